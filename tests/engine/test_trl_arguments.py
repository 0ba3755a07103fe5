"""Arguments of TRL and transformers that have to hold for both models, or are refused before either is loaded."""

import math

import pytest
import torch
from peft import AdaLoraConfig, LoraConfig, PrefixTuningConfig, PromptEncoderConfig, PromptTuningConfig, get_peft_model
from transformers import AutoModelForCausalLM, OPTConfig, OPTForCausalLM

from trl_repulse import PPOTrainer, ReinforceTrainer, RePULSeGRPOTrainer, RePULSePPOTrainer, RePULSeTrainer
from trl_repulse.engine.trl_bridge import disable_dropout
from trl_repulse.evaluation.log_probs import completion_log_probs
from trl_repulse.generation import TransformersGenerator
from trl_repulse.method import proposal_model as _proposal
from trl_repulse.models._model_checks import check_causal

from ..conftest import about_the_cpu
from .test_adapters import lora


pytestmark = pytest.mark.trainer
TRAINERS = [RePULSeTrainer, ReinforceTrainer, PPOTrainer]


def second(trainer):
    return trainer.value.module if isinstance(trainer, PPOTrainer) else trainer.proposal.module


def count_passes(module):
    """Passes of the first layer, and whether each is with gradient; one more in the backward pass if activations are not kept."""
    (layer,) = [m for name, m in module.named_modules() if name.endswith("h.0.attn")]
    passes = []
    # Inside of the layer, whose own hooks are outside of what is recomputed
    layer.register_forward_pre_hook(lambda *_: passes.append(torch.is_grad_enabled()))
    return passes


@pytest.mark.thorough
@pytest.mark.parametrize("trainer_cls", [RePULSeTrainer, PPOTrainer])
@pytest.mark.parametrize("adapters", ["none", "of the second model", "of both"])
def test_activation_checkpointing_recomputes_both_models(make, trainer_cls, adapters):
    extra = {}
    if adapters != "none":
        extra["value_peft_config" if trainer_cls is PPOTrainer else "proposal_peft_config"] = lora("gpt2")
    if adapters == "of both":
        extra["peft_config"] = lora("gpt2")
    found = {}
    for checkpointing in (False, True):
        trainer = make(trainer_cls, extra=extra, gradient_checkpointing=checkpointing, max_steps=1)
        modules = {id(m): m for m in (trainer.model, getattr(second(trainer), "model", second(trainer)))}
        passes = [count_passes(module) for module in modules.values()]
        trainer.train()
        found[checkpointing] = passes
    for plain, checkpointed in zip(found[False], found[True], strict=True):
        assert sum(plain) and len(checkpointed) == len(plain) + sum(plain)


@about_the_cpu
@pytest.mark.parametrize("trainer_cls", TRAINERS)
def test_fp16_on_a_cpu_is_refused(make, trainer_cls):
    """Accelerate (1.15) trains in float32 there; in bfloat16 it does train."""
    with pytest.raises(ValueError, match="`fp16=True` is not supported by Accelerate on 'cpu'.*Set `fp16=False`"):
        make(trainer_cls, fp16=True)
    assert make(trainer_cls, bf16=True).accelerator.native_amp


@pytest.mark.parametrize("trainer_cls", [RePULSeTrainer, ReinforceTrainer])
def test_evaluation_in_batches_longer_than_the_completions_kept(make, prompts, trainer_cls):
    settings = {"per_device_train_batch_size": 2, "num_generations": 2, "log_completions": True}
    trainer = make(trainer_cls, extra={"eval_dataset": prompts}, **settings)
    trainer.train()
    assert "eval_reward" in trainer.evaluate()


@pytest.mark.parametrize(
    ("trainer_cls", "settings"),
    [
        (RePULSeTrainer, {}),
        (RePULSeTrainer, {"negative_loss": "reinforce", "negative_baseline": "proposal"}),
        (RePULSePPOTrainer, {}),
        (RePULSeGRPOTrainer, {}),
        (ReinforceTrainer, {}),
        (ReinforceTrainer, {"baseline": "group_mean", "normalize_advantages": True}),
    ],
)
def test_evaluation_with_one_completion_a_prompt(make, prompts, trainer_cls, settings):
    """CTL compares a prompt's samples, and evaluation learns nothing."""
    settings = {"num_generations_eval": 1, "per_device_eval_batch_size": 4} | settings
    trainer = make(trainer_cls, extra={"eval_dataset": prompts.select(range(3))}, **settings)
    assert math.isfinite(trainer.evaluate()["eval_loss"])


