"""The parser of all commands, arguments that several commands have, and streams that do not end a command."""

import argparse
import io
import json
import logging
import math
import os
import re
import sys
from collections.abc import Callable, Collection, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml

from .._errors import did_you_mean, unknown_name


# argparse (Python 3.11) takes neither `-1e1` nor `-inf` for a number
_NEGATIVE_NUMBER = re.compile(r"-(?:\.?\d|inf(?:inity)?$|nan$)", re.IGNORECASE)


class _Loader(yaml.SafeLoader):
    """Refuses a mapping that has a key twice; PyYAML takes the last one."""

    def compose_mapping_node(self, anchor: Any) -> Any:
        """PyYAML's step that reads a mapping. Raises a `ValueError` that names the key and both lines."""
        node, seen = super().compose_mapping_node(anchor), {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                first = seen.setdefault(key.value, key)
                if first is not key:
                    lines = (each.start_mark.line + 1 for each in (first, key))
                    raise ValueError("has `{}` on line {} and again on line {}; keep one".format(key.value, *lines))
        return node


# Plain words as YAML 1.2 and flags have them: `0123`, `2024_01_15` and dates are text, and `1e-6` is a number
_Loader.yaml_implicit_resolvers = {
    first: [(tag, regexp) for tag, regexp in pairs if tag.rpartition(":")[2] not in ("int", "timestamp")]
    for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"[-+]?(?:0|[1-9]\d*)$"), list("-+0123456789"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"[-+]?\d+[eE][-+]\d+$"), list("-+0123456789"))


def read_yaml(path: Path) -> dict[str, Any]:
    """The settings in a YAML file, by name. Raises a `ValueError` if it cannot be read, is no mapping, or has a name twice."""
    if not path.is_file():
        raise ValueError(f"There is no file `{path}`, which `--config` names; give the path of a YAML file.")
    try:
        with path.open(encoding="utf-8") as file:
            values = yaml.load(file, _Loader) or {}
    except (OSError, UnicodeError, yaml.YAMLError) as error:
        raise ValueError(f"`{path}` is not valid YAML, correct it: {' '.join(str(error).split())}") from error
    except ValueError as error:
        raise ValueError(f"`{path}` {error}.") from None
    if not isinstance(values, dict):
        raise ValueError(f"`{path}` must hold arguments by name, such as `seed: 1`.")
    return values


