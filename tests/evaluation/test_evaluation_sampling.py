"""Held-out samples: what is written, that it is what the model draws, and that a kill costs nothing."""

import functools
import json
import random
import time

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.worlds.exact import ExactEvaluator
from trl_repulse.cli.main import main
from trl_repulse.evaluation import records, sampling
from trl_repulse.evaluation.sampling import SamplingSettings, sample_completions
from trl_repulse.rewards.functions import FunctionReward

from ..conftest import BAD, build_model, without_others, word_reward
from ..distributed_support import FORKS, launcher, run_forked
from ..evaluation_support import sample, sample_slowly, write_inputs, write_samples
from ..reward_models import save_model


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


sample = functools.partial(sample, num_samples=6, max_completion_length=2, shard_size=8)


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_columns_are_what_they_say(tmp_path, model_dirs, prompts, tokenizer, architecture):
    other = build_model(architecture, len(tokenizer), seed=1)
    samples = sample(tmp_path / "s", model_dirs[architecture], prompts, reference=other, beta=0.5)
    table = samples.table
    rows = table.to_pylist()
    assert len(rows) == 6 * len(prompts) and samples.prompts == prompts["prompt"]
    assert [(row["prompt_index"], row["sample_index"]) for row in rows] == [(p, n) for p in range(4) for n in range(6)]
    evaluator = ExactEvaluator(tokenizer, prompts["prompt"], lambda t: torch.zeros(len(t)), [BAD], 2)
    place = {tuple(i for i in ids if i >= 0): k for k, ids in enumerate(evaluator.completion_ids.tolist())}
    model = AutoModelForCausalLM.from_pretrained(model_dirs[architecture])
    log_p, log_p0 = evaluator.log_probs(model), evaluator.log_probs(other)
    for row in rows:
        where = row["prompt_index"], place[tuple(row["completion_ids"])]
        assert row["log_prob"] == pytest.approx(log_p[where].item(), abs=1e-4)
        assert row["kl"] == pytest.approx((log_p - log_p0)[where].item(), abs=1e-4)
        assert row["reward"] == row["rewards/word_reward"] == word_reward([row["completion"]])[0]
        assert row["return"] == pytest.approx(row["reward"] - 0.5 * row["kl"])
        assert row["ended"] == (row["completion_ids"][-1] == tokenizer.eos_token_id)
        assert row["length"] == len(row["completion_ids"])


def test_draws_follow_the_model(tmp_path, model_dirs, prompts, tokenizer):
    samples = sample(tmp_path / "s", model_dirs["gpt2"], prompts, num_samples=2000, shard_size=2000, batch_size=500)
    evaluator = ExactEvaluator(tokenizer, prompts["prompt"], lambda t: torch.zeros(len(t)), [BAD], 2)
    probs = evaluator.log_probs(AutoModelForCausalLM.from_pretrained(model_dirs["gpt2"])).exp()
    rows = [[token for token in row if token >= 0] for row in evaluator.completion_ids.tolist()]
    rewards = torch.tensor(word_reward(tokenizer.batch_decode(rows, skip_special_tokens=True)), dtype=torch.float64)
    for drawn, exact in zip(samples.column(), (probs @ rewards).tolist(), strict=True):
        assert abs(drawn.mean() - exact) < 4.5 * drawn.std() / 2000**0.5
    for estimate in (samples.column("entropy"), -samples.column("log_prob")):
        exact = -(probs * probs.log()).sum(dim=1).mean().item()
        assert abs(estimate.mean() - exact) < 4.5 * estimate.std() / 8000**0.5
    rewards = samples.column()
    assert len({tuple(row) for row in rewards.reshape(8, -1)}) == 8  # no shard repeats another


def test_models_nearly_alike_draw_independently(tmp_path, model_dirs, prompts):
    """Training seeds are: with the same numbers nearly all of their completions would be the same."""
    drawn = []
    for name in ("one", "other"):
        model = AutoModelForCausalLM.from_pretrained(model_dirs["gpt2"])
        if name == "other":
            with torch.no_grad():
                model.transformer.ln_f.bias += 1e-4
        model.save_pretrained(tmp_path / "models" / name)
        AutoTokenizer.from_pretrained(model_dirs["gpt2"]).save_pretrained(tmp_path / "models" / name)
        samples = sample(tmp_path / name, str(tmp_path / "models" / name), prompts, num_samples=100, shard_size=100)
        drawn.append(samples.table["completion_ids"].to_pylist())
    assert np.mean([a == b for a, b in zip(*drawn, strict=True)]) < 0.5


