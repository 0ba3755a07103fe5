"""Sampling and scoring that are the model's own, where padded or cached passes of an architecture are not."""

import pytest
import torch
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    FalconConfig,
    MambaConfig,
    MiniMaxConfig,
    MixtralConfig,
    PersimmonConfig,
    PhimoeConfig,
    RecurrentGemmaConfig,
    RwkvConfig,
    set_seed,
)

from trl_repulse import (
    PPOConfig,
    PPOTrainer,
    ReinforceConfig,
    ReinforceTrainer,
    RePULSeConfig,
    RePULSeTrainer,
)
from trl_repulse.evaluation._generation import transformers_engine
from trl_repulse.evaluation.log_probs import completion_log_probs
from trl_repulse.generation import TransformersGenerator
from trl_repulse.generation._probe import Guard, probe

from .conftest import build_model, word_reward


PROMPTS = ["the", "the cat", "the cat sat", "the dog ran ate fish"]
SHAPE = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2}
SPECIAL = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
# What each architecture needs
GUARDS = {
    "minimax": Guard(sample_by_length=True),
    "rwkv": Guard(score_by_length=True, sample_by_length=True, use_cache=False),
    "recurrent_gemma": Guard(score_by_length=True, sample_by_length=True),
    "mamba": Guard(),
    "bloom": Guard(),
}


def build(architecture, size):
    set_seed(0)
    wide = SHAPE | SPECIAL | {"vocab_size": size, "initializer_range": 0.4}
    if architecture == "minimax":
        experts = {"num_key_value_heads": 1, "num_local_experts": 2, "num_experts_per_tok": 1}
        config = MiniMaxConfig(**wide, **experts, layer_types=["linear_attention", "full_attention"])
    elif architecture == "rwkv":
        config = RwkvConfig(vocab_size=size, hidden_size=32, num_hidden_layers=2, context_length=32, **SPECIAL)
    elif architecture == "recurrent_gemma":
        layers = {"num_hidden_layers": 3, "lru_width": 16, "attention_window_size": 8, "w_init_variance_scale": 0.4}
        config = RecurrentGemmaConfig(**wide | layers)
    elif architecture == "mamba":
        config = MambaConfig(vocab_size=size, hidden_size=16, num_hidden_layers=2, state_size=4, **SPECIAL)
    else:
        config = BloomConfig(vocab_size=size, hidden_size=16, n_layer=2, n_head=2, initializer_range=0.4, **SPECIAL)
    model = AutoModelForCausalLM.from_config(config)
    if architecture == "rwkv":  # its decays are small at first
        with torch.no_grad():
            for name, p in model.named_parameters():
                if p.dim() > 1 and "embeddings" not in name:
                    p.normal_(std=0.4)
    return model.eval()


@pytest.fixture(params=["minimax", "rwkv", "recurrent_gemma"])
def faulty(request):
    return request.param


@torch.no_grad()
def alone(model, prompt, completion):
    """Log-probabilities (T, V) of each token to come, from one unpadded pass."""
    ids = torch.tensor([[*prompt, *completion]])
    return model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float().log_softmax(dim=-1)


def surprise(model, prompts, completions):
    """z of Σ −log p − entropy over draws, which is 0 in expectation exactly if they follow the model."""
    gaps = []
    for prompt, completion in zip(prompts, completions, strict=True):
        log_p = alone(model, prompt, completion)
        chosen = log_p.gather(1, torch.tensor(completion)[:, None])[:, 0]
        gaps.append((-chosen + (log_p.exp() * log_p).sum(dim=-1)).sum().item())
    gaps = torch.tensor(gaps, dtype=torch.float64)
    return (gaps.mean() / (gaps.std() / len(gaps) ** 0.5)).item()


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("architecture", GUARDS)
def test_what_is_found(tokenizer, architecture, training):
    assert probe(build(architecture, len(tokenizer)), training) == GUARDS[architecture]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ordinary_models_need_no_guard(tokenizer, architecture, dtype):
    assert probe(build_model(architecture, len(tokenizer)).to(dtype)) == Guard()
    assert probe(build_model(architecture, 50_000).to(dtype)) == Guard()


def test_nothing_is_disturbed(tokenizer):
    model = build_model("gpt2", len(tokenizer)).train()
    model.transformer.h[1].eval()
    modes, habits = [module.training for module in model.modules()], model.generation_config
    state = torch.get_rng_state()
    weights = {name: p.clone() for name, p in model.named_parameters()}
    probe(model)
    assert [module.training for module in model.modules()] == modes and model.generation_config is habits
    assert torch.equal(torch.get_rng_state(), state)
    for name, p in model.named_parameters():
        assert torch.equal(p, weights[name]) and p.grad is None
