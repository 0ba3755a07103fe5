"""Prompts and completions in the forms that rewards read, and the numbers that reward functions return."""

import inspect
import math
from collections.abc import Iterable
from typing import Any


Messages = list[dict[str, Any]]
_LARGEST = 3.4e38  # in single precision


def message_text(message: dict[str, Any]) -> str:
    """Text of a message, or its text parts."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    return "".join(part["text"] for part in content or [] if part.get("type") == "text")


def conversation_text(conversation: str | Messages) -> str:
    """Texts of all messages, one a line, without roles; plain text as it is."""
    if isinstance(conversation, str):
        return conversation
    return "\n".join(message_text(message) for message in conversation)


def whole_text(prompt: str | Messages, completion: str | Messages) -> str:
    """Prompt and completion as one text: plain text joined, messages one a line."""
    separator = "" if isinstance(prompt, str) else "\n"
    return conversation_text(prompt) + separator + conversation_text(completion)


def last_question(prompt: str | Messages) -> str:
    """Text of the user's last message; a plain prompt as it is. Raises a `ValueError` if the user has none."""
    if isinstance(prompt, str):
        return prompt
    questions = [message for message in prompt if message["role"] == "user"]
    if not questions:
        raise ValueError(
            f"The prompt that begins {conversation_text(prompt)[:60]!r} has no message of the role 'user'; use `question='conversation'`."
        )
    return message_text(questions[-1])


def as_messages(prompt: str | Messages, completion: str | Messages) -> Messages:
    """The whole conversation; plain texts become a user's and an assistant's message."""
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if isinstance(completion, str):
        completion = [{"role": "assistant", "content": completion}]
    return [*prompt, *completion]


def in_parts(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its text as a list of one part, as some chat templates read it; one without a text as it is."""
    if not isinstance(message.get("content"), str):
        return message
    return message | {"content": [{"type": "text", "text": message["content"]}]}


def as_queries(prompts: list[str] | list[Messages], completions: list[str] | list[Messages]) -> list[str | Messages]:
    """Each prompt with its completion behind it, as one text or one conversation."""
    return [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]


def pick_labels(columns: dict[str, Any], label_column: str | None, count: int) -> list[Any]:
    """The column of labels, or `count` empty texts without a `label_column`. Raises a `ValueError` if there is no such column."""
    if label_column is None:
        return [""] * count
    if label_column not in columns:
        raise ValueError(f"The data set has no column `{label_column}` of labels; change or leave out `label_column`.")
    return columns[label_column]


def is_async(function: Any) -> bool:
    """Whether calls of a function, or of a callable object, return coroutines. TRL's `is_async_callable` would import torch."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def as_number(value: Any) -> float | None:
    """A reward as a number; NaN if it is not one, and `None`, which excludes a sample, as it is."""
    if value is None:
        return None
    try:
        return math.nan if isinstance(value, str) else float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # RuntimeError: a tensor with several numbers
        return math.nan


def read_rewards(result: Any, where: str, count: int) -> list[float | None]:
    """The numbers and `None` that a reward function returned. Raises `ValueError` about `where` if they are not one a
    completion, or not finite in single precision, in which TRL keeps them."""
    # A zero-dimensional array is an `Iterable` that cannot be iterated
    is_list = isinstance(result, Iterable) and getattr(result, "shape", None) != ()
    if not is_list or isinstance(result, str | bytes | dict):
        raise ValueError(f"{where} returned {result!r:.60}; it must return a list, one number a completion.")
    values = list(result)
    rewards = [as_number(value) for value in values]
    for i, reward in enumerate(rewards):
        if reward is not None and not abs(reward) <= _LARGEST:
            raise ValueError(
                f"{where} returned {values[i]!r:.60} for completion {i} of {count}; return a finite number, or `None` to "
                "exclude the sample."
            )
    if len(rewards) != count:
        raise ValueError(f"{where} returned {len(rewards)} rewards for {count} completions; return one for each.")
    return rewards
