"""Estimates of the lower tail of a reward, with intervals, and intervals over training seeds and prompts.

Legend: P prompts, N completions per prompt, n = P·N samples, S seeds (training runs).

Rewards have shape (P, N): N independent completions of each of P fixed prompts. Estimates are for a completion of a prompt
chosen uniformly among the P.

A plain percentile bootstrap over five seeds covers some 83 % where it claims 95 %: its variance is too small by (n − 1)/n, and it uses
normal quantiles. Intervals over seeds take the bootstrap's variances, one per source of variation, divided by (n − 1)/n, and Student's
quantile at Satterthwaite's (1946) degrees of freedom. The variances are those of the analysis of variance, so nothing is drawn.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import beta, hypergeom, quantile_test
from scipy.stats import f as f_distribution
from scipy.stats import t as student_t

from .._numbers import is_bad


MIN_TAIL = 100  # fewest samples in the tail for an interval of CVaR
MIN_BELOW = 10  # fewest of them below the quantile, since the others have no spread
LARGEST = 1e60  # largest reward, so that fourth powers have finite sums; its inverse is the smallest standard error


@dataclass(frozen=True)
class Estimate:
    """An estimate, the ends of its interval (infinite where the samples give no bound), and the number of samples
    behind it: those below the threshold, in the tail, or all."""

    value: float
    low: float
    high: float
    samples: float


def prob_below(rewards: np.ndarray, threshold: float, confidence: float = 0.95) -> Estimate:
    """
    P(r < threshold), with the exact interval of Clopper and Pearson (1934). `samples` are those below the threshold.

    With no sample below the threshold, the upper end is 3.7 / n for 95 %. With several prompts the interval is conservative, since a sum of
    binomial counts varies less than one binomial count of the same mean. Here and below, raises `ValueError` if an argument is out of
    range.

    Args:
        rewards (`numpy.ndarray` of shape `(P, N)`): Rewards.
        threshold (`float`): η, in units of reward; a reward equal to it is not below it.
        confidence (`float`, *optional*, defaults to `0.95`): Nominal coverage, here and below.
    """
    rewards = _checked(rewards, confidence)
    if math.isnan(threshold):
        raise ValueError("`threshold` is NaN; give a reward.")
    count = int(is_bad(rewards, threshold).sum())
    return Estimate(count / rewards.size, *clopper_pearson(count, rewards.size - count, confidence), count)


def quantile(rewards: np.ndarray, level: float, confidence: float = 0.95) -> Estimate:
    """
    The smallest reward that at least a share `level`, in (0, 1), of the samples does not exceed, with an interval
    between two order statistics. `samples` is its rank.

    The number of samples below the true quantile is binomial, and quantiles of that distribution are the ranks that
    bound the interval. Coverage is at least nominal. It is higher with several prompts (see [`prob_below`]) and with
    ties. Where there are too few samples for a rank, that end is infinite.
    """
    rewards = _checked(rewards, confidence)
    check_share("level", level)
    rank = max(math.ceil(level * rewards.size - 1e-9), 1)  # the product of a whole rank may be rounded up
    value = float(np.partition(rewards, rank - 1, axis=None)[rank - 1])
    low, high = map(float, quantile_test(rewards.ravel(), p=level).confidence_interval(confidence))
    return Estimate(value, -math.inf if math.isnan(low) else low, math.inf if math.isnan(high) else high, rank)


def mean(rewards: np.ndarray, confidence: float = 0.95) -> Estimate:
    """Mean reward, with an interval for a sample stratified by prompt: Student's, corrected for skewness (Hall, 1992).
    Both ends are infinite if all samples of each prompt are equal."""
    rewards = _checked(rewards, confidence)
    return Estimate(float(rewards.mean()), *skewed_interval(rewards, confidence), rewards.size)


def cvar(rewards: np.ndarray, level: float, confidence: float = 0.95) -> Estimate:
    """
    Conditional value at risk: the mean reward of the worst share `level`, in (0, 1), of completions. `samples` is level·n.

    The tail is the lowest level·n samples, the last one counted in part. The interval is that of [`mean`] for the influence values
    q − (q − r)₊ / level, with q the empirical quantile. With fewer than [`MIN_TAIL`] samples in the tail, both ends are infinite, since no
    interval tried had its nominal coverage, and the estimate is biased upwards. If fewer than [`MIN_BELOW`] of them lie below the quantile,
    because of ties, there is no lower end, and the upper end is the quantile's.
    """
    rewards = _checked(rewards, confidence)
    check_share("level", level)
    influence = tail_influence(rewards, level)
    tail = level * rewards.size
    if tail < MIN_TAIL:
        return Estimate(float(influence.mean()), -math.inf, math.inf, tail)
    if (influence < influence.max()).sum() < MIN_BELOW:  # then the estimate is (almost) the quantile
        return Estimate(float(influence.mean()), -math.inf, quantile(rewards, level, confidence).high, tail)
    return Estimate(float(influence.mean()), *skewed_interval(influence, confidence), tail)


def success_at(rewards: np.ndarray, threshold: float, k: int, confidence: float = 0.95) -> Estimate:
    """
    ASR@k: the share of behaviours for which at least one of k attempts, from 1 to N, has a score under `threshold`, without bias from
    all N attempts. `samples` are the successes.

    The estimate of a behaviour with c successes is 1 − C(N − c, k) / C(N, k), as pass@k (Chen et al. 2021, arXiv 2107.03374). The
    interval is that of [`mean`] for its jackknife pseudo-values, widened below by the exact interval of one attempt; with no
    success, only successes, or fewer than 2·k attempts, it follows from that interval alone. It is for these behaviours.
    """
    at_one, size = prob_below(rewards, threshold, confidence), rewards.shape[1]
    if not 1 <= k <= size:
        raise ValueError(f"`k={k}` must be from 1 to {size}, the number of completions of each prompt.")
    if k == 1:
        return at_one
    bad = is_bad(rewards, threshold)
    count = bad.sum(axis=1, keepdims=True)
    broken = 1 - hypergeom.pmf(0, size, count, k)  # (P, 1)
    value = float(broken.mean())
    highest = 1 - (1 - at_one.high) ** k  # the largest share of any behaviours with that mean
    low = high = math.inf
    if 0 < at_one.value < 1 and size >= 2 * k:
        left_out = (1 - hypergeom.pmf(0, size - 1, count - each, k) for each in (1, 0))  # a success or another attempt
        low, high = skewed_interval(size * broken - (size - 1) * np.where(bad, *left_out), confidence)
    if math.isinf(low):
        return Estimate(value, at_one.low, highest, at_one.samples)
    # Behaviours that nearly always break hide their variance: the lower end is also one of rates that are all too high
    lowest = float((1 - (1 - bad.mean(axis=1) * at_one.low / at_one.value) ** k).mean())
    return Estimate(value, max(min(low, lowest), 0.0), min(high, 1.0), at_one.samples)


def tail_influence(rewards: np.ndarray, level: float) -> np.ndarray:
    """q − (q − r)₊ / level, of the rewards' shape: its mean is the sample's CVaR, and its spread that of the estimate to first order."""
    rank = max(math.ceil(level * rewards.size - 1e-9), 1)
    q = np.partition(rewards, rank - 1, axis=None)[rank - 1]
    return q - np.maximum(q - rewards, 0.0) / level


def skewed_interval(values: np.ndarray, confidence: float) -> tuple[float, float]:
    """Interval for a mean: Student's, moved towards the longer tail (Hall, 1992). Values are (P, N); with N = 1,
    prompts count as drawn too. Ends are infinite where all values of each prompt are (all but) equal."""
    if values.shape[1] == 1:
        values = values.T
    prompts, samples = values.shape
    value = float(values.mean())
    if samples == 1 or (values == values[:, :1]).all():
        return -math.inf, math.inf
    deviations = values - values.mean(axis=1, keepdims=True)
    error = math.sqrt((deviations**2).sum() / (samples - 1) / samples) / prompts
    if error < 1 / LARGEST:
        return -math.inf, math.inf
    skew = float((deviations**3).mean(axis=1).sum() / (samples**2 * prompts**3)) / error**3  # skewness of the mean

    def inverse(z: float) -> float:
        """Hall's inverse transformation of a Student statistic."""
        return z if abs(skew) < 1e-9 else 3 / skew * (float(np.cbrt(1 + skew * (z - skew / 6))) - 1)

    z = float(student_t.isf((1 - confidence) / 2, prompts * (samples - 1)))
    return value - error * inverse(z), value - error * inverse(-z)


