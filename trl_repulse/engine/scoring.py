"""Log-probabilities of completions under models, at the positions they were generated at.

Axis letters: U units of a prompt, n completions of a set in a unit, C = Σn of all sets, T completion tokens, R rows of a pass with
k completions each. It stands on TRL's fused head; other dependencies on TRL are in `_trl.py`.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from .. import _trl
from ..generation._probe import Guard
from ..generation.drawing import Sampler, without_padding
from ..models._adapters import takes
from ..models._fsdp import whole
from .trl_bridge import scored_in_small_tiles
from .units import OWN, CompletionSet, Shape, Units


MASKED = ("eager", "sdpa")  # attention implementations that take pairwise masks
# Share of the cost of separate rows; savings below the error of the count are not worth it
_WORTH = 0.9


def longest_row(config: PreTrainedConfig) -> float:
    """The most tokens of a row with several completions, from the position embeddings and attention windows in a text model's
    configuration; infinite without a limit. Windows do not count if it names the kinds of its layers: masks take care of them."""
    limits = [getattr(config, "max_position_embeddings", None)]
    if not hasattr(config, "layer_types"):
        limits += [value for name, value in vars(config).items() if "window" in name]
    return min((x for x in limits if isinstance(x, int) and not isinstance(x, bool) and x > 0), default=math.inf)


@dataclass(frozen=True)
class Layout:
    """
    Rows `[prompt | completion | completion | ...]`, in which a completion attends to the prompt and to itself.

    Args:
        prompt (`int`): L, prompt tokens with left padding.
        width (`int`): T, completion tokens with right padding.
        count (`int`): k, completions of a row.
    """

    prompt: int
    width: int
    count: int

    @classmethod
    def cheapest(
        cls, prompt: int, width: int, completions: int, hidden_size: int, longest: float = math.inf
    ) -> "Layout":
        """
        The layout that needs the fewest multiplications for prompts of L tokens with n `completions` of T tokens.

        A layer takes about 12·d² multiplications for each token and 2·d for each pair of tokens in a row (d: hidden size), also for masked
        pairs, so long completions can cost more in one row than reading the prompt twice. `count` divides n, shared rows have at most
        `longest` tokens, and 1 is taken if sharing saves less than a tenth.
        """
        counts = [k for k in range(2, completions + 1) if completions % k == 0 and prompt + k * width <= longest]
        separate, *shared = (cls(prompt, width, k) for k in (1, *counts))
        best = min(shared, key=lambda layout: layout.cost(completions, hidden_size), default=separate)
        worth = best.cost(completions, hidden_size) <= _WORTH * separate.cost(completions, hidden_size)
        return best if worth else separate

    def cost(self, completions: float, hidden_size: int) -> float:
        """Multiplications for a prompt with so many completions, up to a factor common to all layouts."""
        tokens = self.prompt + self.count * self.width
        return completions / self.count * tokens * (6 * hidden_size + tokens)

    def rows(self, prompts: torch.Tensor, completions: torch.Tensor) -> torch.Tensor:
        """Rows (R, S) of tokens or masks, S = L + k·T and R = U·n / k, from prompts (U, L) and completions (U, n, T), unit by unit. With
        `count=1`, prompts may have shape (U·n, L)."""
        parts = completions.reshape(-1, self.count * self.width)
        return torch.cat([prompts.repeat_interleave(len(parts) // len(prompts), 0), parts], dim=1)

    def positions(self, attention_mask: torch.Tensor) -> torch.Tensor:
        """Position of each token (R, S) from its mask: each completion continues from the prompt."""
        prompt, completions = attention_mask.long().split([self.prompt, self.count * self.width], dim=1)
        within = completions.view(-1, self.count, self.width).cumsum(dim=2).view_as(completions)
        positions = torch.cat([prompt.cumsum(dim=1), prompt.sum(dim=1, keepdim=True) + within], dim=1)
        return (positions - 1).clamp(min=0)

    def predicting(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The states (R·k, T + 1, d) that predict completions, from those of rows (R, S, d): the prompt's last and the completion's own."""
        if self.count == 1:
            return hidden_states[:, -self.width - 1 :]
        own = self._places(hidden_states.device)[self.prompt :].view(self.count, self.width)
        first = torch.full((self.count, 1), self.prompt - 1, device=own.device)
        offsets = self.width * torch.arange(self.count, device=own.device).unsqueeze(1)
        return hidden_states[:, torch.cat([first, own + offsets], dim=1)].flatten(0, 1)  # at places (k, T + 1)

    def masks(
        self, config: PreTrainedConfig, dtype: torch.dtype, attention_mask: torch.Tensor
    ) -> torch.Tensor | dict[str, torch.Tensor]:
        """Attention masks (R, 1, S, S) for rows with padding mask (R, S), or a dictionary by kind of layer. Boolean, or of `dtype` if they
        are added to scores. Raises `ValueError` if the attention takes no such masks."""
        if config._attn_implementation not in MASKED:
            raise ValueError(f"Attention {config._attn_implementation!r} takes no masks of pairs of tokens.")
        end = self.prompt + self.width
        alone = attention_mask[:, :end].clone()
        alone[:, self.prompt :] = 1  # padding of each completion is masked below
        blank = torch.empty((len(alone), end, 0), dtype=dtype, device=alone.device)
        of_one = _trl.create_masks_for_generate(config, blank, alone, None)
        if isinstance(of_one, dict):
            return {kind: self._spread(mask, attention_mask) for kind, mask in of_one.items()}
        return self._spread(of_one, attention_mask)

    def _spread(self, mask: torch.Tensor | None, attention_mask: torch.Tensor) -> torch.Tensor:
        """Extends the mask of rows with one completion (R, 1, L + T, L + T), `None` if causal, to rows with k completions."""
        device = attention_mask.device
        places, end = self._places(device), self.prompt + self.width
        if mask is None:
            mask = torch.ones((end, end), dtype=torch.bool, device=device).tril()
            mask = mask.expand(len(attention_mask), 1, end, end)
        if mask.dim() != 4:  # layers without attention
            raise ValueError(f"Such layers take no masks of pairs of tokens, got one of {mask.dim()} axes.")
        owner = torch.arange(self.count, device=device).repeat_interleave(self.width)
        owner = torch.cat([owner.new_full((self.prompt,), -1), owner])  # (S,); -1 is the prompt
        seen = (owner == -1) | (owner.unsqueeze(1) == owner)  # (S, S)
        seen = seen & attention_mask.bool()[:, None, None, :]
        hidden = False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min
        return mask[:, :, places][:, :, :, places].masked_fill(~seen, hidden)

    def _places(self, device: torch.device) -> torch.Tensor:
        """Index of each token of a row in a row with one completion, shape (S,)."""
        within = torch.arange(self.width, device=device).repeat(self.count)
        return torch.cat([torch.arange(self.prompt, device=device), self.prompt + within])


