"""Preference data of bad completions and samples: the pairs, the command, and that TRL's trainers take the files unchanged."""

import json

import pytest
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from trl_repulse import RePULSeTrainer
from trl_repulse.cli.main import main
from trl_repulse.evaluation.preferences import (
    RewardedCompletion,
    preference_rows,
    read_rewarded,
    unpaired_rows,
    write_rows,
)
from trl_repulse.evaluation.sampling import SamplingSettings, sample_completions

from ..conftest import QUIET, word_reward


def completions(*rows):
    return [RewardedCompletion(*row) for row in rows]


POOL = completions(
    *(("a", " bad", -5.0), ("a", " fine", 1.0), ("a", " worse", -7.0), ("a", " bad", -5.0), ("a", " best", 4.0)),
    *(("a", " poor", -6.0), ("a", " so-so", -3.5), ("b", " bad", -5.0), ("c", " fine", 1.0)),
)


def test_the_worst_is_rejected_for_the_best():
    rows = preference_rows(POOL, threshold=-4.0, margin=1.0)
    assert [(row["prompt"], row["chosen"], row["rejected"], row["margin"]) for row in rows] == [
        ("a", " best", " worse", 11.0),
        ("a", " fine", " poor", 7.0),
        ("a", " best", " bad", 9.0),
    ]
    assert all(row["margin"] == row["chosen_reward"] - row["rejected_reward"] for row in rows)
    assert [row["chosen"] for row in preference_rows(POOL, threshold=-4.0)] == [" best", " fine", " so-so"]
    assert [row["rejected"] for row in preference_rows(POOL, -4.0, 1.0, max_bad=1)] == [" worse"]


def test_unpaired_rows_need_no_partner():
    rows = unpaired_rows(POOL, threshold=-4.0, margin=1.0)
    assert [(row["prompt"], row["completion"], row["label"]) for row in rows] == [
        ("a", " best", True),
        ("a", " fine", True),
        ("a", " worse", False),
        ("a", " poor", False),
        ("a", " bad", False),
        ("b", " bad", False),
        ("c", " fine", True),
    ]


def test_messages_are_compared_as_such():
    prompt = [{"role": "user", "content": "hi"}]
    same = [{"content": "hi", "role": "user"}]
    answers = [[{"role": "assistant", "content": text}] for text in ("good", "bad")]
    rows = preference_rows(completions((prompt, answers[0], 1.0), (same, answers[1], -1.0)), 0.0)
    assert [(row["chosen"], row["rejected"]) for row in rows] == [tuple(answers)]
    with pytest.raises(ValueError, match="some messages"):
        preference_rows(completions((prompt, answers[0], 1.0), ("hi", "bad", -1.0)), 0.0)


@pytest.mark.parametrize("make", [preference_rows, unpaired_rows])
def test_refused(make):
    for arguments, message in (
        ((POOL, -9.0), "under -9.0"),
        ((POOL, 9.0), "at least 9.0"),
        ((POOL, -4.0, -1.0), "`margin` is -1.0"),
        ((POOL, -4.0, 0.0, 0), "`max_bad` is 0"),
        (([], -4.0), "No prompt has both|all good or all bad"),
    ):
        with pytest.raises(ValueError, match=message):
            make(*arguments)


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_rows_without_a_reward_are_left_out(tmp_path):
    row = {"prompt": "a", "completion": "b", "reward": 1.0, "step": 3}
    assert read_rewarded(write(tmp_path / "rows.jsonl", [row, row | {"reward": None}])) == completions(("a", "b", 1.0))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "completion": "b"}, "lacks"),
        (["a"], "lacks"),
        ({"prompt": "a", "completion": [{"role": "assistant", "content": "b"}], "reward": 1.0}, "of the kind"),
        ({"prompt": 3, "completion": "b", "reward": 1.0}, "neither text"),
        ({"prompt": "a", "completion": "b", "reward": "low"}, "no finite number"),
        ({"prompt": "a", "completion": "b", "reward": float("nan")}, "no finite number"),
        ({"prompt": "a", "completion": "b", "reward": True}, "no finite number"),
    ],
)
def test_rows_that_cannot_be_used_are_named(tmp_path, row, message):
    path = write(tmp_path / "rows.jsonl", [{"prompt": "a", "completion": "b", "reward": 1.0}, row])
    with pytest.raises(ValueError, match=rf"Row 2 of .*{message}"):
        read_rewarded(path)
    with pytest.raises(ValueError, match="no file or folder"):
        read_rewarded(tmp_path / "missing")


