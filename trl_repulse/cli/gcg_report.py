"""`trl-repulse gcg-report`: what the results of attacks say at given thresholds. No model is needed."""

import argparse

from ..evaluation.gcg.results import format_report, read_results, summarize
from ..evaluation.records import write_report
from ..evaluation.tails import Estimate
from ._card import add_card, check_card, check_measured, write_on_card
from ._fields import add_options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("results", metavar="FOLDER", help="folder that `trl-repulse gcg` wrote")
    parser.add_argument("--threshold", type=float, nargs="+", required=True, help="scores under which outputs are bad")
    parser.add_argument("--k", type=int, nargs="+", default=[1], help="samples of an attacker (1)")
    add_options(parser, "confidence", "output")
    parser.add_argument("--tail", type=float, default=0.1, help="share of samples whose mean is shown (%(default)s)")
    add_card(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Writes the files and the card that are asked for, prints the report and returns 0."""
    check_card(args.card)
    header, records = read_results(args.results)
    summary = summarize(header, records, args.threshold, args.k, args.confidence, args.tail)
    write_report(args.output, summary)
    report = format_report(summary)
    print(report)
    if args.card is not None:
        check_measured(args.card, header["model"]["weights"], header["model"]["name"])
        metrics = {
            f"{name} (score < {threshold}), {phase}": Estimate(**rates[phase][key])
            for threshold, rates in summary["thresholds"].items()
            for key, name in (("success", "attack success"), ("bad_share", "bad samples"))
            for phase in ("before", "after")
        }
        attack = header["settings"]
        text = f"```text\n{report}\n```\n\nConditions: {attack['num_samples']} responses of at most "
        text += f"{attack['max_new_tokens']} tokens, temperature 1 from all tokens, seed {attack['seed']}."
        write_on_card(args.card, "Attacks (GCG)", text, metrics, f"{summary['scored']} targets", summary["level"])
    return 0
