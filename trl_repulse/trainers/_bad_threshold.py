"""The reward under which an output is bad, measured at the start of a run that was not told."""

from typing import Any

import numpy as np
import torch
from accelerate.logging import get_logger

from .._rules_of_thumb import LOW, bad_threshold_for


logger = get_logger(__name__)

_SAMPLES, _SHARE, _LEAST = 500, 0.1, 50  # so many, but no more than this share of a run's, and at least the last


class MeasuredThreshold:
    """
    About the 2 % quantile of the rewards of the policy's first samples: 500, or a tenth of all if a run draws fewer than 5,000.

    All processes hold the same one, from what all of them have drawn.

    Args:
        trainer ([`UnitSampling`]):
            Trainer of the policy.
    """

    def __init__(self, trainer: Any):
        self.value: float | None = None  # until enough samples were drawn
        self._rewards: list[float] = []
        self._trainer = trainer

    def observe(self, rewards: torch.Tensor) -> None:
        """Takes note of the rewards of this process's samples; NaN is left out. All processes must call it."""
        trainer = self._trainer
        if not trainer.model.training:
            return
        if self.value is None:
            everyone = trainer.accelerator.gather(rewards.flatten())
            self._rewards += everyone[everyone.isfinite()].tolist()
            if len(self._rewards) >= self._wanted() and len(set(self._rewards)) > 1:
                self._measure()
        if self.value is not None:
            trainer._metrics["train"]["negative/bad_reward_threshold"].append(self.value)

    def _wanted(self) -> int:
        args = self._trainer.args
        drawn = args.per_device_train_batch_size * self._trainer.accelerator.num_processes
        drawn *= self._trainer.state.max_steps * args.gradient_accumulation_steps / args.num_iterations
        return max(_LEAST, min(_SAMPLES, int(_SHARE * drawn)))

    def _measure(self) -> None:
        rewards = np.array(self._rewards)
        self._rewards, self.value = [], bad_threshold_for(rewards)
        logger.warning(
            f"`bad_reward_threshold` is not set. It is now {self.value:g}, about the {LOW:.0%} quantile of the first {rewards.size} "
            "rewards, and from here on what is under it is pushed down. Read the lowest samples, and set it to what you call bad."
        )

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, as JSON takes it to the bit."""
        return {"value": self.value, "rewards": self._rewards}

    def load_state(self, state: dict[str, Any]) -> None:
        """Takes up what [`state`] gave."""
        self.value, self._rewards = state["value"], state["rewards"]
