"""Generators over several models: the right model, with the weights it has now, every time."""

import copy
import itertools
import json
import sys
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers import AutoModelForCausalLM, Trainer
from trl.generation import vllm_generation
from trl.generation.vllm_generation import VLLMGeneration

from trl_repulse import PPOTrainer, ReinforceTrainer, RePULSeTrainer
from trl_repulse.engine.trl_bridge import pinned_changes, without_lasting_changes
from trl_repulse.generation import TransformersGenerator, VLLMGenerator, _engine
from trl_repulse.generation._engine import check_vllm, engine_options, is_pushable
from trl_repulse.generation.vllm_generator import _of_the_drawn

from ..conftest import build_model
from ..distributed_support import launcher, run_forked
from ..vllm_double import build_engine, greedy


PROMPTS = [[3, 12], [4], [5, 13, 14]]
NAMES = ("policy", "proposal")


@pytest.fixture(autouse=True)
def lora_requests(monkeypatch):
    """`vllm.lora.request`, where vLLM is not installed."""
    if "vllm" in sys.modules:
        return
    module = SimpleNamespace(LoRARequest=lambda name, number, path: SimpleNamespace(number=number, lora_path=path))
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(lora=SimpleNamespace(request=module)))
    monkeypatch.setitem(sys.modules, "vllm.lora", SimpleNamespace(request=module))
    monkeypatch.setitem(sys.modules, "vllm.lora.request", module)


def two_models(tokenizer):
    return {name: build_model("llama", len(tokenizer), seed).eval() for seed, name in enumerate(NAMES)}


def two_adapters(tokenizer):
    """One model with the adapters of both names."""
    config = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules="all-linear", init_lora_weights=False)
    model = get_peft_model(build_model("llama", len(tokenizer)), config, adapter_name=NAMES[0])
    model.add_adapter(NAMES[1], config)
    return model.eval()


def shake(module, adapter=None):
    """Changes all weights, or those of one adapter."""
    with torch.no_grad():
        for name, p in module.named_parameters():
            if adapter is None or adapter in name.split("."):
                p.add_(0.2 * torch.randn_like(p))


def sample(generator, name):
    with generator.using(name):
        return [list(ids) for ids in generator.generate(PROMPTS)[1]]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("sleep", "level"), [(False, None), (True, 1), (True, None), pytest.param(True, 2, marks=pytest.mark.slow)]
)
def test_whole_weights_are_never_stale(tokenizer, monkeypatch, sleep, level):
    models = two_models(tokenizer)
    engine = build_engine(models["policy"], monkeypatch, sleep=sleep)
    generator = VLLMGenerator(models, tokenizer, engine=engine, sleep_level=level)
    torch.manual_seed(0)
    seen = set()
    for name in itertools.islice(itertools.cycle(NAMES), 100):
        shake(models[name])
        generator.changed(name)
        expected = [greedy(models[name], ids, 6)[0] for ids in PROMPTS]
        assert sample(generator, name) == expected
        seen.add(str(expected))
    assert len(seen) > 50  # the weights do matter
    assert generator.pushes == {"policy": 50, "proposal": 50}
    assert set(generator.llm.llm.slept[1:]) == ({level or 2} if sleep else set())


