"""RePULSePPOTrainer as a user meets it: what learns, logs, files, what is refused."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from trl_repulse import RePULSeGRPOTrainer, RePULSePPOTrainer


pytestmark = [pytest.mark.trainer, pytest.mark.thorough]

TERM = {"alpha_normalization": "none", "target_dist_beta": -1.0, "alpha": 1.0}
HOT = {"proposal": "hot_policy", "proposal_temperature": 2.0, "bad_reward_threshold": -1.0}
KINDS = {"proposal": {}, "hot": HOT, "own": {"proposal": "policy"}}


@pytest.fixture
def run(make):
    def run(**kwargs):
        trainer = make(RePULSePPOTrainer, **(TERM | kwargs))
        trainer.train()
        return trainer

    return run


def test_the_proposal_learns_the_bad_outputs(run, evaluator):
    settings = {"max_steps": 40, "learning_rate": 3e-3, "proposal_learning_rate": 1e-2, "num_generations": 8}
    trainer = run(**settings, per_device_train_batch_size=32)
    policy, proposal = (evaluator.evaluate(model).log_prob_bad for model in (trainer.model, trainer.proposal.module))
    assert proposal > policy + 1
    log = trainer.state.log_history[0]
    names = ("proposal/ess", "proposal/log_z", "proposal/loss", "proposal/grad_norm", "proposal/reward", "value/loss")
    assert all(log[name] is not None for name in names)


def test_arguments_of_a_users_subclass(make, model_dirs, reward, prompts):
    """Its own `peft_config` stands before ours, and hides nothing of what is refused."""

    class Mine(RePULSeGRPOTrainer):
        def __init__(self, *args, peft_config=None, **options):
            super().__init__(*args, peft_config=peft_config, **options)

    class Fixed(RePULSeGRPOTrainer):
        def __init__(self, args, peft_config=None):
            super().__init__(model_dirs["gpt2"], reward, args, prompts, peft_config=peft_config)

    with pytest.raises(ValueError, match="drawn by your `rollout_func`"):
        make(Mine, extra={"rollout_func": lambda prompts, trainer: {}})
    assert Fixed(make(RePULSeGRPOTrainer).args)._negative is not None


def test_value_model_and_proposal_share_no_weights(make, model_dirs):
    proposal = AutoModelForCausalLM.from_pretrained(model_dirs["llama"])
    value = AutoModelForTokenClassification.from_pretrained(model_dirs["llama"], num_labels=1)
    value.model = proposal.model
    with pytest.raises(ValueError, match="`value_model`.*`proposal_model`"):
        make(RePULSePPOTrainer, model="llama", extra={"value_model": value, "proposal_model": proposal})


def test_the_policy_is_held_while_the_value_model_warms_up(make):
    trainer = make(RePULSePPOTrainer, value_warmup_steps=2)
    start = [p.detach().clone() for p in trainer.model.parameters()]
    proposal = [p.detach().clone() for p in trainer.proposal.module.parameters()]
    trainer.train()
    assert all(torch.equal(p, q) for p, q in zip(start, trainer.model.parameters(), strict=True))
    assert not all(torch.equal(p, q) for p, q in zip(proposal, trainer.proposal.module.parameters(), strict=True))


@pytest.mark.parametrize("name", ["tools", "rollout_func", "environment_factory"])
def test_what_writes_into_completions_is_refused(make, name):
    given = [len] if name == "tools" else len
    with pytest.raises(ValueError, match=f"`{name}` does not go with a negative term.*set `alpha=0`"):
        make(RePULSePPOTrainer, model="not a model", extra={name: given})
