"""Log-probability of stored bad completions (negative data) under any model."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .._checks import check_prompt_lengths
from .._prompts import prompt_fault
from .._tables import read_json_lines
from .._texts import completion_tokens
from ._generation import prompt_text, prompt_tokens
from .log_probs import completion_log_probs


@dataclass(frozen=True)
class NegativeLogProbs:
    """
    Log-probabilities of distinct bad completions, in nats.

    Args:
        count (`int`):
            Distinct completions, over all prompts.
        mean (`float`):
            Mean of log p over them.
        logsumexp (`float`):
            Log of the probability that a completion of a prompt chosen uniformly begins with one of the prompt's completions.
        per_prompt (`dict[str, dict[str, float]]`):
            `"count"`, `"mean"` and `"logsumexp"` of each prompt's own.
        empty (`int`):
            Empty completions, which are left out: every completion begins with them.
    """

    count: int
    mean: float
    logsumexp: float
    per_prompt: dict[str, dict[str, float]]
    empty: int = 0


def check_negatives(path: str | Path) -> None:
    """
    Refuses a file that [`negative_log_probs`] would refuse, without a model.

    Args:
        path (`str` or `Path`):
            As there.

    Raises:
        `ValueError`: If there is no such file, it has no rows or empty completions alone, or a row has no prompt or completion.
    """
    if not [text for _, _, text in _rows(Path(path)) if text]:
        raise ValueError(f"`{path}` has empty completions only; there is none to score.")


def negative_log_probs(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    path: str | Path,
    batch_size: int = 32,
    progress: bool = False,
    chat_template_kwargs: dict[str, Any] | None = None,
) -> NegativeLogProbs:
    """
    How probable a model makes bad completions that training has met (`save_negatives`).

    A completion counts once for each prompt, however often it was drawn. Its text is tokenized anew, which need not give the
    tokens it was drawn with, and without an end: what is computed is the probability that a completion *begins* with these
    tokens. Where one stored completion begins with another, `logsumexp` counts the longer one twice.

    Args:
        model ([`~transformers.PreTrainedModel`]):
            Any causal language model.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            Its tokenizer.
        path (`str` or `Path`):
            A `negatives.jsonl`: one JSON object a line, with `"prompt"` and `"completion"`, both text or both messages.
        batch_size (`int`, *optional*, defaults to `32`):
            Completions of one pass.
        progress (`bool`, *optional*, defaults to `False`):
            Whether to show a progress bar.
        chat_template_kwargs (`dict`, *optional*):
            Further variables of the chat template of prompts that are messages.

    Returns:
        [`NegativeLogProbs`]

    Raises:
        `ValueError`: If the file has no rows or empty completions alone, a row has no prompt or completion, or one is too long
            for the model.
    """
    check_negatives(path)
    pairs = _read(Path(path), tokenizer, chat_template_kwargs)
    empty = 0
    for _, completions in pairs.values():
        if "" in completions:
            del completions[""]
            empty += 1
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
    overall = (sums.logsumexp(dim=0) - torch.tensor(len(sums), dtype=torch.float64).log()).item()
    return NegativeLogProbs(len(log_prob), log_prob.mean().item(), overall, per_prompt, empty)


def _read(
    path: Path, tokenizer: PreTrainedTokenizerBase, chat_template_kwargs: dict[str, Any] | None
) -> dict[str, tuple[Any, dict[str, None]]]:
    """Text of a prompt -> the prompt, and its distinct completions in the order of the file."""
    pairs: dict[str, tuple[Any, dict[str, None]]] = {}
    for number, prompt, text in _rows(path):
        rendered = prompt_text(tokenizer, prompt, chat_template_kwargs, f"The prompt in line {number} of `{path}`")
        pairs.setdefault(rendered, (prompt, {}))[1][text] = None
    return pairs


def _rows(path: Path) -> Iterator[tuple[int, Any, str]]:
    """Number of each line, its prompt, and the text of its completion."""
    if not path.is_file():
        raise ValueError(f"There is no file `{path}`; train with `save_negatives` to have one.")
    empty = True
    for number, row in read_json_lines(path):
        empty = False
        try:
            prompt, completion = row["prompt"], row["completion"]
            text = completion if isinstance(completion, str) else completion[0]["content"]
            if not isinstance(text, str):
                raise ValueError(f"`completion` is {text!r:.60}, neither text nor messages")
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise ValueError(
                f"Line {number} of `{path}` is no bad completion ({error!r}); it needs `prompt` and `completion`."
            ) from error
        fault = prompt_fault(prompt)
        if fault is not None:
            raise ValueError(f"Line {number} of `{path}` {fault}.")
        yield number, prompt, text
    if empty:
        raise ValueError(f"`{path}` is empty; there is no bad completion to score.")
