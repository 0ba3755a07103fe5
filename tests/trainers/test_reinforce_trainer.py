"""ReinforceTrainer as a user meets it: directions, methods by configuration, refusals."""

import pytest
import torch
from datasets import Dataset

from trl_repulse import ReinforceTrainer


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


def test_refused_data(make):
    with pytest.raises(ValueError, match="no column `prompt`, only question"):
        make(ReinforceTrainer, dataset=Dataset.from_dict({"question": ["a"]}))
    with pytest.raises(ValueError, match="has 1 prompts, but one batch of generations takes 4"):
        make(ReinforceTrainer, dataset=Dataset.from_dict({"prompt": ["the cat"]}))
    with pytest.raises(ValueError, match="is empty"):
        make(ReinforceTrainer, dataset=Dataset.from_dict({"prompt": []}))
    with pytest.raises(ValueError, match="exceed the model's context of 32 tokens"):
        make(ReinforceTrainer, dataset=Dataset.from_dict({"prompt": ["the cat " * 20] * 4})).train()
