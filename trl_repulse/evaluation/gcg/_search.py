"""
One step's search: drawing, merging and scoring candidates.

Axis letters: S tokens of the suffix, B candidates, K best tokens at a position, V vocabulary.
"""

import math

import torch
from scipy.stats import spearmanr

from .scoring import SuffixScorer, finite


# Candidates that the model scores at a time: at least 8, and one in 32
_LEAST, _SHARE = 8, 32
# Distance of the rest from the best loss, in standard deviations of the half-precision error
_MARGIN = 5.0


def best_tokens(gradient: torch.Tensor, allowed: torch.Tensor, topk: int) -> torch.Tensor:
    """Allowed tokens of steepest descent at each position, (S, K), on the CPU; from (S, V) and (V,)."""
    return (-gradient.masked_fill(~allowed, torch.inf)).topk(topk, dim=1).indices.cpu()


def draw_candidates(
    ids: torch.Tensor, tokens: torch.Tensor, search_width: int, n_replace: int, generator: torch.Generator
) -> torch.Tensor:
    """
    Candidates (B, S) made from the suffix `ids` (S,): `n_replace` random positions get a random one of their best
    tokens (S, K).

    The random numbers are drawn in the order of nanogcg, so that equal seeds give equal candidates.
    """
    positions = torch.rand((search_width, len(ids)), generator=generator).argsort()[:, :n_replace]  # (B, n_replace)
    ranks = torch.randint(0, tokens.shape[1], (search_width, n_replace, 1), generator=generator)
    values = tokens[positions].gather(2, ranks).squeeze(2)  # (B, n_replace)
    return ids.repeat(search_width, 1).scatter_(1, positions, values)


def distinct(candidates: torch.Tensor) -> torch.Tensor:
    """Candidates (B, S) without repetitions, in the order of their first occurrence."""
    first = {tuple(row): i for i, row in reversed(list(enumerate(candidates.tolist())))}
    return candidates[sorted(first.values())]


def merge_candidates(ids: torch.Tensor, candidates: torch.Tensor, losses: torch.Tensor, limit: int) -> torch.Tensor:
    """
    Merges the best 2, 3, ... up to `limit` candidates (B, S) of the suffix `ids` (S,), by losses (B,). A candidate that
    changes a position already changed is skipped. Returns (M, S) with M < `limit`.
    """
    merged, taken, rows = ids.clone(), torch.zeros_like(ids, dtype=torch.bool), []
    for index in losses.argsort(stable=True).tolist():
        changed = candidates[index] != ids
        if not changed.any() or (changed & taken).any():
            continue
        merged = torch.where(changed, candidates[index], merged)
        taken |= changed
        rows.append(merged)
        if len(rows) == limit:
            break
    return torch.stack(rows[1:]) if len(rows) > 1 else ids.new_empty((0, len(ids)))


def screened_losses(
    scorer: SuffixScorer, screen: SuffixScorer, ids: torch.Tensor, candidates: torch.Tensor
) -> torch.Tensor:
    """
    Losses (B,) in nats of the best of the candidates (B, S), infinite for those left out.

    A half-precision copy of the model (`screen`) ranks all candidates. The model itself scores them in this order until
    the best loss is below the copy's next one by five standard deviations of the copy's errors so far. Where the copy
    overflows, the model scores all.
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


def probe_losses(
    scorer: SuffixScorer,
    draft: SuffixScorer,
    ids: torch.Tensor,
    candidates: torch.Tensor,
    generator: torch.Generator,
    sampling_factor: int,
    reduction: int,
) -> torch.Tensor:
    """
    Probe sampling (Zhao et al. 2024, arXiv 2403.01251): losses (B,) of some candidates (B, S), infinite for the others.

    The model scores a random probe set of B / `sampling_factor` candidates, and of those that the draft model likes best
    (1 − a) · B / `reduction`, where a in [0, 1] is the agreement of the two models on the order of the probe set.
    """
    count = len(candidates)
    draft.observe(ids)
    guesses = finite(draft.losses(candidates))
    probe = torch.randperm(count, generator=generator)[: max(2, count // sampling_factor)]
    losses = torch.full((count,), math.inf)
    losses[probe] = finite(scorer.losses(candidates[probe]))
    # Undefined for one candidate or equal losses: then treated as uncorrelated
    correlation = spearmanr(losses[probe].numpy(), guesses[probe].numpy()).statistic if len(probe) > 1 else math.nan
    agreement = 0.5 if math.isnan(correlation) else (1 + correlation) / 2
    chosen = guesses.argsort(stable=True)[: max(1, int((1 - agreement) * count / reduction))]
    chosen = chosen[losses[chosen].isinf()]
    if len(chosen):
        losses[chosen] = finite(scorer.losses(candidates[chosen]))
    return losses
