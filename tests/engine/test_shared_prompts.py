"""Trainers whose completions share rows and caches with their prompt, and trainers that read it with each of them."""

import copy
from dataclasses import replace

import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset
from peft import LoraConfig

from benchmarks.architectures import build
from trl_repulse import (
    PPOTrainer,
    ReinforceTrainer,
    RePULSeConfig,
    RePULSeGRPOTrainer,
    RePULSePPOTrainer,
    RePULSeTrainer,
)
from trl_repulse.engine import preparation as _set_up
from trl_repulse.engine.scoring import Wanted
from trl_repulse.engine.units import EXTRA, OWN, Units
from trl_repulse.generation.drawing import Sampler, prompts_read_once

from ..conftest import USE_CPU, build_model, build_tokenizer
from ..distributed_support import with_fp16_on_cpu
from .test_layout import scored


UNEVEN = Dataset.from_dict({"prompt": ["the", "the cat", "the cat sat the dog", "a dog ate the fish the cat"]})
MODES = {
    "plain": {},
    "reference": {"beta": 0.1},
    "more proposals": {"num_proposal_generations": 8},
    "reused": {"num_iterations": 2, "max_steps": 4, "epsilon": 0.2},
    "in two micro-batches": {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2},
    "cut apart": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 8},
    "checkpointing": {"gradient_checkpointing": True},
    "dpg": {"proposal_loss": "dpg"},
    "sixo": {"proposal_loss": "sixo"},
    "vargrad": {"proposal_loss": "vargrad"},
    "after": {"proposal_update_order": "after"},
    "hot": {
        "proposal": "hot_policy",
        "proposal_temperature": 1.7,
        "bad_reward_threshold": 0.0,
        "potential": "indicator",
    },
    "own": {"proposal": "policy"},
    "adapters": {"beta": 0.1, "peft_config": LoraConfig(r=4, init_lora_weights=False, target_modules="all-linear")},
    "eager": {"model_init_kwargs": {"attn_implementation": "eager"}},
    "REINFORCE": {"trainer_cls": ReinforceTrainer, "beta": 0.1},
}
for _cls in (RePULSePPOTrainer, RePULSeGRPOTrainer):
    _settings = {"trainer_cls": _cls, "beta": 0.1, "steps_per_generation": 1}
    MODES |= {f"{_cls.__name__}, learned": _settings, f"{_cls.__name__}, hot": MODES["hot"] | _settings}


