"""Advantages of the methods that normalise over the batch, against loops written out."""

import math
import statistics

import pytest
import torch

from trl_repulse.math.objective import compute_advantages, prefix_values


INF, NAN = math.inf, math.nan
EPSILON = 1e-4
RETURNS = [[1.0, 2.5, -6.0], [0.0, 0.25, 3.0], [NAN, 4.0, 1.5], [7.0, NAN, NAN], [NAN, NAN, NAN]]


def double(values):
    return torch.tensor(values, dtype=torch.float64)


def by_hand(returns, baseline, normalize):
    """Nested lists in, nested lists out; `None` stands for a sample that nothing can be said of."""
    advantages = []
    for group in returns:
        known = [r for r in group if not math.isnan(r)]
        row = []
        for r in group:
            if math.isnan(r) or (len(known) < 2 and baseline != "none"):
                row.append(None)
            elif baseline == "none":
                row.append(r)
            elif baseline == "group_mean":
                row.append(r - sum(known) / len(known))
            else:
                row.append(r - (sum(known) - r) / (len(known) - 1))
        advantages.append(row)
    if normalize:
        all_known = [a for row in advantages for a in row if a is not None]
        mean, std = statistics.mean(all_known), statistics.stdev(all_known)
        advantages = [[None if a is None else (a - mean) / (std + EPSILON) for a in row] for row in advantages]
    return double([[0.0 if a is None else a for a in row] for row in advantages])


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("baseline", ["none", "group_mean", "leave_one_out"])
def test_advantages_are_those_of_the_loops(baseline, normalize):
    actual = compute_advantages(double(RETURNS), baseline, normalize=normalize)
    torch.testing.assert_close(actual, by_hand(RETURNS, baseline, normalize), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("wrong", [("group_mean", False), ("none", True), ("leave_one_out", False)])
def test_the_loops_would_notice(wrong):
    """Negative control for REINFORCE++-baseline: neither without normalisation nor with another baseline."""
    with pytest.raises(AssertionError):
        torch.testing.assert_close(
            compute_advantages(double(RETURNS), "group_mean", normalize=True), by_hand(RETURNS, *wrong)
        )


def test_a_sample_left_out_changes_nothing_else():
    with_it, without = double([[1.0, NAN, 5.0], [2.0, 4.0, NAN]]), double([[1.0, 5.0], [2.0, 4.0]])
    for baseline in ("none", "group_mean", "leave_one_out"):
        advantages = compute_advantages(with_it, baseline, normalize=True)
        assert advantages[0, 1] == advantages[1, 2] == 0
        kept = torch.stack([advantages[0, [0, 2]], advantages[1, [0, 1]]])
        torch.testing.assert_close(kept, compute_advantages(without, baseline, normalize=True))
        as_zero = compute_advantages(with_it.nan_to_num(0.0), baseline, normalize=True)  # the control
        assert not torch.allclose(kept, torch.stack([as_zero[0, [0, 2]], as_zero[1, [0, 1]]]), atol=1e-2)


@pytest.mark.parametrize(
    "returns", [[[2.0, 2.0], [2.0, 2.0]], [[NAN, NAN]], [[3.0, NAN], [NAN, NAN]]], ids=["equal", "none", "one"]
)
@pytest.mark.parametrize("baseline", ["none", "group_mean", "leave_one_out"])
def test_nothing_to_compare_is_no_advantage(returns, baseline):
    assert (compute_advantages(double(returns), baseline, normalize=True) == 0).all()


def test_advantages():
    returns = double([[1.0, 2.0, 6.0], [0.0, 0.0, 3.0]])
    expected = double([[-3.0, -1.5, 4.5], [-1.5, -1.5, 3.0]])
    assert torch.equal(compute_advantages(returns), expected)
    assert torch.equal(compute_advantages(returns, "constant", 2.0), returns - 2.0)
    assert torch.equal(compute_advantages(double([[1.0, NAN, 5.0]]), "constant", 1.0), double([[0.0, 0.0, 4.0]]))
    assert torch.equal(compute_advantages(returns, "none", 2.0), returns)
    assert torch.equal(compute_advantages(double([[1.0]]), "none"), double([[1.0]]))
    assert not compute_advantages(returns.requires_grad_()).requires_grad


@pytest.mark.parametrize(
    ("returns", "baseline", "message"),
    [
        ([[1.0], [2.0]], "leave_one_out", "N >= 2"),
        ([[1.0]], "group_mean", "N >= 2"),
        ([[1.0, -INF]], "none", "infinite"),
        ([[1.0, 2.0]], "mean", "`baseline` must be"),
        ([1.0, 2.0], "none", "shape"),
    ],
)
def test_advantages_refuse(returns, baseline, message):
    with pytest.raises(ValueError, match=message):
        compute_advantages(double(returns), baseline)


def test_values_of_prefixes_are_on_a_line_through_the_others():
    rewards, prefixes = double([0.5, -2.0, NAN, 1.5, 4.0]), double([[0, 1], [0, -3], [0, 9], [0, INF], [0, 2]])
    actual = prefix_values(rewards, prefixes)
    prefixes = prefixes.where(prefixes.isfinite(), NAN)
    kept = [0, 1, 3, 4]
    for column in range(2):
        x = (prefixes[:, column] - prefixes[kept, column].nanmean()).nan_to_num(0.0)
        for row in kept:
            others = [each for each in kept if each != row]
            x_mean, y_mean = x[others].mean(), rewards[others].mean()
            covariance = ((x[others] - x_mean) * (rewards[others] - y_mean)).sum()
            spread = (x[others] - x_mean).square().sum() + x[kept].square().mean()
            slope = covariance / spread if spread > 0 else 0.0
            expected = y_mean + slope * (x[row] - x_mean)
            assert actual[row, column].item() == pytest.approx(expected.item(), abs=1e-12)
    assert actual[2].tolist() == [0, 0]
    assert prefix_values(double([3.0]), double([[1.0, 2.0]])).tolist() == [[3, 3]]
