"""
Descriptions of models, rewards and judges in the headers of samples and of attack results.

A description is a JSON value that changes whenever scores may change. It holds no secret, no server address, and nothing
that only affects speed.
"""

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
from ._generation import hash_folder, hash_model
from .records import digest, hash_file, plain_json


logger = get_logger(__name__)

# Fields that do not affect rewards
_IRRELEVANT_FIELDS = ("model", "revision", "name", "batch_size", "device")
# Endings of names, in users' code, of secrets and of settings that only affect where and how fast something runs
_IRRELEVANT_TO_SCORES = re.compile(
    r"(^|_)(key|token|secret|password|url|host|port|device|rank|timeout|retries|batch_size)$", re.IGNORECASE
)
# Description of an object at its first use, before it counts calls or caches anything
_SEEN: dict[tuple[int, str], tuple[weakref.ref[Any], dict[str, str]]] = {}
_PLAIN = bool | int | float | complex | str | bytes | None


def identify_model(model: Any, name: str | None = None) -> dict[str, Any]:
    """Name, revision and a hash of the weights of a model; for an adapter also the name of its base."""
    config = model.config
    found = config._name_or_path
    identity = {"name": name or found, "revision": getattr(config, "_commit_hash", None)}
    identity |= {"dtype": str(model.dtype).removeprefix("torch."), "weights": hash_model(model)}
    if is_peft_model(model) or getattr(model, "_hf_peft_config_loaded", False):
        identity |= {"base": found, "revision": None}  # the configuration belongs to the base
    return identity


def identify_reward(reward: Any) -> dict[str, Any]:
    """
    Description of a reward or judge: its `"name"`, and a hash of its weights, file, or code where there is one. A server is
    only known by the reward's name, since its address may change and may hold a key.
    """
    if isinstance(reward, nn.Module) and (isinstance(reward, PreTrainedModel) or is_peft_model(reward)):
        return identify_model(reward)
    if isinstance(reward, str):
        if Path(reward).is_dir():
            return {"name": reward, "weights": hash_folder(Path(reward))}
        return {"name": reward, "revision": PretrainedConfig.get_config_dict(reward)[0].get("_commit_hash")}
    if isinstance(reward, FunctionReward):
        return {"name": reward.function, "label_column": reward.label_column, "sha256": hash_file(reward.path)}
    if isinstance(reward, TransformedReward):
        names = ("transform", "alpha", "beta", "threshold")
        return {name: getattr(reward, name) for name in names} | {"reward": identify_reward(reward.reward)}
    if (inner := getattr(reward, "scores_by", None)) is not None:  # of `evaluation.attacks`
        return {
            "name": type(reward).__name__,
            "reward": identify_reward(inner),
            "template": reward.chat_template_kwargs,
        }
    if isinstance(reward, RemoteReward):
        return {"name": reward.name} | ({"label_column": reward.label_column} if reward.label_column else {})
    if isinstance(reward, ModelReward):
        if reward._module is None:  # a pickled reward has no weights
            reward._load()
        rendering = reward._rendering
        # The rendered text stands for the variables of a chat template
        left_out = {*_IRRELEVANT_FIELDS, *(["chat_template_kwargs"] if rendering else [])}
        arguments = {each.name: getattr(reward, each.name) for each in fields(reward) if each.name not in left_out}
        return {
            "name": reward.model,
            "revision": reward.revision,
            "weights": hash_model(reward._module),
            "type": type(reward).__name__,
            "arguments": plain_json({k: v for k, v in arguments.items() if v is not None}),
            **rendering,
        }
    kind = type(reward).__qualname__ if is_dataclass(reward) else type(reward).__name__
    return {"name": getattr(reward, "__qualname__", kind)} | _hash_code(reward)


def known_by_name_alone(identity: dict[str, Any]) -> bool:
    """Whether a description of [`identify_reward`] has only a name."""
    if "reward" in identity:
        return known_by_name_alone(identity["reward"])
    return not {"weights", "revision", "sha256", "code"} & identity.keys()


def warn_of_name(place: Path, name: str) -> None:
    """Warns that results in `place` are continued with a reward or judge of which only the name is compared."""
    logger.warning(
        f"`{place}` is continued with the reward or judge `{name}`, which is identified by its name alone, so that a change of it "
        "goes unnoticed. If it has changed, write the results to another place."
    )


