"""
Transforms of the reward for the policy's return, potentials for the target, and schedules.

All functions are element-wise on any shape, here written (P, N): P prompts, N completions a prompt. NaN marks a sample
without a reward and stays NaN. Transforms act before the KL term; potentials and evaluations use the raw reward. A
gradient of the reward flows through.
"""

import math
from typing import Any, Literal

import torch
from torch.nn import functional

from .._numbers import is_bad


def exponential_transform(reward: torch.Tensor, alpha: float, beta: float) -> torch.Tensor:
    """
    Transformed reward r' = r − α·exp(β·r), which penalises low rewards ever more steeply: a baseline of
    [RePULSe](https://huggingface.co/papers/2510.21184).

    α is at least 0, in units of reward; β is negative, in 1 / units of reward. For β·r > 88 in float32 the exponential
    overflows to −inf; cap or scale such rewards first. Raises `ValueError` if a parameter is out of range.
    """
    if not beta < 0:
        raise ValueError(f"`beta` must be negative so that low rewards are punished, got {beta}; try {-abs(beta)}.")
    _require_non_negative("alpha", alpha)
    return reward - alpha * torch.exp(beta * reward)


def indicator_transform(reward: torch.Tensor, alpha: float, threshold: float) -> torch.Tensor:
    """Transformed reward r' = r − α·1[r < η], which subtracts α, at least 0 and in units of reward, from every reward
    below the threshold η. Raises `ValueError` if `alpha` is negative."""
    _require_non_negative("alpha", alpha)
    return reward - alpha * is_bad(reward, threshold).to(reward.dtype)


def transform_rewards(args: Any, reward: torch.Tensor) -> torch.Tensor:
    """The reward r' that the policy maximises, by the transform of a [`~trl_repulse.configs.RewardConfig`]; r itself
    without one."""
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
    so that it does not vanish for rewards in half precision. Raises `ValueError` if `eps` is negative.
    """
    _require_non_negative("eps", eps)
    good, bad = (math.log(eps) if eps > 0 else -math.inf), math.log1p(eps)
    log_potential = torch.full_like(reward, good).masked_fill(is_bad(reward, threshold), bad)
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
    [0, 1]. Raises `ValueError` if an end is 0 or not finite, the signs differ, or `progress` is out of range."""
    if not (math.isfinite(start) and math.isfinite(end) and start != 0 and end != 0 and (start < 0) == (end < 0)):
        raise ValueError(
            f"A geometric schedule needs two non-zero values of the same sign, got start={start} and end={end}; "
            "to begin at nothing, start from a small value of the final sign."
        )
    if not 0.0 <= progress <= 1.0:
        raise ValueError(f"`progress` must lie in [0, 1], got {progress}.")
    ratio: float = end / start
    return end if progress == 1.0 else start * math.pow(ratio, progress)


def dual_step(multiplier: float, p_bad: float, limit: float, scale: float, rate: float) -> float:
    """
    Lagrange multiplier of P(bad) ≤ `limit` after a step of dual ascent: multiplier · exp(rate · (p_bad − limit) / scale).

    As in [Safe RLHF](https://huggingface.co/papers/2310.12773) the step is taken on the logarithm, which keeps the multiplier
    above 0. There, steps grow with the multiplier and the cost; here they have a `scale`, the distance from the limit at which
    a step has the size `rate`, in nats, so that one rate serves any limit. `scale` must not depend on the estimate `p_bad`:
    then the mean step at the limit is 0, however rare bad outputs are. A step up is at most one nat.
    """
    return multiplier * math.exp(min(rate * (p_bad - limit) / scale, 1.0))


def _require_non_negative(name: str, value: float) -> None:
    if not value >= 0:
        raise ValueError(f"`{name}` must be at least 0, got {value}.")
