"""
Trains a policy with RePULSe, or with plain REINFORCE (`--alpha 0`), and says what became of it.

    accelerate launch examples/repulse.py              # the embedded world, on a CPU or any accelerator
    accelerate launch examples/repulse.py --alpha 0    # the same with REINFORCE
    accelerate launch examples/repulse.py --model_name_or_path Qwen/Qwen3-0.6B --reward_model_path my/reward-model \
        --dataset_name prompts.jsonl --max_completion_length 64 --bad_reward_threshold -4
    accelerate launch examples/repulse.py --config examples/configs/smollm/repulse-1.yaml    # a published run

Without `--model_name_or_path` and `--config`, the settings are those of `examples/configs/embedded.yaml`. Flags win.
"""

import sys
from pathlib import Path

from trl_repulse import RePULSeConfig, RePULSeTrainer
from trl_repulse.scripts import TrainingScriptArguments, main_or_exit, run
from trl_repulse.scripts import parse as parse_arguments


def parse(argv: list[str]):
    default = Path(__file__).parent / "configs" / "embedded.yaml"
    return parse_arguments(argv, (TrainingScriptArguments, RePULSeConfig), default)


def main(argv: list[str] | None = None) -> None:
    script_args, args, model_args = parse(sys.argv[1:] if argv is None else argv)
    methods = {
        "learned": "RePULSe",
        "hot_policy": "RePULSe (hot policy)",
        "policy": "RePULSe (policy as proposal)",
    }
    run(RePULSeTrainer, script_args, args, model_args, methods[args.proposal] if args.alpha else "REINFORCE")


if __name__ == "__main__":
    main_or_exit(main)