def test_one_call_draws_for_two_adapters(tokenizer, monkeypatch):
    """The same as a call each: of equal and of unequal numbers of rows, and never what has been declared changed since."""
    model = two_adapters(tokenizer)
    generator = VLLMGenerator({"policy": model}, tokenizer, engine=build_engine(model, monkeypatch, lora=True))
    generator.add("proposal", model, "proposal")
    calls = generator.llm.llm.calls
    rows = [ids for ids in PROMPTS for _ in range(2)]

    def draw(name, prompts):
        with generator.using(name):
            drawn = generator.generate(prompts)
        assert [len(values) for values in generator.log_probs] == [len(ids) for ids in drawn[1]]
        return [list(ids) for ids in drawn[1]], generator.log_probs

    for n, m in ((1, 1), (2, 1), (2, 3)):
        prompts, others = rows[:: 2 // n], [ids for ids in PROMPTS for _ in range(m)]
        if (n, m) == (1, 1):
            others = prompts
        expected = draw("policy", prompts), draw("proposal", others)
        assert expected[0][0] != expected[1][0]
        calls.clear()
        with generator.together("proposal", (n, m)):
            own = draw("policy", prompts)
        assert (own, draw("proposal", others)) == expected
        assert calls == [len(prompts) + len(others)]
    assert draw("proposal", others) == expected[1] and len(calls) == 2  # what was kept is given once

    with generator.together("proposal"):
        draw("policy", PROMPTS)
    shake(model, "proposal")
    generator.changed("proposal")
    model.set_adapter("proposal")
    assert draw("proposal", PROMPTS)[0] == [greedy(model, ids, 6)[0] for ids in PROMPTS]
    calls.clear()
    with generator.together("proposal"):
        draw("policy", PROMPTS)
    draw("proposal", PROMPTS[:2])  # others than those that were drawn for
    assert calls == [6, 2]


def test_whole_models_are_drawn_from_one_after_the_other(tokenizer, monkeypatch):
    models = two_models(tokenizer)
    generator = VLLMGenerator(models, tokenizer, engine=build_engine(models["policy"], monkeypatch))
    with generator.together("proposal"):
        assert sample(generator, "policy") == [greedy(models["policy"], ids, 6)[0] for ids in PROMPTS]
    assert sample(generator, "proposal") == [greedy(models["proposal"], ids, 6)[0] for ids in PROMPTS]
    assert generator.llm.llm.calls == [3, 3]


@pytest.mark.thorough
@pytest.mark.parametrize(("sleep", "level"), [(False, None), (True, None), (True, 2)])
def test_adapters_are_never_stale(tokenizer, monkeypatch, sleep, level):
    model = two_adapters(tokenizer)
    before = {name: p.clone() for name, p in model.named_parameters() if "lora_" not in name}
    engine = build_engine(model, monkeypatch, lora=True, sleep=sleep)
    generator = VLLMGenerator({"policy": model}, tokenizer, engine=engine, sleep_level=level)
    generator.add("proposal", model, "proposal")
    torch.manual_seed(0)
    seen = set()
    for name in itertools.islice(itertools.cycle(NAMES), 100):
        shake(model, name)
        generator.changed(name)
        model.set_adapter(name)
        expected = [greedy(model, ids, 6)[0] for ids in PROMPTS]
        assert sample(generator, name) == sample(generator, name) == expected
        seen.add(str(expected))
    assert len(seen) > 50
    # Twice each, where it was dropped in between; vLLM loads adapters again once it has been given a base
    assert generator.pushes == {"base": 200 if level == 2 else 1, "policy": 50, "proposal": 50}
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters() if name in before)
    assert len(list(generator._folder.iterdir())) == 2  # of each adapter, its latest version


def test_a_push_that_is_left_out_would_be_noticed(tokenizer, monkeypatch):
    models = two_models(tokenizer)
    generator = VLLMGenerator(models, tokenizer, engine=build_engine(models["policy"], monkeypatch))
    sample(generator, "policy")
    torch.manual_seed(0)
    stale = 0
    for _ in range(10):
        shake(models["policy"])  # and nobody is told
        stale += sample(generator, "policy") != [greedy(models["policy"], ids, 6)[0] for ids in PROMPTS]
    assert stale > 5


def test_nothing_is_pushed_twice(tokenizer, monkeypatch):
    models = two_models(tokenizer)
    generator = VLLMGenerator(models, tokenizer, engine=build_engine(models["policy"], monkeypatch))
    for _ in range(3):
        sample(generator, "policy")
        sample(generator, "policy")
        generator.sync_weights()
    assert generator.pushes == {"policy": 1}
    sample(generator, "proposal")
    sample(generator, "policy")
    assert generator.pushes == {"policy": 2, "proposal": 1}  # one engine holds one of them


def test_a_push_that_fails_leaves_nothing_to_sample_from(tokenizer, monkeypatch):
    models = two_models(tokenizer)
    generator = VLLMGenerator(models, tokenizer, engine=build_engine(models["policy"], monkeypatch))
    sample(generator, "policy")
    push = _engine.push_weights
    monkeypatch.setattr(_engine, "push_weights", lambda *args, **kwargs: 1 / 0)
    generator.changed("policy")
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            sample(generator, "policy")
    monkeypatch.setattr(_engine, "push_weights", push)
    assert sample(generator, "policy") == [greedy(models["policy"], ids, 6)[0] for ids in PROMPTS]


