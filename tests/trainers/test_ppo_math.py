"""Losses and gradients of PPO, and of RePULSe on it, against sums written out, on recorded completions.

Reference values come from plain forward passes, one unpadded row at a time, and loops over rows and tokens.
"""

import math
from types import SimpleNamespace

import pytest
import torch

from trl_repulse import PPOTrainer, RePULSePPOTrainer

from ..conftest import same_parameters
from ..recorded import POLICY, PROMPTS, PROPOSAL, N, assert_gradients, gradients, prepare, pushed, recorded, rows_log_p
from .test_trainer_math import reference_loss


pytestmark = pytest.mark.trainer


RecordedPPO = recorded(PPOTrainer)


def rows_values(value, tokenizer, prompt, completion):
    """V(s_t) before each token of one completion, from one unpadded forward."""
    prompt_ids = tokenizer(prompt)["input_ids"]
    values = value(input_ids=torch.tensor([prompt_ids + completion], device=value.device)).logits[0, :, 0]
    return values[len(prompt_ids) - 1 : -1]


def credit(policy, value, ref, tokenizer, reward, args):
    """Per row: prompt, completion, values at sampling time, advantages and returns, by Algorithm and loops."""
    rows = []
    for prompt, completions in zip(PROMPTS, POLICY, strict=True):
        rewards = reward([tokenizer.decode(c, skip_special_tokens=True) for c in completions])
        for completion, r in zip(completions, rewards, strict=True):
            with torch.no_grad():
                log_p = rows_log_p(policy, tokenizer, prompt, completion)
                log_ref = rows_log_p(ref, tokenizer, prompt, completion)
                v = rows_values(value, tokenizer, prompt, completion).tolist() + [0.0]
            token_rewards = [-args.beta * kl for kl in (log_p - log_ref).tolist()]
            token_rewards[-1] += r
            advantages, running = [0.0] * len(completion), 0.0
            for t in reversed(range(len(completion))):
                running = token_rewards[t] + args.gamma * v[t + 1] - v[t] + args.gamma * args.gae_lambda * running
                advantages[t] = running
            returns = [a + b for a, b in zip(advantages, v, strict=False)]
            rows.append((prompt, completion, v[:-1], advantages, returns))
    if args.whiten_advantages:
        everything = [a for row in rows for a in row[3]]
        mean = sum(everything) / len(everything)
        scale = math.sqrt(sum((a - mean) ** 2 for a in everything) / len(everything) + 1e-8)
        rows = [(p, c, v, [(a - mean) / scale for a in advantages], ret) for p, c, v, advantages, ret in rows]
    return rows


def reference_losses(policy, value, rows, tokenizer, args, old_log_ps=None, old_values=None):
    """(policy loss, value loss): the clipped surrogate and the clipped squared error, token by token."""
    policy_loss, error = 0.0, 0.0
    tokens = sum(len(completion) for _, completion, *_ in rows)
    for i, (prompt, completion, v_old, advantages, returns) in enumerate(rows):
        log_p = rows_log_p(policy, tokenizer, prompt, completion)
        v_now = rows_values(value, tokenizer, prompt, completion)
        old = log_p.detach() if old_log_ps is None else old_log_ps[i]
        v_old = v_old if old_values is None else old_values[i]
        for t in range(len(completion)):
            ratio, a = (log_p[t] - old[t]).exp(), advantages[t]
            clipped = ratio.clamp(1 - args.epsilon, 1 + (args.epsilon_high or args.epsilon))
            share = {
                "dapo": 1 / tokens,
                "grpo": 1 / len(rows) / len(completion),
                "dr_grpo": 1 / len(rows) / args.max_completion_length,
            }[args.loss_type]
            policy_loss = policy_loss - torch.minimum(ratio * a, clipped * a) * share
            errors = [(v_now[t] - returns[t]) ** 2]
            if args.value_clip is not None:
                near = v_old[t] + (v_now[t] - v_old[t]).clamp(-args.value_clip, args.value_clip)
                errors.append((near - returns[t]) ** 2)
            error = error + 0.5 * torch.stack(errors).max() / tokens
    return policy_loss, error


@pytest.fixture
def build(tmp_path, tokenizer):
    def build(*args, **kwargs):
        trainer, models, reference = prepare(tmp_path, tokenizer, RecordedPPO, *args, **kwargs)
        return trainer, models["policy"], models["value"], reference

    return build


SETTINGS = {"beta": 0.3, "gamma": 0.9, "gae_lambda": 0.8}
PPO_CASES = {
    "plain": {"whiten_advantages": False},
    "whitened": {},
    "completion mean": {"loss_type": "grpo", "whiten_advantages": False},
    "constant denominator": {"loss_type": "dr_grpo", "whiten_advantages": False},
    "no KL": {"beta": 0.0, "gamma": 1.0, "gae_lambda": 0.95},
}
PPO_RUNS = [("gpt2", batches, case) for batches in [(8, 1), (1, 8)] for case in PPO_CASES]
PPO_RUNS += [("llama", (4, 2), case) for case in ("plain", "whitened")]


