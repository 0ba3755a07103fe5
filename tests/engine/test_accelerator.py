"""What only an accelerator shows: real mixed precision, agreement with the CPU, kernels, memory.

Run with `pytest --accelerator -m gpu tests/engine/test_accelerator.py`.
"""

import shutil

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, TrainerCallback, set_seed

from trl_repulse import PPOTrainer, ReinforceTrainer, RePULSeTrainer
from trl_repulse.evaluation.gcg import run_gcg
from trl_repulse.evaluation.log_probs import completion_log_probs
from trl_repulse.evaluation.sampling import SamplingSettings, sample_completions

from ..conftest import DEVICE, USE_CPU, assert_same_logs, build_accelerator, word_reward
from ..gcg_trigger import GOALS, TARGET, build_trigger_model, build_trigger_tokenizer, evaluation_config, goal_text


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.trainer,
    pytest.mark.skipif(USE_CPU, reason="needs an accelerator and `--accelerator`"),
]

EOS, WIDTH = 1, 4
OVERFLOW, SCALE = 2.0**40, 2.0**8  # no gradient in fp16 fits the first; all of the small models' do the second


class Drawn:
    """Mixin that replaces sampling by completions that depend neither on device nor on model."""

    def _generate(self, prompts):
        self._draws = vars(self).get("_draws", 0) + 1
        generator = torch.Generator().manual_seed(self._draws)
        completions = []
        for _ in prompts:
            ids = torch.randint(3, 19, (WIDTH,), generator=generator).tolist()
            length = int(torch.randint(WIDTH + 1, (), generator=generator))
            completions.append(ids if length == WIDTH else [*ids[:length], EOS])
        texts = self.processing_class.batch_decode(completions, skip_special_tokens=True)
        ids = [self.processing_class(prompt)["input_ids"] for prompt in prompts]
        return ids, completions, None, texts, None, {}, None, []


def drawn(trainer_cls):
    return type(f"Drawn{trainer_cls.__name__}", (Drawn, trainer_cls), {})


HOT = {"proposal": "hot_policy", "proposal_temperature": 1.6, "potential": "indicator", "bad_reward_threshold": -1.0}
# Trainer, the same with draws of its own, settings, whether with adapters
CASES = {
    "learned": (drawn(RePULSeTrainer), RePULSeTrainer, {"beta": 0.1}, False),
    "hot": (drawn(RePULSeTrainer), RePULSeTrainer, HOT, False),
    "REINFORCE": (drawn(ReinforceTrainer), ReinforceTrainer, {"beta": 0.1}, False),
    "PPO": (drawn(PPOTrainer), PPOTrainer, {"beta": 0.1}, False),
    "adapters": (drawn(RePULSeTrainer), RePULSeTrainer, {"beta": 0.1}, True),
}
UNEVEN = Dataset.from_dict({"prompt": ["the", "the cat", "the cat sat the dog", "a dog ate the fish the cat"]})
LORA = {"task_type": "CAUSAL_LM", "r": 4, "init_lora_weights": False, "target_modules": "all-linear"}


@pytest.fixture
def build(make):
    """A trainer of one of the cases: one update of plain gradient descent, unless told otherwise."""

    def build(case, model="llama", drawn=True, extra=None, **kwargs):
        with_draws, without, settings, adapters = CASES[case]
        extra = {"peft_config": LoraConfig(**LORA)} | (extra or {}) if adapters else extra
        base = {"max_completion_length": WIDTH, "max_steps": 1, "optim": "sgd", "learning_rate": 0.1}
        settings = base | settings | kwargs
        trainer = make(with_draws if drawn else without, model, dataset=UNEVEN, extra=extra, **settings)
        trainer.add_callback(Seeded())
        return trainer

    return build


class Seeded(TrainerCallback):
    def on_train_begin(self, args, state, control, **kwargs):
        if state.global_step == 0:
            torch.manual_seed(7)


def second(trainer):
    """The second model; `None` where there is none."""
    return vars(trainer).get("value") or vars(trainer).get("proposal")


def trained(trainer):
    """What is trained, of the trainer's own model and of the second."""
    names = dict(trainer.model.named_parameters())
    if any("lora_" in name for name in names):
        return [flat(p for name, p in names.items() if f".{key}." in name) for key in ("default", "proposal")]
    modules = [trainer.model] if second(trainer) is None else [trainer.model, second(trainer).module]
    return [flat(module.parameters()) for module in modules]


def flat(parameters):
    return torch.cat([p.detach().float().cpu().flatten() for p in parameters])


def parameters(trainer):
    """Of the trainer's own model, and of the second."""
    modules = [trainer.model] if second(trainer) is None else [trainer.model, second(trainer).module]
    return [p for module in modules for p in module.parameters()]


