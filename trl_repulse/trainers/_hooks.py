"""What our trainers share, whichever TRL trainer they stand on."""

from typing import Any

import torch
from accelerate.utils import is_peft_model
from transformers.trainer import TRAINING_ARGS_NAME

from .._checks import check_prompt_lengths
from ..configs import RewardConfig
from ..rewards.transforms import exponential_transform, indicator_transform
from ._cards import amend_model_card
from ._records import NEGATIVES
from ._rewards import with_checks
from ._trl_bridge import prepare_scoring, withheld_from_uploads, without_generation_habits


# What a checkpoint holds to go on training from. With a second model it is withheld from uploads: without that model,
# which is withheld too, nothing can be resumed.
RESUME_STATE = ("optimizer*", "scheduler*", "scaler*", "rng_state*", "global_step*")


def transform_rewards(args: RewardConfig, rewards: torch.Tensor) -> torch.Tensor:
    """
    r': what the policy maximises instead of the reward r; r itself without a transform.

    Args:
        args ([`~trl_repulse.configs.RewardConfig`]):
            Gives transform and parameters.
        rewards (`torch.Tensor`):
            Rewards of any shape.

    Returns:
        `torch.Tensor`: Of the same shape.
    """
    if args.reward_transform == "exponential":
        return exponential_transform(rewards, args.reward_transform_alpha, args.reward_transform_beta)
    if args.reward_transform == "indicator":
        return indicator_transform(rewards, args.reward_transform_alpha, args.reward_transform_threshold)
    return rewards


class TrainerHooks:
    """
    Mixin before a TRL trainer that samples: true positions and distributions, logging, the model card, uploads.
    """

    # Markdown that the model card shows under "Measured"; for whoever measures the policy to set
    tail_report: str | None = None
    # Glob patterns, relative to an uploaded folder, of what no upload to the Hub takes along. The Trainer's arguments,
    # which it pickles, have `hub_token` in them (transformers 5.23)
    _withheld: tuple[str, ...] = tuple(
        prefix + name for name in (NEGATIVES, TRAINING_ARGS_NAME) for prefix in ("", "*/")
    )

    def _prepare_scoring(self) -> None:
        """Readies policy and reference, once TRL has built them, for scores at the positions of generation."""
        for scored in (self.model, self.ref_model):
            if scored is not None:
                unwrapped = self.accelerator.unwrap_model(scored)
                prepare_scoring(unwrapped.get_base_model() if is_peft_model(unwrapped) else unwrapped)

    def _check_reward_functions(self) -> None:
        """Lets faults of the reward functions be named, once TRL has made a list of them; models are left as they are."""
        self.reward_funcs = [
            function if isinstance(function, torch.nn.Module) else with_checks(function, name)
            for function, name in zip(self.reward_funcs, self.reward_func_names, strict=True)
        ]

    def _tokenize_prompts(self, prompts: list):
        tokenized = super()._tokenize_prompts(prompts)
        check_prompt_lengths(tokenized[0], prompts, self.model.config, self.max_completion_length)
        return tokenized

    def _generate_single_turn(self, *args: Any, **kwargs: Any):
        with without_generation_habits(self.accelerator.unwrap_model(self.model_wrapped)):
            return super()._generate_single_turn(*args, **kwargs)

    def _log_mean(self, name: str, values: torch.Tensor) -> None:
        """Logs the mean over all processes, without the samples that have no reward."""
        mode = "train" if self.model.training else "eval"
        self._metrics[mode][name].append(self.accelerator.gather(values.detach()).nanmean().item())

    def _log_bad_fraction(self, rewards: torch.Tensor) -> None:
        """Logs the share of bad completions among all processes' (B_all,) rewards, if a threshold is set."""
        if self.args.bad_reward_threshold is None:
            return
        mode = "train" if self.model.training else "eval"
        bad = (rewards < self.args.bad_reward_threshold)[~rewards.isnan()]
        self._metrics[mode]["bad_fraction"].append(bad.float().mean().item() if len(bad) else torch.nan)

    def create_model_card(self, model_name=None, dataset_name=None, tags=None):
        super().create_model_card(model_name, dataset_name, tags)
        if self.is_world_process_zero():
            amend_model_card(self)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        with withheld_from_uploads(self._withheld):
            super()._push_from_checkpoint(checkpoint_folder)

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
        """Uploads the policy as [`~transformers.Trainer.push_to_hub`] does; a second model and negative data stay."""
        with withheld_from_uploads(self._withheld):
            return super().push_to_hub(*args, **kwargs)
