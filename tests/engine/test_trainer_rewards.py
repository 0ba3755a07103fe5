"""What the trainers make of reward functions: weighted sums, raw and transformed rewards, missing ones, faults."""

import copy
import functools
import json
import math

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForSequenceClassification

from trl_repulse import PPOTrainer, ReinforceTrainer, RePULSeGRPOTrainer, RePULSeTrainer
from trl_repulse.data._checks import check_rewards
from trl_repulse.engine.reward_functions import with_checks

from ..conftest import USE_CPU, same_parameters


pytestmark = pytest.mark.trainer

BOTH = pytest.mark.parametrize("trainer_cls", [ReinforceTrainer, RePULSeTrainer], ids=["reinforce", "repulse"])


def words(completions, **kwargs):
    return [float(len(c.split())) for c in completions]


def badness(completions, **kwargs):
    return [float(c.count("bad")) for c in completions]


def weighted(completions, **kwargs):
    return [0.5 * w - 2.0 * b for w, b in zip(words(completions), badness(completions), strict=True)]


def trained(trainer):
    """Trains at once: the seed is set when a trainer is built."""
    trainer.train()
    return trainer


def logs_of(trainer):
    return trainer.state.log_history[0]


def prefixes(trainer_cls):
    return ("", "proposal/") if trainer_cls is RePULSeTrainer else ("",)


TRANSFORMS = {
    "indicator": (
        {"reward_transform": "indicator", "reward_transform_alpha": 5.0, "reward_transform_threshold": -1.0},
        lambda r: r - 5.0 * (r < -1.0),
    ),
    "exponential": (
        {"reward_transform": "exponential", "reward_transform_alpha": 0.5},
        lambda r: r - 0.5 * math.exp(-r),
    ),
    "clip": ({"reward_clip_range": (-0.75, 0.25)}, lambda r: min(max(r, -0.75), 0.25)),
}


@pytest.mark.parametrize("name", TRANSFORMS)
@BOTH
def test_raw_and_transformed_rewards_stand_side_by_side(make, tmp_path, trainer_cls, name):
    settings, transform = TRANSFORMS[name]
    trainer = make(
        trainer_cls,
        reward_funcs=[words, badness],
        reward_weights=[0.5, -2.0],
        log_completions=True,
        save_negatives=True,
        bad_reward_threshold=-0.5,
        max_steps=1,
        **settings,
    )
    trainer.train()
    tables = [trainer._logs] + ([trainer._tables.extra] if trainer_cls is RePULSeTrainer else [])
    for prefix, table in zip(prefixes(trainer_cls), tables, strict=True):
        raw = weighted(table["completion"])
        assert list(table["rewards"]["words"]) == words(table["completion"])
        assert list(table["rewards"]["badness"]) == badness(table["completion"])
        assert list(table["extra"]["reward"]) == raw
        assert list(table["extra"]["reward_transformed"]) == pytest.approx([transform(r) for r in raw])
        assert raw != pytest.approx(list(table["extra"]["reward_transformed"]))
        assert logs_of(trainer)[f"{prefix}reward"] == pytest.approx(sum(raw) / len(raw))
    raw = weighted(trainer._logs["completion"])
    for logged in ("reward_transformed", "return_transformed"):
        assert logs_of(trainer)[logged] == pytest.approx(sum(map(transform, raw)) / len(raw), rel=1e-5)
    assert logs_of(trainer)["return"] == pytest.approx(sum(raw) / len(raw))

    rows = [json.loads(line) for line in (tmp_path / "out" / "negatives.jsonl").read_text().splitlines()]
    assert {row["source"] for row in rows} == {"policy", *(["proposal"] if trainer_cls is RePULSeTrainer else [])}
    for row in rows:
        assert [row["reward"]] == weighted([row["completion"]]) and row["reward"] < -0.5
        assert row["reward_transformed"] == pytest.approx(transform(row["reward"]))


def test_a_column_of_the_same_name_stays_the_functions(make):
    def logging(completions, log_extra, **kwargs):
        log_extra("reward_transformed", ["mine"] * len(completions))
        return words(completions)

    trainer = make(reward_funcs=logging, log_completions=True, max_steps=1, reward_clip_range=(0, 1))
    trainer.train()
    assert set(trainer._logs["extra"]["reward_transformed"]) == {"mine"}


# Missing rewards


@BOTH
def test_none_beside_another_function_adds_nothing(make, trainer_cls):
    def sometimes(completions, **kwargs):
        return [None if b == 0 else b for b in badness(completions)]

    one = trained(make(trainer_cls, reward_funcs=[words, sometimes], max_steps=1))
    other = trained(make(trainer_cls, reward_funcs=[words, badness], max_steps=1))
    assert same_parameters(one.model, other.model)
    assert logs_of(one)["rewards/sometimes/mean"] >= 1 > logs_of(other)["rewards/badness/mean"]


