"""
Log-probabilities of completions, and of stored bad completions (negative data), under a language model.

Legend: B completions, L tokens of the longest prompt, T tokens of the longest completion, V vocabulary.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..data._checks import check_prompt_lengths
from ..data._prompts import prompt_fault
from ..data._tables import read_json_lines
from ..data._texts import completion_tokens
from ..generation._probe import Guard, probe_shared
from ..generation.drawing import POLICY, Sampler, batches, logits_after_prompts, padded_outputs
from ..models._adapters import in_mode
from ..models._model_checks import check_causal
from ._generation import prompt_text, prompt_tokens


def log_mean_exp(log_prob: torch.Tensor) -> float:
    """Log of the mean of probabilities, from their logs (P,)."""
    return log_prob.logsumexp(dim=0).item() - math.log(len(log_prob))


_AT_ONCE = 2**22  # logits in float32: those of a large vocabulary leave the cache of a CPU


def completion_log_probs(
    model: nn.Module,
    prompt_ids: Sequence[Sequence[int]],
    completion_ids: Sequence[Sequence[int]],
    batch_size: int = 32,
    progress: bool = False,
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
        prompt_ids, completion_ids (`Sequence[Sequence[int]]`):
            Tokens of each prompt, at least one, and of each completion.
        batch_size (`int`, *optional*, defaults to `32`):
            Completions per pass; each takes at most 4·T·V bytes beside the model and its activations.
        progress (`bool`, *optional*, defaults to `False`): Whether to show a progress bar.
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
    with tqdm(total=len(prompt_ids), disable=not progress, unit="completion") as bar:
        for chosen in batches(prompt_ids, batch_size, guard.score_by_length):
            rows = [prompt_ids[i] for i in chosen], [completion_ids[i] for i in chosen]
            log_prob[chosen], entropy[chosen] = _score(model, *rows, sampler, guard.share_prompts)
            bar.update(len(chosen))
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
            width = after[0].size(1)
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


def _padded(rows: Sequence[Sequence[int]], side: str, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of tokens, padded on one side, and their mask, (B, L) each."""
    tensors = [torch.tensor(row, dtype=torch.long, device=device) for row in rows]
    marks = [torch.ones_like(tensor) for tensor in tensors]
    ids, mask = (pad_sequence(x, batch_first=True, padding_side=side) for x in (tensors, marks))
    return ids, mask


@dataclass(frozen=True)
class NegativeLogProbs:
    """
    Log-probabilities of distinct bad completions, in nats.

    Args:
        count, empty (`int`): Distinct completions, over all prompts, and empty ones, which are left out.
        mean (`float`): Mean of log p over them.
        logsumexp (`float`):
            Log of the probability that a completion of a uniformly chosen prompt begins with one of its stored
            completions.
        per_prompt (`dict[str, dict[str, float]]`): `"count"`, `"mean"` and `"logsumexp"` of each prompt.
    """

    count: int
    mean: float
    logsumexp: float
    per_prompt: dict[str, dict[str, float]]
    empty: int = 0


def check_negatives(path: str | Path) -> None:
    """
    Checks a file for [`negative_log_probs`] without a model. Raises `ValueError` if it is missing, has no rows or only empty
    completions, or a row has no prompt or completion.
    """
    _read_rows(Path(path))


def negative_log_probs(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    path: str | Path,
    batch_size: int = 32,
    progress: bool = False,
    chat_template_kwargs: dict[str, Any] | None = None,
) -> NegativeLogProbs:
    """
    How probable a causal language model makes the bad completions that training has stored (`save_negatives`).

    Each completion counts once for each prompt. Its text is tokenized anew, without an end token: the result is the
    probability that a completion *begins* with these tokens. If one stored completion begins with another, `logsumexp`
    counts the longer one twice.

    Args:
        path (`str` or `Path`):
            A `negatives.jsonl`: one JSON object a line, with `"prompt"` and `"completion"`, both text or both
            messages.
        batch_size (`int`, *optional*, defaults to `32`): Completions per pass.
        chat_template_kwargs (`dict`, *optional*): Variables for the chat template, for prompts of messages.

    Raises:
        `ValueError`: As [`check_negatives`], or if a completion is too long for the model.
    """
    pairs: dict[str, tuple[Any, dict[str, None]]] = {}  # text of a prompt -> the prompt, its distinct completions
    for number, prompt, text in _read_rows(Path(path)):
        rendered = prompt_text(tokenizer, prompt, chat_template_kwargs, f"The prompt in line {number} of `{path}`")
        pairs.setdefault(rendered, (prompt, {}))[1][text] = None
    empty = sum("" in completions for _, completions in pairs.values())
    for _, completions in pairs.values():
        completions.pop("", None)
    pairs = {text: pair for text, pair in pairs.items() if pair[1]}
    tokens = prompt_tokens(tokenizer, [prompt for prompt, _ in pairs.values()], chat_template_kwargs)
    prompts = dict(zip(pairs, tokens, strict=True))
    texts = [(text, completion) for text, (_, completions) in pairs.items() for completion in completions]
    ids = [completion_tokens(tokenizer, pairs[text][0], completion) for text, completion in texts]
    check_prompt_lengths(list(prompts.values()), list(prompts), model.config, 0)
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    for (text, completion), row in zip(texts, ids, strict=True):
        if context is not None and len(prompts[text]) + len(row) > context:
            raise ValueError(
                f"The bad completion of `{path}` that begins {completion[:60]!r} has {len(row)} tokens, which with its prompt's "
                f"{len(prompts[text])} exceed the model's context of {context}; remove its line."
            )
    log_prob, _ = completion_log_probs(model, [prompts[text] for text, _ in texts], ids, batch_size, progress)
    per_prompt, start = {}, 0
    for text, (_, completions) in pairs.items():
        own = log_prob[start : start + len(completions)]
        start += len(completions)
        per_prompt[text] = {"count": len(own), "mean": own.mean().item(), "logsumexp": own.logsumexp(dim=0).item()}
    sums = torch.tensor([entry["logsumexp"] for entry in per_prompt.values()], dtype=torch.float64)
    return NegativeLogProbs(len(log_prob), log_prob.mean().item(), log_mean_exp(sums), per_prompt, empty)


def _read_rows(path: Path) -> list[tuple[int, Any, str]]:
    """Number of each line, its prompt, and the text of its completion."""
    if not path.is_file():
        raise ValueError(f"There is no file `{path}`; train with `save_negatives` to have one.")
    rows = []
    for number, row in read_json_lines(path):
        try:
            prompt, completion = row["prompt"], row["completion"]
            text = completion if isinstance(completion, str) else completion[0]["content"]
            if not isinstance(text, str):
                raise ValueError(f"`completion` is {text!r:.60}, neither text nor messages")
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise ValueError(
                f"Line {number} of `{path}` is no bad completion ({error!r}); it needs `prompt` and `completion`."
            ) from error
        if (fault := prompt_fault(prompt)) is not None:
            raise ValueError(f"Line {number} of `{path}` {fault}.")
        rows.append((number, prompt, text))
    if not rows:
        raise ValueError(f"`{path}` is empty; there is no bad completion to score.")
    if not any(text for _, _, text in rows):
        raise ValueError(f"`{path}` has empty completions only; there is none to score.")
    return rows
