"""Configuration of [`~trl_repulse.ReinforceTrainer`]."""

from dataclasses import dataclass, field
from typing import Literal

from trl import RLOOConfig

from ._checks import check_reinforce_config
from .engine_config import EngineConfig
from .reward_config import RewardConfig
from .scoring_config import ScoringConfig


@dataclass
class ReinforceConfig(RewardConfig, EngineConfig, ScoringConfig, RLOOConfig):
    r"""
    Configuration class for the [`ReinforceTrainer`].

    This class includes only the parameters that are specific to REINFORCE as the RePULSe paper runs it. For the other
    arguments, refer to [`RewardConfig`] (reward transforms, negative data), [`~trl_repulse.configs.EngineConfig`] (vLLM),
    [`~trl_repulse.configs.ScoringConfig`] (prompts read once), [`~trl.RLOOConfig`] and
    [`~transformers.TrainingArguments`]. Mind one name: `beta` is, as
    everywhere in TRL, **the coefficient of the KL penalty** to the reference model. The inverse temperature of
    RePULSe's target distribution is `target_dist_beta`, that of a reward transform `reward_transform_beta`.

    Parameters:
        > Parameters that control the policy loss

        baseline (`str`, *optional*, defaults to `"leave_one_out"`):
            What is subtracted from a return to give the advantage: the mean return of the prompt's other samples
            (`"leave_one_out"`) or of all of them (`"group_mean"`), `baseline_constant` (`"constant"`), or nothing
            (`"none"`). With [`~trl.RLOOConfig`]'s `normalize_advantages`, `"none"` is REINFORCE++ and `"group_mean"`
            REINFORCE++-baseline.
        baseline_constant (`float`, *optional*, defaults to `0.0`):
            Constant subtracted from each return when `baseline="constant"`, in units of reward.
        logprob_reduction (`str`, *optional*, defaults to `"mean"`):
            How a completion's token log-probabilities enter the policy loss: their `"mean"` (the convention to which
            the published learning rates and `alpha` belong) or their `"sum"` (what the derivation gives).

    > [!NOTE]
    > These parameters have default values different from [`~trl.RLOOConfig`]:
    > - `disable_dropout`: Defaults to `True` instead of `False`: dropout makes the log-probabilities of one completion
    >   differ from pass to pass.
    """

    disable_dropout: bool = field(
        default=True,
        metadata={"help": "Whether to disable dropout in the models. Dropout makes log-probabilities noisy."},
    )

    # Parameters that control the policy loss
    baseline: Literal["leave_one_out", "group_mean", "constant", "none"] = field(
        default="leave_one_out",
        metadata={
            "help": "What is subtracted from a return: the mean of the prompt's other samples (`leave_one_out`) or of "
            "all of them (`group_mean`), `baseline_constant` (`constant`), or nothing (`none`)."
        },
    )
    baseline_constant: float = field(
        default=0.0, metadata={"help": "Constant subtracted from each return when `baseline='constant'`."}
    )
    logprob_reduction: Literal["mean", "sum"] = field(
        default="mean",
        metadata={
            "help": "How token log-probabilities enter the policy loss: `mean` over the completion's tokens (the "
            "convention the published hyper-parameters belong to) or their `sum`."
        },
    )

    def __post_init__(self):
        super().__post_init__()
        check_reinforce_config(self)
