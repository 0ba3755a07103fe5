"""What PPO adds to a policy gradient: advantages from a value model, and that model's loss.

Axis letters: B completions (rows), T completion tokens. V(s_t) is the value *before* token t: the expected sum of the
token rewards from t on, given the prompt and the completion's tokens before t. A mask is 0 at positions that are not the
policy's (padding, what a tool wrote); they are stepped over, not averaged in. Everything but [`value_loss`] is detached.

The clipped surrogate of the policy is GRPO's own in TRL, which takes advantages of shape (B, T). Rewards of tokens are
made by [`~trl_repulse.math.returns.kl_token_rewards`].
"""

from collections.abc import Callable

import torch

from .importance import require_shape


def _alone(totals: torch.Tensor) -> torch.Tensor:
    return totals


def generalized_advantages(
    rewards: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    gamma: float = 1.0,
    gae_lambda: float = 0.95,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Generalized advantage estimation ([Schulman et al., 2016](https://huggingface.co/papers/1506.02438)).

    A_t = δ_t + γλ·A_{t'}, with δ_t = r_t + γ·V(s_{t'}) − V(s_t) and t' the next position of mask 1. Nothing is expected
    after the last of them, also where the completion was cut off at its maximal length: the reward was given for the text
    as it is. With λ = 1 the advantage is the discounted sum of the rewards to come less V(s_t), with λ = 0 it is δ_t.

    Args:
        rewards (`torch.Tensor`):
            Token rewards of shape (B, T). What stands at masked positions is ignored.
        values (`torch.Tensor`):
            V(s_t) of shape (B, T), in units of reward.
        mask (`torch.Tensor`):
            Mask of shape (B, T). Zeros may stand anywhere.
        gamma (`float`, *optional*, defaults to `1.0`):
            Discount γ of a token's delay, from 0 to 1.
        gae_lambda (`float`, *optional*, defaults to `0.95`):
            λ, from 0 (trusts the values) to 1 (trusts the sampled rewards).

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`:
            Advantages and returns (advantage + value, the values' regression target), each of shape (B, T), 0 where
            masked, detached, in float32 at least.

    Raises:
        `ValueError`: If the shapes differ.
    """
    require_shape("values", values, tuple(rewards.shape))
    require_shape("mask", mask, tuple(rewards.shape))
    counts = mask != 0  # (B, T)
    dtype = torch.promote_types(torch.promote_types(rewards.dtype, values.dtype), torch.float32)
    rewards = rewards.detach().to(dtype).masked_fill(~counts, 0.0)
    values = values.detach().to(dtype).masked_fill(~counts, 0.0)
    advantages = torch.zeros_like(rewards)
    running = next_value = rewards.new_zeros(rewards.size(0))  # (B,)
    for t in reversed(range(rewards.size(1))):
        here = counts[:, t]
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        running = torch.where(here, delta + gamma * gae_lambda * running, running)
        next_value = torch.where(here, values[:, t], next_value)
        advantages[:, t] = torch.where(here, running, 0.0)
    return advantages, advantages + values


def masked_moments(
    values: torch.Tensor, mask: torch.Tensor, reduce: Callable[[torch.Tensor], torch.Tensor] = _alone
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Mean and (biased) variance of the values at the positions that count, over all processes.

    Args:
        values (`torch.Tensor`):
            Values of shape (B, T).
        mask (`torch.Tensor`):
            Mask of shape (B, T).
        reduce (`Callable`, *optional*):
            Sums a tensor over processes. Called twice: the variance is formed around the mean of all of them.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: Two scalars, detached; 0 where no position counts.
    """
    require_shape("mask", mask, tuple(values.shape))
    counted = values.detach()[mask != 0]
    total, count = reduce(torch.stack([counted.sum(), counted.new_tensor(float(counted.numel()))]))
    mean = total / count.clamp(min=1)
    return mean, reduce((counted - mean).square().sum()) / count.clamp(min=1)


def whiten(
    values: torch.Tensor,
    mask: torch.Tensor,
    reduce: Callable[[torch.Tensor], torch.Tensor] = _alone,
    epsilon: float = 1e-8,
) -> torch.Tensor:
    """
    Shifts and scales values to mean 0 and variance 1 over the positions that count, in all processes together.

    Args:
        values (`torch.Tensor`):
            Values of shape (B, T).
        mask (`torch.Tensor`):
            Mask of shape (B, T).
        reduce (`Callable`, *optional*):
            As for [`masked_moments`].
        epsilon (`float`, *optional*, defaults to `1e-8`):
            Added to the variance: values that are all equal become 0.

    Returns:
        `torch.Tensor`: Values of shape (B, T), 0 where masked, detached.
    """
    mean, variance = masked_moments(values, mask, reduce)
    return ((values.detach() - mean) * torch.rsqrt(variance + epsilon)).masked_fill(mask == 0, 0.0)


def value_loss(
    values: torch.Tensor,
    old_values: torch.Tensor,
    returns: torch.Tensor,
    mask: torch.Tensor,
    clip: float | None = 0.2,
    denominator: float | torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Half the squared error of the values, the worse of clipped and unclipped at each token.

    The clipped value stays within `clip` of the one at sampling time: a token whose value has moved further, and not away
    from its return, has no gradient.

    Args:
        values (`torch.Tensor`):
            Values under the model as it is, of shape (B, T).
        old_values (`torch.Tensor`):
            Values at sampling time, of shape (B, T), detached here.
        returns (`torch.Tensor`):
            Regression targets of shape (B, T), detached here.
        mask (`torch.Tensor`):
            Mask of shape (B, T).
        clip (`float`, *optional*, defaults to `0.2`):
            How far a value may move from its old one, in units of reward; `None` does not clip.
        denominator (`float` or `torch.Tensor`, *optional*):
            What the sum over tokens is divided by, the number of tokens that count by default. To add up
            micro-batches, give the whole batch's.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`:
            The loss, a scalar whose gradient flows to `values`, and the share of tokens at which the clipped error was
            the worse, over the same denominator, detached.

    Raises:
        `ValueError`: If the shapes differ.
    """
    for name, tensor in (("old_values", old_values), ("returns", returns), ("mask", mask)):
        require_shape(name, tensor, tuple(values.shape))
    counts = mask != 0  # (B, T)
    dtype = torch.promote_types(values.dtype, torch.float32)
    # Filled before any arithmetic: what stands at masked positions must not reach the gradient, NaN included
    now = values.to(dtype).masked_fill(~counts, 0.0)
    old, target = (x.detach().to(dtype).masked_fill(~counts, 0.0) for x in (old_values, returns))
    errors = (now - target).square()  # (B, T)
    clipped = torch.zeros_like(counts)
    if clip is not None:
        clipped_errors = (old + (now - old).clamp(-clip, clip) - target).square()
        clipped = ((now - old).abs() > clip) & (clipped_errors > errors)  # within, they differ by rounding alone
        errors = torch.maximum(errors, clipped_errors)
    if denominator is None:
        denominator = counts.sum().clamp(min=1)
    return 0.5 * errors.sum() / denominator, clipped.sum().to(dtype) / denominator


def approximate_kl(
    log_p: torch.Tensor, old_log_p: torch.Tensor, mask: torch.Tensor, denominator: float | torch.Tensor | None = None
) -> torch.Tensor:
    """
    KL divergence of the updated policy from the one that sampled, estimated on its samples.

    The k3 estimator ρ − 1 − log ρ with ρ = p/p_old, which is never negative.

    Args:
        log_p, old_log_p (`torch.Tensor`):
            Log-probabilities (nats) under the policy as it is and as it sampled, of shape (B, T).
        mask (`torch.Tensor`):
            Mask of shape (B, T).
        denominator (`float` or `torch.Tensor`, *optional*):
            As for [`value_loss`].

    Returns:
        `torch.Tensor`: Scalar, nats a token, detached.
    """
    require_shape("old_log_p", old_log_p, tuple(log_p.shape))
    require_shape("mask", mask, tuple(log_p.shape))
    dtype = torch.promote_types(log_p.dtype, torch.float32)
    log_ratio = (log_p.detach().to(dtype) - old_log_p.detach()).masked_fill(mask == 0, 0.0)
    if denominator is None:
        denominator = (mask != 0).sum().clamp(min=1)
    return (log_ratio.exp() - 1 - log_ratio).sum() / denominator
