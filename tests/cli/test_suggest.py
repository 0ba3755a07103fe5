"""`trl-repulse suggest`: what it concludes from samples, its warnings, and the file that training takes as it is."""

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from datasets import Dataset
from transformers import AutoConfig, AutoModelForCausalLM

from examples.worlds import two_tokens
from trl_repulse import embedded
from trl_repulse._rules_of_thumb import RATES
from trl_repulse.cli import _suggest_measure
from trl_repulse.cli._suggest_measure import _gain, _prefixes, measure_updates
from trl_repulse.cli._suggest_rules import (
    ALPHA,
    KL_COEFFICIENT,
    SPREAD,
    TARGET_NATS,
    UPDATES,
    Measured,
    Updates,
    plan,
    suggest_settings,
)
from trl_repulse.cli.arguments import ARGUMENTS, parse
from trl_repulse.cli.main import main
from trl_repulse.cli.methods import train
from trl_repulse.generation.drawing import POLICY

from ..conftest import build_tokenizer
from ..evaluation_support import write_inputs


ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "guide.md"
NORMAL = np.random.default_rng(0).normal(1.0, 1.4, (100, 5))
UPDATES_TOOK = Updates(10, {"float32": 10.0, "bfloat16": 5.0}, "cuda", 2**33)  # 50 completions


def measured(rewards=NORMAL, empty=0.5, parameters=135_000_000, lengths=17, ended=True):
    rewards = np.asarray(rewards, dtype=float)
    lengths, ended = (np.broadcast_to(each, rewards.shape) for each in (lengths, ended))
    empty = None if empty is None else np.array([empty])
    return Measured(rewards, lengths, ended, [""] * rewards.size, empty, 200, parameters, seconds=0.01)


def suggest(given=None, **options):
    return suggest_settings(given or measured(), **{"max_completion_length": 64} | options)


def planned(updates=UPDATES_TOOK, **options):
    found = suggest()
    plan(found, measured(), updates, **options)
    return found


def target(found):
    return float(re.search(r"`target_dist_beta: (\S+)`", found.notes["learned proposal"])[1])


# The rules


def test_the_threshold_is_a_low_quantile_and_says_how_many_lie_under_it():
    found = suggest()
    threshold = found.values["bad_reward_threshold"]
    assert threshold == pytest.approx(np.quantile(NORMAL, 0.02), abs=0.06)
    below = int((NORMAL < threshold).sum())
    assert f"{below} of 500 samples" in found.reasons["bad_reward_threshold"] and 5 <= below <= 15
    assert not found.warnings
    own = suggest(bad_reward_threshold=-1.0)
    assert own.values["bad_reward_threshold"] == -1.0
    assert own.reasons["bad_reward_threshold"].endswith("The value is yours.")


@pytest.mark.parametrize("share", [0.01, 0.02, 0.05])
def test_of_two_peaks_the_lower_one_is_bad(share):
    """However many of the samples it has, near the quantile, and a few between both do no harm; nor does a learned proposal's target."""
    draw = np.random.default_rng(0)
    places = draw.permutation(500)
    rewards = draw.normal(3.3, 0.3, 500)
    rewards[places[: round(500 * share)]] = draw.normal(-3.0, 0.3, round(500 * share))
    rewards[places[-3:]] = (-0.5, 0.5, 1.5)
    found = suggest(measured(rewards.reshape(100, 5)))
    threshold = found.values["bad_reward_threshold"]
    assert -2.5 < threshold < 2 and (rewards[rewards < threshold] < 2).all()
    assert -7 < target(found) < -4  # 35 nats over the 6.6 between them


def test_scaled_rewards_scale_what_has_their_unit_and_nothing_else():
    """Under Adam a reward times 10 with beta and alpha times 10 gives the same updates."""
    one, ten = suggest(measured()), suggest(measured(10 * NORMAL))
    assert (one.values["beta"], one.values["alpha"]) == (0.2, 1.0)
    for name in ("beta", "alpha", "bad_reward_threshold"):
        assert ten.values[name] == pytest.approx(10 * one.values[name])
    for name in set(one.values) - {"beta", "alpha", "bad_reward_threshold"}:
        assert ten.values[name] == one.values[name]

    low = np.median(NORMAL[NORMAL < one.values["bad_reward_threshold"]])
    assert target(one) * (np.quantile(NORMAL, 0.98) - low) == pytest.approx(-35, rel=0.05)
    assert target(ten) == pytest.approx(target(one) / 10, rel=0.05)


