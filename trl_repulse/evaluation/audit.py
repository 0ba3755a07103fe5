"""Errors of a judge, from completions that people have labelled: its sensitivity and specificity, and P(truly bad).

Axis letters: P prompts, N completions of each, D draws of a confidence distribution.

The judge calls a completion bad if its score is under a threshold η. All P·N completions have a score; a random part of each
of three strata (bad by the judge, near the threshold, ordinary) has a label too. This is double sampling (Cochran, 1977,
chapter 12; Tenenbein, 1970): P(truly bad) = Σ_s π_s θ_s, with π_s the probability of stratum s, from all scores, and θ_s the
share of truly bad completions in it, from its labels. Completions are independent, so the labels of a stratum are a binomial
sample whatever the scores. Intervals meld those of the π_s and θ_s, as Fay, Proschan and Brittain (2015) do for two samples.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from .._numbers import plain
from .audit_labels import STRATA, Labels, Scored
from .tails import Estimate, check_share


DRAWS = 10_000
ConfidenceDraws = tuple[np.ndarray, np.ndarray]  # from the lower and from the upper confidence distribution, each (D,)


@dataclass(frozen=True)
class Audit:
    """
    What labels say about a judge and a policy. Probabilities, for a completion of a prompt chosen uniformly among the P.

    Args:
        threshold (`float`): η, in units of reward.
        estimates (`dict[str, Estimate]`):
            By quantity: `"P(truly bad)"`, `"P(r < η, truly bad)"`, `"sensitivity of r < η"` and `"specificity of r < η"`.
        strata (`dict[str, dict[str, float]]`):
            `share` (π_s), `labelled` and `truly_bad` of each stratum; empty if the judge's errors are known from elsewhere.
        reasons (`tuple[str, ...]`): Why the interval of P(truly bad) gives bounds only.
        unlabelled (`int`, *optional*, defaults to `0`): Rows of the file without a label.
    """

    threshold: float
    estimates: dict[str, Estimate]
    strata: dict[str, dict[str, float]]
    reasons: tuple[str, ...]
    unlabelled: int = 0

    @property
    def verdict(self) -> str:
        """`"bounds"` if only the ends of the interval of P(truly bad) can be used, else `"reliable"`."""
        return "bounds" if self.reasons else "reliable"

    def to_dict(self) -> dict[str, Any]:
        """The attributes and `verdict`; numbers that are not finite stay."""
        return asdict(self) | {"verdict": self.verdict}

    def notes(self) -> list[str]:
        """Lines with the verdict."""
        p_bad = self.estimates["P(truly bad)"]
        lines = ["Labels: the interval of P(truly bad) covers the errors of the judge too."]
        if self.reasons:
            lines = [f"Labels: bounds only. P(truly bad) is between {plain(p_bad.low)} and {plain(p_bad.high)}."]
        lines += [f"  why   {reason}" for reason in self.reasons]
        if self.unlabelled:
            lines.append(f"{self.unlabelled} rows have no label; the intervals hold if these were left out at random.")
        return lines


def audit_judge(scored: Scored, labels: Labels, confidence: float = 0.95) -> Audit:
    """
    Sensitivity and specificity of a judge, and P(truly bad), from labels.

    Ends of intervals are quantiles of sums of D draws from the lower and upper confidence distributions of all π_s and θ_s:
    Beta(k, m − k + 1) and Beta(k + 1, m − k) for k of m, as in the intervals of Clopper and Pearson. The interval is for these prompts;
    drawn with as many completions of each, it is conservative. It has no errors of the labels themselves. Raises `ValueError` if
    `confidence` is not between 0 and 1.

    Args:
        scored ([`Scored`]): The completions that the labels were drawn from.
        labels ([`Labels`]): The labels.
        confidence (`float`, *optional*, defaults to `0.95`): Nominal coverage of the intervals.
    """
    check_share("confidence", confidence)
    strata = scored.strata(labels.threshold, labels.near_up_to)
    shares = [float((strata == number).mean()) for number in (0, 1)]
    shares.append(1 - sum(shares))
    counts = list(zip(labels.truly_bad, labels.labelled, strict=True))
    estimates, unseen = meld(shares, share_draws(strata, np.random.default_rng(0)), counts, confidence)
    eta = f"r < {labels.threshold:g}"
    names = ("P(truly bad)", f"P({eta}, truly bad)", f"sensitivity of {eta}", f"specificity of {eta}")
    by_name = {name: Estimate(*ends, sum(labels.labelled)) for name, ends in zip(names, estimates, strict=True)}
    reasons = []
    if not sum(labels.truly_bad):
        reasons.append(
            "No labelled completion is truly bad, so that there is an upper end alone. Label more, or lower the threshold."
        )
    elif sum(unseen) > estimates[0][0]:
        which = STRATA[int(np.argmax(unseen))]
        reasons.append(
            f"No labelled {which} completion is truly bad, but up to {plain(max(unseen), 2)} of all may be {which} and truly "
            f"bad. Label more {which} completions."
        )
    columns = zip(STRATA, shares, labels.labelled, labels.truly_bad, strict=True)
    table = {name: {"share": share, "labelled": m, "truly_bad": k} for name, share, m, k in columns}
    return Audit(labels.threshold, by_name, table, tuple(reasons), labels.unlabelled)


def share_draws(strata: np.ndarray, rng: np.random.Generator) -> list[ConfidenceDraws]:
    """Draws of π_bad and π_near from their lower and upper confidence distributions, from the stratum of each completion."""
    return [binomial_draws(int((strata == number).sum()), strata.size, rng) for number in (0, 1)]


def meld(
    shares: list[float], first: list[ConfidenceDraws], counts: list[tuple[int, int]], confidence: float
) -> tuple[list[tuple[float, float, float]], list[float]]:
    """
    Value and ends of P(truly bad), P(bad by the judge and truly bad), sensitivity and specificity.

    Args:
        shares (`list[float]`): Estimated π_s of the three strata.
        first (`list` of 2 pairs of `numpy.ndarray` of shape `(D,)`):
            Draws of π_bad and π_near from their lower and upper confidence distributions.
        counts (`list[tuple[int, int]]`): Truly bad and labelled completions of each stratum.
        confidence (`float`): Nominal coverage.

    Returns:
        `(list, list)`: four triples, with NaN as value where there is none; and of each stratum without a truly bad label the upper
        end of π_s·θ_s, 0 for the others.
    """
    rng, miss = np.random.default_rng(1), (1 - confidence) / 2
    theta_draws = [binomial_draws(k, m, rng) for k, m in counts]

    def ends(of_low: Any, of_high: Any) -> tuple[float, float]:
        """Ends of an interval, from draws (D,) of a quantity's lower and upper confidence distributions."""
        return float(np.quantile(of_low, miss)), float(np.quantile(of_high, 1 - miss))

    def parts(theta: list[np.ndarray], upper_pi: bool, others_often_bad: bool) -> tuple[np.ndarray, ...]:
        """Four probabilities (D,): bad by the judge and truly bad, bad by the judge and not; then both for the others. `theta` are θ of the
        bad, near and ordinary stratum, (D,) each. π_bad is its upper or lower distribution. π_near is that with which the others are truly
        bad most often, or least often."""
        p = first[0][upper_pi]
        near = np.where((theta[1] > theta[2]) == others_often_bad, first[1][1], first[1][0])
        near = np.minimum(near, 1 - p)
        ordinary = 1 - p - near
        inside, truly = p * theta[0], near * theta[1] + ordinary * theta[2]
        return inside, p - inside, truly, near + ordinary - truly

    def total(upper: bool) -> np.ndarray:
        """Lower or upper distribution of P(truly bad), (D,). θ are taken at that end; π_bad too where θ_bad > θ_ordinary, as P(truly bad)
        rises with π_bad there, and at the other end elsewhere."""
        theta = [each[upper] for each in theta_draws]
        same_end, other_end = (parts(theta, upper_pi, upper) for upper_pi in (upper, not upper))
        return np.where(theta[0] > theta[2], same_end[0] + same_end[2], other_end[0] + other_end[2])

    def sensitivity(upper: bool) -> np.ndarray:
        """Grows with π_bad and θ_bad, and falls as others become truly bad."""
        theta = [theta_draws[0][upper], theta_draws[1][not upper], theta_draws[2][not upper]]
        inside, _, outside, _ = parts(theta, upper, not upper)
        return np.divide(inside, inside + outside, out=np.full(DRAWS, float(upper)), where=inside + outside > 0)

    def specificity(upper: bool) -> np.ndarray:
        """Falls with π_bad and as others become truly bad, and grows with θ_bad."""
        theta = [theta_draws[0][upper], theta_draws[1][not upper], theta_draws[2][not upper]]
        _, wrong, _, right = parts(theta, not upper, not upper)
        return np.divide(right, right + wrong, out=np.full(DRAWS, float(upper)), where=right + wrong > 0)

    theta = [k / m if m else 0.0 for k, m in counts]
    inside, outside = shares[0] * theta[0], shares[1] * theta[1] + shares[2] * theta[2]
    truly, good = inside + outside, 1 - inside - outside
    right = min(max((1 - shares[0] - outside) / good, 0.0), 1.0) if good > 0 else math.nan
    triples = [
        (truly, *ends(total(False), total(True))),
        (inside, *ends(first[0][0] * theta_draws[0][0], first[0][1] * theta_draws[0][1])),
        (inside / truly if truly else math.nan, *ends(sensitivity(False), sensitivity(True))),
        (right, *ends(specificity(False), specificity(True))),
    ]
    highest_pi = [first[0][1], first[1][1], np.full(DRAWS, shares[2])]  # π_ordinary is not drawn
    strata = zip(highest_pi, theta_draws, counts, strict=True)
    return triples, [0.0 if k else float(np.quantile(p * t[1], 1 - miss)) for p, t, (k, _) in strata]


