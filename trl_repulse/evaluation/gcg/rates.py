"""
Success rates and their intervals. Numbers in, numbers out.

Axis letters: M targets, N samples of a target.
"""

from collections.abc import Callable, Sequence
from math import comb, floor

import numpy as np
from scipy import stats

from ..tails import Estimate


NOTHING = Estimate(np.nan, np.nan, np.nan, 0)


def success_at_k(successes: int, samples: int, k: int) -> float:
    """
    Probability that at least one of `k` samples, taken from those drawn without replacement, is a success.

    It does not depend on how many were drawn in expectation, so that runs with different numbers of samples compare
    (Chen et al. 2021, arXiv 2107.03374, equation 1): 1 − C(n − c, k) / C(n, k).

    Args:
        successes (`int`):
            c, successes among the samples.
        samples (`int`):
            n, samples drawn.
        k (`int`):
            Samples that an attacker may draw; at most `samples`.

    Returns:
        `float`: a probability.

    Raises:
        `ValueError`: If `k` is not from 1 to `samples`, or there are more successes than samples.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"`k={k}` must be from 1 to the {samples} samples of a target; draw more, or lower it.")
    if not 0 <= successes <= samples:
        raise ValueError(f"{successes} successes of {samples} samples are impossible.")
    return 1 - comb(samples - successes, k) / comb(samples, k)


def wilson_interval(successes: int, trials: int, level: float = 0.95) -> Estimate:
    """
    A rate with Wilson's score interval.

    Args:
        successes (`int`):
            Successes.
        trials (`int`):
            Independent trials.
        level (`float`, *optional*, defaults to `0.95`):
            Coverage.

    Returns:
        [`~trl_repulse.evaluation.tails.Estimate`]: the rate; NaN without trials.
    """
    if trials == 0:
        return NOTHING
    interval = stats.binomtest(successes, trials).proportion_ci(confidence_level=level, method="wilson")
    return Estimate(successes / trials, float(interval.low), float(interval.high), trials)


def lower_tail_mean(values: Sequence[float], share: float) -> float:
    """
    Conditional value at risk: the mean of the lowest share of values.

    Where the share is not a whole number of values, the last one counts in part (Rockafellar and Uryasev 2002).

    Args:
        values (`Sequence[float]`):
            Values.
        share (`float`):
            Share of them, above 0 and at most 1.

    Returns:
        `float`

    Raises:
        `ValueError`: If there are no values or the share is out of range.
    """
    if not 0 < share <= 1:
        raise ValueError(f"The share {share} must be above 0 and at most 1.")
    if len(values) == 0:
        raise ValueError("There are no values to take a mean of.")
    ordered, size = np.sort(np.asarray(values, dtype=float)), share * len(values)
    whole = min(floor(size), len(values) - 1)
    return float((ordered[:whole].sum() + (size - whole) * ordered[whole]) / size)


def bootstrap_over_targets(
    targets: Sequence,
    statistic: Callable[[list], float],
    level: float = 0.95,
    resamples: int = 1000,
    seed: int = 0,
) -> Estimate:
    """
    A statistic with the percentile interval of a bootstrap that draws whole targets, since samples of one target are
    not independent.

    Args:
        targets (`Sequence`):
            Data of each target, M of them.
        statistic (`Callable`):
            Number of a list of such data.
        level (`float`, *optional*, defaults to `0.95`):
            Coverage.
        resamples (`int`, *optional*, defaults to `1000`):
            Draws of M targets.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the draws.

    Returns:
        [`~trl_repulse.evaluation.tails.Estimate`]: NaN without targets; without an interval for one target alone.
    """
    if len(targets) == 0:
        return NOTHING
    value = statistic(list(targets))
    if len(targets) == 1:
        return Estimate(value, np.nan, np.nan, 1)
    result = stats.bootstrap(
        (np.arange(len(targets)),),
        lambda index: statistic([targets[i] for i in index]),
        vectorized=False,
        confidence_level=level,
        n_resamples=resamples,
        method="percentile",
        rng=np.random.default_rng(seed),
    )
    interval = result.confidence_interval
    return Estimate(value, float(interval.low), float(interval.high), len(targets))
