"""Components whose density is known, and a pilot that shares completions out among them."""

import json
import math
from collections import Counter

import pytest
import torch

from trl_repulse.cli.main import main
from trl_repulse.evaluation.log_probs import completion_logits
from trl_repulse.evaluation.rare.components import Component
from trl_repulse.evaluation.rare.counts import OF_POLICY, OF_REFERENCE, TILTED
from trl_repulse.evaluation.rare.mixture import MixtureSample, largest_normalization_error
from trl_repulse.evaluation.rare.pilot import (
    choose_counts,
    choose_shares,
    draw_by_pilot,
    pilot_counts,
    policy_components,
    raised_tokens,
    tail,
)
from trl_repulse.evaluation.rare.sampling import draw
from trl_repulse.generation import drawing
from trl_repulse.math.importance import TILTS

from ..conftest import build_model
from ..distributed_support import launcher, run_forked
from ..evaluation_support import write_inputs


@pytest.fixture
def models(architecture, tokenizer):
    return [build_model(architecture, len(tokenizer), seed) for seed in (0, 1)]


def components_of(policy, other, vocabulary):
    bias = torch.linspace(-1, 1, vocabulary)
    return {
        "half of another model": Component(other, share=0.5),
        "nearer to it, hotter": Component(other, share=0.7, temperature=1.5),
        "first token": Component(policy, temperature=3.0, tokens=1),
        "first token of another model": Component(other, tokens=1),
        "bias": Component(policy, bias=bias),
        "all": Component(other, share=0.5, temperature=2.0, bias=bias, tokens=1),
    }


@pytest.mark.parametrize("large_vocabulary", [8192, 8])
def test_components_draw_as_they_are_scored(
    models, tokenizer, prompts, evaluator, reward, monkeypatch, large_vocabulary
):
    """Against enumeration: probabilities of all completions sum to 1 and follow the formula, and draws have them, also where a
    large vocabulary is drawn from by inversion."""
    monkeypatch.setattr(drawing, "_LARGE_VOCABULARY", large_vocabulary)
    policy, other = models
    components = components_of(policy, other, len(tokenizer))
    ids = evaluator.completion_ids.masked_fill(evaluator.completion_ids < 0, tokenizer.pad_token_id)
    rows = [[token for token in row if token >= 0] for row in evaluator.completion_ids.tolist()]
    prompt_ids = [tokenizer(prompts["prompt"][0])["input_ids"]] * len(rows)
    (of_policy, completion, counts), (of_other, *_) = (completion_logits(model, prompt_ids, rows) for model in models)
    parts = [policy, *components.values()]
    draws = draw(parts, tokenizer, prompts["prompt"][:1], reward_of(reward), [400] * 7, 2, seed=3)
    for k, (name, component) in enumerate(components.items(), 1):
        given = of_policy if component.model is policy else of_other
        log_q = component.log_prob(of_policy, given, completion, counts)
        assert float(log_q.exp().sum()) == pytest.approx(1, abs=1e-4), name
        mixed = (1 - component.share) * of_policy.log_softmax(-1) + component.share * given.log_softmax(-1)
        changed = mixed / component.temperature + (0 if component.bias is None else component.bias)
        changed = torch.cat([changed[:, : component.tokens], of_policy[:, component.tokens or 2 :]], dim=1)
        expected = (
            changed.log_softmax(-1).gather(2, completion.unsqueeze(2)).squeeze(2).masked_fill(~counts, 0).sum(dim=1)
        )
        assert torch.allclose(log_q, expected.double(), atol=1e-4), name
        found, mean = draws.sample.log_density[0, 400 * k : 400 * (k + 1), k], float((log_q.exp() * log_q).sum())
        deviation = float((log_q.exp() * log_q.square()).sum() - mean**2) ** 0.5
        assert abs(float(found.mean()) - mean) < 4 * deviation / 20, name
        for row, value in zip(draws.ids[0][400 * k :][:20], found, strict=False):
            same = (ids[:, : len(row)] == torch.tensor(row)).all(dim=1)
            assert any(torch.isclose(log_q[same], value, atol=1e-4)), name
    assert largest_normalization_error(draws.sample) < 4


