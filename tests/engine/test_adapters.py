"""Policy and proposal as two adapters over one base: losses and gradients are those of two models, passes, files, resume, who shares a base."""

import copy
import functools
from collections import Counter
from contextlib import nullcontext

import pytest
import torch
from datasets import Dataset, concatenate_datasets
from huggingface_hub import ModelCard
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, PreTrainedModel, TrainerCallback

from trl_repulse import RePULSeGRPOTrainer, RePULSePPOTrainer, RePULSeTrainer
from trl_repulse.engine import second_model as second_adapter
from trl_repulse.engine import trl_bridge as _trl_bridge
from trl_repulse.engine.second_model import SecondAdapter, SecondModel

from ..conftest import build_model, same_parameters
from ..recorded import gradients, prepare, recorded
from ..trainers.test_trainer_math import reference_loss


pytestmark = [pytest.mark.trainer, pytest.mark.thorough]

TARGETS = {"gpt2": ["c_attn", "c_proj"], "llama": ["q_proj", "v_proj", "down_proj"]}


def lora(architecture="gpt2", **kwargs):
    settings = {"task_type": "CAUSAL_LM", "target_modules": TARGETS[architecture], "r": 4, "lora_dropout": 0.1}
    return LoraConfig(**(settings | kwargs))


def weights(model, name):
    return {key: p for key, p in model.named_parameters() if name in key.split(".")}


def active(model):
    """Adapters that the next pass would go through."""
    layers = second_adapter.adapter_layers(model)
    names = {tuple(layer.active_adapters) for layer in layers}
    disabled = {layer.disable_adapters for layer in layers}
    assert len(names) == len(disabled) == 1
    return "base" if disabled.pop() else names.pop()[0]


class RecordedAdapters(recorded(RePULSeTrainer)):
    def _draws_others(self):
        return active(self.model) == "proposal"


@pytest.fixture
def run(tmp_path, tokenizer):
    """One update on recorded completions with random adapters: trainer, separate copies of all models, gradients."""

    def run(architecture, *batches, peft=None, **kwargs):
        settings = {"proposal": "learned", "alpha": 2.0, "target_dist_beta": -0.7, "beta": 0.3} | kwargs
        config = lora(architecture, init_lora_weights=False, **(peft or {}))
        given = RecordedAdapters, architecture, *batches
        trainer, *_ = prepare(tmp_path, tokenizer, *given, extra={"peft_config": config}, **settings)
        bare = build_model(architecture, len(tokenizer), seed=0).eval().to(trainer.accelerator.device)
        torch.manual_seed(7)
        with torch.no_grad():
            for p in trainer.proposal.module.parameters():
                p.copy_(0.3 * torch.randn_like(p))
        copies, own = {}, {}
        for model, name in (("policy", "default"), ("proposal", "proposal")):
            separate = get_peft_model(copy.deepcopy(bare), copy.deepcopy(config)).eval().to(bare.device)
            for key, p in weights(separate, "default").items():
                p.data = trainer.model.get_parameter(key.replace(".default", f".{name}")).data.clone()
            copies[name], own[model] = separate, weights(trainer.model, name)
        found = gradients(trainer, {model: torch.nn.ParameterList(each.values()) for model, each in own.items()})
        kept = {model: dict(zip(own[model], each, strict=True)) for model, each in found.items()}
        return trainer, copies, bare, {"default": kept["policy"], "proposal": kept["proposal"]}

    return run


def assert_gradients(loss, module, name, actual):
    own = weights(module, "default")
    expected = torch.autograd.grad(loss, list(own.values()), retain_graph=True)
    for key, e in zip(own, expected, strict=True):
        torch.testing.assert_close(actual[key.replace(".default", f".{name}")], e, atol=2e-6, rtol=2e-4)
    assert max(e.abs().max() for e in expected) > 1e-3


