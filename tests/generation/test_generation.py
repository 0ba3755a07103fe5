"""Generators over several models: the right model, with the weights it has now, every time; what goes to the engine."""

import contextlib
import copy
import itertools
import json
import warnings
from types import SimpleNamespace

import pytest
import torch
from peft import AutoPeftModelForCausalLM, LoraConfig, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers import AutoModelForCausalLM, Trainer
from trl.generation import vllm_generation

from trl_repulse import PPOTrainer, ReinforceTrainer, RePULSeTrainer
from trl_repulse.engine.trl_bridge import without_lasting_changes
from trl_repulse.generation import TransformersGenerator, VLLMGenerator, _engine
from trl_repulse.generation._engine import check_vllm, engine_options, is_pushable
from trl_repulse.generation.vllm_generator import _of_the_drawn

from ..conftest import build_model
from ..distributed_support import launcher, run_forked
from ..vllm_double import build_engine, greedy


pytestmark = pytest.mark.usefixtures("lora_requests")
PROMPTS = [[3, 12], [4], [5, 13, 14]]
NAMES = ("policy", "proposal")
MERGED = {"alpha_pattern": {"q_proj": 64}}  # scales of their own are merged
WITH_HEAD = ["q_proj", "lm_head"]


def two_models(tokenizer):
    return {name: build_model("llama", len(tokenizer), seed).eval() for seed, name in enumerate(NAMES)}


def adapted(tokenizer, *options, kind="llama"):
    """A model with one adapter of other weights for each of `options`, by the names of NAMES."""
    model = build_model(kind, len(tokenizer))
    for name, given in zip(NAMES, options, strict=False):
        settings = {"target_modules": ["q_proj", "v_proj"], "init_lora_weights": False, "r": 2} | given
        config = LoraConfig(task_type="CAUSAL_LM", **settings)
        if name == NAMES[0]:
            model = get_peft_model(model, config, adapter_name=name)
        else:
            model.add_adapter(name, config)
    torch.manual_seed(5)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if any(f".{adapter}." in name for adapter in NAMES):
                p.add_(0.3 * torch.randn_like(p))
    return model.eval()


def two_adapters(tokenizer):
    """One model with the adapters of both names."""
    return adapted(tokenizer, *[{"target_modules": "all-linear"}] * 2)


def serve(tokenizer, monkeypatch, **options):
    """Two models and their generator."""
    models = two_models(tokenizer)
    return models, VLLMGenerator(models, tokenizer, engine=build_engine(models["policy"], monkeypatch, **options))


def draw_greedily(model):
    return [greedy(model, ids, 6)[0] for ids in PROMPTS]


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
@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize(
    ("sleep", "level"), [(False, None), (True, 1), (True, None), pytest.param(True, 2, marks=pytest.mark.slow)]
)
def test_weights_are_never_stale(tokenizer, monkeypatch, adapters, sleep, level):
    models = dict.fromkeys(NAMES, two_adapters(tokenizer)) if adapters else two_models(tokenizer)
    before = {name: p.clone() for name, p in models["policy"].named_parameters() if "lora_" not in name}
    engine = build_engine(models["policy"], monkeypatch, lora=adapters, sleep=sleep)
    generator = VLLMGenerator({"policy": models["policy"]}, tokenizer, engine=engine, sleep_level=level)
    generator.add("proposal", models["proposal"], "proposal" if adapters else None)
    torch.manual_seed(0)
    seen = set()
    for name in itertools.islice(itertools.cycle(NAMES), 40):
        shake(models[name], name if adapters else None)
        generator.changed(name)
        if adapters:
            models[name].set_adapter(name)
        expected = draw_greedily(models[name])
        assert sample(generator, name) == expected and (not adapters or sample(generator, name) == expected)
        seen.add(str(expected))
    assert len(seen) > 20  # the weights do matter
    pushes = {"policy": 20, "proposal": 20}
    if adapters:
        # Twice each, where it was dropped in between; vLLM loads adapters again once it has been given a base
        pushes["base"] = 80 if level == 2 else 1
        assert all(torch.equal(p, before[name]) for name, p in models["policy"].named_parameters() if name in before)
        assert len(list(generator._folder.iterdir())) == 2  # of each adapter, its latest version
    assert generator.pushes == pushes
    assert set(generator.llm.llm.slept[1:]) == ({level or (1 if adapters else 2)} if sleep else set())


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
    assert draw("proposal", PROMPTS)[0] == draw_greedily(model)
    calls.clear()
    with generator.together("proposal"):
        draw("policy", PROMPTS)
    draw("proposal", PROMPTS[:2])  # others than those that were drawn for
    assert calls == [6, 2]


