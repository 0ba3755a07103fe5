"""Importance weights of proposal samples against the target σ(s) ∝ p(s) φ(s), and what they say about the proposal. The check of shapes
serves all of `math/`.

Axis letters: P prompts, N completions per prompt, T completion tokens. Log-probabilities are in nats. A mask is 0 at the
positions that do not count.

The contract: for each prompt, the N completions are drawn independently from the proposal q, and `log_w` is
log p(s) + log φ(s) − log q(s), unnormalised, so that the mean of w over samples estimates Z = E_p[φ] without bias and
the normalised weights give a consistent estimate of any expectation under σ. A sample of weight 0 has `log_w` −inf;
a sample that could not be scored is given the same, so that nothing ever depends on it.
"""

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch


Reduction = Literal["mean", "sum"]


def require_shape(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Raises `ValueError` unless the argument `name` has this shape, in which −1 accepts any size."""
    actual = tuple(tensor.shape)
    if len(actual) != len(shape) or any(want not in (-1, got) for got, want in zip(actual, shape, strict=True)):
        expected = "(" + ", ".join("any" if size == -1 else str(size) for size in shape) + ")"
        raise ValueError(f"`{name}` has shape {actual} but {expected} is needed; reshape or unsqueeze it first.")


def zero_masked(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """
    Values at the positions that count and 0 elsewhere, even for −inf or NaN.

    Args:
        values, mask (`torch.Tensor`):
            Values and mask (bool or numeric), both of shape (P, N, T).

    Returns:
        `torch.Tensor`: Values of shape (P, N, T), in float32 if they were in half precision, since sums follow. Gradient flows
        to `values` at the positions that count.

    Raises:
        `ValueError`: If a shape is not (P, N, T).
    """
    require_shape("log-probabilities", values, (-1, -1, -1))
    require_shape("mask", mask, tuple(values.shape))
    return values.masked_fill(mask == 0, 0.0).to(torch.promote_types(values.dtype, torch.float32))


def sequence_log_prob(log_p: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """
    Log-probability of each completion: the sum over its tokens.

    Args:
        log_p, mask (`torch.Tensor`):
            Log-probabilities of the completion tokens (nats) and mask, both of shape (P, N, T).

    Returns:
        `torch.Tensor`: Of shape (P, N), in nats; 0 for an empty completion. Gradient flows to `log_p`.
    """
    return zero_masked(log_p, mask).sum(dim=-1)


def reduce_log_probs(log_p: torch.Tensor, mask: torch.Tensor, reduction: Reduction = "mean") -> torch.Tensor:
    """
    One number ℓ per completion from its token log-probabilities.

    The derivation of Eq. 4 of [RePULSe](https://huggingface.co/papers/2510.21184) gives the sum; the published
    hyper-parameters are for the mean.

    Args:
        log_p, mask (`torch.Tensor`):
            Log-probabilities (nats) and mask, both of shape (P, N, T).
        reduction (`str`, *optional*, defaults to `"mean"`):
            `"mean"` over the tokens of each completion, or `"sum"`.

    Returns:
        `torch.Tensor`: Of shape (P, N), in nats; 0 for an empty completion. Gradient flows to `log_p`.

    Raises:
        `ValueError`: If `reduction` is neither of the two, or a shape is not (P, N, T).
    """
    total = sequence_log_prob(log_p, mask)
    if reduction == "sum":
        return total
    if reduction == "mean":
        return total / (mask != 0).sum(dim=-1).clamp(min=1)
    raise ValueError(f"`reduction` must be 'mean' or 'sum', got {reduction!r}.")


def log_importance_weights(
    log_p: torch.Tensor, log_q: torch.Tensor, log_potential: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """
    Log importance weights log w = Σ_t log p + log φ − Σ_t log q of proposal samples (before Eq. 4's normalisation).

    Args:
        log_p, log_q, mask (`torch.Tensor`):
            Log-probabilities of the tokens (nats) under the policy and under the model that drew them, as it was then, and
            mask, all of shape (P, N, T).
        log_potential (`torch.Tensor`):
            log φ of each completion, of shape (P, N), in nats. NaN marks a sample without a reward.

    Returns:
        `torch.Tensor`: `log_w` of shape (P, N), in nats, detached; −inf where `log_potential` is NaN or −inf.

    Raises:
        `ValueError`: If the shapes do not fit together.
    """
    require_shape("log_q", log_q, tuple(log_p.shape))
    require_shape("log_potential", log_potential, tuple(log_p.shape[:-1]))
    log_w = (sequence_log_prob(log_p, mask) + log_potential - sequence_log_prob(log_q, mask)).detach()
    return torch.where(log_potential.isnan() | (log_potential == -torch.inf), -torch.inf, log_w)


def log_mixture_weights(
    log_p: torch.Tensor, log_q: torch.Tensor, log_potential: torch.Tensor, num_p: int, num_q: int
) -> torch.Tensor:
    """
    Log-weights of samples of two samplers against both at once: log p + log φ − log m, m = (n·p + k·q) / (n + k).

    This is the balance heuristic of multiple importance sampling ([Veach and Guibas, 1995](https://doi.org/10.1145/218380.218498)). A
    prompt's n samples of the policy p and k of another sampler q count as n + k samples of their mixture m. No weight exceeds φ·(n + k)/n,
    however far q is from p, and the mean weight over all n + k samples estimates Z = E_p[φ] without bias.

    Args:
        log_p, log_q (`torch.Tensor`):
            Log-probabilities of a prompt's completions under policy and other sampler, of shape (P, n + k), in nats.
        log_potential (`torch.Tensor`):
            log φ of each completion, of shape (P, n + k), in nats. NaN marks a sample without a reward.
        num_p, num_q (`int`):
            n and k, at least 1.

    Returns:
        `torch.Tensor`: `log_w` of shape (P, n + k), in nats, detached; −inf where `log_potential` is NaN or −inf.

    Raises:
        `ValueError`: If the shapes do not fit together.
    """
    require_shape("log_p", log_p, (-1, num_p + num_q))
    require_shape("log_q", log_q, tuple(log_p.shape))
    require_shape("log_potential", log_potential, tuple(log_p.shape))
    total = num_p + num_q
    log_m = torch.logaddexp(log_p + math.log(num_p / total), log_q + math.log(num_q / total))
    log_w = (log_p + log_potential - log_m).detach()
    return torch.where(log_potential.isnan() | (log_potential == -torch.inf), -torch.inf, log_w)


def _check_log_w(log_w: torch.Tensor) -> None:
    """Raises a `ValueError` if log-weights are not (P, K), or hold NaN or +inf."""
    require_shape("log_w", log_w, (-1, -1))
    if bool((log_w.isnan() | (log_w == torch.inf)).any()):
        raise ValueError(
            "`log_w` holds NaN or +inf. Look for NaN log-probabilities (a model that diverged) or an infinite potential; to "
            "leave a sample out, set its `log_w` to -inf or its reward to NaN."
        )


def normalize_weights(log_w: torch.Tensor) -> torch.Tensor:
    """
    Weights that sum to 1 within each prompt, the w of Eq. 4.

    Args:
        log_w (`torch.Tensor`):
            Log-weights of shape (P, N), in nats; −inf for a sample of weight 0.

    Returns:
        `torch.Tensor`: `normalized_w` of shape (P, N), probabilities over each prompt's samples; zeros for a prompt whose
        log-weights are all −inf. Gradient flows to `log_w`.

    Raises:
        `ValueError`: If a weight is NaN or +inf, or `log_w` is not of shape (P, N).
    """
    _check_log_w(log_w)
    dead = (log_w == -torch.inf).all(dim=-1, keepdim=True)  # (P, 1)
    return log_w.masked_fill(dead, 0.0).softmax(dim=-1).masked_fill(dead, 0.0)


def effective_sample_size(log_w: torch.Tensor) -> torch.Tensor:
    """
    Effective sample size (Σw)² / Σw² of each prompt's weights.

    Args:
        log_w (`torch.Tensor`):
            Log-weights of shape (P, N), in nats.

    Returns:
        `torch.Tensor`: Of shape (P,), from 1 (one sample has all the weight) to N; 0 if all log-weights are −inf.

    Raises:
        `ValueError`: If a weight is NaN or +inf, or `log_w` is not of shape (P, N).
    """
    sum_of_squares = normalize_weights(log_w).square().sum(dim=-1)
    return torch.where(sum_of_squares > 0, 1.0 / sum_of_squares, 0.0)


def max_weight_share(log_w: torch.Tensor) -> torch.Tensor:
    """Largest normalised weight of each prompt, (P,), as [`effective_sample_size`]: from 1/N to 1, or 0."""
    return normalize_weights(log_w).amax(dim=-1)


def log_z_estimate(log_w: torch.Tensor, scored: torch.Tensor | None = None) -> torch.Tensor:
    """
    Estimate of log Z = log E_p[φ] per prompt: the log of the mean weight, on average a lower bound.

    Samples of log-weight −inf count in the mean as weights of 0, except those without a reward, which `scored` marks.

    Args:
        log_w (`torch.Tensor`):
            Log-weights of shape (P, N), in nats.
        scored (`torch.Tensor`, *optional*):
            Of shape (P, N), bool: which samples have a reward, by default all.

    Returns:
        `torch.Tensor`: Of shape (P,), in nats; −inf if all log-weights are −inf.

    Raises:
        `ValueError`: If a weight is NaN or +inf, or `log_w` is not of shape (P, N).
    """
    _check_log_w(log_w)
    if scored is None:
        return log_w.logsumexp(dim=-1) - math.log(log_w.shape[-1])
    require_shape("scored", scored, tuple(log_w.shape))
    return log_w.logsumexp(dim=-1) - scored.sum(dim=-1).clamp(min=1).log()


def engine_ratios(
    log_q: torch.Tensor,
    engine_log_q: torch.Tensor,
    mask: torch.Tensor,
    mode: str = "sequence_mask",
    clip_min: float | None = None,
    clip_max: float | None = 3.0,
) -> torch.Tensor:
    """
    Importance ratios between a model and the engine that drew its samples, truncated or masked as in TRL's GRPO trainer (1.16).

    Args:
        log_q, engine_log_q, mask (`torch.Tensor`):
            Log-probabilities (nats) by model and engine, and mask, all of shape (..., T). NaN in one counts as no difference.
        mode (`str`, *optional*, defaults to `"sequence_mask"`):
            `"token_truncate"` or `"token_mask"` for a ratio of each token, `"sequence_truncate"` or `"sequence_mask"` for one of
            each sample. Ratios beyond the bounds are clipped, or set to 0.
        clip_min, clip_max (`float`, *optional*):
            The bounds; `None` for none.

    Returns:
        `torch.Tensor`: Of shape (..., T), or (..., 1) for whole samples, detached.

    Raises:
        `ValueError`: If the shapes do not fit together or `mode` is unknown.
    """
    require_shape("engine_log_q", engine_log_q, tuple(log_q.shape))
    require_shape("mask", mask, tuple(log_q.shape))
    level, _, cut = mode.partition("_")
    if level not in ("token", "sequence") or cut not in ("truncate", "mask"):
        raise ValueError(
            f"`mode={mode!r}` must be 'token' or 'sequence' and 'truncate' or 'mask', e.g. 'sequence_mask'."
        )
    difference = (log_q.detach() - engine_log_q).nan_to_num(nan=0.0).masked_fill(mask == 0, 0.0)
    log_ratio = difference.sum(dim=-1, keepdim=True) if level == "sequence" else difference
    ratio = log_ratio.clamp(max=80.0).exp()  # finite, whatever the bounds
    low, high = -math.inf if clip_min is None else clip_min, math.inf if clip_max is None else clip_max
    return ratio.clamp(low, high) if cut == "truncate" else ratio.masked_fill((ratio < low) | (ratio > high), 0.0)


def distinct_share(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Share of a prompt's completions that no earlier one equals, (P,), from 1/N to 1; from tokens and mask, both (P, N, T)."""
    require_shape("mask", mask, tuple(ids.shape))
    rows = ids.masked_fill(mask == 0, -1)
    rows = rows.gather(-1, (mask == 0).long().argsort(dim=-1, stable=True))  # what counts goes first, in its order
    are_equal = (rows[:, :, None] == rows[:, None]).all(dim=-1)  # (P, N, N)
    return 1.0 - are_equal.tril(diagonal=-1).any(dim=-1).float().mean(dim=-1)


_TIE = 1e-4  # difference up to which two values are a tie, since scores of one completion differ by rounding


def rank_among(values: torch.Tensor, others: torch.Tensor, counted: torch.Tensor | None = None) -> torch.Tensor:
    """
    Where a prompt's values stand among others of the same prompt.

    Args:
        values, others (`torch.Tensor`):
            Of shape (P, N) and (P, M).
        counted (`torch.Tensor`, *optional*):
            Mask of the values that count, of shape (P, N); all by default.

    Returns:
        `torch.Tensor`: Of shape (P,), the mean share of others below a value, ties counting half: 0.5 on average for equal
        distributions, 0 if every value is below all others, NaN if no value counts.
    """
    require_shape("others", others, (values.shape[0], -1))
    gap = values[:, :, None] - others[:, None]
    ties = gap.abs() <= _TIE
    below = ((gap > 0) & ~ties).float().add(0.5 * ties).mean(dim=2)  # (P, N)
    return below.mean(dim=1) if counted is None else below.masked_fill(~counted, torch.nan).nanmean(dim=1)


TILTS = (0.5, 1.0, 1.5)  # nats by which a token is raised whose completions have rewards one spread lower
HIGHEST = 3.0  # nats: the most that a token is raised
_FARTHEST = 6.0  # spreads: the largest deviation of a reward


def reward_scale(rewards: Sequence[float]) -> tuple[float, float]:
    """Median of finite rewards, and their spread: half of the distance from the 16 % to the 84 % quantile, which is one standard deviation
    of a normal distribution and ignores outliers. If it is 0, the spread is the standard deviation, which is 0 for equal rewards alone."""
    low, middle, high = np.quantile(rewards, (0.16, 0.5, 0.84))
    return middle, (high - low) / 2 or float(np.std(rewards))


def deviations_of(rewards: torch.Tensor, middle: float, spread: float) -> torch.Tensor:
    """Deviations (r − median) / spread, of the rewards' shape, limited to ±6 so that none decides alone; NaN stays. The spread is not 0."""
    return ((rewards - middle) / spread).clamp(-_FARTHEST, _FARTHEST)


class TokenEffects:
    """Effect of each of V tokens on the reward of completions that have it: the mean deviation of their rewards, shrunk towards 0."""

    def __init__(self, vocabulary: int):
        # Completions that have the token, and the sum of their rewards' deviations
        self.sums = torch.zeros(2, vocabulary, dtype=torch.float64)

    @staticmethod
    def of(ids: torch.Tensor, mask: torch.Tensor, deviations: torch.Tensor, vocabulary: int) -> torch.Tensor:
        """What completions (B, T) with deviations (B,) add to `sums`, (2, V); a token counts once a completion; NaN leaves one out."""
        ids = ids.masked_fill((mask == 0) | deviations.isnan().unsqueeze(1), -1).sort(dim=1).values
        is_first = torch.ones_like(ids, dtype=torch.bool)
        is_first[:, 1:] = ids[:, 1:] != ids[:, :-1]
        row, column = torch.where(is_first & (ids >= 0) & (ids < vocabulary))
        sums = torch.zeros(2, vocabulary, device=ids.device)
        values = torch.stack([torch.ones_like(deviations), deviations]).float()[:, row]
        return sums.index_add_(1, ids[row, column], values)

    def biases(self) -> list[torch.Tensor]:
        """What is added to the logits, (V,) in nats, to make low rewards more frequent: one tensor for each of `TILTS`."""
        raised = -self().float()
        return [(size * raised).clamp(max=HIGHEST) for size in TILTS]

    def __call__(self) -> torch.Tensor:
        """Effects (V,), in spreads of the reward. A token that was seen once has half the deviation of its completion."""
        return self.sums[1] / (self.sums[0] + 1.0)
