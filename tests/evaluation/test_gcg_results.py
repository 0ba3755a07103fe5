"""What a report says of stored results: rates, intervals, tails, and what was left out."""

import math
from dataclasses import asdict

import pytest

from trl_repulse.evaluation.gcg import format_report, summarize
from trl_repulse.evaluation.gcg.rates import mean_over_targets, success_at_k
from trl_repulse.evaluation.gcg.results import success_curve


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


def test_percentages_are_plain():
    records = [result(row, [1.0], [1.0]) for row in range(1, 6)]
    summary = summarize({"rows": 5, "identity": {"judge": "reward"}}, records, [0.0])
    summary["thresholds"]["0.0"]["after"]["bad_share"] = {"value": 0.005, "low": 1.11e-22, "high": 0.219}
    assert "0.5 % (<0.001 to 21.9)" in format_report(summary)


def test_curve():
    records = [result(1, [1.0, 2.0], [-5.0, 2.0]), result(2, [1.0, 4.0], [-5.0, -6.0])]
    curve = success_curve(records)
    assert [(score, rate.value) for score, rate in curve["before"]] == [(1.0, 1.0)]
    assert [(score, rate.value) for score, rate in curve["after"]] == [(-6.0, 0.5), (-5.0, 1.0)]
    assert all(rate.low <= rate.value <= rate.high for points in curve.values() for _, rate in points)
