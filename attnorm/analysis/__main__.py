"""Figures from the command line: ``python -m attnorm.analysis norm-scaling --out DIR``."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path


def main(arguments: Sequence[str] | None = None) -> int:
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
        "--out", metavar="DIR", type=Path, required=True, help="folder, made if missing"
    )
    norm_scaling.set_defaults(run=lambda options: _norm_scaling(options.out))

    length_generalization = commands.add_parser(
        "length-generalization",
        help="the figure and the table of a counting run, from its results.csv",
        description="Reads WORKDIR/results.csv, prints its table, and replaces WORKDIR/length_generalization.png.",
    )
    length_generalization.add_argument("workdir", metavar="WORKDIR", type=Path)
    length_generalization.set_defaults(run=lambda options: _length_generalization(options.workdir))

    options = parser.parse_args(arguments)
    try:
        written = options.run(options)
    except _InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("attnorm"):
            raise
        print(f"error: {error}; install it with: pip install 'attnorm[analysis]'", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"error: cannot write {error.filename}: {os.strerror(error.errno)}", file=sys.stderr)
        return 1
    for path in written:
        print(path)
    return 0


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


if __name__ == "__main__":
    sys.exit(main())
