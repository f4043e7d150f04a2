"""The length benchmark from the command line: ``python -m attnorm.lengthbench --suite small --out DIR``."""

import argparse
import dataclasses
import functools
import shlex
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

from attnorm.extras import install_hint
from attnorm.lengthbench.suites import SUITES, Suite


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        from attnorm.lengthbench.grid import GridError, default_processes, finished, make_grid, run
        from attnorm.lengthbench.report import write_report
        from attnorm.training.workdir import WorkdirError
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("attnorm"):
            raise
        print(f"error: {error}; {install_hint('train')}", file=sys.stderr)
        return 1
    suite = SUITES[options.suite]
    if options.seeds is not None:
        suite = dataclasses.replace(suite, num_seeds=options.seeds)
    module = [sys.executable, "-m", "attnorm.lengthbench"]
    command = shlex.join(sys.orig_argv if arguments is None else [*module, *arguments])
    try:
        grid = make_grid(suite, options.out, command, options.normalizers, options.tasks)
        with grid.claimed():
            errors = run(grid, options.jobs or default_processes())
            grid, cells = finished(grid)
            paths = write_report(grid, cells) if cells else []
    except (GridError, WorkdirError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(
            f"error: cannot read or write {error.filename or options.out}: {error.strerror}", file=sys.stderr
        )
        return 1
    except KeyboardInterrupt:
        print(f"stopped; go on with the cells that are missing with: {command}", file=sys.stderr)
        return 130
    for path in paths:
        print(path)
    for text in errors:
        print(f"error: {text}", file=sys.stderr)
    return 1 if errors else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m attnorm.lengthbench",
        description=textwrap.fill(
            "Trains every normaliser on every task at one length, evaluates it up to 64 times beyond, and writes "
            "report.md, report.html, CSV tables and figures into DIR. The same command goes on where it was "
            "interrupted; cells that are complete are not run again.",
            _width(),
        ),
        epilog="\n".join(map(_contents, SUITES.values())),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--suite",
        choices=SUITES,
        required=True,
        help="tiny: 2 minutes; small: within an hour on 2 cores; full: a GPU",
    )
    add("--out", metavar="DIR", type=Path, required=True, help="folder, made if missing")
    add(
        "--normalizers",
        metavar="NAME",
        nargs="+",
        help='instead of the suite\'s: such as l2, "lp(p=4)", softmax@sqrt_position, softmax@head_rms, '
        "softmax@temperature, lp@learned",
    )
    add("--tasks", metavar="NAME", nargs="+", help="instead of the suite's, such as counting mqar")
    add("--seeds", metavar="N", type=_whole(16), help="how many, 1 to 16, instead of the suite's number")
    add(
        "--jobs",
        metavar="N",
        type=_whole(1024),
        help="cells that run side by side, each on one core; without it, as many as there are cores; on an "
        "accelerator one",
    )
    return parser


def _contents(suite: Suite) -> str:
    """The tasks of a suite, those with the same normalisers together."""
    names: dict[str, list[str]] = {}
    tasks: dict[str, list[str]] = {}
    for task, name in suite.cells(None, None):
        names.setdefault(task, []).append(name)
    for task, compared in names.items():
        tasks.setdefault(", ".join(compared), []).append(task)
    fill = functools.partial(textwrap.fill, width=_width(), initial_indent="  ", subsequent_indent="    ")
    lines = [fill(f"{', '.join(group)}: {compared}") for compared, group in tasks.items()]
    return "\n".join([f"suite {suite.name}, tasks and normalisers:", *lines])


def _width() -> int:
    return min(shutil.get_terminal_size().columns, 110) - 2


def _whole(most: int) -> Callable[[str], int]:
    def parse(text):
        try:
            number = int(text)
        except ValueError:
            number = 0
        if not 1 <= number <= most:
            raise argparse.ArgumentTypeError(f"a whole number from 1 to {most} is wanted, got {text!r}")
        return number

    return parse


if __name__ == "__main__":
    sys.exit(main())
