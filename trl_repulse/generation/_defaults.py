"""What a model was saved with, and `generate` would follow; what ends a completion."""

import contextlib
from collections.abc import Iterator, Sequence

from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase


@contextlib.contextmanager
def without_generation_defaults(model: PreTrainedModel) -> Iterator[GenerationConfig]:
    """Samples inside the context follow the model and the trainer's arguments, and nothing the model was saved with.

    transformers (5.23) fills what a `generation_config` passed to `generate` leaves unset from the model's own:
    `typical_p`, `suppress_tokens`, `no_repeat_ngram_size` and the like would bend the distribution without a word, and
    with it every importance weight. Way out: `generate` taking a passed configuration as it is.

    Args:
        model ([`~transformers.PreTrainedModel`] or `peft.PeftModel`):
            Unwrapped model, compiled or not; its `generation_config` is back in place afterwards, and is what gets saved.
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
    try:
        yield base.generation_config
    finally:
        base.generation_config = saved


def end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """What ends a completion, as in TRL's trainers: the model's own end tokens, and the tokenizer's."""
    config = getattr(model, "generation_config", None)
    own = None if config is None else config.eos_token_id
    own = list(own) if isinstance(own, list | tuple) else [own]
    return [end for end in dict.fromkeys([*own, tokenizer.eos_token_id]) if end is not None]


def until_end(row: list[int], end: Sequence[int]) -> list[int]:
    """A completion's tokens, the one that ends it included."""
    places = [row.index(token) for token in end if token in row]
    return row[: min(places) + 1] if places else row
