"""Drawing from language models: batches of unequal length, caches that are read once, and samplers whose log-probabilities follow from the
logits.
"""

import contextlib
import copy
import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch import nn
from transformers import (
    Cache,
    DynamicCache,
    DynamicLayer,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ..models._adapters import base_of
from ..models._model_checks import vocab_size


# Model -> what `_facts` found out
_FACTS: WeakKeyDictionary[Any, tuple[ReferenceType[Any], frozenset[str]]] = WeakKeyDictionary()


def _facts(model: Any) -> tuple[Any, frozenset[str]]:
    """A model without PEFT's wrapper, and the names of its `forward`'s arguments; found out once, since passes for each token ask."""
    if model not in _FACTS:
        base = base_of(getattr(model, "_orig_mod", model))  # compiled
        _FACTS[model] = ref(base), frozenset(inspect.signature(type(base).forward).parameters)
    base, names = _FACTS[model]
    return base(), names


def padding_token(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, end: Sequence[int]) -> int:
    """A token to pad with: the tokenizer's or an `end` token, if the model has it, else 0. It is masked: any that the model has will do."""
    return next((i for i in (tokenizer.pad_token_id, *end) if i is not None and i < vocab_size(model)), 0)


def padded_outputs(model: nn.Module, ids: torch.Tensor, mask: torch.Tensor, **options: Any) -> Any:
    """Outputs for left-padded rows, or for the last tokens of such rows, with positions from the first real token."""
    if "position_ids" in _facts(model)[1]:
        options["position_ids"] = (mask.long().cumsum(dim=1) - 1).clamp(min=0)[:, -ids.size(1) :]
    return model(input_ids=ids, attention_mask=mask, **options)


def batches(prompt_ids: Sequence[Sequence[int]], batch_size: int, equal: bool) -> list[list[int]]:
    """Indices of prompts, batch by batch; with `equal`, each batch has prompts of one length."""
    groups: dict[int, list[int]] = {}
    for place, ids in enumerate(prompt_ids):
        groups.setdefault(len(ids) if equal else 0, []).append(place)
    return [group[i : i + batch_size] for group in groups.values() for i in range(0, len(group), batch_size)]


def without_padding(
    score: Callable[..., tuple[torch.Tensor | None, ...]],
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    *more: torch.Tensor,
) -> tuple[torch.Tensor | None, ...]:
    """Scores left-padded prompts followed by right-padded completions (B, L + T) with prompts of one length at a
    time. `score` is a function of tokens, mask and `more` (B, ...) of some rows. Each of its results is a tensor of
    these rows, a mean over them, or `None`; returned are those for all rows, in order."""
    starts = attention_mask.long().argmax(dim=1)  # (B,)
    groups = [(starts == start).nonzero()[:, 0] for start in starts.unique()]
    parts = [
        score(*(x[rows][:, starts[rows[0]] :] for x in (input_ids, attention_mask)), *(x[rows] for x in more))
        for rows in groups
    ]
    order = torch.cat(groups).argsort()
    shares = [len(rows) / len(starts) for rows in groups]
    return tuple(
        None
        if values[0] is None
        else torch.cat(values)[order]
        if values[0].dim()
        else sum(value * share for value, share in zip(values, shares, strict=True))
        for values in zip(*parts, strict=True)
    )


@contextlib.contextmanager
def without_generation_defaults(model: PreTrainedModel) -> Iterator[GenerationConfig]:
    """
    Context in which `generate` ignores the sampling settings that the (unwrapped) model was saved with.

    transformers (5.23) fills what a passed `generation_config` leaves unset from the model's own: `typical_p`, `suppress_tokens` and others
    would change the distribution, and with it every importance weight. Way out: `generate` taking what it is passed. Its warning about
    padding is left out: transformers (5.24) drops a mask of ones, and then warns of completions that have ended.
    """
    model = getattr(model, "_orig_mod", model)  # compiled
    base = model if isinstance(model, PreTrainedModel) else model.get_base_model()
    saved = base.generation_config
    base.generation_config = GenerationConfig(
        bos_token_id=saved.bos_token_id,
        eos_token_id=saved.eos_token_id,
        pad_token_id=saved.pad_token_id,
        cache_implementation=saved.cache_implementation,
    )
    logger = logging.getLogger("transformers.modeling_utils")
    logger.addFilter(_is_no_warning_of_padding)
    try:
        yield base.generation_config
    finally:
        base.generation_config = saved
        logger.removeFilter(_is_no_warning_of_padding)


def _is_no_warning_of_padding(record: logging.LogRecord) -> bool:
    return "We strongly recommend passing in an `attention_mask`" not in record.getMessage()


def end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens that end a completion, as in TRL: the model's own and the tokenizer's."""
    config = getattr(model, "generation_config", None)
    own = None if config is None else config.eos_token_id
    own = list(own) if isinstance(own, list | tuple) else [own]
    return [end for end in dict.fromkeys([*own, tokenizer.eos_token_id]) if end is not None]


def until_end(row: list[int], end: Sequence[int]) -> list[int]:
    """A completion's tokens up to and including its end token."""
    places = [row.index(token) for token in end if token in row]
    return row[: min(places) + 1] if places else row


# transformers 5.24 renamed it for its models and `generate`; other models may have the old name
_NAMES = ("cache", "past_key_values")
_IN_GENERATE = _NAMES["cache" not in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters]
_ROOM = 32  # tokens


class GrowingLayer(DynamicLayer):
    """Keys and values of a layer with spare room for many tokens. A [`~transformers.cache_utils.DynamicLayer`] copies everything for each
    token. Here a pass writes into tensors that the pass before returned, so with gradients the layer copies as well."""

    def __init__(self) -> None:
        super().__init__()
        self._rooms: tuple[torch.Tensor, torch.Tensor] | None = None  # (B, H, tokens, D) each
        self._seen: torch.Tensor | None = None  # the keys as [`update`] left them

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds keys (B, H, T, D) and values (B, H, T, E) of T tokens; returns those of all tokens."""
        if torch.is_grad_enabled():
            return super().update(key_states, value_states, *args, **kwargs)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start = self.get_seq_length()
        end = start + key_states.size(-2)
        # Selecting rows or removing tokens makes new tensors
        fits = self._rooms is not None and self.keys is self._seen and end <= self._rooms[0].size(-2)
        if not fits or key_states.dtype != self.keys.dtype:
            self._rooms = self._room(key_states, self.keys, end), self._room(value_states, self.values, end)
        for room, states in zip(self._rooms, (key_states, value_states), strict=True):
            room[..., start:end, :] = states
        self.keys, self.values = (room[..., :end, :] for room in self._rooms)
        self._seen = self.keys
        return self.keys, self.values

    def _room(self, states: torch.Tensor, held: torch.Tensor, end: int) -> torch.Tensor:
        """Keys or values with room for `end` tokens and [`_ROOM`] more, of which the `held` ones are copied."""
        dtype = torch.promote_types(states.dtype, held.dtype)
        room = states.new_empty(*states.shape[:-2], end + _ROOM, states.size(-1), dtype=dtype)
        if self.get_seq_length():
            room[..., : held.size(-2), :] = held
        return room


def growing_cache(model: nn.Module) -> DynamicCache:
    """An empty cache for a model; layers that keep all tokens grow in place."""
    cache = DynamicCache(config=_facts(model)[0].config.get_text_config(decoder=True))
    cache.layers = [GrowingLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def with_cache(model: nn.Module, cache: Cache | None) -> dict[str, Any]:
    """Arguments of a model's `forward` for a cache, or for none, by the name that its class has for it: see [`_NAMES`]."""
    return {_NAMES["cache" not in _facts(model)[1]]: cache, "use_cache": cache is not None}


def _read_once(model: nn.Module, ids: torch.Tensor, mask: torch.Tensor, rows: torch.Tensor) -> DynamicCache:
    """The cache of left-padded prompts (P, L) without their last tokens, for rows (B,) that have a prompt each."""
    cache = growing_cache(model)
    last = {"logits_to_keep": 1} if "logits_to_keep" in _facts(model)[1] else {}
    padded_outputs(model, ids[:, :-1], mask[:, :-1], **with_cache(model, cache), **last)
    cache.batch_select_indices(rows)
    return cache


def logits_after_prompts(
    model: nn.Module, prompts: tuple[torch.Tensor, ...], rows: torch.Tensor, completions: tuple[torch.Tensor, ...]
) -> torch.Tensor:
    """Logits (B, T, V) of completions, whose prompts go through the model once each: tokens and mask of left-padded prompts, (P, L) with
    L > 1, the prompt of each completion, (B,), and tokens and mask of right-padded completions, (B, T)."""
    cache = _read_once(model, *prompts, rows)
    # The last token of a prompt and all but the last of a completion predict the completion
    ids = torch.cat([prompts[0][rows, -1:], completions[0][:, :-1]], dim=1)
    mask = torch.cat([prompts[1][rows], completions[1][:, :-1]], dim=1)
    return padded_outputs(model, ids, mask, **with_cache(model, cache)).logits


def to_generate(cache: Cache) -> dict[str, Cache]:
    """Arguments of `generate` that continue from a cache."""
    return {_IN_GENERATE: cache}


@contextlib.contextmanager
def generating_by(model: nn.Module, generate: Callable[..., Any]) -> Iterator[None]:
    """Context in which another function replaces `model.generate`."""
    before = vars(model).get("generate")
    model.generate = generate
    try:
        yield
    finally:
        if before is None:
            del model.generate
        else:
            model.generate = before


@contextlib.contextmanager
def prompts_read_once(model: nn.Module, everywhere: Callable[[bool], bool] = bool) -> Iterator[None]:
    """Context in which `model.generate` reads a prompt once for neighbouring rows that share it. All but the last
    token of each distinct prompt goes through the model; the cache is repeated for the rows, and `generate`
    continues from it. With the same random numbers the same tokens are drawn, up to rounding. `everywhere` says
    whether a condition holds in all processes: with partitioned weights they must make the same passes."""
    base = _facts(model)[0]
    generate = base.generate

    def generate_from_cache(*args: Any, **kwargs: Any) -> Any:
        """As `generate`, but a prompt that several rows have is read once."""
        ids, mask = kwargs.get("input_ids"), kwargs.get("attention_mask")
        if args or ids is None or mask is None or any(kwargs.get(name) is not None for name in _NAMES):
            return generate(*args, **kwargs)
        new = torch.ones_like(ids[:, 0], dtype=torch.bool)  # rows whose prompt is not that of the row before
        new[1:] = ((ids[1:] != ids[:-1]) | (mask[1:] != mask[:-1])).any(dim=1)
        if not everywhere(ids.size(1) > 1 and not bool(new.all())):
            return generate(**kwargs)
        return generate(**kwargs | to_generate(_read_once(base, ids[new], mask[new], new.cumsum(dim=0) - 1)))

    with generating_by(base, generate_from_cache):
        yield


@contextlib.contextmanager
def casting_once(model: nn.Module) -> Iterator[None]:
    """Context in which autocast casts each weight once, frozen ones too, and keeps the casts as long as autocast lasts. It keeps casts only
    of leaves that require a gradient, so that frozen weights require one inside. Passes must not record gradients."""
    frozen = [p for p in model.parameters() if p.dtype == torch.float32 and p.is_leaf and not p.requires_grad]
    for weight in frozen:
        weight.requires_grad_(True)
    try:
        yield
    finally:
        for weight in frozen:
            weight.requires_grad_(False)


@dataclass(frozen=True, eq=False)
class Sampler:
    """
    Draws each token from softmax(z / `temperature` + `bias`), z being the logits of the model.

    Args:
        temperature (`float`, *optional*, defaults to `1.0`): Temperature.
        bias (`torch.Tensor` of shape `(V,)`, *optional*): What is added to the logits of each token, nats.
    """

    temperature: float = 1.0
    bias: torch.Tensor | None = None

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits `(..., V)` as this sampler has them."""
        logits = logits if self.temperature == 1.0 else logits / self.temperature
        return logits if self.bias is None else logits + self.bias.to(logits)

    @property
    def head_bias(self) -> torch.Tensor | None:
        """The bias of logits that are divided by `temperature` afterwards."""
        return None if self.bias is None else self.bias * self.temperature


POLICY = Sampler()  # a model as it is


class RowSamplers(LogitsProcessor):
    """Draws the rows of a batch that `others` marks by another sampler."""

    def __init__(self, others: list[bool], sampler: Sampler):
        self.others, self.sampler = torch.tensor(others).unsqueeze(1), sampler

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return torch.where(self.others.to(scores.device), self.sampler(scores), scores)


def rows_drawn_by(model: nn.Module, others: list[bool], sampler: Sampler) -> contextlib.AbstractContextManager[None]:
    """Context in which `model.generate` draws the rows of its batches that `others` marks by another sampler; one mark is for all rows."""
    return processed_by(model, RowSamplers(others, sampler))


@contextlib.contextmanager
def processed_by(model: nn.Module, processor: LogitsProcessor) -> Iterator[None]:
    """Context in which `model.generate` changes its logits by a processor first, before what draws by inversion."""
    base = _facts(model)[0]
    generate = base.generate

    def generate_by(*args: Any, **kwargs: Any) -> Any:
        processors = LogitsProcessorList([processor, *kwargs.pop("logits_processor", ())])
        return generate(*args, **kwargs, logits_processor=processors)

    with generating_by(base, generate_by):
        yield


class InverseTransform(LogitsProcessor):
    """Draws the next token of each row by inverting the cumulative distribution, and leaves a finite score to it alone, so that greedy
    decoding takes it. Sums are in float64: in float32 a token with a probability below 6e-8 could be lost."""

    def __init__(self, temperature: float = 1.0):
        self.temperature = temperature

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """From a model's scores (B, V), scores (B, V) that are 0 at the drawn token of each row and −inf elsewhere."""
        cumulative = (scores / self.temperature).softmax(dim=-1).cumsum(dim=-1, dtype=torch.float64)
        if not cumulative[:, -1].isfinite().all():  # as `torch.multinomial` does
            raise RuntimeError("The model gives probabilities that are not numbers; check its weights and precision.")
        drawn = torch.rand_like(cumulative[:, :1]) * cumulative[:, -1:]
        tokens = torch.searchsorted(cumulative, drawn, right=True).clamp(max=scores.size(-1) - 1)
        return torch.full_like(scores, -torch.inf).scatter_(1, tokens, 0.0)


# Vocabularies from which a CPU draws by inversion: `torch.multinomial` makes a random number for each token of the vocabulary,
# which takes longer than a small model
_LARGE_VOCABULARY = 8192
# Settings of `generate`, with the values at which every token may be drawn with the policy's probability
_NEUTRAL = {
    **{"do_sample": (True,), "num_beams": (None, 1), "top_k": (None, 0), "top_p": (None, 1.0), "min_p": (None, 0.0)},
    **{"typical_p": (None, 1.0), "epsilon_cutoff": (None, 0.0), "eta_cutoff": (None, 0.0), "top_h": (None,)},
    "watermarking_config": (None,),  # acts after all other processors, on a token that is drawn already
}


@contextlib.contextmanager
def drawn_by_inversion(model: nn.Module) -> Iterator[None]:
    """Context in which `model.generate` draws by [`InverseTransform`] on a CPU, if the vocabulary is large and all tokens may be drawn. The
    distribution is the same; random numbers are others."""
    base = _facts(model)[0]
    generate = base.generate
    large = base.config.get_text_config(decoder=True).vocab_size >= _LARGE_VOCABULARY

    def generate_by_inversion(*args: Any, generation_config: Any = None, **kwargs: Any) -> Any:
        """As `generate`, by one uniform number a token where that is the same distribution and faster."""
        config = generation_config
        plain = all(getattr(config, name, None) in allowed for name, allowed in _NEUTRAL.items())  # never of `None`
        plain = plain and (config.temperature is None or config.temperature > 0)  # transformers refuses others
        if not (plain and large and base.device.type == "cpu") or not _NEUTRAL.keys().isdisjoint(kwargs):
            return generate(*args, generation_config=config, **kwargs)
        greedy = copy.copy(config)
        # transformers warns of these settings if `do_sample=False`
        greedy.update(do_sample=False, temperature=None, top_k=None, top_p=None, min_p=None, typical_p=None)
        last = InverseTransform(1.0 if config.temperature is None else config.temperature)
        processors = LogitsProcessorList([*kwargs.pop("logits_processor", ()), last])
        return generate(*args, generation_config=greedy, logits_processor=processors, **kwargs)

    with generating_by(base, generate_by_inversion):
        yield


class JointDraw:
    """
    One call of `generate` for `own` neighbouring rows of a prompt and for `others` by `sampler`.

    The first call of [`draw`] draws both and returns the own rows; the first one after [`expect_others`] returns the others. Calls
    between them, as for further turns of a conversation with tools, draw what they are asked for.
    """

    def __init__(self, own: int, others: int, sampler: Sampler):
        self.own, self.others, self.sampler = own, others, sampler
        self._next: str | None = "own"
        self._prompts: list[list[int]] = []  # those of the others
        self._completions: Any = None

    def expect_others(self) -> None:
        """Returns the others from the next call of [`draw`]."""
        self._next = "others"

    def draw(self, prompts: list[list[int]], generate: Callable[..., Any]) -> Any:
        """
        Completions of the prompts and what else `generate` returns, from one call for both kinds of rows. Raises a `RuntimeError` if the
        others are wanted for other prompts than they were drawn for.

        Args:
            prompts (`list[list[int]]`): Tokens of the prompts, one a row.
            generate (`Callable`): Takes prompts and, as `drawn_by`, a mask of the rows that another sampler draws, and that sampler.
        """
        wanted, self._next = self._next, None
        if wanted is None:
            return generate(prompts)
        if wanted == "others":
            if prompts != self._prompts:
                raise RuntimeError("Extra samples were drawn for other prompts than they are asked for.")
            completions, self._prompts, self._completions = self._completions, [], None
            return completions
        blocks = [prompts[i : i + self.own] for i in range(0, len(prompts), self.own)]
        rows = [row for block in blocks for row in [*block, *[block[0]] * self.others]]
        is_other = ([False] * self.own + [True] * self.others) * len(blocks)
        # The rest is log-probabilities, `None` without vLLM (TRL 1.16)
        completions, *rest = generate(rows, drawn_by=(is_other, self.sampler))
        self._prompts = list(compress(rows, is_other))
        self._completions = (list(compress(completions, is_other)), *rest)
        return list(compress(completions, [not other for other in is_other])), *rest
