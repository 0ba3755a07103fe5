"""What the policy maximizes: transforms and potentials of rewards, returns, advantages, coefficients and the loss.

Axis letters: P prompts, N completions per prompt, T completion tokens.
"""

import math
from ctypes import c_float
from typing import Any, Literal, NamedTuple

import torch
from torch.nn import functional

from .importance import Reduction, reduce_log_probs, require_shape, sequence_log_prob, zero_masked


def is_below(rewards: torch.Tensor, threshold: float) -> torch.Tensor:
    """Mask 1[r < η], of the rewards' shape; false for NaN. The threshold is rounded to float32 like rewards: 0.7 is not under 0.7."""
    return rewards.float() < c_float(threshold).value


def exponential_transform(reward: torch.Tensor, alpha: float, beta: float) -> torch.Tensor:
    """
    Transformed reward r' = r − α·exp(β·r), which penalises low rewards ever more steeply: a baseline of
    [RePULSe](https://huggingface.co/papers/2510.21184).

    α is at least 0, in units of reward; β is negative, in 1 / units of reward. For β·r > 88 in float32 the exponential
    overflows and r' is −inf; cap or scale such rewards first. Raises `ValueError` if a parameter is out of range.
    """
    if not beta < 0:
        raise ValueError(f"`beta` must be negative so that low rewards are punished, got {beta}; try {-abs(beta)}.")
    _require_non_negative("alpha", alpha)
    return reward - alpha * torch.exp(beta * reward)


def indicator_transform(reward: torch.Tensor, alpha: float, threshold: float) -> torch.Tensor:
    """Transformed reward r' = r − α·1[r < η], which subtracts α, at least 0 and in units of reward, from every reward
    below the threshold η. Raises `ValueError` if `alpha` is negative."""
    _require_non_negative("alpha", alpha)
    return reward - alpha * is_below(reward, threshold).to(reward.dtype)


def transform_rewards(args: Any, reward: torch.Tensor) -> torch.Tensor:
    """The reward r' that the policy maximises, by the transform of a [`~trl_repulse.configs.SharedConfig`]; r itself without one."""
    if args.reward_transform == "exponential":
        return exponential_transform(reward, args.reward_transform_alpha, args.reward_transform_beta)
    if args.reward_transform == "indicator":
        return indicator_transform(reward, args.reward_transform_alpha, args.reward_transform_threshold)
    return reward


def tilted_log_potential(reward: torch.Tensor, beta: float, reward_cap: float | None = None) -> torch.Tensor:
    """
    log φ = β·min(r, cap), in nats, of the tilted target σ(s) ∝ p(s)·exp(β·min(r, cap)).

    The paper writes exp(−β·r) with β > 0. Here, as in the published commands, β has the sign, in nats per unit of reward:
    negative for low rewards.
    """
    return beta * (reward if reward_cap is None else reward.clamp(max=reward_cap))


def indicator_log_potential(reward: torch.Tensor, threshold: float, eps: float = 1e-16) -> torch.Tensor:
    """
    log φ = log(1[r < η] + ε), in nats, of the target restricted to bad outputs.

    ε is the potential of a good output, at least 0; with 0 its log φ is −inf. Its logarithm is computed in double precision,
    so that it does not vanish for rewards in half precision. NaN stays NaN. Raises `ValueError` if `eps` is negative.
    """
    _require_non_negative("eps", eps)
    good, bad = (math.log(eps) if eps > 0 else -math.inf), math.log1p(eps)
    log_potential = torch.full_like(reward, good).masked_fill(is_below(reward, threshold), bad)
    return torch.where(reward.isnan(), reward, log_potential)


def class_log_potential(logit: torch.Tensor, beta: float, target_class: Literal[0, 1] = 1) -> torch.Tensor:
    """log φ = β·log P(class | s), in nats, of the target that prefers the class 0 or 1 of a binary classifier, given
    its logit of class 1: log P(1) = log sigmoid(logit), log P(0) = −softplus(logit). β is positive to seek the
    class. Raises `ValueError` if `target_class` is neither 0 nor 1."""
    if target_class not in (0, 1):
        raise ValueError(f"`target_class` must be 0 or 1, got {target_class!r}.")
    return beta * functional.logsigmoid(logit if target_class == 1 else -logit)


