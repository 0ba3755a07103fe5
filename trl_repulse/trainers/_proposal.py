"""Building the proposal, and its losses from one batch of samples.

Axis letters: U units of m proposal samples, T completion tokens, V vocabulary.
"""

from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import is_peft_model
from transformers import PreTrainedModel

from ..configs import RePULSeConfig
from ..losses import ctl_coefficients, dpg_loss, log_ratio_loss, sixo_loss, sixo_negative_weights
from ._deepspeed import zero_stage
from ._trl_bridge import (
    add_fused_lm_head,
    create_model_from_path,
    disable_dropout_in_model,
    prepare_scoring,
)


if TYPE_CHECKING:
    from .repulse_trainer import RePULSeTrainer


def build_proposal(
    model: "str | PreTrainedModel", trainer: "RePULSeTrainer", peft_config: Any = None, quantization_config: Any = None
) -> PreTrainedModel:
    """
    Makes a model ready to be sampled and scored by TRL's hooks, as TRL made the policy ready.

    Args:
        model (`str` or [`~transformers.PreTrainedModel`]):
            Where the proposal starts from. A path or id is loaded with the trainer's `model_init_kwargs`.
        trainer ([`RePULSeTrainer`]):
            Trainer with its policy in place.
        peft_config (`peft.PeftConfig`, *optional*):
            If given, the proposal is a new adapter over `model`.
        quantization_config ([`~transformers.BitsAndBytesConfig`], *optional*):
            Quantization to load a path or id with.

    Returns:
        [`~transformers.PreTrainedModel`] or `peft.PeftModel`: The proposal.

    Raises:
        `ValueError`: If its vocabulary is not the policy's.
    """
    args = trainer.args
    if isinstance(model, str):
        init_kwargs = {"trust_remote_code": args.trust_remote_code, **(args.model_init_kwargs or {})}
        if quantization_config is not None:
            init_kwargs["quantization_config"] = quantization_config
        if args.distributed_state.distributed_type in ("MULTI_GPU", "DEEPSPEED"):
            init_kwargs["device_map"] = None
        model = create_model_from_path(model, **init_kwargs)
    policy_size = trainer.model.config.get_text_config().vocab_size
    size = model.config.get_text_config().vocab_size
    if size != policy_size:
        raise ValueError(
            f"`proposal_model` has a vocabulary of {size} tokens and the policy one of {policy_size}; importance "
            "weights need one vocabulary: start the proposal from a model of the policy's family."
        )
    model.config.get_text_config().pad_token_id = trainer._tokenizer.pad_token_id
    model.generation_config.pad_token_id = trainer._tokenizer.pad_token_id
    if peft_config is not None:
        from peft import get_peft_model

        # As TRL does: ZeRO-3 gathers in one dtype
        whole = zero_stage(trainer.accelerator) != 3 or getattr(model, "is_quantized", False)
        model = get_peft_model(model, peft_config, autocast_adapter_dtype=whole)
    if is_peft_model(model) and args.activation_checkpointing:
        model.enable_input_require_grads()
    disable_dropout_in_model(model)
    base = model.get_base_model() if is_peft_model(model) else model
    add_fused_lm_head(base, temperature=1.0)
    prepare_scoring(base)
    return model


def proposal_coefficients(
    args: RePULSeConfig,
    log_q_now: torch.Tensor,
    log_q: torch.Tensor,
    log_p: torch.Tensor,
    normalized_w: torch.Tensor,
    mask: torch.Tensor,
    scored: torch.Tensor,
) -> torch.Tensor:
    """
    What a prompt's samples set against their weights in the proposal's loss; needs them together; detached.

    Args:
        args ([`RePULSeConfig`]):
            Gives loss and parameterisation.
        log_q_now, log_q, log_p (`torch.Tensor` of shape `(P, N, T)`):
            Log-probabilities (nats) under the proposal as it is, as it was sampled, and under the policy.
        normalized_w (`torch.Tensor` of shape `(P, N)`):
            Importance weights, normalised within each prompt.
        mask (`torch.Tensor` of shape `(P, N, T)`):
            1 at completion tokens.
        scored (`torch.Tensor` of shape `(P, N)`):
            Which samples have a reward; the others take part in nothing.

    Returns:
        `torch.Tensor`: Of shape `(P, N, T)`, the token coefficients of CTL (w − w⁻_t, or w alone without its second
        term); of shape `(P, N)`, SIXO's weights towards the policy. DPG needs none and gets `normalized_w` back.
    """
    if args.proposal_loss == "dpg":
        return normalized_w
    if args.proposal_loss == "sixo":
        return sixo_negative_weights(log_q, log_p, normalized_w, mask, scored)
    return ctl_coefficients(
        log_q_now,
        log_q,
        log_p,
        normalized_w,
        mask,
        second_term=args.proposal_loss != "ctl_no_second_term",
        parameterization=args.proposal_parameterization,
        scored=scored,
    )


def proposal_loss(
    trainer: "RePULSeTrainer", batch: dict[str, torch.Tensor], log_q_now: torch.Tensor, log_p: torch.Tensor
) -> torch.Tensor:
    """
    The proposal's loss on one micro-batch of its samples.

    Args:
        trainer ([`RePULSeTrainer`]):
            Trainer of both models.
        batch (`dict[str, torch.Tensor]`):
            Units with `proposal_w` of shape `(U, m)` and the `proposal_coefficients` of [`proposal_coefficients`].
        log_q_now (`torch.Tensor` of shape `(U, m, T)`):
            Log-probabilities (nats) under the proposal, carrying gradient.
        log_p (`torch.Tensor` of shape `(U, m, T)`):
            Log-probabilities (nats) under the sampling-time policy.

    Returns:
        `torch.Tensor`: Scalar, a mean over the samples.
    """
    args, mask = trainer.args, batch["proposal_completion_mask"]
    if args.proposal_loss == "dpg":
        with torch.no_grad():
            log_p_all = _all_log_probs(trainer.model, batch)
        return dpg_loss(
            _all_log_probs(trainer.proposal.engine, batch),
            log_p_all,
            batch["proposal_completion_ids"],
            batch["proposal_w"],
            mask,
        )
    if args.proposal_loss == "sixo":
        return sixo_loss(log_q_now, log_p, batch["proposal_w"], batch["proposal_coefficients"], mask)
    return log_ratio_loss(
        log_q_now, log_p, batch["proposal_coefficients"], mask, parameterization=args.proposal_parameterization
    )


def _all_log_probs(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """log-probabilities of the whole vocabulary at each completion token, shape (U, m, T, V), nats."""
    ids, mask = batch["proposal_completion_ids"], batch["proposal_completion_mask"]
    units, m, width = ids.shape
    input_ids = torch.cat([batch["prompt_ids"].repeat_interleave(m, 0), ids.flatten(0, 1)], dim=1)
    attention_mask = torch.cat([batch["prompt_mask"].repeat_interleave(m, 0), mask.flatten(0, 1)], dim=1)
    positions = (attention_mask.long().cumsum(dim=-1) - 1).clamp(min=0)
    logits = model(input_ids=input_ids, attention_mask=attention_mask, position_ids=positions).logits
    return logits[:, -width - 1 : -1].float().log_softmax(dim=-1).view(units, m, width, -1)
