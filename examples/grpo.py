"""
Trains a policy with TRL's own GRPO or Dr. GRPO, with or without a reward transform, to compare with.

    accelerate launch examples/grpo.py                                           # the embedded world, plain GRPO
    accelerate launch examples/grpo.py --loss_type dr_grpo --scale_rewards none  # Dr. GRPO
    accelerate launch examples/grpo.py --reward_type toxicity --reward_transform exponential --reward_transform_beta -0.5
    accelerate launch examples/grpo.py --model_name_or_path Qwen/Qwen3-0.6B --reward_model_path my/reward-model \
        --dataset_name prompts.jsonl --max_completion_length 64 --loss_type grpo

Without `--model_name_or_path` and `--config`, the settings are those of `examples/configs/embedded_grpo.yaml`. Flags win.
TRL's default `loss_type` is neither of the two but "dapo".
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path

from trl import GRPOConfig, GRPOTrainer

from trl_repulse.rewards.transformed import TransformedReward
from trl_repulse.scripts import TrainingScriptArguments, main_or_exit, make_reward, run
from trl_repulse.scripts import parse as parse_arguments


@dataclass
class GRPOScriptArguments(TrainingScriptArguments):
    """The arguments of all examples, and a reward transform, which `GRPOConfig` does not have."""

    reward_transform: str | None = field(
        default=None, metadata={"help": "`exponential` (r - a*exp(b*r)) or `indicator` (r - a*1[r < threshold])."}
    )
    reward_transform_alpha: float = field(default=1.0, metadata={"help": "The transform's a, at least 0."})
    reward_transform_beta: float = field(default=-1.0, metadata={"help": "The exponential transform's b, below 0."})
    reward_transform_threshold: float | None = field(
        default=None, metadata={"help": "The indicator transform's threshold, in units of reward."}
    )


def parse(argv: list[str]):
    default = Path(__file__).parent / "configs" / "embedded_grpo.yaml"
    return parse_arguments(argv, (GRPOScriptArguments, GRPOConfig), default)


def main(argv: list[str] | None = None) -> None:
    script_args, args, model_args = parse(sys.argv[1:] if argv is None else argv)
    method = {"grpo": "GRPO", "dr_grpo": "Dr. GRPO"}.get(args.loss_type, f"GRPO ({args.loss_type})")
    reward = make_reward(script_args)
    if script_args.reward_transform is not None:
        method = f"{method} ({script_args.reward_transform} transform)"
        reward = TransformedReward(
            reward,
            script_args.reward_transform,
            alpha=script_args.reward_transform_alpha,
            beta=script_args.reward_transform_beta,
            threshold=script_args.reward_transform_threshold,
        )
    else:
        for name, default in (("alpha", 1.0), ("beta", -1.0), ("threshold", None)):
            if getattr(script_args, f"reward_transform_{name}") != default:
                raise ValueError(f"`reward_transform_{name}` has no effect; set `reward_transform`.")
    run(GRPOTrainer, script_args, args, model_args, method, reward_funcs=reward)


if __name__ == "__main__":
    main_or_exit(main)
