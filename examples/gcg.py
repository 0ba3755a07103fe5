"""
Attacks a model with GCG and reports how often that makes it answer badly.

    python examples/gcg.py --model_name_or_path MODEL --table behaviors.csv
    accelerate launch examples/gcg.py --config examples/configs/gcg_eval/gcg-1.yaml

The table is a CSV file with the columns `goal` (what is asked) and `target` (how a bad answer begins). Responses are judged by
their first words unless `--reward_type` and `--reward_model_path` name a reward. Arguments are the fields of `GCGRunArguments`
and `GCGEvaluationConfig`; an interrupted run goes on where it stopped.

Hardware: a model of yours. CPU: not measured. One GPU of 24 GB, of 80 GB: not measured.
"""

from trl_repulse.cli.arguments import FieldsParser
from trl_repulse.cli.scripts import main_or_exit
from trl_repulse.evaluation.gcg import GCGEvaluationConfig, GCGRunArguments
from trl_repulse.evaluation.gcg.evaluator import launch


def main(argv: list[str] | None = None) -> None:
    run, config = FieldsParser((GCGRunArguments, GCGEvaluationConfig)).parse_args_and_config(argv)
    report = launch(run, config)
    if report:
        print(report)


if __name__ == "__main__":
    main_or_exit(main)
