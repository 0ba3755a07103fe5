"""Checks whether a model's padded and cached passes agree with its unpadded, full passes.

Not every architecture predicts the same behind masked padding or with a cache: a state may read the padding, a cache
may mix rows. Whatever samples or scores calls [`probe`] once, at set-up.

Axis letters: B rows, L tokens of a row, S sampled tokens, V vocabulary (or features of a hidden state).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from accelerate.utils.memory import should_reduce_batch_size
from torch import nn
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList
from transformers.utils import logging

from ..models._adapters import base_of, undisturbed
from ..models._model_checks import vocab_size
from .drawing import logits_after_prompts, padded_outputs, prompts_read_once, without_generation_defaults


logger = logging.get_logger(__name__)

PROMPTS = (3, 8, 6)  # tokens of each row's prompt
EQUAL = (8, 8, 8)
_WIDTH = 12  # width after padding; every prompt is padded
_SAMPLED = 6  # S
# Rounding depends on the shape of a batch. Correct passes differ by up to 3 times what one rounding of the embeddings changes,
# wrong ones by 13 times and more, in tiny models of all causal architectures of transformers (5.23), in float32 and bfloat16;
# correct ones with 2 to 48 layers by at most 1.2 times
ROUNDINGS = 8.0


@dataclass(frozen=True)
class Guard:
    """
    How a model must be sampled and scored to get correct results. [`probe`] finds only the first three.

    Args:
        score_by_length (`bool`): Whether rows scored together must have prompts of one length, without padding.
        sample_by_length (`bool`): The same for rows sampled together.
        use_cache (`bool`): Whether `generate` may use its cache.
        share_prompts (`bool`): Whether completions of a prompt may be scored in one row.
        repeat_cache (`bool`): Whether they may be sampled from one cache of the prompt, repeated.
        longest_row (`float`): Most tokens of a row with several completions.
        fused_head (`bool`): Whether TRL's fused head gives the model's log-probabilities; if not, its logits do.
    """

    score_by_length: bool = False
    sample_by_length: bool = False
    use_cache: bool = True
    share_prompts: bool = True
    repeat_cache: bool = True
    longest_row: float = math.inf
    fused_head: bool = True

    def __or__(self, other: "Guard") -> "Guard":
        """A guard that serves both models."""
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
    model: nn.Module, training: bool = False, samples: bool = True, generation_config: GenerationConfig | None = None
) -> Guard:
    """
    Compares the passes of sampling and scoring with full, unpadded passes of single rows, and warns of differences.

    Three rows of a few tokens are run one by one, together, behind left padding, and through `generate` (forced to draw the same tokens)
    with equal and with padded prompts. Log-probabilities agree if they differ by at most a multiple of what one rounding of the embeddings
    changes, in the model's precision. The difference is the root mean square over the vocabulary, and its median over positions counts,
    since rounding can send single tokens to another expert. Differences that need more tokens are not seen.

    `model` has the adapter it will run with; its mode, random states and gradients are kept. `training` is whether it
    will run in training mode, without dropout, `samples` whether `generate` will be used, with `generation_config`.
    Raises `ValueError` if rows in a batch change each other, or generation without cache and padding is wrong.
    """
    model = getattr(model, "_orig_mod", model)  # compiled
    config = generation_config or GenerationConfig()
    cached = config.use_cache is not False

    with undisturbed(model, training):
        passes = Passes(model, _log_probs(model))
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


def probe_shared(model: nn.Module, samples: bool = True, generation_config: GenerationConfig | None = None) -> Guard:
    """As [`probe`] in evaluation mode, and whether a prompt may be read once for all of its completions: `repeat_cache` says so of
    [`~trl_repulse.generation.drawing.prompts_read_once`], `share_prompts` of [`~trl_repulse.generation.drawing.logits_after_prompts`]."""
    config = generation_config or GenerationConfig()
    guard, read = probe(model, samples=samples, generation_config=config), _log_probs(model)

    def read_rows(ids: torch.Tensor, mask: torch.Tensor, tokens: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        """Log-probabilities (B·n, S, V) of completions (B, n, S) with the mask `real` after prompts (B, L)."""
        rows = torch.arange(len(ids), device=ids.device).repeat_interleave(tokens.size(1))
        logits = logits_after_prompts(model, (ids, mask), rows, (tokens.flatten(0, 1), real.flatten(0, 1)))
        return logits.float().log_softmax(dim=-1)

    return replace(
        guard,
        repeat_cache=samples and guard.use_cache and reads_prompts_once(model, False, config),
        share_prompts=shares_prompts(model, False, lambda ids, _: read(ids, None), read_rows),
    )


def probe_values(model: nn.Module) -> Guard:
    """Like [`probe`], for a model with a value head: compares hidden states in training mode."""
    backbone = base_of(model).base_model

    def states(ids: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Hidden states (B, L, V) of tokens (B, L), without a mask or padded on the left."""
        outputs = backbone(input_ids=ids) if mask is None else padded_outputs(backbone, ids, mask)
        return outputs.last_hidden_state.float()

    with undisturbed(model, training=True):
        return _scoring_guard(Passes(model, states), model)


