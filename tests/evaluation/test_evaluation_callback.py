"""Callbacks: the tail report where model or data are not as usual, the table of before and after, warnings of symptoms."""

import asyncio
import functools
import random

import numpy as np
import pytest
import torch
from datasets import Dataset

from trl_repulse import ReinforceTrainer, RePULSeTrainer
from trl_repulse.evaluation._generation import as_function
from trl_repulse.evaluation.callback import BeforeAfterCallback, TailReportCallback, draw_completions

from ..conftest import build_tokenizer, silent, word_reward
from ..evaluation_support import TEMPLATE
from ..reward_models import CHAT_TEMPLATE, messages, save_model
from ..reward_models import build_tokenizer as build_reward_tokenizer


@pytest.mark.trainer
@pytest.mark.parametrize("every", [2, 3])
def test_the_last_report_is_of_the_best_model_if_that_is_loaded(make, prompts, monkeypatch, every):
    saving = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_reward", "greater_is_better": True}
    options = saving | best | {"max_steps": 4, "learning_rate": 0.1, "per_device_eval_batch_size": 16}
    trainer = make(ReinforceTrainer, extra={"eval_dataset": prompts}, **options)
    evaluated, evaluate = [], trainer.evaluate

    def falling(*args, **kwargs):  # the first is the best
        metrics = evaluate(*args, **kwargs) | {"eval_reward": -float(len(evaluated))}
        evaluated.append(metrics)
        return metrics

    monkeypatch.setattr(trainer, "evaluate", falling)
    callback = TailReportCallback(trainer, prompts, 50, thresholds=[-1.0], every=every)
    trainer.add_callback(callback)
    trainer.train()
    assert trainer.state.best_global_step == 1
    assert [entry["update"] for entry in callback.history] == [every, 4]
    assert callback.history[-1]["report"]["mean"].value == callback._draw_rewards().mean()
    logged = [entry["tail/mean"] for entry in trainer.state.log_history if "tail/mean" in entry]
    assert logged[-1] == callback.history[-1]["report"]["mean"].value and len(logged) == 2 + (every == 2)


@pytest.mark.trainer
def test_each_set_of_prompts_has_its_own_names(make, prompts):
    trainer = make(ReinforceTrainer, max_steps=1)
    names = ("tail", "rare")
    callbacks = [TailReportCallback(trainer, prompts.select([i]), 2, metric_key_prefix=names[i]) for i in (0, 1)]
    for callback in callbacks:
        trainer.add_callback(callback)
    trainer.train()
    logged = {key: value for entry in trainer.state.log_history for key, value in entry.items()}
    means = [each.history[-1]["report"]["mean"].value for each in callbacks]
    assert [logged[f"{name}/mean"] for name in names] == means
    trainer.add_callback(TailReportCallback(trainer, prompts, 2))
    with pytest.raises(ValueError, match="Several tail reports have `metric_key_prefix='tail'`"):
        trainer.train()


@pytest.mark.trainer
@pytest.mark.parametrize("asynchronous", [False, True])
def test_rewards_get_what_trl_gives_them(make, prompts, asynchronous):
    """Asynchronous ones also the loop that training made, to which a client belongs."""
    steps, loops = [], set()

    def reward(completions, trainer_state, log_extra, log_metric, **kwargs):
        steps.append((trainer_state.global_step, len(completions)))
        log_extra("words", completions)
        log_metric(name="count", value=float(len(completions)))
        return word_reward(completions)

    async def waiting(**columns):
        loops.add(asyncio.get_running_loop())
        return reward(**columns)

    trainer = make(reward_funcs=waiting if asynchronous else reward)
    callback = TailReportCallback(trainer, prompts, 2)
    trainer.add_callback(callback)
    trainer.train()
    assert [entry["update"] for entry in callback.history] == [2]
    assert (2, 8) in steps and loops == ({trainer.async_loop} if asynchronous else set())
    logged = [entry["count"] for entry in trainer.state.log_history if "count" in entry]
    assert logged == [16.0, 16.0]  # of the trainer's own completions alone


def decorated(reward):
    @functools.wraps(reward)
    def judged(**columns):
        return reward(judge=None, **columns)

    return judged


class Judge:
    def __call__(self, completions, answer, *, hint=None, **kwargs):
        return word_reward(completions)


