"""Prompts as text or as messages: what is refused, and errors of chat templates."""

import hashlib
import reprlib
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import jinja2
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging


if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

logger = logging.get_logger(__name__)


# Errors of a template and of the operations in it; transformers raises ValueError without a template
TEMPLATE_ERRORS = (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
# Arguments of `apply_chat_template` (transformers 5.24) and variables that it sets
_ARGUMENTS = """
    conversation conversations messages tools chat_template add_generation_prompt continue_final_message tokenize padding truncation
    max_length return_tensors return_dict return_assistant_tokens_mask tokenizer_kwargs
""".split()


def check_template_variables(variables: dict[str, Any] | None, allowed: tuple[str, ...] = ()) -> None:
    """Raises `ValueError` if `chat_template_kwargs` holds an argument of `apply_chat_template` that is not in `allowed`."""
    if wrong := [name for name in _ARGUMENTS if name in (variables or {}) and name not in allowed]:
        raise ValueError(
            f"`chat_template_kwargs` has `{'`, `'.join(wrong)}`: no variable of a chat template, but set where it is applied; leave it "
            "out. A template is set as `tokenizer.chat_template`, tools are an argument of the trainer."
        )


def check_conversations(prompts: Iterable[Any], name: str, stored: bool = False) -> None:
    """Raises `ValueError` naming the first row whose prompt is missing, is neither text nor messages that the
    assistant can answer, or differs in kind from the first. `name` is the data set in the message. With `stored`,
    warns of Arrow's rows, which have `None` in the arguments of a tool call where other rows have a value."""
    kind = None
    for number, prompt in enumerate(prompts, 1):
        fault = prompt_fault(prompt)
        if fault is None and stored and _has_gaps(prompt):
            stored = False
            warnings.warn(
                f"{name} has calls of tools with `None` in them. If they have none where the rows come from, `datasets` has filled in what "
                "calls of other rows have, and a chat template may write it: load a JSON file with `load_prompts`, or use "
                "`dataset.with_transform(remove_none_values)`, with the function of `trl.trainer.utils`."
            )
        kind = type(prompt) if kind is None else kind
        if fault is None and isinstance(prompt, str) != issubclass(kind, str):
            fault = "differs in kind from row 1; make every `prompt` text, or every one messages"
        if fault is not None:
            raise ValueError(f"Row {number} of {name} {fault}.")


def prompt_fault(prompt: Any) -> str | None:
    """The end of a sentence about what makes a prompt unusable, with the remedy; `None` for text and messages that can be answered."""
    fault = messages_fault(prompt)
    if fault is None and not isinstance(prompt, str) and prompt[-1]["role"] == "assistant":
        return (
            "ends in a message of the assistant, after which the chat template begins another answer and does not go on with that one; "
            "end it in a message of the user or of a tool, or write the prompt as text to have it continued"
        )
    return fault


def messages_fault(prompt: Any) -> str | None:
    """Like [`prompt_fault`], but the messages may end with an answer."""
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


def _has_gaps(prompt: Any) -> bool:
    """Whether a tool call contains `None`."""

    def has_none(value: Any) -> bool:
        if isinstance(value, dict | list):
            return any(map(has_none, value.values() if isinstance(value, dict) else value))
        return value is None

    return not isinstance(prompt, str) and any(has_none(message.get("tool_calls") or []) for message in prompt)


def _is_message(message: Any) -> bool:
    """Whether role and content are text. A message with tool calls needs no content."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        return False
    content = message.get("content")
    return isinstance(content, str) or (content is None and bool(message.get("tool_calls")))


def conversations(dataset: "Dataset | IterableDataset | None") -> Iterator[Any]:
    """The prompts of a data set that must be checked one by one. Empty for a column of plain text, and for streams and
    transforms, whose rows are checked batch by batch."""
    from datasets import Dataset, Value  # slow; not needed for a command's help

    if not isinstance(dataset, Dataset) or dataset.format["type"] == "custom":
        return
    feature = dataset.features["prompt"]
    if isinstance(feature, Value) and feature.dtype in ("string", "large_string", "string_view"):
        return
    for rows in dataset.select_columns("prompt").with_format(None).iter(1000):
        yield from rows["prompt"]


def one_of_each(prompts: Iterable[list[dict[str, Any]]]) -> list[tuple[int, list[dict[str, Any]]]]:
    """The row number (from 1) and conversation of the first row with each sequence of roles, on which templates depend."""
    first_of: dict[tuple[str, ...], tuple[int, list[dict[str, Any]]]] = {}
    for number, prompt in enumerate(prompts, 1):
        first_of.setdefault(tuple(message["role"] for message in prompt), (number, prompt))
    return list(first_of.values())


class _Message(dict):
    """A message whose missing keys can be looked up and are undefined, as they are to a template."""

    def __missing__(self, key: str) -> jinja2.Undefined:
        return jinja2.Undefined(obj=self, name=key)


def as_templates_read(prompts: list[Any]) -> list[Any]:
    """Prompts for TRL (1.16), which looks up the content of every message; one with tool calls may have none."""
    return [prompt if isinstance(prompt, str) else [_Message(each) for each in prompt] for prompt in prompts]


@contextmanager
def rendering(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], where: str) -> Iterator[None]:
    """Turns an error of the chat template into a `ValueError` with the conversation (`where`), the template's message and the remedy."""
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
    """A conversation as text in the chat template. Raises `ValueError` like [`rendering`], and for `variables` that are arguments of
    `apply_chat_template` other than `tools`."""
    check_template_variables(variables, allowed=("tools",))
    with rendering(tokenizer, messages, where):
        return tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=add_generation_prompt, **(variables or {})
        )


def warn_of_template(
    tokenizer: PreTrainedTokenizerBase, prompt: str | list[dict[str, Any]], variables: dict[str, Any] | None = None
) -> None:
    """Warns once if a plain prompt does without a chat template that there is, or if the template writes today's date."""
    if isinstance(prompt, str):
        if tokenizer.chat_template is not None and not _is_rendered(tokenizer, prompt):
            logger.warning_once(
                f"The prompts are plain text, and the chat template of `{tokenizer.name_or_path}` is not applied to them. If a chat model "
                "is to answer them, pass `--apply_chat_template` (in Python `load_prompts(..., as_conversation=True)`), or write them as "
                "messages."
            )
        return
    if "strftime_now" not in str(tokenizer.chat_template):
        return
    try:
        render(tokenizer, prompt, "A conversation", (variables or {}) | {"strftime_now": None})
    except ValueError:  # the template calls it
        logger.warning_once(
            f"The chat template of `{tokenizer.name_or_path}` writes today's date, so that prompts change at midnight and a run "
            "cannot be resumed on another day. Pass a fixed date by `chat_template_kwargs`, as the template's variable "
            '(`{"date_string": "26 Jul 2024"}`), or write it into the template.'
        )


def _is_rendered(tokenizer: PreTrainedTokenizerBase, text: str) -> bool:
    """Whether a text has what the chat template writes around a user's message, or the template writes nothing there."""
    mark = "\0"
    try:
        around = render(tokenizer, [{"role": "user", "content": mark}], "A message").partition(mark)
    except ValueError:  # a template for other roles
        return False
    parts = [part.strip() for part in (around[0], around[2]) if part.strip()]
    return not parts or any(part in text for part in parts)


def rendering_hash(text: str) -> dict[str, str]:
    """`{"rendering": SHA-256 of a conversation in a chat template}`: part of the description of a reward that reads conversations, which
    changes with its template, and with the date in it."""
    return {"rendering": hashlib.sha256(text.encode()).hexdigest()}
