"""
Lower and upper bounds on log Z = log E_p[φ], and what they say about a proposal q and its target σ ∝ p·φ.

Axis letters: P prompts, R groups, K completions of a group.

A weight is w = p·φ / q. The log of the mean of K weights of draws from q is at most log Z on average; with one of the K
drawn from σ instead it is at least log Z on average (Grosse, Ghahramani and Adams, 2015; Zhao et al., 2024). The gap
closes as K grows, and the faster the better q is. One draw a group gives KL(q ‖ σ) below and KL(σ ‖ q) above.
"""

import math
from dataclasses import dataclass

import torch
from scipy.stats import beta as beta_distribution
from scipy.stats import t as student

from ...importance import require_shape
from ..tails import check_share, skewed_interval


MIN_GROUPS = 8  # two to six that tie by chance put Student's end above log Z in 15 to 4 % where 2.5 % are claimed


@dataclass(frozen=True)
class LogZBounds:
    """
    Bounds on log Z of one prompt, in nats. Means over groups bound log Z on average; the ends allow for their errors.

    Args:
        lower, upper (`float`):
            Means over the groups of the lower and of the upper bound. −inf for the lower one where a group of weights is
            all 0.
        lower_end, upper_end (`float`):
            Ends of an interval for log Z. The lower one is the lower bound less what its standard error and the skewness of its
            groups (Hall, 1992) allow for; of fewer
            than eight groups, whose standard error says too little, less 3.7 / R, as Markov's inequality gives it. The
            upper one allows for modes of the target that the proposal misses and no draw from the target has hit yet: with
            a perfect proposal and R groups it still lies 3.7 / R above log Z.
        confidence (`float`):
            Nominal probability that log Z lies between the ends.
        kl_proposal_target (`tuple[float, float]`):
            Lowest and highest estimate of KL(q ‖ σ): both bounds less E_q[log w].
        kl_target_proposal (`tuple[float, float]`):
            Lowest and highest estimate of KL(σ ‖ q): E_σ[log w] less both bounds.
    """

    lower: float
    upper: float
    lower_end: float
    upper_end: float
    confidence: float
    kl_proposal_target: tuple[float, float]
    kl_target_proposal: tuple[float, float]

    @property
    def gap(self) -> float:
        """Upper less lower bound, in nats."""
        return self.upper - self.lower


def log_z_bounds(log_w: torch.Tensor, log_w_target: torch.Tensor, confidence: float = 0.95) -> list[LogZBounds]:
    """
    Bounds on log Z of each prompt.

    Args:
        log_w (`torch.Tensor` of shape `(P, R, K)`):
            Log-weights log p + log φ − log q of independent draws from the proposal, in nats; −inf for a weight of 0.
        log_w_target (`torch.Tensor` of shape `(P, R)`):
            The same of independent exact draws from the target, one a group. Each takes the place of the last draw of
            its group in the upper bound.
        confidence (`float`, *optional*, defaults to `0.95`):
            Nominal coverage of the interval between the ends, half of what is left for each.

    Returns:
        `list` of [`LogZBounds`]: one a prompt.

    Raises:
        `ValueError`: If shapes do not fit together, there is no group or no draw, a weight is NaN or +inf, or the weight of a
            draw from the target is 0: then the proposal, or the target, is another than was drawn from.
    """
    require_shape("log_w", log_w, (-1, -1, -1))
    require_shape("log_w_target", log_w_target, tuple(log_w.shape[:2]))
    if 0 in log_w.shape[1:]:
        raise ValueError(f"`log_w` has shape {tuple(log_w.shape)}; give each prompt at least one group of one draw.")
    if bool((log_w.isnan() | (log_w == torch.inf)).any()) or not bool(log_w_target.isfinite().all()):
        raise ValueError(
            "`log_w` must hold no NaN or +inf, and `log_w_target` finite numbers alone: a draw from the target has a "
            "positive weight, and a finite one if the proposal can draw it."
        )
    check_share("confidence", confidence)
    log_w, log_w_target = log_w.detach().double(), log_w_target.detach().double()
    log_k = math.log(log_w.shape[-1])
    lower = log_w.logsumexp(dim=-1) - log_k  # (P, R)
    upper = torch.cat([log_w[..., :-1], log_w_target.unsqueeze(-1)], dim=-1).logsumexp(dim=-1) - log_k
    means = log_w.mean(dim=(1, 2)).tolist(), log_w_target.mean(dim=1).tolist()
    size = log_w.shape[-1]
    return [_bounds(*row, size, confidence) for row in zip(lower, upper, *means, strict=True)]


def _bounds(
    lower: torch.Tensor, upper: torch.Tensor, mean: float, target_mean: float, size: int, confidence: float
) -> LogZBounds:
    """Bounds from those of each group of `size` draws, (R,), and the mean log-weights under proposal and target."""
    groups, tail = len(lower), (1 - confidence) / 2
    low, high = float(lower.mean()), float(upper.mean())
    # E[mean weight] = Z over draws from q alone, and Z ** R of the product over groups: it exceeds Z ** R / tail with
    # probability `tail` at most (Markov)
    margin = -math.log(tail) / groups
    if groups >= MIN_GROUPS and low > -math.inf:
        margin = float(student.isf(tail, groups - 1)) * float(lower.std()) / math.sqrt(groups)
        if bool((lower != lower[0]).any()):
            # Farther out where a few groups are far below the rest, as with weights of 0
            margin = max(margin, low - skewed_interval(lower[None].cpu().numpy(), confidence)[0])
        # A weight of 0 that no draw has shown may have a probability of 1 - tail ** (1 / draws), and takes this off log Z
        margin = max(margin, -math.log(tail) / (groups * size))
    # E[1 / mean weight] = 1 / Z with the draw from σ: near 0 where that hits what q misses, and bounded by what is seen
    inverse = (upper.min() - upper).exp()  # (R,), at most 1
    hits = float(inverse.sum())
    least = float(beta_distribution.ppf(tail, hits, groups - hits + 1))
    return LogZBounds(
        lower=low,
        upper=high,
        lower_end=low - margin,
        upper_end=float(upper.min()) - math.log(least),
        confidence=confidence,
        kl_proposal_target=(low - mean, high - mean) if mean > -math.inf else (math.inf, math.inf),
        kl_target_proposal=(target_mean - high, target_mean - low),
    )


def enumeration_sample(
    log_target: torch.Tensor, num_samples: int, generator: torch.Generator | None = None
) -> torch.Tensor:
    """
    Exact draws from a target whose every completion has been enumerated.

    Args:
        log_target (`torch.Tensor` of shape `(P, S)`):
            log p + log φ of every completion, in nats, not normalised; such as
            [`~trl_repulse.evaluation.exact.ExactEvaluator.log_probs`] plus β times its `rewards`.
        num_samples (`int`):
            Draws of each prompt.
        generator (`torch.Generator`, *optional*):
            Source of randomness.

    Returns:
        `torch.Tensor` of shape `(P, num_samples)`: indices of completions.

    Raises:
        `ValueError`: If `log_target` holds NaN or +inf, or a prompt has no completion of positive potential.
    """
    require_shape("log_target", log_target, (-1, -1))
    if bool((log_target.isnan() | (log_target == torch.inf)).any()) or bool(
        (log_target == -torch.inf).all(dim=1).any()
    ):
        raise ValueError("`log_target` needs numbers below +inf, and for each prompt at least one above −inf.")
    # Float64, and probabilities at most 1 apart from rounding: what is lost is below 1e-308 of the target
    return torch.multinomial(log_target.double().softmax(dim=1), num_samples, replacement=True, generator=generator)
