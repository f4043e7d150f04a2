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
    options = parser.parse_args(arguments)
    try:
        written = options.run(options)
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


def _norm_scaling(out: Path) -> list[Path]:
    from attnorm.analysis.norm_scaling import write_norm_scaling

    return write_norm_scaling(out)


if __name__ == "__main__":
    sys.exit(main())
