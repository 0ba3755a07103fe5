"""
Checks whether a model's padded and cached passes agree with its unpadded, full passes.

Not every architecture predicts the same behind masked padding or with a cache: a state may read the padding, a cache
may mix rows. Whatever samples or scores calls [`probe`] once, at set-up.

Axis letters: B rows, L tokens of a row, S sampled tokens, V vocabulary (or features of a hidden state).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers import GenerationConfig
from transformers.utils import logging

from ..models._adapters import base_of, undisturbed
from ._cache import prompts_read_once
from ._padding import padded_outputs
from ._passes import EQUAL, PROMPTS, ROUNDINGS, Passes, distance, holds, rounding


logger = logging.get_logger(__name__)


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
    model: nn.Module,
    training: bool = False,
    samples: bool = True,
    generation_config: GenerationConfig | None = None,
) -> Guard:
    """
    Compares the passes of sampling and scoring with full, unpadded passes of single rows, and warns of differences.

    Three rows of a few tokens are run one by one, together, behind left padding, and through `generate` (forced to
    draw the same tokens) with equal and with padded prompts. Log-probabilities agree if they differ by at most a
    multiple of what one rounding of the embeddings changes, in the model's precision. The difference is the root mean
    square over the vocabulary, and its median over positions counts, since rounding can send single tokens to another
    expert. Differences that need more tokens are not seen.

    Args:
        model ([`~transformers.PreTrainedModel`] or `peft.PeftModel`):
            Causal language model with the adapter it will run with. Mode, random states and gradients are kept.
        training (`bool`): Whether it will run in training mode, without dropout.
        samples (`bool`): Whether `generate` will be used.
        generation_config ([`~transformers.GenerationConfig`], *optional*): Will be passed to `generate`.

    Returns:
        [`Guard`]: What keeps sampling and scoring correct.

    Raises:
        `ValueError`: If rows in a batch change each other, or generation without cache and padding is wrong.
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


def probe_values(model: nn.Module) -> Guard:
    """Like [`probe`], for a model with a value head: compares hidden states in training mode."""
    backbone = base_of(model).base_model

    def states(ids: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        outputs = backbone(input_ids=ids) if mask is None else padded_outputs(backbone, ids, mask)
        return outputs.last_hidden_state.float()

    with undisturbed(model, training=True):
        return _scoring_guard(Passes(model, states), model)


def reads_prompts_once(model: nn.Module, training: bool, generation_config: GenerationConfig) -> bool:
    """Whether `generate` draws from the model's distribution within
    [`~trl_repulse.generation._cache.prompts_read_once`]. `False` with another kind of cache, none, or more rows than
    prompts, and if a pass fails."""
    multiplied = max(generation_config.num_beams or 1, generation_config.num_return_sequences or 1) > 1
    if generation_config.cache_implementation is not None or generation_config.use_cache is False or multiplied:
        return False
    with undisturbed(model, training), prompts_read_once(model):
        passes = Passes(model, _log_probs(model))
        return passes.agree(lambda: passes.repeatedly_generated(generation_config), share=0.9)


def repeats_cache(model: nn.Module) -> bool:
    """Whether the cache of a prompt can be repeated for several completions, in evaluation mode. Raises `ValueError`
    if rows in a batch change each other."""
    read = _log_probs(model)
    with undisturbed(model, training=False):
        passes = Passes(model, lambda ids, _: read(ids, None))
        _check_rows(passes, model)
        return passes.agree(passes.repeated)


def shares_prompts(
    model: nn.Module,
    training: bool,
    read: Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor],
    read_rows: Callable[..., torch.Tensor],
) -> bool:
    """
    Whether several completions in one row are read like separate texts; `False` if a pass fails.

    `read` gives predictions (B, L, V) of tokens (B, L) without a mask, `read_rows` predictions (B·n, S, V) of
    completions from prompts (B, L), their mask, completions (B, n, S) and their mask.
    """
    with undisturbed(model, training):
        passes = Passes(model, read)
        # A layer may be wrong for long texts only
        return passes.agree(lambda: passes.in_rows(read_rows), share=0.9)


def reads_rows_alike(
    model: nn.Module, training: bool, read_rows: Callable[..., torch.Tensor], batch: Sequence[torch.Tensor]
) -> bool:
    """Whether rows that share prompts give the same predictions as separate rows for a batch: prompts (P, L), mask,
    completions (P, n, S), mask. `read_rows` is as in [`shares_prompts`]. `False` if a pass fails."""
    device = next(model.parameters()).device
    prompts, mask, completions, real = batch = tuple(x.to(device) for x in batch)
    n, asked = completions.size(1), real.flatten(0, 1).bool()
    rows = [x.repeat_interleave(n, 0) for x in (prompts, mask)]
    separate = *rows, *(x.flatten(0, 1).unsqueeze(1) for x in (completions, real))

    def alike() -> bool:
        alone = read_rows(*separate)[asked]
        limit = 4 * ROUNDINGS * rounding(model, lambda: read_rows(*separate)[asked], alone)
        return distance(read_rows(*batch)[asked], alone, share=0.9) <= limit

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


def _check_rows(passes: Passes, model: nn.Module) -> None:
    if not passes.agree(passes.together):
        raise ValueError(
            f"{describe(model)} predicts something else for a text in a batch than for the text alone (rows that see each other, "
            "or positions counted otherwise), so that batches cannot be sampled or scored; use another model."
        )


def _scoring_guard(passes: Passes, model: nn.Module) -> Guard:
    _check_rows(passes, model)
    guard = Guard(score_by_length=not passes.agree(passes.padded))
    if guard.score_by_length:
        logger.warning_once(
            f"{describe(model)} reads the padding before a prompt: texts are scored in batches of prompts of one length, which "
            "takes longer."
        )
    return guard


def _sampling_guard(passes: Passes, model: nn.Module, config: GenerationConfig) -> Guard:
    for use_cache in (False,) if config.use_cache is False else (True, False):
        if passes.agree(lambda cache=use_cache: passes.generated(EQUAL, config, cache)):
            mixed = passes.agree(lambda cache=use_cache: passes.generated(PROMPTS, config, cache))
            return Guard(sample_by_length=not mixed, use_cache=use_cache)
    raise ValueError(
        f"{describe(model)} generates from another distribution than its full passes give, even without a cache and without "
        "padding; use another model."
    )
