"""The training methods, as the console command and the example scripts run them."""

import logging
import sys
from collections.abc import Collection, Mapping
from typing import Any

from trl import GRPOTrainer

from .. import embedded
from ..trainers import PPOTrainer, ReinforceTrainer, RePULSeGRPOTrainer, RePULSePPOTrainer, RePULSeTrainer
from ._fields import read_yaml, split_config
from .arguments import ARGUMENTS, of_the_method, parse
from .scripts import run


logger = logging.getLogger(__name__)


def train(
    command: str,
    argv: list[str] | None = None,
    launcher_keys: Collection[str] = (),
    arguments: Mapping[str, tuple[type, type]] = ARGUMENTS,
    **options: Any,
) -> None:
    """
    Runs a training command, such as `"repulse"`, from its flags (those of the process if `argv` is `None`) to the report at the end.

    The file of `--config` may have `launcher_keys`, the launcher's arguments, too. A baseline ignores the fields of RePULSe's negative term
    there, with a warning. `arguments` has each command's dataclasses, of script and trainer, and `options` are those of
    [`~trl_repulse.cli.scripts.run`]. Raises a `ValueError` if arguments are unknown, out of range, missing, or contradict one
    another, and an `OSError` if a model or a file cannot be loaded.
    """
    argv, ignored = sys.argv[1:] if argv is None else argv, of_the_method(command)
    known = {*launcher_keys, *ignored}
    script_args, args, model_args = parse(argv, arguments[command], embedded.settings_path(command), known)
    path, _ = split_config(argv)
    unused = [] if path is None else sorted(ignored & read_yaml(path).keys())
    if unused and args.should_log:
        logger.warning(f"`{command}` has no negative term, and does not use `{'`, `'.join(unused)}` of `{path}`.")
    run(_TRAINERS[command], script_args, args, model_args, _title(command, args), **options)


_TRAINERS: dict[str, type[GRPOTrainer]] = {
    "repulse": RePULSeTrainer,
    "reinforce": ReinforceTrainer,
    "ppo": PPOTrainer,
    "grpo": GRPOTrainer,
    "repulse-ppo": RePULSePPOTrainer,
    "repulse-grpo": RePULSeGRPOTrainer,
}


def _title(command: str, args: Any) -> str:
    """Name of the method in reports."""
    if command.startswith("repulse"):
        base = {"repulse-ppo": "PPO", "repulse-grpo": "GRPO"}.get(command)
        if not args.alpha:
            return base or "REINFORCE"
        proposal = {"hot_policy": " (hot policy)", "policy": " (policy as proposal)"}
        return f"RePULSe on {base}" if base else f"RePULSe{proposal.get(args.proposal, '')}"
    if command == "ppo":
        return "PPO"
    if command == "grpo":
        return {"grpo": "GRPO", "dr_grpo": "Dr. GRPO"}.get(args.loss_type, f"GRPO ({args.loss_type})")
    return "REINFORCE" if args.reward_transform is None else f"REINFORCE ({args.reward_transform} transform)"
