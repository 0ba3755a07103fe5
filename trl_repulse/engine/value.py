"""The value model: building it from a policy or a reward model, and the values it gives.

Axis letters: R rows with k completions each, L prompt tokens, T completion tokens.
"""

import copy
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import is_peft_model
from torch import nn
from transformers import (
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedModel,
)

from ..models._adapters import adapter_config, base_of
from ..models._deepspeed import gathered, gathered_by_layer
from ..models._layout import Layout
from ..models._model_checks import check_vocabulary_size, reads_ahead
from .trl_bridge import create_model_from_path, disable_dropout, get_config_model_id


def build_value_model(
    model: str | PreTrainedModel, init_kwargs: dict[str, Any], peft_config: Any = None
) -> PreTrainedModel:
    """
    Makes a token classifier with one label, whose logit at a token is the value after that token.

    Args:
        model (`str` or [`~transformers.PreTrainedModel`]):
            What it starts from. A causal language model gives its transformer, under a new head that is 0 at first. A
            sequence classifier with one label (a reward model) gives transformer and head: the first values are its
            rewards of the unfinished texts. A token classifier with one label is taken as it is; of the others, weights
            are copied. An adapter over a causal language model is left out, the base model's weights serve. The folder of
            an adapter that a value model had goes on, over the base that it names.
        init_kwargs (`dict`):
            Arguments of `from_pretrained` for a path or id.
        peft_config (`peft.PeftConfig`, *optional*):
            If given, an adapter and the head are trained instead of the whole model. A saved adapter keeps its own.

    Returns:
        [`~transformers.PreTrainedModel`] or `peft.PeftModel`: The value model, without dropout.

    Raises:
        `ValueError`: If the architecture has no token classifier, a classifier has several labels or a head of several
            layers, the model is quantized and no adapter is asked for, or a saved adapter is not a value model's.
    """
    if not isinstance(model, str):
        base = base_of(model)
        if type(base).__name__.endswith("ForTokenClassification"):
            value = model
        elif is_peft_model(model) or getattr(base, "is_quantized", False):
            value = _load(get_config_model_id(base.config), init_kwargs)
        else:
            value = _copied(base)
    elif (saved := adapter_config(model)) is not None:
        from peft import PeftModel

        if saved.task_type != "TOKEN_CLS":
            raise ValueError(
                f"`value_model={model!r}` is the folder of an adapter that gives no values; pass that of a value model, or a "
                "whole model."
            )
        base = _load(saved.base_model_name_or_path, init_kwargs)
        value, peft_config = PeftModel.from_pretrained(base, model, is_trainable=True), None
    else:
        value = _load(model, init_kwargs)
    if value.config.num_labels != 1:
        raise ValueError(
            f"`value_model` has {value.config.num_labels} labels, but a value is one number; pass a model with one label."
        )
    if peft_config is None and not is_peft_model(value) and getattr(value, "is_quantized", False):
        raise ValueError(
            "`value_model` is quantized and cannot be trained whole; pass `value_peft_config`, or load it in full."
        )
    if peft_config is not None:
        from peft import get_peft_model

        peft_config = copy.deepcopy(peft_config)
        peft_config.task_type = "TOKEN_CLS"  # the head is new: it has to be trained and saved with the adapter
        value = get_peft_model(value, peft_config)
    value.config.get_text_config().use_cache = False
    disable_dropout(value)
    return value.train()  # activation checkpointing works in training mode alone


