"""The training commands: what goes to the launcher, what to training, and what their help says."""

import logging
import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from trl import GRPOConfig

from trl_repulse import embedded
from trl_repulse.cli import methods, train
from trl_repulse.cli._fields import keep_writing
from trl_repulse.cli.arguments import ARGUMENTS, TrainingParser
from trl_repulse.cli.main import TRAINING, main


ROOT = Path(__file__).parents[2]
WORKER = "trl_repulse.cli.train"
SETTINGS = {"": "repulse", "_reinforce": "reinforce", "_ppo": "ppo", "_grpo": "grpo"}
SETTINGS |= {"_repulse_ppo": "repulse-ppo", "_repulse_grpo": "repulse-grpo"}


def test_flags_are_sorted(launched, tmp_path):
    (tmp_path / "zero2.yaml").write_text("")
    flags = "--alpha 0 --num_processes=2 --debug underflow_overflow --multi_gpu --main-process-port 29501".split()
    flags += ["--accelerate_config", str(tmp_path / "zero2.yaml"), "--gradient_accumulation_steps", "3"]
    assert main(["repulse-ppo", *flags, "--target_dist_beta", "-1e1"]) == 0
    (args,) = launched
    assert (args.num_processes, args.multi_gpu, args.main_process_port) == (2, True, 29501)
    assert args.config_file == str(tmp_path / "zero2.yaml")
    assert (args.module, args.training_script) == (True, WORKER)
    rest = ["--alpha", "0", "--debug", "underflow_overflow", "--gradient_accumulation_steps", "3"]
    assert args.training_script_args == ["repulse-ppo", *rest, "--target_dist_beta", "-1e1"]


@pytest.mark.parametrize("spelling", [["--config", "FILE"], ["--config=FILE"]])
def test_the_file_may_have_flags_of_the_launcher(launched, tmp_path, spelling):
    path = tmp_path / "own.yaml"
    path.write_text(
        "alpha: 0.5\nnum_processes: 4\nmulti_gpu: true\nuse_fsdp: false\ndebug: underflow_overflow\nmachine_rank: 1\n"
        f"accelerate_config: {path}\n"
    )
    flags = [part.replace("FILE", str(path)) for part in spelling]
    assert main(["repulse", *flags, "--num_processes", "2"]) == 0
    (args,) = launched
    assert (args.num_processes, args.multi_gpu, args.use_fsdp, args.machine_rank) == (2, True, False, 1)
    assert args.config_file == str(path)
    assert args.training_script_args == ["repulse", *flags] and not args.debug


@pytest.mark.parametrize("command", ARGUMENTS)
def test_no_flag_is_both_the_launchers_and_the_methods(command):
    parser = TrainingParser(ARGUMENTS[command], embedded.settings_path(command))
    launchers = train._options(train.launch_command_parser())
    assert {"--num_processes", "--use_deepspeed", "--machine_rank"} <= set(launchers)
    assert not set(launchers) & set(parser._option_string_actions)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--accelerate_config", "none.yaml"], "`none.yaml` does not exist"),
        (["--multi_gpu", "--num_processes", "1"], "at least 2 processes"),
        (["--seed", "1", "--config"], "`--config` needs the path of a YAML file behind it"),
    ],
)
def test_what_cannot_be_launched_is_one_line(capsys, flags, words):
    assert main(["repulse", *flags]) == 1
    error = capsys.readouterr().err
    assert error.startswith("trl-repulse repulse: ") and words in error and error.count("\n") == 1


def test_a_failed_run_is_told_by_the_exit_status(monkeypatch, capsys):
    def fail(args):
        raise subprocess.CalledProcessError(1, "python")

    monkeypatch.setattr(train, "launch_command", fail)
    assert main(["repulse"]) == 1 and capsys.readouterr().err == ""


def listed(command, capsys, *flags):
    """Flags of the help, in order, and their lines."""
    assert main([command, *flags, "--help"]) == 0
    return dict(re.findall(r"^  --(\w+) +(\S.*)$", capsys.readouterr().out, re.MULTILINE))


@pytest.mark.parametrize(
    ("command", "file", "expected"),
    [
        ("repulse", "", {"alpha": "1.0", "potential": "indicator", "alpha_normalization": "none"}),
        ("repulse", "proposal: learned", {"alpha": "0.1", "potential": "tilted", "alpha_normalization": "samples"}),
        ("repulse-ppo", "alpha: 0.3", {"alpha": "0.3", "target_dist_beta": "-10.0", "num_generations": "4"}),
        ("repulse-grpo", "", {"alpha": "0.1", "alpha_normalization": "samples", "logprob_reduction": "mean"}),
        ("repulse-grpo", "loss_type: cispo\nepsilon: 5e-1", {"alpha": "0.05"}),  # which PyYAML reads as text
        ("repulse", "", {"proposal_learning_rate": "as learning_rate", "proposal_temperature": "the run chooses"}),
        (
            "reinforce",
            "",
            {"learning_rate": "by the model's size", "reward_transform": "unset", "baseline": "leave_one_out"},
        ),
    ],
)
def test_the_help_shows_the_values_that_will_apply(capsys, tmp_path, command, file, expected):
    (tmp_path / "own.yaml").write_text(file)
    found = listed(command, capsys, "--config", str(tmp_path / "own.yaml"))
    assert {name: found[name].rpartition(" (")[2] for name in expected} == {k: f"{v})" for k, v in expected.items()}
    shown = {name: line.rpartition(" (")[2] for name, line in found.items()}
    assert not [name for name, value in shown.items() if value == "None)"]