def test_texts_go_in_and_out(tokenizer, monkeypatch):
    models = two_models(tokenizer)
    generator = VLLMGenerator(models, tokenizer, engine=build_engine(models["policy"], monkeypatch))
    generator.changed("proposal")
    [first, second] = generator.complete(["the cat", "fish"], model="proposal", num_completions=2)
    assert len(first) == len(second) == 2 and first[0] == first[1]  # greedy
    ids, log_p = greedy(models["proposal"], tokenizer("fish")["input_ids"], 6)
    assert second[0].token_ids == ids
    assert second[0].text == tokenizer.decode(ids, skip_special_tokens=True)
    assert (second[0].model, second[0].version) == ("proposal", 1)
    assert generator.log_probs[-1] == pytest.approx(log_p)


def test_models_of_another_family_are_refused(tokenizer, monkeypatch):
    policy = build_model("llama", len(tokenizer))
    engine = build_engine(policy, monkeypatch)
    with pytest.raises(ValueError, match="`vocab_size` is 19 in one and 20 in the other"):
        VLLMGenerator({"policy": policy, "proposal": build_model("llama", 20)}, tokenizer, engine=engine)
    with pytest.raises(ValueError, match="cannot share an engine"):
        VLLMGenerator({"policy": policy, "proposal": build_model("gpt2", 19)}, tokenizer, engine=engine)


def test_a_server_of_its_own_is_connected_to(tokenizer, monkeypatch):
    """TRL's server mode with a client in its place: each model's weights and samples go through the right one."""
    calls = []

    class Client:
        def __init__(self, base_url, group_port, connection_timeout):
            self.url = (base_url, group_port)

        def init_communicator(self, device):
            calls.append((self.url[0], "connected", self.url[1]))

        def update_named_params(self, metadata, params):
            assert [name for name, _, _ in metadata] == [name for name, _ in params]
            calls.append((self.url[0], "pushed", engine_of[self.url[0]].model))

        def reset_prefix_cache(self):
            calls.append((self.url[0], "reset", None))

        def generate(self, prompts, n, **kwargs):
            calls.append((self.url[0], "sampled", len(prompts)))
            rows = [[1] for _ in prompts for _ in range(n)]
            return {"prompt_ids": prompts, "completion_ids": rows, "logprobs": [[[0.0]]] * len(rows)}

    monkeypatch.setattr(vllm_generation, "VLLMClient", Client)
    monkeypatch.setattr(vllm_generation, "is_vllm_available", lambda: True)
    models = two_models(tokenizer)
    engine = build_engine(models["policy"], monkeypatch)
    vars(engine).update(mode="server", server_base_url="http://a", group_port=1, server_timeout=1.0)
    vars(engine).update(_weight_metadata=None)
    engine._init_vllm()
    generator = VLLMGenerator({"policy": models["policy"]}, tokenizer, engine=engine)
    generator.add("proposal", models["proposal"], server_base_url="http://b", group_port=2)
    engine_of = {"http://a": engine, "http://b": generator._served["proposal"].engine}
    for _ in range(2):
        generator.generate([[3]] * 4, num_generations=4)
        with generator.using("proposal", num_generations=2):
            generator.generate([[3]] * 2 + [[4]] * 2, num_generations=4)  # what a trainer would say of its policy
    generator.changed("proposal")
    with generator.using("proposal"):
        generator.generate([[3]])
    assert calls == [
        ("http://a", "connected", 1),
        ("http://b", "connected", 2),
        *(("http://a", "pushed", models["policy"]), ("http://a", "reset", None), ("http://a", "sampled", 1)),
        *(("http://b", "pushed", models["proposal"]), ("http://b", "reset", None), ("http://b", "sampled", 2)),
        *(("http://a", "sampled", 1), ("http://b", "sampled", 2)),
        *(("http://b", "pushed", models["proposal"]), ("http://b", "reset", None), ("http://b", "sampled", 1)),
    ]


def test_vllm_must_be_there_and_of_a_known_version(monkeypatch):
    monkeypatch.setattr(_engine, "is_vllm_available", lambda: False)
    with pytest.raises(ImportError, match=r"use_vllm=True.* needs vLLM.*pip install 'trl-repulse\[vllm\]"):
        check_vllm()

    def outdated():
        import warnings

        warnings.warn("TRL currently supports vLLM versions from 0.22.0 to 0.31.0. You have version 0.1.0 installed.")
        return True

    monkeypatch.setattr(_engine, "is_vllm_available", outdated)
    with pytest.raises(ImportError, match=r"from 0.22.0 to 0.31.0.*Install one of these"):
        check_vllm()


