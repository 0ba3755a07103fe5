"""Options of all trainers for rewards."""

from dataclasses import dataclass, field
from typing import Literal

from ._fields import KnownFields


@dataclass
class RewardConfig(KnownFields):
    r"""
    Options for rewards that all trainers share; not a configuration by itself.

    Parameters:
        reward_transform (`str`, *optional*):
            Transform of the reward that the policy maximises: `"exponential"` (r − a·exp(b·r)) or `"indicator"` (r −
            a·1[r < threshold]). If `None`, none. It acts before the KL penalty; the target distribution, the logged
            `reward` and evaluations use the raw reward.
        reward_transform_alpha (`float`, *optional*, defaults to `1.0`):
            The transform's a, at least 0.
        reward_transform_beta (`float`, *optional*, defaults to `-1.0`):
            The exponential transform's b, below 0.
        reward_transform_threshold (`float`, *optional*):
            The indicator transform's threshold, in units of reward.
        bad_reward_threshold (`float`, *optional*):
            Reward below which a completion is bad, for the logged shares of bad samples, the negative data and the
            indicator potential. If `None`, the hot policy of RePULSe takes about the 2 % quantile of the first 500
            rewards (of a tenth of all, but at least 50, if a run draws fewer than 5,000), and pushes nothing down
            until then.
        save_negatives (`bool`, *optional*, defaults to `False`):
            Whether to append sampled completions with a reward below `bad_reward_threshold` to
            `output_dir/negatives.jsonl`.
    """

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
            "potential. If unset, the hot policy measures it."
        },
    )
    save_negatives: bool = field(
        default=False,
        metadata={
            "help": "Whether to append each sampled completion with a reward under `bad_reward_threshold` to "
            "`output_dir/negatives.jsonl`."
        },
    )
