"""How a run ends: at its last update, by Ctrl-C, on a full disk; and the folder that it leaves."""

import contextlib
import functools
import logging
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import psutil
import pytest
import torch
from safetensors import SafetensorError
from trl import GRPOTrainer

from trl_repulse import ReinforceTrainer
from trl_repulse.cli import train as launcher
from trl_repulse.cli.main import main
from trl_repulse.cli.methods import train
from trl_repulse.cli.scripts import main_or_exit

from ..conftest import about_the_cpu


pytestmark = [pytest.mark.trainer, about_the_cpu]


@pytest.fixture(autouse=True)
def default_signals():
    """Signals as a new process has them; libraries that other tests use may have taken them."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signals_are_passed_on_and_named(monkeypatch, capsys, number):
    def launch(args):  # as `accelerate launch` runs a single process
        assert os.environ[launcher._LAUNCHER] == str(os.getpid())
        child = subprocess.Popen(["sleep", "30"])
        signal.getsignal(number)(number, None)
        raise subprocess.CalledProcessError(child.wait(), "python")

    monkeypatch.setattr(launcher, "launch_command", launch)
    assert main(["repulse"]) == 128 + number and signal.getsignal(number) is signal.SIG_DFL
    assert capsys.readouterr().err == f"trl-repulse repulse: training was ended by the signal {number.name}.\n"
    assert launcher._LAUNCHER not in os.environ


def test_a_signal_before_there_is_a_process_ends_the_launcher(monkeypatch):
    monkeypatch.setattr(launcher.psutil.Process, "children", lambda process: [])
    monkeypatch.setattr(launcher, "launch_command", lambda args: signal.getsignal(signal.SIGTERM)(15, None))
    with pytest.raises(SystemExit, match="143"):
        main(["repulse"])


class OneOfTwo(launcher.ChildFailedError):
    """What torch raises if the first of several processes is killed, and the others are then told to end."""

    def __init__(self):
        pass

    def get_first_failure(self):
        return 0, SimpleNamespace(exitcode=-9)


@pytest.mark.parametrize("error", [subprocess.CalledProcessError(-9, "python"), OneOfTwo()])
def test_a_run_that_the_system_kills_is_told_with_the_reason(monkeypatch, capsys, error):
    def killed(args):
        raise error

    monkeypatch.setattr(launcher, "launch_command", killed)
    assert main(["repulse"]) == 137
    said = capsys.readouterr().err
    assert "the signal SIGKILL, which is what the system does when memory is full; lower `per_device_train" in said


@pytest.mark.parametrize("ended", ["launcher", "parent"])
def test_training_ends_with_its_launcher(monkeypatch, ended):
    """At its third look, either the launcher is gone, or this process has another parent."""
    monkeypatch.setenv(launcher._LAUNCHER, "7")
    sent, looks = [], iter([True, True, ended != "launcher"])
    parents = iter([7, 7, 7, 7 if ended == "launcher" else 1])
    monkeypatch.setattr(launcher.os, "getppid", lambda: next(parents))
    monkeypatch.setattr(launcher.psutil, "pid_exists", lambda pid: pid == 7 and next(looks))
    monkeypatch.setattr(launcher.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(launcher.os, "kill", lambda *what: sent.append(what))
    launcher._end_with_launcher()
    assert sent == [(os.getpid(), signal.SIGKILL)] and launcher._LAUNCHER not in os.environ


def trains(process):
    """Whether a process is the one that trains. Others end at once, and then have no command line."""
    with contextlib.suppress(psutil.Error):
        return "trl_repulse.cli.train" in process.cmdline()
    return False


@pytest.mark.thorough
def test_no_process_survives_its_launcher(tmp_path):
    command = [sys.executable, "-m", "trl_repulse.cli", "reinforce", "--output_dir", str(tmp_path)]
    launched = psutil.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not (children := [child for child in launched.children() if trains(child)]):
        time.sleep(0.1)
    launched.kill()
    assert launched.wait() == -signal.SIGKILL
    assert not psutil.wait_procs(children, timeout=60)[1]


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


def test_a_trainer_in_a_used_folder_says_so(make, caplog):
    saved = {"save_strategy": "steps", "save_steps": 1}
    make(max_steps=1, **saved).train()
    make(max_steps=2, **saved).train(resume_from_checkpoint=True)
    assert "holds a run" not in caplog.text
    trainer = make(max_steps=1)
    trainer.train()
    assert caplog.text.count("holds a run or a model, and this run overwrites its files") == 1
    trainer.train()
    assert caplog.text.count("holds a run") == 1  # its own


def test_resuming_says_from_where_and_misses_no_tied_weights(make, caplog, monkeypatch, tmp_path):
    for name in ("trl_repulse.trainers.base_trainer", "transformers"):
        monkeypatch.setattr(logging.getLogger(name), "propagate", True)
        caplog.set_level(logging.INFO, logger=name)
    make(ReinforceTrainer, max_steps=1, save_strategy="steps", save_steps=1).train()
    trainer = make(ReinforceTrainer, max_steps=2)
    assert trainer.model.lm_head.weight is trainer.model.transformer.wte.weight
    caplog.clear()
    trainer.train(resume_from_checkpoint=True)
    said = [record.getMessage() for record in caplog.records]
    assert [each.removeprefix("[RANK 0] ") for each in said if "goes on" in each] == [
        f"Training goes on from {tmp_path / 'out' / 'checkpoint-1'}."
    ]
    assert not any("missing keys" in each for each in said)
    loaded = SimpleNamespace(missing_keys=["lm_head.weight", "a.weight"], unexpected_keys=[])
    trainer._issue_warnings_after_load(loaded)
    assert "missing keys in the checkpoint model loaded: ['a.weight']" in caplog.records[-1].getMessage()
