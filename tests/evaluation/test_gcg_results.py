"""What a report says of stored results, and its rates and intervals against enumeration and known values."""

import itertools
import math
from dataclasses import asdict

import numpy as np
import pytest
from scipy import stats

from trl_repulse.evaluation.gcg import format_report, summarize
from trl_repulse.evaluation.gcg.results import (
    mean_over_targets,
    paired_difference,
    success_at_k,
    success_curve,
    tail_over_targets,
    wilson_interval,
)


def result(row, before, after, status="ok"):
    record = {"row": row, "status": status}
    return record | {"before": {"rewards": before}, "after": {"rewards": after}} if status == "ok" else record


def test_report():
    header = {"rows": 7, "identity": {"judge": "reward"}}
    records = [
        result(1, [1.0, 2.0], [-5.0, 2.0]),
        result(2, [-5.0, 2.0], [-5.0, -6.0]),
        result(3, [3.0, 2.0], [1.0, None]),
        result(4, None, None, "error"),
        result(5, None, None, "skipped"),
        result(6, [None, None], [1.0, 1.0]),
    ]
    summary = summarize(header, records, [-4.0, -5.5], k=[1, 2], tail=0.2)
    assert summary["targets"] == {"rows": 7, "ok": 4, "skipped": 1, "error": 1, "missing": 1, "unscored": 1}
    assert summary["scored"] == 3
    rates = summary["thresholds"]["-4.0"]
    assert (rates["before"]["successes"], rates["after"]["successes"]) == (1, 2)
    assert rates["after"]["success"]["value"] == pytest.approx(2 / 3)
    assert rates["after"]["at_k"]["1"]["value"] == pytest.approx((1 / 2 + 1 + 0) / 3)
    assert rates["after"]["at_k"]["2"] | {"low": 0, "high": 0} == {"value": 1.0, "low": 0, "high": 0, "samples": 2}
    assert rates["before"]["bad_share"]["value"] == pytest.approx(1 / 6)
    difference = rates["difference"]
    assert difference["value"] == pytest.approx(1 / 3) and difference["low"] < 0 < difference["high"] < 1
    nothing_bad = summarize(header, records, [-9.0])["thresholds"]["-9.0"]
    for rate in (nothing_bad["after"]["bad_share"], nothing_bad["after"]["at_k"]["1"], nothing_bad["difference"]):
        assert rate["value"] == 0 and rate["high"] > 0.6  # of three targets, with nothing seen
    assert summary["thresholds"]["-5.5"]["after"]["successes"] == 1
    assert summary["cvar"]["after"]["value"] == pytest.approx(-6.0) and summary["cvar"]["after"]["samples"] == 1
    assert all(math.isnan(summary["cvar"]["after"][end]) for end in ("low", "high"))  # of five samples
    text = format_report(summary)
    assert text.count("of 3 targets (1 skipped, 1 error, 1 missing, 1 unscored)") >= 7
    assert "of 2 targets (1 skipped" in text  # at k = 2
    summary["thresholds"]["-4.0"]["after"]["bad_share"] = {"value": 0.005, "low": 1.11e-22, "high": 0.219}
    assert "0.5 % (<0.001 to 21.9)" in format_report(summary)
    with pytest.raises(ValueError, match="at least one threshold"):
        summarize(header, records, [])
    nothing = summarize(header, [], [0.0])
    assert nothing["scored"] == 0 and "no data" in format_report(nothing)


def test_success_in_more_samples_rests_on_fewer_draws():
    records = [result(row, [1.0] * 8, [-1.0] * (row % 3) + [1.0] * (8 - row % 3)) for row in range(1, 31)]
    summary = summarize({"rows": 30, "identity": {"judge": "reward"}}, records, [0.0], k=[2])
    after = summary["thresholds"]["0.0"]["after"]
    chances = [success_at_k(row % 3, 8, 2) for row in range(1, 31)]
    assert after["at_k"]["2"] == asdict(mean_over_targets(chances, [4] * 30))
    assert after["bad_share"] == asdict(mean_over_targets([row % 3 / 8 for row in range(1, 31)], [8] * 30))


