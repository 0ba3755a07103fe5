"""Success rates and intervals, against enumeration, known values and their coverage."""

import itertools
import math

import numpy as np
import pytest

from trl_repulse.evaluation.gcg.rates import bootstrap_over_targets, lower_tail_mean, success_at_k, wilson_interval


@pytest.mark.exact
@pytest.mark.parametrize("samples", [1, 4, 6])
def test_success_at_k_is_the_share_of_subsets_with_a_success(samples):
    for successes, k in itertools.product(range(samples + 1), range(1, samples + 1)):
        subsets = list(itertools.combinations([True] * successes + [False] * (samples - successes), k))
        share = sum(map(any, subsets)) / len(subsets)
        assert success_at_k(successes, samples, k) == pytest.approx(share)


@pytest.mark.exact
def test_success_at_k_does_not_depend_on_the_number_of_samples_in_expectation():
    p, k = 0.3, 2
    for n in (2, 5, 9):
        weights = [math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)]
        expectation = sum(w * success_at_k(c, n, k) for c, w in enumerate(weights))
        assert expectation == pytest.approx(1 - (1 - p) ** k)
        any_of_n = sum(w * (c > 0) for c, w in enumerate(weights))
        assert n == k or any_of_n != pytest.approx(expectation, abs=0.1)  # the control: "any of n" does depend on n


@pytest.mark.parametrize(("successes", "samples", "k"), [(0, 4, 5), (0, 4, 0), (5, 4, 1)])
def test_success_at_k_refuses(successes, samples, k):
    with pytest.raises(ValueError):
        success_at_k(successes, samples, k)


def test_wilson_interval():
    # p = 0.3, n = 10, z = 1.959964: centre (p + z²/2n) / (1 + z²/n), half z·sqrt(p(1−p)/n + z²/4n²) / (1 + z²/n)
    z, n, p = 1.959963984540054, 10, 0.3
    centre, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    estimate = wilson_interval(3, 10)
    assert (estimate.value, estimate.low, estimate.high) == pytest.approx(
        (0.3, (centre - half) / (1 + z * z / n), (centre + half) / (1 + z * z / n))
    )
    assert wilson_interval(0, 5).low == 0 < wilson_interval(0, 5).high < 1
    assert math.isnan(wilson_interval(0, 0).value)


def test_lower_tail_mean():
    values = [5.0, 1.0, 2.0, 4.0, 3.0]
    assert lower_tail_mean(values, 0.2) == 1.0
    assert lower_tail_mean(values, 0.4) == 1.5
    assert lower_tail_mean(values, 0.3) == pytest.approx((1.0 + 0.5 * 2.0) / 1.5)
    assert lower_tail_mean(values, 0.01) == 1.0
    assert lower_tail_mean(values, 1.0) == 3.0
    for bad in (0.0, 1.5):
        with pytest.raises(ValueError):
            lower_tail_mean(values, bad)
    with pytest.raises(ValueError):
        lower_tail_mean([], 0.5)


def mean(values):
    return sum(values) / len(values)


def test_the_bootstrap_covers_when_targets_are_its_units():
    """Targets differ more than their samples: a bootstrap over samples would be far too sure."""
    rng = np.random.default_rng(0)
    covered = covered_by_samples = 0
    runs = 100
    for seed in range(runs):
        chances = rng.choice([0.05, 0.95], size=25)
        targets = [rng.binomial(1, chance, size=10).astype(float).tolist() for chance in chances]
        pooled = [[x] for target in targets for x in target]
        estimates = [
            bootstrap_over_targets(data, lambda drawn: mean([mean(x) for x in drawn]), 0.9, 200, seed)
            for data in (targets, pooled)
        ]
        covered += estimates[0].low <= 0.5 <= estimates[0].high
        covered_by_samples += estimates[1].low <= 0.5 <= estimates[1].high
    assert 0.8 * runs <= covered <= 0.97 * runs
    assert covered_by_samples < 0.6 * runs  # the control


def test_the_bootstrap_of_little():
    assert math.isnan(bootstrap_over_targets([], mean).value)
    one = bootstrap_over_targets([2.0], mean)
    assert one.value == 2.0 and math.isnan(one.low) and math.isnan(one.high)
    same = bootstrap_over_targets([1.0, 1.0], mean)
    assert (same.value, same.low, same.high) == (1.0, 1.0, 1.0)
    again = [bootstrap_over_targets([0.0, 1.0, 1.0], mean) for _ in range(2)]
    assert again[0] == again[1]
