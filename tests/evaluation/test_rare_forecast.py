"""Forecasts of the largest score, on distributions whose largest of n samples is known."""

import math

import pytest
import torch

from trl_repulse.evaluation.rare.forecast import BackTest, Forecast, NoForecastError, back_test, forecast_largest


def uniform(size, seed):
    return torch.rand(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def covered(quantile, size, runs, samples=1000):
    """How often the interval for the largest of `size` samples holds a drawn one; `quantile` takes survival to score."""
    held = 0
    for seed in range(runs):
        forecast = forecast_largest(quantile(uniform(samples, seed)), [size])[0]
        survival = -math.log(float(uniform(1, 10_000 + seed))) / size  # of the largest of many
        held += forecast.low <= float(quantile(torch.tensor(survival, dtype=torch.float64))) <= forecast.high
    return held / runs


def exponential(survival):
    return -survival.log()


def gumbel(survival):
    return -(-torch.log1p(-survival)).log()


def heavy(survival):
    return survival**-0.5


@pytest.mark.parametrize("quantile", [exponential, gumbel])
def test_intervals_hold_a_million_times_beyond_the_samples(quantile):
    assert covered(quantile, 10**9, 200) >= 0.9


def test_the_wrong_form_of_the_tail_is_wrong_and_fails_the_back_test():
    assert covered(heavy, 10**6, 50) < 0.2
    test = back_test(heavy(uniform(20_000, 0)))
    assert test.covered < 0.8 and not test.reliable
    assert f"{test.covered:.0%} of the back-test's intervals held, of 95% that should" in test.reasons[0]
    test = back_test(exponential(uniform(20_000, 0)))
    assert test.covered >= 0.8 and test.reliable and not test.reasons


def test_the_verdict_asks_for_nearly_the_nominal_coverage():
    wrong = [not back_test(exponential(uniform(2000, seed)), seed=seed).reliable for seed in range(200)]
    assert sum(wrong) / 200 < 0.1
    low, high = Forecast(9, 1.0, 0.0, 2.0, 0.8, 9.0), Forecast(9, 5.0, 4.0, 6.0, 0.8, 9.0)
    for held, reliable in ((6, False), (7, True)):  # of ten, with 80 % nominal
        assert BackTest((low,) * held + (high,) * (10 - held), (1.0,) * 10).reliable == reliable


def test_forecasts_grow_by_the_scale():
    scores = exponential(uniform(5000, 2))
    near, far = forecast_largest(scores, [10**4, 10**8])
    assert far.median - near.median == pytest.approx(math.log(1e4), rel=0.15)
    assert far.high - far.low > near.high - near.low
    assert (near.extrapolation, far.extrapolation) == (2, 20_000)
    assert forecast_largest(scores, [10**4], seed=3) == forecast_largest(scores, [10**4], seed=3)


@pytest.mark.parametrize("size", [1, 10, 100, 1000])
def test_sizes_within_the_scores(size):
    held = 0
    for seed in range(200):
        found = forecast_largest(exponential(uniform(4000, seed)), [size])[0]
        truth = exponential(uniform(size, 10_000 + seed)).max()
        held += found.low <= float(truth) <= found.high
    assert held / 200 > 0.91


def test_few_scores_are_not_off_to_one_side():
    scores = (exponential(uniform(50, seed)) for seed in range(1500))
    found = [forecast_largest(each, [500])[0] for each in scores]
    below = [math.exp(-500 * math.exp(-forecast.median)) for forecast in found]  # P(largest < median)
    assert sum(below) / len(below) == pytest.approx(0.5, abs=0.03)


def test_back_test_observes_the_other_blocks():
    test = back_test(torch.arange(200, dtype=torch.float64))
    assert sorted(test.observed)[1] == 199 > min(test.observed) and len(test.forecasts) == 10
    assert test.forecasts[0].size == 180


def test_a_block_without_a_slope_counts_against_the_forecast():
    """Six scores above the rest are in six blocks of ten at most."""
    scores = torch.cat([torch.zeros(214, dtype=torch.float64), exponential(uniform(6, 0))])
    test = back_test(scores)
    alike = [math.isnan(forecast.median) for forecast in test.forecasts]
    assert sum(alike) >= 4 and test.covered <= 1 - sum(alike) / 10
    assert all(forecast.extrapolation == pytest.approx(9) for forecast in test.forecasts)
    assert back_test(torch.zeros(200)).covered == 0


def test_a_back_test_says_how_many_scores_it_needs():
    scores = exponential(uniform(110, 3))
    assert len(back_test(scores).observed) == 10
    with pytest.raises(NoForecastError, match="^109 scores are too few for a back-test, which needs 110;"):
        back_test(scores[1:])


@pytest.mark.parametrize(
    ("scores", "arguments", "message"),
    [
        (torch.zeros(5), {}, "too few"),
        (torch.zeros(100), {}, "no slope"),
        (torch.tensor([math.inf] * 100), {}, "finite"),
        (torch.rand(100), {"sizes": [0]}, "sizes"),
        (torch.rand(100), {"sizes": [math.nan]}, "sizes"),
        (torch.rand(100), {"sizes": [1000, math.inf]}, "sizes"),
        (torch.rand(100), {"confidence": 1.0}, "confidence"),
    ],
)
def test_what_is_refused(scores, arguments, message):
    with pytest.raises(ValueError, match=message):
        forecast_largest(scores, **({"sizes": [1000]} | arguments))
