"""Errors of a judge: estimates by hand, the ends of intervals against Clopper and Pearson's, coverage, the file of labels."""

import csv
import math

import numpy as np
import pytest
from scipy.stats import norm

from trl_repulse.evaluation import audit as audits
from trl_repulse.evaluation.audit import audit_judge, known_errors, meld, share_draws
from trl_repulse.evaluation.audit_labels import Labels, Scored, choose, draw_labels, read_labels
from trl_repulse.evaluation.tails import clopper_pearson


ANY = pytest.approx


def scored(scores, completions=None):
    scores = np.asarray(scores, dtype=np.float64).reshape(1, -1)
    completions = completions or [f"completion {number}" for number in range(scores.size)]
    return Scored(["the cat"] * scores.size, completions, scores)


def fill(path, label_of, change=lambda rows: rows, **dialect):
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = list(csv.DictReader(file))
    names = list(rows[0])
    for row in rows:
        row["label"] = label_of(row)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, names, extrasaction="ignore", **dialect)
        writer.writeheader()
        writer.writerows(change(rows))


def test_estimates_by_hand():
    """1,000 completions: 20 bad, 30 near and 950 ordinary; of 10 each 8, 2 and 0 are truly bad."""
    sample = scored([-2.0] * 20 + [-0.5] * 30 + [1.0] * 950)
    audit = audit_judge(sample, Labels(-1.0, 0.0, (10, 10, 10), (8, 2, 0)))
    assert {name: estimate.value for name, estimate in audit.estimates.items()} == {
        "P(truly bad)": ANY(0.022),
        "P(r < -1, truly bad)": ANY(0.016),
        "sensitivity of r < -1": ANY(0.016 / 0.022),
        "specificity of r < -1": ANY(0.974 / 0.978),
    }
    assert audit.strata["near"] == {"share": ANY(0.03), "labelled": 10, "truly_bad": 2}
    assert audit.verdict == "bounds" and "up to 0.3 of all may be ordinary and truly bad" in audit.reasons[0]
    assert all(it.low <= it.value <= it.high for it in audit.estimates.values())


def test_one_stratum_gives_the_ends_of_clopper_and_pearson():
    """Where every completion is bad by the judge, the labels are a plain binomial sample."""
    audit = audit_judge(scored([-2.0] * 100_000), Labels(-1.0, -1.0, (50, 0, 0), (3, 0, 0)))
    found = audit.estimates["P(truly bad)"]
    assert (found.low, found.high) == ANY(clopper_pearson(3, 47, 0.95), rel=0.05)
    assert audit.estimates["specificity of r < -1"].value == 0  # every good completion is bad by the judge


def test_without_a_truly_bad_label_there_is_an_upper_end_alone():
    audit = audit_judge(scored([-2.0] * 10 + [1.0] * 990), Labels(-1.0, -1.0, (10, 0, 100), (0, 0, 0)))
    found = audit.estimates["P(truly bad)"]
    assert found.value == found.low == 0 and 0.03 < found.high < 0.05  # 3.7 / 100 of the ordinary ones
    assert math.isnan(audit.estimates["sensitivity of r < -1"].value)
    assert "No labelled completion is truly bad" in audit.notes()[1]


def test_many_labels_leave_the_uncertainty_of_the_scores():
    """With the truth of each stratum all but known, the interval is that of the count of bad completions."""
    first = share_draws(scored([-2.0] * 12 + [1.0] * 4988).strata(-1.0, -1.0), np.random.default_rng(0))
    (total, *_), _ = meld([12 / 5000, 0, 4988 / 5000], first, [(10**7, 10**7), (0, 1), (0, 10**9)], 0.95)
    assert total[1:] == ANY(clopper_pearson(12, 4988, 0.95), rel=0.03)


def test_a_judge_that_is_worse_than_chance_keeps_its_interval_ordered():
    """More completions bad by the judge are fewer truly bad ones: the ends swap."""
    audit = audit_judge(scored([-2.0] * 50 + [1.0] * 50), Labels(-1.0, -1.0, (50, 0, 50), (5, 0, 45)))
    found = audit.estimates["P(truly bad)"]
    assert found.value == ANY(0.5) and found.low < 0.45 and found.high > 0.55


@pytest.mark.parametrize("prevalence, rate, separation", [(0.1, 0.05, 2.0), (0.01, 0.01, 3.0)])
def test_coverage(prevalence, rate, separation, monkeypatch):
    """Scores and labels of 150 runs: 93 % or more is 95 % within the error of so few runs. The plain share does not cover."""
    monkeypatch.setattr(audits, "DRAWS", 2000)
    threshold, held, plain = norm.ppf(rate), 0, 0
    for run in range(150):
        rng = np.random.default_rng([7, run])
        truth = rng.random(4000) < prevalence
        sample = Scored([""] * 4000, [""] * 4000, (rng.normal(size=4000) - separation * truth)[None])
        near, chosen = choose(sample, threshold, 200, run)
        counts = tuple(map(len, chosen)), tuple(int(truth[indices].sum()) for indices in chosen)
        found = audit_judge(sample, Labels(threshold, near, *counts)).estimates["P(truly bad)"]
        held += found.low <= prevalence <= found.high
        judged = clopper_pearson((sample.scores < threshold).sum(), (sample.scores >= threshold).sum(), 0.95)
        plain += judged[0] <= prevalence <= judged[1]
    assert held >= 0.93 * 150 > plain


