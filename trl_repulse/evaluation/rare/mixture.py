"""Samples of a policy and its proposals, pooled into one mixture, and their importance weights.

Axis letters: P prompts, N completions per prompt, K components: the policy first, then the proposals. Log-probabilities
are of whole completions, in nats, in float64.

For each prompt, component k draws `counts[k]` completions independently, so N = Σ_k counts[k], and the mixture is m = Σ_k α_k q_k with
α_k = counts[k] / N. A completion has the weight p / m whichever component drew it (the balance heuristic of Veach and Guibas, 1995). The
mean of (p / m)·f over the N completions estimates E_p[f], without bias if the counts do not depend on what is drawn, and no weight exceeds
1 / α_0. The draws are stratified: the variance of the mean is the sum of the components' contributions, each about its own mean.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from .counts import check_counts


@dataclass(frozen=True)
class MixtureSample:
    """
    Completions of each prompt from the policy and its proposals, with rewards and log-probabilities under all of them.

    Args:
        rewards (`torch.Tensor` of shape `(P, N)`): Reward of each completion, in the order of the components that drew them.
        log_density (`torch.Tensor` of shape `(P, N, K)`):
            Log-probability of each completion under each component, the policy first, in nats; −inf where a component cannot draw it.
        counts (`tuple[int, ...]`): Completions that each component drew for each prompt: 0, or at least 2.

    Raises:
        `ValueError`: If shapes and counts do not fit, a reward is not finite, or a log-probability is NaN, +inf, or −inf
            under the component that drew the completion.
    """

    rewards: torch.Tensor
    log_density: torch.Tensor
    counts: tuple[int, ...]

    def __post_init__(self) -> None:
        shape, counts = tuple(self.rewards.shape), self.counts
        if len(shape) != 2 or 0 in shape or tuple(self.log_density.shape) != (*shape, len(counts)):
            raise ValueError(
                f"`rewards` has shape {shape} and `log_density` {tuple(self.log_density.shape)}; give (P, N) and "
                f"(P, N, {len(counts)}), where {len(counts)} is the length of `counts`."
            )
        check_counts(counts)
        if sum(counts) != shape[1]:
            raise ValueError(f"`counts={counts}` must sum to the {shape[1]} completions of a prompt.")
        if not bool(self.rewards.isfinite().all()):
            raise ValueError("`rewards` holds NaN or infinity; score every completion, and clamp what is infinite.")
        own = self.log_density.gather(-1, self.component.expand(shape).unsqueeze(-1))
        if bool((self.log_density.isnan() | (self.log_density == torch.inf)).any()) or bool((own == -torch.inf).any()):
            raise ValueError(
                "`log_density` holds NaN or +inf, or −inf for a completion under the component that drew it; score the "
                "completions with the very models they were drawn from."
            )

    @property
    def num_prompts(self) -> int:
        """P."""
        return len(self.rewards)

    @cached_property
    def shares(self) -> torch.Tensor:
        """α_k of each component, of shape (K,)."""
        return torch.tensor(self.counts, dtype=torch.float64) / sum(self.counts)

    @cached_property
    def component(self) -> torch.Tensor:
        """Which component drew each completion, of shape (N,)."""
        return torch.arange(len(self.counts)).repeat_interleave(torch.tensor(self.counts))

    @cached_property
    def log_mixture(self) -> torch.Tensor:
        """log m of each completion, of shape (P, N), in nats."""
        return (self.log_density.double() + self.shares.log()).logsumexp(dim=-1)

    @cached_property
    def log_w(self) -> torch.Tensor:
        """log p − log m of each completion, of shape (P, N), in nats; −inf where the policy cannot draw it."""
        return self.log_density[..., 0].double() - self.log_mixture

    def joined(self, other: "MixtureSample") -> "MixtureSample":
        """Both samples of the same prompts and components as one."""
        return MixtureSample(
            join_parts(self.rewards, other.rewards, self.counts, other.counts),
            join_parts(self.log_density, other.log_density, self.counts, other.counts),
            tuple(a + b for a, b in zip(self.counts, other.counts, strict=True)),
        )

    def prompt(self, index: int) -> "MixtureSample":
        """The completions of one prompt, with P = 1."""
        return MixtureSample(self.rewards[index : index + 1], self.log_density[index : index + 1], self.counts)


def join_parts(one: torch.Tensor, other: torch.Tensor, of_one: Sequence[int], of_other: Sequence[int]) -> torch.Tensor:
    """Joins values (P, N, ...) and (P, M, ...) of completions, with these counts, to (P, N + M, ...) in the order of the components."""
    pairs = zip(one.split(list(of_one), dim=1), other.split(list(of_other), dim=1), strict=True)
    return torch.cat([part for pair in pairs for part in pair], dim=1)


def stratified_mean(values: torch.Tensor, counts: tuple[int, ...]) -> tuple[float, float]:
    """Mean of values (P, N), in the order of the components with these counts, and the stratified variance of that mean."""
    parts = zip(values.split(counts, dim=1), counts, strict=True)
    variance = sum(float((part.var(dim=1) * (n / values.numel() ** 2)).sum()) for part, n in parts if n)
    return float(values.mean()), variance


def largest_normalization_error(sample: MixtureSample) -> float:
    """The largest violation of E_m[q_k / m] = 1 in the samples over components k, in standard errors: large if the log-probabilities are
    not those of the models that drew the completions. The standard error includes one unseen completion of the largest possible weight, so
    that a component that hardly overlaps the others does not fail by chance."""
    errors: list[float] = []
    for k, n in enumerate(sample.counts):
        if n:
            mean, variance = stratified_mean((sample.log_density[..., k] - sample.log_mixture).exp(), sample.counts)
            errors.append(abs(mean - 1) / math.sqrt(variance + (n * sample.num_prompts) ** -2))
    return max(errors)


def halves(sample: MixtureSample, values: torch.Tensor) -> tuple[float, float]:
    """Means of values (P, N) over every other completion of each component, and over the rest."""
    parts = zip(sample.shares.tolist(), values.split(sample.counts, dim=1), strict=True)
    drawn = [(share, part) for share, part in parts if share]
    even, odd = (sum(share * float(part[:, start::2].mean()) for share, part in drawn) for start in (0, 1))
    return even, odd
