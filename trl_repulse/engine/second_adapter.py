"""A second adapter over the base model that a TRL trainer's own adapter trains on."""

import contextlib
import copy
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import MethodType
from typing import TYPE_CHECKING

import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import Trainer

from ..models._adapters import AdapterView, adapter_layers, bind_adapters_to_checkpoints, trainable_kept
from ..models._deepspeed import end_backward, gathered, zero_stage
from .second_model import SecondModel
from .trl_bridge import disable_dropout


if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel

# The trainer's own adapter has PEFT's name for the first one.
POLICY_ADAPTER = "default"
_WEIGHTS = "adapter_model.safetensors"


class Adapter(AdapterView):
    """
    One adapter of a PEFT model, as a model: passes run with this adapter, and parameters, saving and loading are of its weights alone.
    Everything else is the PEFT model's.

    Args:
        model (`peft.PeftModel`):
            Model that has the adapter.
        name (`str`):
            Name of the adapter.
        weights (`dict[str, torch.nn.Parameter]`):
            Its parameters by their names in `model`.
    """

    def __init__(self, model: "PeftModel", name: str, weights: dict[str, nn.Parameter]):
        super().__init__(model, adapter_layers(model), name)
        self._weights = weights

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters of this adapter, by their names in the PEFT model."""
        yield from self._weights.items()

    def parameters(self) -> Iterator[nn.Parameter]:
        yield from self._weights.values()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """This adapter's weights, by their names in the PEFT model."""
        return {name: p.detach() for name, p in self.named_parameters()}

    def requires_grad_(self, requires_grad: bool = True) -> "Adapter":
        """Freezes or unfreezes this adapter, whichever is active."""
        for p in self.parameters():
            p.requires_grad_(requires_grad)
        return self

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Context in which this adapter is not trainable."""
        with trainable_kept(self.model):
            self.requires_grad_(False)
            yield

    def save_pretrained(self, save_directory: str | Path) -> None:
        """Writes this adapter alone to a folder, as an ordinary PEFT adapter."""
        from peft import get_peft_model_state_dict

        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        weights = get_peft_model_state_dict(self.model, adapter_name=self.name)
        save_file({k: v.contiguous() for k, v in weights.items()}, folder / _WEIGHTS, metadata={"format": "pt"})
        config = copy.copy(self.model.peft_config[self.name])
        config.inference_mode = True
        config.save_pretrained(folder)

    def load(self, directory: str | Path) -> None:
        """Reads weights that [`save_pretrained`] wrote. Raises a `ValueError` if there is no adapter, or one of other layers."""
        from peft import set_peft_model_state_dict

        path = Path(directory) / _WEIGHTS
        if not path.is_file():
            raise ValueError(
                f"{directory} holds no adapter (`{_WEIGHTS}`), but the proposal is an adapter over the policy's base; "
                "was it trained with full weights?"
            )
        result = set_peft_model_state_dict(self.model, load_file(path), adapter_name=self.name)
        missing = sorted(set(result.missing_keys) & set(self._weights))
        if missing or result.unexpected_keys:
            raise ValueError(
                f"The adapter in {directory} is not of the proposal's layers (first of them: "
                f"{[*missing, *result.unexpected_keys][0]}); train with the configuration it was made with."
            )


def add_adapter(model: "PeftModel", name: str, config: "PeftConfig | None" = None) -> Adapter:
    """
    Adds a frozen adapter, with a new configuration or as a copy of the policy's; what was trainable stays so.

    `model.save_pretrained` leaves it out from now on, unless `selected_adapters` names it.

    Args:
        model (`peft.PeftModel`):
            Model with the policy's adapter.
        name (`str`):
            Name of the new adapter.
        config (`peft.PeftConfig`, *optional*):
            Its configuration. If `None`, the policy's, and its weights are copied.

    Raises:
        `ValueError`: If the model has an adapter of that name.
    """
    if name in model.peft_config:
        raise ValueError(
            f"The policy already has an adapter named {name!r}, the proposal's name; rename or delete it."
        )
    policy_config = model.peft_config[POLICY_ADAPTER]
    own = copy.deepcopy(policy_config if config is None else config)
    own.inference_mode = False
    own.base_model_name_or_path = policy_config.base_model_name_or_path
    before = {id(p) for p in model.parameters()}
    with trainable_kept(model):
        model.add_adapter(name, own)
    weights = {key: p for key, p in model.named_parameters() if id(p) not in before}
    # The precision that TRL gives the policy's, which depends on quantization and on ZeRO-3; it leaves DoRA's magnitudes alone
    matrices = {key: p for key, p in model.named_parameters() if "lora_magnitude_vector" not in key.split(".")}
    dtype = next(p.dtype for key, p in matrices.items() if POLICY_ADAPTER in key.split("."))
    for key, p in weights.items():
        if config is None:
            theirs = ".".join(POLICY_ADAPTER if part == name else part for part in key.split("."))
            p.data = model.get_parameter(theirs).data.clone()
        elif key in matrices:
            p.data = p.data.to(dtype)
    disable_dropout(model)  # the new adapter's; TRL has done so with all others
    model.save_pretrained = MethodType(_save_the_others, model)
    bind_adapters_to_checkpoints(model.get_base_model())
    return Adapter(model, name, weights).requires_grad_(False)


def _save_the_others(model, save_directory, safe_serialization=True, selected_adapters=None, **kwargs) -> None:
    """`PeftModel.save_pretrained` of every adapter but the proposal's."""
    if selected_adapters is None:
        selected_adapters = [name for name in model.peft_config if name != SecondAdapter.name]
    type(model).save_pretrained(model, save_directory, safe_serialization, selected_adapters, **kwargs)


