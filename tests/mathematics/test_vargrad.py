"""VarGrad against a loop written out, on a tabular model whose every sequence is enumerated, and in the trainer.

Axis letters: P prompts, N completions, T tokens, S sequences.
"""

import math
import statistics

import pytest
import torch

from trl_repulse.math.proposal_losses import vargrad_loss, vargrad_targets

from .test_exact import BETA, World, finite_differences, gradient, relative_error
from .test_losses import Batch


NAN, INF = math.nan, math.inf


def log_potential():
    return torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def loss_and_gradient(b, log_phi):
    log_q = b.now.clone().requires_grad_()
    loss = vargrad_loss(log_q, vargrad_targets(log_q, b.p, log_phi, b.mask), b.mask)
    return loss.detach(), torch.autograd.grad(loss, log_q)[0]


def plain(b, log_phi):
    """Half the variance of each prompt's log q - log p - log φ, over those that have a reward: (values, counts, log q)."""
    log_q = b.now.clone().requires_grad_()
    variances, counts = [], []
    for p, row in enumerate(log_phi.tolist()):
        ratios = []
        for n, phi in enumerate(row):
            if math.isnan(phi):
                continue
            length = int(b.mask[p, n].sum())
            assert b.mask[p, n, :length].all()
            ratios.append(sum(log_q[p, n, t] - b.p[p, n, t] for t in range(length)) - phi)
        mean = sum(ratios) / max(len(ratios), 1)
        variances.append(sum((r - mean) ** 2 for r in ratios) / max(len(ratios) - 1, 1) / 2)
        counts.append(len(ratios))
        if len(ratios) > 1:
            expected = statistics.variance([r if isinstance(r, float) else r.item() for r in ratios]) / 2
            assert variances[-1].item() == pytest.approx(expected)
    return variances, counts, log_q


@pytest.mark.parametrize("left_out", [[], [(0, 2)], [(0, 2), (2, 0), (2, 1), (2, 3)], [(1, n) for n in range(4)]])
def test_value_and_gradient_are_those_of_the_variance(left_out):
    b, log_phi = Batch(), log_potential()
    for index in left_out:
        log_phi[index] = NAN
    loss, actual = loss_and_gradient(b, log_phi)
    variances, counts, log_q = plain(b, log_phi)
    value = sum(v * n * n / (n - 1) for v, n in zip(variances, counts, strict=True) if n > 1) / b.mask[..., 0].numel()
    assert loss.item() == pytest.approx(value.item())
    weighted = sum(v * n for v, n in zip(variances, counts, strict=True) if n > 1) / b.mask[..., 0].numel()
    torch.testing.assert_close(actual, torch.autograd.grad(weighted, log_q)[0])
    assert all(torch.equal(actual[index], torch.zeros_like(actual[index])) for index in left_out)


def test_the_loop_would_notice():
    """Controls: a potential of another sign, and the squared log-ratio itself instead of its distance from the mean."""
    b, log_phi = Batch(), log_potential()
    _, actual = loss_and_gradient(b, log_phi)
    _, turned = loss_and_gradient(b, -log_phi)
    assert not torch.allclose(actual, turned, rtol=0.1)
    without_z = vargrad_targets(b.now, b.p, log_phi, b.mask) * 0 + (b.p * b.mask).sum(-1) + log_phi
    log_q = b.now.clone().requires_grad_()
    raw = torch.autograd.grad(vargrad_loss(log_q, without_z, b.mask), log_q)[0]
    assert not torch.allclose(actual, raw, rtol=0.1)


@pytest.mark.parametrize("junk", [7.0, INF, -INF, NAN])
def test_padding_does_not_matter(junk):
    clean, dirty, log_phi = Batch(), Batch(), log_potential()
    for name in ("p", "now"):
        setattr(dirty, name, getattr(clean, name).masked_fill(clean.mask == 0, junk))
    for one, other in zip(loss_and_gradient(clean, log_phi), loss_and_gradient(dirty, log_phi), strict=True):
        assert torch.equal(one, other)


