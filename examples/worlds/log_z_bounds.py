"""
Lower and upper bounds on log Z = log E_p[φ] from a proposal q and draws from its target σ ∝ p·φ.

Axis letters: P prompts, R groups, K completions of a group.

A weight is w = p·φ / q. On average, the log of the mean of K weights of draws from q is at most log Z, and with one of the
K drawn from σ instead, at least log Z (Grosse, Ghahramani and Adams, 2015; Zhao et al., 2024). The gap closes as K grows,
and faster for a better q. With K = 1, the gaps are KL(q ‖ σ) below and KL(σ ‖ q) above.
"""

import math
from dataclasses import dataclass

import torch
from scipy.stats import t as student

from trl_repulse.evaluation.tails import check_share, clopper_pearson, skewed_interval
from trl_repulse.math.importance import require_shape


MIN_GROUPS = 8  # with 2 to 6 groups, chance ties put Student's end above log Z in 15 to 4 % of cases instead of 2.5 %


@dataclass(frozen=True)
class LogZBounds:
    """
    Bounds on log Z of one prompt, in nats.

    Args:
        lower, upper (`float`):
            Means over the groups of the lower and the upper bound. The lower one is −inf if all weights of a group are
            0.
        lower_end, upper_end (`float`):
            Ends of an interval for log Z with nominal coverage `confidence`. The lower one has a margin for the
            standard error and the skewness of the groups (Hall, 1992), or with fewer than eight groups 3.7 / R
            (Markov's inequality). The upper one allows for modes of the target that the proposal misses and that were
            not drawn from the target: at least 3.7 / R.
        kl_proposal_target, kl_target_proposal (`tuple[float, float]`):
            Lowest and highest estimate of KL(q ‖ σ), the bounds minus E_q[log w], and of KL(σ ‖ q), E_σ[log w] minus
            the bounds.
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
        """Upper minus lower bound, in nats."""
        return self.upper - self.lower


def log_z_bounds(log_w: torch.Tensor, log_w_target: torch.Tensor, confidence: float = 0.95) -> list[LogZBounds]:
    """
    Bounds on log Z of each prompt.

    Args:
        log_w (`torch.Tensor` of shape `(P, R, K)`):
            Log-weights log p + log φ − log q of independent draws from the proposal, in nats; −inf for a weight of 0.
        log_w_target (`torch.Tensor` of shape `(P, R)`):
            Log-weights of exact draws from the target. In the upper bound, each replaces the last draw of its group.
        confidence (`float`, *optional*, defaults to `0.95`): Nominal coverage of the interval between the ends.

    Raises:
        `ValueError`: If shapes do not fit, there is no draw, a weight is NaN or +inf, or that of a draw from the
        target is 0.
    """
    require_shape("log_w", log_w, (-1, -1, -1))
    require_shape("log_w_target", log_w_target, tuple(log_w.shape[:2]))
    if 0 in log_w.shape[1:]:
        raise ValueError(f"`log_w` has shape {tuple(log_w.shape)}; give each prompt at least one group of one draw.")
    if bool((log_w.isnan() | (log_w == torch.inf)).any()) or not bool(log_w_target.isfinite().all()):
        raise ValueError(
            "`log_w` must hold no NaN or +inf, and `log_w_target` only finite numbers: a draw from the target has a positive "
            "weight, and the proposal must be able to draw it."
        )
    check_share("confidence", confidence)
    log_w, log_w_target = log_w.detach().double(), log_w_target.detach().double()
    size = log_w.shape[-1]
    log_k = math.log(size)
    lower = log_w.logsumexp(dim=-1) - log_k  # (P, R)
    upper = torch.cat([log_w[..., :-1], log_w_target.unsqueeze(-1)], dim=-1).logsumexp(dim=-1) - log_k
    means = log_w.mean(dim=(1, 2)).tolist(), log_w_target.mean(dim=1).tolist()
    return [_bounds(*row, size, confidence) for row in zip(lower, upper, *means, strict=True)]


def _bounds(
    lower: torch.Tensor, upper: torch.Tensor, mean: float, target_mean: float, size: int, confidence: float
) -> LogZBounds:
    """Bounds from those of each group of `size` draws, (R,), and the mean log-weights under proposal and target."""
    groups, tail = len(lower), (1 - confidence) / 2
    low, high = float(lower.mean()), float(upper.mean())
    # E[mean weight] = Z for draws from q, so the product over groups has the mean Z ** R and exceeds Z ** R / tail with
    # probability `tail` at most (Markov)
    margin = -math.log(tail) / groups
    if groups >= MIN_GROUPS and low > -math.inf:
        margin = float(student.isf(tail, groups - 1)) * float(lower.std()) / math.sqrt(groups)
        if bool((lower != lower[0]).any()):
            # Wider if a few groups are far below the rest, as with weights of 0
            margin = max(margin, low - skewed_interval(lower[None].cpu().numpy(), confidence)[0])
        # A weight of 0 that was never drawn may have a probability of 1 - tail ** (1 / draws), which reduces log Z
        margin = max(margin, -math.log(tail) / (groups * size))
    # E[1 / mean weight] = 1 / Z with the draw from σ; it is near 0 where σ hits a mode that q misses
    inverse = (upper.min() - upper).exp()  # (R,), at most 1
    hits = float(inverse.sum())
    least = clopper_pearson(hits, groups - hits, confidence)[0]
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
    Indices of exact draws, (P, num_samples), from a target whose every completion has been enumerated: `log_target`
    (P, S) is log p + log φ of every completion, in nats, not normalised, such as
    `ExactEvaluator.log_probs` plus β times its `rewards`. Raises `ValueError` if it
    holds NaN or +inf, or a prompt has no completion of positive potential.
    """
    require_shape("log_target", log_target, (-1, -1))
    invalid, empty = log_target.isnan() | (log_target == torch.inf), (log_target == -torch.inf).all(dim=1)
    if bool(invalid.any()) or bool(empty.any()):
        raise ValueError("`log_target` needs numbers below +inf, and for each prompt at least one above −inf.")
    # Probabilities below 1e-308 are lost in float64
    return torch.multinomial(log_target.double().softmax(dim=1), num_samples, replacement=True, generator=generator)