@pytest.mark.parametrize("command", TRAINING)
def test_the_help_fits_two_screens(capsys, command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main([command, "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 100 and max(map(len, lines)) <= 80
    script, config = ARGUMENTS[command]
    own = {each.name for each in (*fields(script), *fields(config))} - {each.name for each in fields(GRPOConfig)}
    listed = [match[1] for line in lines if (match := re.match(r"  --(\w+) +\S", line))]
    assert own <= set(listed) and {"output_dir", "learning_rate", "beta"} <= set(listed)
    assert len(listed) == len(set(listed)) and any("`--help-all`" in line for line in lines)


@pytest.mark.parametrize("flag", ["--help-all", "--help_all"])
def test_the_help_of_all_flags_in_a_script(capsys, flag):
    parser = TrainingParser(ARGUMENTS["ppo"], embedded.settings_path("ppo"))
    with pytest.raises(SystemExit) as exit_:
        parser.parse_args_into_dataclasses([flag])
    out = capsys.readouterr().out
    assert exit_.value.code == 0 and len(out.splitlines()) > 500
    assert out == parser.format_help(all_flags=True) != parser.format_help()


def test_each_command_has_arguments_and_settings():
    assert list(TRAINING) == list(ARGUMENTS)
    for command in TRAINING:
        packaged = Path(embedded.settings_path(command))
        assert packaged.is_file() and packaged.is_relative_to(ROOT / "trl_repulse")


@pytest.mark.parametrize("command", ["reinforce", "ppo", "grpo"])
def test_a_baseline_takes_the_file_of_the_method(tmp_path, monkeypatch, caplog, command):
    """It says what it leaves out; a misspelled name, a flag, and what is of no counterpart are still refused."""
    ran = []
    monkeypatch.setattr(methods, "run", lambda trainer, *given, **more: ran.append(given[1]))
    path = tmp_path / "repulse.yaml"
    settings = {"alpha": 1.0, "proposal": "hot_policy", "beta": 0.3, "bad_reward_threshold": -4.0, "max_steps": 7}
    path.write_text(yaml.safe_dump(settings | {"output_dir": str(tmp_path / "out"), "max_completion_length": 2}))
    methods.train(command, ["--config", str(path)])
    unused = "`alpha`, `bad_reward_threshold`, `proposal`" if command == "grpo" else "`alpha`, `proposal`"
    assert (ran[0].beta, ran[0].max_steps) == (0.3, 7)
    assert f"`{command}` has no negative term, and does not use {unused} of `{path}`." in caplog.messages
    for name in ("alphas", "value_model_path")[: 1 + (command != "ppo")]:
        path.write_text(yaml.safe_dump(settings | {name: 1}))
        with pytest.raises(ValueError, match=f"has `{name}`, which is no argument"):
            methods.train(command, ["--config", str(path)])
    with pytest.raises(ValueError, match="`--alpha` is no argument"):
        methods.train(command, ["--alpha", "1"])


def run(*command, cwd):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=900, env=environment)


@pytest.mark.thorough
def test_the_launcher_imports_neither_trl_nor_the_trainers(tmp_path):
    code = f"import sys, {WORKER}; print(*sys.modules, sep='\\n')"
    imported = set(run(sys.executable, "-c", code, cwd=tmp_path).stdout.split())
    assert "accelerate" in imported and not {"trl", "datasets", "trl_repulse.configs"} & imported


@pytest.mark.thorough
def test_a_run(tmp_path):
    """It prints no notice that is not its own."""
    path = tmp_path / "own.yaml"
    path.write_text(re.sub(r"max_steps: \d+", "max_steps: 2", Path(embedded.settings_path("reinforce")).read_text()))
    command = [sys.executable, "-m", "trl_repulse.cli", "reinforce", "--config", str(path)]
    done = run(*command, "--num_final_samples", "2", "--disable_tqdm", "true", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "REINFORCE, seed 0" in done.stdout and (tmp_path / "reinforce-embedded" / "results.json").exists()
    assert not [each for each in ("FutureWarning", "accelerate launch", "Setting accelerator") if each in done.stderr]


@pytest.mark.thorough
def test_a_configuration_warns_of_no_name_that_trl_uses(tmp_path):
    """TRL's default is set by a name that transformers has deprecated."""
    code = "from trl_repulse import RePULSeConfig; RePULSeConfig(output_dir='x', use_cpu=True, bf16=False)"
    done = run(sys.executable, "-W", "default::FutureWarning", "-c", code, cwd=tmp_path)
    assert done.returncode == 0 and "gradient_checkpointing" not in done.stderr


def test_deepspeed_does_not_say_that_there_is_no_gpu(caplog):
    keep_writing()
    logger = logging.getLogger("DeepSpeed")
    logger.warning("Setting accelerator to CPU. If you have GPU or other accelerator, we were unable to detect it.")
    logger.warning("Another line")
    assert [record.message for record in caplog.records] == ["Another line"]
