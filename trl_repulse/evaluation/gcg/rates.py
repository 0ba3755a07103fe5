"""
Success rates and tails over targets, with intervals.

Axis letters: M targets, N samples of a target.
"""

from collections.abc import Sequence
from math import ceil, comb, sqrt

import numpy as np
from scipy import stats

from ..tails import MIN_TAIL, Estimate, clopper_pearson, mean, tail_influence


MIN_TAIL_TARGETS = 10  # fewest samples in the tail for an interval of CVaR, in targets
NOTHING = Estimate(np.nan, np.nan, np.nan, 0)


def success_at_k(successes: int, samples: int, k: int) -> float:
    """
    Probability that at least one of `k` samples, drawn without replacement from n with c successes, is a success:
    1 − C(n − c, k) / C(n, k) (Chen et al. 2021, arXiv 2107.03374, equation 1). Unbiased for any n. Raises `ValueError` if `k` is
    not from 1 to n, or c not from 0 to n.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"`k={k}` must be from 1 to the {samples} samples of a target; draw more, or lower it.")
    if not 0 <= successes <= samples:
        raise ValueError(f"{successes} successes of {samples} samples are impossible.")
    return 1 - comb(samples - successes, k) / comb(samples, k)


def wilson_interval(successes: int, trials: int, level: float = 0.95) -> Estimate:
    """The rate of successes in independent trials with Wilson's score interval; NaN without trials."""
    if trials == 0:
        return NOTHING
    interval = stats.binomtest(successes, trials).proportion_ci(confidence_level=level, method="wilson")
    return Estimate(successes / trials, float(interval.low), float(interval.high), trials)


def mean_over_targets(values: Sequence[float], trials: Sequence[float], level: float = 0.95) -> Estimate:
    """
    Mean of rates over targets drawn from a population, with the interval of Korn and Graubard (1998) adapted to few targets.

    Theirs is Clopper and Pearson's with an effective number of trials n = p(1 − p) / v · (t(Σ trials − 1) / t(M − 1))², where v
    is the variance of the mean, estimated from the spread of the targets. Here n is at least M, since rates in [0, 1] spread
    most if they are all 0 or 1, and at most the number of trials.

    Departure from the source: with few bad targets v is unreliable, as the worst ones are probably not among them. So 1 / n is
    a mean of 1 / M and theirs, with weights 1 / K and 1 − 1 / K. K is the smaller of Kish's (1965) effective numbers
    (Σx)² / Σx² of targets that contribute to the rate and to its complement. Without spread, n is M.

    Args:
        values, trials (`Sequence[float]`):
            Rate of each of the M targets, in [0, 1], and the independent trials behind it, at least 1.
        level (`float`, *optional*, defaults to `0.95`):
            Nominal coverage.

    Returns:
        [`~trl_repulse.evaluation.tails.Estimate`]: a rate, NaN without targets; `samples` is M.

    Raises:
        `ValueError`: If a rate is not in [0, 1], or has less than one trial.
    """
    rates, count = np.asarray(values, dtype=float), len(values)
    if count == 0:
        return NOTHING
    if not ((rates >= 0) & (rates <= 1)).all() or len(trials) != count or not min(trials) >= 1:
        raise ValueError("Each target needs a rate from 0 to 1 and at least one trial.")
    rate, size = float(rates.mean()), float(count)
    if np.ptp(rates) > 0:
        most = count**2 / float((1 / np.asarray(trials, dtype=float)).sum())
        miss = (1 - level) / 2
        seen = rate * (1 - rate) / (float(rates.var(ddof=1)) / count)
        seen *= float(stats.t.isf(miss, most - 1) / stats.t.isf(miss, count - 1)) ** 2
        contributing = min(float(x.sum() ** 2 / (x**2).sum()) for x in (rates, 1 - rates))
        size = 1 / (1 / contributing / count + (1 - 1 / contributing) / min(max(seen, count), most))
    return Estimate(rate, *clopper_pearson(rate * size, (1 - rate) * size, level), count)