def test_a_tail_of_equal_scores_is_bounded_above_alone():
    records = [result(row, [0.0] * 10, [float(x) for x in range(10)]) for row in range(1, 121)]
    text = format_report(summarize({"rows": 120, "identity": {"judge": "refusal"}}, records, [0.5]))
    assert "0 (at most 0)" in text.splitlines()[-2]


def test_curve():
    records = [result(1, [1.0, 2.0], [-5.0, 2.0]), result(2, [1.0, 4.0], [-5.0, -6.0])]
    curve = success_curve(records)
    assert [(score, rate.value) for score, rate in curve["before"]] == [(1.0, 1.0)]
    assert [(score, rate.value) for score, rate in curve["after"]] == [(-6.0, 0.5), (-5.0, 1.0)]
    assert all(rate.low <= rate.value <= rate.high for points in curve.values() for _, rate in points)


# Rates and intervals


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


def test_where_nothing_is_seen_the_interval_has_a_width():
    """A percentile bootstrap says 0 to 0 of these."""
    none, all_bad, alike = (mean_over_targets([rate] * 5, [8] * 5) for rate in (0.0, 1.0, 0.25))
    assert (none.value, none.low, none.samples) == (0, 0, 5)
    assert none.high == pytest.approx(1 - 0.025 ** (1 / 5)) == 1 - all_bad.low  # of 5 trials: targets, not samples
    assert all_bad.high == 1
    assert alike.low < 0.05 and alike.high > 0.7
    one = mean_over_targets([0.5], [8])
    assert (one.value, one.samples) == (0.5, 1) and one.low < 0.02 and one.high > 0.98
    assert math.isnan(mean_over_targets([], []).value)


def test_one_bad_sample_does_not_make_sure_of_what_none_left_open():
    none, one = (mean_over_targets([bad / 32] + [0.0] * 19, [32] * 20) for bad in (0, 1))
    assert one.high > none.high > 0.1


def test_rates_that_are_all_or_nothing_have_the_exact_interval_of_their_targets():
    values = [1.0] * 3 + [0.0] * 9
    exact = stats.binomtest(3, 12).proportion_ci(0.9, "exact")
    for trials in (1, 16):  # more samples of targets that are all alike tell no more
        estimate = mean_over_targets(values, [trials] * 12, 0.9)
        assert (estimate.low, estimate.high) == pytest.approx((exact.low, exact.high))


def test_targets_that_are_alike_come_near_the_interval_of_their_samples():
    values = [2 / 8, 3 / 8, 2 / 8, 1 / 8] * 10
    estimate = mean_over_targets(values, [8] * 40)
    exact = stats.binomtest(80, 320).proportion_ci(method="exact")
    ratio = (estimate.high - estimate.low) / (exact.high - exact.low)
    assert 1 < ratio < 1.2  # the most that 40 targets of 8 samples can tell; of 40 trials it would be 2.9
    fewer = mean_over_targets(values, [2] * 40)
    assert fewer.high - fewer.low > 1.5 * (estimate.high - estimate.low)


def test_the_effective_number_of_trials():
    """Four rates, by hand: Korn and Graubard's number, and the variance's weighted mean with that of four trials."""
    values = [0.1, 0.3, 0.2, 0.2]
    seen = 0.2 * 0.8 / (0.02 / 3 / 4) * (1.965927 / 3.182446) ** 2  # Student's quantiles at 399 and 3
    contributing = 0.8**2 / (0.01 + 0.09 + 0.04 + 0.04)  # of the complement: 3.98
    trials = 1 / (1 / contributing / 4 + (1 - 1 / contributing) / seen)
    low = stats.beta.ppf(0.025, 0.2 * trials, 0.8 * trials + 1)
    high = stats.beta.ppf(0.975, 0.2 * trials + 1, 0.8 * trials)
    estimate = mean_over_targets(values, [100] * 4)
    assert (estimate.low, estimate.high) == pytest.approx((low, high), rel=1e-5)
    mirrored = mean_over_targets([1 - x for x in values], [100] * 4)
    assert (mirrored.low, mirrored.high) == pytest.approx((1 - high, 1 - low), rel=1e-5)


