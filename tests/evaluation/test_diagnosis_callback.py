"""Warnings while a run trains: of a symptom once, of a sound run none."""

import json
from pathlib import Path

import pytest
from transformers import TrainerControl, TrainerState, TrainingArguments

from trl_repulse.evaluation.diagnosis_callback import DiagnosisCallback


RUNS = json.loads((Path(__file__).parents[1] / "failing_runs.json").read_text(encoding="utf-8"))


def warnings_of(name, tmp_path, caplog, **options):
    """Warnings of a recorded run whose metrics arrive log by log."""
    columns = RUNS[name]["columns"]
    args, state, callback = TrainingArguments(tmp_path), TrainerState(), DiagnosisCallback(**options)
    args.to_dict = lambda: RUNS[name]["settings"]
    caplog.clear()
    for row in zip(*columns.values(), strict=True):
        entry = dict(zip(columns, row, strict=True))
        state.global_step = entry["step"]
        state.log_history.append(entry)
        callback.on_log(args, state, TrainerControl())
    return [record.getMessage() for record in caplog.records]


def test_a_symptom_is_warned_of_once(tmp_path, caplog):
    found = warnings_of("rising_kl", tmp_path, caplog)
    assert sum("KL rises without a gain" in message for message in found) == 1
    assert all("Update " in message and "Remedy: " in message for message in found)


def test_a_sound_run_is_not_warned_of(tmp_path, caplog):
    assert warnings_of("sound", tmp_path, caplog) == []


def test_not_before_its_time(tmp_path, caplog):
    assert warnings_of("rising_kl", tmp_path, caplog, after=1000) == []
    with pytest.raises(ValueError, match="`after=0`"):
        DiagnosisCallback(after=0)
