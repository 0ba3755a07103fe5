"""What goes to the engine: merged adapters, their own copies of whole modules, and what is refused."""

import pytest
import torch
from peft import AutoPeftModelForCausalLM, LoraConfig, PromptTuningConfig, get_peft_model
from transformers import AutoModelForCausalLM
from trl.generation import vllm_generation

from trl_repulse.generation import VLLMGenerator, _engine

from ..conftest import build_model
from ..vllm_double import build_engine, greedy
from .test_generation import NAMES, PROMPTS, lora_requests, sample  # noqa: F401 (a fixture)


MERGED = {"alpha_pattern": {"q_proj": 64}}  # scales of their own are merged
WITH_HEAD = ["q_proj", "lm_head"]


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


def expected(model, name):
    model.set_adapter(name)
    return [greedy(model, ids, 6)[0] for ids in PROMPTS]


def test_what_is_merged_stays_so_until_the_engine_has_it(tokenizer, monkeypatch):
    model = adapted(tokenizer, MERGED)
    before = {name: p.clone() for name, p in model.named_parameters()}
    wanted = expected(model, "policy")
    generator = VLLMGenerator({"policy": model}, tokenizer, engine=build_engine(model, monkeypatch, lora=True))
    assert sample(generator, "policy") == wanted
    with model.disable_adapter():
        assert wanted != [greedy(model, ids, 6)[0] for ids in PROMPTS]
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


@pytest.mark.parametrize(
    ("targets", "pushable"),
    [
        (["q_proj", "lm_head"], False),
        (["model.embed_tokens"], False),
        (r".*(embed_tokens|q_proj)", False),
        (["wte", "c_attn"], False),
        ("all-linear", True),
        (r"model\.layers\..*_proj", True),
        (None, True),
    ],
)
def test_vocabulary_layers_are_not_pushed_as_adapters(targets, pushable):
    assert _engine.is_pushable(LoraConfig(target_modules=targets)) is pushable


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
    config = LoraConfig(task_type="CAUSAL_LM", **options)
    with pytest.raises(ValueError, match=named), _engine.engine_options("float32", [config]):  # before it is built
        pass


def test_learned_prompts_are_refused(monkeypatch):
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    with pytest.raises(ValueError, match="`peft_type=.*PROMPT_TUNING"), _engine.engine_options("float32", [config]):
        pass


@pytest.mark.parametrize(
    ("options", "refused"),
    [({"target_modules": ["c_attn", "lm_head"]}, True), ({"modules_to_save": ["lm_head"]}, True), ({}, False)],
)
def test_head_and_embedding_that_are_one_cannot_be_set_apart(tokenizer, monkeypatch, options, refused):
    model = adapted(tokenizer, {"target_modules": ["c_attn"], "fan_in_fan_out": True} | options, kind="gpt2")
    engine = build_engine(build_model("gpt2", len(tokenizer)), monkeypatch)
    if refused:
        with pytest.raises(
            ValueError, match="Adapter 'policy' changes the head or the embedding.*tie_word_embeddings"
        ):
            VLLMGenerator({"policy": model}, tokenizer, engine=engine)
    else:
        VLLMGenerator({"policy": model}, tokenizer, engine=engine)


@pytest.mark.parametrize(
    "message",
    [
        "Free memory on device cuda:0 (10/79 GiB) on startup is less than desired GPU memory utilization (0.9, 71.1 GiB).",
        "Available memory on node 0 (3/16 GiB) on startup is less than desired CPU memory utilization (0.9, 14.4 GiB).",
        "Decrease GPU memory utilization.",
        "CUDA out of memory.",
    ],
)
def test_engines_that_do_not_fit_in_the_callers_words(monkeypatch, message):
    monkeypatch.setattr(vllm_generation, "LLM", None, raising=False)
    for options, said in (
        ({}, "Lower `vllm_gpu_mem.*`vllm_max_model"),
        ({"prefix": ""}, "Lower `gpu_mem.*`max_model"),
    ):
        with pytest.raises(RuntimeError, match=f"does not fit into memory.*{said}"):
            with _engine.engine_options("float32", **options):
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


def test_a_name_is_given_once(tokenizer, monkeypatch):
    models = {name: build_model("llama", len(tokenizer), seed) for seed, name in enumerate(NAMES)}
    generator = VLLMGenerator(models, tokenizer, engine=build_engine(models["policy"], monkeypatch))
    with pytest.raises(ValueError, match="There is a model 'policy' already; give the new one another name"):
        generator.add("policy", models["proposal"])


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