Parts = tuple[Any, ...]  # tensors of rows or of a whole pass, and `None` for what the pass does not give


class Scores(NamedTuple):
    """Of R rows with k completions of T tokens: log-probabilities and entropies (nats), and a router's loss."""

    log_p: torch.Tensor  # (R·k, T)
    entropy: torch.Tensor | None = None  # (R·k, T)
    aux_loss: torch.Tensor | None = None
    by_sampler: torch.Tensor | None = None  # (R·k, T), log-probabilities by another sampler


class BySampler:
    """
    Requests log-probabilities under a second sampler from a scoring pass and stores them.

    DDP, FSDP and DeepSpeed pass a plain class on unchanged; FSDP copies a dataclass.

    Args:
        sampler ([`Sampler`]): The second sampler.
        labels (`torch.Tensor` of shape `(R·k, T + 1)`): Tokens of the completions, −100 where they do not count.
        wanted (`torch.Tensor` of shape `(R·k,)`): Which completions to score.
    """

    def __init__(self, sampler: Sampler, labels: torch.Tensor, wanted: torch.Tensor):
        self.sampler, self.labels, self.wanted = sampler, labels, wanted.clone()
        # All processes run the head, whose weights they may share: never of nothing
        self.wanted[0] = True
        self.log_p = torch.zeros(labels[:, 1:].shape, device=labels.device)  # (R·k, T)

    def take(self, head: "_FusedHead", hidden_states: torch.Tensor) -> None:
        """Sets `log_p` of the wanted completions to what the sampler's head gives for hidden states (R·k, T + 1, d)."""
        states = hidden_states[self.wanted.to(hidden_states.device)]
        scored = head.forward(states, fused_lm_head=True, labels=self.labels[self.wanted])
        self.log_p[self.wanted] = scored.log_probs.to(self.log_p)


