"""DeepSpeed for a second model: its engine, and access to parameters partitioned by ZeRO-3."""

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, is_peft_model
from accelerate.utils.deepspeed import DeepSpeedOptimizerWrapper, map_pytorch_optim_to_deepspeed
from torch import nn
from transformers import TrainingArguments


def zero_stage(accelerator: Accelerator) -> int | None:
    """ZeRO stage of the run, `None` without DeepSpeed."""
    if accelerator.distributed_type != DistributedType.DEEPSPEED:
        return None
    return accelerator.state.deepspeed_plugin.zero_stage


def share_process_group(args: TrainingArguments) -> None:
    """Lets DeepSpeed use the process group of a CPU run, before ZeRO-3 loads a model. With `use_cpu=True`
    transformers (5.23) opens the process group itself, and DeepSpeed (0.19.8) does not know of it and assumes a
    single process. Way out: transformers opening it through DeepSpeed, as on accelerators."""
    if args.deepspeed_plugin is None or not torch.distributed.is_initialized():
        return
    import deepspeed

    if not deepspeed.comm.is_initialized():
        deepspeed.init_distributed(dist_backend=torch.distributed.get_backend(), verbose=False)


def check_deepspeed(accelerator: Accelerator) -> None:
    """Raises `ValueError` for what a second model cannot use: stage 0, tensor parallelism, or a section for optimizer or scheduler."""
    if (stage := zero_stage(accelerator)) is None:
        return
    config = accelerator.state.deepspeed_plugin.deepspeed_config
    if stage == 0:
        raise ValueError(
            "A second model is not trained with DeepSpeed's stage 0, which does not report the gradient's norm; set "
            "`zero_stage: 1` or use plain data parallelism (`distributed_type: MULTI_GPU`)."
        )
    if named := [key for key in ("optimizer", "scheduler") if key in config]:
        raise ValueError(
            f"The DeepSpeed configuration has a section `{named[0]}`, made for one model; remove it, and set `optim`, "
            "`learning_rate` and `lr_scheduler_type` in the trainer's configuration, which both models follow."
        )
    if config.get("tensor_parallel", {}).get("autotp_size", 0) > 1:
        raise ValueError(
            "A second model is not trained with DeepSpeed's tensor parallelism; remove `tensor_parallel`."
        )


def initialize(
    module: nn.Module, optimizer: torch.optim.Optimizer, accelerator: Accelerator, max_grad_norm: float
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """An engine for a second model and its optimizer, wrapped for schedulers; the engine steps it. Configured like the
    trainer's model, which must be prepared already (no `auto` left), but with its own clipping (0: none)."""
    import deepspeed  # slow: looks for devices and compilers

    config = copy.deepcopy(accelerator.state.deepspeed_plugin.deepspeed_config)
    config |= {"gradient_clipping": max_grad_norm, "zero_allow_untested_optimizer": True}
    zero = config["zero_optimization"]
    zero["stage3_gather_16bit_weights_on_model_save"] = True
    offloaded = zero.get("offload_optimizer", {}).get("device", "none") != "none"
    if offloaded and config.get("zero_force_ds_cpu_optimizer", True):
        optimizer = map_pytorch_optim_to_deepspeed(optimizer)
    accelerator.state.deepspeed_plugin.set_moe_leaf_modules(module)
    engine, optimizer, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
    return engine, DeepSpeedOptimizerWrapper(optimizer)


def is_partitioned(model: nn.Module) -> bool:
    """Whether ZeRO-3 has partitioned the model's parameters."""
    return any("ds_id" in vars(p) for p in model.parameters())


@contextlib.contextmanager
def gathered(model: nn.Module, write: bool = False) -> Iterator[None]:
    """Context in which ZeRO-3's parameters are whole in every process; all processes must enter. With `write`, all
    keep what the first process writes. Without ZeRO-3 nothing happens."""
    if not is_partitioned(model):
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=0 if write else None):
        yield


@contextlib.contextmanager
def gathered_by_layer(model: nn.Module) -> Iterator[None]:
    """Like [`gathered`], for passes without gradient: each layer is whole only while it computes. Parameters outside
    of layers, such as the embeddings, are whole throughout."""
    if not is_partitioned(model):
        yield
        return
    import deepspeed

    layers = list(dict.fromkeys(_layers(model)))  # without repeats
    inside = {id(p) for layer in layers for p in layer.parameters()}
    outside = [p for p in model.parameters() if id(p) not in inside]

    def gather(layer: nn.Module, *_: Any) -> None:
        contexts[layer] = deepspeed.zero.GatheredParameters(list(layer.parameters()))
        contexts[layer].__enter__()

    def release(layer: nn.Module, *_: Any) -> None:
        contexts.pop(layer).__exit__(None, None, None)

    contexts: dict[nn.Module, Any] = {}
    handles = [layer.register_forward_pre_hook(gather) for layer in layers]
    handles += [layer.register_forward_hook(release, always_call=True) for layer in layers]
    try:
        with deepspeed.zero.GatheredParameters(outside):
            yield
    finally:
        for handle in handles:
            handle.remove()


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    """The outermost modules held in `nn.ModuleList`s."""
    for child in module.children():
        yield from child if isinstance(child, nn.ModuleList) else _layers(child)


def end_backward(engine: nn.Module) -> None:
    """Ends a backward pass that was not started by the engine. ZeRO-3 releases gathered layers by a hook on the
    gradient of their input, which the first layers with adapters lack. The engine's own `backward` (0.19.8) makes
    this call. Way out: releasing them after any backward."""
    if engine.zero_optimization_stage() == 3:
        engine.optimizer.parameter_offload.release_backward_leftovers()


def whole_state_dict(module: nn.Module, engine: nn.Module, accelerator: Accelerator) -> dict[str, Any] | None:
    """Weights for `save_pretrained`, gathered from all processes, which must all call it. With ZeRO-3 only the first gets them,
    the others `None`. Before training, a model is its own `engine`."""
    if engine is module:
        with gathered(module):
            whole = {name: value.detach().cpu().clone() for name, value in module.state_dict().items()}
        return whole if accelerator.is_main_process else None
    if zero_stage(accelerator) == 3:
        return engine._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=is_peft_model(module))
    return accelerator.get_state_dict(engine)