def assert_the_same(together, apart, logs=True):
    """Parameters of all models, and metrics."""
    assert together._guard.share_prompts and not apart._guard.share_prompts
    models = [
        [t.model, *(x.module for x in (getattr(t, "proposal", None), getattr(t, "value", None)) if x is not None)]
        for t in (together, apart)
    ]
    for one, other in zip(*models, strict=True):
        for p, q in zip(one.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(p, q, atol=1e-5, rtol=1e-5)
    timings = ("time", "runtime", "per_second", "flos")
    histories = zip(together.state.log_history, apart.state.log_history, strict=True)
    for one, other in histories if logs else ():
        assert one.keys() == other.keys()
        for key in one:
            if one[key] is not None and not any(word in key for word in timings):
                assert one[key] == pytest.approx(other[key], rel=1e-3, abs=2e-5), key


def train(make, model, share, **kwargs):
    kwargs = copy.deepcopy(kwargs)  # PEFT writes into its configurations
    extra = {name: kwargs.pop(name) for name in ("peft_config", "processing_class") if name in kwargs}
    settings = {"max_completion_length": 4, "max_steps": 3, "optim": "sgd", "learning_rate": 0.3} | kwargs
    trainer = make(model=model, dataset=UNEVEN, extra=extra, share_prompts=share, **settings)
    trainer.train()
    return trainer


@pytest.mark.thorough
@pytest.mark.trainer
@pytest.mark.parametrize("mode", MODES)
def test_training_is_the_same(make, architecture, mode):
    assert_the_same(*(train(make, architecture, share, **MODES[mode]) for share in (True, False)))


@pytest.mark.trainer
def test_a_head_that_is_padded(make, tokenizer):
    """More tokens in the model than in the tokenizer."""
    runs = []
    for share in (True, False):
        model = build("llama", len(tokenizer) + 7)
        runs.append(train(make, model, share, processing_class=tokenizer))
    assert_the_same(*runs)


@pytest.mark.thorough
@pytest.mark.trainer
@pytest.mark.parametrize("mode", ["plain", "hot", "PPO"])
def test_compiled_models_share_rows(make, request, mode):
    """Policy and reference, which TRL compiles before we see it, agree; all end as models that are not compiled."""
    request.addfinalizer(torch.compiler.reset)
    compile = {"torch_compile": True, "torch_compile_backend": "eager"} | ({} if USE_CPU else {"tf32": False})
    settings = ({"trainer_cls": PPOTrainer} if mode == "PPO" else MODES[mode]) | {"beta": 0.1, "max_steps": 2}
    compiled, plain = (train(make, "llama", share, **settings, **how) for share, how in ((True, compile), (False, {})))
    assert compiled._guard.repeat_cache and compiled.state.log_history[0]["kl"] == pytest.approx(0, abs=1e-5)
    assert_the_same(compiled, plain, logs=False)


@pytest.mark.thorough
@pytest.mark.trainer
@pytest.mark.parametrize("kwargs", [{}, {"beta": 0.1, "num_iterations": 2}, {"per_device_train_batch_size": 4}])
def test_ppo_too(make, architecture, kwargs):
    """TRL shuffles its completions: those of a prompt share rows where a micro-batch has them all."""
    runs, rows = [], []
    for share in (True, False):
        settings = {"max_completion_length": 4, "max_steps": 2, "optim": "sgd", "learning_rate": 0.3} | kwargs
        trainer = make(
            PPOTrainer, architecture, dataset=UNEVEN, share_prompts=share, steps_per_generation=1, **settings
        )
        seen = []
        trainer.value.module.register_forward_pre_hook(
            lambda module, args, kwargs, seen=seen: seen.append(len(kwargs["input_ids"])), with_kwargs=True
        )
        trainer.train()
        runs.append(trainer)
        rows.append(set(seen))
    assert [4 * count for count in rows[0]] == list(rows[1])
    assert_the_same(*runs)


@pytest.mark.trainer
def test_draws_are_the_same(make, architecture):
    """To the token, of the policy and of the proposal: a prompt's cache, repeated, and prompts read with each completion."""
    drawn = {}
    for share in (True, False):
        sizes = {"max_completion_length": 6, "num_generations": 50, "per_device_train_batch_size": 200}
        trainer = make(model=architecture, dataset=UNEVEN, share_prompts=share, **sizes)
        assert trainer._guard.repeat_cache is share
        lengths = []
        hook = trainer.model.register_forward_pre_hook(
            lambda module, args, kwargs, seen=lengths: seen.append(kwargs["input_ids"].shape), with_kwargs=True
        )
        trainer.model.train()
        torch.manual_seed(0)
        batch = trainer._generate_and_score_completions([row for row in UNEVEN for _ in range(50)])
        hook.remove()
        assert ((4, 6) in lengths) is share and ((200, 7) in lengths) is not share
        drawn[share] = [batch["completion_ids"], batch["proposal_completion_ids"]]
    assert all(torch.equal(one, other) for one, other in zip(drawn[True], drawn[False], strict=True))
    assert len(drawn[True][0].flatten(0, 1).unique(dim=0)) > 100


@pytest.mark.trainer
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision(make, precision, monkeypatch):
    """Under autocast to half precision both differ from float32 alike."""
    monkeypatch.setattr(Accelerator, "__init__", with_fp16_on_cpu)
    settings = {"max_steps": 1, "optim": "sgd", "learning_rate": 0.1, "max_completion_length": 4}
    runs = {}
    for share, half in ((True, True), (False, True), (False, False)):
        trainer = make(model="llama", dataset=UNEVEN, share_prompts=share, **settings, **{precision: half})
        torch.manual_seed(0)
        prompts = torch.tensor([[0, 0, 3, 4], [3, 4, 5, 6]])
        sample = {
            "prompt_ids": prompts,
            "prompt_mask": (prompts != 0).long(),
            "completion_ids": torch.randint(3, 19, (2, 4, 4)),
            "completion_mask": torch.ones(2, 4, 4, dtype=torch.long),
            "rewards": torch.zeros(2, 4),
        }
        units = Units.of({name: x.to(trainer.accelerator.device) for name, x in sample.items()})
        runs[share, half] = trainer._scoring.score(trainer.model, units, trainer.shape, gradient=False).log_p[OWN]
    exact = runs[False, False]
    errors = [(runs[share, True] - exact).abs().mean().item() for share in (True, False)]
    assert 0 < errors[0] < 2 * errors[1] and (runs[True, True] - exact).abs().max() < 0.2


@pytest.mark.thorough
@pytest.mark.trainer
@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("bloom", "takes no positions"),
        ("mamba", "takes no positions"),
        ("falcon_h1", "not read as each would be"),
        ("moshi", "not read as each would be"),
    ],
)
def test_models_that_cannot(make, name, why, monkeypatch):
    tokenizer = build_tokenizer()
    tokenizer.bos_token = "<unk>"
    model = build(name, len(tokenizer))

    def trainer(share):
        return make(RePULSeTrainer, model=model, extra={"processing_class": tokenizer}, share_prompts=share)

    said = []
    monkeypatch.setattr(_set_up.logger, "warning_once", said.append)
    assert not trainer("auto")._guard.share_prompts
    said = [text for text in said if "cannot read a prompt once" in text]
    for role, text in zip(("policy", "proposal"), said, strict=True):
        assert f"the {role}, " in text and why in text
    with pytest.raises(ValueError, match=f"cannot read a prompt once.*{why}.*`share_prompts=False`"):
        trainer(True)
    trainer(False).train()


