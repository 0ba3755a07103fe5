"""A reference that moves (`sync_ref_model=True`) in checkpoints: TRL (1.16) loads a resumed run's as it began."""

from pathlib import Path
from typing import Any

import torch
from accelerate.logging import get_logger
from accelerate.utils import DistributedType
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from ..models import _fsdp
from ..models._deepspeed import gathered


logger = get_logger(__name__)

# File of a moving reference inside a checkpoint.
REFERENCE = "reference.safetensors"


def save_reference(trainer: Any, checkpoint: Path) -> None:
    """
    Writes the reference's parameters, if it moves. All processes must call it.

    With FSDP's first version, whose parameters are flat, nothing is written.
    """
    if not trainer.args.sync_ref_model or _is_flat(trainer):
        return
    module = trainer.accelerator.unwrap_model(trainer.ref_model, keep_torch_compile=False)
    weights: dict[str, torch.Tensor] = {}
    with gathered(module):
        for name, p in module.named_parameters():  # those that TRL moves; tied ones once
            value = _fsdp.whole(p.detach())
            if trainer.args.should_save:
                weights[name] = value.cpu().contiguous().clone()
    if trainer.args.should_save:
        checkpoint.mkdir(parents=True, exist_ok=True)
        save_file(weights, checkpoint / REFERENCE)


def load_reference(trainer: Any, checkpoint: Path) -> None:
    """
    Takes up what [`save_reference`] wrote, if the reference moves. All processes must call it.

    Raises:
        `ValueError`: If the checkpoint holds no reference, or that of another model.
    """
    if not trainer.args.sync_ref_model:
        return
    path = checkpoint / REFERENCE
    if not path.is_file() and not any(checkpoint.glob("position-*.json")):  # of weights alone
        logger.warning("%s holds no reference; `sync_ref_model=True` begins with that of `model`.", checkpoint)
        return
    if not path.is_file() or _is_flat(trainer):
        raise ValueError(
            f"{checkpoint} holds no reference that `sync_ref_model=True` could go on from (written by an earlier version, or "
            "with FSDP's first version); resume from another, or start a new run from its models."
        )
    weights = load_file(path)
    module = trainer.accelerator.unwrap_model(trainer.ref_model, keep_torch_compile=False)
    names = {name for name, _ in module.named_parameters()}
    if names != set(weights):
        raise ValueError(
            f"{path} is not of a reference as `model` makes it: `{min(names ^ set(weights))}` is in one of them alone; set "
            "`model` to what the run began with."
        )
    if trainer.accelerator.is_fsdp2:
        set_model_state_dict(module, weights, options=StateDictOptions(full_state_dict=True, strict=False))
        return
    with gathered(module, write=True), torch.no_grad():
        for name, p in module.named_parameters():
            p.copy_(weights[name])


def _is_flat(trainer: Any) -> bool:
    accelerator = trainer.accelerator
    return accelerator.distributed_type == DistributedType.FSDP and not accelerator.is_fsdp2
