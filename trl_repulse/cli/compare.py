"""`trl-repulse compare`: differences between stored samples of the same prompts. No model is needed."""

import argparse
from dataclasses import asdict, replace
from pathlib import Path

from ._fields import add_options
from .evaluate import write_log


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = "two or more folders that `evaluate` wrote, for the same prompts; each is compared with the first"
    parser.add_argument("folders", metavar="SAMPLES_DIR", type=Path, nargs="+", help=text)
    add_options(parser, "thresholds", required=True)
    add_options(parser, "confidence", "output", "inspect_log", "partial")
    parser.add_argument("--figure", metavar="FILE", type=Path, help="draw P(bad) of each model, and the differences")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints a table and a sentence for each folder but the first, and returns 0."""
    from ..evaluation.comparison import compare_samples
    from ..evaluation.records import load_samples, write_report

    samples = [load_samples(folder, args.partial) for folder in args.folders]
    comparisons = compare_samples(samples, args.thresholds, args.confidence)
    write_report(args.output, {"comparisons": [asdict(each) | {"sentence": each.sentence} for each in comparisons]})
    if args.figure is not None:
        from ..evaluation.plots import plot_comparison

        plot_comparison(comparisons, args.figure)
    if args.inspect_log is not None:
        cut = [replace(each, table=each.table.slice(0, comparisons[0].prompts * each.num_samples)) for each in samples]
        write_log(args.inspect_log, cut, args.thresholds)
    total = max(each.header["prompts"].get("of", 0) for each in samples)
    prompts = f"the first {comparisons[0].prompts:,} of {total:,}" if total else f"{comparisons[0].prompts:,}"
    print(f"{prompts} prompts. Intervals are paired, for other prompts like these.")
    for comparison in comparisons:
        print(f"\n{comparison.to_markdown()}")
    return 0
