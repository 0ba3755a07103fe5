"""P(bad) and CVaR of a policy from a [`~trl_repulse.evaluation.rare.mixture.MixtureSample`], with intervals, and when not to trust them.

Axis letters: P prompts, N completions per prompt, K components.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from scipy.stats import gamma

from ..._numbers import plain
from ...math.objective import is_below
from ..tails import Estimate, check_share, clopper_pearson
from .mixture import MixtureSample, halves, largest_normalization_error, stratified_mean


MIN_VARIANCE_ESS = 20.0  # effective completions behind the variance
MAX_UNSEEN_SHARE = 0.3  # of the estimate
# Bad outputs that one draw of another component is worth; required if the policy's own draws hold fewer than the next constant
MIN_EFFICIENCY = 0.05
ENOUGH_OF_THE_POLICYS = 100.0
MAX_ERROR = 4.0  # standard errors
ENOUGH = 50.0  # effective completions of a tail that say how it is drawn
RARE = 0.1  # the most probable tail that stands for a rarer one
AFFORDABLE = 100  # factor on the number of draws up to which more draws are advised rather than training


@dataclass(frozen=True)
class Diagnostics:
    """
    Diagnostics of an estimate. The tail is the bad completions, or those up to the quantile t of a CVaR. A completion
    contributes x = w · v, its weight times its depth v, which is 1, or t − r for a CVaR.

    Args:
        tail_samples (`int`): Completions in the tail.
        ess, max_weight_share (`float`): Effective number of completions, (Σx)² / Σx², and the largest share of Σx of a single one.
        variance_ess (`float`): The same behind the variance, (Σx²)² / Σx⁴. If it is small, the interval is unreliable.
        unseen_share (`float`):
            Largest share of the estimate that the other components could miss, with 95 % probability, if the policy's own
            draws do not show it: 3 / `expected`, at most 1; 0 without others.
        expected (`float`): Expected number of bad outputs among the policy's own draws: draws of the policy × (E[v])² / E[v²].
        own_share (`float`): Share of Σx² from the policy's own draws. If it is large, they found what the others miss.
        efficiency (`float`):
            Bad outputs of the policy that one draw of the other components is worth: those that plain sampling needs for the
            same variance, minus those that the policy draws here, over the others' draws; 0 without others.
        counts (`tuple[int, ...]`): Completions that each component drew for each prompt, the policy first.
        halves (`tuple[float, float]`), halves_error (`float`):
            The estimate from every other completion and from the rest, and their difference in standard errors.
        normalization_error (`float`): Largest deviation of E_m[q_k / m] from 1, in standard errors.
    """

    tail_samples: int
    ess: float
    max_weight_share: float
    variance_ess: float
    unseen_share: float
    expected: float
    own_share: float
    efficiency: float
    counts: tuple[int, ...]
    halves: tuple[float, float]
    halves_error: float
    normalization_error: float

    @property
    def _distant(self) -> bool:
        """Whether the other components hardly draw bad outputs, and the policy draws too few to do without them."""
        return len(self.counts) > 1 and self.efficiency < MIN_EFFICIENCY and self.expected < ENOUGH_OF_THE_POLICYS

    @property
    def _needed(self) -> float:
        """Bad outputs that must be expected among the policy's own draws."""
        return ENOUGH_OF_THE_POLICYS if self._distant else 3 / MAX_UNSEEN_SHARE

    @property
    def contradicted(self) -> bool:
        """Whether the samples contradict themselves, so that not even a bound holds."""
        return self.normalization_error > MAX_ERROR or self.halves_error > MAX_ERROR

    def reasons(self) -> tuple[str, ...]:
        """Why the estimate is not reliable, one sentence a reason; empty if it is."""
        found = []
        if self.normalization_error > MAX_ERROR:
            found.append(
                f"The log-probabilities are not those of the models that drew the completions: E[q/m] is off by "
                f"{self.normalization_error:.1f} standard errors."
            )
        if self.tail_samples == 0:
            return (*found, "No completion is in the tail: only the upper end of the interval means anything.")
        if self.tail_samples < MIN_VARIANCE_ESS and len(self.counts) == 1:
            found.append(f"Too few completions are bad: {self.tail_samples}, and {MIN_VARIANCE_ESS:.0f} are needed.")
        elif self.variance_ess < MIN_VARIANCE_ESS:
            found.append(
                f"The weights are uneven: {self.variance_ess:.1f} effective completions determine the variance, and "
                f"{MIN_VARIANCE_ESS:.0f} are needed. One completion makes up {self.max_weight_share:.0%} of the estimate."
            )
        if self.unseen_share > MAX_UNSEEN_SHARE:
            found.append(
                f"The other components may miss bad outputs: about {plain(self.expected, 2)} bad outputs are to be expected among the policy's own "
                f"draws, and {self._needed:.0f} are needed. Up to {self.unseen_share:.0%} of the probability could be missing."
            )
        if self._distant:
            found.append(
                f"The other components are far from the policy's bad outputs: one draw is worth {plain(self.efficiency, 2)} of them. Under "
                f"{MIN_EFFICIENCY:g}, {self._needed:.0f} are needed among the policy's own draws, and about {plain(self.expected, 2)} are to be "
                "expected."
            )
        if len(self.counts) == 2:
            found.append("There is only one proposal. It cannot show which bad outputs it neglects.")
        if self.halves_error > MAX_ERROR:
            found.append(f"The two halves of the completions disagree by {self.halves_error:.1f} standard errors.")
        return tuple(found)

    def next_steps(self) -> tuple[str, ...]:
        """What to do about the reasons, one sentence a step, the cheapest first; empty if the estimate is reliable."""
        if self.normalization_error > MAX_ERROR:
            return ("Score with the weights, temperature and end tokens that the completions were drawn with.",)
        own, *others = self.counts
        train = "Train a proposal for this policy, or one more with another seed, and pass it."
        if self.tail_samples == 0:
            return (train,)
        steps = []
        # Bad outputs that the policy's draws should contain: 1.5 times what is required, as the number varies
        enough = 1.5 * 3 / MAX_UNSEEN_SHARE
        uneven = self.variance_ess < MIN_VARIANCE_ESS
        wanted = max(enough, self._needed) if self.unseen_share > MAX_UNSEEN_SHARE or self._distant else 0.0
        if uneven and (self.own_share > 0.5 or not others):
            more = self.expected * max(2.0, MIN_VARIANCE_ESS / max(self.variance_ess, 1.0))
            wanted = max(wanted, more or enough)
        if wanted and not own:
            steps.append("Draw completions from the policy too.")
        elif wanted:
            draws = self._policy_draws(wanted)
            if draws <= AFFORDABLE * own:
                times = math.ceil(draws / own)
                steps.append(
                    f"Draw {draws:,} completions a prompt from the policy, {times} times as many as now: about {wanted:.0f} bad outputs are "
                    "then to be expected."
                )
                if self._distant:
                    fewer = self._policy_draws(enough)
                    also = f"; draw {fewer:,} completions a prompt from the policy." if fewer > own else "."
                    steps.append(f"Or: t{train[1:-1]}{also}")
            else:
                steps += ["Do not rely on the estimate: the policy draws too few bad outputs to confirm it.", train]
        if len(self.counts) == 2:
            steps.append("Draw from a hotter copy of the proposal too, or from a second proposal.")
        if uneven and others and self.own_share <= 0.5:
            times = max(2, math.ceil(MIN_VARIANCE_ESS / max(self.variance_ess, 1.0)))
            steps.append(f"Draw {times} times as many completions from the other components.")
        if self.halves_error > MAX_ERROR:
            steps.append("Draw again with another seed, and twice as many.")
        return tuple(steps)

    def _policy_draws(self, expected: float) -> float:
        """Completions a prompt from the policy, for so many expected bad outputs over all prompts, rounded up to two digits."""
        if self.expected <= 1e-12:
            return math.inf
        number = self.counts[0] * expected / self.expected
        scale = int(10 ** max(0, math.floor(math.log10(number)) - 1))
        return math.ceil(number / scale) * scale


