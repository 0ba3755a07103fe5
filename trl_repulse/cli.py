"""The console command `trl-repulse`.

`TRAINING` names the commands that train, which `trl_repulse._commands.train` launches. `COMMANDS` names each of the
others and its module, which is imported once the command is asked for and has a function `add_arguments(parser)` that
declares its arguments and, with `parser.set_defaults(run=...)`, what it does. Each of them takes
`--config` as well. The arguments of `gcg` are fields, as those of training are.
"""

import argparse
import sys
from importlib import import_module
from pathlib import Path

from trl_repulse import __version__
from trl_repulse._commands._fields import Parser, split_config
from trl_repulse._commands._streams import keep_writing
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
            subparser.add_argument(
                "--config", metavar="FILE", help="YAML file with arguments by name; flags win over it"
            )
            if config is not None:
                subparser.set_defaults_from(config)
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
        if command == "gcg":
            from ._commands.gcg import main as gcg  # imports TRL

            return gcg(argv[1:])
        try:
            config, argv = split_config(argv)
            parser = build_parser(command, config)
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
