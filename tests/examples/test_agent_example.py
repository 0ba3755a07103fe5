"""`examples/agent.py`: what it trains, and the seeds it tunes and reports on."""

import importlib
import json
import shutil
from pathlib import Path

import pytest

from examples.worlds import shop


pytestmark = [pytest.mark.trainer, pytest.mark.thorough]


@pytest.fixture(scope="module")
def policy_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shop")
    shop.build_policy(folder, steps=60, batch_size=16)
    return folder


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples")
    return importlib.import_module("agent")


def test_the_example_trains_each_method_once(tmp_path, policy_dir, capsys, example, monkeypatch):
    shutil.copytree(policy_dir, tmp_path / "policy")
    arguments = ["--output_dir", str(tmp_path), "--completions", "128", "--seeds", "3"]
    example.main(arguments)
    rows = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("*/results.json"))]
    assert len(rows) == len(example.METHODS) and {row["samples"] for row in rows} == {128}
    assert len({row["final"]["log_prob_bad"] for row in rows}) == len(example.METHODS)
    assert {row["initial"]["log_prob_bad"] for row in rows} == {shop.evaluate(str(policy_dir)).log_prob_closed}
    printed = capsys.readouterr().out
    assert all(
        f"{row['final']['expected_reward']:.2f} / {row['final']['log_prob_bad']:.1f}" in printed for row in rows
    )
    changed = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    example.main(arguments)
    assert changed == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    fixed, settings, chosen = example.METHODS["GRPO"]
    monkeypatch.setitem(example.METHODS, "GRPO", (fixed | {"beta": 0.1}, settings, chosen))
    with pytest.raises(SystemExit, match="is a run with other fields; name another --output_dir"):
        example.main(arguments)


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
