"""A user's reward functions, checked as they are called: a fault is named and never becomes a number."""

import contextlib
import inspect
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from transformers import AutoModelForSequenceClassification, PreTrainedModel, TrainingArguments

from .._errors import RAISED_BY
from ..data._checks import ALWAYS_PASSED
from ..models._loading import load_model, load_tokenizer
from ..models._model_checks import check_reward_model, check_reward_tokens, check_separate
from ..rewards._texts import as_number, as_values
from ..rewards.loading import check_classifier
from .trl_bridge import is_async_callable


# Errors that come of what a function is given, and not of a server or a device
_OF_CODE = (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError)
RewardFunc = str | PreTrainedModel | Callable[..., list[float | None]]


def load_reward_models(reward_funcs: Any, tokenizers: Any, args: TrainingArguments) -> tuple[list[Any], list[Any]]:
    """
    Loads the reward models that are given by path, with the arguments that TRL (1.16) loads them with, and checks all.

    TRL itself goes on where a checkpoint has no weights for the head: it is then filled with random numbers, for which the
    policy would be trained.

    Returns:
        `reward_funcs` and `reward_processing_classes` as lists, with models and their tokenizers in the place of paths.

    Raises:
        `ValueError`: If a reward model cannot be loaded, lacks weights, or is none of one label, or a function does not take what
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
            check_reward_model(function, f"`reward_funcs[{i}]`")
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
    if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        return
    missing = [name for name in ALWAYS_PASSED if name not in parameters]
    if missing:
        name = getattr(function, "__name__", type(function).__name__)
        raise ValueError(
            f"The reward function '{name}' does not take `{'`, `'.join(missing)}`, which trainers pass by name; add `**kwargs` to its "
            "parameters."
        )


def check_separate_rewards(reward_funcs: Any, model: Any, label: str, trained: bool) -> None:
    """
    Refuses reward models that share layers or trained weights with a model that is trained.

    The model is called by its `label`; a path or `None` shares nothing. It may be `trained` itself, or by an adapter yet to be made.
    """
    if not isinstance(model, nn.Module):
        return
    for i, reward in enumerate(reward_funcs if isinstance(reward_funcs, list) else [reward_funcs]):
        if isinstance(reward, nn.Module):
            remedy = "load the reward model by itself."
            check_separate(reward, f"`reward_funcs[{i}]`", model, label, (False, trained), remedy)


def all_with_checks(functions: list[Any], names: list[str]) -> list[Any]:
    """Reward functions as [`with_checks`] makes them, by their names in the metrics; models are left as they are."""
    named = zip(functions, names, strict=True)
    return [each if isinstance(each, nn.Module) else with_checks(each, name) for each, name in named]


def with_checks(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """
    A reward function whose errors name it, as it is called in the metrics; asynchronous if it was.

    TRL (1.16) turns `None` into NaN and takes NaN for `None` from there on: a division by zero inside a reward function
    would silently leave samples out, or count as 0 beside other functions. This one returns a list of numbers and `None`, and
    raises `ValueError` for anything else; to an error of the function itself it adds a note with the name and, where some completions
    by themselves raise it too, with the first of these. Each call gets lists of its own, which the function may change.
    """
    if is_async_callable(function):

        async def checked(**columns: Any) -> list[float | None]:
            with _naming(name):
                result = await function(**_own(columns))
            return _read(result, name)

    else:

        def checked(**columns: Any) -> list[float | None]:
            with _naming(name, function, columns):
                result = function(**_own(columns))
            return _read(result, name)

    checked.__name__ = name
    checked.unchecked = function
    return checked


def _own(value: Any) -> Any:
    """The same value in lists and dictionaries of its own."""
    if isinstance(value, dict):
        return {key: _own(each) for key, each in value.items()}
    return [_own(each) for each in value] if isinstance(value, list) else value


@contextlib.contextmanager
def _naming(name: str, function: Callable[..., Any] | None = None, columns: Any = None) -> Iterator[None]:
    """Adds to an error the function's name and, where the function is given, the completion that it is about if there is one."""
    try:
        yield
    except Exception as error:
        error.add_note(f"{RAISED_BY} '{name}'.")
        at = None if function is None or not isinstance(error, _OF_CODE) else _raising(function, columns, type(error))
        if at is not None:
            completions = columns["completions"]
            error.add_note(f"It is about completion {at} of {len(completions)}, {completions[at]!r:.60}.")
        raise


def _raising(function: Callable[..., Any], columns: dict[str, Any], kind: type[Exception]) -> int | None:
    """The first completion for which by itself a function raises such an error; `None` if all do, or if it is not found in 5 seconds."""
    count, end = len(columns.get("completions", ())), time.monotonic() + 5
    raised = []
    for i in range(count):
        row = {name: value[i : i + 1] if isinstance(value, list) else value for name, value in columns.items()}
        try:
            function(**_own(row))
            raised.append(False)
        except kind:
            raised.append(True)
        except Exception:
            return None
        if not all(raised) and any(raised):
            return raised.index(True)
        if time.monotonic() > end:
            return None
    return None


def _read(result: Any, name: str) -> list[float | None]:
    """Numbers and `None`, in the order of the completions; TRL refuses a wrong number of them."""
    values = as_values(result)
    if values is None:
        raise ValueError(
            f"The reward function '{name}' returned {result!r:.60}; it must return a list, one number a completion."
        )
    numbers = [as_number(value) for value in values]
    for i, number in enumerate(numbers):
        if number is not None and math.isnan(number):
            raise ValueError(
                f"The reward function '{name}' returned {values[i]!r:.60} for completion {i} of {len(values)}; return "
                "a finite number, or `None` to exclude the sample."
            )
    return numbers
