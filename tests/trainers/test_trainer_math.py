"""The trainers' losses and gradients against the formulas, on recorded completions.

Reference values are computed here from plain forward passes, one unpadded row at a time, and written out with explicit
sums, so that nothing of the library's losses, weights, padding or batching takes part in them.
"""

import math

import pytest
import torch

from trl_repulse import ReinforceTrainer, RePULSeTrainer

from ..mathematics.test_returns import by_hand
from ..recorded import POLICY, PROMPTS, PROPOSAL, N, assert_gradients, recorded, rows_log_p


pytestmark = pytest.mark.trainer


def reference_loss(policy, proposal, ref, tokenizer, reward, args):
    """(policy loss, proposal loss) of Algorithm 1 on the recorded completions, written out."""
    policy_loss, proposal_loss = 0.0, 0.0
    rows = len(PROMPTS) * N
    all_log_ps, all_kls, all_rewards = [], [], []
    for prompt, ours in zip(PROMPTS, POLICY, strict=True):
        texts = [tokenizer.decode(c, skip_special_tokens=True) for c in ours]
        log_ps = [rows_log_p(policy, tokenizer, prompt, c) for c in ours]
        kls = [(lp.detach() - rows_log_p(ref, tokenizer, prompt, c)).sum() for lp, c in zip(log_ps, ours, strict=True)]
        all_log_ps.append(log_ps)
        all_kls.append(kls)
        all_rewards.append(reward(texts))
    returns = [
        [math.nan if r is None else r - args.beta * kl.item() for r, kl in zip(*pairs, strict=True)]
        for pairs in zip(all_rewards, all_kls, strict=True)
    ]
    advantages = by_hand(returns, args.baseline, args.normalize_advantages)
    for prompt, theirs, log_ps, group in zip(PROMPTS, PROPOSAL, all_log_ps, advantages.tolist(), strict=True):
        for log_p, advantage in zip(log_ps, group, strict=True):
            length = log_p.mean() if args.logprob_reduction == "mean" else log_p.sum()
            policy_loss = policy_loss - advantage * length / rows
        if args.alpha == 0:
            continue

        texts = [tokenizer.decode(c, skip_special_tokens=True) for c in theirs]
        log_ps = [rows_log_p(policy, tokenizer, prompt, c) for c in theirs]
        log_qs = [rows_log_p(proposal, tokenizer, prompt, c) for c in theirs]
        rewards = reward(texts)  # `None` for a sample that takes part in nothing
        unnormalised = [
            0.0 if r is None else math.exp(lp.sum().item() + args.target_dist_beta * r - lq.sum().item())
            for lp, lq, r in zip(log_ps, log_qs, rewards, strict=True)
        ]
        w = [u / (sum(unnormalised) or 1.0) for u in unnormalised]
        for i in range(N):
            length = log_ps[i].mean() if args.logprob_reduction == "mean" else log_ps[i].sum()
            alpha = args.alpha / N if args.alpha_normalization == "samples" else args.alpha
            policy_loss = policy_loss + alpha * w[i] * length / len(PROMPTS)
            for t in range(len(theirs[i])):
                # Σ_{u≤t} log p + log ψ_t − Σ_{u≤t} log q; a shorter completion contributes its whole prefix, ψ = 1
                scores = []
                for lp, lq, r in zip(log_ps, log_qs, rewards, strict=True):
                    if r is None:
                        scores.append(0.0)
                        continue
                    psi = (lq[t] - lp[t]).item() if t < len(lp) else 0.0
                    scores.append(math.exp(lp[: t + 1].sum().item() + psi - lq[: t + 1].sum().item()))
                w_minus = scores[i] / (sum(scores) or 1.0)
                twist = log_qs[i][t] - log_ps[i][t].detach()
                proposal_loss = proposal_loss - (w[i] - w_minus) * twist / len(theirs[i]) / rows
    return policy_loss, proposal_loss


RecordedReinforce, RecordedRePULSe = recorded(ReinforceTrainer), recorded(RePULSeTrainer)


@pytest.fixture
def run(update):
    """One update on the recorded completions; the trainer, the models, all gradients, and the configuration."""

    def run(*args, trainer_cls=RecordedRePULSe, **kwargs):
        if trainer_cls is RecordedRePULSe:
            kwargs = {"proposal": "learned"} | kwargs
        trainer, models, reference, grads = update(trainer_cls, *args, **kwargs)
        return trainer, models["policy"], models.get("proposal"), reference, grads, trainer.args

    return run