class SecondAdapter(SecondModel):
    """
    A [`SecondModel`] that is an adapter over the same frozen base as the trainer's own adapter.

    Its passes run on the bare model with its adapter active, never through the trainer's engine. So neither optimizer has the other's
    weights, and no data-parallel wrapper waits for gradients of an unused adapter. Gradients are averaged over processes once, in
    [`step`].

    DeepSpeed casts the adapter with the rest of the model to its training precision, and ZeRO-3 partitions it. The optimizer then
    works, in each process, on a whole copy of the adapter in float32, which is also what is saved.

    Args:
        module ([`Adapter`]):
            The adapter to train, as [`add_adapter`] makes it.
        accelerator ([`~accelerate.Accelerator`]):
            The trainer's accelerator.
        learning_rate (`float`):
            Peak learning rate of this adapter's optimizer.

    Raises:
        `ValueError`: With FSDP, which flattens all of a model's weights, or a configuration of DeepSpeed that cannot
            serve two models.
    """

    name = "proposal"  # of the adapter

    def __init__(self, module: Adapter, accelerator: Accelerator, learning_rate: float):
        super().__init__(module, accelerator, learning_rate)
        self._deepspeed = False  # the adapter has no engine
        self._policy_engine: nn.Module | None = None  # DeepSpeed's
        self._masters: list[torch.Tensor] | None = None

    def prepare(self, trainer: Trainer, num_training_steps: int) -> None:
        """As [`SecondModel.prepare`]. Unfreezes the adapter, which is frozen while the trainer prepares its own model."""
        self.module.requires_grad_(True)
        super().prepare(trainer, num_training_steps)

    def _build(self, trainer: Trainer) -> None:
        if zero_stage(self._accelerator) is not None:
            self._policy_engine = trainer.model_wrapped
            with gathered(self.module):
                self._masters = [p.detach().float().clone() for p in self.module.parameters()]
        self.optimizer = self._create_optimizer(trainer)

    @contextlib.contextmanager
    def gradient_sync(self, sync: bool) -> Iterator[None]:
        """
        Unfreezes the adapter for a micro-batch; gradients cross processes in [`step`].

        PEFT (0.21) freezes it whenever adapters are switched through PEFT's methods, as a callback may do.
        """
        if self.optimizer is not None:
            self.module.requires_grad_(True)
        yield

    def backward(self, loss: torch.Tensor) -> None:
        super().backward(loss)
        if self._policy_engine is not None:
            end_backward(self._policy_engine)

    @contextlib.contextmanager
    def _masters_in_place(self, changed: bool = False) -> Iterator[None]:
        """With DeepSpeed, parameters are their whole float32 copies inside; if `changed`, these are copied back."""
        if self._masters is None:
            yield
            return
        parameters = list(self.module.parameters())
        before = [p.data for p in parameters]
        for p, master in zip(parameters, self._masters, strict=True):
            p.data = master
        try:
            yield
        finally:
            for p, data in zip(parameters, before, strict=True):
                p.data = data
        if changed:
            with gathered(self.module, write=True), torch.no_grad():
                for p, master in zip(parameters, self._masters, strict=True):
                    p.copy_(master)

    def save_pretrained(self, directory: str | Path, write: bool) -> None:
        """As [`SecondModel.save_pretrained`]; each process has the whole adapter."""
        if write:
            with self._masters_in_place():
                self.module.save_pretrained(directory)

    def load_checkpoint(self, trainer: Trainer, directory: str | Path) -> None:
        with self._masters_in_place(changed=True):
            self.module.load(directory)
            self.load_state(directory)  # an optimizer's state takes the precision of the parameters it finds

    def step(self) -> float:
        """
        As [`SecondModel.step`], of the gradient averaged over processes.

        Raises:
            `ValueError`: If nothing has a gradient.
        """
        if all(p.grad is None for p in self.module.parameters()):
            raise ValueError(
                f"The adapter {self.name!r} has no gradient: it was frozen or inactive in its own passes; switch adapters "
                "between updates alone, as in `on_step_end`."
            )
        with self._masters_in_place(changed=True):
            for p in self.module.parameters():
                if p.grad is not None:
                    p.grad = p.grad.to(p.dtype)
            if self._accelerator.num_processes > 1:
                self._average_gradients()
            return super().step()

    def _average_gradients(self) -> None:
        """Averages gradients over processes, in one call for each dtype."""
        groups = defaultdict(list)
        for p in self.module.parameters():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            groups[p.grad.dtype].append(p.grad)
        for grads in groups.values():
            flat = self._accelerator.reduce(torch.cat([grad.flatten() for grad in grads]), reduction="mean")
            for grad, mean in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
                grad.copy_(mean.view_as(grad))
