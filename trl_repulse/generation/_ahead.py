"""Two sets of completions in one call of `generate`: a model's own, and the same model's at another temperature."""

import contextlib
from collections.abc import Iterator
from itertools import compress
from typing import Any

import torch
from torch import nn
from transformers import LogitsProcessor, LogitsProcessorList

from .._adapters import base_of
from ._prefill import generating_by


class RowTemperatures(LogitsProcessor):
    """
    Divides each row's logits by a temperature of its own.

    Args:
        temperatures (`list[float]`):
            One for each row of the batch.
    """

    def __init__(self, temperatures: list[float]):
        self.temperatures = torch.tensor(temperatures).unsqueeze(1)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores / self.temperatures.to(scores)


@contextlib.contextmanager
def rows_at(model: nn.Module, temperatures: list[float]) -> Iterator[None]:
    """
    Context in which `model.generate` draws each row at a temperature of its own, on top of the configured one.

    Args:
        model ([`~transformers.PreTrainedModel`] or `peft.PeftModel`):
            Model that is sampled from.
        temperatures (`list[float]`):
            One for each row of the batches that are drawn inside.
    """
    base = base_of(model)
    generate = base.generate

    def generate_at(*args: Any, **kwargs: Any) -> Any:
        return generate(*args, **kwargs, logits_processor=LogitsProcessorList([RowTemperatures(temperatures)]))

    with generating_by(base, generate_at):
        yield


class Ahead:
    """
    What is drawn at another temperature in the call that draws a trainer's own completions, kept until it is asked for.

    Args:
        own, others (`int`):
            Neighbouring rows of a prompt that are the trainer's own, and how many of it are drawn beside them.
        temperature (`float`):
            Temperature of the others, relative to the trainer's.
    """

    def __init__(self, own: int, others: int, temperature: float):
        self.own, self.others, self.temperature = own, others, temperature
        self.prompts: list[list[int]] | None = None  # those of the others
        self.completions: Any = None

    def widened(self, prompts: list[list[int]]) -> tuple[list[list[int]], list[float]]:
        """The rows to draw, each prompt's own before its others, and their temperatures."""
        blocks = [prompts[i : i + self.own] for i in range(0, len(prompts), self.own)]
        rows = [row for block in blocks for row in [*block, *[block[0]] * self.others]]
        return rows, ([1.0] * self.own + [self.temperature] * self.others) * len(blocks)

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
