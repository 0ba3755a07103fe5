"""
Extrapolation of the largest score among n samples, far beyond the number of samples at hand.

The log of P(score > x) is assumed to continue as over the largest scores, linearly in x (the Gumbel domain), as Jones et al.,
"Forecasting rare language model behaviors" (2025), find for elicitation scores. [`back_test`] shows whether that would have held from
fewer samples to all of them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..tails import check_share


# Largest shortfall from the nominal coverage in a back-test; 2 to 5 % of samples with the right tail exceed it
MAX_SHORTFALL = 0.15
_DRAWS = 10_000  # draws of the scale
_LEAST = 10  # of the largest scores in a fit, and blocks of a back-test


class NoForecastError(ValueError):
    """There are not more scores than a fit uses, or the largest are all equal."""


@dataclass(frozen=True)
class Forecast:
    """The extrapolated largest score among `size` samples: its median, and an interval of nominal coverage
    `confidence`, which does not allow for a wrong form of the tail. `extrapolation` is `size` over the number of
    samples of the fit."""

    size: int
    median: float
    low: float
    high: float
    confidence: float
    extrapolation: float


@dataclass(frozen=True)
class BackTest:
    """Forecasts from each block of the samples (NaN if its largest scores are all equal), and the largest score
    outside each block, mostly of the same sample."""

    forecasts: tuple[Forecast, ...]
    observed: tuple[float, ...]

    @property
    def covered(self) -> float:
        """Share of the blocks whose interval contains the observed score."""
        pairs = zip(self.forecasts, self.observed, strict=True)
        return sum(forecast.low <= value <= forecast.high for forecast, value in pairs) / len(self.observed)

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why forecasts from these scores are not reliable; empty if the back-test passes."""
        nominal = self.forecasts[0].confidence
        if self.covered >= nominal - MAX_SHORTFALL - 1e-9:
            return ()
        return (
            f"{self.covered:.0%} of the back-test's intervals held, of {nominal:.0%} that should: the largest scores do not go on "
            "as the form of the tail says.",
        )

    @property
    def reliable(self) -> bool:
        """Whether the back-test supports the forecasts."""
        return not self.reasons


def forecast_largest(
    scores: torch.Tensor,
    sizes: Sequence[int],
    confidence: float = 0.95,
    seed: int = 0,
) -> list[Forecast]:
    """
    Extrapolates the largest score to larger numbers of samples, from the √N largest, at least 10.

    Args:
        scores (`torch.Tensor` of shape `(N,)`):
            Scores of independent samples, high for bad outputs: −r of completions of the policy, or −log(−log P(bad)) of
            prompts (Jones et al., 2025).
        sizes (`Sequence[int]`): Numbers of samples to forecast for, such as 10³ to 10⁹.
        confidence (`float`, *optional*, defaults to `0.95`): Nominal coverage of the intervals.
        seed (`int`, *optional*, defaults to `0`): Seed of the simulation behind them.

    Raises:
        `ValueError`: If scores are not finite, too few or all equal at the end ([`NoForecastError`]), or
            another argument is out of range.
    """
    values = scores.detach().double().cpu().numpy()
    count = max(_LEAST, math.isqrt(values.size))
    if values.ndim != 1 or not np.isfinite(values).all():
        raise ValueError("`scores` must be one axis of finite numbers; clamp or leave out the others.")
    if count >= values.size:
        raise NoForecastError(f"{values.size} scores are too few for a forecast, which needs {count + 1}; give more.")
    if not sizes or not all(1 <= size < math.inf for size in sizes):
        raise ValueError(f"`sizes={sizes}` must hold numbers of samples from 1 up, and finite.")
    check_share("confidence", confidence)
    ordered = np.sort(values)
    threshold = ordered[-count - 1]
    excesses = ordered[-count:] - threshold
    if excesses.mean() == 0:
        raise NoForecastError(
            f"The {count + 1} largest scores are all {threshold}: there is no slope to extrapolate. Scores may have reached "
            "their upper end; otherwise give scores with fewer ties."
        )
    rng = np.random.default_rng(seed)
    # 2 · sum / scale is chi-squared with twice as many degrees of freedom as excesses
    scale = excesses.sum() / rng.gamma(count, size=_DRAWS)  # (D,)
    rate = rng.gamma(count + 1, size=_DRAWS) / values.size  # P(score > threshold)
    chance = np.log(rng.uniform(size=_DRAWS))
    forecasts = []
    for size in sizes:
        survival = -np.expm1(chance / size)  # P(score > largest of `size`)
        beyond = threshold - scale * np.log(np.minimum(survival / rate, 1.0))
        # Below the threshold, quantiles of the scores themselves
        rank = np.clip(np.ceil(survival * values.size).astype(int), 1, values.size)
        largest = np.where(survival < rate, beyond, np.minimum(ordered[-rank], threshold))
        low, middle, high = np.quantile(largest, [(1 - confidence) / 2, 0.5, (1 + confidence) / 2])
        forecasts.append(Forecast(size, float(middle), float(low), float(high), confidence, size / values.size))
    return forecasts


def back_test(scores: torch.Tensor, confidence: float = 0.95, seed: int = 0) -> BackTest:
    """Forecasts from each tenth of the shuffled scores for all the others, to compare with their largest score. The
    arguments are those of [`forecast_largest`]. Raises `ValueError` as it does for a tenth, except for equal scores."""
    needed = _LEAST * (1 + _LEAST)
    if scores.ndim == 1 and len(scores) < needed:
        raise NoForecastError(f"{len(scores)} scores are too few for a back-test, which needs {needed}; give more.")
    order = torch.randperm(len(scores), generator=torch.Generator().manual_seed(seed))
    blocks = scores.detach().cpu()[order].tensor_split(_LEAST)
    forecasts, observed = [], []
    for index, block in enumerate(blocks):
        others = torch.cat([*blocks[:index], *blocks[index + 1 :]])
        try:
            forecasts += forecast_largest(block, [len(others)], confidence, seed + index)
        except NoForecastError:
            nan = math.nan
            forecasts.append(Forecast(len(others), nan, nan, nan, confidence, len(others) / len(block)))
        observed.append(float(others.max()))
    return BackTest(tuple(forecasts), tuple(observed))
