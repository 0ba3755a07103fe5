"""Log-probabilities of completions in one pass, at the positions they were generated at.

It stands on TRL's fused head; other dependencies on TRL are in `engine/trl_bridge.py`.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast

from ..generation._samplers import Sampler
from ..models._adapters import takes
from ..models._layout import Layout
from .trl_bridge import add_fused_lm_head


class Scores(NamedTuple):
    """Of R rows with k completions of T tokens: log-probabilities and entropies (nats), and a router's loss."""

    log_p: torch.Tensor  # (R·k, T)
    entropy: torch.Tensor | None = None  # (R·k, T)
    aux_loss: torch.Tensor | None = None
    by_sampler: torch.Tensor | None = None  # (R·k, T), log-probabilities by another sampler


class BySampler:
    """
    Asks a scoring pass for log-probabilities of the `wanted` completions (R·k,) by another `sampler` as well, and holds them
    afterwards. `labels` (R·k, T + 1) are their tokens, −100 where they do not count.

    DDP, FSDP and DeepSpeed pass an object of a plain class on to the model unchanged; FSDP copies a dataclass.
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
    TRL's fused head as another sampler has it, for hidden states that are already computed.

    TRL (1.16) adds a head to a model with one fixed temperature. This object takes the model's place, so that a second head can be
    added. Way out: arguments `temperature` and `bias` on the fused head's forward.
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

    - Positions count from the first token that is not padding, as in generation. TRL (1.16) scores left-padded rows
      without `position_ids`; models with absolute positions (GPT-2) then give log-probabilities that depend on the
      padding and are not those the completions were drawn with, which importance weights do not forgive.
    - Only the hidden states that predict completions go on to the head, as if each completion had a row of T + 1 positions.
      Without Triton, TRL's head projects every position of the prompt onto the vocabulary.
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
    Log-probabilities of the completions of rows, in one pass, and for a mixture-of-experts model its load-balancing loss if asked for.

    Args:
        model (`torch.nn.Module`):
            Model with TRL's fused head that [`prepare_scoring`] readied, wrapped or not.
        accelerator ([`~accelerate.Accelerator`]):
            Gives the autocast context.
        input_ids, attention_mask (`torch.Tensor` of shape `(R, L + k·T)`):
            Left-padded prompts followed by right-padded completions, as `layout` says.
        sampler ([`Sampler`], *optional*):
            Another sampler by which to have log-probabilities as well, without gradient.
        wanted (`torch.Tensor` of shape `(R·k,)`, *optional*):
            Of which completions to have them, by default of all; of others they are 0, or right.

    Returns:
        [`Scores`]: 0 where masked; entropies are `None` if the head does not compute them.
    """
    ids, mask = (x[:, layout.prompt :].reshape(-1, layout.width) for x in (input_ids, attention_mask))
    labels = nn.functional.pad(ids.masked_fill(mask == 0, -100), (1, 0), value=-100)  # the prompt's last token
    extra: dict[str, Any] = {"output_router_logits": True} if compute_aux_loss else {}
    if sampler is not None:
        wanted = torch.ones_like(labels[:, 0], dtype=torch.bool) if wanted is None else wanted
        extra["by_sampler"] = BySampler(sampler, labels, wanted)
    with accelerator.autocast():
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


def in_chunks(
    score: Callable[..., tuple[torch.Tensor | None, ...]], chunks: int, *rows: torch.Tensor
) -> tuple[Any, ...]:
    """What `score` makes of rows, given in so many `chunks`: tensors with as many rows, means over them, or `None`."""
    parts = zip(*(score(*chunk) for chunk in zip(*(x.tensor_split(chunks) for x in rows), strict=True)), strict=True)
    return tuple(
        None if values[0] is None else torch.cat(values) if values[0].dim() else torch.stack(values).mean()
        for values in parts
    )


def needed_rows(
    score: Callable[..., tuple[torch.Tensor | None, ...]], needed: torch.Tensor, *rows: torch.Tensor
) -> tuple[torch.Tensor | None, ...]:
    """
    What `score` makes of the rows that are `needed`, a mask (R,), in tensors of R rows, 0 in the place of others.

    The first row is always read: all processes make the pass, whose weights they may share.
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
    """
    Log-probabilities by another sampler, (R·k, T) and 0 where masked, from the logits of a model that TRL's fused head does not fit;
    arguments as for [`token_log_probs`].
    """
    ids, mask = (x[:, layout.prompt :].reshape(-1, layout.width) for x in (input_ids, attention_mask))
    with accelerator.autocast():
        logits = model(input_ids=input_ids, attention_mask=attention_mask, layout=layout).logits
    logits = logits[:, -layout.width - 1 : -1]
    log_p = [  # one completion after the other: a copy in float32 of all is larger than the logits
        sampler(row.float()).log_softmax(dim=-1).gather(-1, chosen.unsqueeze(-1)).squeeze(-1)
        for row, chosen in zip(logits, ids, strict=True)
    ]
    return torch.stack(log_p).masked_fill(mask == 0, 0.0)