def test_whole_models_are_drawn_from_one_after_the_other(tokenizer, monkeypatch):
    models, generator = serve(tokenizer, monkeypatch)
    with generator.together("proposal"):
        assert sample(generator, "policy") == draw_greedily(models["policy"])
    assert sample(generator, "proposal") == draw_greedily(models["proposal"])
    assert generator.llm.llm.calls == [3, 3]


def test_a_push_that_is_left_out_would_be_noticed(tokenizer, monkeypatch):
    models, generator = serve(tokenizer, monkeypatch)
    sample(generator, "policy")
    torch.manual_seed(0)
    stale = 0
    for _ in range(10):
        shake(models["policy"])  # and nobody is told
        stale += sample(generator, "policy") != draw_greedily(models["policy"])
    assert stale > 5


def test_nothing_is_pushed_twice(tokenizer, monkeypatch):
    models, generator = serve(tokenizer, monkeypatch)
    for _ in range(3):
        sample(generator, "policy")
        sample(generator, "policy")
        generator.sync_weights()
    assert generator.pushes == {"policy": 1}
    sample(generator, "proposal")
    sample(generator, "policy")
    assert generator.pushes == {"policy": 2, "proposal": 1}  # one engine holds one of them


def test_a_push_that_fails_leaves_nothing_to_sample_from(tokenizer, monkeypatch):
    models, generator = serve(tokenizer, monkeypatch)
    sample(generator, "policy")
    push = _engine.push_weights
    monkeypatch.setattr(_engine, "push_weights", lambda *args, **kwargs: 1 / 0)
    generator.changed("policy")
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            sample(generator, "policy")
    monkeypatch.setattr(_engine, "push_weights", push)
    assert sample(generator, "policy") == draw_greedily(models["policy"])


def test_texts_go_in_and_out(tokenizer, monkeypatch):
    models, generator = serve(tokenizer, monkeypatch)
    generator.changed("proposal")
    [first, second] = generator.complete(["the cat", "fish"], model="proposal", num_completions=2)
    assert len(first) == len(second) == 2 and first[0] == first[1]  # greedy
    ids, log_p = greedy(models["proposal"], tokenizer("fish")["input_ids"], 6)
    assert second[0].token_ids == ids
    assert second[0].text == tokenizer.decode(ids, skip_special_tokens=True)
    assert (second[0].model, second[0].version) == ("proposal", 1)
    assert generator.log_probs[-1] == pytest.approx(log_p)


def test_models_of_another_family_or_with_a_name_that_is_taken_are_refused(tokenizer, monkeypatch):
    policy = build_model("llama", len(tokenizer))
    engine = build_engine(policy, monkeypatch)
    with pytest.raises(ValueError, match="`vocab_size` is 19 in one and 20 in the other"):
        VLLMGenerator({"policy": policy, "proposal": build_model("llama", 20)}, tokenizer, engine=engine)
    with pytest.raises(ValueError, match="cannot share an engine"):
        VLLMGenerator({"policy": policy, "proposal": build_model("gpt2", 19)}, tokenizer, engine=engine)
    with pytest.raises(ValueError, match="There is a model 'policy' already; give the new one another name"):
        VLLMGenerator({"policy": policy}, tokenizer, engine=engine).add("policy", policy)


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
    adapters = {"enable_lora": True, "max_lora_rank": 16, "max_loras": 1, "max_cpu_loras": 1}  # of the one pushed
    assert given[0] == {"model": "m", "dtype": "float32", **adapters}
    assert given[1] == {"model": "of an architecture without adapters", "dtype": "float32"}
    with pytest.raises(RuntimeError, match="^an illegal memory access$"), engine_options("float32"):
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
        *[({"target_modules": targets}, False) for targets in (WITH_HEAD, ["model.embed_tokens"], ["wte", "c_attn"])],
        ({"target_modules": r".*(embed_tokens|q_proj)"}, False),
        *[({"target_modules": targets}, True) for targets in ("all-linear", r"model\.layers\..*_proj", None)],
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
    asks = "peft.utils.save_and_load.check_file_exists_on_hf_hub"
    monkeypatch.setattr(asks, lambda *_, **__: pytest.fail("the Hub"))
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
    for second in trainer.second_models.values():
        monkeypatch.setattr(second, "load_checkpoint", lambda *_: None)
    trainer.state.best_model_checkpoint = "checkpoint-1"
    trainer.use_vllm, trainer.vllm_generation = True, SimpleNamespace(changed=lambda: calls.append("changed"))
    trainer._load_best_model()
    assert calls == ["loaded", "changed"]