def start_as(trainer, begun):
    """Gives a trainer the parameters of another one: random ones are drawn on the device."""
    with torch.no_grad():
        for p, q in zip(parameters(trainer), begun, strict=True):
            if p.is_floating_point():
                p.copy_(q)


# The CPU and the accelerator


@pytest.mark.parametrize("share", [True, False], ids=["shared", "separate"])
@pytest.mark.parametrize("case", CASES)
def test_one_update_is_that_of_the_cpu(build, architecture, case, share):
    settings = {"model": architecture, "share_prompts": share}
    here = build(case, use_cpu=True, **settings)
    start, begun = trained(here), [p.detach().clone() for p in parameters(here)]
    here.train()
    build_accelerator()  # accelerate's state is one for all trainers of a process
    there = build(case, use_cpu=False, **settings)
    start_as(there, begun)
    there.train()
    assert there._guard == here._guard and there._guard.share_prompts is share
    assert next(here.model.parameters()).device.type == "cpu"
    assert next(there.model.parameters()).device.type == DEVICE.type
    for before, one, other in zip(start, trained(here), trained(there), strict=True):
        assert (one - before).abs().max() > 1e-4
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    assert_same_logs(here, there)


def test_exact_evaluation_is_that_of_the_cpu(evaluator, model_dirs, architecture):
    model = AutoModelForCausalLM.from_pretrained(model_dirs[architecture])
    here = evaluator.evaluate(model)
    there = evaluator.evaluate(model.to(DEVICE))
    assert there.log_prob_bad == pytest.approx(here.log_prob_bad, abs=1e-5)
    assert there.expected_reward == pytest.approx(here.expected_reward, abs=1e-5)


def test_sampled_log_probs_are_those_of_the_cpu(tmp_path, model_dirs, prompts, architecture):
    build_accelerator()  # samples are drawn on its device
    settings = SamplingSettings(num_samples=50, max_completion_length=3)
    model = model_dirs[architecture]
    samples = sample_completions(tmp_path / "s", model, prompts, word_reward, settings, progress=False)
    again = sample_completions(tmp_path / "again", model, prompts, word_reward, settings, progress=False)
    assert samples.table.equals(again.table)
    table = samples.table

    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = [tokenizer(samples.prompts[i])["input_ids"] for i in table["prompt_index"].to_pylist()]
    completions = table["completion_ids"].to_pylist()
    log_p, _ = completion_log_probs(AutoModelForCausalLM.from_pretrained(model), ids, completions)
    assert table["log_prob"].to_pylist() == pytest.approx([row.sum().item() for row in log_p], abs=1e-4)


def test_gcg_is_that_of_the_cpu():
    tokenizer = build_trigger_tokenizer()
    model = build_trigger_model(tokenizer)
    found = []
    for device in ("cpu", DEVICE):
        model.to(device)
        found.append(run_gcg(model, tokenizer, goal_text(GOALS[0]), TARGET, evaluation_config()))
    here, there = found
    assert here.suffixes == there.suffixes
    assert here.losses == pytest.approx(there.losses, abs=1e-4)


# Mixed precision


PRECISIONS = {"float32": {}, "bf16": {"bf16": True}, "fp16": {"fp16": True}}


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("case", CASES)
def test_resumed_runs_end_with_the_same_bits(build, tmp_path, case, precision):
    """With samples of the models' own; scales of fp16 begin where torch begins, so that first updates may be left out."""
    settings = {"max_steps": 12, "save_strategy": "steps", "save_steps": 6, "optim": "adamw_torch"}
    settings |= {"learning_rate": 1e-2, "drawn": False} | PRECISIONS[precision]
    whole = build(case, **settings)
    start = trained(whole)
    whole.train()
    expected = trained(whole)
    for before, after in zip(start, expected, strict=True):
        assert after.isfinite().all() and (after - before).abs().max() > 1e-3
    states = scaler_states(whole)
    assert len(states) == (0 if precision != "fp16" else len(expected))
    shutil.rmtree(tmp_path / "out" / "checkpoint-12")
    resumed = build(case, **settings)
    resumed.train(resume_from_checkpoint=True)
    assert all(torch.equal(one, other) for one, other in zip(trained(resumed), expected, strict=True))
    assert scaler_states(resumed) == states


def scaler_states(trainer):
    own = [trainer.accelerator.scaler]
    theirs = [] if second(trainer) is None else [second(trainer)._scaler]
    return [scaler.state_dict() for scaler in (*own, *theirs) if scaler is not None]


