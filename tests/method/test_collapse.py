"""What is logged of a proposal that draws the wrong things, made to on purpose; and that a sound one gives no warning."""

import logging

import pytest
import torch
from transformers import AutoTokenizer, TrainerCallback

from trl_repulse import PPOTrainer, ReinforceTrainer, RePULSeGRPOTrainer, RePULSePPOTrainer, RePULSeTrainer
from trl_repulse.engine import diagnosis, logs
from trl_repulse.math.importance import distinct_share, rank_among

from ..conftest import BAD


pytestmark = pytest.mark.trainer
FROZEN = {"learning_rate": 0.0, "proposal_learning_rate": 0.0, "target_dist_beta": -5.0}
EOS = 1


def say(trainer, token):
    """Makes the proposal say one token whatever it reads."""
    head = torch.nn.Linear(trainer.proposal.module.config.hidden_size, 19)
    with torch.no_grad():
        head.weight.zero_()
        head.bias.fill_(-100.0)[token] = 100.0
    trainer.proposal.module.lm_head = head.to(trainer.proposal.module.device)


@pytest.fixture
def warnings(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger(logs.__name__), "propagate", True)
    return lambda: [r.message for r in caplog.records if "The proposal has collapsed" in r.message]


@pytest.mark.thorough
@pytest.mark.parametrize("steps", [1, 2])  # with 2 the policy's log-probabilities are those of sampling time
def test_a_proposal_of_empty_completions(make, model_dirs, prompts, warnings, steps):
    tokenizer = AutoTokenizer.from_pretrained(model_dirs["gpt2"])
    trainer = make(**FROZEN, max_steps=25 * steps, num_iterations=steps)
    say(trainer, EOS)
    trainer.train()
    log = [log for log in trainer.state.log_history if "proposal/log_z_gap" in log][-1]
    assert [log["proposal/ess"], log["proposal/max_weight"]] == pytest.approx([4, 0.25])  # the blind spot
    assert log["proposal/distinct"] == pytest.approx(0.25)
    # By hand: each weight is p(end) · φ(0), and the policy's samples have their rewards
    with torch.no_grad():
        log_p_end = [
            trainer.model(input_ids=torch.tensor([tokenizer(prompt)["input_ids"]], device=trainer.model.device))
            .logits[0, -1]
            .log_softmax(-1)[EOS]
            for prompt in list(trainer._logs["prompt"])[-16::4]
        ]
    rewards = torch.tensor(list(trainer._logs["rewards"]["word_reward"])[-16:]).view(4, 4)
    bound = (-5.0 * rewards).logsumexp(dim=1) - torch.tensor(4.0).log()
    gap = (bound - torch.stack(log_p_end).cpu()).mean().item()
    assert log["proposal/log_z_gap"] == pytest.approx(gap, abs=1e-4) and gap > 2
    assert 0 <= log["proposal/log_p_rank"] <= 1
    [message] = warnings()
    assert "`proposal/log_z_gap`" in message and "1.0 of a prompt's 4 samples are distinct" in message


@pytest.mark.thorough
def test_a_sound_proposal_gives_no_warning(make, warnings):
    trainer = make(**FROZEN, max_steps=25)  # a copy of the policy
    trainer.train()
    logs = trainer.state.log_history[:25]
    gap, rank = (sum(log[name] for log in logs) / 25 for name in ("proposal/log_z_gap", "proposal/log_p_rank"))
    assert abs(gap) < 1.5 and rank == pytest.approx(0.5, abs=0.1)
    assert not warnings()


@pytest.mark.thorough
@pytest.mark.parametrize(("samples", "said"), [(4, 1), (2, 0)])
def test_a_proposal_of_one_bad_completion(make, warnings, samples, said):
    """The gap is far below 0, as it should be; that all samples are alike shows where there are enough of them."""
    trainer = make(**FROZEN, max_steps=25, num_proposal_generations=samples)
    say(trainer, BAD)
    trainer.train()
    assert trainer.state.log_history[24]["proposal/log_z_gap"] < 0
    assert len(warnings()) == said and all(
        "1.0 of a prompt's 4 samples are distinct" in message for message in warnings()
    )


def test_prompts_that_are_cut_apart(make):
    """The same signs where a micro-batch holds no whole prompt."""
    logged = []
    for settings in ({}, {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 8}):
        trainer = make(**FROZEN, max_steps=1, **settings)
        trainer.train()
        logged.append(trainer.state.log_history[0])
    for name in ("proposal/log_z_gap", "proposal/distinct", "proposal/log_p_rank"):
        assert logged[0][name] == pytest.approx(logged[1][name], abs=1e-4), name


