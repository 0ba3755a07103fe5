"""Batches of prompts of unequal length, the tokens that end completions, and `generate` without a model's own defaults."""

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from ..models._adapters import takes
from ..models._model_checks import vocab_size


_WARNING = "We strongly recommend passing in an `attention_mask`"


def padding_token(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, end: Sequence[int]) -> int:
    """A token to pad with. It is masked, so any that the model has will do; a tokenizer may have more."""
    known = [i for i in (tokenizer.pad_token_id, *end) if i is not None and i < vocab_size(model)]
    return known[0] if known else 0


def padded_outputs(model: nn.Module, ids: torch.Tensor, mask: torch.Tensor, **options: Any) -> Any:
    """Outputs for left-padded rows, or for the last tokens of such rows, with positions from the first real token."""
    if takes(model, "position_ids"):
        options["position_ids"] = (mask.long().cumsum(dim=1) - 1).clamp(min=0)[:, -ids.size(1) :]
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
    """Scores left-padded prompts followed by right-padded completions (B, L + T) with prompts of one length at a
    time. `score` is a function of tokens, mask and `more` (B, ...) of some rows. Each of its results is a tensor of
    these rows, a mean over them, or `None`; returned are those for all rows, in order."""
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


@contextlib.contextmanager
def without_generation_defaults(model: PreTrainedModel) -> Iterator[GenerationConfig]:
    """
    Context in which `generate` ignores the sampling settings that the (unwrapped) model was saved with.

    transformers (5.23) fills what a passed `generation_config` leaves unset from the model's own: `typical_p`,
    `suppress_tokens` and others would change the distribution, and with it every importance weight. Way out:
    `generate` taking what it is passed. Its warning about padding is left out: transformers (5.24) drops a mask of
    ones, and then warns of completions that have ended.
    """
    model = getattr(model, "_orig_mod", model)  # compiled
    base = model if isinstance(model, PreTrainedModel) else model.get_base_model()
    saved = base.generation_config
    base.generation_config = GenerationConfig(
        bos_token_id=saved.bos_token_id,
        eos_token_id=saved.eos_token_id,
        pad_token_id=saved.pad_token_id,
        cache_implementation=saved.cache_implementation,
    )
    logger = logging.getLogger("transformers.modeling_utils")
    logger.addFilter(_is_no_warning_of_padding)
    try:
        yield base.generation_config
    finally:
        base.generation_config = saved
        logger.removeFilter(_is_no_warning_of_padding)


def _is_no_warning_of_padding(record: logging.LogRecord) -> bool:
    return _WARNING not in record.getMessage()


def end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens that end a completion, as in TRL: the model's own and the tokenizer's."""
    config = getattr(model, "generation_config", None)
    own = None if config is None else config.eos_token_id
    own = list(own) if isinstance(own, list | tuple) else [own]
    return [end for end in dict.fromkeys([*own, tokenizer.eos_token_id]) if end is not None]


def until_end(row: list[int], end: Sequence[int]) -> list[int]:
    """A completion's tokens up to and including its end token."""
    places = [row.index(token) for token in end if token in row]
    return row[: min(places) + 1] if places else row
