"""
Intervals over targets cover what they claim: targets drawn anew each time, and the differences enumerated.

Axis letters: M targets, N samples of a target.
"""

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from trl_repulse.evaluation.gcg.results import (
    mean_over_targets,
    paired_difference,
    success_at_k,
    tail_over_targets,
)


def bad_counts(rng, targets, rate, samples, correlation):
    """Bad samples of each target, whose own rates are Beta with this mean and correlation within a target."""
    total = (1 - correlation) / correlation
    return rng.binomial(samples, rng.beta(rate * total, (1 - rate) * total, size=targets))


def coverage_of_a_rate(targets, rate, samples, correlation, repetitions, k=1):
    """Coverage, and mean width in units of the least an interval can have that knows the variance."""
    rng = np.random.default_rng(0)
    total = (1 - correlation) / correlation
    a, b = rate * total, (1 - rate) * total
    truth = 1 - math.exp(math.lgamma(b + k) - math.lgamma(b) + math.lgamma(a + b) - math.lgamma(a + b + k))
    covered, widths, values = 0, [], []
    for _ in range(repetitions):
        counts = bad_counts(rng, targets, rate, samples, correlation)
        chances = [success_at_k(int(count), samples, k) for count in counts]
        estimate = mean_over_targets(chances, [samples / k] * targets)
        assert 0 <= estimate.low < estimate.high <= 1
        covered += estimate.low <= truth <= estimate.high
        widths.append(estimate.high - estimate.low)
        values.append(estimate.value)
    return covered / repetitions, np.mean(widths) / (2 * 1.96 * np.std(values))


def percentile_bootstrap_covers(targets, rate, samples, correlation, repetitions):
    rng, covered = np.random.default_rng(0), 0
    for _ in range(repetitions):
        values = bad_counts(rng, targets, rate, samples, correlation) / samples
        low, high = np.quantile(rng.choice(values, size=(500, targets)).mean(axis=1), [0.025, 0.975])
        covered += low <= rate <= high
    return covered / repetitions


# the last two: where Korn and Graubard's own interval covers 84 and 85 %
@pytest.mark.parametrize(
    ("targets", "rate", "samples", "correlation"),
    [
        (5, 0.1, 8, 0.3),
        (10, 0.05, 8, 0.3),
        (20, 0.3, 8, 0.1),
        (10, 0.5, 1, 0.5),
        (20, 0.02, 32, 0.3),
        (20, 0.05, 32, 0.6),
    ],
)
def test_rates_are_covered(targets, rate, samples, correlation):
    covered, width = coverage_of_a_rate(targets, rate, samples, correlation, 400)
    assert covered >= 0.93
    assert width < 3


def test_success_at_k_is_covered():
    covered, width = coverage_of_a_rate(20, 0.1, 8, 0.3, 400, k=4)
    assert covered >= 0.93 and width < 2


def test_a_percentile_bootstrap_would_not_cover():
    """The control."""
    assert percentile_bootstrap_covers(5, 0.1, 8, 0.3, 400) < 0.8
    assert percentile_bootstrap_covers(20, 0.02, 32, 0.3, 400) < 0.8


@pytest.mark.slow
def test_rates_are_covered_over_a_grid(capsys):
    """Prints the least coverage and what the widths are."""
    grid = (5, 10, 20, 50), (0.02, 0.05, 0.1, 0.3, 0.5), (1, 2, 8, 32), (0.01, 0.1, 0.3, 0.6, 0.9)
    found = [(*coverage_of_a_rate(*cell, 1000), cell) for cell in itertools.product(*grid)]
    covered, widths = np.array([each[0] for each in found]), np.array([each[1] for each in found])
    with capsys.disabled():
        print("\nrates: least covered", sorted(found)[:3], "mean", covered.mean())
        print("width", np.quantile(widths, [0.5, 0.9]))
    assert covered.min() >= 0.93


@pytest.mark.slow
def test_success_at_k_is_covered_over_a_grid(capsys):
    sizes = (8, 2), (8, 8), (32, 4), (32, 16)
    cells = itertools.product((5, 20, 50), (0.02, 0.1, 0.3), sizes, (0.01, 0.1, 0.3, 0.6, 0.9))
    found = [
        (*coverage_of_a_rate(targets, rate, samples, correlation, 250, k), (targets, rate, samples, k, correlation))
        for targets, rate, (samples, k), correlation in cells
    ]
    with capsys.disabled():
        print("\nsuccess at k: least covered", sorted(found)[:3])
    assert min(covered for covered, *_ in found) >= 0.93


