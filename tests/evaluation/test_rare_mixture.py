"""Importance sampling from a mixture, on enumerated distributions: exact expectations, intervals, and when it is not to be called reliable."""

import itertools
import math
import re

import numpy as np
import pytest
import torch
from scipy.stats import binom, binomtest

from trl_repulse.evaluation.rare.estimates import cvar, prob_bad
from trl_repulse.evaluation.rare.mixture import MixtureSample, halves, largest_normalization_error, stratified_mean


pytestmark = pytest.mark.exact

# Two prompts, four completions; the second prompt's policy cannot draw the last
POLICY = torch.tensor([[0.6, 0.3, 0.07, 0.03], [0.5, 0.3, 0.2, 0.0]], dtype=torch.float64)
PROPOSAL = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.0, 0.25, 0.5, 0.25]], dtype=torch.float64)
REWARD = torch.tensor([[1.0, 0.0, -6.0, -8.0], [2.0, -1.0, -7.0, -9.0]], dtype=torch.float64)
THRESHOLD = -5.0


def sample_of(indices, counts, models=(POLICY, PROPOSAL)):
    """The sample of given completions, (P, N)."""
    densities = [model.log().gather(1, indices) for model in models]
    return MixtureSample(REWARD.gather(1, indices), torch.stack(densities, dim=-1), counts)


def draw(counts, models=(POLICY, PROPOSAL), seed=0):
    generator = torch.Generator().manual_seed(seed)
    drawn = [(model, n) for model, n in zip(models, counts, strict=True) if n]
    parts = [torch.multinomial(model, n, replacement=True, generator=generator) for model, n in drawn]
    return sample_of(torch.cat(parts, dim=1), counts, models)


def enumerate_samples(counts):
    """Every sample of one prompt and its probability."""
    components = [PROPOSAL[0] if k else POLICY[0] for k, n in enumerate(counts) for _ in range(n)]
    for indices in itertools.product(range(4), repeat=len(components)):
        probability = math.prod(float(model[i]) for model, i in zip(components, indices, strict=True))
        row = torch.tensor([indices])
        densities = torch.stack([model[:1].log().gather(1, row) for model in (POLICY, PROPOSAL)], dim=-1)
        yield probability, MixtureSample(REWARD[:1].gather(1, row), densities, counts)


def test_estimate_and_variance_are_unbiased_by_enumeration():
    counts, truth = (2, 3), 0.1
    mean = second = variance = 0.0
    for probability, sample in enumerate_samples(counts):
        x = sample.log_w.exp() * (sample.rewards < THRESHOLD)
        value, its_variance = stratified_mean(x, counts)
        assert value == pytest.approx(min(prob_bad(sample, THRESHOLD).value, value))
        mean, second = mean + probability * value, second + probability * value**2
        variance += probability * its_variance
    assert mean == pytest.approx(truth)
    assert variance == pytest.approx(second - truth**2)


def test_weights_are_bounded_by_the_policys_share():
    sample = draw((50, 150))
    assert sample.log_w.max() <= math.log(4) + 1e-12
    # The balance heuristic by hand
    mixture = 0.25 * sample.log_density[..., 0].exp() + 0.75 * sample.log_density[..., 1].exp()
    assert torch.allclose(sample.log_w.exp(), sample.log_density[..., 0].exp() / mixture)


def test_the_policy_alone_is_plain_sampling():
    sample = draw((1000,), (POLICY,))
    estimate = prob_bad(sample, THRESHOLD)
    count = int((sample.rewards < THRESHOLD).sum())
    assert estimate.value == count / 2000
    exact = binomtest(count, 2000).proportion_ci()
    assert (estimate.low, estimate.high) == pytest.approx((exact.low, exact.high), rel=0.05)
    assert estimate.diagnostics.unseen_share == 0 and estimate.reliable


