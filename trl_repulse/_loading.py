"""Models and tokenizers by path or Hub id: whatever keeps one from being used is said with its name and its part."""

import json
import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import find_adapter_config_file, is_peft_available

from ._model_checks import check_language_model


if TYPE_CHECKING:
    from peft import PeftModel

_TASKS = {"AutoModelForCausalLM": "CAUSAL_LM", "AutoModelForSequenceClassification": "SEQ_CLS"}


def load_model(auto_class: Any, name: str, part: str, **options: Any) -> PreTrainedModel:
    """
    Loads a model whose weights are all there. Of an adapter it is the base, with the adapter in its layers.

    A classifier loaded as a language model, or the other way round, has a head of random numbers, of which transformers only
    warns.

    Args:
        auto_class:
            [`~transformers.AutoModelForCausalLM`] or another of its kind.
        name (`str`):
            Path or Hub id.
        part (`str`):
            What it is loaded as, for the message, such as `"reference"`.
        options:
            Further arguments of `from_pretrained`.

    Returns:
        [`~transformers.PreTrainedModel`]

    Raises:
        `ValueError`: If it cannot be loaded, or lacks weights; if a language model is asked for and it is of another kind.
    """
    _check_path(name, part)
    if auto_class is AutoModelForCausalLM:
        check_language_model(name, f"The {part} `{name}`", options.get("revision"), headless=True)
    options = {"trust_remote_code": False} | options  # left open, transformers would ask on the terminal
    try:
        if _adapter_config(name, options.get("revision")) is None:
            model, loading = auto_class.from_pretrained(name, output_loading_info=True, **options)
            missing = sorted(loading["missing_keys"])
        else:
            # In the precision of the base, as transformers loads an adapter
            model = load_adapter(auto_class, name, autocast_adapter_dtype=False, **options).get_base_model()
            model._hf_peft_config_loaded, missing = True, []  # transformers' mark of a base with an adapter in it
    except RuntimeError as error:
        raise ValueError(f"The {part} `{name}` cannot be loaded: {_mismatch(name, error, options)}") from error
    except (OSError, ValueError, SafetensorError, ImportError) as error:
        raise ValueError(f"The {part} `{name}` cannot be loaded: {error}") from error
    if missing:
        raise ValueError(f"The {part} `{name}` {_lacks(missing, model)}")
    return model


def load_adapter(
    auto_class: Any,
    name: str,
    base: str | None = None,
    revision: str | None = None,
    autocast_adapter_dtype: bool = True,
    **options: Any,
) -> "PeftModel":
    """
    Loads an adapter over its base, as PEFT does. A base whose vocabulary was resized in training is resized.

    Args:
        auto_class:
            [`~transformers.AutoModelForCausalLM`] or another of its kind.
        name (`str`):
            Path or Hub id of the adapter.
        base (`str`, *optional*):
            Path or Hub id of the base, if not the one that the adapter names.
        revision (`str`, *optional*):
            Branch, tag or commit of the adapter on the Hub.
        autocast_adapter_dtype (`bool`, *optional*, defaults to `True`):
            Whether the weights of an adapter over a base in half precision are kept in float32.
        options:
            Further arguments of `from_pretrained` for the base.

    Returns:
        `peft.PeftModel`: In evaluation mode.

    Raises:
        `ValueError`: If the adapter is not of a kind that changes layers, or it or its base lacks weights. The message leaves
            it to the caller to name the adapter.
        `OSError`: If the base cannot be loaded.
        `RuntimeError`: If the adapter's weights do not fit the base.
        `ImportError`: If there is no PEFT.
    """
    if not is_peft_available():
        raise ImportError('an adapter needs peft; run `pip install "trl-repulse[peft]"`.')
    from peft import PeftConfig, PeftModel, load_peft_weights
    from peft.utils import ModulesToSaveWrapper

    config = PeftConfig.from_pretrained(name, revision=revision)
    if config.is_prompt_learning:
        raise ValueError(
            f"a {config.peft_type.value} adapter changes no layer of its base; give one that does, such as LoRA."
        )
    if getattr(config, "alora_invocation_tokens", None):
        raise ValueError(
            "an aLoRA adapter changes its base only behind certain tokens, which cannot be served; give one of plain LoRA."
        )
    if config.task_type not in (None, _TASKS.get(auto_class.__name__)):
        raise ValueError(
            f"the adapter is of another kind of model (`task_type={config.task_type}`); give one of this kind."
        )
    source = base or config.base_model_name_or_path
    if not source:
        raise ValueError("the adapter does not say over which model it was trained; merge it with `--base_model`.")
    base_revision = None if base else config.revision
    model, loading = auto_class.from_pretrained(source, output_loading_info=True, revision=base_revision, **options)
    _resize(model, load_peft_weights(name, device="cpu", revision=revision))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Found missing adapter keys")
        try:
            adapted = PeftModel.from_pretrained(
                model, name, revision=revision, autocast_adapter_dtype=autocast_adapter_dtype
            )
        except UserWarning as error:
            raise ValueError(f"the adapter lacks weights; save it again. ({str(error)[:200]})") from error
    own = [key for key, module in model.named_modules() if isinstance(module, ModulesToSaveWrapper)]
    missing = [key for key in sorted(loading["missing_keys"]) if key.rpartition(".")[0] not in own]
    if missing:
        raise ValueError(f"its base `{source}` {_lacks(missing, model)}")
    return adapted.eval()


