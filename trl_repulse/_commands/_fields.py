"""The parser of all commands, and arguments that several of them have."""

import argparse
import json
import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml

from .._errors import did_you_mean, unknown_name


# What argparse takes for a number, not for an option; its own (Python 3.11) knows neither `-1e1` nor `-inf`
_NEGATIVE_NUMBER = re.compile(r"-(?:\.?\d|inf(?:inity)?$|nan$)", re.IGNORECASE)


class _Loader(yaml.SafeLoader):
    """Refuses a mapping with a key that stands twice, of which PyYAML takes the last."""

    def compose_mapping_node(self, anchor: Any) -> Any:
        node, seen = super().compose_mapping_node(anchor), {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                first = seen.setdefault(key.value, key)
                if first is not key:
                    lines = (each.start_mark.line + 1 for each in (first, key))
                    raise ValueError("has `{}` on line {} and again on line {}; keep one".format(key.value, *lines))
        return node


def read_yaml(path: Path) -> dict[str, Any]:
    """
    What a YAML file of settings has.

    Args:
        path (`Path`):
            The file.

    Returns:
        `dict[str, Any]`: The settings by name.

    Raises:
        `ValueError`: If there is no such file, it cannot be read, is no mapping, or has a name twice, nested ones included.
    """
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
    """
    A parser, and the sub-parsers it makes, that take `-1e1` and `-inf` for numbers, take names in full alone, answer an unknown one
    with the nearest, and read a YAML file as they read flags.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **{"allow_abbrev": False} | kwargs)
        self._negative_number_matcher = _NEGATIVE_NUMBER
        # Names that are arguments of a launcher, not of this parser
        self.others: Collection[str] = ()
        # Types of arguments that are fields: these take `None`, and lists and mappings as they are. Elsewhere `null` leaves one out
        self.hints: Mapping[str, Any] | None = None

    def parse_known_args(self, args=None, namespace=None):
        """As [`argparse.ArgumentParser.parse_known_args`], but unknown options end with a message here too."""
        namespace, unknown = super().parse_known_args(args, namespace)
        if unknown:
            # Not its value, which may be an address with a key
            flag = next((text for text in unknown if text.startswith("-")), unknown[0]).partition("=")[0]
            known = [*self._option_string_actions, *(f"--{name}" for name in self.others)]
            hint = did_you_mean("--" + flag.lstrip("-").replace("-", "_"), known)
            self.error(f"`{flag}` is no argument; remove it.{hint}")
        return namespace, unknown

    def set_defaults_from(self, path: Path) -> None:
        """
        Makes what a YAML file has the defaults of the arguments, as the values that flags would give.

        Args:
            path (`Path`):
                YAML file with arguments by the names of their flags; those without a flag by `folders`, `output` and the like.

        Raises:
            `ValueError`: If the file cannot be read, or has other names, or values that an argument does not take.
        """
        # A field's `--no_...` is no name of its own
        actions = [action for action in self._actions if not isinstance(action, argparse._StoreFalseAction)]
        named = {(action.option_strings or [action.dest])[0].lstrip("-"): action for action in actions}
        known = [*named.keys() - {"h", "help", "help-all", "config"}, *self.others]
        for name, value in read_yaml(path).items():
            if name == "env" and self.hints is not None:  # variables of the environment, as TRL's parser reads them
                if not isinstance(value, dict | None):
                    raise ValueError(f"`{path}` has `env: {value}`, which must hold environment variables by name.")
                os.environ |= {key: str(each) for key, each in (value or {}).items()}
                continue
            if name not in known:
                raise unknown_name(f"`{path}`", name, value, known)
            if name in self.others or (value is None and self.hints is None):
                continue
            action = named[name]
            parsed = _from_file(path, name, value, action, (self.hints or {}).get(name))
            action.required = False
            self.set_defaults(
                **{action.dest: _Replaced(parsed) if isinstance(action, argparse._AppendAction) else parsed}
            )


def add_prompts(group: Any, required: bool) -> None:
    """
    Declares the prompts of a command, as all commands that sample name them.

    Args:
        group:
            The parser, or a group of its arguments.
        required (`bool`):
            Whether there is no such command without prompts.
    """
    group.add_argument("--prompts", required=required, help="file or data set of prompts")
    group.add_argument("--split", default="train", help="split of a data set (train)")
    group.add_argument("--prompt_column", default="prompt", help="column that holds the prompts (prompt)")
    group.add_argument(
        "--apply_chat_template",
        action="store_true",
        help="make plain prompts messages of a user, in the chat template",
    )


def add_reward(group: Any) -> None:
    """
    Declares the reward of a command, as all commands that score name it.

    Args:
        group:
            The parser, or a group of its arguments.
    """
    group.add_argument("--reward_model_path", help="path or Hub id of the reward model, or a server's address")
    group.add_argument("--reward_type", help="kind of reward, as in the training commands (TRL's own treatment)")
    group.add_argument(
        "--reward_kwargs", metavar="JSON", type=parse_object, default={}, help="further arguments of the reward"
    )


class _Replaced(list):
    """The default of a flag that appends: argparse copies it before the first flag is appended, and flags win over the file."""

    def __copy__(self) -> list[Any]:
        return []


def _from_file(path: Path, name: str, value: Any, action: argparse.Action, hint: Any) -> Any:
    """A value of a YAML file as the flag of that name would give it: PyYAML takes `1e-3` for text, and `off` for false."""
    several = action.nargs not in (None, 0, "?") or isinstance(action, argparse._AppendAction)
    # Of a list, each value is read
    taken = {get_origin(each) or each for each in get_args(hint)} - ({list} if several else set())
    if type(value) in taken & {list, dict, type(None)}:
        return value
    if action.choices is not None:
        if isinstance(value, bool):
            words = ("on", "yes", "true") if value else ("off", "no", "false")
            value = next((word for word in words if word in action.choices), value)
        if value not in action.choices:
            choices = ", ".join(map(str, action.choices))
            raise ValueError(f"`{path}` has `{name}: {value}`, which must be one of {choices}.")
        return value
    kind: Any = parse_boolean if action.nargs == 0 else action.type or str

    def parse(each: Any) -> Any:
        if isinstance(each, list) and isinstance(action, argparse._AppendAction) and action.nargs is not None:
            return [parse(part) for part in each]
        if isinstance(each, dict) and kind is parse_object:
            return each
        if isinstance(each, list | dict):
            raise ValueError("it takes plain values, such as numbers or text")
        return kind(str(each))

    if isinstance(value, list) and not several:
        raise ValueError(f"`{path}` has `{name}: {value}`, which takes one value; give it without the brackets.")
    values = value if isinstance(value, list) else [value]
    try:
        return [parse(each) for each in values] if several else parse(value)
    except (ValueError, argparse.ArgumentTypeError) as error:
        raise ValueError(f"`{path}` has `{name}: {value}`, which cannot be read ({error}).") from error


def parse_boolean(value: str) -> bool:
    """`true` or `false`, in any case."""
    if value.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{value!r} is neither true nor false")
    return value.lower() == "true"


def parse_object(value: str) -> dict[str, Any]:
    """A JSON object."""
    try:
        parsed = json.loads(value)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{value!r} is not JSON ({error})") from error
    if not isinstance(parsed, dict):
        raise argparse.ArgumentTypeError(f"{value!r} is no JSON object")
    return parsed


def check_output(path: Path | None, flag: str = "--output") -> None:
    """
    Refuses a file that could not be written, before there is anything to lose.

    Args:
        path (`Path`, *optional*):
            File to write; its folder is made. `None` passes.
        flag (`str`, *optional*, defaults to `"--output"`):
            The flag that names it.

    Raises:
        `ValueError`: If it is a folder, or its folder cannot be made or written to.
    """
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"`{flag} {path}` cannot be written: {error}.") from error
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        fault = (
            "is a folder; name a file" if path.is_dir() else "is in a folder that cannot be written to; name another"
        )
        raise ValueError(f"`{flag} {path}` {fault}.")


def split_config(argv: list[str]) -> tuple[Path | None, list[str]]:
    """
    The file that `--config` names, and the command line without it.

    Args:
        argv (`list[str]`):
            Command line without the name of the script.

    Returns:
        `tuple`: The path, or `None`, and the other words.

    Raises:
        `ValueError`: If no file follows `--config`, or it is there twice.
    """
    path, rest, words = None, [], iter(argv)
    for word in words:
        flag, has_value, value = word.partition("=")
        if flag != "--config":
            rest.append(word)
            continue
        if path is not None:
            raise ValueError("`--config` is to be given once.")
        value = value if has_value else next(words, "")
        if not value:
            raise ValueError("`--config` needs the path of a YAML file behind it.")
        path = Path(value)
    return path, rest
