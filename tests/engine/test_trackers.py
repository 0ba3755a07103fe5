"""The names of all metrics, and what arrives at wandb, TensorBoard and trackio without a network."""

import importlib.util
import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from trl_repulse import PPOTrainer, ReinforceTrainer, RePULSeTrainer


pytestmark = [pytest.mark.trainer, pytest.mark.thorough]

ROOT = Path(__file__).parents[2]
PAGES = "\n".join((ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in ("metrics", "ppo_trainer"))
SETTINGS = {"beta": 0.1, "bad_reward_threshold": -1.0, "max_steps": 1, "per_device_eval_batch_size": 16}
SETTINGS |= {"reward_transform": "exponential", "reward_transform_alpha": 0.01}

# Of one model's samples
SAMPLES = {
    *("reward", "reward_std", "rewards/NAME/mean", "rewards/NAME/std", "bad_fraction"),
    *(f"completions/{name}_length" for name in ("mean", "min", "max")),
    *(f"completions/{name}_terminated_length" for name in ("mean", "min", "max")),
    "completions/clipped_ratio",
}
POLICY = SAMPLES | {"reward_transformed", "return", "return_transformed", "kl", "entropy", "num_tokens"}
POLICY |= {"completions/distinct"}
WEIGHTS = {"ess", "ess_min", "max_weight", "log_z"}
PROPOSAL = {f"proposal/{name}" for name in SAMPLES | WEIGHTS | {"log_z_gap", "distinct", "log_p_rank"}}
NEGATIVE = {f"negative/{name}" for name in WEIGHTS}
HOT = {"proposal": "hot_policy", "proposal_temperature": 2.0}
CLIPPED = {f"clip_ratio/{name}" for name in ("low_mean", "low_min", "high_mean", "high_max", "region_mean")}
VALUE = {"approx_kl", *(f"value/{name}" for name in ("loss", "mean", "explained_variance", "clip_fraction"))}
# While training alone; `epoch` and `step` are the Trainer's own
UPDATE = {"loss", "grad_norm", "learning_rate", "step_time"}


def of_updates(name):
    return {f"{name}/grad_norm", f"{name}/learning_rate"}


@pytest.mark.parametrize(
    ("trainer_cls", "settings", "sampled", "updated"),
    [
        (RePULSeTrainer, {}, POLICY | PROPOSAL, UPDATE | of_updates("proposal") | {"proposal/loss"}),
        (RePULSeTrainer, {"proposal": "policy"}, POLICY | NEGATIVE, UPDATE),
        (
            *(RePULSeTrainer, HOT),
            POLICY
            | NEGATIVE
            | {"negative/p_bad"}
            | {f"proposal/{name}" for name in SAMPLES | {"distinct", "log_p_rank"}},
            UPDATE,
        ),
        (RePULSeTrainer, {"alpha": 0.0}, POLICY, UPDATE),
        (ReinforceTrainer, {}, POLICY, UPDATE),
        (PPOTrainer, {}, POLICY | CLIPPED | VALUE, UPDATE | of_updates("value")),
    ],
    ids=["repulse", "policy-as-proposal", "hot", "alpha-0", "reinforce", "ppo"],
)
def test_names(make, prompts, trainer_cls, settings, sampled, updated):
    """Dashboards depend on them: no name appears, goes or changes unseen, and each is on a page."""
    trainer = make(trainer_cls, extra={"eval_dataset": prompts}, **SETTINGS, **settings)
    trainer.train()
    trainer.evaluate()
    logged = [{name.replace("word_reward", "NAME") for name in logs} for logs in trainer.state.log_history]
    assert logged[0] - {"epoch", "step"} == sampled | updated
    runtime = {"eval_loss", "eval_runtime", "eval_samples_per_second", "eval_steps_per_second"}
    assert logged[-1] - {"epoch", "step"} == {f"eval_{name}" for name in sampled} | runtime
    assert not {name for name in sampled | updated if f"`{name}`" not in PAGES}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Folder of a run that reported to the trackers at hand, and what wandb has, as JSON."""
    folder = tmp_path_factory.mktemp("tracked")
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "CUDA_VISIBLE_DEVICES": "",
        "TENSORBOARD_LOGGING_DIR": str(folder / "tensorboard"),
        "TRACKIO_DIR": str(folder / "trackio"),
        "WANDB_DIR": str(folder),
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
    }
    trackers = [name for name in ("tensorboard", "trackio", "wandb") if importlib.util.find_spec(name)]
    if not trackers:
        pytest.skip("none of the trackers is installed")
    command = [sys.executable, str(ROOT / "tests" / "tracked_run.py"), str(folder / "out"), *trackers]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    return folder, next((line for line in done.stdout.splitlines() if line.startswith('{"')), "")


WANTED = {
    *("train/reward", "train/kl", "train/grad_norm", "train/completions/mean_length"),
    *("train/proposal/reward", "train/proposal/ess", "train/proposal/loss", "train/proposal/grad_norm"),
    *("eval/reward", "eval/proposal/ess", "eval/proposal/completions/mean_length"),
}


def test_tensorboard(run):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run[0] / "tensorboard"))
    events.Reload()
    assert set(events.Tags()["scalars"]) >= WANTED
    assert [event.step for event in events.Scalars("train/proposal/ess")] == [1, 2]
    assert [event.step for event in events.Scalars("eval/reward")] == [2, 2]  # also behind the training
    private = EventAccumulator(str(run[0] / "out" / "completions"))  # never uploaded
    private.Reload()
    assert "worst_completions/text_summary" not in events.Tags()["tensors"]
    worst, alert = (
        found.Tensors(f"{name}/text_summary")[0].tensor_proto.string_val[0]
        for found, name in ((private, "worst_completions"), (events, "alert"))
    )
    assert "| The KL jumps |" in alert.decode() and "| from 0 to 9 |" in alert.decode()
    header, _, *rows = worst.decode().splitlines()
    assert header == "| model | reward | prompt | completion |" and len(rows) == 10
    assert [row for row in rows if row.startswith("| proposal | ")]
    rewards = [float(row.split(" | ")[1]) for row in rows]
    assert rewards == sorted(rewards)


def test_wandb(run):
    pytest.importorskip("wandb")
    assert set(json.loads(run[1])) >= WANTED
    tables = {
        name: [json.loads(path.read_text("utf-8")) for path in run[0].glob(f"wandb/*/files/media/table/{name}_*")]
        for name in ("completions", "proposal_completions", "worst_completions")
    }
    columns = ["step", "prompt", "completion", "reward_model"]
    assert tables["completions"][0]["columns"] == [*columns, "advantage"]
    assert tables["proposal_completions"][0]["columns"] == columns
    assert tables["worst_completions"][0]["columns"] == ["step", "model", "prompt", "completion", "reward"]
    assert [row[1] for row in tables.pop("worst_completions")[0]["data"]].count("proposal") > 0
    for versions in tables.values():
        assert {1, 2} == {row[0] for table in versions for row in table["data"]}
        assert all(row[2].strip() for table in versions for row in table["data"])


def test_trackio(run):
    pytest.importorskip("trackio")
    with sqlite3.connect(run[0] / "trackio" / "rare.db") as connection:
        rows = [json.loads(row) for (row,) in connection.execute("SELECT metrics FROM metrics ORDER BY id")]
    assert {name for row in rows for name in row} >= WANTED
    policy, proposal = (
        [row[name]["_value"] for row in rows if name in row] for name in ("completions", "proposal_completions")
    )
    assert {"step", "prompt", "completion", "reward_model", "advantage"} == set(policy[0][0])
    assert {"step", "prompt", "completion", "reward_model"} == set(proposal[0][0])
    assert policy[0][0]["prompt"] == proposal[0][0]["prompt"]
    worst = next(row["worst_completions"]["_value"] for row in rows if "worst_completions" in row)
    assert [row["reward"] for row in worst] == sorted(row["reward"] for row in worst) and len(worst) == 10
    assert sum("eval/reward" in row for row in rows) == 2  # also behind the training, in the same run
    with sqlite3.connect(run[0] / "trackio" / "rare.db") as connection:
        alerts = [*connection.execute("SELECT title, text FROM alerts")]
        (names,) = (connection.execute("SELECT COUNT(DISTINCT run_name) FROM metrics").fetchone(),)
    assert alerts == [("The KL jumps", "from 0 to 9")] * 2
    assert names[0] == 1
