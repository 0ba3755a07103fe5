"""Batches of prompts of unequal length, with padding or without."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..models._adapters import takes
from ..models._vocabulary import vocab_size


def padding_token(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, end: Sequence[int]) -> int:
    """A token to pad with. It is masked, so any that the model has will do; a tokenizer may have more."""
    known = [i for i in (tokenizer.pad_token_id, *end) if i is not None and i < vocab_size(model)]
    return known[0] if known else 0


def padded_outputs(model: nn.Module, ids: torch.Tensor, mask: torch.Tensor, **options: Any) -> Any:
    """Outputs for left-padded rows, with positions from the first real token."""
    if takes(model, "position_ids"):
        options["position_ids"] = (mask.long().cumsum(dim=1) - 1).clamp(min=0)
    return model(input_ids=ids, attention_mask=mask, **options)


def batches(prompt_ids: Sequence[Sequence[int]], batch_size: int, equal: bool) -> list[list[int]]:
    """Indices of prompts, batch by batch; with `equal`, each batch has prompts of one length."""
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
    Scores rows with prompts of one length at a time, without left padding.

    Args:
        score (`Callable`):
            Function of tokens, mask and `more` of some rows. Each result is a tensor of these rows, a mean over them,
            or `None`.
        input_ids, attention_mask (`torch.Tensor` of shape `(B, L + T)`):
            Left-padded prompts followed by right-padded completions.
        more (`torch.Tensor` of shape `(B, ...)`): Further inputs of each row.

    Returns:
        `tuple`: The results of `score` for all rows, in order.
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
