"""Prompts of unequal length in one batch: what stands left of the shorter ones, and models that cannot ignore it."""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from accelerate.utils import is_peft_model
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ._vocabulary import vocab_size
from .exact import _evaluating


_PROBED = 3  # tokens, and as many of padding


def padding_token(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, end: Sequence[int]) -> int:
    """What fills a batch up: masked, so that any token does that the model can read; a tokenizer may have more."""
    known = [i for i in (tokenizer.pad_token_id, *end) if i is not None and i < vocab_size(model)]
    return known[0] if known else 0


def padded_logits(model: nn.Module, ids: torch.Tensor, mask: torch.Tensor, **options: Any) -> torch.Tensor:
    """Logits of rows that are padded on the left, whose positions count from the first real token."""
    base = model.get_base_model() if is_peft_model(model) else model
    if "position_ids" in inspect.signature(type(base).forward).parameters:
        options["position_ids"] = (mask.cumsum(dim=1) - 1).clamp(min=0)
    return model(input_ids=ids, attention_mask=mask, **options).logits


def reads_padding(model: nn.Module) -> bool:
    """
    Whether a model's predictions depend on masked padding before the prompt, as those of RWKV and RecurrentGemma do.

    A few tokens are scored behind two different paddings, which must make no difference but the last digits, and alone.

    Args:
        model ([`~transformers.PreTrainedModel`] or `peft.PeftModel`):
            Causal language model. Its training mode is restored.

    Returns:
        `bool`: If `True`, no batch may hold prompts of different lengths.
    """
    device, size = next(model.parameters()).device, vocab_size(model)
    row = torch.arange(_PROBED, device=device) + size // 3  # the first and the last are often no words
    padding = torch.full_like(row, size // 2)
    rows = torch.stack([torch.cat([padding, row]), torch.cat([padding + 1, row])]) % size
    mask = torch.ones_like(rows)
    mask[:, :_PROBED] = 0
    with _evaluating(model):
        padded = padded_logits(model, rows, mask)[:, _PROBED:].float().log_softmax(dim=-1)
        alone = padded_logits(model, rows[:1, _PROBED:], mask[:1, _PROBED:])
    rounding = torch.finfo(alone.dtype).eps
    alone = alone[0].float().log_softmax(dim=-1)
    # Of another width the same sums are rounded otherwise
    return not (
        torch.allclose(padded[0], padded[1], rtol=4 * rounding, atol=4 * rounding, equal_nan=True)
        and torch.allclose(padded[0], alone, rtol=0.1, atol=0.1, equal_nan=True)
    )


def batches(prompt_ids: Sequence[Sequence[int]], batch_size: int, equal: bool) -> list[list[int]]:
    """
    Places of prompts, batch by batch.

    Args:
        prompt_ids (`Sequence[Sequence[int]]`):
            Tokens of the prompts.
        batch_size (`int`):
            Prompts of one batch.
        equal (`bool`):
            Whether a batch holds prompts of one length only; if not, it holds neighbours.

    Returns:
        `list[list[int]]`: Each place once.
    """
    groups: dict[int, list[int]] = {}
    for place, ids in enumerate(prompt_ids):
        groups.setdefault(len(ids) if equal else 0, []).append(place)
    return [group[i : i + batch_size] for group in groups.values() for i in range(0, len(group), batch_size)]
