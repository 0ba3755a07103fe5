"""`examples/pipeline`: from data to a model card in small; what is done is not repeated; mistakes are one line."""

import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard

from trl_repulse.cli.main import TRAINING, build_parser
from trl_repulse.cli.main import main as command

from ..conftest import load_script


ROOT = Path(__file__).parents[2]
PIPELINE = ROOT / "examples" / "pipeline"
STEPS = ["0_data", "1_sft", "2_reward", "3_train", "4_report", "5_attack", "6_card"]
SMALL = {
    "0_data": {"unseen": 3, "replies": 64, "pairs": 64},
    "1_sft": {"max_steps": 4, "per_device_train_batch_size": 8, "save_steps": 2},
    "2_reward": {"max_steps": 4, "per_device_train_batch_size": 8, "save_steps": 2},
    "3_train": {"max_steps": 2, "num_generations": 2, "per_device_train_batch_size": 4, "save_steps": 1},
    "4_report": {"num_samples": 4},
    "5_attack": {"num_steps": 1, "search_width": 8, "max_targets": 2, "num_samples": 4},
}


def load(name):
    return load_script(PIPELINE / f"{name}.py", f"pipeline_{name}")


@pytest.fixture(scope="module")
def script():
    return load("run")


@pytest.fixture
def configs(tmp_path):
    """The pipeline's YAML files, for a run in small."""
    folder = tmp_path / "configs"
    folder.mkdir()
    for step in STEPS:
        config = yaml.safe_load((PIPELINE / f"{step}.yaml").read_text())
        assert set(SMALL.get(step, {})) - {"max_steps", "max_targets"} <= set(config)
        (folder / f"{step}.yaml").write_text(yaml.safe_dump(config | SMALL.get(step, {})))
    return folder


@pytest.fixture
def pipeline(script, configs, tmp_path):
    def pipeline(*flags):
        script.main(["--configs", str(configs), "--output_dir", str(tmp_path / "out"), *flags])

    return pipeline


@pytest.fixture
def recorded(monkeypatch, script):
    """Commands that are asked for; the one that begins as `recorded.fails` fails."""

    class Recorded(list):
        fails = None

    recorded = Recorded()

    def run(words, folder):
        recorded.append(words)
        if recorded.fails is not None and words[: len(recorded.fails)] == recorded.fails:
            sys.exit("error: failed")

    monkeypatch.setattr(script, "run", run)
    return recorded


def test_all_steps_and_none_twice(pipeline, recorded, capsys):
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)]
    pipeline()
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)] == handlers  # its caller's
    assert [" ".join(words[:2]) for words in recorded[1:4]] == ["trl sft", "trl reward", "trl-repulse repulse"]
    assert [words[1] for words in recorded[4:]] == ["evaluate", "evaluate", "gcg", "gcg", "evaluate", "gcg-report"]
    recorded.clear()
    pipeline()
    assert not recorded and capsys.readouterr().out.splitlines()[-7:] == [f"{step}: done" for step in STEPS]


def test_a_run_that_was_interrupted_goes_on(pipeline, recorded, tmp_path):
    recorded.fails = ["trl-repulse", "repulse"]
    with pytest.raises(SystemExit, match="failed"):
        pipeline()
    assert len(recorded) == 4 and "--resume_from_checkpoint" not in recorded[-1]
    for number, state in ((1, "{}"), (2, "{}"), (10, '{"log_hi'), (11, None)):  # the last two are not whole
        (tmp_path / "out" / "3_train" / f"checkpoint-{number}").mkdir(parents=True)
        if state is not None:
            (tmp_path / "out" / "3_train" / f"checkpoint-{number}" / "trainer_state.json").write_text(state)
    recorded.clear()
    with pytest.raises(SystemExit, match="failed"):
        pipeline()
    (again,) = recorded
    assert again[-2:] == ["--resume_from_checkpoint", str(tmp_path / "out" / "3_train" / "checkpoint-2")]
    recorded.clear()
    recorded.fails = ["trl-repulse", "gcg"]
    with pytest.raises(SystemExit, match="failed"):
        pipeline()
    assert [words[1] for words in recorded] == ["repulse", "evaluate", "evaluate", "gcg"]


def test_steps_that_are_asked_for(pipeline, recorded, tmp_path, configs):
    with pytest.raises(SystemExit, match="0_data comes before 3_train and is not done"):
        pipeline("--only", "3_train")
    pipeline()
    recorded.clear()
    (tmp_path / "out" / "3_train" / "checkpoint-1").mkdir(parents=True)
    (tmp_path / "out" / "1_sft").mkdir()
    pipeline("--from", "3_train", "--only", "3_train", "--method", "ppo")
    assert [words[:2] for words in recorded] == [["trl-repulse", "ppo"]]
    assert not (tmp_path / "out" / "3_train").exists() and (tmp_path / "out" / "1_sft").exists()
    recorded.clear()
    (configs / "5_attack.yaml").unlink()
    pipeline("--method", "ppo")
    assert [words[1] for words in recorded] == ["evaluate", "evaluate", "evaluate"]


def test_a_refused_start_removes_nothing(pipeline, recorded, tmp_path):
    pipeline("--method", "ppo")
    (tmp_path / "out" / "4_report").mkdir()
    before = sorted((tmp_path / "out").rglob("*"))
    with pytest.raises(SystemExit, match="3_train was begun with another"):
        pipeline("--from", "4_report")  # without `--method ppo`
    with pytest.raises(SystemExit, match="`--from 1_sft` and `--only 3_train` name two steps"):
        pipeline("--from", "1_sft", "--only", "3_train", "--method", "ppo")
    assert sorted((tmp_path / "out").rglob("*")) == before
    pipeline("--from", "4_report", "--method", "ppo")
    assert not (tmp_path / "out" / "4_report").exists()


