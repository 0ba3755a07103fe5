"""
Draws completions from a policy and its proposals, and scores each under all of them.

Axis letters: P prompts, N completions per prompt, K models, B sequences of one pass, L prompt tokens, T completion tokens.

The sequences of a pass all continue one prompt: nothing is padded on the left, so that no log-probability depends on how a
model counts positions.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from ..._checks import check_prompt_lengths
from ...generation._habits import without_generation_habits
from ...trainers._rewards import with_checks
from ..exact import _evaluating, _reward_of_model
from .mixture import MixtureSample


Prompt = str | list[dict[str, str]]
Reward = Callable[..., Any]


@dataclass(frozen=True)
class Draws:
    """
    Completions with what an estimate needs of them.

    Args:
        sample ([`~trl_repulse.evaluation.rare.mixture.MixtureSample`]):
            Rewards and log-probabilities.
        texts (`list[list[str]]`):
            The N completions of each prompt, without special tokens.
    """

    sample: MixtureSample
    texts: list[list[str]]


def draw(
    models: Sequence[PreTrainedModel],
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    reward: Reward | nn.Module,
    counts: Sequence[int],
    max_completion_length: int,
    *,
    reward_tokenizer: PreTrainedTokenizerBase | None = None,
    batch_size: int = 64,
    seed: int = 0,
) -> Draws:
    """
    Draws completions of each prompt from each model, rewards them, and scores them under every model.

    Sampling is pure, at temperature 1: settings that a model was saved with play no part. A completion ends with one of the
    policy's end tokens or at T tokens. Log-probabilities come from passes over the finished completions, in float32 from the
    logits on, never from generation. Equal completions of a prompt are rewarded once.

    Args:
        models (`Sequence` of [`~transformers.PreTrainedModel`] or `peft.PeftModel`):
            The policy, then its proposals, over one vocabulary. Their training modes are restored.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            Their tokenizer; its chat template is applied to prompts of messages.
        prompts (`Sequence[str]` or `Sequence[list[dict]]`):
            The P prompts, plain text or messages.
        reward (`Callable` or `torch.nn.Module`):
            A reward function in TRL's form, which takes lists `prompts` and `completions` and gives a finite number for
            each, or a sequence-classification model.
        counts (`Sequence[int]`):
            Completions of each prompt from each model.
        max_completion_length (`int`):
            T.
        reward_tokenizer ([`~transformers.PreTrainedTokenizerBase`], *optional*):
            Tokenizer of the reward model; required if `reward` is a module.
        batch_size (`int`, *optional*, defaults to `64`):
            B.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the draws. The state of the global generators is restored.

    Returns:
        [`Draws`]

    Raises:
        `ValueError`: If arguments do not fit together, a prompt is empty or too long, or a reward is not a finite number.
    """
    if len(models) != len(counts) or not models:
        raise ValueError(f"`counts` has {len(counts)} numbers for {len(models)} models; give one a model.")
    if max_completion_length < 1 or batch_size < 1:
        raise ValueError("`max_completion_length` and `batch_size` must be at least 1.")
    if isinstance(reward, nn.Module):
        if reward_tokenizer is None:
            raise ValueError("The reward is a model; pass its tokenizer as `reward_tokenizer`.")
        reward = _as_function(reward, reward_tokenizer)
    prompt_ids = [_tokenize(tokenizer, prompt) for prompt in prompts]
    if not prompt_ids or not all(prompt_ids):
        raise ValueError("`prompts` must hold at least one prompt, and each prompt at least one token.")
    sizes = [model.config.get_text_config().vocab_size for model in models]
    if len(set(sizes)) > 1:
        raise ValueError(f"The models have vocabularies of {sizes} tokens; policy and proposals must share one.")
    for model in models:
        check_prompt_lengths(prompt_ids, list(prompts), model.config, max_completion_length)
    device = models[0].device
    parts: list[tuple[torch.Tensor, torch.Tensor, list[str]]] = []
    with torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type):
        torch.manual_seed(seed)
        for prompt, ids in zip(prompts, prompt_ids, strict=True):
            log_density, texts = _draw_prompt(models, tokenizer, ids, counts, max_completion_length, batch_size)
            parts.append((_score(reward, prompt, texts, batch_size), log_density, texts))
    rewards, densities, texts_of = zip(*parts, strict=True)
    return Draws(MixtureSample(torch.stack(rewards), torch.stack(densities), tuple(counts)), list(texts_of))


def completion_log_prob(
    model: nn.Module, prompt_ids: Sequence[int], completion_ids: torch.Tensor, end_token_ids: Sequence[int]
) -> torch.Tensor:
    """
    Log-probability of completions of one prompt.

    Args:
        model ([`~transformers.PreTrainedModel`]):
            Causal language model whose forward takes `logits_to_keep`. Its training mode is restored.
        prompt_ids (`Sequence[int]`):
            The prompt's L tokens.
        completion_ids (`torch.Tensor` of shape `(B, T)`):
            Completions; what follows the first end token of a row is not counted.
        end_token_ids (`Sequence[int]`):
            Tokens that end a completion, and count.

    Returns:
        `torch.Tensor` of shape `(B,)`: log-probabilities in nats, float64, on the CPU.
    """
    device = next(model.parameters()).device
    completion = completion_ids.to(device)
    ids = torch.cat([torch.tensor(list(prompt_ids), device=device).expand(len(completion), -1), completion], dim=1)
    width = completion.size(1)
    with _evaluating(model):
        output = model(input_ids=ids, attention_mask=torch.ones_like(ids), logits_to_keep=width + 1, use_cache=False)
    logits = output.logits[:, :-1].float()  # (B, T, V)
    log_prob = logits.gather(-1, completion.unsqueeze(-1)).squeeze(-1) - logits.logsumexp(dim=-1)  # (B, T)
    ended = torch.isin(completion, torch.tensor(list(end_token_ids), dtype=torch.long, device=device))
    after_end = ended.cumsum(dim=1) - ended.long() > 0
    return log_prob.masked_fill(after_end, 0.0).double().sum(dim=1).cpu()


def _draw_prompt(
    models: Sequence[PreTrainedModel],
    tokenizer: PreTrainedTokenizerBase,
    prompt_ids: list[int],
    counts: Sequence[int],
    length: int,
    batch_size: int,
) -> tuple[torch.Tensor, list[str]]:
    """Log-probabilities (N, K) and texts of the completions of one prompt."""
    end = _end_token_ids(models[0], tokenizer)
    pad = end[0] if tokenizer.pad_token_id is None and end else tokenizer.pad_token_id
    log_density, rows = [], []
    for model, count in zip(models, counts, strict=True):
        for start in range(0, count, batch_size):
            size = min(batch_size, count - start)
            completion = _generate(model, prompt_ids, size, length, end, pad)
            log_density.append(
                torch.stack([completion_log_prob(scored, prompt_ids, completion, end) for scored in models], dim=-1)
            )
            rows += [_until_end(row, end) for row in completion.tolist()]
    return torch.cat(log_density), tokenizer.batch_decode(rows, skip_special_tokens=True)


def _generate(
    model: PreTrainedModel, prompt_ids: list[int], size: int, length: int, end: list[int], pad: int | None
) -> torch.Tensor:
    """Completions of one prompt, (B, T) or narrower if all have ended."""
    config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=length,
        eos_token_id=end or None,
        pad_token_id=pad,
    )
    ids = torch.tensor(prompt_ids, device=model.device).expand(size, -1)
    with _evaluating(model), without_generation_habits(model):
        output = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=config)
    return output[:, len(prompt_ids) :]


def _end_token_ids(policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """What ends a completion: the policy's own end tokens, else the tokenizer's."""
    end = policy.generation_config.eos_token_id
    end = tokenizer.eos_token_id if end is None else end
    return [] if end is None else end if isinstance(end, list) else [end]


def _until_end(row: list[int], end: list[int]) -> list[int]:
    """A completion's tokens with the one that ends it, which is no part of the text if it is a special token."""
    places = [row.index(token) for token in end if token in row]
    return row[: min(places) + 1] if places else row


