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
from torch import nn
from transformers import GenerationConfig
from transformers.utils import logging

from .._adapters import base_of
from ._padding import padded_outputs
from ._passes import EQUAL, PROMPTS, ROUNDINGS, Passes, distance, holds, rounding
from ._prefill import prompts_read_once


logger = logging.get_logger(__name__)


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
        passes = Passes(model, log_probs)
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
        return _scoring_guard(Passes(model, states), model)


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
        passes = Passes(model, lambda ids, mask: model(input_ids=ids, use_cache=False).logits.float().log_softmax(-1))
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
        passes = Passes(model, log_probs)
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
        passes = Passes(model, read)
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