def test_beams_are_read_with_their_prompts(make):
    settings = {"generation_kwargs": {"num_beams": 2}, "max_steps": 1}
    trainer = make(ReinforceTrainer, **settings)
    assert trainer._guard.share_prompts and not trainer._guard.repeat_cache
    trainer.train()


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_noise_does_not_hide_what_a_model_reads(make, dropout, tokenizer):
    """With dropout on, two passes in training mode differ by more than a wrong mask makes."""
    model = build("gpt_neo", len(tokenizer))  # with a window inside its layers, shorter than the texts of the check
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = dropout
    extra = {"processing_class": tokenizer}
    trainer = make(ReinforceTrainer, model=model, extra=extra, disable_dropout=dropout == 0.0)
    assert not trainer._guard.share_prompts


@pytest.mark.parametrize("share", [False, True])
def test_passes_without_gradient_are_chunked(make, share):
    """As micro-batches with gradient: here each of 4 policy samples and 28 hot ones."""
    hot = MODES["hot"] | {"per_device_train_batch_size": 4, "num_proposal_generations": 28, "max_steps": 1}
    trainer = make(model="llama", dataset=UNEVEN, share_prompts=share, max_completion_length=4, **hot)
    sizes = []
    trainer.model.register_forward_hook(
        lambda module, args, output: sizes.append(len(output.log_probs)) if "log_probs" in output else None
    )
    trainer._guard = replace(trainer._guard, repeat_cache=False)
    trainer.model.train()
    batch = trainer._generate_and_score_completions([{"prompt": "the cat"}] * 4 + [{"prompt": "a dog"}] * 4)
    sizes.clear()
    sets = (OWN, EXTRA)
    bad = {name: torch.ones(2, size, dtype=torch.bool) for name, size in zip(sets, (4, 28), strict=True)}
    wanted = Wanted(sets, sampler=Sampler(1.6), by_sampler=bad)
    trainer._scoring.score(trainer.model, Units.of(batch), trainer.shape, wanted, gradient=False)
    assert sizes == [32, 32]


@pytest.mark.parametrize("trainer_cls", [RePULSeTrainer, ReinforceTrainer])
@pytest.mark.parametrize("positions", [14, 64])
def test_passes_without_gradient_are_counted_in_tokens(make, tokenizer, tmp_path, trainer_cls, positions):
    """As many rows as have no more tokens than a micro-batch of separate rows, here of 4 completions."""
    model = build_model("llama", len(tokenizer))
    model.config.max_position_embeddings = positions  # with 14, a row holds two completions of two tokens, not four
    firsts = ("the", "a", "cat", "dog", "fish", "sat")
    prompts = Dataset.from_dict({"prompt": [f"{first} cat sat a dog ate the fish" for first in firsts]})
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    many = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 6, "beta": 0.1, "max_steps": 1}
    trainer = make(trainer_cls, str(tmp_path), dataset=prompts, share_prompts=True, **many)
    seen = []
    trainer.ref_model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["input_ids"].shape), with_kwargs=True
    )
    trainer.train()
    tokens = 4 * (8 + 2)
    row, rows = (8 + 2 * 2, 2) if positions == 14 else (8 + 4 * 2, 1)  # of a prompt with its four completions
    at_once = tokens // row
    assert at_once == (3 if positions == 14 else 2)
    per_set = [(at_once, row)] * (6 * rows // at_once)
    assert seen == per_set * (len(seen) // len(per_set)) and seen


def test_generate_is_put_back(architecture):
    model = scored("llama")
    with prompts_read_once(model), prompts_read_once(model):
        pass
    assert "generate" not in vars(model)
    model.generate = own = lambda *args, **kwargs: None
    with prompts_read_once(model):
        assert model.generate is not own
    assert model.generate is own


@pytest.mark.parametrize("value", ["yes", None, 2, 0, 1])
def test_other_values_are_refused(value, tmp_path):
    from trl_repulse import PPOConfig, ReinforceConfig

    for config in (ReinforceConfig, RePULSeConfig, PPOConfig):
        with pytest.raises(ValueError, match="`share_prompts=.*` is not one of"):
            config(output_dir=str(tmp_path), use_cpu=True, bf16=False, share_prompts=value)
