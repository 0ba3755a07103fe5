"""RePULSeGRPOTrainer: TRL's own updates where alpha is 0, else its loss and the negative term, written out on recorded completions."""

import math
import statistics

import pytest
import torch
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from examples.worlds.two_tokens import load_prompts, policy_path, reward_model_path
from trl_repulse import RePULSeGRPOTrainer

from ..conftest import same_parameters
from ..recorded import POLICY, PROMPTS, N, assert_gradients, recorded, rows_log_p
from .test_ppo_math import CASES, negative_term, settings_of


pytestmark = pytest.mark.trainer

HOT = {"proposal": "hot_policy", "potential": "tilted", "proposal_temperature": 2.0, "bad_reward_threshold": -1.0}


@pytest.fixture
def run(update):
    """One update on the recorded completions; the trainer, the models, and all gradients."""

    def run(*args, **kwargs):
        trainer, models, reference, grads = update(recorded(RePULSeGRPOTrainer), *args, use_cpu=True, **kwargs)
        return trainer, models["policy"], models.get("proposal"), reference, grads

    return run


def grpo_loss(policy, ref, tokenizer, reward, args):
    """GRPO's loss on the recorded completions, token by token; where all ratios are 1 clipping does nothing."""
    loss, tokens = 0.0, sum(len(c) for group in POLICY for c in group)
    everyone = [r for group in POLICY for r in reward([tokenizer.decode(c, skip_special_tokens=True) for c in group])]
    for g, (prompt, group) in enumerate(zip(PROMPTS, POLICY, strict=True)):
        rewards = everyone[g * N : (g + 1) * N]
        spread = rewards if args.scale_rewards == "group" else everyone
        mean = sum(spread) / len(spread)
        std = math.sqrt(sum((r - mean) ** 2 for r in spread) / (len(spread) - 1))
        scale = 1.0 if args.scale_rewards == "none" else std + 1e-4
        for completion, r in zip(group, rewards, strict=True):
            advantage = (r - sum(rewards) / N) / scale
            log_p = rows_log_p(policy, tokenizer, prompt, completion)
            log_ref = rows_log_p(ref, tokenizer, prompt, completion).detach()
            moved = log_p - log_p.detach()
            for t in range(len(completion)):
                ratio = (moved.mean() if args.importance_sampling_level == "sequence" else moved[t]).exp()
                gain = advantage * (log_p[t] if args.loss_type == "cispo" else ratio)
                gap = log_ref[t] - log_p[t]
                kl = (gap.exp() - gap - 1) * ratio  # `use_bias_correction_kl`
                share = {
                    "dapo": 1 / tokens,
                    "cispo": 1 / tokens,
                    "grpo": 1 / len(everyone) / len(completion),
                    "dr_grpo": 1 / len(everyone) / args.max_completion_length,
                }[args.loss_type]
                loss = loss + (args.beta * kl - gain) * share
    return loss


LOSSES = {
    "dapo": {},
    "grpo": {"loss_type": "grpo", "scale_rewards": "none", "beta": 0.0},
    "dr_grpo": {"loss_type": "dr_grpo", "scale_rewards": "batch"},
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0},
    "sequences": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
}
RUNS = [("gpt2", (8, 1), loss, case) for loss in LOSSES for case in ("hot", "own", "proposal")]
RUNS += [("llama", (2, 4), "dapo", case) for case in CASES if "completion" not in case]


def check(tokenizer, reward, trainer, policy, proposal, reference, grads, **changed):
    """Compares losses and gradients with those of the method, of which `changed` are other settings."""
    args = settings_of(trainer, **changed)
    loss = grpo_loss(policy, reference, tokenizer, reward, args)
    loss = loss + negative_term(policy, proposal, reference, tokenizer, reward, args, grads)
    assert_gradients(loss, policy, grads["policy"])
    assert trainer.state.log_history[0]["loss"] == pytest.approx(loss.item(), abs=2e-5)


@pytest.mark.thorough
@pytest.mark.parametrize(("architecture", "batches", "loss", "case"), RUNS)
def test_one_update_is_grpo_and_the_negative_term(run, tokenizer, reward, architecture, batches, loss, case):
    settings = {"beta": 0.3} | CASES[case] | LOSSES[loss]
    check(tokenizer, reward, *run(architecture, *batches, **settings))


@pytest.mark.parametrize("case", ["hot", "own", "proposal"])
def test_a_wrong_weight_would_be_noticed(run, tokenizer, reward, case):
    """Negative control: the reference with the sign of β turned round does not match."""
    found = run("gpt2", beta=0.3, **CASES[case])
    with pytest.raises(AssertionError):
        check(tokenizer, reward, *found, target_dist_beta=0.7)


UPDATES = {
    "one": {},
    "eight": {"per_device_train_batch_size": 4, "steps_per_generation": 4, "num_iterations": 2},
    "accumulated": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "loss_type": "grpo"},
    "sapo": {"loss_type": "sapo", "scale_rewards": "batch"},
}


