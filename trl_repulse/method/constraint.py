"""A rate of bad outputs that a policy is held to, by one dual variable."""

from typing import Any

import torch
from accelerate.logging import get_logger

from ..engine.metrics import Moments, mean
from ..rewards.transforms import dual_step


logger = get_logger(__name__)

# How far one bad sample may move the logarithm of the multiplier, in nats, where an update has less than one
_SINGLE = 0.25
# Share of the latest estimate of P(bad) in the average, which serves the scale of steps alone
_FORGETTING = 0.05
# All relative to the first value: what is added to the multiplier before its logarithm moves, so that it comes back soon when it was
# long not needed; the least and the most that it may become; and from where it is said that the rate may be out of reach
_SHIFT, _LEAST, _MOST, _FAR = 0.1, 1e-6, 1e6, 1e3


class Constraint:
    """
    Lagrange multiplier of P(reward < `bad_reward_threshold`) ≤ `max_bad_probability`, moved once for each batch of generations.

    All processes hold the same one, from what all of them have seen.

    Args:
        trainer ([`ReinforceTrainer`]):
            Trainer of the policy.
        start (`float`):
            Its value at first, above 0, in units of reward.
    """

    def __init__(self, trainer: Any, start: float):
        self.multiplier = self._start = start
        self._average: float | None = None  # of earlier estimates of P(bad)
        self._trainer = trainer
        self._seen = Moments()
        self._resolution = 0.0

    def observe(self, bad: torch.Tensor, resolution: float) -> None:
        """
        Takes note of samples or prompts that this process trains on.

        Each value of `bad` is the probability that a completion is bad, or 1 if it is and 0 if not; NaN is left out. `resolution` is what
        one bad sample adds to it: 1 of a single sample, 0 of an estimate that tells smaller ones.
        """
        if self._trainer.model.training:
            self._seen += Moments.of(bad)
            self._resolution = resolution

    def update(self) -> None:
        """Moves the multiplier by what was noted since the last update, and logs both. All processes must call it."""
        trainer, args = self._trainer, self._trainer.args
        seen, self._seen = trainer._gathered(self._seen), Moments()
        trainer._metrics["train"]["constraint/multiplier"].append(self.multiplier)
        if not seen.count:  # generations that were used before
            return
        trainer._record({"constraint/p_bad": mean}, seen)
        before = seen.mean if self._average is None else self._average
        self._average = before + _FORGETTING * (seen.mean - before)
        limit, rate = args.max_bad_probability, args.constraint_learning_rate
        scale = max(limit, before, rate * self._resolution / (_SINGLE * seen.count))
        shift = _SHIFT * self._start
        stepped = dual_step(self.multiplier + shift, seen.mean, limit, scale, rate) - shift
        self.multiplier = min(max(stepped, _LEAST * self._start), _MOST * self._start)
        if self.multiplier > _FAR * self._start and seen.mean > limit:
            logger.warning_once(
                f"The constraint's multiplier is over {_FAR:,.0f} times its first value, and P(bad) is still above "
                f"`max_bad_probability={limit:g}`, which may be out of reach; raise it, or lower `bad_reward_threshold`."
            )

    def state(self) -> dict[str, float | None]:
        """What a checkpoint keeps, as JSON takes it to the bit."""
        return {"multiplier": self.multiplier, "average": self._average}

    def load_state(self, state: dict[str, float | None]) -> None:
        """Takes up what [`state`] gave."""
        self.multiplier, self._average = state["multiplier"], state["average"]
