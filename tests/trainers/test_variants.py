"""Each variant of RePULSe, by configuration, moves both models where it should, against a control, by exact evaluation.

The proposal must end with more of its mass on bad outputs than it started with; the policy must end with less than REINFORCE leaves in the
same number of updates, which lowers it too. 16 samples a prompt, so that the margins are well beyond what the seed changes.
"""

import math

import pytest

from ..conftest import USE_CPU


pytestmark = pytest.mark.trainer

SETTINGS = {
    "max_steps": 30,
    "num_generations": 16,
    "per_device_train_batch_size": 64,
    "alpha": 0.15,
    "alpha_normalization": "none",
    "target_dist_beta": -5.0,
    "learning_rate": 2e-3,
    "proposal_learning_rate": 1e-2,
}
# Settings, and the least difference in log P(bad) to REINFORCE, in nats
VARIANTS = {
    "ctl": ({}, 1.0),
    "ctl, no second term": ({"proposal_loss": "ctl_no_second_term"}, 1.0),
    "ctl, prefix": ({"proposal_parameterization": "prefix"}, 1.0),
    "dpg": ({"proposal_loss": "dpg"}, 1.0),
    "sixo": ({"proposal_loss": "sixo", "proposal_learning_rate": 2e-2}, 1.0),
    "vargrad": ({"proposal_loss": "vargrad"}, 1.0),
    "indicator": ({"potential": "indicator", "bad_reward_threshold": -1.0}, 0.5),
    "class": ({"potential": "class", "target_dist_beta": 4.0, "target_class": 0}, 0.3),
    "negative-REINFORCE": ({"negative_loss": "reinforce"}, 1.0),
    "negative-REINFORCE, policy's baseline": ({"negative_loss": "reinforce", "negative_baseline": "policy"}, 1.0),
    "negative-REINFORCE, proposal's baseline": (
        {"negative_loss": "reinforce", "negative_baseline": "proposal", "alpha": 0.3},
        1.0,
    ),
    "two proposal updates": ({"proposal_updates_per_step": 2}, 0.8),
    "after": ({"proposal_update_order": "after"}, 1.0),
    "REINFORCE++-baseline": ({"baseline": "group_mean", "normalize_advantages": True}, 1.0),
}


@pytest.fixture
def run(make, evaluator):
    """Exact numbers of the initial policy, the trained policy and the trained proposal (`None` without one)."""

    def run(**kwargs):
        trainer = make(**(SETTINGS | kwargs))
        start = evaluator.evaluate(trainer.model)
        trainer.train()
        proposal = None if trainer.proposal is None else evaluator.evaluate(trainer.proposal.module)
        return start, evaluator.evaluate(trainer.model), proposal

    return run


_CONTROLS = {}


@pytest.fixture
def reinforce(run):
    """log P(bad) that REINFORCE alone leaves, by the number of updates; trained once each."""

    def reinforce(**kwargs):
        key = tuple(sorted(kwargs.items()))
        if key not in _CONTROLS:
            _CONTROLS[key] = run(alpha=0.0, **kwargs)[1].log_prob_bad
        return _CONTROLS[key]

    return reinforce


@pytest.mark.thorough
@pytest.mark.parametrize("name", VARIANTS)
def test_proposal_gains_and_policy_loses_bad_outputs(run, reinforce, name):
    settings, margin = VARIANTS[name]
    start, policy, proposal = run(**settings)
    assert proposal.log_prob_bad > start.log_prob_bad + 1
    assert proposal.expected_reward < start.expected_reward - 0.2
    assert reinforce() < start.log_prob_bad - 1  # the control is no easy one
    assert policy.log_prob_bad < reinforce() - (margin if USE_CPU else 0.0)  # by how much depends on the draws


def test_the_class_decides_the_direction(run):
    """The control of the class potential: seeking class 1, high rewards, the proposal leaves the bad outputs."""
    start, _, proposal = run(potential="class", target_dist_beta=4.0, target_class=1, learning_rate=0.0)
    assert proposal.log_prob_bad < start.log_prob_bad - 0.5
    assert proposal.expected_reward > start.expected_reward + 0.2


def test_more_proposal_updates_take_the_proposal_further(run):
    settings = {"learning_rate": 0.0, "proposal_learning_rate": 3e-3, "max_steps": 4}
    start, _, one = run(**settings)
    _, _, three = run(proposal_updates_per_step=3, **settings)
    assert start.expected_reward > one.expected_reward > three.expected_reward + 0.3


@pytest.mark.thorough
def test_a_schedule_of_alpha_lies_between_its_ends(run, reinforce):
    start, constant, _ = run()
    _, scheduled, _ = run(alpha_start=1e-3)
    assert constant.log_prob_bad + 0.3 < scheduled.log_prob_bad < reinforce() - 0.5


def test_a_schedule_of_beta_lies_between_its_ends(run):
    settings = {"learning_rate": 0.0, "max_steps": 8}
    seeds = [2] if USE_CPU else range(6)  # in one run of 8 updates with other draws the ends may change places
    weak, scheduled, strong = (
        sum(
            run(target_dist_beta=end, target_dist_beta_start=start, seed=seed, **settings)[2].log_prob_bad
            for seed in seeds
        )
        / len(seeds)
        for start, end in ((None, -0.05), (-0.05, -5.0), (None, -5.0))
    )
    margin = 0.5 if USE_CPU else 0.1
    assert weak + margin < scheduled < strong - margin


# The policy as its own proposal


@pytest.mark.parametrize("alpha", [0.5, 2.0])
def test_the_policy_as_proposal_loses_bad_outputs_while_it_draws_them(run, reinforce, alpha):
    start, policy, proposal = run(proposal="policy", alpha=alpha, max_steps=6)
    assert proposal is None
    assert policy.log_prob_bad < reinforce(max_steps=6) - 0.1 < start.log_prob_bad - 0.5


def by_hand(rewards, beta):
    """ESS and largest weight of softmax(β·r) and the log of the mean of exp(β·r), of one prompt's rewards."""
    w = [math.exp(beta * r) for r in rewards if r is not None]
    return sum(w) ** 2 / sum(x * x for x in w), max(w) / sum(w), math.log(sum(w) / len(w))


@pytest.mark.parametrize(
    "batches", [{}, {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4}], ids=["whole", "cut"]
)
def test_the_weights_of_the_policy_as_proposal_are_logged(make, reward, batches):
    def partial(completions, **kwargs):
        return [None if len(c) > 8 else r for c, r in zip(completions, reward(completions), strict=True)]

    settings = {"num_generations": 8, "max_steps": 1, "log_completions": True, **batches}
    trainer = make(reward_funcs=partial, proposal="policy", **({"per_device_train_batch_size": 16} | settings))
    trainer.train()
    log = trainer.state.log_history[0]
    groups = {}
    for prompt, completion in zip(trainer._logs["prompt"], trainer._logs["completion"], strict=True):
        groups.setdefault(prompt, []).extend(partial([completion]))
    assert any(None in group for group in groups.values())
    expected = [by_hand(group, -2.0) for group in groups.values()]
    ess, share, log_z = zip(*expected, strict=True)
    assert log["negative/ess"] == pytest.approx(sum(ess) / len(ess), rel=1e-4)
    assert log["negative/ess_min"] == pytest.approx(min(ess), rel=1e-4)
    assert log["negative/max_weight"] == pytest.approx(sum(share) / len(share), rel=1e-4)
    assert log["negative/log_z"] == pytest.approx(sum(log_z) / len(log_z), rel=1e-4, abs=1e-5)
