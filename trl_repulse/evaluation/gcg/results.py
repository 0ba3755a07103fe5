"""
Results files, and their success rates and tails at given thresholds. Needs no model and no torch.

A file has a header line, then one line a target, each on the disk before the next target begins. It can be cut off anywhere:
the rest of its last line is then removed, and that target evaluated again.

Axis letters: M targets, N samples of a target.
"""

import json
import math
import os
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from math import ceil, comb, sqrt
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from ..._errors import changed_prompt
from ..._numbers import is_bad, percent, plain
from ..records import write_atomically
from ..tails import MIN_TAIL, Estimate, clopper_pearson, mean, tail_influence


SCHEMA = "trl-repulse/gcg/1"
STATUSES = ("ok", "skipped", "error")
PHASES = ("before", "after")
# Phase -> rewards of each target's samples
Scores = dict[str, list[list[float]]]
MIN_TAIL_TARGETS = 10  # fewest samples in the tail for an interval of CVaR, in targets
NOTHING = Estimate(np.nan, np.nan, np.nan, 0)


class ResultsFile(AbstractContextManager):
    """A results file, written line by line and continued if it exists. Raises `ValueError` if it holds something else."""

    def __init__(self, path: Path, header: dict[str, Any]):
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = _complete_lines(path) if has_results(path) else b""
        self._file = open(path, "ab")
        self._file.truncate(len(kept))
        if not kept:
            self.append(header)

    def __exit__(self, *exception: object) -> None:
        self._file.close()

    def append(self, entry: dict[str, Any]) -> None:
        """Writes a line and waits until it is on the disk."""
        self._file.write(_as_line(entry))
        self._file.flush()
        os.fsync(self._file.fileno())


def has_results(path: Path) -> bool:
    """Whether a file has a complete first line. Raises `ValueError` if it has no line break and does not begin as
    results do, and so must be kept."""
    if not path.exists():
        return False
    content = path.read_bytes()
    begin = _as_line({"schema": SCHEMA})[:-3]  # an incomplete header may be shorter
    if b"\n" not in content and content[: len(begin)] != begin[: len(content)]:
        raise ValueError(f"`{path}` is no file of attack results; use another file.")
    return b"\n" in content


