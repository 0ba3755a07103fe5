"""What a training command prints at each log."""

import json

import pytest
from transformers import PrinterCallback, ProgressCallback, TrainerControl, TrainerState

from trl_repulse.methods import train
from trl_repulse.terse_log import TerseLogCallback, TerseProgressCallback, format_logs, use_terse_log


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


@pytest.mark.parametrize("callback", [TerseLogCallback, TerseProgressCallback])
@pytest.mark.parametrize("is_main", [True, False])
def test_only_the_main_process_prints(capsys, callback, is_main):
    state = TrainerState(global_step=4, max_steps=800, is_world_process_zero=is_main)
    callback = callback()
    for event in ("on_train_begin", "on_log", "on_train_end"):
        getattr(callback, event)(None, state, TrainerControl(), logs=LOGS)
    printed = capsys.readouterr()
    assert printed.out.splitlines() == [LINE] * is_main
    assert ("0/800" in printed.err) == (is_main and isinstance(callback, TerseProgressCallback))


@pytest.mark.parametrize("plain", [True, False])
def test_what_printed_is_replaced(plain):
    class Trainer:
        def __init__(self):
            self.args = type("Args", (), {"disable_tqdm": plain})
            self.callbacks = [PrinterCallback if plain else ProgressCallback]
            self.remove_callback, self.add_callback = self.callbacks.remove, self.callbacks.append

    trainer = Trainer()
    use_terse_log(trainer)
    assert trainer.callbacks == [TerseLogCallback if plain else TerseProgressCallback]


@pytest.mark.trainer
@pytest.mark.parametrize("everything", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_a_run(tmp_path, capsys, everything):
    flags = ["--max_completion_length", "1", "--max_steps", "2", "--logging_steps", "1", "--disable_tqdm", "true"]
    flags += ["--print_all_metrics", str(everything), "--save_strategy", "steps", "--save_steps", "2"]
    train("reinforce", [*flags, "--output_dir", str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    assert len([line for line in lines if line.startswith(("update 1/2 | reward ", "update 2/2 | "))]) == 2 * (
        not everything
    )
    assert len([line for line in lines if line.startswith("{")]) == 3 * everything
    state = json.loads((tmp_path / "checkpoint-2" / "trainer_state.json").read_text())
    assert {"grad_norm", "num_tokens", "completions/clipped_ratio"} <= set(state["log_history"][0])
