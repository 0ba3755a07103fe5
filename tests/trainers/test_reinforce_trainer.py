"""ReinforceTrainer as a user meets it: directions, methods by configuration, refusals."""

from dataclasses import replace

import pytest
import torch
from datasets import Dataset

from trl_repulse import ReinforceTrainer, RePULSeTrainer
from trl_repulse.math.objective import compute_advantages, prefix_advantages

from ..conftest import build_tokenizer


pytestmark = pytest.mark.trainer

METHODS = {
    "published": {},
    "RLOO": {"logprob_reduction": "sum"},
    "REINFORCE++": {"baseline": "none", "normalize_advantages": True},
    "REINFORCE++-baseline": {"baseline": "group_mean", "normalize_advantages": True},
    "group mean": {"baseline": "group_mean"},
    "no baseline": {"baseline": "none"},
    "constant": {"baseline": "constant", "baseline_constant": 0.5},
    "exponential": {"reward_transform": "exponential", "reward_transform_alpha": 0.1},
    "indicator": {"reward_transform": "indicator", "reward_transform_alpha": 3.0, "reward_transform_threshold": -1.0},
}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("method", "sign"), [(name, 1) for name in METHODS] + [(name, -1) for name in ("published", "REINFORCE++")]
)
def test_each_method_follows_the_reward(make, evaluator, reward, method, sign):
    """With the opposite reward, the control, the direction turns."""

    def signed(completions, **kwargs):
        return [sign * r for r in reward(completions)]

    trainer = make(ReinforceTrainer, reward_funcs=signed, max_steps=20, **METHODS[method])
    start = evaluator.evaluate(trainer.model)
    trainer.train()
    end = evaluator.evaluate(trainer.model)
    assert sign * (end.expected_reward - start.expected_reward) > 0.2
    assert sign < 0 or end.log_prob_bad < start.log_prob_bad - 0.2


@pytest.mark.parametrize("method", ["REINFORCE++", "REINFORCE++-baseline"])
def test_logged_advantages_are_normalised_over_the_batch(make, method):
    trainer = make(ReinforceTrainer, log_completions=True, max_steps=1, **METHODS[method])
    trainer.train()
    advantages = torch.tensor(list(trainer._logs["advantages"]))
    assert advantages.mean().abs() < 1e-5 and advantages.std() == pytest.approx(1, abs=1e-3)
    assert not torch.allclose(advantages.view(4, 4).std(dim=1), torch.ones(4), atol=0.05)  # not prompt by prompt


@pytest.mark.parametrize(
    ("kind", "as_messages"), [(ReinforceTrainer, False), (ReinforceTrainer, True), (RePULSeTrainer, False)]
)
def test_prefixes_are_rewarded_and_correct_the_advantages(make, prompts, kind, as_messages):
    calls, batches, tokenizer = (
        [],
        [],
        build_tokenizer(chat_template="{% for m in messages %}{{ m.content }}{% endfor %}"),
    )

    def letters(completions, completion_ids, log_extra, log_metric, **kwargs):
        texts = [each[0]["content"] for each in completions] if as_messages else completions
        log_extra("text", texts)
        rewards = [float(len(text)) for text in texts]
        calls.append((completion_ids, texts, torch.tensor(rewards)))
        log_metric("letters", sum(rewards) / len(rewards))
        return rewards

    class Kept(kind):
        def _loss(self, units, scores):
            batches.append((units, scores, super()._loss(replace(units, extra=None), scores)))
            return super()._loss(units, scores)

    settings = {"prefix_reward_steps": 2, "max_completion_length": 5, "max_steps": 1, "log_completions": True}
    settings |= {} if kind is ReinforceTrainer else {"proposal": "hot_policy", "bad_reward_threshold": 0.0}
    if as_messages:
        prompts = prompts.map(lambda row: {"prompt": [{"role": "user", "content": row["prompt"]}]})
    trainer = make(Kept, reward_funcs=letters, dataset=prompts, extra={"processing_class": tokenizer}, **settings)
    trainer.train()
    (whole, texts, rewards), *cut = calls[:3]  # those of extra samples come later
    assert list(trainer._logs["extra"]["text"]) == texts
    logged = trainer.state.log_history[0]
    assert logged["letters"] == pytest.approx(logged["reward"]) or kind is RePULSeTrainer
    for length, (ids, short, _) in zip((2, 4), cut, strict=True):
        assert ids == [row[:length] for row in whole]
        assert short == tokenizer.batch_decode(ids, skip_special_tokens=True)
    by_token = prefix_advantages(rewards, torch.stack([0 * rewards, *(each for *_, each in cut)], dim=1))
    own_advantages = compute_advantages(rewards.view(-1, 4)).flatten()
    noise = by_token.square().mean() / own_advantages.square().mean()
    assert logged["prefix/noise"] == pytest.approx(noise.item(), rel=1e-4)
    (units, scores, loss), *_ = batches
    kl = compute_advantages(units.returns - units.own.rewards).flatten(0, 1)
    loss_by_hand = []
    for place, row in enumerate(units.rows.flatten().tolist()):
        log_p, size = scores.log_p["own"].flatten(0, 1)[place], len(whole[row])
        advantages = kl[place] + torch.stack([by_token[row, t // 2] for t in range(size)])
        loss_by_hand.append(-(advantages * log_p[:size]).mean())
    assert loss.item() == pytest.approx(torch.stack(loss_by_hand).mean().item(), rel=1e-5)
    torch.testing.assert_close(units.advantages.flatten() - kl, own_advantages[units.rows.flatten()])


def test_refused_data(make):
    with pytest.raises(ValueError, match="no column `prompt`, only question"):
        make(ReinforceTrainer, dataset=Dataset.from_dict({"question": ["a"]}))
    with pytest.raises(ValueError, match="has 1 prompts, but one batch of generations takes 4"):
        make(ReinforceTrainer, dataset=Dataset.from_dict({"prompt": ["the cat"]}))
    with pytest.raises(ValueError, match="is empty"):
        make(ReinforceTrainer, dataset=Dataset.from_dict({"prompt": []}))
    with pytest.raises(ValueError, match="exceed the model's context of 32 tokens"):
        make(ReinforceTrainer, dataset=Dataset.from_dict({"prompt": ["the cat " * 20] * 4})).train()
