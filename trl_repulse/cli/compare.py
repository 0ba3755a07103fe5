"""`trl-repulse compare`: differences between stored samples of the same prompts. No model is needed."""

import argparse
from dataclasses import asdict
from pathlib import Path

from ._fields import add_options, check_output


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments."""
    parser.add_argument(
        "folders",
        metavar="SAMPLES_DIR",
        type=Path,
        nargs="+",
        help="two or more folders that `evaluate` wrote, for the same prompts; each is compared with the first",
    )
    add_options(parser, "thresholds", required=True)
    add_options(parser, "confidence", "output", "partial")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints a table and a sentence for each folder but the first, and returns 0."""
    from ..evaluation.comparison import compare_samples
    from ..evaluation.records import load_samples, write_report

    check_output(args.output)
    samples = [load_samples(each, args.partial) for each in args.folders]
    comparisons = compare_samples(samples, args.thresholds, args.confidence)
    content = [asdict(each) | {"sentence": each.sentence} for each in comparisons]
    write_report(args.output, {"comparisons": content})
    of = max(each.header["prompts"].get("of", 0) for each in samples)
    prompts = f"the first {comparisons[0].prompts:,} of {of:,}" if of else f"{comparisons[0].prompts:,}"
    print(f"{prompts} prompts. Intervals are paired, for other prompts like these.")
    for each in comparisons:
        print(f"\n{each.to_markdown()}")
    return 0