@pytest.mark.parametrize("batches", [(8, 1), (4, 2), (1, 8)], ids=lambda b: f"{b[0]}x{b[1]}")
def test_losses_and_gradients_are_those_of_two_separate_copies(run, tokenizer, reward, architecture, batches):
    trainer, copies, base, grads = run(architecture, *batches)
    assert isinstance(trainer.proposal, SecondAdapter)
    losses = reference_loss(copies["default"], copies["proposal"], base, tokenizer, reward, trainer.args)
    for loss, name in zip(losses, ("default", "proposal"), strict=True):
        assert_gradients(loss, copies[name], name, grads[name])
    log = trainer.state.log_history[0]
    assert log["loss"] == pytest.approx(losses[0].item(), abs=2e-5)
    assert log["proposal/loss"] == pytest.approx(losses[1].item(), abs=2e-5)


def test_swapped_adapters_would_be_noticed(run, tokenizer, reward):
    trainer, copies, base, grads = run("gpt2")
    losses = reference_loss(copies["proposal"], copies["default"], base, tokenizer, reward, trainer.args)
    for loss, of, name in zip(losses, ("proposal", "default"), ("default", "proposal"), strict=True):
        with pytest.raises(AssertionError):
            assert_gradients(loss, copies[of], name, grads[name])


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_gradient_checkpointing_changes_no_gradient(run, architecture, reentrant, order):
    settings = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
    plain, checkpointed = (run(architecture, proposal_update_order=order, **extra)[3] for extra in ({}, settings))
    for name, expected in plain.items():
        for key, e in expected.items():
            torch.testing.assert_close(checkpointed[name][key], e, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_recomputation_with_the_other_adapter_would_be_noticed(run, monkeypatch, reentrant):
    """Negative control of the one above: without the binding the proposal's gradient is wrong, or no longer its own."""
    settings = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
    expected = run("gpt2")[3]["proposal"]
    monkeypatch.setattr(second_adapter, "bind_adapters_to_checkpoints", lambda model: None)
    try:
        actual = run("gpt2", **settings)[3]["proposal"]
    except torch.utils.checkpoint.CheckpointError:
        return
    except ValueError as error:
        assert "'proposal' has no gradient" in str(error)
        return
    assert any(a is None or not torch.allclose(a, expected[key], rtol=1e-2) for key, a in actual.items())


def test_checkpointing_turned_on_before_the_adapters_is_bound_too(tokenizer):
    base = build_model("llama", len(tokenizer), seed=0)
    base.gradient_checkpointing_enable()
    model = get_peft_model(base, lora("llama", init_lora_weights=False, lora_dropout=0.0)).train()
    proposal = second_adapter.add_adapter(model, "proposal").requires_grad_(True)
    with torch.no_grad():
        for p in proposal.parameters():
            p.mul_(-1.5)
    ids = torch.arange(4, 10).view(1, -1)
    gradients = []
    for _ in range(2):
        loss = proposal(input_ids=ids, labels=ids).loss
        gradients.append(torch.autograd.grad(loss, list(proposal.parameters())))
        base.gradient_checkpointing_disable()
    for one, two in zip(*gradients, strict=True):
        torch.testing.assert_close(one, two)


# Passes, optimizers, files, and which models share a base


def test_a_frozen_proposal_is_noticed(make, monkeypatch):
    """Negative control of the variants below: without restoring `requires_grad` the proposal would not move."""
    monkeypatch.setattr(_trl_bridge, "trainable_kept", lambda model: nullcontext())
    monkeypatch.setattr(SecondAdapter, "gradient_sync", lambda self, sync: nullcontext())
    trainer = make(extra={"peft_config": lora()}, beta=0.1, gradient_checkpointing=True)
    with pytest.raises(ValueError, match="'proposal' has no gradient"):
        trainer.train()


class SwitchesAdapters(TrainerCallback):
    """Looks at the base model after each step, or sets the policy's adapter, as PEFT lets one."""

    def __init__(self, off):
        self.off = off

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if self.off:
            with model.disable_adapter():
                pass
        else:
            model.set_adapter("default")


@pytest.mark.parametrize(
    ("off", "order", "checkpointing", "peft"),
    [
        (True, "before", True, {}),
        (True, "after", False, {"modules_to_save": ["lm_head"]}),
        (False, "before", False, {}),
        (False, "after", True, {}),
    ],
)
def test_a_callback_that_switches_adapters_changes_nothing(make, off, order, checkpointing, peft):
    def trained(callbacks):
        trainer = make(
            extra={"peft_config": lora(**peft), "callbacks": callbacks},
            proposal_update_order=order,
            gradient_checkpointing=checkpointing,
        )
        trainer.train()
        return trainer

    plain, switched = trained([]), trained([SwitchesAdapters(off)])
    others = dict(switched.model.named_parameters())
    assert all(torch.equal(p, others[name]) for name, p in plain.model.named_parameters())
    assert all(row["proposal/grad_norm"] > 0 for row in switched.state.log_history if "proposal/grad_norm" in row)


def test_neither_optimizer_has_the_others_weights(make):
    trainer = make(extra={"peft_config": lora()}, max_steps=1)
    trainer.train()
    own = {name: weights(trainer.model, name) for name in ("default", "proposal")}
    for name, optimizer in {"default": trainer.optimizer.optimizer, "proposal": trainer.proposal.optimizer}.items():
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        assert held == {id(p) for p in own[name].values()}
        before = {key: p.clone() for key, p in trainer.model.named_parameters()}
        for p in trainer.model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        for key, p in trainer.model.named_parameters():
            assert torch.equal(p, before[key]) == (key not in own[name])


def test_learning_rates_schedules_and_clipping_are_their_own(make):
    settings = {"learning_rate": 1e-3, "proposal_learning_rate": 5e-2, "lr_scheduler_type": "linear"}
    trainer = make(extra={"peft_config": lora()}, max_grad_norm=1e-4, **settings)
    norms = {}

    def watch(name, optimizer):
        def hook(*_):
            grads = [p.grad.flatten() for group in optimizer.param_groups for p in group["params"]]
            norms.setdefault(name, []).append(torch.cat(grads).norm().item())

        return hook

    prepare = trainer.proposal.prepare

    def prepare_and_watch(*args):
        prepare(*args)
        trainer.proposal.optimizer.register_step_pre_hook(watch("proposal", trainer.proposal.optimizer))
        trainer.optimizer.optimizer.register_step_pre_hook(watch("policy", trainer.optimizer.optimizer))

    trainer.proposal.prepare = prepare_and_watch
    trainer.train()
    logs = trainer.state.log_history
    assert [log["proposal/learning_rate"] for log in logs[:2]] == pytest.approx([5e-2, 2.5e-2])
    assert [log["learning_rate"] for log in logs[:2]] == pytest.approx([1e-3, 5e-4])
    for name in ("policy", "proposal"):
        assert norms[name] == pytest.approx([1e-4] * 2, rel=1e-2)


def test_one_base_and_no_redundant_passes(make):
    trainer = make(extra={"peft_config": lora()}, max_steps=1, beta=0.1)
    base = trainer.model.get_base_model()
    assert trainer.proposal.module.model is trainer.model and trainer.ref_model is None
    full = sum(p.numel() for p in build_model("gpt2", 19).parameters())
    assert sum(p.numel() for p in trainer.model.parameters() if not p.requires_grad) < 1.5 * full
    passes, rows, sampled = Counter(), Counter(), Counter()

    def hook(module, args, kwargs):
        if kwargs.get("fused_lm_head"):  # scoring; the others are generation
            passes[active(trainer.model)] += 1
            rows[active(trainer.model)] += len(kwargs["input_ids"])
        else:
            sampled[active(trainer.model)] += 1

    base.register_forward_pre_hook(hook, with_kwargs=True)
    trainer.train()
    assert passes == {"default": 1, "base": 1, "proposal": 1}
    assert rows == {"default": 4, "base": 4, "proposal": 4}  # each prompt once, with all its completions
    assert set(sampled) == {"default", "proposal"}
    assert active(trainer.model) == "default"


def test_samples_come_from_the_adapter(make, tokenizer):
    prompts = Dataset.from_dict({"prompt": ["the cat"]})
    settings = {"num_generations": 4000, "per_device_train_batch_size": 4000, "max_completion_length": 1}
    trainer = make(dataset=prompts, extra={"peft_config": lora(init_lora_weights=False)}, **settings)
    with torch.no_grad():
        for p in trainer.proposal.module.parameters():
            p.mul_(-1)
            p.add_(0.1)
    trainer.model.train()
    batch = trainer._generate_and_score_completions([{"prompt": "the cat"}] * 4000)
    ids = torch.tensor([tokenizer("the cat")["input_ids"]], device=trainer.model.device)
    models = {"completion_ids": trainer.model, "proposal_completion_ids": trainer.proposal.module}
    expected = {name: model(input_ids=ids).logits[0, -1].softmax(-1) for name, model in models.items()}
    assert (expected["completion_ids"] - expected["proposal_completion_ids"]).abs().max() > 0.1
    for name, probabilities in expected.items():
        share = torch.bincount(batch[name].flatten(), minlength=len(tokenizer)) / 4000
        torch.testing.assert_close(share, probabilities, atol=0.03, rtol=0)  # 4 standard deviations


def test_files(make, tmp_path):
    trainer = make(extra={"peft_config": lora()}, save_strategy="steps", save_steps=1)
    trainer.train()
    trainer.save_model()
    out = tmp_path / "out"
    for folder in (out, out / "checkpoint-1", out / "checkpoint-2"):
        assert (folder / "adapter_config.json").is_file() and (folder / "proposal" / "adapter_config.json").is_file()
        assert not list(folder.glob("proposal/proposal")) and not list(folder.glob("default"))
        assert "Do not deploy" in ModelCard.load(folder / "proposal" / "README.md").text
    ids = torch.arange(4, 10, device=trainer.model.device).view(1, -1)
    with torch.no_grad():
        for folder, model in ((out, trainer.model.eval()), (out / "proposal", trainer.proposal.module)):
            saved = AutoPeftModelForCausalLM.from_pretrained(folder).to(model.device)
            assert list(saved.peft_config) == ["default"]
            assert torch.equal(saved(input_ids=ids).logits, model(input_ids=ids).logits)
    assert not torch.equal(trainer.model(input_ids=ids).logits, trainer.proposal.module(input_ids=ids).logits)
    trainer.model.save_pretrained(tmp_path / "by_hand")  # as `model.push_to_hub` does
    assert not (tmp_path / "by_hand" / "proposal").exists()
    trainer.model.save_pretrained(tmp_path / "by_name", selected_adapters=["proposal"])
    assert (tmp_path / "by_name" / "proposal" / "adapter_model.safetensors").exists()


def test_a_copy_of_the_model_saves_itself(make, tmp_path):
    trainer = make(extra={"peft_config": lora(init_lora_weights=False)})
    copied = copy.deepcopy(trainer.model)
    with torch.no_grad():
        for p in weights(copied, "default").values():
            p.zero_()
    copied.save_pretrained(tmp_path / "copy")
    saved = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "copy")
    assert all((p == 0).all() for p in weights(saved, "default").values())
    assert not (tmp_path / "copy" / "proposal").exists()


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_run_with_a_base_each_resumes_bit_for_bit(make, model_dirs, tmp_path, prompts, checkpointing):
    settings = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "lr_scheduler_type": "linear", "beta": 0.1}
    extra = {"peft_config": lora(), "proposal_model": model_dirs["gpt2"]}
    dataset = concatenate_datasets([prompts] * 4)  # 4 updates an epoch
    build = functools.partial(make, dataset=dataset, extra=extra, gradient_checkpointing=checkpointing, **settings)
    whole = build(output_dir=str(tmp_path / "whole"))
    whole.train()
    resumed = build(output_dir=str(tmp_path / "resumed"))
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert set(resumed.model.peft_config) == {"default"}
    assert same_parameters(whole.model, resumed.model)
    assert same_parameters(whole.proposal.module, resumed.proposal.module)


