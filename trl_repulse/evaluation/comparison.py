"""Several methods' finished runs side by side: means over seeds with intervals, as a table."""

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from scipy.stats import t as student_t


QUANTITIES = {
    "expected_reward": "expected reward",
    "log_prob_bad": "log P(bad), nats",
    "kl": "KL, nats per completion",
}


_KEYS = {"method", "seed", "samples", "policy_updates"}  # of a results file


def load_runs(paths: Iterable[str | Path], labels: Iterable[str] | None = None) -> list[dict[str, Any]]:
    """
    Reads the results of runs that are to be compared.

    Args:
        paths (`Iterable[str | Path]`):
            Files that [`~trl_repulse.evaluation.tracking.write_results`] wrote.
        labels (`Iterable[str]`, *optional*):
            What each run counts to, for variants of one method; the method in its file by default.

    Returns:
        `list[dict]`: Their content, in the order of the paths.

    Raises:
        `ValueError`: If a file is no such results file or has no exact evaluation, if runs drew different numbers of
            completions, started from different policies, or if a method has two runs of one seed.
    """
    runs, seen = [], {}
    files = [Path(path) for path in paths]
    for path, label in zip(files, labels or [None] * len(files), strict=True):
        try:
            run = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise ValueError(f"{path} cannot be read as results ({error}); run it again.") from error
        if not isinstance(run, dict) or not _KEYS <= set(run):
            raise ValueError(f"{path} holds no results of a training script.")
        if not (isinstance(run["method"], str) and isinstance(run["seed"], int | str)):
            raise ValueError(f"{path} has no text as `method` or no number as `seed`; run it again.")
        for part in ("initial", "final"):
            if not isinstance(run.get(part), dict | None):
                raise ValueError(f"{path} has no quantities by name under `{part}`; run it again.")
        if "expected_reward" not in (run.get("final") or {}):
            raise ValueError(f"{path} has no exact evaluation of the policy; compare runs in the embedded world.")
        run["final"] = dict.fromkeys(QUANTITIES) | run["final"]  # a number that is not finite was left out
        for key in QUANTITIES:
            if run["final"][key] is not None and not is_number(run["final"][key]):
                raise ValueError(f"{path} has no number as `{key}` under `final`; run it again.")
        start = (run.get("initial") or {}).get("log_prob_bad")
        if not is_number(start) or not math.isfinite(start):
            raise ValueError(
                f"{path} has no finite log P(bad) at its start (`initial.log_prob_bad`), by which runs are compared; leave it out."
            )
        run_id = (label or run["method"], run["seed"])
        if run_id in seen:
            raise ValueError(f"{path} and {seen[run_id]} are both {run_id[0]} with seed {run_id[1]}; leave one out.")
        seen[run_id] = path
        runs.append(run)
        if run["samples"] != runs[0]["samples"]:
            budgets = f"{run['samples']} completions, other runs {runs[0]['samples']}"
            raise ValueError(f"{path} drew {budgets}; compare runs of one budget.")
        other = runs[0]["initial"]["log_prob_bad"]
        if not math.isclose(start, other, rel_tol=1e-5):
            raise ValueError(
                f"{path} started at log P(bad) {start}, other runs at {other}; compare runs of one policy."
            )
    return runs


def is_number(value: Any) -> bool:
    """Whether a JSON value is a number; Python takes `true` for one."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_finite(value: float | None) -> bool:
    """Whether a quantity has a value: other files have `null` for what is not finite, or Python's `-Infinity`."""
    return value is not None and math.isfinite(value)


def mean_and_interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float]:
    """
    Mean of independent values, with Student's interval.

    Args:
        values (`Sequence[float]`):
            One value a seed.
        level (`float`, *optional*, defaults to `0.95`):
            Confidence level.

    Returns:
        `tuple[float, float]`: The mean and half the width of the interval around it, infinite for a single value, or where values
        agree: they do not tell how far others would lie apart.
    """
    if math.isclose(min(values), max(values), rel_tol=1e-9):
        return statistics.mean(values), math.inf
    quantile = float(student_t.ppf(0.5 + level / 2, len(values) - 1))
    return statistics.mean(values), quantile * statistics.stdev(values) / math.sqrt(len(values))


def summarize(runs: Sequence[dict[str, Any]], level: float = 0.95) -> dict[str, dict[str, tuple[float, float]]]:
    """
    Means over each method's seeds.

    Args:
        runs (`Sequence[dict]`):
            What [`load_runs`] returned.
        level (`float`, *optional*, defaults to `0.95`):
            Confidence level.

    Returns:
        `dict`: By method, in the order of their first runs, and by quantity (`expected_reward` in units of reward,
        `log_prob_bad` and `kl` in nats, per completion): mean and half-width, as [`mean_and_interval`]. NaN where a run has no finite
        number, as a KL without a reference or the log of a P(bad) of 0.
    """
    methods = dict.fromkeys(run["method"] for run in runs)
    finals = {method: [run["final"] for run in runs if run["method"] == method] for method in methods}
    return {
        method: {
            key: (math.nan, math.inf)
            if not all(_is_finite(final[key]) for final in values)
            else mean_and_interval([final[key] for final in values], level)
            for key in QUANTITIES
        }
        for method, values in finals.items()
    }


def format_comparison(runs: Sequence[dict[str, Any]], level: float = 0.95) -> str:
    """
    A Markdown table of [`summarize`], one row a method, with each seed's log P(bad) and reward at its end.

    Args:
        runs (`Sequence[dict]`):
            What [`load_runs`] returned.
        level (`float`, *optional*, defaults to `0.95`):
            Confidence level.

    Returns:
        `str`: The table.
    """
    header = ("method", "updates", *QUANTITIES.values(), "each seed: reward / log P(bad)")
    rows = [header, tuple("---" for _ in header)]
    for method, summary in summarize(runs, level).items():
        mine = [run for run in runs if run["method"] == method]
        ends = [(run["final"]["expected_reward"], run["final"]["log_prob_bad"]) for run in mine]
        each = ", ".join(
            " / ".join(f"{x:.{n}f}" if _is_finite(x) else "–" for x, n in zip(end, (2, 1), strict=True))
            for end in ends
        )
        cells = (
            "–" if math.isnan(mean) else f"{mean:.2f} ± {half:.2f}" if half < math.inf else f"{mean:.2f}"
            for mean, half in summary.values()
        )
        rows.append((method, f"{mine[0]['policy_updates']:,}", *cells, each))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
