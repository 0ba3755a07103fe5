"""
Draws completions from a policy and its proposals, and scores each under all of them.

Axis letters: P prompts, N completions per prompt, K components, B sequences of one pass, L prompt tokens, T completion tokens,
V vocabulary, I inverse temperatures.

The sequences of a pass all continue one prompt: nothing is padded on the left, so that no log-probability depends on how a
model counts positions.
"""

import functools
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from datasets import Dataset
from torch import nn
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..._causal import check_causal
from ..._checks import as_dataset, check_prompt_lengths, check_prompts
from ..._texts import completion_texts
from .._generation import (
    Prompt,
    as_function,
    check_template_kwargs,
    end_tokens,
    evaluate_rewards,
    process_state,
    prompt_tokens,
    transformers_engine,
)
from ..exact import _evaluating
from .mixture import MixtureSample, check_counts


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
    prompts: Dataset | Sequence[Prompt],
    reward: Reward | nn.Module,
    counts: Sequence[int],
    max_completion_length: int,
    *,
    temperatures: Sequence[float] | None = None,
    reward_tokenizer: PreTrainedTokenizerBase | None = None,
    chat_template_kwargs: dict[str, Any] | None = None,
    batch_size: int = 64,
    seed: int = 0,
    progress: bool = True,
) -> Draws:
    """
    Draws completions of each prompt from each component, rewards them, and scores them under every component.

    Sampling is pure: settings that a model was saved with play no part. A completion ends with one of the policy's end tokens
    or at T tokens. Log-probabilities come from passes over the finished completions, in float32 from the logits on, never
    from generation. Equal completions of a prompt are rewarded once.

    Processes that were launched together (`accelerate launch`) share the work, by prompts and components: all must call it, and
    all get the draws of one.

    A component is a model at a temperature. The same model at several costs no further pass to score, and a proposal at a
    temperature above 1 draws what training made it neglect.

    Args:
        models (`Sequence` of [`~transformers.PreTrainedModel`] or `peft.PeftModel`):
            The K components' models: the policy, then proposals, over one vocabulary. Their training modes are restored.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            Their tokenizer; its chat template is applied to prompts of messages.
        prompts ([`~datasets.Dataset`], `Sequence[str]` or `Sequence[list[dict]]`):
            The P prompts, plain text or messages, or a data set with a column `"prompt"`, whose other columns reward functions
            are given.
        reward (`Callable` or `torch.nn.Module`):
            A reward function in TRL's form, which takes lists `prompts` and `completions` and gives a finite number for
            each, or a sequence-classification model.
        counts (`Sequence[int]`):
            Completions of each prompt from each component.
        max_completion_length (`int`):
            T.
        temperatures (`Sequence[float]`, *optional*):
            Temperature of each component, by default 1. The policy's is 1: it is the model in question.
        reward_tokenizer ([`~transformers.PreTrainedTokenizerBase`], *optional*):
            Tokenizer of the reward model; required if `reward` is a module.
        chat_template_kwargs (`dict`, *optional*):
            Further variables of the chat templates, of the tokenizer and of the reward model's, for prompts of messages.
        batch_size (`int`, *optional*, defaults to `64`):
            B.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the draws. The state of the global generators is restored.
        progress (`bool`, *optional*, defaults to `True`):
            Whether to show progress bars, of the main process.

    Returns:
        [`Draws`]

    Raises:
        `ValueError`: If arguments do not fit together, a prompt is empty or too long, a model is not causal, or a reward is not
            a finite number.
    """
    temperatures = [1.0] * len(models) if temperatures is None else [float(value) for value in temperatures]
    if not models or not len(models) == len(counts) == len(temperatures):
        raise ValueError(
            f"`counts` has {len(counts)} numbers and `temperatures` {len(temperatures)} for {len(models)} models; give one a "
            "model."
        )
    check_counts(counts)
    if temperatures[0] != 1 or not all(0 < value < float("inf") for value in temperatures):
        raise ValueError(f"`temperatures={temperatures}` must be above 0, and that of the policy, the first, 1.")
    check_sizes(max_completion_length=max_completion_length, batch_size=batch_size)
    if isinstance(reward, nn.Module) and reward_tokenizer is None:
        raise ValueError("The reward is a model; pass its tokenizer as `reward_tokenizer`.")
    columns = as_dataset(prompts)[:]
    prompts = columns.pop("prompt")
    prompt_ids = _tokens(models, tokenizer, prompts, max_completion_length, chat_template_kwargs)
    sizes = [model.config.get_text_config().vocab_size for model in models]
    if len(set(sizes)) > 1:
        raise ValueError(f"The models have vocabularies of {sizes} tokens; policy and proposals must share one.")
    for k, model in enumerate(models):
        check_causal(model, f"The proposal `models[{k}]`" if k else "The policy")
    end, state, seeds = end_tokens(models[0], tokenizer), process_state(), _seeds(seed)
    bar = functools.partial(tqdm, disable=not (progress and state.is_main_process))
    units = [(p, k, next(seeds)) for p in range(len(prompts)) for k, count in enumerate(counts) if count]
    parts = []
    # One after another: those of a prompt are scored together. Each completion is drawn in one pass, scored in another
    with (
        state.split_between_processes(units) as mine,
        bar(total=2 * sum(counts[k] for _, k, _ in mine), unit="pass", desc="drawing and scoring") as drawn,
    ):
        engines = [
            transformers_engine(
                *(model, tokenizer, max_completion_length, batch_size),
                temperature=temperature,
                end=end,
                on_drawn=drawn.update,
            )
            for model, temperature in zip(models, temperatures, strict=True)
        ]
        for p, own in itertools.groupby(mine, key=operator.itemgetter(0)):
            rows = [row for _, k, seed in own for row in engines[k]([prompt_ids[p]] * counts[k], seed)]
            density = _score(models, temperatures, prompt_ids[p], rows, end, batch_size, drawn.update)
            read = completion_texts(tokenizer, [prompts[p]] * len(rows), [prompt_ids[p]] * len(rows), rows)
            parts.append((p, read, density))
    texts: list[list[str]] = [[] for _ in prompts]
    densities: list[list[torch.Tensor]] = [[] for _ in prompts]
    for p, part, density in gather_object(parts):
        texts[p] += part
        densities[p].append(density)
    log_density = torch.stack([torch.cat(each) for each in densities])  # (P, N, K)
    named = as_function(reward, reward_tokenizer, models[0].device, chat_template_kwargs)
    rewards = _rewards(*named, prompts, columns, texts, batch_size, state, bar)
    return Draws(MixtureSample(rewards, log_density, tuple(counts)), texts)


