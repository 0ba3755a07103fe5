"""Log-probability of stored bad completions (negative data) under any model."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..data._checks import check_prompt_lengths
from ..data._prompts import prompt_fault
from ..data._tables import read_json_lines
from ..data._texts import completion_tokens
from ._generation import prompt_text, prompt_tokens
from .exact import log_mean_exp
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
            Log of the probability that a completion of a uniformly chosen prompt begins with one of its stored completions.
        per_prompt (`dict[str, dict[str, float]]`):
            `"count"`, `"mean"` and `"logsumexp"` of each prompt.
        empty (`int`):
            Empty completions, which are left out.
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
    How probable a model makes the bad completions that training has stored (`save_negatives`).

    Each completion counts once for each prompt. Its text is tokenized anew, without an end token: the result is the probability
    that a completion *begins* with these tokens. If one stored completion begins with another, `logsumexp` counts the longer
    one twice.

    Args:
        model ([`~transformers.PreTrainedModel`]):
            Any causal language model.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            Its tokenizer.
        path (`str` or `Path`):
            A `negatives.jsonl`: one JSON object a line, with `"prompt"` and `"completion"`, both text or both messages.
        batch_size (`int`, *optional*, defaults to `32`):
            Completions per pass.
        progress (`bool`, *optional*, defaults to `False`):
            Whether to show a progress bar.
        chat_template_kwargs (`dict`, *optional*):
            Variables for the chat template, for prompts of messages.

    Returns:
        [`NegativeLogProbs`]

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
