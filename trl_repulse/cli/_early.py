"""What is said of a command's arguments without torch, whose import takes most of the time of a start."""

import multiprocessing
import os
import re
import sys
from collections.abc import Callable
from functools import cache
from importlib.machinery import PathFinder
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ._fields import check_inputs


# Slow to import, and of no use for reading arguments. transformers and TRL import without them
_HIDDEN = ("torch", "accelerate", "peft")
# Options of the launcher that training has too, or that have no use there
NOT_FORWARDED = {"debug", "env", "gradient_accumulation_steps", "help", "module", "no_python"}


def without_torch(function: Callable[..., Any], *args: Any) -> Any:
    """Calls a function in a fork of this process in which torch does not seem to be installed, and returns or raises what it does. Where it
    fails otherwise than with a `ValueError`, and where torch is imported already, it is called here."""
    if {"torch", "transformers"}.isdisjoint(sys.modules):
        context = multiprocessing.get_context("fork")
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_call, args=(sender, function, args))
        process.start()
        sender.close()
        try:
            value, error = receiver.recv()
        except EOFError:
            value, error = None, RuntimeError()
        process.join()
        if isinstance(error, ValueError):
            raise error
        if error is None:
            return value
    return function(*args)


def _call(sender: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """In the fork: sends a function's value and `None`, or `None` and the error that it raises, as an import that needs torch does."""
    sys.modules |= dict.fromkeys(_HIDDEN)  # a module that is `None` cannot be imported
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"  # that there is no torch
    try:
        sender.send((function(*args), None))
    except Exception as error:
        sender.send((None, error))


def read_early(command: str, argv: list[str]) -> str:
    """Checks the arguments of a command whose arguments are fields of dataclasses. Returns the help if they ask for it, else `""`.
    Raises a `ValueError` for a name that is unknown, a value that its flag does not take, or a path at which there is nothing."""
    from .arguments import ARGUMENTS, check_arguments

    if command in ARGUMENTS:
        names, is_own, without_launcher = launcher_names(), True, []
        for word in argv:
            if word.startswith("--"):
                is_own = word.partition("=")[0][2:].replace("-", "_") not in names
            without_launcher += [word] * is_own  # of the launcher neither flags nor their values
        return check_arguments(command, without_launcher, names)
    from .gcg import build_parser

    parser = build_parser()
    if not {"-h", "--help"}.isdisjoint(argv):
        return parser.format_help()
    check_inputs(parser.parse_known_args(parser.read_config(argv))[0])
    parser.parse_args_and_config(argv)
    return ""


@cache
def launcher_names() -> frozenset[str]:
    """Names of the flags of `accelerate launch`, which training commands and the file of `--config` take too, from its source."""
    package = PathFinder.find_spec("accelerate").submodule_search_locations[0]
    source = (Path(package) / "commands" / "launch.py").read_text(encoding="utf-8")
    names = re.findall(r'add_argument\(\s*(?:"-\w",\s*)?"--(\w+)"', source)
    return frozenset({*names, "accelerate_config"} - NOT_FORWARDED)
