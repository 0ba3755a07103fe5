"""Runs side by side: intervals, what may not be compared, the figure, and the script that makes them."""

import contextlib
import importlib.util
import json
import math
import sys
from concurrent.futures import Future
from pathlib import Path

import pytest
import yaml
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from trl_repulse import embedded
from trl_repulse.arguments import ARGUMENTS, parse
from trl_repulse.evaluation.comparison import format_comparison, load_runs, mean_and_interval, summarize
from trl_repulse.evaluation.exact import ExactEvaluator
from trl_repulse.evaluation.result_files import load_frontier
from trl_repulse.plots import plot_frontier


EXAMPLES = Path(__file__).parents[1] / "examples"


def result(method="REINFORCE", seed=0, log_prob_bad=-10.0, **changes):
    start = {"expected_reward": 0.5, "log_prob_bad": -5.0, "kl": 0.0}
    final = {"expected_reward": 4.0, "log_prob_bad": log_prob_bad, "kl": 2.0}
    run = {"method": method, "seed": seed, "samples": 100, "policy_updates": 10, "initial": start, "final": final}
    return run | changes


@pytest.fixture
def write(tmp_path):
    def write(*runs):
        paths = [tmp_path / f"{i}.json" for i in range(len(runs))]
        for path, run in zip(paths, runs, strict=True):
            path.write_text(json.dumps(run))
        return paths

    return write


def test_interval_against_a_table():
    # Student's 97.5 % quantiles in any table: 12.706 for one degree of freedom, 2.776 for four
    assert mean_and_interval([0.0, 2.0]) == pytest.approx((1.0, 12.706), abs=1e-3)
    mean, half = mean_and_interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert (mean, half) == pytest.approx((3.0, 2.776 * math.sqrt(2.5 / 5)), abs=1e-3)
    assert mean_and_interval([7.0]) == mean_and_interval([7.0, 7.0]) == (7.0, math.inf)
    assert mean_and_interval([0.1 + 0.2, 0.3])[1] == math.inf


def test_interval_covers():
    import torch

    draws = torch.randn(4000, 5, generator=torch.Generator().manual_seed(0)).tolist()
    covered = [abs(mean) < half for mean, half in map(mean_and_interval, draws)]
    assert 0.94 < sum(covered) / len(covered) < 0.96


def test_table_and_summary(write):
    runs = load_runs(write(result(seed=0), result(seed=1, log_prob_bad=-12.0), result("RePULSe", log_prob_bad=-40.0)))
    summary = summarize(runs)
    assert list(summary) == ["REINFORCE", "RePULSe"]
    assert summary["REINFORCE"]["log_prob_bad"] == pytest.approx((-11.0, 12.706), abs=1e-3)
    lines = format_comparison(runs).splitlines()
    assert len(lines) == 4 and "-11.00 ± 12.71" in lines[2] and "4.00 / -10.0, 4.00 / -12.0" in lines[2]
    assert "| -40.00 |" in lines[3]  # one seed has no interval


def test_a_run_without_a_reference_has_no_kl(write):
    final = {"expected_reward": 4.0, "log_prob_bad": -10.0, "kl": None}
    runs = load_runs(write(result(), result(seed=1, final=final)))
    never = load_runs(write(result(), result(seed=1, log_prob_bad=None)))  # P(bad) is 0
    assert "4.00 / -10.0, 4.00 / –" in format_comparison(never)
    paths = write(result(), result(seed=1, log_prob_bad=-math.inf))
    assert "-Infinity" in paths[1].read_text() and format_comparison(load_runs(paths)) == format_comparison(never)
    assert math.isnan(summarize(load_runs(paths))["REINFORCE"]["log_prob_bad"][0])
    final = {"expected_reward": 4.0, "kl": 2.0}  # as the commands write it
    assert format_comparison(load_runs(write(result(), result(seed=1, final=final)))) == format_comparison(never)
    assert "| – |" in format_comparison(runs) and math.isnan(summarize(runs)["REINFORCE"]["kl"][0])


