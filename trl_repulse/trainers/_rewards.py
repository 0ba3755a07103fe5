"""A user's reward functions, checked as they are called: a fault is named and never becomes a number."""

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .._errors import RAISED_BY
from ..rewards._numbers import as_number, as_values
from ._trl_bridge import is_async_callable


def all_with_checks(functions: list[Any], names: list[str]) -> list[Any]:
    """
    A trainer's reward functions, each as [`with_checks`] makes it; reward models are left as they are.

    Args:
        functions (`list`):
            Reward functions and models, as TRL's trainers keep them.
        names (`list[str]`):
            Their names in the metrics.

    Returns:
        `list`: One of each.
    """
    return [
        function if isinstance(function, torch.nn.Module) else with_checks(function, name)
        for function, name in zip(functions, names, strict=True)
    ]


def with_checks(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """
    A reward function whose errors name it.

    TRL (1.16) turns `None` into NaN and takes NaN for `None` from there on: a division by zero inside a reward function
    would silently leave samples out, or count as 0 beside other functions.

    Args:
        function (`Callable`):
            Reward function, asynchronous or not.
        name (`str`):
            Its name in the metrics.

    Returns:
        `Callable`: The same function, asynchronous if it was. It returns a list of numbers and `None`, and raises
        `ValueError` for anything else; to an error of the function itself it adds a note with the name.
    """
    if is_async_callable(function):

        async def checked(**columns: Any) -> list[float | None]:
            with _naming(name):
                result = await function(**columns)
            return _read(result, name)

    else:

        def checked(**columns: Any) -> list[float | None]:
            with _naming(name):
                result = function(**columns)
            return _read(result, name)

    checked.__name__ = name
    checked.unchecked = function
    return checked


@contextlib.contextmanager
def _naming(name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        error.add_note(f"{RAISED_BY} '{name}'.")
        raise


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
