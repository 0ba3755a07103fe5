"""Configuration of [`~trl_repulse.ReinforceTrainer`]."""

import math
from dataclasses import dataclass
from typing import Literal

from trl import GRPOConfig

from ._checks import check_compared, require, require_at_least, require_defaults
from .shared_config import SharedConfig, documented, option


# GRPO's fields that REINFORCE does not use, by remedy
_GRPO_ONLY = {
    "is about the kind of GRPO's loss, and the loss here is REINFORCE's; see `logprob_reduction` and `epsilon`": (
        *("loss_type", "importance_sampling_level", "delta", "use_bias_correction_kl", "off_policy_mask_threshold"),
        *("sapo_temperature_neg", "sapo_temperature_pos"),
        *("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"),
    ),
    "is about the entropy in GRPO's loss, and that of REINFORCE has none; see `beta`": (
        *("top_entropy_quantile", "entropy_coef", "use_adaptive_entropy", "entropy_target"),
        *("entropy_coef_min", "entropy_coef_max", "entropy_coef_delta"),
    ),
    "is about GRPO's advantages, and those here are made of returns; see `baseline` and `normalize_advantages`": (
        *("scale_rewards", "multi_objective_aggregation"),
    ),
    "is about GRPO's correction of what vLLM samples, and samples count as the policy's own here": (
        *("vllm_importance_sampling_correction", "vllm_importance_sampling_mode", "vllm_importance_sampling_cap"),
        *("vllm_importance_sampling_clip_max", "vllm_importance_sampling_clip_min"),
    ),
    "is about tools, which REINFORCE does not take": ("max_tool_calling_iterations",),
    "would not reach all models that are scored; see `model_init_kwargs` for their `dtype`": ("cast_lm_head_to_fp32",),
}


