"""What a model was saved with, and `generate` would follow."""

import contextlib
from collections.abc import Iterator

from transformers import GenerationConfig, PreTrainedModel


@contextlib.contextmanager
def without_generation_habits(model: PreTrainedModel) -> Iterator[None]:
    """Samples inside the context follow the model and the trainer's arguments, and nothing the model was saved with.

    transformers (5.23) fills what a `generation_config` passed to `generate` leaves unset from the model's own:
    `typical_p`, `suppress_tokens`, `no_repeat_ngram_size` and the like would bend the distribution without a word, and
    with it every importance weight. Way out: `generate` taking a passed configuration as it is.

    Args:
        model ([`~transformers.PreTrainedModel`] or `peft.PeftModel`):
            Unwrapped model; its `generation_config` is back in place afterwards, and is what gets saved.
    """
    base = model if isinstance(model, PreTrainedModel) else model.get_base_model()
    habits = base.generation_config
    base.generation_config = GenerationConfig(
        bos_token_id=habits.bos_token_id,
        eos_token_id=habits.eos_token_id,
        pad_token_id=habits.pad_token_id,
        cache_implementation=habits.cache_implementation,
    )
    try:
        yield
    finally:
        base.generation_config = habits
