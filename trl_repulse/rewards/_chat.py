"""Conversations in the chat template of a reward's own tokenizer."""

from typing import Any

import jinja2

from .._prompts import check_template_variables, dated, warn_of_date
from ._texts import Messages, as_messages, in_parts, whole_text
from .models import ModelReward


class ChatTemplate:
    """
    The chat template of a reward's tokenizer. One that reads content in parts only gets it in parts.

    Args:
        reward ([`~trl_repulse.rewards.models.ModelReward`]): A reward whose tokenizer is loaded.
        drop_system (`bool`): Whether to leave out system messages.
        variables (`dict`, *optional*): Further variables of the template.

    Raises:
        `ValueError`: If there is no template, or it refuses or leaves out the assistant's message in both forms.
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
                messages = as_messages(*self._PROBES)
                if self._parts:
                    messages = [in_parts(message) for message in messages]
                warn_of_date(self._tokenizer, messages, variables)
                self.dated = dated(self._tokenizer, messages, variables)
                return
        raise (failures or [self._silent()])[0]

    def _silent(self) -> ValueError:
        return ValueError(
            f"The chat template of `{self._model}` leaves out what the assistant said: it is not made for judging "
            "answers. Save another with the tokenizer."
        )

    def render(self, prompt: str | Messages, completion: str | Messages) -> str:
        """
        The conversation as text.

        Raises:
            `ValueError`: If the template refuses it.
        """
        messages = as_messages(prompt, completion)
        if self._drop_system:
            messages = [message for message in messages if message["role"] != "system"]
        if self._parts:
            messages = [in_parts(message) for message in messages]
        try:
            return self._tokenizer.apply_chat_template(messages, tokenize=False, **self._variables)
        except (jinja2.TemplateError, TypeError) as error:
            raise ValueError(
                f"The chat template of `{self._model}` refuses the roles {[message['role'] for message in messages]} "
                f"of the conversation that begins {whole_text(prompt, completion)[:60]!r} ({error}); if it is for a "
                "system message, use `drop_system=True`."
            ) from error


def check_context(reward: ModelReward, ids: list[int], prompt: str | Messages, completion: str | Messages) -> None:
    """Refuses a conversation that does not fit the model: cut, it would lose the end that the reward is read at."""
    context = reward._context()
    if context is not None and len(ids) > context:
        raise ValueError(
            f"{type(reward).__name__} got a conversation of {len(ids)} tokens, more than the context of "
            f"`{reward.model}` ({context}); shorten the prompt, or lower `max_completion_length`. It begins "
            f"{whole_text(prompt, completion)[:60]!r}."
        )
