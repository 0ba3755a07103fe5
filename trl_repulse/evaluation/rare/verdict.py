"""Diagnostics of an importance-sampled estimate: when not to trust it, and what to do then."""

import math
from dataclasses import dataclass

import torch

from ..._numbers import plain
from .mixture import MixtureSample, halves, largest_normalization_error, stratified_mean


MIN_VARIANCE_ESS = 20.0
MAX_UNSEEN_SHARE = 0.3
MIN_EFFICIENCY = 0.05  # required if the policy's own draws hold fewer bad outputs than the next constant
ENOUGH_OF_THE_POLICYS = 100.0
MAX_ERROR = 4.0  # standard errors
AFFORDABLE = 100  # factor on the number of draws up to which more draws are advised rather than training


@dataclass(frozen=True)
class Diagnostics:
    """
    Diagnostics of an estimate. The tail is the bad completions, or those up to the quantile t of a CVaR. A completion
    contributes x = w · v, its weight times its depth v, which is 1, or t − r for a CVaR.

    Args:
        tail_samples, policy_tail_samples (`int`):
            Completions in the tail, and those of them that the policy drew.
        ess (`float`):
            Effective number of completions behind the estimate, (Σx)² / Σx².
        max_weight_share (`float`):
            Share of the sum of contributions from a single completion.
        variance_ess (`float`):
            The same behind the variance, (Σx²)² / Σx⁴. If it is small, the interval is unreliable.
        unseen_share (`float`):
            Largest share of the estimate that the proposals could miss, with 95 % probability, if the policy's own draws do
            not show it: 3 / `expected`, at most 1; 0 without proposals.
        expected (`float`):
            Expected number of bad outputs among the policy's own draws: draws of the policy × (E[v])² / E[v²].
        own_share (`float`):
            Share of Σx² from the policy's own draws. If it is large, they found what the proposals miss.
        efficiency (`float`):
            Bad outputs of the policy that one draw of the proposals is worth: those that plain sampling needs for the same
            variance, minus those that the policy draws here, over the proposals' draws. About 1 for a proposal that draws only
            bad outputs in the policy's proportions, the tail's probability (for a CVaR (E[v])² / E[v²]) for one equal to the
            policy, 0 without proposals.
        counts (`tuple[int, ...]`):
            Completions that each component drew for each prompt: the policy, then the proposals and their hotter copies.
        halves (`tuple[float, float]`), halves_error (`float`):
            The estimate from every other completion and from the rest, and their difference in standard errors.
        normalization_error (`float`):
            Largest deviation of E_m[q_k / m] from 1, in standard errors.
    """

    tail_samples: int
    policy_tail_samples: int
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
        return len(self.counts) > 1 and self.efficiency < MIN_EFFICIENCY and self.expected < ENOUGH_OF_THE_POLICYS

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
        if self.variance_ess < MIN_VARIANCE_ESS and len(self.counts) == 1:
            found.append(f"Too few completions are bad: {self.tail_samples}, and {MIN_VARIANCE_ESS:.0f} are needed.")
        elif self.variance_ess < MIN_VARIANCE_ESS:
            found.append(
                f"The weights are uneven: {self.variance_ess:.1f} effective completions determine the variance, and "
                f"{MIN_VARIANCE_ESS:.0f} are needed. One completion makes up {self.max_weight_share:.0%} of the estimate."
            )
        if self.unseen_share > MAX_UNSEEN_SHARE:
            found.append(
                f"The proposals may miss bad outputs: about {plain(self.expected, 2)} bad outputs are to be expected among the policy's own "
                f"draws, and {3 / MAX_UNSEEN_SHARE:.0f} are needed. Up to {self.unseen_share:.0%} of the probability could be missing."
            )
        if self._distant:
            found.append(
                f"The proposals are far from the policy's bad outputs: one draw is worth {plain(self.efficiency, 2)} of them, and "
                f"{MIN_EFFICIENCY:g} are needed."
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
        another = "rain a second proposal for this policy, with another seed, and pass both"
        train = f"T{another}." if others else "Train a proposal for this policy and pass it."
        if self.tail_samples == 0:
            return (train,)
        steps = []
        # Bad outputs that the policy's draws should contain: 1.5 times what is required, as the number varies
        enough = 1.5 * 3 / MAX_UNSEEN_SHARE
        uneven = self.variance_ess < MIN_VARIANCE_ESS
        wanted = 0.0
        if self.unseen_share > MAX_UNSEEN_SHARE or self._distant:
            wanted = max(enough, ENOUGH_OF_THE_POLICYS if self._distant else 0.0)
        if uneven and (self.own_share > 0.5 or not others):
            more = self.expected * max(2.0, MIN_VARIANCE_ESS / max(self.variance_ess, 1.0))
            wanted = max(wanted, more or enough)
        if wanted and not own:
            steps.append("Draw completions from the policy too.")
        elif wanted:
            draws = self._policy_draws(wanted)
            if draws <= AFFORDABLE * own:
                steps.append(f"Draw {draws:,} completions a prompt from the policy ({own:,} now).")
                if self._distant:
                    fewer = self._policy_draws(enough)
                    also = f"; draw {fewer:,} completions a prompt from the policy" if fewer > own else ""
                    steps.append(f"Or: t{another}{also}.")
            else:
                steps += ["Do not rely on the estimate: the policy draws too few bad outputs to confirm it.", train]
        if len(self.counts) == 2:
            steps.append("Draw from a hotter copy of the proposal too, or from a second proposal.")
        if uneven and others and self.own_share <= 0.5:
            now = max(others)
            draws = _round_up(now * max(2.0, MIN_VARIANCE_ESS / max(self.variance_ess, 1.0)))
            steps.append(f"Draw {draws:,} completions a prompt from each proposal ({now:,} now).")
        if self.halves_error > MAX_ERROR:
            steps.append("Draw again with another seed, and twice as many.")
        return tuple(steps)

    def _policy_draws(self, expected: float) -> float:
        """Completions a prompt from the policy, for so many expected bad outputs over all prompts."""
        return _round_up(self.counts[0] * expected / self.expected) if self.expected > 1e-12 else math.inf


def _round_up(number: float) -> int:
    """Rounds up to two digits."""
    scale = int(10 ** max(0, math.floor(math.log10(number)) - 1))
    return math.ceil(number / scale) * scale


def measure(sample: MixtureSample, log_w: torch.Tensor, log_depth: torch.Tensor | None = None) -> Diagnostics:
    """
    Diagnostics from log-weights (P, N) of the completions in the tail, −inf for the others, and log v (P, N), by default 0; both
    in nats.
    """
    in_tail = log_w > -torch.inf
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
    one, other = halves(sample, x)
    mean, variance = stratified_mean(x, sample.counts)
    drawn = sum(sample.counts[1:]) * sample.num_prompts
    return Diagnostics(
        tail_samples=int(in_tail.sum()),
        policy_tail_samples=int(in_tail[:, : sample.counts[0]].sum()),
        ess=total**2 / squares if squares else 0.0,
        max_weight_share=float(x.max()) / total if total else 0.0,
        variance_ess=squares**2 / float(x.pow(4).sum()) if squares else 0.0,
        unseen_share=unseen,
        expected=expected,
        own_share=float(x[:, : sample.counts[0]].square().sum()) / squares if squares else 0.0,
        efficiency=max(0.0, mean**2 / variance - expected) / drawn if drawn and variance else 0.0,
        counts=sample.counts,
        halves=(one * scale, other * scale),
        # The difference of two halves has four times the variance of the mean of both
        halves_error=abs(one - other) / (2 * variance**0.5) if variance else 0.0,
        normalization_error=largest_normalization_error(sample),
    )
