"""Checks that a model is what it is used as, before it is loaded where possible. All raise `ValueError`."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import transformers
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from .._trl import MODEL_MAPPING_NAMES
from ._adapters import base_of, undisturbed


_HEADLESS = set(MODEL_MAPPING_NAMES.values())  # classes of models without a head
# Change of earlier predictions by a token, relative to that of later ones: at most 0.001 in the causal architectures of
# transformers (5.23) and at least 0.5 in the others, in float32 and bfloat16
_SHARE = 0.1


def check_language_model(model: Any, label: str, revision: str | None = None, headless: bool = False) -> None:
    """Refuses encoder-decoders, models without a language-model head or without weights (device `"meta"`), and
    adapters that [`check_forward_pass`] refuses. Of a path or Hub id only the configuration is read; one that cannot
    be read passes. With `headless`, a path may hold a model without its head, as for tied embeddings."""
    if isinstance(model, str):
        try:
            # Raw, so that no code of the model runs
            config = PretrainedConfig.get_config_dict(model, revision=revision)[0]
        except (OSError, ValueError):
            return
        architecture = (config.get("architectures") or [""])[0]
        cls, is_encoder_decoder = getattr(transformers, architecture, None), config.get("is_encoder_decoder")
        if headless and architecture.endswith("Model"):
            cls = None
    else:
        base = _base(model)
        cls, is_encoder_decoder = type(base), base.config.is_encoder_decoder
        _check_weights(model, label)
        for adapter in getattr(model, "peft_config", {}).values():
            check_forward_pass(adapter)
    if is_encoder_decoder:
        raise ValueError(
            f"{label} is an encoder-decoder, whose encoder reads the prompt; pass a causal language model."
        )
    if isinstance(cls, type) and issubclass(cls, PreTrainedModel) and not cls.can_generate():
        raise ValueError(f"{label} is a {cls.__name__}, which predicts no next token; pass a causal language model.")


def check_forward_pass(adapter: Any, refused: Sequence[str] = ()) -> None:
    """Refuses adapters with a forward pass of their own: prompt learning, aLoRA, and PEFT types in `refused`, such as `"ADALORA"`.
    `adapter` is a PEFT configuration."""
    kind = getattr(adapter.peft_type, "value", adapter.peft_type)
    if getattr(adapter, "alora_invocation_tokens", None):
        kind = "aLoRA (`alora_invocation_tokens`)"
    elif not adapter.is_prompt_learning and kind not in refused:
        return
    raise ValueError(
        f"Adapters of the kind {kind} have a forward pass of their own, in which completions cannot be scored; use plain LoRA."
    )


def check_reward_model(model: nn.Module, label: str) -> None:
    """Refuses reward models whose first logit is no reward: language models, models without a head, and classifiers of several labels."""
    base = _base(model)
    _check_weights(model, label)
    name = type(base).__name__
    if type(base).__module__.startswith("transformers.") and (base.can_generate() or name in _HEADLESS):
        raise ValueError(
            f"{label} is a {name} and no classifier, so that it gives no reward; pass a sequence-classification model of one "
            "label, or one of the classes in `trl_repulse.rewards`."
        )
    if name.endswith("ForSequenceClassification") and base.config.num_labels != 1:
        raise ValueError(
            f"{label} has {base.config.num_labels} labels, of which TRL reads the first; pass a classifier of one label, or "
            "`ToxicityReward(path, label=...)` of `trl_repulse.rewards` with the one that is meant."
        )


def check_reward_tokens(model: nn.Module, tokenizer: PreTrainedTokenizerBase | None, label: str) -> None:
    """Refuses a reward model without embeddings for its tokenizer's vocabulary or for its padding, begin, end and
    separator tokens. Other added tokens may be missing, as in some published models."""
    config = getattr(_base(model), "config", None)
    if tokenizer is None or not isinstance(config, PretrainedConfig):
        return
    size = getattr(config.get_text_config(), "vocab_size", None)
    names = ("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id")
    added = [i for i in (getattr(tokenizer, name, None) for name in names) if i is not None]
    tokens = max(tokenizer.vocab_size, *(i + 1 for i in added), 0)
    if size is not None and tokens > size:
        raise ValueError(
            f"{label} has embeddings for {size} tokens, and its tokenizer has {tokens}; use the tokenizer that it was trained with, "
            "or call `model.resize_token_embeddings(len(tokenizer))` before it is trained."
        )


def check_separate(
    model: nn.Module, label: str, other: nn.Module, other_label: str, trained: tuple[bool, bool], remedy: str
) -> None:
    """Refuses two models that share layers, or weights that one of them trains. `trained` says whether `model` and `other` train the
    weights that require a gradient (rather than an adapter still to be made); `remedy` ends the message."""
    layers = {id(layer) for layer in other.modules() if list(layer.parameters(recurse=False))}
    shared = next((name for name, layer in model.named_modules() if id(layer) in layers), None)
    if shared is None:
        places = {_place(p): p for p in other.parameters()}
        for name, p in model.named_parameters():
            twin = None if _place(p) is None else places.get(_place(p))
            if twin is not None and (p.requires_grad and trained[0] or twin.requires_grad and trained[1]):
                shared = name
                break
    if shared is not None:
        raise ValueError(
            f"{label} and {other_label} share weights (`{shared or type(model).__name__}`): what trains one would change the other; {remedy}"
        )


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig) -> None:
    """Refuses a tokenizer without an end token, or whose padding token the model does not have."""
    if tokenizer.eos_token_id is None:
        raise ValueError(
            "The tokenizer (`processing_class`) has no end token, so that no completion could end; set its `eos_token`, for "
            "completions of a fixed length to a token that the policy never draws."
        )
    size = config.get_text_config().vocab_size
    if tokenizer.pad_token_id >= size:
        raise ValueError(
            f"The tokenizer (`processing_class`) pads with {tokenizer.pad_token!r}, its token {tokenizer.pad_token_id}, but "
            f"`model` has embeddings for {size} tokens; set `tokenizer.pad_token = tokenizer.eos_token`, or call "
            "`model.resize_token_embeddings(len(tokenizer))`."
        )


def check_token_ids(
    prompt_ids: Iterable[Sequence[int]], config: PretrainedConfig, prompts: Sequence[Any] | None = None
) -> None:
    """Refuses prompts with tokens that the model does not have, as after adding tokens to the tokenizer."""
    size = config.get_text_config().vocab_size
    for place, ids in enumerate(prompt_ids):
        if max(ids, default=0) >= size:
            text = "" if prompts is None else f", {str(prompts[place])[:60]!r},"
            raise ValueError(
                f"Prompt {place}{text} has the token {max(ids)}, but the model has embeddings for {size} tokens; use the model's "
                "own tokenizer, or call `model.resize_token_embeddings(len(tokenizer))`."
            )


def check_trained_tokens(configs: list[Any], config: PretrainedConfig) -> None:
    """Refuses `trainable_token_indices` in adapters if the embedding is tied to the head."""
    tied = any(getattr(settings, "tie_word_embeddings", False) for settings in (config, config.get_text_config()))
    if tied and any(getattr(settings, "trainable_token_indices", None) for settings in configs):
        raise ValueError(
            "`trainable_token_indices` of the adapter's configuration trains an embedding that is the head as well "
            "(`tie_word_embeddings`), and completions are scored without what it trains; leave it out, or untie the two."
        )


def _base(model: Any) -> Any:
    """A model without `torch.compile` and PEFT around it."""
    return base_of(getattr(model, "_orig_mod", model))


def _check_weights(model: nn.Module, label: str) -> None:
    """Refuses a model on `"meta"`, unless accelerate has offloaded it or this process is not the first, from which FSDP sends weights."""
    follows = torch.distributed.is_initialized() and torch.distributed.get_rank() > 0
    if any(p.is_meta for p in model.parameters()) and not getattr(model, "hf_device_map", None) and not follows:
        raise ValueError(f"{label} has no weights (it is on the device 'meta'); load it with `from_pretrained`.")


def _place(p: nn.Parameter) -> int | None:
    """Address of a weight's storage; `None` if it is empty, as under ZeRO-3."""
    return (p.to_local() if isinstance(p, DTensor) else p).untyped_storage().data_ptr() or None


