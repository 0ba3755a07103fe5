"""The tail report: estimates against brute force, intervals against tables and by their coverage, what is refused."""

import dataclasses
import json
import math
import re
import runpy
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from transformers import AutoModelForCausalLM

from trl_repulse._numbers import with_unit
from trl_repulse.evaluation import tails
from trl_repulse.evaluation.callback import TailReportCallback
from trl_repulse.evaluation.records import load_samples
from trl_repulse.evaluation.report import _markdown_table, estimates, tail_report
from trl_repulse.evaluation.tails import Estimate, crossed_interval

from ..conftest import USE_CPU, build_tokenizer
from ..evaluation_support import sample, write_samples


def coverage(interval, truth, repetitions=1000):
    held = 0
    for i in range(repetitions):
        low, high = interval(np.random.default_rng(i))
        held += low <= truth <= high
    return held / repetitions


def test_samples_that_are_all_alike_bound_nothing():
    alike = np.full((2, 1000), 0.1)
    assert (tails.mean(alike).low, tails.mean(alike).high) == (-math.inf, math.inf)
    alike[0] = 0.7  # each prompt has one reward
    assert (tails.mean(alike).low, tails.mean(alike).high) == (-math.inf, math.inf)
    assert tails.cvar(alike, 0.1).low == -math.inf


def test_cvar_without_a_sample_under_the_quantile():
    rewards = np.where(np.arange(2000) < 160, 0.0, 5.0)[None]  # an atom of 8 %
    for level, high in ((0.06, 0.0), (0.079, 5.0)):  # the true quantile may be above the atom
        found = tails.cvar(rewards, level)
        assert (found.value, found.low, found.high) == (0.0, -math.inf, high)


@pytest.mark.parametrize("chance", [0.0005, 0.001, 0.003])
def test_cvar_of_a_rare_bad_reward_covers(chance):
    def interval(generator):
        found = tails.cvar(np.where(generator.random((1, 1000)) < chance, -10.0, 1.0), 0.1)
        return found.low - 1e-9, found.high + 1e-9

    assert coverage(interval, 1 - 11 * chance / 0.1) > 0.94


def test_keys_tell_thresholds_apart():
    found = estimates(np.array([[[-1234567.0, -1234568.0, 0.0]]]), [-1234567.5, -1234568.5], [0.01, 0.0100000001])
    assert found["P(r < -1234567.5)"].samples == 1 and found["P(r < -1234568.5)"].samples == 0
    assert "CVaR 0.01" in found and "CVaR 0.0100000001" in found


@pytest.mark.parametrize(
    ("estimate", "truth"),
    [
        (lambda x: tails.mean(x), -1.0),
        (lambda x: tails.cvar(x, 0.1), math.log(0.1) - 1),
        (lambda x: tails.quantile(x, 0.1), math.log(0.1)),
    ],
)
def test_intervals_cover(estimate, truth):
    def interval(rng):
        found = estimate(-rng.exponential(size=(2, 500)))
        return found.low, found.high

    assert 0.93 < coverage(interval, truth) < 0.975


def test_prompts_as_draws_matter():
    # The control: seeds alone, where it is the prompts that differ, would miss most of the time
    def interval(rng):
        cells = rng.standard_normal((1, 10)) + 0.1 * rng.standard_normal((5, 10))
        return crossed_interval(cells.mean(axis=1, keepdims=True))

    assert coverage(interval, 0.0, 200) < 0.4


