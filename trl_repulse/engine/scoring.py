"""Scores of completions: log-probabilities by models, at the positions they were generated at, and rewards by a user's functions.

Axis letters: U units of a prompt, n completions of a set in a unit, C = Σn of all sets, T completion tokens, R rows of a pass with
k completions each. It stands on TRL's fused head; other dependencies on TRL are in `engine/trl_bridge.py`.
"""

import contextlib
import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from transformers import AutoModelForSequenceClassification, PreTrainedConfig, PreTrainedModel, TrainingArguments
from transformers.modeling_outputs import MoeModelOutputWithPast

from .._errors import RAISED_BY
from ..data._checks import ALWAYS_PASSED
from ..generation._batches import without_padding
from ..generation._probe import Guard
from ..generation._samplers import Sampler
from ..models._adapters import takes
from ..models._deepspeed import zero_stage
from ..models._layout import Layout
from ..models._loading import load_model, load_tokenizer
from ..models._model_checks import check_reward_model, check_reward_tokens, check_separate
from ..rewards._texts import read_rewards
from ..rewards.loading import check_classifier
from .trl_bridge import add_fused_lm_head, is_async_callable, scored_in_small_tiles, split_tensor_dict


class Scores(NamedTuple):
    """Of R rows with k completions of T tokens: log-probabilities and entropies (nats), and a router's loss."""

    log_p: torch.Tensor  # (R·k, T)
    entropy: torch.Tensor | None = None  # (R·k, T)
    aux_loss: torch.Tensor | None = None
    by_sampler: torch.Tensor | None = None  # (R·k, T), log-probabilities by another sampler


class BySampler:
    """
    Asks a scoring pass for log-probabilities of the `wanted` completions (R·k,) by another `sampler`, and holds them afterwards. `labels`
    (R·k, T + 1) are their tokens, −100 where they do not count. DDP, FSDP and DeepSpeed pass a plain class on unchanged; FSDP copies a
    dataclass.
    """

    def __init__(self, sampler: Sampler, labels: torch.Tensor, wanted: torch.Tensor):
        self.sampler, self.labels, self.wanted = sampler, labels, wanted.clone()
        # All processes run the head, whose weights they may share: never of nothing
        self.wanted[0] = True
        self.log_p = torch.zeros(labels[:, 1:].shape, device=labels.device)  # (R·k, T)

    def take(self, head: "_FusedHead", hidden_states: torch.Tensor) -> None:
        """Fills in what the sampler's head makes of hidden states (R·k, T + 1, d)."""
        states = hidden_states[self.wanted.to(hidden_states.device)]
        scored = head.forward(states, fused_lm_head=True, labels=self.labels[self.wanted])
        self.log_p[self.wanted] = scored.log_probs.to(self.log_p)


class _FusedHead:
    """
    TRL's fused head as another sampler has it, for hidden states that are already computed. TRL (1.16) adds a head with one fixed
    temperature; this object takes the model's place for a second. Way out: `temperature` and `bias` on the fused head's forward.
    """

    def __init__(self, model: PreTrainedModel, sampler: Sampler, cast_lm_head_to_fp32: bool):
        self.config: PreTrainedConfig = model.config
        self._embeddings, self._bias = model.get_output_embeddings, sampler.head_bias
        add_fused_lm_head(self, sampler.temperature, cast_lm_head_to_fp32)

    def get_output_embeddings(self) -> Any:
        """The model's head, or its weights with the sampler's bias; [`takes_bias`] says where that is the same as biased logits."""
        head = self._embeddings()
        if self._bias is None:
            return head
        return SimpleNamespace(weight=head.weight, bias=self._bias.to(head.weight.device))

    def forward(self, hidden_states: torch.Tensor, **options: Any) -> Any:
        """Replaced by TRL."""

    def base_model(self, hidden_states: torch.Tensor, **options: Any) -> MoeModelOutputWithPast:
        """What the head reads, in the place of a backbone."""
        return MoeModelOutputWithPast(last_hidden_state=hidden_states)


def takes_bias(model: PreTrainedModel) -> bool:
    """Whether a bias of the head is one of the logits: where they are neither capped nor scaled, and the head has none of its own."""
    config, head = model.config.get_text_config(), model.get_output_embeddings()
    names = ("final_logit_softcapping", "logit_scale", "output_multiplier", "lm_head_multiplier", "logits_scaling")
    return getattr(head, "bias", None) is None and all(getattr(config, name, None) in (None, 1) for name in names)


