"""The attack: greedy coordinate gradient (GCG), Zou et al. 2023, arXiv 2307.15043, algorithm 1."""

import copy
import warnings
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Literal

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...models._adapters import in_mode
from ...models._causal import check_causal
from ...models._model_checks import check_token_ids
from ._search import best_tokens, distinct, draw_candidates, merge_candidates, probe_losses, screened_losses
from .config import GCGConfig
from .prompt import AttackPrompt, Messages, allowed_tokens, build_prompt
from .scoring import GCGError, SuffixScorer, check_context, finite


# Times that the candidates of a step are drawn if none survives the round trip
_DRAWS = 10
StopReason = Literal["num_steps", "early_stop", "stop_loss"]


@dataclass(frozen=True)
class GCGResult:
    """
    Result of an attack.

    Args:
        suffix (`str`):
            Text of the best suffix; after an early stop, of the one that caused it.
        suffix_ids (`list[int]`):
            Its tokens.
        prompt_ids (`list[int]`):
            Tokens of the whole prompt with the suffix.
        target_ids (`list[int]`):
            Tokens of the target.
        loss (`float`):
            Loss of the suffix in nats: the mean negative log-probability of the target's tokens, or its mellowmax. It is
            the lowest of all steps, except after an early stop.
        initial_loss (`float`):
            Loss of the suffix that the attack began with.
        losses (`list[float]`):
            Lowest loss of each step's candidates.
        suffixes (`list[str]`):
            Suffix after each step.
        stop_reason (`str`):
            `"num_steps"`, `"early_stop"` or `"stop_loss"`.
        exact_match (`bool`):
            Whether greedy decoding gives the target.
        round_trip (`bool`):
            Whether the prompt's text with the suffix is tokenized to `prompt_ids`.
    """

    suffix: str
    suffix_ids: list[int]
    prompt_ids: list[int]
    target_ids: list[int]
    loss: float
    initial_loss: float
    losses: list[float]
    suffixes: list[str]
    stop_reason: StopReason
    exact_match: bool
    round_trip: bool


def run_gcg(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    messages: str | Messages,
    target: str,
    config: GCGConfig | None = None,
    draft_model: PreTrainedModel | None = None,
) -> GCGResult:
    """
    Searches for a suffix to a prompt after which a model begins its answer with the target.

    Args:
        model ([`~transformers.PreTrainedModel`]):
            Causal language model to attack. It runs in evaluation mode, and its weights get no gradient.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            Its tokenizer.
        messages (`str` or `list[dict]`):
            The prompt: text, which becomes a message of the user, or a conversation. The suffix follows the last
            message.
        target (`str`):
            Beginning of the answer to provoke.
        config ([`GCGConfig`], *optional*):
            Settings of the attack.
        draft_model ([`~transformers.PreTrainedModel`], *optional*):
            A smaller model with the same tokens, for probe sampling (Zhao et al. 2024, arXiv 2403.01251): it scores all
            candidates, and the model only the most promising ones. Faster where it is much smaller, but not exact.

    Returns:
        [`GCGResult`]

    Raises:
        `ValueError`: If the target is empty, there is no chat template, or the settings do not fit the tokenizer
            or a draft model.
        [`GCGError`]: If no candidate survives the round trip, a loss is not finite, or the prompt exceeds the context.

    Example:

    ```python
    >>> from trl_repulse.evaluation.gcg import GCGConfig, run_gcg

    >>> result = run_gcg(model, tokenizer, "Tell me a secret.", "Sure, here is", GCGConfig(num_steps=100))
    >>> result.suffix, result.loss
    ```
    """
    return GCG(model, tokenizer, config or GCGConfig(), draft_model).run(messages, target)


