"""The console command `trl-repulse`.

[`trl_repulse.cli.train`] launches the training commands. Each other command has a module, which is imported when the
command is given. Its function `add_arguments(parser)` declares the arguments and sets `run`, which takes them and returns
the exit status. `gcg` has the fields of dataclasses as arguments, as training has.
"""

import argparse
import sys
from dataclasses import fields
from functools import cache
from importlib import import_module
from pathlib import Path

from .. import __version__
from .._errors import describe_error, did_you_mean, from_reward
from ._early import launcher_names, read_early, without_torch
from ._fields import Parser, check_inputs, check_numbers, check_outputs, keep_writing, split_config


# Training command -> what it does in one line
TRAINING = {
    "repulse": "train with RePULSe: REINFORCE and a negative term on bad samples",
    "reinforce": "train with REINFORCE, with or without a reward transform",
    "ppo": "train with PPO",
    "grpo": "train with TRL's GRPO",
    "repulse-ppo": "train with PPO and RePULSe's negative term",
    "repulse-grpo": "train with GRPO and RePULSe's negative term",
}

# Other command, of the module of that name -> what it does in one line
COMMANDS = {
    "attacks": "measure how often templates, prefilled answers and augmented prompts succeed",
    "audit": "draw completions to label, and measure the errors of a judge from the labels",
    "compare": "compare stored samples of the same prompts",
    "diagnose": "look for symptoms of failure in the log of a training run",
    "evaluate": "sample from a model, and report the lower tail of its reward",
    "gcg": "measure how often attacks on a model succeed",
    "gcg-report": "report attack success rates from results, without a model",
    "negatives": "make preference data of bad completions and samples",
    "rare-events": "estimate how often a model produces its rarest outputs",
    "serve-reward": "serve a reward over HTTP, for trainers elsewhere",
    "suggest": "sample from a model, and suggest settings to train it with",
}


def build_parser(command: str | None = None, config: Path | None = None) -> argparse.ArgumentParser:
    """Builds the parser of the console command, with the arguments of one sub-command; the modules of the others are not imported.
    `config` is a YAML file with arguments of it, over which flags win. Raises a `ValueError` if the file cannot be used."""
    parser = Parser("trl-repulse", description="RePULSe for TRL: training, and tools around it.")
    parser.add_argument("--version", action="version", version=f"trl-repulse {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, summary in TRAINING.items():
        commands.add_parser(name, help=summary)
    for name, summary in COMMANDS.items():
        subparser = commands.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
        if name == command:
            import_module(f"trl_repulse.cli.{name.replace('-', '_')}").add_arguments(subparser)
            help = "YAML file with arguments by name, or that of a training command; flags win over it"
            subparser.add_argument("--config", metavar="FILE", help=help)
            subparser.take_training_names(lambda: without_torch(training_names))
            if config is not None:
                subparser.set_defaults_from(config)
    return parser


@cache
def training_names() -> frozenset[str]:
    """Names that the file of a training command may have: of its arguments, and of the launcher's."""
    from trl import ModelConfig

    from .arguments import ARGUMENTS

    classes = {ModelConfig, *(cls for pair in ARGUMENTS.values() for cls in pair)}
    return frozenset({"env", *launcher_names(), *(field.name for cls in classes for field in fields(cls))})


def main(argv: list[str] | None = None) -> int:
    """Runs the console command and returns its exit status. Mistakes of the user, and errors of a reward function, end it with one
    line. Wrong arguments exit with status 2."""
    keep_writing()
    argv = sys.argv[1:] if argv is None else argv
    command = next((argument for argument in argv if not argument.startswith("-")), None)
    known = [*TRAINING, *COMMANDS]
    if command is not None and command not in known:
        hint = did_you_mean(command, known)
        build_parser().error(f"there is no command `{command}`.{hint} The commands are {', '.join(known)}.")
    try:
        if (argv[:1] == [command] and command in TRAINING) or command == "gcg":
            if text := without_torch(read_early, command, argv[1:]):
                print(text, end="")
                return 0
            if command == "gcg":
                from .gcg import main as gcg

                return gcg(argv[1:])
            from .train import launch

            return launch(command, argv[1:])
        config, argv = split_config(argv)
        args = build_parser(command, config).parse_args(argv)
        check_numbers(args)
        check_inputs(args)
        check_outputs(args)
        return args.run(args)
    except KeyboardInterrupt:
        print(f"trl-repulse {command}: interrupted", file=sys.stderr)
        return 130
    except Exception as error:  # a reward function may raise any
        expected = ValueError | OSError | ImportError | OverflowError
        if command not in TRAINING:
            expected |= RuntimeError  # of torch: weights that do not fit, memory that is full
        if not (isinstance(error, expected) or from_reward(error)):
            raise
        print(f"trl-repulse {command}: {describe_error(error)}", file=sys.stderr)
        return 1