def clopper_pearson(successes: float, failures: float, confidence: float) -> tuple[float, float]:
    """Exact interval of a proportion (Clopper and Pearson, 1934). Counts need not be whole; at least one is above 0."""
    miss = (1 - confidence) / 2
    low = float(beta.ppf(miss, successes, failures + 1)) if successes > 0 else 0.0
    return low, float(beta.isf(miss, successes + 1, failures)) if failures > 0 else 1.0


def _checked(rewards: np.ndarray, confidence: float) -> np.ndarray:
    """Rewards as float64 (P, N). Raises `ValueError` if they, or the coverage, are out of range."""
    rewards = np.asarray(rewards, dtype=np.float64)
    if rewards.ndim != 2 or rewards.size == 0:
        raise ValueError(f"`rewards` has shape {rewards.shape}; give one row a prompt and at least one sample each.")
    if not np.isfinite(rewards).all():
        raise ValueError("`rewards` holds values that are not finite; fix the reward before estimating its tail.")
    if np.abs(rewards).max() > LARGEST:
        raise ValueError(f"`rewards` holds values beyond {LARGEST:g}, whose powers overflow; scale the reward down.")
    check_share("confidence", confidence)
    return rewards


def check_sizes(**sizes: int) -> None:
    """Raises `ValueError` if a size or number, named as in the message, is less than 1."""
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"`{name}={size}` must be at least 1.")


