"""Models, adapters and tokenizers by path or Hub id; errors name the model and its role."""

import json
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import find_adapter_config_file, is_peft_available

from ._model_checks import check_forward_pass, check_language_model, vocab_size


_TASKS = {"AutoModelForCausalLM": "CAUSAL_LM", "AutoModelForSequenceClassification": "SEQ_CLS"}


def load_model(auto_class: Any, name: str, part: str, **options: Any) -> PreTrainedModel:
    """Loads a model and checks that no weights are missing. An adapter is loaded into the layers of its base. `part` is the model's role in
    messages, and `options` go to `from_pretrained`. Raises `ValueError` if the model cannot be loaded, lacks weights (a classifier loaded
    as a language model would have a random head), or is not the language model asked for."""
    _check_path(name, part)
    if auto_class is AutoModelForCausalLM:
        check_language_model(name, f"The {part} `{name}`", options.get("revision"), headless=True)
    options = {"trust_remote_code": False} | options  # if unset, transformers asks on the terminal
    try:
        if _adapter_config(name, options.get("revision")) is None:
            model, loading = auto_class.from_pretrained(name, output_loading_info=True, **options)
            missing = sorted(loading["missing_keys"])
        else:
            model, missing = _load_adapter(auto_class, name, **options), []
    except RuntimeError as error:
        raise ValueError(f"The {part} `{name}` cannot be loaded: {_mismatch(name, error, options)}") from error
    except (OSError, ValueError, SafetensorError, ImportError) as error:
        raise ValueError(f"The {part} `{name}` cannot be loaded: {error}") from error
    if missing:
        raise ValueError(f"The {part} `{name}` {_lacks(missing, model)}")
    return model


def _load_adapter(auto_class: Any, name: str, revision: str | None = None, **options: Any) -> PreTrainedModel:
    """Loads an adapter into the layers of its base, in evaluation mode and the base's precision; resizes the base's
    vocabulary if training did. `revision` belongs to the adapter, `options` go to the base. Raises `ValueError` for a
    wrong kind of adapter or missing weights (the caller adds the adapter's name), `OSError` or `RuntimeError` if the
    base cannot be loaded or does not fit, `ImportError` without PEFT."""
    if not is_peft_available():
        raise ImportError('an adapter needs peft; run `pip install "trl-repulse[peft]"`.')
    from peft import PeftConfig, PeftModel, load_peft_weights
    from peft.utils import ModulesToSaveWrapper

    config = PeftConfig.from_pretrained(name, revision=revision)
    check_forward_pass(config)
    if config.task_type not in (None, _TASKS.get(auto_class.__name__)):
        raise ValueError(
            f"the adapter is of another kind of model (`task_type={config.task_type}`); give one of this kind."
        )
    source = config.base_model_name_or_path
    if not source:
        raise ValueError(
            "the adapter does not say over which model it was trained; set `base_model_name_or_path` in its `adapter_config.json`."
        )
    model, loading = auto_class.from_pretrained(source, output_loading_info=True, revision=config.revision, **options)
    _resize(model, load_peft_weights(name, device="cpu", revision=revision))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Found missing adapter keys")
        try:
            adapted = PeftModel.from_pretrained(model, name, revision=revision, autocast_adapter_dtype=False)
        except UserWarning as error:
            raise ValueError(f"the adapter lacks weights; save it again. ({str(error)[:200]})") from error
    own = [key for key, module in model.named_modules() if isinstance(module, ModulesToSaveWrapper)]
    if missing := [key for key in sorted(loading["missing_keys"]) if key.rpartition(".")[0] not in own]:
        raise ValueError(f"its base `{source}` {_lacks(missing, model)}")
    model = adapted.eval().get_base_model()
    model._hf_peft_config_loaded = True  # transformers' mark of a base with an adapter
    return model


def load_config(name: str, part: str, revision: str | None = None, **options: Any) -> PretrainedConfig:
    """Loads a model's configuration without its weights; that of the base for an adapter. Raises `ValueError` if it cannot be loaded."""
    _check_path(name, part)
    adapter = _adapter_config(name, revision) or {}
    base = adapter.get("base_model_name_or_path")
    revision = adapter.get("revision") if base else revision
    try:
        return AutoConfig.from_pretrained(base or name, revision=revision, **options)
    except (OSError, ValueError) as error:
        raise ValueError(f"The {part} `{name}` cannot be loaded: {error}") from error


def load_tokenizer(name: str, part: str, **options: Any) -> PreTrainedTokenizerBase:
    """Loads a tokenizer; that of the base for an adapter without one. Raises `ValueError` if there is none, or an
    empty one, which transformers makes for a folder without tokenizer files."""
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


def count_labels(name: str, revision: str | None = None) -> int | None:
    """Number of labels in the head that was saved with a classifier's adapter; `None` without adapter or head."""
    if _adapter_config(name, revision) is None or not is_peft_available():  # without PEFT, loading the model fails
        return None
    from peft import PeftConfig, load_peft_weights

    heads = PeftConfig.from_pretrained(name, revision=revision).modules_to_save or ()
    prefixes = tuple(f"base_model.model.{head}." for head in heads)
    weights = load_peft_weights(name, device="cpu", revision=revision)
    rows = [len(weight) for key, weight in weights.items() if key.startswith(prefixes) and weight.ndim == 2]
    return min(rows, default=None)  # hidden layers of a head have more rows


