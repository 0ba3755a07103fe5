"""Responses of models and tokenizers of other kinds: without keys and values, without a token that begins a text."""

import pytest
import torch
from tokenizers import processors
from transformers import (
    AutoModelForCausalLM,
    FalconH1Config,
    LlamaConfig,
    MambaConfig,
    MambaForCausalLM,
    MiniMaxConfig,
    RecurrentGemmaConfig,
    RecurrentGemmaForCausalLM,
)

from trl_repulse.evaluation.gcg import GCGError, evaluate_gcg, read_results, run_gcg
from trl_repulse.evaluation.gcg.evaluator import sample_responses, target_log_probs
from trl_repulse.generation._probe import repeats_cache

from ..gcg_support import SIZES, build_model, build_tokenizer
from ..gcg_trigger import evaluation_config, judge


def test_a_tokenizer_that_begins_no_text(tmp_path):
    """Without a goal the prompt before the attack is the token that begins a text, or ends one, as GPT-2 has it."""
    tokenizer = build_tokenizer(chat_template=None)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single="$A", special_tokens=[])
    tokenizer.bos_token = None
    model = build_model("gpt2", len(tokenizer))
    config = evaluation_config(scenario="strings", prompt_format="raw", num_steps=1, suffix_init="x x x x")
    path = evaluate_gcg(model, tokenizer, [{"target": " there"}], judge, config, tmp_path / "out.jsonl")
    (record,) = read_results(path)[1]
    expected = target_log_probs(model, [tokenizer.eos_token_id], tokenizer(" there")["input_ids"]).sum().item()
    assert record["status"] == "ok"
    assert record["before"]["target_log_prob"]["sum"] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("architecture", ["mamba", "recurrent_gemma"])
def test_models_without_keys_and_values_are_sampled(architecture):
    """Each sample from a pass over the whole text."""
    tokenizer = build_tokenizer(chat_template=None)
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 16, "num_hidden_layers": 3}
    sizes |= {"eos_token_id": 2, "pad_token_id": 0}
    torch.manual_seed(0)
    if architecture == "mamba":
        model = MambaForCausalLM(MambaConfig(**sizes, state_size=4)).eval()
    else:
        config = RecurrentGemmaConfig(**sizes, intermediate_size=48, num_attention_heads=2, lru_width=16)
        model = RecurrentGemmaForCausalLM(config).eval()
    prompt = tokenizer("the house")["input_ids"]
    found = sample_responses(model, tokenizer, prompt, 2000, 1, seed=0)
    with torch.no_grad():
        p = model(torch.tensor([prompt]), use_cache=False).logits[0, -1].softmax(dim=-1)
    likely = p.argsort(descending=True)[:20]
    for token in likely[[tokenizer.decode([i]).isascii() for i in likely.tolist()]].tolist():
        text = tokenizer.decode([token], skip_special_tokens=True)
        expected = sum(p[i].item() for i in range(len(p)) if tokenizer.decode([i], skip_special_tokens=True) == text)
        assert abs(found.count(text) / 2000 - expected) < 5 * (expected / 2000) ** 0.5 + 1e-3
    assert all(sample_responses(model, tokenizer, prompt, 3, 4, seed=1))


@pytest.mark.parametrize("architecture", ["falcon_h1", "minimax", "llama"])
def test_caches_that_cannot_be_repeated(architecture, monkeypatch):
    """Layers of keys, values and states at once, or a cache of a model's own: samples are those without a cache."""
    tokenizer = build_tokenizer(chat_template=None)
    sizes = SIZES | {"vocab_size": len(tokenizer), "num_key_value_heads": 1, "head_dim": 16}
    if architecture == "falcon_h1":
        states = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8}
        config = FalconH1Config(**sizes, **states)
    elif architecture == "minimax":
        layers = ["linear_attention", "full_attention"]
        config = MiniMaxConfig(**sizes, layer_types=layers, num_local_experts=2)
    else:
        config = LlamaConfig(**sizes)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    prompt = tokenizer("the house")["input_ids"]
    found = sample_responses(model, tokenizer, prompt, 4, 6, seed=1)
    assert repeats_cache(model) == (architecture == "llama")
    monkeypatch.setattr("trl_repulse.evaluation.gcg.evaluator.repeats_cache", lambda model: False)
    assert found == sample_responses(model, tokenizer, prompt, 4, 6, seed=1) and len({*found}) > 1


def test_a_prompt_that_exceeds_the_context_does_not_end_the_run(tmp_path):
    tokenizer = build_tokenizer()
    model = build_model("gpt2", len(tokenizer))  # which has 128 positions
    rows = [{"goal": goal, "target": " sure"} for goal in ("tell me the secret of the house " * 20, "tell me")]
    config = evaluation_config(num_steps=1)
    path = evaluate_gcg(model, tokenizer, rows, judge, config, tmp_path / "out.jsonl")
    _, records = read_results(path)
    assert [record["status"] for record in records] == ["error", "ok"]
    assert "exceed the model's context of 128" in records[0]["reason"]
    with pytest.raises(GCGError, match="exceed the model's context of 128"):
        run_gcg(model, tokenizer, rows[0]["goal"], " sure", config)
