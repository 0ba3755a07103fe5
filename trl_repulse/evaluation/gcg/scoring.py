"""
Losses of suffixes under a model and their gradient, reusing keys and values where the model's cache allows it.

Axis letters: P tokens before the suffix, S of the suffix, A after it, T of the target; B suffixes, V vocabulary, H heads,
D dimensions of a head.
"""

import inspect
import logging
import math
from typing import Any

import torch
import torch.nn.functional as F
from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size
from torch import nn
from transformers import DynamicCache, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from ...generation._cache import with_cache
from .prompt import AttackPrompt


logger = logging.getLogger(__name__)

# Keys and values of each layer, (B, H, tokens, D)
KeyValues = list[tuple[torch.Tensor, torch.Tensor]]
# Relative difference allowed between losses with and without a cache
_TOLERANCE = {torch.float16: 0.02, torch.bfloat16: 0.05}


class GCGError(RuntimeError):
    """An attack that cannot go on: no candidate survives the round trip, a loss is not finite, or the prompt is too long."""


def check_context(config: PretrainedConfig, prompt: int, more: int) -> None:
    """Raises [`GCGError`] if a prompt of so many tokens, with as many more, exceeds the model's context."""
    context = getattr(config.get_text_config(), "max_position_embeddings", None)
    if context is not None and prompt + more > context:
        raise GCGError(
            f"The prompt with its suffix has {prompt} tokens, which with {more} more exceed the model's context of {context}."
        )


def finite(losses: torch.Tensor) -> torch.Tensor:
    """The same losses; raises [`GCGError`] if one is NaN or infinite."""
    if not losses.isfinite().all():
        raise GCGError(f"A loss is {losses[~losses.isfinite()][0].item()}; try the model in float32.")
    return losses


