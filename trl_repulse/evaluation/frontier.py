"""
Runs of several methods against two quantities: means over seeds with intervals, the Pareto front, hypervolume gains.

Legend: M methods, S runs (seeds) of a method.
"""

import csv
import io
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import binomtest

from .._numbers import plain
from .bootstrap import combined_interval
from .comparison import mean_and_interval
from .tails import Estimate


# Quantity -> whether less of it is better, and how an axis names it
QUANTITIES = {
    "reward": (False, "mean reward"),
    "return": (False, "mean return"),
    "return_transformed": (False, "mean return, transformed reward"),
    "expected_reward": (False, "expected reward"),
    "prob_bad": (True, "P(r < {threshold:g})"),
    "log_prob_bad": (True, "log P(bad), nats"),
    "cvar": (False, "CVaR {level:g}"),
    "attack_success": (True, "attack success rate"),
    "kl": (True, "KL to the reference, nats per completion"),
}
SHARES = ("prob_bad", "attack_success")  # within [0, 1]


@dataclass(frozen=True)
class Run:
    """
    One trained model's place in the figure.

    Args:
        method (`str`):
            Name of the method.
        x, y (`float`):
            The two quantities.
        x_samples, y_samples (`int`, *optional*, defaults to `0`):
            Completions, or attacks, that each rests on if it is a share; 0 if that is not known.
    """

    method: str
    x: float
    y: float
    x_samples: int = 0
    y_samples: int = 0


@dataclass(frozen=True)
class Point:
    """
    A method's place in the figure.

    Args:
        method (`str`):
            Name of the method.
        runs (`tuple[Run, ...]`):
            Its runs.
        x, y ([`~trl_repulse.evaluation.tails.Estimate`]):
            Means over the runs with intervals; `samples` is their number.
        on_front (`bool`):
            Whether no other method's means are at least as good in both quantities and better in one.
        gain ([`~trl_repulse.evaluation.tails.Estimate`], *optional*):
            Hypervolume gain over the baseline, in units of x times units of y: the area between the reference point and this
            method's means, less that between it and the baseline's. Negative where the baseline dominates more; `None` for the
            baseline itself.
    """

    method: str
    runs: tuple[Run, ...]
    x: Estimate
    y: Estimate
    on_front: bool
    gain: Estimate | None


@dataclass(frozen=True)
class Frontier:
    """
    Methods against two quantities.

    Args:
        x, y (`str`):
            Names of the quantities, keys of [`QUANTITIES`].
        x_label, y_label (`str`):
            What the axes say.
        confidence (`float`):
            Nominal coverage of the intervals.
        points (`tuple[Point, ...]`):
            One a method.
        baseline (`str`):
            The method over which the others gain.
        reference_point (`tuple[float, float]`):
            The corner from which areas are measured, in units of x and y.
    """

    x: str
    y: str
    x_label: str
    y_label: str
    confidence: float
    points: tuple[Point, ...]
    baseline: str
    reference_point: tuple[float, float]

    def to_csv(self) -> str:
        """
        The table as CSV, numbers in full.

        Returns:
            `str`: One row a method.
        """
        names = [f"{key}{end}" for key in (self.x, self.y, "hypervolume_gain") for end in ("", "_low", "_high")]
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["method", "runs", *names, "on_front"])
        for point in self.points:
            estimates = (point.x, point.y, point.gain)
            numbers = [end for it in estimates for end in ((it.value, it.low, it.high) if it else ("", "", ""))]
            writer.writerow([point.method, len(point.runs), *numbers, point.on_front])
        return text.getvalue()

    def to_markdown(self) -> str:
        """
        The table for reading.

        Returns:
            `str`: One row a method, and from where hypervolumes are measured.
        """
        rows = [
            f"| method | runs | {self.x_label} | {self.y_label} | hypervolume gain over {self.baseline} | Pareto front |",
            "|---" * 6 + "|",
        ]
        for point in self.points:
            cells = [
                plain(it.value) + (f" ({plain(it.low)} to {plain(it.high)})" if math.isfinite(it.low) else "")
                if it
                else "–"
                for it in (point.x, point.y, point.gain)
            ]
            front = "yes" if point.on_front else "no"
            rows.append(f"| {point.method} | {len(point.runs)} | {' | '.join(cells)} | {front} |")
        corner = ", ".join(
            f"{label} {plain(value)}"
            for label, value in zip((self.x_label, self.y_label), self.reference_point, strict=True)
        )
        return "\n".join([*rows, "", f"Hypervolumes are measured from the reference point: {corner}."])