@pytest.mark.thorough
@pytest.mark.parametrize("updates", UPDATES)
def test_alpha_0_is_trls_grpo_to_the_last_bit(make, model_dirs, prompts, reward, architecture, updates):
    """Prompts of several lengths, left-padded, over several epochs."""
    settings = {"max_steps": 4, "beta": 0.1, "num_generations": 4} | UPDATES[updates]
    ours = make(RePULSeGRPOTrainer, model=architecture, alpha=0.0, **settings)
    ours.train()
    args = {name: value for name, value in vars(ours.args).items() if name in settings or name in GRPO_SETTINGS}
    theirs = GRPOTrainer(
        model=model_dirs[architecture], reward_funcs=reward, args=GRPOConfig(**args), train_dataset=prompts
    )
    theirs.train()
    assert same_parameters(ours.model, theirs.model)
    other = make(RePULSeGRPOTrainer, model=architecture, **settings)
    other.train()
    assert not same_parameters(other.model, theirs.model)  # the control


GRPO_SETTINGS = {
    *("output_dir", "use_cpu", "bf16", "gradient_checkpointing", "report_to", "save_strategy", "logging_steps"),
    *("per_device_train_batch_size", "num_generations", "max_completion_length", "learning_rate", "lr_scheduler_type"),
    "disable_dropout",
}


@pytest.mark.thorough
def test_the_policy_loses_bad_outputs_that_it_hardly_draws(make, evaluator):
    """Against GRPO, at the same number of completions, by the hot policy; a proposal draws what is bad."""
    settings = {"max_steps": 40, "learning_rate": 3e-3, "proposal_learning_rate": 1e-2, "alpha_normalization": "none"}
    settings |= {"target_dist_beta": -1.0, "num_generations": 8, "per_device_train_batch_size": 32}

    def end(**own):
        trainer = make(RePULSeGRPOTrainer, **(settings | own))
        trainer.train()
        return trainer, evaluator.evaluate(trainer.model).log_prob_bad

    # A seed in ten or so begins slowly and is not ahead by then
    hot = statistics.median(end(**HOT, seed=seed)[1] for seed in range(3))
    _, alone = end(alpha=0.0, num_generations=16, per_device_train_batch_size=64)
    assert hot < alone - 0.5
    trainer, last = end()
    assert evaluator.evaluate(trainer.proposal.module).log_prob_bad > last + 1


@pytest.mark.thorough
@pytest.mark.parametrize("loss_type", ["dapo", "bnpo", "luspo", "vespo"])
@pytest.mark.parametrize("kind", [{}, HOT], ids=["proposal", "hot"])
def test_other_losses_train_and_are_evaluated(make, prompts, loss_type, kind):
    """The last batch of evaluation is filled up with rows that do not count."""
    trainer = make(
        RePULSeGRPOTrainer,
        extra={"eval_dataset": prompts.select(range(3))},
        per_device_eval_batch_size=8,
        loss_type=loss_type,
        log_completions=True,
        **kind,
    )
    trainer.train()
    metrics = trainer.evaluate()
    assert math.isfinite(metrics["eval_loss"]) and math.isfinite(trainer.state.log_history[0]["loss"])


@pytest.mark.parametrize(
    ("loss_type", "scale_rewards"),
    [
        ("dapo", "group"),
        ("dr_grpo", "batch"),
        *(pytest.param("grpo", scale, marks=pytest.mark.thorough) for scale in ("group", "batch", "none")),
        *(
            pytest.param(loss, "group", marks=pytest.mark.thorough)
            for loss in ("bnpo", "cispo", "sapo", "vespo", "luspo")
        ),
    ],
)
def test_by_default_the_push_is_no_stronger_than_the_policys_own_term(make, loss_type, scale_rewards):
    """The gradients' norms at the first update, in which all runs draw the same; some of the hot samples are bad."""
    gradients = {}

    class Kept(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
            gradients[alpha] = torch.cat([p.grad.flatten() for p in model.parameters()])

    level = "sequence" if loss_type == "luspo" else "token"
    for alpha in (1e-12, None, 1.0):
        make(
            RePULSeGRPOTrainer,
            model=policy_path(),
            reward_funcs=reward_model_path(),
            dataset=load_prompts(),
            extra={"callbacks": [Kept()]},
            proposal="hot_policy",
            potential="indicator",
            target_dist_beta=None,
            alpha=alpha,
            alpha_normalization=None,
            bad_reward_threshold=-1.0,
            proposal_temperature=4.0,
            loss_type=loss_type,
            scale_rewards=scale_rewards,
            importance_sampling_level=level,
            per_device_train_batch_size=32,
            num_generations=8,
            max_completion_length=12,
            max_steps=1,
            max_grad_norm=0.0,
        ).train()
    own = gradients[1e-12]
    policy, push, strong = own.norm(), (gradients[None] - own).norm(), (gradients[1.0] - own).norm()
    assert 0.05 * policy < push < 0.5 * policy
    if loss_type != "luspo":  # whose own term is a sum over tokens
        assert strong > 2 * policy  # the control: the default was 1
