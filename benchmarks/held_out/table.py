"""
A table of finished runs in a held-out world: one row a method, means over seeds and unseen prompts with 95 % intervals.

    python -m benchmarks.held_out.table runs/held_out/shop-baselines [--kinds]

Reward and KL have intervals over prompts and seeds. That of P(bad) contains Clopper and Pearson's for all samples, since bad
outputs may be too few to show how seeds differ.
"""

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import binomtest

from trl_repulse.evaluation.bootstrap import crossed_interval


def load(folders: list[Path]) -> dict[tuple[str, int], list[dict[str, Any]]]:
    """Results by method and number of completions, in the order of their names."""
    runs = defaultdict(list)
    for path in sorted(path for folder in folders for path in folder.glob("*/results.json")):
        run = json.loads(path.read_text(encoding="utf-8"))
        runs[run["method"], run["completions"]].append(run)
    return runs


def interval(cells: np.ndarray) -> tuple[float, float]:
    """Interval of the mean of cells (S, P) over seeds and prompts; of two seeds, for these prompts."""
    return crossed_interval(cells.mean(axis=1, keepdims=True) if len(cells) == 2 else cells)


def summarize(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Means and intervals of one method's runs, one a seed."""
    cells = {name: np.array([run["policy"][name] for run in runs], dtype=float) for name in ("reward", "kl", "bad")}
    bad, samples = int(cells["bad"].sum()), cells["bad"].size * runs[0]["policy"]["samples"]
    exact = binomtest(bad, samples).proportion_ci(method="exact")
    low, high = interval(cells["bad"] / runs[0]["policy"]["samples"]) if bad else (exact.low, exact.high)
    kinds: dict[str, int] = defaultdict(int)
    for run in runs:
        for kind, count in run["policy"]["kinds"].items():
            kinds[kind] += count
    return {
        "seeds": len(runs),
        "reward": (cells["reward"].mean(), *interval(cells["reward"])),
        "kl": (cells["kl"].mean(), *interval(cells["kl"])),
        "bad": (bad / samples, max(0.0, min(low, exact.low)), max(high, exact.high)),
        "counts": f"{bad} of {samples:,}",
        "cvar": {level: float(np.mean([run["policy"]["cvar"][level] for run in runs])) for level in ("0.01", "0.001")},
        "kinds": dict(kinds),
        "seconds": float(np.mean([run["seconds"][0] for run in runs])),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--kinds", action="store_true", help="also how the bad outputs are bad")
    options = parser.parse_args()
    print("| completions | method | seeds | reward | P(bad) / 1e-4 | bad | CVaR 1e-2, 1e-3 | KL, nats | s a run |")
    print("|---|---|---|---|---|---|---|---|---|")
    runs = load(options.folders)
    for (method, completions), found in runs.items():
        row = summarize(found)
        reward, kl = ("{:.2f} ({:.2f} to {:.2f})".format(*row[name]) for name in ("reward", "kl"))
        bad = "{:.2f} ({:.2f} to {:.2f})".format(*(1e4 * x for x in row["bad"]))
        cvar = ", ".join(f"{value:.2f}" for value in row["cvar"].values())
        cells = (
            f"{completions:,}",
            method,
            row["seeds"],
            reward,
            bad,
            row["counts"],
            cvar,
            kl,
            f"{row['seconds']:.0f}",
        )
        print("| " + " | ".join(map(str, cells)) + " |")
    if options.kinds:
        for (method, completions), found in runs.items():
            kinds = sorted(summarize(found)["kinds"].items(), key=lambda item: -item[1])
            print(f"\n{method}, {completions:,}: " + ", ".join(f"{kind} {count}" for kind, count in kinds))


if __name__ == "__main__":
    main()