def paired_difference(gained: int, lost: int, pairs: int, level: float = 0.95) -> Estimate:
    """
    Difference of two success rates on the same targets.

    It is the difference of the shares of pairs where only the second, and only the first, is a success. The ends of Clopper and
    Pearson's intervals of the shares are combined with the correlation of two counts of one multinomial (Newcombe 1998,
    Statistics in Medicine 17, 2635, method 10, but with other intervals; Zou 2007).

    Args:
        gained, lost, pairs (`int`):
            Pairs where only the second, or only the first, is a success, and all pairs.
        level (`float`, *optional*, defaults to `0.95`):
            Nominal coverage.

    Returns:
        [`~trl_repulse.evaluation.tails.Estimate`]: second rate minus the first, in [−1, 1]; NaN without pairs.

    Raises:
        `ValueError`: If a count is negative, or more pairs disagree than there are.
    """
    if gained < 0 or lost < 0 or gained + lost > pairs:
        raise ValueError(f"{gained} and {lost} of {pairs} pairs cannot disagree.")
    if pairs == 0:
        return NOTHING
    up, down = gained / pairs, lost / pairs
    (up_low, up_high), (down_low, down_high) = (
        clopper_pearson(share * pairs, (1 - share) * pairs, level) for share in (up, down)
    )
    both = gained * lost
    correlation = -sqrt(both / ((pairs - gained) * (pairs - lost))) if both else 0.0

    def distance(one: float, other: float) -> float:
        return sqrt(one**2 + other**2 - 2 * correlation * one * other)

    low = up - down - distance(up - up_low, down_high - down)
    high = up - down + distance(up_high - up, down - down_low)
    return Estimate(up - down, max(low, -1.0), min(high, 1.0), pairs)


def tail_over_targets(targets: Sequence[Sequence[float]], share: float, level: float = 0.95) -> Estimate:
    """
    Conditional value at risk of all targets' scores, with an interval over targets drawn from a population.

    The estimate is the mean of the lowest share of scores, the last one counted in part (Rockafellar and Uryasev 2002). The
    interval is that of a mean of the targets' influence values, q − (q − r)₊ / share; each end is the wider one of Student's and
    Hall's (1992, corrected for skewness). It needs [`~trl_repulse.evaluation.tails.MIN_TAIL`] samples in the tail, and at least
    those of [`MIN_TAIL_TARGETS`] whole targets. If no score lies below the quantile, there is no lower end, and the upper one is
    the lowest score that, by [`mean_over_targets`], at least a share `share` of scores does not exceed.

    Args:
        targets (`Sequence[Sequence[float]]`), share (`float`):
            Scores of each of the M targets, and the share of them in the tail, above 0 and at most 1.
        level (`float`, *optional*, defaults to `0.95`):
            Nominal coverage.

    Returns:
        [`~trl_repulse.evaluation.tails.Estimate`]: a score, NaN without targets; an end is NaN where there is none. `samples`
        are those in the tail, rounded up.

    Raises:
        `ValueError`: If the share is out of range or a target has no scores.
    """
    if not 0 < share <= 1:
        raise ValueError(f"The share {share} must be above 0 and at most 1.")
    if len(targets) == 0:
        return NOTHING
    if any(len(scores) == 0 for scores in targets):
        raise ValueError("A target has no scores; leave it out.")
    scores, sizes = np.concatenate([np.asarray(each, dtype=float) for each in targets]), np.array([*map(len, targets)])
    influence, samples = tail_influence(scores, share), ceil(share * len(scores) - 1e-9)
    value = float(influence.mean())
    whole_targets = share * len(scores) ** 2 / float((sizes**2).sum())  # of equal sizes: share · M
    if samples < MIN_TAIL or whole_targets < MIN_TAIL_TARGETS - 1e-9:
        return Estimate(value, np.nan, np.nan, samples)
    if np.ptp(influence) == 0:  # no score is below the quantile
        return Estimate(value, np.nan, _quantile_high(targets, share, level), samples)
    # One value a target, with the estimate as mean and, to first order, the spread of its error
    sums = np.add.reduceat(influence - value, np.cumsum(sizes) - sizes)
    by_target = value + sums * len(sizes) / len(scores)
    if np.ptp(by_target) <= 1e-9 * max(1.0, abs(value)):  # equal targets tell nothing about others
        return Estimate(value, np.nan, np.nan, samples)
    half = float(stats.t.isf((1 - level) / 2, len(sizes) - 1)) * float(by_target.std(ddof=1)) / sqrt(len(sizes))
    skewed = mean(by_target[:, None], level)
    return Estimate(value, min(skewed.low, value - half), max(skewed.high, value + half), samples)


def _quantile_high(targets: Sequence[Sequence[float]], share: float, level: float) -> float:
    """Lowest score that at least a share of scores surely does not exceed; NaN if there is none."""
    sizes = [len(each) for each in targets]
    for score in sorted({x for each in targets for x in each}):
        under = [sum(x <= score for x in each) / len(each) for each in targets]
        if mean_over_targets(under, sizes, level).low >= share:
            return float(score)
    return np.nan
