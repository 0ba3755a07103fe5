"""What `test_distributed`, `benchmarks/invariance.py` and the scripts they launch share."""

import functools
import gc
import json
import math
import multiprocessing
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import forkserver
from multiprocessing.connection import wait
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed.run
from accelerate import Accelerator
from accelerate.commands.launch import launch_command, launch_command_parser
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, GradScalerKwargs
from torch.distributed.fsdp import FSDPModule

from trl_repulse.models._deepspeed import gathered
from trl_repulse.models._fsdp import whole


STEPS = 5
FP16_SCALE = 2.0**8  # what the small models' losses are scaled by at first: their gradients do not overflow
ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "accelerate_configs"
TIMEOUT = 600  # seconds
ON_CPU = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}  # environment, one thread a process
# Imports, which take longer than five updates, are made once, in a process that others are forked from; what is not installed is left out
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["deepspeed", "peft", "tests.evaluation_support", "tests.recorded"])


def launcher(processes: int, config: str | None, machines: list[str] | None = None) -> list[str]:
    """
    Start of a command line: `accelerate launch` with a configuration of ours, or torch's launcher without.

    A configuration for several machines takes the options that `machine_options` gives each; else it is told there is one.
    """
    if config is None:
        return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    options = ["--config_file", str(CONFIGS / f"{config}.yaml"), "--num_processes", str(processes)]
    if config.startswith("multi_node"):
        options += machines or ["--num_machines", "1", "--machine_rank", "0"]
    return [sys.executable, "-m", "accelerate.commands.launch", *options]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def machine_options(machines: int) -> list[list[str]]:
    """Of each of several launchers, which meet at a free port of this machine."""
    meeting = ["--num_machines", str(machines), "--main_process_ip", "127.0.0.1"]
    meeting += ["--main_process_port", str(free_port())]
    return [[*meeting, "--machine_rank", str(rank)] for rank in range(machines)]


