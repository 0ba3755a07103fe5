"""What PPO adds to a policy gradient: advantages from a value model, and that model's loss.

Axis letters: B completions (rows), T completion tokens. V(s_t) is the value *before* token t: the expected sum of the
token rewards from t on, given the prompt and the completion's tokens before t. A mask is 0 at positions that are not the
policy's (padding, the output of tools), which are skipped. Everything but [`value_loss`] is detached.

TRL's GRPO has the clipped surrogate of the policy, for advantages of shape (B, T). Token rewards come from
[`~trl_repulse.math.objective.kl_token_rewards`].
"""

from collections.abc import Callable, Sequence

import torch

from .importance import require_shape


def _alone(totals: torch.Tensor) -> torch.Tensor:
    """The sum over processes where there is one process."""
    return totals


def generalized_advantages(
    rewards: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    gamma: float = 1.0,
    gae_lambda: float | Sequence[float] = 0.95,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Generalized advantage estimation ([Schulman et al., 2016](https://huggingface.co/papers/1506.02438)).

    A_t = δ_t + γλ·A_{t'}, with δ_t = r_t + γ·V(s_{t'}) − V(s_t) and t' the next position of mask 1. The value after the last
    of them is 0, also for a completion cut off at its maximal length, whose text was rewarded as it is.

    Args:
        rewards, values, mask (`torch.Tensor`):
            Token rewards, V(s_t) in units of reward, and mask, with zeros anywhere, all of shape (B, T).
        gamma (`float`, *optional*, defaults to `1.0`):
            Discount γ per token, from 0 to 1.
        gae_lambda (`float` or `Sequence[float]`, *optional*, defaults to `0.95`):
            λ, from 0 (A_t = δ_t) to 1 (A_t is the discounted sum of rewards minus V(s_t)), or one for each of the T positions.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: Advantages and returns (advantage + value, the values' regression target), each of
        shape (B, T), 0 where masked, detached, in float32 at least.

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
    lambdas = torch.as_tensor(gae_lambda, dtype=torch.float64).expand(rewards.size(1)).tolist()
    for t in reversed(range(rewards.size(1))):
        counted = counts[:, t]
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        running = torch.where(counted, delta + gamma * lambdas[t] * running, running)
        next_value = torch.where(counted, values[:, t], next_value)
        advantages[:, t] = torch.where(counted, running, 0.0)
    return advantages, advantages + values


def whiten(
    values: torch.Tensor, mask: torch.Tensor, reduce: Callable[[torch.Tensor], torch.Tensor] = _alone
) -> torch.Tensor:
    """
    Shifts and scales values to mean 0 and variance 1 over the positions that count, in all processes together. Values that are all equal
    become 0.

    Args:
        values, mask (`torch.Tensor`):
            Values and mask, both of shape (B, T).
        reduce (`Callable`, *optional*):
            Sums a tensor over processes, which must all make this call; by default there is one. Called twice, since the (biased) variance
            is about the mean of all values.

    Returns:
        `torch.Tensor`: Values of shape (B, T), 0 where masked, detached.
    """
    require_shape("mask", mask, tuple(values.shape))
    counted = values.detach()[mask != 0]
    total, count = reduce(torch.stack([counted.sum(), counted.new_tensor(float(counted.numel()))]))
    mean = total / count.clamp(min=1)
    variance = reduce((counted - mean).square().sum()) / count.clamp(min=1)
    return ((values.detach() - mean) * torch.rsqrt(variance + 1e-8)).masked_fill(mask == 0, 0.0)


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

    A token whose value has moved further than `clip` from the one at sampling time, towards its return, has no gradient.

    Args:
        values, old_values, returns, mask (`torch.Tensor`):
            Values now and at sampling time, their regression targets, and mask, all of shape (B, T). All but `values` are detached here.
        clip (`float`, *optional*, defaults to `0.2`):
            How far a value may move from its old one, in units of reward; `None` does not clip.
        denominator (`float` or `torch.Tensor`, *optional*):
            Divides the sum over tokens, by default the number that count. To add up micro-batches, give the whole batch's.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: The loss, a scalar whose gradient flows to `values`, and the share of tokens at
        which the clipped error was the worse, over the same denominator, detached.

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
        clipped = ((now - old).abs() > clip) & (clipped_errors > errors)  # unclipped, they differ by rounding alone
        errors = torch.maximum(errors, clipped_errors)
    if denominator is None:
        denominator = counts.sum().clamp(min=1)
    return 0.5 * errors.sum() / denominator, clipped.sum().to(dtype) / denominator


def approximate_kl(
    log_p: torch.Tensor, old_log_p: torch.Tensor, mask: torch.Tensor, denominator: float | torch.Tensor | None = None
) -> torch.Tensor:
    """
    KL divergence of the updated policy from the one that sampled: the k3 estimator ρ − 1 − log ρ ≥ 0 with ρ = p/p_old.

    Args:
        log_p, old_log_p, mask (`torch.Tensor`):
            Log-probabilities (nats) under the policy now and at sampling time, and mask, all of shape (B, T).
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
