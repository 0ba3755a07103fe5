"""Frontiers: front, intervals and gains, what may not stand in one figure; the commands `evaluate` and `frontier`."""

import csv
import dataclasses
import json
import math

import numpy as np
import pytest
from scipy.stats import binomtest, ttest_ind

from trl_repulse._commands.evaluate import SETTINGS
from trl_repulse.cli import main
from trl_repulse.evaluation.frontier import Run, make_frontier
from trl_repulse.evaluation.records import load_samples
from trl_repulse.evaluation.result_files import load_frontier
from trl_repulse.evaluation.sampling import SamplingSettings

from .evaluation_support import write_samples


def runs(method, *places):
    return [Run(method, x, y) for x, y in places]


def test_intervals_end_at_what_is_possible():
    drawn = [
        *runs("two", (-12.0, 4.0), (-8.0, 3.0)),
        *runs("beyond", (-1.0, 4.2), (-1.0, 4.1)),
        *runs("one", (-5.0, 3.9)),
    ]
    free = make_frontier(drawn, "log_prob_bad", "expected_reward").points
    two, beyond, one = make_frontier(
        drawn, "log_prob_bad", "expected_reward", largest={"log_prob_bad": 0.0, "expected_reward": 4.04}
    ).points
    assert free[0].y.high > 9 and two.y.high == 4.04 and two.y.low == free[0].y.low and two.y.value == 3.5
    assert free[0].x.high > 0 and two.x.high == 0.0
    assert beyond.y.high == beyond.y.value  # a wrong bound does not turn an interval round
    assert one.y == free[2].y


def test_front_means_and_gains():
    # Less of x is better, more of y
    found = make_frontier(
        [
            *runs("low", (0.1, 1.0), (0.3, 1.0)),
            *runs("high", (0.6, 3.0), (0.6, 3.0)),
            *runs("behind", (0.7, 0.5), (0.9, 0.5)),
        ],
        "prob_bad",
        "reward",
        threshold=-5.0,
    )
    points = {point.method: point for point in found.points}
    assert [point.on_front for point in found.points] == [True, True, False]
    assert points["low"].x.value == pytest.approx(0.2) and points["low"].x.samples == 2
    assert (points["low"].x.low, points["low"].x.high) == (0.0, 1.0)  # Student's, within what a share can be
    # From the worst run in either quantity
    assert found.reference_point == (0.9, 0.5) and found.baseline == "low"
    assert points["low"].gain is None
    assert points["high"].gain.value == pytest.approx(0.3 * 2.5 - 0.7 * 0.5)
    assert points["behind"].gain.value == pytest.approx(0.1 * 0.0 - 0.7 * 0.5)
    assert found.x_label == "P(r < -5)"


@pytest.mark.parametrize("factor", [1e150, 1e-150])
def test_gains_of_any_size(factor):
    """As of rewards that an exponential transform made: the squares of areas are no floats."""
    quantities = ("reward", "return")
    places = np.random.default_rng(0).normal(size=(2, 3, 2)) + [[[0.0, 1.0]], [[1.0, 2.0]]]
    one, other = (
        make_frontier([Run(name, *run) for name, each in zip("ab", found, strict=True) for run in each], *quantities)
        for found in (places, factor * places)
    )
    ends = [[getattr(each.points[1].gain, end) for end in ("value", "low", "high")] for each in (one, other)]
    assert np.isfinite(ends[1]).all() and ends[1] == pytest.approx([factor * factor * end for end in ends[0]])


def test_an_area_beyond_all_floats():
    places = [runs("a", (0.0, 0.0), (1e160, 1e160)), runs("b", (1e160, 2e160), (2e160, 1e160))]
    gain = make_frontier(sum(places, []), "reward", "return").points[1].gain
    assert (gain.value, gain.high) == (math.inf, math.inf)


