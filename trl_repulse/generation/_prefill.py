"""Sampling several completions of a prompt that is read once."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from .._adapters import base_of, takes
from ._cache import growing_cache, has_cache, to_generate, with_cache
from ._padding import padded_outputs


@contextlib.contextmanager
def generating_by(model: nn.Module, generate: Callable[..., Any]) -> Iterator[None]:
    """Context in which `model.generate` is another function; what was there before comes back, whatever happens."""
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
    """
    Context in which `model.generate` reads a prompt once for all neighbouring rows of a batch that begin with it.

    All but the last token of each different prompt goes through the model; what it has cached is repeated for the rows, and
    `generate` goes on from there. Draws with the same random numbers are the same, but for rounding.

    Args:
        model ([`~transformers.PreTrainedModel`] or `peft.PeftModel`):
            Model whose cache can be repeated, as [`~trl_repulse.generation._probe.reads_prompts_once`] finds out.
        everywhere (`Callable`, *optional*, defaults to `bool`):
            Whether something holds in all processes that call `generate`. They make the same passes if their weights are
            partitioned.
    """
    base = base_of(model)
    generate = base.generate

    def generate_from_cache(*args: Any, **kwargs: Any) -> Any:
        ids, mask = kwargs.get("input_ids"), kwargs.get("attention_mask")
        if args or ids is None or mask is None or has_cache(kwargs):
            return generate(*args, **kwargs)
        new = torch.ones_like(ids[:, 0], dtype=torch.bool)  # rows whose prompt is not that of the row before
        new[1:] = ((ids[1:] != ids[:-1]) | (mask[1:] != mask[:-1])).any(dim=1)
        if not everywhere(ids.size(1) > 1 and not bool(new.all())):
            return generate(**kwargs)
        cache = growing_cache(base)
        last = {"logits_to_keep": 1} if takes(base, "logits_to_keep") else {}
        padded_outputs(base, ids[new, :-1], mask[new, :-1], **with_cache(base, cache), **last)
        cache.batch_select_indices(new.cumsum(dim=0) - 1)
        return generate(**kwargs | to_generate(cache))

    with generating_by(base, generate_from_cache):
        yield