def test_engine_options(monkeypatch):
    given = []
    monkeypatch.setattr(vllm_generation, "LLM", lambda **options: given.append(options), raising=False)
    original = vllm_generation.LLM
    monkeypatch.setattr(_engine, "serves_adapters", lambda model, trust_remote_code: model == "m")
    lora = LoraConfig(r=12)
    with engine_options("float32", [lora, LoraConfig(use_dora=True, r=64)]):
        vllm_generation.LLM(model="m")
        vllm_generation.LLM(model="of an architecture without adapters")
    adapters = {
        "enable_lora": True,
        "max_lora_rank": 16,
        "max_loras": 1,
        "max_cpu_loras": 1,
    }  # of the one that is pushed
    assert given[0] == {"model": "m", "dtype": "float32", **adapters}
    assert given[1] == {"model": "of an architecture without adapters", "dtype": "float32"}
    with pytest.raises(RuntimeError, match="does not fit into memory.*Lower `vllm_gpu_memory_utilization`"):
        with engine_options("float32"):
            raise ValueError("No available memory for the cache blocks.")
    with pytest.raises(RuntimeError, match="^an illegal memory access$"):
        with engine_options("float32"):
            raise RuntimeError("an illegal memory access")
    assert vllm_generation.LLM is original


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"r": 1024}, False),
        ({"rank_pattern": {"q_proj": 4}}, False),
        ({"alpha_pattern": {"q_proj": 4}}, False),
        ({"lora_bias": True}, False),
        ({"alora_invocation_tokens": [1]}, False),
        ({"use_dora": True}, False),
        ({"modules_to_save": ["lm_head"]}, False),
        ({"bias": "all"}, False),
        ({"init_lora_weights": "pissa"}, False),
    ],
)
def test_which_adapters_are_pushed_as_they_are(changes, expected):
    assert is_pushable(LoraConfig(**changes)) is expected


def test_an_adapter_is_written_by_the_names_of_its_layers(tokenizer, monkeypatch, tmp_path):
    """Wrappers for activation checkpointing stand in them; nothing but the adapter is written, or asked of the Hub."""
    plain, wrapped = two_adapters(tokenizer), two_adapters(tokenizer)
    wrapped.load_state_dict(plain.state_dict())
    layers = wrapped.get_base_model().model.layers
    for place in range(len(layers)):
        layers[place] = checkpoint_wrapper(layers[place])
    for model in (plain, wrapped):
        model.resize_token_embeddings(len(tokenizer) + 8)
    monkeypatch.setattr(
        "peft.utils.save_and_load.check_file_exists_on_hf_hub", lambda *_, **__: pytest.fail("the Hub")
    )
    engine, written = build_engine(plain, monkeypatch, lora=True), []
    for folder, model in (("plain", plain), ("wrapped", wrapped)):
        _engine.write_adapter(engine, model, "proposal", tmp_path / folder)
        written.append(load_file(tmp_path / folder / "adapter_model.safetensors"))
    assert written[0].keys() == written[1].keys() and all(".lora_" in name for name in written[0])
    assert all(torch.equal(value, written[1][name]) for name, value in written[0].items())


def test_the_engine_stops_where_training_does(tokenizer, monkeypatch):
    models = two_models(tokenizer)
    models["policy"].generation_config.eos_token_id = [5, 9]
    engine = build_engine(models["policy"], monkeypatch)
    engine.generation_kwargs = {"seed": 3}
    generator = VLLMGenerator(models, tokenizer, engine=engine)
    assert set(generator.generation_kwargs["stop_token_ids"]) == {5, 9, tokenizer.eos_token_id}
    assert generator.generation_kwargs["seed"] == 3
    models["policy"].generation_config.eos_token_id = [5, -1, 1000]
    for given, ends in (({}, {5, tokenizer.eos_token_id}), ({"ignore_eos": True}, set())):
        engine.generation_kwargs = given
        generator = VLLMGenerator(models, tokenizer, engine=engine)
        assert set(generator.generation_kwargs["stop_token_ids"]) == ends


@pytest.mark.trainer
def test_continuous_batching_is_refused_under_fsdp(make, monkeypatch):
    trainer = make(ReinforceTrainer, use_transformers_continuous_batching=True)
    monkeypatch.setattr(Trainer, "create_accelerator_and_postprocess", lambda self: None)
    trainer.is_fsdp_enabled = True
    with pytest.raises(ValueError, match="does not go with FSDP"):
        trainer.create_accelerator_and_postprocess()