def test_a_gain_is_over_the_baseline_and_from_the_reference_point():
    methods = [
        *runs("a", (0.1, 1.0), (0.3, 1.0)),
        *runs("b", (0.6, 3.0), (0.5, 3.5)),
        *runs("c", (0.7, 0.5), (0.9, 0)),
    ]
    found = make_frontier(methods, "prob_bad", "reward", -5.0, baseline="b", reference_point=(1.0, -1.0))
    gains = {point.method: point.gain for point in found.points}
    assert gains["b"] is None and found.reference_point == (1.0, -1.0)
    assert gains["a"].value == pytest.approx(0.8 * 2.0 - 0.45 * 4.25)
    back = make_frontier(methods, "prob_bad", "reward", -5.0, baseline="a", reference_point=(1.0, -1.0)).points[1].gain
    assert (back.low, back.high) == pytest.approx((-gains["a"].high, -gains["a"].low))
    # Methods that are neither play no part, but for the corner, if it is theirs
    two = make_frontier(methods[:4], "prob_bad", "reward", -5.0, baseline="b", reference_point=(1.0, -1.0))
    assert two.points[0].gain == gains["a"]
    for wrong, message in (
        ({"baseline": "d"}, "`baseline='d'` is none of the methods; choose among a, b, c"),
        (
            {"reference_point": (0.8, -1.0)},
            r"`reference_point=\(0.8, -1.0\)` is better than the worst runs, \(0.9, 0.0\)",
        ),
        ({"reference_point": (1.0, 0.1)}, "is better than the worst runs"),
        ({"reference_point": (1.0, math.nan)}, "must be two finite numbers"),
    ):
        with pytest.raises(ValueError, match=message):
            make_frontier(methods, "prob_bad", "reward", -5.0, **wrong)


def test_the_interval_of_a_gain_that_is_a_difference_is_welchs():
    """Methods alike in y: what one gains is how far its mean of x lies beyond the other's."""
    ahead, behind = [13.0, 14.0, 16.0], [9.0, 9.1, 9.6, 9.9]
    methods = [*runs("behind", *((x, 1.0) for x in behind)), *runs("ahead", *((x, 1.0) for x in ahead))]
    gain = make_frontier(methods, "reward", "return", reference_point=(0.0, 0.0)).points[1].gain
    expected = ttest_ind(ahead, behind, equal_var=False).confidence_interval(0.95)
    assert gain.value == pytest.approx(np.mean(ahead) - np.mean(behind)) and gain.samples == 3
    assert (gain.low, gain.high) == pytest.approx((expected.low, expected.high))
    for single in (methods[:1] + methods[4:], methods[:5]):  # the baseline's, or the method's
        alone = make_frontier(single, "reward", "return", reference_point=(0.0, 0.0)).points[1].gain
        assert math.isfinite(alone.value) and (alone.low, alone.high) == (-math.inf, math.inf)


def test_the_interval_of_a_gain_follows_both_quantities():
    """Of many runs it is that of the bootstrap over runs: quantities that move together add up, those that trade off do not."""
    rng = np.random.default_rng(0)
    for correlation in (0.9, -0.9):
        cov = [[1.0, correlation], [correlation, 1.0]]
        places = [rng.multivariate_normal(mean, cov, size=400) for mean in ((5.0, 5.0), (6.0, 4.5))]
        methods = [Run(name, *map(float, row)) for name, rows in zip("ab", places, strict=True) for row in rows]
        gain = make_frontier(methods, "reward", "return", reference_point=(-10.0, -10.0)).points[1].gain
        means = [each[rng.integers(400, size=(4000, 400))].mean(axis=1) + 10 for each in places]
        expected = np.quantile(means[1].prod(axis=1) - means[0].prod(axis=1), [0.025, 0.975])
        assert gain.low < 16 * 14.5 - 15 * 15 < gain.high
        assert (gain.low, gain.high) == pytest.approx(expected, abs=0.04 * (gain.high - gain.low))


def test_a_share_of_zero_is_bounded_by_the_exact_interval():
    """No bad sample in any run says that bad samples are rare, not that there are none."""
    none = [Run("a", 0.0, 1.0, x_samples=1000), Run("a", 0.0, 2.0, x_samples=1000)]
    point, other = make_frontier([*none, *runs("b", (0.001, 1.0), (0.002, 2.0))], "prob_bad", "reward", -5.0).points
    assert (point.x.value, point.x.low) == (0.0, 0.0)
    assert point.x.high == pytest.approx(1 - 0.025 ** (1 / 2000), rel=1e-9)
    assert other.x.low == 0.0 < other.x.high  # Student's would go below
    alike = [Run("a", 0.002, 1.0, x_samples=1000), Run("a", 0.002, 2.0, x_samples=1000)]
    x = make_frontier(alike, "prob_bad", "reward", -5.0).points[0].x
    exact = binomtest(4, 2000).proportion_ci(0.95, "exact")
    assert (x.low, x.high) == (exact.low, exact.high)  # Student's would be a point
    unknown = make_frontier(runs("a", (1.0, 1.0), (1.0, 2.0)), "attack_success", "reward").points[0]
    assert (unknown.x.low, unknown.x.high) == (-math.inf, math.inf)


