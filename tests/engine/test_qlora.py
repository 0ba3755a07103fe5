"""QLoRA by TRL's arguments: two adapters over one base in 4 bits. `bitsandbytes` computes on a CPU too."""

import pytest
import torch
from transformers import BitsAndBytesConfig, GPT2Config, GPT2LMHeadModel

from trl_repulse import PPOTrainer
from trl_repulse.engine.second_model import SecondAdapter
from trl_repulse.models._adapters import keep_4bit_trainable

from .test_adapters import lora


bnb = pytest.importorskip("bitsandbytes")
pytestmark = pytest.mark.trainer


def train(make, own, **kwargs):
    extra = {
        "quantization_config": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32),
        "peft_config": lora("llama"),
        "proposal_peft_config": own,
    }
    trainer = make(model="llama", extra=extra, **({"beta": 0.1, "learning_rate": 0.1} | kwargs))
    assert isinstance(trainer.proposal, SecondAdapter)
    assert any(isinstance(p, bnb.nn.Params4bit) for p in trainer.model.parameters())
    start = {name: p.clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    return trainer, {name for name, p in trainer.model.named_parameters() if not torch.equal(p, start[name])}


@pytest.mark.parametrize("own", [None, lora("llama", r=2)], ids=["one configuration", "two"])
def test_two_adapters_over_one_base_in_4_bits(make, tmp_path, own):
    trainer, changed = train(make, own)
    matrices = {name: p for name, p in trainer.model.named_parameters() if "lora_" in name}
    assert changed <= set(matrices)
    assert {p.dtype for p in matrices.values()} == {torch.bfloat16}  # as TRL makes the policy's
    for adapter in ("default", "proposal"):
        assert {name for name in matrices if adapter in name.split(".") and "lora_B" in name} <= changed
    trainer.save_model()
    assert {path.parent.name for path in (tmp_path / "out").glob("**/*.safetensors")} == {"out", "proposal"}


@pytest.mark.thorough
@pytest.mark.parametrize("optim", ["adamw_bnb_8bit", "paged_adamw_8bit", "lion_8bit"])
def test_optimizers_in_8_bits_resume_bit_for_bit(make, tmp_path, tokenizer, optim):
    """Matrices of fewer than 4,096 numbers keep a state of 32 bits."""
    config = GPT2Config(
        vocab_size=len(tokenizer), n_positions=32, n_embd=48, n_layer=2, n_head=2, eos_token_id=1, pad_token_id=0
    )
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    settings = {"optim": optim, "save_strategy": "steps", "save_steps": 2, "max_steps": 4, "learning_rate": 1e-3}
    settings["model"] = str(tmp_path / "model")
    whole = make(**settings)
    whole.train()
    assert {state["state1"].dtype for state in whole.proposal.optimizer.state.values()} == {torch.uint8, torch.float32}
    resumed = make(**settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    for one, other in ((whole.model, resumed.model), (whole.proposal.module, resumed.proposal.module)):
        for (name, p), q in zip(one.named_parameters(), other.parameters(), strict=True):
            assert torch.equal(p, q), name


def test_shared_rows_change_no_update(make):
    """Adam would make large steps of the rounding errors of small gradients."""
    plain = {"optim": "sgd", "learning_rate": 1.0}
    shared, separate = (train(make, None, share_prompts=share, **plain)[0] for share in ("auto", False))
    assert shared._guard.share_prompts and not separate._guard.share_prompts
    for (name, p), q in zip(shared.model.named_parameters(), separate.model.parameters(), strict=True):
        if "lora_" in name:  # in bfloat16
            torch.testing.assert_close(p, q, atol=2e-3, rtol=2e-2, msg=name)
        else:
            assert torch.equal(p, q), name


def test_weights_packed_for_inference_are_refused(make):
    """On CPUs with AVX512-BF16 bitsandbytes packs 4-bit weights that are read in evaluation mode, and they carry no gradient then."""
    trainer, _ = train(make, None, max_steps=1)
    layers = [module for module in trainer.model.modules() if isinstance(module, bnb.nn.Linear4bit)]
    assert layers and not any(layer.support_avx512bf16_for_cpu for layer in layers)
    layers[0].weight.quant_state.packing_format_for_cpu = True
    with pytest.raises(ValueError, match="packed for inference.*Load it again"):
        keep_4bit_trainable(trainer.model, "`model`")


def test_the_value_models_adapter_learns(make):
    """Its head is new and whole; on CPUs with AVX512-BF16 the check of the value model reads it in evaluation mode."""
    extra = {
        "quantization_config": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32),
        "peft_config": lora("llama"),
        "value_peft_config": lora("llama"),
    }
    trainer = make(PPOTrainer, model="llama", extra=extra, learning_rate=0.1, max_steps=3)  # the head starts at 0
    matrices = {name: p for name, p in trainer.value.module.named_parameters() if "lora_B" in name}
    start = {name: p.detach().clone() for name, p in matrices.items()}
    trainer.train()
    assert start and all(not torch.equal(p, start[name]) for name, p in matrices.items())
