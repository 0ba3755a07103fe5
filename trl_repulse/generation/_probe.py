"""
Whether a model's padded and cached passes are its unpadded, full ones.

transformers runs unequal prompts behind masked padding, and generates with a cache. Not every architecture gets the same
predictions that way: a state may read the padding, a cache may mix the rows of a batch. Whatever samples or scores asks
[`probe`] once, at set-up.

Axis letters: B rows, L tokens of a row, S sampled tokens, V vocabulary (or features of a hidden state).
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from accelerate.utils.memory import should_reduce_batch_size
from torch import nn
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList
from transformers.utils import logging

from .._adapters import base_of
from ._cache import growing_cache, with_cache
from ._defaults import without_generation_defaults
from ._padding import padded_outputs, vocab_size
from ._prefill import prompts_read_once


logger = logging.get_logger(__name__)

_PROMPTS = (3, 8, 6)  # tokens of each row's prompt, where they are unequal
_EQUAL = (8, 8, 8)
_WIDTH = 12  # tokens that they are padded to: each has padding
_SAMPLED = 6  # S
# Passes over the same tokens in other shapes are rounded otherwise. Where they are right they differ by up to 3 times what one
# rounding of the embeddings does, where they are wrong by 13 times and more: all causal architectures of transformers (5.23),
# tiny, in float32 and bfloat16. For models of 2 to 48 layers it is 1.2 times at most
_ROUNDINGS = 8.0


@dataclass(frozen=True)
class Guard:
    """
    How a model can be sampled and scored so that the results are its own; [`probe`] finds out.

    Args:
        score_by_length (`bool`, *optional*, defaults to `False`):
            Whether rows that are scored together must have prompts of one length, without padding before them.
        sample_by_length (`bool`, *optional*, defaults to `False`):
            The same of rows that are sampled together.
        use_cache (`bool`, *optional*, defaults to `True`):
            Whether `generate` may use its cache.
        share_prompts (`bool`, *optional*, defaults to `True`):
            Whether completions of a prompt may be scored in one row, which reads it once. [`probe`] does not look at it.
        repeat_cache (`bool`, *optional*, defaults to `True`):
            Whether they may be sampled from one cache of the prompt, repeated. [`probe`] does not look at it either.
        longest_row (`float`, *optional*, defaults to infinity):
            Tokens that a row of a prompt with several completions may have.
        fused_head (`bool`, *optional*, defaults to `True`):
            Whether TRL's fused head gives the model's log-probabilities; its own logits do otherwise. [`probe`] does not look at it.
    """

    score_by_length: bool = False
    sample_by_length: bool = False
    use_cache: bool = True
    share_prompts: bool = True
    repeat_cache: bool = True
    longest_row: float = math.inf
    fused_head: bool = True

    def __or__(self, other: "Guard") -> "Guard":
        """What serves both models."""
        return Guard(
            self.score_by_length or other.score_by_length,
            self.sample_by_length or other.sample_by_length,
            self.use_cache and other.use_cache,
            self.share_prompts and other.share_prompts,
            self.repeat_cache and other.repeat_cache,
            min(self.longest_row, other.longest_row),
            self.fused_head and other.fused_head,
        )


def probe(
    model: nn.Module,
    training: bool = False,
    samples: bool = True,
    generation_config: GenerationConfig | None = None,
) -> Guard:
    """
    Compares passes as sampling and scoring make them with unpadded full passes of single rows; warns where they differ.

    Three rows of a few tokens are run one by one; together; behind left padding; and through `generate`, made to draw the
    same tokens, with prompts of one length and behind left padding. Log-probabilities agree if they differ by no more than
    rounding does: by a multiple of what one rounding of the embeddings changes, in the model's own precision. A difference is
    the root mean square over the vocabulary; its median over positions counts, since rounding can send single tokens to
    another expert. What only shows after more tokens is not seen.

    Args:
        model ([`~transformers.PreTrainedModel`] or `peft.PeftModel`):
            Causal language model, with the adapter active that it will run with. Mode, random states and gradients are left
            as they are.
        training (`bool`, *optional*, defaults to `False`):
            Whether it will run in training mode, which must be free of dropout.
        samples (`bool`, *optional*, defaults to `True`):
            Whether `generate` will be used.
        generation_config ([`~transformers.GenerationConfig`], *optional*):
            What will be passed to `generate`; says whether and which cache is used.

    Returns:
        [`Guard`]: What keeps sampling and scoring right.

    Raises:
        `ValueError`: If passes of several rows are not those of each row, or generation without a cache and without padding
            is not what full passes give.
    """
    model = getattr(model, "_orig_mod", model)  # compiled
    config = generation_config or GenerationConfig()
    cached = config.use_cache is not False

    def log_probs(ids: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        outputs = (
            model(input_ids=ids, use_cache=False)
            if mask is None
            else padded_outputs(model, ids, mask, use_cache=False)
        )
        return outputs.logits.float().log_softmax(dim=-1)

    with undisturbed(model, training):
        passes = _Passes(model, log_probs)
        guard = _scoring_guard(passes, model)
        if samples:
            guard |= _sampling_guard(passes, model, config)
    remedies = ["without its cache"] * (cached and not guard.use_cache)
    remedies += ["in batches of prompts of one length"] * guard.sample_by_length
    if remedies:
        logger.warning_once(
            f"{describe(model)} generates from another distribution than its own "
            f"{'with its cache' if cached and not guard.use_cache else 'behind padding'}: it is sampled "
            f"{' and '.join(remedies)}, which takes longer."
        )
    return guard


def probe_values(model: nn.Module) -> Guard:
    """
    As [`probe`], for a model that scores and does not generate: its hidden states are compared, in training mode.

    Args:
        model ([`~transformers.PreTrainedModel`] or `peft.PeftModel`):
            Causal model with a head for values.

    Returns:
        [`Guard`]: What keeps values right.

    Raises:
        `ValueError`: If passes of several rows are not those of each row.
    """
    backbone = base_of(model).base_model

    def states(ids: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        outputs = backbone(input_ids=ids) if mask is None else padded_outputs(backbone, ids, mask)
        return outputs.last_hidden_state.float()

    with undisturbed(model, training=True):
        return _scoring_guard(_Passes(model, states), model)


def reads_prompts_once(model: nn.Module, training: bool, generation_config: GenerationConfig) -> bool:
    """
    Whether `generate` draws from the model's own distribution within [`~trl_repulse.generation._prefill.prompts_read_once`].

    Args:
        model ([`~transformers.PreTrainedModel`] or `peft.PeftModel`):
            Causal language model.
        training (`bool`):
            Whether it will run in training mode.
        generation_config ([`~transformers.GenerationConfig`]):
            What will be passed to `generate`; with a cache of another kind, none, or more rows than prompts, the answer is no.

    Returns:
        `bool`: `False` where a pass fails, too.
    """
    multiplied = max(generation_config.num_beams or 1, generation_config.num_return_sequences or 1) > 1
    if generation_config.cache_implementation is not None or generation_config.use_cache is False or multiplied:
        return False
    with undisturbed(model, training), prompts_read_once(model):
        passes = _Passes(model, lambda ids, mask: model(input_ids=ids, use_cache=False).logits.float().log_softmax(-1))
        return passes.agree(lambda: passes.repeatedly_generated(generation_config), share=0.9)


def repeats_cache(model: nn.Module) -> bool:
    """
    Whether the cache of one prompt can be repeated for several completions of it, as [`probe`] finds it, in evaluation mode.

    Args:
        model ([`~transformers.PreTrainedModel`]):
            Causal language model.

    Returns:
        `bool`: If `False`, completions need full passes.

    Raises:
        `ValueError`: If passes of several rows are not those of each row.
    """

    def log_probs(ids: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        return model(input_ids=ids, use_cache=False).logits.float().log_softmax(dim=-1)

    with undisturbed(model, training=False):
        passes = _Passes(model, log_probs)
        _check_rows(passes, model)
        return passes.agree(passes.repeated)


def shares_prompts(
    model: nn.Module,
    training: bool,
    read: Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor],
    read_rows: Callable[..., torch.Tensor],
) -> bool:
    """
    Whether several completions of a prompt in one row are read as texts of their own, of a few tokens.

    Args:
        model ([`~transformers.PreTrainedModel`] or `peft.PeftModel`):
            The model.
        training (`bool`):
            Whether it will run in training mode, free of dropout.
        read (`Callable`):
            Predictions (B, L, V) of tokens (B, L), without a mask.
        read_rows (`Callable`):
            Predictions (B·n, S, V) of the completions among prompts (B, L), their mask, completions (B, n, S) and their mask.

    Returns:
        `bool`: `False` where a pass fails, too.
    """
    with undisturbed(model, training):
        passes = _Passes(model, read)
        # A layer may read too much of long texts alone
        return passes.agree(lambda: passes.in_rows(read_rows), share=0.9)


def reads_rows_alike(
    model: nn.Module, training: bool, read_rows: Callable[..., torch.Tensor], batch: Sequence[torch.Tensor]
) -> bool:
    """
    Whether a batch is read in rows that share its prompts as in rows that do not.

    Args:
        model ([`~transformers.PreTrainedModel`] or `peft.PeftModel`):
            The model.
        training (`bool`):
            Whether it will run in training mode, free of dropout.
        read_rows (`Callable`):
            As for [`shares_prompts`].
        batch (`Sequence[torch.Tensor]`):
            Prompts (P, L), their mask, completions (P, n, S) and their mask.

    Returns:
        `bool`: `False` where a pass fails, too.
    """
    prompts, mask, completions, real = batch
    n, asked = completions.size(1), real.flatten(0, 1).bool()
    rows = [x.repeat_interleave(n, 0) for x in (prompts, mask)]
    separate = *rows, *(x.flatten(0, 1).unsqueeze(1) for x in (completions, real))

    def both() -> tuple[torch.Tensor, torch.Tensor]:
        return read_rows(*batch)[asked], alone

    with undisturbed(model, training):
        alone = read_rows(*separate)[asked]
        with _rounded_embeddings(model):
            rounding = _distance(read_rows(*separate)[asked], alone)
        return _agree(both, 4 * _ROUNDINGS * rounding, share=0.9)


@contextlib.contextmanager
def in_mode(model: nn.Module, training: bool) -> Iterator[None]:
    """Training or evaluation mode, without gradients; every submodule gets its own mode back."""
    modes = [(module, module.training) for module in model.modules()]
    model.train(training)
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextlib.contextmanager
def undisturbed(model: nn.Module, training: bool) -> Iterator[None]:
    """Context for passes in training or evaluation mode that leave no trace in random states, modes and gradients."""
    device = next(model.parameters()).device
    devices = [] if device.type == "cpu" else [device]
    # A compiled `forward` does not run hooks, and is compiled anew for each shape
    eager = torch.compiler.set_stance("force_eager")
    with torch.random.fork_rng(devices, device_type=device.type), in_mode(model, training), eager:
        yield


def describe(model: nn.Module) -> str:
    """Class of a model, and where it was loaded from."""
    base = base_of(model)
    path = base.config._name_or_path
    return f"{type(base).__name__} ({path})" if path else type(base).__name__


def _check_rows(passes: "_Passes", model: nn.Module) -> None:
    if not passes.agree(passes.together):
        raise ValueError(
            f"{describe(model)} predicts something else for a text in a batch than for the text alone (rows that see each other, "
            "or positions counted otherwise), so that batches cannot be sampled or scored; use another model."
        )


def _scoring_guard(passes: "_Passes", model: nn.Module) -> Guard:
    _check_rows(passes, model)
    guard = Guard(score_by_length=not passes.agree(passes.padded))
    if guard.score_by_length:
        logger.warning_once(
            f"{describe(model)} reads the padding before a prompt: texts are scored in batches of prompts of one length, which "
            "takes longer."
        )
    return guard


def _sampling_guard(passes: "_Passes", model: nn.Module, config: GenerationConfig) -> Guard:
    for use_cache in (False,) if config.use_cache is False else (True, False):
        if passes.agree(lambda cache=use_cache: passes.generated(_EQUAL, config, cache)):
            mixed = passes.agree(lambda cache=use_cache: passes.generated(_PROMPTS, config, cache))
            return Guard(sample_by_length=not mixed, use_cache=use_cache)
    raise ValueError(
        f"{describe(model)} generates from another distribution than its full passes give, even without a cache and without "
        "padding; use another model."
    )


class _Forced(LogitsProcessor):
    """Keeps what `generate` draws from, and makes it draw given tokens."""

    def __init__(self, tokens: torch.Tensor):
        self._tokens = tokens  # (B, S)
        self.logits: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        token = self._tokens[:, len(self.logits), None]
        self.logits.append(scores.float())
        return torch.full_like(scores, -math.inf).scatter(1, token, 0.0)


class _Passes:
    """
    Passes over a few rows of tokens: predictions (B, S, V) of the same S tokens after each prompt, and where they should be.

    Each method gives both. A row's prompt is its beginning, of one length or of another, and the S tokens go on with it.
    """

    def __init__(self, model: nn.Module, read: Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]):
        self._model, self._read = model, read
        size, device = vocab_size(model), next(model.parameters()).device
        count, length = len(_EQUAL), max(_EQUAL) + _SAMPLED
        # All different where the vocabulary allows; the first and the last tokens are often no words
        ids = torch.arange(count * length, device=device) * max(1, size // 97) + size // 3
        self._ids = (ids % size).view(count, length)  # (B, L)
        self._alone = self._one_by_one(self._ids)  # (B, L, V)
        with _rounded_embeddings(model):
            self._tolerance = _ROUNDINGS * _distance(self._one_by_one(self._ids), self._alone)

    def agree(self, passes: Callable[[], tuple[torch.Tensor, torch.Tensor]], share: float = 0.5) -> bool:
        """Whether this share of predictions, or more, is what it should be; a pass that fails gives none."""
        tolerance = self._tolerance if share == 0.5 else 4 * self._tolerance  # of a median, which single tokens exceed
        return _agree(passes, tolerance, share)

    def together(self) -> tuple[torch.Tensor, torch.Tensor]:
        """All rows in one pass."""
        return self._read(self._ids, torch.ones_like(self._ids)), self._alone

    def padded(self) -> tuple[torch.Tensor, torch.Tensor]:
        """All rows in one pass, with padding before their prompts and after one completion."""
        ids, mask, tokens = self._behind_padding(_PROMPTS)
        ids, mask = torch.cat([ids, tokens], dim=1), torch.cat([mask, torch.ones_like(tokens)], dim=1)
        mask[0, -1] = 0
        return self._read(ids, mask)[:, _WIDTH - 1 : -1], self._expected(_PROMPTS)

    def generated(
        self, lengths: tuple[int, ...], config: GenerationConfig, use_cache: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """All rows through `generate`, with padding if their prompts are unequal."""
        return self._forced(*self._behind_padding(lengths), config, use_cache), self._expected(lengths)

    def _forced(
        self, ids: torch.Tensor, mask: torch.Tensor, tokens: torch.Tensor, config: GenerationConfig, use_cache: bool
    ) -> torch.Tensor:
        """What `generate` draws `tokens` (B, S) from, after prompts (B, W)."""
        forced = _Forced(tokens)
        settings = GenerationConfig(
            max_new_tokens=_SAMPLED,
            do_sample=False,
            pad_token_id=0,
            use_cache=use_cache,
            cache_implementation=config.cache_implementation,
            disable_compile=True,
        )
        with without_generation_defaults(self._model) as config:
            config.eos_token_id = None  # nothing ends the rows
            self._model.generate(
                input_ids=ids,
                attention_mask=mask,
                generation_config=settings,
                logits_processor=LogitsProcessorList([forced]),
                synced_gpus=False,  # one process may probe alone
            )
        return torch.stack(forced.logits, dim=1).log_softmax(dim=-1)

    def repeated(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Several completions of the first row's prompt, which is read once."""
        prompt, tokens = self._ids[:1, : _EQUAL[0]], self._after(self._ids, _EQUAL)
        ids = torch.cat([prompt.expand(len(tokens), -1), tokens], dim=1)
        alone = self._one_by_one(ids)
        cache = growing_cache(self._model)
        options = with_cache(self._model, cache)
        logits = [self._model(input_ids=prompt, **options).logits[:, -1].expand(len(tokens), -1)]
        cache.batch_repeat_interleave(len(tokens))
        for token in tokens[:, :-1].T:
            logits.append(self._model(input_ids=token[:, None], **options).logits[:, -1])
        found = torch.stack(logits, dim=1).float().log_softmax(dim=-1)
        return found, self._after(alone, [length - 1 for length in _EQUAL])

    def in_rows(self, read_rows: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Completions of unequal prompts, those of a prompt in one row."""
        prompts, mask, completions, expected = self._completed()
        real = torch.ones_like(completions)
        real[0, 0, -1] = 0
        return read_rows(prompts, mask, completions, real), expected

    def repeatedly_generated(self, config: GenerationConfig) -> tuple[torch.Tensor, torch.Tensor]:
        """The same completions through `generate`."""
        prompts, mask, completions, expected = self._completed()
        rows = (x.repeat_interleave(completions.size(1), 0) for x in (prompts, mask))
        return self._forced(*rows, completions.flatten(0, 1), config, True), expected

    def _completed(self) -> tuple[torch.Tensor, ...]:
        """Prompts (B, W) behind padding and their mask, n completions (B, n, S) of each, and what to predict (B·n, S, V)."""
        prompts, mask, _ = self._behind_padding(_PROMPTS)
        tokens = self._after(self._ids, _EQUAL)  # (n, S)
        expected = []
        for ids, length in zip(self._ids, _PROMPTS, strict=True):
            alone = self._one_by_one(torch.cat([ids[:length].expand(len(tokens), -1), tokens], dim=1))
            expected.append(self._after(alone, [length - 1] * len(tokens)))
        return prompts, mask, tokens.expand(len(prompts), -1, -1), torch.cat(expected)

    def _one_by_one(self, ids: torch.Tensor) -> torch.Tensor:
        """As the model reads a text by itself: without a mask, and at positions of its own."""
        return torch.cat([self._read(row[None], None) for row in ids])

    def _behind_padding(self, lengths: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Prompts and their mask, padded if they are unequal, and the S tokens after each."""
        width = _WIDTH if len(set(lengths)) > 1 else lengths[0]
        ids, mask = torch.full_like(self._ids[:, :1], 5).repeat(1, width), self._ids.new_zeros(len(lengths), width)
        for row, length in enumerate(lengths):
            ids[row, width - length :], mask[row, width - length :] = self._ids[row, :length], 1
        return ids, mask, self._after(self._ids, lengths)

    def _expected(self, lengths: tuple[int, ...]) -> torch.Tensor:
        return self._after(self._alone, [length - 1 for length in lengths])

    @staticmethod
    def _after(rows: torch.Tensor, starts) -> torch.Tensor:
        return torch.stack([row[start : start + _SAMPLED] for row, start in zip(rows, starts, strict=True)])


def _agree(passes: Callable[[], tuple[torch.Tensor, torch.Tensor]], tolerance: float, share: float) -> bool:
    try:
        return _distance(*passes(), share) <= tolerance
    except Exception as error:  # whatever a model makes of a mask or a cache
        if should_reduce_batch_size(error):
            raise
        return False


@contextlib.contextmanager
def _rounded_embeddings(model: nn.Module) -> Iterator[None]:
    """Context in which a model's embeddings are rounded up or down."""

    def rounded(module: nn.Module, args: tuple, output: torch.Tensor) -> torch.Tensor:
        sign = torch.arange(output.numel(), device=output.device).view_as(output) * 7 % 11 % 2 * 2 - 1
        return output * (1 + sign * _rounding(model, output)).to(output.dtype)

    handle = model.get_input_embeddings().register_forward_hook(rounded)
    try:
        yield
    finally:
        handle.remove()


def _rounding(model: nn.Module, values: torch.Tensor) -> float:
    """By how much a model rounds numbers, relative to them."""
    if getattr(model, "is_quantized", False):
        return 2**-7  # activations may have 8 bits, scaled over a batch
    if values.is_cuda and values.dtype == torch.float32:
        eps = 2**-10  # TF32, which convolutions use by default
    else:
        eps = torch.finfo(values.dtype).eps
    device = values.device.type
    if torch.is_autocast_enabled(device):
        eps = max(eps, torch.finfo(torch.get_autocast_dtype(device)).eps)
    return eps


def _distance(found: torch.Tensor, expected: torch.Tensor, share: float = 0.5) -> float:
    """Root mean square over the vocabulary that a share of positions is within; infinite if numbers are missing there alone."""
    gap = found.clamp(min=-1e4) - expected.clamp(min=-1e4)  # -inf where a token is ruled out
    gap = gap.masked_fill(found.isnan() & expected.isnan(), 0.0).nan_to_num(nan=math.inf)
    distances = gap.square().mean(dim=-1).sqrt()
    return (distances.median() if share == 0.5 else distances.flatten().quantile(share)).item()