@pytest.mark.thorough
def test_ten_kills_leave_the_files_of_a_run_that_was_left_alone(tmp_path, model_dirs, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # accelerators do not outlive a fork
    draw, model = random.Random(0), model_dirs["gpt2"]
    whole = FORKS.Process(target=sample_slowly, args=(tmp_path / "whole", model))
    whole.start()
    whole.join(120)
    assert whole.exitcode == 0
    expected, folder = files(tmp_path / "whole"), tmp_path / "killed"
    seen = 0
    for _ in range(10):
        process = FORKS.Process(target=sample_slowly, args=(folder, model))
        process.start()
        after = seen + draw.randint(0, 3)
        while len(list(folder.glob("shard-*.parquet"))) < after and process.is_alive():
            time.sleep(0.001)
        time.sleep(draw.uniform(0.0, 0.05))
        process.kill()
        process.join()
        assert process.exitcode == -9
        seen = len(list(folder.glob("shard-*.parquet")))
        with pytest.raises(ValueError, match="not complete|no samples"):
            records.load_samples(folder)
    assert 5 < seen < 60
    whole = FORKS.Process(target=sample_slowly, args=(folder, model))
    whole.start()
    whole.join(120)
    assert files(folder) == expected
    assert not list(folder.glob("*.partial")) and len(records.load_samples(folder).table) == 240


@pytest.mark.thorough
@pytest.mark.distributed
def test_two_processes_write_what_one_writes(tmp_path, model_dirs, capsys):
    arguments = ["--model", model_dirs["gpt2"], "--num_samples", "8", "--shard_size", "3", "--thresholds", "5"]
    arguments += write_inputs(tmp_path, "[float(len(c)) for c in completions]")
    done = run_forked([*launcher(2, None), "-m", "trl_repulse.cli", "evaluate", str(tmp_path / "two"), *arguments])
    assert main(["evaluate", str(tmp_path / "one"), *arguments]) == 0
    assert files(tmp_path / "one") == files(tmp_path / "two")
    written = without_others(done.stdout)
    assert written == without_others(capsys.readouterr().out) and written.count("P(r < 5)") == 1


def test_missing_and_torn_shards_alone_are_drawn_again(tmp_path, model_dirs, prompts):
    folder, calls = tmp_path / "s", []

    def counted(completions, **kwargs):
        calls.extend(completions)
        return word_reward(completions, **kwargs)

    sample(folder, model_dirs["gpt2"], prompts, counted)
    whole, times = files(folder), [path.stat().st_mtime_ns for path in folder.iterdir()]
    calls.clear()
    sample(folder, model_dirs["gpt2"], prompts, counted)
    assert times == [path.stat().st_mtime_ns for path in folder.iterdir()] and not calls
    (folder / "complete.json").unlink()
    (folder / "shard-00000.parquet").unlink()
    torn = whole["shard-00001.parquet"][:-9]  # no footer, as after a failing disk
    (folder / "shard-00001.parquet").write_bytes(torn)
    sample(folder, model_dirs["gpt2"], prompts, counted)
    assert files(folder) == whole and len(calls) == 16


def test_processes_that_do_not_know_of_each_other_are_refused(tmp_path, model_dirs, prompts, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")  # Accelerate was set up before, for one process
    with pytest.raises(ValueError, match="2 processes were started, but Accelerate was set up for 1"):
        sample(tmp_path / "s", model_dirs["gpt2"], prompts)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 1}, "begun with another `settings.seed`"),
        ({"model": "llama"}, "begun with another `model.weights`"),
        ({"prompts": ["other"]}, "begun with another `prompts.count`"),
        ({"reward": lambda completions, **_: [0.0] * len(completions)}, "begun with another `rewards"),
    ],
)
def test_a_folder_goes_on_with_its_own_settings_only(tmp_path, model_dirs, prompts, changes, message):
    arguments = {"model": model_dirs["gpt2"], "prompts": prompts}
    sample(tmp_path / "s", **arguments)
    before = files(tmp_path / "s")
    if "model" in changes:
        changes = {"model": model_dirs[changes["model"]]}
    with pytest.raises(ValueError, match=message):
        sample(tmp_path / "s", **(arguments | changes))
    assert files(tmp_path / "s") == before


def test_another_precision_is_named_as_such(tmp_path, model_dirs, prompts):
    """Not as other weights, which it makes; by the setting where that differs, else by the model."""
    model = AutoModelForCausalLM.from_pretrained(model_dirs["gpt2"])
    sample(tmp_path / "path", model_dirs["gpt2"], prompts)
    sample(tmp_path / "model", model, prompts)
    with pytest.raises(ValueError, match="begun with another `settings.dtype`"):
        sample(tmp_path / "path", model_dirs["gpt2"], prompts, dtype="bfloat16")
    with pytest.raises(ValueError, match="begun with another `model.dtype`"):
        sample(tmp_path / "model", model.bfloat16(), prompts)


