"""What is done to a raw reward: transforms for the policy's return, potentials for the target, schedules.

Every function works element by element on any shape, here written (P, N): P prompts, N completions per prompt. NaN
marks a sample without a reward and stays NaN throughout. Transforms act on the reward before the KL term, and never on
the reward that potentials or an evaluation see. Gradient, should the reward carry any, flows.
"""

import math
from typing import Any, Literal

import torch
from torch.nn import functional


def exponential_transform(reward: torch.Tensor, alpha: float, beta: float) -> torch.Tensor:
    """
    Transformed reward r' = r − α·exp(β·r), which punishes low rewards ever more steeply.

    A baseline of [RePULSe](https://huggingface.co/papers/2510.21184). The exponential overflows to −inf for rewards
    far below the usual range (β·r > 88 in float32): cap or scale such rewards first.

    Args:
        reward (`torch.Tensor`):
            Raw rewards of shape (P, N).
        alpha (`float`):
            Weight of the punishment, at least 0, in units of reward.
        beta (`float`):
            Steepness, negative, in 1 / units of reward.

    Returns:
        `torch.Tensor`:
            Transformed rewards of shape (P, N).

    Raises:
        `ValueError`: If `beta` is not negative or `alpha` is.
    """
    if not beta < 0:
        raise ValueError(f"`beta` must be negative so that low rewards are punished, got {beta}; try {-abs(beta)}.")
    _require_non_negative("alpha", alpha)
    return reward - alpha * torch.exp(beta * reward)


def indicator_transform(reward: torch.Tensor, alpha: float, threshold: float) -> torch.Tensor:
    """
    Transformed reward r' = r − α·1[r < η], which takes the same amount off every reward under the threshold η.

    Args:
        reward (`torch.Tensor`):
            Raw rewards of shape (P, N).
        alpha (`float`):
            What is taken off, at least 0, in units of reward.
        threshold (`float`):
            η; a reward equal to it is not punished.

    Returns:
        `torch.Tensor`:
            Transformed rewards of shape (P, N).

    Raises:
        `ValueError`: If `alpha` is negative.
    """
    _require_non_negative("alpha", alpha)
    return reward - alpha * (reward < threshold).to(reward.dtype)


def transform_rewards(args: Any, reward: torch.Tensor) -> torch.Tensor:
    """
    r', what the policy maximises instead of the reward r, as a configuration says.

    Args:
        args ([`~trl_repulse.configs.RewardConfig`]):
            Gives transform and parameters.
        reward (`torch.Tensor`):
            Raw rewards of shape (P, N).

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
        reward (`torch.Tensor`):
            Raw rewards of shape (P, N).
        reward_cap (`float` or `None`):
            Cap, in units of reward; `None` leaves the reward as it is.

    Returns:
        `torch.Tensor`:
            Rewards of shape (P, N), none above the cap.
    """
    return reward if reward_cap is None else reward.clamp(max=reward_cap)


def tilted_log_potential(reward: torch.Tensor, beta: float, reward_cap: float | None = None) -> torch.Tensor:
    """
    Potential of the tilted target σ(s) ∝ p(s)·exp(β·min(r, cap)).

    The paper writes exp(−β·r) with β > 0; here, as in the published commands, β carries the sign: negative leans
    towards low rewards.

    Args:
        reward (`torch.Tensor`):
            Raw rewards of shape (P, N).
        beta (`float`):
            β, in nats per unit of reward; negative to look for low rewards.
        reward_cap (`float`, *optional*):
            Cap on the reward before the tilt.

    Returns:
        `torch.Tensor`:
            log φ of shape (P, N), in nats.
    """
    return beta * cap_reward(reward, reward_cap)


def indicator_log_potential(reward: torch.Tensor, threshold: float, eps: float = 1e-16) -> torch.Tensor:
    """
    Potential of the target restricted to bad outputs, log(1[r < η] + ε).

    Args:
        reward (`torch.Tensor`):
            Raw rewards of shape (P, N).
        threshold (`float`):
            η; a reward equal to it is not bad.
        eps (`float`, *optional*, defaults to `1e-16`):
            ε, what a good output keeps of the potential, at least 0. With 0 its log φ is −inf. It is taken as a number
            of double precision, so that it does not vanish for rewards in half precision.

    Returns:
        `torch.Tensor`:
            log φ of shape (P, N), in nats.

    Raises:
        `ValueError`: If `eps` is negative.
    """
    _require_non_negative("eps", eps)
    good, bad = (math.log(eps) if eps > 0 else -math.inf), math.log1p(eps)
    log_potential = torch.full_like(reward, good).masked_fill(reward < threshold, bad)
    return torch.where(reward.isnan(), reward, log_potential)


def class_log_potential(logit: torch.Tensor, beta: float, target_class: Literal[0, 1] = 1) -> torch.Tensor:
    """
    Potential of the target that leans towards one class of a binary classifier, β·log P(class | s).

    Args:
        logit (`torch.Tensor`):
            The classifier's logit of class 1, of shape (P, N).
        beta (`float`):
            Exponent of the class probability; positive leans towards the class.
        target_class (`int`, *optional*, defaults to `1`):
            Class to lean towards: 1 (log P = log sigmoid(logit)) or 0 (log P = −softplus(logit)).

    Returns:
        `torch.Tensor`:
            log φ of shape (P, N), in nats.

    Raises:
        `ValueError`: If `target_class` is neither 0 nor 1.
    """
    if target_class not in (0, 1):
        raise ValueError(f"`target_class` must be 0 or 1, got {target_class!r}.")
    return beta * functional.logsigmoid(logit if target_class == 1 else -logit)


def geometric_schedule(start: float, end: float, progress: float) -> float:
    """
    Value on the way from `start` to `end` that changes by the same factor in equal steps.

    Args:
        start (`float`):
            Value at progress 0.
        end (`float`):
            Value at progress 1, of the same sign.
        progress (`float`):
            How far training has come, in [0, 1].

    Returns:
        `float`: start · (end / start) ** progress.

    Raises:
        `ValueError`: If either end is 0, not finite, of another sign than the other, or `progress` is outside [0, 1].
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
    Lagrange multiplier of P(bad) ≤ `limit` after a step of dual ascent: multiplier · exp(rate · (p_bad − limit) / scale).

    As in [Safe RLHF](https://huggingface.co/papers/2310.12773) the logarithm of the multiplier moves, which keeps it above 0.
    There steps grow with the multiplier and with the cost; here they have a scale, so that one rate serves any limit. The
    scale must not depend on the estimate: then the multiplier moves by 0 on average at the limit, however rare bad outputs
    are. A step up is of one nat at most.

    Args:
        multiplier (`float`):
            Its value now, above 0.
        p_bad (`float`):
            Estimate of P(bad), a probability.
        limit (`float`):
            What P(bad) may be, a probability above 0.
        scale (`float`):
            Distance from the limit at which a step has the size `rate`, a probability above 0.
        rate (`float`):
            Size of a step, above 0, in nats.

    Returns:
        `float`: The multiplier after the step.
    """
    return multiplier * math.exp(min(rate * (p_bad - limit) / scale, 1.0))


def _require_non_negative(name: str, value: float) -> None:
    if not value >= 0:
        raise ValueError(f"`{name}` must be at least 0, got {value}.")
