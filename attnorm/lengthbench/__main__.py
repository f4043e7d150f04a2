"""The length benchmark from the command line: ``python -m attnorm.lengthbench --suite small --out DIR``."""

import argparse
import dataclasses
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from attnorm.lengthbench.suites import SUITES


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    options = _parser().parse_args(arguments)
    try:
        from attnorm.lengthbench.grid import GridError, default_processes, finished, make_grid, run
        from attnorm.lengthbench.report import write_report
        from attnorm.training.workdir import WorkdirError
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("attnorm"):
            raise
        print(f"error: {error}; install it with: pip install 'attnorm[train]'", file=sys.stderr)
        return 1
    suite = SUITES[options.suite]
    if options.seeds is not None:
        suite = dataclasses.replace(suite, num_seeds=options.seeds)
    command = shlex.join(["python", "-m", "attnorm.lengthbench", *arguments])
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
        print("stopped; the same command goes on with the cells that are missing", file=sys.stderr)
        return 130
    for path in paths:
        print(path)
    for error in errors:
        print(f"error: {error}", file=sys.stderr)
    return 1 if errors else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m attnorm.lengthbench",
        description="Trains every normaliser on every task at one length, evaluates it up to 64 times beyond, and "
        "writes report.md, report.html, CSV tables and figures into DIR. The same command goes on where it was "
        "interrupted; cells that are complete are not run again.",
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
    add("--tasks", metavar="NAME", nargs="+", help="instead of the suite's")
    add("--seeds", metavar="N", type=_whole(16), help="how many, 1 to 16, instead of the suite's number")
    add(
        "--jobs",
        metavar="N",
        type=_whole(1024),
        help="cells that run side by side, each on one core; without it, on CPUs as many as there are cores, and on "
        "an accelerator one",
    )
    return parser


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
