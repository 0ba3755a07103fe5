"""`trl-repulse compare`: paired intervals and their coverage, what is shown, and which samples cannot be paired."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from trl_repulse.cli.main import main
from trl_repulse.evaluation import plots, records
from trl_repulse.evaluation.comparison import COMPLETED, compare_samples, paired_interval
from trl_repulse.evaluation.records import SampleSet

from ..evaluation_support import write_samples


SAME = {"prompts": {"count": 2, "sha256": "p"}, "rewards": {"r": {}}, "reference": None}


def made(name, rewards, weights="w", reference=None, **columns):
    """Samples (P, N) that are on no disk."""
    rewards = np.asarray(rewards, dtype=np.float64)
    header = SAME | {"model": {"weights": weights}, "settings": {"num_samples": rewards.shape[1]}}
    header["reference"] = None if reference is None else {"weights": reference}
    text = [str(i) for i in range(rewards.size)]
    table = {"prompt": text, "completion": [f"{name} {each}" for each in text], "reward": rewards.ravel()}
    return SampleSet(name, header, pa.table(table | {key: np.ravel(each) for key, each in columns.items()}))


def coverage(draw, truth, interval=paired_interval, repetitions=400):
    ends = [interval(*draw(np.random.default_rng(seed))) for seed in range(repetitions)]
    return np.mean([low <= truth <= high for low, high in ends]), np.mean([high - low for low, high in ends])


def unpaired(first, second):
    """The control: what two intervals over prompts would give for the difference, if these were other prompts."""
    means = [each.mean(axis=1) for each in (first, second)]
    half = 1.96 * np.hypot(*(each.std(ddof=1) / np.sqrt(each.size) for each in means))
    return means[1].mean() - means[0].mean() - half, means[1].mean() - means[0].mean() + half


def of_completions(first, second):
    """The control: as if all completions were of prompts of their own."""
    differences = second - first
    half = 1.96 * differences.std() / np.sqrt(differences.size)
    return differences.mean() - half, differences.mean() + half


def numbers(generator):
    """Prompts differ by much, and in how much the second model changes them."""
    level = 3 * generator.standard_normal((60, 1))
    first, second = (level - generator.exponential(size=(60, 8)) for _ in range(2))
    return first, second + 0.5 + generator.standard_normal((60, 1))


def test_intervals_of_means_cover_and_pairing_matters():
    held, width = coverage(numbers, 0.5)
    assert 0.92 < held < 0.98
    assert coverage(numbers, 0.5, unpaired)[1] > 2 * width  # holds too, and says less
    assert coverage(numbers, 0.5, of_completions)[0] < 0.8


@pytest.mark.parametrize(("mean", "factor"), [(0.005, 0.5), (0.02, 0.2), (0.02, 1.0), (0.3, 0.7), (0.3, 1.0)])
def test_intervals_of_rare_events_cover(mean, factor):
    """Most prompts have none, and a few have many."""

    def draw(generator):
        p = generator.beta(0.5, 0.5 / mean - 0.5, size=(120, 1))
        return generator.random((120, 16)) < p, generator.random((120, 16)) < factor * p

    held, width = coverage(draw, (factor - 1) * mean)
    assert held > 0.925
    if mean == 0.3:
        assert coverage(draw, 0, unpaired)[1] > 1.5 * width


def test_where_nothing_is_bad_the_counts_bound_the_difference():
    none = np.zeros((50, 20), dtype=bool)
    low, high = paired_interval(none, none)
    assert low == pytest.approx(-3.68e-3, rel=0.01) and high == -low
    assert paired_interval(none * 1.0, none * 1.0) == (-np.inf, np.inf)  # numbers that do not differ bound nothing


def test_a_difference_is_shown_only_if_there_is_one():
    """Over all quantities together: equal models are said to differ in no more than one of twenty comparisons."""
    said = []
    for seed in range(150):
        generator = np.random.default_rng(seed)
        level = generator.standard_normal((40, 1))

        def draw(name, shift, generator=generator, level=level):
            size = (40, 8)
            columns = {"kl": generator.normal(size=size), "length": generator.integers(1, 9, size)}
            ended = generator.random(size) < 0.8
            return made(name, level + shift + generator.normal(size=size), reference="r", ended=ended, **columns)

        (same,) = compare_samples([draw("a", 0), draw("b", 0)], [-1.5, 0.0])
        said.append(same.sentence != "No difference between `b` and `a` is shown.")
    assert np.mean(said) < 0.08
    (other,) = compare_samples([draw("a", 0), draw("b", 1.0)], [-1.5, 0.0])
    assert other.sentence == (
        "`b` differs from `a`, with a lower P(r < -1.5), a lower P(r < 0), a higher reward; no difference is shown in KL, length, "
        "share of completed answers."
    )
    assert other.differences["reward"].low <= other.differences["reward"].value <= other.differences["reward"].high


def test_the_reference_itself_has_no_kl():
    first, second = np.random.default_rng(0).normal(size=(2, 30, 4))
    before, after = made("a", first, "w"), made("b", second, "v", reference="w", kl=first + 2)
    assert compare_samples([before, after], [0])[0].differences["KL, nats per completion"].first == 0
    other = made("b", second, "v", reference="x", kl=first)
    assert "KL, nats per completion" not in compare_samples([before, other], [0])[0].differences


def test_the_command_compares_each_folder_with_the_first(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    values = np.random.default_rng(0).normal(size=(20, 10))
    for number, (name, shift) in enumerate((("before", 0), ("after", 2), ("later", 0.01))):
        texts = [f"{name} {i}" for i in range(200)]
        write_samples(tmp_path / name, values + shift, name, completions=texts, seed=number)
    Path("repulse.yaml").write_text("bad_reward_threshold: -1\nmax_steps: 3\noutput_dir: out\n")
    flags = ["--config", "repulse.yaml", "--output", "new/report.json"]
    for figure, begin in (("figures/bad.svg", b"<?xml"), ("figures/bad.png", b"\x89PNG")):
        assert main(["compare", "before", "after", "later", *flags, "--figure", figure]) == 0
        assert Path(figure).read_bytes().startswith(begin)
    assert main(["compare", "before", "after", *flags, "--figure", "bad.txt"]) == 1
    out = capsys.readouterr().out
    assert "20 prompts. Intervals are paired" in out
    assert "| quantity | before | after | difference | 95 % interval |" in out
    assert "`after` differs from `before`, with a lower P(r < -1), a higher reward." in out
    assert "`later` differs from `before`, with a higher reward; no difference is shown in P(r < -1)." in out
    report = json.loads(Path("new/report.json").read_text())["comparisons"]
    assert [each["names"][1] for each in report] == ["after", "later"]
    assert report[1]["differences"]["reward"]["low"] == pytest.approx(0.01)
    assert COMPLETED not in report[0]["differences"]


def test_of_samples_that_are_not_complete_the_prompts_that_all_have_are_compared(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    values = np.random.default_rng(0).normal(size=(20, 10))
    for number, name in enumerate(("whole", "stopped", "going on")):
        texts = [f"{name} {i}" for i in range(200)]
        write_samples(tmp_path / name, values + number, shards=20, completions=texts, seed=number)
        for shard in range(20 - 4 * number, 20):
            (tmp_path / name / "complete.json").unlink(missing_ok=True)
            records.shard_path(tmp_path / name, shard).unlink()
    folders = ["whole", "stopped", "going on"]
    assert main(["compare", *folders, "--thresholds", "0"]) == 1
    assert "`stopped` is not complete (16 of 20 prompts so far)" in (error := capsys.readouterr().err)
    assert "with `--partial`" in error
    assert main(["compare", *folders, "--thresholds", "0", "--partial", "--output", "report.json"]) == 0
    assert capsys.readouterr().out.startswith("the first 12 of 20 prompts. Intervals are paired")
    for number, it in enumerate(json.loads(Path("report.json").read_text())["comparisons"], 1):
        reward = it["differences"]["reward"]
        assert it["prompts"] == 12 and reward["second"] == pytest.approx(values[:12].mean() + number)
        assert reward["low"] == pytest.approx(number) == reward["high"]  # of the same prompts
    assert main(["compare", "whole", "whole", "--thresholds", "0", "--partial"]) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompts": ["other", "prompts"]}, "another `prompts.sha256`"),
        ({"max_completion_length": 3}, "another `settings.max_completion_length`"),
        ({"reward_weights": [2.0]}, "another `settings.reward_weights`"),
        ({"temperature": 0.2}, "another `settings.temperature`"),
        ({}, "hold the same completions; leave one out"),
        (None, "One folder cannot be compared; name two or more"),
    ],
)
def test_samples_that_cannot_be_paired_are_refused_by_name(tmp_path, capsys, changes, message):
    folders = [write_samples(tmp_path / "a", np.zeros((2, 3)))]
    if changes is not None:
        folders.append(write_samples(tmp_path / "b", np.ones((2, 3)), "v", **changes))
    assert main(["compare", *map(str, folders), "--thresholds", "0"]) == 1
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_other_rewards_and_references_are_refused_and_other_numbers_are_not():
    one = made("a", np.zeros((2, 3)), reference="r")
    for name, value in (("rewards", {"s": {}}), ("reference", {"weights": "q"})):
        other = made("b", np.zeros((2, 4)), reference="r")
        other.header[name] = value
        with pytest.raises(ValueError, match=f"`b` and `a` were sampled with another `{name}"):
            compare_samples([one, other], [0])
    (found,) = compare_samples([one, made("b", np.zeros((2, 4)), reference="r")], [-1])
    assert found.differences["P(r < -1)"].high > 0
    with pytest.raises(ValueError, match="`confidence=95`"):
        compare_samples([one, made("b", np.zeros((2, 4)), reference="r")], [-1], confidence=95)
    with pytest.raises(ValueError, match="no finite `reward`"):
        compare_samples([one, made("b", np.full((2, 3), np.nan), reference="r")], [0])


def test_the_figure_has_the_shares_and_the_paired_intervals(tmp_path, monkeypatch):
    values = np.random.default_rng(0).normal(size=(30, 8))
    found = compare_samples([made("a", values), made("b", values + 0.5), made("c", values + 1)], [-1.0, 0.0])
    drawn = []
    monkeypatch.setattr(plots, "_save", lambda figure, path: drawn.append(figure))
    plots.plot_comparison(found, tmp_path / "x.png")
    for (shares, changes), name in zip(np.reshape(drawn[0].axes, (2, 2)), ("P(r < -1)", "P(r < 0)"), strict=True):
        differences = [each.differences[name] for each in found]
        assert [bar.get_width() for bar in shares.patches] == [
            differences[0].first,
            *(it.second for it in differences),
        ]
        assert [[*line.get_xdata()] for line in changes.lines[:4:2]] == [[it.low, it.high] for it in differences]
        assert shares.get_xlabel() == name and changes.get_xlabel() == "difference to a, 95 % interval"