def test_full_weights_and_other_layers_are_refused(make, tmp_path):
    make().proposal.module.save_pretrained(tmp_path / "full")
    make(extra={"peft_config": lora(target_modules=["c_fc"])}).proposal.module.save_pretrained(tmp_path / "other")
    adapter = make(extra={"peft_config": lora()}).proposal.module
    for folder, message in (("full", "holds no adapter"), ("other", "not of the proposal's layers")):
        with pytest.raises(ValueError, match=message):
            adapter.load(tmp_path / folder)


def test_an_adapter_passed_as_the_policy_is_shared_too(make, tokenizer, evaluator):
    """TRL then keeps a third, frozen adapter for the reference."""
    policy = get_peft_model(build_model("gpt2", len(tokenizer)), lora(init_lora_weights=False))
    start = evaluator.evaluate(policy)
    trainer = make(model=policy, extra={"processing_class": tokenizer}, beta=0.1, gradient_checkpointing=True)
    assert isinstance(trainer.proposal, SecondAdapter) and set(policy.peft_config) == {"default", "ref", "proposal"}
    before = {name: p.clone() for name, p in policy.named_parameters()}
    assert evaluator.evaluate(trainer.proposal.module).log_prob_bad == pytest.approx(start.log_prob_bad)
    trainer.train()
    assert trainer.state.log_history[0]["kl"] == pytest.approx(0, abs=1e-6)
    changed = {name for name, p in policy.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {name for name in before if {"default", "proposal"} & set(name.split("."))}


def test_the_proposals_adapter_may_have_another_configuration(make):
    own = lora(r=2, target_modules=["c_fc"])
    trainer = make(extra={"peft_config": lora(), "proposal_peft_config": own})
    assert isinstance(trainer.proposal, SecondAdapter)
    names = [name for name, _ in trainer.proposal.module.named_parameters()]
    assert names and all("c_fc" in name for name in names)
    trainer.train()
    assert trainer.proposal.module.state_dict()[names[1]].abs().max() > 0


def test_a_full_policy_with_an_adapter_proposal(make, model_dirs, tmp_path, prompts):
    settings = {"extra": {"proposal_peft_config": lora()}, "save_strategy": "steps", "save_steps": 1}
    settings["dataset"] = concatenate_datasets([prompts] * 2)  # 2 updates an epoch
    trainer = make(**settings)
    initial = AutoModelForCausalLM.from_pretrained(model_dirs["gpt2"])
    trainer.train()
    assert isinstance(trainer.proposal.module, PeftModel) and not isinstance(trainer.model, PeftModel)
    assert not same_parameters(trainer.model, initial)
    proposal = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "out" / "checkpoint-1" / "proposal")
    for name, p in initial.named_parameters():  # its base stays at the initial policy
        key = name.replace(".weight", ".base_layer.weight").replace(".bias", ".base_layer.bias")
        base = dict(proposal.get_base_model().named_parameters())
        assert torch.equal(p, base[key] if key in base else base[name])
    resumed = make(**settings, output_dir=str(tmp_path / "resumed"))
    resumed.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-1"))
    assert same_parameters(trainer.model, resumed.model)
    assert same_parameters(trainer.proposal.module, resumed.proposal.module)


