"""Prompts of unequal length in one batch: what stands left of the shorter ones, and batches without it."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .._adapters import takes


def vocab_size(model: PreTrainedModel) -> int:
    """How many tokens a model reads, and draws from."""
    return int(model.config.get_text_config().vocab_size)


def padding_token(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, end: Sequence[int]) -> int:
    """What fills a batch up: masked, so that any token does that the model can read; a tokenizer may have more."""
    known = [i for i in (tokenizer.pad_token_id, *end) if i is not None and i < vocab_size(model)]
    return known[0] if known else 0


def padded_outputs(model: nn.Module, ids: torch.Tensor, mask: torch.Tensor, **options: Any) -> Any:
    """Outputs for rows that are padded on the left, whose positions count from the first real token."""
    if takes(model, "position_ids"):
        options["position_ids"] = (mask.long().cumsum(dim=1) - 1).clamp(min=0)
    return model(input_ids=ids, attention_mask=mask, **options)


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


def without_padding(
    score: Callable[..., tuple[torch.Tensor | None, ...]],
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    *more: torch.Tensor,
) -> tuple[torch.Tensor | None, ...]:
    """
    Scores rows of one prompt length at a time, with no padding before them.

    Args:
        score (`Callable`):
            Function of tokens and mask of some rows, and of what else there is of them. Each of its results is a tensor with these rows, a mean over them, or
            `None`.
        input_ids, attention_mask (`torch.Tensor` of shape `(B, L + T)`):
            Left-padded prompts followed by right-padded completions.
        more (`torch.Tensor`):
            What else there is of each row, `(B, ...)`.

    Returns:
        `tuple`: What `score` gives for all rows, in their order.
    """
    starts = attention_mask.long().argmax(dim=1)  # (B,)
    groups = [(starts == start).nonzero()[:, 0] for start in starts.unique()]
    parts = [
        score(*(x[rows][:, starts[rows[0]] :] for x in (input_ids, attention_mask)), *(x[rows] for x in more))
        for rows in groups
    ]
    order = torch.cat(groups).argsort()
    shares = [len(rows) / len(starts) for rows in groups]
    return tuple(
        None
        if values[0] is None
        else torch.cat(values)[order]
        if values[0].dim()
        else sum(value * share for value, share in zip(values, shares, strict=True))
        for values in zip(*parts, strict=True)
    )