def reward_of(reward):
    return lambda prompts, completions, **_: reward([p + c for p, c in zip(prompts, completions, strict=True)])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": 0.0}, "`temperature=0.0` must be above 0"),
        ({"temperature": math.inf}, "finite"),
        ({"share": math.nan}, "`share=nan` must be above 0"),
        ({"share": 1.5}, "at most 1"),
        ({"tokens": 0}, "`tokens=0` must be at least 1"),
    ],
)
def test_what_a_component_cannot_be(change, message):
    with pytest.raises(ValueError, match=message):
        Component(None, **change)


def test_the_policy_comes_first_as_it_is(tokenizer, reward):
    model = build_model("gpt2", len(tokenizer))
    with pytest.raises(ValueError, match="must be the policy as it is"):
        draw([Component(model, temperature=2.0)], tokenizer, ["the cat"], reward, [4], 2)


def sample_from(log_p, log_q, counts, rewards, seed=0):
    """Draws from tables (S,) of log-probabilities, the policy's first, of one prompt."""
    generator = torch.Generator().manual_seed(seed)
    columns = torch.stack([log_p, *log_q])
    pairs = zip(columns, counts, strict=True)
    index = torch.cat([torch.multinomial(q.exp(), max(n, 1), True, generator=generator)[:n] for q, n in pairs])
    return MixtureSample(rewards[index][None], columns.T[index][None], tuple(counts))


@pytest.fixture
def world():
    """Policy, a good proposal, a useless one, and one that finds half of what is bad; rewards."""
    generator = torch.Generator().manual_seed(0)
    rewards = torch.randn(200, generator=generator, dtype=torch.float64)
    log_p = (torch.randn(200, generator=generator, dtype=torch.float64) + 2 * rewards).log_softmax(0)
    bad = rewards < -1.2
    good = (log_p - 3 * rewards).log_softmax(0)
    half = (log_p + 6.0 * (bad & (torch.arange(200) % 2 == 0))).log_softmax(0)
    return log_p, [good, (log_p + 5 * rewards).log_softmax(0), half], rewards, bad


def log_mixture(world, shares):
    log_p, others, *_ = world
    return (torch.stack([log_p, *others]) + torch.tensor(shares, dtype=torch.float64).log()[:, None]).logsumexp(0)


def cross_entropy(world, shares):
    return -float((world[0].exp() * world[3] * log_mixture(world, shares))[world[3]].sum())


def second_moment(world, shares):
    return float(((2 * world[0] - log_mixture(world, shares)).exp() * world[3]).sum())


def test_shares_are_the_best_of_all_mixtures(world):
    """On contributions of every completion, against a search over the simplex."""
    log_p, others, rewards, bad = world
    everything = MixtureSample(rewards[None], torch.stack([log_p, *others], dim=-1)[None], (200, 0, 0, 0))
    found = choose_shares(everything, (log_p.exp() * bad)[None], least=0.5).tolist()
    assert sum(found) == pytest.approx(1) and found[0] >= 0.5 and found[2] < 1e-3
    steps = [i / 20 for i in range(11)]
    grid = [(1 - a - b - c, a, b, c) for a in steps for b in steps for c in steps if a + b + c <= 0.5]
    assert cross_entropy(world, found) <= min(cross_entropy(world, each) for each in grid) + 1e-6
    assert second_moment(world, found) < 1.2 * min(second_moment(world, each) for each in grid)
    own = choose_shares(everything, (log_p.exp() * bad)[None], least=1.0).tolist()
    assert own == pytest.approx([1, 0, 0, 0])


