"""A stand-in for `vllm.LLM` under TRL's own `VLLMGeneration`: samples greedily from a copy of the weights it was given.

Whatever is not pushed is not in the copy. So stale weights, weights lost in sleep and forgotten prefixes show.
"""

import copy
import itertools
import json
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import load_file
from trl.distributed import DistributedBackend
from trl.generation import vllm_generation
from trl.generation.vllm_generation import VLLMGeneration

from .conftest import build_accelerator


class Runner:
    def __init__(self, llm):
        self.llm = llm
        self.model_config = SimpleNamespace(hf_text_config=SimpleNamespace(tie_word_embeddings=False))

    def reload_weights(self, weights_iterator):
        assert self.llm.awake, "weights were pushed to a sleeping engine"
        listed = list(weights_iterator)  # copied late, as vLLM does with layers that it pads
        given, own = dict(listed), dict(self.llm.model.named_parameters())
        assert sorted(name for name, _ in listed) == sorted(own)
        with torch.no_grad():
            for name, p in own.items():
                p.copy_(given[name])
        self.llm.stale_prefixes = True


class LLM:
    """Greedy sampling from a copy of a model; sleep level 2 loses the weights, adapters are read for each request."""

    def __init__(self, model, lora=False):
        self.model = copy.deepcopy(model).eval()
        self.awake, self.stale_prefixes, self.slept, self.calls = True, False, [], []
        runner = Runner(self)
        worker = SimpleNamespace(model_runner=runner)
        self.llm_engine = SimpleNamespace(
            vllm_config=SimpleNamespace(
                lora_config=object() if lora else None, model_config=SimpleNamespace(max_model_len=32)
            ),
            model_executor=SimpleNamespace(driver_worker=worker),
        )

    def sleep(self, level):
        self.awake = False
        self.slept.append(level)
        if level == 2:
            with torch.no_grad():
                for p in self.model.parameters():
                    p.fill_(torch.nan)

    def wake_up(self, tags=None):
        self.awake = self.awake or "weights" in tags

    def reset_prefix_cache(self):
        self.stale_prefixes = False

    def generate(self, prompts, sampling_params, use_tqdm, lora_request=None):
        assert self.awake and not self.stale_prefixes
        self.calls.append(len(prompts))
        if not isinstance(lora_request, list):
            return self.draw(prompts, sampling_params, lora_request)
        assert len(prompts) == len(sampling_params) == len(lora_request)
        rows = list(zip(prompts, sampling_params, lora_request, strict=True))
        alike = itertools.groupby(rows, key=lambda row: (id(row[1]), id(row[2])))
        groups = [list(group) for _, group in alike]
        return [output for group in groups for output in self.draw([row[0] for row in group], *group[0][1:])]

    def draw(self, prompts, sampling_params, lora_request):
        model = self.model if lora_request is None else with_adapter(self.model, Path(lora_request.lora_path))
        outputs = []
        for prompt in prompts:
            ids = prompt["prompt_token_ids"]
            drawn, log_p = greedy(model, ids, sampling_params.max_tokens)
            tokens = [{t: SimpleNamespace(rank=1, logprob=value)} for t, value in zip(drawn, log_p, strict=True)]
            outputs.append(
                SimpleNamespace(prompt_token_ids=ids, outputs=[SimpleNamespace(token_ids=drawn, logprobs=tokens)])
            )
        return outputs


@torch.no_grad()
def greedy(model, ids, length):
    """The likeliest continuation and its log-probabilities; ends at the end-of-sequence token (1)."""
    drawn, log_p = [], []
    while len(drawn) < length and 1 not in drawn:
        logits = model(torch.tensor([ids + drawn], device=model.device)).logits[0, -1]
        assert not logits.isnan().any(), "the engine has no weights"
        drawn.append(logits.argmax().item())
        log_p.append(logits.log_softmax(-1).max().item())
    return drawn, log_p


def with_adapter(model, folder):
    """A copy of a model with a saved LoRA adapter added to its weights, computed by hand."""
    model = copy.deepcopy(model)
    config = json.loads((folder / "adapter_config.json").read_text())
    weights = load_file(folder / "adapter_model.safetensors", device=str(model.device))
    for key, a in weights.items():
        if "lora_A" in key:
            target = model.get_submodule(key.removeprefix("base_model.model.").removesuffix(".lora_A.weight"))
            update = weights[key.replace("lora_A", "lora_B")] @ a * config["lora_alpha"] / config["r"]
            with torch.no_grad():
                target.weight.add_(update.T if type(target).__name__ == "Conv1D" else update)
    return model


class Params(SimpleNamespace):
    """`vllm.SamplingParams`: keeps what it is given."""


def build_engine(model, monkeypatch, lora=False, sleep=False, max_completion_length=6):
    """TRL's `VLLMGeneration` around [`LLM`], without its `__init__`, which starts vLLM."""
    monkeypatch.setattr(vllm_generation, "SamplingParams", Params, raising=False)
    engine = object.__new__(VLLMGeneration)
    accelerator = build_accelerator()
    base = copy.deepcopy(model).unload() if hasattr(model, "peft_config") else model
    vars(engine).update(
        model=model,
        accelerator=accelerator,
        _dist=DistributedBackend(accelerator),
        mode="colocate",
        enable_sleep_mode=sleep,
        _llm_weights_sleeping=sleep,
        tensor_parallel_size=1,
        temperature=0.0,
        top_p=1.0,
        top_k=0,
        min_p=None,
        repetition_penalty=1.0,
        max_completion_length=max_completion_length,
        logprobs=None,
        generation_kwargs={},
        structured_outputs_regex=None,
        llm=LLM(base, lora),
    )
    if sleep:
        engine.llm.sleep(level=2)  # as TRL does once an engine is built
    return engine
