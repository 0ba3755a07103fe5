"""`trl-repulse frontier`: many runs against two quantities, as a figure and a table."""

import argparse
import sys
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments."""
    parser.add_argument("output", metavar="OUTPUT", type=Path, help="where OUTPUT.png, OUTPUT.pdf and OUTPUT.csv go")
    parser.add_argument(
        "--method",
        dest="methods",
        metavar=("NAME", "RUN"),
        nargs="+",
        action="append",
        required=True,
        help="a method and its runs: folders of samples (see `evaluate`) or result files, each with `,` and a file of attacks "
        "(see `gcg`) behind it if that is asked for; once for each method",
    )
    parser.add_argument("--x", default="prob_bad", help="quantity of the horizontal axis (prob_bad)")
    parser.add_argument("--y", default="return", help="quantity of the vertical axis (return)")
    parser.add_argument(
        "--threshold", type=float, help="reward under which an output is bad, for prob_bad and attacks"
    )
    parser.add_argument("--level", type=float, help="level of CVaR, for cvar")
    parser.add_argument("--confidence", type=float, default=0.95, help="nominal coverage of the intervals (0.95)")
    parser.add_argument(
        "--baseline", metavar="NAME", help="method over which hypervolume gains are measured (the first one)"
    )
    parser.add_argument(
        "--reference_point",
        type=float,
        nargs=2,
        metavar=("X", "Y"),
        help="x and y from which hypervolumes are measured, no better than any run (the worst run in either quantity)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Reads, draws, prints the table and returns 0, or 1 with a message if that cannot be done."""
    from ..evaluation.records import write_atomically
    from ..evaluation.result_files import load_frontier
    from ..plots import plot_frontier

    try:
        for name, quantities in (("threshold", ("prob_bad", "attack_success")), ("level", ("cvar",))):
            if getattr(args, name) is not None and not {args.x, args.y} & set(quantities):
                raise ValueError(
                    f"`--{name}` has no effect without {' or '.join(quantities)} on an axis; leave it out, or ask for that."
                )
        methods: dict[str, list[list[str]]] = {}
        for name, *paths in args.methods:
            if not paths:
                raise ValueError(f"`--method {name}` has no run; write `--method NAME RUN [RUN ...]`.")
            if name in methods:
                raise ValueError(f"`--method {name}` is given twice; name all its runs at once.")
            # A comma may stand in a path as well: it parts two where a file of attacks follows
            methods[name] = [path.rsplit(",", 1) if path.endswith(".jsonl") else [path] for path in paths]
        point = None if args.reference_point is None else tuple(args.reference_point)
        frontier = load_frontier(
            methods, args.x, args.y, args.threshold, args.level, args.confidence, args.baseline, point
        )
        for suffix in (".png", ".pdf"):
            plot_frontier(frontier, f"{args.output}{suffix}")
        table = frontier.to_csv()
        write_atomically(Path(f"{args.output}.csv"), lambda partial: partial.write_text(table, encoding="utf-8"))
    except (ValueError, OSError) as error:
        print(f"trl-repulse frontier: {error}", file=sys.stderr)
        return 1
    print(frontier.to_markdown())
    print(f"\nWritten: {args.output}.png, {args.output}.pdf, {args.output}.csv")
    return 0
