"""
The average of the weights of runs that `race` trained, and its held-out samples.

    python -m benchmarks.real_chat.average runs/real_chat --runs runs/early/REINFORCE-50-seed? --out runs/average/REINFORCE --samples 16

The average keeps what the updates of all runs share, and loses much of their noise. Its KL says how much of a run's KL is noise. `race --out runs/average --table` prints the table.
"""

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from . import race


def average(runs: list[Path], out: Path) -> None:
    """Writes the average policy of runs, and what they cost together."""
    model = AutoModelForCausalLM.from_pretrained(runs[0] / "policy", dtype=torch.float32)
    weights = [load_file(run / "policy" / "model.safetensors") for run in runs]
    mean = {name: torch.stack([each[name] for each in weights]).mean(dim=0) for name in weights[0]}
    missing, unexpected = model.load_state_dict(mean, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}  # tied to the embedding
    model.save_pretrained(out / "policy")
    AutoTokenizer.from_pretrained(runs[0] / "policy").save_pretrained(out / "policy")
    costs = [json.loads((run / "cost.json").read_text(encoding="utf-8")) for run in runs]
    cost = costs[0] | {"method": f"average of {len(runs)}, {costs[0]['method']}", "seed": 0}
    cost |= {
        name: sum(each[name] or 0 for each in costs) for name in ("completions", "seconds", "cpu_seconds", "budget")
    }
    (out / "cost.json").write_text(json.dumps(cost), encoding="utf-8")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("world", type=Path, help="folder of `benchmarks.real_chat.build`")
    parser.add_argument("--runs", type=Path, nargs="+", required=True, help="folders of runs of one method")
    parser.add_argument("--out", type=Path, required=True, help="folder of the average")
    parser.add_argument("--samples", type=int, default=16, help="held-out samples of each of the 130 prompts")
    options = parser.parse_args(argv)
    logging.set_verbosity_error()
    if not (options.out / "cost.json").is_file():
        average(options.runs, options.out)
    race.evaluate(options.world, options.out / "policy", options.out / "samples", options.samples)


if __name__ == "__main__":
    main()
