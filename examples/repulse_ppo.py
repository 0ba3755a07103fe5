"""
Trains a policy with PPO and RePULSe's negative term, three models in all, and says what became of it.

    accelerate launch examples/repulse_ppo.py              # the embedded world, on a CPU or any accelerator
    accelerate launch examples/repulse_ppo.py --alpha 0    # the same with PPO
    accelerate launch examples/repulse_ppo.py --model_name_or_path Qwen/Qwen3-0.6B --reward_model_path my/reward-model \
        --value_model_path my/reward-model --dataset_name prompts.jsonl --max_completion_length 64 --bad_reward_threshold -4

Without `--model_name_or_path` and `--config`, the settings are those of `examples/configs/embedded_repulse_ppo.yaml`. Flags win.
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path

from trl_repulse import RePULSePPOConfig, RePULSePPOTrainer
from trl_repulse.scripts import TrainingScriptArguments, main_or_exit, run
from trl_repulse.scripts import parse as parse_arguments


@dataclass
class RePULSePPOScriptArguments(TrainingScriptArguments):
    """The arguments of all examples, and where the value model starts from."""

    value_model_path: str | None = field(
        default=None,
        metadata={"help": "Value model: a path or a Hub name, e.g. of the reward model. If unset, the policy."},
    )


def parse(argv: list[str]):
    default = Path(__file__).parent / "configs" / "embedded_repulse_ppo.yaml"
    return parse_arguments(argv, (RePULSePPOScriptArguments, RePULSePPOConfig), default)


def main(argv: list[str] | None = None) -> None:
    script_args, args, model_args = parse(sys.argv[1:] if argv is None else argv)
    method = "RePULSe on PPO" if args.alpha else "PPO"
    run(RePULSePPOTrainer, script_args, args, model_args, method, value_model=script_args.value_model_path)


if __name__ == "__main__":
    main_or_exit(main)