def reads_prompts_once(model: nn.Module, training: bool, generation_config: GenerationConfig) -> bool:
    """Whether `generate` draws from the model's distribution within [`~trl_repulse.generation.drawing.prompts_read_once`]. `False` with
    another kind of cache, none, or more rows than prompts, and if a pass fails."""
    multiplied = max(generation_config.num_beams or 1, generation_config.num_return_sequences or 1) > 1
    if generation_config.cache_implementation is not None or generation_config.use_cache is False or multiplied:
        return False
    with undisturbed(model, training), prompts_read_once(model):
        passes = Passes(model, _log_probs(model))
        return passes.agree(lambda: passes.repeatedly_generated(generation_config), share=0.9)


def shares_prompts(
    model: nn.Module,
    training: bool,
    read: Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor],
    read_rows: Callable[..., torch.Tensor],
) -> bool:
    """Whether several completions in one row are read like separate texts; `False` if a pass fails, but for lack of memory, which is
    raised. `read` gives predictions (B, L, V) of tokens (B, L) without a mask, `read_rows` predictions (B·n, S, V) of completions from
    prompts (B, L), their mask, completions (B, n, S) and their mask."""
    with undisturbed(model, training):
        passes = Passes(model, read)
        # A layer may be wrong for long texts only
        return passes.agree(lambda: passes.in_rows(read_rows), share=0.9)


def reads_rows_alike(
    model: nn.Module, training: bool, read_rows: Callable[..., torch.Tensor], batch: Sequence[torch.Tensor]
) -> bool:
    """Whether rows that share prompts give the same predictions as separate rows for a batch: P prompts (P, L), mask, n completions of
    each (P, n, S), and the mask of the tokens that are compared. `read_rows` is as in [`shares_prompts`]. `False` if a pass fails, but
    for lack of memory, which is raised."""
    device = next(model.parameters()).device
    prompts, mask, completions, real = batch = tuple(x.to(device) for x in batch)
    n, compared = completions.size(1), real.flatten(0, 1).bool()
    rows = [x.repeat_interleave(n, 0) for x in (prompts, mask)]
    separate = *rows, *(x.flatten(0, 1).unsqueeze(1) for x in (completions, real))

    def alike() -> bool:
        """Whether nine positions in ten agree; the tolerance is wider than for a median, as in [`Passes.agree`]."""
        alone = read_rows(*separate)[compared]
        limit = 4 * ROUNDINGS * rounding(model, lambda: read_rows(*separate)[compared], alone)
        return distance(read_rows(*batch)[compared], alone, share=0.9) <= limit

    with undisturbed(model, training):
        return holds(alike)


def describe(model: nn.Module) -> str:
    """Class of a model and where it was loaded from."""
    base = base_of(model)
    path = base.config._name_or_path
    return f"{type(base).__name__} ({path})" if path else type(base).__name__


