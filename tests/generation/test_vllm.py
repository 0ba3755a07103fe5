"""The generator and the trainers on vLLM itself, on CPU with its CPU build: `pytest -m vllm tests/generation/test_vllm.py`."""

import contextlib
import itertools
import json
import os
import sys
from pathlib import Path


os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import pytest
import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, set_seed

from examples.worlds.exact import ExactEvaluator
from trl_repulse import PPOTrainer, ReinforceTrainer, RePULSeTrainer
from trl_repulse.evaluation.sampling import SamplingSettings, sample_completions
from trl_repulse.generation import VLLMGenerator
from trl_repulse.generation.drawing import Sampler

from ..conftest import BAD, word_reward
from ..distributed_support import free_port, launcher, run
from ..engine.test_distributed import needs_deepspeed
from ..vllm_double import greedy
from ..vllm_sleep import let_cpu_sleep


pytestmark = pytest.mark.vllm

pytest.importorskip("vllm")

PROMPTS = [[3, 12], [4], [5, 13, 14]]
NAMES = ("policy", "proposal")
CPU = not torch.cuda.is_available()
OPTIONS = {"max_model_length": 32, "max_num_seqs": 64, "gpu_memory_utilization": 0.1}
TRAINED = {"use_vllm": True, "vllm_max_model_length": 32, "vllm_gpu_memory_utilization": 0.1}  # of trainers


