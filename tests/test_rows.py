"""RePULSe on PPO and GRPO: two processes, between which a prompt is cut apart, train what one trains."""

import sys

import pytest
import torch

from .distributed_support import launcher, run
from .rows_run import METHODS


pytestmark = [pytest.mark.distributed, pytest.mark.trainer]
NAMES = ("loss", "proposal/loss", "proposal/ess", "proposal/log_z", "negative/ess", "negative/p_bad", "value/loss")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    ends = []
    for start, rows in (([sys.executable], 8), (launcher(2, None), 4)):
        folder = tmp_path_factory.mktemp("run")
        run([*start, "-m", "tests.rows_run", str(folder), str(rows)])
        ends.append(torch.load(folder / "found.pt", weights_only=False))
    return ends


@pytest.mark.thorough
@pytest.mark.parametrize("method", METHODS)
def test_two_processes_train_what_one_trains(found, method):
    (one, log, processes), (two, other_log, other_processes) = (each[method] for each in found)
    assert (processes, other_processes) == (1, 2)
    for p, q in zip(one, two, strict=True):
        torch.testing.assert_close(p, q, atol=2e-6, rtol=1e-5)
    assert sum(name in log for name in NAMES) > 1
    for name in NAMES:
        assert log.get(name) == pytest.approx(other_log.get(name), abs=1e-4)
    other = next(each for each in METHODS if each != method)
    assert any(not torch.allclose(p, q) for p, q in zip(one, found[1][other][0], strict=False))  # the control
