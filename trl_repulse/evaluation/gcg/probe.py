"""Probe sampling: Zhao et al. 2024, "Accelerating greedy coordinate gradient via probe sampling", arXiv 2403.01251."""

import math

import torch
from scipy.stats import spearmanr

from .errors import finite
from .scoring import SuffixScorer


def probe_search(
    scorer: SuffixScorer,
    draft: SuffixScorer,
    ids: torch.Tensor,
    candidates: torch.Tensor,
    generator: torch.Generator,
    sampling_factor: int,
    reduction: int,
) -> tuple[float, torch.Tensor]:
    """
    The best candidate among a random probe set and those that a draft model likes best. How many these are depends on how
    well the two models agree on the order of the probe set.

    Args:
        scorer, draft ([`~trl_repulse.evaluation.gcg.scoring.SuffixScorer`]):
            The attacked model's, and the draft model's, which scores all candidates.
        ids (`torch.Tensor` of shape `(S,)`):
            The suffix that the candidates were made from.
        candidates (`torch.Tensor` of shape `(B, S)`):
            Candidates.
        generator (`torch.Generator`):
            Source of the probe set.
        sampling_factor (`int`):
            The probe set is one of so many candidates, at least two.
        reduction (`int`):
            With agreement a from 0 to 1, the model scores (1 − a) · B / `reduction` candidates beside the probe set, at
            least one.

    Returns:
        `float` and `torch.Tensor` of shape `(S,)`: the loss under the attacked model, and the candidate.

    Raises:
        [`~trl_repulse.evaluation.gcg.GCGError`]: If a loss is not finite.
    """
    count = len(candidates)
    draft.observe(ids)
    guesses = finite(draft.losses(candidates))
    probe = torch.randperm(count, generator=generator)[: max(2, count // sampling_factor)]
    losses = torch.full((count,), math.inf)
    losses[probe] = finite(scorer.losses(candidates[probe]))
    # Undefined for one candidate, or where one of the models cannot tell them apart: then as if they were unrelated
    correlation = spearmanr(losses[probe].numpy(), guesses[probe].numpy()).statistic if len(probe) > 1 else math.nan
    agreement = 0.5 if math.isnan(correlation) else (1 + correlation) / 2
    chosen = guesses.argsort(stable=True)[: max(1, int((1 - agreement) * count / reduction))]
    chosen = chosen[losses[chosen].isinf()]
    if len(chosen):
        losses[chosen] = finite(scorer.losses(candidates[chosen]))
    index = int(losses.argmin())
    return losses[index].item(), candidates[index]
