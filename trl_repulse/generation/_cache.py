"""Key-value caches with room for further tokens, and sampling several completions from a prompt that is read once."""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from transformers import Cache, DynamicCache, GenerationMixin
from transformers.cache_utils import DynamicLayer

from ..models._adapters import base_of, takes
from ._batches import padded_outputs


# transformers 5.24 renamed it for its models and `generate`; other models may have the old name
_NAMES = ("cache", "past_key_values")
_IN_GENERATE = _NAMES["cache" not in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters]
_ROOM = 32  # tokens


class GrowingLayer(DynamicLayer):
    """Keys and values of a layer with spare room for many tokens. A [`~transformers.cache_utils.DynamicLayer`]
    copies everything for each token. Here a pass writes into tensors that the pass before returned, so with
    gradients the layer copies as well."""

    def __init__(self) -> None:
        super().__init__()
        self._rooms: tuple[torch.Tensor, torch.Tensor] | None = None  # (B, H, tokens, D) each
        self._seen: torch.Tensor | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds keys (B, H, T, D) and values (B, H, T, E) of T tokens; returns those of all tokens."""
        if torch.is_grad_enabled():
            return super().update(key_states, value_states, *args, **kwargs)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start = self.get_seq_length()
        end = start + key_states.size(-2)
        # Selecting rows or removing tokens makes new tensors
        fits = self._rooms is not None and self.keys is self._seen and end <= self._rooms[0].size(-2)
        if not fits or key_states.dtype != self.keys.dtype:
            self._rooms = self._room(key_states, self.keys, end), self._room(value_states, self.values, end)
        for room, states in zip(self._rooms, (key_states, value_states), strict=True):
            room[..., start:end, :] = states
        self.keys, self.values = (room[..., :end, :] for room in self._rooms)
        self._seen = self.keys
        return self.keys, self.values

    def _room(self, states: torch.Tensor, held: torch.Tensor, end: int) -> torch.Tensor:
        dtype = torch.promote_types(states.dtype, held.dtype)
        room = states.new_empty(*states.shape[:-2], end + _ROOM, states.size(-1), dtype=dtype)
        if self.get_seq_length():
            room[..., : held.size(-2), :] = held
        return room


def growing_cache(model: nn.Module) -> DynamicCache:
    """An empty cache for a model; layers that keep all tokens grow in place."""
    cache = DynamicCache(config=base_of(model).config.get_text_config(decoder=True))
    cache.layers = [GrowingLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def with_cache(model: nn.Module, cache: Cache | None) -> dict[str, Any]:
    """Arguments of a model's `forward` for a cache, or for none."""
    return {_NAMES[not takes(model, "cache")]: cache, "use_cache": cache is not None}


def _read_once(model: nn.Module, ids: torch.Tensor, mask: torch.Tensor, rows: torch.Tensor) -> DynamicCache:
    """The cache of left-padded prompts (P, L) without their last tokens, for rows (B,) that have a prompt each."""
    cache = growing_cache(model)
    last = {"logits_to_keep": 1} if takes(model, "logits_to_keep") else {}
    padded_outputs(model, ids[:, :-1], mask[:, :-1], **with_cache(model, cache), **last)
    cache.batch_select_indices(rows)
    return cache


def logits_after_prompts(
    model: nn.Module, prompts: tuple[torch.Tensor, ...], rows: torch.Tensor, completions: tuple[torch.Tensor, ...]
) -> torch.Tensor:
    """Logits (B, T, V) of completions, whose prompts go through the model once each: tokens and mask of left-padded
    prompts, (P, L) with L > 1, the prompt of each completion, (B,), and tokens and mask of right-padded completions, (B, T)."""
    cache = _read_once(model, *prompts, rows)
    # The last token of a prompt and all but the last of a completion predict the completion
    ids = torch.cat([prompts[0][rows, -1:], completions[0][:, :-1]], dim=1)
    mask = torch.cat([prompts[1][rows], completions[1][:, :-1]], dim=1)
    return padded_outputs(model, ids, mask, **with_cache(model, cache)).logits


def to_generate(cache: Cache) -> dict[str, Cache]:
    """Arguments of `generate` that continue from a cache."""
    return {_IN_GENERATE: cache}


@contextlib.contextmanager
def generating_by(model: nn.Module, generate: Callable[..., Any]) -> Iterator[None]:
    """Context in which another function replaces `model.generate`."""
    before = vars(model).get("generate")
    model.generate = generate
    try:
        yield
    finally:
        if before is None:
            del model.generate
        else:
            model.generate = before


@contextlib.contextmanager
def prompts_read_once(model: nn.Module, everywhere: Callable[[bool], bool] = bool) -> Iterator[None]:
    """Context in which `model.generate` reads a prompt once for neighbouring rows that share it. All but the last
    token of each distinct prompt goes through the model; the cache is repeated for the rows, and `generate`
    continues from it. With the same random numbers the same tokens are drawn, up to rounding. `everywhere` says
    whether a condition holds in all processes: with partitioned weights they must make the same passes."""
    base = base_of(model)
    generate = base.generate

    def generate_from_cache(*args: Any, **kwargs: Any) -> Any:
        ids, mask = kwargs.get("input_ids"), kwargs.get("attention_mask")
        if args or ids is None or mask is None or any(kwargs.get(name) is not None for name in _NAMES):
            return generate(*args, **kwargs)
        new = torch.ones_like(ids[:, 0], dtype=torch.bool)  # rows whose prompt is not that of the row before
        new[1:] = ((ids[1:] != ids[:-1]) | (mask[1:] != mask[:-1])).any(dim=1)
        if not everywhere(ids.size(1) > 1 and not bool(new.all())):
            return generate(**kwargs)
        cache = _read_once(base, ids[new], mask[new], new.cumsum(dim=0) - 1)
        return generate(**kwargs | to_generate(cache))

    with generating_by(base, generate_from_cache):
        yield
