"""What a release needs: the wheel in an environment of its own, the citation, the workflows, the script for `uv run`."""

import os
import re
import runpy
import subprocess
import sys
import sysconfig
import tomllib
import venv
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from . import test_package


ROOT = Path(__file__).parents[2]
wheel = test_package.wheel
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def run(*command, cwd=None):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # no checkout
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=600)


@pytest.mark.slow
def test_an_installed_wheel_runs_the_first_command(wheel, tmp_path):
    """Dependencies come from this environment; the package does not."""
    venv.create(tmp_path / "clean", with_pip=True)
    python = tmp_path / "clean" / "bin" / "python"
    installed = run(python, "-m", "pip", "install", "--no-deps", "--no-index", wheel, cwd=tmp_path)
    assert installed.returncode == 0, installed.stderr
    (packages,) = (tmp_path / "clean" / "lib").glob("python*/site-packages")
    others = sysconfig.get_path("purelib")
    (packages / "others.pth").write_text(f"{others}\n")  # without the `.pth` files there: no editable install
    where = run(python, "-c", "import trl_repulse; print(trl_repulse.__file__)", cwd=tmp_path)
    assert where.stdout.startswith(str(packages)), where.stdout + where.stderr
    script = tmp_path / "clean" / "bin" / "trl-repulse"
    assert run(script, "--version", cwd=tmp_path).stdout == f"trl-repulse {PROJECT['version']}\n"
    done = run(script, "repulse", "--max_steps", "2", "--num_final_samples", "2", cwd=tmp_path)
    assert done.returncode == 0 and "P(bad)" in done.stdout, done.stderr
    assert (tmp_path / "repulse-embedded" / "model.safetensors").is_file()


def test_citation():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= set(citation) and citation["cff-version"] == "1.2.0"
    assert citation["license"] == PROJECT["license"] and "version" not in citation  # pyproject.toml has it


def test_workflows_use_files_and_extras_that_exist():
    files = sorted((ROOT / ".github").rglob("*.yml"))
    assert len(files) >= 6
    for path in files:
        assert yaml.safe_load(path.read_text(encoding="utf-8")), path
    text = "".join(path.read_text(encoding="utf-8") for path in files)
    extras = {name for names in re.findall(r"-e \"\.\[([\w,]+)\]", text) for name in names.split(",")}
    assert extras and extras <= set(PROJECT["optional-dependencies"])
    tested = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text())["jobs"]["tests"]["strategy"]["matrix"]
    (trl,) = (r for r in map(Requirement, PROJECT["dependencies"]) if r.name == "trl")
    assert all(version in trl.specifier for version in tested["trl"])


def test_the_dockerfile_copies_what_the_build_needs():
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = re.findall(r"^COPY (.+) \S+$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert {name for line in copied for name in line.split()} == allowed
    assert all((ROOT / name).exists() for name in allowed)


def test_the_script_for_uv_names_its_dependencies(monkeypatch, capsys):
    path = ROOT / "examples" / "gpu_job.py"
    block = re.search(r"^# /// script\n((?:#.*\n)+?)# ///$", path.read_text(encoding="utf-8"), re.MULTILINE)
    settings = tomllib.loads("".join(line[1:].strip() + "\n" for line in block[1].splitlines()))
    assert settings["requires-python"] == PROJECT["requires-python"]
    assert [Requirement(line).name for line in settings["dependencies"]] == ["trl-repulse"]
    monkeypatch.setattr(sys, "argv", [str(path), "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(path), run_name="__main__")
    assert ended.value.code == 0 and "--push_to" in capsys.readouterr().out


@pytest.mark.trainer
@pytest.mark.parametrize("flags", [[], ["--load_in_4bit"]], ids=["LoRA", "QLoRA"])
def test_the_script_for_uv_trains_an_adapter(tmp_path, monkeypatch, flags):
    from trl_repulse import embedded

    if flags:
        pytest.importorskip("bitsandbytes")
    monkeypatch.chdir(tmp_path)
    flags += ["--model", embedded.policy_path(), "--reward", embedded.reward_model_path(), "--use_cpu"]
    flags += ["--prompts", embedded.prompts_path(), *"--max_steps 1 --max_completion_length 4 --threshold -4".split()]
    monkeypatch.setattr(sys, "argv", ["gpu_job.py", *flags])
    runpy.run_path(str(ROOT / "examples" / "gpu_job.py"), run_name="__main__")
    assert (tmp_path / "out" / "adapter_model.safetensors").is_file()
