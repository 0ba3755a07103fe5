"""Models and tokenizers by path or Hub id: whatever keeps one from being used is said with its name and its part."""

from typing import Any

from safetensors import SafetensorError
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase


def load_model(auto_class: Any, name: str, part: str, **options: Any) -> PreTrainedModel:
    """
    Loads a model whose weights are all there.

    A classifier loaded as a language model, or the other way round, has a head of random numbers, of which transformers only
    warns.

    Args:
        auto_class:
            [`~transformers.AutoModelForCausalLM`] or another of its kind.
        name (`str`):
            Path or Hub id.
        part (`str`):
            What it is loaded as, for the message, such as `"reference"`.
        options:
            Further arguments of `from_pretrained`.

    Returns:
        [`~transformers.PreTrainedModel`]

    Raises:
        `ValueError`: If it cannot be loaded, or lacks weights.
    """
    try:
        model, loading = auto_class.from_pretrained(name, output_loading_info=True, **options)
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(f"The {part} `{name}` cannot be loaded: {error}") from error
    missing = sorted(loading["missing_keys"])
    if missing:
        raise ValueError(
            f"The {part} `{name}` has no weights for {', '.join(missing[:3])}, which {type(model).__name__} needs; give a "
            "checkpoint that was trained as one."
        )
    return model


def load_tokenizer(name: str, part: str, **options: Any) -> PreTrainedTokenizerBase:
    """
    Loads a tokenizer that has a vocabulary; of a folder without one transformers makes an empty one.

    Args:
        name (`str`):
            Path or Hub id.
        part (`str`):
            Whose it is, for the message.
        options:
            Further arguments of `from_pretrained`.

    Returns:
        [`~transformers.PreTrainedTokenizerBase`]

    Raises:
        `ValueError`: If there is none.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, **options)
    except (OSError, ValueError) as error:
        raise ValueError(f"The tokenizer of the {part} `{name}` cannot be loaded: {error}") from error
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
        raise ValueError(
            f"The {part} `{name}` has no tokenizer beside its weights; save one with `save_pretrained` there."
        )
    return tokenizer
