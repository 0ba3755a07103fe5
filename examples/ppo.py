"""
Trains a policy with PPO and says what became of it.

    accelerate launch examples/ppo.py              # the embedded world, on a CPU or any accelerator
    accelerate launch examples/ppo.py --model_name_or_path Qwen/Qwen3-0.6B --reward_model_path my/reward-model \
        --value_model_path my/reward-model --dataset_name prompts.jsonl --max_completion_length 64

Without `--model_name_or_path` and `--config`, the settings are those of `examples/configs/embedded_ppo.yaml`. Flags win.
Everything but the method is shared with `examples/repulse.py`.
"""

import sys
from argparse import ArgumentError
from dataclasses import dataclass, field

from repulse import RePULSeScriptArguments, parse, run

from trl_repulse import PPOConfig, PPOTrainer


@dataclass
class PPOScriptArguments(RePULSeScriptArguments):
    """The arguments of `examples/repulse.py`, and where the value model starts from."""

    value_model_path: str | None = field(
        default=None,
        metadata={"help": "Value model: a path or a Hub name, e.g. of the reward model. If unset, the policy."},
    )


def main(argv: list[str] | None = None) -> None:
    arguments = sys.argv[1:] if argv is None else argv
    script_args, args, model_args = parse(arguments, (PPOScriptArguments, PPOConfig), "embedded_ppo.yaml")
    run(PPOTrainer, script_args, args, model_args, "PPO", value_model=script_args.value_model_path)


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError, ArgumentError) as error:
        sys.exit(f"error: {' '.join(str(error).split())}")