def test_counts_of_a_pilot_are_near_the_best(world):
    log_p, others, rewards, _ = world
    pilot = sample_from(log_p, others, (300, 100, 100, 100), rewards)
    counts = choose_counts(pilot, 1000, thresholds=[-1.2])
    assert sum(counts) == 1000 and counts[0] >= 500 and all(n == 0 or n >= 2 for n in counts)
    large = sample_from(log_p, others, (40_000, 20_000, 20_000, 20_000), rewards)
    best = choose_counts(large, 1000, thresholds=[-1.2])
    found, least = (second_moment(world, [max(n, 1e-9) / 1000 for n in each]) for each in (counts, best))
    assert found < 1.2 * least
    level = float((log_p.exp() * (rewards < -1.2)).sum())
    assert choose_counts(pilot, 1000, levels=[level])[0] >= 500
    assert choose_counts(pilot, 1000, thresholds=[-1.2, -0.5])[1] > 0


def test_a_tail_without_finds_is_widened():
    """No reward is under the threshold: the fifty lowest of the policy's own draws stand for it, while these are rare."""
    rewards = torch.arange(1000, dtype=torch.float64)[None]
    sample = MixtureSample(rewards, torch.zeros(1, 1000, 1), (1000,))
    assert torch.where(tail(sample, -1.0)[0])[0].tolist() == [*range(50)]
    assert torch.where(tail(sample, 60.0)[0])[0].tolist() == [*range(60)]
    few = sample.prompt(0)
    few = MixtureSample(few.rewards[:, :100], few.log_density[:, :100], (100,))
    assert not tail(few, -1.0).any() and torch.where(tail(few, 3.0)[0])[0].tolist() == [*range(3)]


def test_a_judge_of_two_scores_has_no_wider_tail():
    """What is not bad would stand for it: the finds decide alone, and without any all components draw alike."""
    log_density = torch.tensor([[[-5.0, -1.0]] * 4 + [[-1.0, -3.0]] * 196])
    sample = MixtureSample(torch.tensor([[-5.0] * 4 + [0.0] * 196]), log_density, (100, 100))
    for asked in ({"thresholds": [-1.0]}, {"levels": [1e-6]}, {"levels": [0.01]}):
        own, proposal = choose_counts(sample, 100, **asked)
        assert proposal == 50, asked
    alike = MixtureSample(torch.zeros(1, 200), log_density.flip(1), (100, 100))
    assert choose_counts(alike, 100, thresholds=[-1.0]) == [50, 50]


def test_a_cvar_counts_by_depth():
    """The quantile is a reward that most outputs share: it adds nothing to the CVaR."""
    rewards = torch.tensor([[-9.0] * 30 + [-6.0] * 30 + [0.0] * 940])
    log_density = torch.zeros(1, 1000, 2)
    log_density[0, :60, 1] = 3.0
    sample = MixtureSample(rewards, log_density, (500, 500))
    contributions = tail(sample, 0.0, 0.0)[0]
    assert torch.where(contributions)[0].tolist() == [*range(60)]
    assert float(contributions[0] / contributions[59]) == pytest.approx(9 / 6)
    assert choose_counts(sample, 100, levels=[0.5]) == [50, 50]


def test_samples_are_joined_by_component(world):
    log_p, others, rewards, _ = world
    one, other = (sample_from(log_p, others[:2], counts, rewards, seed=9) for counts in ((3, 2, 0), (2, 0, 4)))
    both = one.joined(other)
    assert both.counts == (5, 2, 4)
    parts = one.rewards[0, :3], other.rewards[0, :2], one.rewards[0, 3:], other.rewards[0, 2:]
    assert both.rewards[0].tolist() == torch.cat(parts).tolist()
    assert both.log_density.shape == (1, 11, 3)


def test_components_are_counted_before_they_are_made():
    assert len(policy_components(None)) == len(OF_POLICY) and TILTED == len(TILTS)
    assert len(policy_components(None, "reference")) == len(OF_POLICY) + len(OF_REFERENCE)


def test_tokens_of_low_rewards_are_raised(tokenizer, reward):
    model = build_model("gpt2", len(tokenizer))

    def judge(prompts, completions):
        return [-3.0 * text.count("bad") for text in completions]

    draws = draw([model], tokenizer, ["the cat", "fish"], judge, [300], 2, seed=0)
    for bias in raised_tokens(draws, len(tokenizer)):
        assert tokenizer.decode(int(bias.argmax())) == "bad" and 0 < float(bias.max()) <= 3
    flat = draw([model], tokenizer, ["the cat"], lambda prompts, completions: [0.0] * len(prompts), [20], 2)
    assert not any(bool(bias.any()) for bias in raised_tokens(flat, len(tokenizer)))


