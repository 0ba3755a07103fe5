"""Configuration of [`~trl_repulse.RePULSeGRPOTrainer`]."""

from dataclasses import dataclass, field
from typing import Literal

from trl import GRPOConfig

from ._checks import check_compared, check_repulse_config, check_shared, own_precision, require
from .engine_config import EngineConfig
from .negative_term_config import NegativeTermConfig
from .reward_config import RewardConfig
from .scoring_config import ScoringConfig


@dataclass
class RePULSeGRPOConfig(NegativeTermConfig, RewardConfig, EngineConfig, ScoringConfig, GRPOConfig):
    r"""
    Configuration class for the [`RePULSeGRPOTrainer`].

    Its arguments are those of [`~trl_repulse.configs.NegativeTermConfig`], [`RewardConfig`] (negative data),
    [`~trl_repulse.configs.EngineConfig`] (vLLM), [`~trl_repulse.configs.ScoringConfig`] (shared prompts),
    [`~trl.GRPOConfig`] and [`~transformers.TrainingArguments`]. `beta` is the KL coefficient, and `target_dist_beta`
    the inverse temperature of the target distribution. `learning_rate`, `max_grad_norm`, `optim`, the weight decay and
    the scheduler apply to each model separately; only the proposal's learning rate can differ.

    Parameters:
        logprob_reduction (`str`, *optional*):
            How the token log-probabilities of a completion enter the negative term: their `"mean"` (the convention of
            the published `alpha`) or their `"sum"`. For GRPO's own loss see `loss_type`. If `None`, `"mean"`; with
            `alpha` unset and `loss_type` `"dr_grpo"` or `"luspo"`, `"sum"`, as in these losses.
        proposal_tools (`bool`, *optional*, defaults to `False`):
            Whether the proposal, or the hot policy, may use the trainer's `tools`, which take effect, and environments
            of a `proposal_environment_factory`. It seeks the policy's worst behaviour there.

    > [!NOTE]
    > These parameters have default values different from [`~trl.GRPOConfig`] and
    > [`~trl_repulse.configs.NegativeTermConfig`]:
    > - `alpha`: Defaults to 0.1 with any `proposal`, and `alpha_normalization` to `"samples"`, in units of the advantages,
    >   which have a standard deviation of about 1 unless `scale_rewards="none"`. The default is divided by the number of
    >   proposal samples with `alpha_normalization="none"`, and by `max_completion_length` with `loss_type="dr_grpo"`, which
    >   divides by it too, or `logprob_reduction="sum"` (not with `loss_type="luspo"`, which is a sum itself). With
    >   `loss_type="cispo"` it is multiplied by `epsilon_high` if that is below 1, as the advantages are.
    > - `per_device_eval_batch_size`: Defaults to `None` instead of `8`: 8, rounded up to whole prompts.
    > - `disable_dropout`: Defaults to `True` instead of `False`: dropout makes the log-probabilities of a completion
    >   differ from pass to pass.
    """

    disable_dropout: bool = field(
        default=True,
        metadata={"help": "Whether to disable dropout in the models. Dropout makes log-probabilities noisy."},
    )
    logprob_reduction: Literal["mean", "sum"] | None = field(
        default=None,
        metadata={
            "help": "How token log-probabilities enter the negative term: their `mean` or their `sum`. If unset, `mean`, or with a "
            "default `alpha` as in `loss_type`."
        },
    )
    proposal_tools: bool = field(
        default=False,
        metadata={
            "help": "Whether the proposal, or the hot policy, which seeks the policy's worst behaviour, may act with the tools."
        },
    )

    def __post_init__(self):
        check_compared(self)
        if self.alpha is None:
            self._set_alpha()
        if self.logprob_reduction is None:
            self.logprob_reduction = "mean"
        with own_precision(self):
            super().__post_init__()
        check_shared(self)
        remedy = "does not reach GRPO's advantages, which TRL makes of rewards; leave it at None"
        require(self, self.reward_transform is None, "reward_transform", remedy)
        check_repulse_config(self, in_rows=True)
        remedy = (
            "is for completions that are drawn for the negative term; leave it False, the policy's own need no leave"
        )
        own = self.alpha > 0 and not self.draws_twice
        require(self, not (own and self.proposal_tools), "proposal_tools", remedy)

    def _set_alpha(self) -> None:
        """The published α in units of the advantages, with tokens counted as in GRPO's loss."""
        if self.logprob_reduction is None and self.loss_type in ("dr_grpo", "luspo"):
            self.logprob_reduction = "sum"
        self.alpha = 0.1
        if self.alpha_normalization is None:
            self.alpha_normalization = "samples"
        elif self.alpha_normalization == "none":
            self.alpha /= self.num_proposal_generations or self.num_generations
        # Only LUSPO's loss is a sum; DR-GRPO divides sums by the greatest length
        if self.loss_type == "dr_grpo" or (self.logprob_reduction == "sum" and self.loss_type != "luspo"):
            self.alpha /= self.max_completion_length or 1  # 0 is refused later
        if self.loss_type == "cispo":  # the ratio, initially 1, is clipped there
            self.alpha *= min(self.epsilon if self.epsilon_high is None else self.epsilon_high, 1.0)
