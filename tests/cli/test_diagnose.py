"""`trl-repulse diagnose`: each symptom in a log made for it, sound logs beside it, runs made to fail, and bad input."""

import json
import logging
import math
import random
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from accelerate import PartialState
from transformers import TrainerState

from trl_repulse.cli.main import main
from trl_repulse.engine import logs
from trl_repulse.engine.diagnosis import SYMPTOMS, diagnose, load_log
from trl_repulse.engine.logs import Watch


ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "reading_a_run.md").read_text(encoding="utf-8")
FIXTURES = json.loads((ROOT / "tests" / "failing_runs.json").read_text(encoding="utf-8"))
SETTINGS = {"num_generations": 8, "max_completion_length": 16}

# A sound run with a learned proposal, and one with the hot policy: metric -> its value at a share of the run
LEARNED = {
    "loss": lambda t: 0.1,
    "grad_norm": lambda t: 1.0,
    "reward": lambda t: 4 - 3 * math.exp(-5 * t),
    "return": lambda t: 4 - 3 * math.exp(-5 * t),
    "reward_std": lambda t: 2 - 1.9 * t,
    "entropy": lambda t: 2 - 1.2 * t,
    "kl": lambda t: 0.2 * (1 - math.exp(-5 * t)) + 0.01 * t,
    "bad_fraction": lambda t: 0.01 * (1 - t),
    "completions/mean_length": lambda t: 9.0,
    "completions/max_length": lambda t: 16.0,
    "completions/clipped_ratio": lambda t: 0.1,
    "completions/distinct": lambda t: 1 - 0.5 * t,
    "proposal/reward": lambda t: 1 - 6 * t,
    "proposal/bad_fraction": lambda t: 0.5,
    "proposal/ess": lambda t: 1.2 if t < 0.1 else 4.0,
    "proposal/distinct": lambda t: 0.9 - 0.4 * t,
    "proposal/log_z_gap": lambda t: 1 - 10 * t,
    "proposal/completions/mean_length": lambda t: 9.0,
    "proposal/completions/clipped_ratio": lambda t: 0.1,
}
HOT = {name: LEARNED[name] for name in LEARNED if name not in ("proposal/ess", "proposal/log_z_gap")} | {
    "negative/ess": lambda t: 1.0,  # a prompt mostly has one bad sample
    "negative/p_bad": lambda t: 0.001 if 0.1 < t < 0.3 else 0.0,  # later there is nothing left to find
    "proposal/reward": lambda t: 3 - 3 * math.exp(-5 * t),
    "proposal/bad_fraction": lambda t: 0.1 if t < 0.3 else 0.0,
}


def make_log(sound=LEARNED, updates=200, every=5, **columns):
    """A log with some columns exchanged; `None` leaves one out. A slash in a name is written as two underscores."""
    columns = sound | {name.replace("__", "/"): column for name, column in columns.items()}
    known = {name: column if callable(column) else lambda t, v=column: v for name, column in columns.items()}
    return [
        {"step": step} | {name: column(step / updates) for name, column in known.items() if column(0) is not None}
        for step in range(every, updates + 1, every)
    ]


def seen(log, settings=SETTINGS):
    return [finding.symptom for finding in diagnose(log, settings).findings]


# Symptoms in logs made for them


