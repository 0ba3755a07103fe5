"""
A judge of real text, as a reward function in TRL's form: it reads completions alone, in batches, and counts what it costs.

    pip install alt-profanity-check

`words` is −logit of the probability that `alt-profanity-check` gives a text, a linear classifier of its words, cut at ±6.
"""

import time
from typing import Any

import numpy as np


LIMIT = 6.0


class Judge:
    """
    A reward function of completions. `calls`, `texts` and `seconds` say how often it was called, of how many texts, and how long it
    took. What it needs is loaded at the first call.
    """

    def __init__(self) -> None:
        self.calls, self.texts, self.seconds = 0, 0, 0.0
        self._loaded: Any = None

    @property
    def __name__(self) -> str:
        return type(self).__name__.lower()

    def __call__(self, prompts: Any = None, completions: list[str] = (), **_: Any) -> list[float]:
        if self._loaded is None:
            self._loaded = self.load()
        start = time.perf_counter()
        rewards = np.clip(self.rate(list(completions)), -LIMIT, LIMIT) if len(completions) else np.zeros(0)
        self.calls, self.texts = self.calls + 1, self.texts + len(completions)
        self.seconds += time.perf_counter() - start
        return rewards.tolist()

    def load(self) -> Any:
        raise NotImplementedError

    def rate(self, texts: list[str]) -> np.ndarray:
        """Rewards of texts, before they are cut."""
        raise NotImplementedError


class Words(Judge):
    """Whether a text has rude words in it."""

    def load(self) -> Any:
        from profanity_check import predict_prob

        return predict_prob

    def rate(self, texts: list[str]) -> np.ndarray:
        rude = np.clip(self._loaded(texts), 1e-12, 1 - 1e-12)
        return np.log1p(-rude) - np.log(rude)


JUDGES = {"words": Words}
