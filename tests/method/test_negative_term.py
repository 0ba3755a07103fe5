"""What every negative term keeps, also one that a user writes by the documentation alone: the tests that are shipped, and mistakes."""

import json

import pytest
import torch

from trl_repulse import RePULSeGRPOTrainer, RePULSePPOTrainer, RePULSeTrainer
from trl_repulse.method.negative_term import ExtraSamplesTerm, Weights
from trl_repulse.method.testing import NegativeTermTests, coefficients, record_weights


pytestmark = pytest.mark.trainer


class WorstAgain(ExtraSamplesTerm):
    """Draws from the policy once more, and pushes down the worst sample of each prompt."""

    def weigh(self, units, scores, shape):
        rewards = self.services.by_prompt(units.extra.rewards, shape.extra)  # (P, K)
        worst = (rewards == rewards.min(dim=1, keepdim=True).values).float()
        share = worst / worst.sum(dim=1, keepdim=True)
        of_prompts = -self.scheduled("alpha") * shape.extra * share
        return Weights(extra=self.services.by_unit(of_prompts, units.extra.rewards))

    def observe(self, units, scores, weights, shape):
        rewards = self.services.by_prompt(units.extra.rewards, shape.extra)
        self.logs.mean("negative/worst", rewards.min(dim=1).values)

    def source(self, shape):
        from trl_repulse.engine.units import Source

        return Source()


def with_own_term(trainer_cls, term=WorstAgain):
    own = {"build_negative_term": lambda self: term(self.services)}
    return type(f"Own{trainer_cls.__name__}", (trainer_cls,), own)


TERMS = {
    "policy": {"proposal": "policy", "target_dist_beta": -2.0, "reward_cap": 1.0},
    "hot policy": {"proposal": "hot_policy", "bad_reward_threshold": -1.0},
    "learned": {"proposal": "learned", "target_dist_beta": -2.0},
    "of a user": {"proposal": "policy", "target_dist_beta": -2.0},
}
CUT = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 8}


@pytest.mark.parametrize("settings", [{}, CUT, {"num_iterations": 2}], ids=["whole", "cut", "used twice"])
@pytest.mark.parametrize(
    "trainer_cls", [RePULSeTrainer, RePULSePPOTrainer, RePULSeGRPOTrainer], ids=lambda c: c.__name__
)
@pytest.mark.parametrize("term", TERMS)
def test_the_contract(make, term, trainer_cls, settings):
    """A prompt's coefficients are at most 0 and sum to −α·K or to 0, carry no gradient, and change nothing that they are made of."""
    options = {"alpha": 0.7, "alpha_normalization": "none", "num_generations": 4} | TERMS[term] | settings
    cls = with_own_term(trainer_cls) if term == "of a user" else trainer_cls
    trainer = make(cls, **options, max_steps=2, save_strategy="steps", save_steps=1)
    negative = trainer._negative
    seen = record_weights(negative)
    trainer.train()
    assert seen
    for _, _, shape, weights in seen:
        total = 0.0
        for name, units in coefficients(weights):
            size = shape.generations if name == "own" else shape.extra
            assert not units.requires_grad and (units <= 0).all()
            # Each set is divided by its own number of samples in the loss
            total = total + negative.services.by_prompt(units, size).sum(dim=1) / size
        torch.testing.assert_close(total, torch.where(total < 0, -0.7, 0.0))
    assert json.loads(json.dumps(negative.state())) == negative.state()
    if term == "of a user":
        assert any("negative/worst" in log for log in trainer.state.log_history)


@pytest.mark.parametrize("settings", [{}, CUT], ids=["whole", "cut"])
def test_good_samples_of_the_policy_are_not_pushed_down(make, settings):
    """With the indicator's ε alone, all samples of a prompt without a bad one would have the same weight."""
    threshold = TERMS["hot policy"]["bad_reward_threshold"]
    own = {"proposal": "policy", "potential": "indicator", "bad_reward_threshold": threshold}
    trainer = make(RePULSeTrainer, **own, **settings, max_steps=3)
    seen = record_weights(trainer._negative)
    trainer.train()
    bad = torch.cat([(units.own.rewards < threshold).flatten() for units, *_ in seen])
    pushed = torch.cat([(weights.own < 0).flatten() for *_, weights in seen])
    assert 0 < bad.sum() < len(bad) and torch.equal(pushed, bad)


@pytest.mark.parametrize("settings", [{}, CUT], ids=["whole", "cut"])
def test_a_term_needs_weigh_alone(make, settings):
    class WeighsAlone(ExtraSamplesTerm):
        weigh = WorstAgain.weigh

    trainer = make(with_own_term(RePULSeTrainer, WeighsAlone), **TERMS["of a user"], max_steps=1, **settings)
    trainer.train()
    assert len(trainer._tables.extra["prompt"]) == 16


class Shipped(NegativeTermTests):
    """The shipped tests of one term and trainer."""

    trainer_cls, settings = RePULSeTrainer, {}

    @pytest.fixture(autouse=True)
    def _make(self, make):
        self.make = make

    def make_trainer(self, output_dir, **settings):
        return self.make(self.trainer_cls, output_dir=output_dir, **self.settings | settings)


class TestHotPolicy(Shipped):
    settings = TERMS["hot policy"] | {"proposal_temperature": 2.0}


class TestPolicy(Shipped):
    settings = TERMS["policy"]


class TestLearned(Shipped):
    settings = TERMS["learned"]


class TestOfAUser(Shipped):
    trainer_cls, settings = with_own_term(RePULSeTrainer), TERMS["of a user"]


class Mistaken(WorstAgain):
    """Terms that are wrong in one way each, which one of the shipped tests has to notice."""


class Raises(Mistaken):
    def weigh(self, units, scores, shape):
        return Weights(extra=-super().weigh(units, scores, shape).extra)


class ChangesUnits(Mistaken):
    def weigh(self, units, scores, shape):
        units.extra.rewards += 1.0
        return super().weigh(units, scores, shape)


class OfUnitsAlone(Mistaken):
    def weigh(self, units, scores, shape):
        rewards = units.extra.rewards
        worst = (rewards == rewards.min(dim=1, keepdim=True).values).float()
        return Weights(extra=-worst)


class Forgets(Mistaken):
    calls = 0

    def weigh(self, units, scores, shape):
        self.calls += 1
        weights = super().weigh(units, scores, shape)
        return Weights(extra=weights.extra * self.calls)


@pytest.mark.parametrize(
    ("term", "test", "says"),
    [
        (Raises, "test_weights", "extra samples raise"),
        (ChangesUnits, "test_weights", "changes .*proposal_rewards"),
        (Raises, "test_gradient", "did not become less probable"),
        (OfUnitsAlone, "test_processes", "differ"),
        (Forgets, "test_resume", "differs in the resumed run"),
    ],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_mistakes_are_noticed(make, tmp_path, term, test, says):
    tests = Shipped()
    tests.make, tests.settings, tests.trainer_cls = make, TERMS["of a user"], with_own_term(RePULSeTrainer, term)
    with pytest.raises(AssertionError, match=says):
        getattr(tests, test)(tmp_path, *(["whole"] if test == "test_weights" else []))