def test_log_probabilities_are_those_of_the_drawn_tokens():
    log_probs, ids = [[[-0.1, -3.0], [-0.2]], [[-0.5, -0.7]]], [[[8, 7], [6]], [[5, 4]]]
    assert _of_the_drawn([[7, 6], [5]], log_probs, ids) == [[-3.0, -0.2], [-0.5]]
    assert _of_the_drawn([[7], [5]], [[[-3.0]], [[None]]], None) == [[-3.0], [None]]
    assert _of_the_drawn([[7]], None, None) == []


@pytest.mark.thorough
@pytest.mark.distributed
def test_processes_whose_completions_differ_in_length(tmp_path, model_dirs):
    output = tmp_path / "logs.json"
    script = [*launcher(2, None), "-m", "tests.uneven_engine_run", model_dirs["llama"], str(output)]
    run_forked(script)
    for name, logs in json.loads(output.read_text()).items():
        assert logs["completions/max_length"] == 3, name
        mean, largest = (float(logs[f"sampling/sampling_logp_difference/{key}"]) for key in ("mean", "max"))
        assert 0 < mean <= largest < 3, name


@pytest.mark.trainer
def test_continuous_batching_leaves_mode_and_precision(make):
    trainer = make(model="llama", use_transformers_continuous_batching=True)
    for model in (trainer.model, trainer.proposal.module):
        model.register_buffer("kept", torch.ones(1))
        trainer.model.eval(), model.eval()
        before = [p.data_ptr() for p in model.parameters()]
        with without_lasting_changes(trainer, model):
            model.to(torch.bfloat16).train()  # as TRL does
        assert {p.dtype for p in model.parameters()} == {torch.float32} == {model.kept.dtype}
        assert [p.data_ptr() for p in model.parameters()] == before
        assert not model.training and not trainer.model.training


@pytest.mark.trainer
@pytest.mark.parametrize("trainer_cls", [RePULSeTrainer, ReinforceTrainer, PPOTrainer])
def test_the_best_checkpoint_is_pushed(make, monkeypatch, trainer_cls):
    trainer, calls = make(trainer_cls), []
    monkeypatch.setattr(Trainer, "_load_best_model", lambda self: calls.append("loaded"))
    for second in ("proposal", "value"):
        if hasattr(trainer, second):
            monkeypatch.setattr(getattr(trainer, second), "load_checkpoint", lambda *_: None)
    trainer.state.best_model_checkpoint = "checkpoint-1"
    trainer.use_vllm, trainer.vllm_generation = True, SimpleNamespace(changed=lambda: calls.append("changed"))
    trainer._load_best_model()
    assert calls == ["loaded", "changed"]


def test_what_of_trl_the_engine_relies_on():
    assert pinned_changes() == []
    expected = {"generate": ["self", "prompts", "images", "num_generations", "profiler"], "sync_weights": ["self"]}
    import inspect

    for name, parameters in expected.items():
        assert list(inspect.signature(getattr(VLLMGeneration, name)).parameters)[: len(parameters)] == parameters
    for name in ("_init_vllm", "_iter_named_params", "_iter_fsdp_params", "_fix_param_name_to_vllm"):
        assert callable(getattr(VLLMGeneration, name))


def test_transformers_generator(tokenizer, model_dirs):
    models = {name: AutoModelForCausalLM.from_pretrained(model_dirs["llama"]) for name in NAMES}
    models["proposal"].lm_head.weight.data.neg_()
    models["policy"].generation_config.suppress_tokens = list(range(2, 19))  # must not bend what is drawn
    generator = TransformersGenerator(models, tokenizer, max_completion_length=3, batch_size=3, do_sample=False)
    prompts = ["the cat", "fish", "the dog ran the cat ate"]
    for name in NAMES:
        models[name].train()
        groups = generator.complete(prompts, model=name, num_completions=2)
        assert models[name].training
        for prompt, group in zip(prompts, groups, strict=True):
            ids = greedy(models[name].eval(), tokenizer(prompt)["input_ids"], 3)[0]
            assert [completion.token_ids for completion in group] == [ids, ids]
            assert group[0].text == tokenizer.decode(ids, skip_special_tokens=True) and group[0].model == name


def test_transformers_generator_leaves_each_module_its_mode(tokenizer, model_dirs):
    model = AutoModelForCausalLM.from_pretrained(model_dirs["llama"]).train()
    model.model.norm.eval()  # frozen
    TransformersGenerator({"policy": model}, tokenizer, max_completion_length=1).complete(["fish"], model="policy")
    assert [name for name, module in model.named_modules() if not module.training] == ["model.norm"]