def test_the_command_says_what_is_wrong(tmp_path, capsys):
    rows = [{"prompt": "a", "completion": "b", "reward": 1.0}, {"prompt": "a", "completion": "c", "reward": -9.0}]
    path = write(tmp_path / "rows.jsonl", rows)
    for output, threshold, message in (
        (tmp_path / "out.csv", "-4", "names no format; end it with .jsonl"),
        (path, "-4", "is one of the sources"),
        (write(tmp_path / "run.jsonl", rows[1:]), "-4", "holds other rows"),  # OUTPUT was left out
        (tmp_path / "out.jsonl", "-20", "No prompt has both"),
    ):
        assert main(["negatives", str(output), str(path), "--threshold", threshold]) == 1
        said = capsys.readouterr().err
        assert said.startswith("trl-repulse negatives: ") and message in said and said.count("\n") == 1
    assert path.read_text(encoding="utf-8").count("\n") == 2
    assert main(["negatives", str(tmp_path / "new" / "out.jsonl"), str(path), "--threshold", "-4"]) == 0
    assert "1 pairs of 1 prompts, from 2 completions" in capsys.readouterr().out


@pytest.fixture(scope="module")
def sources(tmp_path_factory, model_dirs, prompts):
    """Negative data of a run, and held-out samples of the same prompts."""
    folder = tmp_path_factory.mktemp("sources")
    drawn = {"per_device_train_batch_size": 16, "num_generations": 4, "max_completion_length": 3, "max_steps": 3}
    bad = {"proposal": "policy", "target_dist_beta": -2.0, "bad_reward_threshold": -2.0, "save_negatives": True}
    args = RePULSeTrainer._config_cls(output_dir=str(folder / "run"), **bad, **drawn, **QUIET)
    RePULSeTrainer(model_dirs["gpt2"], word_reward, args, prompts).train()
    settings = SamplingSettings(num_samples=8, max_completion_length=3)
    drawn = (folder / "samples", model_dirs["gpt2"], prompts["prompt"], word_reward, settings)
    sample_completions(*drawn, progress=False)
    return [str(folder / "run" / "negatives.jsonl"), str(folder / "samples")]


@pytest.mark.thorough
@pytest.mark.trainer
@pytest.mark.parametrize("method", ["DPO", "KTO"])
def test_trls_trainers_take_the_files_unchanged(tmp_path, model_dirs, sources, method):
    from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer

    path, form = tmp_path / "rows.jsonl", {"DPO": "preference", "KTO": "unpaired"}[method]
    assert main(["negatives", str(path), *sources, "--threshold", "-2", "--margin", "1", "--format", form]) == 0
    dataset = load_dataset("json", data_files=str(path), split="train")
    assert len(dataset) > 3
    config_cls, trainer_cls = {"DPO": (DPOConfig, DPOTrainer), "KTO": (KTOConfig, KTOTrainer)}[method]
    model, tokenizer = (cls.from_pretrained(model_dirs["gpt2"]) for cls in (AutoModelForCausalLM, AutoTokenizer))
    args = config_cls(output_dir=str(tmp_path / "out"), max_steps=2, per_device_train_batch_size=2, **QUIET)
    trainer = trainer_cls(model=model, args=args, train_dataset=dataset, processing_class=tokenizer)

    trainer.train()
    assert trainer.state.global_step == 2


def test_messages_are_written_as_they_are(tmp_path):
    one = [{"role": "assistant", "tool_calls": [{"function": {"name": "look", "arguments": {"city": "a"}}}]}]
    other = [{"role": "assistant", "content": "b", "n": 2.5}]
    asked = [{"role": "user", "content": "?"}]
    rows = unpaired_rows(completions((asked, one, -5.0), (asked, other, 1.0)), -1.0)
    write_rows(tmp_path / "rows.jsonl", rows)
    assert [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()] == rows