def _hash_code(function: Callable[..., Any]) -> dict[str, str]:
    """`code`, a hash of a function's byte code and the plain values it uses; empty without Python code."""
    owner = function.__self__ if isinstance(function, MethodType) else function
    key = (id(owner), getattr(function, "__name__", ""))
    seen, found = _SEEN.get(key, (lambda: None, {}))
    if seen() is owner:
        return found
    root = owner.func if isinstance(owner, partial) else owner
    package = _package(root if isinstance(root, FunctionType) else type(root))
    found = {}
    with suppress(NotImplementedError, RecursionError):  # weights not in memory, circular values
        found = {"code": digest(_describe(function, package, []))}
    with suppress(TypeError):  # not all objects have weak references
        _SEEN[key] = weakref.ref(owner, lambda _: _SEEN.pop(key, None)), found
    return found


def _package(defined: Any) -> str:
    return (defined.__module__ or "").partition(".")[0]  # code run by `exec` may have no module


def _describe(value: Any, package: str, seen: list[Any]) -> Any:
    """A function, or a value that it uses, as JSON; `None` if it is in `seen` already."""
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, list | tuple):
        return [_describe(each, package, seen) for each in value]
    if isinstance(value, set | frozenset):
        return sorted(json.dumps(_describe(each, package, seen), sort_keys=True) for each in value)
    if isinstance(value, dict):
        named = {str(name): each for name, each in value.items() if not _IRRELEVANT_TO_SCORES.search(str(name))}
        return {name: _describe(each, package, seen) for name, each in named.items()}
    if isinstance(value, CodeType):  # without file names and line numbers
        return [value.co_code.hex(), value.co_names, _describe(value.co_consts, package, seen)]
    kind = value if isinstance(value, type) else type(value)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if kind is value:
        return name
    if any(value is each for each in seen):  # functions that call each other
        return None
    seen.append(value)
    if isinstance(value, FunctionType):
        return _describe(_parts_of_function(value), _package(value), seen)
    if isinstance(value, MethodType):
        return _describe([value.__func__, value.__self__], package, seen)
    if isinstance(value, partial):
        return _describe([value.func, value.args, value.keywords], package, seen)
    if isinstance(value, FunctionReward | ModelReward | RemoteReward | TransformedReward):
        return identify_reward(value)
    if _package(kind) == package or isinstance(value, nn.Module):
        return _describe(_parts_of_instance(value, package), package, seen)
    return name


def _parts_of_function(function: FunctionType) -> dict[str, Any]:
    """Its code, defaults, closure, and the constants and functions of its module that it uses."""
    code = function.__code__
    held = {}
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # not bound yet
            held[name] = cell.cell_contents
    for name in _global_names(code):
        found = function.__globals__.get(name)
        if _is_plain(found) or (isinstance(found, FunctionType) and found.__module__ == function.__module__):
            held.setdefault(name, found)
    parameters = inspect.signature(function, follow_wrapped=False).parameters
    defaults = {name: each.default for name, each in parameters.items() if each.default is not each.empty}
    return {"code": code, "defaults": defaults, "held": held}


def _parts_of_instance(value: Any, package: str) -> dict[str, Any]:
    """Functions and plain values of its classes from one package, and its attributes."""
    methods: dict[str, FunctionType] = {}
    members: dict[str, Any] = {}
    for cls in reversed([cls for cls in type(value).__mro__ if _package(cls) == package and cls is not object]):
        for name, member in vars(cls).items():
            function = getattr(member, "__func__", getattr(member, "fget", member))
            if isinstance(function, FunctionType):
                methods[name] = function
            elif isinstance(member, MemberDescriptorType):  # of a class with `__slots__`
                with suppress(AttributeError):
                    members[name] = member.__get__(value)
            elif _is_plain(member) and not name.startswith("__"):
                members[name] = member
    if isinstance(value, nn.Module):
        members["weights"] = hash_model(value)
    elif callable(value) and not methods:
        raise NotImplementedError
    else:
        members |= getattr(value, "__dict__", {})
    return {"class": type(value).__qualname__, "methods": methods, "values": members}


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN)


def _global_names(code: CodeType) -> Iterator[str]:
    """Global names used by a function and the functions inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _global_names(constant)
