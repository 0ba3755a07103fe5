"""The trainers' losses and gradients against the formulas, on recorded completions.

Reference values are computed here from plain forward passes, one unpadded row at a time, and written out with explicit
sums, so that nothing of the library's losses, weights, padding or batching takes part in them.
"""

import math
from argparse import Namespace

import pytest
import torch

from trl_repulse import ReinforceConfig, ReinforceTrainer, RePULSeConfig, RePULSeTrainer

from .conftest import USE_CPU, build_model
from .test_returns import by_hand


pytestmark = pytest.mark.trainer

N = 4
PROMPTS = ["the cat", "the dog ran the cat ate"]
# Token ids of recorded completions; 1 is eos. Lengths differ, one is empty but for eos.
POLICY = [[[12, 13, 14], [18, 1], [1], [17, 17, 11]], [[11, 15, 1], [17, 12, 13], [18, 18, 18], [14, 1]]]
PROPOSAL = [[[18, 13, 1], [18, 17], [13, 14, 15], [18, 18, 1]], [[11, 1], [18, 1], [12, 18, 13], [16, 16, 16]]]


def rows_log_p(model, tokenizer, prompt, completion):
    """Log-probabilities of one completion's tokens, from one unpadded forward."""
    ids = torch.tensor([tokenizer(prompt)["input_ids"] + completion], device=model.device)
    log_p = model(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None]).squeeze(-1)
    return log_p[-len(completion) :]


def cvar_by_hand(rewards, level, over):
    """r less what it lacks to the quantile, over the level; `None` stands for a sample without a reward."""
    groups = rewards if over == "prompt" else [sum(rewards, [])]
    tails = []
    for group in groups:
        known = sorted(r for r in group if r is not None)
        quantile = known[math.ceil(level * (len(known) - 1))]
        tails += [None if r is None else quantile - max(quantile - r, 0) / level for r in group]
    return [tails[i : i + N] for i in range(0, len(tails), N)]


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
    if args.cvar_level is not None:
        all_rewards = cvar_by_hand(all_rewards, args.cvar_level, args.cvar_over)
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


class Recorded:
    """Mixin that replaces sampling by the recorded completions."""

    def _generate(self, prompts):
        table = PROPOSAL if isinstance(self, RePULSeTrainer) and self._sampling_proposal() else POLICY
        seen = dict.fromkeys(PROMPTS, 0)
        completions = []
        for prompt in prompts:
            completions.append(table[PROMPTS.index(prompt)][seen[prompt]])
            seen[prompt] += 1
        texts = self.processing_class.batch_decode(completions, skip_special_tokens=True)
        prompt_ids = [self.processing_class(p)["input_ids"] for p in prompts]
        return prompt_ids, completions, None, texts, None, {}, None, []

    def _sampling_proposal(self):
        return self.proposal is not None and self.model_wrapped is self.proposal.engine


class RecordedRePULSe(Recorded, RePULSeTrainer):
    pass


class RecordedReinforce(Recorded, ReinforceTrainer):
    pass


