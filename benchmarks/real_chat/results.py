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
_ARM = ("device", "budget", "completions", "method", "batch")  # what runs of several seeds have in common

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


def _arm(row: Row) -> tuple:
    """The arm of a run. Runs of equal seconds draw different numbers of completions."""
    return tuple(None if name == "completions" and row.get("budget") else row.get(name) for name in _ARM)


def add(file: Path, rows: Iterable[Row]) -> list[Row]:
    """Adds rows to a file, in the place of those of the same runs; returns all."""
    kept = {(*_arm(row), row["seed"]): row for row in [*read(file), *rows]}
    rows = [kept[key] for key in sorted(kept, key=str)]
    lines = ",\n".join(json.dumps(row) for row in rows)  # a run a line
    file.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    return rows


def print_table(rows: list[Row], methods: list[str]) -> None:
    """A table for each device, methods pooled over seeds, and paired differences from REINFORCE at the same budget."""
    order = [
        *dict.fromkeys(["initial policy", *methods, *(row["method"] for row in rows)])
    ]  # some methods have left the package

    def place(row: Row) -> tuple:
        budget = row.get("budget") or 0
        cost = 0 if budget else row["completions"]
        return row["device"], budget, cost, order.index(row["method"]), row.get("batch") or 0, row["seed"]

    arms: dict[tuple, list[Row]] = {}
    for row in sorted(rows, key=place):
        arms.setdefault(_arm(row), []).append(row)
    for device in dict.fromkeys(arm[0] for arm in arms):
        print(f"{device}\n\n| method | seeds | completions | seconds | reward |", end="")
        print(
            "".join(f" P(r < {at:g}) |" for at in THRESHOLDS), "CVaR 1 % | P(second judge bad) | KL, nats | finished |"
        )
        print("|---" * (9 + len(THRESHOLDS)) + "|")
        for arm, runs in arms.items():
            if arm[0] == device:
                print(f"| {_name(arm)} | {len(runs)} | {' | '.join(_cells(runs))} |")
    for arm, runs in arms.items():
        for other, base in arms.items():
            if other != arm and other[:3] == arm[:3] and other[3] == "REINFORCE" != arm[3]:
                _print_difference(arm, runs, other, base)


def _print_difference(arm: tuple, runs: list[Row], other: tuple, base: list[Row]) -> None:
    parts = []
    for name in ("reward", *SHARES, "KL, nats"):
        first, second = (_column(some, name) for some in (base, runs))
        low, high = paired_interval(first, second)
        parts.append(f"{name} {second.mean() - first.mean():+.2g} ({low:.2g} to {high:.2g})")
    budget = f"{arm[2]:,} completions" if arm[1] is None else f"{arm[1]:g} s"
    what = f"{_name(arm)} − {_name(other)}, {budget} on {arm[0]}"
    print(f"\n{what}, paired 95 % intervals over prompts: {'; '.join(parts)}.")


def _name(arm: tuple) -> str:
    return arm[3] if arm[4] is None else f"{arm[3]} ({arm[4]} an update)"


def _column(runs: list[Row], name: str) -> np.ndarray:
    """A column of runs together: booleans of all samples (P, n), or the mean of each prompt (P, 1)."""
    sums, samples = np.sum([run["sums"][name] for run in runs], axis=0), sum(run["samples"] for run in runs)
    return np.arange(samples) < sums[:, None] if name in SHARES else sums[:, None] / samples


def _cells(runs: list[Row]) -> list[str]:
    """Cells of a method's row after the number of its seeds."""
    cells = [f"{np.mean([run['completions'] for run in runs]):,.0f}"]
    cells += [f"{np.mean([run.get('budget') or run['seconds'] for run in runs]):,.0f}"]
    cells += [f"{_column(runs, 'reward').mean():.2f}"]
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
