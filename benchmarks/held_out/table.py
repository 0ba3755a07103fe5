"""
A table of finished runs in a held-out world: one row a method, means over seeds and unseen prompts with 95 % intervals.

    python -m benchmarks.held_out.table runs/held_out/shop-baselines [--kinds] [--against "RePULSe, hot policy"]

P(bad) is estimated from samples at two temperatures, each weighed by the mixture of both; `bad` counts those at temperature 1 alone.
Perplexity is that of the samples under the initial policy, and distinct-2 the share of different pairs of neighbouring tokens among a
prompt's samples, which falls with their number. All have intervals over prompts and seeds, log10 P(bad) over seeds alone. Where none of
the samples was bad, P(bad) has Clopper and Pearson's upper bound for the samples at temperature 1.

With `--against` a second table has how many times as many bad outputs each method makes as that one: the factor of geometric means over
seeds, worlds weighing alike, with Welch's 95 % interval of the difference of log P(bad), each world having a mean of its own.
"""

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import binomtest
from scipy.stats import t as student_t

from trl_repulse.evaluation.tails import crossed_interval


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
    names = ["reward", "kl", "bad", "p_bad"]
    fluent = all("nats" in run["policy"] for run in runs)  # results of before have no such figures
    names += ["nats", "distinct_2"] if fluent else []
    cells = {name: np.array([run["policy"][name] for run in runs], dtype=float) for name in names}
    bad, samples = int(cells["bad"].sum()), cells["bad"].size * runs[0]["policy"]["samples"]
    p_bad = cells["p_bad"].mean()
    exact = binomtest(bad, samples).proportion_ci(method="exact")
    low, high = interval(cells["p_bad"]) if p_bad else (0.0, exact.high)
    by_seed = cells["p_bad"].mean(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
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
        "perplexity": np.exp([cells["nats"].mean(), *interval(cells["nats"])]) if fluent else None,
        "distinct_2": (cells["distinct_2"].mean(), *interval(cells["distinct_2"])) if fluent else None,
        "bad": (p_bad, max(0.0, low), high),
        "log": (logs.mean(), logs.mean() - spread, logs.mean() + spread) if by_seed.all() else None,
        "counts": f"{bad} of {samples:,}",
        "cvar": {level: float(np.mean([run["policy"]["cvar"][level] for run in runs])) for level in ("0.01", "0.001")},
        "kinds": dict(kinds),
        "seconds": float(np.mean([run["seconds"][0] for run in runs])),
    }


def log_p_bad(runs: list[dict[str, Any]]) -> np.ndarray:
    """log P(bad) of runs, nats; −inf where none of the samples was bad."""
    with np.errstate(divide="ignore"):
        return np.log([np.mean(run["policy"]["p_bad"]) for run in runs])


def factor(pairs: list[tuple[np.ndarray, np.ndarray]]) -> tuple[float, float, float, float]:
    """
    exp of the mean difference of two methods' values, its 95 % interval and p (two-sided), by Welch's test.

    Args:
        pairs (`list[tuple[numpy.ndarray, numpy.ndarray]]`):
            For each world, values of both methods, one a seed and at least two.
    """
    difference = np.mean([a.mean() - b.mean() for a, b in pairs])
    parts = [(x.var(ddof=1) / len(x) / len(pairs) ** 2, len(x) - 1) for pair in pairs for x in pair]
    variance = sum(part for part, _ in parts)
    freedom = variance**2 / sum(part**2 / n for part, n in parts)
    reach = student_t.ppf(0.975, freedom) * variance**0.5
    p = 2 * student_t.sf(abs(difference) / variance**0.5, freedom)
    return *(float(np.exp(difference + x)) for x in (0.0, -reach, reach)), float(p)


def compare(runs: dict[tuple[str, int], list[dict[str, Any]]], against: str) -> None:
    """Prints every method's factor over one of them, in the worlds that both have runs in."""
    print(
        f"\n| completions | method, against {against} | runs | factor of P(bad) | p | reward | KL, nats per completion |"
    )
    print("|---|---|---|---|---|---|---|")
    for (method, completions), found in runs.items():
        yardstick = runs.get((against, completions), [])
        if method == against or not yardstick:
            continue
        pairs = [
            tuple([run for run in several if run["world"] == world] for several in (found, yardstick))
            for world in sorted({run["world"] for run in found})
        ]
        pairs = [pair for pair in pairs if min(map(len, pair)) > 1]
        if not pairs:
            continue
        logs = [(log_p_bad(a), log_p_bad(b)) for a, b in pairs]
        said = "a seed found none", ""
        if all(np.isfinite(x).all() for pair in logs for x in pair):
            *values, p = factor(logs)
            shown = [f"{x:.2g}" if 0.01 <= x < 99.5 else f"{x:.0e}" if x < 0.01 else f"{x:,.0f}" for x in values]
            said = "{} ({} to {})".format(*shown), f"{p:.2g}"
        gaps = [
            np.mean(
                [np.mean([x["policy"][name] for x in a]) - np.mean([x["policy"][name] for x in b]) for a, b in pairs]
            )
            for name in ("reward", "kl")
        ]
        count = sum(len(a) for a, _ in pairs)
        print(f"| {completions:,} | {method} | {count} | {said[0]} | {said[1]} | {gaps[0]:+.2f} | {gaps[1]:+.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--kinds", action="store_true", help="also how the bad outputs are bad")
    parser.add_argument(
        "--against", metavar="METHOD", help="also how many times as many bad outputs others make as this one"
    )
    options = parser.parse_args()
    print(
        "| completions | method | seeds | reward | P(bad) / 1e-6 | log10 P(bad) | bad | CVaR 1e-2, 1e-3 | KL, nats per completion "
        "| perplexity | distinct-2 | s a run |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|---|")
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
            "{:.1f} ({:.1f} to {:.1f})".format(*row["perplexity"]) if row["perplexity"] is not None else "",
            "{:.3f} ({:.3f} to {:.3f})".format(*row["distinct_2"]) if row["distinct_2"] else "",
            f"{row['seconds']:.0f}",
        )
        print("| " + " | ".join(map(str, cells)) + " |")
    if options.kinds:
        for (method, completions), found in runs.items():
            kinds = sorted(summarize(found)["kinds"].items(), key=lambda item: -item[1])
            print(f"\n{method}, {completions:,}: " + ", ".join(f"{kind} {share:.1e}" for kind, share in kinds))
    if options.against:
        compare(runs, options.against)


if __name__ == "__main__":
    main()