def _log_probs(model: nn.Module) -> Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]:
    """Function that gives a model's log-probabilities (B, L, V) of tokens (B, L), without a mask or padded on the left."""

    def read(ids: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        if mask is None:
            outputs = model(input_ids=ids, use_cache=False)
        else:
            outputs = padded_outputs(model, ids, mask, use_cache=False)
        return outputs.logits.float().log_softmax(dim=-1)

    return read


def _scoring_guard(passes: "Passes", model: nn.Module) -> Guard:
    """Whether rows can be scored behind padding. Raises `ValueError` if rows in a batch change each other."""
    if not passes.agree(passes.together):
        raise ValueError(
            f"{describe(model)} predicts something else for a text in a batch than for the text alone (rows that see each other, "
            "or positions counted otherwise), so that batches cannot be sampled or scored; use another model."
        )
    guard = Guard(score_by_length=not passes.agree(passes.padded))
    if guard.score_by_length:
        logger.warning_once(
            f"{describe(model)} reads the padding before a prompt: texts are scored in batches of prompts of one length, which "
            "takes longer."
        )
    return guard


def _sampling_guard(passes: "Passes", model: nn.Module, config: GenerationConfig) -> Guard:
    """The first way in which `generate` draws from the model's distribution: with its cache, or without; with padding, or without. Raises a
    `ValueError` if there is none."""
    for use_cache in (False,) if config.use_cache is False else (True, False):
        if passes.agree(lambda cache=use_cache: passes.generated(EQUAL, config, cache)):
            agree_padded = passes.agree(lambda cache=use_cache: passes.generated(PROMPTS, config, cache))
            return Guard(sample_by_length=not agree_padded, use_cache=use_cache)
    raise ValueError(
        f"{describe(model)} generates from another distribution than its full passes give, even without a cache and without "
        "padding; use another model."
    )


class _Forced(LogitsProcessor):
    """Records the scores that `generate` samples from, and forces given tokens."""

    def __init__(self, tokens: torch.Tensor):
        self._tokens = tokens  # (B, S)
        self.logits: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        token = self._tokens[:, len(self.logits), None]
        self.logits.append(scores.float())
        return torch.full_like(scores, -math.inf).scatter(1, token, 0.0)


class Passes:
    """Passes over a few rows of tokens. Methods return predictions (B, S, V) of S tokens after each prompt, and what they should be."""

    def __init__(self, model: nn.Module, read: Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]):
        self._model, self._read = model, read
        size, device = vocab_size(model), next(model.parameters()).device
        count, length = len(EQUAL), max(EQUAL) + _SAMPLED
        # All different if the vocabulary allows; the first and last ids are often unused
        ids = torch.arange(count * length, device=device) * max(1, size // 97) + size // 3
        self._ids = (ids % size).view(count, length)  # (B, L)
        self._alone = self._one_by_one(self._ids)  # (B, L, V)
        self._tolerance = ROUNDINGS * rounding(model, lambda: self._one_by_one(self._ids), self._alone)

    def agree(self, passes: Callable[[], tuple[torch.Tensor, torch.Tensor]], share: float = 0.5) -> bool:
        """Whether at least this share of predictions is as expected; `False` if the pass fails."""
        # Single tokens exceed the tolerance of a median
        tolerance = self._tolerance if share == 0.5 else 4 * self._tolerance
        return holds(lambda: distance(*passes(), share) <= tolerance)

    def together(self) -> tuple[torch.Tensor, torch.Tensor]:
        """All rows in one pass."""
        return self._read(self._ids, torch.ones_like(self._ids)), self._alone

    def padded(self) -> tuple[torch.Tensor, torch.Tensor]:
        """All rows in one pass, with padding before the prompts and after one completion."""
        ids, mask, tokens = self._behind_padding(PROMPTS)
        ids, mask = torch.cat([ids, tokens], dim=1), torch.cat([mask, torch.ones_like(tokens)], dim=1)
        mask[0, -1] = 0
        return self._read(ids, mask)[:, _WIDTH - 1 : -1], self._expected(PROMPTS)

    def generated(
        self, lengths: tuple[int, ...], config: GenerationConfig, use_cache: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """All rows through `generate`, padded if their prompts are unequal."""
        return self._forced(*self._behind_padding(lengths), config, use_cache), self._expected(lengths)

    def _forced(
        self, ids: torch.Tensor, mask: torch.Tensor, tokens: torch.Tensor, config: GenerationConfig, use_cache: bool
    ) -> torch.Tensor:
        """Log-probabilities (B, S, V) from which `generate` samples when it is forced to draw `tokens` (B, S) after prompts (B, W)."""
        forced = _Forced(tokens)
        settings = GenerationConfig(
            max_new_tokens=_SAMPLED,
            do_sample=False,
            pad_token_id=0,
            use_cache=use_cache,
            cache_implementation=config.cache_implementation,
            disable_compile=True,
        )
        with without_generation_defaults(self._model) as defaults:
            defaults.eos_token_id = None  # nothing ends the rows
            self._model.generate(
                input_ids=ids,
                attention_mask=mask,
                generation_config=settings,
                logits_processor=LogitsProcessorList([forced]),
                synced_gpus=False,  # one process may probe alone
            )
        return torch.stack(forced.logits, dim=1).log_softmax(dim=-1)

    def in_rows(self, read_rows: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Completions of unequal prompts, those of a prompt in one row."""
        prompts, mask, completions, expected = self._completed()
        real = torch.ones_like(completions)
        real[0, 0, -1] = 0
        return read_rows(prompts, mask, completions, real), expected

    def repeatedly_generated(self, config: GenerationConfig) -> tuple[torch.Tensor, torch.Tensor]:
        """The completions of [`in_rows`] through `generate`, with the prompts repeated for each."""
        prompts, mask, completions, expected = self._completed()
        rows = (x.repeat_interleave(completions.size(1), 0) for x in (prompts, mask))
        return self._forced(*rows, completions.flatten(0, 1), config, True), expected

    def _completed(self) -> tuple[torch.Tensor, ...]:
        """Left-padded prompts (B, W), their mask, n completions (B, n, S) and the expected predictions (B·n, S, V)."""
        prompts, mask, _ = self._behind_padding(PROMPTS)
        tokens = self._after(self._ids, EQUAL)  # (n, S)
        expected = []
        for ids, length in zip(self._ids, PROMPTS, strict=True):
            alone = self._one_by_one(torch.cat([ids[:length].expand(len(tokens), -1), tokens], dim=1))
            expected.append(self._after(alone, [length - 1] * len(tokens)))
        return prompts, mask, tokens.expand(len(prompts), -1, -1), torch.cat(expected)

    def _one_by_one(self, ids: torch.Tensor) -> torch.Tensor:
        """Predictions (B, L, V) for each row (B, L) on its own, without mask and positions."""
        return torch.cat([self._read(row[None], None) for row in ids])

    def _behind_padding(self, lengths: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Prompts (B, W) of these lengths (left-padded if unequal), their mask, and the S tokens after each, (B, S)."""
        width = _WIDTH if len(set(lengths)) > 1 else lengths[0]
        ids, mask = torch.full_like(self._ids[:, :1], 5).repeat(1, width), self._ids.new_zeros(len(lengths), width)
        for row, length in enumerate(lengths):
            ids[row, width - length :], mask[row, width - length :] = self._ids[row, :length], 1
        return ids, mask, self._after(self._ids, lengths)

    def _expected(self, lengths: tuple[int, ...]) -> torch.Tensor:
        """Predictions (B, S, V) of the S tokens after prompts of these lengths, from rows that were read one by one."""
        return self._after(self._alone, [length - 1 for length in lengths])

    @staticmethod
    def _after(rows: torch.Tensor, starts) -> torch.Tensor:
        """The S positions from a start on of each row (B, L, ...), (B, S, ...)."""
        return torch.stack([row[start : start + _SAMPLED] for row, start in zip(rows, starts, strict=True)])


def holds(check: Callable[[], bool]) -> bool:
    """The result of a check; `False` if it fails with an error other than lack of memory."""
    try:
        return check()
    except Exception as error:  # models may fail in any way on masks and caches
        if should_reduce_batch_size(error):
            raise
        return False


def rounding(model: nn.Module, read: Callable[[], torch.Tensor], expected: torch.Tensor) -> float:
    """How far ([`distance`]) one rounding of the embeddings moves what `read` gives from the `expected` predictions (..., V), in the
    model's precision; at least one rounding of the predictions in float32."""

    def rounded(module: nn.Module, args: tuple, output: torch.Tensor) -> torch.Tensor:
        """Embeddings, each number moved up or down by a rounding error; the signs are a fixed pattern, so that no random state changes."""
        sign = torch.arange(output.numel(), device=output.device).view_as(output) * 7 % 11 % 2 * 2 - 1
        return output * (1 + sign * _rounding(model, output)).to(output.dtype)

    handle = model.get_input_embeddings().register_forward_hook(rounded)
    try:
        moved = distance(read(), expected)
    finally:
        handle.remove()
    # Small weights hardly pass on a change of the embeddings
    return max(moved, distance(expected * (1 + torch.finfo(torch.float32).eps), expected))


def _rounding(model: nn.Module, values: torch.Tensor) -> float:
    """Relative rounding error of the model's numbers, of which `values` are some."""
    if getattr(model, "is_quantized", False):
        return 2**-7  # activations may have 8 bits, scaled over a batch
    # In models of float64, parts of layers and the comparison use float32
    eps = torch.finfo(torch.float32 if values.dtype == torch.float64 else values.dtype).eps
    if values.is_cuda and values.dtype == torch.float32:
        eps = 2**-10  # TF32, which convolutions use by default
    device = values.device.type
    if torch.is_autocast_enabled(device):
        eps = max(eps, torch.finfo(torch.get_autocast_dtype(device)).eps)
    return eps


def distance(found: torch.Tensor, expected: torch.Tensor, share: float = 0.5) -> float:
    """Root mean square over the vocabulary of the differences of two tensors (..., V), which a share of the positions stays within. Where
    only one of both has NaN, a position is infinitely far; where both have it, it counts as equal."""
    gap = found.clamp(min=-1e4) - expected.clamp(min=-1e4)  # -inf for excluded tokens
    gap = gap.masked_fill(found.isnan() & expected.isnan(), 0.0).nan_to_num(nan=math.inf)
    distances = gap.square().mean(dim=-1).sqrt()
    return (distances.median() if share == 0.5 else distances.flatten().quantile(share)).item()
