"""The training methods, as the console command and the example scripts run them."""

import sys
from collections.abc import Callable, Collection
from typing import Any

from trl import GRPOConfig, GRPOTrainer, ModelConfig

from . import embedded
from .arguments import ARGUMENTS, GRPOScriptArguments, PPOScriptArguments, TrainingScriptArguments, parse
from .configs import PPOConfig, ReinforceConfig, RePULSeConfig, RePULSeGRPOConfig, RePULSePPOConfig
from .rewards.transformed import TransformedReward
from .scripts import make_reward, run
from .trainers import PPOTrainer, ReinforceTrainer, RePULSeGRPOTrainer, RePULSePPOTrainer, RePULSeTrainer


def train(command: str, argv: list[str] | None = None, launcher_keys: Collection[str] = ()) -> None:
    """
    Trains with one method, from the command line to the report at the end.

    Args:
        command (`str`):
            Training command: `"repulse"`, `"reinforce"`, `"ppo"`, `"grpo"`, `"repulse-ppo"` or `"repulse-grpo"`.
        argv (`list[str]`, *optional*):
            Its flags, by default those of the process.
        launcher_keys (`Collection[str]`, *optional*, defaults to `()`):
            Names that the file of `--config` may also have, for the launcher.

    Raises:
        `ValueError`: If arguments are unknown, out of range, missing, or contradict one another.
        `OSError`: If a model or a file cannot be loaded.
    """
    argv = sys.argv[1:] if argv is None else argv
    _METHODS[command](*parse(argv, ARGUMENTS[command], embedded.settings_path(command), launcher_keys))


def _repulse(script_args: TrainingScriptArguments, args: RePULSeConfig, model_args: ModelConfig) -> None:
    names = {
        "learned": "RePULSe",
        "hot_policy": "RePULSe (hot policy)",
        "policy": "RePULSe (policy as proposal)",
    }
    run(RePULSeTrainer, script_args, args, model_args, names[args.proposal] if args.alpha else "REINFORCE")


def _reinforce(script_args: TrainingScriptArguments, args: ReinforceConfig, model_args: ModelConfig) -> None:
    name = "REINFORCE" if args.reward_transform is None else f"REINFORCE ({args.reward_transform} transform)"
    run(ReinforceTrainer, script_args, args, model_args, name)


def _ppo(script_args: PPOScriptArguments, args: PPOConfig, model_args: ModelConfig) -> None:
    run(PPOTrainer, script_args, args, model_args, "PPO", value_model=script_args.value_model_path)


def _grpo(script_args: GRPOScriptArguments, args: GRPOConfig, model_args: ModelConfig) -> None:
    name = {"grpo": "GRPO", "dr_grpo": "Dr. GRPO"}.get(args.loss_type, f"GRPO ({args.loss_type})")
    reward = make_reward(script_args)
    if script_args.reward_transform is not None:
        name = f"{name} ({script_args.reward_transform} transform)"
        reward = TransformedReward(
            reward,
            script_args.reward_transform,
            alpha=script_args.reward_transform_alpha,
            beta=script_args.reward_transform_beta,
            threshold=script_args.reward_transform_threshold,
        )
    run(GRPOTrainer, script_args, args, model_args, name, reward_funcs=reward)


def _repulse_ppo(script_args: PPOScriptArguments, args: RePULSePPOConfig, model_args: ModelConfig) -> None:
    name = "RePULSe on PPO" if args.alpha else "PPO"
    run(RePULSePPOTrainer, script_args, args, model_args, name, value_model=script_args.value_model_path)


def _repulse_grpo(script_args: TrainingScriptArguments, args: RePULSeGRPOConfig, model_args: ModelConfig) -> None:
    run(RePULSeGRPOTrainer, script_args, args, model_args, "RePULSe on GRPO" if args.alpha else "GRPO")


_METHODS: dict[str, Callable[[Any, Any, ModelConfig], None]] = {
    "repulse": _repulse,
    "reinforce": _reinforce,
    "ppo": _ppo,
    "grpo": _grpo,
    "repulse-ppo": _repulse_ppo,
    "repulse-grpo": _repulse_grpo,
}
