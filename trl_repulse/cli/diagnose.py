"""`trl-repulse diagnose`: symptoms of failure in the log of a run. No model is needed."""

import argparse
import sys
from dataclasses import asdict
from pathlib import Path

from ..engine.diagnosis import SYMPTOMS, Diagnosis, diagnose, load_log
from ..evaluation.records import write_report
from ._fields import add_options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="OUT", type=Path, help="output_dir of a run, or one of its checkpoints")
    add_options(parser, "output", "inspect_log")
    parser.epilog = "Exit status: 0 if no symptom is seen, 1 if one is, 2 if there is no log that can be read."
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints the symptoms. Returns 0 if there are none, 1 if there are some, or 2 with a message if there is no log."""
    try:
        path, history, settings = load_log(args.folder)
        diagnosis = diagnose(history, settings)
        if args.inspect_log is not None:
            from ..evaluation.inspect import write_training_log

            write_training_log(args.inspect_log, args.folder)
        write_report(args.output, {"log": path, **asdict(diagnosis)})
    except (ValueError, OSError) as error:
        print(f"trl-repulse diagnose: {error}", file=sys.stderr)
        return 2
    print(f"{path}: {diagnosis.updates:,} updates\n\n{_format(diagnosis)}")
    return 1 if diagnosis.findings else 0


def _format(diagnosis: Diagnosis) -> str:
    """What the command prints, as Markdown."""
    lines = [f"- {finding}" for finding in diagnosis.findings] or ["No symptom is seen."]
    if len(lines) > 1:
        lines.insert(0, "Begin with the first symptom; the others may be its consequences.")
    if diagnosis.sound:
        lines += ["", "Looked for, and not seen:", *(f"- {SYMPTOMS[name].title}" for name in diagnosis.sound)]
    if diagnosis.unknown:
        lines += ["", "Not looked for:"]
        lines += [f"- {SYMPTOMS[name].title}: {reason}" for name, reason in diagnosis.unknown.items()]
    return "\n".join(lines)
