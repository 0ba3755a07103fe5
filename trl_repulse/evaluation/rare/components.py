"""What draws completions of a policy: the policy, proposals, and the policy changed in ways whose density is known.

Axis letters: B rows, T completion tokens, V vocabulary.
"""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from transformers import Cache, LogitsProcessor, PreTrainedModel

from ...configs._checks import require, require_at_least
from ...generation.drawing import Sampler, growing_cache, processed_by, with_cache
from ...models._adapters import in_mode


@dataclass(frozen=True, eq=False)
class Component:
    """
    A part of the mixture.

    Each of the first `tokens` tokens is drawn from softmax(((1 − share) · log p + share · log q) / temperature + bias), where p is
    the policy and q is `model`. Later tokens are drawn from p.

    Args:
        model ([`~transformers.PreTrainedModel`]): q: the policy, a proposal, or a reference model.
        share (`float`, *optional*, defaults to `1.0`): Weight of q in the geometric mean with the policy.
        temperature (`float`, *optional*, defaults to `1.0`): Temperature.
        bias (`torch.Tensor` of shape `(V,)`, *optional*): What is added to each token's logit, nats.
        tokens (`int`, *optional*): Number of first tokens that are changed, by default all.
    """

    model: PreTrainedModel
    share: float = 1.0
    temperature: float = 1.0
    bias: torch.Tensor | None = None
    tokens: int | None = None

    def __post_init__(self) -> None:
        require(self, 0 < self.temperature < math.inf, "temperature", "must be above 0, and finite")
        require(self, 0 < self.share <= 1, "share", "must be above 0, and at most 1")
        require_at_least(self, 1, "tokens")

    def logits(self, of_policy: torch.Tensor, of_model: torch.Tensor) -> torch.Tensor:
        """Logits (..., V) of the tokens that are changed, from logits (..., V) of the policy and of `model`."""
        logits = of_model if self.share == 1 else (1 - self.share) * of_policy + self.share * of_model
        return Sampler(self.temperature, self.bias)(logits)

    def log_prob(
        self, of_policy: torch.Tensor, of_model: torch.Tensor, completion: torch.Tensor, counts: torch.Tensor
    ) -> torch.Tensor:
        """Log-probabilities (B,) of completions (B, T), nats, float64, from logits (B, T, V) of the policy and of
        `model`. `counts` (B, T) says which tokens count."""
        end = completion.size(1) if self.tokens is None else self.tokens
        logits = self.logits(of_policy[:, :end], of_model[:, :end])
        if end < completion.size(1):
            logits = torch.cat([logits, of_policy[:, end:]], dim=1)
        return log_prob(logits, completion, counts)

    @property
    def draws_alone(self) -> bool:
        """Whether `model` draws whole completions without the policy's logits."""
        return self.share == 1 and self.tokens is None

    @property
    def changes_nothing(self) -> bool:
        """Whether it draws from its model as it is."""
        return self.draws_alone and self.temperature == 1 and self.bias is None


def log_prob(logits: torch.Tensor, completion: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Log-probabilities (B,), nats, float64, of the tokens of completions (B, T) that count (B, T), from logits (B, T, V)."""
    chosen = logits.gather(-1, completion.unsqueeze(-1)).squeeze(-1) - logits.logsumexp(dim=-1)
    return chosen.masked_fill(~counts, 0.0).double().sum(dim=1)


class _Changed(LogitsProcessor):
    """A component's logits in place of those of the model that generates, behind prompts of `length` tokens. `reads_model` says whether
    the component's own model must be run beside that one."""

    def __init__(self, component: Component, reads_model: bool, length: int, use_cache: bool):
        self.component, self.reads_model, self.length, self.use_cache = component, reads_model, length, use_cache
        self.cache: Cache | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Logits (B, V) of the next token, from those of the model that generates, `scores` (B, V), and its tokens so far."""
        drawn = input_ids.size(1) - self.length
        if self.component.tokens is not None and drawn >= self.component.tokens:
            return scores
        return self.component.logits(scores, self._read(input_ids, drawn == 0) if self.reads_model else scores)

    def _read(self, input_ids: torch.Tensor, is_first: bool) -> torch.Tensor:
        """Logits (B, V) of the next token under the component's own model."""
        model = self.component.model
        if is_first:
            self.cache = growing_cache(model) if self.use_cache else None
        ids = input_ids if is_first or self.cache is None else input_ids[:, -1:]
        with torch.no_grad(), in_mode(model, training=False):
            return model(input_ids=ids, logits_to_keep=1, **with_cache(model, self.cache)).logits[:, -1].float()


@contextlib.contextmanager
def drawn_by(policy: PreTrainedModel, component: Component, length: int, use_cache: bool) -> Iterator[PreTrainedModel]:
    """Context with the model whose `generate` draws as a component does, behind prompts of `length` tokens without
    padding. `use_cache` says whether the component's model may use a cache."""
    model = component.model if component.draws_alone else policy
    if component.changes_nothing:
        yield model
        return
    with processed_by(model, _Changed(component, component.model is not model, length, use_cache)):
        yield model
