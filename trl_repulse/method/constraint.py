"""A rate of bad outputs that a policy is held to, by one dual variable."""

from typing import Any

import torch
from accelerate.logging import get_logger

from ..engine.logs import Logs, Moments, mean
from ..math.objective import dual_step


logger = get_logger(__name__)

_SINGLE = 0.25  # nats by which one bad sample may move the logarithm of the multiplier, if an update has less than one
_FORGETTING = 0.05  # share of the latest estimate of P(bad) in the average, which only scales the steps
# Relative to the multiplier's first value
_SHIFT = 0.1  # added to it before its logarithm moves, so that it recovers soon
_LEAST, _MOST = 1e-6, 1e6  # its limits
_FAR = 1e3  # there is a warning above it


class Constraint:
    """
    Lagrange multiplier of P(reward < `bad_reward_threshold`) ≤ `max_bad_probability`, the same in all processes, which is updated once
    for each batch of generations.

    Args:
        args ([`~trl_repulse.ReinforceConfig`]):
            Configuration with the limit.
        logs ([`Logs`]):
            The trainer's metrics.
        start (`float`):
            Its value at first, above 0, in units of reward.
    """

    def __init__(self, args: Any, logs: Logs, start: float):
        self.multiplier = self._start = start
        self._average: float | None = None  # of earlier estimates of P(bad)
        self._args, self._logs = args, logs
        self._seen = Moments()
        self._resolution = 0.0

    def observe(self, bad: torch.Tensor, resolution: float) -> None:
        """
        Adds samples or prompts that this process trains on.

        `bad` holds probabilities that a completion is bad, or 1 if it is and 0 if not; NaN is left out. `resolution` is the weight of one
        bad sample: 1 for counts, 0 for an estimate that can be smaller.
        """
        if self._logs.mode == "train":
            self._seen += Moments.of(bad)
            self._resolution = resolution

    def update(self) -> None:
        """Updates the multiplier from what was observed since the last update, and logs both. All processes must call it."""
        args, logs = self._args, self._logs
        seen, self._seen = logs.gathered(self._seen), Moments()
        logs.value("constraint/multiplier", self.multiplier)
        if not seen.count:  # generations that were used before
            return
        logs.record_moments({"constraint/p_bad": mean}, seen)
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
        """What a checkpoint keeps, for JSON."""
        return {"multiplier": self.multiplier, "average": self._average}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restores what [`state`] gave."""
        self.multiplier, self._average = state["multiplier"], state["average"]