def geometric_schedule(start: float, end: float, progress: float) -> float:
    """The value start · (end / start) ** progress, which changes by the same factor in equal steps, for a progress in
    [0, 1]. Both ends are finite, not 0 and of one sign."""
    ratio: float = end / start
    return end if progress == 1.0 else start * math.pow(ratio, progress)


def _require_non_negative(name: str, value: float) -> None:
    if not value >= 0:
        raise ValueError(f"`{name}` must be at least 0, got {value}.")


Baseline = Literal["leave_one_out", "group_mean", "constant", "none"]
# Against division by 0, in units of return; TRL's value
_EPSILON = 1e-4


def kl_token_rewards(
    log_p: torch.Tensor, log_ref: torch.Tensor, reward: torch.Tensor, kl_coefficient: float, mask: torch.Tensor
) -> torch.Tensor:
    """
    Reward of each token: −coefficient·(log p − log p_0), plus the completion's reward at its last token.

    The KL term is the k1 estimator, one sample of each token's log-ratio, which can be negative.

    Args:
        log_p, log_ref, mask (`torch.Tensor`):
            Log-probabilities (nats) under the policy that drew the completions and under the reference, and mask, all of shape (P, N, T).
        reward (`torch.Tensor`):
            Rewards of shape (P, N), after the transform. NaN puts NaN at the last token.
        kl_coefficient (`float`):
            In units of reward per nat.

    Returns:
        `torch.Tensor`: Token rewards of shape (P, N, T), 0 where masked and for empty completions, detached. The log-ratio has
        the precision of the log-probabilities, the rest that of the reward if it is higher.

    Raises:
        `ValueError`: If the shapes do not fit together.
    """
    require_shape("log_ref", log_ref, tuple(log_p.shape))
    require_shape("reward", reward, tuple(log_p.shape[:-1]))
    log_ratio = zero_masked(log_p, mask).detach() - zero_masked(log_ref, mask).detach()
    dtype = torch.promote_types(log_ratio.dtype, reward.dtype)
    penalty = -kl_coefficient * log_ratio.to(dtype)
    # (P, N, T), 1-based, 0 if masked
    positions = torch.arange(1, mask.shape[-1] + 1, device=mask.device) * (mask != 0)
    last = (positions == positions.amax(dim=-1, keepdim=True)) & (positions > 0)
    return torch.where(last, penalty + reward.detach().to(dtype).unsqueeze(-1), penalty)


def compute_advantages(
    returns: torch.Tensor, baseline: Baseline = "leave_one_out", constant: float = 0.0, normalize: bool = False
) -> torch.Tensor:
    """
    Advantages: returns minus a baseline, and optionally normalised over all samples.

    `"none"` with `normalize` is [REINFORCE++](https://huggingface.co/papers/2501.03262), `"group_mean"` with it
    REINFORCE++-baseline: the statistics are those of the whole batch, not of a prompt as in GRPO. The paper normalises
    advantages of tokens, each with the KL penalty of later tokens; here a completion has one advantage with its whole penalty.

    Args:
        returns (`torch.Tensor`):
            Returns of shape (P, N); NaN leaves a sample out. With `normalize`, those of the whole batch over all processes.
        baseline (`str`, *optional*, defaults to `"leave_one_out"`):
            `"leave_one_out"`: mean return of the prompt's other samples; `"group_mean"`: mean return of all the
            prompt's samples, which multiplies every advantage by (N − 1)/N; `"constant"`: `constant`; `"none"`: 0.
        constant (`float`, *optional*, defaults to `0.0`):
            The constant of `"constant"`, in units of return.
        normalize (`bool`, *optional*, defaults to `False`):
            Whether to subtract the mean of all advantages and divide by their standard deviation + 1e-4 (with Bessel's
            correction, as TRL does).

    Returns:
        `torch.Tensor`: Advantages of shape (P, N), detached. A sample left out gets 0 and is in no baseline, mean or standard deviation. So
        does the only sample left of a prompt under `"leave_one_out"` and `"group_mean"`, and, normalised, the only one of the batch.

    Raises:
        `ValueError`: If N is 1 under `"leave_one_out"` or `"group_mean"`, a return is infinite, or `baseline` is unknown.
    """
    require_shape("returns", returns, (-1, -1))
    returns = returns.detach()
    if bool(returns.isinf().any()):
        raise ValueError("A return is infinite; bound the reward, or return NaN (`None`) to leave a sample out.")
    scored = ~returns.isnan()  # (P, N)
    known = returns.masked_fill(~scored, 0.0)
    if baseline in ("leave_one_out", "group_mean"):
        if returns.shape[1] < 2:
            raise ValueError(f"`baseline={baseline!r}` needs N >= 2 per prompt; draw more or use another baseline.")
        count, total = scored.sum(dim=1, keepdim=True), known.sum(dim=1, keepdim=True)  # (P, 1)
        scored = scored & (count > 1)
        if baseline == "leave_one_out":
            count, total = count - 1, total - known
        advantages = known - total / count.clamp(min=1)
    elif baseline in ("constant", "none"):
        advantages = known - (constant if baseline == "constant" else 0.0)
    else:
        raise ValueError(f"`baseline` must be 'leave_one_out', 'group_mean', 'constant' or 'none', got {baseline!r}.")
    if normalize:
        counted = advantages[scored]
        spread = counted.std() if len(counted) > 1 else torch.inf
        advantages = (advantages - counted.mean()) / (spread + _EPSILON)
    return torch.where(scored, advantages, 0.0)