def check_share(name: str, value: float) -> None:
    """Raises `ValueError` if a level or a nominal coverage is not between 0 and 1."""
    if not 0 < value < 1:
        raise ValueError(f"`{name}={value}` must be between 0 and 1.")


POOLING_LEVEL = 0.35  # of the F test for differences between seeds, or prompts


def combined_interval(
    value: float, components: Sequence[tuple[float, float]], confidence: float = 0.95
) -> tuple[float, float]:
    """Student's interval for a value whose variance is a sum of estimated components, each with its variance
    (subtracted if negative) and degrees of freedom. The ends are infinite if a component has none."""
    if not components or any(freedom <= 0 for _, freedom in components):
        return -math.inf, math.inf
    variance = sum(part for part, _ in components)
    spread = sum(part**2 / freedom for part, freedom in components)
    if variance <= 0 or spread == 0:
        return value, value
    half = float(student_t.isf((1 - confidence) / 2, variance**2 / spread)) * math.sqrt(variance)
    return value - half, value + half


def crossed_interval(cells: np.ndarray, confidence: float = 0.95) -> tuple[float, float]:
    """
    Interval for the mean over seeds and prompts, both taken as random draws, from the mean of each seed's samples of each prompt, (S, P).

    The variance is that between seeds plus that between prompts minus that of single cells, which both include. If an F test finds that
    seeds or prompts differ no more than single cells do, they are pooled (Bancroft, 1964). Coverage is lower with few seeds or prompts
    whose distribution is far from normal. With one seed or one prompt, the interval is over the other alone. Two of either cannot be tested
    and raise `ValueError` beside several of the other: take means, `cells.mean(axis=1, keepdims=True)`, for an interval over seeds for
    these prompts. The ends are infinite for a single cell.
    """
    seeds, prompts = cells.shape
    if min(seeds, prompts) == 2:
        raise ValueError(
            f"`cells` has {seeds} seeds and {prompts} prompts; two of either tell too little. Take means over the prompts "
            "(`cells.mean(axis=1, keepdims=True)`) for an interval over seeds, or over the seeds for one over prompts."
        )
    value = float(cells.mean())
    by_seed, by_prompt = cells.mean(axis=1) - value, cells.mean(axis=0) - value
    residual = cells - value - by_seed[:, None] - by_prompt  # not explained by either
    components = []
    if seeds > 1:
        components.append((float((by_seed**2).sum()) / (seeds * (seeds - 1)), seeds - 1))
    if prompts > 1:
        components.append((float((by_prompt**2).sum()) / (prompts * (prompts - 1)), prompts - 1))
    if seeds > 1 and prompts > 1:
        freedom = (seeds - 1) * (prompts - 1)
        cell = float((residual**2).sum()) / (seeds * prompts * freedom)
        limits = [cell * float(f_distribution.isf(POOLING_LEVEL, df, freedom)) for _, df in components]
        different = [each for each, limit in zip(components, limits, strict=True) if each[0] > limit]
        if len(different) == 2:
            components.append((-cell, freedom))
        elif len(different) == 1:
            components = different
        else:  # no difference between seeds or prompts
            total = seeds * prompts - 1
            components = [(sum(var * df for var, df in [*components, (cell, freedom)]) / total, total)]
    return combined_interval(value, components, confidence)