class _FusedHead:
    """TRL's fused head as another sampler has it, for hidden states that are already computed. TRL (1.16) adds a head with one fixed
    temperature; this object takes the model's place for a second. Way out: `temperature` and `bias` on the fused head's forward."""

    def __init__(self, model: PreTrainedModel, sampler: Sampler, cast_lm_head_to_fp32: bool):
        self.config: PreTrainedConfig = model.config
        self._embeddings, self._bias = model.get_output_embeddings, sampler.head_bias
        place: Any = self
        _trl.add_fused_lm_head(place, sampler.temperature, cast_lm_head_to_fp32)

    def get_output_embeddings(self) -> Any:
        """The model's head, or its weights with the sampler's bias; [`takes_bias`] says where that is the same as biased logits."""
        head = self._embeddings()
        if self._bias is None:
            return head
        weight, bias = head.weight, self._bias.to(head.weight.device)
        # TRL (1.16) takes the bias for a parameter: it gathers both from FSDP2's shards, and asks both for ZeRO-3's status
        if (status := getattr(weight, "ds_status", None)) is not None:
            bias.ds_status = type(status).AVAILABLE  # type: ignore[attr-defined]
        return SimpleNamespace(weight=whole(weight), bias=bias)

    def forward(self, hidden_states: torch.Tensor, **options: Any) -> Any:
        """`add_fused_lm_head` replaces this method."""

    def base_model(self, hidden_states: torch.Tensor, **options: Any) -> _trl.MoeModelOutputWithPast:
        """What the head reads, in the place of a backbone."""
        return _trl.MoeModelOutputWithPast(last_hidden_state=hidden_states)


def takes_bias(model: PreTrainedModel) -> bool:
    """Whether a bias of the head is one of the logits: where they are neither capped nor scaled, and the head has none of its own."""
    config, head = model.config.get_text_config(), model.get_output_embeddings()
    names = ("final_logit_softcapping", "logit_scale", "output_multiplier", "lm_head_multiplier", "logits_scaling")
    return getattr(head, "bias", None) is None and all(getattr(config, name, None) in (None, 1) for name in names)


def prepare_scoring(model: PreTrainedModel, cast_lm_head_to_fp32: bool = False) -> None:
    """
    Readies a model with a head, not wrapped by PEFT, for passes over rows of a [`Layout`], by hooks on it and on its backbone.

    Fixes three things in scoring passes (those with a `layout`); the first in every pass through the fused head
    (`fused_lm_head=True`), which must have been added with the same `cast_lm_head_to_fp32`:

    - Positions count from the first token that is not padding, as in generation. TRL (1.16) scores left-padded rows without
      `position_ids`: absolute positions (GPT-2) then depend on the padding, and log-probabilities are not those of the sampling.
    - Only the hidden states that predict completions go on to the head, as if each completion had a row of T + 1 positions.
    - Completions that share a row do not see each other. The backbone gets a mask that says so; the model around it
      keeps the mask of real tokens, over which a mixture-of-experts model takes its load-balancing loss.

    Way out: TRL passing `position_ids`, and its fused head skipping ignored positions on every device.
    """
    takes_positions, takes_last, caches = (
        takes(model, name) for name in ("position_ids", "logits_to_keep", "use_cache")
    )
    now: dict[str, Any] = {"layout": None, "by_sampler": None}

    def before_model(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Takes the arguments of a scoring pass out, and adds positions and what saves memory."""
        layout = now["layout"] = kwargs.pop("layout", None)
        now["by_sampler"] = kwargs.pop("by_sampler", None)
        if layout is None and not kwargs.get("fused_lm_head"):
            return args, kwargs
        mask = kwargs["attention_mask"]
        if takes_positions and kwargs.get("position_ids") is None:
            positions = (mask.long().cumsum(dim=1) - 1).clamp(min=0) if layout is None else layout.positions(mask)
            kwargs = kwargs | {"position_ids": positions}
        if layout is not None and not kwargs.get("fused_lm_head"):
            kwargs = kwargs | ({"use_cache": False} if caches else {})
            kwargs = kwargs | ({"logits_to_keep": layout.width + 1} if takes_last else {})
        return args, kwargs

    def before_backbone(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Gives the mask in which completions of a row do not see each other."""
        layout = now["layout"]
        if layout is None or layout.count == 1:
            return args, kwargs
        return args, kwargs | {"attention_mask": layout.masks(module.config, module.dtype, kwargs["attention_mask"])}

    def after_backbone(module: nn.Module, args: tuple, output: Any) -> Any:
        """Leaves the hidden states that predict completions, and scores them under a second sampler if one is asked for."""
        layout, by_sampler = now["layout"], now["by_sampler"]
        if layout is not None:
            output.last_hidden_state = layout.predicting(output.last_hidden_state)
        if by_sampler is not None:
            with torch.no_grad():
                head = _FusedHead(model, by_sampler.sampler, cast_lm_head_to_fp32)
                by_sampler.take(head, output.last_hidden_state)
        return output

    def after_model(module: nn.Module, args: tuple, output: Any) -> None:
        now["layout"] = now["by_sampler"] = None  # the backbone may be called by itself

    model.register_forward_pre_hook(before_model, with_kwargs=True)
    model.register_forward_hook(after_model, always_call=True)
    backbone = backbone_of(model)
    if backbone is not model:
        backbone.register_forward_pre_hook(before_backbone, with_kwargs=True)
        backbone.register_forward_hook(after_backbone)


def backbone_of(model: PreTrainedModel) -> nn.Module:
    """What a model's head reads: OPT's decoder and not the `base_model` around it; elsewhere `decoder` may be the head."""
    decoder = model.get_decoder()
    return decoder if isinstance(decoder, PreTrainedModel) and decoder is not model else model.base_model


def token_log_probs(
    model: nn.Module,
    accelerator: Accelerator,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    layout: Layout,
    compute_aux_loss: bool = False,
    sampler: Sampler | None = None,
    wanted: torch.Tensor | None = None,
) -> Scores:
    """
    Log-probabilities of the completions of rows, 0 where masked, in one pass.

    Args:
        model (`torch.nn.Module`): With TRL's fused head, readied by [`prepare_scoring`], wrapped or not.
        input_ids, attention_mask (`torch.Tensor` of shape `(R, L + k·T)`): Left-padded prompts, then right-padded completions.
        compute_aux_loss (`bool`): Whether to have the load-balancing loss of a mixture-of-experts model too.
        sampler ([`Sampler`], *optional*): Another sampler by which to have log-probabilities as well, without gradient.
        wanted (`torch.Tensor` of shape `(R·k,)`, *optional*): Of which completions, by default of all; of others they are 0, or right.
    """
    ids, mask = (x[:, layout.prompt :].reshape(-1, layout.width) for x in (input_ids, attention_mask))
    labels = nn.functional.pad(ids.masked_fill(mask == 0, -100), (1, 0), value=-100)  # the prompt's last token
    extra: dict[str, Any] = {"output_router_logits": True} if compute_aux_loss else {}
    if sampler is not None:
        wanted = torch.ones_like(labels[:, 0], dtype=torch.bool) if wanted is None else wanted
        extra["by_sampler"] = BySampler(sampler, labels, wanted)
    with accelerator.autocast(), scored_in_small_tiles(labels.device, labels[:, 1:].numel()):
        outputs = model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            labels=labels,
            fused_lm_head=True,
            layout=layout,
            **extra,
        )
    by_sampler = None if sampler is None else extra["by_sampler"].log_p
    return Scores(outputs.log_probs, outputs.entropy, outputs.aux_loss, by_sampler)


