"""Generation defaults that a model was saved with, and the tokens that end a completion."""

import contextlib
import logging
from collections.abc import Iterator, Sequence

from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase


_WARNING = "We strongly recommend passing in an `attention_mask`"


@contextlib.contextmanager
def without_generation_defaults(model: PreTrainedModel) -> Iterator[GenerationConfig]:
    """
    Context in which `generate` ignores the sampling settings that the (unwrapped) model was saved with.

    transformers (5.23) fills what a passed `generation_config` leaves unset from the model's own: `typical_p`,
    `suppress_tokens`, `no_repeat_ngram_size` and others would change the distribution, and with it every importance
    weight. Way out: `generate` taking the passed configuration as it is. Its warning about padding is left out: transformers (5.24) drops a mask of ones,
    and then warns of completions that have ended.
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
