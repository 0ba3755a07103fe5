"""Models with PEFT's wrapper and without, contexts for passes that change nothing, and all dependence on how PEFT and
transformers switch, freeze and load adapters.

The latter state what they rely on and what would make them unnecessary, as in `engine/trl_bridge.py`; tests of both
bridges pin it. PEFT is imported only where it is used.
"""

import contextlib
import inspect
import random
from collections.abc import Iterator
from pathlib import Path
from types import MethodType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from accelerate.utils import is_peft_model
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from transformers import PreTrainedModel
from transformers.utils import is_peft_available


if TYPE_CHECKING:
    from peft import PeftConfig


def base_of(model: Any) -> Any:
    """A model without PEFT's wrapper. Fast enough for each step, unlike [`accelerate.utils.is_peft_model`]."""
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
    """Context for passes without gradient or compilation, which leaves random states and modes as they were."""
    device = next((p.device for p in model.parameters() if not p.is_meta), torch.device("cpu"))
    devices = [] if device.type == "cpu" else [device]
    # A compiled `forward` runs no hooks, and is recompiled for each shape
    eager = torch.compiler.set_stance("force_eager")
    with torch.random.fork_rng(devices, device_type=device.type), in_mode(model, training), eager:
        yield


@contextlib.contextmanager
def random_states_kept(device: torch.device | None = None) -> Iterator[None]:
    """Context after which the random states of Python, NumPy and torch, on the CPU and on a device, are what they were."""
    states = random.getstate(), np.random.get_state()
    device = device or torch.device("cpu")
    try:
        with torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


def adapter_config(model: Any) -> "PeftConfig | None":
    """Configuration of the adapter that a folder holds; `None` of anything else."""
    if not isinstance(model, str) or not (Path(model) / "adapter_config.json").is_file():
        return None
    from peft import PeftConfig

    return PeftConfig.from_pretrained(model)


def adapter_layers(model: nn.Module) -> list[nn.Module]:
    """The modules of a PEFT model that depend on the active adapter."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import AuxiliaryTrainingWrapper

    return [module for module in model.modules() if isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper))]


def keep_4bit_trainable(model: nn.Module, argument: str) -> None:
    """Keeps 4-bit layers trainable. Raises `ValueError` if weights are packed already; `argument` names the model.
    On CPUs with AVX512-BF16 bitsandbytes (0.50) packs 4-bit weights that are read in evaluation mode, and adapters
    before them no longer learn. Way out: packing only if no gradient is needed, or a switch."""
    if not getattr(model, "is_loaded_in_4bit", False):
        return
    from bitsandbytes.nn import Linear4bit

    for layer in (module for module in model.modules() if isinstance(module, Linear4bit)):
        if getattr(getattr(layer.weight, "quant_state", None), "packing_format_for_cpu", False):
            raise ValueError(
                f"{argument} has 4-bit weights that bitsandbytes has packed for inference, which carry no gradient. Load it again, "
                "and do not run it in evaluation mode before training."
            )
        layer.support_avx512bf16_for_cpu = False


@contextlib.contextmanager
def _with_adapters(layers: list[nn.Module], adapters: list[list[str] | str]) -> Iterator[None]:
    """Context in which `adapters[i]` (one name or several) is active in `layers[i]`. PEFT's (0.21) public `set_adapter` also freezes all
    other adapters, which must train on here, so `_active_adapter` is set directly. Way out: a switch that leaves `requires_grad` alone."""
    before = [layer._active_adapter for layer in layers]
    try:
        for layer, names in zip(layers, adapters, strict=True):
            layer._active_adapter = names
        yield
    finally:
        for layer, names in zip(layers, before, strict=True):
            layer._active_adapter = names


class AdapterView:
    """A PEFT model with one adapter active. Other attributes are the model's; `requires_grad` does not change."""

    def __init__(self, model: Any, layers: list[nn.Module], name: str):
        self.model, self.name, self._layers = model, name, layers

    def active(self) -> contextlib.AbstractContextManager[None]:
        """Context in which the model's passes use this adapter."""
        return _with_adapters(self._layers, [[self.name]] * len(self._layers))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.active():
            return self.model(*args, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Samples from the model with this adapter."""
        with self.active():
            return self.model.generate(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "model" or name.startswith("__"):  # not set yet, as while copying
            raise AttributeError(name)
        return getattr(self.model, name)


class BaseView(AdapterView):
    """A PEFT model without its adapters."""

    def __init__(self, model: Any):
        super().__init__(model, [], "")

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Context in which the model's passes use the base alone."""
        with trainable_kept(self.model), self.model.disable_adapter():
            yield


def bind_adapters_to_checkpoints(model: PreTrainedModel) -> None:
    """
    Makes a checkpointed layer recompute, in backward, with the adapters of its forward pass.

    Otherwise the adapter active during backward would be used, and gradients would be wrong without an error.
    transformers (5.23) hands the checkpointing function to `_set_gradient_checkpointing`; TRL turns checkpointing off
    and on around every pass without gradient. Way out: PEFT or transformers binding the adapters.
    """
    original = type(model)._set_gradient_checkpointing

    def bound_to(layers: list[nn.Module], checkpoint: Any) -> Any:
        """`checkpoint`, which runs again with the adapters that were active in the first pass."""

        def bound_checkpoint(function: Any, *args: Any, **kwargs: Any) -> Any:
            adapters = [layer._active_adapter for layer in layers]

            def function_as_before(*inner_args: Any, **inner_kwargs: Any) -> Any:
                with _with_adapters(layers, adapters):
                    return function(*inner_args, **inner_kwargs)

            return checkpoint(function_as_before, *args, **kwargs)

        return bound_checkpoint

    def set_bound(self, enable=True, gradient_checkpointing_func=torch_checkpoint, every_n_layers=1):
        """The model's own `_set_gradient_checkpointing`, with a function that is bound to the adapters."""
        original(self, enable, bound_to(adapter_layers(self), gradient_checkpointing_func), every_n_layers)

    model._set_gradient_checkpointing = MethodType(set_bound, model)
    layers = adapter_layers(model)
    for module in model.modules():  # turned on before
        if "_gradient_checkpointing_func" in module.__dict__:
            module._gradient_checkpointing_func = bound_to(layers, module._gradient_checkpointing_func)


@contextlib.contextmanager
def trainable_kept(model: nn.Module) -> Iterator[None]:
    """Context that restores `requires_grad` of each parameter, which PEFT (0.21) changes in `set_adapter` and
    `add_adapter`, and when `disable_adapter` ends. Way out: as for [`_with_adapters`]."""
    before = [(p, p.requires_grad) for p in model.parameters()]
    try:
        yield
    finally:
        for p, requires_grad in before:
            if p.requires_grad != requires_grad:
                p.requires_grad_(requires_grad)


@contextlib.contextmanager
def adapters_kept(model: nn.Module) -> Iterator[None]:
    """Context in which loading a checkpoint neither adds adapters to a PEFT model nor freezes any. transformers
    (5.23) loads every adapter in a checkpoint into the policy, a second model's too, and freezes all but one. PEFT
    would then save that copy in the second model's place. Way out: a check of the adapters that the model has."""
    if not is_peft_model(model):
        yield
        return
    names, load_adapter = set(model.peft_config), model.load_adapter

    def load_own(model_id: Any, adapter_name: str, *args: Any, **kwargs: Any) -> Any:
        # A second model's may not fit the policy: another size or architecture, or biases
        return load_adapter(model_id, adapter_name, *args, **kwargs) if adapter_name in names else None

    model.load_adapter = load_own
    try:
        with trainable_kept(model):
            yield
    finally:
        del model.load_adapter
