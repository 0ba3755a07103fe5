"""Two sets of completions in one call of `generate`: a model's own, and others of the same model by another sampler."""

from itertools import compress
from typing import Any

from ._samplers import Sampler


class Ahead:
    """
    What is drawn by another sampler in the call that draws a trainer's own completions, kept until it is asked for.

    Args:
        own, others (`int`):
            Neighbouring rows of a prompt that are the trainer's own, and how many of it are drawn beside them.
        sampler ([`Sampler`]):
            What draws the others.
    """

    def __init__(self, own: int, others: int, sampler: Sampler):
        self.own, self.others, self.sampler = own, others, sampler
        self.prompts: list[list[int]] | None = None  # those of the others
        self.completions: Any = None

    def widened(self, prompts: list[list[int]]) -> tuple[list[list[int]], list[bool]]:
        """The rows to draw, each prompt's own before its others, and which are others."""
        blocks = [prompts[i : i + self.own] for i in range(0, len(prompts), self.own)]
        rows = [row for block in blocks for row in [*block, *[block[0]] * self.others]]
        return rows, ([False] * self.own + [True] * self.others) * len(blocks)

    def keep(self, prompts: list[list[int]], drawn: Any) -> Any:
        """Takes the others out of what TRL drew for [`widened`] rows; the trainer's own, as TRL returns them."""
        completions, *rest = drawn  # log-probabilities, `None` without vLLM (TRL 1.16)
        is_own = [i % (self.own + self.others) < self.own for i in range(len(prompts))]
        others = [not own for own in is_own]
        self.prompts = list(compress(prompts, others))
        self.completions = (list(compress(completions, others)), *rest)
        return list(compress(completions, is_own)), *rest

    def take(self, prompts: list[list[int]]) -> Any:
        """The others, as TRL returns completions, if they were drawn and for these prompts; else `None`."""
        return self.completions if self.prompts == prompts else None
