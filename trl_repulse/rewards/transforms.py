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


def exponential_transform(reward: torch.Tensor, alpha: float, beta: float) -> torch.Tensor:
    """
    Transformed reward r' = r − α·exp(β·r), which penalises low rewards ever more steeply.

    A baseline of [RePULSe](https://huggingface.co/papers/2510.21184). For β·r > 88 in float32 the exponential
    overflows to −inf; cap or scale such rewards first.

    Args:
        reward (`torch.Tensor`): Raw rewards of shape (P, N).
        alpha (`float`): Weight of the penalty, at least 0, in units of reward.
        beta (`float`): Steepness, negative, in 1 / units of reward.

    Returns:
        `torch.Tensor`: Transformed rewards of shape (P, N).

    Raises:
        `ValueError`: If `beta` is not negative or `alpha` is.
    """
    if not beta < 0:
        raise ValueError(f"`beta` must be negative so that low rewards are punished, got {beta}; try {-abs(beta)}.")
    _require_non_negative("alpha", alpha)
    return reward - alpha * torch.exp(beta * reward)


def indicator_transform(reward: torch.Tensor, alpha: float, threshold: float) -> torch.Tensor:
    """
    Transformed reward r' = r − α·1[r < η], which subtracts the same amount from every reward below the threshold η.

    Args:
        reward (`torch.Tensor`): Raw rewards of shape (P, N).
        alpha (`float`): Amount to subtract, at least 0, in units of reward.
        threshold (`float`): η; a reward equal to it is not penalised.

    Returns:
        `torch.Tensor`: Transformed rewards of shape (P, N).

    Raises:
        `ValueError`: If `alpha` is negative.
    """
    _require_non_negative("alpha", alpha)
    return reward - alpha * (reward < threshold).to(reward.dtype)


def transform_rewards(args: Any, reward: torch.Tensor) -> torch.Tensor:
    """
    The reward r' that the policy maximises, as configured.

    Args:
        args ([`~trl_repulse.configs.RewardConfig`]): Transform and parameters.
        reward (`torch.Tensor`): Raw rewards of shape (P, N).

    Returns:
        `torch.Tensor`: Transformed rewards of shape (P, N); r itself without a transform.
    """
    if args.reward_transform == "exponential":
        return exponential_transform(reward, args.reward_transform_alpha, args.reward_transform_beta)
    if args.reward_transform == "indicator":
        return indicator_transform(reward, args.reward_transform_alpha, args.reward_transform_threshold)
    return reward


def cap_reward(reward: torch.Tensor, reward_cap: float | None) -> torch.Tensor:
    """
    min(r, cap), so that a few very high rewards do not shape the target.

    Args:
        reward (`torch.Tensor`): Raw rewards of shape (P, N).
        reward_cap (`float` or `None`): Cap, in units of reward; `None` for no cap.

    Returns:
        `torch.Tensor`: Capped rewards of shape (P, N).
    """
    return reward if reward_cap is None else reward.clamp(max=reward_cap)


def tilted_log_potential(reward: torch.Tensor, beta: float, reward_cap: float | None = None) -> torch.Tensor:
    """
    Potential of the tilted target σ(s) ∝ p(s)·exp(β·min(r, cap)).

    The paper writes exp(−β·r) with β > 0. Here, as in the published commands, β has the sign: negative for low
    rewards.

    Args:
        reward (`torch.Tensor`): Raw rewards of shape (P, N).
        beta (`float`): β, in nats per unit of reward; negative to seek low rewards.
        reward_cap (`float`, *optional*): Cap on the reward before the tilt.

    Returns:
        `torch.Tensor`: log φ of shape (P, N), in nats.
    """
    return beta * cap_reward(reward, reward_cap)


def indicator_log_potential(reward: torch.Tensor, threshold: float, eps: float = 1e-16) -> torch.Tensor:
    """
    Potential of the target restricted to bad outputs, log(1[r < η] + ε).

    Args:
        reward (`torch.Tensor`): Raw rewards of shape (P, N).
        threshold (`float`): η; a reward equal to it is not bad.
        eps (`float`, *optional*, defaults to `1e-16`):
            ε, the potential of a good output, at least 0; with 0 its log φ is −inf. Its logarithm is computed in
            double precision, so that it does not vanish for rewards in half precision.

    Returns:
        `torch.Tensor`: log φ of shape (P, N), in nats.

    Raises:
        `ValueError`: If `eps` is negative.
    """
    _require_non_negative("eps", eps)
    good, bad = (math.log(eps) if eps > 0 else -math.inf), math.log1p(eps)
    log_potential = torch.full_like(reward, good).masked_fill(reward < threshold, bad)
    return torch.where(reward.isnan(), reward, log_potential)


def class_log_potential(logit: torch.Tensor, beta: float, target_class: Literal[0, 1] = 1) -> torch.Tensor:
    """
    Potential of the target that prefers one class of a binary classifier, β·log P(class | s).

    Args:
        logit (`torch.Tensor`): The classifier's logit of class 1, of shape (P, N).
        beta (`float`): Exponent of the class probability; positive to seek the class.
        target_class (`int`, *optional*, defaults to `1`):
            Class to seek: 1 (log P = log sigmoid(logit)) or 0 (log P = −softplus(logit)).

    Returns:
        `torch.Tensor`: log φ of shape (P, N), in nats.

    Raises:
        `ValueError`: If `target_class` is neither 0 nor 1.
    """
    if target_class not in (0, 1):
        raise ValueError(f"`target_class` must be 0 or 1, got {target_class!r}.")
    return beta * functional.logsigmoid(logit if target_class == 1 else -logit)


def geometric_schedule(start: float, end: float, progress: float) -> float:
    """
    Value between `start` and `end` that changes by the same factor in equal steps.

    Args:
        start (`float`): Value at progress 0.
        end (`float`): Value at progress 1, of the same sign.
        progress (`float`): Progress of the training, in [0, 1].

    Returns:
        `float`: start · (end / start) ** progress.

    Raises:
        `ValueError`: If an end is 0 or not finite, the signs differ, or `progress` is outside [0, 1].
    """
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
    Lagrange multiplier of P(bad) ≤ `limit` after a step of dual ascent: multiplier · exp(rate · (p_bad − limit) /
    scale).

    As in [Safe RLHF](https://huggingface.co/papers/2310.12773) the step is taken on the logarithm, which keeps the
    multiplier above 0. There, steps grow with the multiplier and the cost; here they have a scale, so that one rate
    serves any limit. `scale` must not depend on the estimate: then the mean step at the limit is 0, however rare bad
    outputs are. A step up is at most one nat.

    Args:
        multiplier (`float`): Current value, above 0.
        p_bad (`float`): Estimate of P(bad), a probability.
        limit (`float`): Limit of P(bad), a probability above 0.
        scale (`float`): Distance from the limit at which a step has the size `rate`, a probability above 0.
        rate (`float`): Size of a step, above 0, in nats.

    Returns:
        `float`: The multiplier after the step.
    """
    return multiplier * math.exp(min(rate * (p_bad - limit) / scale, 1.0))


def _require_non_negative(name: str, value: float) -> None:
    if not value >= 0:
        raise ValueError(f"`{name}` must be at least 0, got {value}.")