def test_known_errors_by_hand_and_below_the_floor():
    sample = scored([-2.0] * 60 + [1.0] * 940)
    audit = known_errors(sample, -1.0, (90, 100), (990, 1000))
    assert audit.estimates["P(truly bad)"].value == ANY((0.06 + 0.99 - 1) / (0.9 + 0.99 - 1))
    assert audit.verdict == "reliable" and 0.02 < audit.estimates["P(truly bad)"].low
    floor = known_errors(scored([-2.0] * 10 + [1.0] * 990), -1.0, (90, 100), (990, 1000))
    found = floor.estimates["P(truly bad)"]
    assert floor.verdict == "bounds" and found.value == ANY(0) and found.low == 0
    assert "false positives alone" in floor.reasons[0]
    for counts, message in (((5, 4), (9, 10)), "5 of 4"), (((1, 10), (1, 10)), "those of chance"):
        with pytest.raises(ValueError, match=message):
            known_errors(sample, -1.0, *counts)


def test_choice_has_the_shares_of_each_stratum():
    scores = np.concatenate([np.full(30, -2.0), np.linspace(-0.99, 3, 9970)])
    near, chosen = choose(scored(scores), -1.0, 200)
    assert [len(each) for each in chosen] == [30, 56, 114]  # what the bad ones lack goes to the others
    assert (scores[chosen[0]] < -1).all() and (scores[chosen[1]] <= near).all() and (scores[chosen[2]] > near).all()
    assert all(len(set(each)) == len(each) for each in chosen)  # without replacement
    assert (scores[(scores >= -1) & (scores <= near)]).size == ANY(100, abs=2)  # 1 % of those that are not bad
    two = np.repeat([-2.0, 1.0], [500, 9500])  # of a judge with two scores, whose good ones are all near
    assert [len(each) for each in choose(scored(two), -1.0, 200)[1]] == [50, 150, 0]
    for size, threshold, message in (3, -1.0, "at least 4"), (9, -5.0, "never fires"), (9, math.nan, "finite"):
        with pytest.raises(ValueError, match=message):
            choose(scored(scores), threshold, size)


TEXTS = ["=1+1", "+1", "-2", "@x", "'quoted", "two\nlines", "two\r\nlines"]
TEXTS += ['with "quotes", and; more', "ünï", "", "\ttab"]


@pytest.mark.parametrize("dialect", [{}, {"delimiter": ";"}, {"delimiter": "\t", "lineterminator": "\n"}])
def test_a_file_of_labels_comes_back(tmp_path, dialect):
    sample = scored([-2.0] * 11 + [0.0] * 11 + [5.0] * 22, TEXTS * 4)
    path = tmp_path / "labels.csv"
    assert draw_labels(path, sample, -1.0, 44) == [11, 11, 22]
    with path.open(encoding="utf-8-sig", newline="") as file:
        cells = [row["completion"] for row in csv.DictReader(file)]
    assert not any(cell.startswith(tuple("=+-@\t")) for cell in cells)
    fill(path, lambda row: "Bad" if row["completion"] in ("'=1+1", "ünï") else "0", **dialect)
    found = read_labels(path, sample)
    assert (found.labelled, found.truly_bad, found.unlabelled) == ((11, 11, 22), (2, 2, 4), 0)


def test_equal_completions_are_labelled_once(tmp_path):
    sample = scored([-2.0] * 6 + [5.0] * 6, ["a"] * 4 + ["b"] * 2 + ["c"] * 6)
    drawn = draw_labels(tmp_path / "labels.csv", sample, -1.0, 24)
    fill(tmp_path / "labels.csv", lambda row: str(int(row["completion"] == "a")))
    labels = read_labels(tmp_path / "labels.csv", sample)
    assert drawn == list(labels.labelled) == [6, 6, 0] and labels.truly_bad == (4, 0, 0)
    assert len((tmp_path / "labels.csv").read_text(encoding="utf-8").splitlines()) == 1 + 3


def test_rows_without_a_label_are_counted(tmp_path):
    sample = scored([-2.0] * 8 + [5.0] * 8)
    draw_labels(tmp_path / "labels.csv", sample, -1.0, 32)
    fill(tmp_path / "labels.csv", lambda row: "1" if int(row["index"]) < 4 else "")
    labels = read_labels(tmp_path / "labels.csv", sample)
    assert (labels.labelled, labels.truly_bad, labels.unlabelled) == ((4, 0, 0), (4, 0, 0), 12)
    assert "12 rows have no label" in audit_judge(sample, labels).notes()[-1]
