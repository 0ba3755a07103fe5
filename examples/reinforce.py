"""
Trains a policy with REINFORCE as the RePULSe paper runs it, with or without a reward transform.

    accelerate launch examples/reinforce.py                                      # the embedded world
    accelerate launch examples/reinforce.py --reward_transform exponential --reward_transform_beta -0.5
    accelerate launch examples/reinforce.py --model_name_or_path Qwen/Qwen3-0.6B --reward_model_path my/reward-model \
        --dataset_name prompts.jsonl --max_completion_length 64
    accelerate launch examples/reinforce.py --config examples/configs/smollm/reinforce-1.yaml    # a published run

Without `--model_name_or_path` and `--config`, the settings are those of `examples/configs/embedded_reinforce.yaml`. Flags
win.
"""

import sys
from pathlib import Path

from trl_repulse import ReinforceConfig, ReinforceTrainer
from trl_repulse.scripts import TrainingScriptArguments, main_or_exit, run
from trl_repulse.scripts import parse as parse_arguments


def parse(argv: list[str]):
    default = Path(__file__).parent / "configs" / "embedded_reinforce.yaml"
    return parse_arguments(argv, (TrainingScriptArguments, ReinforceConfig), default)


def main(argv: list[str] | None = None) -> None:
    script_args, args, model_args = parse(sys.argv[1:] if argv is None else argv)
    method = "REINFORCE" if args.reward_transform is None else f"REINFORCE ({args.reward_transform} transform)"
    run(ReinforceTrainer, script_args, args, model_args, method)


if __name__ == "__main__":
    main_or_exit(main)
