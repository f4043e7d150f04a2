"""Figures from the command line: ``python -m attnorm.analysis norm-scaling --out DIR``."""

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attnorm.extras import install_hint


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        written = options.run(options)
    except _InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("attnorm"):
            raise
        print(f"error: {error}; {install_hint('analysis')}", file=sys.stderr)
        return 1
    except OSError as error:
        reason = error.strerror or error
        print(f"error: cannot read or write {error.filename or 'a file'}: {reason}", file=sys.stderr)
        return 1
    for path in written:
        print(path)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m attnorm.analysis", description="Make a figure and its table."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    norm_scaling = commands.add_parser(
        "norm-scaling",
        help="norms of the weights and of their Jacobian against the number of keys, for L1 and L2",
        description="Writes norm_scaling.csv, norm_scaling.png, norm_scaling_equal_logits.csv and "
        "norm_scaling_equal_logits.png into DIR; files of these names there are replaced.",
    )
    norm_scaling.add_argument(
        "--out", metavar="DIR", type=_folder, required=True, help="folder, made if missing"
    )
    norm_scaling.set_defaults(run=lambda options: _norm_scaling(options.out))

    length_generalization = commands.add_parser(
        "length-generalization",
        help="the figure and the table of a counting run, from its results.csv",
        description="Reads WORKDIR/results.csv, prints its table, and replaces WORKDIR/length_generalization.png.",
    )
    length_generalization.add_argument("workdir", metavar="WORKDIR", type=_folder)
    length_generalization.set_defaults(run=lambda options: _length_generalization(options.workdir))

    extrapolation = commands.add_parser(
        "extrapolation",
        help="the loss of language models by position, within and beyond the trained length, of several runs",
        description="Reads finished runs of train.py with language models that differ in their attention alone, "
        "prints their table, and writes extrapolation.csv, extrapolation.png, training_loss.csv and "
        "training_loss.png into DIR; files of these names there are replaced.",
    )
    extrapolation.add_argument("workdirs", metavar="RUN", type=_folder, nargs="+", help="workdir of train.py")
    extrapolation.add_argument(
        "--out", metavar="DIR", type=_folder, required=True, help="folder, made if missing"
    )
    extrapolation.set_defaults(run=lambda options: _extrapolation(options.workdirs, options.out))

    _add_selection(
        commands.add_parser(
            "selection",
            help="what the attention of a model can select: five figures, and the paper's claims beside them",
            description="Measures the limits of selection (arXiv 2508.17821) on a model's attention and "
            "writes figure_2a, 2b, 2c, 3 and 4 as .csv and .png, heads.csv, summary.csv and summary.md into DIR. "
            "The same command goes on where it was interrupted. Default lengths and numbers that do not fit the "
            "model are left out.",
        )
    )

    return parser


def _add_selection(parser: argparse.ArgumentParser) -> None:
    from attnorm.analysis.selection.options import Options

    parser.add_argument(
        "--model",
        default="synthetic",
        help="synthetic, heads with known weights; minilm; a workdir of train.py; the folder of a GPT-2 or BERT "
        "checkpoint, or its hub id (default: synthetic)",
    )
    parser.add_argument(
        "--text", metavar="FILE", type=Path, help="UTF-8; without it, the model's own examples"
    )
    parser.add_argument("--out", metavar="DIR", type=_folder, required=True, help="folder, made if missing")
    parser.add_argument(
        "--normalizer",
        metavar="NAME",
        nargs="+",
        default=["softmax", "l2"],
        help='such as l2 or "lp(p=3)"; those that the model was not trained with are applied to its logits '
        "(default: softmax l2)",
    )
    for field in dataclasses.fields(Options):
        flag, values = f"--{field.name.replace('_', '-')}", field.default
        keywords = {"default": argparse.SUPPRESS, "choices": field.metadata["choices"]}
        shown = " ".join(f"{value:.4g}" for value in values) if isinstance(values, tuple) else values
        keywords["help"] = f"{field.metadata['help']} (default: {shown})"
        if isinstance(values, bool):
            del keywords["choices"]
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, **keywords)
        elif isinstance(values, tuple):
            parser.add_argument(flag, type=type(values[0]), nargs="+", **keywords)
        else:
            parser.add_argument(flag, type=type(values), **keywords)
    parser.set_defaults(run=_selection)


def _folder(text: str) -> Path:
    if not text:  # Path("") is the current folder
        raise argparse.ArgumentTypeError("must be a folder, got an empty name")
    return Path(text)


class _InputError(Exception):
    """What the command was given to read cannot be used."""


def _norm_scaling(out: Path) -> list[Path]:
    from attnorm.analysis.norm_scaling import write_norm_scaling

    return write_norm_scaling(out)


def _length_generalization(workdir: Path) -> list[Path]:
    from attnorm.analysis.length_generalization import draw, median_table

    results = workdir / "results.csv"
    if not results.is_file():
        raise _InputError(f"WORKDIR must hold the results.csv of a counting run, got {workdir}")
    try:
        table = median_table(results)
    except (KeyError, ValueError) as error:
        raise _InputError(f"{results} is not the results.csv of a counting run: {error!r}") from error
    if len(table.splitlines()) < 3:
        raise _InputError(f"{results} holds no evaluation yet")
    print(table)
    figure = workdir / "length_generalization.png"
    draw(results, figure)
    return [figure]


def _extrapolation(workdirs: Sequence[Path], out: Path) -> list[Path]:
    from attnorm.analysis.extrapolation import RunError, write

    try:
        files, table = write(workdirs, out)
    except RunError as error:
        raise _InputError(error) from error
    print(table)
    return files


def _selection(options: argparse.Namespace) -> list[Path]:
    from attnorm.analysis import sources
    from attnorm.analysis.selection import command
    from attnorm.analysis.selection.options import Options, options_that_fit
    from attnorm.data.text import read_text

    given = vars(options)
    try:
        source = sources.load(options.model)
        chosen: dict[str, Any] = {
            field.name: tuple(given[field.name]) if isinstance(given[field.name], list) else given[field.name]
            for field in dataclasses.fields(Options)
            if field.name in given
        }
        measured = dataclasses.replace(
            options_that_fit(source.max_length, chosen.get("lengths", ())), **chosen
        )
        text = None if options.text is None else read_text(options.text)
        texts = command.make_texts(source, text, measured)
        rules = command.parse_rules(options.normalizer)
    except (ValueError, TypeError, ModuleNotFoundError) as error:
        raise _InputError(error) from error
    try:
        files = command.run(
            source,
            texts,
            options.out,
            measured,
            rules,
            model=options.model,
            text_name="examples" if options.text is None else options.text.name,
        )
    except (command.SettingsError, FloatingPointError) as error:
        raise _InputError(error) from error
    except KeyboardInterrupt:
        raise _InputError("stopped; the same command goes on from here") from None
    print((options.out / "summary.md").read_text())
    return files


if __name__ == "__main__":
    sys.exit(main())
