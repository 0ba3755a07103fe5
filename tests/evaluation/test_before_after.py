"""The table of completions from before and after training."""

import random

import numpy as np
import pytest
import torch
from datasets import Dataset

from trl_repulse import RePULSeTrainer
from trl_repulse.evaluation.before_after import BeforeAfterCallback
from trl_repulse.evaluation.callback import draw_completions

from ..conftest import word_reward


pytestmark = pytest.mark.trainer


def rows_of(path):
    return [[cell.strip() for cell in line.strip("| \n").split(" | ")] for line in path.read_text().splitlines()]


def test_the_table_has_what_the_policy_draws_before_and_after(make, prompts, tmp_path):
    """And training goes on as without it."""
    weights, tables = [], []
    for follow in (True, False):
        trainer = make(RePULSeTrainer, max_steps=3, learning_rate=0.1)
        table = BeforeAfterCallback(trainer, prompts, num_completions=len(prompts) + 2)
        ids, seed = table._prompt_ids, trainer.args.seed
        before = draw_completions(trainer, table.dataset, ids, 1, seed)
        if follow:
            trainer.add_callback(table)
        trainer.train()
        weights.append(torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()]))
        if follow:
            table.write(tmp_path / "new" / "table.md")
            tables = before, draw_completions(trainer, table.dataset, ids, 1, seed)
    assert torch.equal(*weights)
    header, _, *rows = rows_of(tmp_path / "new" / "table.md")
    assert header == ["prompt", "update 0", "reward", "update 3", "reward"]
    texts = prompts["prompt"][:]
    assert [row[0] for row in rows] == [*texts, *texts[:2]]
    for place, drawn in ((1, tables[0]), (3, tables[1])):
        assert [row[place : place + 2] for row in rows] == [[text.strip(), f"{reward:.3g}"] for text, reward in drawn]
        assert [reward for _, reward in drawn] == pytest.approx(word_reward([text for text, _ in drawn]))
    assert tables[0] != tables[1]


def test_prompts_of_a_stream_and_marks_of_a_table(make, tmp_path):
    def reward(completions, **kwargs):
        return [None] * len(completions)

    rows = [{"prompt": "the cat"}, {"prompt": "a | b\nc"}, {"prompt": "fish"}]
    trainer = make(reward_funcs=reward)
    table = BeforeAfterCallback(trainer, Dataset.from_list(rows).to_iterable_dataset(), num_completions=2)
    table.on_train_begin(trainer.args, trainer.state, trainer.control)
    table.write(tmp_path / "table.md")
    found = (tmp_path / "table.md").read_text().splitlines()
    assert len(found) == 4 and found[2].startswith("| the cat | ") and found[3].startswith("| a \\| b<br>c | ")
    assert found[2].endswith(" |  |")  # no reward


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([{"prompt": "cat " * 40}], "exceed the model's context"),
        ([{"prompt": "the cat"}], "'labelled' needs `label`, but the held-out prompts have no such column"),
    ],
)
def test_prompts_that_cannot_be_used_are_refused(make, rows, words):
    def labelled(completions, label, **kwargs):
        return [0.0] * len(completions)

    trainer = make(reward_funcs=labelled)
    dataset = Dataset.from_list(rows)
    if "exceed" in words:
        dataset = dataset.add_column("label", [1])
    with pytest.raises(ValueError, match=words):
        BeforeAfterCallback(trainer, dataset)


def test_rewards_that_draw_random_numbers_leave_those_of_training_as_they_are(make, prompts):
    def reward(completions, **kwargs):
        return [random.random() + np.random.rand() + torch.rand(1).item() for _ in completions]

    trainer = make(reward_funcs=reward)
    table = BeforeAfterCallback(trainer, prompts)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    table.on_train_begin(trainer.args, trainer.state, trainer.control)
    assert len({value for _, value in table._before}) > 1
    assert before == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