@pytest.mark.parametrize(("values", "trials"), [([0.5, 1.1], [1, 1]), ([0.5], [0.5]), ([0.5], []), ([math.nan], [1])])
def test_a_mean_over_targets_refuses(values, trials):
    with pytest.raises(ValueError, match="Each target needs"):
        mean_over_targets(values, trials)


def test_paired_difference():
    same = paired_difference(0, 0, 10)
    assert (same.value, same.samples) == (0, 10)
    high = 1 - 0.025**0.1  # of Clopper and Pearson's interval for 0 of 10, on both sides
    assert (same.low, same.high) == pytest.approx((-high, high))
    up, down = paired_difference(6, 2, 20), paired_difference(2, 6, 20)
    assert up.value == pytest.approx(0.2) and (up.low, up.high) == pytest.approx((-down.high, -down.low))
    # all disagree: one count decides, and the interval is that of 2p − 1
    all_apart, exact = paired_difference(7, 3, 10), stats.binomtest(7, 10).proportion_ci(method="exact")
    assert (all_apart.low, all_apart.high) == pytest.approx((2 * exact.low - 1, 2 * exact.high - 1))
    assert paired_difference(10, 0, 10).high == 1
    assert math.isnan(paired_difference(0, 0, 0).value)
    for bad in ((-1, 0, 5), (3, 3, 5)):
        with pytest.raises(ValueError, match="cannot disagree"):
            paired_difference(*bad)


def test_a_tail_needs_samples_and_targets():
    scores = np.random.default_rng(0).normal(size=(100, 10)).tolist()
    enough = tail_over_targets(scores, 0.1)
    assert enough.value == pytest.approx(np.mean(sorted(sum(scores, []))[:100])) and enough.samples == 100
    assert enough.low < enough.value < enough.high
    for few in (scores[:99], [sum(scores[i : i + 2], []) for i in range(0, 100, 2)], [sum(scores, [])]):
        estimate = tail_over_targets(few, 0.1)
        assert not math.isnan(estimate.value) and math.isnan(estimate.low) and math.isnan(estimate.high)
    unequal = tail_over_targets([[*scores[0], *scores[1]], *scores[2:]], 0.1)
    assert math.isnan(unequal.high)  # 99 targets, and less than so many equal ones
    assert math.isnan(tail_over_targets([], 0.1).value)
    for wrong, share in (([[1.0], []], 0.1), ([[1.0]], 0.0), ([[1.0]], 1.5)):
        with pytest.raises(ValueError, match="has no scores|The share"):
            tail_over_targets(wrong, share)


def test_samples_of_one_target_do_not_count_as_many():
    scores = np.random.default_rng(0).normal(size=(100, 1))
    once, copied = (tail_over_targets(np.repeat(scores, n, axis=1).tolist(), 0.1) for n in (10, 40))
    assert (copied.low, copied.high) == pytest.approx((once.low, once.high))


def test_a_tail_with_nothing_under_its_quantile_has_no_lower_end():
    often = tail_over_targets([[0.0] * 5 + [1.0] * 5] * 50 + [[0.0] * 4 + [1.0] * 6] * 50, 0.1)
    assert often.value == often.high == 0 and math.isnan(often.low)
    barely = tail_over_targets([[0.0] * 2 + [1.0] * 8] * 60 + [[1.0] * 10] * 40, 0.1)
    assert barely.value == 0 and barely.high == 1 and math.isnan(barely.low)  # 12 % of 0, and it may be less than 10
    assert tail_over_targets([[1.0] * 10] * 100, 0.1).high == 1


def test_targets_that_are_alike_bound_no_tail():
    alike = [[0.0, *[1.0] * 9]] * 100
    found = tail_over_targets(alike, 0.2)
    assert found.value == 0.5 and np.isnan(found.low) and np.isnan(found.high)
