"""RePULSe on PPO and GRPO: two processes, between which a prompt is cut apart, train what one trains, whatever cuts models apart."""

import functools

import pytest
import torch

from ..distributed_support import launcher, run_forked
from ..rows_run import METHODS
from .test_distributed import needs_deepspeed


pytestmark = [pytest.mark.distributed, pytest.mark.trainer]
NAMES = ("loss", "proposal/loss", "proposal/ess", "proposal/log_z", "negative/ess", "negative/p_bad", "value/loss")


@pytest.fixture(scope="module")
def launch(tmp_path_factory):
    @functools.cache
    def launch(processes, config=None):
        folder = tmp_path_factory.mktemp("run")
        run_forked([*launcher(processes, config), "-m", "tests.rows_run", str(folder), str(12 // processes)])
        return torch.load(folder / "found.pt", weights_only=False)

    return launch


@pytest.mark.thorough
@pytest.mark.invariant
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "config",
    [
        None,
        *(pytest.param(name, marks=[needs_deepspeed, pytest.mark.slow]) for name in ("zero2", "zero3")),
        pytest.param("fsdp2", marks=pytest.mark.slow),
    ],
)
def test_two_processes_train_what_one_trains(launch, config, method):
    alone = launch(1)
    one, log, processes, _, shared = alone[method]
    two, other_log, other_processes, engines, others_shared = launch(2, config)[method]
    assert (processes, other_processes, engines) == (1, 2, {config})
    assert min(shared) > 1 and min(others_shared) > 1
    for p, q in zip(one, two, strict=True):
        torch.testing.assert_close(p, q, atol=2e-6, rtol=1e-5)
    assert sum(name in log for name in NAMES) > 1
    for name in NAMES:
        assert log.get(name) == pytest.approx(other_log.get(name), abs=1e-4)
    other = next(each for each in METHODS if each != method)
    assert any(not torch.allclose(p, q) for p, q in zip(one, alone[other][0], strict=False))  # the control