def measure(sample: MixtureSample, log_w: torch.Tensor, log_depth: torch.Tensor | None = None) -> Diagnostics:
    """Diagnostics from log-weights (P, N), −inf outside of the tail, and log v (P, N), by default 0; both in nats."""
    log_depth = torch.zeros_like(log_w) if log_depth is None else log_depth
    log_x = log_w + log_depth
    shift = log_x.max().clamp(min=torch.finfo(log_x.dtype).min)  # finite, even if all are −inf
    x, scale = (log_x - shift).exp(), float(shift.exp())
    total, squares = float(x.sum()), float(x.square().sum())
    # n (Σwv / n)² / (Σwv² / n) of n completions, times the policy's share of them
    expected = 0.0
    if total:
        share = (2 * log_x.logsumexp(dim=(0, 1)) - (log_x + log_depth).logsumexp(dim=(0, 1))).exp()
        expected = float(share) * sample.counts[0] / log_w.size(1)
    unseen = 0.0 if len(sample.counts) == 1 else min(1.0, 3.0 / expected) if expected else 1.0
    even, odd = halves(sample, x)
    mean, variance = stratified_mean(x, sample.counts)
    drawn = sum(sample.counts[1:]) * sample.num_prompts
    return Diagnostics(
        tail_samples=int((log_w > -torch.inf).sum()),
        ess=total**2 / squares if squares else 0.0,
        max_weight_share=float(x.max()) / total if total else 0.0,
        variance_ess=squares**2 / float(x.pow(4).sum()) if squares else 0.0,
        unseen_share=unseen,
        expected=expected,
        own_share=float(x[:, : sample.counts[0]].square().sum()) / squares if squares else 0.0,
        efficiency=max(0.0, mean**2 / variance - expected) / drawn if drawn and variance else 0.0,
        counts=sample.counts,
        halves=(even * scale, odd * scale),
        # The difference of two halves has four times the variance of the mean of both
        halves_error=abs(even - odd) / (2 * variance**0.5) if variance else 0.0,
        normalization_error=largest_normalization_error(sample),
    )


