"""Runs that are not told which reward is bad, nor a learning rate: both are found at the start, and said."""

import logging
import re
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from peft import LoraConfig
from transformers import TrainerCallback

from trl_repulse import PPOTrainer, ReinforceTrainer, RePULSeGRPOTrainer, RePULSePPOTrainer, RePULSeTrainer
from trl_repulse._rules_of_thumb import bad_threshold_for
from trl_repulse.engine import preparation as _set_up
from trl_repulse.method import hot_policy as _hot_policy
from trl_repulse.method.hot_policy import HotPolicy

from ..conftest import build_model, same_parameters


pytestmark = pytest.mark.trainer

HOT = {"proposal": "hot_policy", "potential": None, "target_dist_beta": None, "proposal_temperature": 2.0}
HOT |= {"alpha": 1.0, "alpha_normalization": "none"}
TRAINERS = [RePULSeTrainer, RePULSePPOTrainer, RePULSeGRPOTrainer]


@pytest.fixture
def few(monkeypatch):
    monkeypatch.setattr(_hot_policy, "_LEAST", 24)


def recorded(trainer):
    """Rewards of the policy's own samples in training, in order."""
    rewards, observe = [], trainer._negative.measured.observe

    def noted(batch):
        if trainer.model.training:
            rewards.extend(batch.flatten().tolist())
        observe(batch)

    trainer._negative.measured.observe = noted
    return rewards


@pytest.mark.parametrize("trainer_cls", TRAINERS)
def test_the_threshold_is_that_of_the_first_samples(make, few, caplog, tmp_path, trainer_cls):
    trainer = make(trainer_cls, max_steps=4, **HOT)
    rewards = recorded(trainer)
    assert trainer.bad_reward_threshold is None
    with caplog.at_level(logging.WARNING, logger=_hot_policy.__name__):
        trainer.train()
    expected = bad_threshold_for(np.array(rewards[:32]))  # of 24 or more: of whole batches of 16
    assert trainer.bad_reward_threshold == expected and trainer.args.bad_reward_threshold is None
    (said,) = [each.getMessage() for each in caplog.records if each.name == _hot_policy.__name__]
    share = np.mean(np.array(rewards[:32]) < expected)
    assert f"It is now {expected:g}: {share:.1%} of the first 32 rewards are under it" in said
    logs = [row for row in trainer.state.log_history if "reward" in row]
    assert [row.get("negative/bad_reward_threshold") for row in logs] == [None, *[pytest.approx(expected)] * 3]
    assert "bad_fraction" not in logs[0]
    for i, row in enumerate(logs[1:], 1):  # of the batch that it was measured on as well
        assert row["bad_fraction"] == pytest.approx(np.mean(np.array(rewards[16 * i : 16 * (i + 1)]) < expected))
    assert "negative/p_bad" in logs[-1] and not any(name.startswith("negative/") for name in logs[0])
    trainer.create_model_card()
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert f"| `bad_reward_threshold` | {expected} |" in card


@pytest.mark.parametrize(("steps", "least"), [(1, 16), (4, 48)])
def test_the_first_log_has_the_share_of_bad_samples(make, monkeypatch, steps, least):
    """The threshold is measured on its last batch, or in the middle: the share is of all samples that the other metrics are of."""
    monkeypatch.setattr(_hot_policy, "_LEAST", least)
    trainer = make(max_steps=steps, logging_steps=steps, **HOT)
    rewards = recorded(trainer)
    trainer.train()
    log = trainer.state.log_history[0]
    share = np.mean(np.array(rewards) < trainer.bad_reward_threshold)
    assert len(rewards) == 16 * steps and share > 0
    assert log["bad_fraction"] == pytest.approx(share) and log["reward"] == pytest.approx(np.mean(rewards), rel=1e-5)


