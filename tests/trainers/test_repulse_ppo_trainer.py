"""RePULSePPOTrainer as a user meets it: what learns, logs, files, what is refused."""

import statistics

import pytest
import torch
from huggingface_hub import ModelCard
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from trl_repulse import RePULSeGRPOTrainer, RePULSePPOTrainer

from ..conftest import same_parameters


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


@pytest.mark.parametrize(
    ("ppo", "hot"),
    [
        ({"num_generations": 16, "per_device_train_batch_size": 64}, {"num_generations": 8}),
        ({"num_generations": 1, "per_device_train_batch_size": 4}, {"num_proposal_generations": 15}),
    ],
    ids=["as many completions", "one of the policy's own"],
)
def test_the_policy_loses_bad_outputs_that_it_hardly_draws(run, evaluator, ppo, hot):
    """Against PPO."""
    settings = {"max_steps": 40, "learning_rate": 3e-3, "value_learning_rate": 1e-2, **ppo}
    plain = evaluator.evaluate(run(**settings, alpha=0.0).model).log_prob_bad
    settings |= {"per_device_train_batch_size": min(32, ppo["per_device_train_batch_size"])} | HOT | hot
    # A seed in ten or so begins slowly and is not ahead by then
    ends = [evaluator.evaluate(run(**settings, seed=seed).model).log_prob_bad for seed in range(3)]
    assert statistics.median(ends) < plain - 0.5


def test_the_proposal_learns_the_bad_outputs(run, evaluator):
    settings = {"max_steps": 40, "learning_rate": 3e-3, "proposal_learning_rate": 1e-2, "num_generations": 8}
    trainer = run(**settings, per_device_train_batch_size=32)
    policy, proposal = (evaluator.evaluate(model).log_prob_bad for model in (trainer.model, trainer.proposal.module))
    assert proposal > policy + 1
    log = trainer.state.log_history[0]
    names = ("proposal/ess", "proposal/log_z", "proposal/loss", "proposal/grad_norm", "proposal/reward", "value/loss")
    assert all(log[name] is not None for name in names)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("share", [True, False])
def test_evaluation_with_rows_that_fill_up_a_batch(make, prompts, kind, share):
    trainer = make(
        RePULSePPOTrainer,
        model="llama",
        extra={"eval_dataset": prompts.select(range(3))},
        share_prompts=share,
        log_completions=True,
        per_device_eval_batch_size=8,
        **KINDS[kind],
    )
    trainer.train()
    assert torch.isfinite(torch.tensor(trainer.evaluate()["eval_loss"]))


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


@pytest.mark.parametrize("trainer_cls", [RePULSePPOTrainer, RePULSeGRPOTrainer])
def test_files(make, tmp_path, trainer_cls):
    trainer = make(trainer_cls, save_strategy="steps", save_steps=1, max_steps=1)
    trainer.train()
    trainer.save_model()
    for folder in (tmp_path / "out", tmp_path / "out" / "checkpoint-1"):
        assert same_parameters(AutoModelForCausalLM.from_pretrained(folder), trainer.model)
        for name, second in trainer.second_models.items():
            auto_class = AutoModelForTokenClassification if name == "value" else AutoModelForCausalLM
            assert same_parameters(auto_class.from_pretrained(folder / name), second.module)
        assert "Do not deploy" in ModelCard.load(folder / "proposal" / "README.md").text
        assert not (folder / "value" / "README.md").exists()


def test_a_base_that_is_the_reference(make):
    """A policy trained whole beside a proposal that is an adapter over its initial weights: no third copy of them."""
    config = LoraConfig(task_type="CAUSAL_LM", target_modules=["c_attn"])
    trainer = make(RePULSePPOTrainer, extra={"proposal_peft_config": config}, beta=0.1)
    trainer.train()
    kl = [log["kl"] for log in trainer.state.log_history if "kl" in log]
    assert kl[0] == pytest.approx(0, abs=1e-6) and abs(kl[1]) > 1e-6


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
