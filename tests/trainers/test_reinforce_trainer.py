"""ReinforceTrainer as a user meets it: directions, methods by configuration, refusals."""

from dataclasses import replace

import pytest
import torch
from datasets import Dataset

from trl_repulse import ReinforceTrainer, RePULSeTrainer
from trl_repulse.math.objective import compute_advantages, prefix_values

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
    ("kind", "as_messages", "gae_lambda"),
    [(ReinforceTrainer, False, 1.0), (ReinforceTrainer, True, 0.8), (RePULSeTrainer, False, 0.5)],
)
def test_prefixes_are_rewarded_and_give_values(make, prompts, kind, as_messages, gae_lambda):
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
    settings |= {"gae_lambda": gae_lambda, "beta": 0.05}
    settings |= {} if kind is ReinforceTrainer else {"proposal": "hot_policy", "bad_reward_threshold": 0.0}
    if as_messages:
        prompts = prompts.map(lambda row: {"prompt": [{"role": "user", "content": row["prompt"]}]})
    trainer = make(Kept, reward_funcs=letters, dataset=prompts, extra={"processing_class": tokenizer}, **settings)
    with torch.no_grad():
        for weights in trainer.ref_model.parameters():
            weights.add_(0.1 * torch.randn_like(weights))
    trainer.train()
    (whole, texts, rewards), *cut = calls[:3]  # those of extra samples come later
    assert list(trainer._logs["extra"]["text"]) == texts
    logged = trainer.state.log_history[0]
    assert logged["letters"] == pytest.approx(logged["reward"]) or kind is RePULSeTrainer
    for length, (ids, short, _) in zip((2, 4), cut, strict=True):
        assert ids == [row[:length] for row in whole]
        assert short == tokenizer.batch_decode(ids, skip_special_tokens=True)
    values = prefix_values(rewards, torch.stack([0 * rewards, *(each for *_, each in cut)], dim=1))
    (units, scores, loss), *_ = batches
    losses, squares = [], []
    for prompt, (rows, log_p, log_ref) in enumerate(
        zip(units.rows, scores.log_p["own"], units.own.ref_log_p, strict=True)
    ):
        sizes = [len(whole[row]) for row in rows]
        kl = [(log_p[n] - log_ref[n])[:size].tolist() for n, size in enumerate(sizes)]
        of_whole = compute_advantages(rewards[rows][None] - 0.05 * torch.tensor([[sum(each) for each in kl]]))[0]
        torch.testing.assert_close(
            units.returns[prompt], rewards[rows] - 0.05 * torch.tensor([sum(each) for each in kl])
        )
        for n, (row, size) in enumerate(zip(rows, sizes, strict=True)):
            others = [x for x in range(4) if x != n]
            before = [
                values[row, t // 2].item() - 0.05 * sum(sum(kl[x][t:]) for x in others) / 3 for t in range(size)
            ] + [rewards[row].item()]
            deltas = [before[t + 1] - before[t] - 0.05 * kl[n][t] for t in range(size)]
            advantages = [
                sum(gae_lambda ** (u // 2 - t // 2) * deltas[u] for u in range(t, size)) for t in range(size)
            ]
            losses.append(-(torch.tensor(advantages) * log_p[n, :size]).mean())
            squares.append((sum(sum(deltas[t:]) ** 2 for t in range(size)), size * of_whole[n].item() ** 2))
    assert loss.item() == pytest.approx(torch.stack(losses).mean().item(), rel=1e-5)
    by_token, by_completion = map(sum, zip(*squares, strict=True))
    assert logged["prefix/noise"] == pytest.approx(by_token / by_completion, rel=1e-4)


def test_prefixes_of_truncated_completions_are_rewarded_too(make):
    calls = []

    def reward(completion_ids, **kwargs):
        calls.append(completion_ids)
        return [float(sum(ids)) / len(ids) for ids in completion_ids]

    settings = {"max_completion_length": 5, "pad_to_multiple_of": 16, "mask_truncated_completions": True}
    make(ReinforceTrainer, reward_funcs=reward, prefix_reward_steps=2, max_steps=1, **settings).train()
    whole, *cut = calls
    assert any(len(row) == 5 for row in whole) and cut == [[row[:length] for row in whole] for length in (2, 4)]


def test_refused_data(make):
    with pytest.raises(ValueError, match="no column `prompt`, only question"):
        make(ReinforceTrainer, dataset=Dataset.from_dict({"question": ["a"]}))
    with pytest.raises(ValueError, match="has 1 prompts, but one batch of generations takes 4"):
        make(ReinforceTrainer, dataset=Dataset.from_dict({"prompt": ["the cat"]}))
    with pytest.raises(ValueError, match="is empty"):
        make(ReinforceTrainer, dataset=Dataset.from_dict({"prompt": []}))
    with pytest.raises(ValueError, match="exceed the model's context of 32 tokens"):
        make(ReinforceTrainer, dataset=Dataset.from_dict({"prompt": ["the cat " * 20] * 4})).train()
