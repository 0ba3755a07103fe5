"""Tails of samples: against exact binomials and plain code, over seeds and prompts, and what is refused."""

import math

import numpy as np
import pytest
from scipy.stats import beta, binomtest, norm
from scipy.stats import t as student_t

from trl_repulse.evaluation import tails
from trl_repulse.evaluation.records import load_samples
from trl_repulse.evaluation.report import TailReport, estimates, tail_report
from trl_repulse.evaluation.tails import combined_interval, crossed_interval

from ..evaluation_support import write_samples


@pytest.fixture
def sets(tmp_path):
    """Held-out samples of three models, of whose draws half lie at -3 or below."""
    rewards = -np.random.default_rng(0).integers(0, 6, (3, 4, 60)).astype(float)
    return [load_samples(write_samples(tmp_path / str(i), each, weights=str(i))) for i, each in enumerate(rewards)]


def binomial_tail(count, n, p):
    """P(B <= count), term by term."""
    return math.fsum(math.comb(n, k) * p**k * (1 - p) ** (n - k) for k in range(count + 1))


@pytest.mark.parametrize("count", [1, 3, 50, 97, 99])
def test_clopper_pearson_against_its_definition(count):
    """At the upper end so few bad samples have probability 2.5 %, at the lower end so many."""
    rewards = np.concatenate([np.full(count, -1.0), np.full(100 - count, 1.0)]).reshape(4, 25)
    found = tails.prob_below(rewards, 0.0)
    assert (found.value, found.samples) == (count / 100, count)
    assert binomial_tail(count, 100, found.high) == pytest.approx(0.025, abs=1e-8)
    assert 1 - binomial_tail(count - 1, 100, found.low) == pytest.approx(0.025, abs=1e-8)
    ends = (beta.ppf(0.005, count, 101 - count), beta.ppf(0.995, count + 1, 100 - count))
    wider = tails.prob_below(rewards, 0.0, confidence=0.99)
    assert (wider.low, wider.high) == pytest.approx(ends, rel=1e-8)


@pytest.mark.parametrize(("level", "n"), [(0.1, 200), (0.01, 900), (0.5, 7), (0.999, 40), (0.001, 100)])
def test_quantile_against_binomial_counts(level, n):
    rewards = np.random.default_rng(n).normal(size=(1, n))
    ordered, found = sorted(rewards[0]), tails.quantile(rewards, level)
    assert found.value == next(x for i, x in enumerate(ordered, 1) if i / n >= level - 1e-12)
    # An end at rank k misses where fewer than k samples, or at least k, are below the quantile
    fewer = np.cumsum([math.comb(n, k) * level**k * (1 - level) ** (n - k) for k in range(n)])
    low = [k for k in range(1, n + 1) if fewer[k - 1] <= 0.025]
    high = [k for k in range(1, n + 1) if 1 - fewer[k - 1] <= 0.025]
    assert found.low == (ordered[max(low) - 1] if low else -math.inf)
    assert found.high == (ordered[min(high) - 1] if high else math.inf)


@pytest.mark.parametrize("decimals", [1, 0])  # with ties, with atoms
@pytest.mark.parametrize(("level", "n"), [(0.1, 200), (0.02, 300), (0.5, 31)])
def test_a_quantile_is_bounded_by_clopper_and_pearson(level, n, decimals):
    """It lies where their intervals of the probabilities of less, and of no more, do not leave its level out."""
    rewards = np.random.default_rng(n).normal(size=(1, n)).round(decimals)
    inside = []
    for reward in np.unique(rewards):
        less, no_more = (
            binomtest(int(count), n).proportion_ci(0.95, "exact")
            for count in ((rewards < reward).sum(), (rewards <= reward).sum())
        )
        if less.low <= level <= no_more.high:
            inside.append(reward)
    found = tails.quantile(rewards, level)
    assert (found.low, found.high) == (inside[0], inside[-1])