def test_runs_that_agree_have_no_interval():
    """They do not tell how far others would lie apart; 0.1 + 0.2 differs from 0.3 in its last digit."""
    drawn = [
        *runs("a", (0.3, 1.0), (0.1 + 0.2, 2.0)),
        *runs("b", *[(0.1, 0.7)] * 3),
        *runs("c", (2.0, 3.0), (2.5, 3.5)),
    ]
    for quantities in (("kl", "return"), ("attack_success", "cvar")):  # b's is a share of unknown samples
        places = drawn if quantities[0] == "kl" else [Run(run.method, run.x / 3, run.y) for run in drawn]
        a, b, c = make_frontier(places, *quantities, level=0.1, reference_point=(3.0, 0.0)).points
        nothing = (-math.inf, math.inf)
        assert (
            (a.x.low, a.x.high) == (b.x.low, b.x.high) == (b.y.low, b.y.high) == (b.gain.low, b.gain.high) == nothing
        )
        assert a.y.low < 1.0 < 2.0 < a.y.high and c.x.low < c.x.high < math.inf  # a control
        assert math.isfinite(c.gain.low)


def test_both_better_when_larger():
    found = make_frontier([*runs("a", (1.0, 1.0)), *runs("b", (2.0, 2.0)), *runs("c", (3.0, 0.0))], "reward", "return")
    assert [point.on_front for point in found.points] == [False, True, True]
    assert found.points[0].x.low == -math.inf and found.points[1].gain.low == -math.inf  # one run has no interval
    assert [point.gain and point.gain.value for point in found.points] == [None, 2.0, 0.0]


def test_tables(tmp_path):
    found = make_frontier([*runs("a, b", (0.1, 1.0), (0.3, 1.2)), *runs("c", (0.6, 3.0))], "kl", "reward")
    rows = list(csv.DictReader(found.to_csv().splitlines()))
    assert [row["method"] for row in rows] == ["a, b", "c"]
    assert float(rows[0]["kl"]) == pytest.approx(0.2) and rows[1]["reward_low"] == "-inf"
    assert rows[0]["hypervolume_gain"] == "" and float(rows[1]["hypervolume_gain"]) == pytest.approx(-0.4 * 0.1)
    assert found.to_markdown().endswith(
        "\n\nHypervolumes are measured from the reference point: KL to the reference, nats per completion 0.6, mean reward 1."
    )
    assert "| c | 1 | 0.6 | 3 | -0.04 | yes |" in found.to_markdown()
    assert "hypervolume gain over a, b" in found.to_markdown() and "| – | yes |" in found.to_markdown()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_runs_without_a_finite_value(bad):
    with pytest.raises(ValueError, match="must be finite"):
        make_frontier(runs("a", (bad, 0.0)), "kl", "reward")
    with pytest.raises(ValueError, match="no runs"):
        make_frontier([], "kl", "reward")
    with pytest.raises(ValueError, match="`confidence=95`"):
        make_frontier(runs("a", (0.0, 0.0)), "kl", "reward", confidence=95)


@pytest.fixture
def folders(tmp_path):
    """Samples of two methods, two seeds each."""
    rng = np.random.default_rng(0)
    made = {}
    for name, shift in (("A", 0.0), ("B", 1.0)):
        made[name] = [
            str(write_samples(tmp_path / f"{name}{i}", rng.normal(shift, 1 + i, (3, 100)), f"{name}{i}", seed=i))
            for i in range(2)
        ]
    return made


def test_folders_of_samples(folders):
    found = load_frontier(folders, "prob_bad", "return", threshold=-1.0)
    assert [point.method for point in found.points] == ["A", "B"] and found.points[1].on_front
    assert found.points[1].y.value - found.points[0].y.value == pytest.approx(1.0, abs=0.5)
    assert load_frontier(folders, "cvar", "reward", level=0.1).x_label == "CVaR 0.1"


