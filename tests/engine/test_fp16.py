"""fp16 in one process: each model's loss is scaled by itself, and an overflow costs the model it happens to one update.

Accelerate (1.15) trains in float32 where fp16 is asked for on CPU; torch can do it, and is let here. Several processes are
in `test_distributed`.
"""

import shutil

import pytest
import torch
from accelerate import Accelerator
from peft import LoraConfig
from transformers import TrainerCallback

from trl_repulse import PPOTrainer, RePULSeTrainer

from ..conftest import DEVICE
from ..distributed_support import FP16_SCALE, with_fp16_on_cpu


pytestmark = pytest.mark.trainer

ADAPTERS = {"peft_config": LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["c_attn"], init_lora_weights=False)}
KINDS = {
    "whole": (RePULSeTrainer, {}, {}),
    "after": (RePULSeTrainer, {}, {"proposal_update_order": "after", "proposal_updates_per_step": 2}),
    "adapters": (RePULSeTrainer, ADAPTERS, {"beta": 0.1}),
    "PPO": (PPOTrainer, {}, {"num_iterations": 2}),
    "PPO, values first": (PPOTrainer, {}, {"value_warmup_steps": 1}),
}
OVERFLOW = 2.0**40  # no gradient in fp16 is small enough to be scaled by this


@pytest.fixture
def train(make, monkeypatch):
    """Trains in fp16; `first` may change the trainer before its first step."""
    monkeypatch.setattr(Accelerator, "__init__", with_fp16_on_cpu)

    def train(kind, first=lambda trainer: None, resume=None, **kwargs):
        trainer_cls, extra, settings = KINDS[kind]
        settings = {"fp16": True, "optim": "sgd"} | settings | kwargs
        trainer = make(trainer_cls, extra=extra, **settings)
        trainer.add_callback(AtFirst(lambda: first(trainer)))
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    return train


class AtFirst(TrainerCallback):
    def __init__(self, first):
        self._first = first

    def on_train_begin(self, args, state, control, **kwargs):
        self._first()


def second(trainer):
    return trainer.value if isinstance(trainer, PPOTrainer) else trainer.proposal


def parameters(trainer):
    """Of the trainer's own model and of the second, trained ones alone."""
    theirs = [p for p in second(trainer).module.parameters() if p.requires_grad]
    held = {id(p) for p in theirs}
    own = [p for p in trainer.model.parameters() if p.requires_grad and id(p) not in held]
    return [torch.cat([p.detach().flatten() for p in each]) for each in (own, theirs)]


def logged(trainer, name):
    prefix = "value" if isinstance(trainer, PPOTrainer) else "proposal"
    return [log[f"{prefix}/{name}"] for log in trainer.state.log_history if "loss" in log]


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
def test_both_models_train_as_in_float32(train, kind):
    """To the precision of fp16, with gradients in the units they have without scaling; not to that of float32."""
    exact, half = train(kind, fp16=False, max_steps=1), train(kind, max_steps=1)
    assert half.accelerator.scaler.get_scale() == second(half)._scaler.get_scale() == FP16_SCALE
    for one, two in zip(parameters(exact), parameters(half), strict=True):
        assert torch.isfinite(two).all() and (one - two).norm() < 1e-3 * one.norm()
    norm, expected = logged(half, "grad_norm")[0], logged(exact, "grad_norm")[0]
    assert norm == pytest.approx(expected, rel=0.02) and norm != pytest.approx(expected, rel=1e-7)


def overflow_of(trainer, own):
    if own:
        trainer.accelerator.scaler.load_state_dict(trainer.accelerator.scaler.state_dict() | {"scale": OVERFLOW})
    else:
        second(trainer)._scaler = torch.amp.GradScaler(DEVICE.type, init_scale=OVERFLOW)


@pytest.mark.parametrize("kind", ["whole", "adapters", "PPO"])
@pytest.mark.parametrize("own", [True, False])
def test_an_overflow_is_the_models_own(train, kind, own):
    starts = []

    def first(trainer):
        overflow_of(trainer, own)
        starts.extend(parameters(trainer))

    trainer = train(kind, first, max_steps=1, lr_scheduler_type="linear")
    changed = [not torch.equal(now, start) for now, start in zip(parameters(trainer), starts, strict=True)]
    assert changed == ([False, True] if own else [True, False])
    scales = [trainer.accelerator.scaler.get_scale(), second(trainer)._scaler.get_scale()]
    assert scales == ([OVERFLOW / 2, FP16_SCALE] if own else [FP16_SCALE, OVERFLOW / 2])
    # A schedule does not move on with an update that was not made
    assert [trainer.lr_scheduler.last_epoch, second(trainer).scheduler.last_epoch] == [not own, own]
    assert (logged(trainer, "grad_norm")[0] is None) == (not own)  # NaN, as TRL logs it


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["whole", "adapters", "PPO"])
def test_an_overflow_is_got_over_and_resumed_from(train, tmp_path, kind):
    """The scale falls until gradients fit; resumed there, parameters and scales are those of a run in one go."""
    settings = {"max_steps": 40, "save_strategy": "steps", "save_steps": 8, "optim": "adamw_torch"}
    whole = train(kind, lambda trainer: overflow_of(trainer, False), output_dir=str(tmp_path / "out"), **settings)
    assert second(whole)._scaler.get_scale() < OVERFLOW / 2**9 and logged(whole, "grad_norm")[-1] is not None
    expected, state = parameters(whole), second(whole)._scaler.state_dict()
    for later in range(16, 41, 8):
        shutil.rmtree(tmp_path / "out" / f"checkpoint-{later}")
    resumed = train(kind, resume=True, output_dir=str(tmp_path / "out"), **settings)
    assert second(resumed)._scaler.state_dict() == state
    assert all(torch.equal(one, two) for one, two in zip(parameters(resumed), expected, strict=True))
