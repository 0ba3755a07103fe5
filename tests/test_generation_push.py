"""What goes to the engine: merged adapters, their own copies of whole modules, and what is refused."""

import pytest
import torch
from peft import LoraConfig, get_peft_model

from trl_repulse.generation import VLLMGenerator, _engine

from .conftest import build_model
from .test_generation import NAMES, PROMPTS, lora_requests, sample  # noqa: F401 (a fixture)
from .vllm_double import build_engine, greedy


MERGED = {"alpha_pattern": {"q_proj": 64}}  # scales of their own are merged


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
