"""`trl-repulse audit`: completions to label, and the errors of a judge that their labels show. No model is needed."""

import argparse
from pathlib import Path
from typing import Any

from .._numbers import plain
from ._fields import add_options, check_output


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("samples", metavar="SAMPLES", type=Path, help="folder of `evaluate`, or log of Inspect")
    parser.add_argument("labels", metavar="LABELS", type=Path, nargs="?", help="CSV file to write or to read")
    drawing = parser.add_argument_group("drawing")
    drawing.add_argument("--draw", metavar="N", type=int, help="write a file of N completions to label, such as 200")
    drawing.add_argument("--threshold", type=float, help="reward under which the judge calls a completion bad")
    drawing.add_argument("--column", default="reward", help="column with the judge's scores (reward)")
    drawing.add_argument("--seed", type=int, default=0, help="seed of the draw (0)")
    elsewhere = parser.add_argument_group("labels from elsewhere, in place of LABELS, with --threshold")
    for name, those in (("sensitivity", "truly bad completions"), ("specificity", "other completions")):
        elsewhere.add_argument(
            f"--{name}", metavar=("RIGHT", "LABELLED"), type=int, nargs=2, help=f"judged rightly, of so many {those}"
        )
    add_options(parser.add_argument_group("report"), "confidence", "output")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Draws, or reads and reports, and returns 0."""
    from ..evaluation.audit import audit_judge, known_errors
    from ..evaluation.audit_labels import STRATA, draw_labels, read_labels, read_scored
    from ..evaluation.records import write_report

    _check(args)
    if args.draw is not None:
        check_output(args.labels, "LABELS", (".csv",))
    scored = read_scored(args.samples, args.column)
    if args.draw is not None:
        counts = draw_labels(args.labels, scored, args.threshold, args.draw, args.seed)
        drawn = ", ".join(f"{count} {name}" for count, name in zip(counts, STRATA, strict=True))
        print(f"{drawn} completions: {args.labels}\nWrite 1 (truly bad) or 0 into its column `label`.")
        return 0
    if args.sensitivity is not None:
        audit = known_errors(scored, args.threshold, tuple(args.sensitivity), tuple(args.specificity), args.confidence)
    else:
        labels = read_labels(args.labels, scored)
        if args.threshold not in (None, labels.threshold):
            raise ValueError(
                f"`--threshold {args.threshold:g}` is not that of the labels, {labels.threshold:g}; leave it out, or draw with `--draw`."
            )
        audit = audit_judge(scored, labels, args.confidence)
    write_report(args.output, {"samples": args.samples, "confidence": args.confidence, **audit.to_dict()})
    print(format_audit(audit, args.confidence))
    return 0


def _check(args: argparse.Namespace) -> None:
    """Refuses arguments that contradict each other or lack another one."""
    if (args.sensitivity is None) != (args.specificity is None):
        raise ValueError("`--sensitivity` and `--specificity` belong together; give both, or label completions.")
    if (args.sensitivity is None) == (args.labels is None):
        raise ValueError("Name either a file of LABELS, or `--sensitivity` and `--specificity` from elsewhere.")
    if args.draw is not None and args.labels is None:
        raise ValueError("`--draw` needs a file to write; name it behind the samples.")
    if (args.draw is not None or args.sensitivity is not None) and args.threshold is None:
        raise ValueError("`--threshold` is needed; give the reward under which the judge calls a completion bad.")


def format_audit(audit: Any, confidence: float) -> str:
    """Tables of the estimates and the strata of an [`~trl_repulse.evaluation.audit.Audit`], and its verdict."""
    from ..evaluation.report import text_table

    rows = [("", "estimate", f"{100 * confidence:g}% interval", "labels")]
    for name, estimate in audit.estimates.items():
        value = plain(estimate.value) if estimate.value == estimate.value else "none"  # NaN
        rows.append((name, value, f"{plain(estimate.low)} to {plain(estimate.high)}", f"{estimate.samples:,}"))
    lines = text_table(rows)
    if audit.strata:
        rows = [("stratum", "share of completions", "labelled", "truly bad")]
        for name, stratum in audit.strata.items():
            rows.append((name, plain(stratum["share"]), f"{stratum['labelled']:,}", f"{stratum['truly_bad']:,}"))
        lines += ["", *text_table(rows)]
    return "\n".join([*lines, "", *audit.notes()])
