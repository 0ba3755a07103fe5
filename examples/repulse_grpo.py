"""
Trains a policy with GRPO and RePULSe's negative term, and says what became of it.

    accelerate launch examples/repulse_grpo.py              # the embedded world, on a CPU or any accelerator
    accelerate launch examples/repulse_grpo.py --alpha 0    # the same with GRPO alone
    accelerate launch examples/repulse_grpo.py --model_name_or_path Qwen/Qwen3-0.6B --reward_model_path my/reward-model \
        --dataset_name prompts.jsonl --max_completion_length 64 --bad_reward_threshold -4 --loss_type dr_grpo --scale_rewards none

Without `--model_name_or_path` and `--config`, the settings are those of `examples/configs/embedded_repulse_grpo.yaml`. Flags win.
"""

import sys
from pathlib import Path

from trl_repulse import RePULSeGRPOConfig, RePULSeGRPOTrainer
from trl_repulse.scripts import TrainingScriptArguments, main_or_exit, run
from trl_repulse.scripts import parse as parse_arguments


def parse(argv: list[str]):
    default = Path(__file__).parent / "configs" / "embedded_repulse_grpo.yaml"
    return parse_arguments(argv, (TrainingScriptArguments, RePULSeGRPOConfig), default)


def main(argv: list[str] | None = None) -> None:
    script_args, args, model_args = parse(sys.argv[1:] if argv is None else argv)
    method = "RePULSe on GRPO" if args.alpha else "GRPO"
    run(RePULSeGRPOTrainer, script_args, args, model_args, method)


if __name__ == "__main__":
    main_or_exit(main)
