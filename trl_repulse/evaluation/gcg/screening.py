"""Scoring all candidates in half precision, and in the model's own those among which the best must be."""

import torch

from .errors import finite
from .scoring import SuffixScorer


# Candidates scored again at a time: at least so many, and one of so many
_LEAST, _SHARE = 8, 32
# Standard deviations of half precision's error that the rest must lie behind the best
_MARGIN = 5.0


def screened_losses(
    scorer: SuffixScorer, screen: SuffixScorer, ids: torch.Tensor, candidates: torch.Tensor
) -> torch.Tensor:
    """
    Losses of the best candidates, found by the losses of a copy of the model in half precision.

    Candidates are scored with the model itself in the order of the copy's losses, until the best of them is ahead of what the
    copy says of the next by five standard deviations of the copy's errors so far. The best candidate is then, up to an
    outlier beyond that, the best of all. Where the copy cannot tell candidates apart, or overflows, all are scored.

    Args:
        scorer, screen ([`~trl_repulse.evaluation.gcg.scoring.SuffixScorer`]):
            The model's, and its copy's.
        ids (`torch.Tensor` of shape `(S,)`):
            The suffix that the candidates were made from.
        candidates (`torch.Tensor` of shape `(B, S)`):
            Candidates.

    Returns:
        `torch.Tensor` of shape `(B,)`: losses under the model in nats, infinite for candidates that were left out.

    Raises:
        [`~trl_repulse.evaluation.gcg.GCGError`]: If a loss under the model itself is not finite.
    """
    screen.observe(ids)
    guesses = screen.losses(candidates)
    if not guesses.isfinite().all():
        return finite(scorer.losses(candidates))
    order = guesses.argsort(stable=True)
    losses = torch.full_like(guesses, torch.inf)
    size = max(_LEAST, len(order) // _SHARE)
    for start in range(0, len(order), size):
        chosen = order[start : start + size]
        losses[chosen] = finite(scorer.losses(candidates[chosen]))
        done = start + len(chosen)
        if done < len(order):
            errors = losses[order[:done]] - guesses[order[:done]]
            if losses.min() < guesses[order[done]] + errors.mean() - _MARGIN * errors.std():
                break
    return losses
