"""Mixins of the configurations: clear errors for misspelt fields, and a default evaluation batch."""

import inspect
from dataclasses import dataclass, field
from typing import Any

from .._errors import did_you_mean


class KnownFields:
    """Mixin of dataclasses whose error about an unknown field names the nearest one."""

    def __new__(cls, *args: Any, **kwargs: Any):
        known = inspect.signature(cls.__init__).parameters
        takes_any = any(each.kind is each.VAR_KEYWORD for each in known.values())  # a subclass with its own arguments
        for name in kwargs:
            if name not in known and not takes_any:
                raise TypeError(f"{cls.__name__} has no field `{name}`.{did_you_mean(name, known)}")
        return super().__new__(cls)


@dataclass
class WholePrompts:
    """Mixin before [`~trl.GRPOConfig`] whose default evaluation batch does not split a prompt's completions."""

    per_device_eval_batch_size: int | None = field(  # a number after `__post_init__`
        default=None,
        metadata={"help": "Completions of one pass of evaluation. If unset, 8, rounded up to whole prompts."},
    )

    def __post_init__(self):
        if self.per_device_eval_batch_size is None:
            drawn = max(self.num_generations_eval or self.num_generations or 1, 1)
            self.per_device_eval_batch_size = -(-8 // drawn) * drawn
        super().__post_init__()