@pytest.mark.thorough
@pytest.mark.parametrize(("architecture", "batches", "case"), PPO_RUNS)
def test_one_update_is_ppo(build, tokenizer, reward, architecture, case, batches):
    """However the batch is split into micro-batches."""
    trainer, policy, value, reference = build(architecture, *batches, **(SETTINGS | PPO_CASES[case]))
    rows = credit(policy, value, reference, tokenizer, reward, trainer.args)
    policy_loss, error = reference_losses(policy, value, rows, tokenizer, trainer.args)
    expected = (policy_loss.item(), error.item())
    expected_grads = [
        torch.autograd.grad(loss, list(module.parameters()), allow_unused=True)
        for loss, module in ((policy_loss, policy), (error, value))
    ]
    grads = gradients(trainer, {"policy": policy, "value": value})
    for name, ours in zip(("policy", "value"), expected_grads, strict=True):
        for e, actual in zip(ours, grads[name], strict=True):
            e = torch.zeros_like(actual) if e is None else e.to(actual.device)
            torch.testing.assert_close(actual, e, atol=2e-6, rtol=2e-4)
    log = trainer.state.log_history[0]
    assert log["loss"] == pytest.approx(expected[0], abs=2e-5)
    assert log["value/loss"] == pytest.approx(expected[1], rel=1e-4)
    assert log["approx_kl"] == log["value/clip_fraction"] == 0


def test_a_shifted_value_would_be_noticed(build, tokenizer, reward):
    """Negative control: with the value after the token instead of before it, nothing fits."""
    trainer, policy, value, reference = build(**SETTINGS)
    grads = gradients(trainer, {"policy": policy, "value": value})
    rows = credit(policy, value, reference, tokenizer, reward, trainer.args)
    rows = [(p, c, v, a[1:] + a[:1], r[1:] + r[:1]) for p, c, v, a, r in rows]
    policy_loss, error = reference_losses(policy, value, rows, tokenizer, trainer.args)
    with pytest.raises(AssertionError):
        assert_gradients(policy_loss, policy, grads["policy"])
    with pytest.raises(AssertionError):
        assert_gradients(error, value, grads["value"])


@pytest.mark.parametrize("value_clip", [0.2, None])
def test_both_losses_clip_once_the_models_have_moved(build, tokenizer, reward, value_clip):
    trainer, policy, value, reference = build(**SETTINGS, epsilon_high=0.3, value_clip=value_clip)
    args = trainer.args
    rows = credit(policy, value, reference, tokenizer, reward, args)
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    inputs = trainer._generate_and_score_completions([row for row in trainer.train_dataset for _ in range(N)])

    generator = torch.Generator().manual_seed(0)
    shape = inputs["advantages"].shape
    shifts = [0.5 * torch.randn(shape, generator=generator).to(policy.device) for _ in range(2)]
    with torch.no_grad():
        log_ps = [rows_log_p(policy, tokenizer, prompt, completion) for prompt, completion, *_ in rows]
    inputs["old_per_token_logps"] = torch.zeros(shape, device=policy.device)
    inputs["old_values"] = inputs["old_values"] + shifts[1]
    old_log_ps, old_values = [], []
    for i, (_, completion, v_old, *_) in enumerate(rows):
        old_log_ps.append(log_ps[i] + shifts[0][i, : len(completion)])
        inputs["old_per_token_logps"][i, : len(completion)] = old_log_ps[-1]
        old_values.append([v + s.item() for v, s in zip(v_old, shifts[1][i], strict=False)])

    policy_loss, error = reference_losses(policy, value, rows, tokenizer, args, old_log_ps, old_values)
    loss = trainer._compute_loss(policy, inputs)
    assert loss.item() == pytest.approx(policy_loss.item(), abs=1e-5)
    actual = torch.autograd.grad(loss, list(policy.parameters()), allow_unused=True)
    assert_gradients(policy_loss, policy, [torch.zeros(()) if g is None else g for g in actual])
    assert_gradients(error, value, [torch.zeros_like(p) if p.grad is None else p.grad for p in value.parameters()])
    metrics = trainer._metrics["train"]
    assert metrics["value/loss"][-1] == pytest.approx(error.item(), rel=1e-4)
    assert (metrics["value/clip_fraction"][-1] > 0.1) == (value_clip is not None)
    assert metrics["clip_ratio/region_mean"][-1] > 0.1 and metrics["approx_kl"][-1] > 0.05
    # Without clipping the surrogate would be another
    args.epsilon = args.epsilon_high = 1e6
    unclipped, _ = reference_losses(policy, value, rows, tokenizer, args, old_log_ps, old_values)
    assert loss.item() != pytest.approx(unclipped.item(), abs=1e-3)


def test_a_token_that_a_tool_wrote_is_stepped_over(build, tokenizer, reward):
    """Its advantage, return and loss are 0, and the reward goes to the last token that the policy wrote."""
    trainer, policy, value, _ = build(beta=0.0, gae_lambda=1.0, whiten_advantages=False)
    trainer.model.train()
    generate = trainer._generate
    prompts = ["the cat"] * 4
    masks = [[1, 0, 1], [1, 0], [1], [0, 1, 0]]

    def with_tools(prompts):
        ids, completions, _, *rest = generate(prompts)
        return ids, completions, masks, *rest

    trainer._generate = with_tools
    batch = trainer._generate_and_score_completions([{"prompt": prompt} for prompt in prompts])
    rewards = reward([tokenizer.decode(c, skip_special_tokens=True) for c in POLICY[0]])
    for i, mask in enumerate(masks):
        for t, counts in enumerate(mask):
            expected = rewards[i] if counts else 0.0
            assert batch["returns"][i, t].item() == pytest.approx(expected, abs=1e-5)
            assert (batch["advantages"][i, t] == 0) == (not counts)
    assert batch["num_items_in_batch"] == 5


# RePULSe on PPO


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
    plain = {"baseline": "none", "normalize_advantages": False}
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