def axis_label(quantity: str, threshold: float | None = None, level: float | None = None) -> str:
    """
    What an axis says.

    Args:
        quantity (`str`):
            Key of [`QUANTITIES`].
        threshold (`float`, *optional*):
            η of `"prob_bad"`, in units of reward.
        level (`float`, *optional*):
            Level of `"cvar"`.

    Returns:
        `str`: The label.

    Raises:
        `ValueError`: If there is no such quantity, or it needs a threshold or a level.
    """
    if quantity not in QUANTITIES:
        raise ValueError(f"There is no quantity {quantity!r}; choose among {', '.join(QUANTITIES)}.")
    for name, value in {"prob_bad": {"threshold": threshold}, "cvar": {"level": level}}.get(quantity, {}).items():
        if value is None:
            raise ValueError(f"The quantity '{quantity}' needs a `{name}`.")
    return QUANTITIES[quantity][1].format(threshold=threshold, level=level)


def make_frontier(
    runs: Sequence[Run],
    x: str,
    y: str,
    threshold: float | None = None,
    level: float | None = None,
    confidence: float = 0.95,
    baseline: str | None = None,
    reference_point: tuple[float, float] | None = None,
    largest: Mapping[str, float] | None = None,
) -> Frontier:
    """
    Means over each method's runs, intervals, front and hypervolume gains.

    Intervals of means are Student's. That of a share holds the interval of Clopper and Pearson for all samples of its runs, if their
    number is known; where the share is 0 (or 1) in all runs it is that interval, or none. The hypervolume that a method's means
    dominate, down to the reference point, is a product of two; its gain over the baseline's has the interval of Welch (1947) for the
    difference of two means, of the products linearised around the means (the delta method, which the bootstrap over runs tends to). The
    reference point is taken as given, also where it is the worst run in either quantity. A single run, or runs that agree, have no
    interval, and nothing over or under them has one.

    Args:
        runs (`Sequence[Run]`):
            Runs of all methods.
        x, y (`str`):
            Quantities, keys of [`QUANTITIES`].
        threshold (`float`, *optional*):
            η of `"prob_bad"`, in units of reward.
        level (`float`, *optional*):
            Level of `"cvar"`.
        confidence (`float`, *optional*, defaults to `0.95`):
            Nominal coverage of the intervals.
        baseline (`str`, *optional*):
            Method over which hypervolume gains are measured; the first one if not given.
        reference_point (`tuple[float, float]`, *optional*):
            x and y from which areas are measured, no better than any run; by default the worst run in either quantity.
        largest (`Mapping[str, float]`, *optional*):
            Largest possible value of a quantity, where it is known: Student's intervals end there.

    Returns:
        [`Frontier`]

    Raises:
        `ValueError`: If there are no runs or none of the baseline, a quantity is unknown or not finite, a run is worse than the
            reference point, or an argument is missing or out of range.
    """
    labels = [axis_label(name, threshold, level) for name in (x, y)]
    if not 0 < confidence < 1:
        raise ValueError(f"`confidence={confidence}` must lie between 0 and 1.")
    if not runs:
        raise ValueError("There are no runs; name at least one.")
    for run in runs:
        if not (math.isfinite(run.x) and math.isfinite(run.y)):
            raise ValueError(f"A run of {run.method} has {x} {run.x} and {y} {run.y}; both must be finite.")
    groups = {name: [run for run in runs if run.method == name] for name in dict.fromkeys(run.method for run in runs)}
    check_baseline(baseline, groups)
    baseline = next(iter(groups)) if baseline is None else baseline
    signs = np.array([-1.0 if QUANTITIES[name][0] else 1.0 for name in (x, y)])
    # More is better in both columns from here on
    places = {name: signs * [(run.x, run.y) for run in group] for name, group in groups.items()}  # M of (S, 2)
    means = np.stack([group.mean(axis=0) for group in places.values()])  # (M, 2)
    corner = _corner(np.concatenate(list(places.values())), signs, reference_point)
    points = []
    for index, (method, group) in enumerate(groups.items()):
        ends = []
        for name, values, samples in (
            (x, [run.x for run in group], [run.x_samples for run in group]),
            (y, [run.y for run in group], [run.y_samples for run in group]),
        ):
            mean, half = mean_and_interval(values, confidence)
            interval = (mean - half, mean + half)
            if math.isfinite(half) and name in (largest or {}):
                interval = (mean - half, max(mean, min(mean + half, largest[name])))
            if name in SHARES:
                interval = _interval_of_share(values, *interval, sum(samples) if all(samples) else 0, confidence)
            ends.append(Estimate(mean, *interval, len(group)))
        others = np.delete(means, index, axis=0)
        on_front = not ((others >= means[index]).all(axis=1) & (others > means[index]).any(axis=1)).any()
        gain = None
        if method != baseline:
            gain = _gain(places[method] - corner, places[baseline] - corner, confidence)
        points.append(Point(method, tuple(group), *ends, bool(on_front), gain))
    found = tuple(float(each) + 0.0 for each in signs * corner)  # no -0.0
    return Frontier(x, y, *labels, confidence, tuple(points), baseline, found)


