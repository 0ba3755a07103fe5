"""CVaR of rewards: what it is, its gradient by enumeration, and its bias where the quantile is that of the same samples.

Axis letters: P prompts, S sequences, M samples, K outcomes.
"""

import itertools
import math

import pytest
import torch

from trl_repulse.math.objective import compute_advantages, cvar_rewards, cvar_schedule, policy_gradient_loss

from .test_exact import World, finite_differences, gradient, relative_error


NAN = math.nan
KL = 0.4


def double(values):
    return torch.tensor(values, dtype=torch.float64)


def worst_mean(rewards, level):
    """The mean of the worst share of a list, with the last of them in part."""
    left, total = level * len(rewards), 0.0
    for reward in sorted(rewards):
        total += min(left, 1.0) * reward
        left -= min(left, 1.0)
    return total / (level * len(rewards))


@pytest.mark.parametrize("level", [0.1, 0.2, 0.3, 0.5, 0.9, 1.0])
def test_the_mean_is_that_of_the_worst_share(level):
    rewards = torch.randn(4, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for group, tail in zip(rewards, cvar_rewards(rewards, level), strict=True):
        assert tail.mean().item() == pytest.approx(worst_mean(group.tolist(), level), abs=1e-12)


def test_cvar_rewards_by_hand():
    rewards = double([[5.0, -3.0, 1.0, 0.0], [2.0, 2.0, 2.0, -2.0]])
    # Half of four is two: each is measured from the third. A quarter is one, measured from the second.
    assert torch.equal(cvar_rewards(rewards, 0.5), double([[1.0, -7.0, 1.0, -1.0], [2.0, 2.0, 2.0, -6.0]]))
    assert torch.equal(cvar_rewards(rewards, 0.25), double([[0.0, -12.0, 0.0, 0.0], [2.0, 2.0, 2.0, -14.0]]))
    torch.testing.assert_close(cvar_rewards(rewards, 1.0), rewards)
    assert not cvar_rewards(rewards.requires_grad_(), 0.5).requires_grad


def test_a_share_that_is_a_whole_number_is_not_rounded_up():
    rewards = torch.arange(101, dtype=torch.float64)[None]
    assert 0.07 * 100 > 7  # in floating point
    tail = cvar_rewards(rewards, 0.07)
    assert (tail < 7).sum() == 7 and tail[0, 7] == 7


def test_samples_left_out_are_in_no_share():
    rewards = double([[NAN, 4.0, -1.0, 2.0, NAN, 3.0], [NAN] * 6])
    tail = cvar_rewards(rewards, 0.5)
    assert torch.equal(tail[0, [1, 2, 3, 5]], cvar_rewards(rewards[:1, [1, 2, 3, 5]], 0.5)[0])
    assert torch.equal(tail.isnan(), rewards.isnan())
    assert not torch.equal(tail[0, [1, 2, 3, 5]], cvar_rewards(rewards.nan_to_num(0.0), 0.5)[0, [1, 2, 3, 5]])


@pytest.mark.parametrize("level", [0.0, -0.1, 1.1, NAN])
def test_refused_levels(level):
    with pytest.raises(ValueError, match="`level` must be above 0"):
        cvar_rewards(double([[1.0, 2.0]]), level)


def test_the_schedule_falls_from_all_rewards_to_the_level():
    assert [cvar_schedule(0.2, 0.5, progress) for progress in (0.0, 0.25, 0.5, 1.0)] == [1.0, 0.6, 0.2, 0.2]
    assert cvar_schedule(0.2, 0.0, 0.0) == 0.2
    assert cvar_schedule(0.2, 1.0, 0.5) == pytest.approx(0.6)


# By enumeration


def exact_cvar(prob, reward, level):
    """CVaR of a distribution (S,) of rewards (S,), which carries gradient of its probabilities."""
    order = reward.argsort()
    prob, reward = prob[order], reward[order]
    before = prob.cumsum(0) - prob
    return (torch.minimum((level - before).clamp(min=0), prob) * reward).sum() / level


def policy_gradient(world, credits):
    """Expected gradient of REINFORCE with these credits (P, S)."""
    prob = world.string_prob(world.policy)

    def loss(table):
        return policy_gradient_loss(world.raw_log_prob(table), world.mask, prob * credits, "sum", denominator=1)

    return gradient(loss, world.policy)


@pytest.fixture
def world():
    """A policy with probabilities that are multiples of 1/4^T, so that a population has exactly its distribution."""
    world = World(ending=False)
    world.policy = world.drawn_from
    return world


def credits_of(world, level, over):
    """What [`cvar_rewards`] makes of all strings' rewards, from a population of four times as many."""
    population = world.draw(world.reward).repeat(1, 4)  # (P, M)
    shape = population.shape
    groups = population if over == "prompt" else population.view(1, -1)
    tail = cvar_rewards(groups, level).view(shape)
    by_string = torch.zeros_like(world.reward)
    return by_string.scatter_(1, world.rows.repeat(1, 4), tail)  # the same for all that are the same


def objective(world, level, over):
    def cvar(table):
        prob = world.string_prob(table)
        if over == "batch":
            return -exact_cvar(prob.flatten() / len(prob), world.reward.flatten(), level) * len(prob)
        return -sum(exact_cvar(*row, level) for row in zip(prob, world.reward, strict=True))

    return cvar


@pytest.mark.exact
@pytest.mark.parametrize("over", ["batch", "prompt"])
@pytest.mark.parametrize("level", [0.11, 0.4, 1.0])
def test_the_gradient_is_that_of_cvar(world, level, over):
    expected = finite_differences(objective(world, level, over), world.policy)
    assert relative_error(policy_gradient(world, credits_of(world, level, over)), expected) <= 1e-6


@pytest.mark.exact
@pytest.mark.parametrize("over", ["batch", "prompt"])
def test_other_credits_would_be_noticed(world, over):
    """Controls: the other group, another level, and the worst share with its rewards as they are."""
    expected = finite_differences(objective(world, 0.4, over), world.policy)
    other = {"batch": "prompt", "prompt": "batch"}[over]
    assert relative_error(policy_gradient(world, credits_of(world, 0.4, other)), expected) > 1e-2
    assert relative_error(policy_gradient(world, credits_of(world, 0.3, over)), expected) > 1e-2
    tail = credits_of(world, 0.4, over)
    in_tail = tail < tail.amax(dim=1, keepdim=True)
    assert relative_error(policy_gradient(world, in_tail * world.reward / 0.4), expected) > 1e-2


@pytest.mark.exact
def test_the_kl_penalty_stays_outside():
    """
    Of returns with a KL penalty in them the policy p_0·exp(r / k) has all alike, so that CVaR has its optimum where the mean has
    it. With the penalty outside that policy is no optimum: p_0·exp(-max(t - r, 0) / (κ·k)) is.
    """
    level, generator = 0.3, torch.Generator().manual_seed(0)
    reward, log_ref = torch.randn(2, 12, dtype=torch.float64, generator=generator)
    log_ref = log_ref.log_softmax(0)

    def fields(logits):
        """Gradients of CVaR(r - KL) and of CVaR(r) - KL at a policy, by autograd through the exact formula."""
        logits = logits.clone().requires_grad_()
        log_p = logits.log_softmax(0)
        penalty = KL * (log_p - log_ref)
        inside = exact_cvar(log_p.exp(), reward - penalty.detach(), level)
        outside = exact_cvar(log_p.exp(), reward, level) - (log_p.exp() * penalty).sum()
        return [torch.autograd.grad(each, logits, retain_graph=True)[0].norm().item() for each in (inside, outside)]

    inside, outside = fields(log_ref + reward / KL)
    assert inside < 1e-12 and outside > 1e-2
    for t in reward:  # the quantile is one of the rewards
        optimum = log_ref - (t - reward).clamp(min=0) / (level * KL)
        prob = optimum.softmax(0)
        if prob[reward < t].sum() < level <= prob[reward <= t].sum():
            assert fields(optimum)[1] < 1e-12
            return
    pytest.fail("no reward is the quantile of its own optimum")


REWARD = double([-2.0, -0.5, 0.3, 1.0])
LOGITS = double([-0.6, 0.2, 0.0, 0.4])


def small_batches(samples):
    """All counts of K outcomes in `samples` draws, with their probability: (batches, K) and (batches,)."""
    counts = [c for c in itertools.product(range(samples + 1), repeat=len(REWARD)) if sum(c) == samples]
    counts = double(counts)
    log_prob = math.lgamma(samples + 1) - torch.lgamma(counts + 1).sum(1) + (counts * LOGITS.log_softmax(0)).sum(1)
    return counts, log_prob.exp()


def bias(samples, level, baseline, credits=cvar_rewards):
    """Relative error of the expected gradient in the logits, each batch being one prompt of `samples` completions."""
    prob = LOGITS.softmax(0)
    total = torch.zeros_like(prob)
    counts, weights = small_batches(samples)
    assert weights.sum() == pytest.approx(1)
    for count, weight in zip(counts.long(), weights, strict=True):
        outcomes = torch.arange(len(REWARD)).repeat_interleave(count)
        advantages = compute_advantages(credits(REWARD[outcomes][None], level), baseline)[0]
        scores = torch.eye(len(REWARD), dtype=torch.float64)[outcomes] - prob  # of log-probabilities in the logits
        total += weight * (advantages[:, None] * scores).mean(0)
    logits = LOGITS.clone().requires_grad_()
    expected = torch.autograd.grad(exact_cvar(logits.softmax(0), REWARD, level), logits)[0]
    return relative_error(total, expected)


@pytest.mark.exact
@pytest.mark.parametrize("baseline", ["leave_one_out", "none"])
@pytest.mark.parametrize("level", [0.25, 0.5])
def test_the_bias_of_few_samples_vanishes(level, baseline):
    errors = {samples: bias(samples, level, baseline) for samples in (4, 8, 16)}
    assert errors[16] < errors[8] * 0.7 and errors[8] < errors[4] * 0.9
    assert errors[16] < 0.15
    assert bias(4, 1.0, baseline) < 1e-12  # the mean has none


@pytest.mark.exact
def test_the_worst_share_alone_stays_biased():
    """Control: the worst half with its rewards as they are, whose gradient is not that of CVaR however many samples there are."""

    def worst_alone(rewards, level):
        tail = cvar_rewards(rewards, level)
        return torch.where(tail < tail.amax(), rewards / level, 0.0)

    assert bias(16, 0.5, "none", worst_alone) > 0.3
