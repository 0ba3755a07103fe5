"""PPO's mathematics against plain loops over rows and tokens, in float64."""

import math

import pytest
import torch

from trl_repulse.math.ppo import approximate_kl, generalized_advantages, value_loss, whiten


B, T = 5, 7


@pytest.fixture
def batch():
    """Token rewards, values and a mask with padding, holes (what a tool wrote) and a row without any token."""
    generator = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(2, B, T, generator=generator, dtype=torch.float64)
    mask = torch.tensor(
        [
            [1, 1, 1, 1, 1, 1, 1],
            [1, 1, 1, 0, 0, 0, 0],
            [1, 1, 0, 0, 1, 1, 0],
            [0, 1, 0, 1, 0, 0, 1],
            [0, 0, 0, 0, 0, 0, 0],
        ]
    )
    return rewards, values, mask


def looped_advantages(rewards, values, mask, gamma, lam, first_value=0):
    """A_t = Σ_k (γλ)^k δ_{t+k} over the tokens that count, written out; `first_value` shifts the values (a mistake)."""
    advantages = torch.zeros_like(rewards)
    for b in range(len(rewards)):
        places = [t for t in range(T) if mask[b, t]]
        r = [rewards[b, t].item() for t in places]
        v = [values[b, t].item() for t in places] + [0.0] * (1 + first_value)
        for i, t in enumerate(places):
            advantages[b, t] = sum(
                (gamma * lam) ** (k - i) * (r[k] + gamma * v[k + 1 + first_value] - v[k + first_value])
                for k in range(i, len(places))
            )
    return advantages


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.8), (1.0, 1.0), (0.7, 0.0), (0.0, 0.5)])
def test_advantages_are_the_sum_of_discounted_errors(batch, gamma, lam):
    rewards, values, mask = batch
    advantages, returns = generalized_advantages(rewards, values, mask, gamma, lam)
    expected = looped_advantages(rewards, values, mask, gamma, lam)
    torch.testing.assert_close(advantages, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(returns, (expected + values) * mask, rtol=1e-12, atol=1e-12)


def test_values_after_the_token_would_be_noticed(batch):
    rewards, values, mask = batch
    advantages, _ = generalized_advantages(rewards, values, mask)
    wrong = looped_advantages(rewards, values, mask, 1.0, 0.95, first_value=1)
    assert not torch.allclose(advantages, wrong, atol=1e-2)


def test_masked_positions_are_stepped_over(batch):
    """The same as if they were not there, whatever stands in them."""
    rewards, values, mask = batch
    rewards, values = (x.masked_fill(mask == 0, torch.nan) for x in (rewards, values))
    advantages, returns = generalized_advantages(rewards, values, mask, 0.9, 0.8)
    assert torch.isfinite(advantages).all() and torch.isfinite(returns).all()
    assert (advantages[mask == 0] == 0).all() and (returns[mask == 0] == 0).all()
    for b in range(B):
        kept = mask[b] != 0
        alone, _ = generalized_advantages(
            rewards[b : b + 1, kept], values[b : b + 1, kept], mask[b : b + 1, kept], 0.9, 0.8
        )
        assert torch.equal(advantages[b, kept], alone[0])


def test_precision_and_shapes(batch):
    rewards, values, mask = batch
    advantages, _ = generalized_advantages(*(x.to(torch.bfloat16) for x in batch))
    assert advantages.dtype == torch.float32
    with pytest.raises(ValueError, match="`values` has shape"):
        generalized_advantages(rewards, values[:, :1], mask)
    with pytest.raises(ValueError, match="`returns` has shape"):
        value_loss(values, values, rewards[0], mask)


def test_whitening(batch):
    values, _, mask = batch
    counted = [values[b, t].item() for b in range(B) for t in range(T) if mask[b, t]]
    mean = sum(counted) / len(counted)
    variance = sum((x - mean) ** 2 for x in counted) / len(counted)
    expected = (values - mean) / math.sqrt(variance + 1e-8) * mask
    torch.testing.assert_close(whiten(values, mask), expected, rtol=1e-12, atol=1e-12)
    assert (whiten(torch.full_like(values, 3.0), mask) == 0).all()
    assert (whiten(values, torch.zeros_like(mask)) == 0).all()


def test_whitening_sums_over_processes(batch):
    """With totals that come from two processes, half of the rows are whitened as the whole is."""
    values, _, mask = batch
    others = [values[3:][mask[3:] != 0]]
    mean = values[mask != 0].mean()
    totals = iter([torch.tensor([others[0].sum(), others[0].numel()]), (others[0] - mean).square().sum()])
    half = whiten(values[:3], mask[:3], lambda total: total + next(totals))
    torch.testing.assert_close(half, whiten(values, mask)[:3], rtol=1e-12, atol=1e-12)
    assert not torch.allclose(half, whiten(values[:3], mask[:3]), atol=1e-3)


def looped_value_loss(values, old_values, returns, mask, clip):
    """Loss, its gradient and the number of clipped tokens, written out."""
    loss, gradient, clipped = 0.0, torch.zeros_like(values), 0
    tokens = int(mask.sum())
    for b in range(B):
        for t in range(T):
            if not mask[b, t]:
                continue
            v, old, target = values[b, t].item(), old_values[b, t].item(), returns[b, t].item()
            error, slope = (v - target) ** 2, 2 * (v - target)
            if clip is not None:
                near = min(max(v, old - clip), old + clip)
                if (near - target) ** 2 > error:
                    error, slope, clipped = (near - target) ** 2, 0.0, clipped + 1
            loss += 0.5 * error / tokens
            gradient[b, t] = 0.5 * slope / tokens
    return loss, gradient, clipped / tokens


@pytest.mark.parametrize("clip", [0.2, 1.0, None])
def test_value_loss_and_its_gradient(batch, clip):
    old_values, returns, mask = batch
    generator = torch.Generator().manual_seed(1)
    values = old_values + torch.randn(B, T, generator=generator, dtype=torch.float64)
    expected = looped_value_loss(values, old_values, returns, mask, clip)
    values.requires_grad_()
    loss, share = value_loss(values, old_values, returns, mask, clip)
    loss.backward()
    assert loss.item() == pytest.approx(expected[0], rel=1e-12)
    torch.testing.assert_close(values.grad, expected[1], rtol=1e-12, atol=1e-12)
    assert share.item() == pytest.approx(expected[2])
    if clip is not None:  # clipping did something, or the comparison would prove nothing
        assert expected[2] > 0.05
        assert expected[0] != pytest.approx(looped_value_loss(values.detach(), old_values, returns, mask, None)[0])


def test_value_losses_of_micro_batches_add_up(batch):
    old_values, returns, mask = batch
    values = old_values + 0.5
    tokens = mask.sum()
    whole, share = value_loss(values, old_values, returns, mask)
    rows = [slice(0, 1), slice(1, 3), slice(3, 5)]
    parts = [value_loss(values[r], old_values[r], returns[r], mask[r], denominator=tokens) for r in rows]
    torch.testing.assert_close(sum(loss for loss, _ in parts), whole)
    torch.testing.assert_close(sum(clipped for _, clipped in parts), share)


def test_what_only_rounding_tells_apart_is_not_clipped():
    generator = torch.Generator().manual_seed(0)
    values, old_values, returns = torch.randn(3, 20, 50, generator=generator)
    assert ((old_values + (values - old_values) - returns).square() > (values - returns).square()).any()  # the control
    assert value_loss(values, old_values, returns, torch.ones(20, 50), clip=10.0)[1] == 0


def test_masked_values_have_no_gradient_whatever_they_are(batch):
    old_values, returns, mask = batch
    values = old_values.masked_fill(mask == 0, torch.nan).requires_grad_()
    loss, _ = value_loss(values, old_values, returns, mask)
    loss.backward()
    assert loss.isfinite() and values.grad.isfinite().all() and (values.grad[mask == 0] == 0).all()
    assert value_loss(old_values, old_values, returns, torch.zeros_like(mask))[0] == 0


def test_approximate_kl(batch):
    log_p, old_log_p, mask = batch
    expected = 0.0
    for b in range(B):
        for t in range(T):
            if mask[b, t]:
                log_ratio = (log_p[b, t] - old_log_p[b, t]).item()
                expected += (math.exp(log_ratio) - 1 - log_ratio) / int(mask.sum())
    assert approximate_kl(log_p, old_log_p, mask).item() == pytest.approx(expected, rel=1e-12)
    assert approximate_kl(log_p, log_p, mask) == 0
