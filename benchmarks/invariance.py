"""Five updates of policy and proposal on recorded completions, by one process and by two, compared.

    python -m benchmarks.invariance

The runs are those of `tests/distributed_run.py`: the same two prompts with the same eight completions of each model at every
update, in float32, however they lie on processes and micro-batches. A run agrees with the first of its block if losses and
gradient norms of all updates and, at the end, the parameters of both models differ by no more than 1e-4: numbers relative to
their size, parameters relative to how far training has moved them (norms). In the second block each update has one prompt,
cut over both processes; its last run makes a mistake, baselines within a process, and must not agree.
"""

import argparse
import tempfile
from pathlib import Path

import torch

from tests.conftest import build_model, build_tokenizer
from tests.distributed_support import train


TOLERANCE = 1e-4
LOGGED = ("loss", "grad_norm", "proposal/loss", "proposal/grad_norm")
SEEDS = {"policy": 0, "proposal": 1}
ENGINES = {"DDP": "cpu_ddp", "ZeRO-2": "zero2", "ZeRO-3": "zero3", "FSDP2": "fsdp2"}

# (name, processes, micro-batch, accumulation, method, configuration); the first of a block is what the others are compared to
WHOLE = [("1 process", 1, 8, 1, "leave one out", None), ("1 process", 1, 2, 4, "leave one out", None)] + [
    (f"2 processes, {name}", 2, size, accumulation, "leave one out", config)
    for name, config in ENGINES.items()
    for size, accumulation in ((4, 1), (1, 4))
]
CUT = [("1 process, a prompt an update", 1, 4, 1, "leave one out", None)] + [
    *((f"2 processes, {name}, the prompt cut", 2, 2, 1, "leave one out", config) for name, config in ENGINES.items()),
    ("2 processes, DDP, **baseline within a process**", 2, 2, 1, "within a process", "cpu_ddp"),
]


def trained(folder: str, number: int, run: tuple) -> dict:
    """Logs and parameters of one run, these as the difference from where training began."""
    _, processes, size, accumulation, method, config = run
    place = Path(folder, str(number))
    vocabulary = len(build_tokenizer())
    build_model("gpt2", vocabulary, seed=2).eval().save_pretrained(place / "reference")
    result = train(place, processes, size, accumulation, method, config)
    for model, seed in SEEDS.items():
        start = torch.cat([p.detach().flatten() for p in build_model("gpt2", vocabulary, seed).parameters()])
        result[model] = torch.tensor(result["parameters"][model]) - start
    return result


def differences(one: dict, other: dict) -> list[float]:
    """Largest relative difference of each logged quantity over the updates, then of each model's movement."""
    found = []
    for name in LOGGED:
        pairs = [(a[name], b[name]) for a, b in zip(one["logs"], other["logs"], strict=True)]
        found.append(max(abs(a - b) / abs(a) for a, b in pairs))
    return [*found, *(((other[model] - one[model]).norm() / one[model].norm()).item() for model in SEEDS)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    columns = [
        "run",
        "accumulation",
        "loss",
        "gradient norm",
        "proposal: loss",
        "gradient norm",
        "policy",
        "proposal",
        "agrees",
    ]
    print("| " + " | ".join(columns) + " |\n|" + "---|" * len(columns))
    unexpected = []
    with tempfile.TemporaryDirectory() as folder:
        for block, runs in enumerate((WHOLE, CUT)):
            first = trained(folder, 100 * block, runs[0])
            print(f"| {runs[0][0]} | {runs[0][3]} | " + "| " * 6 + "|", flush=True)
            for number, run in enumerate(runs[1:], start=1):
                found = differences(first, trained(folder, 100 * block + number, run))
                agrees = max(found) <= TOLERANCE
                cells = [run[0], str(run[3]), *(f"{value:.0e}" for value in found), "yes" if agrees else "no"]
                print("| " + " | ".join(cells) + " |", flush=True)
                if agrees != (run[4] == "leave one out"):
                    unexpected.append(run[0])
    if unexpected:
        raise SystemExit(f"Not as expected: {', '.join(unexpected)}")


if __name__ == "__main__":
    main()
