"""Arguments of a sub-command from the fields of dataclasses, by name or from a YAML file."""

import argparse
import json
import os
from dataclasses import fields
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml

from .._errors import unknown_name


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


def add_fields(parser: argparse.ArgumentParser, *classes: type) -> None:
    """
    Declares `--config`, and an argument for each field; those not given are left out of the parsed arguments.

    Args:
        parser (`argparse.ArgumentParser`):
            The sub-command's parser.
        classes (`type`):
            Dataclasses whose fields have a `help` in their metadata, and default values.
    """
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="YAML file with arguments by name; flags win over it"
    )
    for cls in classes:
        hints, group = get_type_hints(cls), parser.add_argument_group(cls.__name__)
        for field in fields(cls):
            default = "" if field.default is None else f" ({field.default})"
            text = f"{field.metadata['help']}{default}".replace("%", "%%")
            group.add_argument(f"--{field.name}", default=argparse.SUPPRESS, help=text, **_kind(hints[field.name]))


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


def read_fields(args: argparse.Namespace, *classes: type) -> list[Any]:
    """
    The dataclasses, from the file that `--config` names and the flags.

    Args:
        args (`argparse.Namespace`):
            What was parsed.
        classes (`type`):
            The dataclasses declared.

    Returns:
        `list`: an instance of each.

    Raises:
        `ValueError`: If the file cannot be read or has other names, or a dataclass refuses a value.
    """
    values: dict[str, Any] = {}
    known = {field.name for cls in classes for field in fields(cls)}
    if args.config is not None:
        hints = {name: hint for cls in classes for name, hint in get_type_hints(cls).items()}
        for name, value in _read_file(args.config, known).items():
            values[name] = from_file(args.config, name, value, _kind(hints[name]), hints[name])
    values |= {name: value for name, value in vars(args).items() if name in known}
    return [cls(**{f.name: values[f.name] for f in fields(cls) if f.name in values}) for cls in classes]


def add_config(parser: argparse.ArgumentParser, path: Path | None) -> None:
    """
    Declares `--config`, and makes what its file says the defaults of the other arguments.

    Args:
        parser (`argparse.ArgumentParser`):
            The sub-command's parser, with its arguments.
        path (`Path`, *optional*):
            YAML file with arguments by the names of their flags; those without a flag by `folders`, `output` and the like.

    Raises:
        `ValueError`: If the file cannot be read, or has other names, or values that an argument does not take.
    """
    actions = {(action.option_strings or [action.dest])[-1].lstrip("-"): action for action in parser._actions}
    del actions["help"]
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="YAML file with arguments by name; flags win over it"
    )
    for name, value in ({} if path is None else _read_file(path, set(actions))).items():
        action = actions[name]
        if value is None:
            continue
        kind: dict[str, Any] = {"type": action.type or str}
        if action.choices is not None:
            kind["choices"] = action.choices
        elif action.nargs == 0:
            kind["type"] = parse_boolean
        elif action.nargs is not None or isinstance(action, argparse._AppendAction):
            kind["nargs"] = "+"
        action.required = False
        parsed = from_file(path, name, value, kind)
        parser.set_defaults(
            **{action.dest: _Replaced(parsed) if isinstance(action, argparse._AppendAction) else parsed}
        )


class _Replaced(list):
    """The default of a flag that appends: argparse copies it before the first flag is appended, and flags win over the file."""

    def __copy__(self) -> list[Any]:
        return []


def _read_file(path: Path, known: set[str]) -> dict[str, Any]:
    """What a YAML file says, if it is of arguments alone."""
    values = read_yaml(path)
    for name, value in values.items():
        if name not in known:
            raise unknown_name(f"`{path}`", name, value, known)
    return values


def from_file(path: Path, name: str, value: Any, kind: dict[str, Any], hint: Any = None) -> Any:
    """
    A value of a YAML file as the flag of that name would give it: PyYAML takes `1e-3` for text.

    Args:
        path (`Path`), name (`str`), value:
            The file, the name there, and what stands behind it.
        kind (`dict`):
            What argparse knows of the flag: `type`, `choices` and `nargs`.
        hint (`type`, *optional*):
            The field's type, which may take `None`, and lists and mappings as they are.

    Returns:
        The value.

    Raises:
        `ValueError`: If the flag does not take it.
    """
    several, types = kind.get("nargs") == "+", get_args(hint)
    taken = {get_origin(each) or each for each in types} - (
        {list} if several else set()
    )  # of a list, each value is read
    if type(value) in taken & {list, dict, type(None)}:
        return value
    if "choices" in kind:
        if isinstance(value, bool):  # YAML takes `off` and `no` for false
            words = ("on", "yes", "true") if value else ("off", "no", "false")
            value = next((word for word in words if word in kind["choices"]), value)
        if value not in kind["choices"]:
            choices = ", ".join(map(str, kind["choices"]))
            raise ValueError(f"`{path}` has `{name}: {value}`, which must be one of {choices}.")
        return value

    def parse(each: Any) -> Any:
        if isinstance(each, dict) and kind["type"] is parse_object:
            return each
        if isinstance(each, list | dict):
            raise ValueError("it takes plain values, such as numbers or text")
        return kind["type"](str(each))

    if isinstance(value, list) and not several:
        raise ValueError(f"`{path}` has `{name}: {value}`, which takes one value; give it without the brackets.")
    values = value if isinstance(value, list) else [value]
    try:
        return [parse(each) for each in values] if several else parse(value)
    except (ValueError, argparse.ArgumentTypeError) as error:
        raise ValueError(f"`{path}` has `{name}: {value}`, which cannot be read ({error}).") from error


def _kind(hint: Any) -> dict[str, Any]:
    """What argparse has to know of a type."""
    if get_origin(hint) in (Union, UnionType):  # `Literal[...] | None` is the former
        options = [option for option in get_args(hint) if option is not type(None)]
        if dict in options:
            return {"type": parse_object, "metavar": "JSON"}
        (hint,) = options
    if get_origin(hint) is Literal:
        return {"choices": get_args(hint)}
    if get_origin(hint) is list:
        return {"type": get_args(hint)[0], "nargs": "+"}
    if hint is bool:
        return {"type": parse_boolean, "nargs": "?", "const": True, "metavar": "true|false"}
    return {"type": hint}


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


def with_config(argv: list[str], default_config: str | None = None) -> list[str]:
    """
    A command line with `--config FILE` as TRL's parser finds it: in two words.

    Args:
        argv (`list[str]`):
            Command line without the name of the script.
        default_config (`str`, *optional*):
            File to add where `--config`, `--model_name_or_path` and `--help` are missing.

    Returns:
        `list[str]`: The command line.

    Raises:
        `ValueError`: If no file follows `--config`, or it cannot be read.
    """
    argv = [part for arg in argv for part in (arg.split("=", 1) if arg.startswith("--config=") else [arg])]
    if argv[-1:] == ["--config"]:
        raise ValueError("`--config` needs the path of a YAML file behind it.")
    for path in (argv[place + 1] for place, arg in enumerate(argv) if arg == "--config"):
        read_yaml(Path(path))  # which has what is wrong of the file said once, before processes are launched
    # argparse also takes `--model-name-or-path`, and the beginnings of its name that no other flag has
    flags = [arg.split("=")[0].replace("-", "_") for arg in argv]
    given = {"__config", "_h", "__help", "__help_all"}.intersection(flags) or any(
        flag.startswith("__model_n") for flag in flags
    )
    return argv if given or default_config is None else ["--config", default_config, *argv]
