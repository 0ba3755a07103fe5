"""`trl-repulse gcg-merge`: the results of an evaluation's shards as one file."""

import argparse
import sys
from pathlib import Path

from ..evaluation.gcg.records import merge_results


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments."""
    parser.add_argument("output", metavar="OUTPUT", type=Path, help="file to write")
    parser.add_argument("shards", metavar="FILE", nargs="+", type=Path, help="results of the shards")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Merges and returns 0, or 1 with a message if the files do not belong together."""
    try:
        if args.output.exists() and args.output not in args.shards:
            raise ValueError(f"`{args.output}` is in the way; name a new file.")
        count = merge_results(args.shards, args.output)
    except (ValueError, OSError) as error:
        print(f"trl-repulse gcg-merge: {error}", file=sys.stderr)
        return 1
    print(f"Merged {count} targets into {args.output}.")
    return 0
