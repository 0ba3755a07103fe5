"""The dual variable that holds a policy to a rate of bad outputs: its step, where it ends, and what a trainer does with it."""

import math
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from trl_repulse import ReinforceTrainer, RePULSeTrainer
from trl_repulse.engine.logs import Logs
from trl_repulse.math.objective import dual_step
from trl_repulse.method import constraint as _constraint
from trl_repulse.method.constraint import Constraint

from ..conftest import same_parameters
from ..trainers.test_trainer_math import RecordedReinforce, RecordedRePULSe, run  # noqa: F401


LIMIT = {"max_bad_probability": 0.1, "bad_reward_threshold": -1.0, "constraint_learning_rate": 0.5}
HOT = {"proposal": "hot_policy", "proposal_temperature": 2.0}


# The step


def test_the_step_is_up_above_the_limit_and_down_below_it():
    assert dual_step(2.0, 0.03, 0.01, 0.02, 0.1) == pytest.approx(2.0 * math.exp(0.1))
    assert dual_step(2.0, 0.0, 0.01, 0.02, 0.1) == pytest.approx(2.0 * math.exp(-0.05))
    assert dual_step(2.0, 0.01, 0.01, 0.3, 0.1) == 2.0
    assert dual_step(2.0, 1.0, 0.01, 0.01, 0.2) == pytest.approx(2.0 * math.exp(1.0))


@pytest.mark.parametrize("limit", [0.1, 1e-3, 1e-5])
def test_at_the_limit_it_does_not_move_on_average(limit):
    """However few of 64 samples are bad; an estimate that is clipped more closely would move it down."""

    def drift(estimate):
        bad = torch.arange(65, dtype=torch.float64)
        prob = torch.distributions.Binomial(64, torch.tensor(limit, dtype=torch.float64)).log_prob(bad).exp()
        scale = max(limit, 0.1 / 64 / 0.25)
        return sum(
            p.item() * math.log(dual_step(1.0, estimate(k.item() / 64), limit, scale, 0.1))
            for p, k in zip(prob, bad, strict=True)
        )

    assert abs(drift(lambda share: share)) < 1e-7
    assert drift(lambda share: min(share, 2 * limit)) < -1e-5  # the control


@pytest.mark.parametrize("start", [1e-3, 1.0, 30.0])
@pytest.mark.parametrize("limit", [3e-2, 3e-4, 1e-6])
def test_exact_policies_end_at_the_limit(start, limit):
    """With p_0·exp((r − cost·1[bad]) / k), the best policy at each cost, P(bad) ends at the limit, from either side."""
    generator = torch.Generator().manual_seed(0)
    reward, log_ref = torch.randn(2, 50, dtype=torch.float64, generator=generator)
    bad, cost, average = reward < -1.0, start, None
    for _ in range(3000):
        p_bad = (log_ref + (reward - cost * bad) / 0.5).softmax(0)[bad].sum().item()
        average = p_bad if average is None else average
        cost = dual_step(cost, p_bad, limit, max(limit, average), 0.02)
        average += 0.05 * (p_bad - average)
    free = (log_ref + reward / 0.5).softmax(0)[bad].sum().item()
    if free > limit:
        assert p_bad == pytest.approx(limit, rel=1e-2)
    else:
        assert p_bad <= free and cost < start * 1e-6  # the constraint does not bind, and goes


def constraint_of(start, limit, rate):
    """A constraint of one process."""
    args = SimpleNamespace(max_bad_probability=limit, constraint_learning_rate=rate)
    accelerator = SimpleNamespace(device="cpu", gather=lambda x: x)
    logs = Logs(accelerator, {"train": defaultdict(list)}, SimpleNamespace(training=True))
    return Constraint(args, logs, start)


