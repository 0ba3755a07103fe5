"""Differences between sets of held-out samples on the same prompts.

Axis letters: P prompts, N completions of each (the sets may differ in N).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from .._numbers import is_bad, plain
from .records import SampleSet, header_difference, remedy
from .tails import check_share, clopper_pearson, skewed_interval


MEANS = {"reward": "reward", "kl": "KL, nats per completion", "length": "length, tokens"}  # column -> name
COMPLETED = "share of completed answers"
ENOUGH = 30  # prompts that must differ for Student's interval of a probability to stand alone
# Settings that samples must share; they may differ in seed, number, precision and what drew them
_SAME = ("max_completion_length", "reward_weights", "end_token_ids", "max_tokens", "temperature", "top_p", "top_k")


@dataclass(frozen=True)
class Difference:
    """Means of two sets of samples, the interval of second − first, and whether it is shown among all that are compared."""

    first: float
    second: float
    low: float
    high: float
    shown: bool

    @property
    def value(self) -> float:
        """second − first."""
        return self.second - self.first


@dataclass(frozen=True)
class Comparison:
    """Folders of two sets of samples, P, the nominal coverage, and the differences by quantity."""

    names: tuple[str, str]
    prompts: int
    confidence: float
    differences: dict[str, Difference]

    @property
    def sentence(self) -> str:
        """Whether the two differ, and in what."""
        first, second = self.names
        named = [(name.partition(",")[0], diff) for name, diff in self.differences.items()]  # without units
        shown = [f"a {'lower' if diff.value < 0 else 'higher'} {name}" for name, diff in named if diff.shown]
        others = [name for name, diff in named if not diff.shown]
        if not shown:
            return f"No difference between `{second}` and `{first}` is shown."
        more = f"; no difference is shown in {', '.join(others)}" if others else ""
        return f"`{second}` differs from `{first}`, with {', '.join(shown)}{more}."

    def to_markdown(self) -> str:
        """A table and the sentence."""
        head = ("quantity", *self.names, "difference", f"{100 * self.confidence:g} % interval")
        rows = [head, ["---"] * len(head)]
        for name, diff in self.differences.items():
            ends = " to ".join("none" if math.isinf(end) else plain(end) for end in (diff.low, diff.high))
            rows.append([name, plain(diff.first), plain(diff.second), plain(diff.value), ends])
        return "\n".join([*(f"| {' | '.join(row)} |" for row in rows), "", self.sentence])


def compare_samples(
    samples: Sequence[SampleSet], thresholds: Sequence[float], confidence: float = 0.95
) -> list[Comparison]:
    """
    Compares sets of held-out samples with the first of them: P(r < η), mean reward, KL and length, and the share of completions that
    ended by themselves.

    Intervals are for other prompts like these: Student's for the differences of P prompts, corrected for skewness (Hall, 1992). For
    probabilities that differ in fewer than [`ENOUGH`] prompts they also contain what the counts give (Clopper and Pearson's intervals, joined
    as by Zou and Donner, 2008), so that there is one if nothing is bad. A difference is *shown* if 0 is outside of its interval at a
    confidence of 1 − (1 − `confidence`) / m, for m quantities (Bonferroni).

    Args:
        samples (`Sequence` of [`~trl_repulse.evaluation.records.SampleSet`]):
            Two or more sets with the same prompts, rewards and length. Of sets that are not complete ([`~trl_repulse.evaluation.records.load_samples`]
            with `partial`), the first prompts are compared, which all sets have.
        thresholds (`Sequence[float]`): η of each P(r < η), in units of reward.
        confidence (`float`, *optional*, defaults to `0.95`): Nominal coverage.

    Returns:
        `list` of [`Comparison`]: one for each set but the first. KL is left out without samples of it against one reference; it is 0 for
        the reference itself.

    Raises:
        `ValueError`: If there are fewer than two sets, they do not fit, or a reward is missing.
    """
    check_share("confidence", confidence)
    if len(samples) < 2:
        raise ValueError("One folder cannot be compared; name two or more.")
    first, *others = samples
    for one, other in combinations(samples, 2):
        _check_pair(one, other)
    prompts = min(len(each.prompts) for each in samples)
    comparisons = []
    for other in others:
        columns, of_other = _columns(first, other, thresholds), _columns(other, first, thresholds)
        names = [name for name in columns if name in of_other]
        bonferroni = 1 - (1 - confidence) / len(names)
        differences = {}
        for name in names:
            a, b = columns[name][:prompts], of_other[name][:prompts]
            low, high = paired_interval(a, b, bonferroni)
            ends = paired_interval(a, b, confidence)
            differences[name] = Difference(float(a.mean()), float(b.mean()), *ends, not low <= 0 <= high)
        comparisons.append(Comparison((str(first.folder), str(other.folder)), prompts, confidence, differences))
    return comparisons


def _check_pair(one: SampleSet, other: SampleSet) -> None:
    """Refuses sets that cannot be paired, and the same set twice."""
    headers = []
    for samples in (one, other):
        settings = {name: samples.header["settings"].get(name) for name in _SAME}
        prompts = {name: value for name, value in samples.header["prompts"].items() if name not in ("count", "of")}
        headers.append({"prompts": prompts, "rewards": samples.header["rewards"], "settings": settings})
        if None not in (one.header["reference"], other.header["reference"]):
            headers[-1]["reference"] = samples.header["reference"]
    if (name := header_difference(*headers)) is not None:
        raise ValueError(
            f"`{other.folder}` and `{one.folder}` were sampled with another `{name}`; compare samples of the same prompts, rewards, "
            f"reference and length{remedy(name)}."
        )
    rows = min(len(samples.table) for samples in (one, other))
    texts = [samples.table.select(["prompt", "completion"]).slice(0, rows) for samples in (one, other)]
    if texts[0].equals(texts[1]):
        raise ValueError(f"`{other.folder}` and `{one.folder}` hold the same completions; leave one out.")


def _columns(samples: SampleSet, other: SampleSet, thresholds: Sequence[float]) -> dict[str, np.ndarray]:
    """What is compared, (P, N) each, by name. The KL is 0 for samples of the model that `other` has as its reference."""
    rewards, names = samples.column(), samples.table.column_names
    columns = {f"P(r < {threshold:.15g})": is_bad(rewards, threshold) for threshold in thresholds}
    reference = other.header["reference"] or {}
    for column, name in MEANS.items():
        if column in names:
            columns[name] = samples.column(column)
        elif column == "kl" and reference.get("weights") == samples.header["model"]["weights"]:
            columns[name] = np.zeros_like(rewards)  # of the reference itself
    if "ended" in names:
        columns[COMPLETED] = samples.table["ended"].to_numpy().reshape(rewards.shape)
    return columns


def paired_interval(first: np.ndarray, second: np.ndarray, confidence: float = 0.95) -> tuple[float, float]:
    """Interval of the mean of `second` minus that of `first`, (P, N) each, of numbers or of booleans, as
    [`compare_samples`] says. The ends are infinite for numbers that differ alike in all prompts."""
    by_prompt = second.mean(axis=1) - first.mean(axis=1)  # (P,)
    low, high = skewed_interval(by_prompt[:, None], confidence)
    if first.dtype != bool or (by_prompt != 0).sum() >= ENOUGH:
        return low, high
    of_first, of_second = (clopper_pearson(x.sum(), (~x).sum(), confidence) for x in (first, second))
    p, q = first.mean(), second.mean()
    lowest = q - p - math.hypot(q - of_second[0], of_first[1] - p)
    highest = q - p + math.hypot(of_second[1] - q, p - of_first[0])
    if math.isinf(low):
        return lowest, highest
    return max(min(low, lowest), -1.0), min(max(high, highest), 1.0)
