"""Models with PEFT's wrapper and without, and contexts for passes that change nothing."""

import contextlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.utils import is_peft_available


if TYPE_CHECKING:
    from peft import PeftConfig


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


@contextlib.contextmanager
def in_mode(model: nn.Module, training: bool) -> Iterator[None]:
    """Context in training or evaluation mode, without gradients; every submodule gets its mode back."""
    modes = [(module, module.training) for module in model.modules()]
    model.train(training)
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextlib.contextmanager
def undisturbed(model: nn.Module, training: bool) -> Iterator[None]:
    """Context for passes that change no random states, modes or gradients."""
    device = next((p.device for p in model.parameters() if not p.is_meta), torch.device("cpu"))
    devices = [] if device.type == "cpu" else [device]
    # A compiled `forward` runs no hooks, and is recompiled for each shape
    eager = torch.compiler.set_stance("force_eager")
    with torch.random.fork_rng(devices, device_type=device.type), in_mode(model, training), eager:
        yield


def adapter_config(model: Any) -> "PeftConfig | None":
    """Configuration of the adapter that a folder holds; `None` of anything else."""
    if not isinstance(model, str) or not (Path(model) / "adapter_config.json").is_file():
        return None
    from peft import PeftConfig

    return PeftConfig.from_pretrained(model)
