"""What a training command prints at each log, and numbers as reports print them."""

import json
import math

import pytest
from transformers import TrainerState

from examples.worlds import two_tokens
from examples.worlds.exact_tracking import train
from trl_repulse._numbers import format_logs, percent, plain
from trl_repulse.cli.scripts import _print_log


LOGS = {"reward": -1.0333, "bad_fraction": 0.0078125, "kl": None, "completions/mean_length": 2.0, "loss": 3.0}
LINE = "update 4/800 | reward -1.03 | bad 0.781 % | length 2 tokens"


def test_a_line_has_the_main_metrics_with_their_units():
    assert format_logs(LOGS, 4, 800) == LINE
    full = LOGS | {"kl": 0.01234, "entropy": 2.5, "proposal/reward": -5.0, "proposal/ess": 20.36, "step_time": 0.3765}
    assert format_logs(full, 4, 800) == (
        "update 4/800 | reward -1.03 | bad 0.781 % | KL 0.0247 nats/completion | entropy 2.5 nats/token | length 2 tokens | "
        "proposal reward -5 | ESS 20.4 samples | 0.377 s/update"
    )


def test_an_evaluation_says_so():
    logs = {f"eval_{name}": value for name, value in LOGS.items()} | {"epoch": 1.0}
    assert format_logs(logs, 4, 800) == f"evaluation at {LINE}"
    logs = {f"eval_rare_{name}": value for name, value in LOGS.items()} | {"eval_rare_my_reward": 3.0}  # a function's
    assert format_logs(logs, 4, 800) == f"evaluation of rare at {LINE}"


def test_the_summary_at_the_end_is_not_printed():
    assert format_logs({"train_runtime": 3.0, "train_loss": 0.1}, 4, 800) == ""


@pytest.mark.parametrize("is_main", [True, False])
def test_only_the_main_process_prints(capsys, is_main):
    _print_log(None, TrainerState(global_step=4, max_steps=800, is_world_process_zero=is_main), None, LOGS)
    assert capsys.readouterr().out.splitlines() == [LINE] * is_main


@pytest.mark.trainer
@pytest.mark.parametrize("bar", [False, True])
def test_a_run(tmp_path, capsys, bar):
    flags = "--max_completion_length 1 --max_steps 2 --logging_steps 1 --save_strategy steps --save_steps 2 --disable_tqdm".split()
    flags = [*two_tokens.flags("reinforce"), *flags, str(not bar)]
    train("reinforce", [*flags, "--output_dir", str(tmp_path)])
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert len([line for line in lines if line.startswith(("update 1/2 | reward ", "update 2/2 | "))]) == 2
    assert not any(line.startswith("{") for line in lines) and ("2/2 [" in err) == bar
    state = json.loads((tmp_path / "checkpoint-2" / "trainer_state.json").read_text())
    assert {"grad_norm", "num_tokens", "completions/clipped_ratio"} <= set(state["log_history"][0])


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *((0.0, "0"), (-5.25, "-5.25"), (0.00012346, "0.0001235"), (1.2e-5, "1.2e-5"), (1.11e-20, "1.11e-20")),
        *((9999.6, "10,000"), (123456.0, "123,456"), (-9.87654e20, "-9.877e+20")),
        *((math.inf, "inf"), (math.nan, "nan")),
    ],
)
def test_plain(value, text):
    assert plain(value) == text


@pytest.mark.parametrize(
    ("share", "text"),
    [
        *((0.0, "0"), (0.005, "0.5"), (1.11e-22, "<0.001"), (-1e-9, ">-0.001")),
        *((1e-5, "0.001"), (0.2191, "21.9"), (1, "100")),
    ],
)
def test_percent(share, text):
    assert percent(share) == text