@documented
@dataclass
class ReinforceConfig(SharedConfig, GRPOConfig):
    r"""
    Configuration class for the [`ReinforceTrainer`].

    This class includes only the parameters that are specific to REINFORCE as in the RePULSe paper. For the other
    arguments, refer to [`~trl_repulse.configs.SharedConfig`] (rewards, scoring, vLLM), [`~trl.GRPOConfig`] and
    [`~transformers.TrainingArguments`]. Options of GRPO's own loss, advantages and corrections (`loss_type`,
    `scale_rewards`, `entropy_coef`, ...) are refused. `beta` is, as everywhere in TRL, **the coefficient of the KL
    penalty** to the reference model. The inverse temperature of RePULSe's target distribution is `target_dist_beta`,
    that of a reward transform `reward_transform_beta`.

    Parameters:
        > Parameters that control the policy loss

        baseline (`str`, *optional*, defaults to `"leave_one_out"`):
            What is subtracted from a return: the mean of the prompt's other samples (`"leave_one_out"`) or of all of
            them (`"group_mean"`), `baseline_constant` (`"constant"`), or nothing (`"none"`). With
            `normalize_advantages`, `"none"` is REINFORCE++ and `"group_mean"` REINFORCE++-baseline.
        baseline_constant (`float`, *optional*, defaults to `0.0`):
            The baseline with `baseline="constant"`, in units of reward.
        normalize_advantages (`bool`, *optional*, defaults to `False`):
            Whether to shift and scale advantages to mean 0 and standard deviation 1 over a generation batch, over all
            processes, like [`~trl.RLOOConfig`]'s field.
        reward_clip_range (`list[float]`, *optional*):
            Lowest and highest reward the policy sees, before any transform, like [`~trl.RLOOConfig`]'s field. If
            unset, no limits. The target distribution, the logged `reward` and evaluations use unclipped rewards.
        prefix_reward_steps (`int`, *optional*):
            If set, the first so many tokens of a completion, twice as many, and so on are rewarded too, and what such a
            reward predicts of the whole completion's is part of the baseline of the tokens behind. The expected gradient
            is the same, with less noise, if the reward can tell from half an answer. Costs a call of each reward a prefix.
        gae_lambda (`float`, *optional*, defaults to `1.0`):
            λ of generalized advantage estimation, from one rewarded prefix to the next, from 0 to 1. Below 1, what a prefix
            predicts counts in part in place of what comes later: less noise, some bias. Needs `prefix_reward_steps`.
        logprob_reduction (`str`, *optional*, defaults to `"mean"`):
            How token log-probabilities enter the policy loss: their `"mean"` over a completion's tokens (the
            convention of the published learning rates and `alpha`) or their `"sum"` (as derived).

    > [!NOTE]
    > These parameters have default values different from [`~trl.GRPOConfig`]; `beta` and `num_generations` are as in
    > [`~trl.RLOOConfig`]:
    > - `per_device_eval_batch_size`: Defaults to `None` instead of `8`: as large as training's, in whole prompts.
    > - `learning_rate`: Defaults to `None` instead of `1e-06`: a rule of thumb for the model's size (docs/guide.md), which
    >   the trainer sets and prints.
    > - `beta`: Defaults to `0.05` instead of `0.0`.
    > - `num_generations`: Defaults to `2` instead of `8`.
    > - `vllm_importance_sampling_correction`: Defaults to `False` instead of `True`: samples count as the policy's own.
    > - `disable_dropout`: Defaults to `True` instead of `False`: dropout makes the log-probabilities of a completion
    >   differ from pass to pass.
    """

    learning_rate: float | None = option(
        None, "Peak learning rate. If unset, by the model's size, with the rule of thumb of `trl-repulse suggest`."
    )
    beta: float = option(0.05, "Coefficient of the KL penalty, which is part of the return.")
    num_generations: int | None = option(2, "Number of completions a prompt, at least 2, whose returns are compared.")
    vllm_importance_sampling_correction: bool = option(False, "Must stay False: samples count as the policy's own.")

    baseline: Literal["leave_one_out", "group_mean", "constant", "none"] = "leave_one_out"
    baseline_constant: float = 0.0
    normalize_advantages: bool = False
    reward_clip_range: list[float] | None = None
    prefix_reward_steps: int | None = None
    gae_lambda: float = 1.0
    logprob_reduction: Literal["mean", "sum"] = "mean"

    def __post_init__(self):
        check_compared(self)
        super().__post_init__()
        self.check()

    def check(self) -> None:
        super().check()
        for what, names in _GRPO_ONLY.items():
            require_defaults(self, what + "; leave it at {!r}", *names)
        if self.reward_clip_range is not None:
            # PyYAML reads numbers like 1e-3 as text
            limits = [] if isinstance(self.reward_clip_range, str) else list(map(float, self.reward_clip_range))
            ordered = len(limits) == 2 and limits[0] < limits[1]
            require(self, ordered, "reward_clip_range", "must be a lower limit and a higher one")
            self.reward_clip_range = limits
        if self.prefix_reward_steps is not None:
            require_at_least(self, 1, "prefix_reward_steps")
            fits = self.prefix_reward_steps < self.max_completion_length
            require(self, fits, "prefix_reward_steps", "leaves no prefix of `max_completion_length` tokens")
            remedy = "has no effect with `prefix_reward_steps`"
            require_defaults(self, remedy, "baseline", "normalize_advantages", "num_iterations")
            fits = self.gradient_accumulation_steps % self.steps_per_generation == 0
            require(
                self, fits, "steps_per_generation", "gives several updates, which `prefix_reward_steps` does not serve"
            )
        require(self, 0.0 <= self.gae_lambda <= 1.0, "gae_lambda", "must be from 0 to 1")
        if self.prefix_reward_steps is None:
            require_defaults(self, "has no effect; set `prefix_reward_steps`", "gae_lambda")
        require(self, math.isfinite(self.baseline_constant), "baseline_constant", "must be a finite number")
        if self.baseline != "constant":
            require_defaults(self, "has no effect; set `baseline='constant'`", "baseline_constant")
        else:
            remedy = "has no effect with `normalize_advantages=True`, which subtracts the mean; set `baseline='none'`"
            require(self, not self.normalize_advantages, "baseline", remedy)