@pytest.mark.parametrize(
    ("changes", "arguments", "message"),
    [
        ({"prompts": ["a", "b", "c"]}, {}, "another `prompts.sha256`"),
        ({"dtype": "float16"}, {}, "another `settings.dtype`"),
        ({}, {"x": "harm"}, "no quantity 'harm'; choose among reward"),
        ({}, {"threshold": None}, "needs a `threshold`"),
        ({}, {"x": "cvar"}, "needs a `level`"),
        ({}, {"x": "kl"}, "no column of numbers `kl`"),
    ],
)
def test_samples_that_may_not_stand_in_one_figure(folders, tmp_path, changes, arguments, message):
    other = write_samples(tmp_path / "other", np.zeros((3, 100)), **changes)
    with pytest.raises(ValueError, match=message):
        load_frontier(folders | {"C": [other]}, **({"x": "prob_bad", "y": "return", "threshold": -1.0} | arguments))


def test_other_result_files(folders, tmp_path):
    paths = [tmp_path / f"{i}.json" for i in range(4)]
    for i, path in enumerate(paths):
        settings = {"attack": "gcg", "steps": 10 if i < 3 else 20}
        path.write_text(json.dumps({"settings": settings, "attack_success": 0.1 * i, "reward": float(i)}))
    found = load_frontier({"A": paths[:2], "B": [paths[2]]}, "attack_success", "reward")
    assert found.points[0].x.value == pytest.approx(0.05)
    for wrong, message in (
        ({"A": paths}, "differ in the setting `steps`"),
        ({"A": [paths[0]], "B": [paths[0]]}, "named twice"),
        ({"A": [paths[0], *folders["A"]]}, "runs of one kind"),
        ({"A": [tmp_path / "none.json"]}, "There is no run `.*none.json`; name a folder"),
        ({"A": [paths[0], tmp_path / "none"]}, "There is no run `.*none`"),
        ({"A": [folders["A"][0], tmp_path / "none"]}, "There is no run `.*none`"),
        ({"A": [paths[0], f"{tmp_path}/none,none.jsonl".rsplit(",", 1)]}, "There is no run `.*none`"),
        ({"A": [tmp_path / "A0" / "header.json"]}, "name the folder"),
    ):
        with pytest.raises(ValueError, match=message):
            load_frontier(wrong, "attack_success", "reward")
    with pytest.raises(ValueError, match="no number `return`; it has attack_success, reward"):
        load_frontier({"A": paths[:2]}, "attack_success", "return")
    paths[0].write_text(json.dumps({"settings": {"threshold": -5.0}, "prob_bad": 0.1, "reward": 1.0}))
    with pytest.raises(ValueError, match="no `prob_bad` at `threshold=-4.0`"):
        load_frontier({"A": paths[:1]}, "prob_bad", "reward", threshold=-4.0)
    paths[0].write_text(json.dumps({"settings": {}, "return": True, "reward": 1.0}))
    with pytest.raises(ValueError, match="0.json` has no number `return`; it has reward"):
        load_frontier({"A": paths[:1]}, "return", "reward")
    for key, share in (("attack_success", 7), ("prob_bad", -0.1), ("prob_bad", math.nan)):
        paths[0].write_text(json.dumps({"settings": {"threshold": -5.0}, key: share, "reward": 1.0}))
        with pytest.raises(ValueError, match=f"0.json` has the share `{key}` {share}; write it"):
            load_frontier({"A": paths[:1]}, key, "reward", threshold=-5.0)
    paths[0].write_text(json.dumps({"settings": [1], "reward": 1.0}))
    with pytest.raises(ValueError, match="0.json` has `settings` that are no settings by name"):
        load_frontier({"A": paths[:1]}, "reward", "reward")
    paths[0].write_text(json.dumps({"reward": 1.0}))
    with pytest.raises(ValueError, match="no `settings`"):
        load_frontier({"A": paths[:1]}, "reward", "reward")


