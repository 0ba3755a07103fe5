"""Draws completions from a policy and its proposals, and scores each under all of them.

Axis letters: P prompts, N completions per prompt, K components, B sequences of one pass, T completion tokens, V vocabulary, I inverse
temperatures.

All sequences of a pass continue one prompt, so nothing is padded on the left.
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

from ...data._checks import as_dataset, check_prompt_lengths
from ...data._texts import completion_texts
from ...generation._probe import Guard, probe_shared
from ...generation.completions import tokenize
from ...generation.drawing import end_tokens
from ...models._model_checks import check_causal, vocab_size
from .._generation import (
    Prompt,
    as_function,
    check_columns,
    check_template_kwargs,
    evaluate_rewards,
    process_state,
    transformers_engine,
)
from ..log_probs import completion_logits
from ..tails import check_sizes
from .components import Component, drawn_by
from .counts import check_counts
from .mixture import MixtureSample, join_parts


Reward = Callable[..., Any]


@dataclass(frozen=True)
class Draws:
    """Completions as a sample of the mixture, as text, and as tokens: the N of each prompt; texts are without special tokens."""

    sample: MixtureSample
    texts: list[list[str]]
    ids: list[list[list[int]]]

    def joined(self, other: "Draws") -> "Draws":
        """Both draws from the same prompts and components as one."""
        own, more = self.sample.counts, other.sample.counts

        def both(mine: list[list[Any]], others: list[list[Any]]) -> list[list[Any]]:
            """For each prompt the values of both draws' completions, in the order of the components."""
            places = join_parts(torch.arange(sum(own))[None], sum(own) + torch.arange(sum(more))[None], own, more)[0]
            return [[(a + b)[i] for i in places.tolist()] for a, b in zip(mine, others, strict=True)]

        return Draws(self.sample.joined(other.sample), both(self.texts, other.texts), both(self.ids, other.ids))