class Scales(TrainerCallback):
    """Sets what losses are scaled by."""

    def __init__(self, trainer, own, theirs):
        self._trainer, self._scales = trainer, (own, theirs)

    def on_train_begin(self, *args, **kwargs):
        scaler = self._trainer.accelerator.scaler
        scaler.load_state_dict(scaler.state_dict() | {"scale": self._scales[0]})
        if second(self._trainer) is not None:
            second(self._trainer)._scaler = torch.amp.GradScaler(DEVICE.type, init_scale=self._scales[1])


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_an_overflow_is_the_models_own(build, case, own):
    trainer = build(case, fp16=True)
    if second(trainer) is None and not own:
        pytest.skip("has one model")
    assert trainer.accelerator.scaler.is_enabled()
    trainer.add_callback(Scales(trainer, *((OVERFLOW, SCALE) if own else (SCALE, OVERFLOW))))
    start = trained(trainer)
    trainer.train()
    changed = [not torch.equal(one, other) for one, other in zip(trained(trainer), start, strict=True)]
    assert changed == [not own, own][: len(changed)]
    scales = [state["scale"] for state in scaler_states(trainer)]
    assert scales == ([OVERFLOW / 2, SCALE] if own else [SCALE, OVERFLOW / 2])[: len(scales)]


@pytest.mark.parametrize("case", CASES)
def test_half_precision_in_shared_rows(build, case):
    """One update under autocast: shared rows are as far from float32 as separate ones."""
    exact = build(case, share_prompts=True)
    start = trained(exact)
    runs = {share: build(case, share_prompts=share, bf16=True) for share in ("auto", False)}
    for trainer in runs.values():
        start_as(trainer, parameters(exact))
    assert runs["auto"].model.config._attn_implementation == "sdpa"
    assert runs["auto"]._guard.share_prompts and not runs[False]._guard.share_prompts
    for trainer in (exact, *runs.values()):
        trainer.train()
    for i, (before, expected) in enumerate(zip(start, trained(exact), strict=True)):
        step = (expected - before).norm()
        errors = [((trained(trainer)[i] - expected).norm() / step).item() for trainer in runs.values()]
        assert step > 0 and 0 < errors[0] < max(0.02, 3 * errors[1]) and errors[0] < 0.2, errors


# What changes how an update is computed, and not the update


@pytest.mark.parametrize("case", ["learned", "hot", "PPO"])
def test_compiled_models_make_the_same_update(build, request, case):
    request.addfinalizer(torch.compiler.reset)
    eager = build(case, share_prompts=False)
    compiled = build(case, torch_compile=True, torch_compile_backend="inductor", tf32=False)
    start, _ = trained(eager), start_as(compiled, parameters(eager))
    for trainer in (eager, compiled):
        trainer.train()
    assert compiled._guard.share_prompts
    for before, one, other in zip(start, trained(eager), trained(compiled), strict=True):
        assert (one - before).abs().max() > 1e-4
        torch.testing.assert_close(one, other, atol=5e-5, rtol=1e-4)


def save_llama(folder, tokenizer, **shape):
    set_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4} | shape
    special = {"bos_token_id": None, "eos_token_id": EOS, "pad_token_id": 0}
    config = LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=256, **sizes, **special)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


# Memory


@pytest.mark.skipif(
    not callable(getattr(torch.accelerator, "max_memory_allocated", None)), reason="torch does not tell before 2.9"
)
@pytest.mark.parametrize("case", ["learned", "hot", "REINFORCE", "PPO"])
def test_shared_rows_take_less_memory(make, tokenizer, tmp_path, case):
    """Prompts of 128 tokens with 8 completions each: they are kept for the backward pass once."""
    shape = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4}
    folder = save_llama(tmp_path / "base", tokenizer, **shape)
    long = Dataset.from_dict({"prompt": [word + " cat" * 127 for word in ("the", "dog", "fish", "bad")]})
    assert {len(tokenizer(prompt)["input_ids"]) for prompt in long["prompt"]} == {128}
    trainer_cls, _, settings, _ = CASES[case]
    sizes = {"num_generations": 8, "per_device_train_batch_size": 32, "max_completion_length": WIDTH}
    settings = settings | sizes | {"optim": "sgd", "max_steps": 1}
    peaks = {}
    for share in (True, False):
        trainer = make(trainer_cls, folder, dataset=long, share_prompts=share, **settings)
        torch.accelerator.synchronize()
        before = torch.accelerator.memory_allocated()
        torch.accelerator.reset_peak_memory_stats()
        trainer.train()
        torch.accelerator.synchronize()
        peaks[share] = torch.accelerator.max_memory_allocated() - before
        del trainer
    assert 0 < peaks[True] < 0.7 * peaks[False], peaks
