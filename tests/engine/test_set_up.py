"""Models that a trainer's set-up must take as they are: attention for half precision alone, compiled, with code of their own."""

import json
from types import SimpleNamespace

import pytest
import torch
from transformers import AttentionInterface, GPT2ForSequenceClassification, LlamaForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from benchmarks.architectures import build
from trl_repulse import PPOTrainer, ReinforceTrainer, RePULSeTrainer
from trl_repulse.engine.preparation import as_trained, check_noise
from trl_repulse.generation._probe import Guard, probe
from trl_repulse.models._model_checks import check_causal

from ..conftest import build_model


CODE = """
from transformers import LlamaConfig, LlamaForCausalLM

class OwnConfig(LlamaConfig):
    model_type = "own"

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


@pytest.fixture(autouse=True)
def half_precision_attention():
    def attention(module, query, key, value, *args, **kwargs):
        kind = query.device.type
        if torch.is_autocast_enabled(kind):  # as transformers casts for FlashAttention
            query, key, value = (x.to(torch.get_autocast_dtype(kind)) for x in (query, key, value))
        if query.dtype == torch.float32:
            raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
        return sdpa_attention_forward(module, query, key, value, *args, **kwargs)

    AttentionInterface.register("half_precision", attention)
    AttentionMaskInterface.register("half_precision", sdpa_mask)


@pytest.mark.parametrize("trainer_cls", [RePULSeTrainer, PPOTrainer])
def test_attention_that_has_no_kernel_for_float32(make, tokenizer, trainer_cls):
    model = build_model("llama", len(tokenizer))
    model.set_attn_implementation("half_precision")
    trainer = make(trainer_cls, model=model, extra={"processing_class": tokenizer}, bf16=True, beta=0.0)
    assert trainer._guard == Guard(share_prompts=False)  # such attention may take no masks
    trainer.train()


@pytest.mark.parametrize(("device", "during"), [("meta", "eager"), ("cpu", "half_precision")])
def test_attention_is_another_where_a_model_is_not_on_its_device_yet(tokenizer, device, during):
    model = build_model("llama", len(tokenizer))
    model.set_attn_implementation("half_precision")
    accelerator = SimpleNamespace(device=torch.device(device), autocast=lambda: torch.autocast("cpu", torch.bfloat16))
    with as_trained(SimpleNamespace(accelerator=accelerator), model):
        assert model.config._attn_implementation == during
        check_causal(model, "`model`")
    assert model.config._attn_implementation == "half_precision"


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_rounding_is_that_of_autocast(tokenizer, architecture):
    model = build_model(architecture, len(tokenizer)).eval()
    with torch.autocast("cpu", torch.bfloat16):
        assert probe(model) == Guard()


@pytest.mark.parametrize("way", ["model", "in place", "forward"])
def test_compiled_models_are_probed_as_they_are_written(tokenizer, way):
    model = build_model("gpt2", len(tokenizer)).eval()
    compiled = model
    if way == "model":
        compiled = torch.compile(model, backend="eager")
    elif way == "in place":
        model.compile(backend="eager")
    else:
        model.forward = torch.compile(model.forward, backend="eager")
    ids = torch.tensor([[3, 4, 5]])
    with torch.no_grad():
        compiled(input_ids=ids)
    check_causal(compiled, "`model`")
    assert probe(compiled) == Guard()


def test_a_mixture_of_experts_that_gives_its_routers_loss():
    """It comes before the logits where a model's configuration asks for it."""
    model = build("mixtral", 40)
    model.config.output_router_logits = True
    check_causal(model, "`model`")


def test_looking_for_noise_seeds_no_accelerator(tokenizer, monkeypatch):
    model = build_model("llama", len(tokenizer))
    monkeypatch.setattr(torch, "manual_seed", lambda seed: pytest.fail("seeds all devices, of which one is restored"))
    check_noise(model, "policy")


def test_models_with_code_of_their_own_may_be_allowed_where_they_are_loaded(make, tokenizer, tmp_path):
    folder = tmp_path / "own"
    build_model("llama", len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "own.py").write_text(CODE)
    config = json.loads((folder / "config.json").read_text())
    classes = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    config |= {"model_type": "own", "architectures": ["OwnForCausalLM"], "auto_map": classes}
    (folder / "config.json").write_text(json.dumps(config))
    trainer = make(ReinforceTrainer, model=str(folder), model_init_kwargs={"trust_remote_code": True}, beta=0.0)
    assert isinstance(trainer.model, LlamaForCausalLM)


def test_values_may_begin_with_the_reward_model_itself(make, model_dirs, tokenizer):
    reward = GPT2ForSequenceClassification.from_pretrained(model_dirs["gpt2"], num_labels=1)
    extra = {"value_model": reward, "reward_processing_classes": tokenizer}
    trainer = make(PPOTrainer, reward_funcs=reward, extra=extra)
    before = reward.transformer.wte.weight.clone()
    trainer.train()
    assert torch.equal(reward.transformer.wte.weight, before)
