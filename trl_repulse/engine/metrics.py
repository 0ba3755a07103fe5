"""Metrics that are pooled over the batches since the last log: each sample, token or prompt counts the same.

TRL logs the mean over batches of what each batch gave, in which a sample of a small batch counts more than others.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Moments:
    """
    What is kept of some values: their number, mean, sum of squared distances from it, smallest and largest. Two add up to that of all.
    """

    count: float = 0.0
    mean: float = 0.0
    squares: float = 0.0
    low: float = math.inf
    high: float = -math.inf

    @classmethod
    def of(cls, values: torch.Tensor) -> "Moments":
        """Of a tensor's values; NaN counts for nothing."""
        values = values.detach().flatten().cpu().double()
        values = values[~values.isnan()]
        if not len(values):
            return cls()
        squares = (values - values.mean()).square().sum()
        return cls(len(values), *(x.item() for x in (values.mean(), squares, values.min(), values.max())))

    @classmethod
    def alike(cls, value: float, count: float) -> "Moments":
        """Of `count` values of which the mean alone is known; NaN counts for nothing."""
        return cls() if math.isnan(value) or count <= 0 else cls(count, value, 0.0, value, value)

    def __add__(self, other: "Moments") -> "Moments":
        count = self.count + other.count
        if not count:
            return self
        gap, share = other.mean - self.mean, other.count / count
        return Moments(
            count,
            self.mean + gap * share,
            self.squares + other.squares + gap * gap * share * self.count,
            min(self.low, other.low),
            max(self.high, other.high),
        )


def mean(values: Moments) -> float:
    """The mean; NaN of no values."""
    return values.mean if values.count else math.nan


def std(values: Moments) -> float:
    """The unbiased standard deviation; NaN of fewer than two values."""
    return math.sqrt(values.squares / (values.count - 1)) if values.count > 1 else math.nan


def lowest(values: Moments) -> float:
    """The smallest value; NaN of none."""
    return values.low if values.count else math.nan


def highest(values: Moments) -> float:
    """The largest value; NaN of none."""
    return values.high if values.count else math.nan


def share_explained(targets: Moments, errors: Moments) -> float:
    """1 − Var(errors) / Var(targets): 1 is perfect, 0 no better than a constant; NaN where the targets do not vary."""
    return 1 - errors.squares / targets.squares if targets.squares > 0 else math.nan


class Pooled(float):
    """A metric of one batch, as a number that `statistic` makes of moments, which knows how to become that of several batches."""

    def __new__(cls, statistic: Callable[..., float], *moments: Moments):
        metric = super().__new__(cls, statistic(*moments))
        metric.statistic, metric.moments = statistic, moments
        return metric


class ShareUnder(Pooled):
    """
    Share of one batch's `rewards` (B_all,) under a `threshold`, which may come to be known until it is logged; NaN where it is `None`.

    NaN among the rewards counts for nothing.
    """

    def __new__(cls, rewards: torch.Tensor, threshold: Callable[[], float | None]):
        metric = float.__new__(cls, math.nan)
        metric.statistic, metric._rewards, metric._threshold = mean, rewards, threshold
        return metric

    @property
    def moments(self) -> tuple[Moments]:
        threshold = self._threshold()
        if threshold is None:
            return (Moments(),)
        return (Moments.of((self._rewards < threshold).float().masked_fill(self._rewards.isnan(), math.nan)),)


def pool(metrics: Iterable[Pooled]) -> float:
    """One metric of all batches, at least one, over all their values together."""
    metrics = list(metrics)
    totals = [sum(batches[1:], batches[0]) for batches in zip(*(metric.moments for metric in metrics), strict=True)]
    return metrics[0].statistic(*totals)


def pool_all(metrics: dict[str, list[Any]]) -> None:
    """
    Leaves one value, in place, of each metric that is [`Pooled`]; what is not stays as it is, for TRL's mean over batches. Of those, one of
    which nothing is known is left out, for which TRL (1.16) would log `None`.
    """
    for name, values in list(metrics.items()):
        if values and all(isinstance(value, Pooled) for value in values):
            metrics[name] = [pool(values)]
            if math.isnan(metrics[name][0]):
                del metrics[name]


def drop_batch_means(metrics: dict[str, list[Any]], *prefixes: str) -> None:
    """Takes TRL's values, of one batch whatever it is filled up with, out of the metrics with these beginnings, in place."""
    for name in metrics:
        if name.startswith(prefixes):
            metrics[name] = [value for value in metrics[name] if isinstance(value, Pooled)]


def weighted(name: str, value: float, count: float) -> Pooled:
    """A metric that TRL has taken of one batch, of `count` samples or tokens of all processes; its name tells minima and maxima."""
    statistic = lowest if name.endswith("min") else highest if name.endswith("max") else mean
    return value if isinstance(value, Pooled) else Pooled(statistic, Moments.alike(value, count))
