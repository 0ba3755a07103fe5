"""Prompts as text or as messages: which are refused, and what is said where a chat template is missing or refuses them."""

import reprlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import jinja2
from datasets import Dataset, IterableDataset, Value
from transformers import PreTrainedTokenizerBase


# What a template raises: by itself, or where an operation of its own fails. Transformers raises ValueError where there is none
TEMPLATE_ERRORS = (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


def check_conversations(prompts: Iterable[Any], name: str) -> None:
    """
    Refuses prompts that are neither text nor messages, and the mixture of both.

    Args:
        prompts (`Iterable`):
            Prompts.
        name (`str`):
            What they are rows of, for the message.

    Raises:
        `ValueError`: Naming the first row whose prompt is missing, no text and no conversation, or of another kind than the first.
    """
    kind = None
    for number, prompt in enumerate(prompts, 1):
        fault = prompt_fault(prompt)
        kind = type(prompt) if kind is None else kind
        if fault is None and isinstance(prompt, str) != issubclass(kind, str):
            fault = "differs in kind from row 1; make every `prompt` text, or every one messages"
        if fault is not None:
            raise ValueError(f"Row {number} of {name} {fault}.")


def prompt_fault(prompt: Any) -> str | None:
    """
    What keeps a prompt from being used.

    Args:
        prompt:
            A prompt.

    Returns:
        `str`: the end of a sentence about it, with the remedy; `None` for text and for messages.
    """
    if isinstance(prompt, str):
        return None
    if prompt is None or (isinstance(prompt, list) and not prompt):
        return "has an empty `prompt`; fill it in or drop the row"
    wrong = [each for each in prompt if not _is_message(each)] if isinstance(prompt, list) else [prompt]
    if not wrong:
        return None
    return (
        'has a `prompt` that is neither text nor a list of messages {"role": ..., "content": ...} with text in both (it has '
        f"{reprlib.repr(wrong[0])}); write it as one or the other"
    )


def _is_message(message: Any) -> bool:
    """Whether it has role and content as text; one that calls tools may lack the content."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        return False
    content = message.get("content")
    return isinstance(content, str) or (content is None and bool(message.get("tool_calls")))


def conversations(dataset: Dataset | IterableDataset | None) -> Iterator[Any]:
    """
    The prompts of a data set that have to be checked one by one.

    Args:
        dataset ([`~datasets.Dataset`] or [`~datasets.IterableDataset`], *optional*):
            Data set with a column `"prompt"`.

    Returns:
        `Iterator`: its prompts in order. Nothing for a column of plain text, or where rows are made as they are read (a stream, a
        transform): these are checked batch by batch.
    """
    if not isinstance(dataset, Dataset) or dataset.format["type"] == "custom":
        return
    feature = dataset.features["prompt"]
    if isinstance(feature, Value) and feature.dtype in ("string", "large_string", "string_view"):
        return
    for rows in dataset.select_columns("prompt").with_format(None).iter(1000):
        yield from rows["prompt"]


def one_of_each(prompts: Iterable[list[dict[str, Any]]]) -> list[tuple[int, list[dict[str, Any]]]]:
    """
    The first conversation of each sequence of roles, which is what templates refuse conversations for.

    Args:
        prompts (`Iterable`):
            Conversations.

    Returns:
        `list[tuple[int, list[dict]]]`: number of the row, from 1, and the conversation.
    """
    found: dict[tuple[str, ...], tuple[int, list[dict[str, Any]]]] = {}
    for number, prompt in enumerate(prompts, 1):
        found.setdefault(tuple(message["role"] for message in prompt), (number, prompt))
    return list(found.values())


@contextmanager
def rendering(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], where: str) -> Iterator[None]:
    """
    Context in which a template's error becomes one that names the conversation, the template's message and the remedy.

    Args:
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            Tokenizer whose template is applied.
        messages (`list[dict]`):
            The conversation.
        where (`str`):
            What it is, for the message, such as its row.

    Raises:
        `ValueError`: If there is no template, or it refuses the conversation.
    """
    try:
        yield
    except TEMPLATE_ERRORS as error:
        if tokenizer.chat_template is None:
            raise ValueError(
                f"{where} is a conversation, but the tokenizer has no chat template; save one with the tokenizer "
                "(`tokenizer.chat_template`), or use plain text (without `apply_chat_template`)."
            ) from error
        roles = ", ".join(str(message.get("role")) for message in messages)
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(
            f"{where}, with the roles {roles}, is refused by the chat template ({reason}); change its messages, or the template."
        ) from error


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict[str, Any]],
    where: str,
    variables: dict[str, Any] | None = None,
    add_generation_prompt: bool = True,
) -> str:
    """
    A conversation in the tokenizer's chat template.

    Args:
        tokenizer, messages, where:
            As for [`rendering`].
        variables (`dict`, *optional*):
            Further variables of the template.
        add_generation_prompt (`bool`, *optional*, defaults to `True`):
            Whether the assistant's answer is to follow.

    Returns:
        `str`: the text.

    Raises:
        `ValueError`: As [`rendering`].
    """
    with rendering(tokenizer, messages, where):
        return tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=add_generation_prompt, **(variables or {})
        )
