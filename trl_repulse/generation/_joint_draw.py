"""Two sets of completions in one call of `generate`: a model's own, and others of the same model by another sampler."""

from itertools import compress
from typing import Any

from ._samplers import Sampler


class JointDraw:
    """
    One draw of a trainer's own completions and of others, which are kept until they are asked for.

    Args:
        own, others (`int`):
            Neighbouring rows of a prompt that are the trainer's own, and how many others it gets.
        sampler ([`Sampler`]):
            What draws the others.
    """

    def __init__(self, own: int, others: int, sampler: Sampler):
        self.own, self.others, self.sampler = own, others, sampler
        self.is_drawn = False
        self._prompts: list[list[int]] | None = None  # those of the others
        self._completions: Any = None

    def widened(self, prompts: list[list[int]]) -> tuple[list[list[int]], list[bool]]:
        """The rows to draw, each prompt's own before its others, and which are others."""
        blocks = [prompts[i : i + self.own] for i in range(0, len(prompts), self.own)]
        rows = [row for block in blocks for row in [*block, *[block[0]] * self.others]]
        return rows, ([False] * self.own + [True] * self.others) * len(blocks)

    def split(self, prompts: list[list[int]], drawn: Any) -> Any:
        """The trainer's own among what TRL drew for [`widened`] rows, as TRL returns them; the others are kept."""
        completions, *rest = drawn  # log-probabilities, `None` without vLLM (TRL 1.16)
        is_own = [i % (self.own + self.others) < self.own for i in range(len(prompts))]
        others = [not own for own in is_own]
        self._prompts = list(compress(prompts, others))
        self._completions = (list(compress(completions, others)), *rest)
        self.is_drawn = True
        return list(compress(completions, is_own)), *rest

    def take(self, prompts: list[list[int]]) -> Any:
        """The others, once, as TRL returns completions; `None` if they were drawn for other prompts."""
        if self._prompts != prompts:
            return None
        completions, self._prompts, self._completions = self._completions, None, None
        return completions