def none_of_cats(completions, **kwargs):
    return [None if "cat" in c else r for c, r in zip(completions, words(completions), strict=True)]


@BOTH
def test_a_sample_that_no_function_judged_is_left_out(make, trainer_cls):
    # Of 16 other draws on an accelerator none may be of a cat
    more = {} if USE_CPU else {"num_generations": 16, "per_device_train_batch_size": 64}
    trainer = make(trainer_cls, reward_funcs=[none_of_cats, none_of_cats], log_completions=True, max_steps=3, **more)
    trainer.train()
    tables = [trainer._logs] + ([trainer._tables.extra] if trainer_cls is RePULSeTrainer else [])
    models = [trainer.model] + ([trainer.proposal.module] if trainer_cls is RePULSeTrainer else [])
    left_out = [["cat" in c for c in table["completion"]] for table in tables]
    assert all(any(column) and not all(column) for column in left_out)
    for table, column in zip(tables, left_out, strict=True):
        assert [math.isnan(r) for r in table["extra"]["reward"]] == column
    advantages = list(trainer._logs["advantages"])
    assert all(a == 0 for a, out in zip(advantages, left_out[0], strict=True) if out) and any(advantages)
    assert all(torch.isfinite(p).all() for model in models for p in model.parameters())
    assert all(math.isfinite(log["reward"]) for log in trainer.state.log_history[:3])


@pytest.mark.parametrize("loss", ["ctl", "ctl_no_second_term", "dpg", "sixo", "vargrad"])
def test_without_any_reward_nothing_moves(make, loss):
    def nothing(completions, **kwargs):
        return [None] * len(completions)

    trainer = make(reward_funcs=nothing, weight_decay=0.0, proposal_loss=loss)
    models = [trainer.model, trainer.proposal.module]
    start = [[p.clone() for p in model.parameters()] for model in models]
    trainer.train()
    for model, before in zip(models, start, strict=True):
        assert all(torch.equal(p, q) for p, q in zip(before, model.parameters(), strict=True))


# Faults


def awaited(function):
    """The same as an asynchronous function."""

    @functools.wraps(function)
    async def later(**kwargs):
        return function(**kwargs)

    return later


KINDS = pytest.mark.parametrize("kind", [lambda function: function, awaited], ids=["sync", "async"])


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (
            [1.0] * 15 + [math.nan],
            "returned nan for completion 15 of 16; return a finite number, or `None` to exclude",
        ),
        ([1.0] * 15 + [torch.tensor(math.nan)], r"returned tensor\(nan\) for completion 15 of 16"),
        ([[1.0, 2.0]] * 16, r"returned \[1.0, 2.0\] for completion 0 of 16"),
        ([1e39] * 16, r"returned 1e\+39 for completion 0 of 16"),  # more than single precision holds
        ([1.0] * 15, "returned 15 rewards for 16 completions; return one for each"),
        (None, "returned None; it must return a list"),
    ],
    ids=lambda value: str(value)[-20:],
)
@KINDS
def test_what_is_no_reward_is_an_error_that_names_the_function(make, result, message, kind):
    def faulty(completions, **kwargs):
        return result

    with pytest.raises(ValueError, match=f"^The reward function 'faulty' {message}"):
        make(reward_funcs=[words, kind(faulty)]).train()


def test_a_models_reward_must_be_finite():
    rewards = torch.tensor([[math.nan, 1.0], [0.0, math.inf]])
    check_rewards(rewards, ["a", "b"], [False, False])  # NaN of a function is its `None`
    with pytest.raises(ValueError, match="^The reward model 'b' returned inf for a completion; check its weights"):
        check_rewards(rewards, ["a", "b"], [False, True])


def test_what_counts_as_a_number():
    checked = with_checks(lambda completions: [True, torch.tensor(2.0), None], "mine")
    assert checked(completions=["a", "b", "c"]) == [1.0, 2.0, None]


@KINDS
def test_an_error_of_a_function_keeps_its_type_and_names_it(make, kind):
    """The function is called once: it may count its calls, pay for them or keep a state."""

    class Down(Exception):
        pass

    calls = []

    def flaky(**kwargs):
        calls.append(0)
        raise Down("no answer")

    with pytest.raises(Down, match="no answer") as error:
        make(reward_funcs=[words, kind(flaky)]).train()
    assert error.value.__notes__ == ["Raised by the reward function 'flaky'."] and calls == [0]


