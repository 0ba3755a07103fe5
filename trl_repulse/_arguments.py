"""Dataclasses from a command line and a file of settings, as the example scripts read them."""

from dataclasses import fields
from typing import Any

from trl import TrlParser

from ._errors import did_you_mean


def parse_fields(parser: TrlParser, argv: list[str] | None) -> tuple[Any, ...]:
    """
    Dataclasses from a command line, and from the YAML file that `--config` names.

    Args:
        parser ([`~trl.TrlParser`]):
            Parser of the dataclasses.
        argv (`list[str]`, *optional*):
            Command line without the name of the script, by default the process's.

    Returns:
        `tuple`: An instance of each dataclass.

    Raises:
        `ValueError`: If the command line or the file has a name that is no field.
    """
    *parsed, in_file, in_line = parser.parse_args_and_config(
        argv, return_remaining_strings=True, separate_remaining_strings=True
    )
    known = [each.name for cls in parser.dataclass_types for each in fields(cls)]
    if in_file:
        name = in_file[0].removeprefix("--")
        hint = did_you_mean(name, known)
        raise ValueError(f"The file of `--config` has `{name}`, which is no argument; remove it.{hint}")
    if in_line:
        flag = next((text for text in in_line if text.startswith("--")), in_line[0]).partition("=")[0]
        hint = did_you_mean("--" + flag.lstrip("-").replace("-", "_"), [f"--{name}" for name in known])
        raise ValueError(f"`{flag}` is no argument; remove it.{hint}")
    return tuple(parsed)
