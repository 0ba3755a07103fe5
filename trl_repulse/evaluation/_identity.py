"""
What decides the scores of a reward or judge: the one description that samples, attacks and their results know it by.

A description is what JSON knows. It has no secret, no address of a server, and nothing that changes speed alone.
"""

import ast
import hashlib
import inspect
import json
import re
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path
from types import CodeType, FunctionType, MemberDescriptorType, MethodType
from typing import Any

from accelerate.logging import get_logger
from accelerate.utils import is_peft_model
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from ..rewards.functions import FunctionReward
from ..rewards.models import ModelReward
from ..rewards.remote import RemoteReward
from ..rewards.transformed import TransformedReward
from . import records
from ._generation import hash_folder, hash_model


logger = get_logger(__name__)

# Fields that change no reward of the same weights
_IRRELEVANT_FIELDS = ("model", "revision", "name", "batch_size", "device")
# Last words of names, in code of users, of secrets and of what says where and how fast something runs
_IRRELEVANT_TO_SCORES = re.compile(
    r"(^|_)(key|token|secret|password|url|host|port|device|rank|timeout|retries|batch_size)$", re.IGNORECASE
)
# What was found of an object when it was first used, before it counted or kept anything
_SEEN: dict[tuple[int, str], tuple[weakref.ref[Any], dict[str, str]]] = {}
_PLAIN = bool | int | float | complex | str | bytes | None


class _NoSource(Exception):
    """Code whose source is not at hand."""


def identify_model(model: Any, name: str | None = None) -> dict[str, Any]:
    """
    Name, revision and a hash of the weights of a model, of an adapter with the name of its base.

    Args:
        model ([`~transformers.PreTrainedModel`] or `peft.PeftModel`):
            The model.
        name (`str`, *optional*):
            What it was loaded by.

    Returns:
        `dict`
    """
    config = model.config
    found = config._name_or_path
    identity = {"name": name or found, "revision": getattr(config, "_commit_hash", None), "weights": hash_model(model)}
    if is_peft_model(model) or getattr(model, "_hf_peft_config_loaded", False):
        identity |= {"base": found, "revision": None}  # the configuration is the base's
    return identity


def identify_reward(reward: Any) -> dict[str, Any]:
    """
    What says which reward it is, as far as that can be said.

    Args:
        reward (`str`, `torch.nn.Module` or `Callable`):
            A reward as TRL takes it, or a judge of attacks.

    Returns:
        `dict`: `"name"`, with the hash of weights, of a file or of the function's own `"code"` where there is one. A server is
        known by the reward's name alone: its address may be another the next time, and may hold a key.
    """
    if isinstance(reward, nn.Module) and (isinstance(reward, PreTrainedModel) or is_peft_model(reward)):
        return identify_model(reward)
    if isinstance(reward, str):
        if Path(reward).is_dir():
            return {"name": reward, "weights": hash_folder(Path(reward))}
        return {"name": reward, "revision": PretrainedConfig.get_config_dict(reward)[0].get("_commit_hash")}
    if isinstance(reward, FunctionReward):
        content = hashlib.sha256(reward.path.read_bytes()).hexdigest()
        return {"name": reward.function, "label_column": reward.label_column, "sha256": content}
    if isinstance(reward, TransformedReward):
        names = ("transform", "alpha", "beta", "threshold")
        return {name: getattr(reward, name) for name in names} | {"reward": identify_reward(reward.reward)}
    if isinstance(reward, RemoteReward):
        return {"name": reward.name} | ({"label_column": reward.label_column} if reward.label_column else {})
    if isinstance(reward, ModelReward):
        if reward._module is None:  # one that was pickled comes without weights
            reward._load()
        decides = {
            each.name: getattr(reward, each.name) for each in fields(reward) if each.name not in _IRRELEVANT_FIELDS
        }
        return {
            "name": reward.model,
            "revision": reward.revision,
            "weights": hash_model(reward._module),
            "type": type(reward).__name__,
            "arguments": records.plain_json(decides),
            **({} if reward._template is None else reward._template.dated),
        }
    kind = type(reward).__qualname__ if is_dataclass(reward) else type(reward).__name__
    return {"name": getattr(reward, "__qualname__", kind)} | _hash_code(reward)


def known_by_name_alone(identity: dict[str, Any]) -> bool:
    """
    Whether nothing but its name tells a reward from another.

    Args:
        identity (`dict`):
            What [`identify_reward`] gave.

    Returns:
        `bool`
    """
    if "reward" in identity:
        return known_by_name_alone(identity["reward"])
    return not {"weights", "revision", "sha256", "code"} & identity.keys()


def warn_of_name(place: Path, name: str) -> None:
    """
    Says of results that are gone on with that a reward or judge of theirs is known by its name alone.

    Args:
        place (`Path`):
            Where the results are.
        name (`str`):
            The reward's or judge's.
    """
    logger.warning(
        f"`{place}` is gone on with by a reward or judge `{name}` that is known by its name alone, now or when it was begun: "
        "nothing shows whether both are the same. If they are not, name another place for the results."
    )


