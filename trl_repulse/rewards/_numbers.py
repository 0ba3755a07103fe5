"""What a reward function returned, as numbers."""

import math
from collections.abc import Iterable
from typing import Any


def as_number(value: Any) -> float | None:
    """What a reward function gave for one completion; NaN for what is no number."""
    if value is None:
        return None
    try:
        return math.nan if isinstance(value, str) else float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # the last from tensors of several numbers
        return math.nan


def as_values(result: Any) -> list[Any] | None:
    """What a reward function returned, one entry a completion; `None` if it is nothing of that kind."""
    if isinstance(result, str | bytes | dict) or not isinstance(result, Iterable):
        return None
    # An array without dimensions is an `Iterable` that cannot be iterated over
    return None if getattr(result, "shape", None) == () else list(result)