def _tokenize(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> list[int]:
    if isinstance(prompt, str):
        return tokenizer(prompt)["input_ids"]
    text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    return tokenizer(text, add_special_tokens=False)["input_ids"]  # the template wrote them


def _as_function(model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> Reward:
    """A reward model as a reward function, which reads what TRL would have it read."""
    of_texts = _reward_of_model(model, tokenizer)

    def reward(prompts: list[Any], completions: list[Any], **_: Any) -> list[float]:
        pairs = zip(prompts, completions, strict=True)
        texts = [
            prompt + completion
            if isinstance(prompt, str)
            else tokenizer.apply_chat_template(prompt + completion, tokenize=False)
            for prompt, completion in pairs
        ]
        return of_texts(texts).tolist()

    return reward


def _score(reward: Reward, prompt: Prompt, texts: list[str], batch_size: int) -> torch.Tensor:
    """Rewards of the completions of one prompt, (N,); equal completions are scored once."""
    distinct = list(dict.fromkeys(texts))
    is_plain = isinstance(prompt, str)
    name = getattr(reward, "__name__", type(reward).__name__)
    checked, values = with_checks(reward, name), {}
    for start in range(0, len(distinct), batch_size):
        batch = distinct[start : start + batch_size]
        completions = batch if is_plain else [[{"role": "assistant", "content": text}] for text in batch]
        rewards = checked(prompts=[prompt] * len(batch), completions=completions)
        if len(rewards) != len(batch) or None in rewards:
            raise ValueError(
                f"The reward function '{name}' gave {len(rewards)} rewards for {len(batch)} completions, "
                f"{rewards.count(None)} of them `None`; an estimate needs a number for each."
            )
        values |= dict(zip(batch, rewards, strict=True))
    return torch.tensor([values[text] for text in texts], dtype=torch.float64)
