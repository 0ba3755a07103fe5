"""Two processes train what one trains: prompts whole on a process, or cut apart over processes and micro-batches."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from . import distributed_ppo_run
from .conftest import build_model


pytestmark = [pytest.mark.distributed, pytest.mark.trainer]

METRICS = (
    "loss",
    "grad_norm",
    "kl",
    "return",
    "proposal/loss",
    "proposal/grad_norm",
    "proposal/ess",
    "proposal/log_z",
)
PPO_METRICS = (
    "loss",
    "grad_norm",
    "kl",
    "return",
    "approx_kl",
    "value/loss",
    "value/grad_norm",
    "value/clip_fraction",
    "value/explained_variance",
)


@pytest.fixture(scope="module")
def launch(tmp_path_factory, tokenizer):
    @functools.cache
    def launch(processes, batch_size, accumulation, variant="leave one out", script="distributed_run"):
        folder = tmp_path_factory.mktemp("run")
        build_model("gpt2", len(tokenizer), seed=2).eval().save_pretrained(folder / "reference")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
        command += ["-m", f"tests.{script}", str(folder), str(batch_size), str(accumulation), variant]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        root = Path(__file__).parents[1]
        done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-3000:]
        result = json.loads((folder / "result.json").read_text())
        assert result["world_size"] == processes
        return result

    return launch


@pytest.mark.parametrize(
    ("batch_size", "accumulation", "method"),
    [
        (4, 1, "leave one out"),
        (2, 2, "leave one out"),
        (4, 1, "REINFORCE++"),
        (4, 1, "REINFORCE++-baseline"),
        (2, 2, "REINFORCE++-baseline"),
    ],
)
def test_two_processes_equal_one(launch, batch_size, accumulation, method):
    assert_equal(launch(1, 8, 1, method), launch(2, batch_size, accumulation, method), METRICS)


@pytest.mark.parametrize(
    ("batch_size", "accumulation", "method"),
    [(4, 1, "adapters"), (2, 2, "adapters, checkpointed"), (4, 1, "adapters, after")],
)
def test_two_processes_of_two_adapters_equal_one(launch, batch_size, accumulation, method):
    """The engine holds one of them alone: TRL looks for unused parameters there unless told not to, and finds none."""
    assert_equal(launch(1, 8, 1, method), launch(2, batch_size, accumulation, method), METRICS)


def assert_equal(alone, together, metrics):
    assert set(metrics) <= set(alone["logs"][0])
    for name, expected in alone["parameters"].items():
        actual = torch.tensor(together["parameters"][name])
        torch.testing.assert_close(actual, torch.tensor(expected), rtol=1e-4, atol=1e-5)
    for one, two in zip(alone["logs"], together["logs"], strict=True):
        expected = {name: one[name] for name in metrics if name in one}
        assert {name: two[name] for name in expected} == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_the_comparison_can_fail(launch):
    plain, normalized = launch(1, 8, 1), launch(1, 8, 1, "REINFORCE++-baseline")
    assert plain["logs"][0]["loss"] != pytest.approx(normalized["logs"][0]["loss"], rel=1e-4)


def test_two_processes_of_ppo_equal_one(launch, tokenizer, tmp_path):
    """Whitening, explained variance and both losses run over all processes' tokens, of which each has its own number."""
    build_model("gpt2", len(tokenizer), seed=2).eval().save_pretrained(tmp_path / "reference")
    distributed_ppo_run.main(str(tmp_path), "8", "1", "plain")
    alone = json.loads((tmp_path / "result.json").read_text())
    assert alone["world_size"] == 1 and alone["logs"][1]["value/clip_fraction"] > 0
    assert_equal(alone, launch(2, 2, 2, "plain", script="distributed_ppo_run"), PPO_METRICS)