def write_reward(file, factor):
    file.write_text(f"def score(completions, **kwargs):\n    return [{factor} * len(c) for c in completions]\n")
    return FunctionReward(file, "score")


@pytest.mark.parametrize("kind", ["another file", "the file's text", "the folder's weights"])
def test_a_folder_goes_on_with_its_own_reward_only(tmp_path, model_dirs, prompts, tokenizer, kind):
    """Rewards of the same name."""
    first = write_reward(tmp_path / "a.py", 1)
    if kind == "another file":
        second = write_reward(tmp_path / "b.py", 2)
    elif kind == "the folder's weights":
        first = second = save_model(tmp_path / "reward", "gpt2", tokenizer)[0]
    sample(tmp_path / "s", model_dirs["gpt2"], prompts, first)
    sample(tmp_path / "s", model_dirs["gpt2"], prompts, first)  # the same
    if kind == "the file's text":
        second = write_reward(tmp_path / "a.py", 2)
    elif kind == "the folder's weights":
        save_model(tmp_path / "reward", "gpt2", tokenizer, initializer_range=0.4)
    with pytest.raises(ValueError, match="begun with another `rewards"):
        sample(tmp_path / "s", model_dirs["gpt2"], prompts, second)


def test_a_completion_ends_as_in_training(tmp_path, model_dirs, prompts, tokenizer):
    """At the model's own end tokens and at the tokenizer's; the trainers stop at both."""
    model = AutoModelForCausalLM.from_pretrained(model_dirs["gpt2"])
    model.generation_config.eos_token_id = [5]
    samples = sample(tmp_path / "s", model, prompts, tokenizer=tokenizer, num_samples=50, max_completion_length=8)
    ended = 0
    for row in samples.table.to_pylist():
        assert not {5, tokenizer.eos_token_id} & set(row["completion_ids"][:-1])
        assert row["ended"] == (row["completion_ids"][-1] in (5, tokenizer.eos_token_id))
        ended += row["completion_ids"][-1] == tokenizer.eos_token_id
    assert ended


def test_no_folder_of_something_else_is_written_to(tmp_path, model_dirs, prompts):
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(ValueError, match="holds something else"):
        sample(tmp_path, model_dirs["gpt2"], prompts)
    assert files(tmp_path) == {"mine.txt": b"mine"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompts": []}, "`prompts` is empty"),
        ({"prompts": ["the cat", ""]}, "Prompt 1, '', has no tokens"),
        ({"dtype": "foo"}, "`dtype='foo'` must be 'auto'"),
        ({"reward": lambda completions, **_: [float("inf")] * len(completions)}, "inf"),
        ({"reward": lambda completions, **_: [float("nan")] * len(completions)}, "nan"),
        ({"reward": lambda completions, **_: [0.0]}, "1 reward"),
        ({"reward": []}, "0 rewards"),
        ({"beta": 0.1}, "needs a `reference`"),
        ({"reward_weights": (1.0, 2.0)}, "2 weights for 1"),
        ({"max_completion_length": 40}, "exceed the model's context"),
        ({"num_samples": 0}, "`num_samples=0`"),
        ({"seed": -1}, "`seed=-1`"),
        ({"engine": "other"}, "'other'"),
        ({"beta": float("nan")}, "`beta=nan` must be a finite number"),
        ({"reward_weights": (1.0, float("nan"))}, "`reward_weights=.*` must be finite numbers"),
    ],
)
def test_what_is_refused(tmp_path, model_dirs, prompts, arguments, message):
    with pytest.raises(ValueError, match=message):
        sample(tmp_path / "s", **({"model": model_dirs["gpt2"], "prompts": prompts} | arguments))
    if (tmp_path / "s").exists():  # the reward failed, after sampling had begun
        with pytest.raises(ValueError, match="not complete"):
            records.load_samples(tmp_path / "s")


def test_a_sample_without_a_reward_is_said_when_it_is_read(tmp_path, model_dirs, prompts):
    def reward(completions, **_):
        return [None if "bad" in text else 1.0 for text in completions]

    samples = sample(tmp_path / "s", model_dirs["gpt2"], prompts, reward, num_samples=50)
    missing = sum("bad" in text for text in samples.table["completion"].to_pylist())
    assert 0 < missing == samples.table["reward"].null_count
    with pytest.raises(ValueError, match=f"{missing} of 200 samples .* no finite `reward`"):
        samples.column()
    assert samples.column("entropy").shape == (4, 50)
    with pytest.raises(ValueError, match="no column of numbers `kl`.*reference"):
        samples.column("kl")