HOT = {"proposal": "hot_policy", "bad_reward_threshold": 2.5}
HOT |= dict.fromkeys(("target_dist_beta", "potential", "alpha", "alpha_normalization"))


@pytest.mark.parametrize(
    ("trainer_cls", "settings"),
    [(ReinforceTrainer, {}), (PPOTrainer, {}), (RePULSeTrainer, {}), (RePULSeTrainer, HOT), (RePULSeGRPOTrainer, HOT)],
)
def test_what_a_function_changes_no_other_call_sees(make, tokenizer, trainer_cls, settings):
    """A function may extend the conversation in place; what is called next, of hot and learned samples too, gets the prompt."""
    seen = []

    def extends(prompts, completions, completion_ids, tags, **kwargs):
        for prompt, completion, ids, tag in zip(prompts, completions, completion_ids, tags, strict=True):
            seen.append((len(prompt), len(completion), tuple(tag)))
            prompt += completion
            completion[0]["content"], tag[0] = "changed", "changed"
            ids.clear()
        return [float(i) for i, _ in enumerate(prompts)]

    def reads(prompts, completions, completion_ids, tags, **kwargs):
        assert all(completion_ids) and all(text[0]["content"] != "changed" for text in completions)
        return extends(prompts, completions, completion_ids, tags)

    rows = [{"prompt": [{"role": "user", "content": text}], "tags": ["a"]} for text in ("the cat", "the dog") * 4]
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    options = {"dataset": Dataset.from_list(rows), "extra": {"processing_class": tokenizer}}
    make(trainer_cls, reward_funcs=[extends, reads], **options, **settings).train()
    assert set(seen) == {(1, 1, ("a",))}


@pytest.mark.parametrize("trainer_cls", [ReinforceTrainer, PPOTrainer, RePULSeTrainer, RePULSeGRPOTrainer])
def test_a_constant_reward_is_said_once(make, tokenizer, caplog, trainer_cls):
    def counts(completions, **kwargs):  # messages that are equal to the text, which there are none of
        return [float(completion.count("bad")) for completion in completions]

    def late(completions, **kwargs):  # of a rare event, which comes to be seen
        calls.append(len(completions))
        return [float(len(calls) > 3 and not i) for i, _ in enumerate(completions)]

    calls, tokenizer = [], copy.deepcopy(tokenizer)
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    dataset = Dataset.from_list([{"prompt": [{"role": "user", "content": "the cat"}]}] * 8)
    options = {"dataset": dataset, "extra": {"processing_class": tokenizer}, "reward_funcs": [counts, late]}
    settings = HOT if "RePULSe" in trainer_cls.__name__ else {}
    with caplog.at_level("WARNING"):
        make(trainer_cls, max_steps=24, logging_steps=1, **options, **settings).train()
    said = [each for each in caplog.messages if "A reward that does not vary" in each]
    assert len(said) == 1 and "`rewards/counts/std` is 0 over updates 1 to 20" in said[0]
    assert "list of messages" in said[0]


def test_functions_of_all_kinds_are_still_called_as_TRL_calls_them(make):
    seen = {}

    def plain(prompts, completions, completion_ids, trainer_state, log_extra, log_metric, **kwargs):
        seen["plain"] = len(prompts) == len(completions) == len(completion_ids)
        log_metric("mine", 2.0)
        return torch.tensor(words(completions))

    class Judge:
        async def __call__(self, completions, **kwargs):
            seen["judge"] = True
            return words(completions)

    given = [plain, Judge()]
    trainer = make(reward_funcs=given, max_steps=1)
    trainer.train()
    assert seen == {"plain": True, "judge": True} and given[0] is plain
    log = logs_of(trainer)
    assert log["mine"] == log["proposal/mine"] == 2.0
    assert log["rewards/plain/mean"] == log["rewards/Judge/mean"]


def test_a_decorator_may_take_what_its_function_does_not(make):
    def short(completions):
        return [-float(len(completion)) for completion in completions]

    @functools.wraps(short)
    def cached(completions, **kwargs):
        return short(completions)

    assert logs_of(trained(make(ReinforceTrainer, reward_funcs=cached, max_steps=1)))["reward"] < 0


def test_a_reward_model_has_no_dropout_and_nan_from_it_is_refused(make, model_dirs):
    model = AutoModelForSequenceClassification.from_pretrained(model_dirs["gpt2"], num_labels=1)
    assert not make(reward_funcs=model.train()).reward_funcs[0].training  # as a `RewardTrainer` leaves it
    torch.nn.init.constant_(model.score.weight, torch.nan)
    with pytest.raises(ValueError, match="returned nan .* check its weights"):
        make(reward_funcs=model).train()
