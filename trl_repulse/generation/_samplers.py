"""Ways of drawing from a language model whose log-probabilities follow from its logits, alone or two in one call."""

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import compress
from typing import Any

import torch
from torch import nn
from transformers import LogitsProcessor, LogitsProcessorList

from ..models._adapters import base_of
from ._cache import generating_by


@dataclass(frozen=True, eq=False)
class Sampler:
    """
    Draws each token from softmax(z / `temperature` + `bias`), z being the logits of the model.

    Args:
        temperature (`float`, *optional*, defaults to `1.0`):
            Temperature.
        bias (`torch.Tensor` of shape `(V,)`, *optional*):
            What is added to the logits of each token, nats.
    """

    temperature: float = 1.0
    bias: torch.Tensor | None = None

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits `(..., V)` as this sampler has them."""
        logits = logits if self.temperature == 1.0 else logits / self.temperature
        return logits if self.bias is None else logits + self.bias.to(logits)

    @property
    def head_bias(self) -> torch.Tensor | None:
        """The bias of logits that are divided by `temperature` afterwards."""
        return None if self.bias is None else self.bias * self.temperature


POLICY = Sampler()  # a model as it is


class RowSamplers(LogitsProcessor):
    """Draws the rows of a batch that `others` marks by another sampler."""

    def __init__(self, others: list[bool], sampler: Sampler):
        self.others, self.sampler = torch.tensor(others).unsqueeze(1), sampler

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return torch.where(self.others.to(scores.device), self.sampler(scores), scores)


@contextlib.contextmanager
def rows_drawn_by(model: nn.Module, others: list[bool], sampler: Sampler) -> Iterator[None]:
    """Context in which `model.generate` draws the `others` among the rows of its batches by another sampler."""
    base = base_of(model)
    generate = base.generate

    def generate_by(*args: Any, **kwargs: Any) -> Any:
        processors = LogitsProcessorList([RowSamplers(others, sampler), *kwargs.pop("logits_processor", ())])
        return generate(*args, **kwargs, logits_processor=processors)

    with generating_by(base, generate_by):
        yield


class InverseTransform(LogitsProcessor):
    """
    Draws the next token of each row by inverting the cumulative distribution, and leaves a finite score to it alone, so that
    greedy decoding takes it. Sums are in float64: in float32 a token with a probability below 6e-8 could be lost.
    """

    def __init__(self, temperature: float = 1.0):
        self.temperature = temperature

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        cumulative = (scores / self.temperature).softmax(dim=-1).cumsum(dim=-1, dtype=torch.float64)
        drawn = torch.rand_like(cumulative[:, :1]) * cumulative[:, -1:]
        tokens = torch.searchsorted(cumulative, drawn, right=True).clamp(max=scores.size(-1) - 1)
        return torch.full_like(scores, -torch.inf).scatter_(1, tokens, 0.0)


# Vocabularies from which a CPU draws by inversion: `torch.multinomial` makes a random number for each token of the vocabulary,
# which takes longer than a small model
_LARGE_VOCABULARY = 8192
_NEUTRAL = {
    **{"do_sample": (True,), "num_beams": (None, 1), "top_k": (None, 0), "top_p": (None, 1.0), "min_p": (None, 0.0)},
    **{"typical_p": (None, 1.0), "epsilon_cutoff": (None, 0.0), "eta_cutoff": (None, 0.0), "top_h": (None,)},
}


@contextlib.contextmanager
def drawn_by_inversion(model: nn.Module) -> Iterator[None]:
    """
    Context in which `model.generate` draws by [`InverseTransform`] on a CPU, if the vocabulary is large and all tokens may be
    drawn. The distribution is the same; random numbers are others.
    """
    base = base_of(model)
    generate = base.generate
    large = base.config.get_text_config(decoder=True).vocab_size >= _LARGE_VOCABULARY

    def generate_by_inversion(*args: Any, generation_config: Any = None, **kwargs: Any) -> Any:
        config = generation_config
        plain = config is not None and all(
            getattr(config, name, None) in allowed for name, allowed in _NEUTRAL.items()
        )
        if not (plain and large and base.device.type == "cpu") or not _NEUTRAL.keys().isdisjoint(kwargs):
            return generate(*args, generation_config=config, **kwargs)
        greedy = copy.copy(config)
        greedy.update(do_sample=False, temperature=None, top_k=None, top_p=None, min_p=None, typical_p=None)
        last = InverseTransform(1.0 if config.temperature is None else config.temperature)
        processors = LogitsProcessorList([*kwargs.pop("logits_processor", ()), last])
        return generate(*args, generation_config=greedy, logits_processor=processors, **kwargs)

    with generating_by(base, generate_by_inversion):
        yield


class JointDraw:
    """
    One call of `generate` for `own` neighbouring rows of a prompt and for `others` by `sampler`.

    The first call of [`draw`] draws both and returns the own rows; the first one after [`expect_others`] returns the others. Calls
    between them, as for further turns of a conversation with tools, draw what they are asked for.
    """

    def __init__(self, own: int, others: int, sampler: Sampler):
        self.own, self.others, self.sampler = own, others, sampler
        self._next: str | None = "own"
        self._prompts: list[list[int]] = []  # those of the others
        self._completions: Any = None

    def expect_others(self) -> None:
        """Returns the others from the next call of [`draw`]."""
        self._next = "others"

    def draw(self, prompts: list[list[int]], generate: Callable[..., Any]) -> Any:
        """
        Draws for prompts as `generate` does, and returns what it returns.

        Args:
            prompts (`list[list[int]]`): Tokens of the prompts, one a row.
            generate (`Callable`): Takes prompts and, as `drawn_by`, a mask of the rows that another sampler draws, and that sampler.
        """
        asked, self._next = self._next, None
        if asked is None:
            return generate(prompts)
        if asked == "others":
            if prompts != self._prompts:
                raise RuntimeError("Extra samples were drawn for other prompts than they are asked for.")
            completions, self._prompts, self._completions = self._completions, [], None
            return completions
        blocks = [prompts[i : i + self.own] for i in range(0, len(prompts), self.own)]
        rows = [row for block in blocks for row in [*block, *[block[0]] * self.others]]
        is_other = ([False] * self.own + [True] * self.others) * len(blocks)
        completions, *rest = generate(
            rows, drawn_by=(is_other, self.sampler)
        )  # log-probabilities, `None` without vLLM (TRL 1.16)
        self._prompts = list(compress(rows, is_other))
        self._completions = (list(compress(completions, is_other)), *rest)
        return list(compress(completions, [not other for other in is_other])), *rest