def test_transformers_generator(tokenizer, model_dirs):
    """It pads with a token that the models have, and leaves each module its mode."""
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.add_special_tokens({"pad_token": "<more>"})  # without an embedding
    models = {name: AutoModelForCausalLM.from_pretrained(model_dirs["llama"]) for name in NAMES}
    models["proposal"].lm_head.weight.data.neg_()
    models["policy"].generation_config.suppress_tokens = list(range(2, 19))  # must not bend what is drawn
    generator = TransformersGenerator(models, tokenizer, max_completion_length=3, batch_size=3, do_sample=False)
    prompts = ["the cat", "fish", "the dog ran the cat ate"]
    for name in NAMES:
        models[name].train().model.norm.eval()
        groups = generator.complete(prompts, model=name, num_completions=2)
        assert [place for place, module in models[name].named_modules() if not module.training] == ["model.norm"]
        for prompt, group in zip(prompts, groups, strict=True):
            ids = greedy(models[name].eval(), tokenizer(prompt)["input_ids"], 3)[0]
            assert [completion.token_ids for completion in group] == [ids, ids]
            assert group[0].text == tokenizer.decode(ids, skip_special_tokens=True) and group[0].model == name


def test_transformers_generator_refuses_prompts_that_cannot_be_continued(tokenizer, model_dirs):
    model = AutoModelForCausalLM.from_pretrained(model_dirs["gpt2"])
    generator = TransformersGenerator({"policy": model}, tokenizer, max_completion_length=8)
    for prompt, message in (("", "has no tokens"), ("fish " * model.config.n_positions, "exceed the model's context")):
        with pytest.raises(ValueError, match=message):
            generator.complete(["the cat", prompt], model="policy")


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
    logs = {"policy": trainer._logs, "proposal": trainer._tables.extra}
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


# What goes to the engine


def expected(model, name):
    model.set_adapter(name)
    return draw_greedily(model)


def test_what_is_merged_stays_so_until_the_engine_has_it(tokenizer, monkeypatch):
    model = adapted(tokenizer, MERGED)
    before = {name: p.clone() for name, p in model.named_parameters()}
    wanted = expected(model, "policy")
    generator = VLLMGenerator({"policy": model}, tokenizer, engine=build_engine(model, monkeypatch, lora=True))
    assert sample(generator, "policy") == wanted
    with model.disable_adapter():
        assert wanted != draw_greedily(model)
    assert all(torch.allclose(p, before[name], atol=1e-6) for name, p in model.named_parameters())