def test_variants_of_one_method_are_told_apart_by_their_labels(write):
    paths = write(result("RePULSe"), result("RePULSe", log_prob_bad=-12.0))
    with pytest.raises(ValueError, match="both RePULSe with seed 0"):
        load_runs(paths)
    frontier = load_frontier({"beta 1": [paths[0]], "beta 2": [paths[1]]}, "log_prob_bad", "expected_reward")
    assert [point.method for point in frontier.points] == ["beta 1", "beta 2"]
    with pytest.raises(ValueError, match="both one with seed 0"):
        load_frontier({"one": paths}, "log_prob_bad", "expected_reward")


@pytest.mark.parametrize(
    ("second", "words"),
    [
        (result(seed=0), "both REINFORCE with seed 0"),
        (result(seed=1, samples=200), "drew 200 completions, other runs 100"),
        (result(seed=1, initial={"expected_reward": 0.5, "log_prob_bad": -6.0}), "started at log P"),
        (result(seed=1, final=None), "no exact evaluation"),
        (
            result(seed=1, initial={"expected_reward": 0.5, "log_prob_bad": None}),
            r"no finite log P\(bad\) at its start",
        ),
        (result(seed=1, initial=None), "`initial.log_prob_bad`"),
        (result(seed=1, initial={"log_prob_bad": "x"}), "`initial.log_prob_bad`"),
        (result(seed=1, initial=1), "under `initial`"),
        (result(seed=1, final=2), "under `final`"),
        (result(seed=1, final={"expected_reward": True, "log_prob_bad": -5.0, "kl": 0.0}), "`expected_reward` under"),
        (result(seed=[1]), "`seed`"),
        ({"loss": 1.0}, "no results of a training script"),
    ],
)
def test_what_may_not_be_compared(write, second, words):
    paths = write(result(), second)
    with pytest.raises(ValueError, match=words) as error:
        load_runs(paths)
    assert str(paths[1]) in str(error.value)


def test_torn_file(write, tmp_path):
    (path,) = write(result())
    path.write_text(path.read_text()[:20])
    with pytest.raises(ValueError, match="cannot be read as results"):
        load_runs([path])


@pytest.mark.parametrize("suffix", ["png", "pdf"])
def test_figure(write, tmp_path, suffix):
    paths = write(*(result(m, s, -10.0 - s) for m in "abcdefgh" for s in range(3)), result("single"))
    methods = {m: paths[3 * i : 3 * i + 3] for i, m in enumerate("abcdefgh")} | {"single": paths[-1:]}
    frontier = load_frontier(methods, "log_prob_bad", "expected_reward")
    plot_frontier(frontier, tmp_path / "figures" / f"frontier.{suffix}")
    assert (tmp_path / "figures" / f"frontier.{suffix}").stat().st_size > 5000