def check_sizes(**sizes: int) -> None:
    """
    Refuses sizes and numbers below 1.

    Args:
        sizes (`int`):
            By the names that the message says.

    Raises:
        `ValueError`: If one is less than 1.
    """
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"`{name}={size}` must be at least 1.")


def completion_log_prob(
    model: nn.Module,
    prompt_ids: Sequence[int],
    completion_ids: torch.Tensor,
    end_token_ids: Sequence[int],
    temperatures: Sequence[float] = (1.0,),
) -> torch.Tensor:
    """
    Log-probability of completions of one prompt, at several temperatures.

    Args:
        model ([`~transformers.PreTrainedModel`]):
            Causal language model whose forward takes `logits_to_keep`. Its training mode is restored.
        prompt_ids (`Sequence[int]`):
            The prompt's L tokens.
        completion_ids (`torch.Tensor` of shape `(B, T)`):
            Completions; what follows the first end token of a row is not counted.
        end_token_ids (`Sequence[int]`):
            Tokens that end a completion, and count.
        temperatures (`Sequence[float]`, *optional*, defaults to `(1.0,)`):
            What the logits are divided by, K numbers.

    Returns:
        `torch.Tensor` of shape `(B, K)`: log-probabilities in nats, float64, on the CPU.
    """
    logits, completion, counts = _logits(model, prompt_ids, completion_ids, end_token_ids)
    chosen = logits.gather(-1, completion.unsqueeze(-1)).squeeze(-1)  # (B, T)
    columns = []
    for temperature in temperatures:
        log_prob = chosen / temperature - (logits / temperature).logsumexp(dim=-1)
        columns.append(log_prob.masked_fill(~counts, 0.0).double().sum(dim=1).cpu())
    return torch.stack(columns, dim=-1)


