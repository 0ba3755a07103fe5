"""Two adapters over one base: losses and gradients are those of two separate models, checkpointed or not."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model

from trl_repulse import RePULSeTrainer
from trl_repulse.engine import second_model as second_adapter
from trl_repulse.engine.second_model import SecondAdapter

from ..conftest import build_model
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