def check_causal(model: nn.Module, label: str) -> None:
    """Raises `ValueError` if a model cannot be sampled token by token and scored in one pass: if [`check_language_model`] refuses it, it
    reads later tokens, or it computes with another model's weights. One pass over two short texts that differ in a token decides. Mode,
    gradients and random states are kept. Parameters that ZeRO-3 has partitioned must be gathered."""
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
            f"{label} computes with the weights of another model, which a trainer had patched before it was copied; load it anew."
        )
    if ahead:
        raise ValueError(
            f"{label} predicts tokens from those that come after them, as encoders do; pass a causal language model, or, if "
            "it was trained as one, load it with `is_decoder=True`."
        )


def reads_ahead(model: nn.Module) -> bool:
    """Whether the model's output for a token depends on later tokens; `False` without weights. Two rows of five tokens that differ in the
    third alone are read: outputs for the first two tokens may not change, relative to those for the last two."""
    device = next((p.device for p in model.parameters() if not p.is_meta), None)
    if device is None:
        return False
    tokens = [i * vocab_size(model) // 7 for i in range(7)]  # the last ids are often unused
    ids = torch.tensor([tokens[:5], [*tokens[:2], tokens[6], *tokens[3:5]]], device=device)
    with undisturbed(model, training=False):
        outputs = model(input_ids=ids, attention_mask=torch.ones_like(ids))
        # A mixture of experts may give a loss first
        predicted = outputs.logits if "logits" in outputs else outputs.last_hidden_state
        original, changed = predicted.float()  # (5, V) each
    change = (original - changed).abs()
    return bool(change[:2].max() > _SHARE * change[3:].max())


def check_vocabulary_size(model: PreTrainedModel, label: str, policy: PreTrainedModel) -> None:
    """Refuses a second model whose vocabulary has another size than the policy's."""
    size, own = vocab_size(model), vocab_size(policy)
    if size != own:
        raise ValueError(
            f"{label} has a vocabulary of {size} tokens and the policy one of {own}; pass a model of the policy's family."
        )


def vocab_size(model: PreTrainedModel) -> int:
    """Number of tokens in the model's vocabulary."""
    return int(model.config.get_text_config().vocab_size)