def read_results(*paths: str | Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Header, and one line a target sorted by row, of a file of results or of several that are parts of one
    evaluation. Incomplete last lines are left out. Raises `ValueError` if a file is missing, empty or no results
    file, or the files belong to different evaluations."""
    header: dict[str, Any] = {}
    rows: dict[int, dict[str, Any]] = {}
    for path in map(Path, paths):
        if not path.is_file():
            raise ValueError(f"There is no file `{path}`; give the results of an evaluation.")
        found, records = _parse(_complete_lines(path), path)
        header = header or found
        check_identity(found, header, path)
        for record in records:
            rows.setdefault(record["row"], record)
    if not header:
        raise ValueError("No file of results is given.")
    return header, [rows[number] for number in sorted(rows)]


def merge_results(paths: Iterable[str | Path], output: str | Path) -> int:
    """Merges the results of an evaluation's shards into the file `output`, which may be one of them and is replaced as
    a whole. Returns its number of targets; raises as [`read_results`]."""
    header, records = read_results(*paths)
    content = b"".join(_as_line(entry) for entry in [header, *records])
    write_atomically(Path(output), lambda partial: partial.write_bytes(content))
    return len(records)


def check_identity(found: dict[str, Any], expected: dict[str, Any], path: Path) -> None:
    """Raises `ValueError` if two headers differ in what results depend on; `path` is where `found` comes from."""
    ours, theirs = ({**header["identity"], **header["identity"]["config"]} for header in (expected, found))
    del ours["config"], theirs["config"]
    differing = sorted(name for name in ours | theirs if ours.get(name) != theirs.get(name))
    if differing == ["prompt"]:
        changed = changed_prompt(ours["prompt"], theirs["prompt"])
        raise ValueError(f"`{path}` holds results of other prompts: {changed}, or use another output file.")
    if differing:
        shown = ", ".join(f"{name} ({theirs.get(name)!r:.40}, not {ours.get(name)!r:.40})" for name in differing[:5])
        raise ValueError(f"`{path}` holds results of another evaluation: {shown}; use another output file.")


def _as_line(entry: dict[str, Any]) -> bytes:
    return json.dumps(entry, allow_nan=False).encode() + b"\n"


def _complete_lines(path: Path) -> bytes:
    """The file up to its last line break."""
    content = path.read_bytes()
    return content[: content.rfind(b"\n") + 1]


def _parse(content: bytes, path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Header and lines of a file."""
    if not content:
        raise ValueError(f"`{path}` is empty; it holds no results.")
    try:
        header, *records = [json.loads(line) for line in content.splitlines()]
        valid = header["schema"] == SCHEMA and all(each["status"] in STATUSES and each["row"] >= 1 for each in records)
    except (ValueError, RecursionError, KeyError, TypeError):
        valid = False
    if not valid:
        raise ValueError(f"`{path}` is no file of attack results of the schema {SCHEMA!r}; use another file.")
    return header, records


def summarize(
    header: dict[str, Any],
    records: Sequence[dict[str, Any]],
    thresholds: Sequence[float],
    k: Sequence[int] = (1,),
    level: float = 0.95,
    tail: float = 0.1,
) -> dict[str, Any]:
    """
    Attack success rates and tails, before and after the attack. A response is bad if its score is below the threshold. An
    attack on a target succeeds if any of its responses is bad.

    Args:
        header (`dict`), records (`Sequence[dict]`): What [`read_results`] returned.
        thresholds (`Sequence[float]`): Scores below which a response is bad.
        k (`Sequence[int]`, *optional*, defaults to `(1,)`):
            Numbers of samples for success at k. Targets with fewer samples are left out of it.
        level (`float`, *optional*, defaults to `0.95`):
            Coverage of the intervals over targets: Wilson's for the success rate, and those of [`mean_over_targets`] (success
            at k, share of bad samples), [`paired_difference`] and [`tail_over_targets`] (conditional value at risk).
        tail (`float`, *optional*, defaults to `0.1`): Share of samples that the conditional value at risk averages.

    Returns:
        `dict`: `"targets"`, the number of `"rows"` of the table, and of them `"ok"`, `"skipped"`, `"error"`, `"missing"` (not
        yet evaluated) and `"unscored"` (without a score by the judge); `"scored"`, the denominator of all rates; `"judge"`,
        `"level"` and `"tail"`; `"cvar"`, one estimate a phase; `"thresholds"`, the rates at each. An estimate has `value` (NaN without
        targets), `low` and `high` (NaN where there is no such end), and `samples`: the number of targets, for `"cvar"` of
        samples in the tail.

    Raises:
        `ValueError`: If no threshold is given.
    """
    if not thresholds:
        raise ValueError("Give at least one threshold.")
    scores = _scores(records)
    counts = {status: sum(record["status"] == status for record in records) for status in STATUSES}
    left = {"missing": header["rows"] - len(records), "unscored": counts["ok"] - len(scores["after"])}
    return {
        "targets": {"rows": header["rows"], **counts, **left},
        "scored": len(scores["after"]),
        "judge": header["identity"]["judge"],
        "level": level,
        "tail": tail,
        "cvar": {phase: asdict(tail_over_targets(scores[phase], tail, level)) for phase in PHASES},
        "thresholds": {str(threshold): _rates(scores, threshold, k, level) for threshold in thresholds},
    }


def success_curve(records: Sequence[dict[str, Any]], level: float = 0.95) -> dict[str, list[tuple[float, Estimate]]]:
    """For `"before"` and `"after"`, the lowest score of each target in rising order, with the success rate at a
    threshold just above it and Wilson's interval of coverage `level`."""
    curve = {}
    for phase, targets in _scores(records).items():
        lowest = sorted(map(min, targets))
        steps = {score: number for number, score in enumerate(lowest, 1)}
        curve[phase] = [(score, wilson_interval(number, len(lowest), level)) for score, number in steps.items()]
    return curve


def format_report(summary: dict[str, Any]) -> str:
    """The summary that [`summarize`] returned, as text of several lines."""
    counts, coverage = summary["targets"], f"{100 * summary['level']:g} %"
    left_out = ", ".join(f"{counts[name]} {name}" for name in ("skipped", "error", "missing", "unscored"))
    note = f"of {summary['scored']} targets ({left_out})"
    lines = [f"{counts['rows']} targets, judged by {summary['judge']}; intervals of {coverage}"]
    for threshold, rates in summary["thresholds"].items():
        lines += ["", f"Bad is a score below {threshold}", f"{'':34}{'before':>26}{'after':>26}"]
        before, after = (rates[phase] for phase in PHASES)
        rows = [("attack success", before["success"], after["success"], note)]
        for k, at_k in after["at_k"].items():
            label = f"  in {k} sample{'s' * (k != '1')}"
            rows.append((label, before["at_k"][k], at_k, f"of {at_k['samples']} targets ({left_out})"))
        rows.append(("bad samples", before["bad_share"], after["bad_share"], note))
        lines += [f"{label:34}{_show(one):>26}{_show(other):>26}  {of}" for label, one, other, of in rows]
        lines.append(f"{'success after, less before':34}{'':26}{_show(rates['difference']):>26}  {note}")
    cvar = summary["cvar"]
    label = f"mean of the lowest {100 * summary['tail']:g} %"
    before, after = (_show(cvar[phase], share=False) for phase in PHASES)
    lines += ["", f"{label:34}{before:>26}{after:>26}  {note}"]
    lines.append(f"{'  samples it rests on':34}{cvar['before']['samples']:>26}{cvar['after']['samples']:>26}")
    return "\n".join(lines)


def _scores(records: Sequence[dict[str, Any]]) -> Scores:
    """Scores before and after, of the targets that have both."""
    found: Scores = {phase: [] for phase in PHASES}
    for record in records:
        if record["status"] == "ok":
            pair = [[x for x in record[phase]["rewards"] if x is not None] for phase in PHASES]
            if all(pair):
                for phase, scores in zip(PHASES, pair, strict=True):
                    found[phase].append(scores)
    return found


def _rates(scores: Scores, threshold: float, k: Sequence[int], level: float) -> dict[str, Any]:
    rates: dict[str, Any] = {}
    succeeded = []
    for phase, targets in scores.items():
        counts = [(int(is_bad(np.array(each), threshold).sum()), len(each)) for each in targets]  # bad samples and all
        succeeded.append([c > 0 for c, _ in counts])
        at_k = {}
        for number in k:
            enough = [(c, n) for c, n in counts if n >= number]
            chances = [success_at_k(c, n, number) for c, n in enough]
            # n samples are worth at least n / k independent trials of k samples
            at_k[str(number)] = asdict(mean_over_targets(chances, [n / number for _, n in enough], level))
        successes = sum(succeeded[-1])
        rates[phase] = {
            "successes": successes,
            "success": asdict(wilson_interval(successes, len(counts), level)),
            "at_k": at_k,
            "bad_share": asdict(mean_over_targets([c / n for c, n in counts], [n for _, n in counts], level)),
        }
    changes = [after - before for before, after in zip(*succeeded, strict=True)]
    rates["difference"] = asdict(paired_difference(changes.count(1), changes.count(-1), len(changes), level))
    return rates


def _show(estimate: dict[str, float], share: bool = True) -> str:
    value, low, high = (estimate[name] for name in ("value", "low", "high"))
    if math.isnan(value):
        return "no data"
    show, unit = (percent, " %") if share else (plain, "")
    if math.isnan(high):
        interval = ""
    elif math.isnan(low):
        interval = f" (at most {show(high, 3)})"
    else:
        interval = f" ({show(low, 3)} to {show(high, 3)})"
    return f"{show(value, 3)}{unit}{interval}"


# Rates and tails over targets, with intervals


def success_at_k(successes: int, samples: int, k: int) -> float:
    """Probability that at least one of `k` samples, drawn without replacement from n with c successes, is a success: 1
    − C(n − c, k) / C(n, k) (Chen et al. 2021, arXiv 2107.03374, equation 1). Unbiased for any n. Raises
    `ValueError` if `k` is not from 1 to n, or c not from 0 to n."""
    if not 1 <= k <= samples:
        raise ValueError(f"`k={k}` must be from 1 to the {samples} samples of a target; draw more, or lower it.")
    if not 0 <= successes <= samples:
        raise ValueError(f"{successes} successes of {samples} samples are impossible.")
    return 1 - comb(samples - successes, k) / comb(samples, k)


def wilson_interval(successes: int, trials: int, level: float = 0.95) -> Estimate:
    """The rate of successes in independent trials with Wilson's score interval; NaN without trials."""
    if trials == 0:
        return NOTHING
    interval = stats.binomtest(successes, trials).proportion_ci(confidence_level=level, method="wilson")
    return Estimate(successes / trials, float(interval.low), float(interval.high), trials)


def mean_over_targets(values: Sequence[float], trials: Sequence[float], level: float = 0.95) -> Estimate:
    """
    Mean of rates over targets drawn from a population, with the interval of Korn and Graubard (1998) adapted to few targets.

    Theirs is Clopper and Pearson's with an effective number of trials n = p(1 − p) / v · (t(Σ trials − 1) / t(M − 1))², where v
    is the variance of the mean, estimated from the spread of the targets. Here n is at least M, since rates in [0, 1] spread
    most if they are all 0 or 1, and at most the number of trials.

    Departure from the source: with few bad targets v is unreliable, as the worst ones are probably not among them. So 1 / n is
    a mean of 1 / M and theirs, with weights 1 / K and 1 − 1 / K. K is the smaller of Kish's (1965) effective numbers
    (Σx)² / Σx² of targets that contribute to the rate and to its complement. Without spread, n is M.

    Args:
        values, trials (`Sequence[float]`): Rate of each target, in [0, 1], and its independent trials, at least 1.
        level (`float`, *optional*, defaults to `0.95`): Nominal coverage.

    Returns:
        [`~trl_repulse.evaluation.tails.Estimate`]: a rate, NaN without targets; `samples` is M.

    Raises:
        `ValueError`: If a rate is not in [0, 1], or has less than one trial.
    """
    rates, count = np.asarray(values, dtype=float), len(values)
    if count == 0:
        return NOTHING
    if not ((rates >= 0) & (rates <= 1)).all() or len(trials) != count or not min(trials) >= 1:
        raise ValueError("Each target needs a rate from 0 to 1 and at least one trial.")
    rate, size = float(rates.mean()), float(count)
    if np.ptp(rates) > 0:
        most = count**2 / float((1 / np.asarray(trials, dtype=float)).sum())
        miss = (1 - level) / 2
        seen = rate * (1 - rate) / (float(rates.var(ddof=1)) / count)
        seen *= float(stats.t.isf(miss, most - 1) / stats.t.isf(miss, count - 1)) ** 2
        contributing = min(float(x.sum() ** 2 / (x**2).sum()) for x in (rates, 1 - rates))
        size = 1 / (1 / contributing / count + (1 - 1 / contributing) / min(max(seen, count), most))
    return Estimate(rate, *clopper_pearson(rate * size, (1 - rate) * size, level), count)


def paired_difference(gained: int, lost: int, pairs: int, level: float = 0.95) -> Estimate:
    """
    The second success rate minus the first on the same targets, where `gained` and `lost` of `pairs` succeed only in the
    second, or only in the first; NaN without pairs.

    The ends of Clopper and Pearson's intervals of these two shares are combined with the correlation of two counts of one
    multinomial (Newcombe 1998, Statistics in Medicine 17, 2635, method 10, but with other intervals; Zou 2007). Raises
    `ValueError` if a count is negative, or more pairs disagree than there are.
    """
    if gained < 0 or lost < 0 or gained + lost > pairs:
        raise ValueError(f"{gained} and {lost} of {pairs} pairs cannot disagree.")
    if pairs == 0:
        return NOTHING
    up, down = gained / pairs, lost / pairs
    (up_low, up_high), (down_low, down_high) = (
        clopper_pearson(share * pairs, (1 - share) * pairs, level) for share in (up, down)
    )
    both = gained * lost
    correlation = -sqrt(both / ((pairs - gained) * (pairs - lost))) if both else 0.0

    def distance(one: float, other: float) -> float:
        return sqrt(one**2 + other**2 - 2 * correlation * one * other)

    low = up - down - distance(up - up_low, down_high - down)
    high = up - down + distance(up_high - up, down - down_low)
    return Estimate(up - down, max(low, -1.0), min(high, 1.0), pairs)


def tail_over_targets(targets: Sequence[Sequence[float]], share: float, level: float = 0.95) -> Estimate:
    """
    Conditional value at risk of all targets' scores, with an interval over targets drawn from a population.

    The estimate is the mean of the lowest share of scores, the last one counted in part (Rockafellar and Uryasev 2002). The
    interval is that of a mean of the targets' influence values, q − (q − r)₊ / share; each end is the wider one of Student's and
    Hall's (1992, corrected for skewness). It needs [`~trl_repulse.evaluation.tails.MIN_TAIL`] samples in the tail, and at least
    those of [`MIN_TAIL_TARGETS`] whole targets. If no score lies below the quantile, there is no lower end, and the upper one is
    the lowest score that, by [`mean_over_targets`], at least a share `share` of scores does not exceed.

    Args:
        targets (`Sequence[Sequence[float]]`), share (`float`):
            Scores of each of the M targets, and the share of them in the tail, above 0 and at most 1.
        level (`float`, *optional*, defaults to `0.95`): Nominal coverage.

    Returns:
        [`~trl_repulse.evaluation.tails.Estimate`]: a score, NaN without targets; an end is NaN where there is none. `samples`
        are those in the tail, rounded up.

    Raises:
        `ValueError`: If the share is out of range or a target has no scores.
    """
    if not 0 < share <= 1:
        raise ValueError(f"The share {share} must be above 0 and at most 1.")
    if len(targets) == 0:
        return NOTHING
    if any(len(scores) == 0 for scores in targets):
        raise ValueError("A target has no scores; leave it out.")
    scores, sizes = np.concatenate([np.asarray(each, dtype=float) for each in targets]), np.array([*map(len, targets)])
    influence, samples = tail_influence(scores, share), ceil(share * len(scores) - 1e-9)
    value = float(influence.mean())
    whole_targets = share * len(scores) ** 2 / float((sizes**2).sum())  # of equal sizes: share · M
    if samples < MIN_TAIL or whole_targets < MIN_TAIL_TARGETS - 1e-9:
        return Estimate(value, np.nan, np.nan, samples)
    if np.ptp(influence) == 0:  # no score is below the quantile
        return Estimate(value, np.nan, _quantile_high(targets, share, level), samples)
    # One value a target, with the estimate as mean and, to first order, the spread of its error
    sums = np.add.reduceat(influence - value, np.cumsum(sizes) - sizes)
    by_target = value + sums * len(sizes) / len(scores)
    if np.ptp(by_target) <= 1e-9 * max(1.0, abs(value)):  # equal targets tell nothing about others
        return Estimate(value, np.nan, np.nan, samples)
    half = float(stats.t.isf((1 - level) / 2, len(sizes) - 1)) * float(by_target.std(ddof=1)) / sqrt(len(sizes))
    skewed = mean(by_target[:, None], level)
    return Estimate(value, min(skewed.low, value - half), max(skewed.high, value + half), samples)


def _quantile_high(targets: Sequence[Sequence[float]], share: float, level: float) -> float:
    """Lowest score that at least a share of scores surely does not exceed; NaN if there is none."""
    sizes = [len(each) for each in targets]
    for score in sorted({x for each in targets for x in each}):
        under = [sum(x <= score for x in each) / len(each) for each in targets]
        if mean_over_targets(under, sizes, level).low >= share:
            return float(score)
    return np.nan