class Parser(argparse.ArgumentParser):
    """A parser that takes full names only, reads `-1e1` and `-inf` as numbers, suggests the nearest name for an unknown one, and reads a
    YAML file as it reads flags. Its sub-parsers do the same."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **{"allow_abbrev": False} | kwargs)
        self._negative_number_matcher = _NEGATIVE_NUMBER
        self.others: Collection[str] = ()  # names that the file may have too: of a launcher, or of a baseline's method
        self.names_in_files: Callable[[], Collection[str]] | None = None
        # Types by name, if the arguments are fields of dataclasses; these may be `None`
        self.hints: Mapping[str, Any] | None = None

    def parse_known_args(self, args=None, namespace=None):
        """As [`argparse.ArgumentParser.parse_known_args`], but an unknown option is an error."""
        namespace, unknown = super().parse_known_args(args, namespace)
        if unknown:
            # Without its value, which may be an address with a key
            flag = next((text for text in unknown if text.startswith("-")), unknown[0]).partition("=")[0]
            known = [*self._option_string_actions, *(f"--{name}" for name in self.others)]
            name = flag.lstrip("-").replace("-", "_")
            name = next((names[0] for names in SYNONYMS if name in names), name)  # as training commands have it
            self.error(f"`{flag}` is no argument; remove it.{did_you_mean(f'--{name}', known)}")
        revision, of_file = self.get_default("revision"), self.get_default("model")
        model = getattr(namespace, "policy", None) or getattr(namespace, "model", None)
        if None not in (revision, of_file) and getattr(namespace, "revision", None) is revision and model != of_file:
            namespace.revision = None  # a file has that of the model that it names
        for name, value in vars(namespace).items():  # the shell leaves `--output=~/a` and what is in a file
            if isinstance(value, Path) or (name in _INPUTS and str(value).startswith("~")):
                setattr(namespace, name, type(value)(Path(value).expanduser()))
        return namespace, unknown

    def take_training_names(self, names_in_files: Callable[[], Collection[str]] | None = None) -> None:
        """Lets options have the names that training has for them too ([`SYNONYMS`]); these come first in the help. With `names_in_files`,
        which returns all names of training and is slow, the command takes a training command's file."""
        self.names_in_files = names_in_files
        for action in self._actions:
            for names in SYNONYMS:
                if action.option_strings and action.option_strings[0].removeprefix("--") in names:
                    action.option_strings = [f"--{name}" for name in names]
                    self._option_string_actions |= dict.fromkeys(action.option_strings, action)

    def set_defaults_from(self, path: Path) -> None:
        """Makes the values in a YAML file the defaults, converted as those of flags are. The file has options by the names of their flags
        and the others by their `dest`. Of a training command's file other commands take [`OF_TRAINING`] alone. A training command (with
        `hints`) sets the environment variables in `env`. Raises a `ValueError` for an unknown name, or a value that an argument does not take."""
        # Without the `--no_...` of a field
        actions = [action for action in self._actions if not isinstance(action, argparse._StoreFalseAction)]
        named = {name.lstrip("-"): action for action in actions for name in action.option_strings or [action.dest]}
        known = [*named.keys() - {"h", "help", "help-all", "config"}, *self.others]
        values = read_yaml(path)
        if self.names_in_files is not None and values.keys() - known:
            of_training = self.names_in_files()
            if wrong := [name for name in values if name not in OF_TRAINING | of_training]:
                name = min(wrong, key=known.__contains__)  # rather one that the command has not, either
                raise unknown_name(f"`{path}`", name, values[name], {*known, *of_training} - {name})
            taken = _of_training(values, trains="max_steps" in named)
            values = {name: value for name, value in taken.items() if name in named}
        dests = [named[name].dest for name in values if name in named]
        if twice := [name for name in values if name in named and dests.count(named[name].dest) > 1]:
            raise ValueError(f"`{path}` has `{'` and `'.join(twice)}`, which are one argument; keep one.")
        for name, value in values.items():
            if name == "env" and self.hints is not None:  # environment variables, as TRL's parser sets them
                if not isinstance(value, dict | None):
                    raise ValueError(f"`{path}` has `env: {value}`, which must hold environment variables by name.")
                os.environ |= {key: str(each) for key, each in (value or {}).items()}
            elif name not in known:
                raise unknown_name(f"`{path}`", name, value, known)
            elif name not in self.others and (value is not None or self.hints is not None):
                action = named[name]
                try:
                    parsed = _from_file(value, action, (self.hints or {}).get(action.dest))
                except ValueError as error:
                    raise ValueError(f"`{path}` has `{name}: {value}`, which {error}.") from error
                action.required = False
                if isinstance(action, argparse._AppendAction):
                    parsed = _Replaced(parsed)
                self.set_defaults(**{action.dest: parsed})


def _of_training(values: dict[str, Any], trains: bool) -> dict[str, Any]:
    """What other commands take of a training command's settings; of prompts, held-out ones, if there are any and it is not to train."""
    taken = {name: value for name, value in values.items() if name in OF_TRAINING}
    if trains:
        return taken
    if values.get("eval_dataset_name") is not None or values.get("eval_strategy", False) not in (False, "no"):
        taken["dataset_train_split"] = values.get("dataset_test_split") or "test"
    if values.get("eval_dataset_name") is not None:
        taken["dataset_name"] = values["eval_dataset_name"]
        taken.pop("dataset_config", None)  # is of the training data
        taken["prompt_column"] = values.get("eval_prompt_column") or values.get("prompt_column")
        if taken["dataset_train_split"] == "test" and Path(taken["dataset_name"]).expanduser().is_file():
            taken["dataset_train_split"] = "train"  # a file has one split
    return taken


class _Replaced(list):
    """Default of a flag that appends. argparse copies it before it appends the first flag, so that flags win over the file."""

    def __copy__(self) -> list[Any]:
        return []