@pytest.mark.parametrize("architecture", ["llama"], indirect=True)
def test_a_pilot_estimates_what_enumeration_knows(models, tokenizer, prompts, evaluator, reward):
    from trl_repulse.evaluation.rare.estimates import prob_bad

    policy, reference = models
    components, rewarded = policy_components(policy, reference), Counter()

    def counted(prompts, completions, **kwargs):
        rewarded.update(zip(prompts, completions, strict=True))
        return reward_of(reward)(prompts, completions)

    given = policy, components, tokenizer, prompts["prompt"], counted, 1200, 2
    draws, names = draw_by_pilot(*given, thresholds=[-2.0], seed=1)
    assert set(rewarded.values()) == {1}  # over all stages
    first, pilot = pilot_counts(1200, len(names) - 1)
    assert sum(draws.sample.counts) == 1200 - 2 * first == len(draws.ids[0]) == len(draws.texts[0])
    assert all(count >= least for count, least in zip(draws.sample.counts, pilot, strict=True))
    assert names[0] == "policy" and names[-1] == "policy, raised tokens × 1.5" and len(names) == 14
    truth = float((evaluator.log_probs(policy).exp() * (evaluator.rewards < -2.0)).sum(1).mean())
    estimate = prob_bad(draws.sample, -2.0)
    assert estimate.low < truth < estimate.high and largest_normalization_error(draws.sample) < 4
    assert draws.sample.rewards[0].tolist() == reward([prompts["prompt"][0] + text for text in draws.texts[0]])
    assert tokenizer.batch_decode(draws.ids[0], skip_special_tokens=True) == draws.texts[0]


@pytest.fixture
def command(tmp_path, model_dirs, tokenizer):
    build_model("gpt2", len(tokenizer), seed=1).save_pretrained(tmp_path / "reference")
    inputs = write_inputs(tmp_path, "[-3.0 * c.count('bad') for c in completions]")
    return ["rare-events", model_dirs["gpt2"], *inputs, "--threshold", "-1", "--output", str(tmp_path / "report.json")]


@pytest.mark.parametrize(
    ("quantities", "message"),
    [({}, "Give `thresholds`"), ({"thresholds": [math.nan]}, "numbers"), ({"levels": [-0.5]}, "`levels=-0.5`")],
)
def test_what_a_pilot_cannot_choose_for(quantities, message):
    with pytest.raises(ValueError, match=message):
        draw_by_pilot(None, {}, None, ["the cat"], None, 1000, 2, **quantities)


def test_a_reference_is_checked_before_anything_is_drawn(tokenizer):
    policy, larger = (build_model("gpt2", len(tokenizer) + more) for more in (0, 1))
    components = {"larger": Component(larger)}
    with pytest.raises(ValueError, match=r"vocabularies of \[\d+, \d+\] tokens"):
        draw_by_pilot(policy, components, tokenizer, ["the cat"], None, 400, 2, thresholds=[0.0])


def test_what_a_component_draws_does_not_depend_on_others(tokenizer, reward):
    model = build_model("gpt2", len(tokenizer))
    parts = [model, Component(model, temperature=2.0), Component(model, temperature=3.0)]
    given = parts, tokenizer, ["the cat", "fish"], reward_of(reward)
    some, others = (draw(*given, counts, 2).texts for counts in ([4, 2, 4], [4, 0, 4]))
    assert [row[:4] + row[6:] for row in some] == others