@pytest.mark.parametrize(
    ("symptom", "sound", "columns", "evidence"),
    [
        ("not_finite", LEARNED, {"grad_norm": lambda t: math.nan if t > 0.5 else 1.0}, "`grad_norm` is not finite in 20 of 40"),
        ("not_finite", LEARNED, {"entropy": lambda t: None if t == 1 else 2.0}, "`entropy` is not finite in 1 of 40"),
        ("not_finite", LEARNED, {"proposal__loss": lambda t: math.inf if t == 1 else 1.0}, "1 of 40 logs, from update 200 to 200"),
        ("constant_reward", LEARNED, {"reward_std": 0.0, "reward": -3.0, "return": -3.0}, "is 0 over updates 1 to 200"),
        ("constant_reward", LEARNED, {"rewards__f__std": 0.0, "rewards__f__mean": 2.0, "rewards__g__std": 1.0}, "`rewards/f/std` is 0"),
        ("collapse", LEARNED, {"proposal__log_z_gap": lambda t: 5.0 if t > 0.5 else -5.0}, "5.0 nats on average over updates 101 to"),
        ("collapse", LEARNED, {"proposal__distinct": lambda t: 0.125 if t > 0.5 else 0.9}, "of a prompt's 8 samples are distinct"),
        ("turned_target", LEARNED, {"proposal__reward": lambda t: 1 - 10 * min(t, 0.9 - t)}, "has risen to"),
        ("turned_target", LEARNED, {"proposal__reward": lambda t: 3.8 - 3 * math.exp(-5 * t)}, "never far below"),
        ("ess", LEARNED, {"proposal__ess": 1.05}, "`proposal/ess` is 1.05 of 8 samples"),
        ("nothing_bad", HOT, {"negative__p_bad": 0.0, "proposal__bad_fraction": 0.0}, "are 0 over updates 1 to 200"),
        ("finds_no_more", HOT, {"bad_fraction": 0.03, "proposal__bad_fraction": 0.02}, "is 0.02 and `bad_fraction` 0.03 on"),
        ("finds_no_more", HOT, {"proposal__gain": lambda t: 3 - 2.3 * t}, "`proposal/gain` is 0.7"),
        ("rising_kl", LEARNED, {"kl": lambda t: 16 * t * t}, "nats per token while `reward` went from"),
        ("jumping_kl", LEARNED, {"kl": lambda t: min(8 * t, 0.5)}, "`kl` is 4.50 nats per completion at update 15, from 1.80 at"),
        ("falling_return", LEARNED, {"return": lambda t: 4 - 8 * (t - 0.5) ** 2}, "`return` fell from"),
        ("narrow", LEARNED, {"entropy": lambda t: 0.364 * (1 - t) + 0.07 * t}, "`entropy` fell from 0.34"),
        ("narrow", HOT, {"completions__distinct": lambda t: 0.125 if t > 0.5 else 0.9}, "1.0 of a prompt's 8 completions"),
        ("empty", LEARNED, {"completions__mean_length": lambda t: max(1.0, 9 - 20 * t)}, "and was 7.75 at the start"),
        ("empty", LEARNED, {"proposal__completions__mean_length": lambda t: 9 if t < 0.8 else 1}, "`proposal/completions/mean_"),
        ("cut", LEARNED, {"completions__clipped_ratio": lambda t: t}, "and was 0.0"),
    ],
)  # fmt: skip
def test_a_symptom_is_seen_alone(symptom, sound, columns, evidence):
    [finding] = diagnose(make_log(sound, **columns), SETTINGS).findings
    assert finding.symptom == symptom and evidence in finding.evidence
    assert "\n" not in str(finding) and finding.page in str(finding)


# Logs that look alike, and are sound


@pytest.mark.parametrize("every", [1, 5, 20, 50])
@pytest.mark.parametrize("sound", [LEARNED, HOT], ids=["learned", "hot"])
def test_sound_logs(sound, every):
    diagnosis = diagnose(make_log(sound, every=every), SETTINGS)
    assert not diagnosis.findings
    assert set(diagnosis.sound) | set(diagnosis.unknown) == set(SYMPTOMS)


@pytest.mark.parametrize(
    "columns",
    [
        {"grad_norm": lambda t: math.inf if t < 0.05 else 1.0},  # fp16 looks for its scale
        {"proposal__log_z": math.nan},  # no prompt had a bad sample
        {"reward": lambda t: None if t == 0.5 else LEARNED["reward"](t)},  # a log without a reward
        {"reward_std": lambda t: 2.0 if t < 0.5 else 0.0},  # converged
        {"proposal__log_z_gap": lambda t: 9.0 if 0.5 < t < 0.56 else -9.0},  # too short
        {"proposal__distinct": 0.3},
        {"kl": lambda t: 0.08 * t},  # too little
        {"reward": lambda t: 4 * t, "kl": lambda t: 8 * t * t, "return": lambda t: 4 * t},  # pays
        {"return": lambda t: 4 - 0.8 * t},  # less than the noise of a batch
        {"completions__clipped_ratio": 0.4},
        {"entropy": lambda t: 0.05 if t < 0.5 else 0.001},  # there was little to lose
        {"entropy": lambda t: 2.2 - 1.8 * t},  # a fifth is left, as in sound runs, and it is much
        {"entropy": lambda t: 2 - 1.2 * t if not 0.5 < t < 0.6 else 0.1},  # it came back
        {"completions__distinct": 0.125},  # one answer from the start on
        # Extra samples alone find something
        {"negative__p_bad": 1e-6, "proposal__gain": 0.6, "bad_fraction": lambda t: max(0, 0.01 - t)},
    ],
)
def test_what_only_looks_like_a_symptom(columns):
    assert seen(make_log(**columns)) == []


