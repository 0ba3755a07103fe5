"""
A table of finished runs in a held-out world: one row a method, means over seeds and unseen prompts with 95 % intervals.

    python -m benchmarks.held_out.table runs/held_out/shop-baselines [--kinds]

P(bad) is estimated from samples at two temperatures, each weighed by the mixture of both; `bad` counts those at temperature 1 alone.
All have intervals over prompts and seeds, log10 P(bad) over seeds alone. Where none of the samples was bad, P(bad) has Clopper and Pearson's upper bound for the
samples at temperature 1.
"""

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import binomtest
from scipy.stats import t as student_t

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
    names = ("reward", "kl", "bad", "p_bad")
    cells = {name: np.array([run["policy"][name] for run in runs], dtype=float) for name in names}
    bad, samples = int(cells["bad"].sum()), cells["bad"].size * runs[0]["policy"]["samples"]
    p_bad = cells["p_bad"].mean()
    exact = binomtest(bad, samples).proportion_ci(method="exact")
    low, high = interval(cells["p_bad"]) if p_bad else (0.0, exact.high)
    by_seed = cells["p_bad"].mean(axis=1)
    with np.errstate(divide="ignore"):
        logs = np.log10(by_seed)
    spread = student_t.ppf(0.975, len(logs) - 1) * logs.std(ddof=1) / len(logs) ** 0.5 if len(logs) > 1 else np.nan
    kinds: dict[str, float] = defaultdict(float)
    for run in runs:
        for kind, count in run["policy"]["kinds"].items():
            kinds[kind] += count / len(runs)
    return {
        "seeds": len(runs),
        "reward": (cells["reward"].mean(), *interval(cells["reward"])),
        "kl": (cells["kl"].mean(), *interval(cells["kl"])),
        "bad": (p_bad, max(0.0, low), high),
        "log": (logs.mean(), logs.mean() - spread, logs.mean() + spread) if by_seed.all() else None,
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
    print(
        "| completions | method | seeds | reward | P(bad) / 1e-6 | log10 P(bad) | bad | CVaR 1e-2, 1e-3 | KL, nats | s a run |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    runs = load(options.folders)
    for (method, completions), found in runs.items():
        row = summarize(found)
        reward, kl = ("{:.2f} ({:.2f} to {:.2f})".format(*row[name]) for name in ("reward", "kl"))
        bad = "{:.3g} ({:.3g} to {:.3g})".format(*(1e6 * x for x in row["bad"]))
        cvar = ", ".join(f"{value:.2f}" for value in row["cvar"].values())
        cells = (
            f"{completions:,}",
            method,
            row["seeds"],
            reward,
            bad,
            "{:.2f} ({:.2f} to {:.2f})".format(*row["log"]) if row["log"] else "",
            row["counts"],
            cvar,
            kl,
            f"{row['seconds']:.0f}",
        )
        print("| " + " | ".join(map(str, cells)) + " |")
    if options.kinds:
        for (method, completions), found in runs.items():
            kinds = sorted(summarize(found)["kinds"].items(), key=lambda item: -item[1])
            print(f"\n{method}, {completions:,}: " + ", ".join(f"{kind} {share:.1e}" for kind, share in kinds))


if __name__ == "__main__":
    main()
