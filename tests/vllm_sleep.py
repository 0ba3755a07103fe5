"""Sleep for vLLM's CPU build, which has none: what sleep takes from an engine on an accelerator is overwritten.

The engine itself is vLLM's, with its scheduler, prefix cache and tags; only the worker's part is replaced. Level 1 keeps all
that was allocated when the model was loaded (weights, buffers, adapters' slots), level 2 the buffers alone.
"""

from collections.abc import Iterator
from typing import Any

import torch


LOST = 1e30  # what is read where a cache has not been written anew


def let_cpu_sleep(monkeypatch) -> None:
    """Has the workers of engines that are built from here on sleep."""
    from vllm.model_executor.layers import rotary_embedding
    from vllm.platforms import current_platform
    from vllm.v1.worker.cpu_worker import CPUWorker

    monkeypatch.setattr(type(current_platform), "is_sleep_mode_available", lambda self: True)
    monkeypatch.setattr(rotary_embedding, "_ROPE_DICT", {})  # shared by engines: others may have been left asleep
    monkeypatch.setattr(CPUWorker, "sleep", sleep)
    monkeypatch.setattr(CPUWorker, "wake_up", wake_up)


def sleep(worker: Any, level: int = 1) -> None:
    model = worker.model_runner.model
    kept = {buffer.data_ptr() for buffer in model.buffers()}
    worker.asleep = []
    for tensor in held(model):
        if level == 1 or tensor.data_ptr() in kept:
            worker.asleep.append((tensor, tensor.clone()))
        tensor.fill_(torch.nan if tensor.is_floating_point() else 0)
    for layer in model.modules():  # packed copies of weights, behind functions
        if "cpu_linear" in vars(layer):
            if level == 1:
                worker.asleep.append((layer, layer.cpu_linear))
            layer.cpu_linear = gone
    for cache in worker.model_runner.kv_caches:
        cache.fill_(LOST)


def wake_up(worker: Any, tags: list[str] | None = None) -> None:
    if tags is not None and "weights" not in tags:
        return
    for place, content in worker.asleep:
        if isinstance(place, torch.Tensor):
            place.copy_(content)
        else:
            place.cpu_linear = content
    worker.asleep = []


def gone(*args: Any, **kwargs: Any) -> torch.Tensor:
    raise AssertionError("a layer was used whose weights had been dropped in sleep")


def held(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Every tensor with content that the model's modules hold: parameters, buffers, slots of adapters."""
    seen = set()
    for module in model.modules():
        pending = list(vars(module).values())
        while pending:
            value = pending.pop()
            if isinstance(value, dict):
                pending.extend(value.values())
            elif isinstance(value, list | tuple):
                pending.extend(value)
            elif isinstance(value, torch.Tensor) and value.numel() and value.data_ptr() not in seen:
                seen.add(value.data_ptr())
                yield value.data