def _hash_code(function: Callable[..., Any]) -> dict[str, str]:
    """The hash of a function's source and of the plain values it works with; nothing where there is no source."""
    owner = function.__self__ if isinstance(function, MethodType) else function
    key = (id(owner), getattr(function, "__name__", ""))
    seen, found = _SEEN.get(key, (lambda: None, {}))
    if seen() is owner:
        return found
    root = owner.func if isinstance(owner, partial) else owner
    package = _package(root if isinstance(root, FunctionType) else type(root))
    try:
        content = json.dumps(_describe(function, package, []), sort_keys=True)
        found = {"code": hashlib.sha256(content.encode()).hexdigest()}
    except (
        _NoSource,
        RecursionError,
        NotImplementedError,
    ):  # values that hold themselves, weights that are not in memory
        found = {}
    with suppress(TypeError):  # not all objects can be referred to
        _SEEN[key] = weakref.ref(owner, lambda _: _SEEN.pop(key, None)), found
    return found


def _package(defined: Any) -> str:
    return (defined.__module__ or "").partition(".")[0]  # code that is run by `exec` may be of no module


def _describe(value: Any, package: str, said: list[Any]) -> Any:
    """What decides what a function gives, or a value that it works with, as JSON; of what was said before, nothing."""
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, list | tuple):
        return [_describe(each, package, said) for each in value]
    if isinstance(value, set | frozenset):
        return sorted(json.dumps(_describe(each, package, said), sort_keys=True) for each in value)
    if isinstance(value, dict):
        return _describe_named({str(key): each for key, each in value.items()}, package, said)
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if any(value is each for each in said):  # functions that call each other
        return None
    said.append(value)
    if isinstance(value, FunctionType):
        return _describe_function(value, said)
    if isinstance(value, MethodType):
        return [_describe(each, package, said) for each in (value.__func__, value.__self__)]
    if isinstance(value, partial):
        return [_describe(each, package, said) for each in (value.func, value.args, value.keywords)]
    if isinstance(value, FunctionReward | ModelReward | RemoteReward | TransformedReward):
        return identify_reward(value)
    kind = type(value)
    if _package(kind) == package or isinstance(value, nn.Module):
        return _describe_instance(value, package, said)
    return f"{kind.__module__}.{kind.__qualname__}"


def _describe_named(values: dict[str, Any], package: str, said: list[Any]) -> dict[str, Any]:
    return {
        name: _describe(each, package, said) for name, each in values.items() if not _IRRELEVANT_TO_SCORES.search(name)
    }


def _describe_function(function: FunctionType, said: list[Any]) -> dict[str, Any]:
    """Its source and defaults, what it has from the functions around it, and the constants and functions of its module."""
    package, code = _package(function), function.__code__
    held = {}
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            held[name] = cell.cell_contents
        except ValueError:  # not bound yet
            continue
    for name in _global_names(code):
        found = function.__globals__.get(name)
        if _is_plain(found) or (isinstance(found, FunctionType) and found.__module__ == function.__module__):
            held.setdefault(name, found)
    defaults = function.__defaults__ or ()
    names = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
    defaults = dict(zip(names, defaults, strict=True)) | (function.__kwdefaults__ or {})
    return {
        "source": _source(code),
        "defaults": _describe_named(defaults, package, said),
        "held": _describe_named({name: each for name, each in held.items() if each is not None}, package, said),
    }


def _describe_instance(value: Any, package: str, said: list[Any]) -> dict[str, Any]:
    """Source and plain values of its classes, as far as they are of one package, and its attributes."""
    kind, sources, members = type(value), {}, {}
    for cls in reversed(kind.__mro__):
        if _package(cls) != package or cls is object:
            continue
        for name, member in vars(cls).items():
            function = getattr(member, "__func__", getattr(member, "fget", member))
            if isinstance(function, FunctionType):
                try:
                    sources[name] = _describe_function(function, said)
                except _NoSource:  # dataclasses write methods of their own
                    continue
            elif isinstance(member, MemberDescriptorType):  # of a class with `__slots__`
                with suppress(AttributeError):
                    members[name] = member.__get__(value)
            elif _is_plain(member) and not name.startswith("__"):
                members[name] = member
    if callable(value) and not sources and not isinstance(value, nn.Module):
        raise _NoSource
    if isinstance(value, nn.Module):
        members["weights"] = hash_model(value)
    else:
        members |= getattr(value, "__dict__", {})
    return {"class": kind.__qualname__, "methods": sources, "values": _describe_named(members, package, said)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN)


def _global_names(code: CodeType) -> Iterator[str]:
    """Names that a function and the functions inside it look up."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _global_names(constant)


def _source(code: CodeType) -> str:
    """The source of a function as Python would write it: without comments, and without what stands beside a lambda."""
    try:
        tree = ast.parse("".join(inspect.findsource(code)[0]))
    except (OSError, SyntaxError) as error:
        raise _NoSource from error
    places = [each for each in code.co_positions() if None not in each and each[2:] != (0, 0)]
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == code.co_name:
            if min([node, *node.decorator_list], key=lambda each: each.lineno).lineno == code.co_firstlineno:
                return ast.unparse(node)
        elif isinstance(node, ast.Lambda) and code.co_name == "<lambda>" and places:
            begin, end = (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)
            if all(begin <= (line, column) and (last, stop) <= end for line, last, column, stop in places):
                found.append((begin, node))
    if not found:  # the file is another than the one that was run
        raise _NoSource
    return ast.unparse(max(found, key=lambda each: each[0])[1])  # the innermost