def test_what_does_not_read_as_complete(tmp_path):
    folder = write_samples(tmp_path / "s", np.zeros((2, 3)), shards=2)
    assert records.load_samples(folder).column().shape == (2, 3)
    shard, complete, header = folder / "shard-00001.parquet", folder / "complete.json", folder / "header.json"
    originals = files(folder)

    def refused(message):
        with pytest.raises(ValueError, match=message):
            records.load_samples(folder)
        for name, content in originals.items():
            (folder / name).write_bytes(content)

    shard.write_bytes(originals[shard.name][:-1])
    refused("missing or was changed")
    shard.unlink()
    refused("missing or was changed")
    complete.unlink()
    refused(r"not complete \(2 of 2 prompts so far\)")
    header.write_bytes(originals["header.json"].replace(b'"m"', b'"n"'))
    refused("changed after it was written")
    header.write_bytes(originals["header.json"][:50])
    refused("cannot be read")
    header.unlink()
    refused("holds no samples")
    with pytest.raises(ValueError, match="holds no samples"):
        records.load_samples(shard)
    assert pq.read_table(shard).num_rows == 3 and json.loads(complete.read_text())["shards"][0]["rows"] == 3


SHARD = {"file": "shard-00000.parquet", "sha256": "0"}
LISTS_OF_SHARDS = [[], {"file": "sha256"}, ["shard"], [{"file": "shard"}], [SHARD | {"file": 0}]]
OTHER = "cannot be read|belongs to another header"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        *(("complete.json", text, OTHER) for text in ("{}", "[]", '{"hash": "0"}')),
        *(("complete.json", json.dumps({"hash": "0", "shards": shards}), OTHER) for shards in LISTS_OF_SHARDS),
        ("complete.json", json.dumps({"hash": [0], "shards": [SHARD]}), OTHER),
        ("complete.json", json.dumps({"hash": "0", "shards": [SHARD]}), "belongs to another header"),
        *(("complete.json", text, "cannot be read") for text in ('{"hash": ', "")),
        *(("header.json", text, "not of samples, or was changed") for text in ("[]", "{}", "null")),
    ],
)
def test_damaged_files_are_named_with_what_to_do(tmp_path, name, text, message):
    folder = write_samples(tmp_path / "s", np.zeros((2, 3)))
    (folder / name).write_text(text)
    with pytest.raises(ValueError, match=f"{name}` .*({message}).*; .*(sample|start) again"):
        records.load_samples(folder)
    if name == "header.json":
        with pytest.raises(ValueError, match=f"{name}` .*{message}.*; start again in another folder"):
            records.open_folder(folder, {})


def test_a_file_is_whole_or_not_there(tmp_path):
    def torn(path):
        path.write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        records.write_atomically(tmp_path / "a.json", torn)
    assert not (tmp_path / "a.json").exists()


def test_progress_is_by_batch(tmp_path, model_dirs, prompts, monkeypatch):
    told = []

    class Bar(sampling.tqdm):
        def update(self, count):
            told.append(count)
            super().update(count)

    monkeypatch.setattr(sampling, "tqdm", Bar)
    settings = SamplingSettings(num_samples=8, max_completion_length=3, batch_size=4, shard_size=16)
    sample_completions(tmp_path / "s", model_dirs["gpt2"], prompts, word_reward, settings)
    assert sum(told) == 32 and max(told) == 4
    assert SamplingSettings().shard_size == 256


def test_a_run_that_was_stopped_is_read_as_far_as_it_went(tmp_path, model_dirs, prompts, monkeypatch, capsys):
    folder, write = tmp_path / "s", records.write_shard
    whole = sample(tmp_path / "whole", model_dirs["gpt2"], prompts)  # 6 of each of 4 prompts, in shards of 5

    def stopped(folder, number, table):
        if number == 2:
            raise KeyboardInterrupt
        write(folder, number, table)

    monkeypatch.setattr(records, "write_shard", stopped)
    with pytest.raises(KeyboardInterrupt):
        sample(folder, model_dirs["gpt2"], prompts)
    with pytest.raises(ValueError, match=r"2 of 4 prompts so far.*`--partial`.*`trl-repulse evaluate`"):
        records.load_samples(folder)
    part = records.load_samples(folder, partial=True)
    assert part.column().tolist() == whole.column()[:2].tolist() and part.prompts == whole.prompts[:2]
    assert main(["evaluate", str(folder), "--partial", "--thresholds", "0.1"]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"`{folder}` is partial: the first 2 of 4 prompts.") and "P(r < 0.1)" in said
    assert main(["evaluate", str(folder), "--partial", "--card", str(tmp_path)]) == 1
    assert "leave out `--model` and `--card`" in capsys.readouterr().err
    monkeypatch.setattr(records, "write_shard", write)
    assert sample(folder, model_dirs["gpt2"], prompts).table.equals(whole.table)
    assert records.load_samples(folder, partial=True).table.equals(whole.table)
