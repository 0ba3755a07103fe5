"""Results of runs at several seeds: their table and their figure."""

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from scipy.stats import t as student_t


QUANTITIES = {
    "expected_reward": "expected reward",
    "log_prob_bad": "log P(bad), nats",
    "kl": "KL, nats per completion",
}


def by_method(files: Iterable[Path]) -> dict[str, list[dict[str, Any]]]:
    """The runs of each method, from their `results.json`; a quantity is NaN where it is missing or was not finite."""
    methods: dict[str, list[dict[str, Any]]] = {}
    for path in files:
        run = json.loads(path.read_text(encoding="utf-8"))
        values = (run["final"].get(key) for key in QUANTITIES)
        run["final"] = {
            key: value if value is not None and math.isfinite(value) else math.nan
            for key, value in zip(QUANTITIES, values, strict=True)
        }
        methods.setdefault(run["method"], []).append(run)
    return methods


def mean_and_interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float]:
    """Mean, and half the width of Student's interval around it: infinite for a single value, or where values agree or one is NaN."""
    if math.isnan(sum(values)) or math.isclose(min(values), max(values), rel_tol=1e-9):
        return statistics.mean(values), math.inf
    quantile = float(student_t.ppf(0.5 + level / 2, len(values) - 1))
    return statistics.mean(values), quantile * statistics.stdev(values) / math.sqrt(len(values))


def format_table(methods: dict[str, list[dict[str, Any]]]) -> str:
    """A Markdown table of means over seeds with 95 % intervals, and of each seed's reward and log P(bad)."""

    def text(value: float, digits: int) -> str:
        return f"{value:.{digits}f}" if math.isfinite(value) else "–"

    header = ("method", "updates", *QUANTITIES.values(), "each seed: reward / log P(bad)")
    rows = [header, tuple("---" for _ in header)]
    for method, runs in methods.items():
        cells = []
        for key in QUANTITIES:
            mean, half = mean_and_interval([run["final"][key] for run in runs])
            cells.append(f"{mean:.2f} ± {half:.2f}" if math.isfinite(half) else text(mean, 2))
        ends = [run["final"] for run in runs]
        each = ", ".join(f"{text(end['expected_reward'], 2)} / {text(end['log_prob_bad'], 1)}" for end in ends)
        rows.append((method, f"{runs[0]['policy_updates']:,}", *cells, each))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def draw(methods: dict[str, list[dict[str, Any]]], largest_reward: float, path: Path) -> None:
    """Reward against log P(bad): every run, and each method's mean with its intervals, which end at what is possible."""
    figure = Figure(figsize=(7.2, 4.4), layout="constrained")
    panel = figure.subplots()
    for i, (method, runs) in enumerate(methods.items()):
        color, ends = f"C{i % 10}", {}
        for key, largest in (("log_prob_bad", 0.0), ("expected_reward", largest_reward)):
            mean, half = mean_and_interval(values := [run["final"][key] for run in runs])
            error = [[half], [max(min(half, largest - mean), 0.0)]] if math.isfinite(half) else None
            ends[key] = values, mean, error
        (x, mean_x, error_x), (y, mean_y, error_y) = ends.values()
        panel.scatter(x, y, s=16, color=color, marker="osD"[i // 10 % 3], alpha=0.4, linewidths=0)
        style = {"color": color, "fmt": "osD"[i // 10 % 3], "capsize": 3, "label": method}
        panel.errorbar(mean_x, mean_y, xerr=error_x, yerr=error_y, **style)
    panel.set_xlabel(f"{QUANTITIES['log_prob_bad']} (less is better)")
    panel.set_ylabel(f"{QUANTITIES['expected_reward']} (more is better)")
    panel.grid(color="#dddddd")
    figure.legend(title="mean, 95 % interval over seeds", loc="outside right upper", frameon=False)
    figure.savefig(path, dpi=160)