@dataclass(frozen=True)
class RareEstimate(Estimate):
    """
    An estimate (a probability, or a reward), its interval, and whether to trust them. `samples` are the completions in the tail.

    Args:
        confidence, standard_error (`float`): Nominal coverage of the interval; estimated standard deviation of `value`.
        diagnostics ([`~trl_repulse.evaluation.rare.estimates.Diagnostics`]): What the estimate rests on.
        bounds (`tuple[float, float]`, *optional*):
            For a probability, bounds that hold whatever the others miss: the lower end of the interval, and the
            upper end of Clopper and Pearson's interval for the policy's own draws.
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
    P(r < threshold) under the policy, the mean over prompts; a reward equal to the threshold is not bad.

    The interval treats the weighted count of bad completions as a multiple of a Poisson count, as Fay and Feuer (1997) do for standardised
    rates, but with the stratified variance. Fewer than 50 effective bad completions do not show how large weights become: the upper end
    takes them to be as large on average as those of the 50 lowest rewards. Without a bad completion, it is that of Clopper and Pearson for
    the policy's own draws, or 1 without these. For prompts whose outputs are mostly bad, only the policy's own draws are used, and the good
    ones are counted. Raises `ValueError` if `confidence` is not between 0 and 1, or `threshold` is NaN.
    """
    check_share("confidence", confidence)
    if math.isnan(threshold):
        raise ValueError("`threshold` is NaN; give the reward under which an output is bad.")
    bad = is_below(sample.rewards, threshold)
    value, low, high, error, log_w = _probability(sample, bad, confidence)
    diagnostics = measure(sample, log_w.masked_fill(~bad, -torch.inf))
    own = bad[:, : sample.counts[0]]
    bounds = low, clopper_pearson(int(own.sum()), int((~own).sum()), confidence)[1]
    return RareEstimate(value, low, high, diagnostics.tail_samples, confidence, error, diagnostics, bounds)


