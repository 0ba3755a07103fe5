"""Bounds on log Z and exact draws from the target, on enumerated distributions."""

import math

import pytest
import torch

from examples.worlds.log_z_bounds import enumeration_sample, log_z_bounds


pytestmark = pytest.mark.exact

BETA = -1.5


class World:
    """One prompt: a policy, rewards, and a proposal somewhere between policy and target; all enumerated."""

    def __init__(self, seed, size=30, noise=0.5):
        self.generator = torch.Generator().manual_seed(seed)
        self.log_p = torch.randn(1, size, generator=self.generator, dtype=torch.float64).log_softmax(-1)
        self.reward = torch.randn(1, size, generator=self.generator, dtype=torch.float64)
        self.log_target = self.log_p + BETA * self.reward
        self.log_z = float(self.log_target.logsumexp(-1))
        self.log_sigma = self.log_target - self.log_z
        shaken = self.log_sigma + noise * torch.randn(1, size, generator=self.generator, dtype=torch.float64)
        self.log_q = shaken.log_softmax(-1)

    def bounds(self, groups, size, confidence=0.95):
        log_w = self.log_target - self.log_q
        drawn = enumeration_sample(self.log_q, groups * size, self.generator)
        target = enumeration_sample(self.log_target, groups, self.generator)
        return log_z_bounds(
            log_w.gather(1, drawn).view(1, groups, size), log_w.gather(1, target).view(1, groups), confidence
        )[0]


def test_bounds_hold_in_expectation_by_enumeration():
    """Two draws a group: E[lower] ≤ log Z ≤ E[upper], each expectation summed over all pairs."""
    world = World(0, size=12, noise=1.0)
    w, q, sigma = (world.log_target - world.log_q)[0], world.log_q[0].exp(), world.log_sigma[0].exp()
    pairs = torch.stack(torch.meshgrid(w, w, indexing="ij"), dim=-1).view(-1, 1, 2)  # each pair a prompt of one group
    both = log_z_bounds(pairs, pairs[..., 1])
    lower = torch.tensor([bound.lower for bound in both], dtype=torch.float64).view(12, 12)
    upper = torch.tensor([bound.upper for bound in both], dtype=torch.float64).view(12, 12)
    mean_lower, mean_upper = float(q @ lower @ q), float(q @ upper @ sigma)
    assert mean_lower < world.log_z < mean_upper
    # One draw a group leaves the whole divergences
    kl_q = float((q * (world.log_q - world.log_sigma)[0]).sum())
    assert float(q @ w) == pytest.approx(world.log_z - kl_q)
    assert world.log_z - mean_lower < kl_q


def test_bounds_bracket_the_truth_and_close():
    narrow, held = [], 0
    for seed in range(100):
        world = World(seed)
        bound = world.bounds(16, 64)
        held += bound.lower_end <= world.log_z <= bound.upper_end
        narrow.append(bound.gap)
    assert held >= 93  # 95 expected at least; the benchmark counts at its leisure
    assert sum(narrow) / 100 < 0.02 < World(0).bounds(500, 2).gap
    weights, hits = torch.randn(1, 10, 5), torch.randn(1, 10)
    assert log_z_bounds(weights.clone().requires_grad_(), hits) == log_z_bounds(weights, hits)


def test_divergences_lie_between_their_estimates():
    world = World(3)
    bound = world.bounds(2000, 64)
    kl_q = float((world.log_q.exp() * (world.log_q - world.log_sigma)).sum())
    kl_sigma = float((world.log_sigma.exp() * (world.log_sigma - world.log_q)).sum())
    for (low, high), truth in ((bound.kl_proposal_target, kl_q), (bound.kl_target_proposal, kl_sigma)):
        assert low <= high and low - 0.05 < truth < high + 0.05


def test_a_perfect_proposal_has_no_gap():
    bound = World(1, noise=0.0).bounds(4, 3)
    assert bound.lower == pytest.approx(bound.upper) == pytest.approx(World(1).log_z)
    assert bound.kl_proposal_target == pytest.approx((0, 0), abs=1e-12)


def test_weights_of_zero():
    bound = log_z_bounds(torch.full((1, 2, 3), -math.inf), torch.zeros(1, 2))[0]
    assert bound.lower == bound.lower_end == -math.inf
    assert bound.upper == pytest.approx(-math.log(3)) and bound.gap == math.inf
    assert bound.kl_proposal_target == (math.inf, math.inf)