def prefix_values(rewards: torch.Tensor, prefix_rewards: torch.Tensor) -> torch.Tensor:
    """
    What the reward of a prefix predicts of the whole completion's: the values of the tokens behind it.

    For each prefix a line is fitted to the other completions, so that the value of a token depends on nothing that follows it: as a
    baseline it leaves the expected gradient the same. The mean square of the prefix rewards is added to the slope's denominator, which
    shrinks it.

    Args:
        rewards (`torch.Tensor`): Rewards of shape (B,), of all completions of the batch; NaN leaves one out.
        prefix_rewards (`torch.Tensor`): Rewards of S prefixes of each, of shape (B, S); what is not finite counts as the mean.

    Returns:
        `torch.Tensor`: Of shape (B, S), detached; 0 for a completion that is left out, and its own reward for one without others.
    """
    require_shape("prefix_rewards", prefix_rewards, (len(rewards), -1))
    # Some devices have no float64
    y, x = (each.detach().cpu().double() for each in (rewards.unsqueeze(1), prefix_rewards))
    scored = ~y.isnan()  # (B, 1)
    x = torch.where(scored & x.isfinite(), x, torch.nan)
    x, y, w = (x - x.nanmean(dim=0)).nan_to_num(0.0), y.nan_to_num(0.0), scored.double()
    n = (w.sum() - w).clamp(min=1)  # of the others, as all below
    mean_x, mean_y = (x.sum(0) - x) / n, (y.sum() - y) / n
    xx = x.square().sum(0) - x.square() - n * mean_x.square()
    xy = (x * y).sum(0) - x * y - n * mean_x * mean_y
    spread = x.square().sum(0) / w.sum().clamp(min=1)
    slope = torch.where(spread > 0, xy / (xx + spread).clamp(min=torch.finfo(x.dtype).tiny), 0.0)
    values = mean_y + slope * (x - mean_x) if w.sum() > 1 else y.expand_as(x)
    return (values * w).to(rewards)


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

    With `old_log_p`, for samples reused after an update: −min(ρ·c, clip(ρ)·c) with the sequence-level ρ = p/p_old, divided by the
    completion's length if `reduction` is `"mean"`. At ρ = 1 this has the same gradient, but another value.

    Args:
        log_p, mask (`torch.Tensor`):
            Log-probabilities (nats) and mask, both of shape (P, N, T), or (B, 1, T) if groups are split.
        coefficients (`torch.Tensor`):
            Coefficients of shape (P, N), or without `old_log_p` (P, N, T), detached here. A sample of coefficient 0 adds exactly 0.
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
    if coefficients.shape == log_p.shape and old_log_p is None:  # of tokens
        c = coefficients.detach()
        log_p, coefficients = torch.where(c != 0, c * log_p, 0.0), c.new_ones(c.shape[:-1])
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
            log_ratio.masked_fill(
                clipped | (c == 0), 0.0
            ).exp(),  # an overflow in what is not taken would make the gradient NaN
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
    coefficients: torch.Tensor  # (P, N), or (P, N, T)
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