def _from_file(value: Any, action: argparse.Action, hint: Any) -> Any:
    """A YAML value as the flag would give it: PyYAML reads `1e-3` as text, and `off` as false. `hint` is the type of the
    dataclass's field, if there is one. Raises a `ValueError` whose message continues a sentence."""
    several = action.nargs not in (None, 0, "?") or isinstance(action, argparse._AppendAction)
    # Each value of a list is converted
    kept_types = {get_origin(option) or option for option in get_args(hint)} - ({list} if several else set())
    if type(value) in kept_types & {list, dict, type(None)}:
        return value
    if action.choices is not None:
        if isinstance(value, bool):
            words = ("on", "yes", "true") if value else ("off", "no", "false")
            value = next((word for word in words if word in action.choices), value)
        if value not in action.choices:
            raise ValueError(f"must be one of {', '.join(map(str, action.choices))}")
        return value
    if isinstance(value, list) and not several:
        raise ValueError("takes one value; give it without the brackets")
    kind: Any = parse_boolean if action.nargs == 0 else action.type or str

    def convert(each: Any) -> Any:
        """One plain value as the flag's type converts its text. Raises a `ValueError` for a list or mapping."""
        if isinstance(each, dict) and kind is parse_object:
            return each
        if isinstance(each, list | dict):
            raise ValueError("it takes plain values, such as numbers or text")
        return each if kind is str and isinstance(each, bool) else kind(str(each))  # `scale_rewards: false`

    try:
        if not several:
            return convert(value)
        return [convert(each) for each in (value if isinstance(value, list) else [value])]
    except (ValueError, argparse.ArgumentTypeError) as error:
        raise ValueError(f"cannot be read ({error})") from error


def add_prompts(group: Any, required: bool) -> None:
    """Declares the arguments that name prompts."""
    group.add_argument("--prompts", required=required, help="file or data set of prompts")
    group.add_argument("--dataset_config", help="configuration of a data set")
    group.add_argument("--split", default="train", help="split of a data set (train)")
    group.add_argument("--prompt_column", default="prompt", help="column that holds the prompts (prompt)")
    text = "make plain prompts messages of a user, in the chat template"
    group.add_argument("--apply_chat_template", action="store_true", help=text)


def named_prompts(args: argparse.Namespace) -> Any:
    """Loads the prompts that the arguments of [`add_prompts`] name."""
    from ..data.loading import load_prompts

    options = {"column": args.prompt_column, "as_conversation": args.apply_chat_template}
    return load_prompts(args.prompts, args.split, args.dataset_config, **options)


def add_reward(group: Any) -> None:
    """Declares the arguments that name a reward."""
    group.add_argument("--reward_model_path", help="path or Hub id of the reward model, or a server's address")
    group.add_argument("--reward_type", help="kind of reward, as in the training commands (TRL's own treatment)")
    group.add_argument(
        "--reward_kwargs", metavar="JSON", type=parse_object, default={}, help="further arguments of the reward"
    )


def add_options(group: Any, *names: str, **options: Any) -> None:
    """Declares arguments that several commands have, by name. `options` are for all of them."""
    for name in names:
        group.add_argument(f"--{name}", **SHARED[name] | options)


def parse_boolean(value: str) -> bool:
    """`true` or `false`, in any case."""
    if value.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{value!r} is neither true nor false")
    return value.lower() == "true"


def parse_object(value: str) -> dict[str, Any]:
    """A JSON object, from the text of a flag. [`_from_file`] takes a mapping of a YAML file as it is."""
    try:
        parsed = json.loads(value)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{value!r} is not JSON ({error})") from error
    if not isinstance(parsed, dict):
        raise argparse.ArgumentTypeError(f"{value!r} is no JSON object")
    return parsed


def check_outputs(args: Any) -> None:
    """Makes the folders of files that will be written. Raises a `ValueError` that names the flag if one cannot be written."""
    for name, endings in _OUTPUTS.items():
        if isinstance(path := getattr(args, name, None), Path):
            check_output(path, f"--{name}", endings)
    if getattr(args, "inspect_log", None) is not None and find_spec("inspect_ai") is None:
        raise ValueError("`--inspect_log` needs Inspect; run `pip install trl-repulse[inspect]`.")


