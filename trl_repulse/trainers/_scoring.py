"""Log-probabilities of completions in one pass, at the positions they were generated at.

It stands on TRL's fused head; other dependencies on TRL are in `_trl_bridge.py`.
"""

import inspect
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from transformers import PreTrainedModel


def prepare_scoring(model: PreTrainedModel) -> None:
    """Readies a model that has TRL's fused head for [`token_log_probs`].

    Two things are put right on scoring passes (`fused_lm_head=True`), and on no others:

    - Positions count from the first token that is not padding, as in generation. TRL (1.16) scores left-padded rows
      without `position_ids`; models with absolute positions (GPT-2) then give log-probabilities that depend on the
      padding and are not those the completions were drawn with, which importance weights do not forgive.
    - Labels may be shorter than the input: only the last hidden states, which predict them, go through the LM head.
      Without Triton, TRL's head projects every position of the prompt onto the vocabulary.

    A pass may ask for the model's own logits instead (`plain_logits`, the number of last positions), at the same positions.

    Way out: TRL passing `position_ids`, and its fused head skipping ignored positions on every device.

    Args:
        model ([`~transformers.PreTrainedModel`]):
            Causal language model, not wrapped by PEFT, with `add_fused_lm_head` called on it. Hooks are registered on
            it and on its backbone.
    """
    parameters = inspect.signature(type(model).forward).parameters
    takes_positions, takes_last = "position_ids" in parameters, "logits_to_keep" in parameters
    kept: dict[str, int | None] = {"last": None}

    def before_model(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        kept["last"] = None
        plain = kwargs.pop("plain_logits", None)
        if kwargs.get("fused_lm_head") or plain is not None:
            mask = kwargs["attention_mask"]
            if takes_positions and kwargs.get("position_ids") is None:
                kwargs = kwargs | {"position_ids": (mask.long().cumsum(dim=-1) - 1).clamp(min=0)}
            if plain is not None:
                kwargs = kwargs | {"use_cache": False} | ({"logits_to_keep": plain} if takes_last else {})
            elif kwargs["labels"].size(1) < mask.size(1):
                kept["last"] = kwargs["labels"].size(1)
        return args, kwargs

    def after_backbone(module: nn.Module, args: tuple, output: Any) -> Any:
        if kept["last"] is not None:
            output.last_hidden_state = output.last_hidden_state[:, -kept["last"] :]
        return output

    model.register_forward_pre_hook(before_model, with_kwargs=True)
    if model.base_model is not model:
        model.base_model.register_forward_hook(after_backbone)


def token_log_probs(
    model: nn.Module,
    accelerator: Accelerator,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    width: int,
    compute_aux_loss: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Log-probabilities of the last tokens of each row, in one pass.

    Args:
        model (`torch.nn.Module`):
            Model that [`prepare_scoring`] readied, wrapped or not.
        accelerator ([`~accelerate.Accelerator`]):
            Gives the autocast context.
        input_ids, attention_mask (`torch.Tensor` of shape `(B, L + T)`):
            Left-padded prompts followed by right-padded completions.
        width (`int`):
            T, number of tokens to score.
        compute_aux_loss (`bool`, *optional*, defaults to `False`):
            Whether to ask a mixture-of-experts model for its load-balancing loss.

    Returns:
        Log-probabilities (nats) and entropies (nats; `None` if the head does not compute them), each of shape
        `(B, T)` and 0 where masked, and the auxiliary loss or `None`.
    """
    labels = input_ids.masked_fill(attention_mask == 0, -100)[:, -width - 1 :].clone()
    labels[:, 0] = -100  # the prompt's last token
    extra = {"output_router_logits": True} if compute_aux_loss else {}
    with accelerator.autocast():
        outputs = model(input_ids=input_ids, attention_mask=attention_mask, labels=labels, fused_lm_head=True, **extra)
    return outputs.log_probs, outputs.entropy, outputs.aux_loss


@torch.no_grad()
def tempered_log_probs(
    model: nn.Module,
    accelerator: Accelerator,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    width: int,
    temperature: float,
) -> torch.Tensor:
    """Log-probabilities of the last tokens of each row at a temperature, in one pass without gradient.

    TRL's fused head (1.16) has one temperature, set when it is put on, so that these come from the model's logits. Way out: a
    `temperature` argument on the fused head's forward.

    Args:
        model, accelerator, input_ids, attention_mask, width:
            As for [`token_log_probs`].
        temperature (`float`):
            What logits are divided by.

    Returns:
        `torch.Tensor`: Of shape `(B, T)`, nats, 0 where masked.
    """
    with accelerator.autocast():
        logits = model(input_ids=input_ids, attention_mask=attention_mask, plain_logits=width + 1).logits
    log_p = (logits[:, -width - 1 : -1].float() / temperature).log_softmax(dim=-1)
    chosen = log_p.gather(-1, input_ids[:, -width:, None]).squeeze(-1)
    return chosen.masked_fill(attention_mask[:, -width:] == 0, 0.0)