def test_the_spread_is_that_within_a_prompt():
    """Prompts that differ by much add nothing: advantages compare completions of one prompt."""
    generator = np.random.default_rng(0)
    rewards = generator.normal(0.0, 14.0, (100, 1)) + generator.normal(0.0, 1.4, (100, 5))
    assert suggest(measured(rewards)).values["beta"] == 0.2
    flat = generator.normal(0.0, 14.0, (100, 1)) + generator.normal(0.0, 0.1, (100, 5))
    assert any("hardly differs between completions of one prompt" in text for text in suggest(measured(flat)).warnings)


@pytest.mark.parametrize(
    ("parameters", "full", "adapter"),
    [(135_000_000, 3e-5, 1.5e-4), (240_000, 6e-4, 3e-3), (1_240_000_000, 3e-7, 1.5e-6), (8_000_000_000, 3e-7, 1.5e-6)],
)
def test_the_learning_rate_is_that_of_the_runs_at_such_a_size(parameters, full, adapter):
    given = measured(parameters=parameters)
    assert suggest(given).values["learning_rate"] == pytest.approx(full)
    assert suggest(given, use_peft=True).values["learning_rate"] == pytest.approx(adapter)
    assert f"{full:g} for all weights, {adapter:g} for an adapter" in suggest(given).reasons["learning_rate"]


@pytest.mark.parametrize(("share", "prompts"), [(0.1, 10), (0.05, 20), (0.02, 50), (0.002, 50)])
def test_an_update_has_prompts_enough_for_ten_bad_samples(share, prompts):
    rewards = np.where(np.arange(500).reshape(100, 5) < 500 * share, -9.0, NORMAL)
    found = suggest(measured(rewards), bad_reward_threshold=-8.0)
    assert (found.values["num_generations"], found.values["train_batch_size"]) == (5, 5 * prompts)
    few = suggest(replace(measured(), num_prompts=4)).values
    assert (few["num_generations"], few["train_batch_size"]) == (13, 52)


def test_lengths_are_those_of_completions_that_ended():
    assert suggest(measured(lengths=30)).values["max_completion_length"] == 40
    assert suggest(measured(lengths=62)).values["max_completion_length"] == 64  # not more than was drawn
    cut = suggest(measured(ended=np.arange(5) > 0))
    assert cut.values["max_completion_length"] == 64 and "20% of the samples did not end" in cut.warnings[0]


def test_the_pass_that_was_measured_is_the_pass_that_is_suggested():
    values = planned(updates=replace(UPDATES_TOOK, prompts=25)).values
    assert (values["per_device_train_batch_size"], values["train_batch_size"]) == (125, 250)
    assert planned(updates=replace(UPDATES_TOOK, prompts=30)).values["per_device_train_batch_size"] == 125
    found = planned()
    assert found.values["per_device_train_batch_size"] == 50
    reason = found.reasons["per_device_train_batch_size"]
    assert "50 completions of a pass fit on this device (cuda), in 8 GiB" in reason


@pytest.mark.parametrize(
    ("device", "seconds", "bf16"),
    [("cuda", (10, 11), True), ("cuda", (5, 11), False), ("cpu", (10, 9), False), ("cpu", (10, 5), True)],
)
def test_the_other_precision_is_taken_where_it_is_clearly_faster(device, seconds, bf16):
    took = dict(zip(("float32", "bfloat16"), seconds, strict=True))
    found = planned(updates=replace(UPDATES_TOOK, device=device, seconds=took))
    assert found.values["bf16"] is bf16
    assert f"took {seconds[0]} s in float32 and {seconds[1]} s in bfloat16" in found.reasons["bf16"]


def test_a_plan_without_a_budget_says_how_long_it_takes():
    found = planned()  # 50 prompts of half a second, 800 times
    assert found.values["max_steps"] == UPDATES
    assert found.notes["time"].startswith("about 5.6 hours for 800 updates of 25 seconds")
    assert planned(max_steps=80).notes["time"].startswith("about 33 minutes for 80 updates")
    assert planned(max_steps=80).values["warmup_steps"] == 10 and planned().values["warmup_steps"] == 20
    assert "evaluation" not in found.notes