def run(command: list[str]) -> subprocess.CompletedProcess:
    """Runs a command on the CPU, one thread a process."""
    done = subprocess.run(command, cwd=ROOT, env=os.environ | ON_CPU, capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def run_forked(command: list[str]) -> subprocess.CompletedProcess:
    """
    As [`run`], for a command of [`launcher`] with a module (`-m`), on one machine.

    The launcher reads its configuration and prepares the environment as ever, but here, and in place of an agent that starts
    Python anew for each process, they are forked from one that has imported what they need.
    """
    _, _, start, *arguments = command
    with patch.dict(os.environ, ON_CPU), tempfile.TemporaryDirectory() as folder:
        forkserver.ensure_running()  # before the launcher's environment is there
        with patch.object(torch.distributed.run, "run", functools.partial(_fork, Path(folder))):
            if start == "accelerate.commands.launch":
                launch_command(launch_command_parser().parse_args(arguments))
            else:
                torch.distributed.run.main(arguments)
        out, err = (
            "".join(path.read_text() for path in sorted(Path(folder).glob(f"*.{name}"))) for name in ("out", "err")
        )
    return subprocess.CompletedProcess(command, 0, out, err)


def _fork(folder: Path, args) -> None:
    """In place of `torch.distributed.run.run`: starts the processes and waits for them; one that fails ends the others."""
    assert args.module and int(args.nnodes.partition(":")[0]) == 1
    size, port = int(args.nproc_per_node), free_port()
    environment = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    environment |= {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    ranks = [
        FORKS.Process(
            target=_rank,
            args=(
                [args.training_script, *args.training_script_args],
                environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                folder / str(rank),
            ),
        )
        for rank in range(size)
    ]
    started, until = [], time.monotonic() + TIMEOUT
    try:
        for process in ranks:
            process.start()
            started.append(process)
        while (left := [process for process in ranks if process.exitcode is None]) and time.monotonic() < until:
            if any(process.exitcode for process in ranks):
                break
            wait([process.sentinel for process in left], max(until - time.monotonic(), 0))
    finally:
        for process in started:
            if process.exitcode is None:
                process.kill()
            process.join()
    errors = "".join(f"{path.name}: {path.read_text()[-3000:]}\n" for path in sorted(folder.glob("*.err")))
    assert not any(process.exitcode for process in ranks), f"{[process.exitcode for process in ranks]}\n{errors}"


def _rank(argv: list[str], environment: dict[str, str], path: Path) -> None:
    """One of the processes: `python -m` with this command line and environment, and its output in files."""
    gc.freeze()  # as in `conftest`
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(ROOT)
    for stream, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(path.with_suffix(f".{name}"), os.O_WRONLY | os.O_CREAT), stream)
    sys.argv = argv
    runpy.run_module(argv[0], run_name="__main__", alter_sys=True)


def train(
    folder, processes: int, batch_size: int, accumulation: int, variant: str, config=None, machines=1, checkpoint=None
):
    """
    What `tests/distributed_run.py` wrote by [`finish`]; it is checked that as many processes ran, in the engine meant.

    On several machines the launcher starts its processes itself.
    """
    arguments = ["-m", "tests.distributed_run", str(folder), str(batch_size), str(accumulation), variant]
    arguments += [] if checkpoint is None else [str(checkpoint)]
    options = [None] if machines == 1 else machine_options(machines)
    with ThreadPoolExecutor(machines) as pool:
        start = run if machines > 1 else run_forked
        list(pool.map(lambda each: start([*launcher(processes, config, each), *arguments]), options))
    result = json.loads(Path(folder, "result.json").read_text())
    assert result["world_size"] == processes
    sharded = (config or "").removeprefix("multi_node_")
    sharded = sharded if sharded.startswith(("zero", "fsdp")) else None
    second = [] if variant.startswith("hot") else [None if variant.startswith("adapters") else sharded]
    assert result["engines"] == [sharded, *second]
    return result


def start() -> None:
    """To be called before the trainer is built."""
    Accelerator.__init__ = with_fp16_on_cpu
    # DeepSpeed's shared-memory collectives would be compiled for two minutes. It refuses fp16 on a CPU that has no
    # instructions for it (0.19.8); torch computes without them
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
        import deepspeed

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.get_accelerator().is_fp16_supported = lambda: True
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        AcceleratorState.__init__ = _with_fsdp_on_cpu


_build_accelerator = Accelerator.__init__
_build_state = AcceleratorState.__init__


def with_fp16_on_cpu(self, *args, **kwargs):
    """Accelerate (1.15) reads `fp16` on CPU and trains in float32; torch has autocast and gradient scaling for it."""
    _build_accelerator(self, *args, **kwargs)
    if self.mixed_precision != "fp16":
        return
    if self.device.type != "cpu":  # which scales by itself, from a scale that gradients of small models are fit for
        self.scaler_handler = GradScalerKwargs(init_scale=FP16_SCALE)
        self.scaler = torch.amp.GradScaler(self.device.type, **self.scaler_handler.to_kwargs())
        return
    assert self.scaler is None and not self.native_amp
    if self.distributed_type == DistributedType.DEEPSPEED:  # which scales by itself, on CPU too
        self.deepspeed_plugin.deepspeed_config["fp16"]["initial_scale_power"] = int(math.log2(FP16_SCALE))
    else:
        self.scaler_handler = GradScalerKwargs(init_scale=FP16_SCALE)
        self.native_amp, self.scaler = True, torch.amp.GradScaler("cpu", **self.scaler_handler.to_kwargs())


def _with_fsdp_on_cpu(self, mixed_precision=None, cpu=False, *args, fsdp_plugin=None, **kwargs):
    """Accelerate (1.15) reads a configuration for FSDP on CPU and trains with plain data parallelism; torch can do it."""
    _build_state(self, mixed_precision, cpu, *args, fsdp_plugin=fsdp_plugin, **kwargs)
    if self.distributed_type == DistributedType.MULTI_CPU:
        if self._mixed_precision != "no":
            fsdp_plugin.set_mixed_precision(self._mixed_precision)
        self.fsdp_plugin = fsdp_plugin
        self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP


def engine_name(engine: torch.nn.Module) -> str | None:
    """The configuration that cuts models apart as this one is; `None` for whole ones."""
    if isinstance(engine, FSDPModule):
        return "fsdp2"
    return f"zero{engine.zero_optimization_stage()}" if "Speed" in type(engine).__name__ else None


def finish(trainer, models: dict[str, torch.nn.Module], folder: str, **more) -> None:
    """Writes world size, logs and all parameters of the trained models, and `more`."""
    engines = [
        trainer.model_wrapped,
        *(vars(trainer)[name].engine for name in models if name in ("proposal", "value")),
    ]
    flat = {}
    for name, model in models.items():
        with gathered(model):
            flat[name] = torch.cat([whole(p.detach()).flatten() for p in model.parameters()]).tolist()
    if trainer.accelerator.is_main_process:
        result = {
            "world_size": trainer.accelerator.num_processes,
            "engines": [engine_name(engine) for engine in engines],
            "wrapped": [any("checkpoint_wrapped" in name for name, _ in engine.named_modules()) for engine in engines],
            "logs": [log for log in trainer.state.log_history if "loss" in log],
            "evaluations": [log for log in trainer.state.log_history if "eval_loss" in log],
            "parameters": flat,
            **more,
        }
        Path(folder, "result.json").write_text(json.dumps(result))


def leave() -> None:
    """
    Ends a process whose results are written.

    Gloo's threads may abort it where the process group is destroyed, or left to the interpreter's exit, after another process has gone.
    """
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
