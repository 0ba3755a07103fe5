"""Every dependence on how PEFT and transformers switch, freeze and load adapters; pinned in the tests of both bridges.

Each entry says what it relies on, why, and what would let it go, as in `_trl_bridge.py`. PEFT is imported where it is
used: nothing here needs it without adapters.
"""

import contextlib
import inspect
from collections.abc import Iterator
from types import MethodType
from typing import Any

from accelerate.utils import is_peft_model
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from transformers import PreTrainedModel


def adapter_layers(model: nn.Module) -> list[nn.Module]:
    """
    The modules of a PEFT model that look up which adapter is active: layers, and modules of which each adapter has a copy.

    PEFT (0.21) keeps the active adapters of each in `_active_adapter`. Its public `set_adapter` also freezes all other
    adapters, which must go on training here, so that the attribute is set instead. Way out: a switch in PEFT that
    leaves `requires_grad` alone.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import AuxiliaryTrainingWrapper

    return [module for module in model.modules() if isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper))]


def keep_gradients(model: nn.Module, argument: str) -> None:
    """
    Keeps 4-bit layers as they are trained. `argument` is what the user passed the model as.

    On CPUs with AVX512-BF16 bitsandbytes (0.50) packs 4-bit weights that are read in evaluation mode for a product that carries
    no gradient, and leaves them so when training goes on: adapters before them would no longer learn. Way out: packing only
    where no gradient is asked for, or a switch.

    Raises:
        `ValueError`: If weights are packed already.
    """
    if not getattr(model, "is_loaded_in_4bit", False):
        return
    from bitsandbytes.nn import Linear4bit

    for layer in model.modules():
        if not isinstance(layer, Linear4bit):
            continue
        if getattr(getattr(layer.weight, "quant_state", None), "packing_format_for_cpu", False):
            raise ValueError(
                f"{argument} has 4-bit weights that bitsandbytes has packed for inference, which carry no gradient. Load it again, "
                "and do not run it in evaluation mode before training."
            )
        layer.support_avx512bf16_for_cpu = False


@contextlib.contextmanager
def _with_adapters(layers: list[nn.Module], adapters: list[list[str] | str]) -> Iterator[None]:
    """Gives each of `layers` its own of `adapters` as the active ones, and back."""
    before = [layer._active_adapter for layer in layers]
    try:
        for layer, names in zip(layers, adapters, strict=True):
            layer._active_adapter = names
        yield
    finally:
        for layer, names in zip(layers, before, strict=True):
            layer._active_adapter = names


class AdapterView:
    """A PEFT model as one of its adapters makes it; attributes are the model's, `requires_grad` is left as it is."""

    def __init__(self, model: Any, layers: list[nn.Module], name: str):
        self.model = model
        self.name = name
        self._layers = layers

    def active(self) -> contextlib.AbstractContextManager[None]:
        """Context in which the model's passes go through this adapter."""
        return _with_adapters(self._layers, [[self.name]] * len(self._layers))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.active():
            return self.model(*args, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Samples from the model with this adapter."""
        with self.active():
            return self.model.generate(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "model" or name.startswith("__"):  # not set yet, as in a copy that is being made
            raise AttributeError(name)
        return getattr(self.model, name)


class BaseView(AdapterView):
    """A PEFT model with its adapters off."""

    def __init__(self, model: Any):
        super().__init__(model, [], "")

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Context in which the model's passes go through its base alone."""
        with trainable_kept(self.model), self.model.disable_adapter():
            yield


def bind_adapters_to_checkpoints(model: PreTrainedModel) -> None:
    """
    Lets a checkpointed layer be computed again, in backward, with the adapters of its first computation.

    Without, the adapter that is active at the time of backward would be used, and the gradients be wrong without a
    word. transformers (5.23) hands the checkpointing function to `_set_gradient_checkpointing`, from wherever
    checkpointing is turned on: TRL turns it off and on again around every pass without gradient. Way out: PEFT or
    transformers binding the adapters themselves.

    Raises:
        `ValueError`: If the model has the checkpointing of transformers before 4.35, which takes no function.
    """
    original = type(model)._set_gradient_checkpointing
    if "value" in inspect.signature(original).parameters:
        raise ValueError(
            f"{type(model).__name__} has an outdated form of gradient checkpointing, which two adapters cannot share; "
            "pass `proposal_model` to give the proposal a base of its own."
        )

    def bound_to(layers: list[nn.Module], checkpoint: Any) -> Any:
        def bound_checkpoint(function: Any, *args: Any, **kwargs: Any) -> Any:
            adapters = [layer._active_adapter for layer in layers]

            def with_adapters(*inner_args: Any, **inner_kwargs: Any) -> Any:
                with _with_adapters(layers, adapters):
                    return function(*inner_args, **inner_kwargs)

            return checkpoint(with_adapters, *args, **kwargs)

        return bound_checkpoint

    def set_bound(self, enable=True, gradient_checkpointing_func=torch_checkpoint, every_n_layers=1):
        function = bound_to(adapter_layers(self), gradient_checkpointing_func)
        original(self, enable, function, every_n_layers)

    model._set_gradient_checkpointing = MethodType(set_bound, model)
    layers = adapter_layers(model)
    for module in model.modules():  # turned on before, by whoever built the model
        if "_gradient_checkpointing_func" in module.__dict__:
            module._gradient_checkpointing_func = bound_to(layers, module._gradient_checkpointing_func)


@contextlib.contextmanager
def trainable_kept(model: nn.Module) -> Iterator[None]:
    """
    Puts `requires_grad` of each parameter back as it was.

    PEFT (0.21) sets it for the active adapter and clears it for all others in `set_adapter`, in `add_adapter`, and on
    leaving `disable_adapter`. Way out: as for [`adapter_layers`].
    """
    before = [(p, p.requires_grad) for p in model.parameters()]
    try:
        yield
    finally:
        for p, requires_grad in before:
            if p.requires_grad != requires_grad:
                p.requires_grad_(requires_grad)


@contextlib.contextmanager
def adapters_kept(model: nn.Module) -> Iterator[None]:
    """
    Loading a checkpoint inside the context adds no adapter to a PEFT model and freezes none; without adapters nothing is done.

    transformers (5.23) loads every folder of a checkpoint that holds an adapter into the policy, a second model's too, and
    clears `requires_grad` of all but one. From then on PEFT would save that copy in the second model's place. Way out: a
    check there of the adapters that the model has.
    """
    if not is_peft_model(model):
        yield
        return
    names = set(model.peft_config)
    with trainable_kept(model):
        yield
        for name in set(model.peft_config) - names:
            model.delete_adapter(name)