def test_report_of_one_model(tmp_path):
    values = np.random.default_rng(0).normal(size=(3, 400))
    samples = load_samples(write_samples(tmp_path / "s", values, prompts=["a", "b", "a"], shards=3))
    report = tail_report(samples, [0.0, -9.0, 100.0], [0.1], [0.25])
    assert report.overall["P(r < 0)"] == tails.prob_below(values, 0.0)
    assert report.overall["P(r < -9)"].value == 0 < report.overall["P(r < -9)"].high < 0.004
    assert report.overall["P(r < 100)"].value == 1
    assert report.overall["CVaR 0.1"] == tails.cvar(values, 0.1)
    assert report.overall["mean return"].value == pytest.approx(values.mean() - 1)
    assert list(report.per_prompt) == ["a", "b", "a (prompt 2)"]
    assert report.per_prompt["b"]["mean"] == tails.mean(values[1:2])
    text = report.to_markdown(per_prompt=True)
    assert "| P(r < -9) | 0 | 0 to 0.003069 | 0 samples |" in text
    assert "3 prompts" in text and "Prompt 'b'" in text and "95 % interval" in text
    assert "Prompt" not in report.to_markdown()
    content = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert content["per_prompt"]["b"]["CVaR 0.1"]["low"] is None  # 40 samples in the tail


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weights": "w0"}, "same model"),
        ({"prompts": ["other", "prompts"]}, "another `prompts.sha256`"),
        ({"max_completion_length": 3}, "another `settings.max_completion_length`"),
    ],
)
def test_samples_that_do_not_belong_together(tmp_path, changes, message):
    first = write_samples(tmp_path / "0", np.zeros((2, 3)), "w0")
    second = write_samples(tmp_path / "1", np.zeros((2, 3)), **({"weights": "w1"} | changes))
    with pytest.raises(ValueError, match=message):
        tail_report([load_samples(first), load_samples(second)])
    with pytest.raises(ValueError, match="no samples"):
        tail_report([])
    third = write_samples(tmp_path / "2", np.zeros((2, 3)), "w2")
    with pytest.raises(ValueError, match="`quantiles` are those of one model"):
        tail_report([load_samples(first), load_samples(third)], quantiles=[0.1])


def more(samples, **columns):
    """The samples with further columns of numbers."""
    for name, values in columns.items():
        samples = dataclasses.replace(samples, table=samples.table.append_column(name, pa.array(values)))
    return samples


def test_a_value_that_is_not_finite_costs_its_mean_alone_unless_it_is_asked_for(tmp_path):
    values = np.random.default_rng(0).normal(size=(2, 50))
    samples = load_samples(write_samples(tmp_path / "s", values))
    samples = more(samples, kl=np.where(np.arange(100) == 7, math.inf, values.ravel()))
    assert list(tail_report(samples, levels=[]).overall) == ["mean", "mean return"]
    with pytest.raises(ValueError, match="1 of 100 samples .* no finite `kl`"):
        tail_report(samples, column="kl")
    reward = samples.table["reward"]  # a column equal to another is reported once
    same = dataclasses.replace(samples, table=samples.table.set_column(3, "return", reward))
    assert list(tail_report(same, levels=[]).overall) == ["mean"]
    values[0, 0] = math.nan  # without a reward there is no return
    other = np.nan_to_num(values).ravel()
    samples = more(load_samples(write_samples(tmp_path / "t", values)), length=other)
    with pytest.raises(ValueError, match="1 of 100 samples"):
        tail_report(samples)
    report = tail_report(samples, column="length", levels=[])
    assert list(report.overall) == ["mean"] and report.overall["mean"].value == pytest.approx(other.mean())


def test_a_table_names_the_units(tmp_path):
    samples = load_samples(write_samples(tmp_path / "s", np.random.default_rng(0).normal(size=(2, 50))))
    samples = more(samples, kl=np.arange(100.0), entropy=np.arange(100.0))
    table = tail_report(samples, levels=[]).to_markdown()
    assert "| mean kl, nats per completion | 49.5 |" in table
    assert "| mean entropy, nats per completion | 49.5 |" in table  # a sum over tokens
    table = tail_report(samples, levels=[], column="entropy").to_markdown()
    assert table.startswith("`entropy`, nats per completion: 50 completions of each of 2 prompts")
    of_training = ["entropy, nats per token", "eval_entropy, nats per token"]
    assert [with_unit(name) for name in ("entropy", "eval_entropy")] == of_training


