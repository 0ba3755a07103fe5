"""
Runs of several methods against two quantities: means over seeds with intervals, the Pareto front, hypervolume gains.

Legend: M methods, S runs (seeds) of a method, R replicates.
"""

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import binomtest

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
    "kl": (True, "KL to the reference, nats"),
}
REPLICATES = 10_000  # R
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
        gain ([`~trl_repulse.evaluation.tails.Estimate`]):
            Hypervolume gain: the area that this method alone dominates, in units of x times units of y, between the front
            and the worst run in either quantity.
    """

    method: str
    runs: tuple[Run, ...]
    x: Estimate
    y: Estimate
    on_front: bool
    gain: Estimate


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
    """

    x: str
    y: str
    x_label: str
    y_label: str
    confidence: float
    points: tuple[Point, ...]

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
            numbers = [end for it in (point.x, point.y, point.gain) for end in (it.value, it.low, it.high)]
            writer.writerow([point.method, len(point.runs), *numbers, point.on_front])
        return text.getvalue()

    def to_markdown(self) -> str:
        """
        The table for reading.

        Returns:
            `str`: One row a method.
        """
        rows = [
            f"| method | runs | {self.x_label} | {self.y_label} | hypervolume gain | Pareto front |",
            "|---" * 6 + "|",
        ]
        for point in self.points:
            cells = [
                f"{it.value:.4g}" + (f" ({it.low:.4g} to {it.high:.4g})" if math.isfinite(it.low) else "")
                for it in (point.x, point.y, point.gain)
            ]
            front = "yes" if point.on_front else "no"
            rows.append(f"| {point.method} | {len(point.runs)} | {' | '.join(cells)} | {front} |")
        return "\n".join(rows)


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
    seed: int = 0,
) -> Frontier:
    """
    Means over each method's runs, intervals, front and hypervolume gains.

    Intervals of means are Student's. That of a share holds the interval of Clopper and Pearson for all samples of its runs, if their
    number is known; where the share is 0 (or 1) in all runs it is that interval, or none. For the gains the means of all methods are drawn anew from normal
    distributions with the covariance of their runs (a parametric bootstrap), spread as Student's at the degrees of freedom that
    Satterthwaite (1946) gives the sum of what each method adds to the gain's variance; the interval lies between quantiles of
    the gains that result, from 0 where the method is not surely ahead of each other one in either quantity. The corner from which areas are measured, the worst run in either quantity, is taken as given. A
    single run has no interval, and in the intervals of others it is held where it is.

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
        seed (`int`, *optional*, defaults to `0`):
            Seed of the bootstrap.

    Returns:
        [`Frontier`]

    Raises:
        `ValueError`: If there are no runs, a quantity is unknown or not finite, or an argument is missing or out of range.
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
    signs = np.array([-1.0 if QUANTITIES[name][0] else 1.0 for name in (x, y)])
    # More is better in both columns from here on
    places = [signs * np.array([(run.x, run.y) for run in group]) for group in groups.values()]  # M of (S, 2)
    means = np.stack([group.mean(axis=0) for group in places])  # (M, 2)
    worst = np.concatenate(places).min(axis=0)
    generator = np.random.default_rng(seed)
    shifts = np.stack([_shifts(group, generator) for group in places], axis=1)  # (R, M, 2)
    sizes = np.array([len(group) for group in places])
    points = []
    for index, (method, group) in enumerate(groups.items()):
        ends = []
        for name, values, samples in (
            (x, [run.x for run in group], [run.x_samples for run in group]),
            (y, [run.y for run in group], [run.y_samples for run in group]),
        ):
            mean, half = mean_and_interval(values, confidence)
            interval = (mean - half, mean + half)
            if name in SHARES:
                interval = _interval_of_share(mean, *interval, sum(samples) if all(samples) else 0, confidence)
            ends.append(Estimate(mean, *interval, len(group)))
        others = np.delete(means, index, axis=0)
        on_front = not ((others >= means[index]).all(axis=1) & (others > means[index]).any(axis=1)).any()
        ahead = _surely_adds(places, index, confidence)
        gain = _gain_estimate(means, shifts, sizes, index, worst, ahead, confidence, generator)
        points.append(Point(method, tuple(group), *ends, bool(on_front), gain))
    return Frontier(x, y, *labels, confidence, tuple(points))


def hypervolume(points: np.ndarray, worst: np.ndarray) -> np.ndarray:
    """
    Area that points dominate, more being better in both quantities.

    Args:
        points (`numpy.ndarray` of shape `(R, M, 2)`):
            R sets of M points.
        worst (`numpy.ndarray` of shape `(2,)`):
            Corner from which the area is measured; what lies beyond it counts nothing.

    Returns:
        `numpy.ndarray` of shape `(R,)`: Areas, 0 without points.
    """
    points = np.maximum(points - worst, 0.0)
    order = np.argsort(-points[..., 0], axis=1, kind="stable")[..., None]
    points = np.take_along_axis(points, order, axis=1)  # from the best x down
    height = np.maximum.accumulate(points[..., 1], axis=1)
    right = points[..., 0]
    left = np.concatenate([right[:, 1:], np.zeros((len(points), min(1, right.shape[1])))], axis=1)
    return ((right - left) * height).sum(axis=1)


def _interval_of_share(value: float, low: float, high: float, samples: int, confidence: float) -> tuple[float, float]:
    """
    Student's interval within [0, 1], and at least that of Clopper and Pearson for all samples: runs that agree by chance do not
    make counts more certain than they are. Of a single run, or where all have 0 or all have 1, one of the two.
    """
    inside = 0.0 < value < 1.0
    if inside and not (math.isfinite(low) and samples):
        return (max(low, 0.0), min(high, 1.0)) if math.isfinite(low) else (low, high)
    if not samples:
        return -math.inf, math.inf
    exact = binomtest(round(value * samples), samples).proportion_ci(confidence, "exact")
    if not inside:
        return float(exact.low), float(exact.high)
    return min(max(low, 0.0), float(exact.low)), max(min(high, 1.0), float(exact.high))


def _shifts(group: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """
    Normal errors of the mean of a method's S runs, (S, 2), with the runs' covariance: (R, 2).

    Resampling the runs themselves would give three of them ten different means. A single run stays where it is.
    """
    count = len(group)
    if count == 1:
        return np.zeros((REPLICATES, 2))
    deviations = (group - group.mean(axis=0)) / math.sqrt(count * (count - 1))
    return generator.standard_normal((REPLICATES, count)) @ deviations


def _surely_adds(places: list[np.ndarray], index: int, confidence: float) -> bool:
    """
    Whether a method is surely ahead of each other one, in either quantity, by Welch's interval for the difference of their means.

    One that no other equals in both quantities adds area, however unsure either is by itself: quantiles of drawn gains alone call two
    equal methods different in 12 % of cases. Here each quantity errs in (1 - confidence) / 2, and a gain of 0 has no other side to err on.
    """
    own = places[index]
    for other in (each for i, each in enumerate(places) if i != index):
        parts = [each for each in (own, other) if len(each) > 1]  # a single run is held where it is
        variances = [(each.var(axis=0, ddof=1) / len(each), len(each) - 1) for each in parts]
        lower = [
            combined_interval(
                float(gap), [(float(variance[k]), freedom) for variance, freedom in variances], confidence
            )[0]
            for k, gap in enumerate(own.mean(axis=0) - other.mean(axis=0))
        ]
        if max(lower) <= 0:
            return False
    return True


def _gain_estimate(
    means: np.ndarray,
    shifts: np.ndarray,
    sizes: np.ndarray,
    index: int,
    worst: np.ndarray,
    ahead: bool,
    confidence: float,
    generator: np.random.Generator,
) -> Estimate:
    """
    The area a method adds to that of the others, with its interval; the lower end is 0 unless the method is surely `ahead`.

    Student's distributions drawn for each method by itself would have the tails of the fewest runs added up: the interval of
    Behrens and Fisher, which covers 98 to 99 % for three runs.
    """

    def gain(points: np.ndarray) -> np.ndarray:
        area = hypervolume(points, worst)
        added = area - hypervolume(np.delete(points, index, axis=1), worst)
        return np.where(added > 1e-12 * area, added, 0.0)  # what is left of rounding is no gain

    value, count = float(gain(means[None])[0]), int(sizes[index])
    if count == 1:
        return Estimate(value, -math.inf, math.inf, 1)
    variances = np.zeros(len(means))
    for method in range(len(means)):
        alone = np.zeros_like(shifts)
        alone[:, method] = shifts[:, method]
        variances[method] = gain(means + alone).var()
    spread = (variances**2 / np.maximum(sizes - 1, 1)).sum()
    freedom = float(variances.sum() ** 2 / spread) if spread else count - 1
    scale = np.sqrt(freedom / generator.chisquare(freedom, size=(REPLICATES, 1, 1)))
    low, high = np.quantile(gain(means + scale * shifts), [(1 - confidence) / 2, (1 + confidence) / 2])
    return Estimate(value, min(float(low), value) if ahead else 0.0, max(float(high), value), count)
