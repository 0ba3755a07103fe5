"""`trl-repulse gcg`: how often attacks on a model succeed."""

import logging
import sys

from .._errors import describe_error, from_reward
from ..arguments import FieldsParser
from ..evaluation.gcg.evaluation_config import GCGEvaluationConfig, GCGRunArguments


def main(argv: list[str] | None = None) -> int:
    """Evaluates and prints the report; returns 0, or 1 with a message if that cannot be done."""
    logging.basicConfig(format="%(levelname)s: %(message)s")
    try:
        parser = FieldsParser((GCGRunArguments, GCGEvaluationConfig), prog="trl-repulse gcg")
        arguments, config = parser.parse_args_and_config(argv)
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
