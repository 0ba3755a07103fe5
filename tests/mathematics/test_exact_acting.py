"""Weights and gradients where an environment writes: a tabular world whose every trajectory is enumerated.

Of a trajectory's three tokens the model writes the first and the last, and a random environment the second, whatever came before it. It
draws with probabilities of 1/4 or 2/4 as the proposal does, so that a population of 4^3 trajectories has exactly their distribution. Both
models have an opinion of the environment's token as well, which is wrong and must not count.

Axis letters as in `test_exact.py`.
"""

import pytest
import torch

from trl_repulse.math.importance import distinct_share, log_importance_weights, log_mixture_weights, normalize_weights
from trl_repulse.math.objective import tilted_log_potential

from .test_exact import (
    BETA,
    TOKENS,
    TOLERANCE,
    P,
    T,
    V,
    World,
    ctl_gradient,
    eq4_gradient,
    eq4_objective,
    finite_differences,
    kl_to_target,
    relative_error,
)


pytestmark = pytest.mark.exact


class ActingWorld(World):
    """The second token is the environment's: `drawn_from` gives its probabilities, and the models' are something else."""

    def __init__(self):
        super().__init__(ending=False)
        self.environment = self.raw_log_prob(self.drawn_from)[..., 1]  # (P, S), nats
        self.everything, self.mask = self.mask, self.mask.clone()
        self.mask[..., 1] = 0
        self.opinion = torch.randn(P, V**T, T, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def string_prob(self, table):
        return ((self.raw_log_prob(table) * self.mask).sum(-1) + self.environment).exp()

    def log_weights(self, mask):
        """As a trainer has them: of a model's log-probabilities at all tokens, those under the mask."""
        log_q = self.sample(self.drawn_from) + self.draw(self.opinion * (1 - self.mask))  # not the environment's
        potential = tilted_log_potential(self.draw(self.reward), BETA)
        return log_importance_weights(self.sample(self.policy), log_q, potential, self.draw(mask))


@pytest.fixture
def world():
    return ActingWorld()


def by_trajectory(world, weights):
    merged = torch.zeros(P, V**T, dtype=torch.float64)
    return merged.scatter_add_(1, world.rows, weights)


def test_the_environments_factors_cancel(world):
    """p/q over the model's tokens alone weighs every trajectory as the target does, environment and all."""
    weights = by_trajectory(world, normalize_weights(world.log_weights(world.mask)))
    torch.testing.assert_close(weights, world.target(), rtol=1e-10, atol=1e-12)
    function = torch.randn(V**T, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    torch.testing.assert_close(weights @ function, world.target() @ function, rtol=1e-10, atol=1e-12)


def test_counting_the_environments_tokens_would_be_noticed(world):
    weights = by_trajectory(world, normalize_weights(world.log_weights(world.everything)))
    assert (weights - world.target()).abs().max() > 0.02


def test_eq4_gradient(world):
    expected = finite_differences(eq4_objective(world), world.policy)
    w = normalize_weights(world.log_weights(world.mask))
    assert relative_error(eq4_gradient(world, w), expected) <= TOLERANCE
    assert relative_error(eq4_gradient(world, normalize_weights(world.log_weights(world.everything))), expected) > 1e-2


def test_ctl_gradient_is_that_of_the_kl(world):
    expected = finite_differences(kl_to_target(world), world.proposal)
    w = normalize_weights(world.log_weights(world.mask))
    assert relative_error(ctl_gradient(world, w), expected) <= TOLERANCE
    world.mask = world.everything
    assert relative_error(ctl_gradient(world, w), expected) > 1e-2


def test_mixture_weights_estimate_the_probability_without_bias(world):
    """The hot policy's: over 4^3 trajectories of a policy and 4^3 of another sampler, their mean is P(bad)."""
    order = torch.rand(V, generator=torch.Generator().manual_seed(3)).argsort()
    policy, environment = world.drawn_from[..., order].clone(), world.environment
    first = slice(1, 1 + V)  # contexts of the second token
    policy[:, first] = world.drawn_from[:, first]
    prob = (world.raw_log_prob(policy) * world.mask).sum(-1) + environment
    counts = (prob.exp() * 4**T).round().long()
    own = torch.stack([torch.arange(V**T).repeat_interleave(row) for row in counts])  # (P, N)
    rows = torch.cat([own, world.rows], dim=1)

    def scores(table, mask):
        log_p = world.raw_log_prob(table).clone()
        log_p[..., 1] = world.opinion[..., 0 if table is policy else 1]
        return (log_p * mask).sum(-1).gather(1, rows)

    log_potential = torch.where(world.reward < -1, 0.0, -torch.inf)
    expected = (prob.exp() * (world.reward < -1)).sum(-1)
    estimates = [
        log_mixture_weights(
            scores(policy, mask), scores(world.drawn_from, mask), log_potential.gather(1, rows), 4**T, 4**T
        )
        .exp()
        .mean(-1)
        for mask in (world.mask, world.everything)
    ]
    assert (expected > 0.01).all()
    torch.testing.assert_close(estimates[0], expected, rtol=1e-10, atol=1e-12)
    assert (estimates[1] - expected).abs().max() > 1e-3


def test_trajectories_are_distinct_by_what_the_model_wrote():
    """However long the environment's answers are."""
    ids = torch.tensor([[[5, 7, 8, 6], [5, 9, 6, 0], [5, 7, 6, 6], [5, 6, 0, 0]]])
    mask = torch.tensor([[[1, 0, 0, 1], [1, 0, 1, 0], [1, 0, 1, 1], [1, 1, 0, 0]]])
    assert distinct_share(ids, mask).item() == 0.5  # (5, 6) thrice, (5, 6, 6)
    assert distinct_share(TOKENS[None], torch.ones_like(TOKENS[None])).item() == 1.0