class GCG:
    """
    An attack on one model, for any number of prompts.

    Args:
        model, tokenizer, config, draft_model:
            As for [`run_gcg`].

    Raises:
        `ValueError`: If the settings do not fit the tokenizer or a draft model, or a model is not causal.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        config: GCGConfig,
        draft_model: PreTrainedModel | None = None,
    ):
        self.model, self.tokenizer, self.config, self.draft_model = model, tokenizer, config, draft_model
        check_causal(model, "`model`")
        if draft_model is not None:
            check_causal(draft_model, "`draft_model`")
            if draft_model.get_input_embeddings().weight.shape[0] < len(tokenizer):
                raise ValueError(
                    "`draft_model` has fewer tokens than the tokenizer; give a model with the tokens of the attacked one."
                )
            if config.merge_swaps > 1:
                raise ValueError(
                    "`merge_swaps` needs the losses of all candidates; set it to 0, or leave out `draft_model`."
                )
            if config.screen_dtype is not None:
                raise ValueError("A `draft_model` and `screen_dtype` both choose what is scored; leave out one.")
        self._screen: PreTrainedModel | None = None
        if config.screen_dtype is not None:
            if model.dtype == getattr(torch, config.screen_dtype):
                raise ValueError(f"The model is in {config.screen_dtype} already; leave `screen_dtype` out.")
            # The weights must require a gradient: otherwise torch (2.13) multiplies a slice of the hidden states with
            # the head row by row, which is a hundred times slower on CPU in half precision
            self._screen = copy.deepcopy(model).to(getattr(torch, config.screen_dtype)).requires_grad_(True)
        rows = model.get_input_embeddings().weight.shape[0]
        self._allowed = allowed_tokens(tokenizer, rows, config.allow_non_ascii, config.forbid_special)
        self._allowed = self._allowed.to(model.device)
        self._topk = min(config.topk, int(self._allowed.sum()))
        if self._topk < config.topk:
            warnings.warn(f"`topk={config.topk}` is more than the {self._topk} tokens that are allowed; using these.")
        length = len(tokenizer(config.suffix_init, add_special_tokens=False)["input_ids"])
        if config.n_replace > length:
            raise ValueError(f"`n_replace={config.n_replace}` is more than the {length} tokens of `suffix_init`.")

    def run(self, messages: str | Messages, target: str, seed: int | None = None) -> GCGResult:
        """
        Attacks one prompt.

        Args:
            messages, target:
                As for [`run_gcg`].
            seed (`int`, *optional*):
                Seed in place of the configuration's.

        Returns:
            [`GCGResult`]

        Raises:
            `ValueError`: If the target is empty or there is no chat template.
            [`GCGError`]: If no candidate survives the round trip, a loss is not finite, or the prompt exceeds the context.
        """
        config = self.config
        prompt = build_prompt(
            self.tokenizer, messages, target, config.prompt_format, config.suffix_init, config.chat_template_kwargs
        )
        with ExitStack() as stack:
            for model in (self.model, self.draft_model, self._screen):
                if model is not None:
                    ids = prompt.splice(prompt.suffix_ids)
                    check_token_ids([ids, prompt.target_ids], model.config)
                    check_context(model.config, len(ids), len(prompt.target_ids))
                    stack.enter_context(in_mode(model, training=False))
            return self._run(prompt, config.seed if seed is None else seed)

    def _run(self, prompt: AttackPrompt, seed: int) -> GCGResult:
        config = self.config
        generator = torch.Generator().manual_seed(seed)
        scorers = [
            None if model is None else self._scorer(model, prompt)
            for model in (self.model, self.draft_model, self._screen)
        ]
        scorer = scorers[0]
        buffer = self._fill_buffer(prompt, scorer, generator)
        initial_loss, ids = best = buffer[0]
        losses, suffixes = [], []
        stop_reason: StopReason = "num_steps"
        for _ in range(config.num_steps):
            gradient, matches = scorer.gradient(ids)
            if matches and config.early_stop:
                stop_reason, best = "early_stop", buffer[0]
                break
            candidates = self._draw(prompt, ids, gradient, generator)
            loss, found = self._search(prompt, *scorers, ids, candidates, generator)
            _insert(buffer, loss, found, config.buffer_size)
            best = min(best, (loss, found), key=lambda entry: entry[0]) if losses else (loss, found)
            ids = buffer[0][1]
            losses.append(loss)
            suffixes.append(prompt.suffix_texts([ids.tolist()])[0])
            if config.stop_loss is not None and loss <= config.stop_loss:
                stop_reason = "stop_loss"
                break
        loss, ids = best
        row = ids.tolist()
        return GCGResult(
            suffix=prompt.suffix_texts([row])[0],
            suffix_ids=row,
            prompt_ids=prompt.splice(row),
            target_ids=prompt.target_ids,
            loss=loss,
            initial_loss=initial_loss,
            losses=losses,
            suffixes=suffixes,
            stop_reason=stop_reason,
            exact_match=scorer.matches(ids),
            round_trip=bool(prompt.survives(ids[None], "context")),
        )

    def _scorer(self, model: PreTrainedModel, prompt: AttackPrompt) -> SuffixScorer:
        default = 64 if model.device.type == "cpu" else self.config.search_width
        scorer = SuffixScorer(model, prompt, self.config.micro_batch_size or default, self.config.mellowmax)
        if self.config.use_prefix_cache:
            scorer.enable_cache(torch.tensor(prompt.suffix_ids), self.config.reuse_suffix_kv)
        return scorer

    def _fill_buffer(
        self, prompt: AttackPrompt, scorer: SuffixScorer, generator: torch.Generator
    ) -> list[tuple[float, torch.Tensor]]:
        """The first suffix, and random ones that survive the round trip if more are to be kept; best first."""
        suffixes = torch.tensor([prompt.suffix_ids])
        if self.config.buffer_size > 1:
            tokens = self._allowed.cpu().nonzero().flatten()
            drawn = torch.randint(len(tokens), (self.config.search_width, len(prompt.suffix_ids)), generator=generator)
            drawn = tokens[drawn]
            drawn = drawn[prompt.survives(drawn, self.config.filter_roundtrip)]
            suffixes = torch.cat([suffixes, drawn[: self.config.buffer_size - 1]])
        losses = finite(scorer.losses(suffixes))
        return sorted(zip(losses.tolist(), suffixes, strict=True), key=lambda entry: entry[0])

    def _draw(
        self, prompt: AttackPrompt, ids: torch.Tensor, gradient: torch.Tensor, generator: torch.Generator
    ) -> torch.Tensor:
        """Distinct candidates that survive the round trip."""
        config = self.config
        if not gradient.isfinite().all():
            raise GCGError("The gradient is not finite; try the model in float32.")
        tokens = best_tokens(gradient, self._allowed, self._topk)
        n_replace = min(config.n_replace, len(ids))  # the suffix may have fewer tokens in the prompt
        for _ in range(_DRAWS):
            drawn = distinct(draw_candidates(ids, tokens, config.search_width, n_replace, generator))
            kept = drawn[prompt.survives(drawn, config.filter_roundtrip)]
            if len(kept):
                return kept
        raise GCGError(
            f"No candidate of {_DRAWS} draws survived the round trip through the tokenizer; set "
            "`filter_roundtrip='suffix'` or 'off', or try another `suffix_init`."
        )

    def _search(
        self,
        prompt: AttackPrompt,
        scorer: SuffixScorer,
        draft: SuffixScorer | None,
        screen: SuffixScorer | None,
        ids: torch.Tensor,
        candidates: torch.Tensor,
        generator: torch.Generator,
    ) -> tuple[float, torch.Tensor]:
        """The best candidate, or the best merge of several, and its loss."""
        config = self.config
        if draft is not None:
            sizes = config.probe_sampling_factor, config.probe_reduction
            losses = probe_losses(scorer, draft, ids, candidates, generator, *sizes)
        elif screen is not None:
            losses = screened_losses(scorer, screen, ids, candidates)
        else:
            losses = finite(scorer.losses(candidates))
        if config.merge_swaps > 1:
            merged = merge_candidates(ids, candidates, losses, config.merge_swaps)
            merged = merged[prompt.survives(merged, config.filter_roundtrip)]
            candidates = torch.cat([candidates, merged])
            losses = torch.cat([losses, finite(scorer.losses(merged))])
        index = int(losses.argmin())
        return losses[index].item(), candidates[index]


def _insert(buffer: list[tuple[float, torch.Tensor]], loss: float, ids: torch.Tensor, size: int) -> None:
    """Keeps the best suffixes, best first; without a size, the new one whatever its loss."""
    if size == 0:
        buffer[:] = [(loss, ids)]
    elif loss < buffer[-1][0]:
        if len(buffer) >= size:
            buffer.pop()
        buffer.append((loss, ids))
        buffer.sort(key=lambda entry: entry[0])