@pytest.mark.parametrize(("every", "updates"), [(1, 400), (10, 400)])
def test_one_prompt_an_update_is_no_symptom(every, updates):
    """Rewards that differ between prompts as much as within them: the means of 20 updates vary by a fifth of their spread."""
    alarms = 0
    for seed in range(20):
        draw = random.Random(seed)
        log = make_log(updates=updates, every=every, reward_std=2**0.5)
        for entry in log:
            batches = [draw.gauss(0, 1) + draw.gauss(0, 8**-0.5) for _ in range(every)]
            entry["reward"] = entry["return"] = 4.0 + sum(batches) / every
        alarms += "falling_return" in seen(log)
    assert alarms <= 1


FROM_THE_START = make_log(completions__clipped_ratio=1.0, reward=4.0, kl=lambda t: 0.2 * t)
CUT = make_log(completions__clipped_ratio=1.0, completions__mean_length=2.0, kl=None)
NO_THRESHOLD = make_log(HOT, updates=3, every=1, negative__p_bad=None)  # not measured yet: no estimate of P(bad)
OF_HOT = {"proposal": "hot_policy", "alpha": 1.0}


@pytest.mark.parametrize(
    ("symptom", "log", "settings", "why"),
    [
        ("cut", FROM_THE_START, {}, "from the start on; raise"),
        ("rising_kl", FROM_THE_START, {}, "near its best from the start"),
        ("cut", CUT, {"max_completion_length": 2}, "meant to be cut"),
        ("rising_kl", CUT, {"max_completion_length": 2}, "`beta` above 0"),
        ("empty", CUT, {"max_completion_length": 1}, "completions have one token"),
        ("turned_target", make_log(HOT), {}, "hot policy"),
        ("finds_no_more", NO_THRESHOLD, OF_HOT, "fewer than the 20 updates"),
        ("turned_target", NO_THRESHOLD, OF_HOT, "has no target"),
        ("nothing_bad", NO_THRESHOLD, OF_HOT, "once `bad_reward_threshold` is known"),
        ("finds_no_more", NO_THRESHOLD, {"proposal": "learned"}, "there is no hot policy"),
    ],
)
def test_what_is_not_judged_or_not_looked_for(symptom, log, settings, why):
    assert why in diagnose(log, SETTINGS | settings).unknown[symptom]


def test_signs_that_a_log_lacks_are_named():
    unknown = diagnose([{"step": 50, "reward": 1.0, "loss": 0.0}], {}).unknown
    assert set(unknown) == set(SYMPTOMS) - {"not_finite"}
    assert "no `proposal/log_z_gap`: it is logged with a learned proposal" in unknown["collapse"]


def test_a_log_without_settings():
    unknown = diagnose(make_log(), {}).unknown
    assert "`proposal/distinct` cannot be judged: `num_generations` is not known" in unknown["collapse"]
    assert "`num_generations` is not known" in unknown["ess"] and set(unknown) == {
        "collapse", "ess", "nothing_bad", "finds_no_more"
    }  # fmt: skip
    assert seen(make_log(proposal__log_z_gap=9.0), {}) == ["collapse"]


def test_a_short_log_is_not_judged():
    diagnosis = diagnose(make_log(updates=15), SETTINGS)
    assert diagnosis.sound == ["not_finite", "jumping_kl"] and not diagnosis.findings
    assert "fewer than the 20 updates" in diagnosis.unknown["falling_return"]


