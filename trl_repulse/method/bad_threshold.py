"""The reward under which an output is bad, measured at the start of a run whose configuration has no threshold."""

from typing import Any

import numpy as np
import torch
from accelerate.logging import get_logger

from .._rules_of_thumb import bad_threshold_for
from ..engine.scorer import Scorer


logger = get_logger(__name__)

# Samples that are used, but no more than this share of a run's, and at least the last
_SAMPLES, _SHARE, _LEAST = 500, 0.1, 50
_MOST_BAD = 0.1  # largest share of the samples that may be under a threshold


class MeasuredThreshold:
    """
    About the 2 % quantile of the rewards of the policy's first samples in all processes: 500, or a tenth of all if a run draws fewer
    than 5,000, and at least 50.

    Args:
        scorer ([`Scorer`]):
            The trainer's services.
    """

    def __init__(self, scorer: Scorer):
        self.value: float | None = None  # until enough samples were drawn
        self._rewards: list[float] = []
        self._scorer = scorer
        self._has_begun = False

    def observe(self, rewards: torch.Tensor) -> None:
        """
        Adds the rewards of this process's samples, without NaN, until the threshold is measured. All processes must call it.

        Raises:
            `ValueError`: If more than a tenth of the rewards are the lowest, which is not rare.
        """
        if self._scorer.mode != "train":
            return
        if self.value is None:
            trainer: Any = self._scorer.trainer
            args, batch = trainer.args, trainer.args.per_device_train_batch_size * trainer.accelerator.num_processes
            drawn = (
                batch * trainer.state.max_steps * args.gradient_accumulation_steps // args.num_iterations
            )  # in the run
            if not self._has_begun and drawn < _LEAST:
                logger.warning(
                    f"`bad_reward_threshold` is not set, and takes {_LEAST} samples to measure. This run draws {drawn}, so that nothing "
                    "is pushed down. Set it, or train longer."
                )
            self._has_begun = True
            everyone = trainer.accelerator.gather(rewards.flatten())
            self._rewards += everyone[everyone.isfinite()].tolist()
            wanted = max(_LEAST, min(_SAMPLES, int(_SHARE * drawn)))
            if len(self._rewards) >= wanted and len(set(self._rewards)) > 1:
                self._measure()
        if self.value is not None:
            self._scorer.log_value("negative/bad_reward_threshold", self.value)

    def _measure(self) -> None:
        rewards = np.array(self._rewards)
        value = bad_threshold_for(rewards)
        share = float((rewards < value).mean())
        if share > _MOST_BAD:
            raise ValueError(
                f"`bad_reward_threshold` is not set and cannot be measured: {share:.0%} of the first {rewards.size} rewards are under {value:g}, "
                "the lowest possible threshold, and bad outputs should be rare. Set it to the reward under which an output is bad, or use `alpha=0`."
            )
        self._rewards, self.value = [], value
        logger.warning(
            f"`bad_reward_threshold` is not set. It is now {value:g}: {share:.1%} of the first {rewards.size} rewards are under it. From here "
            "on such completions are pushed down. Read some (`log_completions=True`), and set `bad_reward_threshold` to what you call bad."
        )

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, for JSON."""
        return {"value": self.value, "rewards": self._rewards}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restores what [`state`] gave."""
        self.value, self._rewards = state["value"], state["rewards"]
