"""A prompt and its completion, plain text or messages, in the forms that reward models read."""

from typing import Any


Messages = list[dict[str, Any]]


def message_text(message: dict[str, Any]) -> str:
    """Text of one message; of content in parts, the text parts."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    return "".join(part["text"] for part in content or [] if part.get("type") == "text")


def conversation_text(conversation: str | Messages) -> str:
    """Texts of all messages, one below the other, without their roles; plain text as it is."""
    if isinstance(conversation, str):
        return conversation
    return "\n".join(message_text(message) for message in conversation)


def whole_text(prompt: str | Messages, completion: str | Messages) -> str:
    """Prompt and completion as one text: plain ones joined as they were generated, messages one below the other."""
    separator = "" if isinstance(prompt, str) else "\n"
    return conversation_text(prompt) + separator + conversation_text(completion)


def last_question(prompt: str | Messages) -> str:
    """Text of the last message of the user; a plain prompt as it is."""
    if isinstance(prompt, str):
        return prompt
    questions = [message for message in prompt if message["role"] == "user"]
    if not questions:
        raise ValueError(
            f"The prompt that begins {conversation_text(prompt)[:60]!r} has no message of the role 'user' to take the "
            "question from; use `question='conversation'` or add one."
        )
    return message_text(questions[-1])


def as_messages(prompt: str | Messages, completion: str | Messages) -> Messages:
    """The conversation of both; plain texts become a message of the user and one of the assistant."""
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if isinstance(completion, str):
        completion = [{"role": "assistant", "content": completion}]
    return [*prompt, *completion]


def in_parts(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its text as a list of one part."""
    if not isinstance(message.get("content"), str):
        return message
    return message | {"content": [{"type": "text", "text": message["content"]}]}


def as_queries(prompts: list[str] | list[Messages], completions: list[str] | list[Messages]) -> list[str | Messages]:
    """Prompt and completion as one: plain texts joined, conversations continued."""
    return [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]


def pick_labels(columns: dict[str, Any], label_column: str | None, count: int) -> list[Any]:
    """The column of labels, or an empty text a sample where none is asked for."""
    if label_column is None:
        return [""] * count
    if label_column not in columns:
        raise ValueError(
            f"The data set has no column `{label_column}` of labels; give it one, or change or leave out "
            "`label_column`."
        )
    return columns[label_column]