def binomial_draws(k: int, m: int, rng: np.random.Generator) -> ConfidenceDraws:
    """Draws (D,) from the lower and the upper confidence distribution of a proportion, after k of m. Their quantiles are
    the ends of Clopper and Pearson's interval (1934)."""
    low = rng.beta(k, m - k + 1, DRAWS) if k > 0 else np.zeros(DRAWS)
    return low, rng.beta(k + 1, m - k, DRAWS) if m > k else np.ones(DRAWS)


def known_errors(
    scored: Scored,
    threshold: float,
    sensitivity: tuple[int, int],
    specificity: tuple[int, int],
    confidence: float = 0.95,
) -> Audit:
    """
    P(truly bad) if the judge's errors are known from labels of other completions.

    The estimate is that of Rogan and Gladen (1978), (π + Sp − 1) / (Se + Sp − 1), cut to [0, 1]; the interval melds those of π,
    Se and Sp. It supposes that the judge errs as often here as there, which labels of these completions need not.

    Args:
        scored ([`Scored`]): Completions.
        threshold (`float`): η, in units of reward.
        sensitivity, specificity (`tuple[int, int]`): Right answers and labels: among the truly bad completions, and among the others.
        confidence (`float`, *optional*, defaults to `0.95`): Nominal coverage of the intervals.

    Raises:
        `ValueError`: If counts are out of range, or the judge is no better than chance.
    """
    check_share("confidence", confidence)
    for name, (k, m) in (("sensitivity", sensitivity), ("specificity", specificity)):
        if not 0 <= k <= m or m < 1:
            raise ValueError(f"`{name}` is {k} of {m}; give right answers and labels, such as 45 50.")
    se, sp = sensitivity[0] / sensitivity[1], specificity[0] / specificity[1]
    if se + sp <= 1:
        raise ValueError(f"`sensitivity` {se:.3g} and `specificity` {sp:.3g} are those of chance; use another judge.")
    strata = scored.strata(threshold, threshold)
    rng, miss = np.random.default_rng(0), (1 - confidence) / 2
    p, _ = share_draws(strata, rng)
    rates = [binomial_draws(k, m, rng) for k, m in (sensitivity, specificity)]
    value = float((strata == 0).mean())
    ends = []
    for end in (0, 1):  # the estimate falls with Se, whose other end is taken, and rises with π and (if Se > π) Sp
        margin = rates[0][1 - end] + rates[1][end] - 1
        corrected = np.divide(p[end] + rates[1][end] - 1, margin, out=np.full(DRAWS, float(end)), where=margin > 0)
        ends.append(float(np.quantile(np.clip(corrected, 0, 1), 1 - miss if end else miss)))
    reasons = []
    if ends[0] == 0:
        reasons.append(
            f"P(r < {threshold:g}) is {plain(value)}, which false positives alone may give: up to "
            f"{plain(1 - float(np.quantile(rates[1][0], miss)), 2)} of good completions. Label more of these."
        )
    names = f"sensitivity of r < {threshold:g}", f"specificity of r < {threshold:g}"
    corrected = min(max((value + sp - 1) / (se + sp - 1), 0.0), 1.0)
    estimates = {"P(truly bad)": Estimate(corrected, ends[0], ends[1], sensitivity[1] + specificity[1])}
    for name, (k, m), (low, high) in zip(names, (sensitivity, specificity), rates, strict=True):
        estimates[name] = Estimate(k / m, float(np.quantile(low, miss)), float(np.quantile(high, 1 - miss)), m)
    return Audit(threshold, estimates, {}, tuple(reasons))