@pytest.mark.parametrize(
    ("minutes", "prompts", "steps"),
    [(1000, 50, 800), (100, 50, 180), (60, 30, 180), (20, 10, 180), (5, 5, 90), (0.1, 5, 1)],
)
def test_a_plan_fits_its_minutes(minutes, prompts, steps):
    """Smaller updates before there are few, and training and evaluation in the minutes together."""
    found = planned(minutes=minutes)
    assert (found.values["train_batch_size"], found.values["max_steps"]) == (5 * prompts, steps)
    assert found.values["train_batch_size"] % found.values["per_device_train_batch_size"] == 0
    text = found.notes["evaluation"].replace(",", "")
    count, held_out, each = map(int, re.search(r"^(\d+) .* (\d+) prompts and `--num_samples (\d+)`", text).groups())
    assert count == held_out * each and held_out <= measured().num_prompts
    evaluated = 2 * count
    assert steps * prompts * 0.5 + evaluated * 0.01 <= 60 * minutes
    assert evaluated * 0.01 > 0.24 * 60 * minutes
    shown = found.notes["what this can show"]
    assert ("P(bad) has hardly moved" in shown) is (steps < 160)
    assert ("no fall of P(bad)" in shown) is (minutes < 1)


def test_what_a_budget_can_show_is_seen_four_times_of_five():
    found = planned(minutes=2)
    text = found.notes["what this can show"]
    p, q = map(float, re.search(r"falls from (\S+) to (\S+) or less", text).groups())
    count = int(re.match(r"([\d,]+)", found.notes["evaluation"])[1].replace(",", ""))
    generator = np.random.default_rng(0)
    before, after = generator.binomial(count, p, 4000) / count, generator.binomial(count, q, 4000) / count
    error = np.sqrt((before * (1 - before) + after * (1 - after)) / count)
    assert np.mean(before - after > 1.96 * error) == pytest.approx(0.8, abs=0.05)


def test_a_plan_for_what_no_sample_shows_and_for_no_update():
    """Nothing under the threshold, and evaluations that are slow."""
    found, slow = suggest(bad_reward_threshold=-50.0), replace(measured(), seconds=1e4)
    plan(found, slow, UPDATES_TOOK, minutes=1)
    assert found.notes["evaluation"].startswith("1 completions before")
    assert found.notes["what this can show"].startswith("no fall of P(bad)")
    with pytest.raises(ValueError, match="An update of 25 completions takes 2.5 seconds, .*01`; give 1 or more"):
        planned(minutes=0.01)


@pytest.mark.parametrize(
    ("gain", "says"), [(None, False), ((1.4, 0.1), False), ((0.95, 0.2), False), ((0.95, 0.03), True)]
)
def test_extra_samples_that_gain_nothing_are_advised_against(gain, says):
    found = suggest(replace(measured(), gain=gain))
    assert any(text.startswith("Use REINFORCE (`trl-repulse reinforce`") for text in found.warnings) is says


@pytest.mark.parametrize(
    ("minutes", "a_prompt", "fits", "measured_prompts"),
    [
        (30, 2.0, 50, [5]),  # 160 updates of 5 prompts and no more fit
        (30, 9.0, 50, [5]),  # slow, but there are no smaller updates
        (None, 2.0, 50, [5, 10]),  # the others would take long
        (30, 0.3, 50, [5, 10]),
        (None, 0.01, 50, [5, 50]),
        (None, 0.01, 9, [5]),  # more do not fit into memory
    ],
)
def test_as_many_prompts_are_measured_as_are_proposed(monkeypatch, capsys, minutes, a_prompt, fits, measured_prompts):
    """By the pace of `evaluate` it would be two; a part of an update's time does not depend on their number."""
    counts = []

    def took(args, found, prompts, function, count, bf16):
        if count > fits:
            raise torch.OutOfMemoryError("full")
        counts.append(count)
        return a_prompt * (count + 5) * (2 - bf16)

    monkeypatch.setattr(_suggest_measure, "_train", took)
    args = SimpleNamespace(minutes=minutes, use_peft=False)
    updates = measure_updates(args, suggest(), replace(measured(), seconds=0.5), None, None)
    assert counts == [count for count in measured_prompts for _ in range(2)] and updates.prompts == counts[-1]