def test_cut_groups_add_up():
    b, log_phi = Batch(), log_potential()
    log_phi[1, 1] = NAN
    target = vargrad_targets(b.now, b.p, log_phi, b.mask)
    whole = vargrad_loss(b.now, target, b.mask)
    flat = [x.flatten(0, 1).unsqueeze(1) for x in (b.now, target, b.mask)]
    parts = [vargrad_loss(*part, denominator=12) for part in zip(*(x.split([5, 1, 6]) for x in flat), strict=True)]
    torch.testing.assert_close(sum(parts), whole)


def test_refused():
    b, log_phi = Batch(), log_potential()
    with pytest.raises(ValueError, match="needs N >= 2 completions per prompt"):
        vargrad_targets(b.now[:, :1], b.p[:, :1], log_phi[:, :1], b.mask[:, :1])
    log_phi[0, 0] = -INF
    with pytest.raises(ValueError, match="A potential is infinite"):
        vargrad_targets(b.now, b.p, log_phi, b.mask)
    with pytest.raises(ValueError, match="shape"):
        vargrad_loss(b.now, log_phi[0], b.mask)


# By enumeration


def population_loss(world, table, beta=BETA):
    """Of all that is drawn from `drawn_from`; half the variance, whose divisor here is N and not N - 1, as in the limit."""
    log_q, mask = world.sample(table), world.draw(world.mask)
    target = vargrad_targets(log_q, world.sample(world.policy), beta * world.draw(world.reward), mask)
    samples = log_q.shape[1]
    return vargrad_loss(log_q, target, mask) * (samples - 1) / samples


@pytest.fixture(params=[False, True], ids=["fixed_length", "ending"])
def world(request):
    return World(request.param)


def log_ratio(world, table):
    log_q, log_p = ((world.raw_log_prob(x) * world.mask).sum(-1) for x in (table, world.policy))
    return log_q - log_p - BETA * world.reward  # (P, S)


def variance(world):
    prob = world.string_prob(world.drawn_from)

    def half_variance(table):
        ratio = log_ratio(world, table)
        mean = (prob * ratio).sum(-1, keepdim=True)
        return (prob * (ratio - mean).square()).sum(-1).mean() / 2

    return half_variance


@pytest.mark.exact
def test_the_gradient_is_that_of_the_variance_under_any_sampler(world):
    expected = finite_differences(variance(world), world.proposal)
    assert relative_error(gradient(lambda table: population_loss(world, table), world.proposal), expected) <= 1e-5
    wrong = gradient(lambda table: population_loss(world, table, -BETA), world.proposal)
    assert relative_error(wrong, expected) > 1e-1


@pytest.mark.exact
def test_on_its_own_samples_it_follows_the_kl_from_the_proposal(world):
    def kl(table):
        return (world.string_prob(table) * log_ratio(world, table)).sum(-1).mean()

    def error(table):
        actual = gradient(lambda x: population_loss(world, x), table)
        return relative_error(actual, finite_differences(kl, table))

    assert error(world.drawn_from) <= 1e-5
    assert error(world.proposal) > 1e-2  # the control: of samples of another model it does not


@pytest.mark.exact
def test_the_optimum_is_the_target(world):
    """Descent on samples that are not the proposal's own ends at σ, where each sample's residual is 0."""
    table = world.proposal.clone().requires_grad_()
    optimizer = torch.optim.LBFGS([table], max_iter=400, tolerance_grad=1e-10, line_search_fn="strong_wolfe")
    target = world.target()
    assert (world.string_prob(table) - target).abs().max() > 0.1

    def closure():
        # Targets move with the proposal and are detached: half the variance has the same gradient, and a value that falls
        optimizer.zero_grad()
        loss = variance(world)(table)
        table.grad = gradient(lambda x: population_loss(world, x), table.detach())
        return loss.detach()

    optimizer.step(closure)
    torch.testing.assert_close(world.string_prob(table.detach()), target, atol=1e-4, rtol=1e-3)
    assert population_loss(world, table.detach()) < 1e-8
    moved = table.detach() + 0.1 * torch.randn_like(table)
    assert population_loss(world, moved) > 1e-4