def constrained_policy(role, start, resumed_at=None, updates=1000):
    """P(bad) at each update of a policy over 20 outputs, one of them bad, and the multipliers; 64 samples give each estimate."""
    generator = torch.Generator().manual_seed(0)
    reference = torch.tensor([0.004] + [0.996 / 19] * 19, dtype=torch.float64)
    bad = torch.eye(20, dtype=torch.float64)[0]
    # At this KL coefficient the best policy without a constraint has P(bad) = 0.076
    reward = bad * 0.5 * math.log(0.076 / 0.924 * 0.996 / 0.004)
    logits, constraint = reference.log(), constraint_of(start, limit=0.02, rate=0.05)
    found, multipliers = [], []
    for update in range(updates):
        if update == resumed_at:
            state, constraint = constraint.state(), constraint_of(start, limit=0.02, rate=0.05)
            constraint.load_state(state)
        p, multiplier = logits.softmax(0), constraint.multiplier
        found.append(p[0].item())
        multipliers.append(multiplier)
        gain = reward - 0.5 * (p / reference).log()
        if role == "cost":
            gain = gain - multiplier * bad
        gradient = p * (gain - p @ gain)
        if role == "alpha":
            gradient = gradient - multiplier * (bad - p)  # of log P(bad)
        constraint.observe(torch.rand(64, generator=generator) < p[0], resolution=1.0)
        constraint.update()
        logits = logits + 0.4 * gradient
    return torch.tensor(found), multipliers


@pytest.mark.parametrize(("role", "start"), [("cost", 1.0), ("cost", 10.0), ("alpha", 0.03)])
def test_it_holds_after_a_time_in_which_it_was_not_needed(role, start, monkeypatch):
    """P(bad) begins far below the limit, and the multiplier falls; then the reward drives P(bad) over the limit."""
    p_bad, multipliers = constrained_policy(role, start)
    assert p_bad[:200].max() < 0.02 and min(multipliers) < 0.1 * start
    assert p_bad[500:].mean() < 1.2 * 0.02 and p_bad.max() < 2 * 0.02
    assert multipliers == constrained_policy(role, start, resumed_at=300)[1]
    monkeypatch.setattr(_constraint, "_SHIFT", 0.0)  # the control: its logarithm alone moves
    assert constrained_policy(role, start)[0].max() > 2.5 * 0.02


# In a trainer


def replayed(logs, start, resolution, rate=0.5, limit=0.1, forgetting=0.05):
    """The multipliers that the logged estimates give."""
    multipliers, average = [start], logs[0]["constraint/p_bad"]
    for log in logs:
        p_bad = log["constraint/p_bad"]
        factor = math.exp(rate * (p_bad - limit) / max(average, limit, rate * resolution / 0.25))
        multipliers.append(max((multipliers[-1] + 0.1 * start) * factor - 0.1 * start, 1e-6 * start))
        average += forgetting * (p_bad - average)
    return multipliers


INDICATOR = {"alpha": 0.3, "potential": "indicator", "target_dist_beta": -10.0}
CASES = {
    "cost": (ReinforceTrainer, {}, 1.0),
    "cost, RePULSe without a term": (RePULSeTrainer, {"alpha": 0.0}, 1.0),
    "alpha, own samples": (RePULSeTrainer, {"proposal": "policy", "alpha": 0.3}, 0.3),
    "alpha, learned": (RePULSeTrainer, INDICATOR | {"proposal": "learned"}, 0.3),
    "alpha, hot": (RePULSeTrainer, INDICATOR | HOT, 0.3),
}


@pytest.mark.trainer
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if "hot" in case else pytest.mark.thorough) for case in CASES]
)
def test_the_multiplier_follows_what_is_seen(make, case):
    trainer_cls, settings, start = CASES[case]
    trainer = make(trainer_cls, max_steps=3, **LIMIT, **settings)
    trainer.train()
    logs = trainer.state.log_history[:-1]
    expected = replayed(logs, start, 0 if "hot" in case else 1 / 16)
    assert [log["constraint/multiplier"] for log in logs] == pytest.approx(expected[:-1], rel=1e-6)
    assert trainer.constraint.multiplier == pytest.approx(expected[-1], rel=1e-6) and len(set(expected)) > 1
    for log, multiplier in zip(logs, expected, strict=False):
        if "cost" in case:
            cost = log["reward"] - log["reward_transformed"]
            assert cost == pytest.approx(multiplier * log["bad_fraction"], abs=1e-5)
        p_bad = log["negative/p_bad" if "hot" in case else "bad_fraction"]
        assert log["constraint/p_bad"] == pytest.approx(p_bad, abs=1e-7)
    if "cost" not in case:
        assert trainer._negative.scheduled("alpha") == trainer.constraint.multiplier
        assert not trainer.args.charges_bad


