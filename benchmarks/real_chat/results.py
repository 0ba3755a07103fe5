"""
What stays of held-out samples of the world "real chat", without their texts, and the table of it.

A row is a run: its method, seed, cost and device, and of each prompt the number of samples and the sums of what the table has. Rows of
several machines are kept in one file.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from trl_repulse.evaluation.comparison import paired_interval
from trl_repulse.evaluation.records import SampleSet
from trl_repulse.evaluation.tails import cvar, prob_below

from . import judge


THRESHOLDS = (0.0, -2.0, -4.0)
SECOND_THRESHOLD = -0.8  # of `judge.sentiment`
SECOND = f"P(second judge < {SECOND_THRESHOLD:g})"
SHARES = (*(f"P(r < {at:g})" for at in THRESHOLDS), SECOND, "finished")  # columns of booleans
LEVEL = 0.01  # of the CVaR
_KEPT = 2 * LEVEL  # share of the rewards, the lowest, that are kept
_RUN = ("device", "completions", "method", "seed")  # what tells runs apart

Row = dict[str, Any]


def summarize(samples: SampleSet, cost: Row) -> Row:
    """The row of a run that cost so much, from its samples."""
    rewards = samples.column()  # (P, n)
    second = np.array(judge.sentiment(samples.table["completion"].to_pylist())).reshape(rewards.shape)
    zeros = np.zeros_like(rewards)  # the initial policy is its own reference
    columns = {
        "reward": rewards,
        "KL, nats": samples.column("kl") if "kl" in samples.table.column_names else zeros,
        "finished": samples.table["ended"].to_numpy().reshape(rewards.shape).astype(bool),
        SECOND: second < SECOND_THRESHOLD,
    } | {f"P(r < {at:g})": rewards < at for at in THRESHOLDS}
    lowest = np.sort(rewards, axis=None)[: int(np.ceil(_KEPT * rewards.size)) + 1]
    return cost | {
        "device": samples.header["device"],
        "samples": rewards.shape[1],
        "sums": {name: values.sum(axis=1).round(3).tolist() for name, values in columns.items()},
        "lowest": lowest.round(3).tolist(),
    }


def read(file: Path) -> list[Row]:
    """The rows of a file, none if there is no file yet."""
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else []


def add(file: Path, rows: Iterable[Row]) -> list[Row]:
    """Adds rows to a file, in the place of those of the same runs; returns all."""
    kept = {tuple(row[name] for name in _RUN): row for row in [*read(file), *rows]}
    rows = [kept[key] for key in sorted(kept)]
    lines = ",\n".join(json.dumps(row) for row in rows)  # a run a line
    file.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    return rows


def print_table(rows: list[Row], methods: list[str]) -> None:
    """A table for each device, methods pooled over seeds, and paired differences from REINFORCE with as many completions."""
    order = ["initial policy", *methods]
    rows = sorted(rows, key=lambda row: (row["device"], row["completions"], order.index(row["method"]), row["seed"]))
    arms: dict[tuple, list[Row]] = {}
    for row in rows:
        arms.setdefault((row["device"], row["completions"], row["method"]), []).append(row)
    for device in dict.fromkeys(row["device"] for row in rows):
        print(f"{device}\n\n| method | seeds | completions | seconds | reward |", end="")
        print(
            "".join(f" P(r < {at:g}) |" for at in THRESHOLDS), "CVaR 1 % | P(second judge bad) | KL, nats | finished |"
        )
        print("|---" * (9 + len(THRESHOLDS)) + "|")
        for (of_device, completions, method), runs in arms.items():
            if of_device == device:
                print(f"| {method} | {len(runs)} | {completions:,} | {' | '.join(_cells(runs))} |")
    for (device, completions, method), runs in arms.items():
        base = arms.get((device, completions, "REINFORCE"))
        if base is not None and method != "REINFORCE":
            parts = []
            for name in ("reward", *SHARES, "KL, nats"):
                first, second = (_column(some, name) for some in (base, runs))
                low, high = paired_interval(first, second)
                parts.append(f"{name} {second.mean() - first.mean():+.2g} ({low:.2g} to {high:.2g})")
            what = f"{method} − REINFORCE, {completions:,} completions on {device}"
            print(f"\n{what}, paired 95 % intervals over prompts: {'; '.join(parts)}.")


def _column(runs: list[Row], name: str) -> np.ndarray:
    """A column of runs together: booleans of all samples (P, n), or the mean of each prompt (P, 1)."""
    sums, samples = np.sum([run["sums"][name] for run in runs], axis=0), sum(run["samples"] for run in runs)
    return np.arange(samples) < sums[:, None] if name in SHARES else sums[:, None] / samples


def _cells(runs: list[Row]) -> list[str]:
    """Cells of a method's row after the number of its completions."""
    cells = [f"{np.mean([run['seconds'] for run in runs]):,.0f}", f"{_column(runs, 'reward').mean():.2f}"]
    cells += [_with_interval(_column(runs, f"P(r < {at:g})")) for at in THRESHOLDS]
    cells += [f"{np.mean([_cvar(run) for run in runs]):.2f}", _with_interval(_column(runs, SECOND))]
    return [*cells, *(f"{_column(runs, name).mean():.2f}" for name in ("KL, nats", "finished"))]


def _cvar(run: Row) -> float:
    """A run's CVaR. Rewards above the lowest ones that are kept do not change it."""
    lowest, count = run["lowest"], len(run["sums"]["reward"]) * run["samples"]
    return cvar(np.pad(lowest, (0, count - len(lowest)), mode="edge")[None], LEVEL).value


def _with_interval(is_bad: np.ndarray) -> str:
    """A share with Clopper and Pearson's 95 % interval, for these prompts."""
    it = prob_below(np.where(is_bad, -1.0, 1.0), 0.0)
    return f"{it.value:.1e} ({it.low:.1e} to {it.high:.1e})"