CASES = {
    "published": {},
    "eq4": {"alpha_normalization": "none", "logprob_reduction": "sum"},
    "no KL": {"beta": 0.0},
    "REINFORCE++": {"baseline": "none", "normalize_advantages": True},
    "REINFORCE++-baseline": {"baseline": "group_mean", "normalize_advantages": True},
    "group mean": {"baseline": "group_mean"},
}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("architecture", "case"), [*(("gpt2", case) for case in CASES), ("llama", "published"), ("llama", "eq4")]
)
@pytest.mark.parametrize("batches", [(8, 1), (4, 2), (2, 4), (1, 8)], ids=lambda b: f"{b[0]}x{b[1]}")
def test_one_update_is_algorithm_1(run, tokenizer, reward, architecture, case, batches):
    """Whole prompts in one micro-batch (weights from the pass with gradient) and cut ones (at sampling time) agree."""
    settings = {"alpha": 2.0, "target_dist_beta": -0.7, "beta": 0.3, **CASES[case]}
    trainer, policy, proposal, reference, grads, args = run(architecture, *batches, **settings)
    policy_loss, proposal_loss = reference_loss(policy, proposal, reference, tokenizer, reward, args)
    assert_gradients(policy_loss, policy, grads["policy"])
    assert_gradients(proposal_loss, proposal, grads["proposal"])
    assert trainer.state.log_history[0]["loss"] == pytest.approx(policy_loss.item(), abs=2e-5)
    assert trainer.state.log_history[0]["proposal/loss"] == pytest.approx(proposal_loss.item(), abs=2e-5)


def test_a_wrong_weight_would_be_noticed(run, tokenizer, reward):
    """Negative control: the reference with the sign of β turned round does not match."""
    settings = {"alpha": 2.0, "target_dist_beta": -0.7, "beta": 0.3}
    _, policy, proposal, reference, grads, args = run("gpt2", **settings)
    args.target_dist_beta = 0.7
    policy_loss, proposal_loss = reference_loss(policy, proposal, reference, tokenizer, reward, args)
    with pytest.raises(AssertionError):
        assert_gradients(policy_loss, policy, grads["policy"])
    with pytest.raises(AssertionError):
        assert_gradients(proposal_loss, proposal, grads["proposal"])


@pytest.mark.parametrize(
    "batches", [pytest.param((8, 1), marks=pytest.mark.thorough), (2, 4)], ids=lambda b: f"{b[0]}x{b[1]}"
)
@pytest.mark.parametrize(
    "without", [pytest.param([], marks=pytest.mark.thorough), [" bad dog"]], ids=["all", "without a reward"]
)
def test_vargrad_is_the_variance_of_each_prompt(run, tokenizer, reward, batches, without):
    settings = {"proposal_loss": "vargrad", "target_dist_beta": -0.7}
    partial = leaving_out(reward, without)
    trainer, policy, proposal, _, grads, args = run("gpt2", *batches, reward_funcs=partial, **settings)
    loss, value = 0.0, 0.0
    for prompt, completions in zip(PROMPTS, PROPOSAL, strict=True):
        ratios = []
        for completion in completions:
            (r,) = partial([tokenizer.decode(completion, skip_special_tokens=True)])
            if r is not None:
                log_p, log_q = (rows_log_p(model, tokenizer, prompt, completion) for model in (policy, proposal))
                ratios.append(log_q.sum() - log_p.sum().detach() - args.target_dist_beta * r)
        n, half_variance = len(ratios), torch.stack(ratios).var() / 2
        loss += n * half_variance / (len(PROMPTS) * N)
        value += n * n / (n - 1) * half_variance.item() / (len(PROMPTS) * N)
    assert_gradients(loss, proposal, grads["proposal"])
    assert trainer.state.log_history[0]["proposal/loss"] == pytest.approx(value, rel=1e-4)


METHODS = {
    "published": {},
    "REINFORCE++": {"baseline": "none", "normalize_advantages": True},
    "REINFORCE++-baseline": {"baseline": "group_mean", "normalize_advantages": True},
}


@pytest.mark.thorough
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("batches", [(8, 1), (4, 2), (1, 8)], ids=lambda b: f"{b[0]}x{b[1]}")
def test_reinforce_is_the_first_term_alone(run, tokenizer, reward, batches, method):
    for trainer_cls, settings in ((RecordedReinforce, {}), (RecordedRePULSe, {"alpha": 0.0})):
        settings = {"beta": 0.3, **METHODS[method], **settings}
        _, policy, _, reference, grads, args = run("gpt2", *batches, trainer_cls=trainer_cls, **settings)
        args.alpha = 0.0
        policy_loss, _ = reference_loss(policy, None, reference, tokenizer, reward, args)
        assert_gradients(policy_loss, policy, grads["policy"])


@pytest.mark.parametrize("wrong", [{"normalize_advantages": False}, {"baseline": "none"}], ids=["plain", "baseline"])
def test_a_wrong_normalisation_would_be_noticed(run, tokenizer, reward, wrong):
    settings = {"beta": 0.3, **METHODS["REINFORCE++-baseline"]}
    _, policy, _, reference, grads, args = run("gpt2", trainer_cls=RecordedReinforce, **settings)
    args.alpha = 0.0
    for name, value in wrong.items():
        setattr(args, name, value)
    policy_loss, _ = reference_loss(policy, None, reference, tokenizer, reward, args)
    with pytest.raises(AssertionError):
        assert_gradients(policy_loss, policy, grads["policy"])


