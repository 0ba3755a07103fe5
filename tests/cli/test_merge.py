"""`trl-repulse merge`: the merged model says what the adapter says; a proposal's is refused unless asked for."""

from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import ModelCard
from peft import AutoPeftModelForCausalLM, LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from trl_repulse.cli import merge as command
from trl_repulse.cli.main import main
from trl_repulse.engine.records import write_proposal_card
from trl_repulse.models import _loading

from ..conftest import build_model, build_tokenizer


@pytest.fixture
def adapter(tmp_path, model_dirs):
    """A folder with a random adapter over a saved model, without a tokenizer."""
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(model_dirs["gpt2"])
    config = LoraConfig(task_type="CAUSAL_LM", target_modules=["c_attn"], r=4, init_lora_weights=False)
    get_peft_model(base, config).save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(4, 10).view(1, -1)).logits


def assert_merged(folder, expected):
    merged = AutoModelForCausalLM.from_pretrained(folder)
    torch.testing.assert_close(logits(merged), expected, atol=1e-4, rtol=1e-4)
    return merged


def test_merged_weights_give_the_adapters_logits(adapter, tmp_path, model_dirs, capsys):
    assert main(["merge", str(adapter), str(tmp_path / "merged")]) == 0
    assert "Merged" in capsys.readouterr().out
    expected = logits(AutoPeftModelForCausalLM.from_pretrained(adapter))
    assert_merged(tmp_path / "merged", expected)
    base = AutoModelForCausalLM.from_pretrained(model_dirs["gpt2"])
    assert not torch.allclose(logits(base), expected, atol=1e-2)  # the control: the adapter does something
    assert AutoTokenizer.from_pretrained(tmp_path / "merged").eos_token == "<eos>"


def test_the_card_of_a_training_run_goes_along(adapter, tmp_path):
    card = ModelCard("---\nlibrary_name: peft\ntags:\n- trl\n- lora\n- base_model:adapter:b\n---\n\n# A run\n")
    card.save(adapter / "README.md")
    assert main(["merge", str(adapter), str(tmp_path / "merged")]) == 0
    merged = ModelCard.load(tmp_path / "merged" / "README.md")
    assert (merged.data.library_name, merged.data.tags) == ("transformers", ["trl"]) and "# A run" in merged.text
    card.data.tags = ["lora"]  # PEFT's form
    card.save(adapter / "README.md")
    assert main(["merge", str(adapter), str(tmp_path / "again")]) == 0
    assert not (tmp_path / "again" / "README.md").exists()


@pytest.fixture
def tied(tmp_path):
    """Saves a model whose head shares the embedding's weights, and an adapter; returns the adapter's logits."""

    def tied(architecture, **changes):
        base = build_model(architecture, len(tokens := build_tokenizer()))
        base.config.tie_word_embeddings = True
        base.tie_weights()
        base.save_pretrained(tmp_path / "base")
        tokens.save_pretrained(tmp_path / "base")
        base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        config = LoraConfig(task_type="CAUSAL_LM", r=4, init_lora_weights=False, **changes)
        adapted = get_peft_model(base, config)
        adapted.save_pretrained(tmp_path / "adapter")
        return logits(adapted)

    return tied


EMBEDDING = {"gpt2": "wte", "llama": "embed_tokens"}


@pytest.mark.filterwarnings("ignore:Model with `tie_word_embeddings=True`")
@pytest.mark.parametrize("place", ["head", "embedding"])
def test_head_and_embedding_that_share_weights_are_set_apart(tied, tmp_path, architecture, place):
    expected = tied(architecture, target_modules=["lm_head" if place == "head" else EMBEDDING[architecture]])
    assert main(["merge", str(tmp_path / "adapter"), str(tmp_path / "merged")]) == 0
    assert not assert_merged(tmp_path / "merged", expected).config.tie_word_embeddings


def test_shared_weights_that_no_adapter_changes_stay_shared(tied, tmp_path):
    expected = tied("llama", target_modules=["q_proj"])
    assert main(["merge", str(tmp_path / "adapter"), str(tmp_path / "merged")]) == 0
    assert assert_merged(tmp_path / "merged", expected).config.tie_word_embeddings


@pytest.mark.filterwarnings("ignore:Model with `tie_word_embeddings=True`")
def test_a_merge_that_gives_other_logits_is_refused(tied, tmp_path, monkeypatch, capsys):
    tied("llama", target_modules=["lm_head"])
    argv = ["merge", str(tmp_path / "adapter"), str(tmp_path / "merged")]
    with monkeypatch.context() as patch:
        patch.setattr(command, "_untie", lambda model: None)
        assert main(argv) == 1
    error = "cannot be merged: the merged model gives other logits"
    assert error in capsys.readouterr().err and not (tmp_path / "merged").exists()
    load, base = _loading.load_model, str(tmp_path / "base")
    monkeypatch.setattr(_loading, "load_model", lambda cls, _, *more, **kwargs: load(cls, base, *more, **kwargs))
    assert main(argv) == 1
    assert error in capsys.readouterr().err and not (tmp_path / "merged").exists()


def test_dtype(adapter, tmp_path):
    assert main(["merge", str(adapter), str(tmp_path / "merged"), "--dtype", "bfloat16"]) == 0
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "merged").dtype == torch.bfloat16


def test_a_proposal_is_refused_unless_asked_for(adapter, tmp_path, capsys):
    write_proposal_card(adapter, "policy", "base", SimpleNamespace(potential="tilted", target_dist_beta=-2.0))
    assert main(["merge", str(adapter), str(tmp_path / "merged")]) == 1
    assert "--allow_proposal" in capsys.readouterr().err
    assert not (tmp_path / "merged").exists()
    assert main(["merge", str(adapter), str(tmp_path / "merged"), "--allow_proposal"]) == 0
    assert ModelCard.load(adapter / "README.md").data.library_name == "peft"
    card = ModelCard.load(tmp_path / "merged" / "README.md")
    assert card.data.library_name == "transformers"
    assert "Do not deploy" in card.text and "not-for-deployment" in card.data.tags
    # What was merged is still known for what it is
    assert main(["merge", str(tmp_path / "merged"), str(tmp_path / "again")]) == 1


def test_errors(adapter, tmp_path, model_dirs, capsys):
    def refused(*argv):
        assert main(["merge", *map(str, argv)]) == 1
        message = capsys.readouterr().err.splitlines()[-1]  # after the progress of loading
        assert message.startswith("trl-repulse merge: ")
        return message

    out = tmp_path / "merged"
    assert "holds no adapter" in refused(tmp_path / "nothing", out)
    assert "full weights" in refused(model_dirs["gpt2"], out)
    assert "is in the way" in refused(adapter, adapter)
    assert refused(adapter, out, "--base_model", tmp_path / "gone")
    assert refused(adapter, out, "--base_model", model_dirs["llama"])
    assert not out.exists()