@pytest.mark.trainer
def test_a_column_that_a_reward_needs_is_missed_before_training(make, prompts, tmp_path):
    (tmp_path / "mine.py").write_text("def in_a_file(completions, answer):\n    return [0.0 for _ in completions]\n")
    for name, signature in {"of_labels": "completions, labels", "of_queries": "queries, labels"}.items():
        (tmp_path / f"{name}.py").write_text(
            f"def judge({signature}):\n    return [float(x == 'x') for x in labels]\n"
        )
    from trl_repulse.rewards import RemoteReward, load_reward_function

    labelled = [
        load_reward_function(f"{tmp_path / 'of_labels.py'}:judge", "answer"),
        load_reward_function(f"{tmp_path / 'of_queries.py'}:judge", "answer"),
        RemoteReward("http://localhost:1", label_column="answer"),
    ]

    def needs(completions, answer, **kwargs):
        return word_reward(completions)

    @decorated
    def supplied(completions, judge, **kwargs):
        return word_reward(completions)

    def spare(completions, answer=None, *columns, **kwargs):
        return word_reward(completions)

    with_answer = prompts.add_column("answer", ["x"] * len(prompts))
    for reward in (needs, Judge(), load_reward_function(f"{tmp_path / 'mine.py'}:in_a_file"), *labelled):
        trainer = make(reward_funcs=reward, dataset=with_answer)
        for callback in (TailReportCallback, BeforeAfterCallback):
            with pytest.raises(ValueError, match=r"The reward function '.*' needs `answer`, but the held-out prompts"):
                callback(trainer, prompts)
        TailReportCallback(trainer, with_answer)
    without_labels = load_reward_function(f"{tmp_path / 'of_queries.py'}:judge")
    for reward in (supplied, spare, functools.partial(needs, answer=["x"] * 8), without_labels):
        TailReportCallback(make(reward_funcs=reward), prompts)


@pytest.mark.trainer
def test_rewards_may_share_a_name(make, prompts):
    trainer = make(
        reward_funcs=[lambda completions, value=value, **_: [value] * len(completions) for value in (1.0, 2.0)]
    )
    callback = TailReportCallback(trainer, prompts)
    drawn = draw_completions(trainer, callback.dataset, callback._prompt_ids, 1, 0)
    assert [reward for _, reward in drawn] == [3.0] * len(prompts)


@pytest.mark.trainer
def test_prompts_are_read_with_the_trainers_template(make):
    tokenizer = build_tokenizer(chat_template=TEMPLATE)
    rows = Dataset.from_dict({"prompt": [[{"role": "user", "content": text}] for text in ("the cat", "fish")] * 2})

    for template in ({"thinking": False}, None):
        options = {"chat_template_kwargs": template, "reward_funcs": silent, "dataset": rows}
        trainer = make(ReinforceTrainer, extra={"processing_class": tokenizer}, **options)
        expected = trainer._tokenize_prompts(rows["prompt"][:])[0]
        assert TailReportCallback(trainer, rows)._prompt_ids == expected
        assert (tokenizer.decode(expected[0]) == "the cat bad") == (template is not None)


def test_reward_models_read_messages_with_the_trainers_template(tmp_path):
    tokenizer = build_reward_tokenizer(chat_template=CHAT_TEMPLATE)
    model = save_model(tmp_path / "judge", "llama", tokenizer)[1]
    prompt, completion = messages("the cat", " ran")
    name, function = as_function(model, tokenizer, torch.device("cpu"), {"extra": "bad"})
    text = tokenizer.apply_chat_template(prompt + completion, tokenize=False, extra="bad")
    with torch.no_grad():
        ids = tokenizer([text], return_tensors="pt", add_special_tokens=False)["input_ids"]
        expected = model(input_ids=ids).logits[0, 0].item()
    assert function(prompts=[prompt], completions=[completion]) == [pytest.approx(expected)]
    plain = as_function(model, tokenizer, torch.device("cpu"))[1](prompts=[prompt], completions=[completion])
    assert plain != [pytest.approx(expected)]  # the control


def rows_of(path):
    return [[cell.strip() for cell in line.strip("| \n").split(" | ")] for line in path.read_text().splitlines()]


@pytest.mark.trainer
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


@pytest.mark.trainer
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


@pytest.mark.trainer
def test_prompts_that_are_too_long_are_refused(make):
    with pytest.raises(ValueError, match="exceed the model's context"):
        BeforeAfterCallback(make(), Dataset.from_list([{"prompt": "cat " * 40}]))


@pytest.mark.trainer
def test_rewards_that_draw_random_numbers_leave_those_of_training_as_they_are(make, prompts):
    def reward(completions, **kwargs):
        return [random.random() + np.random.rand() + torch.rand(1).item() for _ in completions]

    trainer = make(reward_funcs=reward)
    table = BeforeAfterCallback(trainer, prompts)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    table.on_train_begin(trainer.args, trainer.state, trainer.control)
    assert len({value for _, value in table._before}) > 1
    assert before == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
