"""What the scripts that `test_distributed` launches share."""

import json
import os
from pathlib import Path

import torch

from trl_repulse.trainers._deepspeed import gathered


STEPS = 5


def start() -> None:
    """To be called before DeepSpeed starts: its shared-memory collectives would be compiled for two minutes."""
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
        import deepspeed

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def finish(trainer, models: dict[str, torch.nn.Module], folder: str) -> None:
    """Writes world size, logs and all parameters of the trained models, then leaves the process group."""
    engines = [trainer.model_wrapped, next(vars(trainer)[name].engine for name in models if name != "policy")]
    stages = [engine.zero_optimization_stage() if "Speed" in type(engine).__name__ else None for engine in engines]
    flat = {}
    for name, model in models.items():
        with gathered(model):
            flat[name] = torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()
    if trainer.accelerator.is_main_process:
        result = {
            "world_size": trainer.accelerator.num_processes,
            "stages": stages,
            "logs": trainer.state.log_history[:STEPS],
            "parameters": flat,
        }
        Path(folder, "result.json").write_text(json.dumps(result))


def leave() -> None:
    """Left to the interpreter's exit, gloo's threads may abort the process."""
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
