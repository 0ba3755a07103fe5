"""Reward transforms, potentials and schedules."""

import math

import pytest
import torch

from trl_repulse.math.objective import (
    class_log_potential,
    exponential_transform,
    geometric_schedule,
    indicator_log_potential,
    indicator_transform,
    tilted_log_potential,
)


REWARD = torch.tensor([[-4.0, -2.0, 0.0], [3.0, math.nan, -2.0001]], dtype=torch.float64)

ALL = {
    "exponential": lambda r: exponential_transform(r, 0.3, -0.5),
    "indicator": lambda r: indicator_transform(r, 2.0, -2.0),
    "tilted": lambda r: tilted_log_potential(r, -2.0),
    "tilted_capped": lambda r: tilted_log_potential(r, -2.0, reward_cap=1.0),
    "indicator_potential": lambda r: indicator_log_potential(r, -2.0),
    "indicator_potential_0": lambda r: indicator_log_potential(r, -2.0, eps=0.0),
    "class_1": lambda r: class_log_potential(r, 1.5, 1),
    "class_0": lambda r: class_log_potential(r, 1.5, 0),
}


@pytest.mark.parametrize("name", ALL)
def test_nan_stays_and_inputs_are_kept(name):
    reward = REWARD.clone()
    result = ALL[name](reward)
    assert result.shape == REWARD.shape and torch.equal(result.isnan(), REWARD.isnan())
    torch.testing.assert_close(reward, REWARD, rtol=0, atol=0, equal_nan=True)


def expect(result, values):
    expected = torch.tensor(values, dtype=torch.float64)
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12, equal_nan=True)


def test_exponential_transform():
    r = [[-4.0, -2.0, 0.0], [3.0, math.nan, -2.0001]]
    expect(ALL["exponential"](REWARD), [[x - 0.3 * math.exp(-0.5 * x) for x in row] for row in r])
    low, high = exponential_transform(torch.tensor([[-5.0, 5.0]]), 1.0, -1.0)[0] - torch.tensor([-5.0, 5.0])
    assert low < -100 < -0.01 < high < 0


def test_indicator_transform():
    expect(ALL["indicator"](REWARD), [[-6.0, -2.0, 0.0], [3.0, math.nan, -4.0001]])


def test_cap_and_tilt():
    expect(ALL["tilted"](REWARD), [[8.0, 4.0, 0.0], [-6.0, math.nan, 4.0002]])
    expect(ALL["tilted_capped"](REWARD), [[8.0, 4.0, 0.0], [-2.0, math.nan, 4.0002]])


def test_indicator_potential():
    floor = math.log(1e-16)
    expect(ALL["indicator_potential"](REWARD), [[0.0, floor, floor], [floor, math.nan, 0.0]])
    expect(ALL["indicator_potential_0"](REWARD), [[0.0, -math.inf, -math.inf], [-math.inf, math.nan, 0.0]])
    expect(indicator_log_potential(REWARD[:1], -2.0, eps=0.5), [[math.log(1.5), math.log(0.5), math.log(0.5)]])


def test_indicator_potential_survives_half_precision():
    result = indicator_log_potential(torch.tensor([[0.0]], dtype=torch.float16), -2.0)
    assert result.dtype == torch.float16 and abs(result.item() + 36.84) < 0.02


def test_class_potential():
    logit = torch.tensor([[-3.0, 0.0, 40.0, -1000.0]], dtype=torch.float64)
    one, zero = class_log_potential(logit, 1.0, 1), class_log_potential(logit, 1.0, 0)
    expect(one[:, :3].exp() + zero[:, :3].exp(), [[1.0, 1.0, 1.0]])
    expect(one[:, :2], [[-math.log1p(math.exp(3.0)), -math.log(2)]])
    expect(zero[:, 2:], [[-40.0, 0.0]])
    assert one[0, 3] == -1000
    expect(class_log_potential(logit[:, :2], 2.0, 0), (2 * zero[:, :2]).tolist())
    assert class_log_potential(torch.tensor([[5.0]]), 1.0) > class_log_potential(torch.tensor([[-5.0]]), 1.0)


def test_parameters_out_of_range_are_refused():
    for function, arguments, message in (
        *((exponential_transform, (0.3, beta), "`beta` must be negative") for beta in (0.0, 0.5, math.nan)),
        (exponential_transform, (-0.3, -1.0), "`alpha`"),
        (indicator_transform, (-0.3, -1.0), "`alpha`"),
        (indicator_log_potential, (-1.0, -1e-3), "`eps`"),
        (class_log_potential, (1.0, 2), "`target_class`"),
    ):
        with pytest.raises(ValueError, match=message):
            function(REWARD, *arguments)


def test_geometric_schedule():
    assert geometric_schedule(-0.1, -10.0, 0.0) == -0.1 and geometric_schedule(-0.1, -10.0, 1.0) == -10.0
    assert geometric_schedule(-0.1, -10.0, 0.5) == pytest.approx(-1.0)
    assert geometric_schedule(8.0, 1.0, 1 / 3) == pytest.approx(4.0)
    assert geometric_schedule(3.0, 3.0, 0.7) == 3.0