def load_tokenizer(name: str, part: str, **options: Any) -> PreTrainedTokenizerBase:
    """
    Loads a tokenizer that has a vocabulary; of a folder without one transformers makes an empty one.

    An adapter without a tokenizer has that of its base.

    Args:
        name (`str`):
            Path or Hub id.
        part (`str`):
            Whose it is, for the message.
        options:
            Further arguments of `from_pretrained`.

    Returns:
        [`~transformers.PreTrainedTokenizerBase`]

    Raises:
        `ValueError`: If there is none.
    """
    _check_path(name, part)
    options = {"trust_remote_code": False} | options
    tokenizer, fault = None, None
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, **options)
    except (OSError, ValueError) as error:
        fault = error
    if tokenizer is not None and not set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
        return tokenizer
    config = _adapter_config(name, options.get("revision"))
    if config is not None and config.get("base_model_name_or_path"):
        more = options | {"revision": config.get("revision")}
        return load_tokenizer(config["base_model_name_or_path"], f"base of the {part}", **more)
    if fault is not None and not (Path(name).is_dir() and not any(Path(name).glob("*token*"))):
        raise ValueError(f"The tokenizer of the {part} `{name}` cannot be loaded: {fault}") from fault
    raise ValueError(
        f"The {part} `{name}` has no tokenizer beside its weights; save one with `save_pretrained` there."
    )


def is_adapter(name: str, revision: str | None = None) -> bool:
    """Whether this is an adapter without a whole model beside it."""
    return _adapter_config(name, revision) is not None


def count_labels(name: str, revision: str | None = None) -> int | None:
    """Labels of a classifier that was saved as an adapter, from the head saved with it; `None` if there is none."""
    if not is_peft_available():
        return None  # loading it says so
    from peft import PeftConfig, load_peft_weights

    heads = PeftConfig.from_pretrained(name, revision=revision).modules_to_save or ()
    prefixes = tuple(f"base_model.model.{head}." for head in heads)
    weights = load_peft_weights(name, device="cpu", revision=revision)
    rows = [len(weight) for key, weight in weights.items() if key.startswith(prefixes) and weight.ndim == 2]
    return min(rows, default=None)  # the layers before the last have as many rows as the model is wide


def _check_path(name: str, part: str) -> None:
    """Refuses a folder that is not there, which transformers takes for a malformed id."""
    if (name.startswith((".", "~", os.sep)) or name.count("/") > 1) and not Path(name).exists():
        raise ValueError(
            f"The {part} `{name}` cannot be loaded: there is no such folder; name one, or an id on the Hub."
        )


def _adapter_config(name: str, revision: str | None) -> dict[str, Any] | None:
    """What an adapter says of itself; `None` of anything else, and of an adapter beside a whole model."""
    if (Path(name) / "config.json").is_file():
        return None
    try:
        found = find_adapter_config_file(name, revision=revision)
    except (OSError, ValueError):  # whatever it is, loading it says what is wrong
        return None
    return None if found is None else json.loads(Path(found).read_text(encoding="utf-8"))


def _resize(model: PreTrainedModel, weights: dict[str, Any]) -> None:
    """Gives embedding and head the rows that an adapter was saved with."""
    layers = [layer for layer in (model.get_input_embeddings(), model.get_output_embeddings()) if layer is not None]
    names = {layer: name for name, layer in model.named_modules() if layer in layers}
    keys = {layer: [f"base_model.model.{name}{infix}.weight" for infix in ("", ".base_layer")]
            for layer, name in names.items()}  # fmt: skip
    saved = {layer: len(weights[key]) for layer in keys for key in keys[layer] if key in weights}
    rows = next((count for layer, count in saved.items() if count != len(layer.weight)), None)
    if rows is None:
        return
    held = {id(layer.weight) for layer in saved}
    for layer in layers:
        if id(layer.weight) not in held:
            raise ValueError(
                f"the vocabulary was resized to {rows} in training, and the adapter was saved without its new rows of "
                f"`{names[layer]}`; save it with `save_embedding_layers=True` and the head in `modules_to_save`."
            )
    model.resize_token_embeddings(rows, mean_resizing=False)


def _lacks(missing: list[str], model: PreTrainedModel) -> str:
    return (
        f"has no weights for {', '.join(missing[:3])}, which {type(model).__name__} needs; give a checkpoint that was "
        "trained as one."
    )


def _mismatch(name: str, error: RuntimeError, options: dict[str, Any]) -> str:
    """Why weights do not fit: a classifier of several labels where one is asked for, or as torch says it."""
    if options.get("num_labels") == 1 and _adapter_config(name, options.get("revision")) is None:
        own = {key: options[key] for key in ("revision", "trust_remote_code") if key in options}
        labels = AutoConfig.from_pretrained(name, **own).num_labels
        if labels != 1:
            return (
                f"its head has the size of {labels} labels, and TRL's own treatment reads one; give a classifier of one label, or "
                "set `reward_type` and the `label` to read (`--reward_type toxicity --reward_kwargs '{\"label\": 1}'`, in Python "
                "`ToxicityReward(path, label=1)`)."
            )
    return " ".join(str(error).split())[:500]
