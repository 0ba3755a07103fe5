"""
How much a sample says about the lower tail: estimates with intervals, from arrays of rewards.

Legend: P prompts, N completions per prompt, n = P·N samples, R bootstrap replicates.

Samples are rewards of shape (P, N): N independent completions of each of P prompts, which are held fixed. All estimates are of
the reward of a completion of a prompt chosen uniformly among the P.
"""

import math
from dataclasses import dataclass

import numpy as np
from scipy.stats import binom, binomtest, norm


REPLICATES = 2_000


@dataclass(frozen=True)
class Estimate:
    """
    An estimate with its interval.

    Args:
        value (`float`):
            The estimate.
        low, high (`float`):
            Ends of the interval; infinite where the samples bound the quantity on one side only.
        samples (`float`):
            Number of samples the estimate rests on: those under the threshold, in the tail, or all.
    """

    value: float
    low: float
    high: float
    samples: float


def prob_below(rewards: np.ndarray, threshold: float, confidence: float = 0.95) -> Estimate:
    """
    P(r < threshold), with the exact interval of Clopper and Pearson (1934).

    Without a sample under the threshold the upper end is still right: 3.7 / n for 95 %. For several prompts the number of
    samples under the threshold is a sum of binomial counts, which varies less than one binomial count of the same mean: the
    interval is then conservative, the more so the more the prompts differ.

    Args:
        rewards (`numpy.ndarray` of shape `(P, N)`):
            Rewards.
        threshold (`float`):
            η, in units of reward; a reward equal to it is not under it.
        confidence (`float`, *optional*, defaults to `0.95`):
            Nominal coverage.

    Returns:
        [`Estimate`]: A probability; `samples` are those under the threshold.

    Raises:
        `ValueError`: If an argument is out of range.
    """
    rewards = _checked(rewards, confidence)
    if math.isnan(threshold):
        raise ValueError("`threshold` is NaN; give a reward.")
    count = int((rewards < threshold).sum())
    interval = binomtest(count, rewards.size).proportion_ci(confidence, "exact")
    return Estimate(count / rewards.size, float(interval.low), float(interval.high), count)


def quantile(rewards: np.ndarray, level: float, confidence: float = 0.95) -> Estimate:
    """
    A quantile of the reward, with an interval between two order statistics.

    The number of samples under the true quantile is binomial, whatever the distribution; its quantiles are the ranks that
    bound the interval. Coverage is at least nominal: above it for several prompts, as for [`prob_below`], and because ranks
    are whole. Where the samples are too few for a rank on one side, that end is infinite.

    Args:
        rewards (`numpy.ndarray` of shape `(P, N)`):
            Rewards.
        level (`float`):
            Level of the quantile, in (0, 1).
        confidence (`float`, *optional*, defaults to `0.95`):
            Nominal coverage.

    Returns:
        [`Estimate`]: A reward, the smallest that at least a share `level` of the samples does not exceed; `samples` are those
        at or below that rank.

    Raises:
        `ValueError`: If an argument is out of range.
    """
    rewards, level = _checked(rewards, confidence), _checked_level(level)
    ordered, n = np.sort(rewards, axis=None), rewards.size
    miss = (1 - confidence) / 2
    # P(B < low) <= miss and P(B >= high) <= miss for the count B ~ Binomial(n, level) of samples below the quantile
    low = int(binom.ppf(miss, n, level))
    high = int(binom.isf(miss, n, level)) + 1
    rank = max(math.ceil(level * n - 1e-9), 1)
    return Estimate(
        float(ordered[rank - 1]),
        float(ordered[low - 1]) if low >= 1 else -math.inf,
        float(ordered[high - 1]) if high <= n else math.inf,
        rank,
    )


def mean(rewards: np.ndarray, confidence: float = 0.95) -> Estimate:
    """
    Mean reward, with the normal interval of a sample stratified by prompt.

    Args:
        rewards (`numpy.ndarray` of shape `(P, N)`):
            Rewards.
        confidence (`float`, *optional*, defaults to `0.95`):
            Nominal coverage.

    Returns:
        [`Estimate`]: A reward; the interval is infinite with one sample a prompt and more than one prompt missing a spread.

    Raises:
        `ValueError`: If an argument is out of range.
    """
    rewards = _checked(rewards, confidence)
    value, error = float(rewards.mean()), math.sqrt(_variance_of_mean(rewards))
    half = norm.isf((1 - confidence) / 2) * error if math.isfinite(error) else math.inf
    return Estimate(value, value - half, value + half, rewards.size)


def _variance_of_mean(values: np.ndarray) -> float:
    """Variance of the mean of (P, N) values, by prompt; prompts of one sample each are taken for draws from all prompts."""
    prompts, samples = values.shape
    if samples > 1:
        return float((values.var(axis=1, ddof=1) / samples).sum() / prompts**2)
    return float(values.var(ddof=1) / prompts) if prompts > 1 else math.inf
