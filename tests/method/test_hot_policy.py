"""The policy drawn hotter in the proposal's place: weights, its loss, what it does to P(bad), and the choice of what draws it."""

import contextlib
import dataclasses
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import is_peft_model
from peft import LoraConfig
from transformers import AutoTokenizer, GPT2LMHeadModel

from trl_repulse import ReinforceTrainer, RePULSeGRPOTrainer, RePULSePPOTrainer, RePULSeTrainer
from trl_repulse.engine.scoring import BySampler, Scoring, Wanted
from trl_repulse.engine.units import CompletionSet, Drawing, Shape
from trl_repulse.generation.drawing import POLICY, Sampler
from trl_repulse.math.importance import TILTS, TokenEffects, log_mixture_weights
from trl_repulse.method import hot_policy as _hot_policy
from trl_repulse.method.hot_policy import TEMPERATURES, HotPolicy

from ..conftest import BAD, assert_same_logs
from ..mathematics.test_exact import World
from ..trainers.test_variants import SETTINGS


pytestmark = pytest.mark.trainer
HOT = {"proposal": "hot_policy", "proposal_temperature": 2.0, "bad_reward_threshold": -1.0}
HOT |= {"alpha_normalization": "none"}
COEFFICIENTS = "negative_coefficients", "proposal_negative_coefficients"
CUT = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 8}


@contextlib.contextmanager
def apart(*args):
    """In place of `Drawing.together`: extra samples are drawn in a call of their own."""
    yield


def read_all(argument):
    """A scoring pass's argument, with all completions to be read."""
    return replace(argument, needed={}) if isinstance(argument, Wanted) else argument


@pytest.mark.exact
def test_mixture_weights_average_to_z():
    """Over all strings of a toy language, each as often as two samplers draw it, the mean weight is Z."""
    world = World(ending=True)
    p, q = world.string_prob(world.policy), world.string_prob(world.proposal)  # (P, S)
    log_potential = -1.3 * world.reward
    n, k = 9, p.shape[1] - 9
    log_w = log_mixture_weights(p.log(), q.log(), log_potential, n, k)
    drawn = (n * p + k * q) / (n + k)
    found = torch.where(drawn > 0, drawn * log_w.exp(), 0.0).sum(dim=1)
    torch.testing.assert_close(found, (p * log_potential.exp()).sum(dim=1), atol=1e-12, rtol=1e-9)
    strings = p > 0
    assert (log_w <= log_potential + math.log((n + k) / n) + 1e-12)[strings].all()
    far = log_mixture_weights(p.log(), q.log() - 1000, log_potential, n, k)  # a sampler that never draws these
    torch.testing.assert_close(far[strings], (log_potential + math.log((n + k) / n))[strings])


def test_mixture_weights_of_samples_without_weight():
    zeros = torch.zeros(1, 3)
    log_w = log_mixture_weights(zeros, zeros, torch.tensor([[0.0, -math.inf, math.nan]]), 1, 2)
    assert log_w.tolist() == [[0.0, -math.inf, -math.inf]]
    with pytest.raises(ValueError, match="`log_p` has shape"):
        log_mixture_weights(zeros, zeros, zeros, 2, 2)


def log_prob(trainer, prompt_ids, completion_ids, mask, temperature):
    """log p of completions (n, T) after one prompt without padding, from the model's own logits."""
    ids = torch.cat([prompt_ids.expand(len(completion_ids), -1), completion_ids], dim=1)
    model = trainer.model.get_base_model() if is_peft_model(trainer.model) else trainer.model
    with torch.no_grad():
        logits = model(input_ids=ids).logits[:, len(prompt_ids) - 1 : -1] / temperature
    return (logits.log_softmax(-1).gather(-1, completion_ids[..., None])[..., 0] * mask).sum(dim=1)