def test_a_completion_that_the_policy_cannot_draw_weighs_nothing():
    sample = sample_of(torch.tensor([[0, 1, 2, 3], [0, 1, 3, 3]]), (2, 2))
    assert sample.log_w[1].tolist()[2:] == [-math.inf, -math.inf]
    assert prob_bad(sample.prompt(1), THRESHOLD).value == 0
    assert math.isfinite(prob_bad(sample, THRESHOLD).value)


def test_no_bad_completion_gives_the_exact_upper_bound():
    estimate = prob_bad(sample_of(torch.zeros(2, 30, dtype=torch.long), (20, 10), (POLICY, PROPOSAL + 0.1)), THRESHOLD)
    assert (estimate.value, estimate.low) == (0, 0)
    assert estimate.high == pytest.approx(binomtest(0, 40).proportion_ci().high)
    assert not estimate.reliable and "No completion" in estimate.reasons[-1]


def test_without_draws_of_the_policy_nothing_bounds_what_was_not_seen():
    sample = sample_of(torch.tensor([[1] * 30, [1] * 30]), (0, 30))
    assert prob_bad(sample, THRESHOLD).high == 1
    assert prob_bad(sample, THRESHOLD).diagnostics.unseen_share == 1


def test_a_threshold_above_all_rewards():
    estimate = prob_bad(draw((50, 50)), 100.0)
    assert estimate.high == 1 and estimate.low == pytest.approx(binomtest(100, 100).proportion_ci().low)
    assert estimate.value == 1


@pytest.mark.parametrize(("chance", "counts"), [(0.003, (1000,)), (0.01, (500, 500))])
def test_good_outputs_that_are_rare(chance, counts):
    """The complement of an interval for what is rare: it covers, and holds the estimate."""
    policy = torch.tensor([1 - chance, chance], dtype=torch.float64)
    proposal = torch.tensor([0.7, 0.3], dtype=torch.float64)
    models, rewards, held = torch.stack([policy, proposal][: len(counts)]), torch.tensor([-9.0, 0.0]), 0
    for seed in range(400):
        generator = torch.Generator().manual_seed(seed)
        pairs = zip(models, counts, strict=True)
        drawn = torch.cat([torch.multinomial(q, n, True, generator=generator) for q, n in pairs])
        estimate = prob_bad(MixtureSample(rewards[drawn][None], models.log().T[drawn][None], counts), -5.0)
        assert 0 <= estimate.low <= estimate.value <= estimate.high <= 1
        held += estimate.low <= 1 - chance <= estimate.high
    assert held / 400 > 0.93


def test_good_outputs_that_proposals_hardly_draw():
    """The policy draws N(0, 1), the proposal N(-2, 1): what is good is known far worse than what is bad."""
    squares = []
    for seed in range(40):
        drawn = torch.randn(1, 1000, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) - 2
        log_density = -torch.stack([drawn, drawn + 2], dim=-1).square() / 2
        estimate = prob_bad(MixtureSample(drawn, log_density, (0, 1000)), 0.3)  # P(bad) is 0.618
        squares.append((estimate.value - 0.618) ** 2)
    assert (sum(squares) / 40) ** 0.5 < 0.1


@pytest.mark.parametrize("shift", [-3000.0, -40.0])
def test_log_space(shift):
    """Probabilities far below the smallest number keep their ratio."""
    sample = draw((100, 100))
    lowered = MixtureSample(sample.rewards, sample.log_density + shift, sample.counts)
    assert prob_bad(lowered, THRESHOLD).value == pytest.approx(prob_bad(sample, THRESHOLD).value)


def exact_cvar(level):
    rewards, order = REWARD.flatten().sort()
    cumulative = (POLICY.flatten() / 2)[order].cumsum(0).clamp(max=level)
    return float((cumulative.diff(prepend=torch.zeros(1)) * rewards).sum() / level)


