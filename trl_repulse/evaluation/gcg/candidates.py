"""
Candidates of a step: drawing them from a gradient, comparing and merging them. Pure functions of tensors.

Axis letters: S tokens of the suffix, B candidates, K best tokens at a position, V vocabulary.
"""

import torch


def best_tokens(gradient: torch.Tensor, allowed: torch.Tensor, topk: int) -> torch.Tensor:
    """
    The tokens of steepest descent at each position.

    Args:
        gradient (`torch.Tensor` of shape `(S, V)`):
            Gradient of the loss with respect to the one-hot tokens.
        allowed (`torch.Tensor` of shape `(V,)`):
            `True` for tokens that may be chosen; at least `topk` of them.
        topk (`int`):
            K.

    Returns:
        `torch.Tensor` of shape `(S, K)`: tokens, steepest first, on the CPU.
    """
    return (-gradient.masked_fill(~allowed, torch.inf)).topk(topk, dim=1).indices.cpu()


def draw_candidates(
    ids: torch.Tensor, tokens: torch.Tensor, search_width: int, n_replace: int, generator: torch.Generator
) -> torch.Tensor:
    """
    Draws candidates: `n_replace` positions at random get tokens at random out of their best.

    The random numbers are drawn in the order of nanogcg, so that equal seeds give equal candidates.

    Args:
        ids (`torch.Tensor` of shape `(S,)`):
            The suffix that is changed.
        tokens (`torch.Tensor` of shape `(S, K)`):
            What [`best_tokens`] returned.
        search_width (`int`):
            B.
        n_replace (`int`):
            Positions changed; at most S.
        generator (`torch.Generator`):
            Source of the random numbers, on the CPU.

    Returns:
        `torch.Tensor` of shape `(B, S)`: candidates. Some may be equal to each other or to `ids`.
    """
    positions = torch.rand((search_width, len(ids)), generator=generator).argsort()[:, :n_replace]  # (B, n_replace)
    ranks = torch.randint(0, tokens.shape[1], (search_width, n_replace, 1), generator=generator)
    values = tokens[positions].gather(2, ranks).squeeze(2)  # (B, n_replace)
    return ids.repeat(search_width, 1).scatter_(1, positions, values)


def distinct(candidates: torch.Tensor) -> torch.Tensor:
    """
    Candidates without repetitions, in the order of their first occurrence.

    Args:
        candidates (`torch.Tensor` of shape `(B, S)`):
            Candidates.

    Returns:
        `torch.Tensor` of shape `(B', S)`
    """
    first = {tuple(row): i for i, row in reversed(list(enumerate(candidates.tolist())))}
    return candidates[sorted(first.values())]


def first_changed(ids: torch.Tensor, candidates: torch.Tensor) -> torch.Tensor:
    """
    The first position at which each candidate differs.

    Args:
        ids (`torch.Tensor` of shape `(S,)`):
            The suffix compared with.
        candidates (`torch.Tensor` of shape `(B, S)`):
            Candidates.

    Returns:
        `torch.Tensor` of shape `(B,)`: positions; S where nothing differs.
    """
    equal = (candidates == ids).long()
    return equal.cumprod(dim=1).sum(dim=1)


def merge_candidates(ids: torch.Tensor, candidates: torch.Tensor, losses: torch.Tensor, limit: int) -> torch.Tensor:
    """
    Merges the best candidates one after the other: the best two, the best three, ... at positions not yet taken.

    Args:
        ids (`torch.Tensor` of shape `(S,)`):
            The suffix that all candidates were made from.
        candidates (`torch.Tensor` of shape `(B, S)`):
            Candidates.
        losses (`torch.Tensor` of shape `(B,)`):
            Their losses.
        limit (`int`):
            Candidates merged at most.

    Returns:
        `torch.Tensor` of shape `(M, S)`: merged candidates, M < `limit`, of 2, 3, ... candidates each.
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
