"""
The training commands, `trl-repulse repulse` and its kin, which run through `accelerate launch` as `trl grpo` does.

As a module, `python -m trl_repulse._commands.train COMMAND [flags]`, it is what each process of the launcher runs. The
launcher itself imports neither TRL nor the trainers.
"""

import argparse
import logging
import signal
import subprocess
import sys
from itertools import islice
from typing import Any

import psutil
from accelerate.commands.launch import launch_command, launch_command_parser
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from .. import embedded
from .._errors import describe_error
from ._fields import read_yaml, split_config


# Options of the launcher that training has too, or that have no use here
_NOT_FORWARDED = {"debug", "env", "gradient_accumulation_steps", "help", "module", "no_python"}
_EPILOG = (
    "Flags of `accelerate launch` are passed on to it, such as --num_processes 4, --multi_gpu or --main_process_port "
    "29501; --accelerate_config FILE names its configuration file. They may be in the file of --config too. "
    "`accelerate launch --help` lists them."
)


def launch(command: str, argv: list[str]) -> int:
    """
    Launches a training command in as many processes as Accelerate is asked for.

    Args:
        command (`str`):
            Training command, such as `"repulse"`.
        argv (`list[str]`):
            Its flags. Those of `accelerate launch` are for the launcher, as are their names in the file of `--config`.

    Returns:
        `int`: Exit status, 1 with a message if the run cannot be launched or has failed.
    """
    prog = f"trl-repulse {command}"
    try:
        path, rest = split_config(argv)
        settings = {} if path is None else read_yaml(path)
        if not {"-h", "--help", "--help-all", "--help_all"}.isdisjoint(rest):
            # transformers (5.23) imports an installed PEFT beside its arguments, half of the time until the help is there
            hidden = "transformers" not in sys.modules and "peft" not in sys.modules
            if hidden:
                sys.modules["peft"] = None
            try:
                from ..arguments import ARGUMENTS, TrainingParser
            finally:
                if hidden:
                    del sys.modules["peft"]

            parser = TrainingParser(ARGUMENTS[command], embedded.settings_path(command), prog=prog, epilog=_EPILOG)
            parser.set_defaults_with_config(**settings)
            print(parser.format_help(not {"--help-all", "--help_all"}.isdisjoint(rest)), end="")
            return 0
        logging.getLogger("accelerate.commands.launch").setLevel(
            logging.ERROR
        )  # its notice is about `accelerate launch`
        launch_command(_parse_launch(prog, [command, *argv], settings))
    except (KeyboardInterrupt, SignalException):
        _wait_for_processes()
        return 130
    except (subprocess.CalledProcessError, ChildFailedError):
        return 1  # the processes have said why
    except (ValueError, OSError) as error:
        print(f"{prog}: {describe_error(error)}", file=sys.stderr)
        return 1
    return 0


def _wait_for_processes() -> None:
    """Lets the processes say how to go on, after Ctrl-C; those that did not get it, since it was sent to this one alone, do."""
    _, running = psutil.wait_procs(psutil.Process().children(), timeout=10)
    for process in running:
        process.send_signal(signal.SIGINT)


def _parse_launch(prog: str, argv: list[str], settings: dict[str, Any]) -> argparse.Namespace:
    """Arguments of `accelerate launch`: those of the line and the file that are its own, this module, and the rest."""
    parser = launch_command_parser()
    parser.prog, parser.usage = prog, "%(prog)s [--config FILE] [--FLAG VALUE ...]"
    parser.add_argument("--accelerate_config", dest="config_file", help="As `--config_file`; the name that `trl` has.")
    options = _options(parser)
    forwarded, rest = [], []
    for name, value in settings.items():
        option = options.get(f"--{name}")
        if option is not None and (option.nargs != 0 or value):
            forwarded += [f"--{name}"] if option.nargs == 0 else [f"--{name}", str(value)]
    words = iter(argv)
    for word in words:
        option = options.get(word.partition("=")[0])
        if option is None:
            rest.append(word)
            continue
        forwarded += [word, *islice(words, 0 if option.nargs == 0 or "=" in word else 1)]
    return parser.parse_args([*forwarded, "--module", "trl_repulse._commands.train", *rest])


def _options(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """The launcher's own flags."""
    actions = [action for action in parser._actions if action.dest not in _NOT_FORWARDED]
    return {flag: action for action in actions for flag in action.option_strings if flag.startswith("--")}


if __name__ == "__main__":
    try:
        from ..methods import train
        from ..scripts import main_or_exit
    except KeyboardInterrupt:
        sys.exit("Interrupted.")

    names = [flag.removeprefix("--") for flag in _options(launch_command_parser())]
    main_or_exit(lambda: train(sys.argv[1], sys.argv[2:], [*names, "accelerate_config"]))
