"""What every negative term keeps, also one that a user writes by the documentation of `NegativeTerm` and `Scorer` alone."""

import json

import pytest
import torch

from trl_repulse import RePULSeGRPOTrainer, RePULSePPOTrainer, RePULSeTrainer
from trl_repulse.evaluation.log_probs import completion_log_probs
from trl_repulse.method.negative_term import COEFFICIENTS, NEGATIVE, DrawnTerm


pytestmark = pytest.mark.trainer


class WorstAgain(DrawnTerm):
    """Draws from the policy once more, and pushes down the worst sample of each prompt."""

    def weigh(self, batch, log_p=None, log_p_negative=None):
        rewards = self.scorer.by_prompt(batch["proposal_rewards"], self.size)  # (P, K)
        worst = (rewards == rewards.min(dim=1, keepdim=True).values).float()
        share = worst / worst.sum(dim=1, keepdim=True)
        self.scorer.log("negative/worst", rewards.min(dim=1).values)
        coefficients = -self.scheduled("alpha") * self.size * share
        return {COEFFICIENTS[NEGATIVE]: self.scorer.by_unit(coefficients, batch["proposal_rewards"])}


def with_own_term(trainer_cls):
    return type(f"Own{trainer_cls.__name__}", (trainer_cls,), {"build_negative_term": lambda self: WorstAgain(self)})


TERMS = {
    "policy": {"proposal": "policy", "target_dist_beta": -2.0},
    "hot policy": {"proposal": "hot_policy", "bad_reward_threshold": -1.0},
    "learned": {"proposal": "learned", "target_dist_beta": -2.0},
    "of a user": {"proposal": "policy", "target_dist_beta": -2.0},
}
CUT = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 8}


@pytest.mark.parametrize("settings", [{}, CUT, {"num_iterations": 2}], ids=["whole", "cut", "used twice"])
@pytest.mark.parametrize(
    "trainer_cls", [RePULSeTrainer, RePULSePPOTrainer, RePULSeGRPOTrainer], ids=lambda c: c.__name__
)
@pytest.mark.parametrize("term", TERMS)
def test_the_contract(make, monkeypatch, term, trainer_cls, settings):
    """A prompt's coefficients are at most 0 and sum to −α·K or to 0, carry no gradient, and change nothing that they are made of."""
    options = {"alpha": 0.7, "alpha_normalization": "none", "num_generations": 4} | TERMS[term] | settings
    cls = with_own_term(trainer_cls) if term == "of a user" else trainer_cls
    trainer = make(cls, **options, max_steps=2, save_strategy="steps", save_steps=1)
    negative, seen = trainer._negative, []
    weigh = negative.weigh

    def spy(batch, *args):
        before = {name: value.clone() for name, value in batch.items()}
        made = weigh(batch, *args)
        assert all(torch.equal(batch[name], before[name]) for name in before) and len(batch) == len(before)
        if set(made) & set(COEFFICIENTS.values()):
            seen.append(made)
        return made

    monkeypatch.setattr(negative, "weigh", spy)
    trainer.train()
    assert seen
    for made in seen:
        total = 0.0
        for name, size in zip(COEFFICIENTS.values(), (negative.scorer.num_generations, negative.size), strict=True):
            if name in made:
                units = made[name]
                assert not units.requires_grad and (units <= 0).all()
                # Each set is divided by its own number of samples in the loss
                total = total + negative.scorer.by_prompt(units, size).sum(dim=1) / size
        torch.testing.assert_close(total, torch.where(total < 0, -0.7, 0.0))
    assert json.loads(json.dumps(negative.state())) == negative.state()
    if term == "of a user":
        assert any("negative/worst" in log for log in trainer.state.log_history)


def test_a_users_term_lowers_what_it_weighs(make, monkeypatch):
    """Whatever the policy's own samples do in the same step."""
    weigh, seen, log_p = WorstAgain.weigh, [], []

    def spy(self, batch, *args):
        made = weigh(self, batch, *args)
        seen.append(batch | made)
        return made

    def tokens(batch, name):
        ids, mask = (batch[f"{name}_{part}"].view(-1, batch[f"{name}_{part}"].size(-1)) for part in ("ids", "mask"))
        return [row[kept.bool()].tolist() for row, kept in zip(ids, mask, strict=True)]

    monkeypatch.setattr(WorstAgain, "weigh", spy)
    term = {"proposal": "policy", "target_dist_beta": -2.0, "alpha_normalization": "none"}
    step = {"max_steps": 1, "optim": "sgd", "learning_rate": 0.01, "warmup_steps": 0, "max_grad_norm": 1e9}
    for alpha in (1.0, 1e-9):
        trainer = make(with_own_term(RePULSeTrainer), alpha=alpha, **term, **step)
        trainer.train()
        prompts, completions = tokens(seen[-1], "prompt"), tokens(seen[-1], "proposal_completion")
        prompts = [ids for ids in prompts for _ in range(len(completions) // len(prompts))]
        log_p.append(completion_log_probs(trainer.model, prompts, completions)[0])
    with_term, without = seen
    assert torch.equal(with_term["proposal_completion_ids"], without["proposal_completion_ids"])
    assert float((with_term[COEFFICIENTS[NEGATIVE]].cpu().flatten() * (log_p[0] - log_p[1])).sum()) > 0.01