def test_transformers_generator_pads_with_a_token_that_the_model_has(tokenizer, model_dirs):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.add_special_tokens({"pad_token": "<more>"})  # the model has no embedding for it
    model = AutoModelForCausalLM.from_pretrained(model_dirs["llama"])
    generator = TransformersGenerator({"policy": model}, tokenizer, max_completion_length=3, do_sample=False)
    for [completion], prompt in zip(
        generator.complete(["fish", "the cat"], "policy"), ("fish", "the cat"), strict=True
    ):
        assert completion.token_ids == greedy(model, tokenizer(prompt)["input_ids"], 3)[0]


def test_transformers_generator_draws_from_the_model(tokenizer, model_dirs):
    model = AutoModelForCausalLM.from_pretrained(model_dirs["llama"])
    generator = TransformersGenerator({"policy": model}, tokenizer, max_completion_length=1, batch_size=5000)
    torch.manual_seed(0)
    [drawn] = generator.complete(["the cat"], model="policy", num_completions=5000)
    counts = torch.bincount(torch.tensor([c.token_ids[0] for c in drawn]), minlength=len(tokenizer))
    with torch.no_grad():
        p = model(torch.tensor([tokenizer("the cat")["input_ids"]])).logits[0, -1].softmax(-1)
    assert ((counts / 5000 - p).abs() < 5 * (p * (1 - p) / 5000).sqrt() + 1e-4).all()


@pytest.mark.parametrize("options", [{}, {"eos_token_id": [1, 5]}, {"eos_token_id": 5}])
def test_transformers_generator_stops_at_every_end(tokenizer, model_dirs, options):
    """The model's end tokens, as in chat models whose turns end with one of their own, and the tokenizer's."""
    model = AutoModelForCausalLM.from_pretrained(model_dirs["llama"])
    model.generation_config.eos_token_id = [5]
    ends = {5} if options.get("eos_token_id") == 5 else {1, 5}
    generator = TransformersGenerator({"policy": model}, tokenizer, max_completion_length=8, **options)
    [drawn] = generator.complete(["the cat"], model="policy", num_completions=200)
    assert {c.token_ids[-1] for c in drawn} >= ends
    for completion in drawn:
        assert not ends & set(completion.token_ids[:-1])
        assert completion.token_ids[-1] in ends or len(completion.token_ids) == 8


@pytest.mark.trainer
@pytest.mark.parametrize("adapters", [False, True])
def test_continuous_batches_are_drawn_from_the_right_model(make, adapters):
    """Of a head 300 times as large only the likeliest token is drawn."""
    config = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["o_proj", "down_proj"], init_lora_weights=False)
    small = {"num_blocks": 32, "max_batch_tokens": 64}  # else the cache takes most of the memory
    options = {"use_transformers_continuous_batching": True, "transformers_continuous_batching_config": small}
    options |= {"max_steps": 1, "max_completion_length": 1}
    trainer = make(model="llama", extra={"peft_config": config} if adapters else {}, **options)
    with torch.no_grad():
        scaled = trainer.model if adapters else trainer.proposal.module  # adapters share the head
        for name, p in scaled.named_parameters():
            if name.endswith("lm_head.weight") or "lora_B.proposal." in name:
                p.mul_(300.0)
    drawn = {}
    for name, engine in (("policy", trainer.model), ("proposal", trainer.proposal.module)):
        trainer.model.train()
        with torch.no_grad():
            prompts = list(trainer.train_dataset["prompt"])
            ids = [trainer.processing_class(prompt, return_tensors="pt") for prompt in prompts]
            drawn[name] = [engine(**row).logits[0, -1].argmax().item() for row in ids]
    trainer.train()
    logs = {"policy": trainer._logs, "proposal": trainer._negative.logs}
    right = {}
    for name, likeliest in drawn.items():
        texts = [trainer.processing_class.decode([token], skip_special_tokens=True) for token in likeliest]
        expected = dict(zip(prompts, texts, strict=True))
        pairs = list(zip(logs[name]["prompt"], logs[name]["completion"], strict=True))
        right[name] = sum(expected[prompt] == text for prompt, text in pairs) / len(pairs)
    assert right["proposal"] > 0.9
    if adapters:
        assert right["policy"] > 0.9 and drawn["policy"] != drawn["proposal"]
    else:
        assert right["policy"] < 0.9
