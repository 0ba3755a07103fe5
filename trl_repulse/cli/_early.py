"""What a command says of its arguments without torch, whose import takes most of the time of a start."""

import os
import re
import sys
from collections.abc import Callable
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path

from ._fields import check_inputs, read_yaml, split_config


# Slow to import, and of no use for reading arguments. transformers and TRL import without them
_HIDDEN = ("torch", "accelerate", "peft")
# Options of the launcher that training has too, or that have no use there
NOT_FORWARDED = {"debug", "env", "gradient_accumulation_steps", "help", "module", "no_python"}

_EPILOG = (
    "Flags of `accelerate launch` are passed on to it, such as --num_processes 4, --multi_gpu or --main_process_port "
    "29501; --accelerate_config FILE names its configuration file. They may be in the file of --config too. "
    "`accelerate launch --help` lists them."
)


def without_torch(work: Callable[[], str]) -> str:
    """
    Returns the text that `work` returns, or raises its `ValueError`, from a fork of this process in which torch does not seem to be
    installed. Where that fails otherwise, and where torch is imported already, `work` is done here.
    """
    if not {"torch", "transformers"}.isdisjoint(sys.modules):
        return work()
    receiver, sender = os.pipe()
    child = os.fork()
    if not child:
        status, text = 2, ""
        try:
            sys.modules |= dict.fromkeys(_HIDDEN)
            os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"  # that there is no torch
            status, text = 0, work()
        except ValueError as error:
            status, text = 1, str(error)
        finally:
            os.write(sender, text.encode())
            os._exit(status)
    os.close(sender)
    with open(receiver, encoding="utf-8") as pipe:
        text = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status == 1:
        raise ValueError(text)
    return work() if status else text


def read_early(command: str, argv: list[str]) -> str:
    """
    Reads the arguments of a command whose arguments are fields of dataclasses. Returns the help if they ask for it, else nothing.
    Raises a `ValueError` for a name that is unknown, or a value that its flag does not take.
    """
    return without_torch(lambda: _read(command, argv))


def _read(command: str, argv: list[str]) -> str:
    from .arguments import ARGUMENTS, check_arguments, help_of

    path, rest = split_config(argv)
    everything = not {"--help-all", "--help_all"}.isdisjoint(rest)
    if command not in ARGUMENTS:
        from .gcg import build_parser

        parser = build_parser()
        if not {"-h", "--help"}.isdisjoint(rest):
            return parser.format_help()
        check_inputs(parser.parse_known_args(parser.read_config(argv))[0])
        parser.parse_args_and_config(argv)
    elif everything or not {"-h", "--help"}.isdisjoint(rest):
        return help_of(command, {} if path is None else read_yaml(path), _EPILOG, everything)
    else:
        names, own, words = launcher_names(), True, []
        for word in argv:
            if word.startswith("--"):
                own = word.partition("=")[0][2:].replace("-", "_") not in names
            words += [word] * own  # of the launcher neither flags nor their values
        check_arguments(command, words, names)
    return ""


@cache
def launcher_names() -> frozenset[str]:
    """Names of the flags of `accelerate launch`, which training commands and the file of `--config` take too, from its source."""
    package = PathFinder.find_spec("accelerate").submodule_search_locations[0]
    source = (Path(package) / "commands" / "launch.py").read_text(encoding="utf-8")
    return frozenset(re.findall(r'add_argument\(\s*(?:"-\w",\s*)?"--(\w+)"', source)) - NOT_FORWARDED | {
        "accelerate_config"
    }