class FakePolicy:
    """One token a completion, as of a policy p (V,), whose lowest rewards have the first tokens; extra samples are of q (V,)."""

    def __init__(self, p, q, rewards):
        self.p, self.q, self.of_token = np.array(p), np.array(q), np.array(rewards)
        self.args = SimpleNamespace(seed=0, bad_reward_threshold=-1.0)
        config = AutoConfig.for_model("gpt2", vocab_size=len(p), n_layer=1, n_embd=8, n_head=2)
        self.model = AutoModelForCausalLM.from_config(config)

    def draw(self, places, seed, sampler):
        of = self.p if sampler is POLICY else self.q
        drawn = np.random.default_rng(seed).choice(len(of), len(places), p=of)
        return [[int(token)] for token in drawn], [""] * len(places), self.of_token[drawn]

    def log_p(self, places, tokens, sampler):
        changed = sampler.bias is not None or sampler.temperature != 1
        return np.log((self.q if changed else self.p)[[token for (token,) in tokens]])


def test_the_gain_is_that_of_the_mixture():
    """By enumeration: P(bad) over the sum of p²/m over bad outputs. Samplers that find bad outputs gain, others do not."""
    p, rewards = [0.01, 0.01, 0.03, 0.95], [-2.0, -3.0, 0.0, 1.0]
    for q, advised in (
        ([0.25, 0.15, 0.1, 0.5], False),
        ([0.001, 0.003, 0.046, 0.95], True),
        ([0.0, 0.1, 0.1, 0.8], None),
    ):
        q = np.maximum(q, 1e-9)
        gains = []
        for seed in range(8):
            policy = FakePolicy(p, q / q.sum(), rewards)
            policy.args.seed = 10 * seed
            places = list(range(3000))
            tokens, _, drawn = policy.draw(places, 1000 + seed, POLICY)
            gains.append(_gain(policy, places, tokens, drawn))
        bad = np.array(p[:2])
        exact = bad.sum() / (bad * 2 * bad / (bad + policy.q[:2])).sum()
        found = np.array(gains)
        assert found[:, 0].mean() == pytest.approx(exact, rel=0.1)
        assert found[:, 0].std() < 2 * found[:, 1].mean()
        if advised is not None:
            assert all((gain + error < 1) is advised for gain, error in gains)
    policy = FakePolicy([0.001, 0.0, 0.0, 0.999], p, rewards)
    assert _gain(policy, [0] * 50, [[3]] * 50, np.array([1.0, 0.5] * 25)) is None  # too few to tell
    assert _gain(policy, [0, 1] * 25, [[3]] * 50, np.array([1.0, np.nan] * 25)) is None  # prompts without a reward


def test_what_prefixes_predict_is_measured():
    """Rewards that are sums over two tokens, of which the first is known half of the time; and a reward that knows nothing before the end."""
    drawn = np.random.default_rng(0).integers(0, 2, (60, 2))
    policy = SimpleNamespace(
        tokenizer=build_tokenizer(), prompts=Dataset.from_dict({"prompt": ["a"] * 12}), ids=[[1]] * 12
    )
    places, tokens = [place for place in range(12) for _ in range(5)], [[int(t) + 2 for t in row] for row in drawn]
    for known, low, high in ((1.0, 0.4, 0.8), (0.0, 0.99, 1.01)):
        policy.rewards = lambda places, rows, texts, known=known: np.array([known * sum(row) for row in rows])
        steps, noise = _prefixes(policy, places, tokens, drawn.sum(1) + 4.0, 5)
        assert steps == 1 and low < noise < high
    assert _prefixes(policy, places, tokens, np.ones(60), 5) is None


@pytest.mark.parametrize(("found", "says"), [(None, False), ((3, 0.9), False), ((3, 0.5), True)])
def test_prefixes_are_suggested_where_they_tell(found, says):
    notes = suggest(replace(measured(), prefixes=found)).notes
    assert ("`prefix_reward_steps: 3` and `gae_lambda: 0.9`" in notes.get("rewards of prefixes", "")) is says


# Rewards that training cannot use


@pytest.mark.parametrize("value", [0.25, np.nan])
def test_a_constant_reward_is_refused(value):
    with pytest.raises(ValueError, match="All 500 samples have .* nothing to learn; check the reward function"):
        suggest(measured(np.full((100, 5), value)))


