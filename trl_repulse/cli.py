"""The console command `trl-repulse`.

`TRAINING` names the commands that train, which `trl_repulse._commands.train` launches. `COMMANDS` names each of the
others and its module, which is imported once the command is asked for and has a function `add_arguments(parser)` that
declares its arguments and, with `parser.set_defaults(run=...)`, what it does. Each of them but
`serve-reward`, which has sub-commands, takes `--config` as well.
"""

import argparse
import io
import os
import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from trl_repulse import __version__
from trl_repulse._commands._fields import add_config, with_config
from trl_repulse._errors import describe_error, did_you_mean


# Training command -> what it does in one line
TRAINING = {
    "repulse": "train with RePULSe: REINFORCE and a negative term on bad samples",
    "reinforce": "train with REINFORCE, with or without a reward transform",
    "ppo": "train with PPO",
    "grpo": "train with TRL's GRPO, with or without a reward transform",
    "repulse-ppo": "train with PPO and RePULSe's negative term",
    "repulse-grpo": "train with GRPO and RePULSe's negative term",
}

# Other command -> its module, and what it does in one line
COMMANDS = {
    "diagnose": ("trl_repulse._commands.diagnose", "look for symptoms of failure in the log of a training run"),
    "evaluate": ("trl_repulse._commands.evaluate", "sample from a model, and report the lower tail of its reward"),
    "gcg": ("trl_repulse._commands.gcg", "measure how often attacks on a model succeed"),
    "gcg-report": ("trl_repulse._commands.gcg_report", "report attack success rates from results, without a model"),
    "merge": ("trl_repulse._commands.merge", "merge a saved adapter into the full weights of its base"),
    "negatives": ("trl_repulse._commands.negatives", "make preference data of bad completions and samples"),
    "rare-events": ("trl_repulse._commands.rare_events", "estimate how often a model produces its rarest outputs"),
    "serve-reward": ("trl_repulse._commands.serve_reward", "serve a reward over HTTP, for trainers elsewhere"),
    "suggest": ("trl_repulse._commands.suggest", "sample from a model, and suggest settings to train it with"),
}

# What argparse takes for a number, not for an option; its own (Python 3.11) knows neither `-1e1` nor `-inf`
NEGATIVE_NUMBER = re.compile(r"-(?:\.?\d|inf(?:inity)?$|nan$)", re.IGNORECASE)


class Parser(argparse.ArgumentParser):
    """
    A parser, and the sub-parsers it makes, that take `-1e1` and `-inf` for numbers, not for options, and say which option
    is the nearest to an unknown one.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._negative_number_matcher = NEGATIVE_NUMBER

    def parse_known_args(self, args=None, namespace=None):
        """As [`argparse.ArgumentParser.parse_known_args`], but unknown options end with a message here too."""
        namespace, unknown = super().parse_known_args(args, namespace)
        if unknown:
            # Not their values: one may be an address with a key
            flags = [text.partition("=")[0] for text in unknown if text.startswith("-")] or unknown
            known = [option for action in self._actions for option in action.option_strings]
            self.error(f"unrecognized arguments: {' '.join(flags)}.{did_you_mean(flags[0], known)}")
        return namespace, unknown


class _Stream(io.FileIO):
    """A standard stream that loses what nobody reads any more, as where it was piped to `head`."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            return len(data)


def keep_writing() -> None:
    """
    Lets nothing that a command says end it: readers may leave, the shell may have closed a stream, and letters that the
    locale lacks are written as escapes. Streams that a caller has put in place of Python's stay as they are.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))
        elif stream is getattr(sys, f"__{name}__"):
            stream.flush()
            raw = _Stream(stream.fileno(), "w", closefd=False)
            whole = raw if stream.write_through else io.BufferedWriter(raw)
            options = {"line_buffering": stream.line_buffering, "write_through": stream.write_through}
            setattr(sys, name, io.TextIOWrapper(whole, stream.encoding, "backslashreplace", **options))


def build_parser(command: str | None = None, config: Path | None = None) -> argparse.ArgumentParser:
    """
    The parser of the console command.

    Args:
        command (`str`, *optional*):
            Sub-command whose arguments are declared; those of the others stay unknown, and their modules unloaded.
        config (`Path`, *optional*):
            YAML file with arguments of the sub-command, which flags win over.

    Returns:
        `argparse.ArgumentParser`: The parser.

    Raises:
        `ValueError`: If the file cannot be used.
    """
    parser = Parser("trl-repulse", description="RePULSe for TRL: training, and tools around it.")
    parser.add_argument("--version", action="version", version=f"trl-repulse {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, summary in TRAINING.items():
        commands.add_parser(name, help=summary)
    for name, (module, summary) in COMMANDS.items():
        subparser = commands.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
        if name == command:
            import_module(module).add_arguments(subparser)
            if "--config" not in subparser._option_string_actions and subparser._subparsers is None:
                add_config(subparser, config)
    return parser


def main(argv: list[str] | None = None) -> int:
    """
    Runs the console command.

    Args:
        argv (`list[str]`, *optional*):
            Arguments, by default those of the process.

    Returns:
        `int`: Exit status; wrong arguments exit with status 2 before that.
    """
    keep_writing()
    argv = sys.argv[1:] if argv is None else argv
    command = next((argument for argument in argv if not argument.startswith("-")), None)
    known = [*TRAINING, *COMMANDS]
    if command is not None and command not in known:
        hint = did_you_mean(command, known)
        build_parser().error(f"there is no command `{command}`.{hint} The commands are {', '.join(known)}.")
    try:
        if argv[:1] == [command] and command in TRAINING:
            from ._commands.train import launch  # imports torch

            return launch(command, argv[1:])
        try:
            argv = with_config(argv)
            if argv.count("--config") > 1 or {"--co", "--con", "--conf"}.intersection(
                arg.split("=")[0] for arg in argv
            ):
                raise ValueError("`--config` is to be given once, and in full.")
            parser = build_parser(command, Path(argv[argv.index("--config") + 1]) if "--config" in argv else None)
        except ValueError as error:  # of the file of `--config`
            print(f"trl-repulse {command}: {error}", file=sys.stderr)
            return 1
        args = parser.parse_args(argv)
        return args.run(args)
    except KeyboardInterrupt:
        print(f"trl-repulse {command}: interrupted", file=sys.stderr)
        return 130
    except ImportError as error:  # of an optional package
        print(f"trl-repulse {command}: {describe_error(error)}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