@pytest.mark.thorough
@pytest.mark.parametrize("peft", [False, True], ids=["whole", "adapter"])
@pytest.mark.parametrize("settings", [{}, {"num_proposal_generations": 6}, {"num_iterations": 2}, CUT], ids=str)
def test_coefficients_by_hand(make, monkeypatch, settings, peft):
    seen, weigh = [], HotPolicy.weigh

    def spy(self, units, *args):
        weights = weigh(self, units, *args)
        seen.append(weights.added_to(units).to_batch())
        return weights

    monkeypatch.setattr(HotPolicy, "weigh", spy)
    extra = {"peft_config": LoraConfig(task_type="CAUSAL_LM")} if peft else None
    trainer = make(
        **(HOT | {"max_steps": 1, "alpha": 0.7, "target_dist_beta": -0.4} | settings), extra=extra, learning_rate=0.0
    )
    trainer.train()
    names = ("completion", "proposal_completion")
    n, k = 4, settings.get("num_proposal_generations", 4)
    parts = {}  # of each prompt
    for batch in seen:
        for unit in range(len(batch["prompt_ids"])):
            lead = tuple(batch["prompt_ids"][unit][batch["prompt_mask"][unit] == 1].tolist())
            rows = {name: batch[name][unit] for name in batch if name.endswith("rewards") or "completion" in name}
            rows |= {name: batch[name][unit] for name in COEFFICIENTS}
            parts.setdefault(lead, []).append(rows)
    assert len(parts) == 4
    found = 0.0
    for lead, units in parts.items():
        log_p, log_m, rewards, got = [], [], [], []
        for name, coefficients in zip(names, COEFFICIENTS, strict=True):
            ids = torch.cat([unit[f"{name}_ids"] for unit in units])
            mask = torch.cat([unit[f"{name}_mask"] for unit in units])
            p, hot = (log_prob(trainer, torch.tensor(lead, device=ids.device), ids, mask, t) for t in (1.0, 2.0))
            log_p.append(p)
            log_m.append(torch.logaddexp(p + math.log(n / (n + k)), hot + math.log(k / (n + k))))
            rewards.append(
                torch.cat([unit["rewards" if name == "completion" else "proposal_rewards"] for unit in units])
            )
            got.append(torch.cat([unit[coefficients] for unit in units]))
        log_p, log_m, rewards = torch.cat(log_p), torch.cat(log_m), torch.cat(rewards)
        bad = rewards < -1.0
        w = torch.where(bad, (log_p - log_m - 0.4 * rewards).exp(), 0.0)
        share = 0.7 * w / w.sum().clamp(min=1e-30)
        torch.testing.assert_close(got[0], -share[:n] * n, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(got[1], -share[n:] * k, atol=1e-5, rtol=1e-4)
        found += torch.where(bad, (log_p - log_m).exp(), 0.0).sum().item() / (n + k)
    assert found > 0
    if settings != {"num_iterations": 2}:
        assert trainer.state.log_history[0]["negative/p_bad"] == pytest.approx(found / 4, rel=1e-3)


@pytest.mark.parametrize("settings", [{}, CUT], ids=["whole", "cut"])
def test_only_bad_samples_are_scored_by_the_sampler(make, monkeypatch, settings):
    """In the pass that gives the log-probabilities of training, or in the one that weighs samples early: no pass of its own."""
    wanted, take, passes = [], BySampler.take, []

    def spy(self, head, hidden_states):
        take(self, head, hidden_states)
        scored = self.log_p.sum(dim=1) != 0
        assert torch.equal(scored, self.wanted & (self.labels != -100).any(dim=1))
        wanted.append(self.wanted.sum().item())

    monkeypatch.setattr(BySampler, "take", spy)
    trainer = make(**HOT | settings, max_steps=1, learning_rate=0.0)
    trainer.model.register_forward_hook(lambda module, args, output: passes.append("log_probs" in output))
    trainer.train()
    rewards = [
        x for logs in (trainer._logs, trainer._tables.extra) for column in logs["rewards"].values() for x in column
    ]
    bad = sum(reward < -1.0 for reward in rewards)
    assert 0 < bad < len(rewards)
    # A pass of which nothing is wanted scores one completion all the same
    assert bad <= sum(wanted) <= bad + len(wanted)
    assert sum(passes) == len(wanted) + settings.get("gradient_accumulation_steps", 0)


SEPARATE, LONG = {"share_prompts": False}, {"max_completion_length": 5}


@pytest.mark.parametrize(
    ("trainer_cls", "settings"),
    [
        (RePULSeTrainer, {}),
        (RePULSeTrainer, LONG),
        (RePULSeTrainer, SEPARATE),
        (RePULSeTrainer, {"num_iterations": 2, "num_proposal_generations": 8}),
        pytest.param(RePULSeTrainer, CUT | {"beta": 0.1}, marks=pytest.mark.thorough),
        pytest.param(RePULSeTrainer, CUT | SEPARATE, marks=pytest.mark.thorough),
        pytest.param(RePULSePPOTrainer, {"beta": 0.1, "num_iterations": 2}, marks=pytest.mark.thorough),
        pytest.param(RePULSeGRPOTrainer, SEPARATE, marks=pytest.mark.thorough),
    ],
)
def test_what_is_not_bad_is_not_read(make, monkeypatch, trainer_cls, settings):
    """Its weight is 0: the policy ends as if all hot samples were scored, and reads fewer tokens."""
    ends, read, score = [], [], Scoring.score
    for everything in (False, True):
        trainer = make(
            trainer_cls, **HOT | {"bad_reward_threshold": -1.5} | settings, max_steps=6, logging_steps=1, optim="sgd"
        )
        if everything:
            monkeypatch.setattr(
                Scoring, "score", lambda self, *args, **rest: score(self, *map(read_all, args), **rest)
            )
        tokens = []
        trainer.model.register_forward_hook(
            lambda module, args, kwargs, output, tokens=tokens: (
                tokens.append(kwargs["attention_mask"].sum().item()) if "log_probs" in output else None
            ),
            with_kwargs=True,
        )
        trainer.train()
        pushed = [log["negative/ess"] for log in trainer.state.log_history if "negative/ess" in log]
        assert any(pushed)
        ends.append(trainer)
        read.append(sum(tokens))
    assert read[0] < 0.9 * read[1]
    for one, other in zip(*(trainer.model.parameters() for trainer in ends), strict=True):
        torch.testing.assert_close(one, other, atol=2e-6, rtol=1e-5)
    assert_same_logs(*ends, rel=1e-4, absolute=1e-5, ignored=("log_p_rank",))


@pytest.mark.thorough
@pytest.mark.parametrize("settings", [{}, CUT], ids=["whole", "cut"])
def test_nothing_bad_nothing_pushed(make, monkeypatch, settings):
    """Where no sample is bad the update is REINFORCE's own."""
    monkeypatch.setattr(Drawing, "together", apart)  # else the policy draws with other random numbers
    ends = []
    for trainer_cls, own in ((RePULSeTrainer, HOT | {"bad_reward_threshold": -99.0}), (ReinforceTrainer, {})):
        trainer = make(trainer_cls, max_steps=1, optim="sgd", **own, **settings)
        trainer.train()
        ends.append(trainer.model.parameters())
    for hot, plain in zip(*ends, strict=True):
        torch.testing.assert_close(hot, plain, atol=1e-6, rtol=0)


@pytest.mark.thorough
def test_the_policy_loses_bad_outputs_that_it_hardly_draws(make, evaluator):
    """Against REINFORCE and against the policy's own samples, at the same number of completions."""
    ends = {}
    for name, settings in {
        "REINFORCE": {"alpha": 0.0, "num_generations": 16, "per_device_train_batch_size": 64},
        "policy": {"proposal": "policy", "num_generations": 16, "per_device_train_batch_size": 64},
        "hot": {**HOT, "num_generations": 8, "per_device_train_batch_size": 32},
    }.items():
        trainer = make(**(SETTINGS | settings | {"max_steps": 60}))
        trainer.train()
        ends[name] = evaluator.evaluate(trainer.model).log_prob_bad
    assert ends["hot"] < min(ends["REINFORCE"], ends["policy"]) - 0.5, ends


@pytest.mark.thorough
@pytest.mark.parametrize("settings", [{}, {"num_proposal_generations": 6}, CUT], ids=["whole", "uneven", "cut"])
@pytest.mark.parametrize("peft", [False, True], ids=["whole", "adapter"])
def test_one_call_draws_both(make, monkeypatch, settings, peft):
    """In training and evaluation; in calls of their own where rows cannot have temperatures."""
    calls, generate = [], GPT2LMHeadModel.generate

    def spy(self, *args, **kwargs):
        calls.append((self.training, len(kwargs["input_ids"])))
        return generate(self, *args, **kwargs)

    extra = {"peft_config": LoraConfig(task_type="CAUSAL_LM")} if peft else None
    trainer = make(**HOT, **settings, extra=extra, per_device_eval_batch_size=16)
    monkeypatch.setattr(GPT2LMHeadModel, "generate", spy)
    hot = settings.get("num_proposal_generations", 4) * 4
    trainer.train()
    assert [rows for _, rows in calls] == [16 + hot] * 2

    calls.clear()
    trainer._guard = dataclasses.replace(trainer._guard, sample_by_length=True)
    trainer.evaluate(trainer.train_dataset)
    assert sum(rows for _, rows in calls) == 32 and len(calls) > 1
    assert trainer._drawing.joint is None


def test_samples_are_drawn_at_the_temperature(make, tokenizer, model_dirs):
    """As often as the tempered distribution says; the policy's own as often as the policy says."""
    trainer = make(
        **HOT,
        max_steps=1,
        num_generations=500,
        per_device_train_batch_size=2000,
        max_completion_length=1,
        learning_rate=0.0,
        log_completions=True,
        num_completions_to_print=1,
    )
    trainer.train()
    tokenizer = AutoTokenizer.from_pretrained(model_dirs["gpt2"])
    for logs, temperature in ((trainer._logs, 1.0), (trainer._tables.extra, 2.0)):
        counts = torch.zeros(len(tokenizer))
        for prompt, completion in zip(logs["prompt"], logs["completion"], strict=True):
            if prompt == "fish":
                counts[(tokenizer(completion)["input_ids"] or [tokenizer.eos_token_id])[0]] += 1
        ids = torch.tensor([tokenizer("fish")["input_ids"]], device=trainer.model.device)
        with torch.no_grad():
            p = (trainer.model(input_ids=ids).logits[0, -1] / temperature).softmax(-1).cpu()
        special = [i for i in tokenizer.all_special_ids if i != tokenizer.eos_token_id]
        p[tokenizer.eos_token_id] += p[special].sum()  # which are left out of the text
        p[special] = 0
        chi = ((counts - 500 * p) ** 2 / (500 * p).clamp(min=1e-9))[p * 500 > 3].sum().item()
        assert chi < 50, (temperature, chi)  # 16 degrees of freedom
    assert counts.sum() == 500
    assert trainer.generation_config.temperature == 1.0


# The choice of what draws hot samples


CHOSEN = {"proposal": "hot_policy", "proposal_temperature": None, "bad_reward_threshold": -1.0}
CHOSEN |= {"potential": "indicator"}
FIXED = {**CHOSEN, "learning_rate": 0.0, "alpha_normalization": "none"}


def test_effects_are_shrunk_means_of_deviations():
    torch.manual_seed(0)
    ids, mask = torch.randint(0, 7, (40, 5)), torch.ones(40, 5, dtype=torch.long)
    mask[::3, 3:] = 0
    deviations = torch.randn(40)
    deviations[4] = torch.nan
    effects = TokenEffects(8)
    for part in (slice(0, 15), slice(15, 40)):
        effects.sums += TokenEffects.of(ids[part], mask[part], deviations[part], 8)
    for token in range(8):
        of = [deviations[i] for i in range(40) if i != 4 and token in ids[i][mask[i] == 1]]
        assert effects()[token] == pytest.approx(float(sum(of)) / (len(of) + 1), abs=1e-5)


@pytest.mark.exact
def test_the_gain_approaches_the_exact_one(make, monkeypatch, prompts):
    """Of samples that were drawn at one temperature."""
    monkeypatch.setattr(_hot_policy, "_FINDS", 100_000)
    size = {"num_generations": 400, "per_device_train_batch_size": 1600, "max_completion_length": 1}
    trainer = make(**FIXED | {"proposal_temperature": 1.6}, **size, max_steps=8)
    trainer.train()
    choice = trainer._negative.choice
    choice.choose()
    bad = [i for i in range(len(trainer.processing_class)) if trainer.processing_class.decode([i]).strip() == "bad"]
    p_bad = squares = 0.0
    for prompt in prompts["prompt"]:
        ids = torch.tensor([trainer.processing_class(prompt)["input_ids"]], device=trainer.model.device)
        with torch.no_grad():
            logits = trainer.model(input_ids=ids).logits[0, -1].float().cpu()
        p, q = (each(logits).softmax(-1)[bad] for each in (POLICY, Sampler(1.6)))
        p_bad += p.sum().item()
        squares += (p * 2 * p / (p + q)).sum().item()
    assert choice.gain() == pytest.approx(p_bad / squares, rel=0.05) and abs(p_bad / squares - 1) > 0.05


def test_finds_are_gathered_where_prompts_are_not():
    """Prompts that are cut apart are gathered before their bad samples are kept."""
    term, gathered = HotPolicy.__new__(HotPolicy), []
    term.choice = SimpleNamespace(choose=lambda gathers: gathered.append(gathers), sampler=POLICY)
    for unit, generations in ((4, 4), (1, 4), (1, 1)):
        term.source(Shape(True, generations, 4, unit, unit == 4, True, 4))
    assert gathered == [True, False, True]


def test_the_sampler_that_finds_most_is_drawn_most(make):
    """Counts decide, which are forgotten, so that a choice can change; at first every sampler has its turn."""
    trainer = make(**CHOSEN, max_steps=1)
    choice = trainer._negative.choice
    assert len(choice.samplers) == 1 + len(TEMPERATURES) + len(TILTS) and choice.samplers[0] is POLICY

    def drawn(times):
        found = []
        for _ in range(times):
            choice.choose()
            found.append(choice.index)
        return found

    assert set(drawn(200)) == set(range(7))
    choice.counts[:] = [[1, 2, 30, 1, 2, 1, 3], [99, 98, 70, 99, 98, 99, 97]]
    assert drawn(50).count(2) == 50
    batch = CompletionSet(
        torch.zeros(8, 1, 1, dtype=torch.long), torch.ones(8, 1, 1, dtype=torch.long), torch.zeros(8, 1)
    )
    for _ in range(400):  # all of its samples are good now
        choice.index = 2
        choice.observe(batch, batch, trainer.bad_reward_threshold)
    assert choice.counts[0, 2] < 0.1 and 2 not in drawn(20)


def test_a_biased_sampler_draws_as_often_as_it_says(make):
    trainer = make(
        **FIXED, num_generations=1000, per_device_train_batch_size=4000, max_steps=1, max_completion_length=1
    )
    choice = trainer._negative.choice
    raised = torch.zeros(choice.effects.sums.size(1))
    raised[BAD] = 2.0
    choice.samplers[-1] = Sampler(bias=raised)
    choice.choose = lambda **_: setattr(choice, "index", len(choice.samplers) - 1)
    seen = {}
    choice.observe = lambda own, extra, _: seen.update(own=own.ids, others=extra.ids)
    trainer.train()
    for name, bias in (("own", 0.0), ("others", 2.0)):
        expected = []
        for prompt in trainer.train_dataset["prompt"]:
            ids = torch.tensor([trainer.processing_class(prompt)["input_ids"]], device=trainer.model.device)
            with torch.no_grad():
                logits = trainer.model(input_ids=ids).logits[0, -1].float().cpu()
            logits[BAD] += bias
            expected.append(logits.softmax(-1)[BAD].item())
        share, mean = (seen[name] == BAD).float().mean().item(), sum(expected) / 4
        assert abs(share - mean) < 4.5 * math.sqrt(mean * (1 - mean) / 4000), (name, share, mean)


def test_effects_find_the_bad_token(make):
    """After a few updates its logit is raised most, and the samplers that raise it find most."""
    trainer = make(**CHOSEN, num_generations=16, per_device_train_batch_size=64, max_steps=12, learning_rate=0.0)
    trainer.train()
    choice = trainer._negative.choice
    assert choice.effects().argmin() == BAD and choice.samplers[-1].bias.argmax() == BAD
    shares = choice.counts[0] / choice.counts.sum(axis=0)
    assert shares[-3:].max() > 1.5 * shares[0]
    logs = [log for log in trainer.state.log_history if "proposal/gain" in log]
    assert logs and all(log["proposal/gain"] > 0.5 for log in logs)


@pytest.mark.thorough
@pytest.mark.parametrize("settings", [{}, {"num_iterations": 2}, {"proposal_temperature": 1.6}], ids=str)
def test_a_resumed_run_chooses_as_one_that_went_on(make, tmp_path, settings):
    def run(steps, **kwargs):
        trainer = make(**CHOSEN | settings, max_steps=6, save_strategy="steps", save_steps=3, **kwargs)
        trainer.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-3") if steps else None)
        return trainer

    whole = run(0)
    resumed = run(3)
    one, other = whole._negative, resumed._negative
    assert one.choice.state() == other.choice.state()
    assert torch.equal(one.choice.effects.sums, other.choice.effects.sums)
    logs = [
        [{k: v for k, v in log.items() if k.startswith(("proposal", "loss"))} for log in trainer.state.log_history][:6]
        for trainer in (whole, resumed)
    ]
    assert logs[0] == logs[1]