@pytest.mark.parametrize("trainer_cls", TRAINERS)
def test_metrics_that_are_not_known_are_left_out(make, few, prompts, trainer_cls):
    """TRL logs `None`, which callbacks and dashboards do not expect."""
    seen = []
    callback = type("Seen", (TrainerCallback,), {"on_log": lambda self, *args, logs, **_: seen.append(dict(logs))})
    extra = {"callbacks": [callback()], "eval_dataset": prompts}
    trainer = make(trainer_cls, max_steps=4, extra=extra, per_device_eval_batch_size=16, **HOT)
    trainer.evaluate()  # where no sample is bad, as no threshold is known
    trainer.train()
    logged = [*seen, *trainer.state.log_history]
    assert all(isinstance(value, int | float) for logs in logged for value in logs.values())
    ranks = ["proposal/log_p_rank" in logs for logs in seen if "reward" in logs]
    assert not ranks[0] and ranks[-1] and "eval_proposal/log_p_rank" not in seen[0]


@pytest.mark.parametrize("trainer_cls", TRAINERS)
def test_nothing_is_pushed_before(make, few, monkeypatch, trainer_cls):
    pushed, weigh = [], HotPolicy.weigh

    def spy(self, *args):
        found = weigh(self, *args)
        pushed.append((self.bad_reward_threshold, any(x.abs().sum() > 0 for x in (found.own, found.extra))))
        return found

    monkeypatch.setattr(HotPolicy, "weigh", spy)
    make(trainer_cls, max_steps=4, **HOT).train()
    assert any(found for _, found in pushed) and not any(found for known, found in pushed if known is None)
    assert pushed[0][0] is None


def test_equal_rewards_are_waited_out(make, monkeypatch):
    """Of equal rewards none is bad; the threshold comes with the first that differs."""
    monkeypatch.setattr(_hot_policy, "_LEAST", 8)
    calls = []

    def reward(completions, **_):
        calls.append(0)
        return [float(len(calls) <= 2 or i > 0) for i in range(len(completions))]

    trainer = make(reward_funcs=reward, max_steps=4, **HOT)
    trainer.train()
    assert 0 < trainer.bad_reward_threshold < 1


def rewards_of(values):
    """A reward function that gives these, again and again."""
    return lambda completions, **_: [values[i % len(values)] for i in range(len(completions))]


def test_rewards_of_which_most_are_the_lowest_show_no_threshold(make, few):
    trainer = make(reward_funcs=rewards_of([0.0] * 7 + [1.0]), max_steps=4, **HOT)
    message = r"^`bad_reward_threshold` is not set and cannot be measured: 88% of the first 32 rewards are under 0.5, .* `alpha=0`\.$"
    with pytest.raises(ValueError, match=message):
        trainer.train()


def test_a_run_that_is_too_short_to_measure_says_so(make, caplog):
    with caplog.at_level(logging.WARNING, logger=_hot_policy.__name__):
        make(max_steps=2, **HOT).train()
    (said,) = [each.getMessage() for each in caplog.records if each.name == _hot_policy.__name__]
    assert "takes 50 samples to measure. This run draws 32, so that nothing is pushed down" in said


@pytest.mark.parametrize(
    ("rewards", "most"),
    [
        (np.random.default_rng(0).normal(123456.75, 0.03, 500), 0.05),  # a high level, a small spread
        (np.random.default_rng(1).normal(-3e-5, 1e-5, 500), 0.05),
        (np.random.default_rng(2).normal(4e4, 2e4, 500), 0.05),
        (np.repeat([0.0, 1.0], [5, 495]), 0.01),
        (np.repeat([1.0, 2.0, 5.0], [30, 200, 270]), 0.06),
    ],
)
def test_the_worst_few_percent_are_under_the_threshold(rewards, most):
    assert 0.005 <= np.mean(rewards < bad_threshold_for(rewards)) <= most


def with_an_extreme(rewards, extreme):
    return np.append(rewards[:-1], extreme)


