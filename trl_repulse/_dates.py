"""How a chat template that writes today's date is kept to the day on which work was begun."""

import os.path


# How work that was begun goes on with the prompts that it had
KEEP_DATE = (
    "if the chat template writes today's date, pass the earlier one by `chat_template_kwargs`, as its variable "
    '(`{"date_string": "26 Jul 2024"}`), or write it into the template'
)


def changed_prompt(now: str, before: str) -> str:
    """
    How a prompt that is rendered anew differs from what it was, with the remedy.

    Args:
        now, before (`str`):
            The prompt's two texts.

    Returns:
        `str`: a clause.
    """
    begin = max(0, len(os.path.commonprefix([now, before])) - 20)
    return f"a prompt reads {now[begin:][:40]!r}, not {before[begin:][:40]!r}; {KEEP_DATE}"
