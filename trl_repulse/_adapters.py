"""Models with PEFT's wrapper and without."""

import inspect
from typing import Any

from transformers.utils import is_peft_available


def base_of(model: Any) -> Any:
    """A model without PEFT's wrapper. Fast enough for each step, unlike [`accelerate.utils.is_peft_model`], which
    looks the package up every time."""
    if is_peft_available():
        from peft import PeftModel

        if isinstance(model, PeftModel):
            return model.get_base_model()
    return model


def takes(model: Any, argument: str) -> bool:
    """Whether the model's `forward`, inside PEFT's wrapper, has an argument of this name."""
    return argument in inspect.signature(type(base_of(model)).forward).parameters