@pytest.mark.parametrize("extreme", [-3000.0, 1e4, -1e30])
@pytest.mark.parametrize("count", [50, 500])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("level", [5.0, 8.0])
def test_one_extreme_reward_does_not_move_the_threshold(level, scale, count, extreme):
    rewards = scale * np.random.default_rng(0).normal(level, 1.0, count)
    plain, found = bad_threshold_for(rewards), bad_threshold_for(with_an_extreme(rewards, extreme))
    share = np.mean(with_an_extreme(rewards, extreme) < found)
    assert 0.01 <= share <= 0.03
    if count == 500:
        assert found == pytest.approx(plain, abs=scale)  # the deviation's power of ten


@pytest.mark.parametrize(
    ("rewards", "share"),
    [
        (with_an_extreme(np.full(500, 8.0), -3000.0), 1 / 500),
        (with_an_extreme(np.full(500, 8.0), 1e4), 499 / 500),  # which a run refuses: it is not rare
        (with_an_extreme(np.repeat([-1.0, 1.0, 2.0], [100, 200, 200]), -3000.0), 1 / 500),
        (with_an_extreme(np.repeat([-1.0, 1.0, 2.0], [5, 200, 295]), 1e4), 5 / 500),
        (with_an_extreme(np.repeat([0.1, 0.3], [5, 495]), 1e38), 5 / 500),
        (np.repeat([0.9, 1.0], [30, 470]), 30 / 500),
    ],
)
def test_of_equal_rewards_all_or_none_are_bad(rewards, share):
    assert np.mean(rewards < bad_threshold_for(rewards)) == share


def test_an_evaluation_measures_nothing(make, few, prompts):
    trainer = make(extra={"eval_dataset": prompts}, per_device_eval_batch_size=16, **HOT)
    for _ in range(4):
        trainer.evaluate()
    assert trainer.bad_reward_threshold is None and not trainer._negative.measured._rewards


@pytest.mark.parametrize(("updates", "samples"), [(1000, 500), (40, 64), (10, 50)])
def test_how_many_samples(make, updates, samples):
    trainer = make(max_steps=updates, **HOT)
    trainer.state.max_steps = updates
    trainer.model.train()
    measured, count = trainer._negative.measured, 0
    while measured.value is None:
        measured.observe(torch.tensor([float(count)], device=trainer.model.device))
        count += 1
    assert count == samples


@pytest.mark.thorough
@pytest.mark.parametrize("step", [1, 2, 4])
def test_a_resumed_run_measures_the_same(make, monkeypatch, tmp_path, step):
    """Before there are enough samples, and after."""
    monkeypatch.setattr(_hot_policy, "_LEAST", 40)
    settings = HOT | {"save_strategy": "steps", "save_steps": 1, "max_steps": 5, "optim": "adamw_torch"}
    whole = make(output_dir=str(tmp_path / "whole"), **settings)
    whole.train()
    assert whole.bad_reward_threshold is not None
    folder = tmp_path / "resumed"
    shutil.copytree(tmp_path / "whole", folder)
    for later in range(step + 1, 6):
        shutil.rmtree(folder / f"checkpoint-{later}")
    resumed = make(output_dir=str(folder), **settings)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.bad_reward_threshold == whole.bad_reward_threshold
    assert same_parameters(resumed.model, whole.model)
    with pytest.raises(ValueError, match="bad_reward_threshold"):
        make(output_dir=str(folder), **settings | {"bad_reward_threshold": -1.0}).train(resume_from_checkpoint=True)


# Learning rate


