"""What a folder of samples is tied to: weights and settings, by hash, and not what a model was called that day."""

import math
import shutil
import threading

import numpy as np
import pandas as pd
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from trl_repulse.evaluation import records
from trl_repulse.evaluation.report import tail_report
from trl_repulse.rewards.classifiers import SequencePairReward

from ..conftest import word_reward
from ..evaluation_support import sample
from ..reward_models import save_model


@pytest.fixture
def moved(model_dirs, tmp_path):
    """The same two models elsewhere."""
    return {name: shutil.copytree(folder, tmp_path / "moved" / name) for name, folder in model_dirs.items()}


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
    others = str(moved["gpt2"]), str(moved["llama"])
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


def test_samples_whose_reference_had_another_path_are_compared(tmp_path, model_dirs, moved, tokenizer):
    first = sample(tmp_path / "a", model_dirs["gpt2"], ["fish"], reference=model_dirs["llama"])
    model = AutoModelForCausalLM.from_pretrained(model_dirs["gpt2"])
    with torch.no_grad():
        model.transformer.ln_f.bias += 0.1
    second = sample(tmp_path / "b", model, ["fish"], reference=str(moved["llama"]), tokenizer=tokenizer)
    assert tail_report([first, second]).seeds == 2


def test_names_without_a_hash_beside_them_are_compared():
    one = {"rewards": {"r": {"name": "hub/judge", "revision": "1"}}, "model": {"name": "a", "weights": "w"}}
    other = {"rewards": {"r": {"name": "hub/judge", "revision": "2"}}, "model": {"name": "b", "weights": "w"}}
    assert records.header_difference(one, other, ()) == "rewards.r.revision"
    assert records.header_difference(one, one | {"model": {"name": "a", "weights": "v"}}, ()) == "model.weights"
    assert records.header_difference(one, one | {"model": None}, ()) == "model"


def test_an_adapter_has_its_own_name(tmp_path, model_dirs):
    config = LoraConfig(task_type="CAUSAL_LM", target_modules=["c_attn"], init_lora_weights=False, fan_in_fan_out=True)
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(model_dirs["gpt2"]), config)
    adapted.save_pretrained(tmp_path / "adapter")
    AutoTokenizer.from_pretrained(model_dirs["gpt2"]).save_pretrained(tmp_path / "adapter")
    found = sample(tmp_path / "s", str(tmp_path / "adapter"), ["fish"], reference=model_dirs["gpt2"])
    assert found.header["model"]["name"] == str(tmp_path / "adapter")
    assert found.header["model"]["base"] == model_dirs["gpt2"]
    assert found.header["reference"]["name"] == model_dirs["gpt2"] and "base" not in found.header["reference"]


def test_a_folder_has_no_revisions(tmp_path, model_dirs):
    with pytest.raises(ValueError, match=r"`revision='v1'` is of a model on the Hub, and `.*` is a folder; leave it"):
        sample(tmp_path / "s", model_dirs["gpt2"], ["fish"], revision="v1")
    assert not (tmp_path / "s").exists()


def test_an_infinite_kl_leaves_returns_without_a_penalty(tmp_path, model_dirs, tokenizer):
    class Narrow(type(AutoModelForCausalLM.from_pretrained(model_dirs["llama"]))):
        def forward(self, *args, **kwargs):
            output = super().forward(*args, **kwargs)
            output.logits[..., 10:] = -torch.inf
            return output

    reference = Narrow(AutoModelForCausalLM.from_pretrained(model_dirs["llama"]).config)
    settings = {"reference": reference, "reward_transform": "exponential", "num_samples": 20}
    found = sample(tmp_path / "s", model_dirs["llama"], ["fish"], **settings)
    assert math.inf in found.table["kl"].to_pylist()
    assert np.array_equal(found.column("return"), found.column("reward"))
    assert np.isfinite(found.column("return_transformed")).all()


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
