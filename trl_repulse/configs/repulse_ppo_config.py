"""Configuration of [`~trl_repulse.RePULSePPOTrainer`]."""

from dataclasses import dataclass, field
from typing import Literal

from ._checks import check_repulse_config
from .negative_term_config import NegativeTermConfig
from .ppo_config import PPOConfig


@dataclass
class RePULSePPOConfig(NegativeTermConfig, PPOConfig):
    r"""
    Configuration class for the [`RePULSePPOTrainer`].

    Its arguments are those of [`~trl_repulse.configs.NegativeTermConfig`], [`PPOConfig`], [`~trl.GRPOConfig`] and
    [`~transformers.TrainingArguments`]. `beta` is the KL coefficient, and `target_dist_beta` the inverse temperature
    of the target distribution. `learning_rate`, `max_grad_norm`, `optim`, the weight decay and the scheduler apply to
    each model separately; the learning rates of value model and proposal can differ.

    Parameters:
        logprob_reduction (`str`, *optional*, defaults to `"mean"`):
            How the token log-probabilities of a completion enter the negative term: their `"mean"` (the convention of
            the published `alpha`) or their `"sum"`. For PPO's own loss see `loss_type`.

    > [!NOTE]
    > These parameters have default values different from [`PPOConfig`]:
    > - `num_generations`: Defaults to `4` instead of `1`: importance weights compare a prompt's samples.
    """

    num_generations: int | None = field(
        default=4,
        metadata={"help": "Number of completions a prompt. Importance weights compare a prompt's samples."},
    )
    logprob_reduction: Literal["mean", "sum"] = field(
        default="mean",
        metadata={"help": "How token log-probabilities enter the negative term: their `mean` or their `sum`."},
    )

    def __post_init__(self):
        super().__post_init__()
        check_repulse_config(self, in_rows=True)
