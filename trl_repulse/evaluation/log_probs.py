"""Log-probabilities of completions under a language model.

Legend: B completions, L tokens of the longest prompt, T tokens of the longest completion, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from ..generation._probe import Guard, probe_shared
from ..generation.drawing import POLICY, Sampler, batches, logits_after_prompts, padded_outputs
from ..models._adapters import in_mode
from ..models._model_checks import check_causal


_AT_ONCE = 2**22  # logits in float32: those of a large vocabulary leave the cache of a CPU


def completion_log_probs(
    model: nn.Module,
    prompt_ids: Sequence[Sequence[int]],
    completion_ids: Sequence[Sequence[int]],
    batch_size: int = 32,
    sampler: Sampler = POLICY,
    guard: Guard | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Log-probability of each of B completions after its prompt, and the summed entropy of the next-token distributions.

    End-of-sequence tokens count. Prompts are padded on the left, and each is read once in a pass for all of its completions.
    Models whose predictions depend on masked padding get prompts of one length in each pass; those whose cache cannot be
    continued read each prompt with each completion. The model runs in its own precision, the rest in float32, and sums in float64.

    Args:
        model ([`~transformers.PreTrainedModel`]):
            Causal language model whose forward takes `logits_to_keep`. Its training mode is restored.
        prompt_ids, completion_ids (`Sequence[Sequence[int]]`): Tokens of each prompt, at least one, and of each completion.
        batch_size (`int`, *optional*, defaults to `32`):
            Completions per pass; each takes at most 4·T·V bytes beside the model and its activations.
        sampler ([`~trl_repulse.generation.drawing.Sampler`], *optional*): What drew, if not the model as it is.
        guard ([`~trl_repulse.generation._probe.Guard`], *optional*): What `probe_shared` has found out, by default here.

    Returns:
        `tuple` of two `torch.Tensor` of shape `(B,)`, float64, on the CPU: log-probabilities, and sums of the
        entropies, both in nats. Over the model's own samples, the means of the second and of the negated first both
        estimate the entropy of its completions; the second varies less.

    Raises:
        `ValueError`: If a prompt is empty, the model is not causal or mixes the rows of a batch, or a log-probability is NaN.
    """
    if not all(len(ids) for ids in prompt_ids):
        raise ValueError("A prompt has no token; give each at least one.")
    check_causal(model, "`model`")
    log_prob, entropy = torch.empty(2, len(prompt_ids), dtype=torch.float64).unbind()
    guard = guard or probe_shared(model, samples=False)
    for chosen in batches(prompt_ids, batch_size, guard.score_by_length):
        rows = [prompt_ids[i] for i in chosen], [completion_ids[i] for i in chosen]
        log_prob[chosen], entropy[chosen] = _score(model, *rows, sampler, guard.share_prompts)
    if bool(log_prob.isnan().any()):
        raise ValueError("The model gives log-probabilities that are not numbers; check its weights and precision.")
    return log_prob, entropy


def completion_logits(
    model: nn.Module, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], share: bool = True
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits (B, T, V) of a batch of completions in evaluation mode, without gradient; their tokens, and which of these are no
    padding, (B, T) each. `share` says whether a prompt may be read once for all of its completions."""
    device = next(model.parameters()).device
    numbers: dict[tuple[int, ...], int] = {}  # of the distinct prompts
    of_row = torch.tensor([numbers.setdefault(tuple(ids), len(numbers)) for ids in prompts], device=device)
    before, after = _padded(list(numbers), "left", device), _padded(completions, "right", device)
    with in_mode(model, training=False):
        if share and len(numbers) < len(prompts) and before[0].size(1) > 1:
            logits = logits_after_prompts(model, before, of_row, after)
        else:
            ids, mask = (torch.cat([x[of_row], y], dim=1) for x, y in zip(before, after, strict=True))
            width = after[0].size(1)  # T; the logits of a token are at the place before it
            logits = padded_outputs(model, ids, mask, logits_to_keep=width + 1, use_cache=False).logits[:, :-1]
    return logits, after[0], after[1].bool()


def _score(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    sampler: Sampler,
    share: bool,
) -> tuple[torch.Tensor, ...]:
    """Log-probabilities and entropies of one batch, each (B,). `share` is as in [`completion_logits`]."""
    if not any(map(len, completions)):
        return torch.zeros(2, len(prompts), dtype=torch.float64).unbind()
    read = completion_logits(model, prompts, completions, share)
    rows = max(1, _AT_ONCE // read[0][0].numel())
    parts = zip(*(x.split(rows) for x in read), strict=True)
    return torch.cat([_sums(sampler(part.float()), *rest) for part, *rest in parts], dim=1).cpu().unbind()


def _sums(logits: torch.Tensor, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Log-probabilities and entropies (2, B) of completions, nats, float64, from their logits (B, T, V), tokens and mask (B, T)."""
    log_p = logits.log_softmax(dim=-1)
    token = log_p.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)  # (B, T)
    entropy = -(log_p.exp() * log_p.clamp(min=torch.finfo(log_p.dtype).min)).sum(dim=-1)  # (B, T); 0 · -inf is 0
    return torch.stack([token, entropy]).masked_fill(~mask, 0.0).double().sum(dim=-1)


def _padded(rows: Sequence[Sequence[int]], side: str, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Rows of tokens, padded on one side, and their mask, (B, L) each."""
    tensors = [torch.tensor(row, dtype=torch.long, device=device) for row in rows]
    marks = [torch.ones_like(tensor) for tensor in tensors]
    return tuple(pad_sequence(x, batch_first=True, padding_side=side) for x in (tensors, marks))
