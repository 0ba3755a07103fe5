"""Returns of sampled completions (reward less a KL penalty) and their advantages.

Axis letters: P prompts, N completions per prompt, T completion tokens. Log-probabilities are in nats. Everything here
is made at sampling time and detached. A mask is 0 at the positions that do not count.
"""

from typing import Literal

import torch

from .importance import require_shape, zero_masked


Baseline = Literal["leave_one_out", "group_mean", "constant", "none"]
# Against division by 0, in units of return; TRL's value
_EPSILON = 1e-4
# Rounding error allowed in a number of samples
_ROUNDING = 1e-6


def kl_token_rewards(
    log_p: torch.Tensor, log_ref: torch.Tensor, reward: torch.Tensor, kl_coefficient: float, mask: torch.Tensor
) -> torch.Tensor:
    """
    Reward of each token: −coefficient·(log p − log p_0), plus the completion's reward at its last token.

    The KL term is the k1 estimator, one sample of each token's log-ratio, which can be negative.

    Args:
        log_p, log_ref, mask (`torch.Tensor`):
            Log-probabilities (nats) under the policy that drew the completions and under the reference, and mask, all of shape
            (P, N, T).
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


def cvar_rewards(rewards: torch.Tensor, level: float) -> torch.Tensor:
    """
    Rewards whose mean is the conditional value at risk (CVaR): t − max(t − r, 0) / κ, with t the κ-quantile.

    CVaR at level κ is the mean of the worst share κ of rewards, and equals max_t {t − E[max(t − r, 0)] / κ} (Rockafellar
    and Uryasev, 2000). At the best t, the κ-quantile, it has the gradient of the expectation. So REINFORCE on these rewards
    is the policy gradient of CVaR, with any baseline and any κ; κ = 1 leaves rewards as they are.
    [RA-RLHF](https://huggingface.co/papers/2501.06911) instead keeps only the worst share of a batch, with PPO's advantages.

    Of M rewards t is the one at rank ⌈κ·(M − 1)⌉ + 1 from below: for each reward below it, the κ-quantile of the others. For
    κ < 1 the estimate of the gradient has a bias of order 1 / M, since t and the baseline are from the same samples: in an
    example with κ = 0.25 it was 42% of the gradient for M = 4, and 12% for M = 16.

    Args:
        rewards (`torch.Tensor`):
            Rewards of shape (G, M), in G groups with a tail each; NaN leaves a sample out.
        level (`float`):
            κ, the share of the rewards in the tail, above 0 and at most 1.

    Returns:
        `torch.Tensor`: Of shape (G, M), in units of reward, detached; NaN where the reward is.

    Raises:
        `ValueError`: If `level` is not in (0, 1].
    """
    require_shape("rewards", rewards, (-1, -1))
    if not 0 < level <= 1:
        raise ValueError(f"`level` must be above 0 and at most 1, got {level}.")
    rewards = rewards.detach()
    count = (~rewards.isnan()).sum(dim=1, keepdim=True)  # (G, 1)
    under = (level * (count - 1) - _ROUNDING).ceil().long().clamp(min=0)
    ranked = rewards.nan_to_num(nan=torch.inf).sort(dim=1).values
    quantile = ranked.gather(1, under)
    return quantile - (quantile - rewards).clamp(min=0) / level


def cvar_schedule(level: float, ratio: float, progress: float) -> float:
    """
    Level of CVaR at a `progress` in [0, 1] of training: RA-RLHF's soft schedule, which falls linearly from 1 and reaches `level`
    at `progress=ratio`.
    """
    return level if progress >= ratio else 1.0 - (1.0 - level) * progress / ratio


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
        `torch.Tensor`: Advantages of shape (P, N), detached. A sample left out gets 0 and is in no baseline, mean or standard
        deviation. So does the only sample left of a prompt under `"leave_one_out"` and `"group_mean"`, and, normalised, the
        only one of the batch.

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