def draw(
    components: Sequence[PreTrainedModel | Component],
    tokenizer: PreTrainedTokenizerBase,
    prompts: Dataset | Sequence[Prompt],
    reward: Reward | nn.Module,
    counts: Sequence[int],
    max_completion_length: int,
    *,
    reward_tokenizer: PreTrainedTokenizerBase | None = None,
    chat_template_kwargs: dict[str, Any] | None = None,
    batch_size: int = 64,
    seed: int = 0,
    rewarded: dict[tuple[int, str], float] | None = None,
    progress: bool = True,
) -> Draws:
    """
    Draws completions of each prompt from each component, rewards them, and scores them under every component.

    One pass of a model scores all of its components. Sampling ignores the model's generation configuration. A completion
    ends with one of the policy's end tokens or at T tokens. Equal completions of a prompt are rewarded once. Under
    `accelerate launch`, processes share the work; all must call this function and get the same result.

    Args:
        components (`Sequence` of [`~transformers.PreTrainedModel`], `peft.PeftModel` or `Component`):
            What draws: the policy, a model, then K − 1 others, of models that share its vocabulary
            ([`~trl_repulse.evaluation.rare.components.Component`]). Training modes are restored.
        tokenizer, reward_tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            The tokenizer of the models, and that of the reward if it is a model.
        prompts ([`~datasets.Dataset`], `Sequence[str]` or `Sequence[list[dict]]`):
            The P prompts: plain text, messages, or a data set with a column `"prompt"`, whose other columns reach the reward.
        reward (`Callable` or `torch.nn.Module`):
            A reward function as in TRL, with a finite reward for each completion, or a sequence-classification model.
        counts (`Sequence[int]`): Completions of each prompt from each component: 0, or at least 2.
        max_completion_length, batch_size (`int`): T and B.
        chat_template_kwargs (`dict`, *optional*): Variables for the chat templates of both tokenizers.
        seed (`int`, *optional*, defaults to `0`): Seed of the draws. The global random state is restored.
        rewarded (`dict[tuple[int, str], float]`, *optional*):
            Known rewards by a prompt's number and a completion's text; new ones are added.
        progress (`bool`, *optional*, defaults to `True`): Whether the main process shows progress bars.

    Raises:
        `ValueError`: If arguments do not fit together, a prompt is empty or too long, a model is not causal, or a reward is not finite.
    """
    if not components or len(components) != len(counts):
        raise ValueError(f"`counts` has {len(counts)} numbers for {len(components)} components; give one each.")
    check_counts(counts := [int(count) for count in counts])
    parts = [each if isinstance(each, Component) else Component(each) for each in components]
    policy = parts[0].model
    if not parts[0].changes_nothing:
        raise ValueError("The first of `components` must be the policy as it is; pass the model itself.")
    check_sizes(max_completion_length=max_completion_length, batch_size=batch_size)
    if isinstance(reward, nn.Module) and reward_tokenizer is None:
        raise ValueError("The reward is a model; pass its tokenizer as `reward_tokenizer`.")
    columns = as_dataset(prompts)[:]
    prompts = columns.pop("prompt")
    called = getattr(reward, "__name__", type(reward).__name__)
    remedy = "but the prompts have no such column; add it, or give it a default"
    check_columns(reward, called, columns.keys() - {"completion"}, remedy)
    models = {id(part.model): part.model for part in parts}
    prompt_ids = _prompt_ids(list(models.values()), tokenizer, prompts, max_completion_length, chat_template_kwargs)
    sizes = [vocab_size(part.model) for part in parts]
    if len(set(sizes)) > 1:
        raise ValueError(
            f"The models have vocabularies of {sorted(set(sizes))} tokens; policy, reference and proposals must share one."
        )
    for k, part in enumerate(parts):
        check_causal(part.model, f"The model of `components[{k}]`" if k else "The policy")
    end, state, seeds = end_tokens(policy, tokenizer), process_state(), _seeds(seed)
    bar = functools.partial(tqdm, disable=not (progress and state.is_main_process))
    units = [(p, k, next(seeds)) for p in range(len(prompts)) for k in range(len(counts))]
    units = [unit for unit in units if counts[unit[1]]]  # what one component draws does not depend on the others
    scored = []
    # Prompt by prompt, since completions of a prompt are scored together. Each is drawn in one pass, scored in another
    with (
        state.split_between_processes(units) as mine,
        bar(total=2 * sum(counts[k] for _, k, _ in mine), unit="pass", desc="drawing and scoring") as drawn,
    ):
        guards = {key: probe_shared(model) for key, model in models.items()}
        given = tokenizer, max_completion_length, batch_size
        engines = {
            key: transformers_engine(model, *given, end=end, on_drawn=drawn.update, guard=guards[key])
            for key, model in models.items()
        }
        for p, own in itertools.groupby(mine, key=operator.itemgetter(0)):
            rows = []
            for _, k, seed in own:
                with drawn_by(policy, parts[k], len(prompt_ids[p]), guards[id(parts[k].model)].use_cache) as source:
                    rows += engines[id(source)]([prompt_ids[p]] * counts[k], seed)
            density = _score(parts, prompt_ids[p], rows, guards, batch_size, drawn.update)
            texts_of = completion_texts(tokenizer, [prompts[p]] * len(rows), [prompt_ids[p]] * len(rows), rows)
            scored.append((p, texts_of, rows, density))
    texts: list[list[str]] = [[] for _ in prompts]
    ids_of: list[list[list[int]]] = [[] for _ in prompts]
    densities: list[list[torch.Tensor]] = [[] for _ in prompts]
    for p, own_texts, rows, density in gather_object(scored):
        texts[p] += own_texts
        ids_of[p] += rows
        densities[p].append(density)
    log_density = torch.stack([torch.cat(each) for each in densities])  # (P, N, K)
    named = as_function(reward, reward_tokenizer, policy.device, chat_template_kwargs)
    rewards = _rewards(*named, prompts, columns, texts, batch_size, state, bar, {} if rewarded is None else rewarded)
    return Draws(MixtureSample(rewards, log_density, tuple(counts)), texts, ids_of)


