"""Arguments of the training commands: their dataclasses, their parser and its help."""

import argparse
import inspect
import re
import shutil
import sys
import textwrap
from collections.abc import Collection, Iterable
from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import Any, NoReturn, get_type_hints

from trl import GRPOConfig, ModelConfig, ScriptArguments, TrlParser

from .. import configs, embedded
from ..configs._checks import parse_objects, require, require_at_least
from ..configs.shared_config import WholePrompts, documented
from ._fields import Parser, check_inputs, split_config


@documented
@dataclass
class TrainingScriptArguments(ScriptArguments):
    """
    Arguments of the training commands, in addition to the trainer's configuration and [`~trl.ModelConfig`].

    Includes those of [`~trl.ScriptArguments`]. `dataset_name` may also be a .jsonl, .json, .csv or .parquet file.

    Args:
        reward_model_path (`str`, *optional*):
            Reward model: a path, a Hub id, or a server's address.
        reward_type (`str`, *optional*):
            `"sequence_pair"`, `"chat"`, `"toxicity"`, `"guard"`, `"remote"`, or a function,
            `path/to/file.py:function`, as in [`~trl_repulse.rewards.loading.load_reward`]. If unset, TRL's own
            treatment of sequence classifiers.
        reward_kwargs (`dict` or `str`, *optional*):
            Further arguments of the reward, e.g. `{"max_length": 300}`; on the command line as JSON.
        prompt_column (`str`, *optional*, defaults to `"prompt"`):
            Column of the data set that holds the prompts.
        apply_chat_template (`bool`, *optional*, defaults to `False`):
            Whether to make plain prompts messages of a user, in the chat template.
        single_prompt (`str`, *optional*):
            The one prompt to train on, in place of the rows of `dataset_name`.
        max_prompt_length (`int`, *optional*):
            Prompts of more tokens are left out.
        eval_dataset_name (`str`, *optional*):
            Held-out prompts, evaluated by sampling after training: a file, or the `dataset_test_split` of a data set.
        eval_prompt_column (`str`, *optional*):
            Column of the held-out prompts. If unset, `prompt_column`.
        train_batch_size (`int`, *optional*):
            Completions of one update, over all processes. If set, it determines `gradient_accumulation_steps`, on any
            number of devices.
        lr_decay_ratio (`float`, *optional*):
            Share of the updates, the last ones, over which `warmup_stable_decay` lets the learning rate fall to 0,
            linearly. If set, and not 0, it determines `num_decay_steps` from `max_steps`.
        num_final_samples (`int`, *optional*, defaults to `0`):
            Completions of each held-out prompt that estimate P(bad) before and after training, and as many of hotter
            copies. 0: no estimate. Needs `eval_dataset_name` and a `bad_reward_threshold`.
        num_table_completions (`int`, *optional*, defaults to `10`):
            Completions in the table of before and after training. 0: no table.
    """

    reward_model_path: str | None = None
    reward_type: str | None = None
    reward_kwargs: dict | str | None = None
    prompt_column: str = "prompt"
    apply_chat_template: bool = False
    single_prompt: str | None = None
    max_prompt_length: int | None = None
    eval_dataset_name: str | None = None
    eval_prompt_column: str | None = None
    train_batch_size: int | None = None
    lr_decay_ratio: float | None = None
    num_final_samples: int = 0
    num_table_completions: int = 10

    def __post_init__(self):
        require_at_least(self, 0, "num_table_completions")
        require(self, (n := self.num_final_samples) == 0 or n > 1, "num_final_samples", "must be 0, or at least 2")
        parse_objects(self, "reward_kwargs")


@documented
@dataclass
class PPOScriptArguments(TrainingScriptArguments):
    """
    [`TrainingScriptArguments`] of the commands with a value model.

    Args:
        value_model_path (`str`, *optional*):
            Value model: a path or a Hub id, e.g. of the reward model. If unset, the policy.
    """

    value_model_path: str | None = None


@dataclass
class _GRPOConfig(WholePrompts, GRPOConfig):
    """TRL's, with the evaluation batch and the precedence of `bf16` and `fp16` of all commands."""


