"""Conversations in the chat template of a reward's own tokenizer."""

from typing import Any

import jinja2

from ._texts import Messages, as_messages, whole_text
from .models import ModelReward


def check_chat_template(reward: ModelReward) -> None:
    """Refuses a tokenizer without a chat template."""
    if reward._tokenizer.chat_template is None:
        raise ValueError(
            f"The tokenizer of `{reward.model}` has no chat template; save one with it, or use a reward that reads plain "
            "text (`SequencePairReward`, `ToxicityReward`)."
        )


def render(
    reward: ModelReward, prompt: str | Messages, completion: str | Messages, drop_system: bool, **variables: Any
) -> str:
    """
    The conversation as text.

    Raises:
        `ValueError`: If the template refuses it.
    """
    messages = as_messages(prompt, completion)
    if drop_system:
        messages = [message for message in messages if message["role"] != "system"]
    try:
        return reward._tokenizer.apply_chat_template(messages, tokenize=False, **variables)
    except jinja2.TemplateError as error:
        raise ValueError(
            f"The chat template of `{reward.model}` refuses the roles {[message['role'] for message in messages]} of the "
            f"conversation that begins {whole_text(prompt, completion)[:60]!r} ({error}); if it is for a system message, "
            "use `drop_system=True`."
        ) from error


def check_context(reward: ModelReward, ids: list[int], prompt: str | Messages, completion: str | Messages) -> None:
    """Refuses a conversation that does not fit the model: cut, it would lose the end that the reward is read at."""
    context = reward._context()
    if context is not None and len(ids) > context:
        raise ValueError(
            f"{type(reward).__name__} got a conversation of {len(ids)} tokens, more than the context of `{reward.model}` "
            f"({context}); shorten the prompt, or lower `max_completion_length`. It begins "
            f"{whole_text(prompt, completion)[:60]!r}."
        )
