"""
Runs of several methods against two quantities: means over seeds with intervals, the Pareto front, hypervolume gains.

Legend: M methods, S runs (seeds) of a method, R bootstrap replicates.
"""

import csv
import io
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from . import tails
from .bootstrap import REPLICATES, combined_interval, resampled_weights
from .comparison import load_runs
from .records import COMPLETE, HEADER, first_difference, load_samples
from .report import check_same_settings
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


@dataclass(frozen=True)
class Run:
    """
    One trained model's place in the figure.

    Args:
        method (`str`):
            Name of the method.
        x, y (`float`):
            The two quantities.
    """

    method: str
    x: float
    y: float


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


def load_frontier(
    paths: dict[str, Sequence[str | Path]],
    x: str,
    y: str,
    threshold: float | None = None,
    level: float | None = None,
    confidence: float = 0.95,
) -> Frontier:
    """
    Reads result files of many runs, and refuses those that may not stand in one figure.

    A run is a folder of held-out samples ([`~trl_repulse.evaluation.sampling.sample_completions`]), the `results.json` of a
    training script with exact evaluation, or another JSON file with `"settings"` and the quantities by name. All runs are of
    one of these kinds.

    Args:
        paths (`dict[str, Sequence[str | Path]]`):
            Method -> its runs, one a seed.
        x, y (`str`):
            Quantities, keys of [`QUANTITIES`].
        threshold (`float`, *optional*):
            η of `"prob_bad"`, in units of reward.
        level (`float`, *optional*):
            Level of `"cvar"`.
        confidence (`float`, *optional*, defaults to `0.95`):
            Nominal coverage of the intervals.

    Returns:
        [`Frontier`]

    Raises:
        `ValueError`: If a run cannot be read or lacks a quantity, runs were made with different settings, or one is named
            twice.
    """
    for name in (x, y):
        if name not in QUANTITIES:
            raise ValueError(f"There is no quantity {name!r}; choose among {', '.join(QUANTITIES)}.")
        needed = {"prob_bad": ("threshold", threshold), "cvar": ("level", level)}.get(name)
        if needed is not None and needed[1] is None:
            raise ValueError(f"The quantity '{name}' needs a `{needed[0]}`.")
    flat = [(method, Path(path)) for method, each in paths.items() for path in each]
    places = [path.resolve() for _, path in flat]
    if len(set(places)) < len(places):
        twice = next(path for path in places if places.count(path) > 1)
        raise ValueError(f"`{twice}` is named twice; name each run once.")
    values = _read([path for _, path in flat], (x, y), threshold, level)
    runs = [Run(method, *pair) for (method, _), pair in zip(flat, values, strict=True)]
    return make_frontier(runs, x, y, threshold, level, confidence)


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

    Intervals are those of [`~trl_repulse.evaluation.bootstrap`]: for the means Student's, for a gain from the variances that
    resampling the runs of one method after the other gives it. A gain's interval is right where the method is clearly on the
    front or clearly off it; near the edge, where the gain is bent, it is not. A single run has no interval.

    Args:
        runs (`Sequence[Run]`):
            Runs of all methods.
        x, y, threshold, level, confidence:
            As for [`load_frontier`].
        seed (`int`, *optional*, defaults to `0`):
            Seed of the bootstrap.

    Returns:
        [`Frontier`]

    Raises:
        `ValueError`: If there are no runs, or a quantity is not finite.
    """
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
    resampled = _resampled(places, np.random.default_rng(seed))  # M of (R, 2)
    points = []
    for index, (method, group) in enumerate(groups.items()):
        ends = []
        for axis in range(2):
            part = (float(resampled[index][:, axis].var()), len(group) - 1)
            low, high = combined_interval(float(means[index, axis]), [part], confidence)
            ends.append(Estimate(*(signs[axis] * np.array([means[index, axis], *(low, high)[:: int(signs[axis])]])),
                                 len(group)))  # fmt: skip
        others = np.delete(means, index, axis=0)
        on_front = not ((others >= means[index]).all(axis=1) & (others > means[index]).any(axis=1)).any()
        gain = _gain_estimate(means, resampled, [len(it) for it in places], index, worst, confidence)
        points.append(Point(method, tuple(group), *ends, bool(on_front), gain))
    labels = [QUANTITIES[name][1].format(threshold=threshold or 0.0, level=level or 0.0) for name in (x, y)]
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


def _resampled(places: list[np.ndarray], generator: np.random.Generator) -> list[np.ndarray]:
    """Bootstrap means of each method, (R, 2), spread by √(S / (S − 1)) so that their variance is unbiased."""
    drawn = []
    for group in places:
        count, mean = len(group), group.mean(axis=0)
        weights = resampled_weights(count, REPLICATES, generator)
        drawn.append(mean + (weights @ (group - mean)) * math.sqrt(count / max(count - 1, 1)))
    return drawn


def _gain_estimate(
    means: np.ndarray,
    resampled: list[np.ndarray],
    counts: list[int],
    index: int,
    worst: np.ndarray,
    confidence: float,
) -> Estimate:
    """The area a method adds to that of the others, with its interval; resamples one method's runs after the other."""

    def gain(points: np.ndarray) -> np.ndarray:
        return hypervolume(points, worst) - hypervolume(np.delete(points, index, axis=1), worst)

    value = float(gain(means[None])[0])
    components = []
    for other, drawn in enumerate(resampled):
        points = np.repeat(means[None], len(drawn), axis=0)
        points[:, other] = drawn
        components.append((float(gain(points).var()), counts[other] - 1))
    # A method whose single run has no bearing on the gain does not take its interval away
    neighbours = [means[None].copy() for _ in counts]
    for other, moved in enumerate(neighbours):
        moved[:, other] += 1e-6 * (np.abs(means[other] - worst) + 1e-12)
    relevant = [
        part
        for part, moved in zip(components, neighbours, strict=True)
        if part[1] > 0 or float(gain(moved)[0]) != value
    ]
    low, high = combined_interval(value, relevant, confidence)
    return Estimate(value, max(low, 0.0) if math.isfinite(low) else low, high, counts[index])


