"""Configuration of [`~trl_repulse.PPOTrainer`]."""

import math
from dataclasses import dataclass

from trl import GRPOConfig

from ._checks import check_second_schedule, require, require_defaults
from .shared_config import SharedConfig, documented, option


class _Single(int):
    """The number 1, passing the check of `GRPOConfig` (TRL 1.16) for two generations a prompt, which GRPO compares and PPO does not; its
    trainer runs with 1. Way out: a class attribute for the minimum in TRL."""

    def __lt__(self, other: int) -> bool:
        return False


@documented
@dataclass
class PPOConfig(SharedConfig, GRPOConfig):
    r"""
    Configuration class for the [`PPOTrainer`].

    This class includes only the parameters that are specific to PPO. For the other arguments, refer to
    [`~trl_repulse.configs.SharedConfig`] (rewards, scoring, vLLM), [`~trl.GRPOConfig`] and
    [`~transformers.TrainingArguments`]. `beta` is the coefficient of the KL penalty in the token rewards (not in the
    loss), `epsilon` and `epsilon_high` clip the policy's ratio, `num_iterations` is the number of epochs over a
    generation batch, and `steps_per_generation` the number of its micro-batches: an epoch has `steps_per_generation /
    gradient_accumulation_steps` updates. `use_bias_correction_kl` has no effect.

    Parameters:
        > Parameters that control the value model

        value_learning_rate (`float`, *optional*):
            Peak learning rate of the value model. If `None`, the policy's. Schedule, weight decay and clipping
            (`max_grad_norm`) are the policy's, applied to each model separately.
        value_clip (`float`, *optional*, defaults to `0.2`):
            How far a value may move from the one at sampling time before the value loss is clipped, in units of
            reward. If `None`, it is never clipped.
        value_warmup_steps (`int`, *optional*, defaults to `0`):
            Number of first updates in which the value model learns alone. The policy's learning-rate schedule counts
            them.

        > Parameters that control the advantages

        gae_lambda (`float`, *optional*, defaults to `0.95`):
            Lambda of generalized advantage estimation, from 0 (one reward and the next value) to 1 (all rewards to
            come).
        gamma (`float`, *optional*, defaults to `1.0`):
            Discount of a token's delay, from 0 to 1.
        whiten_advantages (`bool`, *optional*, defaults to `True`):
            Whether to scale advantages to mean 0 and variance 1 over the tokens of a generation batch, over all
            processes.

    > [!NOTE]
    > These parameters have default values different from [`~trl.GRPOConfig`]:
    > - `per_device_eval_batch_size`: Defaults to `None` instead of `8`: as large as training's, in whole prompts.
    > - `learning_rate`: Defaults to `None` instead of `1e-06`: a rule of thumb for the model's size (docs/guide.md), which
    >   the trainer sets and prints.
    > - `beta`: Defaults to `0.05` instead of `0.0`.
    > - `num_generations`: Defaults to `1` instead of `8`: a prompt's completions are not compared.
    > - `scale_rewards`: Defaults to `none` instead of `group`: there are no group advantages.
    > - `disable_dropout`: Defaults to `True` instead of `False`: dropout makes the log-probabilities of a completion
    >   differ from pass to pass. The value model never has dropout.
    """

    learning_rate: float | None = option(
        None, "Peak learning rate. If unset, by the model's size, with the rule of thumb of `trl-repulse suggest`."
    )
    beta: float = option(0.05, "Coefficient of the KL penalty, which is part of the token rewards.")
    num_generations: int | None = option(1, "Number of completions a prompt, at least 1. PPO does not compare them.")
    scale_rewards: str = option("none", "Must stay 'none': there are no group advantages to scale.")

    value_learning_rate: float | None = None
    value_clip: float | None = 0.2
    value_warmup_steps: int = 0

    gae_lambda: float = 0.95
    gamma: float = 1.0
    whiten_advantages: bool = True

    def __post_init__(self):
        remedy = "must be at least 1: the number of completions drawn for each prompt"
        require(self, (self.num_generations or 0) >= 1, "num_generations", remedy)
        if single := self.num_generations == 1:
            self.num_generations = _Single(1)
        super().__post_init__()
        if single:
            self.num_generations = 1
        self.check()

    def check(self) -> None:
        super().check()
        for name in ("gamma", "gae_lambda"):
            require(self, 0 <= getattr(self, name) <= 1, name, "must be from 0 to 1")
        if self.value_learning_rate is not None:
            remedy = "must be a finite number of at least 0 (0 freezes the value model)"
            require(self, 0 <= self.value_learning_rate < math.inf, "value_learning_rate", remedy)
        if self.value_clip is not None:
            remedy = "must be a finite number above 0; set None to leave the value loss unclipped"
            require(self, 0 < self.value_clip < math.inf, "value_clip", remedy)
        require(self, self.value_warmup_steps >= 0, "value_warmup_steps", "must be at least 0")
        if self.fp16 and self.max_grad_norm <= 0:  # the dropped gradient would not be unscaled
            remedy = "needs clipping with `fp16=True`; set `max_grad_norm` above 0, or `bf16=True` instead"
            require(self, self.value_warmup_steps == 0, "value_warmup_steps", remedy)
        check_second_schedule(self)
        # GRPO's options for group advantages, and for losses other than PPO's
        remedy = "is not PPO's clipped surrogate, or depends on how a batch is split; set 'dapo', 'grpo' or 'dr_grpo'"
        require(self, self.loss_type in ("dapo", "grpo", "dr_grpo"), "loss_type", remedy)
        unused = (
            "has no effect: advantages come from the value model, not from a prompt's other completions; leave it at {!r}, "
            "and see `whiten_advantages`"
        )
        require_defaults(self, unused, "scale_rewards", "multi_objective_aggregation")
        require_defaults(self, "does not fit advantages of tokens; set {!r}", "importance_sampling_level")
        remedy = "masks whole completions by a group advantage, which PPO has not; leave it unset"
        require_defaults(self, remedy, "off_policy_mask_threshold")