@pytest.fixture
def run(tmp_path, tokenizer, reward):
    """Runs one update on the recorded completions and returns losses and gradients of both models."""
    from datasets import Dataset

    def run(
        architecture,
        batch_size=8,
        accumulation=1,
        trainer_cls=RecordedRePULSe,
        reward_funcs=reward,
        max_steps=1,
        **kwargs,
    ):
        config_cls = RePULSeConfig if issubclass(trainer_cls, RePULSeTrainer) else ReinforceConfig
        if config_cls is RePULSeConfig:
            kwargs = {"proposal": "learned"} | kwargs
        args = config_cls(
            output_dir=str(tmp_path / "run"),
            use_cpu=USE_CPU,
            bf16=False,
            gradient_checkpointing=False,
            report_to="none",
            save_strategy="no",
            logging_steps=1,
            max_steps=max_steps,
            per_device_train_batch_size=batch_size,
            gradient_accumulation_steps=accumulation,
            num_generations=N,
            max_completion_length=3,
            max_grad_norm=0.0,
            learning_rate=1e-9,
            shuffle_dataset=False,
            **kwargs,
        )
        policy = build_model(architecture, len(tokenizer), seed=0)
        policy.name_or_path = policy.config._name_or_path = str(tmp_path / "policy")
        reference = build_model(architecture, len(tokenizer), seed=2)
        reference.eval().save_pretrained(tmp_path / "policy")  # what TRL loads as the reference
        extra = {}
        proposal = None
        if config_cls is RePULSeConfig and args.has_proposal:
            proposal = extra["proposal_model"] = build_model(architecture, len(tokenizer), seed=1)
        trainer = trainer_cls(
            model=policy,
            reward_funcs=reward_funcs,
            args=args,
            train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
            processing_class=tokenizer,
            **extra,
        )
        grads = {}

        def keep(name, module):
            grads[name] = [None if p.grad is None else p.grad.clone() for p in module.parameters()]

        if proposal is not None:
            step = trainer.proposal.step
            trainer.proposal.step = lambda: (keep("proposal", proposal), step())[1]
        original = trainer._get_grad_norm
        trainer._get_grad_norm = lambda model, grad_norm=None: (keep("policy", policy), original(model, grad_norm))[1]
        trainer.train()
        return trainer, policy, proposal, reference.to(policy.device), grads, args

    return run


def assert_gradients(loss, module, actual):
    expected = torch.autograd.grad(loss, list(module.parameters()), allow_unused=True, retain_graph=True)
    for e, a in zip(expected, actual, strict=True):
        e = torch.zeros_like(a) if e is None else e
        torch.testing.assert_close(a, e, atol=2e-6, rtol=2e-4)


CVAR = {"cvar_level": 0.4, "cvar_schedule_ratio": 0.0}
CASES = {
    "published": {},
    "eq4": {"alpha_normalization": "none", "logprob_reduction": "sum"},
    "no KL": {"beta": 0.0},
    "REINFORCE++": {"baseline": "none", "normalize_advantages": True},
    "REINFORCE++-baseline": {"baseline": "group_mean", "normalize_advantages": True},
    "group mean": {"baseline": "group_mean"},
    "CVaR": CVAR,
}


@pytest.mark.thorough
@pytest.mark.parametrize("case", CASES)
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
    "CVaR": CVAR,
    "CVaR of prompts": CVAR | {"cvar_over": "prompt"},
    "CVaR, normalised": CVAR | {"baseline": "none", "normalize_advantages": True},
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


@pytest.mark.parametrize(
    "batches", [pytest.param((8, 1), marks=pytest.mark.thorough), (2, 4)], ids=lambda b: f"{b[0]}x{b[1]}"
)
def test_cvar_is_of_the_generation_batch_however_it_is_cut(run, tokenizer, reward, batches):
    """And not of a prompt: that would be noticed, as would be rewards as they are."""
    _, policy, _, reference, grads, args = run("gpt2", *batches, trainer_cls=RecordedReinforce, **CVAR | {"beta": 0.3})
    args.alpha = 0.0
    assert_gradients(reference_loss(policy, None, reference, tokenizer, reward, args)[0], policy, grads["policy"])
    for change in ({"cvar_over": "prompt"}, {"cvar_level": 1.0}):
        loss, _ = reference_loss(policy, None, reference, tokenizer, reward, Namespace(**vars(args) | change))
        with pytest.raises(AssertionError):
            assert_gradients(loss, policy, grads["policy"])


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
@pytest.mark.parametrize("case", ["published", "eq4", "REINFORCE++-baseline", "CVaR"])
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
    for name in ("proposal_w", "negative_coefficients", "proposal_coefficients"):
        values = batch[name].flatten(1)
        assert (values[left_out] == 0).all(), name
    others = batch["proposal_w"].view(2, N)[0, :3]
    whole, *_ = run("gpt2", 1, 8, **settings)
    batch = whole._generate_and_score_completions([{"prompt": prompt} for prompt in PROMPTS for _ in range(N)])
    with_it = batch["proposal_w"].view(2, N)[0]
    torch.testing.assert_close(others, with_it[:3] / with_it[:3].sum())
    assert with_it[3] > 0.5  # the control: it had a weight