def find_temperature(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    max_completion_length: int,
    divergence: float = 2.0,
    *,
    num_samples: int = 16,
    max_prompts: int = 16,
    chat_template_kwargs: dict[str, Any] | None = None,
    batch_size: int = 64,
    seed: int = 0,
) -> float:
    """
    The temperature at which a model's completions diverge from those at temperature 1 by so many nats.

    KL(q ‖ q at the temperature) of a whole completion, the mean over prompts, is estimated from completions drawn at
    temperature 1, exactly at each token. Unlike a temperature, a divergence means the same for completions of 2 tokens and of 200.

    Args:
        model ([`~transformers.PreTrainedModel`] or `peft.PeftModel`):
            The proposal q. Its training mode is restored.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            Its tokenizer.
        prompts (`Sequence[str]` or `Sequence[list[dict]]`):
            Prompts, plain text or messages.
        max_completion_length (`int`):
            T.
        divergence (`float`, *optional*, defaults to `2.0`):
            In nats, above 0 and finite.
        num_samples (`int`, *optional*, defaults to `16`):
            Completions of each prompt.
        max_prompts (`int`, *optional*, defaults to `16`):
            Prompts that are used, spread over all.
        chat_template_kwargs (`dict`, *optional*):
            Further variables of the chat template, for prompts of messages.
        batch_size (`int`, *optional*, defaults to `64`):
            B.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the draws. The state of the global generators is restored.

    Returns:
        `float`: above 1, and 10 at most.

    Raises:
        `ValueError`: If `divergence` is not a finite number above 0, a size is less than 1, a prompt is empty or too long, or the
            model is not causal.
    """
    if not 0 < divergence < float("inf"):
        raise ValueError(f"`divergence={divergence}` must be above 0, and finite.")
    check_sizes(max_completion_length=max_completion_length, num_samples=num_samples, max_prompts=max_prompts,
                batch_size=batch_size)  # fmt: skip
    check_prompts(prompts)
    chosen = [prompts[i] for i in range(0, len(prompts), max(1, -(-len(prompts) // max_prompts)))]
    check_causal(model, "`model`")
    end, seeds = end_tokens(model, tokenizer), _seeds(seed)
    engine = transformers_engine(model, tokenizer, max_completion_length, batch_size, end=end)
    inverse = torch.linspace(1.0, 0.1, 31, dtype=torch.float64)  # (I,)
    total, rows = torch.zeros_like(inverse), 0
    for ids in _tokens([model], tokenizer, chosen, max_completion_length, chat_template_kwargs):
        for batch in _batches(engine([ids] * num_samples, next(seeds)), batch_size):
            logits, _, counts = _logits(model, ids, batch, end)
            log_q = logits[counts].log_softmax(dim=-1)  # (tokens, V)
            mean = -torch.special.entr(log_q.exp()).sum(dim=-1)  # 0 for tokens of probability 0
            for i, s in enumerate(inverse.tolist()):
                total[i] += ((1 - s) * mean + (s * log_q).logsumexp(dim=-1)).sum().item()
            rows += len(batch)
    found = (total / rows).clamp(min=0).sqrt()  # rises along the inverse temperatures, nearly in a straight line
    wanted = divergence**0.5
    place = int(torch.searchsorted(found, wanted))
    if place == len(found):
        return 1 / float(inverse[-1])
    share = (wanted - float(found[place - 1])) / float(found[place] - found[place - 1])
    return 1 / float(torch.lerp(inverse[place - 1], inverse[place], share))


def _tokens(
    models: Sequence[PreTrainedModel],
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    length: int,
    chat_template_kwargs: dict[str, Any] | None,
) -> list[list[int]]:
    check_prompts(prompts)
    check_template_kwargs(prompts, chat_template_kwargs)
    prompt_ids = prompt_tokens(tokenizer, prompts, chat_template_kwargs)
    if not prompt_ids or not all(prompt_ids):
        raise ValueError("`prompts` must hold at least one prompt, and each prompt at least one token.")
    for model in models:
        check_prompt_lengths(prompt_ids, list(prompts), model.config, length)
    return prompt_ids


def _seeds(seed: int) -> Iterator[int]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield int(torch.randint(2**62, (), generator=generator))


def _batches(rows: list[list[int]], size: int) -> Iterator[torch.Tensor]:
    """Completions in batches, (B, T) as wide as the longest; what is filled up comes after an end token."""
    for start in range(0, len(rows), size):
        batch = rows[start : start + size]
        width = max(map(len, batch))
        yield torch.tensor([row + [row[-1]] * (width - len(row)) for row in batch])


def _logits(
    model: nn.Module, prompt_ids: Sequence[int], completion_ids: torch.Tensor, end_token_ids: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits of the completion's tokens, (B, T, V) in float32; the tokens, and which of them count, (B, T)."""
    device = next(model.parameters()).device
    completion = completion_ids.to(device)
    ids = torch.cat([torch.tensor(list(prompt_ids), device=device).expand(len(completion), -1), completion], dim=1)
    width = completion.size(1)
    with _evaluating(model):
        output = model(input_ids=ids, attention_mask=torch.ones_like(ids), logits_to_keep=width + 1, use_cache=False)
    ended = torch.isin(completion, torch.tensor(list(end_token_ids), dtype=torch.long, device=device))
    counts = ended.cumsum(dim=1) - ended.long() == 0
    return output.logits[:, :-1].float(), completion, counts


def _score(
    models: Sequence[PreTrainedModel],
    temperatures: Sequence[float],
    prompt_ids: list[int],
    rows: list[list[int]],
    end: list[int],
    batch_size: int,
    on_scored: Callable[[int], object],
) -> torch.Tensor:
    """Log-probability of each completion under each component, (N, K); one pass a model."""
    places: dict[int, list[int]] = {}
    for k, model in enumerate(models):
        places.setdefault(id(model), []).append(k)
    parts = []
    for batch in _batches(rows, batch_size):
        part = torch.empty(len(batch), len(models), dtype=torch.float64)
        for own in places.values():
            at = [temperatures[k] for k in own]
            part[:, own] = completion_log_prob(models[own[0]], prompt_ids, batch, end, at)
        parts.append(part)
        on_scored(len(batch))
    return torch.cat(parts)


def _rewards(
    name: str,
    function: Reward,
    prompts: Sequence[Prompt],
    columns: dict[str, list],
    texts: list[list[str]],
    batch_size: int,
    state: PartialState,
    bar: Callable[..., Any],
) -> torch.Tensor:
    """Rewards of the completions, (P, N); equal completions of a prompt are scored once, by one of the processes."""
    distinct = list(dict.fromkeys((p, text) for p, row in enumerate(texts) for text in row))
    with state.split_between_processes(distinct) as mine:
        given = []
        for start in bar(range(0, len(mine), batch_size), desc="rewards"):
            batch = mine[start : start + batch_size]
            own = {column: [values[p] for p, _ in batch] for column, values in columns.items()}
            drawn = [prompts[p] for p, _ in batch], [text for _, text in batch]
            given += evaluate_rewards({name: function}, *drawn, None, own, batch_size)[name]
        given = gather_object(given)
    if None in given:
        raise ValueError(
            f"The reward function '{name}' gave `None` to {given.count(None)} of {len(given)} completions; an estimate needs a "
            "number for each."
        )
    values = dict(zip(distinct, given, strict=True))
    return torch.tensor([[values[p, text] for text in row] for p, row in enumerate(texts)], dtype=torch.float64)