@pytest.mark.parametrize(
    ("rewards", "words"),
    [
        (np.random.default_rng(0).exponential(1.0, (100, 5)), "has no low tail: the worst 2 %"),
        (np.maximum(NORMAL, -0.5), "share the lowest reward"),
        (np.where(np.arange(500).reshape(100, 5) % 2, 0.0, 1.0), "50% of the samples are bad"),
        (np.where(np.arange(500).reshape(100, 5) < 9, np.nan, NORMAL), "9 of 500"),
    ],
)
def test_rewards_without_a_low_tail_are_warned_of(rewards, words):
    assert any(words in text for text in suggest(measured(rewards)).warnings)


@pytest.mark.parametrize(
    ("empty", "words"),
    [
        (-5.0, "counts as bad"),
        (-1.9, "among the lowest"),
        (9.0, "among the highest"),
        (None, "fails on an empty completion"),
    ],
)
def test_what_an_empty_completion_gets_is_looked_at(empty, words):
    (text,) = suggest(measured(empty=empty)).warnings
    assert words in text and "empty completion" in text


def test_what_a_cut_completion_gets_is_looked_at():
    ended = np.arange(100)[:, None] >= 4
    found = suggest(measured(np.where(ended, NORMAL, 9.0), ended=ended))
    assert "A completion that was cut gets 9, among the highest" in found.warnings[0]


# The command


@pytest.fixture
def measuring(tmp_path, monkeypatch):
    """The command in the world of two tokens, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    flags = ["--model", two_tokens.policy_path(), "--reward_model_path", two_tokens.reward_model_path()]
    flags += ["--prompts", two_tokens.prompts_path(), "--num_samples", "200", "--max_completion_length", "2"]

    def command(*more):
        more = more if "--minutes" in more else ("--max_steps", "2", *more)
        return main(["suggest", *flags, *map(str, more)])

    return command


@pytest.fixture
def command(measuring, monkeypatch):
    """The same, without updates that are measured."""
    took = replace(UPDATES_TOOK, prompts=4, device="cpu")
    monkeypatch.setattr("trl_repulse.cli._suggest_measure.measure_updates", lambda *args: took)
    return measuring


@pytest.mark.trainer
def test_updates_are_measured_and_what_is_done_is_said(measuring, capsys, monkeypatch):
    """A pass that does not fit is made smaller; the file's plan is that of the minutes."""
    sizes, train = [], _suggest_measure._train

    def small(*args):
        sizes.append(args[-2])
        if args[-2] > 1:
            raise torch.OutOfMemoryError("full")
        return train(*args)

    monkeypatch.setattr(_suggest_measure, "_train", small)
    assert measuring("--minutes", "100", "--output", "repulse.yaml") == 0
    assert sizes == [4, 2, 1, 1]  # prompts, the last in both precisions
    out, err = capsys.readouterr()
    said = [line.removeprefix("suggest: ") for line in err.splitlines() if line.startswith("suggest: ")]
    assert said[0].startswith("reading ") and said[1].startswith("drawing 50 completions of at most 2 tokens")
    assert said[-1] == "training for two updates of 13 completions and as many extra ones in bfloat16 ..."
    written = yaml.safe_load(Path("repulse.yaml").read_text())
    assert written["per_device_train_batch_size"] == 13 and written["max_steps"] > 2
    assert "evaluation: " in out and "what this can show: that P(bad) falls" in out
    monkeypatch.setattr(_suggest_measure, "_train", lambda *args: small(*args[:-2], 2, False))
    assert measuring() == 1
    assert "too small to train on 13 completions at a time; try `--use_peft`, or ZeRO" in capsys.readouterr().err