def _load(path: str, init_kwargs: dict[str, Any]) -> PreTrainedModel:
    if (quantization_config := init_kwargs.get("quantization_config")) is not None:  # not of a head that is new
        quantization_config = copy.deepcopy(quantization_config)
        skipped = quantization_config.llm_int8_skip_modules or []
        quantization_config.llm_int8_skip_modules = [*skipped, "score", "classifier"]
        init_kwargs = init_kwargs | {"quantization_config": quantization_config}
    config = AutoConfig.from_pretrained(
        path,
        trust_remote_code=init_kwargs.get("trust_remote_code", False),
        revision=init_kwargs.get("revision"),
    )
    architecture = (config.architectures or [""])[0]
    if architecture.endswith("ForSequenceClassification"):
        return _copied(create_model_from_path(path, AutoModelForSequenceClassification, **init_kwargs))
    if architecture.endswith("ForTokenClassification"):
        return create_model_from_path(path, AutoModelForTokenClassification, **init_kwargs)
    _require_token_classifier(config)
    value = create_model_from_path(path, AutoModelForTokenClassification, num_labels=1, **init_kwargs)
    with gathered(_head(value), write=True):
        _set_head(value, None)
    return value


def _copied(source: PreTrainedModel) -> PreTrainedModel:
    """A token classifier with the weights of a causal language model or a sequence classifier."""
    is_classifier = type(source).__name__.endswith("ForSequenceClassification")
    config = copy.deepcopy(source.config)
    if not is_classifier:
        config.num_labels = 1
    _require_token_classifier(config)
    value = AutoModelForTokenClassification.from_config(config, dtype=source.dtype)
    with gathered(source), gathered(value, write=True):
        missing = value.base_model.load_state_dict(source.base_model.state_dict(), strict=False).missing_keys
        assert not missing, missing  # one class, one configuration; a pooler may be left over
        if config.num_labels == 1:
            _set_head(value, _head(source) if is_classifier else None)
    return value


def _require_token_classifier(config: Any) -> None:
    if type(config) not in MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING:
        raise ValueError(
            f"transformers has no token classifier for `{config.model_type}`, which the value model would be; pass "
            "`value_model` of another architecture with the policy's tokenizer."
        )


def _head(model: PreTrainedModel) -> nn.Linear:
    heads = [child for child in model.children() if isinstance(child, nn.Linear)]
    if len(heads) != 1:
        raise ValueError(
            f"The head of `{type(model).__name__}`, which `value_model` is, is not one linear layer; pass a causal language "
            "model or a reward model with a linear head."
        )
    return heads[0]


def _set_head(value: PreTrainedModel, source: nn.Linear | None) -> None:
    head = _head(value)
    with torch.no_grad():
        nn.init.zeros_(head.weight)
        if head.bias is not None:
            nn.init.zeros_(head.bias)
        if source is not None:
            head.weight.copy_(source.weight)
            if head.bias is not None and source.bias is not None:
                head.bias.copy_(source.bias)


def check_value_model(value: PreTrainedModel, policy: PreTrainedModel) -> None:
    """
    Refuses a value model that cannot read the policy's tokens, or that reads tokens still to come.

    Raises:
        `ValueError`: If the vocabularies differ in size, or the value at a token depends on the tokens after it.
    """
    check_vocabulary_size(value, "`value_model`", policy)
    backbone = base_of(value).base_model
    with gathered_by_layer(backbone):
        ahead = value.config.is_encoder_decoder or reads_ahead(backbone)
    if ahead:
        raise ValueError(
            "`value_model` reads tokens to the right (it is an encoder), so its values would know what is still to be "
            "sampled; pass a causal model."
        )


def token_values(
    model: torch.nn.Module,
    accelerator: Accelerator,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    layout: Layout,
) -> torch.Tensor:
    """
    V(s_t), the value before each token of the completions of rows, of shape `(R·k, T)` and in float32; gradient flows to the model.

    Args as for [`~trl_repulse.engine.scoring.token_log_probs`]; [`~trl_repulse.engine.scoring.prepare_scoring`] must have
    readied the model.
    """
    with accelerator.autocast():
        logits = model(input_ids=input_ids, attention_mask=attention_mask, layout=layout).logits  # (R·k, T + 1, 1)
    return logits[:, -layout.width - 1 : -1, 0].float()