def test_a_kl_that_jumps_is_seen_at_once():
    """In nats per completion 1.05, 3.42 and 6.78, of 60 tokens; a policy that begins away from the reference does not jump."""
    rows = [
        {"step": i, "kl": kl / 60, "completions/mean_length": 60.0, "reward": 0.0}
        for i, kl in enumerate((1.05, 3.42, 6.78), 1)
    ]
    (finding,) = [each for each in diagnose(rows, {"learning_rate": 0.1}).findings if each.symptom == "jumping_kl"]
    assert "6.78 nats per completion at update 3" in finding.evidence and "`learning_rate` (now 0.1)" in finding.remedy
    assert seen([rows[0] | {"step": i, "kl": 0.1 - i / 1000} for i in (1, 2, 3)]) == []
    assert "first 20 updates" in diagnose([rows[2] | {"step": 50}]).unknown["jumping_kl"]


# Runs made to fail, by benchmarks/failing_runs.py


# Run -> what is seen in it, the symptom that it was made for among its consequences
EXPECTED = {
    "sound": [],
    "sound_hot": [],
    "collapse": ["collapse"],
    "turned_target": ["turned_target"],
    "ess": ["ess"],
    "falling_return": ["falling_return"],
    "rising_kl": ["falling_return", "rising_kl", "collapse", "ess"],
    "empty": ["empty"],
    "cut": ["empty", "cut", "collapse"],  # the longest completions score best, and none at all worst
    "narrow": ["narrow"],
    "nothing_bad": ["nothing_bad"],
    "not_finite": ["not_finite", "collapse"],
    "constant_reward": ["constant_reward", "collapse"],
}


@pytest.mark.parametrize("name", EXPECTED)
def test_a_run_made_to_fail_is_recognised(name):
    run = FIXTURES[name]
    log = [dict(zip(run["columns"], values, strict=True)) for values in zip(*run["columns"].values(), strict=True)]
    assert seen(log, run["settings"]) == EXPECTED[name]
    assert set(FIXTURES) == set(EXPECTED)


@pytest.mark.parametrize("symptom", SYMPTOMS)
def test_each_symptom_has_a_section(symptom):
    anchors = {
        re.sub(r"[^\w -]", "", line[3:].lower()).replace(" ", "-")
        for line in PAGE.splitlines()
        if line.startswith("## ")
    }
    assert SYMPTOMS[symptom].anchor in anchors


# The command


def write(folder, log, settings=None, name="trainer_state.json"):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(json.dumps({"global_step": log[-1]["step"] if log else 0, "log_history": log}))
    if settings is not None:
        (folder / "results.json").write_text(json.dumps({"settings": settings}))
    return folder


def test_the_command_on_a_sound_run(tmp_path, capsys):
    assert main(["diagnose", str(write(tmp_path, make_log(), SETTINGS))]) == 0
    said = capsys.readouterr().out
    assert "200 updates" in said and "No symptom is seen." in said and "- The proposal has collapsed\n" in said


def test_the_command_on_a_failed_run(tmp_path, capsys):
    folder, file = write(tmp_path, make_log(proposal__ess=1.0, kl=None), SETTINGS), tmp_path / "new" / "seen.json"
    assert main(["diagnose", str(folder), "--json", str(file)]) == 1
    said = capsys.readouterr().out
    assert "- One sample carries the weights: `proposal/ess` is 1.00 of 8 samples" in said
    assert "Not looked for:\n" in said and "`kl`" in said
    content = json.loads(file.read_text())
    assert [each["symptom"] for each in content["findings"]] == ["ess"] and "rising_kl" in content["unknown"]
    assert content["findings"][0]["page"] == "docs/reading_a_run.md#one-sample-carries-the-weights"