def build(kind, tokenizer, folder, positions=32):
    """A saved tiny model with heads of 32 dimensions, the least that vLLM takes on CPU."""
    set_seed(0)
    shared = {"vocab_size": len(tokenizer), "initializer_range": 0.3}
    shared |= {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
    if kind == "gpt2":  # its head has the embedding's weights
        model = GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=2, n_head=2, n_positions=positions, **shared))
    else:
        shared |= {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
        shared |= {"num_key_value_heads": 1, "tie_word_embeddings": kind == "llama, tied"}
        model = LlamaForCausalLM(LlamaConfig(max_position_embeddings=positions, **shared))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def shake(module, adapter=None):
    with torch.no_grad():
        for name, p in module.named_parameters():
            if adapter is None or adapter in name.split("."):
                p.add_(0.1 * torch.randn_like(p))


def alternate(generator, change, expected, times=100, names=NAMES):
    """How many of `times` alternating changes and samplings gave what the model's weights give; every tenth is sampled twice."""
    fresh, seen = 0, set()
    for i, name in enumerate(itertools.islice(itertools.cycle(names), times)):
        change(name)
        wanted = expected(name)
        with generator.using(name):
            drawn = [[list(ids) for ids in generator.generate(PROMPTS)[1]] for _ in range(2 if i % 10 == 0 else 1)]
        fresh += all(completions == wanted for completions in drawn)
        seen.add(str(wanted))
    assert len(seen) > times // 2
    return fresh


@pytest.fixture(autouse=True)
def cpu_sleeps(monkeypatch):
    if CPU:
        let_cpu_sleep(monkeypatch)


@pytest.mark.parametrize("sleep", [False, 1, 2])
@pytest.mark.parametrize("kind", ["gpt2", "llama", "llama, tied"])
def test_whole_weights_are_never_stale(tokenizer, tmp_path, kind, sleep):
    accelerator = Accelerator(cpu=CPU)
    policy = build(kind, tokenizer, tmp_path).to(accelerator.device)
    proposal = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval().to(accelerator.device)
    models = {"policy": policy, "proposal": proposal}
    options = OPTIONS | {"temperature": 0.0, "max_completion_length": 6, "enable_sleep_mode": bool(sleep)}
    generator = VLLMGenerator(models, tokenizer, accelerator, sleep_level=sleep or None, **options)
    set_seed(0)

    def change(name):
        shake(models[name])
        generator.changed(name)

    def expected(name):
        return [greedy(models[name], ids, 6)[0] for ids in PROMPTS]

    assert alternate(generator, change, expected) == 100
    if sleep != 2:  # nobody is told
        assert alternate(generator, lambda name: shake(models[name]), expected, 20, ["policy"]) < 10


@pytest.mark.parametrize("sleep", [False, 1, 2])
def test_adapters_are_never_stale(tokenizer, tmp_path, sleep):
    accelerator = Accelerator(cpu=CPU)
    config = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear", init_lora_weights=False)
    model = get_peft_model(build("llama", tokenizer, tmp_path), config, adapter_name="policy")
    model.add_adapter("proposal", config)
    model.to(accelerator.device).eval()
    options = OPTIONS | {"temperature": 0.0, "max_completion_length": 6, "enable_sleep_mode": bool(sleep)}
    generator = VLLMGenerator({"policy": model}, tokenizer, accelerator, sleep_level=sleep or None, **options)
    generator.add("proposal", model, "proposal")
    set_seed(0)

    def change(name):
        shake(model, name)
        generator.changed(name)

    def expected(name):
        model.set_adapter(name)
        return [greedy(model, ids, 6)[0] for ids in PROMPTS]

    assert alternate(generator, change, expected) == 100
    assert generator.pushes["base"] == (110 if sleep == 2 else 1)

    calls, generate = [], generator.llm.llm.generate
    generator.llm.llm.generate = lambda prompts, **options: calls.append(len(prompts)) or generate(prompts, **options)
    for _ in range(20):  # one call for both
        for name in NAMES:
            change(name)
        drawn = {}
        with generator.together("proposal"):
            drawn["policy"] = [list(ids) for ids in generator.generate(PROMPTS)[1]]
        with generator.using("proposal"):
            drawn["proposal"] = [list(ids) for ids in generator.generate(PROMPTS)[1]]
        assert drawn == {name: expected(name) for name in NAMES}
    assert calls == [2 * len(PROMPTS)] * 20


@pytest.mark.parametrize("adapters", [False, True])
def test_prompts_are_read_once(tokenizer, tmp_path, adapters):
    """Completions of a prompt have it from the engine's prefix cache, which forgets it when weights change; each adapter reads its own."""
    accelerator = Accelerator(cpu=CPU)
    model = build("llama", tokenizer, tmp_path, positions=512)
    if adapters:
        config = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear", init_lora_weights=False)
        model = get_peft_model(model, config, adapter_name="policy")
        model.add_adapter("proposal", config)
    model.to(accelerator.device).eval()
    names = NAMES if adapters else NAMES[:1]
    options = OPTIONS | {"temperature": 0.0, "max_completion_length": 6, "max_model_length": 512}
    generator = VLLMGenerator({"policy": model}, tokenizer, accelerator, **options)
    if adapters:
        generator.add("proposal", model, "proposal")
    engine = generator.llm.llm
    block = engine.llm_engine.vllm_config.cache_config.block_size
    prompt = torch.randint(3, len(tokenizer), (2 * block + 5,), generator=torch.Generator().manual_seed(0)).tolist()
    cached, generate = [], engine.generate

    def watched(prompts, **options):
        outputs = generate(prompts, **options)
        cached.append([output.num_cached_tokens for output in outputs])
        return outputs

    engine.generate = watched
    set_seed(0)
    seen = set()
    for _ in range(10):
        cached.clear()
        drawn = {}
        for name in names:
            shake(model, name if adapters else None)
            generator.changed(name)
        with generator.together("proposal") if adapters else contextlib.nullcontext():
            drawn["policy"] = [list(ids) for ids in generator.generate([prompt] * 4)[1]]
        if adapters:
            with generator.using("proposal"):
                drawn["proposal"] = [list(ids) for ids in generator.generate([prompt] * 4)[1]]
        for name in names:
            if adapters:
                model.set_adapter(name)
            assert drawn[name] == [greedy(model, prompt, 6)[0]] * 4
        assert cached == [[0, 2 * block, 2 * block, 2 * block] * len(names)]
        seen.add(str(drawn))
    assert len(seen) > 5


def test_one_call_draws_by_two_samplers(tokenizer, tmp_path):
    """The frequencies of first tokens are the model's, by each sampler."""
    accelerator = Accelerator(cpu=CPU)
    model = build("llama", tokenizer, tmp_path).to(accelerator.device)
    generator = VLLMGenerator({"policy": model}, tokenizer, accelerator, **OPTIONS | {"max_completion_length": 1})
    n = 4000
    logits = model(torch.tensor([PROMPTS[0]], device=model.device)).logits[0, -1].detach().cpu()
    for other in (Sampler(2.0), Sampler(bias=torch.linspace(-2, 3, len(logits)))):
        with generator.together("policy", (n, n), other):
            own = generator.generate([PROMPTS[0]] * n)[1]
        with generator.using("policy", sampler=other):
            hot = generator.generate([PROMPTS[0]] * n)[1]
        assert generator._ahead is None
        for drawn, sampler, wrong in ((own, Sampler(), other), (hot, other, Sampler())):
            counts = torch.bincount(torch.tensor([ids[0] for ids in drawn]), minlength=len(logits))
            probs = sampler(logits).softmax(dim=-1)
            z = (counts - n * probs) / (n * probs * (1 - probs)).sqrt()
            assert z.abs().max() < 4.5
            assert (counts / n - wrong(logits).softmax(dim=-1)).abs().max() > 0.02


@pytest.mark.parametrize("kind", ["scales", "ranks", "gpt2", "checkpointed", "copies", "vocabulary"])
def test_adapters_of_every_kind_are_the_models(tokenizer, tmp_path, kind):
    """What vLLM has no words for is merged, and names are those of layers without wrappers."""
    options = {"scales": {"alpha_pattern": {"q_proj": 64}}, "ranks": {"rank_pattern": {"q_proj": 2}}}
    options |= {"copies": {"modules_to_save": ["norm", "lm_head"]}}
    # Merged layers that vLLM pads, and so copies late
    options |= {"vocabulary": {"target_modules": ["q_proj", "embed_tokens", "lm_head"]}}
    options |= {"gpt2": {"target_modules": ["c_attn"], "fan_in_fan_out": True}}
    settings = {"target_modules": "all-linear"} | options.get(kind, {})
    config = LoraConfig(task_type="CAUSAL_LM", r=4, init_lora_weights=False, **settings)
    accelerator = Accelerator(cpu=CPU)
    model = get_peft_model(build("gpt2" if kind == "gpt2" else "llama", tokenizer, tmp_path), config)
    model.to(accelerator.device).eval()
    shake(model, "default")
    if kind == "checkpointed":
        layers = model.get_base_model().model.layers
        for place in range(len(layers)):
            layers[place] = checkpoint_wrapper(layers[place])
    generator = VLLMGenerator({"policy": model}, tokenizer, accelerator, max_completion_length=6, **OPTIONS)
    _, drawn, log_probs, _ = generator.generate([ids for ids in PROMPTS for _ in range(8)], num_generations=8)
    for prompt, completion, found in zip([ids for ids in PROMPTS for _ in range(8)], drawn, log_probs, strict=True):
        ids = torch.tensor([[*prompt, *completion]], device=accelerator.device)
        with torch.no_grad():
            expected = model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(dim=-1)
        for place, token in enumerate(completion):
            assert found[place][0] == pytest.approx(expected[place, token].item(), abs=1e-3)


@pytest.mark.trainer
def test_runs_of_other_seeds_draw_other_completions(make, tokenizer, tmp_path):
    build("llama", tokenizer, tmp_path / "model")
    drawn = []
    for seed in (1, 2, 1):
        trainer = make(
            ReinforceTrainer,
            model=str(tmp_path / "model"),
            shuffle_dataset=False,
            max_completion_length=6,
            max_steps=1,
            seed=seed,
            **TRAINED,
        )
        trainer.train()
        drawn.append(list(trainer._logs["completion"]))
    assert drawn[0] == drawn[2] != drawn[1]


def test_completions_stop_at_every_end(tokenizer, tmp_path):
    model = build("llama", tokenizer, tmp_path)
    model.generation_config.eos_token_id = [5]
    generator = VLLMGenerator({"policy": model}, tokenizer, Accelerator(cpu=CPU), max_completion_length=8, **OPTIONS)
    drawn = generator.generate([[3]] * 200, num_generations=200)[1]
    ends = {5, tokenizer.eos_token_id}
    assert {ids[-1] for ids in drawn if len(ids) < 8} == ends and not any(ends & set(ids[:-1]) for ids in drawn)


@pytest.mark.trainer
@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize(
    ("trainer_cls", "sleep"),
    [(RePULSeTrainer, None), (RePULSeTrainer, 1), (RePULSeTrainer, 2), (ReinforceTrainer, None), (PPOTrainer, None)],
)
def test_trainers_sample_from_the_weights_they_have(make, tokenizer, tmp_path, trainer_cls, sleep, adapters):
    build("llama", tokenizer, tmp_path / "model")
    extra = {"peft_config": LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear")} if adapters else {}
    trainer = make(
        trainer_cls,
        model=str(tmp_path / "model"),
        extra=extra,
        vllm_enable_sleep_mode=sleep is not None,
        vllm_sleep_level=sleep,
        learning_rate=0.05,
        max_steps=5,
        **TRAINED,
    )
    trainer.train()
    prefixes = ("", "proposal/") if trainer_cls is RePULSeTrainer else ("",)
    for prefix in prefixes:
        gaps = [log[f"{prefix}sampling/sampling_logp_difference/max"] for log in trainer.state.log_history[:-1]]
        assert len(gaps) == 5 and max(gaps) < 1e-4
        if trainer_cls is not PPOTrainer:
            versions = [log[f"{prefix}sampling/weights_version"] for log in trainer.state.log_history[:-1]]
            assert versions == [1, 2, 3, 4, 5]
    pushes = {"policy": 5, **({"proposal": 5} if len(prefixes) == 2 else {})}
    if adapters:
        pushes["base"] = 5 if sleep == 2 else 1  # dropped before each call, which draws for both
    assert trainer.vllm_generation.pushes == pushes


@pytest.fixture
def shared_memory():
    """
    None is left of an engine over several processes, before the test and after it.

    The CPU build names it by ranks alone in a launch, and will not start where some is left of a process that was ended.
    """

    def forget():
        for path in Path("/dev/shm").glob("-tp:0-*-cpushm_*"):
            path.unlink(missing_ok=True)

    forget()
    yield
    forget()


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.trainer
@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ("cpu_ddp", "whole"),
        ("cpu_ddp", "adapters"),
        ("cpu_ddp", "one engine"),
        ("fsdp2", "whole"),  # which refuses adapters
        pytest.param("zero2", "whole", marks=needs_deepspeed),
        pytest.param("zero2", "adapters", marks=needs_deepspeed),
        pytest.param("zero3", "whole", marks=needs_deepspeed),
        pytest.param("zero3", "adapters", marks=needs_deepspeed),
    ],
)
def test_two_processes_sample_from_the_weights_they_have(tokenizer, tmp_path, shared_memory, config, kind):
    """Each has an engine of its own, or half of one (tensor parallelism); with ZeRO-3 and FSDP2 none has a whole model besides."""
    build("llama", tokenizer, tmp_path / "model")
    done = run([*launcher(2, config), "-m", "tests.vllm_run", str(tmp_path), kind])
    result = json.loads(next(line for line in done.stdout.splitlines() if line.startswith('{"world_size"')))
    assert result["world_size"] == 2 and result["engine"] == (2 if kind == "one engine" else 1)
    for prefix in ("", "proposal/"):
        gaps = [log[f"{prefix}sampling/sampling_logp_difference/max"] for log in result["logs"]]
        assert len(gaps) == 3 and max(gaps) < 1e-4
        assert [log[f"{prefix}sampling/weights_version"] for log in result["logs"]] == [1, 2, 3]