# Training command -> dataclasses of its own arguments and of the trainer's configuration
ARGUMENTS: dict[str, tuple[type, type]] = {
    "repulse": (TrainingScriptArguments, configs.RePULSeConfig),
    "reinforce": (TrainingScriptArguments, configs.ReinforceConfig),
    "ppo": (PPOScriptArguments, configs.PPOConfig),
    "grpo": (TrainingScriptArguments, _GRPOConfig),
    "repulse-ppo": (PPOScriptArguments, configs.RePULSePPOConfig),
    "repulse-grpo": (TrainingScriptArguments, configs.RePULSeGRPOConfig),
}


class FieldsParser(Parser, TrlParser):
    """[`~trl.TrlParser`] that raises mistakes as one line each, and reads a YAML file as it reads flags."""

    description = "Every flag is also a key of the YAML file that --config names; flags win over the file."

    def __init__(self, dataclass_types: Iterable[type], **kwargs: Any):
        usage = "%(prog)s [--config FILE] [--FLAG VALUE ...]"
        super().__init__(dataclass_types, **{"usage": usage, "description": self.description} | kwargs)
        self.hints = {name: hint for cls in dataclass_types for name, hint in get_type_hints(cls).items()}

    def error(self, message: str) -> NoReturn:
        """Raises a `ValueError`."""
        raise ValueError(message)

    def parse_args_and_config(self, args: Iterable[str] | None = None, **kwargs: Any) -> tuple[Any, ...]:
        """Reads the command line, and the YAML file that `--config` names, into an instance of each dataclass. Flags win over the file.
        `kwargs` are those of `parse_args_into_dataclasses`. Raises a `ValueError` if a name is unknown, or a value cannot be read or is
        refused by its dataclass."""
        return self.parse_args_into_dataclasses(self.read_config(args), **kwargs)

    def read_config(self, args: Iterable[str] | None = None) -> list[str]:
        """Makes the values in the file that `--config` names the defaults. Returns the other words of the command line."""
        path, argv = split_config(sys.argv[1:] if args is None else list(args))
        if path is not None:
            self.set_defaults_from(path)
        return argv


_EPILOG = (
    "Flags of `accelerate launch` are passed on to it, such as --num_processes 4, --multi_gpu or --main_process_port 29501; "
    "--accelerate_config FILE names its configuration file. They may be in the file of --config too. `accelerate launch --help` lists them."
)
# Fields of TRL and transformers that `--help` lists
_COMMON = """
    model_name_or_path output_dir max_steps learning_rate per_device_train_batch_size num_generations max_completion_length
    temperature beta bf16 use_cpu use_vllm use_peft seed save_steps resume_from_checkpoint
""".split()


