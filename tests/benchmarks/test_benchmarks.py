"""Benchmarks run, and hold what they say."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ..conftest import without_others


ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.trainer, pytest.mark.thorough]


def test_cost_growth(tmp_path):
    options = "--methods RLOO RePULSe --counts 2 --lengths 16 --new 2 --rounds 1 --steps 2".split()
    command = [sys.executable, "benchmarks/cost_growth.py", *options, "--output_dir", str(tmp_path)]
    subprocess.run(command, check=True, cwd=ROOT)
    points = json.loads((tmp_path / "growth.json").read_text())["points"]
    found = [measured for axis in points.values() for measured in axis.values()]
    assert [set(measured) for measured in found] == [{"RLOO", "RePULSe"}] * 2
    assert all(value > 0 for measured in found for values in measured.values() for value in values)
    assert (tmp_path / "growth.png").stat().st_size > 0


def test_same_bits(tmp_path):
    """Two runs end in the same bits; a coefficient that differs in its last is noticed."""
    command, file = (
        [sys.executable, "-m", "benchmarks.same_bits", "--only", "reinforce, cut", "hot, cut"],
        tmp_path / "before.json",
    )
    subprocess.run([*command, "--write", file], check=True, cwd=ROOT)
    done = subprocess.run([*command, "--compare", file], capture_output=True, text=True, cwd=ROOT)
    assert without_others(done.stdout) == "All 2 runs end in the same bits\n" and done.returncode == 0
    changed = (
        "import sys, torch; from benchmarks import same_bits; from trl_repulse.method import hot_policy as it; plain = it.normalize_weights; "
        "it.normalize_weights = lambda log_w: torch.nextafter(plain(log_w), torch.ones(())); "
        f"sys.argv[1:] = ['--only', 'hot, cut', '--compare', {str(file)!r}]; same_bits.main()"
    )
    done = subprocess.run([sys.executable, "-c", changed], capture_output=True, text=True, cwd=ROOT)
    assert without_others(done.stdout).startswith("hot, cut, tilted: policy; log; first after update 1 in ")
    assert done.returncode == 1 and done.stderr.endswith("1 of 1 runs differ\n")
