"""QLoRA by TRL's arguments: two adapters over one base in 4 bits. `bitsandbytes` computes on a CPU too."""

import pytest
import torch
from transformers import BitsAndBytesConfig

from trl_repulse.trainers.second_adapter import SecondAdapter

from .test_adapters_math import lora


bnb = pytest.importorskip("bitsandbytes")
pytestmark = pytest.mark.trainer


def quantized_weights(model):
    return {name: p for name, p in model.named_parameters() if isinstance(p, bnb.nn.Params4bit)}


def train(make, own, **kwargs):
    extra = {
        "quantization_config": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32),
        "peft_config": lora("llama"),
        "proposal_peft_config": own,
    }
    trainer = make(model="llama", extra=extra, beta=0.1, learning_rate=0.1, **kwargs)
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


def test_gradient_checkpointing_changes_no_update(make):
    plain, checkpointed = (train(make, None, gradient_checkpointing=on)[0] for on in (False, True))
    for (name, p), q in zip(plain.model.named_parameters(), checkpointed.model.parameters(), strict=True):
        assert torch.equal(p, q), name
