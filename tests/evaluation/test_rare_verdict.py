"""When importance sampling must not be called reliable, and intervals where most outputs are bad: enumerated worlds of one reward each."""

import math
import re

import numpy as np
import pytest
import torch
from scipy.stats import binom

from trl_repulse.evaluation.rare.estimates import cvar, prob_bad
from trl_repulse.evaluation.rare.mixture import MixtureSample


pytestmark = pytest.mark.exact


def draw(rewards, components, counts, seed):
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
        sample = draw(rewards, (policy, *proposals), (5000,) * 3, seed)
        estimate = cvar(sample, 0.01)
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
        assert not cvar(draw(rewards, (policy, *proposals), (5000,) * 3, seed), 0.1).reliable
    # Where all four are drawn and the policy meets each, nothing speaks against it
    whole = [[*(0.5 * low / low.sum()), *[0.125] * 4], [*(0.7 * low / low.sum()), *[0.075] * 4]]
    assert cvar(draw(rewards, (policy, *whole), (400_000, 5000, 5000), 0), 0.1).reliable


NEGLECTS = [-1.0, -1.0, 1.0], [5e-4, 5e-4, 0.999], ([0.9, 0.0, 0.1], [0.8, 0.0, 0.2])


def test_bounds_hold_whatever_proposals_miss():
    """Two proposals that never draw half of the bad outputs, and a policy that often draws none of it either."""
    rewards, policy, proposals = NEGLECTS
    within, inside, verdicts = 0, 0, set()
    for seed in range(300):
        estimate = prob_bad(draw(rewards, (policy, *proposals), (1000, 500, 500), seed), 0.0)
        within += estimate.bounds[0] <= 1e-3 <= estimate.bounds[1]
        inside += estimate.low <= 1e-3 <= estimate.high
        verdicts.add(estimate.verdict)
        bad = estimate.diagnostics.policy_tail_samples
        below = binom.cdf(bad, 1000, estimate.bounds[1])
        assert below == pytest.approx(0.025, rel=1e-6)
    assert within / 300 > 0.95 and inside / 300 < 0.8 and verdicts == {"bounds"}


def test_few_finds_take_the_weights_of_slightly_better_outputs():
    """The proposal misses half of the bad outputs, and as much of the next 200: by the few that it finds, nothing is missing."""
    rewards = [-5.0, -5.0, *np.linspace(-4, -1, 200), 0.0]
    policy = [1e-4, 1e-4, *[5e-4] * 200, 0.9]
    proposal = [5e-3, 0.0, *[5e-3, 0.0] * 100, 0.495]
    samples = [draw(rewards, (policy, proposal), (1000, 1000), seed) for seed in range(200)]
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
    sample = draw([-1.0, 1.0], ([0.01, 0.99], [0.5, 0.5], [0.6, 0.4]), (20_000, 500, 500), 0)
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
        estimate = prob_bad(draw(rewards, (policy, *proposals), now, seed), 0.0)
        if estimate.reliable:
            break
        for step in estimate.next_steps:
            if found := re.search(r"^Draw ([\d,]+) completions a prompt from the policy", step):
                now = (int(found[1].replace(",", "")), *now[1:])
            elif found := re.search(r"^Draw (\d+) times as many completions from the other components", step):
                now = (now[0], *[int(found[1]) * n for n in now[1:]])
    assert seed > 0 and estimate.reliable and sum(now) < 200 * sum(counts)


def test_what_is_needed_is_what_is_advised():
    """At a P(bad) of 1e-2 and proposals of no use, ten bad outputs were said to be needed, and draws advised for a hundred."""
    policy = [0.01, 0.99]
    estimate = prob_bad(draw([-1.0, 1.0], (policy, policy, [0.008, 0.992]), (470, 200, 200), 0), 0.0)
    assert estimate.diagnostics.expected < 10
    needed = [int(number) for reason in estimate.reasons for number in re.findall(r"(\d+) are needed", reason)]
    assert {*needed[-2:]} == {100}
    step = next(step for step in estimate.next_steps if step.startswith("Draw"))
    times = float(re.search(r"(\d+) times as many", step)[1])
    assert "about 100 bad outputs are then to be expected" in step
    assert times == pytest.approx(100 / estimate.diagnostics.expected, rel=0.1)
    # Where proposals are near, ten are needed, and half more is advised, as their number varies
    near = prob_bad(draw([-1.0, 1.0], (policy, [0.5, 0.5], [0.6, 0.4]), (470, 200, 200), 0), 0.0)
    assert "and 10 are needed" in near.reasons[0] and "about 15 bad outputs" in near.next_steps[0]


def test_there_is_a_next_step_unless_the_estimate_is_reliable():
    rng = np.random.default_rng(0)
    for seed in range(150):
        shapes = [[0.05, 0.05, 2.0], *[[0.5, 0.3, 0.5]] * rng.integers(3)]
        components = [(rng.dirichlet(shape) + 1e-9).tolist() for shape in shapes]
        counts = tuple(int(n) for n in rng.choice([50, 500, 5000], size=len(components)))
        sample = draw([-2.0, -1.0, 1.0], components, counts, seed)
        for estimate in (prob_bad(sample, 0.0), cvar(sample, 0.01)):
            assert estimate.reliable == (not estimate.next_steps), estimate
            assert all(step[0].isupper() and step.endswith(".") for step in estimate.next_steps)


def test_what_to_do_where_draws_cannot_help():
    rare = prob_bad(draw([-1.0, 1.0], ([1e-7, 1.0], [0.5, 0.5], [0.6, 0.4]), (2000, 500, 500), 0), 0.0)
    assert rare.verdict == "bounds" and rare.bounds[1] < 2e-3
    steps = [step.split(":")[0].split(" for")[0] for step in rare.next_steps]
    assert steps == ["Do not rely on the estimate", "Train a proposal"]
    one = prob_bad(draw([-1.0, 1.0], ([0.01, 0.99], [0.5, 0.5]), (20_000, 500), 0), 0.0)
    assert one.next_steps == ("Draw from a hotter copy of the proposal too, or from a second proposal.",)
    few = prob_bad(draw([-1.0, 1.0], ([0.01, 0.99],), (700,), 0), 0.0)
    assert "Too few completions are bad" in few.reasons[0]
    none = prob_bad(draw([-1.0, 1.0], ([0.0, 1.0], [0.0, 1.0]), (100, 100), 0), 0.0)
    assert none.verdict == "bounds" and none.bounds[0] == 0 and none.next_steps[0].startswith("Train a proposal")
    assert cvar(draw([-1.0, 1.0], ([0.01, 0.99], [0.5, 0.5]), (100, 50), 0), 1e-3).verdict == "unreliable"


def test_efficiency_and_unseen_share_of_a_cvar_by_hand():
    rewards, policy = [0.0, -1.0, -3.0], [0.9, 0.06, 0.04]
    sample = draw(rewards, (policy, policy, policy), (3000,) * 3, 0)
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
        estimate = prob_bad(draw([-1.0, 1.0, 1.0], (policy, *proposals), counts, seed), 0.0)
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


def test_a_cvar_of_rewards_near_the_largest_number():
    rewards = torch.zeros(1, 3000, dtype=torch.float64)
    rewards[0, ::3] = -1e308
    estimate = cvar(MixtureSample(rewards, torch.zeros(1, 3000, 1), (3000,)), 0.5)
    assert estimate.value == pytest.approx(-1e308 / 1.5) and -1e308 < estimate.low < estimate.value < estimate.high
    assert estimate.high < 0