def find_temperature(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    max_completion_length: int,
    divergence: float = 2.0,
    *,
    num_samples: int = 16,
    chat_template_kwargs: dict[str, Any] | None = None,
    batch_size: int = 64,
    seed: int = 0,
) -> float:
    """
    The temperature, above 1 and at most 10, at which a model's completions diverge from those at temperature 1 by so many nats.

    KL(q ‖ q at the temperature) of whole completions, averaged over prompts (at most 16, spread over all), is estimated from
    completions drawn at temperature 1, exactly at each token.

    Args:
        model ([`~transformers.PreTrainedModel`] or `peft.PeftModel`): The proposal q. Its training mode is restored.
        divergence (`float`, *optional*, defaults to `2.0`): In nats, above 0 and finite.
        num_samples (`int`, *optional*, defaults to `16`): Completions of each prompt.
        tokenizer, prompts, max_completion_length, chat_template_kwargs, batch_size, seed:
            As in [`draw`]; prompts are plain text or messages.
    """
    if not 0 < divergence < float("inf"):
        raise ValueError(f"`divergence={divergence}` must be above 0, and finite.")
    check_sizes(max_completion_length=max_completion_length, num_samples=num_samples, batch_size=batch_size)
    prompts = as_dataset(prompts)[:]["prompt"]
    chosen = prompts[:: -(-len(prompts) // 16)]
    check_causal(model, "`model`")
    guard, seeds = probe_shared(model), _seeds(seed)
    engine = transformers_engine(model, tokenizer, max_completion_length, batch_size, guard=guard)
    # KL at a token: (1 − s) · E[log q] + log Σ q^s, for the inverse temperature s
    inverse = torch.linspace(1.0, 0.1, 31, dtype=torch.float64)  # (I,)
    total, rows = torch.zeros_like(inverse), 0
    for ids in _prompt_ids([model], tokenizer, chosen, max_completion_length, chat_template_kwargs):
        drawn = engine([ids] * num_samples, next(seeds))
        for batch in (drawn[i : i + batch_size] for i in range(0, num_samples, batch_size)):
            logits, _, counts = completion_logits(model, [ids] * len(batch), batch, guard.share_prompts)
            log_q = logits[counts].float().log_softmax(dim=-1)  # (tokens, V)
            mean = -torch.special.entr(log_q.exp()).sum(dim=-1)  # 0 for tokens of probability 0
            for i, s in enumerate(inverse.tolist()):
                total[i] += ((1 - s) * mean + (s * log_q).logsumexp(dim=-1)).sum().item()
            rows += len(batch)
    root_kl = (total / rows).clamp(min=0).sqrt()  # almost linear in the inverse temperature
    root_wanted = divergence**0.5
    place = int(torch.searchsorted(root_kl, root_wanted))
    if place == len(root_kl):
        return 1 / float(inverse[-1])
    share = (root_wanted - float(root_kl[place - 1])) / float(root_kl[place] - root_kl[place - 1])
    return 1 / float(torch.lerp(inverse[place - 1], inverse[place], share))


def _prompt_ids(
    models: Sequence[PreTrainedModel],
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    length: int,
    chat_template_kwargs: dict[str, Any] | None,
) -> list[list[int]]:
    """Tokens of each prompt; refuses prompts to which `length` more tokens are too many for one of the models."""
    check_template_kwargs(prompts, chat_template_kwargs)
    prompt_ids = tokenize(tokenizer, prompts, chat_template_kwargs)
    for model in models:
        check_prompt_lengths(prompt_ids, list(prompts), model.config, length)
    return prompt_ids


def _seeds(seed: int) -> Iterator[int]:
    """An endless stream of seeds under 2^62."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield int(torch.randint(2**62, (), generator=generator))


def _score(
    parts: Sequence[Component],
    prompt_ids: list[int],
    rows: list[list[int]],
    guards: dict[int, Guard],
    batch_size: int,
    on_scored: Callable[[int], object],
) -> torch.Tensor:
    """Log-probabilities (nats, float64) of this process's N completions of a prompt under each of K components, (N, K). The first component
    is the policy. Each model reads a batch once; `guards` are by `id` of the model, and `on_scored` gets the size of each batch."""
    models, scored = {id(part.model): part.model for part in parts}, []
    for batch in (rows[i : i + batch_size] for i in range(0, len(rows), batch_size)):
        logits = {}
        for key, model in models.items():
            of_model, *tokens = completion_logits(model, [prompt_ids] * len(batch), batch, guards[key].share_prompts)
            logits[key] = of_model.float()
        columns = [part.log_prob(logits[id(parts[0].model)], logits[id(part.model)], *tokens).cpu() for part in parts]
        scored.append(torch.stack(columns, dim=-1))
        on_scored(len(batch))
    return torch.cat(scored)


def _rewards(
    name: str,
    function: Reward,
    prompts: Sequence[Prompt],
    columns: dict[str, list],
    texts: list[list[str]],
    batch_size: int,
    state: PartialState,
    bar: Callable[..., Any],
    known: dict[tuple[int, str], float],
) -> torch.Tensor:
    """Rewards of the completions, (P, N); equal completions of a prompt are scored once, by one of the processes, and
    added to `known`. Raises `ValueError` if one is `None`. All processes must call it, and get the same."""
    keys = ((p, text) for p, row in enumerate(texts) for text in row)
    distinct = list(dict.fromkeys(key for key in keys if key not in known))
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
    known.update(zip(distinct, given, strict=True))
    return torch.tensor([[known[p, text] for text in row] for p, row in enumerate(texts)], dtype=torch.float64)
