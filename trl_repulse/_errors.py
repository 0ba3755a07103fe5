"""An error in one line: its message, notes, remedy, and the line of a reward function that raised it."""

import difflib
import os.path
import re
import sysconfig
import traceback
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any


PACKAGE = Path(__file__).parent
# Beginning of the note that names the reward function that raised an error
RAISED_BY = "Raised by the reward function"
# The module that calls users' reward functions, and adds that note
CALLER = str(PACKAGE / "engine" / "reward_functions.py")


# Optional module -> the extra of this package that installs it
EXTRAS = {
    "bitsandbytes": "quantization",
    "deepspeed": "deepspeed",
    "flash_attn": "flash-attn",
    "peft": "peft",
    "trackio": "trackio",
    "vllm": "vllm",
    "wandb": "wandb",
}

# What to do if a chat template writes today's date, and work goes on the next day
KEEP_DATE = (
    "if the chat template writes today's date, pass the earlier one by `chat_template_kwargs`, as its variable "
    '(`{"date_string": "26 Jul 2024"}`), or write it into the template'
)


def describe_error(error: BaseException) -> str:
    """An error in one line: its message, or its class if it has none, and its notes. If a reward function raised it, also the innermost
    line outside of installed packages, Python and this library."""
    # The message of a KeyError is only the key
    message = f"KeyError: {error}" if isinstance(error, KeyError) else str(error)
    parts = [message or type(error).__name__, *getattr(error, "__notes__", ())]
    if isinstance(error, ModuleNotFoundError) and error.name and "pip install" not in message:
        module = error.name.partition(".")[0]
        if isinstance(error, PackageNotFoundError):  # whose name may be a sentence, as of transformers on DeepSpeed
            module = next((word for word in re.findall(r"\w+", error.name) if word in EXTRAS), module)
        remedy = "Install the package that has it, or put its folder on `PYTHONPATH`."
        parts.append(f'Run `pip install "trl-repulse[{EXTRAS[module]}]"`.' if module in EXTRAS else remedy)
    if from_reward(error) and (place := _place(error)) is not None:
        parts.append(f"In {place}.")
    lines = [" ".join(part.split()) for part in parts]
    return " ".join([*(line if line[-1:] in ".!?" else f"{line}." for line in lines[:-1]), lines[-1]])


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: a question with the nearest known name, or nothing if none is near."""
    nearest = difflib.get_close_matches(name, list(known), n=1, cutoff=0.75)
    return f" Did you mean `{nearest[0]}`?" if nearest else ""


def unknown_name(where: str, name: str, value: Any, known: Iterable[str]) -> ValueError:
    """The error about an unknown name in a settings file, which `where` names. For a section it says that none are read."""
    fault = "is no argument; remove it"
    if isinstance(value, dict):
        fault = "is no argument. Nested sections are not read; write their settings at the top level"
    return ValueError(f"{where} has `{name}`, which {fault}.{did_you_mean(str(name), known)}")


def changed_prompt(now: str, before: str) -> str:
    """A clause that says how the text of a prompt has changed, with the remedy."""
    begin = max(0, len(os.path.commonprefix([now, before])) - 20)
    return f"a prompt reads {now[begin:][:40]!r}, not {before[begin:][:40]!r}; {KEEP_DATE}"


def from_reward(error: BaseException) -> bool:
    """Whether a reward function raised the error."""
    return any(note.startswith(RAISED_BY) for note in getattr(error, "__notes__", ()))


def _place(error: BaseException) -> str | None:
    """File and line of the innermost frame of a user's code below the call of a reward function."""
    frames = traceback.extract_tb(error.__traceback__)
    callers = [i for i, frame in enumerate(frames) if frame.filename == CALLER]
    inside = frames[callers[-1] + 1 :] if callers else []
    users = [frame for frame in inside if not _is_library(frame.filename)]
    return f"{users[-1].filename}, line {users[-1].lineno}" if users else None


def _is_library(filename: str) -> bool:
    """Whether a file is of an installed package, of this one or of Python's library, not the user's own."""
    path = Path(filename)
    return (
        filename.startswith("<")
        or not {"site-packages", "dist-packages"}.isdisjoint(path.parts)
        or path.is_relative_to(PACKAGE)
        or path.is_relative_to(sysconfig.get_path("stdlib"))
    )