def prepare_scoring(model: PreTrainedModel, cast_lm_head_to_fp32: bool = False) -> None:
    """
    Readies a model with a head, not wrapped by PEFT, for passes over rows of a [`Layout`], by hooks on it and on its backbone.

    Three things are put right on scoring passes, which are told by a `layout`, and the first on all of the fused head
    (`fused_lm_head=True`), which was added with the same `cast_lm_head_to_fp32`:

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
        layout = now["layout"]
        if layout is None or layout.count == 1:
            return args, kwargs
        return args, kwargs | {"attention_mask": layout.masks(module.config, module.dtype, kwargs["attention_mask"])}

    def after_backbone(module: nn.Module, args: tuple, output: Any) -> Any:
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
    other = None if sampler is None else extra["by_sampler"].log_p
    return Scores(outputs.log_probs, outputs.entropy, outputs.aux_loss, other)


def needed_rows(
    score: Callable[..., tuple[torch.Tensor | None, ...]], needed: torch.Tensor, *rows: torch.Tensor
) -> tuple[torch.Tensor | None, ...]:
    """
    What `score` makes of the rows that are `needed`, a mask (R,), in tensors of R rows, 0 in the place of others. The first row is always
    read: all processes make the pass, whose weights they may share.
    """
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
    """As [`token_log_probs`], by another sampler, (R·k, T), from the logits of a model that TRL's fused head does not fit."""
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
class CompletionSets:
    """Sets of completions to the same prompts side by side, as a pass reads them, and the way back to each set for its scores."""

    ids: torch.Tensor  # (U, C, T)
    mask: torch.Tensor  # (U, C, T): which tokens the model reads
    read: torch.Tensor  # (U, C): which completions are needed
    asked: torch.Tensor | None  # (U, C): which also need log-probabilities by another sampler
    shapes: list[tuple[int, int]]  # n and T of each set
    _places: torch.Tensor | None = None  # (U, slots): where those that are kept were, of `_completions` in a unit
    _completions: int = 0

    @classmethod
    def of(
        cls,
        batch: dict[str, torch.Tensor],
        names: Sequence[str],
        pad_token_id: int,
        needed: Masks,
        asked: Masks | None,
    ) -> "CompletionSets":
        """The sets `names` of a batch. `needed` and `asked` have a mask for each set of which not all completions count."""
        shapes = [(batch[f"{name}_ids"].size(1), batch[f"{name}_ids"].size(2)) for name in names]
        width = max(length for _, length in shapes)

        def joined(parts: list[torch.Tensor], value: int) -> torch.Tensor:
            return torch.cat([F.pad(part, (0, width - part.size(2)), value=value) for part in parts], dim=1)

        ids = joined([batch[f"{name}_ids"] for name in names], pad_token_id)
        mask = joined([batch.get(f"{name}_attended", batch[f"{name}_mask"]) for name in names], 0)

        def of_all(masks: Masks) -> torch.Tensor:
            every = [ids.new_ones((len(ids), n), dtype=torch.bool) for n, _ in shapes]
            return torch.cat([masks.get(name, part) for name, part in zip(names, every, strict=True)], dim=1)

        return cls(ids, mask, of_all(needed), None if asked is None else of_all(asked), shapes)

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
        self.read = self.read.reshape(-1, units * self.read.size(1))
        self.asked = None if self.asked is None else self.asked.reshape(self.read.shape)

    def keep_needed(self, slots: int) -> None:
        """Keeps `slots` completions of each unit: those that are needed first. The mask of the others is 0."""
        self._completions = self.completions
        self._places = self.read.long().argsort(dim=1, descending=True, stable=True)[:, :slots]
        index = self._places.unsqueeze(2).expand(-1, -1, self.width)
        self.read = self.read.gather(1, self._places)
        self.asked = None if self.asked is None else self.asked.gather(1, self._places)
        self.ids, self.mask = self.ids.gather(1, index), self.mask.gather(1, index) * self.read.unsqueeze(2)

    def rows(self, layout: Layout, prompts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Tokens of rows and their mask, `(R, S)` each, with `prompts` (tokens and mask, `(U, L)` each) in front; then `read` and `asked`, `(R, k)`."""
        tokens = [layout.rows(x, y) for x, y in zip(prompts, (self.ids, self.mask), strict=True)]
        return tokens + [x.reshape(-1, layout.count) for x in (self.read, self.asked) if x is not None]

    def split(self, scores: torch.Tensor) -> list[torch.Tensor]:
        """Scores of the completions in rows, `(R·k, T)`, as `(U, n, T)` for each set; 0 for completions that were not kept."""
        if self._places is not None:
            kept = scores.view(*self._places.shape, self.width)
            index = self._places.unsqueeze(2).expand(-1, -1, self.width)
            scores = kept.new_zeros(len(kept), self._completions, self.width).scatter(1, index, kept)
        counts = [n for n, _ in self.shapes]
        parts = scores.view(-1, sum(counts), self.width).split(counts, dim=1)
        return [part[..., :length] for part, (_, length) in zip(parts, self.shapes, strict=True)]


class RowLayouts:
    """Mixin before [`~trl.GRPOTrainer`]: completions laid out in rows, as [`~trl_repulse.generation._probe.Guard`] allows."""

    _guard = Guard()  # what keeps sampling and scoring right for all models

    def _whole(self, mode: str) -> bool:
        """Whether a unit holds all of the policy's samples of its prompt."""
        return False

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        """As TRL's; the rows of each update are sorted by prompt, or those of each micro-batch where that is what a loss is made of."""
        before, args = self._buffered_inputs, self.args
        inputs = super()._prepare_inputs(generation_batch)
        if self._buffered_inputs is before or not self._guard.share_prompts or self._whole("train"):
            return inputs
        # Of these losses, each micro-batch has a mean or a quantile of its own
        alone = args.loss_type == "bnpo" or args.top_entropy_quantile < 1
        alone = alone or self._entropy_bonus_enabled or self.aux_loss_enabled
        size = 1 if alone else math.gcd(args.steps_per_generation, args.gradient_accumulation_steps)
        groups = [self._buffered_inputs[i : i + size] for i in range(0, args.steps_per_generation, size)]
        self._buffered_inputs = [batch for group in groups for batch in by_prompt(group)]
        return self._buffered_inputs[self._step % args.steps_per_generation]

    def _micro_batch_size(self) -> int:
        return self.args.per_device_train_batch_size if self.model.training else self.args.per_device_eval_batch_size

    def _layout(self, prompt: int, width: int, completions: int) -> Layout:
        """How `completions` of `width` tokens to each prompt of `prompt` tokens are laid out in rows."""
        if not self._guard.share_prompts:
            return Layout(prompt, width, 1)
        return Layout.cheapest(prompt, width, completions, self._hidden_size, self._guard.longest_row)

    @property
    def _hidden_size(self) -> int:
        return self.model.config.get_text_config().hidden_size

    def _layout_for(self, prompt: int, width: int, needed: torch.Tensor) -> tuple[Layout, int]:
        """
        The cheapest layout for the completions that are `needed`, a mask (U, n), and for how many completions of a unit it has room:
        as many as the most that a unit needs, or some more if these fill rows. All n where prompts are not shared.
        """
        most = needed.size(1)
        if not self._guard.share_prompts:
            return Layout(prompt, width, 1), most
        largest, average = torch.stack([needed.sum(dim=1).max(), needed.sum(dim=1).float().mean()]).tolist()
        size, longest = self._hidden_size, self._guard.longest_row

        def cost(found: tuple[Layout, int]) -> float:
            layout, slots = found
            return layout.cost(slots if layout.count > 1 else average, size)  # separate rows can be left out

        slots = range(max(1, int(largest)), most + 1)
        return min(((Layout.cheapest(prompt, width, k, size, longest), k) for k in slots), key=cost)

    def _neighbours(
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
            in_passes (`int`, *optional*): The micro-batch that limits passes, as in [`_in_passes`]; `None` for a single pass.
        """
        if not self._guard.share_prompts:
            return 1
        run = most = 1
        if prompts is not None:
            new = torch.stack([(x[1:] != x[:-1]).any(dim=1) for x in prompts]).any(dim=0)
            starts = [0, *(new.nonzero()[:, 0] + 1).tolist(), len(new) + 1]
            run = most = math.gcd(*(end - start for start, end in itertools.pairwise(starts)))
            if in_passes is not None:
                length = prompts[0].size(1)
                room = (in_passes * (length + width) - length) // max(width, 1)
                most = max(1, min(room, 2 * in_passes) // completions)
        if in_passes is not None and self._passes_together:
            found = self.accelerator.gather(torch.tensor([[run, most]], device=self.accelerator.device)).tolist()
            run, most = math.gcd(*(x for x, _ in found)), min(x for _, x in found)
        return max(count for count in range(1, min(run, most) + 1) if run % count == 0)

    def _in_passes(
        self,
        score: Callable[..., tuple[torch.Tensor | None, ...]],
        layout: Layout,
        units: int,
        size: int,
        *rows: torch.Tensor,
    ) -> tuple[torch.Tensor | None, ...]:
        """
        What `score` makes of rows (R, ...) without gradient, in several passes. Where prompts are shared, each takes no more tokens than a
        micro-batch of `size` has in rows of single completions, and no more than twice its completions, which go onto the vocabulary; or
        one row. A collective call where processes share weights and so make the same number of passes: no more than they have `units`.
        """
        at_once = size
        if self._guard.share_prompts:
            tokens, row = size * (layout.prompt + layout.width), layout.prompt + layout.count * layout.width
            at_once = max(1, min(tokens // row, 2 * size // layout.count))
        passes = math.ceil(len(rows[0]) / at_once)
        if self._guard.share_prompts and self._passes_together:
            passes = torch.tensor([passes], device=self.accelerator.device)
            passes = min(int(self.accelerator.gather(passes).max()), units)
        chunks = zip(*(x.tensor_split(passes) for x in rows), strict=True)
        parts = zip(*(self._by_length(score, *chunk) for chunk in chunks), strict=True)
        return tuple(
            None if values[0] is None else torch.cat(values) if values[0].dim() else torch.stack(values).mean()
            for values in parts
        )

    @property
    def _passes_together(self) -> bool:
        """Whether processes share weights, so that all make the same passes."""
        return self.is_fsdp_enabled or zero_stage(self.accelerator) == 3

    def _in_rows(
        self,
        score: Callable[[torch.Tensor, torch.Tensor, Layout], tuple[torch.Tensor | None, ...]],
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        width: int,
        size: int | None = None,
    ) -> tuple[torch.Tensor | None, ...]:
        """
        What `score` makes of completions (B, T) at the end of rows (B, L + T), of which neighbours may have the same prompt: in one pass,
        or in several as for micro-batches of `size`.
        """
        length = input_ids.size(1) - width
        prompts = [x[:, :length] for x in (input_ids, attention_mask)]
        n = self._neighbours(prompts, width, 1, size)
        layout = self._layout(length, width, n)
        completions = [x[:, length:].reshape(-1, n, width) for x in (input_ids, attention_mask)]
        rows = [layout.rows(x[::n], y) for x, y in zip(prompts, completions, strict=True)]

        def of_rows(ids: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
            return score(ids, mask, replace(layout, prompt=ids.size(1) - layout.count * width))

        if size is None:
            return self._by_length(of_rows, *rows)
        return self._in_passes(of_rows, layout, len(input_ids) // n, size, *rows)

    def _by_length(
        self,
        score: Callable[..., tuple[torch.Tensor | None, ...]],
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        *more: torch.Tensor,
    ) -> tuple[torch.Tensor | None, ...]:
        """
        What `score` makes of rows (B, L + T), their mask and whatever else there is of each row: all at once, or by prompt length
        if a model reads padding.
        """
        if not self._guard.score_by_length:
            return score(input_ids, attention_mask, *more)
        if self.accelerator.num_processes > 1 and len(attention_mask.argmax(dim=1).unique()) > 1:
            raise ValueError(
                "Prompts of different lengths are scored in passes of their own, since the model reads padding, and several "
                "processes cannot make different numbers of passes; use prompts of one length, or one process."
            )
        return without_padding(score, input_ids, attention_mask, *more)


def by_prompt(batches: list[dict[str, torch.Tensor | None]]) -> list[dict[str, torch.Tensor | None]]:
    """The rows of micro-batches, those of a prompt next to each other, in as many micro-batches; what has no rows stays."""
    in_rows = [name for name, x in batches[0].items() if x is not None and x.dim() > 0]
    rows = {name: torch.cat([batch[name] for batch in batches]) for name in in_rows}
    prompts = torch.stack([rows["prompt_ids"], rows["prompt_mask"]], dim=2)
    order = prompts.unique(dim=0, return_inverse=True)[1].argsort(stable=True)
    return split_tensor_dict(batches[0] | {name: x[order] for name, x in rows.items()}, len(batches))


RewardFunc = str | PreTrainedModel | Callable[..., list[float | None]]


def load_reward_models(reward_funcs: Any, tokenizers: Any, args: TrainingArguments) -> tuple[list[Any], list[Any]]:
    """
    `reward_funcs` and `reward_processing_classes` as lists, with models and their tokenizers in the place of paths, loaded as TRL (1.16)
    does. TRL would train for the random numbers of a head that a checkpoint lacks.

    Raises:
        `ValueError`: If a reward model cannot be loaded, lacks weights, or is none of one label, or a function does not take what
            it is called with.
    """
    functions = list(reward_funcs) if isinstance(reward_funcs, list) else [reward_funcs]
    own = list(tokenizers) if isinstance(tokenizers, list) else [tokenizers]
    if tokenizers is None:
        own = [None] * len(functions)
    options = {"trust_remote_code": args.trust_remote_code, **(args.model_init_kwargs or {})}
    if args.distributed_state.distributed_type in ("MULTI_GPU", "DEEPSPEED"):
        options["device_map"] = None
    for function in functions:
        if isinstance(function, str):
            check_classifier(function, "reward_funcs", options.get("revision"))
        elif not isinstance(function, nn.Module):
            _check_parameters(function)
    for i, function in enumerate(functions):
        if isinstance(function, str):
            functions[i] = load_model(
                AutoModelForSequenceClassification, function, "reward model", num_labels=1, **options
            )
            if i < len(own) and own[i] is None:
                named = {name: options[name] for name in ("revision", "trust_remote_code") if name in options}
                own[i] = load_tokenizer(function, "reward model", **named)
        if isinstance(function, nn.Module):
            check_reward_model(function, f"`reward_funcs[{i}]`")
    check_tokenizers(functions, own)
    return functions, own


def check_tokenizers(functions: list[Any], tokenizers: list[Any]) -> None:
    """Refuses reward models with fewer embeddings than their tokenizers have tokens; one without a tokenizer yet passes."""
    for i, (function, tokenizer) in enumerate(zip(functions, tokenizers, strict=False)):
        if isinstance(function, nn.Module):
            check_reward_tokens(function, tokenizer, f"`reward_funcs[{i}]`")


def _check_parameters(function: Callable[..., Any]) -> None:
    """Refuses a function that TRL (1.16) cannot call: it passes these names, and each column of the data set."""
    try:
        # Of what is called: a decorator may take what the function that it names does not
        parameters = inspect.signature(function, follow_wrapped=False).parameters
    except (TypeError, ValueError):  # one of C, which cannot be asked
        return
    if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        return
    missing = [name for name in ALWAYS_PASSED if name not in parameters]
    if missing:
        name = getattr(function, "__name__", type(function).__name__)
        raise ValueError(
            f"The reward function '{name}' does not take `{'`, `'.join(missing)}`, which trainers pass by name; add `**kwargs` to its "
            "parameters."
        )


def check_separate_rewards(reward_funcs: Any, model: Any, label: str, trained: bool) -> None:
    """
    Refuses reward models that share layers or trained weights with a model, called by its `label`; a path or `None` shares nothing. It
    may be `trained` itself, or by an adapter yet to be made.
    """
    if not isinstance(model, nn.Module):
        return
    for i, reward in enumerate(reward_funcs if isinstance(reward_funcs, list) else [reward_funcs]):
        if isinstance(reward, nn.Module):
            remedy = "load the reward model by itself."
            check_separate(reward, f"`reward_funcs[{i}]`", model, label, (False, trained), remedy)


def all_with_checks(functions: list[Any], names: list[str]) -> list[Any]:
    """Reward functions as [`with_checks`] makes them, by their names in the metrics; models are left as they are."""
    named = zip(functions, names, strict=True)
    return [each if isinstance(each, nn.Module) else with_checks(each, name) for each, name in named]


def with_checks(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """
    A reward function whose errors name it, as it is called in the metrics; asynchronous if it was.

    TRL (1.16) takes NaN for `None`: a division by zero would silently leave samples out, or count as 0 beside other functions. This one
    returns a list of numbers and `None`, and raises `ValueError` for anything else; an error of the function itself gets a note with the
    name. Each call gets lists of its own.
    """
    where = f"The reward function '{name}'"
    if is_async_callable(function):

        async def checked(completions: list[Any], **columns: Any) -> list[float | None]:
            with _naming(name):
                result = await function(completions=_own(completions), **_own(columns))
            return read_rewards(result, where, len(completions))

    else:

        def checked(completions: list[Any], **columns: Any) -> list[float | None]:
            with _naming(name):
                result = function(completions=_own(completions), **_own(columns))
            return read_rewards(result, where, len(completions))

    checked.__name__ = name
    checked.unchecked = function
    return checked


def _own(value: Any) -> Any:
    """The same value in lists and dictionaries of its own."""
    if isinstance(value, dict):
        return {key: _own(each) for key, each in value.items()}
    return [_own(each) for each in value] if isinstance(value, list) else value


@contextlib.contextmanager
def _naming(name: str) -> Iterator[None]:
    """Adds the function's name to an error. The function is not called again to find the completion: it may count, or cost, its calls."""
    try:
        yield
    except Exception as error:
        error.add_note(f"{RAISED_BY} '{name}'.")
        raise
