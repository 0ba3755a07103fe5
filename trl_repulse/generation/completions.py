"""Completions as generators return them, and what all generators do with prompts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..data._prompts import render, warn_of_template
from ..data._texts import check_added_tokens, completion_texts


# Settings in which models of one architecture and vocabulary may differ
_INCIDENTAL = {
    *("_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "quantization_config", "_attn_implementation"),
}


@dataclass(frozen=True)
class Completion:
    """
    A completion and its origin.

    Args:
        text (`str`): Text without special tokens, as it reads after its prompt.
        token_ids (`list[int]`): Tokens, with the end-of-sequence token if the model ended the completion.
        model (`str`): Name of the model that drew it.
        version (`int`): How often the model's weights had been declared changed.
    """

    text: str
    token_ids: list[int]
    model: str
    version: int


def tokenize(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str | list[dict[str, str]]],
    chat_template_kwargs: dict[str, Any] | None = None,
) -> list[list[int]]:
    """Token ids of prompts (plain text, or conversations as lists of messages), as TRL's trainers make them. Raises a `ValueError` if the
    chat template is missing or fails, or the tokenizer ends plain text with its end token."""
    rows: list[list[int]] = []
    for prompt in prompts[:1]:
        warn_of_template(tokenizer, prompt, chat_template_kwargs)
    for number, prompt in enumerate(prompts, 1):
        plain = isinstance(prompt, str)
        text = prompt if plain else render(tokenizer, prompt, f"Row {number} of `prompts`", chat_template_kwargs)
        rows.append(tokenizer(text, add_special_tokens=plain)["input_ids"])  # a chat template writes them itself
    check_added_tokens(tokenizer, prompts, rows)
    return rows


def group_completions(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str | list[dict[str, str]]],
    prompt_ids: Sequence[Sequence[int]],
    completion_ids: Sequence[Sequence[int]],
    model: str,
    version: int,
) -> list[list[Completion]]:
    """Groups completions, equally many a prompt and prompt by prompt, from their tokens and those of their prompts."""
    size = len(completion_ids) // max(len(prompts), 1)
    repeated = [prompt for prompt in prompts for _ in range(size)]
    texts = completion_texts(tokenizer, repeated, prompt_ids, completion_ids)
    flat = [Completion(text, list(ids), model, version) for text, ids in zip(texts, completion_ids, strict=True)]
    return [flat[i * size : (i + 1) * size] for i in range(len(prompts))]


def check_one_family(models: dict[str, PreTrainedModel]) -> None:
    """Checks that models can replace one another: same architecture, size and vocabulary. Raises a `ValueError` that names the models and
    the difference if they do not."""
    (first, model), *others = models.items()
    shape = _shape(model)
    for name, other in others:
        theirs = _shape(other)
        if differing := [key for key in sorted(shape.keys() | theirs.keys()) if shape.get(key) != theirs.get(key)]:
            key = "vocab_size" if "vocab_size" in differing else differing[0]
            raise ValueError(
                f"Models {first!r} and {name!r} cannot share an engine: `{key}` is {shape.get(key)!r} in one and "
                f"{theirs.get(key)!r} in the other; start both from one model, or generate without vLLM."
            )


def _shape(model: PreTrainedModel) -> dict[str, Any]:
    """A model's configuration, without the settings in which models that replace one another may differ."""
    return {key: value for key, value in model.config.get_text_config().to_dict().items() if key not in _INCIDENTAL}