def _check_path(name: str, part: str) -> None:
    """Raises a `ValueError` for a missing folder, which transformers would report as a malformed id."""
    if (name.startswith((".", "~", os.sep)) or name.count("/") > 1) and not Path(name).exists():
        raise ValueError(
            f"The {part} `{name}` cannot be loaded: there is no such folder; name one, or an id on the Hub."
        )


def _adapter_config(name: str, revision: str | None) -> dict[str, Any] | None:
    """The adapter's configuration; `None` if there is none, or a whole model next to it."""
    if (Path(name) / "config.json").is_file():
        return None
    try:
        path = find_adapter_config_file(name, revision=revision)
    except (OSError, ValueError):  # loading the model reports the error
        return None
    return None if path is None else json.loads(Path(path).read_text(encoding="utf-8"))


def _resize(model: PreTrainedModel, weights: dict[str, Any]) -> None:
    """Resizes embedding and head to the rows that the adapter was saved with, if these are others. Raises a `ValueError` if only one of the
    two was saved and they have weights of their own. `weights` are the adapter's, by PEFT's names."""
    layers = [layer for layer in (model.get_input_embeddings(), model.get_output_embeddings()) if layer is not None]
    names = {layer: name for name, layer in model.named_modules() if layer in layers}
    saved = {
        layer: len(weights[key])
        for layer, name in names.items()
        for infix in ("", ".base_layer")
        if (key := f"base_model.model.{name}{infix}.weight") in weights
    }
    rows = next((count for layer, count in saved.items() if count != len(layer.weight)), None)
    if rows is None:
        return
    ids_of_saved = {id(layer.weight) for layer in saved}
    for layer in layers:
        if id(layer.weight) not in ids_of_saved:
            raise ValueError(
                f"the vocabulary was resized to {rows} in training, and the adapter was saved without its new rows of "
                f"`{names[layer]}`; save it with `save_embedding_layers=True` and the head in `modules_to_save`."
            )
    model.resize_token_embeddings(rows, mean_resizing=False)


def _lacks(missing: list[str], model: PreTrainedModel) -> str:
    """The end of a sentence about a checkpoint without weights of the model's class, with the remedy."""
    return f"has no weights for {', '.join(missing[:3])}, which {type(model).__name__} needs; give a checkpoint that was trained as one."


def _mismatch(name: str, error: RuntimeError, options: dict[str, Any]) -> str:
    """Why weights do not fit: a classifier of several labels where one is needed, or torch's own message."""
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


def check_reference(
    name: str | None,
    reference: PreTrainedModel,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt_ids: Sequence[Sequence[int]],
    trust_remote_code: bool = False,
) -> None:
    """Raises `ValueError` if the reference has a smaller or another vocabulary than the model. Added tokens may
    have other names, since fine-tuning uses reserved ones. Of all others, no token of the prompts may differ, and
    at most half of the vocabulary. `name` is where reference and tokenizer were loaded from, if anywhere."""
    own_size, reference_size = vocab_size(model), vocab_size(reference)
    label = name or reference.config._name_or_path
    if reference_size < own_size:
        raise ValueError(
            f"The reference `{label}` has a vocabulary of {reference_size} tokens and the model one of {own_size}; resize the "
            "reference's embeddings to it with `resize_token_embeddings`, or give another reference."
        )
    differ, shared = ({}, 0) if name is None else _differences(name, tokenizer, trust_remote_code)
    met_in_prompts = sorted(differ.keys() & {i for ids in prompt_ids for i in ids})
    if met_in_prompts or 2 * len(differ) > shared:
        token = (met_in_prompts or sorted(differ))[0]
        raise ValueError(
            f"The reference `{label}` has another vocabulary than the model, with {differ[token][1]!r} for its token {token}, "
            f"{differ[token][0]!r}; give a reference with the model's tokenizer."
        )


def check_same_tokens(
    name: str, label: str, tokenizer: PreTrainedTokenizerBase, trust_remote_code: bool = False
) -> None:
    """Raises `ValueError` if the model at path or Hub id `name` was saved with a tokenizer that gives another meaning
    to a token. Names of added tokens may differ; a model without a tokenizer passes."""
    differ, _ = _differences(name, tokenizer, trust_remote_code)
    if differ:
        token = min(differ)
        raise ValueError(
            f"{label} has a tokenizer of its own, with {differ[token][1]!r} for the policy's token {token}, "
            f"{differ[token][0]!r}; pass a model with the policy's tokenizer."
        )


def _differences(
    name: str, tokenizer: PreTrainedTokenizerBase, trust_remote_code: bool
) -> tuple[dict[int, tuple[str, str]], int]:
    """Tokens (ours, theirs) by id where the tokenizer and a saved model's differ, and the number of ids in both, without added tokens."""
    try:
        saved = load_tokenizer(name, "model", trust_remote_code=trust_remote_code)
    except ValueError:
        return {}, 0  # weights without a tokenizer, such as an adapter
    added = {i for reader in (tokenizer, saved) for i in reader.get_added_vocab().values()}
    ours, theirs = ({i: token for token, i in reader.get_vocab().items()} for reader in (tokenizer, saved))
    shared = (ours.keys() & theirs.keys()) - added
    return {i: (ours[i], theirs[i]) for i in shared if ours[i] != theirs[i]}, len(shared)
