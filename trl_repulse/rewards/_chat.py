"""Conversations in the chat template of a reward's tokenizer."""

from typing import Any

import jinja2

from ..data._prompts import check_template_variables, dated, warn_of_date
from ._texts import Messages, as_messages, in_parts, whole_text
from .models import ModelReward


class ChatTemplate:
    """
    The chat template of a reward's tokenizer, with content in parts if the template reads no other.

    Raises `ValueError` if there is none, or it fails on or drops the assistant's message in both forms.
    """

    _PROBES = ("Is this the question?", "This is the answer.")

    def __init__(self, reward: ModelReward, drop_system: bool, variables: dict[str, Any] | None):
        self._model = reward.model
        self._tokenizer = reward._tokenizer
        self._drop_system = drop_system
        self._variables = variables or {}
        check_template_variables(
            variables, ("tools", "chat_template", "add_generation_prompt", "continue_final_message")
        )
        if self._tokenizer.chat_template is None:
            raise ValueError(
                f"The tokenizer of `{self._model}` has no chat template; save one with it, or use a reward that reads "
                "plain text (`SequencePairReward`, `ToxicityReward`)."
            )
        failures = []
        for self._parts in (False, True):
            try:
                text = self.render(*self._PROBES)
            except ValueError as error:
                failures.append(error)
                continue
            if self._PROBES[1] in text:
                messages = self._messages(*self._PROBES)
                warn_of_date(self._tokenizer, messages, variables)
                self.dated = dated(self._tokenizer, messages, variables)
                return
        if failures:
            raise failures[0]
        raise ValueError(
            f"The chat template of `{self._model}` leaves out what the assistant said: it is not made for judging "
            "answers. Save another with the tokenizer."
        )

    def _messages(self, prompt: str | Messages, completion: str | Messages) -> Messages:
        messages = as_messages(prompt, completion)
        if self._drop_system:
            messages = [message for message in messages if message["role"] != "system"]
        return [in_parts(message) for message in messages] if self._parts else messages

    def render(self, prompt: str | Messages, completion: str | Messages) -> str:
        """The conversation as text. Raises `ValueError` if the template refuses it."""
        messages = self._messages(prompt, completion)
        try:
            return self._tokenizer.apply_chat_template(messages, tokenize=False, **self._variables)
        except (jinja2.TemplateError, TypeError) as error:
            raise ValueError(
                f"The chat template of `{self._model}` refuses the roles {[message['role'] for message in messages]} "
                f"of the conversation that begins {whole_text(prompt, completion)[:60]!r} ({error}); if it is for a "
                "system message, use `drop_system=True`."
            ) from error
