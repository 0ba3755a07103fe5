"""Descriptions of models, rewards and judges in the headers of samples and of attack results.

A description is a JSON value that changes whenever scores may change. It holds no secret, no server address, and nothing
that only affects speed.
"""

import inspect
import linecache
import re
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

from accelerate.logging import get_logger
from accelerate.utils import is_peft_model
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils import find_adapter_config_file

from ..rewards.functions import FunctionReward
from ..rewards.models import ModelReward
from ..rewards.remote import RemoteReward
from ._generation import hash_model
from .records import digest, hash_file, plain_json


logger = get_logger(__name__)

_IRRELEVANT_FIELDS = ("model", "revision", "name", "batch_size", "device")  # they do not affect rewards
# Endings of names, in users' code, of secrets and of settings that only affect where and how fast something runs
_IRRELEVANT_TO_SCORES = re.compile(
    r"(^|_)(key|token|secret|password|url|host|port|device|rank|timeout|retries|batch_size)$", re.IGNORECASE
)
_PLAIN = bool | int | float | complex | str | bytes | None


def identify_model(model: Any, name: str | None = None) -> dict[str, Any]:
    """Name, revision and a hash of the weights of a model; for an adapter also the name of its base."""
    config = model.config
    path = config._name_or_path
    identity = {"name": name or path, "revision": getattr(config, "_commit_hash", None)}
    identity |= {"dtype": str(model.dtype).removeprefix("torch."), "weights": hash_model(model)}
    if is_peft_model(model) or getattr(model, "_hf_peft_config_loaded", False):
        identity |= {"base": path, "revision": None}  # the configuration belongs to the base
    return identity


def identify_reward(reward: Any) -> dict[str, Any]:
    """Description of a reward or judge: its `"name"`, and a hash of its weights, file, or code where there is one. A
    server is only known by the reward's name, since its address may change and may hold a key."""
    if isinstance(reward, nn.Module) and (isinstance(reward, PreTrainedModel) or is_peft_model(reward)):
        return identify_model(reward)
    if isinstance(reward, str):
        if Path(reward).is_dir():
            kinds = ("config.json", "adapter_config.json", "*.safetensors", "*.bin")
            paths = sorted(path for kind in kinds for path in Path(reward).glob(kind))
            return {"name": reward, "weights": digest([[path.name, hash_file(path)] for path in paths])}
        with suppress(OSError):
            return {"name": reward, "revision": PretrainedConfig.get_config_dict(reward)[0].get("_commit_hash")}
        path = find_adapter_config_file(reward)  # an adapter has no `config.json`
        return {"name": reward, "revision": path and Path(path).parent.name}
    if isinstance(reward, FunctionReward):
        return {"name": reward.function, "label_column": reward.label_column, "sha256": hash_file(reward.path)}
    if (inner := getattr(reward, "scores_by", None)) is not None:  # of `evaluation.attacks`
        return {"name": type(reward).__name__, "reward": identify_reward(inner), **reward.rendering}
    if isinstance(reward, RemoteReward):
        return {"name": reward.name} | ({"label_column": reward.label_column} if reward.label_column else {})
    if isinstance(reward, ModelReward):
        is_dated = reward._rendering and "strftime_now" in str(reward._tokenizer.chat_template)
        # The rendered text stands for the variables of a chat template
        left_out = {*_IRRELEVANT_FIELDS, *(["chat_template_kwargs"] if is_dated else [])}
        arguments = {each.name: getattr(reward, each.name) for each in fields(reward) if each.name not in left_out}
        return {
            "name": reward.model,
            "revision": reward.revision,
            "weights": hash_model(reward._module),
            "type": type(reward).__name__,
            "arguments": plain_json({k: v for k, v in arguments.items() if v is not None}),
            **reward._rendering,
        }
    kind = type(reward).__qualname__ if is_dataclass(reward) else type(reward).__name__
    named = {"name": getattr(reward, "__qualname__", kind)}
    # Code without a file has no hash. `NotImplementedError`: weights not in memory
    with suppress(OSError, TypeError, ValueError, NotImplementedError, RecursionError):
        named["code"] = digest(_describe(reward, outermost=True))
    return named


def known_by_name_alone(identity: dict[str, Any]) -> bool:
    """Whether a description of [`identify_reward`] has only a name."""
    if "reward" in identity:
        return known_by_name_alone(identity["reward"])
    return not {"weights", "revision", "sha256", "code"} & identity.keys()


def warn_of_names(place: Path, rewards: dict[str, dict[str, Any]]) -> None:
    """Warns that results in `place` are continued with rewards, described by name, of which only the name is compared."""
    for name in (name for name, identity in rewards.items() if known_by_name_alone(identity)):
        logger.warning(
            f"`{place}` is continued with the reward or judge `{name}`, which is identified by its name alone, so that a change of "
            "it goes unnoticed. If it has changed, write the results to another place."
        )


def _describe(value: Any, outermost: bool = False) -> Any:
    """A value as JSON. An `outermost` object counts with the arguments that it was made with. Of what it holds, functions, models and
    rewards count too, and other objects by their type alone. Raises `TypeError` or `OSError` for code without a source."""
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, list | tuple):
        return [_describe(each) for each in value]
    if isinstance(value, set | frozenset):
        return sorted(repr(each) for each in value)
    if isinstance(value, dict):
        named = {str(name): each for name, each in value.items() if not _IRRELEVANT_TO_SCORES.search(str(name))}
        return {name: _describe(each) for name, each in named.items()}
    if isinstance(value, FunctionReward | ModelReward | RemoteReward):
        return identify_reward(value)
    if isinstance(value, partial):
        return [_describe(value.func, outermost), _describe(value.args), _describe(value.keywords)]
    if isinstance(value, MethodType):
        return [value.__name__, _describe(value.__self__, outermost)]
    if isinstance(value, FunctionType):
        held = [value.__defaults__, value.__kwdefaults__, inspect.getclosurevars(value).nonlocals]
        column = max(end or 0 for *_, end in value.__code__.co_positions())  # tells apart two lambdas of one line
        return [*_source(value), value.__code__.co_firstlineno, column, _describe(held)]
    kind = type(value)
    if not outermost and not isinstance(value, nn.Module):
        return f"{kind.__module__}.{kind.__qualname__}"
    weights = hash_model(value) if isinstance(value, nn.Module) else None
    if any("__call__" in vars(each) for each in kind.__mro__) and not isinstance(kind.__call__, FunctionType):  # in C
        raise TypeError
    held = {name: getattr(value, name, getattr(value, f"_{name}", ...)) for name in inspect.signature(kind).parameters}
    if any(each is ... for each in held.values()):  # kept under another name
        held = {name: each for name, each in vars(value).items() if isinstance(each, _PLAIN)}
    return [*_source(kind), weights, _describe(held)]


def _source(defined: Any) -> tuple[str, str]:
    """The text of the file, or the notebook's cell, of a function or class, and its name. Raises `TypeError` or `OSError` without one."""
    text = "".join(linecache.getlines(inspect.getfile(defined)))
    if not text:
        raise OSError
    return text, defined.__qualname__