@pytest.mark.parametrize("mode", ["colocate", "server"])
def test_a_push_that_fails_leaves_no_adapter_merged(tokenizer, monkeypatch, mode):
    model = adapted(tokenizer, MERGED)
    engine = build_engine(model, monkeypatch)

    def fail(weights):
        next(iter(weights))
        assert any(getattr(module, "merged", False) for module in model.modules())
        raise torch.OutOfMemoryError("CUDA out of memory")

    class Client:
        def update_named_params(self, metadata, weights):
            fail(weights)

    engine.mode, engine.vllm_client, engine._weight_metadata = mode, Client(), None
    engine.llm.llm_engine.model_executor.driver_worker.model_runner.reload_weights = lambda weights_iterator: fail(
        weights_iterator
    )
    with pytest.raises(torch.OutOfMemoryError):
        _engine.push_weights(engine, model, "policy")
    assert not any(getattr(module, "merged", False) for module in model.modules())
    assert "_iter_named_params" not in vars(engine)


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("active", NAMES)
def test_adapters_with_copies_of_modules(tokenizer, monkeypatch, active, separate):
    """Each goes out with its own, under the plain name, whichever is active; one without any takes the base's."""
    saved = {"modules_to_save": ["norm", "lm_head"]}
    model = adapted(tokenizer, saved, {} if separate else saved)
    wanted = {name: expected(model, name) for name in NAMES}
    assert wanted["policy"] != wanted["proposal"]
    model.set_adapter("policy")
    engine = build_engine(model, monkeypatch, lora=separate)
    generator = VLLMGenerator({"policy": model}, tokenizer, engine=engine)
    generator.add("proposal", model, "proposal")
    model.set_adapter(active)
    for name in (*NAMES, *NAMES):
        assert sample(generator, name) == wanted[name]
    assert generator.pushes["proposal"] == (1 if separate else 2)


@pytest.mark.parametrize("targets", [WITH_HEAD, r".*(embed_tokens|q_proj)"])
def test_adapters_of_vocabulary_layers_are_merged(tokenizer, monkeypatch, targets):
    model = adapted(tokenizer, {"target_modules": targets}, {})
    wanted = {name: expected(model, name) for name in NAMES}
    model.set_adapter("policy")
    monkeypatch.setattr(_engine, "is_pushable", lambda config: True)  # whatever they are called
    generator = VLLMGenerator({"policy": model}, tokenizer, engine=build_engine(model, monkeypatch, lora=True))
    generator.add("proposal", model, "proposal")
    assert {name: served.separate for name, served in generator._served.items()} == {"policy": False, "proposal": True}
    assert {name: sample(generator, name) for name in NAMES} == wanted


def test_a_base_that_is_trained_goes_with_its_adapter(tokenizer, monkeypatch):
    model = adapted(tokenizer, {})
    for name, p in model.named_parameters():
        p.requires_grad_(p.requires_grad or "norm" in name)
    generator = VLLMGenerator({"policy": model}, tokenizer, engine=build_engine(model, monkeypatch, lora=True))
    first = sample(generator, "policy")
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name:
                p.add_(2 * torch.randn_like(p))
    generator.changed("policy")
    assert sample(generator, "policy") == expected(model, "policy") != first


@pytest.mark.parametrize(
    ("options", "named"),
    [({"trainable_token_indices": [1, 2]}, "trainable_token_indices"), ({"layer_replication": [(0, 1)]}, "layer_")],
)
def test_adapters_that_cannot_be_merged_are_refused(tokenizer, monkeypatch, options, named):
    model = adapted(tokenizer, options)
    with pytest.raises(ValueError, match=f"cannot be given an adapter with `{named}.*without vLLM"):
        VLLMGenerator({"policy": model}, tokenizer, engine=build_engine(adapted(tokenizer, {}), monkeypatch))
    learned = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    for config, message in ((LoraConfig(**options), named), (learned, "`peft_type=.*PROMPT_TUNING")):
        with pytest.raises(ValueError, match=message), engine_options("float32", [config]):  # before it is built
            pass


@pytest.mark.parametrize(
    ("options", "refused"),
    [({"target_modules": ["c_attn", "lm_head"]}, True), ({"modules_to_save": ["lm_head"]}, True), ({}, False)],
)
def test_head_and_embedding_that_are_one_cannot_be_set_apart(tokenizer, monkeypatch, options, refused):
    model = adapted(tokenizer, {"target_modules": ["c_attn"], "fan_in_fan_out": True} | options, kind="gpt2")
    engine = build_engine(build_model("gpt2", len(tokenizer)), monkeypatch)
    message = "Adapter 'policy' changes the head or the embedding.*tie_word_embeddings"
    with pytest.raises(ValueError, match=message) if refused else contextlib.nullcontext():
        VLLMGenerator({"policy": model}, tokenizer, engine=engine)