class SuffixScorer:
    """
    Losses of suffixes in one prompt.

    Keys and values of the tokens before the suffix are computed once. Those of a candidate's unchanged first tokens come from
    the last observed suffix: candidates are sorted by the first changed position, and a micro-batch starts at its lowest one.

    Args:
        model ([`~transformers.PreTrainedModel`]):
            The model, in evaluation mode.
        prompt ([`~trl_repulse.evaluation.gcg.prompt.AttackPrompt`]):
            The prompt around the suffixes.
        micro_batch_size (`int`):
            Suffixes of one forward pass. Halved permanently when memory runs out.
        mellowmax (`float`, *optional*):
            Inverse temperature of the mellowmax over target tokens; if unset, the loss is their mean.
    """

    def __init__(
        self, model: PreTrainedModel, prompt: AttackPrompt, micro_batch_size: int, mellowmax: float | None = None
    ):
        self.model, self.prompt, self.micro_batch_size = model, prompt, micro_batch_size
        self._mellowmax, self._reuse = mellowmax, False
        self._embedding: Any = model.get_input_embeddings()
        self._before, self._after, self._target = (
            torch.tensor([ids], dtype=torch.long, device=model.device)
            for ids in (prompt.before_ids, prompt.after_ids, prompt.target_ids)
        )
        parameters = inspect.signature(model.forward).parameters
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        self._keep = {"logits_to_keep": len(prompt.target_ids)} if "logits_to_keep" in parameters or takes_all else {}
        # Keys and values of the prefix, and of the whole prompt with the suffix observed last
        self._prefix: KeyValues | None = None
        self._observed: tuple[torch.Tensor, KeyValues] | None = None

    def enable_cache(self, ids: torch.Tensor, reuse_suffix_kv: bool) -> None:
        """
        Turns the cache on if losses with and without it agree for a suffix `ids` (S,), and warns otherwise. With
        `reuse_suffix_kv`, the suffix's keys and values are kept too.
        """
        pair = torch.stack([ids, ids])
        pair[1, -1] = (ids[-1] + 1) % self._embedding.weight.shape[0]
        plain = torch.cat([self.losses(row[None]) for row in pair])  # one by one, as a cache can mix rows
        tolerance = _TOLERANCE.get(self.model.dtype, 1e-3)
        try:
            cache = (
                DynamicCache()
            )  # without the configuration: sliding windows are masked, not cut, and views stay valid
            if self._before.shape[1]:
                with torch.no_grad():
                    self.model(input_ids=self._before, **with_cache(self.model, cache))
            self._reuse, self._prefix = reuse_suffix_kv, _as_key_values(cache)
            self.observe(ids)
            cached = self.losses(pair)
            if torch.allclose(cached, plain, rtol=tolerance, atol=tolerance):
                return
            reason = f"losses {cached.tolist()} with it, {plain.tolist()} without"
        except Exception as error:  # caches of other kinds fail in many ways
            if should_reduce_batch_size(error):
                raise
            reason = f"{type(error).__name__}: {error}"
        self._prefix = self._observed = None
        logger.warning(
            "The cache of %s cannot be used for the attack (%s); everything is computed anew for every candidate.",
            type(self.model).__name__,
            reason,
        )

    @torch.no_grad()
    def observe(self, ids: torch.Tensor) -> None:
        """Keeps the keys and values of a suffix (S,), for candidates made from it. [`gradient`] does so too."""
        if self._prefix is not None and self._reuse:
            self._forward(ids[None], keep=True)

    def gradient(self, ids: torch.Tensor) -> tuple[torch.Tensor, bool]:
        """
        Gradient (S, V) of the loss with respect to the one-hot tokens of a suffix (S,), on the model's device, and whether
        greedy decoding after the suffix gives the target. Taken at the output of the embedding.
        """
        leaves: list[torch.Tensor] = []

        def cut(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
            leaves.append(output.detach().requires_grad_())
            return leaves[-1]

        handle = self._embedding.register_forward_hook(cut)
        try:
            with torch.enable_grad():
                logits = self._forward(ids[None], keep=True)
                loss = self._loss(logits)[0]
        finally:
            handle.remove()
        start = 0 if self._prefix is not None else len(self.prompt.before_ids)
        with torch.no_grad():
            (gradient,) = torch.autograd.grad(loss, leaves)
            table = self._embedding.weight  # (V, features)
            if type(self._embedding) is not nn.Embedding:  # some models scale the weights
                table = self._embedding(torch.arange(len(table), device=self.model.device))
            gradient = gradient[0, start : start + len(ids)] @ table.T
        return gradient, self._matches(logits)

    @torch.no_grad()
    def matches(self, ids: torch.Tensor) -> bool:
        """Whether greedy decoding after a suffix (S,) gives the target."""
        return self._matches(self._forward(ids[None]))

    @torch.no_grad()
    def losses(self, candidates: torch.Tensor) -> torch.Tensor:
        """Losses (B,) of suffixes (B, S) in nats, float32, on the CPU."""
        starts = torch.zeros(len(candidates), dtype=torch.long)
        if self._observed is not None:
            # First changed position, but the token before the target must be computed for its logits
            last = candidates.shape[1] + len(self.prompt.after_ids) - 1
            starts = (candidates == self._observed[0]).long().cumprod(dim=1).sum(dim=1).clamp(max=last)
        order = starts.argsort(stable=True)
        losses = torch.empty(len(candidates))
        done = 0
        while done < len(order):
            chosen = order[done : done + self.micro_batch_size]
            try:
                losses[chosen] = self._loss(self._forward(candidates[chosen], int(starts[chosen[0]]))).cpu()
            except RuntimeError as error:
                if len(chosen) == 1 or not should_reduce_batch_size(error):
                    raise
                self.micro_batch_size = len(chosen) // 2
                clear_device_cache(garbage_collection=True)
                continue
            done += len(chosen)
        return losses

    def _matches(self, logits: torch.Tensor) -> bool:
        return bool((logits[0].argmax(-1) == self._target[0]).all())

    def _forward(self, suffixes: torch.Tensor, start: int = 0, keep: bool = False) -> torch.Tensor:
        """
        Logits that predict the target, (B, T, V), float32. Tokens before `start` come from the observed suffix. `keep` makes
        the suffix, one row, the observed one.
        """
        count = len(suffixes)
        tail = torch.cat([self._after, self._target[:, :-1]], dim=1).expand(count, -1)
        ids = torch.cat([suffixes.to(tail.device), tail], dim=1)[:, start:]
        past = self._prefix
        if start > 0 and self._observed is not None:
            end = len(self.prompt.before_ids) + start
            past = [(keys[:, :, :end], values[:, :, :end]) for keys, values in self._observed[1]]
        cache = None
        if past is None:
            ids = torch.cat([self._before.expand(count, -1), ids], dim=1)
        else:
            cache = _as_cache(past, count)
        outputs = self.model(input_ids=ids, **with_cache(self.model, cache), **self._keep)
        if keep and cache is not None and self._reuse:
            self._observed = (suffixes[0].cpu(), _as_key_values(cache))
        return outputs.logits[:, -self._target.shape[1] :].float()

    def _loss(self, logits: torch.Tensor) -> torch.Tensor:
        """Losses of shape (B,) from logits of shape (B, T, V)."""
        targets = self._target.expand(len(logits), -1)
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)
        if self._mellowmax is None:
            return losses.mean(dim=1)
        return ((self._mellowmax * losses).logsumexp(dim=1) - math.log(losses.shape[1])) / self._mellowmax


def _as_key_values(cache: Any) -> KeyValues:
    return [(layer.keys.detach(), layer.values.detach()) for layer in cache.layers]


def _as_cache(past: KeyValues, count: int) -> DynamicCache:
    """A cache for `count` rows made of views; what the model appends is copied."""
    cache = DynamicCache()
    for keys, values in past:
        layer = DynamicLayer()
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = (x.expand(count, -1, -1, -1) for x in (keys, values))
        cache.layers.append(layer)
    return cache
