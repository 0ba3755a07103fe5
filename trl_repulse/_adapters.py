"""Models with PEFT's wrapper and without."""

import inspect
from typing import Any

from transformers.utils import is_peft_available


def base_of(model: Any) -> Any:
    """
    A model without PEFT's wrapper around it.

    It is called at each step, where [`accelerate.utils.is_peft_model`] takes milliseconds: it looks the package up each time.

    Args:
        model ([`~transformers.PreTrainedModel`] or `peft.PeftModel`):
            The model, not wrapped for several processes.

    Returns:
        [`~transformers.PreTrainedModel`]: The model itself if it has no wrapper.
    """
    if is_peft_available():
        from peft import PeftModel

        if isinstance(model, PeftModel):
            return model.get_base_model()
    return model


def takes(model: Any, argument: str) -> bool:
    """Whether a model's `forward` has an argument of this name. PEFT's wrapper is looked through."""
    return argument in inspect.signature(type(base_of(model)).forward).parameters