@pytest.mark.thorough
@pytest.mark.trainer
def test_it_never_vanishes(make):
    trainer = make(ReinforceTrainer, max_steps=3, **LIMIT | {"bad_reward_threshold": -100.0})
    trainer.constraint.multiplier = 1.1e-6
    trainer.train()
    assert trainer.constraint.multiplier == 1e-6


@pytest.mark.trainer
def test_it_stays_finite_and_says_that_a_rate_is_out_of_reach(make, caplog):
    trainer = make(ReinforceTrainer, **LIMIT)
    constraint = trainer.constraint
    constraint.multiplier = 1e38
    good, bad = trainer._transform(torch.tensor([[1.0, -9.0]]))[0].tolist()
    assert good == 1.0 and bad < -1e37
    trainer.model.train()
    constraint.observe(torch.zeros(4), resolution=1.0)
    constraint.update()
    assert constraint.multiplier == 1e6 and "out of reach" not in caplog.text  # the rate is held
    constraint.observe(torch.ones(4), resolution=1.0)
    constraint.update()
    assert constraint.multiplier == 1e6 and "out of reach; raise it" in caplog.text


@pytest.mark.trainer
@pytest.mark.parametrize(
    "trainer_cls",
    [RecordedReinforce, pytest.param(RecordedRePULSe, marks=pytest.mark.thorough)],
    ids=["cost", "alpha"],
)
@pytest.mark.parametrize(
    "batches",
    [*(pytest.param(each, marks=pytest.mark.thorough) for each in ((8, 1), (4, 2))), (1, 8)],
    ids=lambda b: f"{b[0]}x{b[1]}",
)
def test_the_multiplier_does_not_depend_on_how_a_batch_is_cut(run, trainer_cls, batches):  # noqa: F811
    """Three updates on recorded completions, of which two of eight are bad: the estimate is the same each time."""
    settings = LIMIT | {"bad_reward_threshold": -2.0}
    trainer, *_ = run("gpt2", *batches, trainer_cls=trainer_cls, max_steps=3, **settings)
    share = trainer.state.log_history[0]["bad_fraction"]
    assert 0.1 < share < 1
    steps = 3 * 0.5 * (share - 0.1) / max(share, 0.5 / 8 / 0.25)
    start = 1.0 if trainer_cls is RecordedReinforce else trainer.args.alpha
    assert trainer.constraint.multiplier == pytest.approx(start * (1.1 * math.exp(steps) - 0.1), rel=1e-6)


@pytest.mark.thorough
@pytest.mark.trainer
def test_reused_generations_are_counted_once(make):
    trainer = make(ReinforceTrainer, max_steps=4, num_iterations=2, **LIMIT)
    trainer.train()
    logs = trainer.state.log_history[:-1]
    assert ["constraint/p_bad" in log for log in logs] == [True, False, True, False]
    multipliers = [log["constraint/multiplier"] for log in logs]
    assert multipliers[1] == multipliers[2] != multipliers[0]


@pytest.mark.thorough
@pytest.mark.trainer
def test_it_goes_on_from_a_checkpoint_to_the_bit(make, tmp_path, monkeypatch):
    settings = LIMIT | {"bad_reward_threshold": 0.2, "optim": "adamw_torch", "max_steps": 4}
    settings |= {"save_strategy": "steps", "save_steps": 2}

    def trained(folder, resume=None):
        trainer = make(ReinforceTrainer, output_dir=str(tmp_path / folder), **settings)
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    checkpoint = str(tmp_path / "whole" / "checkpoint-2")
    whole, resumed = trained("whole"), trained("resumed", checkpoint)
    assert resumed.constraint.state() == whole.constraint.state()
    assert same_parameters(whole.model, resumed.model)
    monkeypatch.setattr(Constraint, "load_state", lambda self, state: None)  # the control
    begun_anew = trained("anew", checkpoint)
    assert begun_anew.constraint.multiplier != whole.constraint.multiplier
    assert not same_parameters(whole.model, begun_anew.model)