@pytest.mark.parametrize(("level", "n"), [(0.1, 1000), (0.1, 1003), (0.25, 999), (0.3333, 500)])
def test_cvar_against_plain_code(level, n):
    rewards = np.random.default_rng(n).normal(size=(1, n))
    whole, total = int(level * n), 0.0
    ordered = sorted(rewards[0])
    for x in ordered[:whole]:
        total += x
    total += (level * n - whole) * ordered[whole]  # the last one by its fraction
    found = tails.cvar(rewards, level)
    assert found.value == pytest.approx(total / (level * n), rel=1e-12)
    assert found.samples == pytest.approx(level * n)
    assert found.low < found.value < found.high
    assert tails.tail_influence(rewards, level).mean() == pytest.approx(found.value, rel=1e-12)


def test_cvar_of_a_short_tail_has_no_interval():
    rewards = np.random.default_rng(0).normal(size=(10, 99))
    found = tails.cvar(rewards, 0.1)
    assert (found.low, found.high) == (-math.inf, math.inf) and found.samples == pytest.approx(99)
    assert math.isfinite(tails.cvar(rewards, 0.11).low)


def test_intervals_cover():
    """The truth of a normal reward whose mean depends on the prompt; four standard errors of 400 repetitions."""
    generator, means, covered = np.random.default_rng(0), np.array([[-1.0], [0.0], [2.0]]), {}
    grid = np.linspace(-6, 6, 100_001)
    q = grid[np.searchsorted(norm.cdf(grid - means).mean(axis=0), 0.2)]
    below = means[:, 0] * norm.cdf(q - means[:, 0]) - norm.pdf(q - means[:, 0])  # E[r; r < q] of each prompt
    truth = {"mean": 1 / 3, "quantile": q, "cvar": below.mean() / 0.2, "prob": norm.cdf(-2 - means).mean()}
    for _ in range(400):
        rewards = means + generator.normal(size=(3, 200))
        found = {
            "mean": tails.mean(rewards),
            "quantile": tails.quantile(rewards, 0.2),
            "cvar": tails.cvar(rewards, 0.2),
            "prob": tails.prob_below(rewards, -2.0),
        }
        for name, it in found.items():
            covered[name] = covered.get(name, 0) + (it.low <= truth[name] <= it.high) / 400
    assert 0.906 < covered["mean"] < 0.994 and 0.906 < covered["cvar"] < 0.994
    assert covered["quantile"] > 0.906 and covered["prob"] > 0.906