def test_frontier_command(folders, tmp_path, capsys):
    methods = [part for name, paths in folders.items() for part in ("--method", name, *paths)]
    output = tmp_path / "figures" / "v1.5"
    assert main(["frontier", str(output), *methods, "--threshold", "-1"]) == 0
    assert "| B | 2 |" in capsys.readouterr().out
    assert {path.name for path in output.parent.iterdir()} == {"v1.5.png", "v1.5.pdf", "v1.5.csv"}
    assert (output.parent / "v1.5.pdf").read_bytes().startswith(b"%PDF")
    options = ["--threshold", "-1", "--baseline", "B", "--reference_point", "1", "-5"]
    assert main(["frontier", str(output), *methods, *options]) == 0
    table = capsys.readouterr().out.splitlines()
    assert "hypervolume gain over B" in table[0] and " to " in table[2].split("|")[5] and "–" in table[3]
    assert main(["frontier", str(output), *methods, "--threshold", "-1", "--baseline", "C"]) == 1
    assert "`baseline='C'` is none of the methods; choose among A, B" in capsys.readouterr().err
    assert main(["frontier", str(output), *methods, "--method", "A", *folders["A"], "--threshold", "-1"]) == 1
    assert "given twice" in capsys.readouterr().err
    comma = write_samples(tmp_path / "a, b", np.zeros((3, 100)))
    assert main(["frontier", str(output), "--method", "A", str(comma), "--threshold", "-1"]) == 0
    capsys.readouterr()
    assert main(["frontier", str(output), "--method", "A", "--threshold", "-1"]) == 1
    assert "`--method A` has no run" in capsys.readouterr().err
    for axes, message in (
        (["--x", "reward", "--threshold", "-1"], "`--threshold` has no effect without prob_bad or attack_success"),
        (["--threshold", "-1", "--level", "0.1"], "`--level` has no effect without cvar"),
    ):
        assert main(["frontier", str(output), *methods, *axes]) == 1
        assert message in capsys.readouterr().err


def test_each_setting_of_the_sampler_is_an_option():
    assert set(SETTINGS) == {field.name for field in dataclasses.fields(SamplingSettings)}


@pytest.fixture
def arguments(tmp_path, model_dirs):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "the cat"}\n{"prompt": "fish"}\n')
    (tmp_path / "mine.py").write_text(
        "def reward(completions, **kwargs):\n    return [-3.0 * c.count('bad') for c in completions]\n"
    )
    return [
        *("--model", model_dirs["gpt2"], "--prompts", str(tmp_path / "prompts.jsonl")),
        *("--reward_type", f"{tmp_path / 'mine.py'}:reward", "--num_samples", "50", "--max_completion_length", "2"),
    ]


def test_evaluate_command_samples_once_and_reads_often(arguments, tmp_path, model_dirs, capsys):
    folder, output = str(tmp_path / "samples"), tmp_path / "new" / "report.json"
    (tmp_path / "negatives.jsonl").write_text('{"prompt": "fish", "completion": " bad"}\n')
    options = ["--reference", model_dirs["gpt2"], "--beta", "0.1", "--reward_weights", "2"]
    reading = ["--thresholds", "-1", "-99", "--negatives", str(tmp_path / "negatives.jsonl"), "--output", str(output)]
    assert main(["evaluate", folder, *arguments, *options, *reading]) == 0
    out = capsys.readouterr().out
    assert "| P(r < -1) |" in out and "| P(r < -99) | 0 | 0 to 0.036" in out and "1 distinct bad completion" in out
    report = json.loads(output.read_text())
    assert report["negatives"]["count"] == 1 and set(report["per_prompt"]) == {"the cat", "fish"}
    assert main(["evaluate", folder, "--thresholds", "-5", "--quantiles", "0.5", "--per_prompt"]) == 0
    out = capsys.readouterr().out
    assert "| P(r < -5) |" in out and "| quantile 0.5 |" in out and "Prompt 'fish'" in out


def test_the_files_do_not_depend_on_what_can_be_printed(tmp_path, poor_stdout):
    write_samples(tmp_path / "samples", np.arange(100.0).reshape(2, 50), prompts=["☕", "fish"])
    output, figure = tmp_path / "report.json", tmp_path / "rewards.png"
    flags = ["--per_prompt", "--output", str(output), "--figure", str(figure)]
    with poor_stdout():
        assert main(["evaluate", str(tmp_path / "samples"), *flags]) == 0
    assert "☕" in json.loads(output.read_text())["per_prompt"] and figure.is_file()


