"""FSDP2 for a second model: preparation, sharded weights and optimizer states. All processes must call every function."""

import dataclasses
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, is_peft_model
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor

from ._adapters import AdapterView


def check_fsdp(accelerator: Accelerator, module: nn.Module | AdapterView) -> None:
    """Raises `ValueError` for adapters and for FSDP1, which a second model cannot use."""
    if accelerator.distributed_type != DistributedType.FSDP:
        return
    if is_peft_model(module) or isinstance(module, AdapterView):
        raise ValueError(
            "A second model that is an adapter is not trained with FSDP; leave out `peft_config`, or launch with "
            "DeepSpeed ZeRO (`distributed_type: DEEPSPEED`) or plain data parallelism (`MULTI_GPU`)."
        )
    if not accelerator.is_fsdp2:
        raise ValueError(
            "A second model is not trained with the first version of FSDP; set `fsdp_version: 2` for the launcher."
        )


def keep_precision(accelerator: Accelerator) -> None:
    """Makes models under FSDP2 return log-probabilities and values in float32. Must come before any is prepared.
    With `bf16=True` accelerate (1.15) rounds all outputs, from which ratios and importance weights are computed.
    Way out: an option for the outputs' precision in accelerate."""
    if accelerator.is_fsdp2 and accelerator.state.fsdp_plugin.mixed_precision_policy is not None:
        plugin = accelerator.state.fsdp_plugin
        plugin.mixed_precision_policy = dataclasses.replace(plugin.mixed_precision_policy, output_dtype=torch.float32)


def start_scaler(accelerator: Accelerator) -> None:
    """Makes the trainer's optimizer loadable under FSDP2 with `fp16=True`. Torch takes a step of rate 0 to build
    the state. Through accelerate's (1.15) wrapper it is a step of the scaler, which fails before it has scaled
    anything. Way out: accelerate passing on the unwrapped optimizer."""
    if accelerator.is_fsdp2 and accelerator.scaler is not None:
        accelerator.scaler.scale(torch.zeros((), device=accelerator.device))


def prepare(
    module: nn.Module, optimizer: torch.optim.Optimizer, accelerator: Accelerator
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Shards a model and its optimizer. Returns the engine and the unwrapped optimizer: accelerate's wrapper would
    skip steps between two updates of the trainer's own model."""
    engine, wrapped = accelerator.prepare(module, optimizer)
    return engine, wrapped.optimizer


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor gathered from its shards, if it has any."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def load_weights(module: nn.Module, directory: str | Path) -> None:
    """Loads the files of `save_pretrained` into a sharded model. Raises `ValueError` if weights are missing."""
    weights: dict[str, torch.Tensor] = {}
    for path in sorted(Path(directory).glob("model*.safetensors")):
        weights |= load_file(path)
    # FSDP wraps layers with checkpointed activations; files and torch's state dicts do not show it
    names = {name.replace("_checkpoint_wrapped_module.", "") for name, _ in module.named_parameters()}
    if missing := names - set(weights):  # tied ones are named and saved once
        raise ValueError(f"{directory} lacks weights of `{type(module).__name__}`, among them `{min(missing)}`.")
    set_model_state_dict(module, weights, options=StateDictOptions(full_state_dict=True, strict=False))


def optimizer_state(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The whole `state` and `param_groups` by parameter name in the first process; empty in the others."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return {"state": {}, "param_groups": []} | get_optimizer_state_dict(module, optimizer, options=options)
