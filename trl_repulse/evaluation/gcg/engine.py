"""The attack: greedy coordinate gradient (GCG), Zou et al. 2023, arXiv 2307.15043, algorithm 1; then the losses of suffixes and
their gradient, which reuse keys and values where the model's cache allows it.

Axis letters: S tokens of the suffix, A after it, T of the target; B candidates, K best tokens at a position, V vocabulary,
H heads, D dimensions of a head.
"""

import inspect
import logging
import warnings
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
import torch.nn.functional as F
from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size
from torch import nn
from transformers import DynamicCache, DynamicLayer, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from ...generation.drawing import with_cache
from ...models._adapters import in_mode
from ...models._model_checks import check_causal, check_token_ids
from .config import GCGConfig
from .prompt import AttackPrompt, Messages, allowed_tokens, build_prompt


logger = logging.getLogger(__name__)

KeyValues = list[tuple[torch.Tensor, torch.Tensor]]  # of each layer, (B, H, tokens, D)
_TOLERANCE = {torch.float16: 0.02, torch.bfloat16: 0.05}  # relative, of losses with and without a cache
_DRAWS = 10  # times that the candidates of a step are drawn if none survives the round trip


class GCGError(RuntimeError):
    """An attack that cannot go on: no candidate survives the round trip, a loss is not finite, or the prompt is too long."""


def check_context(config: PretrainedConfig, prompt: int, more: int) -> None:
    """Raises [`GCGError`] if a prompt of so many tokens, with as many more, exceeds the model's context."""
    context = getattr(config.get_text_config(), "max_position_embeddings", None)
    if context is not None and prompt + more > context:
        raise GCGError(
            f"The prompt with its suffix has {prompt} tokens, which with {more} more exceed the model's context of {context}."
        )


def finite(losses: torch.Tensor) -> torch.Tensor:
    """The same losses; raises [`GCGError`] if one is NaN or infinite."""
    if not losses.isfinite().all():
        raise GCGError(f"A loss is {losses[~losses.isfinite()][0].item()}; try the model in float32.")
    return losses


@dataclass(frozen=True)
class GCGResult:
    """
    Result of an attack.

    Args:
        suffix (`str`), suffix_ids (`list[int]`): Text and tokens of the best suffix of all steps.
        prompt_ids, target_ids (`list[int]`): Tokens of the whole prompt with the suffix, and of the target.
        loss (`float`): Loss of the suffix in nats: the mean negative log-probability of the target's tokens.
        initial_loss (`float`): Loss of the suffix that the attack began with.
        losses (`list[float]`): Lowest loss of each step's candidates.
        suffixes (`list[str]`): Suffix after each step.
        exact_match (`bool`): Whether greedy decoding gives the target.
        round_trip (`bool`): Whether the prompt's text with the suffix is tokenized to `prompt_ids`.
    """

    suffix: str
    suffix_ids: list[int]
    prompt_ids: list[int]
    target_ids: list[int]
    loss: float
    initial_loss: float
    losses: list[float]
    suffixes: list[str]
    exact_match: bool
    round_trip: bool