@pytest.mark.trainer
def test_the_file_trains_as_it_is(command, capsys):
    """The settings that are printed are those of the run, and the run ends with a model."""
    assert command("--output", "my repulse.yaml") == 0
    printed = capsys.readouterr().out
    assert "trl-repulse repulse --config 'my repulse.yaml'" in printed
    written = yaml.safe_load(Path("my repulse.yaml").read_text())
    _, args, _ = parse(["--config", "my repulse.yaml"], ARGUMENTS["repulse"], embedded.settings_path("repulse"))
    for name in ("bad_reward_threshold", "beta", "alpha", "learning_rate", "num_generations"):
        assert getattr(args, name) == written[name]
        assert re.search(rf"^{name} +{written[name]:g} ", printed, re.MULTILINE)
    assert args.proposal == "hot_policy" and args.proposal_temperature is None and args.max_steps == 2
    assert written["num_generations"] * 4 == args.generation_batch_size  # all four prompts
    for method, more in (("repulse-ppo", []), ("repulse-grpo", ["--scale_rewards", "none"])):  # as a note says
        _, other, _ = parse(["--config", "my repulse.yaml", *more], ARGUMENTS[method], embedded.settings_path(method))
        assert other.alpha == args.alpha and other.generation_batch_size == args.generation_batch_size
    assert "`repulse-grpo` takes it with `--scale_rewards none`" in printed
    train("repulse", ["--config", "my repulse.yaml"])
    trained = AutoModelForCausalLM.from_pretrained("out")
    initial = AutoModelForCausalLM.from_pretrained(two_tokens.policy_path())
    assert any((p != q).any() for p, q in zip(trained.parameters(), initial.parameters(), strict=True))


@pytest.mark.trainer
@pytest.mark.thorough
def test_the_file_trains_an_adapter(command):
    assert command("--output", "repulse.yaml", "--use_peft") == 0
    train("repulse", ["--config", "repulse.yaml"])
    assert Path("out/adapter_model.safetensors").is_file()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--num_samples", "10"], "`num_samples=10` is too few to suggest from; draw at least 50"),
        (["--max_steps", "0"], "`max_steps=0` must be at least 1"),
        (["--bad_reward_threshold", "nan"], "`--bad_reward_threshold nan` must be a finite number"),
        (["--seed", "-1"], "`--seed -1` must be at least 0"),
        (["--prompts", "none.jsonl"], "none.jsonl"),
        (["--output", "."], "`--output .` is a folder; name a file"),
        (["--reward_type", "guess"], "`reward_type='guess'` is not one of"),
        (["--chat_template_kwargs", '{"a": 1}'], "`chat_template_kwargs` has no effect on prompts of plain text"),
    ],
)
def test_mistakes_are_said_before_a_model_is_loaded(command, capsys, monkeypatch, flags, message):
    monkeypatch.setattr("trl_repulse.models._loading.load_model", lambda *args: pytest.fail("a model was loaded"))
    assert command(*flags) == 1
    error = capsys.readouterr().err
    *said, error = error.splitlines()
    assert error.startswith("trl-repulse suggest: ") and message in error and len(said) <= 1


def test_a_useless_reward_ends_in_one_line(command, capsys, tmp_path):
    arguments = ["suggest", "--model", two_tokens.policy_path(), *write_inputs(tmp_path, "[0.5 for _ in completions]")]
    arguments += "--num_samples 50 --output repulse.yaml --max_steps 2 --prompts".split() + [two_tokens.prompts_path()]
    assert main(arguments) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert "have the reward 0.5, so that there is nothing to learn" in error and not Path("repulse.yaml").exists()
    write_inputs(tmp_path, "[len(text.strip()) ** 0.5 / len(text) for text in completions]")
    assert main(arguments) == 0
    assert "WARNING: The reward function fails on an empty completion" in capsys.readouterr().out


# The guide


def test_the_guide_has_the_rules_of_the_command():
    """Its table, and the figures in it, are those that decide."""
    text = GUIDE.read_text(encoding="utf-8")
    for value in (KL_COEFFICIENT / SPREAD, round(ALPHA / SPREAD, 1)):
        assert f"{value:.2g} times" in text
    assert f"{KL_COEFFICIENT:g} at {SPREAD:g}" in text and f"{ALPHA:g} at {SPREAD:g}" in text
    assert f"`max_steps` | {UPDATES} |" in text
    assert f"−{TARGET_NATS:g} nats" in text
    for size, rate in RATES:
        mantissa, exponent = f"{rate:.0e}".split("e-")
        number = f"{size / 1e9:g} billion" if size >= 1e9 else f"{size / 1e6:g} million"
        assert f"{mantissa}e-{int(exponent)} at {number}" in text
    found = planned()
    assert all(f"`{name}`" in text for name in found.values if name not in ("proposal", "max_completion_length"))