def check_baseline(baseline: str | None, methods: Iterable[str]) -> None:
    """
    Refuses a baseline that is none of the methods.

    Args:
        baseline (`str`, *optional*):
            Its name, if one is asked for.
        methods (`Iterable[str]`):
            All methods.

    Raises:
        `ValueError`: If the baseline is none of them.
    """
    names = list(methods)
    if baseline is not None and baseline not in names:
        raise ValueError(f"`baseline={baseline!r}` is none of the methods; choose among {', '.join(names)}.")


def _corner(places: np.ndarray, signs: np.ndarray, reference_point: tuple[float, float] | None) -> np.ndarray:
    """Where areas are measured from, more being better: the reference point, or the worst of all runs' `places`."""
    worst = places.min(axis=0)
    if reference_point is None:
        return worst
    if len(reference_point) != 2 or not all(map(math.isfinite, reference_point)):
        raise ValueError(f"`reference_point={reference_point}` must be two finite numbers, of x and y.")
    corner = signs * np.array(reference_point, dtype=float)
    if (worst < corner).any():
        worst = tuple((signs * worst + 0.0).tolist())  # no -0.0
        raise ValueError(
            f"`reference_point={reference_point}` is better than the worst runs, {worst}; name one that is not."
        )
    return corner


def _interval_of_share(
    values: list[float], low: float, high: float, samples: int, confidence: float
) -> tuple[float, float]:
    """
    Student's interval within [0, 1], and at least that of Clopper and Pearson for all samples. Of a single run Student's alone;
    where runs agree, the other alone.
    """
    value = statistics.mean(values)
    inside = 0.0 < value < 1.0
    if inside and (len(values) == 1 or not samples):
        return (max(low, 0.0), min(high, 1.0)) if math.isfinite(low) else (low, high)
    if not samples:
        return -math.inf, math.inf
    exact = binomtest(round(value * samples), samples).proportion_ci(confidence, "exact")
    if not math.isfinite(low):
        return float(exact.low), float(exact.high)
    return min(max(low, 0.0), float(exact.low)), max(min(high, 1.0), float(exact.high))


def _gain(own: np.ndarray, other: np.ndarray, confidence: float) -> Estimate:
    """
    The area that a method's means dominate less that of another's; runs (S, 2) are measured from the corner, more being better.

    A method's area is the product of its means; to first order it moves as the mean of what each run adds to it.
    """
    # By powers of two, which change no digit: products of large or small numbers would leave the range of floats
    exponents = np.frexp(np.abs(np.concatenate([own, other])).max(axis=0))[1]
    value, components = 0.0, []
    for runs, sign in ((np.ldexp(own, -exponents), 1.0), (np.ldexp(other, -exponents), -1.0)):
        mean = runs.mean(axis=0)
        value += sign * float(mean.prod())
        parts = runs @ mean[::-1]
        alike = np.ptp(parts) <= 1e-9 * np.abs(parts).max()  # as one run is
        components.append((0.0, 0) if alike else (float(parts.var(ddof=1)) / len(parts), len(parts) - 1))
    with np.errstate(over="ignore"):  # an area beyond all floats is infinite
        ends = np.ldexp([value, *combined_interval(value, components, confidence)], exponents.sum())
    return Estimate(*map(float, ends), len(own))
