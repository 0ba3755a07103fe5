"""
The training commands, which run through `accelerate launch` as `trl grpo` does.

`python -m trl_repulse.cli.train COMMAND [flags]` is what each process of the launcher runs. The launcher itself
imports neither TRL nor the trainers.
"""

import argparse
import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from itertools import islice
from typing import Any

import psutil
from accelerate.commands.launch import launch_command, launch_command_parser
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from ._early import NOT_FORWARDED, launcher_names
from ._fields import read_yaml, split_config


_LAUNCHER = "TRL_REPULSE_LAUNCHER"  # environment variable: the launcher's process, with which training ends


def launch(command: str, argv: list[str]) -> int:
    """Launches a training command. `accelerate launch` takes its own options from the flags and from the file of `--config`.
    Returns the exit status: 0, 130 after a signal, or that of [`_status`]."""
    prog, (path, _) = f"trl-repulse {command}", split_config(argv)
    settings = {} if path is None else read_yaml(path)
    logging.getLogger("accelerate.commands.launch").setLevel(logging.ERROR)  # its notice is about `accelerate launch`
    os.environ[_LAUNCHER] = str(os.getpid())
    try:
        with _signals_passed_on():
            launch_command(_parse_launch(prog, [command, *argv], settings))
    except (KeyboardInterrupt, SignalException):
        # The processes say how to resume. They got no Ctrl-C if it was sent to this process alone
        left = psutil.wait_procs(psutil.Process().children(), timeout=10)[1]
        for process in left:
            process.send_signal(signal.SIGINT)
        psutil.wait_procs(left, timeout=30)
        return 130
    except subprocess.CalledProcessError as error:
        return _status(prog, error.returncode)
    except ChildFailedError as error:
        return _status(prog, error.get_first_failure()[1].exitcode)
    finally:
        del os.environ[_LAUNCHER]
    return 0


@contextlib.contextmanager
def _signals_passed_on() -> Iterator[None]:
    """Passes on what ends this process, which `accelerate launch` does not do for a single process."""

    def pass_on(number: int, frame: Any) -> None:
        """Sends the signal to all children. Without any, this process ends as the signal would end it."""
        children = psutil.Process().children()
        for process in children:
            process.send_signal(number)
        if not children:
            sys.exit(128 + number)

    taken = [each for each in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(each) is signal.SIG_DFL]
    for number in taken:
        signal.signal(number, pass_on)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


def _status(prog: str, code: int) -> int:
    """The command's exit status for that of a training process: 128 and the number of the signal that ended it (printed), else 1."""
    if code >= 0:
        return 1
    full = ", which is what the system does when memory is full; lower `per_device_train_batch_size`, or free memory"
    why = full if -code == signal.SIGKILL else ""
    print(f"{prog}: training was ended by the signal {signal.Signals(-code).name}{why}.", file=sys.stderr)
    return 128 - code


def _end_with_launcher() -> None:
    """Ends this process once its launcher has ended, even if by a signal that cannot be passed on."""
    launcher, parent = int(os.environ.pop(_LAUNCHER)), os.getppid()
    while os.getppid() == parent and psutil.pid_exists(launcher):
        time.sleep(1)
    os.kill(os.getpid(), signal.SIGKILL)


def _parse_launch(prog: str, argv: list[str], settings: dict[str, Any]) -> argparse.Namespace:
    """Arguments of `accelerate launch`: its options in `settings` (the file) and `argv`, which wins, this module, and all other words."""
    parser = launch_command_parser()
    parser.prog, parser.usage = prog, "%(prog)s [--config FILE] [--FLAG VALUE ...]"
    parser.add_argument("--accelerate_config", dest="config_file", help="As `--config_file`; the name that `trl` has.")
    options = _options(parser)
    forwarded, for_training, words = [], [], iter(argv)
    for name, value in settings.items():
        option = options.get(f"--{name}")
        if value is False and option is not None and "no" in (option.choices or ()):
            value = "no"  # as PyYAML does not read it
        if option is not None and value is not None and (option.nargs != 0 or value):
            forwarded += [f"--{name}"] if option.nargs == 0 else [f"--{name}", str(value)]
    for word in words:
        option = options.get(word.partition("=")[0])
        if option is None:
            for_training.append(word)
        else:
            forwarded += [word, *islice(words, 0 if option.nargs == 0 or "=" in word else 1)]
    return parser.parse_args([*forwarded, "--module", "trl_repulse.cli.train", *for_training])


def _options(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """The launcher's actions by flag, without those of [`NOT_FORWARDED`]."""
    actions = [action for action in parser._actions if action.dest not in NOT_FORWARDED]
    return {flag: action for action in actions for flag in action.option_strings if flag.startswith("--")}


if __name__ == "__main__":
    if _LAUNCHER in os.environ:
        threading.Thread(target=_end_with_launcher, daemon=True).start()
    try:
        from .methods import train
        from .scripts import main_or_exit
    except KeyboardInterrupt:
        sys.exit("Interrupted.")

    main_or_exit(lambda: train(sys.argv[1], sys.argv[2:], launcher_names()))
