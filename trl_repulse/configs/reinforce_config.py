"""Configuration of [`~trl_repulse.ReinforceTrainer`]."""

from dataclasses import dataclass, field
from typing import Literal

from trl import RLOOConfig

from ._checks import check_reinforce_config


@dataclass
class ReinforceConfig(RLOOConfig):
    r"""
    Configuration class for the [`ReinforceTrainer`].

    This class includes only the parameters that are specific to REINFORCE as the RePULSe paper runs it. For the other
    arguments, refer to [`~trl.RLOOConfig`] and [`~transformers.TrainingArguments`]. Mind one name: `beta` is, as
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

        > Parameters that control the reward

        reward_transform (`str`, *optional*):
            Transform of the reward the policy maximises: `"exponential"` (r − a·exp(b·r)) or `"indicator"`
            (r − a·1[r < threshold]). If `None`, the reward itself. Acts before the KL penalty, and never on the
            reward that the target distribution, the logged `reward` and the evaluation see.
        reward_transform_alpha (`float`, *optional*, defaults to `1.0`):
            The transform's a, at least 0.
        reward_transform_beta (`float`, *optional*, defaults to `-1.0`):
            The exponential transform's b, below 0.
        reward_transform_threshold (`float`, *optional*):
            The indicator transform's threshold, in units of reward.
        bad_reward_threshold (`float`, *optional*):
            Reward under which a completion counts as bad: the logged shares of bad samples, the negative data and the
            indicator potential use it.
        save_negatives (`bool`, *optional*, defaults to `False`):
            Whether to append each sampled completion with a reward under `bad_reward_threshold` to
            `output_dir/negatives.jsonl`.

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

    # Parameters that control the reward
    reward_transform: Literal["exponential", "indicator"] | None = field(
        default=None,
        metadata={
            "help": "Transform of the reward the policy maximises: `exponential` (r - a*exp(b*r)) or `indicator` "
            "(r - a*1[r < threshold]). Never seen by the target distribution or the evaluation."
        },
    )
    reward_transform_alpha: float = field(default=1.0, metadata={"help": "The reward transform's a, at least 0."})
    reward_transform_beta: float = field(
        default=-1.0, metadata={"help": "The exponential reward transform's b, below 0."}
    )
    reward_transform_threshold: float | None = field(
        default=None, metadata={"help": "The indicator reward transform's threshold, in units of reward."}
    )
    bad_reward_threshold: float | None = field(
        default=None,
        metadata={
            "help": "Reward under which a completion counts as bad, for logging, the negative data and the indicator "
            "potential."
        },
    )
    save_negatives: bool = field(
        default=False,
        metadata={
            "help": "Whether to append each sampled completion with a reward under `bad_reward_threshold` to "
            "`output_dir/negatives.jsonl`."
        },
    )

    def __post_init__(self):
        super().__post_init__()
        check_reinforce_config(self)
