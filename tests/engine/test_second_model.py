"""The second model: its own optimizer, schedule and clipping; state that survives a round trip without pickle."""

from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from peft import LoraConfig, get_peft_model
from transformers import Trainer, TrainingArguments

from trl_repulse.engine.second_model import SecondModel
from trl_repulse.models._fsdp import keep_precision

from ..conftest import DEVICE, USE_CPU, build_accelerator, build_model


@pytest.fixture
def trainer(tmp_path, tokenizer):
    settings = {"learning_rate": 0.5, "weight_decay": 0.1, "max_grad_norm": 0.25, "optim": "adamw_torch"}
    settings |= {"lr_scheduler_type": "linear", "warmup_steps": 2}
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=USE_CPU, report_to="none", **settings)
    return Trainer(model=build_model("gpt2", len(tokenizer), seed=1), args=args)


def build(trainer, vocab_size, learning_rate=1e-2):
    second = SecondModel(build_model("gpt2", vocab_size).eval(), build_accelerator(), learning_rate)
    second.prepare(trainer, num_training_steps=10)
    return second


def train_step(second, vocab_size, scale=1.0):
    ids = torch.arange(4, 10, device=DEVICE).view(1, -1) % vocab_size
    second.backward(scale * second.engine(input_ids=ids, labels=ids).loss)
    norm = second.step()
    second.scheduler.step()
    return norm


class Grouped(torch.optim.SGD):
    """State in groups, and a table that parameters share, as of bitsandbytes' optimizers in 8 bits."""

    table = torch.arange(4.0, device=DEVICE)

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p] = {
                    "step": 1,
                    "quant": {"map": self.table, "inner": {"absmax": p.detach().clone(), "n": 2}},
                }


def test_grouped_state_survives(trainer, tokenizer, tmp_path):
    first, other = build(trainer, len(tokenizer)), build(trainer, len(tokenizer))
    for second in (first, other):
        second.optimizer = Grouped(second.module.parameters(), lr=0.1)
    train_step(first, len(tokenizer))
    first.save_state(tmp_path)
    other.load_state(tmp_path)
    states = [second.optimizer.state_dict()["state"] for second in (first, other)]
    assert set(states[0]) == set(states[1])
    for key, one in states[0].items():
        two = states[1][key]
        assert one["step"] == two["step"] and one["quant"]["inner"]["n"] == two["quant"]["inner"]["n"]
        assert torch.equal(one["quant"]["map"], two["quant"]["map"])
        assert torch.equal(one["quant"]["inner"]["absmax"], two["quant"]["inner"]["absmax"])


def test_optimizer_schedule_and_decay_are_its_own(trainer, tokenizer):
    second = build(trainer, len(tokenizer))
    assert {group["weight_decay"] for group in second.optimizer.param_groups} == {0.1, 0.0}
    decayed = {id(p) for p in second.optimizer.param_groups[0]["params"]}
    names = {name for name, p in second.module.named_parameters() if id(p) in decayed}
    assert "transformer.h.0.attn.c_attn.weight" in names and not any("bias" in name or "ln_" in name for name in names)
    rates = []
    for _ in range(10):
        rates.append(second.optimizer.param_groups[0]["lr"])
        train_step(second, len(tokenizer))
    assert max(rates) == pytest.approx(1e-2)  # its own peak, not the trainer's 0.5
    assert rates[0] == 0 and rates[2] == max(rates) and rates[-1] < rates[2]


def test_gradient_is_clipped_and_its_norm_reported(trainer, tokenizer):
    second = build(trainer, len(tokenizer))
    ids = torch.arange(4, 10, device=DEVICE).view(1, -1)
    second.backward(100 * second.engine(input_ids=ids, labels=ids).loss)
    expected = torch.stack([p.grad.norm() for p in second.module.parameters()]).norm().item()
    seen = []
    second.optimizer.register_step_pre_hook(
        lambda optimizer, args, kwargs: seen.append(
            torch.stack([p.grad.norm() for group in optimizer.param_groups for p in group["params"]]).norm().item()
        )
    )
    assert second.step() == pytest.approx(expected, rel=1e-4) and expected > 1
    assert seen == [pytest.approx(0.25, rel=1e-3)]
    assert all(p.grad is None for p in second.module.parameters())


def test_loading_without_a_saved_state_changes_nothing(trainer, tokenizer, tmp_path):
    second = build(trainer, len(tokenizer))
    second.load_state(tmp_path)
    assert not second.optimizer.state


def stub(kind, stage=None, fsdp2=False, precision="no", **config):
    class Stub:
        distributed_type = DistributedType[kind]
        is_fsdp2 = fsdp2
        mixed_precision = precision
        state = SimpleNamespace(deepspeed_plugin=SimpleNamespace(zero_stage=stage, deepspeed_config=config))

    return Stub()


@pytest.mark.parametrize(
    ("accelerator", "message"),
    [
        (stub("FSDP"), "first version of FSDP; set `fsdp_version: 2`"),
        (stub("DEEPSPEED", 0), "stage 0"),
        (stub("DEEPSPEED", 2, optimizer={}), "section `optimizer`"),
        (stub("DEEPSPEED", 2, scheduler={}), "section `scheduler`"),
        (stub("DEEPSPEED", 2, tensor_parallel={"autotp_size": 2}), "tensor parallelism"),
    ],
)
def test_engines_that_cannot_serve_two_models_are_refused_in_one_line(tokenizer, accelerator, message):
    with pytest.raises(ValueError, match=message) as error:
        SecondModel(build_model("gpt2", len(tokenizer)), accelerator, 1e-3)
    assert "\n" not in str(error.value)


def test_an_adapter_is_refused_with_fsdp(tokenizer):
    module = get_peft_model(build_model("gpt2", len(tokenizer)), LoraConfig(target_modules=["c_attn"]))
    with pytest.raises(ValueError, match="leave out `peft_config`, or launch with DeepSpeed"):
        SecondModel(module, stub("FSDP", fsdp2=True), 1e-3)


def test_outputs_stay_in_float32_under_fsdp():
    """Accelerate has them rounded with `bf16=True`; gone when this fails."""
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    plugin.set_mixed_precision("bf16")
    assert plugin.mixed_precision_policy.output_dtype == torch.bfloat16
    keep_precision(SimpleNamespace(is_fsdp2=True, state=SimpleNamespace(fsdp_plugin=plugin)))
    policy = plugin.mixed_precision_policy
    assert policy.output_dtype == torch.float32 and policy.param_dtype == torch.bfloat16