def test_mistakes_are_one_line(pipeline, recorded, configs):
    for flag in ("--from", "--only"):
        with pytest.raises(SystemExit, match="error: there is no step `train` in .*; the steps are 0_data, 1_sft"):
            pipeline(flag, "train")
    pipeline()
    with pytest.raises(SystemExit, match="error: 3_train was begun with another `3_train.yaml` or `--method`"):
        pipeline("--method", "reinforce")
    with open(configs / "4_report.yaml", "a") as file:
        file.write("confidence: 0.9\n")
    with pytest.raises(SystemExit, match="4_report was begun with another .* anew with `--from 4_report`"):
        pipeline()
    pipeline("--only", "3_train")  # before it
    for text, words in (
        ("seed: 0\n", "has no `output_dir`; add it"),
        ("output_dir: mine\n", "has another `output_dir`; write"),
        ("a: [\n", "is no YAML, correct it"),
    ):
        (configs / "3_train.yaml").write_text(text)
        with pytest.raises(SystemExit, match=f"error: `.*3_train.yaml` {words}"):
            pipeline("--from", "3_train")
    (configs / "3_train.yaml").unlink()
    with pytest.raises(SystemExit, match="there is no file `.*3_train.yaml`; copy the YAML files of"):
        pipeline()


def test_the_files_are_those_of_the_commands():
    """Each has arguments that its command takes."""
    for step, name in (("4_report", "evaluate"), ("6_card", "evaluate")):
        build_parser(name, PIPELINE / f"{step}.yaml").parse_args([name])
    report = build_parser("evaluate", PIPELINE / "4_report.yaml").parse_args(["evaluate", "elsewhere"])
    assert report.folders == [Path("elsewhere")] and report.thresholds == [-4.0]


@pytest.fixture
def in_process(monkeypatch, script):
    """Runs the commands of a pipeline here, without a launcher; counts them."""
    from trl_repulse.cli.methods import train

    ran = []

    def run(words, folder):
        ran.append(words)
        monkeypatch.chdir(folder)
        program, name, *rest = words
        if program == "data.py":
            monkeypatch.setattr(sys, "argv", words)
            load("data").main()
        elif program == "trl":
            module = importlib.import_module(f"trl.scripts.{name}")
            module.main(*module.make_parser().parse_args_and_config(rest, fail_with_unknown_args=False))
        elif name in TRAINING:
            train(name, rest, ["num_processes"])
        else:
            assert command(words[1:]) == 0

    monkeypatch.setattr(script, "run", run)
    return ran


@pytest.mark.trainer
@pytest.mark.thorough
def test_the_pipeline_in_small(pipeline, in_process, tmp_path, capsys):
    pipeline()
    out = tmp_path / "out"
    for path in ("1_sft/model.safetensors", "2_reward/model.safetensors", "3_train/adapter_config.json"):
        assert (out / path).is_file()
    for phase in ("before", "after"):
        report = json.loads((out / "4_report" / f"{phase}.json").read_text())
        assert report["prompts"] == 3 and "P(r < -4)" in report["overall"]
        assert len(list((out / "5_attack" / phase).glob("target-*.json"))) == 2
    card = ModelCard.load(out / "3_train" / "README.md")
    assert {"trl", "repulse"} <= set(card.data.tags) and card.data.library_name == "peft"
    assert "### Held-out samples" in card.text and "| P(r < -4) |" in card.text and "attack success" in card.text
    assert card.text.index("### Hyper-parameters") < card.text.index("### Held-out samples")
    metrics = {each.metric_name: each.metric_value for each in card.data.eval_results}
    assert metrics["P(r < -4)"] == pytest.approx(report["overall"]["P(r < -4)"]["value"], rel=1e-5)
    assert "attack success (score < -4.0), after" in metrics
    written = (out / "3_train" / "README.md").read_text()
    in_process.clear()
    pipeline("--from", "6_card")  # once more: the same card
    assert len(in_process) == 2 and (out / "3_train" / "README.md").read_text() == written


@pytest.mark.slow
def test_a_pipeline_that_is_killed_goes_on(configs, tmp_path):
    """In processes of its own; ended in the midst of SFT, whose processes end with it."""
    config = yaml.safe_load((configs / "1_sft.yaml").read_text())
    (configs / "1_sft.yaml").write_text(yaml.safe_dump(config | {"max_steps": 50}))
    words = [sys.executable, str(PIPELINE / "run.py"), "--configs", str(configs)]
    words += ["--output_dir", str(tmp_path / "out")]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    process, until = subprocess.Popen(words, env=environment), time.monotonic() + 600
    try:
        while not list(tmp_path.glob("out/1_sft/checkpoint-1?/trainer_state.json")):
            assert process.poll() is None and time.monotonic() < until
            time.sleep(0.05)
    finally:
        process.terminate()  # SIGTERM
    assert process.wait(timeout=30) == 143
    done = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("out/done/0_data.json")}
    assert done and not (tmp_path / "out" / "1_sft" / "model.safetensors").exists()
    shutil.copytree(tmp_path / "out" / "1_sft", tmp_path / "stopped")
    time.sleep(2)
    folders = (tmp_path / "stopped", tmp_path / "out" / "1_sft")
    stopped, now = ({path.name for path in folder.glob("checkpoint-*")} for folder in folders)
    assert stopped == now  # nothing goes on behind its back
    again = subprocess.run([*words, "--only", "1_sft"], env=environment, capture_output=True, text=True, timeout=600)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "0_data: done" in again.stdout and "--resume_from_checkpoint" in again.stdout
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("out/done/0_data.json")} == done
    assert (tmp_path / "out" / "1_sft" / "model.safetensors").is_file() and "2_reward" not in again.stdout
