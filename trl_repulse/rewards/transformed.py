"""A reward function with a transform, for trainers that have none of their own."""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal

import torch

from ..configs._checks import check_choices, check_transform
from ..math.objective import transform_rewards
from ._texts import is_async, read_rewards


@dataclass(eq=False, repr=False)
class TransformedReward:
    """
    A reward function whose rewards are transformed before the trainer gets them.

    For [`~trl.GRPOTrainer`] and other trainers of TRL. [`~trl_repulse.ReinforceTrainer`] and the trainers based on it
    have the option `reward_transform`, which gives the target distribution the raw reward; do not use both. The mean
    raw reward is logged as `rewards/NAME/mean`, the transformed one as `rewards/NAME_transformed/mean`.

    Args:
        reward (`Callable`): Reward function in TRL's form, such as those in `trl_repulse.rewards`.
        transform (`str`, *optional*, defaults to `"exponential"`):
            `"exponential"` (r − a·exp(b·r)) or `"indicator"` (r − a·1[r < threshold]).
        alpha (`float`, *optional*, defaults to `1.0`): a, at least 0.
        beta (`float`, *optional*, defaults to `-1.0`): b of the exponential transform, below 0.
        threshold (`float`, *optional*): Threshold of the indicator transform, in units of reward.

    Raises:
        `ValueError`: If `reward` is not callable or asynchronous, an argument is invalid, or a parameter of the other
            transform is set; when called, if a transformed reward is infinite.
    """

    reward: Callable[..., list]
    transform: Literal["exponential", "indicator"] = "exponential"
    alpha: float = 1.0
    beta: float = -1.0
    threshold: float | None = None

    def __post_init__(self):
        reward = self.reward
        if not callable(reward) or isinstance(reward, torch.nn.Module):
            raise ValueError(
                f"A reward transform needs a reward function, got {reward!r:.60}; make one of a model's path, e.g. with "
                "`reward_type='sequence_pair'`."
            )
        if is_async(reward):
            raise ValueError(
                f"A reward transform needs a function that returns its rewards, and {reward!r:.60} is asynchronous; transform "
                "inside it with `trl_repulse.math.objective`."
            )
        check_choices(self)
        options = {f"reward_transform_{name}": getattr(self, name) for name in ("alpha", "beta", "threshold")}
        self._options = SimpleNamespace(reward_transform=self.transform, **options)
        check_transform(self._options)

    @property
    def __name__(self) -> str:
        return f"{self._raw_name}_transformed"

    @property
    def _raw_name(self) -> str:
        return getattr(self.reward, "__name__", type(self.reward).__name__)

    def __call__(
        self, prompts: list, completions: list, completion_ids: list[list[int]] | None = None, **kwargs: Any
    ) -> list[float | None]:
        """Transformed rewards of completions, as TRL calls a reward function; `None` where the wrapped function returned
        it. Raises `ValueError` if that does not return a list, or a transformed reward is infinite."""
        result = self.reward(prompts=prompts, completions=completions, completion_ids=completion_ids, **kwargs)
        raw = read_rewards(result, f"The reward function '{self._raw_name}'", len(completions))
        given = [reward for reward in raw if reward is not None]
        rewards = transform_rewards(self._options, torch.tensor(given, dtype=torch.float64)).tolist()
        for reward, value in zip(given, rewards, strict=True):
            if abs(value) > torch.finfo(torch.float32).max:
                raise ValueError(
                    f"The transform of the reward {reward} overflows (`reward_transform_beta={self.beta}`); scale the "
                    "reward, or bring `reward_transform_beta` closer to 0."
                )
        if given and "log_metric" in kwargs:
            kwargs["log_metric"](f"rewards/{self._raw_name}/mean", sum(given) / len(given))
        left = iter(rewards)
        return [None if reward is None else next(left) for reward in raw]
