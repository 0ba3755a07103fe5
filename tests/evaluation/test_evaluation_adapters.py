"""Adapters as evaluation loads them: as PEFT does, over their bases, with whatever is wrong said of the right folder."""

import json

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from trl_repulse.evaluation._generation import hash_model
from trl_repulse.models._loading import load_model, load_tokenizer

from ..reward_models import build_tokenizer, save_model


IDS = torch.arange(4, 10).view(1, -1)


@pytest.fixture
def save(tmp_path, model_dirs):
    """Saves a random adapter over a saved model, without a tokenizer; returns its folder and its logits."""

    def save(base=None, rows=None, auto_class=AutoModelForCausalLM, name="adapter", **changes):
        torch.manual_seed(0)
        model = auto_class.from_pretrained(base or model_dirs["llama"])
        if rows is not None:
            model.resize_token_embeddings(rows)
        task = "CAUSAL_LM" if auto_class is AutoModelForCausalLM else "SEQ_CLS"
        options = {"target_modules": ["q_proj"], "r": 4, "init_lora_weights": False, "task_type": task} | changes
        adapted = get_peft_model(model, LoraConfig(**options)).eval()
        for key, weights in adapted.named_parameters():
            if "magnitude" in key or "modules_to_save" in key:
                weights.data *= 1.5  # as if trained
        adapted.save_pretrained(tmp_path / name)
        with torch.no_grad():
            return str(tmp_path / name), adapted(IDS).logits

    return save


def assert_loaded(folder, expected):
    model = load_model(AutoModelForCausalLM, folder, "model")
    with torch.no_grad():
        torch.testing.assert_close(model(IDS).logits, expected)
    return model


@pytest.mark.parametrize("changes", [{}, {"use_dora": True}, {"modules_to_save": ["lm_head"]}])
def test_kinds_of_adapters(save, changes):
    assert_loaded(*save(**changes))


@pytest.mark.parametrize("changes", [{}, {"modules_to_save": ["embed_tokens", "lm_head"]}])
def test_an_adapter_over_a_resized_vocabulary(save, tokenizer, changes):
    assert_loaded(*save(rows=len(tokenizer) + 2, **changes))


def test_a_resized_vocabulary_that_was_not_saved(save, tokenizer):
    folder, _ = save(rows=len(tokenizer) + 2, target_modules=["embed_tokens"])
    with pytest.raises(ValueError, match=r"The model `.*` cannot be loaded: .* without its new rows of `lm_head`"):
        load_model(AutoModelForCausalLM, folder, "model")


def test_an_adapter_is_the_model_that_transformers_loads(save):
    """By the hash of its weights too, of which the seeds of held-out samples are made."""
    folder, expected = save()
    loaded = assert_loaded(folder, expected)
    assert hash_model(loaded) == hash_model(AutoModelForCausalLM.from_pretrained(folder))
    assert loaded._hf_peft_config_loaded and not loaded.training


def test_an_adapter_without_a_tokenizer_has_that_of_its_base(save, tokenizer):
    folder, _ = save()
    assert load_tokenizer(folder, "model").get_vocab() == tokenizer.get_vocab()


def test_what_an_adapter_lacks_is_said(save, tmp_path, model_dirs):
    folder, _ = save()
    weights = load_file(f"{folder}/adapter_model.safetensors")
    save_file(dict(list(weights.items())[1:]), f"{folder}/adapter_model.safetensors")
    with pytest.raises(ValueError, match=r"The model `.*adapter` cannot be loaded: the adapter lacks weights"):
        load_model(AutoModelForCausalLM, folder, "model")
    base = AutoModelForCausalLM.from_pretrained(model_dirs["llama"])
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    get_peft_model(base, config).save_pretrained(tmp_path / "prompt")
    with pytest.raises(ValueError, match=r"The model `.*prompt` cannot be loaded: a PROMPT_TUNING adapter"):
        load_model(AutoModelForCausalLM, str(tmp_path / "prompt"), "model")


def test_an_adapter_that_tokens_activate_is_refused(model_dirs, tmp_path):
    config = LoraConfig(task_type="CAUSAL_LM", alora_invocation_tokens=[1, 2])
    get_peft_model(AutoModelForCausalLM.from_pretrained(model_dirs["llama"]), config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="cannot be loaded: an aLoRA adapter .* give one of plain LoRA"):
        load_model(AutoModelForCausalLM, str(tmp_path), "model")


def test_the_head_of_a_classifier_comes_from_its_adapter_or_not_at_all(save, model_dirs):
    folder, expected = save(auto_class=AutoModelForSequenceClassification, modules_to_save=["score"])
    with pytest.raises(ValueError, match=r"The reward model `.*` cannot be loaded: .*size mismatch"):  # two labels
        load_model(AutoModelForSequenceClassification, folder, "reward model", num_labels=1)
    loaded = load_model(AutoModelForSequenceClassification, folder, "reward model")
    with torch.no_grad():
        torch.testing.assert_close(loaded(IDS).logits, expected)
    with pytest.raises(ValueError, match=r"The model `.*` cannot be loaded: the adapter is of another kind"):
        load_model(AutoModelForCausalLM, folder, "model")
    language, _ = save(name="language")
    with pytest.raises(ValueError, match=r"The reward model `.*` cannot be loaded: the adapter is of another kind"):
        load_model(AutoModelForSequenceClassification, language, "reward model", num_labels=1)
    bare, _ = save(name="bare", task_type=None)  # it has no head to bring
    with pytest.raises(ValueError, match=r"`.*bare` cannot be loaded: its base `.*` has no weights for score.weight"):
        load_model(AutoModelForSequenceClassification, bare, "reward model", num_labels=1)


def test_several_labels_where_one_is_read(tmp_path):
    folder, _ = save_model(tmp_path / "two", "llama", build_tokenizer(), num_labels=2)
    with pytest.raises(
        ValueError,
        match=r"The reward model `.*two` cannot be loaded: its head has the size of 2 labels.*--reward_type",
    ):
        load_model(AutoModelForSequenceClassification, folder, "reward model", num_labels=1)


def test_folders_that_are_empty_or_not_there(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"The model `.*empty` has no tokenizer beside its weights"):
        load_tokenizer(str(tmp_path / "empty"), "model")
    for load in (load_tokenizer, lambda *options: load_model(AutoModelForCausalLM, *options)):
        with pytest.raises(ValueError, match=r"The model `./nosuch` cannot be loaded: there is no such folder"):
            load("./nosuch", "model")


def test_an_adapter_whose_base_is_unknown(save):
    folder, _ = save()
    path = f"{folder}/adapter_config.json"
    with open(path) as file:
        config = json.load(file)
    with open(path, "w") as file:
        json.dump(config | {"base_model_name_or_path": None}, file)
    with pytest.raises(ValueError, match="does not say over which model it was trained"):
        load_model(AutoModelForCausalLM, folder, "model")