def _probability(
    sample: MixtureSample, event: torch.Tensor, confidence: float
) -> tuple[float, float, float, float, torch.Tensor]:
    """Probability of an event (P, N) under the policy, the ends of its interval, its standard error, and the log-weights used. For prompts
    where the event is likelier than not, only the policy's own draws are used, and the complement is counted, for which proposals are not
    made. The ends are those of the difference of two counts with intervals (Zou and Donner, 2008)."""
    own, (prompts, completions) = sample.counts[0], event.shape
    share = sample.log_w.masked_fill(~event, -torch.inf).logsumexp(dim=1).exp() / completions  # (P,)
    likely = (share > 0.5) & (own > 0)
    log_w = sample.log_w.masked_fill(likely[:, None], -torch.inf)
    log_w[:, :own] = log_w[:, :own].masked_fill(likely[:, None], math.log(completions / own) if own else 0.0)
    log_x = log_w.masked_fill(~event | likely[:, None], -torch.inf)
    rare = _count(log_x, sample.counts, own, ~likely, confidence, _log_weight_nearby(sample, event))
    log_good = event.new_zeros(prompts, own).double().masked_fill(event[:, :own] | ~likely[:, None], -torch.inf)
    good = _count(log_good, (own,), own, likely, confidence) if own else (0.0,) * 4  # value, ends, error
    likely_share = float(likely.double().mean())
    value = likely_share + rare[0] - good[0]
    low = value - math.hypot(rare[0] - rare[1], good[2] - good[0])
    high = value + math.hypot(rare[2] - rare[0], good[0] - good[1])
    return min(value, 1.0), min(max(low, 0.0), 1.0), min(high, 1.0), math.hypot(rare[3], good[3]), log_w


def widened(sample: MixtureSample, own: torch.Tensor) -> torch.Tensor:
    """What completions contribute to a tail, `own` (P, N), if at least [`ENOUGH`] effective ones do. Otherwise the weights of the lowest
    rewards, of as many completions as are enough, if that tail is rare ([`RARE`]). All 0 if nothing was found."""
    if float(own.sum()) and float(own.sum().square() / own.square().sum()) >= ENOUGH:
        return own
    weights = sample.log_w.exp()
    rewards, order = sample.rewards.flatten().sort(stable=True)
    lowest = weights.flatten()[order]
    ess = lowest.cumsum(0).square() / lowest.square().cumsum(0).clamp(min=torch.finfo(lowest.dtype).tiny)
    places = torch.where(ess >= ENOUGH)[0]
    wider = weights.masked_fill(sample.rewards > rewards[int(places[0]) if len(places) else -1], 0.0)
    return wider if float(wider.mean()) <= RARE else own


def _log_weight_nearby(sample: MixtureSample, event: torch.Tensor) -> float:
    """Log of the policy's mean weight over the lowest rewards, if an event (P, N) has too few completions to tell; else −inf."""
    if not 0 < sample.counts[0] < event.size(1):  # then all weights are 1, or they have no bound
        return -math.inf
    own = sample.log_w.exp() * event
    near = widened(sample, own)
    return -math.inf if near is own or not near.any() else math.log(float(near.square().sum() / near.sum()))


def _count(
    log_x: torch.Tensor,
    counts: tuple[int, ...],
    policy_count: int,
    prompts: torch.Tensor,
    confidence: float,
    log_weight: float = -math.inf,
) -> tuple[float, float, float, float]:
    """Mean of weighted counts, from `log_x` (P, N), over all prompts, of which only `prompts` (P,) have any, with an interval and the
    standard error. With a count of 0, the upper end is exact for the `policy_count` draws of the policy. `log_weight` is as in
    [`_count_interval`]."""
    if float(log_x.max()) == -math.inf:
        active = int(prompts.sum())
        return 0.0, 0.0, clopper_pearson(0, policy_count * active, confidence)[1] * active / len(prompts), 0.0
    return _count_interval(log_x, counts, confidence, log_weight)


def weighted_quantiles(sample: MixtureSample, levels: Sequence[float]) -> list[float]:
    """For each level the lowest reward up to which completions have that probability under the policy, by their weights."""
    rewards, order = sample.rewards.double().flatten().sort(stable=True)
    cumulative = sample.log_w.flatten()[order].logcumsumexp(dim=0) - math.log(order.numel())
    return [float(rewards[min(int((cumulative < math.log(level)).sum()), len(rewards) - 1)]) for level in levels]


