"""The choice of what draws hot samples: what it counts, tokens' effects, its gain against enumeration, and how it is resumed."""

import math

import pytest
import torch

from trl_repulse.engine.units import CompletionSet
from trl_repulse.generation.drawing import POLICY, Sampler
from trl_repulse.math.importance import TILTS, TokenEffects
from trl_repulse.method import hot_policy as _hot_policy
from trl_repulse.method.hot_policy import TEMPERATURES

from ..conftest import BAD


pytestmark = pytest.mark.trainer
CHOSEN = {
    "proposal": "hot_policy",
    "proposal_temperature": None,
    "bad_reward_threshold": -1.0,
    "potential": "indicator",
}
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
