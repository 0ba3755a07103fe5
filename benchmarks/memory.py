"""Peak memory of RePULSe with two adapters over one base against TRL RLOO with one adapter, at equal batch.

    python benchmarks/memory.py --model tiny
    python benchmarks/memory.py --model 135m

"Equal batch": both generate, score and learn from 2·P·N completions a step, as in `step_cost.py`; RePULSe's micro-batch
has P·N of each model. Full fine-tuning of either is reported beside. Every run is a process of its own; the peak is the
device's, or the process's resident set on CPU, of which the part that Python and its libraries take is named too.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import torch
from peft import LoraConfig
from step_cost import SHAPES, build
from transformers.utils import logging


METHODS = ("RLOO", "RePULSe")
GOAL = 1.3


def resident(field: str) -> float:
    """`VmHWM` (peak) or `VmRSS` (now) of this process, in MiB."""
    # Not getrusage: its maximum survives exec, so that a child starts with its parent's
    return int(re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) / 2**10


def measure(options: argparse.Namespace) -> None:
    """Prints the peak of `--steps` steps, and what was taken before the model was built."""
    method, kind = options.run
    on_device = torch.accelerator.is_available()
    before = 0.0 if on_device else resident("VmRSS")
    config = None
    if kind == "adapters":
        targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        config = LoraConfig(task_type="CAUSAL_LM", r=options.rank, lora_alpha=2 * options.rank, target_modules=targets)
    with tempfile.TemporaryDirectory() as folder:
        build(method, options, folder, peft_config=config)[0].train()
    peak = torch.accelerator.max_memory_allocated() / 2**20 if on_device else resident("VmHWM")
    print(json.dumps({"peak": peak, "before": before}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="tiny")
    parser.add_argument("--rank", type=int, default=16, help="of the adapters, on all linear layers")
    parser.add_argument("--prompts", type=int, default=2, help="P, prompts of a RePULSe step")
    parser.add_argument("--generations", type=int, default=5, help="N, completions a prompt and model")
    parser.add_argument("--prompt-length", type=int, default=128)
    parser.add_argument("--completion-length", type=int, default=20)
    parser.add_argument(
        "--beta", type=float, default=0.05, help="KL coefficient; above 0 both methods run a reference"
    )
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--run", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.set_verbosity_error()
    if options.run:
        measure(options)
        return

    print(
        f"model {options.model}, {2 * options.prompts * options.generations} completions a step (N = "
        f"{options.generations}) of {options.completion_length} tokens to prompts of {options.prompt_length}, rank "
        f"{options.rank}, beta {options.beta}, gradient checkpointing {options.gradient_checkpointing}, "
        f"{torch.get_num_threads()} threads"
    )
    print(f"{'':12}{'RLOO, MiB':>12}{'RePULSe, MiB':>14}{'ratio':>8}{'without start':>16}")
    for kind in ("adapters", "full"):
        runs = {}
        for method in METHODS:
            argv = [sys.executable, __file__, *sys.argv[1:], "--run", method, kind]
            output = subprocess.run(argv, check=True, capture_output=True, text=True).stdout
            runs[method] = json.loads(output.splitlines()[-1])
        peaks = [runs[method]["peak"] for method in METHODS]
        own = [runs[method]["peak"] - runs[method]["before"] for method in METHODS]
        verdict = "" if kind == "full" else f"  goal {GOAL}: {'met' if peaks[1] <= GOAL * peaks[0] else 'missed'}"
        print(f"{kind:12}{peaks[0]:12.0f}{peaks[1]:14.0f}{peaks[1] / peaks[0]:8.3f}{own[1] / own[0]:16.3f}{verdict}")


if __name__ == "__main__":
    main()
