"""Two processes train what one trains: prompts whole on a process, or cut apart over processes and micro-batches.

Whatever the engine: plain data parallelism, DeepSpeed ZeRO-1, 2 and 3. Offloading, several machines and GPUs are not run.
"""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerate.commands.config.config_args import load_config_from_file
from transformers import AutoModelForCausalLM
from transformers.integrations import is_deepspeed_available

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


ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "accelerate_configs"
needs_deepspeed = pytest.mark.skipif(
    not is_deepspeed_available(), reason="needs deepspeed: pip install -e '.[deepspeed]'"
)


def start(command, **environment):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} | environment
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def launcher(processes, config):
    if config is None:
        return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    options = ["--config_file", str(CONFIGS / f"{config}.yaml"), "--num_processes", str(processes)]
    return [sys.executable, "-m", "accelerate.commands.launch", *options]


@pytest.fixture(scope="module")
def launch(tmp_path_factory, tokenizer):
    @functools.cache
    def launch(processes, batch_size, accumulation, variant="leave one out", script="distributed_run", config=None):
        folder = tmp_path_factory.mktemp("run")
        build_model("gpt2", len(tokenizer), seed=2).eval().save_pretrained(folder / "reference")
        command = launcher(processes, config)
        start([*command, "-m", f"tests.{script}", str(folder), str(batch_size), str(accumulation), variant])
        result = json.loads((folder / "result.json").read_text())
        assert result["world_size"] == processes
        stage = int(config.removeprefix("zero")) if (config or "").startswith("zero") else None
        assert result["stages"] == [stage, stage]
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


@needs_deepspeed
@pytest.mark.invariant
@pytest.mark.parametrize(
    ("config", "batch_size", "accumulation"),
    [
        ("zero2", 1, 4),
        ("zero3", 1, 4),
        pytest.param("zero1", 2, 2, marks=pytest.mark.slow),
        pytest.param("zero2", 4, 1, marks=pytest.mark.slow),
        pytest.param("zero3", 4, 1, marks=pytest.mark.slow),
    ],
)
def test_two_processes_of_deepspeed_equal_one(launch, config, batch_size, accumulation):
    assert_equal(launch(1, 8, 1), launch(2, batch_size, accumulation, config=config), METRICS)


@pytest.mark.parametrize(("config", "processes"), [("single_gpu", 1), ("cpu_ddp", 2)])
def test_configurations_of_the_launcher_start_what_they_say(launch, config, processes):
    result = launch(processes, 8 // processes, 1, config=config)  # asserts the world size
    assert_equal(launch(1, 8, 1), result, METRICS)


@pytest.mark.parametrize("path", sorted(CONFIGS.iterdir()), ids=lambda path: path.stem)
def test_configurations_of_the_launcher_are_read(path):
    config = load_config_from_file(str(path))
    assert (
        config.mixed_precision == "no"
    )  # the trainer's configuration decides; the launcher's would win over `bf16=False`
    assert "MULTI_CPU" not in path.read_text().replace("`distributed_type: MULTI_CPU`", "")


@pytest.mark.parametrize("config", ["cpu_ddp", pytest.param("zero3", marks=[needs_deepspeed, pytest.mark.slow])])
@pytest.mark.parametrize("method", ["checkpoints", "checkpoints in a block"])
def test_a_checkpoint_of_two_processes_resumes_both_models(tmp_path, tokenizer, config, method):
    """Four updates in one go, and two and two: the same two models, to the last bit."""
    build_model("gpt2", len(tokenizer), seed=2).eval().save_pretrained(tmp_path / "reference")
    command = [*launcher(2, config), "-m", "tests.distributed_run", str(tmp_path), "4", "1", method]
    start(command)
    whole = json.loads((tmp_path / "result.json").read_text())["parameters"]
    start([*command, str(tmp_path / "run" / "checkpoint-2")])
    assert json.loads((tmp_path / "result.json").read_text())["parameters"] == whole
    proposal = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "proposal")
    saved = torch.cat([p.detach().flatten() for p in proposal.parameters()])
    assert torch.equal(saved, torch.tensor(whole["proposal"]))


@needs_deepspeed
@pytest.mark.slow
@pytest.mark.parametrize("config", ["zero2", "zero3"])
def test_the_example_runs_under_deepspeed(tmp_path, config):
    command = [
        *launcher(2, config),
        "-m",
        "tests.distributed_example",
        "examples/repulse.py",
        "--use_cpu",
        "true",
        "--max_steps",
        "5",
    ]
    start([*command, "--per_device_train_batch_size", "64", "--output_dir", str(tmp_path)])
    assert json.loads((tmp_path / "results.json").read_text())["policy_updates"] == 5
    assert (tmp_path / "proposal" / "model.safetensors").exists()


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


def test_groups_normalised_within_a_process_would_be_noticed(launch):
    """Each of two processes holds two of a prompt's four completions; the mistake compares these with one another alone."""
    alone = launch(1, 4, 1)
    assert_equal(alone, launch(2, 2, 1), METRICS)
    with pytest.raises(AssertionError):
        assert_equal(alone, launch(2, 2, 1, "within a process"), METRICS)


def test_two_processes_of_ppo_equal_one(launch, tokenizer, tmp_path):
    """Whitening, explained variance and both losses run over all processes' tokens, of which each has its own number."""
    build_model("gpt2", len(tokenizer), seed=2).eval().save_pretrained(tmp_path / "reference")
    distributed_ppo_run.main(str(tmp_path), "8", "1", "plain")
    alone = json.loads((tmp_path / "result.json").read_text())
    assert alone["world_size"] == 1 and alone["logs"][1]["value/clip_fraction"] > 0
    assert_equal(alone, launch(2, 2, 2, "plain", script="distributed_ppo_run"), PPO_METRICS)


@needs_deepspeed
@pytest.mark.invariant
@pytest.mark.slow
@pytest.mark.parametrize("config", ["zero2", "zero3"])
def test_two_processes_of_ppo_under_deepspeed_equal_one(launch, config):
    alone = launch(1, 8, 1, "plain", script="distributed_ppo_run")
    assert_equal(alone, launch(2, 2, 2, "plain", script="distributed_ppo_run", config=config), PPO_METRICS)