def test_the_base_of_an_adapter_proposal_is_a_full_policys_reference(make, model_dirs, prompts):
    """Two copies of the weights instead of three, and the run that TRL's own reference gives."""
    settings = {"beta": 0.3, "gradient_checkpointing": True, "max_steps": 3}
    lent = make(extra={"proposal_peft_config": lora()}, **settings)
    assert lent.ref_model.model is lent.proposal.module and lent.args.beta == lent.beta == 0.3
    lent.train()
    extra = {"proposal_peft_config": lora(), "proposal_model": model_dirs["gpt2"]}
    own = make(extra=extra, **settings)
    assert isinstance(own.ref_model, PreTrainedModel)
    own.train()
    kl = [[log["kl"] for log in trainer.state.log_history[:3]] for trainer in (lent, own)]
    assert kl[0] == pytest.approx(kl[1], abs=1e-6) and abs(kl[0][2]) > 1e-3
    assert same_parameters(lent.model, own.model)
    assert same_parameters(lent.proposal.module, own.proposal.module)
    assert all(p.requires_grad == ("lora_" in name) for name, p in lent.proposal.module.named_parameters())


@pytest.mark.parametrize(
    ("peft", "settings"),
    [({"init_lora_weights": "olora"}, {}), ({}, {"sync_ref_model": True}), ({}, {"beta": 0.0})],
    ids=["changed base", "moving reference", "no reference"],
)
def test_where_the_proposals_base_is_no_reference(make, peft, settings):
    trainer = make(model="llama", extra={"proposal_peft_config": lora("llama", **peft)}, **({"beta": 0.1} | settings))
    assert trainer.ref_model is None if trainer.beta == 0 else isinstance(trainer.ref_model, PreTrainedModel)


