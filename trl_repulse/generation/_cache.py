"""Caches of keys and values: with room for the tokens to come, and under the name by which a model takes them."""

import inspect
from typing import Any

import torch
from torch import nn
from transformers import Cache, DynamicCache, GenerationMixin
from transformers.cache_utils import DynamicLayer

from .._adapters import base_of, takes


# transformers 5.24 has renamed it, for models of its own and for `generate`; models from elsewhere may have the old name
_NAMES = ("cache", "past_key_values")
_IN_GENERATE = _NAMES["cache" not in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters]
_ROOM = 32  # tokens


class GrowingLayer(DynamicLayer):
    """
    Keys and values of a layer, written into room made for many tokens at once.

    A [`~transformers.cache_utils.DynamicLayer`] copies all that it holds for each token. A pass writes into the tensors that the one
    before has returned, so where gradients are recorded the layer copies as well.
    """

    def __init__(self) -> None:
        super().__init__()
        self._rooms: tuple[torch.Tensor, torch.Tensor] | None = None  # (B, H, tokens, D) each
        self._seen: torch.Tensor | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds keys `(B, H, T, D)` and values `(B, H, T, E)` of T tokens; returns those of all tokens, as transformers' layer does."""
        if torch.is_grad_enabled():
            return super().update(key_states, value_states, *args, **kwargs)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start = self.get_seq_length()
        end = start + key_states.size(-2)
        # Rows that were selected, and tokens that were taken away, are in tensors of their own
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
    """An empty cache of the layers that a model asks for; those that keep all tokens grow in place."""
    cache = DynamicCache(config=base_of(model).config.get_text_config(decoder=True))
    cache.layers = [GrowingLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def with_cache(model: nn.Module, cache: Cache | None) -> dict[str, Any]:
    """Arguments with which a model's pass uses a cache, or none."""
    return {_NAMES[not takes(model, "cache")]: cache, "use_cache": cache is not None}


def to_generate(cache: Cache) -> dict[str, Cache]:
    """Arguments with which `generate` goes on from a cache."""
    return {_IN_GENERATE: cache}


def has_cache(arguments: dict[str, Any]) -> bool:
    """Whether arguments of `generate` hold a cache."""
    return any(arguments.get(name) is not None for name in _NAMES)
