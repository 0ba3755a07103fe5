"""Whether a language model predicts each token from those before it, by weights of its own."""

import torch
from torch import nn

from ._model_checks import check_language_model


# What a token changes in the predictions before it, as a share of what it changes in those behind it: at most 0.001 in the
# causal architectures of transformers (5.23), at least 0.5 in the others, in float32 and in bfloat16
_SHARE = 0.1


def check_causal(model: nn.Module, label: str) -> None:
    """
    Refuses a model that cannot be sampled from token by token and scored in one pass: it has to predict the next token, from
    the ones before it alone, with weights of its own.

    One pass over two short texts that differ in a token tells; no list of architectures is needed. Mode, gradients and random
    states are left as they are. What ZeRO-3 has cut apart must be gathered.

    Args:
        model ([`~transformers.PreTrainedModel`] or `peft.PeftModel`):
            Language model, where it is and in its precision.
        label (`str`):
            What the message calls it.

    Raises:
        `ValueError`: If [`~trl_repulse._model_checks.check_language_model`] refuses it, if it reads the tokens after the one
            that it predicts, or if it computes with the weights of another model.
    """
    check_language_model(model, label)
    if all(p.is_meta for p in model.parameters()):  # FSDP sends the weights later, from a process that can check them
        return
    # bitsandbytes (0.50) packs weights anew on CPU in evaluation mode, not of every size
    if getattr(model, "is_quantized", False) and next(model.parameters()).device.type == "cpu":
        return
    embeddings, passes = model.get_input_embeddings(), []
    handle = embeddings.register_forward_hook(lambda *_: passes.append(True))
    try:
        ahead = reads_ahead(model)
    finally:
        handle.remove()
    if not passes:
        raise ValueError(
            f"{label} computes with the weights of another model: it is a copy of one that a trainer had patched. Copy a model "
            "before it is passed to a trainer, or load it anew."
        )
    if ahead:
        raise ValueError(
            f"{label} predicts tokens from those that come after them, as encoders do; pass a causal language model, or, if "
            "it was trained as one, load it with `is_decoder=True`."
        )


def reads_ahead(model: nn.Module) -> bool:
    """
    Whether what a model gives for a token depends on later ones.

    Args:
        model (`torch.nn.Module`):
            Model, or the layers under a head.

    Returns:
        `bool`: `False` of a model without weights.
    """
    device = next((p.device for p in model.parameters() if not p.is_meta), None)
    if device is None:
        return False
    size = model.config.get_text_config().vocab_size
    tokens = [i * size // 7 for i in range(7)]  # the last are often no words
    ids = torch.tensor([tokens[:5], [*tokens[:2], tokens[6], *tokens[3:5]]], device=device)
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        states = torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type)
        # A compiled `forward` would not run hooks
        with states, torch.no_grad(), torch.compiler.set_stance("force_eager"):
            outputs = model(input_ids=ids, attention_mask=torch.ones_like(ids))
            # A mixture of experts may give a loss first
            predicted = outputs.logits if "logits" in outputs else outputs.last_hidden_state
            one, other = predicted.float()  # (5, V) each
    finally:
        for module, mode in modes:
            module.training = mode
    change = (one - other).abs()
    return bool(change[:2].max() > _SHARE * change[3:].max())