def test_mean_of_symmetric_samples_is_students():
    values = np.concatenate([-np.arange(1.0, 6.0), np.arange(1.0, 6.0)])
    found = tails.mean(values[None])
    half = student_t.ppf(0.975, 9) * values.std(ddof=1) / math.sqrt(10)
    assert (found.low, found.high) == pytest.approx((-half, half), rel=1e-9)
    skewed = tails.mean(np.array([[0.0] * 9 + [10.0]]))
    assert skewed.high - skewed.value > skewed.value - skewed.low  # towards the longer tail


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: tails.mean(np.ones(3)), "`rewards` has shape"),
        (lambda: tails.mean(np.ones((2, 0))), "`rewards` has shape"),
        (lambda: tails.cvar(np.array([[1.0, -1e308]]), 0.1), "`rewards` holds values beyond 1e.60.*scale the reward"),
        (lambda: tails.cvar(np.array([[1.0, math.nan]]), 0.1), "not finite; fix the reward"),
        (lambda: tails.prob_below(np.array([[1.0, -math.inf]]), 0.1), "not finite; fix the reward"),
        (lambda: tails.prob_below(np.ones((1, 2)), math.nan), "`threshold` is NaN"),
        (lambda: tails.quantile(np.ones((1, 2)), 0.0), "`level=0.0` must be between 0 and 1"),
        (lambda: tails.cvar(np.ones((1, 2)), 1.0), "`level=1.0` must be between 0 and 1"),
        (lambda: tails.mean(np.ones((1, 2)), 95.0), "`confidence=95.0` must be between 0 and 1"),
    ],
)
def test_arguments_are_checked(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_cvar_of_an_atom_and_a_few_rewards_below_it_has_no_lower_end():
    """Two samples in 2,000 below 0 on average: they are too few to tell how deep others lie."""
    rng, covered, bounded = np.random.default_rng(3), 0, 0
    for _ in range(300):
        rewards = np.where(rng.random((1, 2000)) < 1e-3, -rng.exponential(size=(1, 2000)), 0.0)
        found = tails.cvar(rewards, 0.1)
        covered += found.low <= -0.01 <= found.high
        bounded += math.isfinite(found.low)
    assert covered / 300 > 0.97 and bounded < 5
    rewards[0, :10] = -1.0
    assert math.isfinite(tails.cvar(rewards, 0.1).low)


def test_bootstrap_over_seeds_is_students():
    values = np.array([1.0, 2.0, 4.0, 4.5, 6.0])
    half = student_t.ppf(0.975, 4) * values.std(ddof=1) / math.sqrt(5)
    low, high = crossed_interval(values[:, None])
    assert (values.mean() - low, high - values.mean()) == pytest.approx((half, half))
    assert crossed_interval(values[::-1, None]) == pytest.approx((low, high))  # in any order
    assert crossed_interval(values[None]) == pytest.approx((low, high))  # prompts of one seed likewise
    assert crossed_interval(values[:1, None]) == (-math.inf, math.inf)


@pytest.mark.parametrize(("seed_spread", "prompt_spread"), [(1.0, 1.0), (3.0, 0.5)])
def test_variances_are_those_of_resampling(seed_spread, prompt_spread):
    """Of seeds and prompts that differ: seeds alone, prompts alone, and both at once, resampled 200,000 times."""
    generator, shape = np.random.default_rng(5), (4, 7)
    cells = seed_spread * generator.normal(size=(4, 1)) + prompt_spread * generator.normal(size=(1, 7))
    cells += 0.1 * generator.normal(size=shape)
    by_seed, by_prompt = (
        generator.multinomial(count, np.full(count, 1 / count), size=200_000) / count for count in shape
    )
    seeds, prompts = (by_seed @ cells).mean(axis=1).var(), (by_prompt @ cells.T).mean(axis=1).var()
    both = ((by_seed @ cells) * by_prompt).sum(axis=1).var() - seeds - prompts
    expected = combined_interval(cells.mean(), [(seeds * 4 / 3, 3), (prompts * 7 / 6, 6), (-both * 28 / 18, 18)])
    half = (expected[1] - expected[0]) / 2
    assert crossed_interval(cells) == pytest.approx(expected, abs=0.02 * half)


@pytest.mark.parametrize("shape", [(2, 16), (16, 2), (2, 2)])
def test_two_of_either_are_refused(shape):
    cells = np.random.default_rng(4).normal(size=shape)
    with pytest.raises(
        ValueError, match=f"`cells` has {shape[0]} seeds and {shape[1]} prompts; .* means over the prompts"
    ):
        crossed_interval(cells)
    crossed_interval(cells.mean(axis=1, keepdims=True)), crossed_interval(cells.mean(axis=0, keepdims=True))


@pytest.mark.parametrize(("seeds", "prompts"), [(5, 4), (3, 16)])
@pytest.mark.parametrize("effects", [(0.0, 0.0), (0.3, 0.0), (0.3, 0.3), (1.0, 0.2)])
def test_intervals_over_seeds_and_prompts_cover_with_differences_and_without(seeds, prompts, effects):
    """Differences that are there, hardly there, or not: the test that pools them costs no coverage."""
    generator, covered, repetitions = np.random.default_rng(2), 0, 600
    for _ in range(repetitions):
        cells = effects[0] * generator.normal(size=(seeds, 1)) + effects[1] * generator.normal(size=(1, prompts))
        low, high = crossed_interval(cells + generator.normal(size=(seeds, prompts)))
        covered += low <= 0.0 <= high
    assert 0.92 < covered / repetitions < 0.985


def test_differences_that_are_not_there_are_pooled():
    """By hand: neither seeds nor prompts differ, or seeds alone do."""
    # all of the variation is that of cells: 6 over 8 degrees of freedom
    alike = np.array([[1.0, -1.0, 0.0], [-1.0, 0.0, 1.0], [0.0, 1.0, -1.0]])
    half = student_t.ppf(0.975, 8) * math.sqrt(6 / 8 / 9)
    assert crossed_interval(alike) == pytest.approx((-half, half))
    seeds = np.array([0.0, 10.0, 20.0, 35.0, 40.0])
    cells = seeds[:, None] + np.array(
        [[0.1, -0.1, 0.0], [-0.1, 0.1, 0.0], [0.1, -0.1, 0.0], [-0.1, 0.1, 0.0], [0.0] * 3]
    )
    half = student_t.ppf(0.975, 4) * seeds.std(ddof=1) / math.sqrt(5)
    assert crossed_interval(cells) == pytest.approx((21 - half, 21 + half))


def test_parts_of_the_bootstrap():
    half = student_t.ppf(0.975, 4) * 2.0
    assert combined_interval(1.0, [(4.0, 4)]) == pytest.approx((1 - half, 1 + half))
    half = student_t.ppf(0.975, 8) * 2.0  # Satterthwaite: two equal parts have twice the freedom
    assert combined_interval(1.0, [(2.0, 4), (2.0, 4)]) == pytest.approx((1 - half, 1 + half))
    assert combined_interval(1.0, [(4.0, 0)]) == (-math.inf, math.inf)
    assert combined_interval(1.0, [(0.0, 4)]) == (1.0, 1.0)


@pytest.mark.parametrize("exponent", [-180, 180])  # beyond the range of float32
@pytest.mark.parametrize("effects", [(1.0, 1.0), (1.0, 0.0), (0.0, 0.0)])
def test_intervals_scale_with_the_rewards(exponent, effects):
    generator = np.random.default_rng(6)
    values = effects[0] * generator.normal(size=(3, 1, 1)) + effects[1] * generator.normal(size=(1, 8, 1))
    values = values + generator.normal(size=(3, 8, 200)) - 2.0
    cells, scaled = values.mean(axis=2), np.ldexp(values, exponent)
    assert crossed_interval(scaled.mean(axis=2)) == tuple(np.ldexp(crossed_interval(cells), exponent))
    found, expected = estimates(scaled, [], [0.2]), estimates(values, [], [0.2])
    for name, each in expected.items():
        ends = tuple(np.ldexp((each.low, each.high), exponent))
        assert (found[name].low, found[name].high) == pytest.approx(ends, rel=1e-12)
    least = tails.mean(np.ldexp(values[0], -1000))  # nearly the smallest numbers
    assert (least.low, least.high) == (-math.inf, math.inf)


def test_report_over_seeds(sets):
    report = tail_report(sets, thresholds=[-2.5, -100.0], levels=[0.5])
    values = np.stack([each.column() for each in sets])
    assert (report.seeds, report.prompts, report.samples, report.per_prompt) == (3, 4, 60, {})
    # Four prompts do not speak for others: over seeds alone
    by_seed = (values < -2.5).mean(axis=(1, 2))
    low, high = crossed_interval(by_seed[:, None])
    half = student_t.isf(0.025, 2) * by_seed.std(ddof=1) / math.sqrt(3)
    assert (low, high) == pytest.approx((by_seed.mean() - half, by_seed.mean() + half), abs=0.05 * half)
    found, pooled = report.overall["P(r < -2.5)"], tails.prob_below(values.reshape(12, 60), -2.5)
    assert (found.low, found.high) == pytest.approx((min(low, pooled.low), max(high, pooled.high)))
    assert found.value == pooled.value
    assert report.overall["P(r < -100)"].high == pytest.approx(1 - 0.025 ** (1 / 720), rel=1e-9)
    assert "by each of 3 models" in report.to_markdown()
    assert report.to_dict()["scope"] == "other seeds and these prompts"
    assert "Intervals are for other seeds and these prompts." in report.to_markdown()
    assert tail_report(sets[0]).scope == "this model and these prompts"


def test_seeds_alike_are_no_more_certain_than_their_counts():
    """One bad sample in each of three models; every sample bad."""
    values = np.ones((3, 4, 100))
    values[:, 0, 0] = -9.0
    assert estimates(values, [-5.0], [])["P(r < -5)"] == tails.prob_below(values.reshape(12, 100), -5.0)
    all_bad = estimates(values, [10.0], [])["P(r < 10)"]
    assert all_bad.low == pytest.approx(0.025 ** (1 / 1200)) and all_bad.value == all_bad.high == 1


def test_seeds_with_equal_means_have_the_interval_of_their_samples():
    values = np.random.default_rng(0).standard_normal((1, 4, 250)).repeat(3, axis=0)  # the same draws three times
    found = estimates(values, [0.0], [0.2])
    for name, alone in (
        ("mean", tails.mean(values.reshape(12, 250))),
        ("CVaR 0.2", tails.cvar(values.reshape(12, 250), 0.2)),
    ):
        assert found[name] == alone and found[name].low < found[name].value < found[name].high


def test_no_bad_sample_of_several_models_says_nothing_of_others(tmp_path):
    rewards = np.random.default_rng(0).uniform(0, 1, (3, 6, 50))
    sets = [load_samples(write_samples(tmp_path / str(i), each, weights=str(i))) for i, each in enumerate(rewards)]
    report = tail_report(sets, thresholds=[-1.0, 0.5, 2.0])
    assert report.one_sided == ["P(r < -1)", "P(r < 2)"] == report.to_dict()["one_sided"]
    assert "interval of P(r < -1), P(r < 2) is for these models and prompts" in report.to_markdown()
    assert tail_report(sets[0], thresholds=[-1.0]).one_sided == []
    atoms = np.where(rewards < 0.5, -1.0, 0.0)
    sets = [load_samples(write_samples(tmp_path / f"a{i}", each, weights=str(i))) for i, each in enumerate(atoms)]
    assert tail_report(sets, levels=[0.2]).one_sided == ["CVaR 0.2"]


def test_rates_that_agree_up_to_rounding_have_the_interval_of_their_samples():
    values = np.zeros((3, 4, 50))
    for i in range(3):  # 0.64 of each model, spread otherwise
        values[i].ravel()[np.random.default_rng(i).permutation(200)[:128]] = 1.0
    found = estimates(values, [], [])["mean"]
    assert found.high - found.low > 0.05


@pytest.mark.parametrize(("seeds", "prompts"), [(3, 5), (3, 6), (2, 6), (2, 40)])
def test_three_seeds_and_six_prompts_speak_for_others(seeds, prompts):
    values = np.random.default_rng(0).normal(size=(seeds, prompts, 200)) + np.arange(prompts)[:, None]
    found, cells = estimates(values, [0.0], []), values.mean(axis=2)
    alone = crossed_interval(cells.mean(axis=1, keepdims=True))
    report = TailReport("reward", *values.shape, 0.95, found, {})
    if (seeds, prompts) == (3, 6):
        both = crossed_interval(cells)
        assert both[1] - both[0] > 3 * (alone[1] - alone[0])
        assert (found["mean"].low, found["mean"].high) == both and report.scope == "other seeds and other prompts"
    else:
        assert (found["mean"].low, found["mean"].high) == alone and report.scope == "other seeds and these prompts"