@pytest.mark.exact
@pytest.mark.parametrize("pairs", [5, 10, 25])
def test_differences_are_covered(pairs):
    """By enumeration of what disagrees; most of all 60 % of pairs do so."""
    assert min(covered for covered, (up, down) in coverage_of_differences(pairs, 0.1) if up + down < 0.65) >= 0.945


@pytest.mark.slow
def test_differences_are_covered_over_a_grid(capsys):
    for pairs in (5, 6, 8, 10, 15, 20, 30, 50):
        found = coverage_of_differences(pairs, 0.02)
        least = [min(each for each in found if sum(each[1]) < most) for most in (0.51, 0.81, 1)]
        with capsys.disabled():
            print(f"\ndifference of {pairs} pairs: least covered where at most 50, 80, 98 % disagree", least)
        assert least[0][0] >= 0.955 and least[1][0] >= 0.92 and least[2][0] >= 0.89


def coverage_of_differences(pairs, step):
    counts = np.array([(up, down) for up in range(pairs + 1) for down in range(pairs + 1 - up)])
    ends = np.array([(e.low, e.high) for e in (paired_difference(int(up), int(down), pairs) for up, down in counts)])
    counts = np.column_stack([counts, pairs - counts.sum(axis=1)])
    shares, found = np.arange(0, 1, step), []
    for up, down in itertools.product(shares, shares):
        if up >= down and up + down < 1 - 1e-9:
            inside = (ends[:, 0] <= up - down + 1e-12) & (ends[:, 1] >= up - down - 1e-12)
            chances = stats.multinomial.pmf(counts, pairs, [up, down, 1 - up - down])
            found.append((float(chances[inside].sum()), (float(up), float(down))))
    return found


def draw_scores(kind, rng, targets, samples, correlation):
    """Scores (M, N): normal ones, exponential ones with the long tail below, or bad ones far from the others, of this rate."""
    if kind == "normal":
        own, rest = rng.standard_normal((targets, 1)), rng.standard_normal((targets, samples))
        return math.sqrt(correlation) * own + math.sqrt(1 - correlation) * rest
    if kind == "exponential":
        own, rest = rng.exponential(size=(targets, 1)), rng.exponential(size=(targets, samples))
        return -math.sqrt(correlation) * own - math.sqrt(1 - correlation) * rest
    total = (1 - correlation) / correlation
    bad = rng.random((targets, samples)) < rng.beta(kind * total, (1 - kind) * total, size=(targets, 1))
    return np.where(bad, rng.normal(-5, 1, bad.shape), rng.normal(2, 1, bad.shape))


def coverage_of_a_tail(kind, correlation, targets, samples, repetitions):
    many = np.sort(draw_scores(kind, np.random.default_rng(1), 300_000, 8, correlation), axis=None)
    truth, rng, covered = many[: len(many) // 10].mean(), np.random.default_rng(0), 0
    for _ in range(repetitions):
        estimate = tail_over_targets(draw_scores(kind, rng, targets, samples, correlation), 0.1)
        covered += estimate.low <= truth <= estimate.high
    return covered / repetitions


@pytest.mark.parametrize(("kind", "correlation"), [("normal", 0.6), ("exponential", 0.6), (0.05, 0.3)])
def test_tails_are_covered(kind, correlation):
    assert coverage_of_a_tail(kind, correlation, 100, 10, 300) >= 0.93


@pytest.mark.slow
def test_tails_are_covered_over_a_grid(capsys):
    """Where the quantile falls between bad scores and others, a rate of 0.1, less is covered."""
    grid = ("normal", "exponential", 0.02, 0.05, 0.1, 0.3), (0.05, 0.3, 0.6), (100, 200), (10, 20)
    found = [(coverage_of_a_tail(*cell, 1000), cell) for cell in itertools.product(*grid)]
    with capsys.disabled():
        print("\ntails: least covered", sorted(found, key=lambda each: each[0])[:12])
    assert min(covered for covered, cell in found if cell[0] != 0.1) >= 0.93
    assert min(covered for covered, _ in found) >= 0.88