@pytest.mark.parametrize("iterations", [1, 2])
def test_reused_generations_start_from_the_same_gradient(run, tokenizer, reward, iterations):
    """Off-policy (generations serve several updates): at the first update the ratio is 1 and the gradient that of on-policy."""
    settings = {"alpha": 2.0, "target_dist_beta": -0.7, "beta": 0.3, "num_iterations": iterations}
    trainer, policy, proposal, reference, grads, args = run("gpt2", **settings)
    assert trainer._on_policy == (iterations == 1)
    policy_loss, proposal_loss = reference_loss(policy, proposal, reference, tokenizer, reward, args)
    assert_gradients(policy_loss, policy, grads["policy"])
    assert_gradients(proposal_loss, proposal, grads["proposal"])


# Completions of the first prompt: the policy's first and the proposal's first; all of the proposal's
LEFT_OUT = {
    "one of each": [" cat dog sat", " bad dog"],
    "a prompt's": [" bad dog", " bad fish", " dog sat ran", " bad bad"],
}


def leaving_out(reward, texts):
    def partial(completions, **kwargs):
        values = reward(completions)
        return [None if c in texts else r for c, r in zip(completions, values, strict=True)]

    return partial


@pytest.mark.thorough
@pytest.mark.parametrize("which", LEFT_OUT)
@pytest.mark.parametrize("batches", [(8, 1), (4, 2), (1, 8)], ids=lambda b: f"{b[0]}x{b[1]}")
@pytest.mark.parametrize("case", ["published", "eq4", "REINFORCE++-baseline"])
def test_a_sample_without_a_reward_is_as_if_not_drawn(run, tokenizer, reward, which, batches, case):
    """Its weight is 0, and all others' are those computed without it; P·N stays the denominator."""
    partial = leaving_out(reward, LEFT_OUT[which])
    settings = {"alpha": 2.0, "target_dist_beta": -0.7, "beta": 0.3, **CASES[case]}
    trainer, policy, proposal, reference, grads, args = run("gpt2", *batches, reward_funcs=partial, **settings)
    policy_loss, proposal_loss = reference_loss(policy, proposal, reference, tokenizer, partial, args)
    assert_gradients(policy_loss, policy, grads["policy"])
    assert_gradients(proposal_loss, proposal, grads["proposal"])


@pytest.mark.parametrize("batches", [(8, 1), (1, 8)], ids=lambda b: f"{b[0]}x{b[1]}")
def test_a_reward_of_0_instead_would_be_noticed(run, tokenizer, reward, batches):
    partial = leaving_out(reward, LEFT_OUT["one of each"])
    settings = {"alpha": 2.0, "target_dist_beta": -0.7, "beta": 0.3}
    _, policy, proposal, reference, grads, args = run("gpt2", *batches, reward_funcs=partial, **settings)
    losses = reference_loss(
        policy, proposal, reference, tokenizer, lambda texts: [r or 0.0 for r in partial(texts)], args
    )
    for loss, module, name in zip(losses, (policy, proposal), ("policy", "proposal"), strict=True):
        with pytest.raises(AssertionError):
            assert_gradients(loss, module, grads[name])


def test_the_weight_of_a_sample_without_a_reward_is_exactly_0(run, tokenizer, reward):
    partial = leaving_out(reward, [" bad bad"])
    settings = {"alpha": 2.0, "target_dist_beta": -0.7}
    trainer, *_ = run("gpt2", 1, 8, reward_funcs=partial, **settings)
    batch = trainer._generate_and_score_completions([{"prompt": prompt} for prompt in PROMPTS for _ in range(N)])
    texts = [tokenizer.decode(c, skip_special_tokens=True) for group in PROPOSAL for c in group]
    left_out = torch.tensor([text == " bad bad" for text in texts])
    assert left_out.nonzero().flatten().tolist() == [3]
    for name in ("proposal_weights", "proposal_negative_coefficients", "proposal_contrast"):
        values = batch[name].flatten(1)
        assert (values[left_out] == 0).all(), name
    others = batch["proposal_weights"].view(2, N)[0, :3]
    whole, *_ = run("gpt2", 1, 8, **settings)
    batch = whole._generate_and_score_completions([{"prompt": prompt} for prompt in PROMPTS for _ in range(N)])
    with_it = batch["proposal_weights"].view(2, N)[0]
    torch.testing.assert_close(others, with_it[:3] / with_it[:3].sum())
    assert with_it[3] > 0.5  # the control: it had a weight
