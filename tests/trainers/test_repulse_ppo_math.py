"""RePULSePPOTrainer's losses and gradients against sums written out, on recorded completions, and PPO's own where alpha is 0.

Reference values come from plain forward passes, one unpadded row at a time, and loops over rows and tokens.
"""

from types import SimpleNamespace

import pytest

from trl_repulse import PPOTrainer, RePULSePPOTrainer

from ..conftest import same_parameters
from ..recorded import PROPOSAL, N, assert_gradients, gradients, prepare, pushed, recorded
from .test_ppo_math import SETTINGS, credit, reference_losses
from .test_trainer_math import reference_loss


pytestmark = pytest.mark.trainer


Recorded = recorded(RePULSePPOTrainer)


@pytest.fixture
def run(tmp_path, tokenizer, reward):
    """One update on the recorded completions; the trainer, the models, and all gradients."""

    def run(*args, **kwargs):
        trainer, models, reference = prepare(tmp_path, tokenizer, Recorded, *args, use_cpu=True, **kwargs)
        rows = credit(models["policy"], models["value"], reference, tokenizer, reward, trainer.args)
        return trainer, models, reference, rows, gradients(trainer, models)

    return run


TERM = {"proposal": "learned", "alpha": 2.0, "target_dist_beta": -0.7}
HOT = TERM | {
    "proposal": "hot_policy",
    "potential": "tilted",
    "proposal_temperature": 1.7,
    "bad_reward_threshold": 0.1,
}
OWN = TERM | {"proposal": "policy"}
CASES = {
    "hot": HOT,
    "hot, Eq. 4": HOT | {"alpha_normalization": "none", "logprob_reduction": "sum"},
    "hot, more": HOT | {"num_proposal_generations": 2 * N},
    "hot, completion mean": HOT | {"loss_type": "grpo", "whiten_advantages": False},
    "own": OWN,
    "proposal": TERM,
    "proposal, Eq. 4": TERM | {"alpha_normalization": "none", "logprob_reduction": "sum"},
}
RUNS = [("gpt2", batches, case) for case in CASES for batches in [(8, 1), (1, 8)]]
RUNS += [("llama", (4, 2), case) for case in ("hot", "own", "proposal")]


def settings_of(trainer, **changed):
    """A trainer's settings for the formulas, of which `changed` are other ones."""
    plain = {"baseline": "none", "normalize_advantages": False, "cvar_level": None}
    return SimpleNamespace(**(vars(trainer.args) | plain | changed))


def negative_term(policy, proposal, reference, tokenizer, reward, args, grads):
    """The negative term, written out; compares the gradients of a proposal, if there is one."""
    if proposal is None:
        draws = (args.num_proposal_generations or N) // N if args.proposal_temperature != 1.0 else 0
        return pushed(policy, tokenizer, reward, args, [others * draws for others in PROPOSAL])
    both, proposal_loss = reference_loss(policy, proposal, reference, tokenizer, reward, args)
    assert_gradients(proposal_loss, proposal, grads["proposal"])
    alone = SimpleNamespace(**(vars(args) | {"alpha": 0.0}))
    return both - reference_loss(policy, None, reference, tokenizer, reward, alone)[0]


def check(tokenizer, reward, trainer, models, reference, rows, grads, **changed):
    """Compares losses and gradients with those of the method, of which `changed` are other settings."""
    args, policy = settings_of(trainer, **changed), models["policy"]
    loss, error = reference_losses(policy, models["value"], rows, tokenizer, args)
    loss = loss + negative_term(policy, models.get("proposal"), reference, tokenizer, reward, args, grads)
    assert_gradients(error, models["value"], grads["value"])
    assert_gradients(loss, policy, grads["policy"])
    assert trainer.state.log_history[0]["loss"] == pytest.approx(loss.item(), abs=2e-5)


@pytest.mark.thorough
@pytest.mark.parametrize(("architecture", "batches", "case"), RUNS)
def test_one_update_is_ppo_and_the_negative_term(run, tokenizer, reward, architecture, batches, case):
    """However the batch is split into micro-batches."""
    found = run(architecture, *batches, **SETTINGS, **CASES[case])
    check(tokenizer, reward, *found)


@pytest.mark.parametrize("case", ["hot", "own", "proposal"])
def test_a_wrong_weight_would_be_noticed(run, tokenizer, reward, case):
    """Negative control: the reference with the sign of β turned round does not match."""
    found = run("gpt2", **SETTINGS, **CASES[case])
    with pytest.raises(AssertionError):
        check(tokenizer, reward, *found, target_dist_beta=0.7)


@pytest.mark.parametrize("case", ["hot", "own", "proposal"])
def test_reused_generations_start_from_the_same_gradient(run, tokenizer, reward, case):
    """Where a batch serves two updates the negative term is clipped; at the first the ratio is 1."""
    trainer, models, reference, rows, grads = run("gpt2", num_iterations=2, **SETTINGS, **CASES[case])
    assert not trainer._on_policy
    with pytest.raises(KeyError):  # the loss's value is another, gradients are not
        trainer.state.log_history[0].pop("loss")
        check(tokenizer, reward, trainer, models, reference, rows, grads)


UPDATES = {
    "one": {},
    "four": {"per_device_train_batch_size": 4, "steps_per_generation": 4, "num_iterations": 2},
    "accumulated": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "loss_type": "grpo"},
}


@pytest.mark.thorough
@pytest.mark.parametrize("updates", UPDATES)
def test_alpha_0_is_ppo_to_the_last_bit(make, updates):
    settings = {"max_steps": 4, "beta": 0.1, "num_generations": 4} | UPDATES[updates]
    trainers = []
    for trainer_cls, own in ((RePULSePPOTrainer, {"alpha": 0.0}), (PPOTrainer, {}), (RePULSePPOTrainer, {})):
        trainers.append(make(trainer_cls, **settings, **own))
        trainers[-1].train()
    ours, theirs, other = trainers
    assert ours.proposal is None
    assert same_parameters(ours.model, theirs.model) and same_parameters(ours.value.module, theirs.value.module)
    assert not same_parameters(other.model, theirs.model)  # the control
    logs = [
        [{key: log[key] for key in log if "time" not in key} for log in trainer.state.log_history[:4]]
        for trainer in (ours, theirs)
    ]
    assert str(logs[0]) == str(logs[1])
