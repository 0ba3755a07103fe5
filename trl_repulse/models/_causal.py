"""Checks that a language model predicts each token from those before it, with its own weights."""

import torch
from torch import nn

from ._adapters import undisturbed
from ._model_checks import check_language_model


# Change of earlier predictions by a token, relative to that of later ones: at most 0.001 in the causal architectures of
# transformers (5.23) and at least 0.5 in the others, in float32 and bfloat16
_SHARE = 0.1


def check_causal(model: nn.Module, label: str) -> None:
    """
    Raises `ValueError` if a model cannot be sampled token by token and scored in one pass: if [`check_language_model`]
    refuses it, it reads later tokens, or it computes with another model's weights.

    One pass over two short texts that differ in a token decides. Mode, gradients and random states are kept.
    Parameters that ZeRO-3 has partitioned must be gathered.
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
    """Whether the model's output for a token depends on later tokens; `False` without weights."""
    device = next((p.device for p in model.parameters() if not p.is_meta), None)
    if device is None:
        return False
    size = model.config.get_text_config().vocab_size
    tokens = [i * size // 7 for i in range(7)]  # the last ids are often unused
    ids = torch.tensor([tokens[:5], [*tokens[:2], tokens[6], *tokens[3:5]]], device=device)
    with undisturbed(model, training=False):
        outputs = model(input_ids=ids, attention_mask=torch.ones_like(ids))
        # A mixture of experts may give a loss first
        predicted = outputs.logits if "logits" in outputs else outputs.last_hidden_state
        one, other = predicted.float()  # (5, V) each
    change = (one - other).abs()
    return bool(change[:2].max() > _SHARE * change[3:].max())
