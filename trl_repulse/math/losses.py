"""Losses of the policy: REINFORCE on its own samples, and the negative term on the proposal's.

Axis letters: P prompts, N completions per prompt, T completion tokens. Log-probabilities are in nats. A sample's
coefficient multiplies the gradient of its ℓ (its reduced log-probability) in the direction of ascent: an advantage for
policy samples, −α·w for proposal samples. Coefficients are computed at sampling time, so that micro-batches may be cut in any way.
A mask is 0 at the positions that do not count.
"""

from typing import Literal, NamedTuple

import torch

from .importance import Reduction, reduce_log_probs, require_shape, sequence_log_prob
from .returns import compute_advantages


AlphaNormalization = Literal["samples", "none"]
NegativeBaseline = Literal["none", "proposal", "policy"]


def scale_gradient(values: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """The same values, whose gradient is multiplied by a factor of the same shape, or one that broadcasts."""
    return values.detach() + factor * (values - values.detach())


def policy_gradient_loss(
    log_p: torch.Tensor,
    mask: torch.Tensor,
    coefficients: torch.Tensor,
    reduction: Reduction = "mean",
    denominator: float | torch.Tensor | None = None,
    old_log_p: torch.Tensor | None = None,
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.2,
) -> torch.Tensor:
    """
    Policy-gradient loss Σ −c·ℓ / denominator, where ℓ is the token mean or sum of a sample's log-probabilities.

    With `old_log_p`, for samples reused after an update: −min(ρ·c, clip(ρ)·c) with the sequence-level ρ = p/p_old, over the
    completion's length if `reduction` is `"mean"`. At ρ = 1 this has the same gradient, but another value.

    Args:
        log_p, mask (`torch.Tensor`):
            Log-probabilities (nats) and mask, both of shape (P, N, T), or (B, 1, T) if groups are split.
        coefficients (`torch.Tensor`):
            Coefficients of shape (P, N), detached here. A sample of coefficient 0 adds exactly 0.
        reduction (`str`, *optional*, defaults to `"mean"`):
            `"mean"` or `"sum"` over a completion's tokens.
        denominator (`float` or `torch.Tensor`, *optional*):
            Divides the sum over samples, by default P·N. To add up micro-batches, give the whole batch's.
        old_log_p (`torch.Tensor`, *optional*):
            Log-probabilities at sampling time, of shape (P, N, T), in nats, detached here.
        epsilon_low, epsilon_high (`float`, *optional*, defaults to `0.2`):
            The ratio is clipped to [1 − epsilon_low, 1 + epsilon_high].

    Returns:
        `torch.Tensor`: Scalar. Gradient flows to `log_p`.

    Raises:
        `ValueError`: If the shapes do not fit together or `reduction` is unknown.
    """
    require_shape("coefficients", coefficients, tuple(log_p.shape[:-1]))
    c = coefficients.detach()
    reduced = reduce_log_probs(log_p, mask, reduction)  # (P, N)
    if old_log_p is None:
        gains = torch.where(c != 0, c * reduced, 0.0)
    else:
        require_shape("old_log_p", old_log_p, tuple(log_p.shape))
        log_ratio = sequence_log_prob(log_p, mask) - sequence_log_prob(old_log_p.detach(), mask)
        ratio = log_ratio.detach().exp()
        clipped = ((c > 0) & (ratio > 1 + epsilon_high)) | ((c < 0) & (ratio < 1 - epsilon_low))
        surrogate = torch.where(
            clipped,
            ratio.clamp(1 - epsilon_low, 1 + epsilon_high),
            log_ratio.masked_fill(clipped | (c == 0), 0.0).exp(),
        )
        length = (mask != 0).sum(dim=-1)
        scale = length.clamp(min=1) if reduction == "mean" else torch.ones_like(length)
        gains = torch.where((c != 0) & (length > 0), c * surrogate / scale, 0.0)
    return -gains.sum() / (gains.numel() if denominator is None else denominator)


def negative_coefficients(
    normalized_w: torch.Tensor, alpha: float, alpha_normalization: AlphaNormalization = "samples"
) -> torch.Tensor:
    """
    Coefficients of proposal samples that make [`policy_gradient_loss`], divided by P·N, the second term of Eq. 4.

    Args:
        normalized_w (`torch.Tensor`):
            Weights of shape (P, N), which sum to 1 (or 0) within each prompt.
        alpha (`float`):
            Weight of the term.
        alpha_normalization (`str`, *optional*, defaults to `"samples"`):
            `"samples"`: −α·w, as for the published α, which is Eq. 4 with α / N. `"none"`: −α·N·w, Eq. 4 itself, whose
            fixed point does not depend on N.

    Returns:
        `torch.Tensor`: Coefficients of shape (P, N), detached.

    Raises:
        `ValueError`: If `alpha_normalization` is unknown.
    """
    require_shape("normalized_w", normalized_w, (-1, -1))
    if alpha_normalization not in ("samples", "none"):
        raise ValueError(f"`alpha_normalization` must be 'samples' or 'none', got {alpha_normalization!r}.")
    factor = normalized_w.shape[1] if alpha_normalization == "none" else 1
    return -alpha * factor * normalized_w.detach()


def negative_reinforce_coefficients(
    normalized_w: torch.Tensor,
    returns_neg: torch.Tensor,
    alpha: float,
    baseline: NegativeBaseline = "none",
    returns: torch.Tensor | None = None,
    alpha_normalization: AlphaNormalization = "samples",
) -> torch.Tensor:
    """
    Coefficients α·w·(R − b) of negative-REINFORCE, a variant which the RePULSe paper found harmful.

    Args:
        normalized_w, alpha, alpha_normalization:
            As for [`negative_coefficients`].
        returns_neg (`torch.Tensor`):
            Returns of the proposal samples, of shape (P, N); NaN leaves a sample out.
        baseline (`str`, *optional*, defaults to `"none"`):
            b. `"proposal"`: unweighted mean return of the prompt's other proposal samples (`"expectation"` in the research
            code). `"policy"`: mean return of its policy samples (`"other_expectation"`). `"none"`: 0.
        returns (`torch.Tensor`, *optional*):
            Returns of the policy samples, of shape (P, any), for `"policy"`. A prompt whose returns are all NaN gets 0.

    Returns:
        `torch.Tensor`: Coefficients of shape (P, N), detached.

    Raises:
        `ValueError`: If `baseline` is unknown, `"policy"` lacks `returns`, or `"proposal"` has N = 1.
    """
    require_shape("returns_neg", returns_neg, tuple(normalized_w.shape))
    if baseline == "policy":
        if returns is None:
            raise ValueError("`baseline='policy'` needs `returns`, the returns of the policy samples.")
        require_shape("returns", returns, (returns_neg.shape[0], -1))
        advantages = compute_advantages(returns_neg - returns.nanmean(dim=1, keepdim=True), "none")
    elif baseline in ("none", "proposal"):
        advantages = compute_advantages(returns_neg, "none" if baseline == "none" else "leave_one_out")
    else:
        raise ValueError(f"`baseline` must be 'none', 'proposal' or 'policy', got {baseline!r}.")
    return -negative_coefficients(normalized_w, alpha, alpha_normalization) * advantages


class WeightedSamples(NamedTuple):
    """Samples of one kind, with their coefficients in [`repulse_loss`]."""

    log_p: torch.Tensor  # (P, N, T), nats
    mask: torch.Tensor  # (P, N, T), 0 at the positions that do not count
    coefficients: torch.Tensor  # (P, N)
    old_log_p: torch.Tensor | None = None  # (P, N, T), nats, of samples that are used again


def repulse_loss(
    own: WeightedSamples,
    negative: WeightedSamples | None = None,
    reduction: Reduction = "mean",
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.2,
) -> torch.Tensor:
    """
    The policy's loss, Eq. 4 of [RePULSe](https://huggingface.co/papers/2510.21184): REINFORCE plus the negative term.

    With `reduction="sum"`, `alpha_normalization="none"` and exact weights, its expected gradient is that of
    −E_p[R] + α·log E_p[φ]. The defaults are the published conventions, which differ by 1/N and 1/length.

    Args:
        own ([`WeightedSamples`]):
            The policy's samples, with their advantages, plus −α·w if they are in the negative term too.
        negative ([`WeightedSamples`], *optional*):
            Samples drawn for the negative term, with the [`negative_coefficients`]. P and N may differ.
        reduction, epsilon_low, epsilon_high:
            As for [`policy_gradient_loss`].

    Returns:
        `torch.Tensor`: Scalar. Gradient flows to the log-probabilities of both.
    """
    clipping = epsilon_low, epsilon_high
    loss = policy_gradient_loss(*own[:3], reduction, None, own.old_log_p, *clipping)
    if negative is not None:
        loss = loss + policy_gradient_loss(*negative[:3], reduction, None, negative.old_log_p, *clipping)
    return loss