@pytest.mark.parametrize(
    "settings", [{}, {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 8}], ids=["whole", "cut"]
)
def test_the_signs_of_a_hot_policy(make, monkeypatch, settings):
    """The same signs for the hot policy: what it draws, against a count by hand."""
    hot = {"proposal": "hot_policy", "proposal_temperature": 2.0, "target_dist_beta": None}
    hot |= {"bad_reward_threshold": 99.0}  # the rank is of what is bad
    trainer = make(**(FROZEN | hot), max_steps=2, logging_steps=1, **settings)
    drawn = []
    draw = type(trainer._negative).draw
    monkeypatch.setattr(type(trainer._negative), "draw", lambda *args: drawn.append(draw(*args)) or drawn[-1])
    trainer.train()
    for log, batch in zip(trainer.state.log_history, drawn, strict=False):
        ids = batch.extra.ids.masked_fill(batch.extra.mask == 0, -1).flatten(0, 1)
        distinct = [len({tuple(row) for row in prompt}) / 4 for prompt in ids.view(-1, 4, ids.size(1)).tolist()]
        assert log["proposal/distinct"] == pytest.approx(sum(distinct) / len(distinct))
        assert 0 <= log["proposal/log_p_rank"] <= 1 and "proposal/log_z_gap" not in log


def test_distinct_share():
    ids = torch.tensor([[[1, 2], [1, 2], [1, 3], [4, 2]], [[1, 9], [1, 8], [1, 7], [1, 6]]])
    mask = torch.tensor([[[1, 1]] * 4, [[1, 0]] * 4])
    assert distinct_share(ids, mask).tolist() == [0.75, 0.25]  # padding does not tell completions apart
    with pytest.raises(ValueError, match="`mask` has shape"):
        distinct_share(ids, mask[:1])


def test_rank_among():
    values, others = torch.tensor([[0.0, 5.0], [-9.0, -9.0]]), torch.tensor([[-1.0, 1.0, 5.0], [1.0, 2.0, 3.0]])
    assert rank_among(values, others).tolist() == pytest.approx([(1 / 3 + 2.5 / 3) / 2, 0.0])
    counted = torch.tensor([[False, True], [False, False]])
    assert rank_among(values, others, counted).tolist() == pytest.approx([2.5 / 3, torch.nan], nan_ok=True)


class Sharpen(TrainerCallback):
    """Makes the policy say the most probable alone from an update on."""

    def __init__(self, update):
        self.update = update

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        if state.global_step == self.update:
            with torch.no_grad():
                model.get_output_embeddings().weight.mul_(1000.0)


@pytest.mark.parametrize("is_narrow", [True, False])
@pytest.mark.parametrize(
    "trainer_cls", [ReinforceTrainer, PPOTrainer, RePULSeTrainer, RePULSePPOTrainer, RePULSeGRPOTrainer]
)
def test_a_policy_that_says_one_thing(make, caplog, monkeypatch, trainer_cls, is_narrow):
    """Every trainer logs its distinct completions, and warns once; of a policy that stays as it was it does not."""
    monkeypatch.setattr(logging.getLogger(logs.__name__), "propagate", True)
    monkeypatch.setattr(diagnosis, "UPDATES", 2)
    monkeypatch.setattr(logs.Watch, "_next", 2)
    monkeypatch.setattr(logs, "UPDATES", 2)
    extra = {"callbacks": [Sharpen(3)]} if is_narrow else {}
    trainer = make(trainer_cls, learning_rate=0.0, max_steps=9, extra=extra)
    trainer.train()
    logged = [log for log in trainer.state.log_history if "reward" in log]
    found = [record.message for record in caplog.records if "The policy has collapsed" in record.message]
    last = list(trainer._logs["completion"])[-16:]
    drawn = [last[i : i + 4] for i in range(0, 16, 4)]
    assert logged[-1]["completions/distinct"] == pytest.approx(sum(len(set(texts)) for texts in drawn) / 16)
    assert len(found) == is_narrow
    if is_narrow:
        assert logged[0]["entropy"] > 1 and logged[-1]["entropy"] < 0.1
        assert "`entropy` fell from" in found[0] and "1.0 of a prompt's 4 completions are distinct" in found[0]
        assert "raise `beta` (now 0.0)" in found[0]


@pytest.mark.parametrize("trainer_cls", [ReinforceTrainer, RePULSeGRPOTrainer])
def test_a_kl_that_jumps_is_said_at_once(make, caplog, monkeypatch, trainer_cls):
    monkeypatch.setattr(logging.getLogger(logs.__name__), "propagate", True)
    extra = {"callbacks": [Sharpen(1)]}
    make(trainer_cls, learning_rate=0.0, beta=1e-3, max_steps=4, max_completion_length=4, extra=extra).train()
    (said,) = [record.message for record in caplog.records if "The KL jumps at the start" in record.message]
    assert "nats per completion at update 2, from 0.00 at update 1" in said and "`learning_rate` (now 0.0)" in said
