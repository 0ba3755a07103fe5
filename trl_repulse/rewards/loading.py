"""Rewards by name, for command lines and configuration files."""

from collections.abc import Callable
from dataclasses import fields
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from transformers import PretrainedConfig

from .classifiers import ChatReward, SequencePairReward, ToxicityReward
from .functions import load_reward_function
from .guard import GuardReward
from .remote import RemoteReward


REWARD_TYPES: dict[str, type] = {
    "sequence_pair": SequencePairReward,
    "chat": ChatReward,
    "toxicity": ToxicityReward,
    "guard": GuardReward,
    "remote": RemoteReward,
}


def load_reward(reward_type: str | None, path: str | None = None, /, **kwargs: Any) -> str | Callable[..., list]:
    """
    Loads a reward by type and path. Raises `ValueError` if the type is unknown, or path or arguments do not fit it.

    Args:
        reward_type (`str`, *optional*):
            One of `REWARD_TYPES`, or a function, `"path/to/file.py:function"`. If `None`, TRL loads the reward model at `path`.
        path (`str`, *optional*):
            Path or Hub id of the reward model; for `"remote"`, one or several addresses, separated by commas. Not for a function.
        kwargs: Further arguments of the reward, such as `max_length` or `label`.

    Returns:
        `Callable` or `str`: A reward function for a trainer; `path` itself if `reward_type` is `None`.
    """
    for name, value in (("reward_type", reward_type), ("reward_model_path", path)):
        if not isinstance(value, str | None):
            raise ValueError(f"`{name}={value!r}` must be text.")
    if reward_type != "remote" and "://" in (path or ""):
        raise ValueError("`reward_model_path` is the address of a server; set `reward_type='remote'`.")
    if reward_type is None:
        if path is None:
            raise ValueError(
                "`reward_model_path` is needed; give a path or a Hub id, or a `reward_type` that has none."
            )
        if kwargs:
            raise ValueError(
                f"`reward_kwargs` ({', '.join(kwargs)}) has no effect without `reward_type`; set it to one of "
                f"{', '.join(map(repr, REWARD_TYPES))}."
            )
        check_classifier(path)
        return path
    if reward_type in REWARD_TYPES:
        if path is None:
            raise ValueError(f"`reward_type={reward_type!r}` needs `reward_model_path`; give a path, an id or a URL.")
        cls = REWARD_TYPES[reward_type]
        hints = get_type_hints(cls)
        _check_arguments(reward_type, {each.name: hints[each.name] for each in fields(cls) if each.kw_only}, kwargs)
        return cls(path.split(",") if reward_type == "remote" else path, **kwargs)
    if ".py:" not in reward_type:
        raise ValueError(
            f"`reward_type={reward_type!r}` is not one of {', '.join(map(repr, REWARD_TYPES))}, nor a function in a "
            "file, written 'path/to/file.py:function'."
        )
    if path is not None:
        raise ValueError(f"`reward_model_path` has no effect with the function {reward_type!r}; leave it out.")
    _check_arguments(reward_type, {"label_column": get_type_hints(load_reward_function)["label_column"]}, kwargs)
    return load_reward_function(reward_type, **kwargs)


def check_classifier(path: str, argument: str = "reward_model_path", revision: str | None = None) -> None:
    """Raises `ValueError` if a reward model, by its configuration, is a language model, whose head would be random. Only
    local files are read; `argument` is its name in the message."""
    try:
        # Raw, so that no code of the model runs
        config = PretrainedConfig.get_config_dict(path, local_files_only=True, revision=revision)[0]
    except (OSError, ValueError):
        return
    architectures = config.get("architectures") or []
    if architectures and all(name.endswith(("ForCausalLM", "LMHeadModel", "ForMaskedLM")) for name in architectures):
        raise ValueError(
            f"`{argument}={path!r}` is a {architectures[0]} and no classifier, so that its rewards would be random; give "
            "a sequence-classification model, or set `reward_type`, in Python one of the classes in `trl_repulse.rewards`."
        )


def _check_arguments(reward_type: str, hints: dict[str, Any], kwargs: dict[str, Any]) -> None:
    """Refuses arguments that the reward does not take, and values of other types than its own, as JSON may hold."""
    for name, value in sorted(kwargs.items()):
        if name not in hints:
            raise ValueError(
                f"`reward_kwargs` has `{name}`, which `reward_type={reward_type!r}` does not take; it takes {', '.join(sorted(hints))}."
            )
        if not _fits(value, hints[name]):
            kind = hints[name].__name__ if isinstance(hints[name], type) else str(hints[name])
            raise ValueError(f"`reward_kwargs` has `{name}={value!r}`, which is no `{kind}`; give one.")


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value, as read from JSON, is of an annotated type."""
    if get_origin(hint) in (Union, UnionType):
        return any(_fits(value, option) for option in get_args(hint))
    kind = get_origin(hint) or hint
    if kind in (int, float):
        return isinstance(value, int | kind) and not isinstance(value, bool)
    if kind is tuple:  # a list in JSON; a single text works too
        return isinstance(value, tuple | list | str)
    return isinstance(value, kind) if isinstance(kind, type) else True
