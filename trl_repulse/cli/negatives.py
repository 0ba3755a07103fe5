"""`trl-repulse negatives`: preference data of bad completions that training has met, and of samples. No model is needed."""

import argparse
from pathlib import Path

from ._fields import check_output


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("output", metavar="OUTPUT", type=Path, help="file to write, .jsonl")
    text = "negatives.jsonl of a run, another file of prompt, completion and reward, or a folder of samples (see `evaluate`)"
    add("sources", metavar="SOURCE", type=Path, nargs="+", help=text)
    add("--threshold", type=float, required=True, help="reward under which a completion is bad")
    add("--margin", type=float, default=0.0, help="how far above the threshold a completion is good (0)")
    add("--format", choices=("preference", "unpaired"), default="preference", help="TRL's format (preference)")
    add("--max_bad", type=int, metavar="N", help="bad completions of a prompt, the worst ones (all of them)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Writes the rows, prints how many there are and returns 0."""
    from ..evaluation.preferences import preference_rows, read_rewarded, unpaired_rows, write_rows

    check_output(args.output, "OUTPUT", (".jsonl",))
    old = args.output.read_text(encoding="utf-8", errors="replace") if args.output.exists() else ""
    is_own = not old or '"chosen":' in old or '"label":' in old  # of an earlier call of this command
    if not is_own or args.output.resolve() in [source.resolve() for source in args.sources]:
        raise ValueError(
            f"`{args.output}` is one of the sources, or holds other rows, and would be written over; name another OUTPUT first."
        )
    completions = [each for source in args.sources for each in read_rewarded(source)]
    make = preference_rows if args.format == "preference" else unpaired_rows
    rows = make(completions, args.threshold, args.margin, args.max_bad)
    write_rows(args.output, rows)
    prompts = len({str(row["prompt"]) for row in rows})
    written = f"{len(rows):,} pairs"
    if args.format == "unpaired":
        good = sum(row["label"] for row in rows)
        written = f"{good:,} good and {len(rows) - good:,} bad completions"
    print(f"{written} of {prompts:,} prompts, from {len(completions):,} completions: {args.output}")
    return 0
