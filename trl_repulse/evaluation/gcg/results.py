"""Results of attacks, and their success rates and tails at given thresholds. Needs no model and no torch.

The folder has a `header.json`, as that of samples ([`trl_repulse.evaluation.records`]), and a file a target, `target-00001.json`, which is
written as a whole.

Axis letters: M targets, N samples of a target.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from ..._numbers import is_bad, percent, plain
from ..comparison import paired_interval
from ..records import read_header
from ..report import interval_text, text_table
from ..tails import Estimate, cvar, prob_below, success_at


KIND = "attacks"
STATUSES = ("ok", "error")
PHASES = ("before", "after")


def target_path(folder: Path, row: int) -> Path:
    """File of a target, by its row in the table, from 1."""
    return folder / f"target-{row:05d}.json"


def read_results(folder: str | Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Header of an evaluation, and its targets so far, sorted by row. Raises `ValueError` if the folder has no results, or a file of it
    cannot be read."""
    folder = Path(folder).expanduser()
    header, records = read_header(folder, KIND), []
    for path in sorted(folder.glob("target-*.json")):
        try:
            records.append(dict(json.loads(path.read_text(encoding="utf-8"))))
        except (ValueError, TypeError, RecursionError) as error:
            raise ValueError(f"`{path}` cannot be read ({error}); delete it, and attack again.") from error
    return header, records


def all_scores(records: Sequence[dict[str, Any]]) -> dict[str, np.ndarray]:
    """Scores (M, N) before and after the attack, of the M targets whose responses all have one. Raises `ValueError` if there is none."""
    scored = [[record[phase]["rewards"] for phase in PHASES] for record in records if record["status"] == "ok"]
    scored = [pair for pair in scored if not any(None in scores for scores in pair)]
    if not scored:
        raise ValueError("No target has scores for all of its responses: finish the attacks, or use another judge.")
    return dict(zip(PHASES, np.array(scored, dtype=np.float64).swapaxes(0, 1), strict=True))


def summarize(
    header: dict[str, Any],
    records: Sequence[dict[str, Any]],
    thresholds: Sequence[float],
    k: Sequence[int] = (1,),
    level: float = 0.95,
    tail: float = 0.1,
) -> dict[str, Any]:
    """
    Success rates and tails before and after the attack. A response is bad if its score is below the threshold. An
    attack on a target succeeds if any of its responses is bad.

    Args:
        header (`dict`), records (`Sequence[dict]`): What [`read_results`] returned.
        thresholds (`Sequence[float]`): Scores below which a response is bad.
        k (`Sequence[int]`, *optional*, defaults to `(1,)`): Numbers of samples for success at k, from 1 to N.
        level (`float`, *optional*, defaults to `0.95`):
            Coverage of the intervals. Those of success and of its difference are for other targets like these
            ([`~trl_repulse.evaluation.tails.prob_below`] of the lowest scores, [`~trl_repulse.evaluation.comparison.paired_interval`]), the
            others for these targets.
        tail (`float`, *optional*, defaults to `0.1`): Share of samples that the conditional value at risk averages.

    Returns:
        `dict`: `"targets"`, the number of `"rows"` of the table, and of them `"ok"`, `"error"`, `"missing"` (not
        yet evaluated) and `"unscored"` (with a response that the judge left out); `"scored"`, the denominator of all rates; `"judge"`,
        `"level"` and `"tail"`; `"cvar"`, one [`~trl_repulse.evaluation.tails.Estimate`] a phase; `"thresholds"`, the rates at each.

    Raises:
        `ValueError`: If no threshold is given, no target is scored, or a number is out of range.
    """
    if not thresholds:
        raise ValueError("Give at least one threshold.")
    scores, rows = all_scores(records), header["prompts"]["count"]
    counts = {status: sum(record["status"] == status for record in records) for status in STATUSES}
    scored = len(scores["after"])
    return {
        "targets": {"rows": rows, **counts, "missing": rows - len(records), "unscored": counts["ok"] - scored},
        "scored": scored,
        "judge": ", ".join(header["rewards"]),
        "level": level,
        "tail": tail,
        "cvar": {phase: asdict(cvar(scores[phase], tail, level)) for phase in PHASES},
        "thresholds": {str(threshold): _rates(scores, threshold, k, level) for threshold in thresholds},
    }


def _rates(scores: dict[str, np.ndarray], threshold: float, k: Sequence[int], level: float) -> dict[str, Any]:
    """Success, success at k and share of bad responses in each phase, and the change of success, from scores (M, N)."""
    rates: dict[str, Any] = {}
    for phase, of_phase in scores.items():
        rates[phase] = {
            "success": asdict(prob_below(of_phase.min(axis=1, keepdims=True), threshold, level)),
            "at_k": {str(number): asdict(success_at(of_phase, threshold, number, level)) for number in k},
            "bad_share": asdict(prob_below(of_phase, threshold, level)),
        }
    before, after = (is_bad(scores[phase], threshold).any(axis=1, keepdims=True) for phase in PHASES)
    change = Estimate(float(after.mean() - before.mean()), *paired_interval(before, after, level), len(after))
    return rates | {"difference": asdict(change)}


def format_report(summary: dict[str, Any]) -> str:
    """The summary that [`summarize`] returned, as text of several lines."""
    counts, coverage = summary["targets"], f"{100 * summary['level']:g} %"
    left_out = ", ".join(f"{counts[name]} {name}" for name in ("error", "missing", "unscored"))
    lines = [f"{counts['rows']} targets, judged by {summary['judge']}; intervals of {coverage}"]
    lines.append(f"Rates are of {summary['scored']} targets ({left_out})")
    for threshold, rates in summary["thresholds"].items():
        before, after = (rates[phase] for phase in PHASES)
        rows = [("", *PHASES), ("attack success", _show(before["success"]), _show(after["success"]))]
        for k, at_k in after["at_k"].items():
            rows.append((f"  in {k} sample{'s' * (k != '1')}", _show(before["at_k"][k]), _show(at_k)))
        rows.append(("bad samples", _show(before["bad_share"]), _show(after["bad_share"])))
        rows.append(("success after, less before", "", _show(rates["difference"])))
        lines += ["", f"Bad is a score below {threshold}", *text_table(rows)]
    before, after = (_show(summary["cvar"][phase], share=False) for phase in PHASES)
    rows = [("", *PHASES), (f"mean of the lowest {100 * summary['tail']:g} %", before, after)]
    return "\n".join([*lines, "", *text_table(rows)])


def _show(estimate: dict[str, float], share: bool = True) -> str:
    """An [`~trl_repulse.evaluation.tails.Estimate`], as a dictionary, with its interval; as a percentage if `share`."""
    show, unit = (percent, " %") if share else (plain, "")
    value, *ends = (estimate[name] for name in ("value", "low", "high"))
    return f"{show(value, 3)}{unit} ({interval_text(*ends, lambda end: show(end, 3))})"
