"""What a trainer's set-up must take as it is: attention for half precision, compiled models; and the batch it checks models on."""

import copy
import json
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from datasets import Dataset, IterableDataset
from transformers import (
    AttentionInterface,
    GPT2ForSequenceClassification,
    GPT2ForTokenClassification,
    LlamaForCausalLM,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from benchmarks.architectures import build
from trl_repulse import PPOTrainer, ReinforceTrainer, RePULSeTrainer
from trl_repulse.engine import preparation as _set_up
from trl_repulse.engine.preparation import as_trained, check_noise
from trl_repulse.engine.scoring import Layout
from trl_repulse.generation._probe import Guard, probe
from trl_repulse.models._model_checks import check_causal

from ..conftest import build_model, build_tokenizer


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


LONG = (
    "the cat sat a dog ate the fish the dog ran the cat sat"  # longer than prompts that are made up, 12 with padding
)
PROMPTS = ["the", LONG, "a dog", "the cat sat", "fish", "the dog"]


def rows(prompts=PROMPTS):
    return Dataset.from_dict({"prompt": prompts})


@pytest.mark.trainer
def test_it_is_of_the_runs_prompts_and_the_policys_draws(make, tokenizer, architecture):
    trainer = make(ReinforceTrainer, architecture, dataset=rows(), max_completion_length=4, temperature=5.0)
    prompts, mask, completions, real = trainer._first_batch
    for ids, own, text in zip(prompts, mask, PROMPTS[:4], strict=True):
        assert ids[own == 1].tolist() == tokenizer(text)["input_ids"]
        assert own.tolist() == sorted(own.tolist())  # padded on the left
    assert completions.shape == real.shape == (4, 3, 4)
    assert len({tuple(row) for row in completions.flatten(0, 1).tolist()}) > 6  # drawn, and not the likeliest
    for ids, own in zip(completions.flatten(0, 1).tolist(), real.flatten(0, 1).tolist(), strict=True):
        length = ids.index(1) + 1 if 1 in ids else 4
        assert own == [1] * length + [0] * (4 - length)
    assert 0 in real


@pytest.mark.trainer
@pytest.mark.parametrize("positions", [24, 64, 2048])
def test_long_prompts_are_cut_to_what_is_quickly_read(make, tokenizer, positions):
    model = build_model("llama", len(tokenizer))
    model.config.max_position_embeddings = positions
    text = " ".join(["the cat"] * 400)
    settings = {"dataset": rows([text, "fish"] * 2), "max_completion_length": 8, "share_prompts": True}
    if positions < 800:
        settings["dataset"] = rows([" ".join(["the cat"] * ((positions - 8) // 2)), "fish"] * 2)
    longest = {24: None, 64: 40, 2048: 512}[positions]
    batch = make(ReinforceTrainer, model, extra={"processing_class": tokenizer}, **settings)._first_batch
    if longest is None:  # no room for a prompt with three completions of eight tokens
        assert batch is None
    else:
        assert batch[0].size(1) == longest and batch[1].sum(dim=1).tolist() == [longest, 1] * 2


@pytest.mark.trainer
def test_a_stream_loses_no_row(make):
    seen = {}
    for share in (True, False):
        stream = IterableDataset.from_generator(lambda: iter([{"prompt": text} for text in PROMPTS * 8]))
        seen[share] = []

        def reward(prompts, completions, share=share, **kwargs):
            seen[share].append((prompts, completions))
            return [0.5 * len(completion) for completion in completions]

        trainer = make(ReinforceTrainer, dataset=stream, reward_funcs=reward, share_prompts=share)
        assert (trainer._first_batch is not None) == share
        trainer.train()
    assert seen[True] == seen[False] and len(seen[True]) == 2


def leak(monkeypatch):
    """Models that are marked read the completion before their own, behind prompts that are longer than those made up."""
    masks = Layout.masks

    def leaking(self, config, dtype, attention_mask):
        found = masks(self, config, dtype, attention_mask).clone()
        if getattr(config, "leaks", False) and self.prompt > 12 and self.count > 1:
            begin = self.prompt + self.width
            found[:, :, begin : begin + self.width, self.prompt : begin] = found[:, :, begin:, begin:][
                :, :, : self.width, : self.width
            ].amax()
        return found

    monkeypatch.setattr(Layout, "masks", leaking)


@pytest.mark.trainer
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("role", ["policy", "proposal", "value model"])
def test_what_only_the_runs_prompts_show(make, role, bf16, monkeypatch):
    leak(monkeypatch)
    tokenizer = build_tokenizer()
    model = build_model("gpt2", len(tokenizer))
    other = copy.deepcopy(model)
    if role == "value model":
        config = copy.deepcopy(model.config)
        config.num_labels = 1
        other = GPT2ForTokenClassification(config)
        other.transformer.load_state_dict(model.transformer.state_dict())
    (model if role == "policy" else other).config.leaks = True
    name = {"policy": "proposal_model", "proposal": "proposal_model", "value model": "value_model"}[role]
    cls = PPOTrainer if role == "value model" else RePULSeTrainer
    said = []
    monkeypatch.setattr(_set_up.logger, "warning_once", said.append)

    def trainer(prompts, share="auto"):
        extra = {"processing_class": tokenizer, name: copy.deepcopy(other)}
        settings = {"dataset": rows(prompts), "share_prompts": share, "max_completion_length": 4, "bf16": bf16}
        return make(cls, copy.deepcopy(model), extra=extra, **settings)

    assert trainer(["the", "the cat"] * 2)._guard.share_prompts
    assert not [text for text in said if "cannot read a prompt once" in text]
    assert not trainer(PROMPTS)._guard.share_prompts
    (text,) = (text for text in said if "cannot read a prompt once" in text)
    assert f"the {role}, " in text and "the data set's first prompts" in text
    with pytest.raises(ValueError, match="the data set's first prompts .*`share_prompts=False`"):
        trainer(PROMPTS, True)
    assert not trainer(PROMPTS, False)._guard.share_prompts


@pytest.mark.trainer
def test_a_value_model_with_fewer_positions_is_checked_on_what_it_can_read(make, tokenizer, monkeypatch):
    config = build_model("gpt2", len(tokenizer)).config
    config.num_labels, config.n_positions = 1, 24
    widths, reads = [], _set_up.reads_rows_alike

    def watched(model, training, read_rows, batch):
        widths.append(batch[0].size(1))
        return reads(model, training, read_rows, batch)

    monkeypatch.setattr(_set_up, "reads_rows_alike", watched)
    settings = {"share_prompts": True, "max_completion_length": 4, "num_generations": 4}
    extra = {"value_model": GPT2ForTokenClassification(config)}
    trainer = make(PPOTrainer, "gpt2", dataset=rows(), extra=extra, **settings)
    assert widths == [14, 24 - 3 * 4] and trainer._guard.longest_row == 24
    trainer.train()


@pytest.mark.trainer
def test_rows_that_are_made_at_random(make):
    """Reading the first ones changes no random state."""

    def made(rows):
        drawn = random.random(), np.random.rand(), torch.rand(1).item()
        return {"prompt": [PROMPTS[int(6 * sum(drawn)) % 6] for _ in rows["prompt"]]}

    states = {}
    for share in (True, False):
        dataset = rows(PROMPTS * 4).with_transform(made)
        trainer = make(ReinforceTrainer, dataset=dataset, share_prompts=share)
        assert (trainer._first_batch is not None) == share
        states[share] = random.random(), np.random.rand(), torch.rand(1).item()
    assert states[True] == states[False]


@pytest.mark.trainer
def test_a_model_that_only_an_engine_samples_from(make, tokenizer, monkeypatch):
    model = build_model("llama", len(tokenizer))

    def generate(*args, **kwargs):
        raise AttributeError("no generate")

    monkeypatch.setattr(model, "generate", generate)
    settings = {"use_transformers_continuous_batching": True, "share_prompts": True}
    trainer = make(ReinforceTrainer, model, extra={"processing_class": tokenizer}, **settings)
    assert trainer._first_batch is None and trainer._guard.share_prompts
