"""
How much a sample says about the lower tail: estimates with intervals, from arrays of rewards.

Legend: P prompts, N completions per prompt, n = P·N samples.

Samples are rewards of shape (P, N): N independent completions of each of P prompts, which are held fixed. All estimates are of
the reward of a completion of a prompt chosen uniformly among the P.
"""

import math
from dataclasses import dataclass

import numpy as np
from scipy.stats import binom, binomtest
from scipy.stats import t as student_t


MIN_TAIL = 100  # samples in the tail below which a CVaR has no interval
MIN_BELOW = 10  # samples of the tail below its quantile, which alone make its spread
LARGEST = 1e290  # reward of which sums and products with a level are numbers still


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
    bound the interval. It is Clopper and Pearson's (1934) read the other way: the rewards η for which theirs of P(r < η) and P(r ≤ η)
    do not leave the level out. As with theirs coverage is at least nominal: above it for several prompts, as for
    [`prob_below`], because ranks are whole, and where many samples share a reward, as an end there holds all of them. Where the samples are too few for a rank on one side, that end is infinite.

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
    rewards = _checked(rewards, confidence)
    check_share("level", level)
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
    Mean reward, with an interval for a sample stratified by prompt.

    The interval is Student's with the correction for skewness of Hall (1992), which moves it towards the longer tail.

    Args:
        rewards (`numpy.ndarray` of shape `(P, N)`):
            Rewards.
        confidence (`float`, *optional*, defaults to `0.95`):
            Nominal coverage.

    Returns:
        [`Estimate`]: A reward. Where all samples of each prompt are alike they say nothing of what others would be, and
        both ends are infinite.

    Raises:
        `ValueError`: If an argument is out of range.
    """
    rewards = _checked(rewards, confidence)
    return Estimate(float(rewards.mean()), *skewed_interval(rewards, confidence), rewards.size)


def cvar(rewards: np.ndarray, level: float, confidence: float = 0.95) -> Estimate:
    """
    Conditional value at risk: the mean reward of the worst share `level` of completions.

    The tail is the lowest level·n samples, the last of them by its fraction. The interval is that of [`mean`] for the
    influence values −(q − r)₊ / level, q the empirical quantile. It needs [`MIN_TAIL`] samples in the tail: with fewer, no
    interval that was tried covers what it claims, and both ends are infinite. The estimate is then biased upwards as well.
    Where fewer than [`MIN_BELOW`] of these lie under the quantile, as many may equal it, they do not bound the CVaR from below; the
    upper end is then the quantile's.

    Args:
        rewards (`numpy.ndarray` of shape `(P, N)`):
            Rewards.
        level (`float`):
            Share of completions in the tail, in (0, 1).
        confidence (`float`, *optional*, defaults to `0.95`):
            Nominal coverage.

    Returns:
        [`Estimate`]: A reward; `samples` is level·n, the number of samples in the tail, not always whole.

    Raises:
        `ValueError`: If an argument is out of range.
    """
    rewards = _checked(rewards, confidence)
    check_share("level", level)
    influence = tail_influence(rewards, level)
    tail = level * rewards.size
    if tail < MIN_TAIL:
        return Estimate(float(influence.mean()), -math.inf, math.inf, tail)
    if (influence < influence.max()).sum() < MIN_BELOW:  # it is the quantile itself where no sample lies below that
        return Estimate(float(influence.mean()), -math.inf, quantile(rewards, level, confidence).high, tail)
    return Estimate(float(influence.mean()), *skewed_interval(influence, confidence), tail)


def tail_influence(rewards: np.ndarray, level: float) -> np.ndarray:
    """
    q − (q − r)₊ / level, whose mean is the CVaR of the sample and whose spread is, to first order, that of the estimate.

    Args:
        rewards (`numpy.ndarray`):
            Rewards, of any shape.
        level (`float`):
            Share of completions in the tail, in (0, 1).

    Returns:
        `numpy.ndarray`: Of the same shape, in units of reward.
    """
    rank = max(math.ceil(level * rewards.size - 1e-9), 1)
    q = np.partition(rewards, rank - 1, axis=None)[rank - 1]
    influence: np.ndarray = q - np.maximum(q - rewards, 0.0) / level
    return influence


def skewed_interval(values: np.ndarray, confidence: float) -> tuple[float, float]:
    """
    Interval for a mean: Student's, moved towards the longer tail (Hall, 1992).

    Args:
        values (`numpy.ndarray` of shape `(P, N)`):
            Values, N of each prompt; with one a prompt, as if prompts were drawn as well.
        confidence (`float`):
            Nominal coverage.

    Returns:
        `tuple[float, float]`: Low and high end, infinite where all values of each prompt are alike.
    """
    if values.shape[1] == 1:
        values = values.T
    prompts, samples = values.shape
    value = float(values.mean())
    if samples == 1 or (values == values[:, :1]).all():
        return -math.inf, math.inf
    deviations = values - values.mean(axis=1, keepdims=True)
    # By a power of two, which changes no digit: cubes of large or small numbers would leave the range of floats
    exponent = math.frexp(float(np.abs(deviations).max()))[1]
    deviations = np.ldexp(deviations, -exponent)
    error = math.sqrt((deviations**2).sum() / (samples - 1) / samples) / prompts
    skew = float((deviations**3).mean(axis=1).sum() / (samples**2 * prompts**3)) / error**3  # of the mean

    def inverse(z: float) -> float:
        """Hall's inverse transformation of a Student statistic."""
        return z if abs(skew) < 1e-9 else 3 / skew * (float(np.cbrt(1 + skew * (z - skew / 6))) - 1)

    z = float(student_t.isf((1 - confidence) / 2, prompts * (samples - 1)))
    error = math.ldexp(error, exponent)
    return value - error * inverse(z), value - error * inverse(-z)


def _checked(rewards: np.ndarray, confidence: float) -> np.ndarray:
    rewards = np.asarray(rewards, dtype=np.float64)
    if rewards.ndim != 2 or rewards.size == 0:
        raise ValueError(f"`rewards` has shape {rewards.shape}; give one row a prompt and at least one sample each.")
    if not np.isfinite(rewards).all():
        raise ValueError("`rewards` holds values that are not finite; fix the reward before estimating its tail.")
    if np.abs(rewards).max() > LARGEST:
        raise ValueError(f"`rewards` holds values beyond {LARGEST:g}, whose sums are none; scale the reward down.")
    check_share("confidence", confidence)
    return rewards


def check_share(name: str, value: float) -> None:
    """
    Refuses a level or a nominal coverage that is no share.

    Args:
        name (`str`):
            Name of the argument, for the message.
        value (`float`):
            Its value.

    Raises:
        `ValueError`: If it is not between 0 and 1.
    """
    if not 0 < value < 1:
        raise ValueError(f"`{name}={value}` must be between 0 and 1.")