@pytest.mark.trainer
def test_stale_weights_would_be_noticed_in_training(make, tokenizer, tmp_path, caplog):
    build("llama", tokenizer, tmp_path / "model")
    trainer = make(ReinforceTrainer, model=str(tmp_path / "model"), learning_rate=0.05, max_steps=5, **TRAINED)
    trainer.vllm_generation.changed = lambda *names: None
    trainer.train()
    assert trainer.state.log_history[4]["sampling/sampling_logp_difference/mean"] > 0.1
    assert "vLLM's log-probabilities of the samples" in caplog.text


@pytest.mark.skipif(not CPU, reason="on an accelerator the two ways draw other random numbers")
def test_with_the_same_random_numbers_training_is_the_same(monkeypatch):
    """The world of two tokens, to the bit; the benchmark runs it to its end."""
    monkeypatch.setenv("MASTER_PORT", str(free_port()))  # the engines of this process have another
    done = run([sys.executable, "-m", "benchmarks.same_draws", "--max_steps", "25"])
    row = next(line for line in done.stdout.splitlines() if line.startswith("| 0 |"))
    assert [cell.strip() for cell in row.split("|")[2:5]] == ["25", "25", "none"]


def test_an_engine_that_does_not_fit(tokenizer, tmp_path):
    model = build("llama", tokenizer, tmp_path)
    options = OPTIONS | {"max_model_length": 10_000_000}
    with pytest.raises((RuntimeError, ValueError), match="max_model_len"):
        VLLMGenerator({"policy": model}, tokenizer, Accelerator(cpu=CPU), **options)


def test_held_out_samples_are_the_models(tokenizer, prompts, tmp_path):
    model, folder = build("llama", tokenizer, tmp_path / "model"), str(tmp_path / "model")
    settings = SamplingSettings(num_samples=500, max_completion_length=2, shard_size=1000, engine="vllm")
    options = {"max_model_len": 32, "gpu_memory_utilization": 0.1, "enforce_eager": True}
    samples = sample_completions(
        tmp_path / "samples", folder, prompts, word_reward, settings, engine_kwargs=options, progress=False
    )
    evaluator = ExactEvaluator(tokenizer, prompts["prompt"], lambda t: torch.zeros(len(t)), [BAD], 2)
    report = evaluator.evaluate(model)
    for estimate in (samples.column("entropy"), -samples.column("log_prob")):
        assert abs(estimate.mean() - report.entropy) < 4.5 * estimate.std() / 2000**0.5
    assert len({tuple(row) for row in samples.column("log_prob").reshape(2, -1)}) == 2
