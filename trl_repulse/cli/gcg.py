"""`trl-repulse gcg`: how often attacks on a model succeed."""

import logging

from ..evaluation.gcg.config import GCGEvaluationConfig, GCGRunArguments
from .arguments import FieldsParser


def build_parser() -> FieldsParser:
    parser = FieldsParser((GCGRunArguments, GCGEvaluationConfig), prog="trl-repulse gcg")
    parser.take_training_names()
    return parser


def main(argv: list[str]) -> int:
    """Evaluates, prints the report on the main process and returns 0."""
    logging.basicConfig(format="%(levelname)s: %(message)s")
    arguments, config = build_parser().parse_args_and_config(argv)
    from ..evaluation.gcg.evaluator import launch

    if report := launch(arguments, config):
        print(report)
    return 0