def test_the_units_are_those_of_the_sampler(tmp_path, model_dirs):
    """Entropy and KL of completions are sums: with uniform next tokens, T times the logarithm of the vocabulary."""
    model = AutoModelForCausalLM.from_pretrained(model_dirs["gpt2"])
    for parameter in model.parameters():
        parameter.data.zero_()
    model.generation_config.eos_token_id = None
    tokenizer = build_tokenizer()
    tokenizer.eos_token = None
    samples = sample(tmp_path / "s", model, ["the cat"], tokenizer=tokenizer, reference=model, max_completion_length=5)
    report = tail_report(samples, levels=[])
    assert report.overall["mean entropy"].value == pytest.approx(5 * math.log(model.config.vocab_size))
    assert report.overall["mean length"].value == 5 and "| mean length, tokens | 5 |" in report.to_markdown()


def test_ends_without_bounds_in_words():
    names = {"a": (-math.inf, math.inf), "b": (-math.inf, 2.0), "c": (1.0, math.inf), "d": (1.0, 2.0)}
    estimates = {name: Estimate(1.0, *ends, 5) for name, ends in names.items()}
    rows = [row.split(" | ")[2] for row in _markdown_table(estimates, 0.95)[2:]]
    assert rows == ["no interval", "at most 2", "at least 1", "1 to 2"]


@pytest.mark.trainer
def test_callback_reports_and_leaves_training_alone(make, prompts):
    plain = make(max_steps=3)
    plain.train()
    watched = make(max_steps=3)
    callback = TailReportCallback(watched, prompts, 50, thresholds=[-1.0], levels=[0.5], every=2)
    watched.add_callback(callback)
    watched.train()
    assert [entry["update"] for entry in callback.history] == [2, 3]
    logged = [entry for entry in watched.state.log_history if "tail/mean" in entry]
    assert [entry["step"] for entry in logged] == [2, 3]
    last = callback.history[-1]["report"]
    assert logged[-1]["tail/prob_below_-1"] == last["P(r < -1)"].value and last["mean"].samples == 200
    low = last["CVaR 0.5"].low  # of samples with no bad one it is −∞, which is not logged
    assert logged[-1].get("tail/cvar_0.5_low", -math.inf) == low and (low > -math.inf or not USE_CPU)
    keys = ("loss", "reward", "grad_norm", "proposal/loss")
    logs = [[entry for entry in trainer.state.log_history if "loss" in entry] for trainer in (plain, watched)]
    losses = [[[entry[key] for key in keys] for entry in log] for log in logs]
    assert losses[0] == losses[1] and len(losses[0]) == 3


def test_callback_refuses(make, prompts):
    trainer = make()
    for given, arguments, message in (
        (prompts, {"every": 0}, "`every=0`"),
        (prompts, {"levels": [2.0]}, "`level=2.0`"),
        (prompts, {"seed": -1}, "`seed=-1` must be at least 0"),
        ([], {}, "is empty"),
    ):
        with pytest.raises(ValueError, match=message):
            TailReportCallback(trainer, given, **arguments)


@pytest.mark.slow
def test_example(tmp_path, monkeypatch, capsys):
    script = Path(__file__).parents[2] / "examples" / "evaluate.py"
    monkeypatch.setattr(sys, "argv", [str(script), "--output_dir", str(tmp_path / "s"), "--num_samples", "500"])
    monkeypatch.syspath_prepend(script.parent)  # as Python does for a script
    runpy.run_path(str(script), run_name="__main__")
    out = capsys.readouterr().out
    low, high = map(float, re.search(r"P\(r < -5\) \| \S+ \| (\S+) to (\S+)", out).groups())
    assert low < float(re.search(r"P\(r < -5\) = (\S+),", out)[1]) < high