def cvar(sample: MixtureSample, level: float, confidence: float = 0.95) -> RareEstimate:
    """
    Mean of the lowest rewards that have probability `level` under the policy, over prompts and completions together.

    CVaR = max over t of t − E[(t − r)₊] / level, at the quantile t (Rockafellar and Uryasev, 2000). The lower end is that at the
    weighted quantile; as in [`prob_bad`], few effective completions do not show how large weights become. The true quantile may be
    another, so the upper end is the largest over t around it. If no reward is below the weighted quantile, there is no lower end.
    Raises `ValueError` if `level` or `confidence` is not between 0 and 1.
    """
    check_share("confidence", confidence)
    check_share("level", level)
    levels = (min(level * 2 ** (k / 2), 1.0) for k in range(-4, 15))  # from a quarter of `level` to 128 times it
    quantile, *around = weighted_quantiles(sample, [level, *levels])
    log_depth = (quantile - sample.rewards.double()).clamp(min=0).log() - math.log(level)  # (P, N)
    in_tail = sample.log_w.masked_fill(sample.rewards > quantile, -torch.inf)
    diagnostics = measure(sample, in_tail, log_depth)
    even, odd = diagnostics.halves
    diagnostics = replace(diagnostics, halves=(quantile - even, quantile - odd))
    mean, least, most, error = _shortfall(sample, quantile, level, confidence)
    others = set(around) - {quantile}
    high = max([quantile - least, *(t - _shortfall(sample, t, level, confidence)[1] for t in others)])
    return RareEstimate(
        quantile - mean, quantile - most, high, diagnostics.tail_samples, confidence, error, diagnostics
    )


def _shortfall(sample: MixtureSample, t: float, level: float, confidence: float) -> tuple[float, float, float, float]:
    """E[(t − r)₊] / level, the ends of its interval for this t, and its standard error. There is no upper end if no reward is below t."""
    log_depth = (t - sample.rewards.double()).clamp(min=0).log() - math.log(level)  # (P, N)
    log_x = sample.log_w + log_depth
    if float(log_x.max()) == -math.inf:
        return 0.0, 0.0, math.inf, 0.0
    below = sample.rewards < t
    log_total_below = sample.log_w.masked_fill(~below, -torch.inf).logsumexp(dim=(0, 1))
    log_mean_depth = float(log_x.logsumexp(dim=(0, 1)) - log_total_below)
    return _count_interval(log_x, sample.counts, confidence, _log_weight_nearby(sample, below) + log_mean_depth)


def _count_interval(
    log_x: torch.Tensor, counts: tuple[int, ...], confidence: float, log_weight: float = -math.inf
) -> tuple[float, float, float, float]:
    """Mean of contributions x (P, N), the ends of its interval, and its standard error. The upper end supposes that x
    is on average at least exp(`log_weight`) where it is not 0. Ends are quantiles of gamma distributions (Fay and Feuer, 1997), for the
    upper one of the mean with one more completion of the largest x: it adds `largest`, in units of that x."""
    shift = float(log_x.max())
    mean, variance = stratified_mean((log_x - shift).exp(), counts)
    largest, tail = 1 / log_x.numel(), (1 - confidence) / 2
    low_variance = max(variance, largest**2)
    lower = gamma.ppf(tail, mean**2 / low_variance, scale=low_variance / mean)
    # Above, in units of the largest weight, seen or near
    top = max(shift, log_weight)
    scale = math.exp(shift - top)
    high_mean = scale * mean + largest
    high_variance = max(scale**2 * variance, scale * mean * largest * math.exp(log_weight - top)) + largest**2
    upper = gamma.isf(tail, high_mean**2 / high_variance, scale=high_variance / high_mean)
    mean, low, error = (float(each) * math.exp(shift) for each in (mean, lower, variance**0.5))
    return mean, low, float(upper) * math.exp(top), error