def check_output(path: Path, flag: str, endings: Collection[str] = ()) -> None:
    """[`check_outputs`] of one file."""
    if endings and path.suffix not in endings:
        raise ValueError(f"`{flag} {path}` names no format; end it with {', '.join(endings)}.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"`{flag} {path}` cannot be written: {error}.") from error
    if path.is_dir():
        raise ValueError(f"`{flag} {path}` is a folder; name a file.")
    if not os.access(path.parent, os.W_OK):
        raise ValueError(f"`{flag} {path}` is in a folder that cannot be written to; name another.")


def check_inputs(args: Any) -> None:
    """Raises a `ValueError` if a model, prompts or another table is named by a path at which there is nothing."""
    for name in _INPUTS:
        value = getattr(args, name, None)
        if isinstance(value, str | Path):
            path = Path(value).expanduser()
            is_path = str(value).startswith(("/", "./", "../", "~")) or path.suffix in _TABLES
            if is_path and not path.exists():
                raise ValueError(f"There is no file or folder `{value}`, which `{name}` names; correct the path.")


def check_numbers(args: argparse.Namespace) -> None:
    """Raises a `ValueError` if a threshold is not finite, a seed is negative, or a nominal coverage is not between 0 and 1."""
    for name in ("threshold", "thresholds", "bad_reward_threshold"):
        values = getattr(args, name, None)
        for value in values if isinstance(values, list) else [values]:
            if value is not None and not math.isfinite(value):
                raise ValueError(f"`--{name} {value:g}` must be a finite number.")
    if getattr(args, "seed", 0) < 0:
        raise ValueError(f"`--seed {args.seed}` must be at least 0.")
    if "confidence" in args:
        from ..evaluation.tails import check_share

        check_share("confidence", args.confidence)


def split_config(argv: list[str]) -> tuple[Path | None, list[str]]:
    """Splits off `--config`: its file, or `None`, and the other arguments. Raises a `ValueError` if it has no path or is given twice."""
    path, others, words = None, [], iter(argv)
    for word in words:
        flag, has_value, value = word.partition("=")
        if flag != "--config":
            others.append(word)
            continue
        if path is not None:
            raise ValueError("`--config` is to be given once.")
        value = value if has_value else next(words, "")
        if not value:
            raise ValueError("`--config` needs the path of a YAML file behind it.")
        path = Path(value).expanduser()
    return path, others


# Arguments that name a file to write -> its endings, if it needs one
_OUTPUTS: dict[str, tuple[str, ...]] = {"output": (), "figure": (".png", ".pdf", ".svg"), "inspect_log": (".eval",)}
# Arguments that name what is read; only names with these endings are files wherever they are
_INPUTS = """
    model_name_or_path model policy reference value_model_path reward_model_path
    dataset_name eval_dataset_name prompts benign attacks table
""".split()
_TABLES = (".jsonl", ".json", ".csv", ".parquet")
# Names of one argument: training's, then others that commands have for it
SYNONYMS = (
    ("model_name_or_path", "model"),
    ("model_revision", "revision"),
    ("dataset_name", "prompts"),
    ("dataset_train_split", "split"),
    ("bad_reward_threshold", "threshold", "thresholds"),
    ("level", "levels"),
    ("output", "json"),
)
# What other commands take of a training command's file
OF_TRAINING = set(
    """
    model_name_or_path model_revision trust_remote_code reward_model_path reward_type reward_kwargs dataset_name dataset_config
    dataset_train_split prompt_column apply_chat_template chat_template_kwargs max_prompt_length max_completion_length
    bad_reward_threshold use_peft
    """.split()
)
# Arguments of several commands
SHARED: dict[str, dict[str, Any]] = {
    "batch_size": {"type": int, "help": "completions of one pass (%(default)s)"},
    "chat_template_kwargs": {
        "metavar": "JSON",
        "type": parse_object,
        "help": """further variables of the chat template, such as '{"enable_thinking": false}'""",
    },
    "confidence": {"type": float, "default": 0.95, "help": "nominal coverage of the intervals (0.95)"},
    "dtype": {"default": "auto", "help": "precision of the models' weights (that of each checkpoint)"},
    "inspect_log": {
        "metavar": "FILE",
        "type": Path,
        "help": "log of the answers for `inspect view`, worst first (.eval)",
    },
    "output": {"metavar": "FILE", "type": Path, "help": "JSON file for the report"},
    "partial": {
        "action": "store_true",
        "help": "read the prompts that are done, of a run that has stopped or goes on",
    },
    "seed": {"type": int, "default": 0, "help": "seed of the draws (0)"},
    "thresholds": {"type": float, "nargs": "+", "help": "rewards under which an output is bad"},
    "trust_remote_code": {"action": "store_true", "help": "run Python code that comes with models"},
}


class _Stream(io.FileIO):
    """A standard stream that drops what nobody reads, as after a pipe to `head`."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            return len(data)


def _is_not_about_cpu(record: logging.LogRecord) -> bool:
    """A filter of logging that drops DeepSpeed's line that there is no GPU."""
    return "Setting accelerator to CPU" not in str(record.msg)


def keep_writing() -> None:
    """Makes output safe: readers may leave, the shell may have closed a stream, and letters that the locale lacks are escaped.
    Streams with which a caller has replaced Python's stay. DeepSpeed, if it is installed, does not say that there is no GPU."""
    logging.getLogger("DeepSpeed").addFilter(_is_not_about_cpu)
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
