"""`trl-repulse gcg`: how often attacks on a model succeed."""

import argparse
import logging
import sys

from .._errors import describe_error, from_reward
from ..evaluation.gcg.evaluation_config import GCGEvaluationConfig, GCGRunArguments
from ._fields import add_fields, read_fields


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments."""
    add_fields(parser, GCGRunArguments, GCGEvaluationConfig)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Evaluates and prints the report; returns 0, or 1 with a message if that cannot be done."""
    logging.basicConfig(format="%(levelname)s: %(message)s")
    try:
        arguments, config = read_fields(args, GCGRunArguments, GCGEvaluationConfig)
        from ..evaluation.gcg.launch import launch

        report = launch(arguments, config)
    except Exception as error:  # a reward may fail with any
        if not (isinstance(error, ValueError | OSError) or from_reward(error)):
            raise
        print(f"trl-repulse gcg: {describe_error(error)}", file=sys.stderr)
        return 1
    if report:
        print(report)
    return 0
