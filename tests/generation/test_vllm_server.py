"""The generator and RePULSe on vLLM's own servers, on CPU: `pytest -m vllm tests/generation/test_vllm_server.py`.

Weights go through a store where they would go through NCCL (`tests/vllm_server.py`). Each server takes half a minute to start.
"""

import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import requests
import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM, set_seed

from trl_repulse.generation import VLLMGenerator

from ..distributed_support import free_port, launcher, run
from ..engine.test_distributed import needs_deepspeed
from ..vllm_double import greedy
from ..vllm_server import let_cpu_push
from .test_vllm import alternate, build, shake


pytestmark = [pytest.mark.vllm, pytest.mark.slow]

pytest.importorskip("vllm")

# What TRL starts servers with
OPTIONS = ["--enable-scale-out", "--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1"]
OPTIONS += ["--weight-transfer-config", json.dumps({"backend": "nccl"})]


@pytest.fixture(scope="module")
def model(tmp_path_factory, tokenizer):
    folder = tmp_path_factory.mktemp("model")
    build("llama", tokenizer, folder)
    return str(folder)


@pytest.fixture(scope="module")
def servers(model, tmp_path_factory):
    """Addresses of two servers."""
    environment = os.environ | {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}
    folder = tmp_path_factory.mktemp("servers")
    started, urls = [], []
    try:
        for i in range(2):
            port = free_port()
            command = [sys.executable, "-m", "tests.vllm_server", model, "--host", "127.0.0.1", "--port", str(port)]
            command += ["--dtype", "float32", "--max-model-len", "32", "--enforce-eager", *OPTIONS]
            with (folder / f"{i}.log").open("w") as log:
                process = subprocess.Popen(
                    command, env=environment, cwd=Path(__file__).parents[2], stdout=log, stderr=log
                )
            started.append(process)
            urls.append(f"http://127.0.0.1:{port}")
        for i, url in enumerate(urls):
            wait_for(url, started[i], folder / f"{i}.log")
        yield urls
    finally:
        for process in started:
            process.terminate()
        for process in started:
            process.wait(60)


def wait_for(url, process, log):
    for _ in range(180):
        assert process.poll() is None, log.read_text()[-3000:]
        try:
            if requests.get(f"{url}/health", timeout=2).status_code == 200:
                return
        except requests.ConnectionError:
            pass
        time.sleep(1)
    raise AssertionError(log.read_text()[-3000:])


@pytest.mark.parametrize("number", [1, 2])
def test_servers_sample_from_the_right_weights(tokenizer, model, servers, monkeypatch, number):
    let_cpu_push(monkeypatch)
    models = {
        name: AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32) for name in ("policy", "proposal")
    }
    options = {"mode": "server", "server_base_url": servers[0], "group_port": free_port(), "temperature": 0.0}
    accelerator = Accelerator(cpu=True)
    generator = VLLMGenerator({"policy": models["policy"]}, tokenizer, accelerator, max_completion_length=6, **options)
    theirs = {} if number == 1 else {"server_base_url": servers[1], "group_port": free_port()}
    generator.add("proposal", models["proposal"], **theirs)
    set_seed(0)

    def change(name):
        shake(models[name])
        generator.changed(name)

    def expected(name):
        return [greedy(models[name], ids, 6)[0] for ids in ([3, 12], [4], [5, 13, 14])]

    assert alternate(generator, change, expected, 40) == 40
    assert generator.pushes == {"policy": 20, "proposal": 20}
    assert alternate(generator, lambda name: shake(models[name]), expected, 20, ["policy"]) < 10  # nobody is told


@pytest.mark.trainer
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("processes", "config", "kind", "number"),
    [
        *itertools.product((1, 2), ("cpu_ddp",), ("whole", "adapters"), (1, 2)),
        (2, "fsdp2", "whole", 2),
        pytest.param(2, "zero3", "whole", 1, marks=needs_deepspeed),
        pytest.param(2, "zero3", "adapters", 2, marks=needs_deepspeed),
    ],
)
def test_repulse_samples_from_servers(tokenizer, model, servers, tmp_path, processes, config, kind, number):
    (tmp_path / "model").symlink_to(model)
    urls = ",".join(servers[:number])
    command = [*launcher(processes, config), "-m", "tests.vllm_run", str(tmp_path), kind, urls]
    done = run(command)
    result = json.loads(next(line for line in done.stdout.splitlines() if line.startswith('{"world_size"')))
    assert result["world_size"] == processes and result["servers"] == number
    for prefix in ("", "proposal/"):
        gaps = [log[f"{prefix}sampling/sampling_logp_difference/max"] for log in result["logs"]]
        assert len(gaps) == 3 and max(gaps) < 1e-4
        assert [log[f"{prefix}sampling/weights_version"] for log in result["logs"]] == [1, 2, 3]
