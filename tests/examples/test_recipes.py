"""The recipes in `examples/recipes`: what they do to the rewards, and what they say to a mistaken user."""

import json
import re
import runpy
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from examples.worlds import two_tokens
from trl_repulse.evaluation.records import load_samples


pytestmark = pytest.mark.trainer

WORLD = ("--model", two_tokens.policy_path(), "--reward_model_path", two_tokens.reward_model_path())
WORLD += ("--prompts", two_tokens.prompts_path(), "--max_completion_length", "2", "--num_train_epochs", "4")
RECIPES = sorted((Path(__file__).parents[2] / "examples" / "recipes").glob("*.py"))


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Runs a recipe on the CPU; the mean rewards that it printed."""

    def run(name, *flags):
        path = next(path for path in RECIPES if path.stem == name)
        monkeypatch.setattr(sys, "argv", [str(path), "--output_dir", str(tmp_path / "out"), *flags])
        runpy.run_path(str(path), run_name="__main__")
        return [float(text) for text in re.findall(r"mean reward (-?[\d.]+)", capsys.readouterr().out)]

    return run


@pytest.mark.thorough
def test_raft(run, tmp_path):
    means = run("raft", *WORLD, "--rounds", "3", "--num_samples", "64", "--keep", "8")
    found = [load_samples(tmp_path / "out" / f"samples-{number}") for number in range(4)]
    assert means == pytest.approx([samples.column().mean() for samples in found], abs=1e-3)
    assert means == sorted(means) and means[-1] > means[0] + 1.0
    assert found[-1].header["model"]["name"] == str(tmp_path / "out" / "model")


@pytest.mark.thorough
def test_raft_that_keeps_everything_leaves_the_reward(run):
    """The negative control: it is the choice that raises the reward."""
    means = run("raft", *WORLD, "--rounds", "1", "--num_samples", "64", "--keep", "64")
    assert abs(means[1] - means[0]) < 0.7


@pytest.mark.thorough
def test_iterative_dpo(run, tmp_path):
    means = run("iterative_dpo", *WORLD, "--num_samples", "64", "--max_bad", "16")
    found = [load_samples(tmp_path / "out" / f"samples-{number}").column() for number in range(3)]
    assert means == sorted(means) and means[2] > means[0] + 0.5
    assert (found[2] < 0).mean() < 0.8 * (found[0] < 0).mean()


@pytest.mark.thorough
def test_conditional_sft(run, tmp_path):
    before, worst, best = run("conditional_sft", *WORLD, "--num_samples", "256")
    assert worst < before - 0.5 and best > before + 0.5
    assert len(AutoTokenizer.from_pretrained(tmp_path / "out" / "model")("<|reward_4|>")["input_ids"]) == 1


@pytest.mark.parametrize("name", [path.stem for path in RECIPES])
@pytest.mark.parametrize(
    "flags, said",
    [
        (["--prompts", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--reward_model_path", two_tokens.policy_path()], "no classifier"),
        (["--num_samples", "0"], "num_samples"),
        (["--modle", "x"], "--model"),
    ],
    ids=["prompts", "reward", "number", "typo"],
)
def test_a_mistake_is_one_line(run, capsys, name, flags, said):
    with pytest.raises(SystemExit) as ended:
        run(name, *flags)
    text = str(ended.value.code) if ended.value.code != 2 else capsys.readouterr().err.splitlines()[-1]
    assert said in text and "\n" not in text.strip()


def test_iterative_dpo_refuses_conversations(run, tmp_path):
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"prompt": [{"role": "user", "content": "hello"}]}) + "\n")
    with pytest.raises(SystemExit) as ended:
        run("iterative_dpo", "--prompts", str(path))
    assert "has conversations" in str(ended.value.code)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipes_are_short(path):
    assert len(path.read_text().splitlines()) <= 80
