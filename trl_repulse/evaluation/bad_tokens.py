"""
Exact probability that a completion of one or two tokens contains a bad token, for a vocabulary of any size.

Legend: P prompts, V vocabulary, A tokens that are neither bad nor an end, B sequences of one forward pass, L prompt tokens.
"""

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import nn

from ..models._adapters import in_mode
from ..models._model_checks import check_causal, check_token_ids
from .tails import check_sizes


@torch.no_grad()
def exact_log_prob_bad(
    model: nn.Module,
    prompt_ids: Sequence[Sequence[int]],
    bad_token_ids: Collection[int],
    max_completion_length: int,
    eos_token_ids: Collection[int],
    batch_size: int | None = None,
) -> torch.Tensor:
    """
    Log-probability that any token of a completion is bad, by enumeration of its first token.

    A completion ends with an end-of-sequence token or at T tokens. For T = 2,

        P(bad) = Σ_{s₁ bad} P(s₁) + Σ_{s₁ neither bad nor end} P(s₁) · P(s₂ bad | s₁),

    which takes up to V + 1 sequences a prompt (about 50,000 for GPT-2) and no reward model. Prompts are not padded. The model
    runs in its own precision; the rest is in log space, so that tiny probabilities are exact.

    Args:
        model ([`~transformers.PreTrainedModel`]):
            Causal language model whose forward takes `logits_to_keep`. Its training mode is restored.
        prompt_ids (`Sequence[Sequence[int]]`):
            Tokens of each of the P prompts.
        bad_token_ids (`Collection[int]`):
            Tokens that make a completion bad, anywhere in it.
        max_completion_length (`int`):
            T, 1 or 2.
        eos_token_ids (`Collection[int]`):
            Tokens that end a completion; may be empty.
        batch_size (`int`, *optional*):
            B; by default 64 on a CPU and 512 elsewhere. Logits take about 8·B·V bytes in float32.

    Returns:
        `torch.Tensor` of shape `(P,)`: log P(bad) of each prompt in nats, float64, on the CPU; −inf without bad tokens.

    Raises:
        `ValueError`: If an argument is out of range, a prompt is empty, or the model is not causal.

    Example:

    ```python
    >>> from transformers import AutoModelForCausalLM, AutoTokenizer
    >>> from trl_repulse.evaluation.bad_tokens import exact_log_prob_bad

    >>> tokenizer = AutoTokenizer.from_pretrained("distilgpt2")
    >>> model = AutoModelForCausalLM.from_pretrained("distilgpt2")
    >>> prompt_ids = [tokenizer("This man is a")["input_ids"]]
    >>> exact_log_prob_bad(model, prompt_ids, [5089, 9372], 2, [tokenizer.eos_token_id])
    ```
    """
    bad, eos, batch_size = _check_arguments(
        model, prompt_ids, bad_token_ids, eos_token_ids, max_completion_length, batch_size
    )
    with in_mode(model, training=False):
        first = [
            _first_token_log_prob_bad(model, ids, bad, eos, max_completion_length, batch_size) for ids in prompt_ids
        ]
    return torch.stack([row.logsumexp(dim=0).cpu() for row in first])


def _check_arguments(
    model: nn.Module,
    prompt_ids: Sequence[Sequence[int]],
    bad_token_ids: Collection[int],
    eos_token_ids: Collection[int],
    max_completion_length: int,
    batch_size: int | None,
) -> tuple[list[int], list[int], int]:
    """Bad and end tokens, sorted, and the batch size."""
    if max_completion_length not in (1, 2):
        raise ValueError(
            f"`max_completion_length={max_completion_length}` must be 1 or 2; estimate others by sampling."
        )
    if batch_size is None:
        batch_size = 64 if next(model.parameters()).device.type == "cpu" else 512
    check_sizes(batch_size=batch_size)
    if not prompt_ids or not all(len(ids) for ids in prompt_ids):
        raise ValueError("`prompt_ids` must hold at least one prompt, and each prompt at least one token.")
    config: Any = model.config
    check_token_ids(prompt_ids, config)
    check_causal(model, "`model`")
    return sorted(set(bad_token_ids)), sorted(set(eos_token_ids)), batch_size


def _first_token_log_prob_bad(
    model: nn.Module, prompt_ids: Sequence[int], bad: list[int], eos: list[int], length: int, batch_size: int
) -> torch.Tensor:
    """Log P(first token, and a bad token among the first `length`) for each first token, (V,), float64."""
    prompt = torch.tensor(list(prompt_ids), device=next(model.parameters()).device)  # (L,)
    first = _next_log_prob(model, prompt.unsqueeze(0))[0]  # (V,)
    for name, tokens in (("bad_token_ids", bad), ("eos_token_ids", eos)):
        if tokens and not 0 <= tokens[0] <= tokens[-1] < len(first):
            raise ValueError(
                f"`{name}` has {tokens[0] if tokens[0] < 0 else tokens[-1]}, but the model's vocabulary is "
                f"0 to {len(first) - 1}; use the ids of the model's own tokenizer."
            )
    joint = torch.full_like(first, -torch.inf)
    joint[bad] = first[bad]
    if length == 2 and bad:
        live = torch.ones_like(first, dtype=torch.bool)
        live[bad + eos] = False
        others = live.nonzero()  # (A, 1)
        for start in range(0, len(others), batch_size):
            batch = others[start : start + batch_size]
            rows = torch.cat([prompt.expand(len(batch), -1), batch], dim=1)  # (B, L + 1)
            second = _next_log_prob(model, rows, bad).logsumexp(dim=1)  # log P(s₂ bad | s₁), (B,)
            joint[batch[:, 0]] = first[batch[:, 0]] + second
    return joint


def _next_log_prob(model: nn.Module, rows: torch.Tensor, chosen: list[int] | None = None) -> torch.Tensor:
    """Log-probabilities of the token after each row, (B, V) or only those of `chosen`, float64."""
    logits = model(input_ids=rows, attention_mask=torch.ones_like(rows), logits_to_keep=1, use_cache=False).logits
    logits = logits[:, -1].to(torch.promote_types(logits.dtype, torch.float32))  # (B, V)
    logits.sub_(logits.amax(dim=1, keepdim=True))  # in place: nothing else uses this output
    kept = (logits if chosen is None else logits[:, chosen]).to(torch.float64, copy=True)
    # Exponentials in the model's precision and their sum in float64: an error of 1e-7 nats in float32
    return kept - logits.exp_().sum(dim=1, keepdim=True, dtype=torch.float64).log()