def test_one_group_leaves_markovs_inequality():
    bound = log_z_bounds(torch.zeros(1, 1, 4), torch.zeros(1, 1))[0]
    assert bound.lower == bound.upper == 0
    assert bound.upper_end == pytest.approx(-bound.lower_end) == pytest.approx(math.log(40))


@pytest.mark.parametrize(("groups", "size", "lost"), [(64, 16, 0.01), (16, 16, 0.05), (64, 64, 0.003), (16, 2, 0.01)])
def test_groups_with_a_few_weights_of_zero(groups, size, lost):
    """Most groups have none, some lie far below: by Student's interval alone the end is above log Z in 5 to 8 %."""
    found = torch.rand(2000, groups, size, generator=torch.Generator().manual_seed(0)) < lost
    bounds = log_z_bounds(torch.zeros_like(found, dtype=torch.double).masked_fill(found, -math.inf),
                          torch.zeros(2000, groups))  # fmt: skip
    assert sum(bound.lower_end > math.log1p(-lost) for bound in bounds) / 2000 < 0.035


@pytest.mark.parametrize("groups", [2, 3, 4, 7])
def test_few_groups_that_tie_by_chance_say_little_of_their_error(groups):
    """The proposal draws nearly all of the target in one of a hundred draws; groups with one such draw each are alike."""
    log_p, log_q = torch.tensor([1 - 1e-6, 1e-6]).log(), torch.tensor([0.01, 0.99]).log()
    hits = torch.rand(3000, groups, 64, generator=torch.Generator().manual_seed(0)) < 0.01
    bounds = log_z_bounds(torch.where(hits, *(log_p - log_q)), (log_p - log_q)[0].expand(3000, groups))
    assert sum(bound.lower_end > 0 for bound in bounds) / 3000 < 0.025 + 2 * math.sqrt(0.025 / 3000)
    assert all(bound.lower - bound.lower_end == pytest.approx(math.log(40) / groups) for bound in bounds)


def test_the_upper_end_allows_for_a_mode_that_no_draw_has_hit():
    """The proposal misses 10 % of the target: most often no draw shows it, and both means lie below log Z."""
    world, held, fooled = World(7, noise=0.0), 0, 0
    missed = torch.zeros_like(world.log_q)
    missed[0, world.log_sigma[0].argmin()] = -20.0
    heavy = world.log_sigma.clone()
    heavy[0, heavy[0].argmin()] = math.log(0.1)
    world.log_target = heavy.log_softmax(-1)
    world.log_z, world.log_q = 0.0, (world.log_target + missed).log_softmax(-1)
    for _ in range(200):
        bound = world.bounds(16, 64)
        held += bound.lower_end <= 0 <= bound.upper_end
        fooled += bound.upper < -1e-3
    assert held >= 185 and fooled > 20


def test_exact_draws_by_enumeration():
    log_target = torch.tensor([[-3000.0, -3001.0, -math.inf], [5.0, -math.inf, 5.0]])
    drawn = enumeration_sample(log_target, 20_000, torch.Generator().manual_seed(0))
    shares = torch.stack([row.bincount(minlength=3) / 20_000 for row in drawn])
    assert torch.allclose(shares, log_target.softmax(-1), atol=0.02)
    assert shares[0, 2] == shares[1, 1] == 0


def test_arguments_are_checked():
    zeros = torch.zeros(1, 2, 3)
    for call, message in (
        (lambda: log_z_bounds(zeros, torch.zeros(1, 3)), "log_w_target"),
        (lambda: log_z_bounds(zeros * math.nan, torch.zeros(1, 2)), "NaN"),
        (lambda: log_z_bounds(zeros, torch.full((1, 2), -math.inf)), "positive weight"),
        (lambda: log_z_bounds(zeros, torch.zeros(1, 2), 0.0), "confidence"),
        (lambda: log_z_bounds(torch.zeros(1, 0, 3), torch.zeros(1, 0)), "at least one group of one draw"),
        (lambda: log_z_bounds(torch.zeros(1, 2, 0), torch.zeros(1, 2)), "at least one group of one draw"),
        (lambda: enumeration_sample(torch.full((1, 2), -math.inf), 1), "at least one"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
