"""Returns of sampled completions (reward less a KL penalty) and their advantages.

Axis letters: P prompts, N completions per prompt, T completion tokens. Log-probabilities are in nats. Everything here
is made at sampling time and detached.
"""

from typing import Literal

import torch

from .importance import require_shape, zero_masked


Baseline = Literal["leave_one_out", "constant", "none"]


def kl_token_rewards(
    log_p: torch.Tensor, log_ref: torch.Tensor, reward: torch.Tensor, kl_coefficient: float, mask: torch.Tensor
) -> torch.Tensor:
    """
    Reward of each token: −coefficient·(log p − log p_0), and the completion's reward on top at its last token.

    The KL term is the k1 estimator, one sample of each token's log-ratio, which can be negative.

    Args:
        log_p (`torch.Tensor`):
            Log-probabilities under the policy that drew the completions, of shape (P, N, T), in nats.
        log_ref (`torch.Tensor`):
            The same under the reference, of shape (P, N, T), in nats.
        reward (`torch.Tensor`):
            Rewards of shape (P, N), transformed if there is a transform. NaN puts NaN at the last token.
        kl_coefficient (`float`):
            Price of a nat, in units of reward.
        mask (`torch.Tensor`):
            Mask of shape (P, N, T), 0 at the positions that do not count.

    Returns:
        `torch.Tensor`:
            Token rewards of shape (P, N, T), 0 where masked, detached. An empty completion has no token to carry its
            reward: all 0. The log-ratio is formed in the precision of the log-probabilities, the rest in the reward's
            if that is higher.

    Raises:
        `ValueError`: If the shapes do not fit together.
    """
    require_shape("log_ref", log_ref, tuple(log_p.shape))
    require_shape("reward", reward, tuple(log_p.shape[:-1]))
    log_ratio = zero_masked(log_p, mask).detach() - zero_masked(log_ref, mask).detach()
    dtype = torch.promote_types(log_ratio.dtype, reward.dtype)
    penalty = -kl_coefficient * log_ratio.to(dtype)
    positions = torch.arange(1, mask.shape[-1] + 1, device=mask.device) * (
        mask != 0
    )  # (P, N, T), 1-based, 0 if masked
    last = (positions == positions.amax(dim=-1, keepdim=True)) & (positions > 0)
    return torch.where(last, penalty + reward.detach().to(dtype).unsqueeze(-1), penalty)


def kl_penalized_returns(
    log_p: torch.Tensor, log_ref: torch.Tensor, reward: torch.Tensor, kl_coefficient: float, mask: torch.Tensor
) -> torch.Tensor:
    """
    Return of each completion: its reward less coefficient · Σ_t (log p − log p_0).

    Args:
        log_p, log_ref, reward, kl_coefficient, mask:
            As for [`kl_token_rewards`].

    Returns:
        `torch.Tensor`:
            Returns of shape (P, N), detached; NaN where the reward is. An empty completion keeps its reward, unlike
            the sum of its token rewards.

    Raises:
        `ValueError`: If the shapes do not fit together.
    """
    token_penalties = kl_token_rewards(log_p, log_ref, torch.zeros_like(reward), kl_coefficient, mask)
    return token_penalties.sum(dim=-1) + reward.detach()


def compute_advantages(
    returns: torch.Tensor, baseline: Baseline = "leave_one_out", constant: float = 0.0
) -> torch.Tensor:
    """
    Advantages: returns less a baseline.

    Args:
        returns (`torch.Tensor`):
            Returns of shape (P, N); NaN leaves a sample out.
        baseline (`str`, *optional*, defaults to `"leave_one_out"`):
            `"leave_one_out"`: mean return of the prompt's other samples; `"constant"`: `constant`; `"none"`: nothing.
        constant (`float`, *optional*, defaults to `0.0`):
            The constant of `"constant"`, in units of return.

    Returns:
        `torch.Tensor`:
            Advantages of shape (P, N), detached. A sample left out gets 0 and is in no other sample's baseline; the
            only sample left of a prompt gets 0 under `"leave_one_out"`.

    Raises:
        `ValueError`: If N is 1 under `"leave_one_out"`, a return is infinite, or `baseline` is unknown.
    """
    require_shape("returns", returns, (-1, -1))
    returns = returns.detach()
    if bool(returns.isinf().any()):
        raise ValueError("A return is infinite; bound the reward, or return NaN (`None`) to leave a sample out.")
    scored = ~returns.isnan()  # (P, N)
    known = returns.masked_fill(~scored, 0.0)
    if baseline == "leave_one_out":
        if returns.shape[1] < 2:
            raise ValueError("`baseline='leave_one_out'` needs N >= 2 per prompt; draw more or use another baseline.")
        others = (scored.sum(dim=1, keepdim=True) - 1).clamp(min=0)  # (P, 1)
        mean_of_others = (known.sum(dim=1, keepdim=True) - known) / others.clamp(min=1)
        return torch.where(scored & (others > 0), known - mean_of_others, 0.0)
    if baseline in ("constant", "none"):
        return torch.where(scored, known - (constant if baseline == "constant" else 0.0), 0.0)
    raise ValueError(f"`baseline` must be 'leave_one_out', 'constant' or 'none', got {baseline!r}.")
