"""Fields by name: a misspelt one is refused with the nearest."""

from dataclasses import fields
from typing import Any

from .._errors import did_you_mean


class KnownFields:
    """Mixin of dataclasses whose message about an unknown field names the nearest one."""

    def __new__(cls, *args: Any, **kwargs: Any):
        known = [field.name for field in fields(cls)]
        for name in kwargs:
            if name not in known:
                raise TypeError(f"{cls.__name__} has no field `{name}`.{did_you_mean(name, known)}")
        return super().__new__(cls)
