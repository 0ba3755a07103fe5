"""What a report says of stored results."""

import numpy as np
import pytest

from trl_repulse.evaluation.comparison import paired_interval
from trl_repulse.evaluation.gcg import format_report, summarize
from trl_repulse.evaluation.tails import clopper_pearson, success_at


def header(rows):
    return {"prompts": {"count": rows}, "rewards": {"reward": {}}}


def result(row, before, after, status="ok"):
    record = {"row": row, "status": status}
    return record | {"before": {"rewards": before}, "after": {"rewards": after}} if status == "ok" else record


def test_report():
    records = [
        result(1, [1.0, 2.0], [-5.0, 2.0]),
        result(2, [-5.0, 2.0], [-5.0, -6.0]),
        result(3, [3.0, 2.0], [1.0, 4.0]),
        result(4, None, None, "error"),
        result(5, None, None, "error"),
        result(6, [None, None], [1.0, 1.0]),
    ]
    summary = summarize(header(7), records, [-4.0, -5.5], k=[1, 2], tail=0.2)
    assert summary["targets"] == {"rows": 7, "ok": 4, "error": 2, "missing": 1, "unscored": 1}
    assert summary["scored"] == 3
    rates = summary["thresholds"]["-4.0"]
    assert rates["before"]["success"]["value"] == pytest.approx(1 / 3)
    success = rates["after"]["success"]
    assert (success["value"], success["samples"]) == (pytest.approx(2 / 3), 2)
    assert (success["low"], success["high"]) == pytest.approx(clopper_pearson(2, 1, 0.95))  # of other targets
    after = np.array([[-5.0, 2.0], [-5.0, -6.0], [1.0, 4.0]])
    assert rates["after"]["at_k"]["1"]["value"] == pytest.approx((1 / 2 + 1 + 0) / 3)
    assert rates["after"]["at_k"]["2"] == vars(success_at(after, -4.0, 2))
    assert rates["before"]["bad_share"]["value"] == pytest.approx(1 / 6)
    difference, before = rates["difference"], np.array([[False], [True], [False]])
    assert difference["value"] == pytest.approx(1 / 3) and difference["low"] < 0 < difference["high"] <= 1
    ends = paired_interval(before, np.array([[True], [True], [False]]))
    assert (difference["low"], difference["high"]) == pytest.approx(ends)
    nothing_bad = summarize(header(7), records, [-9.0])["thresholds"]["-9.0"]
    for rate in (nothing_bad["after"]["success"], nothing_bad["difference"]):
        assert rate["value"] == 0 and rate["high"] > 0.6  # of three targets, with nothing seen
    assert summary["cvar"]["after"]["value"] == pytest.approx((-6.0 - 0.2 * 5) / 1.2)
    text = format_report(summary)
    assert "Rates are of 3 targets (2 error, 1 missing, 1 unscored)" in text
    assert "(no interval)" in text.splitlines()[-1]  # of six samples
    summary["thresholds"]["-4.0"]["after"]["bad_share"] = {"value": 0.005, "low": 1.11e-22, "high": 0.219}
    assert "0.5 % (<0.001 to 21.9)" in format_report(summary)
    for thresholds, k, message in (([], 1, "at least one threshold"), ([0.0], 3, "`k=3` must be from 1 to 2")):
        with pytest.raises(ValueError, match=message):
            summarize(header(7), records, thresholds, [k])
    with pytest.raises(ValueError, match="No target has scores for all of its responses"):
        summarize(header(7), records[3:], [0.0])


def test_a_tail_of_equal_scores_is_bounded_above_alone():
    records = [result(row, [0.0] * 10, [float(x) for x in range(10)]) for row in range(1, 121)]
    text = format_report(summarize(header(120), records, [0.5]))
    assert "0 (at most 0)" in text.splitlines()[-1]
