"""Fields by name: a misspelt one is refused with the nearest."""

import inspect
from typing import Any

from .._errors import did_you_mean


class KnownFields:
    """Mixin of dataclasses whose message about an unknown field names the nearest one."""

    def __new__(cls, *args: Any, **kwargs: Any):
        known = inspect.signature(cls.__init__).parameters
        takes_any = any(
            each.kind is each.VAR_KEYWORD for each in known.values()
        )  # a subclass with arguments of its own
        for name in kwargs:
            if name not in known and not takes_any:
                raise TypeError(f"{cls.__name__} has no field `{name}`.{did_you_mean(name, known)}")
        return super().__new__(cls)