def test_command(command, tmp_path, capsys):
    reference = ["--reference", str(tmp_path / "reference")]
    for more, components in ((reference, 14), (["--num_proposal_samples", "0"], 1)):
        assert main([*command, "--num_samples", "300", *more]) == 0
        report, printed = json.loads((tmp_path / "report.json").read_text()), capsys.readouterr().out
        assert len(report["components"]) == len(report["counts"]) == components
        assert report["counts"][0] >= sum(report["counts"]) / 2
        assert ("Completions of each prompt" in printed) == (components > 1)
        assert report["prob_bad"][0]["low"] < report["prob_bad"][0]["value"] < report["prob_bad"][0]["high"]
        assert report["prob_bad"][0]["diagnostics"]["normalization_error"] < 4


PROPOSAL = ["--proposal", "x"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--threshold"], "Nothing is asked for"),
        (["--num_samples", "60"], "give at least 90 completions a prompt, or draw without a pilot and `--reference`"),
        (["--num_samples", "1", "--num_proposal_samples", "0"], "`--num_samples 1` must be 0, or at least 2"),
        (["--reference", "x", "--num_proposal_samples", "0"], "`--reference` is for the pilot"),
        (["--divergence", "2"], "`--divergence` has no effect without `--proposal`"),
        (["--num_proposal_samples", "2"], "`--num_proposal_samples` has no effect without `--proposal`"),
        ([*PROPOSAL, "--num_proposal_samples", "0"], "is plain sampling; leave out `--proposal`"),
        ([*PROPOSAL, "--num_proposal_samples", "1"], "`--num_proposal_samples 1` must be 0, or at least 2"),
        ([*PROPOSAL, "--divergence", "-1"], "`--divergence -1` must be 0"),
        ([*PROPOSAL, "y", "x"], "names a proposal twice"),
        (["--proposal", "out/proposal"], "only a run with `proposal='learned'` saves one. Leave `--proposal` out"),
        (["--batch_size", "0"], "`batch_size=0` must be at least 1"),
        (["--level", "2"], "`level=2.0`"),
        (["--threshold", "nan"], "`--threshold nan`"),
        (["--dtype", "foo"], "`dtype='foo'` must be 'auto'"),
        (["--chat_template_kwargs", '{"a": 1}'], "`chat_template_kwargs` has no effect on prompts of plain text"),
    ],
)
def test_command_refuses(command, tmp_path, capsys, monkeypatch, change, message):
    """Before anything is loaded, in one line."""
    monkeypatch.setattr("trl_repulse.models._loading.load_model", None)
    monkeypatch.setattr("trl_repulse.rewards.loading.load_reward", None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    command = command[: command.index("--threshold")] if change == ["--threshold"] else [*command, *change]
    assert main(command) == 1
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


@pytest.mark.thorough
@pytest.mark.distributed
def test_two_processes_choose_and_estimate_what_one_does(command, tmp_path, capsys):
    """Fourteen components of three prompts, cut in the middle of the second; the report is printed once."""
    with (tmp_path / "prompts.jsonl").open("a") as file:
        file.write('{"prompt": "a dog"}\n')
    with (tmp_path / "mine.py").open("a") as file:  # who was asked
        file.write("import os, pathlib\n")
        file.write("pathlib.Path(__file__).with_name('rank' + os.environ.get('RANK', '')).touch()\n")
    command += ["--level", "0.1", "--num_samples", "300", "--reference", str(tmp_path / "reference")]
    done = run_forked([*launcher(2, "cpu_ddp"), "-m", "trl_repulse.cli", *command])
    two = json.loads((tmp_path / "report.json").read_text())
    assert main(command) == 0
    one = json.loads((tmp_path / "report.json").read_text())
    assert sorted(path.name for path in tmp_path.glob("rank*")) == ["rank", "rank0", "rank1"]
    assert done.stdout.count("P(r < -1)  ") == capsys.readouterr().out.count("P(r < -1)  ") == 1
    for report in (one, two):
        del report["settings"]
    assert dict(leaves(two)) == pytest.approx(dict(leaves(one)), rel=1e-4)


def leaves(value, path=()):
    """Numbers of a report, and where they stand; reasons, which have numbers in them, are only counted."""
    if isinstance(value, dict | list):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(part, (*path, key))
    else:
        yield str(path), 0.0 if isinstance(value, str) or value is None else float(value)