def _read(
    paths: list[Path], names: tuple[str, str], threshold: float | None, level: float | None
) -> list[tuple[float, float]]:
    """The two quantities of each run."""
    kinds = {"samples" if path.is_dir() else "file" for path in paths}
    if len(kinds) > 1:
        raise ValueError("Folders of samples and result files stand in one figure; compare runs of one kind.")
    if kinds == {"samples"}:
        samples = [load_samples(path) for path in paths]
        check_same_settings(samples)

        def value(columns: Any, name: str) -> float:
            if name == "prob_bad":
                return tails.prob_below(columns.column(), threshold).value
            if name == "cvar":
                return tails.cvar(columns.column(), level).value
            return float(columns.column(name).mean())

        return [(value(each, names[0]), value(each, names[1])) for each in samples]
    contents = [_read_json(path) for path in paths]
    if all({"initial", "final", "samples"} <= set(content) for content in contents):
        contents = [run["final"] for run in load_runs(paths)]
    else:
        for path, content in zip(paths, contents, strict=True):
            if "settings" not in content:
                raise ValueError(
                    f"`{path}` has no `settings`, so that nothing says which runs it may be compared with."
                )
            name = first_difference(content["settings"], contents[0]["settings"])
            if name is not None:
                raise ValueError(
                    f"`{path}` and `{paths[0]}` differ in the setting `{name}`; compare runs of one kind."
                )
    for path, content in zip(paths, contents, strict=True):
        for name in names:
            if not isinstance(content.get(name), int | float):
                numbers = [key for key, number in content.items() if isinstance(number, int | float)]
                raise ValueError(f"`{path}` has no number `{name}`; it has {', '.join(numbers) or 'none'}.")
    return [(float(content[names[0]]), float(content[names[1]])) for content in contents]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"`{path}` cannot be read as results ({error}); run it again.") from error
    if not isinstance(content, dict) or path.name in (HEADER, COMPLETE):
        raise ValueError(f"`{path}` is no file of results; of samples, name the folder.")
    return content