def score_needed(score: Callable[..., Parts], needed: torch.Tensor, *rows: torch.Tensor) -> Parts:
    """Scores only the rows with `needed` (R,), and returns tensors of R rows, 0 for the others. `score` takes tensors of rows and returns
    tensors with as many rows, means over rows, or `None`, which are passed on. The first row is always scored: processes that share weights
    must all make the pass."""
    needed = needed.clone()
    needed[0] = True
    return tuple(
        x if x is None or not x.dim() else x.new_zeros(len(needed), *x.shape[1:]).index_put((needed,), x)
        for x in score(*(row[needed] for row in rows))
    )


@torch.no_grad()
def sampler_log_probs(
    model: nn.Module,
    accelerator: Accelerator,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    layout: Layout,
    sampler: Sampler,
) -> torch.Tensor:
    """Log-probabilities `(R·k, T)` under another sampler, from a model's logits, if TRL's fused head does not fit the model."""
    ids, mask = (x[:, layout.prompt :].reshape(-1, layout.width) for x in (input_ids, attention_mask))
    with accelerator.autocast():
        logits = model(input_ids=input_ids, attention_mask=attention_mask, layout=layout).logits
    logits = logits[:, -layout.width - 1 : -1]
    log_p = [  # one completion after the other: a copy in float32 of all is larger than the logits
        sampler(row.float()).log_softmax(dim=-1).gather(-1, chosen.unsqueeze(-1)).squeeze(-1)
        for row, chosen in zip(logits, ids, strict=True)
    ]
    return torch.stack(log_p).masked_fill(mask == 0, 0.0)


Masks = dict[str, torch.Tensor]  # of sets, by name: (U, n)


@dataclass
class Wanted:
    """
    What a pass has to score of the policy's samples and of extra ones.

    Args:
        sets (`tuple[str, ...]`): Names of the sets.
        needed (`dict[str, torch.Tensor]`): For a set, a mask `(U, n)` of the completions to score, by default all. Others are not read,
            but for one where nothing is needed, and their scores are 0.
        sampler ([`Sampler`], *optional*): A second sampler to score under, without gradient.
        by_sampler (`dict[str, torch.Tensor]`): For a set, a mask `(U, n)` of the completions to score under `sampler`; others have 0.
    """

    sets: tuple[str, ...] = (OWN,)
    needed: Masks = field(default_factory=dict)
    sampler: Sampler | None = None
    by_sampler: Masks = field(default_factory=dict)


