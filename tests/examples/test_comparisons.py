"""`examples/compare.py` and `examples/agent.py`: which runs they make, on which seeds, and their tables."""

import contextlib
import importlib
import json
import math
import shutil
import sys
from concurrent.futures import Future
from pathlib import Path

import pytest
import yaml

from examples.worlds import results, shop, two_tokens
from examples.worlds.exact_tracking import ARGUMENTS
from trl_repulse import embedded
from trl_repulse.cli.arguments import parse

from .. import conftest
from .test_two_tokens import exact_evaluator


EXAMPLES = Path(__file__).parents[2] / "examples"


def load_script():
    sys.path[:0] = [str(EXAMPLES)] * (str(EXAMPLES) not in sys.path)  # as for a script that is run there
    return conftest.load_script(EXAMPLES / "compare.py", "compare")


def run_of(seed, log_prob_bad, reward=4.0):
    final = {"expected_reward": reward, "log_prob_bad": log_prob_bad}  # a run without a reference has no KL
    return {"method": "A", "seed": seed, "samples": 8, "policy_updates": 1000, "final": final}


def test_intervals_against_a_table():
    # Student's 97.5 % quantiles in any table: 12.706 for one degree of freedom, 2.776 for four
    mean_and_interval = results.mean_and_interval
    assert mean_and_interval([0.0, 2.0]) == pytest.approx((1.0, 12.706), abs=1e-3)
    mean, half = mean_and_interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert (mean, half) == pytest.approx((3.0, 2.776 * math.sqrt(2.5 / 5)), abs=1e-3)
    assert mean_and_interval([7.0]) == mean_and_interval([7.0, 7.0]) == (7.0, math.inf)
    assert mean_and_interval([0.1 + 0.2, 0.3])[1] == math.inf


def test_table_and_figure(tmp_path):
    paths = [tmp_path / f"{i}.json" for i in range(4)]
    runs = [*(run_of(seed, -10.0 - 2 * seed) for seed in range(2)), run_of(2, None) | {"method": "B"}]
    for path, run in zip(paths, [*runs, run_of(3, -5.0, 4.1) | {"method": "C"}], strict=True):
        path.write_text(json.dumps(run))
    methods = results.by_method(paths)
    lines = results.format_table(methods).splitlines()
    assert lines[2:] == [
        "| A | 1,000 | 4.00 | -11.00 ± 12.71 | – | 4.00 / -10.0, 4.00 / -12.0 |",
        "| B | 1,000 | 4.00 | – | – | 4.00 / – |",
        "| C | 1,000 | 4.10 | -5.00 | – | 4.10 / -5.0 |",
    ]
    results.draw(methods, 4.04, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 5000


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
        argv = [*two_tokens.flags(command), *argv, "--output_dir", "unused"]
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


@pytest.mark.thorough
def test_the_largest_reward_is_the_worlds():
    evaluator = exact_evaluator(two_tokens.load_prompts()["prompt"], 2)
    config = yaml.safe_load((EXAMPLES / "configs" / "compare.yaml").read_text())
    assert config["largest_reward"] == pytest.approx(evaluator.rewards.amax(dim=1).mean().item(), abs=1e-4)


def test_unknown_method(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["compare.py", "--methods", "DPO"])
    with pytest.raises(SystemExit, match="has no method .'DPO'.; it has RePULSe, REINFORCE"):
        load_script().main()


# `examples/agent.py`


@pytest.fixture(scope="module")
def policy_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shop")
    shop.build_policy(folder, steps=60, batch_size=16)
    return folder


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module("agent")


@pytest.mark.thorough
@pytest.mark.trainer
def test_the_example_trains_each_method_once(tmp_path, policy_dir, capsys, example, monkeypatch):
    shutil.copytree(policy_dir, tmp_path / "policy")
    arguments = ["--output_dir", str(tmp_path), "--completions", "128", "--seeds", "3"]
    example.main(arguments)
    rows = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("*/results.json"))]
    assert len(rows) == len(example.METHODS) and {row["samples"] for row in rows} == {128}
    assert len({row["final"]["log_prob_bad"] for row in rows}) == len(example.METHODS)
    assert {row["initial"]["log_prob_bad"] for row in rows} == {shop.evaluate(str(policy_dir)).log_prob_closed}
    printed = capsys.readouterr().out
    ends = [row["final"] for row in rows]
    assert all(f"{end['expected_reward']:.2f} / {end['log_prob_bad']:.1f}" in printed for end in ends)
    changed = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    example.main(arguments)
    assert changed == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    fixed, settings, chosen = example.METHODS["GRPO"]
    monkeypatch.setitem(example.METHODS, "GRPO", (fixed | {"beta": 0.1}, settings, chosen))
    with pytest.raises(SystemExit, match="is a run with other fields; name another --output_dir"):
        example.main(arguments)


@pytest.mark.thorough
@pytest.mark.trainer
def test_the_example_tunes_on_other_seeds_than_it_reports(tmp_path, policy_dir, example, monkeypatch):
    """Every method has as many settings, and each runs on the same seeds."""
    shutil.copytree(policy_dir, tmp_path / "policy")
    asked = []

    def run(method, setting, seed, completions, output_dir):
        asked.append((method, str(setting), seed))
        ends = {"expected_reward": 0.9, "log_prob_bad": -7.0}
        results = tmp_path / f"{len(asked)}.json"
        row = {"method": f"{method}, {setting}", "seed": seed, "samples": 1, "policy_updates": 1}
        results.write_text(json.dumps(row | {"initial": ends, "final": ends}))
        return results

    monkeypatch.setattr(example, "run", run)
    example.main(["--output_dir", str(tmp_path), "--tune"])
    settings = {method: {setting for name, setting, _ in asked if name == method} for method in example.METHODS}
    assert {len(found) for found in settings.values()} == {3} and len(asked) == 6 * len(example.TUNING_SEEDS)
    tuning = set(asked)
    asked.clear()
    example.main(["--output_dir", str(tmp_path)])
    reported = {seed for *_, seed in asked}
    assert len(reported) == 5 and not {seed for *_, seed in tuning} & reported
    assert {row[:2] for row in asked} <= {row[:2] for row in tuning}
