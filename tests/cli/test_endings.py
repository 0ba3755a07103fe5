"""How a run ends: at its last update, by Ctrl-C, on a full disk; and the folder that it leaves."""

import functools
import subprocess

import pytest
import torch
from safetensors import SafetensorError
from trl import GRPOTrainer

from trl_repulse.cli import train as launcher
from trl_repulse.cli.main import main
from trl_repulse.cli.methods import train
from trl_repulse.cli.scripts import main_or_exit
from trl_repulse.engine.diagnosis import load_log

from ..conftest import about_the_cpu


pytestmark = [pytest.mark.trainer, about_the_cpu]


def command(name, folder, *flags):
    """What a short run with a checkpoint at each update ends with."""
    given = ["--max_steps", "3", "--save_strategy", "steps", "--save_steps", "1", "--num_table_completions", "0"]
    with pytest.raises(SystemExit) as exit_:
        main_or_exit(lambda: train(name, [*given, "--output_dir", str(folder), *flags]))
    assert "\n" not in exit_.value.code
    return exit_.value.code


def third_step_fails(monkeypatch, error):
    step = GRPOTrainer.training_step

    @functools.wraps(step)  # whose signature is checked
    def training_step(trainer, *args, **kwargs):
        if trainer.state.global_step == 2:
            raise error
        return step(trainer, *args, **kwargs)

    monkeypatch.setattr(GRPOTrainer, "training_step", training_step)


@pytest.mark.parametrize("name", ["reinforce", "grpo"])
def test_an_interrupted_run_says_how_to_go_on(tmp_path, monkeypatch, name):
    third_step_fails(monkeypatch, KeyboardInterrupt())
    message = command(name, tmp_path)
    assert message.startswith("Interrupted. ") and f"goes on from {tmp_path / 'checkpoint-2'}" in message
    assert "`--resume_from_checkpoint true`" in message
    assert "has to start anew" in command(name, tmp_path / "none", "--save_strategy", "no")


def test_an_interrupted_launch_is_no_traceback(monkeypatch, capsys):
    def interrupted(args):
        raise KeyboardInterrupt

    monkeypatch.setattr(launcher, "launch_command", interrupted)
    child = subprocess.Popen(["sleep", "0.2"])
    assert main(["repulse"]) == 130 and child.poll() is not None and capsys.readouterr().err == ""


TORCH = RuntimeError("[enforce fail at inline_container.cc:668] . unexpected pos 64 vs 0")
SAFETENSORS = SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("reinforce", TORCH),
        ("grpo", TORCH),
        ("reinforce", SAFETENSORS),
        ("grpo", OSError(28, "No space left on device")),
    ],
    ids=["torch", "torch-grpo", "safetensors", "python-grpo"],
)
def test_a_full_disk_is_one_sentence(tmp_path, monkeypatch, name, error):
    save = torch.save

    def full(what, file, *args, **kwargs):
        if "checkpoint-2" in str(file):
            raise error
        return save(what, file, *args, **kwargs)

    monkeypatch.setattr(torch, "save", full)
    message = command(name, tmp_path)
    assert message.startswith(f"error: The disk of `output_dir={str(tmp_path)!r}` is full")
    assert f"goes on from {tmp_path / 'checkpoint-1'}; the updates after it are lost" in message


def test_another_error_is_not_blamed_on_the_disk(tmp_path, monkeypatch):
    third_step_fails(monkeypatch, OSError("the cable is out"))
    assert command("reinforce", tmp_path) == "error: the cable is out"


def test_a_trainer_that_saves_nothing_leaves_its_log(make):
    trainer = make(save_strategy="no", max_steps=1)
    trainer.train()
    _, history, _ = load_log(trainer.args.output_dir)
    assert any("reward" in entry for entry in history)


def test_a_trainer_in_a_used_folder_says_so(make, caplog):
    saved = {"save_strategy": "steps", "save_steps": 1}
    make(max_steps=1, **saved).train()
    make(max_steps=2, **saved).train(resume_from_checkpoint=True)
    assert "holds a run" not in caplog.text
    trainer = make(max_steps=1)
    trainer.train()
    assert caplog.text.count("holds a run or a model, whose files this one writes over") == 1
    trainer.train()
    assert caplog.text.count("holds a run") == 1  # its own


def test_a_folder_with_a_model_is_not_written_over_without_a_word(make, caplog, tmp_path):
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "config.json").write_text("{}")
    make(max_steps=1, output_dir=str(tmp_path / "own")).train()
    assert "holds a run or a model" in caplog.text