def test_proposals_from_folders(make, model_dirs, tmp_path, prompts):
    trainer = make(extra={"peft_config": lora()})
    trainer.train()
    trainer.save_model()
    folder = str(tmp_path / "out" / "proposal")
    joined = make(extra={"peft_config": lora(), "proposal_model": folder}, output_dir=str(tmp_path / "joined"))
    assert isinstance(joined.proposal, SecondAdapter)
    assert same_parameters(joined.proposal.module, trainer.proposal.module)
    apart = make(extra={"proposal_model": folder}, output_dir=str(tmp_path / "apart"))
    assert type(apart.proposal) is SecondModel and not isinstance(apart.model, PeftModel)
    ids = torch.arange(4, 10, device=trainer.model.device).view(1, -1)
    with torch.no_grad():
        expected = trainer.proposal.module(input_ids=ids).logits
        torch.testing.assert_close(apart.proposal.module(input_ids=ids).logits, expected)
    full = make(extra={"peft_config": lora("llama"), "proposal_model": model_dirs["llama"]}, model="llama")
    assert type(full.proposal) is SecondModel and full.proposal.module.get_base_model() is not None
    for trainer in (joined, apart, full):
        start = [p.clone() for p in trainer.proposal.module.parameters()]
        trainer.train()
        assert any(not torch.equal(p, q) for p, q in zip(start, trainer.proposal.module.parameters(), strict=True))