class _HelpAll(argparse._HelpAction):
    """Prints the help of all flags."""

    def __call__(self, parser: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> None:
        parser._print_message(parser.format_help(all_flags=True), sys.stdout)
        parser.exit()


class TrainingParser(FieldsParser):
    """[`FieldsParser`] of a training command. `--help` lists the method's flags and the common ones, `--help-all` all flags.

    `classes` are the dataclasses of the command's own arguments and of the trainer's configuration, to which [`~trl.ModelConfig`] is
    added. The help names `default_config`, the settings file of a run without `--config` and `--model_name_or_path`."""

    def __init__(self, classes: tuple[type, type], default_config: str, **kwargs: Any):
        description = (
            f"{self.description} In parentheses is the value that will apply, or what decides it, for a model of your own, and "
            "with the file where --config is given too; "
            f"flags may change values that others depend on. Without --config and --model_name_or_path the command trains in the embedded world, with the settings of {default_config}."
        )
        super().__init__((*classes, ModelConfig), **{"description": description} | kwargs)
        self.add_argument("--help-all", "--help_all", action=_HelpAll, dest=argparse.SUPPRESS, help="list all flags")

    def format_help(self, all_flags: bool = False) -> str:
        """The help of the method's, the command's and the common flags, a line each; or that of all flags in full."""
        if all_flags:
            return super().format_help()
        script, config, _ = self.dataclass_types
        shared = {each.name for each in fields(GRPOConfig)}
        # What a subclass adds comes first
        own = {cls: [n for base in cls.__mro__ for n in inspect.get_annotations(base)] for cls in (config, script)}
        values = SimpleNamespace(**{action.dest: action.default for action in self._actions})
        if issubclass(config, configs.NegativeTermConfig):
            config.fill_in(values)  # what is unset
        sections = {
            f"{config.__name__}: the method": [name for name in own[config] if name not in shared],
            "reward, prompts and tracking": own[script],
            "common fields (`--help-all` lists all, in full)": _COMMON,
        }
        actions = {action.dest: action for action in reversed(self._actions) if action.nargs != 0}  # no `--no_...`
        width = max(shutil.get_terminal_size().columns, 80) - 2
        description, *epilog = (textwrap.fill(text, width) for text in (self.description, self.epilog) if text)
        listed = [
            _in_lines(title, [actions[name] for name in dict.fromkeys(names)], vars(values), width)
            for title, names in sections.items()
            if names
        ]
        return "\n\n".join([self.format_usage().rstrip(), description, *listed, *epilog]) + "\n"


def _in_lines(title: str, actions: list[argparse.Action], values: dict[str, Any], width: int) -> str:
    """A section of the short help, in lines of `width` characters. Each flag has a line: the first sentence of its help, and the value that
    will apply: that in `values`, by flag, or what decides it."""
    column, lines = 4 + max(len(action.dest) for action in actions), [f"{title}:"]
    for action in actions:
        text = action.help.replace("%%", "%")
        value = str(values[action.dest])
        if values[action.dest] is None:  # then the help says what decides, if anything does
            decides = re.search(r"If (?:unset|`None`), (.+?)(?:[.;,] |\.$)", text)
            value = re.sub(r"^`(\w+)`$", r"as \1", decides[1]) if decides else "unset"  # `name` -> as name
        value = textwrap.shorten(value, width=26, placeholder="...")
        sentence = re.split(r"[.:;] (?=[A-Z])|\.$", text)[0]
        room = width - column - 5 - len(value)
        lines.append(f"  {'--' + action.dest:{column}}{textwrap.shorten(sentence, room, placeholder='...')} ({value})")
    return "\n".join(lines)


def check_arguments(command: str, argv: list[str], launcher_keys: Collection[str]) -> str:
    """Checks what needs no torch of a training command's arguments, as [`parse`] does: names, values that flags take, paths, and the
    command's own arguments. Returns the help if they ask for it, else nothing. Raises a `ValueError` for wrong ones."""
    (script, _), default_config = ARGUMENTS[command], embedded.settings_path(command)
    parser = TrainingParser(ARGUMENTS[command], default_config, prog=f"trl-repulse {command}", epilog=_EPILOG)
    parser.others = {*launcher_keys, *of_the_method(command)}
    everything = not {"--help-all", "--help_all"}.isdisjoint(argv)
    if everything or not {"-h", "--help"}.isdisjoint(argv):
        parser.set_defaults_with_config(use_cpu="True without a GPU", bf16="True with a GPU")  # which torch knows
        parser.read_config(argv)
        return parser.format_help(everything)
    args, _ = parser.parse_known_args(parser.read_config(_with_config(argv, default_config)))
    check_inputs(args)
    script_args = script(**{each.name: getattr(args, each.name) for each in fields(script)})
    if args.model_name_or_path is not None:
        _check_named(script_args, args.eval_strategy)
    return ""


def of_the_method(command: str) -> set[str]:
    """Fields that the method with a negative term has and `command` has not, if it is the baseline of one, else none."""
    method = {"reinforce": "repulse", "ppo": "repulse-ppo", "grpo": "repulse-grpo"}.get(command, command)
    of_method, own = ({field.name for cls in ARGUMENTS[name] for field in fields(cls)} for name in (method, command))
    return of_method - own


def _with_config(argv: list[str], default_config: str) -> list[str]:
    """`argv`, behind `--config default_config` if it names neither settings nor a model and asks for no help."""
    flags = {word.partition("=")[0].replace("-", "_") for word in argv}
    named = flags & {"__config", "__model_name_or_path", "_h", "__help", "__help_all"}
    return argv if named else ["--config", default_config, *argv]


def parse(
    argv: list[str], classes: tuple[type, type], default_config: str, launcher_keys: Collection[str] = ()
) -> tuple[Any, Any, ModelConfig]:
    """
    Reads the arguments of a training command, from the command line and the YAML file that `--config` names. Flags win.

    Without `--config` and `--model_name_or_path` it reads `default_config` and gives the paths of the embedded world. `classes` are
    the dataclasses of the command's own arguments (a [`TrainingScriptArguments`]) and of the trainer's configuration, which
    are returned filled in, with [`~trl.ModelConfig`]. The file may have `launcher_keys`, the launcher's arguments, too. Raises a
    `ValueError` if arguments are unknown, cannot be read, are out of range or missing, or contradict one another.
    """
    import torch
    from accelerate.utils import get_int_from_env

    argv, parser = _with_config(argv, default_config), TrainingParser(classes, default_config)
    parser.others = launcher_keys
    if not torch.accelerator.is_available():
        parser.set_defaults_with_config(use_cpu=True, bf16=False)
    given, _ = parser.parse_known_args(parser.read_config(argv))  # TRL's checks need the passes of an update
    if (size := given.train_batch_size) is not None:
        processes = get_int_from_env(["WORLD_SIZE"], 1)
        a_pass = given.per_device_train_batch_size * processes
        if size < 1 or size % a_pass:
            raise ValueError(
                f"`train_batch_size={size}` is no multiple of the {a_pass} completions of one pass "
                f"(`per_device_train_batch_size` times {processes} processes); change one of them."
            )
        argv = [*argv, "--gradient_accumulation_steps", str(size // a_pass)]
    script_args, args, model_args = parser.parse_args_and_config(argv)
    if size is not None and args.world_size != processes:
        raise ValueError(
            f"`train_batch_size` needs WORLD_SIZE={args.world_size} in the environment; use `accelerate launch`."
        )
    if script_args.lr_decay_ratio:
        steps = _decay_steps(script_args.lr_decay_ratio, args)
        more = args.lr_scheduler_kwargs or {}
        args.lr_scheduler_kwargs = {"decay_type": "linear", **more, "num_decay_steps": steps}
    if model_args.model_name_or_path is None:
        if script_args.reward_type is None or ".py:" not in script_args.reward_type:
            script_args.reward_model_path = script_args.reward_model_path or embedded.reward_model_path()
        script_args.dataset_name = script_args.dataset_name or embedded.prompts_path()
        script_args.eval_dataset_name = script_args.eval_dataset_name or embedded.prompts_path("unseen")
    _check_named(script_args, args.eval_strategy)
    args.model_init_kwargs = {
        "revision": model_args.model_revision,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
        **(args.model_init_kwargs or {}),
    }
    return script_args, args, model_args


def _check_named(script_args: TrainingScriptArguments, eval_strategy: str) -> None:
    """Refuses arguments that name no reward or no prompts."""
    needed = ["dataset_name"] if script_args.single_prompt is None else []
    for name in ["reward_model_path"] * (script_args.reward_type is None) + needed:
        if getattr(script_args, name) is None:
            raise ValueError(f"`--{name}` is needed with `--model_name_or_path`; give a path or a Hub name.")
    if eval_strategy != "no" and script_args.dataset_name is None and script_args.eval_dataset_name is None:
        raise ValueError("`--eval_strategy` needs held-out prompts; give `--eval_dataset_name`.")
    if script_args.num_final_samples and script_args.eval_dataset_name is None:
        raise ValueError("`--num_final_samples` needs held-out prompts; give `--eval_dataset_name`.")


def _decay_steps(ratio: float, args: Any) -> int:
    """Updates over which the learning rate falls: `ratio` of `max_steps`. Raises a `ValueError` if it is out of range or has no effect."""
    if not 0 < ratio <= 1:
        raise ValueError(f"`lr_decay_ratio={ratio}` must be from 0 (another schedule) to 1.")
    if args.lr_scheduler_type != "warmup_stable_decay" or args.max_steps <= 0:
        raise ValueError(
            f"`lr_decay_ratio={ratio}` is a share of `max_steps` in `lr_scheduler_type='warmup_stable_decay'`; set both, or set it to 0."
        )
    return max(round(ratio * args.max_steps), 1)