def test_dropout_by_number_is_off_for_both_models(make, tokenizer, tmp_path):
    """OPT's layers keep a probability as a number, which TRL's helper leaves alone; at rate 0 the models stay equal."""
    sizes = {"hidden_size": 16, "word_embed_proj_dim": 16, "ffn_dim": 32}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"max_position_embeddings": 32, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
    config = OPTConfig(vocab_size=len(tokenizer), dropout=0.3, attention_dropout=0.3, **sizes)
    torch.manual_seed(0)
    model = OPTForCausalLM(config).train()
    ids = torch.tensor([[3, 12, 4]])
    assert not torch.equal(model(ids).logits, model(ids).logits)  # the control
    model.save_pretrained(tmp_path / "opt")
    tokenizer.save_pretrained(tmp_path / "opt")
    trainer = make(model=str(tmp_path / "opt"), learning_rate=0.0, beta=0.1)
    trainer.train()
    for log in trainer.state.log_history[:-1]:
        assert log["kl"] == pytest.approx(0, abs=1e-6)
    ids = ids.to(trainer.accelerator.device)
    for module in (trainer.model, trainer.proposal.module):
        assert module.training and torch.equal(module(ids).logits, module(ids).logits)
    disable_dropout(model)
    assert config.dropout == 0.3  # what is saved stays as it is


@pytest.mark.parametrize("trainer_cls", TRAINERS)
@pytest.mark.parametrize(
    "config",
    [
        PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
        PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
        PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
        AdaLoraConfig(task_type="CAUSAL_LM", total_step=10, target_modules=["c_attn"], fan_in_fan_out=True),
        LoraConfig(task_type="CAUSAL_LM", alora_invocation_tokens=[5]),
    ],
    ids=["prompt", "p", "prefix", "AdaLoRA", "aLoRA"],
)
def test_adapters_with_a_forward_pass_of_their_own_are_refused(make, trainer_cls, config):
    second = {RePULSeTrainer: "proposal_peft_config", PPOTrainer: "value_peft_config"}.get(trainer_cls, "peft_config")
    for name in ("peft_config", second):
        with pytest.raises(ValueError, match="have a forward pass of their own"):
            make(trainer_cls, model="not loaded", extra={name: config})


def test_a_policy_with_a_prompt_of_its_own_is_refused(make, model_dirs, tokenizer):
    base = AutoModelForCausalLM.from_pretrained(model_dirs["gpt2"])
    model = get_peft_model(base, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
    with pytest.raises(ValueError, match="PROMPT_TUNING have a forward pass"):
        make(model=model, extra={"processing_class": tokenizer})


def test_alora_is_refused_wherever_a_model_is_sampled_or_scored(make, model_dirs, tokenizer, tmp_path):
    """Its adapter depends on where the invocation stands in the tokens, which is not known of completions scored with a cache."""

    def adapted(**options):
        base = AutoModelForCausalLM.from_pretrained(model_dirs["gpt2"])
        return get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", fan_in_fan_out=True, **options))

    model = adapted(alora_invocation_tokens=[5])
    folder = str(tmp_path / "alora")
    model.save_pretrained(folder)
    for found in (
        lambda: make(ReinforceTrainer, model=model, extra={"processing_class": tokenizer}),
        lambda: make(model="not loaded", extra={"proposal_model": folder}),
        lambda: TransformersGenerator({"policy": model}, tokenizer),
        lambda: completion_log_probs(model, [[5]], [[6]]),
        lambda: check_causal(AutoModelForCausalLM.from_pretrained(folder), "The model"),
    ):
        with pytest.raises(ValueError, match="aLoRA .* use plain LoRA"):
            found()
    check_causal(adapted(), "The model")  # the control


def test_the_proposal_has_no_revision_of_the_policys(make, model_dirs, tmp_path, monkeypatch):
    loaded, load = {}, _proposal.create_model_from_path

    def record(path, *args, **kwargs):
        loaded[path] = kwargs.pop("revision", None)
        return load(path, *args, **kwargs)

    monkeypatch.setattr(_proposal, "create_model_from_path", record)
    other = str(tmp_path / "other")
    AutoModelForCausalLM.from_pretrained(model_dirs["gpt2"]).save_pretrained(other)
    for path, revision in ((other, None), (model_dirs["gpt2"], "main")):
        make(model_init_kwargs={"revision": "main"}, extra={"proposal_model": path})
        assert loaded[path] == revision


def test_a_proposal_with_an_adapter_is_not_given_another(make, model_dirs):
    def adapted(**kwargs):
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(model_dirs["gpt2"]), lora("gpt2"))
        return model.requires_grad_(False) if kwargs else model

    trainer = make(extra={"proposal_model": adapted(), "peft_config": lora("gpt2")})
    assert set(trainer.proposal.module.peft_config) == {"default"}
    trainer.train()
    with pytest.raises(ValueError, match="nothing to train; load its adapter with `is_trainable=True`"):
        make(extra={"proposal_model": adapted(frozen=True), "peft_config": lora("gpt2")})
