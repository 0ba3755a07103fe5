"""
Log-probabilities of completions under a language model.

Legend: B completions, L tokens of the longest prompt, T tokens of the longest completion, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import nn
from tqdm.auto import tqdm

from ..generation._batches import batches, padded_outputs
from ..generation._probe import probe
from ..models._adapters import in_mode
from ..models._model_checks import check_causal


def completion_log_probs(
    model: nn.Module,
    prompt_ids: Sequence[Sequence[int]],
    completion_ids: Sequence[Sequence[int]],
    batch_size: int = 32,
    progress: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Log-probability of each completion after its prompt, and the summed entropy of the next-token distributions.

    End-of-sequence tokens count. Prompts are padded on the left; models whose predictions depend on masked padding get prompts
    of one length in each pass. The model runs in its own precision, the rest in float32, and sums in float64.

    Args:
        model ([`~transformers.PreTrainedModel`]):
            Causal language model whose forward takes `logits_to_keep`. Its training mode is restored.
        prompt_ids (`Sequence[Sequence[int]]`):
            Prompt tokens of each of the B completions, at least one each.
        completion_ids (`Sequence[Sequence[int]]`):
            Tokens of each completion; may be empty.
        batch_size (`int`, *optional*, defaults to `32`):
            Completions per pass; each takes 12·T·V bytes beside the model and its activations.
        progress (`bool`, *optional*, defaults to `False`):
            Whether to show a progress bar.

    Returns:
        `tuple` of two `torch.Tensor` of shape `(B,)`, float64, on the CPU: log-probabilities, and sums over the tokens of the
        entropy of the distribution each was drawn from, both in nats. Over the model's own samples, the means of the second
        and of the negated first both estimate the entropy of its completions; the second varies less.

    Raises:
        `ValueError`: If a prompt is empty, the model is not causal, or a log-probability is NaN.
    """
    if not all(len(ids) for ids in prompt_ids):
        raise ValueError("A prompt has no token; give each at least one.")
    check_causal(model, "`model`")
    log_prob, entropy = torch.empty(2, len(prompt_ids), dtype=torch.float64).unbind()
    equal = len({len(ids) for ids in prompt_ids}) > 1 and probe(model, samples=False).score_by_length
    with in_mode(model, training=False), tqdm(total=len(prompt_ids), disable=not progress, unit="completion") as bar:
        for chosen in batches(prompt_ids, batch_size, equal):
            rows = [prompt_ids[i] for i in chosen], [completion_ids[i] for i in chosen]
            log_prob[chosen], entropy[chosen] = _score(model, *rows)
            bar.update(len(chosen))
    if bool(log_prob.isnan().any()):
        raise ValueError("The model gives log-probabilities that are not numbers; check its weights and precision.")
    return log_prob, entropy


def _score(
    model: nn.Module, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies of one batch, each (B,)."""
    device = next(model.parameters()).device
    width = max(map(len, completions))  # T
    if width == 0:
        return torch.zeros(2, len(prompts), dtype=torch.float64).unbind()
    longest = max(map(len, prompts))  # L
    ids = torch.zeros(len(prompts), longest + width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        span = slice(longest - len(prompt), longest + len(completion))
        ids[row, span] = torch.tensor([*prompt, *completion])
        mask[row, span] = 1
    ids, mask = ids.to(device), mask.to(device)
    logits = padded_outputs(model, ids, mask, logits_to_keep=width + 1, use_cache=False).logits
    log_p = logits[:, :-1].float().log_softmax(dim=-1)  # (B, T, V)
    counted = mask[:, -width:] == 0
    token = log_p.gather(-1, ids[:, -width:].unsqueeze(-1)).squeeze(-1)  # (B, T)
    entropy = -(log_p.exp() * log_p.clamp(min=torch.finfo(log_p.dtype).min)).sum(dim=-1)  # (B, T); 0 · -inf is 0
    both = torch.stack([token, entropy]).masked_fill(counted, 0.0)  # (2, B, T)
    return both.double().sum(dim=-1).cpu().unbind()