class SuffixScorer:
    """
    Losses of suffixes in one prompt, under a model in evaluation mode, `micro_batch_size` of them in one forward pass. That is
    halved for good when memory runs out.

    Keys and values of the tokens before the suffix are computed once. Those of a candidate's unchanged first tokens come from
    the last observed suffix: candidates are sorted by the first changed position, and a micro-batch starts at its lowest one.
    """

    def __init__(self, model: PreTrainedModel, prompt: AttackPrompt, micro_batch_size: int):
        self.model, self.prompt, self.micro_batch_size = model, prompt, micro_batch_size
        self._embedding: Any = model.get_input_embeddings()
        self._before, self._after, self._target = (
            torch.tensor([ids], dtype=torch.long, device=model.device)
            for ids in (prompt.before_ids, prompt.after_ids, prompt.target_ids)
        )
        parameters = inspect.signature(model.forward).parameters
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        self._keep = {"logits_to_keep": len(prompt.target_ids)} if "logits_to_keep" in parameters or takes_all else {}
        # Keys and values of the prefix, and of the whole prompt with the suffix observed last
        self._prefix: KeyValues | None = None
        self._observed: tuple[torch.Tensor, KeyValues] | None = None

    @torch.no_grad()
    def enable_cache(self, ids: torch.Tensor) -> None:
        """Turns the cache on if losses with and without it agree for a suffix `ids` (S,), and warns otherwise."""
        pair = torch.stack([ids, ids])
        pair[1, -1] = (ids[-1] + 1) % self._embedding.weight.shape[0]
        plain = torch.cat([self.losses(row[None]) for row in pair])  # one by one, as a cache can mix rows
        tolerance = _TOLERANCE.get(self.model.dtype, 1e-3)
        try:
            # Without the configuration: sliding windows are masked, not cut, and views stay valid
            cache = DynamicCache()
            if self._before.shape[1]:
                self.model(input_ids=self._before, **with_cache(self.model, cache))
            self._prefix = _as_key_values(cache)
            self._forward(ids[None], keep=True)
            cached = self.losses(pair)
            if torch.allclose(cached, plain, rtol=tolerance, atol=tolerance):
                return
            reason = f"losses {cached.tolist()} with it, {plain.tolist()} without"
        except Exception as error:  # caches of other kinds fail in many ways
            if should_reduce_batch_size(error):
                raise
            reason = f"{type(error).__name__}: {error}"
        self._prefix = self._observed = None
        logger.warning(
            "The cache of %s cannot be used for the attack (%s); everything is computed anew for every candidate.",
            type(self.model).__name__,
            reason,
        )

    def gradient(self, ids: torch.Tensor) -> torch.Tensor:
        """Gradient (S, V) of the loss with respect to the one-hot tokens of a suffix (S,), on the model's device,
        taken at the output of the embedding. The suffix becomes the observed one."""
        leaves: list[torch.Tensor] = []

        def cut(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
            """A hook: cuts the graph behind the embedding, whose output becomes the leaf."""
            leaves.append(output.detach().requires_grad_())
            return leaves[-1]

        handle = self._embedding.register_forward_hook(cut)
        try:
            with torch.enable_grad():
                loss = self._loss(self._forward(ids[None], keep=True))[0]
        finally:
            handle.remove()
        start = 0 if self._prefix is not None else len(self.prompt.before_ids)
        with torch.no_grad():
            (gradient,) = torch.autograd.grad(loss, leaves)
            table = self._embedding.weight  # (V, features)
            if type(self._embedding) is not nn.Embedding:  # some models scale the weights
                table = self._embedding(torch.arange(len(table), device=self.model.device))
            return gradient[0, start : start + len(ids)] @ table.T

    @torch.no_grad()
    def matches(self, ids: torch.Tensor) -> bool:
        """Whether greedy decoding after a suffix (S,) gives the target."""
        return bool((self._forward(ids[None])[0].argmax(-1) == self._target[0]).all())

    @torch.no_grad()
    def losses(self, candidates: torch.Tensor) -> torch.Tensor:
        """Losses (B,) of suffixes (B, S) in nats, float32, on the CPU."""
        starts = torch.zeros(len(candidates), dtype=torch.long)
        if self._observed is not None:
            # First changed position, but the token before the target must be computed for its logits
            last = candidates.shape[1] + len(self.prompt.after_ids) - 1
            starts = (candidates == self._observed[0]).long().cumprod(dim=1).sum(dim=1).clamp(max=last)
        order = starts.argsort(stable=True)
        losses = torch.empty(len(candidates))
        done = 0
        while done < len(order):
            chosen = order[done : done + self.micro_batch_size]
            try:
                losses[chosen] = self._loss(self._forward(candidates[chosen], int(starts[chosen[0]]))).cpu()
                done += len(chosen)
            except RuntimeError as error:
                if len(chosen) == 1 or not should_reduce_batch_size(error):
                    raise
                self.micro_batch_size = len(chosen) // 2
                clear_device_cache(garbage_collection=True)
        return losses

    def _forward(self, suffixes: torch.Tensor, start: int = 0, keep: bool = False) -> torch.Tensor:
        """Logits that predict the target, (B, T, V), float32. Tokens before `start` come from the observed suffix.
        `keep` makes the suffix, one row, the observed one."""
        count = len(suffixes)
        tail = torch.cat([self._after, self._target[:, :-1]], dim=1).expand(count, -1)
        ids = torch.cat([suffixes.to(tail.device), tail], dim=1)[:, start:]
        past = self._prefix
        if start > 0 and self._observed is not None:
            end = len(self.prompt.before_ids) + start
            past = [(keys[:, :, :end], values[:, :, :end]) for keys, values in self._observed[1]]
        cache = None if past is None else _as_cache(past, count)
        if cache is None:
            ids = torch.cat([self._before.expand(count, -1), ids], dim=1)
        outputs = self.model(input_ids=ids, **with_cache(self.model, cache), **self._keep)
        if keep and cache is not None:
            self._observed = (suffixes[0].cpu(), _as_key_values(cache))
        return outputs.logits[:, -self._target.shape[1] :].float()

    def _loss(self, logits: torch.Tensor) -> torch.Tensor:
        """Losses of shape (B,) from logits of shape (B, T, V)."""
        targets = self._target.expand(len(logits), -1)
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        return losses.view(targets.shape).mean(dim=1)


def _as_key_values(cache: Any) -> KeyValues:
    """Keys and values of a cache's layers, without gradient; [`_as_cache`] is the way back."""
    return [(layer.keys.detach(), layer.values.detach()) for layer in cache.layers]


def _as_cache(past: KeyValues, count: int) -> DynamicCache:
    """A cache for `count` rows made of views; what the model appends is copied."""
    cache = DynamicCache()
    for keys, values in past:
        layer = DynamicLayer()
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = (x.expand(count, -1, -1, -1) for x in (keys, values))
        cache.layers.append(layer)
    return cache


def run_gcg(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    messages: str | Messages,
    target: str,
    config: GCGConfig | None = None,
) -> GCGResult:
    """
    Searches for a suffix to a prompt after which a model begins its answer with the target.

    Args:
        model ([`~transformers.PreTrainedModel`]), tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            Causal language model to attack, and its tokenizer. The weights get no gradient.
        messages (`str` or `list[dict]`):
            The prompt: text, which becomes a message of the user, or a conversation. The suffix follows the last message.
        target (`str`): Beginning of the answer to provoke.
        config ([`GCGConfig`], *optional*): Settings of the attack.

    Raises:
        `ValueError`: If the target is empty, the model is not causal, there is no chat template, or the settings do not fit the tokenizer.
        [`GCGError`]: If no candidate survives the round trip, a loss is not finite, or the prompt exceeds the context.
    """
    return GCG(model, tokenizer, config or GCGConfig()).run(messages, target)


class GCG:
    """An attack on one model, for any number of prompts. Arguments and errors are those of [`run_gcg`]."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, config: GCGConfig):
        self.model, self.tokenizer, self.config = model, tokenizer, config
        check_causal(model, "`model`")
        embedding: Any = model.get_input_embeddings()
        self._allowed = allowed_tokens(tokenizer, len(embedding.weight)).to(model.device)
        self._topk = min(config.topk, int(self._allowed.sum()))
        if self._topk < config.topk:
            warnings.warn(f"`topk={config.topk}` is more than the {self._topk} tokens that are allowed; using these.")
        length = len(tokenizer(config.suffix_init, add_special_tokens=False)["input_ids"])
        if config.n_replace > length:
            raise ValueError(f"`n_replace={config.n_replace}` is more than the {length} tokens of `suffix_init`.")

    def run(self, messages: str | Messages, target: str, seed: int | None = None) -> GCGResult:
        """Attacks one prompt, as [`run_gcg`], with a seed in place of the configuration's if one is given."""
        config = self.config
        options = config.prompt_format, config.suffix_init, config.chat_template_kwargs
        prompt = build_prompt(self.tokenizer, messages, target, *options)
        ids = prompt.splice(prompt.suffix_ids)
        check_token_ids([ids, prompt.target_ids], self.model.config)
        check_context(self.model.config, len(ids), len(prompt.target_ids))
        with in_mode(self.model, training=False):
            return self._run(prompt, config.seed if seed is None else seed)

    def _run(self, prompt: AttackPrompt, seed: int) -> GCGResult:
        """The search for one prompt, algorithm 1."""
        config = self.config
        generator = torch.Generator().manual_seed(seed)
        size = config.micro_batch_size or (64 if self.model.device.type == "cpu" else config.search_width)
        scorer = SuffixScorer(self.model, prompt, size)
        if config.use_prefix_cache:
            scorer.enable_cache(torch.tensor(prompt.suffix_ids))
        buffer = self._fill_buffer(prompt, scorer, generator)
        initial_loss, ids = buffer[0]
        steps: list[tuple[float, torch.Tensor]] = []  # the best candidate of each, with its loss
        suffixes: list[str] = []
        for _ in range(config.num_steps):
            candidates = self._draw(prompt, ids, scorer.gradient(ids), generator)
            losses = finite(scorer.losses(candidates))
            best = int(losses.argmin())
            steps.append((losses[best].item(), candidates[best]))
            if config.buffer_size == 0:
                buffer = steps[-1:]
            elif steps[-1][0] < buffer[-1][0]:
                buffer = sorted([*buffer[: config.buffer_size - 1], steps[-1]], key=itemgetter(0))
            ids = buffer[0][1]
            suffixes.append(prompt.suffix_texts([ids.tolist()])[0])
        loss, ids = min(steps, key=itemgetter(0))
        row = ids.tolist()
        return GCGResult(
            suffix=prompt.suffix_texts([row])[0],
            suffix_ids=row,
            prompt_ids=prompt.splice(row),
            target_ids=prompt.target_ids,
            loss=loss,
            initial_loss=initial_loss,
            losses=[loss for loss, _ in steps],
            suffixes=suffixes,
            exact_match=scorer.matches(ids),
            round_trip=bool(prompt.survives(ids[None], "context")),
        )

    def _fill_buffer(
        self, prompt: AttackPrompt, scorer: SuffixScorer, generator: torch.Generator
    ) -> list[tuple[float, torch.Tensor]]:
        """Losses and suffixes (S,), best first: the first suffix, and random ones that survive the round trip if more are to be kept."""
        suffixes = torch.tensor([prompt.suffix_ids])
        if self.config.buffer_size > 1:
            tokens = self._allowed.cpu().nonzero().flatten()
            size = self.config.search_width, len(prompt.suffix_ids)
            drawn = tokens[torch.randint(len(tokens), size, generator=generator)]
            drawn = drawn[prompt.survives(drawn, self.config.filter_roundtrip)]
            suffixes = torch.cat([suffixes, drawn[: self.config.buffer_size - 1]])
        losses = finite(scorer.losses(suffixes))
        return sorted(zip(losses.tolist(), suffixes, strict=True), key=itemgetter(0))

    def _draw(
        self, prompt: AttackPrompt, ids: torch.Tensor, gradient: torch.Tensor, generator: torch.Generator
    ) -> torch.Tensor:
        """Distinct candidates (B, S) that survive the round trip, from the suffix (S,) and its gradient (S, V)."""
        config = self.config
        if not gradient.isfinite().all():
            raise GCGError("The gradient is not finite; try the model in float32.")
        tokens = (-gradient.masked_fill(~self._allowed, torch.inf)).topk(self._topk, dim=1).indices.cpu()  # (S, K)
        n_replace = min(config.n_replace, len(ids))  # the suffix may have fewer tokens in the prompt
        width = config.search_width
        for _ in range(_DRAWS):
            # Random numbers in the order of nanogcg: equal seeds give equal candidates
            positions = torch.rand((width, len(ids)), generator=generator).argsort()[:, :n_replace]
            ranks = torch.randint(0, self._topk, (width, n_replace, 1), generator=generator)
            values = tokens[positions].gather(2, ranks).squeeze(2)  # (B, n_replace)
            drawn = ids.repeat(width, 1).scatter_(1, positions, values)
            drawn = torch.tensor(list(dict.fromkeys(map(tuple, drawn.tolist()))))
            kept = drawn[prompt.survives(drawn, config.filter_roundtrip)]
            if len(kept):
                return kept
        raise GCGError(
            f"No candidate of {_DRAWS} draws survived the round trip through the tokenizer; set "
            "`filter_roundtrip='suffix'` or 'off', or try another `suffix_init`."
        )