@dataclass
class SetScores:
    """
    Log-probabilities (nats) of a micro-batch's samples, `(U, n, T)`.

    Args:
        log_p (`dict[str, torch.Tensor]`): By set, of all tokens that are attended to.
        entropy (`torch.Tensor` of shape `(U, n, T)`, *optional*): Entropy (nats) at the tokens of the first set.
        aux_loss (`torch.Tensor`, *optional*): Load-balancing loss of a mixture-of-experts model.
        by_sampler (`dict[str, torch.Tensor]`): By set, log-probabilities under a second sampler, detached.
        proposal (`torch.Tensor` of shape `(U, m, T)`, *optional*): Of the extra samples under a proposal as it is now.
    """

    log_p: dict[str, torch.Tensor] = field(default_factory=dict)
    entropy: torch.Tensor | None = None
    aux_loss: torch.Tensor | None = None
    by_sampler: dict[str, torch.Tensor] = field(default_factory=dict)
    proposal: torch.Tensor | None = None

    def of(self, which: str, samples: CompletionSet) -> torch.Tensor:
        """Detached log-probabilities of a set under the policy that was sampled: as stored, or else those of this pass."""
        return self.log_p[which].detach() if samples.log_p is None else samples.log_p


@dataclass
class CompletionSets:
    """Sets of completions to the same prompts, joined for one pass. [`split`] separates the scores of each set."""

    ids: torch.Tensor  # (U, C, T)
    mask: torch.Tensor  # (U, C, T): which tokens the model reads
    needed: torch.Tensor  # (U, C): which completions are needed
    by_sampler: torch.Tensor | None  # (U, C): which also need log-probabilities by another sampler
    shapes: list[tuple[int, int]]  # n and T of each set
    _places: torch.Tensor | None = None  # (U, slots): where those that are kept were, of `_completions` in a unit
    _completions: int = 0

    @classmethod
    def of(
        cls, sets: dict[str, CompletionSet], pad_token_id: int, needed: Masks, by_sampler: Masks | None
    ) -> "CompletionSets":
        """Joins sets, given by name. `needed` and `by_sampler` have a mask for each set of which not all completions count."""
        shapes = [(x.ids.size(1), x.ids.size(2)) for x in sets.values()]
        width = max(length for _, length in shapes)

        def joined(parts: list[torch.Tensor], value: int) -> torch.Tensor:
            """Tensors (U, n, T) of sets as one, (U, C, T of the longest), filled up with a value."""
            return torch.cat([F.pad(part, (0, width - part.size(2)), value=value) for part in parts], dim=1)

        ids = joined([x.ids for x in sets.values()], pad_token_id)
        mask = joined([x.read for x in sets.values()], 0)

        def of_all(masks: Masks) -> torch.Tensor:
            """One mask (U, C) of the sets' masks, true for sets that have none."""
            every = [ids.new_ones((len(ids), n), dtype=torch.bool) for n, _ in shapes]
            return torch.cat([masks.get(name, part) for name, part in zip(sets, every, strict=True)], dim=1)

        return cls(ids, mask, of_all(needed), None if by_sampler is None else of_all(by_sampler), shapes)

    @property
    def width(self) -> int:
        """T of the longest set."""
        return self.ids.size(2)

    @property
    def completions(self) -> int:
        """C: completions of a unit."""
        return self.ids.size(1)

    def join(self, units: int) -> None:
        """Joins every `units` neighbouring units into one. They must have the same prompt."""
        self.ids, self.mask = (x.reshape(-1, units * x.size(1), self.width) for x in (self.ids, self.mask))
        self.needed = self.needed.reshape(-1, units * self.needed.size(1))
        self.by_sampler = None if self.by_sampler is None else self.by_sampler.reshape(self.needed.shape)

    def keep_needed(self, slots: int) -> None:
        """Keeps `slots` completions of each unit: those that are needed first. The mask of the others is 0."""
        self._completions = self.completions
        self._places = self.needed.long().argsort(dim=1, descending=True, stable=True)[:, :slots]
        index = self._places.unsqueeze(2).expand(-1, -1, self.width)
        self.needed = self.needed.gather(1, self._places)
        self.by_sampler = None if self.by_sampler is None else self.by_sampler.gather(1, self._places)
        self.ids, self.mask = self.ids.gather(1, index), self.mask.gather(1, index) * self.needed.unsqueeze(2)

    def rows(self, layout: Layout, prompts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Tokens of rows and their mask, `(R, S)` each, with `prompts` (tokens and mask, `(U, L)` each) in front; then `needed` and `by_sampler`, `(R, k)`."""
        tokens = [layout.rows(x, y) for x, y in zip(prompts, (self.ids, self.mask), strict=True)]
        return tokens + [x.reshape(-1, layout.count) for x in (self.needed, self.by_sampler) if x is not None]

    def split(self, scores: torch.Tensor) -> list[torch.Tensor]:
        """Scores of the completions in rows, `(R·k, T)`, as `(U, n, T)` for each set; 0 for completions that were not kept."""
        if self._places is not None:
            kept = scores.view(*self._places.shape, self.width)
            index = self._places.unsqueeze(2).expand(-1, -1, self.width)
            scores = kept.new_zeros(len(kept), self._completions, self.width).scatter(1, index, kept)
        counts = [n for n, _ in self.shapes]
        parts = scores.view(-1, sum(counts), self.width).split(counts, dim=1)
        return [part[..., :length] for part, (_, length) in zip(parts, self.shapes, strict=True)]


class Scoring:
    """
    Scores completions with models, laid out in rows as [`~trl_repulse.generation._probe.Guard`] allows.

    Methods are collective calls where processes share weights.

    Args:
        accelerator ([`~accelerate.Accelerator`]): The trainer's accelerator.
        args ([`~transformers.TrainingArguments`]): The trainer's configuration.
        pad_token_id (`int`): Padding of completions.
        hidden_size (`int`): Width of the policy, by which rows are compared.
        aux_loss (`bool`): Whether passes with gradient have the load-balancing loss of a mixture-of-experts model.
        passes_together (`bool`): Whether processes share weights, so that all make the same passes.
    """

    guard = Guard()  # what keeps passes right for all models, found at set-up

    def __init__(
        self,
        accelerator: Accelerator,
        args: Any,
        pad_token_id: int,
        hidden_size: int,
        aux_loss: bool,
        passes_together: bool,
    ):
        self._accelerator, self._args, self.passes_together = accelerator, args, passes_together
        self._pad_token_id, self._hidden_size, self._aux_loss = pad_token_id, hidden_size, aux_loss

    def score(
        self, model: nn.Module, units: Units, shape: Shape, wanted: Wanted | None = None, gradient: bool = True
    ) -> SetScores:
        """
        Log-probabilities of sets of completions to the same prompts, in one forward pass.

        Args:
            model (`torch.nn.Module`): Model to score with.
            units ([`Units`]): Prompts and samples.
            shape ([`Shape`]): How the batch is cut.
            wanted ([`Wanted`], *optional*): What to score, by default the policy's samples.
            gradient (`bool`): Whether the pass carries gradient. Without, there are several, as for micro-batches of their own.
        """
        wanted = wanted or Wanted()
        sets = {name: units.sets()[name] for name in wanted.sets}
        by_sampler = None if wanted.sampler is None else wanted.by_sampler
        joined = CompletionSets.of(sets, self._pad_token_id, wanted.needed, by_sampler)
        prompts = self._prompts_of(units, sets)
        length, shared = prompts[0].size(1), len(prompts[0]) == len(joined.ids)  # or a prompt for each completion
        # Completions of one pass: those of a micro-batch, with the extra ones
        size = shape.micro_batch * joined.completions // min(n for n, _ in joined.shapes)
        if not shape.whole:
            of_units = prompts if shared else None
            joint = self.neighbours(of_units, joined.width, joined.completions, None if gradient else size)
            if joint > 1:
                prompts = [x[::joint] for x in prompts]
                joined.join(joint)
        layout = Layout(length, joined.width, 1)
        if shared and not wanted.needed:
            layout = self.layout(length, joined.width, joined.completions)
        elif shared:
            layout, slots = self._layout_for(length, joined.width, joined.needed)
            joined.keep_needed(slots)
        rows = joined.rows(layout, prompts)
        reader = self._reader(model, layout, bool(wanted.needed), wanted.sampler, gradient)
        if gradient:
            log_p, entropy, aux_loss, other_log_p = self.by_length(reader, *rows)
        else:
            kwargs = self._args.gradient_checkpointing_kwargs
            with torch.no_grad(), _trl.disable_gradient_checkpointing(model, kwargs):  # type: ignore[arg-type]
                log_p, _, _, other_log_p = self.in_passes(reader, layout, len(joined.ids), size, *rows)
            entropy = aux_loss = None

        def by_name(scores: torch.Tensor | None) -> dict[str, torch.Tensor]:
            return {} if scores is None else dict(zip(sets, joined.split(scores), strict=True))

        entropy = None if entropy is None else joined.split(entropy)[0]
        return SetScores(by_name(log_p), entropy, aux_loss, by_name(other_log_p))

    def _reader(
        self, model: nn.Module, layout: Layout, skip_unneeded: bool, sampler: Sampler | None, gradient: bool
    ) -> Callable[..., Parts]:
        """A function that scores what [`CompletionSets.rows`] returns, with one pass of the model. With `skip_unneeded`, it skips
        completions that are not needed if each has a row of its own."""
        aux_loss = gradient and self._aux_loss

        def log_probs(ids: torch.Tensor, mask: torch.Tensor, *by_sampler: torch.Tensor) -> Scores:
            """Scores of rows (R, S); `by_sampler` marks the completions that the second sampler's scores are needed of."""
            cut = replace(layout, prompt=ids.size(1) - layout.count * layout.width)
            given = (model, self._accelerator, ids, mask, cut)
            if sampler is None:
                return token_log_probs(*given, aux_loss)
            if self.guard.fused_head:
                return token_log_probs(*given, aux_loss, sampler, by_sampler[0].flatten())
            return token_log_probs(*given, aux_loss)._replace(by_sampler=sampler_log_probs(*given, sampler))

        def of_rows(ids: torch.Tensor, mask: torch.Tensor, needed: torch.Tensor, *by_sampler: torch.Tensor) -> tuple:
            if not skip_unneeded or layout.count > 1:
                return log_probs(ids, mask, *by_sampler)
            return score_needed(log_probs, needed.squeeze(1), ids, mask, *by_sampler)

        return of_rows

    def _prompts_of(self, units: Units, sets: dict[str, CompletionSet]) -> list[torch.Tensor]:
        """Tokens and mask of the prompts of sets: `(U, L)`, or where a set has its own, one for each completion, `(U·Σn, L)`."""
        shared = [units.prompt_ids, units.prompt_mask]
        if all(samples.prompt_ids is None for samples in sets.values()):
            return shared
        joined = []
        for common, name, value in zip(shared, ("prompt_ids", "prompt_mask"), (self._pad_token_id, 0), strict=True):
            owned = [(getattr(samples, name), samples.ids.size(1)) for samples in sets.values()]
            parts = [common.unsqueeze(1).expand(-1, n, -1) if own is None else own for own, n in owned]
            length = max(part.size(2) for part in parts)
            parts = [F.pad(part, (length - part.size(2), 0), value=value) for part in parts]
            joined.append(torch.cat(parts, dim=1).flatten(0, 1))
        return joined

    def layout(self, prompt: int, width: int, completions: int) -> Layout:
        """How `completions` of `width` tokens to each prompt of `prompt` tokens are laid out in rows."""
        if not self.guard.share_prompts:
            return Layout(prompt, width, 1)
        return Layout.cheapest(prompt, width, completions, self._hidden_size, self.guard.longest_row)

    def _layout_for(self, prompt: int, width: int, needed: torch.Tensor) -> tuple[Layout, int]:
        """Returns the cheapest layout for the completions with `needed` (U, n), and the number of slots of a unit: as many as the most that
        a unit needs, or a few more if these fill rows. All n if prompts are not shared."""
        most = needed.size(1)
        if not self.guard.share_prompts:
            return Layout(prompt, width, 1), most
        largest, average = torch.stack([needed.sum(dim=1).max(), needed.sum(dim=1).float().mean()]).tolist()
        size, longest = self._hidden_size, self.guard.longest_row

        def cost(candidate: tuple[Layout, int]) -> float:
            layout, slots = candidate
            return layout.cost(slots if layout.count > 1 else average, size)  # separate rows can be left out

        slots = range(max(1, int(largest)), most + 1)
        return min(((Layout.cheapest(prompt, width, k, size, longest), k) for k in slots), key=cost)

    def neighbours(
        self, prompts: Sequence[torch.Tensor] | None, width: int, completions: int, in_passes: int | None
    ) -> int:
        """
        How many neighbouring units are read as one, since they have the same prompt: a number that divides each run of such units.

        A collective call where processes share weights, unless all is read in one pass.

        Args:
            prompts (`Sequence[torch.Tensor]`, *optional*): Tokens of the units' prompts and their mask, `(U, L)` each; `None` where
                completions of a unit have prompts of their own.
            width (`int`): T.
            completions (`int`): Of a unit.
            in_passes (`int`, *optional*): The micro-batch that limits passes, as in [`in_passes`]; `None` for a single pass.
        """
        if not self.guard.share_prompts:
            return 1
        run = most = 1
        if prompts is not None:
            new = torch.stack([(x[1:] != x[:-1]).any(dim=1) for x in prompts]).any(dim=0)
            starts = [0, *(new.nonzero()[:, 0] + 1).tolist(), len(new) + 1]
            run = most = math.gcd(*(end - start for start, end in itertools.pairwise(starts)))
            if in_passes is not None:
                # Completions whose tokens fit into a pass beside one prompt, at most twice a micro-batch
                length = prompts[0].size(1)
                room = (in_passes * (length + width) - length) // max(width, 1)
                most = max(1, min(room, 2 * in_passes) // completions)
        if in_passes is not None and self.passes_together:
            pairs = self._accelerator.gather(torch.tensor([[run, most]], device=self._accelerator.device)).tolist()
            run, most = math.gcd(*(x for x, _ in pairs)), min(x for _, x in pairs)
        return max(count for count in range(1, min(run, most) + 1) if run % count == 0)

    def in_passes(
        self, score: Callable[..., Parts], layout: Layout, units: int, size: int, *rows: torch.Tensor
    ) -> Parts:
        """
        Calls `score` on rows (R, ...) in several passes without gradient, and joins the results.

        Where prompts are shared, a pass has at most as many tokens as a micro-batch of `size` completions in separate rows, and at most
        twice as many completions, whose logits take memory; but at least one row. A collective call where processes share weights: all
        make the same number of passes, at most `units`.
        """
        at_once = size
        if self.guard.share_prompts:
            tokens, row = size * (layout.prompt + layout.width), layout.prompt + layout.count * layout.width
            at_once = max(1, min(tokens // row, 2 * size // layout.count))
        passes = math.ceil(len(rows[0]) / at_once)
        if self.guard.share_prompts and self.passes_together:
            of_process = torch.tensor([passes], device=self._accelerator.device)
            passes = min(int(self._accelerator.gather(of_process).max()), units)
        chunks = zip(*(x.tensor_split(passes) for x in rows), strict=True)
        parts = zip(*(self.by_length(score, *chunk) for chunk in chunks), strict=True)
        return tuple(
            None if values[0] is None else torch.cat(values) if values[0].dim() else torch.stack(values).mean()
            for values in parts
        )

    def in_rows(
        self,
        score: Callable[[torch.Tensor, torch.Tensor, Layout], Parts],
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        width: int,
        size: int | None = None,
    ) -> Parts:
        """Calls `score` on completions (B, T) at the end of rows (B, L + T), laid out so that neighbours with the same prompt share a row.
        In one pass, or in several as for micro-batches of `size`."""
        length = input_ids.size(1) - width
        prompts = [x[:, :length] for x in (input_ids, attention_mask)]
        n = self.neighbours(prompts, width, 1, size)
        layout = self.layout(length, width, n)
        completions = [x[:, length:].reshape(-1, n, width) for x in (input_ids, attention_mask)]
        rows = [layout.rows(x[::n], y) for x, y in zip(prompts, completions, strict=True)]

        def of_rows(ids: torch.Tensor, mask: torch.Tensor) -> Parts:
            """`score` with the layout of these rows, whose prompts may have lost padding."""
            return score(ids, mask, replace(layout, prompt=ids.size(1) - layout.count * width))

        if size is None:
            return self.by_length(of_rows, *rows)
        return self.in_passes(of_rows, layout, len(input_ids) // n, size, *rows)

    def by_length(
        self, score: Callable[..., Parts], input_ids: torch.Tensor, attention_mask: torch.Tensor, *more: torch.Tensor
    ) -> Parts:
        """Calls `score` on rows (B, L + T), their mask, and further tensors of rows: in one pass, or in one for each prompt length if a
        model reads padding. Raises a `ValueError` if there are several lengths then, and several processes."""
        if not self.guard.score_by_length:
            return score(input_ids, attention_mask, *more)
        if self._accelerator.num_processes > 1 and len(attention_mask.argmax(dim=1).unique()) > 1:
            raise ValueError(
                "Prompts of different lengths are scored in passes of their own, since the model reads padding, and several "
                "processes cannot make different numbers of passes; use prompts of one length, or one process."
            )
        return without_padding(score, input_ids, attention_mask, *more)


def sorted_by_prompt(batches: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sorts the rows of micro-batches by prompt, and cuts them into the same number of micro-batches. Values without rows stay."""
    in_rows = [name for name, x in batches[0].items() if x is not None and x.dim() > 0]
    rows = {name: torch.cat([batch[name] for batch in batches]) for name in in_rows}
    prompts = torch.stack([rows["prompt_ids"], rows["prompt_mask"]], dim=2)
    order = prompts.unique(dim=0, return_inverse=True)[1].argsort(stable=True)
    return _trl.split_tensor_dict(batches[0] | {name: x[order] for name, x in rows.items()}, len(batches))
