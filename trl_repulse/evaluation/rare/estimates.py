"""
P(bad) and CVaR of a policy from a [`~trl_repulse.evaluation.rare.mixture.MixtureSample`], with intervals.

Axis letters: P prompts, N completions per prompt, K components.
"""

import math
from bisect import bisect_left
from dataclasses import dataclass, replace
from typing import Literal

import torch
from scipy.stats import gamma

from ..tails import Estimate, check_share, clopper_pearson
from .mixture import MixtureSample, stratified_mean
from .verdict import Diagnostics, measure


@dataclass(frozen=True)
class RareEstimate(Estimate):
    """
    An estimate (a probability, or a reward), its interval, and whether to trust them. `samples` are the completions in the tail.

    Args:
        confidence (`float`):
            Nominal coverage of the interval.
        standard_error (`float`):
            Estimated standard deviation of `value`.
        diagnostics ([`~trl_repulse.evaluation.rare.verdict.Diagnostics`]):
            What the estimate rests on.
        bounds (`tuple[float, float]`, *optional*):
            For a probability, bounds that hold whatever the proposals miss: the lower end of the interval, and the upper end
            of Clopper and Pearson's interval for the policy's own draws.
    """

    confidence: float
    standard_error: float
    diagnostics: Diagnostics
    bounds: tuple[float, float] | None = None

    @property
    def reliable(self) -> bool:
        """Whether there is no reason against the interval."""
        return not self.reasons

    @property
    def verdict(self) -> Literal["reliable", "bounds", "unreliable"]:
        """`"bounds"` if the interval is not reliable but `bounds` are."""
        if self.reliable:
            return "reliable"
        if self.bounds is None or self.bounds[0] > self.bounds[1] or self.diagnostics.contradicted:
            return "unreliable"
        return "bounds"

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why the estimate is not reliable; empty if it is."""
        return self.diagnostics.reasons()

    @property
    def next_steps(self) -> tuple[str, ...]:
        """How to make it reliable; empty if it is."""
        return self.diagnostics.next_steps()


def prob_bad(sample: MixtureSample, threshold: float, confidence: float = 0.95) -> RareEstimate:
    """
    P(r < threshold) under the policy, the mean over prompts.

    The interval treats the weighted count of bad completions as a multiple of a Poisson count, as Fay and Feuer (1997) do for
    standardised rates, but with the stratified variance. Without a bad completion, the upper end is that of Clopper and Pearson
    for the policy's own draws, or 1 without these. For prompts whose outputs are mostly bad, only the policy's own draws are
    used, and the good ones are counted.

    Args:
        sample ([`~trl_repulse.evaluation.rare.mixture.MixtureSample`]):
            Completions of policy and proposals.
        threshold (`float`):
            η; a reward equal to it is not bad.
        confidence (`float`, *optional*, defaults to `0.95`):
            Nominal coverage of the interval.

    Returns:
        [`RareEstimate`]: a probability.

    Raises:
        `ValueError`: If `confidence` is not between 0 and 1, or `threshold` is NaN.
    """
    check_share("confidence", confidence)
    if math.isnan(threshold):
        raise ValueError("`threshold` is NaN; give the reward under which an output is bad.")
    bad = sample.rewards < threshold
    value, low, high, error, log_w = _probability(sample, bad, confidence)
    diagnostics = measure(sample, log_w.masked_fill(~bad, -torch.inf))
    own = bad[:, : sample.counts[0]]
    bounds = low, clopper_pearson(int(own.sum()), int((~own).sum()), confidence)[1]
    return RareEstimate(value, low, high, diagnostics.tail_samples, confidence, error, diagnostics, bounds)


def _probability(
    sample: MixtureSample, event: torch.Tensor, confidence: float
) -> tuple[float, float, float, float, torch.Tensor]:
    """
    Probability of an event (P, N) under the policy, the ends of its interval, its standard error, and the log-weights used.

    For prompts where the event is likelier than not, only the policy's own draws are used, and the complement is counted, for
    which proposals are not made. The ends are those of the difference of two counts with intervals (Zou and Donner, 2008).
    """
    own, (prompts, completions) = sample.counts[0], event.shape
    share = sample.log_w.masked_fill(~event, -torch.inf).logsumexp(dim=1).exp() / completions  # (P,)
    likely = (share > 0.5) & (own > 0)
    log_w = sample.log_w.masked_fill(likely[:, None], -torch.inf)
    log_w[:, :own] = log_w[:, :own].masked_fill(likely[:, None], math.log(completions / own) if own else 0.0)
    rare = _count(log_w.masked_fill(~event | likely[:, None], -torch.inf), sample.counts, own, ~likely, confidence)
    rest = event.new_zeros(prompts, own).double().masked_fill(event[:, :own] | ~likely[:, None], -torch.inf)
    left = _count(rest, (own,), own, likely, confidence) if own else (0.0,) * 4
    whole = float(likely.double().mean())
    value = whole + rare[0] - left[0]
    low = value - math.hypot(rare[0] - rare[1], left[2] - left[0])
    high = value + math.hypot(rare[2] - rare[0], left[0] - left[1])
    return min(value, 1.0), min(max(low, 0.0), 1.0), min(high, 1.0), math.hypot(rare[3], left[3]), log_w


def _count(
    log_x: torch.Tensor, counts: tuple[int, ...], own: int, prompts: torch.Tensor, confidence: float
) -> tuple[float, float, float, float]:
    """
    Mean of weighted counts over all prompts, of which only `prompts` have any, with an interval and the standard error. With
    a count of 0, the upper end is exact for the policy's own draws.
    """
    if float(log_x.max()) == -math.inf:
        some = int(prompts.sum())
        return 0.0, 0.0, clopper_pearson(0, own * some, confidence)[1] * some / len(prompts), 0.0
    return _count_interval(log_x, counts, confidence)


def cvar(sample: MixtureSample, level: float, confidence: float = 0.95) -> RareEstimate:
    """
    Mean of the lowest rewards that have probability `level` under the policy, over prompts and completions together.

    CVaR = max over t of t − E[(t − r)₊] / level (Rockafellar and Uryasev, 2000), at the weighted quantile t. The interval is
    that of E[(t − r)₊] for fixed t. If no reward is below t, there is no lower end, and the upper one is the quantile's.

    Args:
        sample ([`~trl_repulse.evaluation.rare.mixture.MixtureSample`]):
            Completions of policy and proposals.
        level (`float`):
            Probability of the tail, between 0 and 1.
        confidence (`float`, *optional*, defaults to `0.95`):
            Nominal coverage of the interval.

    Returns:
        [`RareEstimate`]: a reward.

    Raises:
        `ValueError`: If `level` or `confidence` is not between 0 and 1.
    """
    check_share("confidence", confidence)
    check_share("level", level)
    log_level = math.log(level)
    rewards, order = sample.rewards.double().flatten().sort(stable=True)
    cumulative = sample.log_w.flatten()[order].logcumsumexp(dim=0) - math.log(order.numel())
    quantile = rewards[min(int((cumulative < log_level).sum()), len(rewards) - 1)]
    log_depth = (quantile - sample.rewards.double()).clamp(min=0).log() - log_level  # (P, N)
    log_x = sample.log_w + log_depth
    in_tail = sample.log_w.masked_fill(sample.rewards > quantile, -torch.inf)
    diagnostics = measure(sample, in_tail, log_depth)
    one, other = diagnostics.halves
    diagnostics = replace(diagnostics, halves=(float(quantile) - one, float(quantile) - other))
    if float(log_x.max()) == -math.inf:  # no reward below the quantile
        value, high = float(quantile), _quantile_bound(sample, level, confidence)
        return RareEstimate(value, -math.inf, high, diagnostics.tail_samples, confidence, 0.0, diagnostics)
    *numbers, error = _count_interval(log_x, sample.counts, confidence)
    value, high, low = (float(quantile) - number for number in numbers)
    return RareEstimate(value, low, high, diagnostics.tail_samples, confidence, error, diagnostics)


def _times_exp(number: float, shift: float) -> float:
    """number · e^shift, where e^shift alone may overflow."""
    try:
        return number * math.exp(shift)
    except OverflowError:
        return math.exp(math.log(number) + shift) if number else 0.0


def _quantile_bound(sample: MixtureSample, level: float, confidence: float) -> float:
    """Upper end for the quantile: the lowest reward whose lower interval end of P(r ≤ reward) reaches `level`."""
    rewards = sample.rewards.unique()  # in rising order

    def surely(index: int) -> bool:
        return _probability(sample, sample.rewards <= rewards[index], confidence)[1] >= level

    first = bisect_left(range(len(rewards)), True, key=surely)
    return float(rewards[first]) if first < len(rewards) else math.inf


def _count_interval(
    log_x: torch.Tensor, counts: tuple[int, ...], confidence: float
) -> tuple[float, float, float, float]:
    """Mean of contributions x (P, N), the ends of its interval, and its standard error."""
    shift = float(log_x.max())
    mean, variance = stratified_mean((log_x - shift).exp(), counts)
    largest = 1 / log_x.numel()
    low_variance, high_mean, high_variance = max(variance, largest**2), mean + largest, variance + largest**2
    tail = (1 - confidence) / 2
    lower = gamma.ppf(tail, mean**2 / low_variance, scale=low_variance / mean)
    upper = gamma.isf(tail, high_mean**2 / high_variance, scale=high_variance / high_mean)
    mean, low, high, error = (_times_exp(float(each), shift) for each in (mean, lower, upper, variance**0.5))
    return mean, low, high, error
