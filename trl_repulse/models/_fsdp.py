"""A second model under FSDP2: its preparation, and weights and optimizer states that lie on several processes.

Every function with a model or an optimizer must be called by all processes.
"""

import dataclasses
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, is_peft_model
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from ._peft_bridge import AdapterView


def check_fsdp(accelerator: Accelerator, module: nn.Module | AdapterView) -> None:
    """
    Refuses ways of FSDP that a second model cannot follow.

    Raises:
        `ValueError`: With FSDP's first version, or adapters.
    """
    if accelerator.distributed_type != DistributedType.FSDP:
        return
    if is_peft_model(module) or isinstance(module, AdapterView):
        raise ValueError(
            "A second model that is an adapter is not trained with FSDP; leave out `peft_config`, or launch with "
            "DeepSpeed ZeRO (`distributed_type: DEEPSPEED`) or plain data parallelism (`MULTI_GPU`)."
        )
    if not accelerator.is_fsdp2:
        raise ValueError(
            "A second model is not trained with the first version of FSDP; set `fsdp_version: 2` in the launcher's "
            "configuration."
        )


def keep_precision(accelerator: Accelerator) -> None:
    """
    Lets models under FSDP2 give log-probabilities and values in float32, as they do everywhere else. Must come before any is prepared.

    With `bf16=True` accelerate (1.15) has FSDP2 round all outputs to bfloat16, two or three digits, of which ratios and
    importance weights are then made. Way out: an option for the outputs' precision in accelerate's configuration.
    """
    if accelerator.is_fsdp2 and accelerator.state.fsdp_plugin.mixed_precision_policy is not None:
        plugin = accelerator.state.fsdp_plugin
        plugin.mixed_precision_policy = dataclasses.replace(plugin.mixed_precision_policy, output_dtype=torch.float32)


def start_scaler(accelerator: Accelerator) -> None:
    """
    Lets the optimizer of the trainer's own model be loaded under FSDP2 with `fp16=True`.

    Torch takes a step, of rate 0, to build the state that it fills; through accelerate's (1.15) wrapper that is a step of the
    scaler, which refuses before it has scaled anything. Way out: accelerate handing on the optimizer that it has wrapped.
    """
    if accelerator.is_fsdp2 and accelerator.scaler is not None:
        accelerator.scaler.scale(torch.zeros((), device=accelerator.device))


def prepare(
    module: nn.Module, optimizer: torch.optim.Optimizer, accelerator: Accelerator
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """
    Cuts a model apart as the trainer's is, together with its optimizer.

    Returns:
        The engine, and the optimizer itself: accelerate's wrapper would skip steps between two updates of the trainer's own model.
    """
    engine, wrapped = accelerator.prepare(module, optimizer)
    return engine, wrapped.optimizer


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of which processes may hold parts: gathered if it was sharded or to be summed up."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def load_weights(module: nn.Module, directory: str | Path) -> None:
    """
    Reads weights that `save_pretrained` wrote, in one file or several, into a model that is cut apart.

    Raises:
        `ValueError`: If weights are missing.
    """
    weights: dict[str, torch.Tensor] = {}
    for path in sorted(Path(directory).glob("model*.safetensors")):
        weights |= load_file(path)
    # Layers whose activations are checkpointed by FSDP are wrapped, which neither files nor torch's names show
    names = {name.replace("_checkpoint_wrapped_module.", "") for name, _ in module.named_parameters()}
    missing = names - set(weights)  # tied ones are named and saved once
    if missing:
        raise ValueError(f"{directory} lacks weights of `{type(module).__name__}`, among them `{min(missing)}`.")
    set_model_state_dict(module, weights, options=StateDictOptions(full_state_dict=True, strict=False))


def optimizer_state(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """An optimizer's `state` and `param_groups` by names of parameters, whole, in the first process; nothing in the others."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return {"state": {}, "param_groups": []} | get_optimizer_state_dict(module, optimizer, options=options)


def load_optimizer_state(module: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Gives an optimizer what [`optimizer_state`] gave, which must be the same in all processes."""
    set_optimizer_state_dict(module, optimizer, state, options=StateDictOptions(full_state_dict=True))