def test_evaluate_command_reads_rewards_of_any_size(tmp_path, capsys):
    """As an exponential transform makes them: the squares of their variances are no floats."""
    rewards, found = -np.random.default_rng(0).exponential(size=(3, 8, 200)), []
    for factor in (1.0, 1e104):
        names = [tmp_path / f"{factor}-{i}" for i in range(3)]
        folders = [
            str(write_samples(*each, str(i))) for i, each in enumerate(zip(names, factor * rewards, strict=True))
        ]
        assert main(["evaluate", *folders, "--levels", "0.2", "--output", str(tmp_path / "report.json")]) == 0
        found.append(json.loads((tmp_path / "report.json").read_text())["overall"])
    assert "| CVaR 0.2 | -2.6" in capsys.readouterr().out
    for name in ("mean", "CVaR 0.2"):
        ends = [found[0][name][end] * 1e104 for end in ("low", "high")]
        assert [found[1][name][end] for end in ("low", "high")] == pytest.approx(ends)


def test_evaluate_command_takes_several_rewards(arguments, tmp_path, capsys):
    (tmp_path / "second.py").write_text(
        "def length(completions, **kwargs):\n    return [float(len(c)) for c in completions]\n"
    )
    place = arguments.index("--reward_type")
    arguments[place : place + 2] = [
        *("--reward", json.dumps({"reward_type": f"{tmp_path / 'mine.py'}:reward"})),
        *("--reward", json.dumps({"reward_type": f"{tmp_path / 'second.py'}:length", "reward_kwargs": {}})),
    ]
    folder = tmp_path / "samples"
    assert main(["evaluate", str(folder), *arguments, "--reward_weights", "1", "0.5"]) == 0
    table = load_samples(folder).table.to_pandas()
    assert (table["rewards/length"] == table["completion"].str.len()).all()
    assert np.allclose(table["reward"], table["rewards/reward"] + 0.5 * table["rewards/length"])
    capsys.readouterr()
    assert main(["evaluate", str(folder), "--column", "rewards/length", "--thresholds", "1"]) == 0
    assert "| P(r < 1) |" in capsys.readouterr().out
    assert main(["evaluate", str(tmp_path / "other"), *arguments, "--reward_type", "toxicity"]) == 1
    assert "`--reward` holds all" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "There is no file"),
        ("\n", "is empty"),
        ('{"prompt": "fish", "completion": " bad"}\n{"prompt": "fish"}', "Line 2 of"),
        ('{"prompt": "fish", "completion": ""}', "empty completions only"),
        (b"\xff\xfe\xff", "is not UTF-8 text"),
    ],
)
def test_evaluate_command_refuses_negatives_before_it_samples(arguments, tmp_path, capsys, text, message):
    path = tmp_path / "negatives.jsonl"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert main(["evaluate", str(tmp_path / "s"), *arguments, "--negatives", str(path)]) == 1
    err = capsys.readouterr().err
    assert message in err and str(path) in err and not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["--num_samples", "0"], "`num_samples=0`"),
        (["--prompts", "none.jsonl"], "There is no file"),
        (["--reward_type", "toxicity"], "`reward_model_path`"),
        (["--beta", "1"], "needs a `reference`"),
        (["--levels", "2"], "`level=2.0`"),
        (["--column", "kl"], "none of what these samples will have"),
    ],
)
def test_evaluate_command_says_what_is_wrong(arguments, tmp_path, capsys, changes, message):
    assert main(["evaluate", str(tmp_path / "s"), *arguments, *changes]) == 1
    err = capsys.readouterr().err
    assert "trl-repulse evaluate: " in err and message in err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["--seed", "1"], "`--seed` has no effect without `--model`"),
        (["--negatives", "n.jsonl"], "`--negatives` has no effect without `--model`"),
        (["--apply_chat_template"], "`--apply_chat_template` has no effect without `--model`"),
        (["--reward_kwargs", '{"negate": true}'], "`--reward_kwargs` has no effect without `--model`"),
        (["--split", "test"], "`--split` has no effect without `--model`"),
        ([], "holds no samples"),
        (["--model", "m"], "`--prompts` is needed"),
        (["other", "--model", "m"], "samples into one folder"),
        (["other", "--per_prompt"], "`--per_prompt` is for one model"),
    ],
)
def test_reading_needs_samples(tmp_path, capsys, changes, message):
    assert main(["evaluate", str(tmp_path / "s"), *changes]) == 1
    assert message in capsys.readouterr().err