@pytest.mark.parametrize("settings", [{"bias": "lora_only"}, {"init_lora_weights": "olora"}], ids=str)
def test_configurations_that_change_the_base_get_a_base_each(make, settings):
    trainer = make(model="llama", extra={"peft_config": lora("llama", **settings)})
    assert type(trainer.proposal) is SecondModel
    trainer.train()


def test_an_adapter_named_as_the_proposals_is_refused(make, tokenizer):
    policy = get_peft_model(build_model("gpt2", len(tokenizer)), lora())
    policy.add_adapter("proposal", lora())
    with pytest.raises(ValueError, match="already has an adapter"):
        make(model=policy, extra={"processing_class": tokenizer})


VARIANTS = {
    "no reference": {"beta": 0.0},
    "reference": {},
    "modules to save": {"peft": {"modules_to_save": ["ln_f"]}},
    "dora": {"peft": {"use_dora": True}},
    "after": {"proposal_update_order": "after"},
    "dpg": {"proposal_loss": "dpg"},
    "PPO": {"trainer_cls": RePULSePPOTrainer},
    "PPO, no reference": {"trainer_cls": RePULSePPOTrainer, "beta": 0.0},
    "GRPO": {"trainer_cls": RePULSeGRPOTrainer},
    "GRPO, no reference": {"trainer_cls": RePULSeGRPOTrainer, "beta": 0.0},
}


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_both_adapters_are_trained_and_nothing_else(make, name, checkpointing):
    """The reference pass, which turns adapters off, leaves both trainable."""
    settings = {"beta": 0.1} | VARIANTS[name]
    config = lora(**settings.pop("peft", {}))
    trainer = make(extra={"peft_config": config}, gradient_checkpointing=checkpointing, **settings)
    start = {key: p.clone() for key, p in trainer.model.named_parameters()}
    trainer.train()
    changed = {key for key, p in trainer.model.named_parameters() if not torch.equal(p, start[key])}
    own = weights(trainer.model, "default") | weights(trainer.model, "proposal")
    assert all(p.requires_grad for p in own.values())
    assert {key for key in own if "lora_B" in key} <= changed <= own.keys()


def test_training_twice_goes_on(make):
    trainer = make(extra={"peft_config": lora()}, max_steps=1)
    trainer.train()
    middle = {key: p.clone() for key, p in trainer.model.named_parameters()}
    trainer.train()
    changed = {key for key, p in trainer.model.named_parameters() if not torch.equal(p, middle[key])}
    for name in ("default", "proposal"):
        assert {key for key in weights(trainer.model, name) if "lora_B" in key} <= changed
    held = {id(p) for group in trainer.optimizer.param_groups for p in group["params"]}
    assert not held & {id(p) for p in trainer.proposal.module.parameters()}