@pytest.mark.parametrize(
    "message",
    [
        "Free memory on device cuda:0 (10/79 GiB) on startup is less than desired GPU memory utilization (0.9, 71.1 GiB).",
        "Available memory on node 0 (3/16 GiB) on startup is less than desired CPU memory utilization (0.9, 14.4 GiB).",
        "Decrease GPU memory utilization.",
        "No available memory for the cache blocks.",
        "CUDA out of memory.",
    ],
)
def test_engines_that_do_not_fit_in_the_callers_words(monkeypatch, message):
    monkeypatch.setattr(vllm_generation, "LLM", None, raising=False)
    for prefix in ("vllm_", ""):
        said = f"does not fit into memory.*Lower `{prefix}gpu_mem.*`{prefix}max_model"
        with pytest.raises(RuntimeError, match=said), engine_options("float32", prefix=prefix):
            raise ValueError(message)


def test_a_server_is_told_of_each_models_own_tensors(tokenizer, monkeypatch):
    told = []

    class Client:
        def update_named_params(self, metadata, weights):
            sent = [(name, str(p.dtype).removeprefix("torch."), list(p.shape)) for name, p in weights]
            told.append((metadata == sent, metadata))

        def reset_prefix_cache(self):
            pass

    models = {name: build_model("llama", len(tokenizer)) for name in NAMES}
    models["proposal"].to(torch.bfloat16)
    engine = build_engine(models["policy"], monkeypatch)
    vars(engine).update(mode="server", vllm_client=Client(), _weight_metadata=None)
    generator = VLLMGenerator(models, tokenizer, engine=engine)
    for name in (*NAMES, *NAMES):
        with generator.using(name):
            generator.sync_weights()
    assert [right for right, _ in told] == [True] * 4
    assert told[0][1] is told[2][1]  # collected once


def test_an_adapter_that_cannot_be_written_leaves_the_one_before(tokenizer, monkeypatch, tmp_path):
    model = adapted(tokenizer, {})
    generator = VLLMGenerator({"policy": model}, tokenizer, engine=build_engine(model, monkeypatch, lora=True))
    drawn = sample(generator, "policy")
    write = _engine.write_adapter
    monkeypatch.setattr(_engine, "write_adapter", lambda *args: 1 / 0)
    generator.changed("policy")
    with pytest.raises(ZeroDivisionError):
        sample(generator, "policy")
    assert [(folder / "adapter_model.safetensors").exists() for folder in generator._folder.iterdir()] == [True]
    monkeypatch.setattr(_engine, "write_adapter", write)
    for folder in generator._folder.iterdir():  # and one that is gone is no reason to stop
        folder.rename(tmp_path / folder.name)
    assert sample(generator, "policy") == drawn


def test_adapters_that_transformers_loaded_are_refused(tokenizer, monkeypatch, model_dirs, tmp_path):
    base = AutoModelForCausalLM.from_pretrained(model_dirs["llama"])
    get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", r=2)).save_pretrained(tmp_path)
    engine = build_engine(build_model("llama", len(tokenizer)), monkeypatch)
    with pytest.raises(ValueError, match="'policy' has an adapter that transformers loaded.*AutoPeftModel.*merge"):
        VLLMGenerator({"policy": AutoModelForCausalLM.from_pretrained(tmp_path)}, tokenizer, engine=engine)
    generator = VLLMGenerator({"policy": AutoPeftModelForCausalLM.from_pretrained(tmp_path)}, tokenizer, engine=engine)
    with pytest.raises(ValueError, match="'proposal' has an adapter"):
        generator.add("proposal", AutoModelForCausalLM.from_pretrained(tmp_path))


def test_prompts_that_leave_no_room_are_refused(tokenizer, monkeypatch):
    model = build_model("llama", len(tokenizer)).eval()
    engine = build_engine(model, monkeypatch, max_completion_length=30)
    generator = VLLMGenerator({"policy": model}, tokenizer, engine=engine)
    generator.complete(["the cat"], "policy")
    with pytest.raises(ValueError, match="of 3 tokens and `max_completion_length=30` do not.*`max_model_length=32`"):
        generator.complete(["fish", "the cat ran"], "policy")