def load_script():
    spec = importlib.util.spec_from_file_location("compare", EXAMPLES / "compare.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["compare"] = module  # worker processes look its functions up by name
    spec.loader.exec_module(module)
    return module


def test_settings_are_as_many_for_every_method_and_flags_exist():
    config = yaml.safe_load((EXAMPLES / "configs" / "compare.yaml").read_text())
    assert {len(method["settings"]) for method in config["methods"].values()} == {3}
    script = load_script()
    options = script.argparse.Namespace(methods=None, tune=True, seeds=[0], output_dir=Path("runs"))
    runs = script.plan(config, options)
    assert len({folder for *_, folder in runs}) == 3 * len(config["methods"]) * len(script.TUNING_SEEDS)
    runs = [run for run in runs if run[2]["seed"] == script.TUNING_SEEDS[0]]
    for command, _, flags, _ in runs:
        argv = [part for key, value in flags.items() for part in (f"--{key}", str(value))]
        argv = [*argv, "--output_dir", "unused"]
        _, args, _ = parse(argv, ARGUMENTS[command], embedded.settings_path(command))
        drawn = args.max_steps * args.per_device_train_batch_size * (2 if getattr(args, "has_proposal", False) else 1)
        assert drawn == config["samples"]


def test_settings_need_not_be_numbers():
    """PyYAML takes `1e-3` for text."""
    script = load_script()
    setting = yaml.safe_load("{learning_rate: 1e-3, baseline: none, whiten_advantages: true, bad_token_ids: [1, 2]}")
    methods = {"REINFORCE": {"command": "reinforce", "settings": [setting]}}
    options = script.argparse.Namespace(methods=None, tune=True, seeds=[0], output_dir=Path("runs"))
    runs = script.plan({"samples": 8, "samples_per_update": 4, "common": {}, "methods": methods}, options)
    _, label, flags, folder = runs[0]
    assert label.startswith("REINFORCE, learning_rate 1e-3, baseline none, whiten_advantages True")
    assert folder.name.startswith("REINFORCE-learning_rate1e-3-baselinenone-") and flags["tracking_every"] == 1


@pytest.mark.thorough
@pytest.mark.trainer
def test_comparison_runs_and_resumes(tmp_path, monkeypatch, capsys):
    config = yaml.safe_load((EXAMPLES / "configs" / "compare.yaml").read_text())
    config["samples"] = 8 * config["samples_per_update"]
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    flags = ["--config", str(path), "--output_dir", str(tmp_path / "runs"), "--seeds", "3", "--workers", "1"]
    script = load_script()
    monkeypatch.syspath_prepend(EXAMPLES)  # for the worker's import of `compare`
    monkeypatch.setattr(sys, "argv", ["compare.py", *flags, "--methods", "REINFORCE"])
    script.main()
    (results,) = (tmp_path / "runs").glob("*/results.json")
    written, content = results.stat().st_mtime_ns, json.loads(results.read_text())
    out = capsys.readouterr().out
    assert "1 of 1: REINFORCE" in out and "| REINFORCE | 8 |" in out

    class Pool(contextlib.nullcontext):
        """In place of the workers; takes the run above for what is asked for."""

        def submit(self, run, script, method, flags, folder):
            folder.mkdir()
            content.update(method=method, policy_updates=flags["max_steps"])
            (folder / "results.json").write_text(json.dumps(content))
            future = Future()
            future.set_result(None)
            return future

    monkeypatch.setattr(script, "ProcessPoolExecutor", lambda *args, **kwargs: Pool(Pool()))
    monkeypatch.setattr(sys, "argv", ["compare.py", *flags, "--methods", "RePULSe", "REINFORCE"])
    script.main()
    out = capsys.readouterr().out
    assert results.stat().st_mtime_ns == written and "2 of 2: RePULSe" in out and "1 of 2" not in out
    assert "| RePULSe | 4 |" in out and "| REINFORCE | 8 |" in out
    path.write_text(yaml.safe_dump(config | {"common": config["common"] | {"max_grad_norm": 1.0}}))
    with pytest.raises(SystemExit, match="runs.*-seed3 is a run with other flags; name another"):
        script.main()
    assert (tmp_path / "runs" / "frontier.png").exists() and not list((tmp_path / "runs").glob("*.running"))


def test_the_largest_reward_is_the_worlds():
    tokenizer, judge = (
        AutoTokenizer.from_pretrained(path()) for path in (embedded.policy_path, embedded.reward_model_path)
    )
    model = AutoModelForSequenceClassification.from_pretrained(embedded.reward_model_path())
    bad = embedded.bad_token_ids(tokenizer)
    evaluator = ExactEvaluator(tokenizer, embedded.load_prompts()["prompt"], model, bad, 2, reward_tokenizer=judge)
    config = yaml.safe_load((EXAMPLES / "configs" / "compare.yaml").read_text())
    assert config["largest_reward"] == pytest.approx(evaluator.rewards.amax(dim=1).mean().item(), abs=1e-4)


def test_unknown_method(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["compare.py", "--methods", "DPO"])
    with pytest.raises(SystemExit, match="has no method .'DPO'.; it has RePULSe, REINFORCE"):
        load_script().main()