@pytest.mark.parametrize("level", [0.01, 0.1, 0.3])
def test_cvar(level):
    estimate = cvar(draw((20_000, 20_000)), level)
    assert estimate.low <= exact_cvar(level) <= estimate.high
    assert estimate.high - estimate.value < 0.2


def test_cvar_of_the_policy_alone_is_the_mean_of_the_lowest_rewards():
    sample = draw((500,), (POLICY,))
    lowest = sample.rewards.flatten().sort().values[:100]
    assert cvar(sample, 0.1).value == pytest.approx(float(lowest.mean()))


def test_cvar_of_fewer_samples_than_one_says_so():
    estimate = cvar(draw((50,), (POLICY,)), 1e-4)
    assert estimate.value == REWARD[POLICY > 0].min() and estimate.low == -math.inf
    assert not estimate.reliable


def test_cvar_without_a_reward_under_the_quantile_has_an_upper_end():
    above = 0
    for seed in range(300):
        rewards = torch.randn(1, 50, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        estimate = cvar(MixtureSample(rewards, torch.zeros(1, 50, 1), (50,)), 0.01)
        assert (estimate.value, estimate.low) == (float(rewards.min()), -math.inf)
        assert math.isfinite(estimate.high)
        above += estimate.high < -2.6652  # of a standard normal: density at the quantile / 0.01
    assert above / 300 < 0.04


def test_the_upper_end_of_a_cvar_allows_for_another_quantile():
    """Uniform rewards: the mean of the lowest four of 2,000 is above or below the truth by more than their spread shows."""
    below = above = 0
    for seed in range(300):
        rewards = torch.rand(4, 500, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        estimate = cvar(MixtureSample(rewards, torch.zeros(4, 500, 1), (500,)), 0.002)
        below, above = below + (estimate.high < 0.001), above + (0.001 < estimate.low)
    assert below / 300 < 0.04 and above / 300 < 0.06


def test_cvar_that_one_reward_makes_is_not_reliable():
    """The tail holds hundreds of completions of one weight; nearly all of the value and of the variance is one reward's."""
    rewards = torch.randn(1, 10_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert cvar(MixtureSample(rewards, torch.zeros(1, 10_000, 1), (10_000,)), 0.05).reliable
    rewards = rewards.clone()
    rewards[0, 5000] = -1e4
    estimate = cvar(MixtureSample(rewards, torch.zeros(1, 10_000, 1), (10_000,)), 0.05)
    assert not estimate.reliable and estimate.diagnostics.tail_samples == 500
    assert estimate.diagnostics.max_weight_share > 0.9 and estimate.diagnostics.variance_ess < 1.1


def test_halves_of_a_cvar_are_cvars():
    estimate = cvar(draw((4000, 4000)), 0.3)
    assert sum(estimate.diagnostics.halves) / 2 == pytest.approx(estimate.value)
    assert estimate.diagnostics.halves == pytest.approx((estimate.value,) * 2, abs=0.5)


def test_the_order_of_completions_does_not_matter():
    """Of the policy alone bad and good outputs are as sure; rounding used to decide whose interval is reported."""
    intervals = set()
    for places in itertools.combinations(range(10), 2):
        rewards = torch.full((1, 10), -1.0, dtype=torch.float64)
        rewards[0, list(places)] = 1.0
        estimate = prob_bad(MixtureSample(rewards, torch.zeros(1, 10, 1), (10,)), 0.0)
        intervals.add((round(estimate.low, 9), round(estimate.high, 9)))
    assert len(intervals) == 1


def test_wrong_log_probabilities_are_noticed():
    sample = draw((2000, 2000))
    assert largest_normalization_error(sample) < 4
    rewards = draw((2000, 2000), ((POLICY.log() / 1.3).log_softmax(dim=-1).exp(), PROPOSAL)).rewards
    indices = (rewards.unsqueeze(-1) == REWARD.unsqueeze(1)).long().argmax(-1)
    wrong = sample_of(indices, (2000, 2000))
    assert largest_normalization_error(wrong) > 4
    assert "log-probabilities are not those" in prob_bad(wrong, THRESHOLD).reasons[0]


def test_a_proposal_that_drops_a_mode_is_found_out_by_the_policys_draws():
    """Half of the bad outputs are missing: without enough draws of the policy the verdict says so, with them as well."""
    policy = torch.tensor([[0.9998, 0.0, 1e-4, 1e-4]] * 2, dtype=torch.float64)
    dropped = torch.tensor([[0.2, 0.0, 0.8, 1e-9]] * 2, dtype=torch.float64)
    whole = torch.tensor([[0.2, 0.0, 0.4, 0.4]] * 2, dtype=torch.float64)
    few = prob_bad(draw((1000, 1000), (policy, dropped)), THRESHOLD)
    assert few.high < 2e-4  # the interval misses the truth
    assert few.diagnostics.unseen_share == 1 and not few.reliable
    many = prob_bad(draw((50_000, 1000), (policy, dropped)), THRESHOLD)
    assert many.diagnostics.variance_ess < 20 and not many.reliable
    alone = prob_bad(draw((50_000, 1000), (policy, whole)), THRESHOLD)
    assert alone.low < 2e-4 < alone.high
    assert len(alone.reasons) == 1 and "only one proposal" in alone.reasons[0]
    softer = torch.tensor([[0.5, 0.0, 0.25, 0.25]] * 2, dtype=torch.float64)
    good = prob_bad(draw((50_000, 500, 500), (policy, whole, softer)), THRESHOLD)
    assert good.reliable and good.low < 2e-4 < good.high


def test_proposals_far_from_the_bad_outputs_are_not_called_reliable():
    """The policy itself for a proposal, or ones that hardly find bad outputs, or find them out of proportion."""
    policy = torch.tensor([[0.9996, 0.0, 2e-4, 2e-4]] * 2, dtype=torch.float64)
    weak = torch.tensor([[0.9993, 0.0, 4e-4, 3e-4]] * 2, dtype=torch.float64)
    uneven = torch.tensor([[0.0, 0.0, 0.995, 0.005]] * 2, dtype=torch.float64)
    strong = torch.tensor([[0.8, 0.0, 0.1, 0.1]] * 2, dtype=torch.float64)
    same = prob_bad(draw((40_000, 20_000, 20_000), (policy, policy, policy)), THRESHOLD)
    # Equal weights: a draw is worth as many bad outputs as the policy's own
    assert same.diagnostics.efficiency == pytest.approx(4e-4, rel=0.3)
    for proposals in ((policy, policy), (policy, weak), (uneven, uneven)):
        poor = prob_bad(draw((40_000, 20_000, 20_000), (policy, *proposals)), THRESHOLD)
        assert poor.diagnostics.variance_ess > 20 and poor.diagnostics.unseen_share < 0.3
        (reason,) = poor.reasons
        assert "The other components are far from the policy's bad outputs" in reason
    good = prob_bad(draw((40_000, 20_000, 20_000), (policy, strong, strong)), THRESHOLD)
    assert good.diagnostics.efficiency > 0.05 and good.reliable
    # Where the policy draws more than a hundred bad outputs, these alone will do
    assert prob_bad(draw((150_000, 20_000, 20_000), (policy, policy, weak)), THRESHOLD).reliable
    assert prob_bad(draw((40_000,), (policy,)), THRESHOLD).diagnostics.efficiency == 0


@pytest.mark.thorough
def test_efficiency_is_in_bad_outputs_of_the_policy():
    """By the variance over many samples: what the policy would have to draw for it, less its draws, over the proposals'."""
    counts, found, values = (40_000, 10_000, 10_000), [], []
    policy = torch.tensor([[0.9998, 0.0, 1e-4, 1e-4]] * 2, dtype=torch.float64)
    strong = torch.tensor([[0.7, 0.0, 0.1, 0.2]] * 2, dtype=torch.float64)
    for seed in range(200):
        estimate = prob_bad(draw(counts, (policy, strong, strong), seed=seed), THRESHOLD)
        found.append(estimate.diagnostics.efficiency)
        values.append(estimate.value)
    plain = 2e-4**2 / float(torch.tensor(values).var())  # bad outputs for that variance, as P is small
    assert sum(found) / 200 == pytest.approx((plain - 2 * 40_000 * 2e-4) / (2 * 20_000), rel=0.25)


def test_halves_share_no_completion():
    values = torch.tensor([[1.0, 2.0, 10.0, 30.0], [1.0, 2.0, 10.0, 30.0]])
    assert halves(sample_of(torch.ones(2, 4, dtype=torch.long), (2, 2)), values) == (5.5, 16.0)


def test_coverage_of_plain_and_weighted_samples():
    """Of 300 intervals at 95 %, fewer than 270 would hold the truth once in 10⁴ runs."""
    for counts in ((60, 60), (300, 30)):
        held = 0
        for seed in range(300):
            estimate = prob_bad(draw(counts, seed=seed), THRESHOLD)
            held += estimate.low <= 0.15 <= estimate.high
        assert held >= 270


# Verdicts, in worlds of one reward each


def draw_from(rewards, components, counts, seed):
    """Completions of one prompt from components that are given by weights, (N,) each."""
    generator = torch.Generator().manual_seed(seed)
    probs = [torch.tensor(weights, dtype=torch.float64) / sum(weights) for weights in components]
    pairs = zip(probs, counts, strict=True)
    index = torch.cat([torch.multinomial(p, n, replacement=True, generator=generator) for p, n in pairs])
    density = torch.stack([p.log()[index] for p in probs], dim=-1)
    return MixtureSample(torch.tensor(rewards, dtype=torch.float64)[index][None], density[None], counts)


def test_a_cvar_of_an_atom_rests_on_what_lies_below_it():
    """Reward 0 unless bad: the policy draws the quantile a hundred times, and nothing of the half that proposals miss."""
    rewards, policy = [0.0, -1.0, -1.2, -0.9, -1.1], [1 - 1e-4, *[25e-6] * 4]
    proposals = ([0.05, 0.5, 0.45, 1e-9, 1e-9], [0.2, 0.45, 0.35, 1e-7, 1e-7])
    held = 0
    for seed in range(30):
        estimate = cvar(draw_from(rewards, (policy, *proposals), (5000,) * 3, seed), 0.01)
        held += estimate.low <= -0.0105 <= estimate.high
        assert not estimate.reliable and estimate.diagnostics.unseen_share == 1
    assert held < 20


def test_a_cvar_of_a_few_deep_rewards_rests_on_them():
    """Level 0.1, and two thirds of the CVaR from four outputs near -1000 of which the proposals draw two."""
    grid = np.linspace(-4.0, 4.0, 2001)
    normal = np.exp(-(grid**2) / 2)
    rewards = [*grid, -1000.0, -1010.0, -990.0, -1005.0]
    policy = [*(normal / normal.sum() * (1 - 1e-4)), *[25e-6] * 4]
    low = np.where(grid < -1, 1.0, 0.05)
    proposals = [
        [*(0.5 * low / low.sum()), 0.25, 0.25, 1e-9, 1e-9],
        [*(0.7 * low / low.sum()), 0.15, 0.15, 1e-7, 1e-7],
    ]
    for seed in range(20):
        assert not cvar(draw_from(rewards, (policy, *proposals), (5000,) * 3, seed), 0.1).reliable
    # Where all four are drawn and the policy meets each, nothing speaks against it
    whole = [[*(0.5 * low / low.sum()), *[0.125] * 4], [*(0.7 * low / low.sum()), *[0.075] * 4]]
    assert cvar(draw_from(rewards, (policy, *whole), (400_000, 5000, 5000), 0), 0.1).reliable


NEGLECTS = [-1.0, -1.0, 1.0], [5e-4, 5e-4, 0.999], ([0.9, 0.0, 0.1], [0.8, 0.0, 0.2])


def test_bounds_hold_whatever_proposals_miss():
    """Two proposals that never draw half of the bad outputs, and a policy that often draws none of it either."""
    rewards, policy, proposals = NEGLECTS
    within, inside, verdicts = 0, 0, set()
    for seed in range(300):
        sample = draw_from(rewards, (policy, *proposals), (1000, 500, 500), seed)
        estimate = prob_bad(sample, 0.0)
        within += estimate.bounds[0] <= 1e-3 <= estimate.bounds[1]
        inside += estimate.low <= 1e-3 <= estimate.high
        verdicts.add(estimate.verdict)
        below = binom.cdf(int((sample.rewards[:, :1000] < 0).sum()), 1000, estimate.bounds[1])
        assert below == pytest.approx(0.025, rel=1e-6)
    assert within / 300 > 0.95 and inside / 300 < 0.8 and verdicts == {"bounds"}


def test_few_finds_take_the_weights_of_slightly_better_outputs():
    """The proposal misses half of the bad outputs, and as much of the next 200: by the few that it finds, nothing is missing."""
    rewards = [-5.0, -5.0, *np.linspace(-4, -1, 200), 0.0]
    policy = [1e-4, 1e-4, *[5e-4] * 200, 0.9]
    proposal = [5e-3, 0.0, *[5e-3, 0.0] * 100, 0.495]
    samples = [draw_from(rewards, (policy, proposal), (1000, 1000), seed) for seed in range(200)]
    found = [prob_bad(sample, -4.5) for sample in samples]
    assert sum(each.low <= 2e-4 <= each.high for each in found) >= 0.93 * 200
    # By the finds alone, which say half as much, a fifth of the intervals lie below the truth
    few = [each.high for each, sample in zip(found, samples, strict=True) if each.samples and own_end(sample) < 2e-4]
    assert len(few) > 30 and min(few) > 2e-4
    # Of the lowest 4e-4, whose mean is −4.5, as much is at −5 and at −4
    assert sum(cvar(sample, 4e-4).low <= -4.5 for sample in samples) >= 0.95 * 200


def own_end(sample):
    """The upper end where all that is not bad is good alike."""
    return prob_bad(MixtureSample((sample.rewards < -4.5) * -5.0, sample.log_density, sample.counts), -4.5).high


def test_samples_that_contradict_themselves_give_no_bounds():
    sample = draw_from([-1.0, 1.0], ([0.01, 0.99], [0.5, 0.5], [0.6, 0.4]), (20_000, 500, 500), 0)
    assert prob_bad(sample, 0.0).verdict == "reliable" and not prob_bad(sample, 0.0).next_steps
    density = sample.log_density.clone()
    density[..., 1] += 0.5
    wrong = prob_bad(MixtureSample(sample.rewards, density, sample.counts), 0.0)
    assert wrong.verdict == "unreliable" and "end tokens" in wrong.next_steps[0]


@pytest.mark.parametrize(
    ("policy", "proposals", "counts"),
    [
        # The policy has drawn too little
        ([1e-3, 1e-3, 0.998], ([0.5, 0.4, 0.1], [0.3, 0.3, 0.4]), (500, 1000, 1000)),
        ([2e-3, 2e-3, 0.996], ([0.01, 0.0002, 0.9898], [0.012, 0.0001, 0.9879]), (2000, 1000, 1000)),  # far proposals
        ([4e-3, 4e-3, 0.992], (), (500,)),  # none
        # The policy draws what they miss
        ([5e-3, 1.2e-3, 0.9938], ([0.5, 1e-9, 0.5], [0.6, 1e-9, 0.4]), (10_000, 1000, 1000)),
    ],
)
def test_what_a_verdict_advises_makes_the_estimate_reliable(policy, proposals, counts):
    rewards, now = [-1.0, -1.0, 1.0], counts
    for seed in range(4):
        estimate = prob_bad(draw_from(rewards, (policy, *proposals), now, seed), 0.0)
        if estimate.reliable:
            break
        for step in estimate.next_steps:
            if found := re.search(r"^Draw ([\d,]+) completions a prompt from the policy", step):
                now = (int(found[1].replace(",", "")), *now[1:])
            elif found := re.search(r"^Draw (\d+) times as many completions from the other components", step):
                now = (now[0], *[int(found[1]) * n for n in now[1:]])
    assert seed > 0 and estimate.reliable and sum(now) < 200 * sum(counts)


def test_there_is_a_next_step_unless_the_estimate_is_reliable():
    rng = np.random.default_rng(0)
    for seed in range(150):
        shapes = [[0.05, 0.05, 2.0], *[[0.5, 0.3, 0.5]] * rng.integers(3)]
        components = [(rng.dirichlet(shape) + 1e-9).tolist() for shape in shapes]
        counts = tuple(int(n) for n in rng.choice([50, 500, 5000], size=len(components)))
        sample = draw_from([-2.0, -1.0, 1.0], components, counts, seed)
        for estimate in (prob_bad(sample, 0.0), cvar(sample, 0.01)):
            assert estimate.reliable == (not estimate.next_steps), estimate
            assert all(step[0].isupper() and step.endswith(".") for step in estimate.next_steps)


def test_what_to_do_where_draws_cannot_help():
    rare = prob_bad(draw_from([-1.0, 1.0], ([1e-7, 1.0], [0.5, 0.5], [0.6, 0.4]), (2000, 500, 500), 0), 0.0)
    assert rare.verdict == "bounds" and rare.bounds[1] < 2e-3
    steps = [step.split(":")[0].split(" for")[0] for step in rare.next_steps]
    assert steps == ["Do not rely on the estimate", "Train a proposal"]
    one = prob_bad(draw_from([-1.0, 1.0], ([0.01, 0.99], [0.5, 0.5]), (20_000, 500), 0), 0.0)
    assert one.next_steps == ("Draw from a hotter copy of the proposal too, or from a second proposal.",)
    few = prob_bad(draw_from([-1.0, 1.0], ([0.01, 0.99],), (700,), 0), 0.0)
    uneven = cvar(draw_from([-100.0, -1.0, 1.0], ([0.002, 0.08, 0.918],), (700,), 0), 0.05)  # of 48 below
    assert "Too few completions are bad" in few.reasons[0] and "weights are uneven" in uneven.reasons[0]
    none = prob_bad(draw_from([-1.0, 1.0], ([0.0, 1.0], [0.0, 1.0]), (100, 100), 0), 0.0)
    assert none.verdict == "bounds" and none.bounds[0] == 0 and none.next_steps[0].startswith("Train a proposal")
    assert cvar(draw_from([-1.0, 1.0], ([0.01, 0.99], [0.5, 0.5]), (100, 50), 0), 1e-3).verdict == "unreliable"


def test_efficiency_and_unseen_share_of_a_cvar_by_hand():
    rewards, policy = [0.0, -1.0, -3.0], [0.9, 0.06, 0.04]
    sample = draw_from(rewards, (policy, policy, policy), (3000,) * 3, 0)
    found = cvar(sample, 0.2).diagnostics  # the quantile is 0: depths are 1 and 3
    counts = [int((sample.rewards == each).sum()) for each in rewards[1:]]
    share = (counts[0] + 3 * counts[1]) ** 2 / (counts[0] + 9 * counts[1]) / 9000  # E[v]² / E[v²], all weights being 1
    assert found.unseen_share == pytest.approx(3 / (3000 * share))
    # The policy itself for a proposal: 9,000 plain draws, of which it drew 3,000
    assert found.efficiency == pytest.approx((9000 * share / (1 - share) - 3000 * share) / 6000, rel=0.01)


@pytest.mark.parametrize(
    ("policy", "proposals", "counts"),
    [
        ([0.998, 0.0019, 1e-4], ([0.5, 0.5, 1e-8], [0.5, 0.5, 1e-7]), (1000, 10_000, 10_000)),
        ([0.949, 0.05, 1e-3], ([0.5, 0.5, 1e-6], [0.5, 0.5, 1e-5]), (300, 3000, 3000)),
    ],
)
def test_good_outputs_that_proposals_miss(policy, proposals, counts):
    """Most outputs are bad: what the proposals draw of the good ones does not decide the estimate."""
    held = 0
    for seed in range(200):
        estimate = prob_bad(draw_from([-1.0, 1.0, 1.0], (policy, *proposals), counts, seed), 0.0)
        held += estimate.low <= policy[0] <= estimate.high
        assert sum(estimate.diagnostics.halves) / 2 == pytest.approx(estimate.value)
    assert held / 200 > 0.93


@pytest.mark.parametrize("samples", [5, 20])
@pytest.mark.parametrize("counts", [1, 3])
def test_prompts_that_are_nearly_always_bad_among_others(samples, counts):
    """Ten prompts in a hundred, with so many good completions to be expected: those not seen leave room below."""
    rng, held, chance = np.random.default_rng(0), 0, 1 - counts / (10 * samples)
    for _ in range(300):
        rewards = torch.ones(100, samples)
        rewards[:10] = torch.tensor(rng.random((10, samples)) >= chance).float()
        estimate = prob_bad(MixtureSample(rewards, torch.zeros(100, samples, 1), (samples,)), 0.5)
        assert estimate.low <= estimate.value <= estimate.high
        held += estimate.low <= 0.1 * chance <= estimate.high
    assert held / 300 > 0.93


def test_a_prompt_that_is_always_bad_beside_one_that_is_rarely():
    """By hand: what the rare one adds, and what three unseen good completions would take off."""
    rewards = torch.cat([torch.full((1, 400), -1.0), torch.tensor([[-1.0] * 4 + [1.0] * 396])])
    estimate = prob_bad(MixtureSample(rewards, torch.zeros(2, 400, 1), (400,)), 0.0)
    alone = prob_bad(MixtureSample(rewards[1:], torch.zeros(1, 400, 1), (400,)), 0.0)
    unseen = 1 - 0.025 ** (1 / 400)
    assert estimate.value == pytest.approx((1 + alone.value) / 2)
    assert estimate.high == pytest.approx((1 + alone.high) / 2)
    assert estimate.low == pytest.approx(0.5 + alone.value / 2 - math.hypot(alone.value - alone.low, unseen) / 2)


# Refusals


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"counts": (3, 2)}, "must sum to the 4"),
        ({"counts": (3, 1)}, "at least 2"),
        ({"counts": (4,)}, "length of `counts`"),
        ({"rewards": torch.full((2, 4), math.nan)}, "score every completion"),
        ({"log_density": torch.full((2, 4, 2), math.nan)}, "NaN"),
        ({"log_density": torch.full((2, 4, 2), -math.inf)}, "under the component that drew it"),
    ],
)
def test_what_is_refused(change, message):
    good = {"rewards": torch.zeros(2, 4), "log_density": torch.zeros(2, 4, 2), "counts": (2, 2)}
    MixtureSample(**good)
    with pytest.raises(ValueError, match=message):
        MixtureSample(**(good | change))


def test_arguments_are_checked():
    sample = draw((2, 2))
    for call, name in (
        (lambda: prob_bad(sample, math.nan), "threshold"),
        (lambda: prob_bad(sample, 0.0, 1.0), "confidence"),
        (lambda: cvar(sample, 0.0), "level"),
    ):
        with pytest.raises(ValueError, match=f"`{name}"):
            call()