@pytest.mark.parametrize("adapter", [False, True])
@pytest.mark.parametrize("trainer_cls", [ReinforceTrainer, RePULSeTrainer, PPOTrainer, RePULSePPOTrainer])
def test_a_learning_rate_for_the_size(make, tokenizer, monkeypatch, trainer_cls, adapter):
    said = []
    monkeypatch.setattr(_set_up.logger, "warning", said.append)
    model = build_model("gpt2", len(tokenizer))
    of_all = model.num_parameters()
    peft_config = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["c_attn"]) if adapter else None
    extra = {"processing_class": tokenizer, "peft_config": peft_config}
    trainer = make(trainer_cls, model=model, extra=extra, learning_rate=None, max_steps=1, optim="adamw_torch")
    expected = 3e-3 if adapter else 6e-4
    (text,) = [each for each in said if "learning_rate" in each]
    parameters = re.search(r"for ([\d,]+) parameters", text)[1]
    assert int(parameters.replace(",", "")) >= of_all and f"It is now {expected:g}," in text
    assert trainer.args.learning_rate == expected
    trainer.train()
    assert trainer.optimizer.param_groups[0]["lr"] == expected
    for second in trainer.second_models.values():
        assert second.optimizer.param_groups[0]["lr"] == expected


class Policy(torch.nn.Linear):
    """1.24 billion parameters that are nowhere."""

    def __init__(self):
        super().__init__(1, int(1.24e9), bias=False, device="meta")


def test_the_rate_is_that_of_the_size(make):
    trainer = make(learning_rate=None)
    trainer.args.learning_rate = None
    _set_up.set_learning_rate(trainer, Policy())
    assert trainer.args.learning_rate == 3e-7


def test_parameters_of_4_bits_are_counted_as_such():
    class Params4bit(torch.nn.Parameter):  # by its name, as transformers knows it
        pass

    packed = Params4bit(torch.zeros(32, 1, dtype=torch.uint8), requires_grad=False)
    assert _set_up._count(packed) == 64 and _set_up._count(torch.nn.Parameter(torch.zeros(32, 1))) == 32


def test_a_configuration_serves_two_trainers(make, model_dirs, prompts, reward):
    args = make(learning_rate=1e-6).args
    args.learning_rate = None
    given = {"reward_funcs": reward, "args": args, "train_dataset": prompts}
    first = RePULSeTrainer(model=model_dirs["gpt2"], **given)
    adapter = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["c_attn"])
    second = RePULSeTrainer(model=model_dirs["gpt2"], peft_config=adapter, **given)
    assert (first.args.learning_rate, second.args.learning_rate, args.learning_rate) == (6e-4, 3e-3, None)


def test_an_optimizer_brings_its_rate(make, tokenizer):
    model = build_model("gpt2", len(tokenizer))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.123)
    extra = {"processing_class": tokenizer, "optimizers": (optimizer, None)}
    assert make(ReinforceTrainer, model=model, extra=extra, learning_rate=None).args.learning_rate == 0.123


@pytest.mark.parametrize("section", ["optimizer", "scheduler"])
def test_a_section_of_deepspeed_needs_the_rate(make, section):
    trainer = make(learning_rate=None)
    trainer.args.learning_rate = None
    plugin = SimpleNamespace(deepspeed_config={section: {}})
    trainer.accelerator = SimpleNamespace(state=SimpleNamespace(deepspeed_plugin=plugin))
    with pytest.raises(ValueError, match="`learning_rate` is not set, and DeepSpeed's configuration"):
        _set_up.set_learning_rate(trainer, trainer.model)


def test_grpo_keeps_the_rate_of_trl_and_warns(make, tokenizer, monkeypatch):
    said = []
    monkeypatch.setattr(_set_up.logger, "warning_once", said.append)
    model = build_model("gpt2", len(tokenizer))
    for rate in (1e-6, 2e-6):
        trainer = make(RePULSeGRPOTrainer, model=model, extra={"processing_class": tokenizer}, learning_rate=rate)
    (text,) = [each for each in said if "learning_rate" in each]
    assert f"a model of {model.num_parameters():,} parameters hardly changes; set it, e.g. to 0.0006" in text
    said.clear()
    trainer.args.learning_rate = 1e-6
    _set_up.set_learning_rate(trainer, Policy())
    assert not said and trainer.args.learning_rate == 1e-6
