"""Reward functions and models as a trainer uses them: loaded, checked, and with errors that name the function."""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from .._errors import RAISED_BY
from .._trl import is_async_callable
from ..data._checks import ALWAYS_PASSED
from ..models._loading import load_model, load_tokenizer
from ..models._model_checks import check_reward_model, check_reward_tokens, check_separate
from ..rewards._texts import read_rewards
from ..rewards.loading import check_classifier


RewardFunc = str | PreTrainedModel | Callable[..., list[float | None]]


def load_reward_models(reward_funcs: Any, tokenizers: Any, args: Any) -> tuple[list[Any], list[Any]]:
    """
    Returns `reward_funcs` and `reward_processing_classes` as lists, in which paths are replaced by models and tokenizers, loaded as TRL
    (1.16) does. TRL would train for the random numbers of a head that a checkpoint lacks.

    Raises:
        `ValueError`: If a reward model cannot be loaded, lacks weights, or does not have one label, or a function does not take what
            it is called with.
    """
    functions = list(reward_funcs) if isinstance(reward_funcs, list) else [reward_funcs]
    own = list(tokenizers) if isinstance(tokenizers, list) else [tokenizers]
    if tokenizers is None:
        own = [None] * len(functions)
    options = {"trust_remote_code": args.trust_remote_code, **(args.model_init_kwargs or {})}
    if args.distributed_state.distributed_type in ("MULTI_GPU", "DEEPSPEED"):
        options["device_map"] = None
    for function in functions:
        if isinstance(function, str):
            check_classifier(function, "reward_funcs", options.get("revision"))
        elif not isinstance(function, nn.Module):
            _check_parameters(function)
    for i, function in enumerate(functions):
        if isinstance(function, str):
            functions[i] = load_model(
                AutoModelForSequenceClassification, function, "reward model", num_labels=1, **options
            )
            if i < len(own) and own[i] is None:
                named = {name: options[name] for name in ("revision", "trust_remote_code") if name in options}
                own[i] = load_tokenizer(function, "reward model", **named)
        if isinstance(function, nn.Module):
            check_reward_model(function.eval(), f"`reward_funcs[{i}]`")  # its own trainer leaves dropout on
    check_tokenizers(functions, own)
    return functions, own


def check_tokenizers(functions: list[Any], tokenizers: list[Any]) -> None:
    """Refuses reward models with fewer embeddings than their tokenizers have tokens; one without a tokenizer yet passes."""
    for i, (function, tokenizer) in enumerate(zip(functions, tokenizers, strict=False)):
        if isinstance(function, nn.Module):
            check_reward_tokens(function, tokenizer, f"`reward_funcs[{i}]`")


def _check_parameters(function: Callable[..., Any]) -> None:
    """Refuses a function that TRL (1.16) cannot call: it passes these names, and each column of the data set."""
    try:
        # Of what is called: a decorator may take what the function that it names does not
        parameters = inspect.signature(function, follow_wrapped=False).parameters
    except (TypeError, ValueError):  # one of C, which cannot be asked
        return
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    if missing := [name for name in ALWAYS_PASSED if name not in parameters]:
        name = getattr(function, "__name__", type(function).__name__)
        raise ValueError(
            f"The reward function '{name}' does not take `{'`, `'.join(missing)}`, which trainers pass by name; add `**kwargs` to its "
            "parameters."
        )


def check_separate_rewards(reward_funcs: Any, model: Any, label: str, trained: bool) -> None:
    """Refuses reward models that share layers or trained weights with a model, called by its `label`; a path or `None` shares nothing. It
    may be `trained` itself, or by an adapter yet to be made."""
    if not isinstance(model, nn.Module):
        return
    for i, reward in enumerate(reward_funcs if isinstance(reward_funcs, list) else [reward_funcs]):
        if isinstance(reward, nn.Module):
            remedy = "load the reward model by itself."
            check_separate(reward, f"`reward_funcs[{i}]`", model, label, (False, trained), remedy)


def all_with_checks(functions: list[Any], names: list[str]) -> list[Any]:
    """Reward functions as [`with_checks`] makes them, by their names in the metrics; models are left as they are."""
    named = zip(functions, names, strict=True)
    return [function if isinstance(function, nn.Module) else with_checks(function, name) for function, name in named]


def with_checks(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """
    A reward function whose errors name it, as it is called in the metrics; asynchronous if it was.

    TRL (1.16) takes NaN for `None`: a division by zero would silently leave samples out, or count as 0 beside other functions. This one
    returns a list of numbers and `None`, and raises `ValueError` for anything else; an error of the function itself gets a note with the
    name. Each call gets lists of its own. A function that has the checks is returned as it is.
    """
    if getattr(function, "unchecked", None) is not None:
        return function
    where = f"The reward function '{name}'"

    def checked_at_once(completions: list[Any], **columns: Any) -> list[float | None]:
        with _naming(name):
            result = function(completions=_copied(completions), **_copied(columns))
            result = list(result) if inspect.isgenerator(result) else result
        return read_rewards(result, where, len(completions))

    async def checked_later(completions: list[Any], **columns: Any) -> list[float | None]:
        with _naming(name):
            result = await function(completions=_copied(completions), **_copied(columns))
        return read_rewards(result, where, len(completions))

    checked: Any = checked_later if is_async_callable(function) else checked_at_once
    checked.__name__ = name
    checked.unchecked = function
    return checked


def _copied(value: Any) -> Any:
    """A copy of nested lists and dictionaries; other values are not copied."""
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return [_copied(item) for item in value] if isinstance(value, list) else value


@contextlib.contextmanager
def _naming(name: str) -> Iterator[None]:
    """Adds the function's name to an error. The function is not called again to find the completion: it may count, or cost, its calls."""
    try:
        yield
    except Exception as error:
        error.add_note(f"{RAISED_BY} '{name}'.")
        raise
