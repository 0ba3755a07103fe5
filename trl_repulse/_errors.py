"""How an error is said in one line: its message, notes, remedy, and where in a reward function it arose."""

import difflib
import re
import sysconfig
import traceback
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any


PACKAGE = Path(__file__).parent
# How the note begins that names the reward function an error came through
RAISED_BY = "Raised by the reward function"
# The module that calls users' reward functions, and notes their names
CALLER = str(PACKAGE / "trainers" / "_rewards.py")


# Module that may be missing -> the extra of this package that brings it
EXTRAS = {
    "bitsandbytes": "quantization",
    "deepspeed": "deepspeed",
    "fastapi": "serve",
    "flash_attn": "flash-attn",
    "peft": "peft",
    "trackio": "trackio",
    "uvicorn": "serve",
    "vllm": "vllm",
    "wandb": "wandb",
}


def describe_error(error: BaseException) -> str:
    """
    An error in one line, for a command that ends with it.

    Args:
        error (`BaseException`):
            The error, as it was caught.

    Returns:
        `str`: Its message and its notes. Where it came through a reward function also the file and the line, the
        innermost one outside of installed packages, Python and this library; an error without a message has its class.
    """
    # That of a KeyError is but the key
    message = f"KeyError: {error}" if isinstance(error, KeyError) else str(error)
    said = [message or type(error).__name__, *getattr(error, "__notes__", ())]
    if isinstance(error, ModuleNotFoundError) and error.name and "pip install" not in message:
        module = error.name.partition(".")[0]
        if isinstance(error, PackageNotFoundError):  # whose name may be a sentence, as of transformers on DeepSpeed
            module = next((word for word in re.findall(r"\w+", error.name) if word in EXTRAS), module)
        remedy = "Install the package that has it, or put its folder on `PYTHONPATH`."
        said.append(f'Run `pip install "trl-repulse[{EXTRAS[module]}]"`.' if module in EXTRAS else remedy)
    place = _place(error) if from_reward(error) else None
    if place is not None:
        said.append(f"In {place}.")
    lines = [" ".join(part.split()) for part in said]
    return " ".join([*(line if line[-1:] in ".!?" else f"{line}." for line in lines[:-1]), lines[-1]])


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """
    The end of a message about an unknown name.

    Args:
        name (`str`):
            The name.
        known (`Iterable` of `str`):
            Names there are.

    Returns:
        `str`: A question with the nearest of them, after a space; empty if none is near.
    """
    nearest = difflib.get_close_matches(name, list(known), n=1, cutoff=0.75)
    return f" Did you mean `{nearest[0]}`?" if nearest else ""


def unknown_name(where: str, name: str, value: Any, known: Iterable[str]) -> ValueError:
    """
    The error about a name in a file of settings that is none.

    Args:
        where (`str`):
            What the message calls the file.
        name (`str`), value:
            The name, and what stands behind it.
        known (`Iterable` of `str`):
            Names there are.

    Returns:
        `ValueError`: Of a section, it says that none are read.
    """
    fault = "is no argument; remove it"
    if isinstance(value, dict):
        fault = "is no argument. Nested sections are not read; write their settings at the top level"
    return ValueError(f"{where} has `{name}`, which {fault}.{did_you_mean(str(name), known)}")


def from_reward(error: BaseException) -> bool:
    """Whether an error came through a reward function, as the note on it says."""
    return any(note.startswith(RAISED_BY) for note in getattr(error, "__notes__", ()))


def _place(error: BaseException) -> str | None:
    frames = traceback.extract_tb(error.__traceback__)
    callers = [i for i, frame in enumerate(frames) if frame.filename == CALLER]
    inside = frames[callers[-1] + 1 :] if callers else []
    users = [frame for frame in inside if not _is_library(frame.filename)]
    return f"{users[-1].filename}, line {users[-1].lineno}" if users else None


def _is_library(filename: str) -> bool:
    path = Path(filename)
    return (
        filename.startswith("<")
        or not {"site-packages", "dist-packages"}.isdisjoint(path.parts)
        or path.is_relative_to(PACKAGE)
        or path.is_relative_to(sysconfig.get_path("stdlib"))
    )