def test_the_log_of_the_last_checkpoint(tmp_path):
    for step in (9, 10):
        folder = write(tmp_path / f"checkpoint-{step}", make_log(updates=step, every=1))
        (folder / "position-0.json").write_text(json.dumps({"settings": {"num_generations": step}}))
    path, log, settings = load_log(tmp_path)
    assert path.parent.name == "checkpoint-10" and len(log) == 10 and settings == {"num_generations": 10}
    write(tmp_path, make_log())  # the end of the run, by `trainer.save_state()` alone
    path, _, settings = load_log(tmp_path)
    assert path.parent == tmp_path and settings == {"num_generations": 10}
    (tmp_path / "results.json").write_text("{}")  # of another program
    assert load_log(tmp_path)[2] == {"num_generations": 10}
    write(tmp_path, make_log(), SETTINGS)  # and by a training command
    assert load_log(tmp_path)[2] == SETTINGS
    for content in ("{", '{"global_step": "11"}'):  # a run that was interrupted, or of another program
        (tmp_path / "checkpoint-10" / "trainer_state.json").write_text(content)
        assert load_log(tmp_path)[0].parent == tmp_path
    assert load_log(tmp_path / "checkpoint-9")[2] == {"num_generations": 9}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "There is no `trainer_state.json` in"),
        ("{", "cannot be read"),
        ("[]", "is no JSON object"),
        ("{}", "has no `log_history`"),
        ('{"log_history": [1]}', "has no `log_history`"),
        ('{"log_history": []}', "The log is empty: no update was logged. Set `logging_steps`"),
        ('{"log_history": [{"step": 3, "train_runtime": 1.0}]}', "The log is empty"),
    ],
)
def test_a_folder_without_a_log(tmp_path, capsys, content, message):
    if content is not None:
        (tmp_path / "trainer_state.json").write_text(content)
    assert main(["diagnose", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("trl-repulse diagnose: ") and message in error and error.count("\n") == 1


def test_what_is_no_folder(tmp_path, capsys):
    file = tmp_path / "results.json"
    file.write_text("{}")
    for path, message in ((file, "is a file; name the folder of a run"), (tmp_path / "none", "does not exist; name")):
        assert main(["diagnose", str(path)]) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1


@pytest.mark.trainer
@pytest.mark.thorough
def test_a_training_command_leaves_what_is_read(tmp_path, capsys):
    from examples.worlds import two_tokens
    from examples.worlds.exact_tracking import train  # imports TRL, which nothing else here needs

    flags = "--max_completion_length 1 --max_steps 24 --logging_steps 4 --disable_tqdm true".split()
    flags += two_tokens.flags("repulse")
    train("repulse", [*flags, "--num_table_completions", "0", "--output_dir", str(tmp_path)])
    assert main(["diagnose", str(tmp_path)]) == 0
    assert "24 updates" in capsys.readouterr().out
    assert load_log(tmp_path)[2]["num_generations"] == 32


def warnings_of(name, caplog, sent):
    """Warnings of a recorded run whose metrics arrive log by log."""
    PartialState()
    columns, caplog.records[:] = FIXTURES[name]["columns"], []
    state = TrainerState(is_world_process_zero=True)
    watch = Watch(SimpleNamespace(report_to=[], **FIXTURES[name]["settings"]), None)
    watch.trackers = SimpleNamespace(alert=lambda *alert: sent.append(alert))
    for row in zip(*columns.values(), strict=True):
        entry = dict(zip(columns, row, strict=True))
        state.global_step = entry["step"]
        state.log_history.append(entry)
        watch.look(state)
    return [record.getMessage() for record in caplog.records]


def test_a_trainer_warns_of_a_symptom_once_and_sends_one_alert(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger(logs.__name__), "propagate", True)
    sent = []
    warned = warnings_of("rising_kl", caplog, sent)
    assert sum("KL rises without a gain" in message for message in warned) == 1
    assert len(sent) == len(warned) and all("Remedy: " in message for message in warned)
    ((title, text, step),) = (alert for alert in sent if alert[0].startswith("The KL rises"))
    assert any(text in message for message in warned) and step >= 100
    assert warnings_of("sound", caplog, sent := []) == [] == sent
    monkeypatch.setattr(logs, "PATIENCE", 1000)
    assert all("The proposal has collapsed" in message for message in warnings_of("rising_kl", caplog, sent))


def test_noise_is_no_symptom():
    """Means of 64 samples around a plateau, the same for all."""
    noise = [math.sin(12.9898 * i) * 43758.5453 % 1 - 0.5 for i in range(1001)]
    names = {"reward": 4.0, "return": 4.0, "proposal/reward": -6.0, "kl": 0.1}
    log = make_log(updates=400, every=1, **{name.replace("/", "__"): value for name, value in names.items()})
    for i, entry in enumerate(log):
        entry |= {name: value + noise[i] * min(abs(value), 1.0) for name, value in names.items()}
    assert seen(log) == []
