"""
Effects of tokens on the reward, from completions that have them, and logits raised by them.

Axis letters: B completions, T completion tokens, V tokens of the vocabulary.
"""

from collections.abc import Sequence

import numpy as np
import torch


TILTS = (0.5, 1.0, 1.5)  # nats by which a token is raised whose completions have rewards one spread lower
HIGHEST = 3.0  # nats: the most that a token is raised
_FARTHEST = 6.0  # spreads: the largest deviation of a reward


def reward_scale(rewards: Sequence[float]) -> tuple[float, float]:
    """Median of rewards, and their spread: half of the distance from the 16 % to the 84 % quantile, or the standard deviation if it is 0."""
    low, middle, high = np.quantile(rewards, (0.16, 0.5, 0.84))
    return middle, (high - low) / 2 or float(np.std(rewards))


def deviations_of(rewards: torch.Tensor, middle: float, spread: float) -> torch.Tensor:
    """Deviations of rewards from the median, in spreads, of which there are at most 6."""
    return ((rewards - middle) / spread).clamp(-_FARTHEST, _FARTHEST)


class TokenEffects:
    """
    Effect of each of V tokens on the reward of completions that have it: the mean deviation of their rewards, shrunk towards 0.
    """

    def __init__(self, vocabulary: int):
        # Completions that have the token, and the sum of their rewards' deviations
        self.sums = torch.zeros(2, vocabulary, dtype=torch.float64)

    @staticmethod
    def of(ids: torch.Tensor, mask: torch.Tensor, deviations: torch.Tensor, vocabulary: int) -> torch.Tensor:
        """The sums, (2, V), of completions (B, T) with deviations (B,); NaN leaves a completion out."""
        ids = ids.masked_fill((mask == 0) | deviations.isnan().unsqueeze(1), -1).sort(dim=1).values
        first = torch.ones_like(ids, dtype=torch.bool)
        first[:, 1:] = ids[:, 1:] != ids[:, :-1]
        row, column = torch.where(first & (ids >= 0) & (ids < vocabulary))
        sums = torch.zeros(2, vocabulary, device=ids.device)
        values = torch.stack([torch.ones_like(deviations), deviations]).float()[:, row]
        return sums.index_add_(1, ids[row, column], values)

    def biases(self) -> list[torch.Tensor]:
        """What is added to the logits (V,), nats, to make low rewards more frequent: one tensor for each of `TILTS`."""
        raised = -self().float()
        return [(size * raised).clamp(max=HIGHEST) for size in TILTS]

    def __call__(self) -> torch.Tensor:
        """Effects (V,), in spreads of the reward. A token that was seen once has half the deviation of its completion."""
        return self.sums[1] / (self.sums[0] + 1.0)
