"""Policy and proposal losses at their edges. Axis letters: P prompts, N completions, T tokens, V vocabulary."""

import math

import pytest
import torch

from trl_repulse.math.importance import normalize_weights, reduce_log_probs
from trl_repulse.math.objective import (
    kl_token_rewards,
    negative_coefficients,
    negative_reinforce_coefficients,
    policy_gradient_loss,
)
from trl_repulse.math.proposal_losses import (
    ctl_coefficients,
    dpg_loss,
    log_ratio_loss,
    sixo_loss,
    sixo_negative_weights,
)

from ..whole_losses import ctl_loss, eq_4, kl_penalized_returns, negative_loss, negative_reinforce_loss, reinforce_loss


P, N, T, V = 3, 4, 5, 6
INF, NAN = math.inf, math.nan
LENGTHS = torch.tensor([[5, 3, 1, 0], [2, 5, 5, 4], [1, 1, 2, 3]])
MASK = (torch.arange(T) < LENGTHS.unsqueeze(-1)).double()  # (P, N, T)


def double(values):
    return torch.tensor(values, dtype=torch.float64)


class Batch:
    """Random log-probabilities of both models over the whole vocabulary, tokens, returns and log-weights."""

    def __init__(self, seed=0):
        generator = torch.Generator().manual_seed(seed)

        def rand(*shape):
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        self.mask = MASK.clone()
        self.tokens = torch.randint(V, (P, N, T), generator=generator)
        self.p_all, self.q_all, self.now_all = (rand(P, N, T, V).log_softmax(-1) for _ in range(3))
        self.p, self.q, self.now = (self.taken(x) for x in (self.p_all, self.q_all, self.now_all))
        self.returns, self.log_w = rand(P, N), rand(P, N)

    def taken(self, log_all):
        return log_all.gather(-1, self.tokens.unsqueeze(-1)).squeeze(-1)


# Each proposal loss as a function of the batch and the leaf that carries gradient.
PROPOSAL = {
    "ctl": lambda b, now, w: ctl_loss(b.taken(now), b.q, b.p, w, b.mask),
    "ctl_prefix": lambda b, now, w: ctl_loss(b.taken(now), b.q, b.p, w, b.mask, parameterization="prefix"),
    "ctl_no_second_term": lambda b, now, w: ctl_loss(b.taken(now), b.q, b.p, w, b.mask, second_term=False),
    "sixo": lambda b, now, w: sixo_loss(b.taken(now), b.p, w, sixo_negative_weights(b.q, b.p, w, b.mask), b.mask),
    "dpg": lambda b, now, w: dpg_loss(now, b.p_all, b.tokens, w, b.mask),
}
POLICY = {
    "reinforce": lambda b, log_p, w: reinforce_loss(log_p, b.mask, b.returns),
    "negative": lambda b, log_p, w: negative_loss(log_p, b.mask, w),
    "negative_none": lambda b, log_p, w: negative_loss(log_p, b.mask, w, "none", "sum"),
    "negative_reinforce": lambda b, log_p, w: negative_reinforce_loss(log_p, b.mask, w, b.returns, "proposal"),
    "repulse": lambda b, log_p, w: eq_4(log_p, b.mask, b.returns, log_p, b.mask, w, 0.3),
    "clipped": lambda b, log_p, w: policy_gradient_loss(log_p, b.mask, b.returns, old_log_p=b.q),
}


def value_and_gradient(name, batch, log_w=None):
    leaf = (batch.now_all if name in PROPOSAL else batch.p).clone().requires_grad_()
    loss = (PROPOSAL | POLICY)[name](batch, leaf, normalize_weights(batch.log_w if log_w is None else log_w))
    return loss.detach(), torch.autograd.grad(loss, leaf)[0]


# Reductions


def test_reductions():
    log_p = double([[[-1.0, -2.0, NAN], [-3.0, -INF, NAN], [INF, NAN, NAN]]])
    mask = torch.tensor([[[1, 1, 0], [1, 0, 0], [0, 0, 0]]])
    assert torch.equal(reduce_log_probs(log_p, mask, "sum"), double([[-3.0, -3.0, 0.0]]))
    assert torch.equal(reduce_log_probs(log_p, mask, "mean"), double([[-1.5, -3.0, 0.0]]))
    with pytest.raises(ValueError, match="'mean' or 'sum'"):
        reduce_log_probs(log_p, mask, "median")


# Policy


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_policy_gradient_by_hand(reduction):
    log_p, mask = double([[[-1.0, -2.0], [-4.0, -8.0]]]).requires_grad_(), torch.tensor([[[1, 1], [1, 0]]])
    c = double([[3.0, -5.0]]).requires_grad_()
    loss = policy_gradient_loss(log_p, mask, c, reduction)
    scale = 2 if reduction == "mean" else 1
    assert loss.item() == -(3 * -3 / scale - 5 * -4) / 2
    gradient, nothing = torch.autograd.grad(loss, [log_p, c], allow_unused=True)
    assert torch.equal(gradient, double([[[-1.5 / scale, -1.5 / scale], [2.5, 0.0]]])) and nothing is None
    assert policy_gradient_loss(log_p, mask, c, reduction, denominator=8).item() == loss.item() / 4


def test_zero_coefficient_silences_a_sample():
    log_p = double([[[-1.0, -INF], [-1.0, -2.0]]]).requires_grad_()
    for old in (None, double([[[-1.0, -900.0], [-1.0, -2.0]]])):
        loss = policy_gradient_loss(log_p, torch.ones(1, 2, 2), double([[0.0, 1.0]]), old_log_p=old)
        gradient = torch.autograd.grad(loss, log_p)[0]
        assert loss.isfinite() and torch.equal(gradient[0, 0], double([0.0, 0.0])) and (gradient[0, 1] != 0).all()


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_clipped_gradient_at_ratio_one(reduction):
    b = Batch()
    leaf = b.p.clone().requires_grad_()
    plain = policy_gradient_loss(leaf, b.mask, b.returns, reduction)
    clipped = policy_gradient_loss(leaf, b.mask, b.returns, reduction, old_log_p=b.p)
    torch.testing.assert_close(torch.autograd.grad(clipped, leaf), torch.autograd.grad(plain, leaf))
    length = b.mask.sum(-1)
    value = b.returns * (length > 0) / (length.clamp(min=1) if reduction == "mean" else 1)
    torch.testing.assert_close(clipped.detach(), -value.sum() / (P * N))


@pytest.mark.parametrize("c", [2.0, -2.0])
@pytest.mark.parametrize("ratio", [0.01, 0.5, 0.75, 0.95, 1.2, 1.35, 3.0])
def test_clipping(c, ratio):
    old = double([[[-1.0, -2.0, -3.0]]])
    leaf = (old + math.log(ratio) / 3).requires_grad_()
    loss = policy_gradient_loss(
        leaf, torch.ones(1, 1, 3), double([[c]]), old_log_p=old, epsilon_low=0.2, epsilon_high=0.3
    )
    assert loss.item() == pytest.approx(-min(ratio * c, min(max(ratio, 0.8), 1.3) * c) / 3)
    moving = ratio <= 1.3 if c > 0 else ratio >= 0.8
    gradient = torch.autograd.grad(loss, leaf)[0]
    torch.testing.assert_close(gradient, torch.full_like(leaf, -c * ratio / 3 if moving else 0.0).detach())


def test_clipping_survives_a_huge_ratio():
    old = torch.full((1, 1, 4), -500.0)
    leaf = torch.zeros(1, 1, 4).requires_grad_()
    loss = policy_gradient_loss(leaf, torch.ones(1, 1, 4), torch.tensor([[1.0]]), old_log_p=old)
    assert loss.item() == pytest.approx(-1.2 / 4)
    assert torch.equal(torch.autograd.grad(loss, leaf)[0], torch.zeros(1, 1, 4))


def test_negative_term_by_hand():
    log_p = double([[[-1.0], [-2.0]]]).requires_grad_()
    loss = negative_loss(log_p, torch.ones(1, 2, 1), double([[0.25, 0.75]]), "none")
    assert loss.item() == -0.25 - 1.5
    assert torch.equal(torch.autograd.grad(loss, log_p)[0], double([[[0.25], [0.75]]]))  # descent lowers log p
    assert negative_loss(log_p, torch.ones(1, 2, 1), double([[0.25, 0.75]]), "samples").item() == (-0.25 - 1.5) / 2
    with pytest.raises(ValueError, match="alpha_normalization"):
        negative_coefficients(double([[0.25, 0.75]]), 0.3, "prompts")


def test_negative_reinforce_baselines():
    w, returns_neg = double([[0.5, 0.25, 0.25]]), double([[-6.0, NAN, 3.0]])
    returns = double([[1.0, NAN, 2.0, 3.0]])
    for baseline, expected in {
        "none": [[0.5 * -6, 0, 0.25 * 3]],
        "proposal": [[0.5 * -9, 0, 0.25 * 9]],
        "policy": [[0.5 * -8, 0, 0.25 * 1]],
    }.items():
        actual = negative_reinforce_coefficients(w, returns_neg, 2.0, baseline, returns)
        assert torch.equal(actual, 2 * double(expected)), baseline
        scaled = negative_reinforce_coefficients(w, returns_neg, 2.0, baseline, returns, "none")
        assert torch.equal(scaled, 3 * actual)
    dead = negative_reinforce_coefficients(w, returns_neg, 2.0, "policy", returns * NAN)
    assert torch.equal(dead, torch.zeros(1, 3, dtype=torch.float64))


def test_negative_reinforce_refuses():
    for baseline, message in (
        ("proposal", "N >= 2"),
        ("policy", "needs `returns`"),
        ("expectation", "`baseline` must be"),
    ):
        with pytest.raises(ValueError, match=message):
            negative_reinforce_coefficients(double([[1.0]]), double([[1.0]]), 1.0, baseline)


# Edges shared by all losses

DEPENDING_ON_W = ["negative", "negative_none", "negative_reinforce", *PROPOSAL]


@pytest.mark.parametrize("name", DEPENDING_ON_W)
def test_all_weights_minus_inf_push_nothing(name):
    b = Batch()
    value, gradient = value_and_gradient(name, b, torch.full((P, N), -INF, dtype=torch.float64))
    assert value.item() == 0 and torch.equal(gradient, torch.zeros_like(gradient))
    log_w = b.log_w.clone()
    log_w[1] = -INF
    value, gradient = value_and_gradient(name, b, log_w)
    assert value.isfinite() and torch.equal(gradient[1], torch.zeros_like(gradient[1]))
    alone, rest = value_and_gradient(name, b)
    assert torch.equal(gradient[[0, 2]], rest[[0, 2]]) and rest[1].norm() > 0 and alone != value


@pytest.mark.parametrize("name", DEPENDING_ON_W)
def test_one_weight_minus_inf(name):
    b = Batch()
    b.log_w[1, 1] = -INF
    value, gradient = value_and_gradient(name, b)
    assert value.isfinite() and gradient.isfinite().all() and gradient[1].norm() > 0
    if name not in ("ctl", "ctl_prefix", "sixo"):  # there it still serves as a negative sample
        assert torch.equal(gradient[1, 1], torch.zeros_like(gradient[1, 1]))


@pytest.mark.parametrize("junk", [7.0, INF, -INF, NAN])
@pytest.mark.parametrize("name", [*POLICY, *PROPOSAL])
def test_padding_does_not_matter(name, junk):
    clean, dirty = Batch(), Batch()
    masked = clean.mask == 0
    for key in ("p", "q", "now"):
        setattr(dirty, key, getattr(clean, key).masked_fill(masked, junk))
        full = key + "_all"
        setattr(dirty, full, getattr(clean, full).masked_fill(masked.unsqueeze(-1), junk))
    if name == "dpg":
        dirty.tokens = clean.tokens.masked_fill(masked, -100)
    (value, gradient), (dirty_value, dirty_gradient) = value_and_gradient(name, clean), value_and_gradient(name, dirty)
    assert torch.equal(value, dirty_value)
    assert torch.equal(gradient, dirty_gradient)
    assert torch.equal(gradient[masked], torch.zeros_like(gradient[masked])) and gradient.norm() > 0


@pytest.mark.parametrize("name", [*POLICY, *PROPOSAL])
def test_width_of_padding_does_not_matter(name):
    narrow, wide = Batch(), Batch()
    for key in ("mask", "tokens", "p", "q", "now"):
        x = getattr(narrow, key)
        setattr(wide, key, torch.cat([x, torch.zeros(P, N, 3, dtype=x.dtype)], -1))
    for key in ("p_all", "q_all", "now_all"):
        setattr(wide, key, torch.cat([getattr(narrow, key), torch.zeros(P, N, 3, V).double()], -2))
    (value, gradient), (wide_value, wide_gradient) = value_and_gradient(name, narrow), value_and_gradient(name, wide)
    torch.testing.assert_close(wide_value, value)
    torch.testing.assert_close(wide_gradient[:, :, :T], gradient)


@pytest.mark.parametrize("name", [*POLICY, *PROPOSAL])
def test_inputs_are_not_mutated(name):
    b, fresh = Batch(), Batch()
    value_and_gradient(name, b)
    for key, value in vars(fresh).items():
        assert torch.equal(getattr(b, key), value), key


@pytest.mark.parametrize("name", [*POLICY, *PROPOSAL])
def test_empty_completions_alone(name):
    b = Batch()
    b.mask = torch.zeros_like(b.mask)
    value, gradient = value_and_gradient(name, b)
    assert value.item() == 0 and torch.equal(gradient, torch.zeros_like(gradient))


# Groups cut apart


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("sizes", [[5, 1, 6], [1] * 12, [7, 5]])
def test_micro_batches_add_up(sizes, reduction):
    b = Batch()
    w = normalize_weights(b.log_w)
    order = torch.randperm(P * N, generator=torch.Generator().manual_seed(1))
    c = ctl_coefficients(b.now, b.q, b.p, w, b.mask)
    c_prefix = ctl_coefficients(b.now, b.q, b.p, w, b.mask, parameterization="prefix")
    negative_w = sixo_negative_weights(b.q, b.p, w, b.mask)
    losses = {
        "policy": (lambda p, m, a, d: policy_gradient_loss(p, m, a, reduction, d), (b.p, b.mask, b.returns)),
        "clipped": (
            lambda p, m, a, old, d: policy_gradient_loss(p, m, a, reduction, d, old),
            (b.p, b.mask, b.returns, b.q),
        ),
        "token": (lambda *x: log_ratio_loss(*x[:-1], "token", reduction, x[-1]), (b.now, b.p, c, b.mask)),
        "prefix": (lambda *x: log_ratio_loss(*x[:-1], "prefix", reduction, x[-1]), (b.now, b.p, c_prefix, b.mask)),
        "sixo": (lambda *x: sixo_loss(*x[:-1], reduction, x[-1]), (b.now, b.p, w, negative_w, b.mask)),
        "dpg": (lambda *x: dpg_loss(*x[:-1], reduction, x[-1]), (b.now_all, b.p_all, b.tokens, w, b.mask)),
    }
    for name, (loss, inputs) in losses.items():
        whole = loss(*inputs, None)
        flat = [x.flatten(0, 1)[order].unsqueeze(1) for x in inputs]  # (B, 1, ...)
        chunks = list(zip(*(x.split(sizes) for x in flat), strict=True))
        parts = [loss(*chunk, P * N) for chunk in chunks]
        torch.testing.assert_close(sum(parts), whole, msg=name)
        torch.testing.assert_close(sum(loss(*chunk, torch.tensor(P * N)) for chunk in chunks), whole)
        means = sum(loss(*chunk, None) for chunk in chunks) / len(sizes)
        if len(set(sizes)) > 1:
            assert (means - whole).abs() > 1e-6, f"{name}: uneven micro-batches cannot average to the whole"


# Proposal


def test_ctl_coefficients_by_hand():
    half = double([[[0.5, 0.5], [0.5, 0.25]]]).log()
    log_p, now = double([[[0.2, 0.4], [0.6, 0.1]]]).log(), double([[[0.3, 0.9], [0.7, 0.2]]]).log()
    mask, w = torch.ones(1, 2, 2), double([[0.9, 0.1]])
    token = double([[0.3 / 0.5, 0.2 * 0.9 / 0.25], [0.7 / 0.5, 0.6 * 0.2 / 0.125]])
    prefix = double([[0.3 / 0.5, 0.27 / 0.25], [0.7 / 0.5, 0.14 / 0.125]])
    for name, unnormalized in {"token": token, "prefix": prefix}.items():
        actual = ctl_coefficients(now, half, log_p, w, mask, parameterization=name)
        torch.testing.assert_close(actual[0], w[0, :, None] - unnormalized / unnormalized.sum(0))
    only = ctl_coefficients(now, half, log_p, w, mask, second_term=False)
    assert torch.equal(only, w.unsqueeze(-1).expand(1, 2, 2))


@pytest.mark.parametrize("name", PROPOSAL)
def test_policy_gets_no_gradient(name):
    b = Batch()
    b.p.requires_grad_()
    b.p_all.requires_grad_()
    loss = PROPOSAL[name](b, b.now_all.clone().requires_grad_(), normalize_weights(b.log_w))
    loss.backward()
    assert b.p.grad is None and b.p_all.grad is None


@pytest.mark.parametrize("parameterization", ["token", "prefix"])
def test_samples_without_a_reward_are_in_no_weight(parameterization):
    b = Batch()
    kept = torch.tensor([0, 2, 3])
    log_w = b.log_w.clone()
    log_w[:, 1] = -INF
    w, scored = normalize_weights(log_w), log_w > -INF

    def coefficients(which, w, **options):
        log_probs = [x[:, which] for x in (b.now, b.q, b.p)]
        return ctl_coefficients(
            *log_probs, w[:, which], b.mask[:, which], parameterization=parameterization, **options
        )

    everything, without = torch.arange(N), coefficients(kept, w)
    result = coefficients(everything, w, scored=scored)
    assert (result[:, 1] == 0).all()
    torch.testing.assert_close(result[:, kept], without)
    weighs_0 = coefficients(everything, w)  # the control: a weight of 0 is a reward, and is pushed
    assert (weighs_0[:, 1] < 0).any() and not torch.allclose(weighs_0[:, kept], without)
    negative = sixo_negative_weights(b.q, b.p, w, b.mask, scored)
    assert (negative[:, 1] == 0).all()
    torch.testing.assert_close(
        negative[:, kept], sixo_negative_weights(b.q[:, kept], b.p[:, kept], w[:, kept], b.mask[:, kept])
    )


def test_ctl_refuses():
    b = Batch()
    w = normalize_weights(b.log_w[:, :1])
    one = [x[:, :1] for x in (b.now, b.q, b.p)]
    with pytest.raises(ValueError, match="N >= 2"):
        ctl_coefficients(*one, w, b.mask[:, :1])
    assert torch.equal(ctl_coefficients(*one, w, b.mask[:, :1], second_term=False), b.mask[:, :1])
    w = normalize_weights(b.log_w)
    with pytest.raises(ValueError, match="parameterization"):
        ctl_coefficients(b.now, b.q, b.p, w, b.mask, parameterization="full")
    with pytest.raises(ValueError, match="normalized_w"):
        ctl_coefficients(b.now, b.q, b.p, w[:, :1], b.mask)
    with pytest.raises(ValueError, match="coefficients"):
        log_ratio_loss(b.now, b.p, w, b.mask)


def test_ctl_survives_a_policy_that_cannot_say_a_sample():
    b = Batch()
    b.p[1, 2, 1] = -INF  # its weight is 0
    b.log_w[1, 2] = -INF
    now = b.now.clone().requires_grad_()
    gradient = torch.autograd.grad(ctl_loss(now, b.q, b.p, normalize_weights(b.log_w), b.mask), now)[0]
    assert gradient.isfinite().all()
    assert torch.equal(gradient[1, 2, 2:], torch.zeros(3, dtype=torch.float64))  # no prefix of p leads there


def test_dpg_tolerates_tokens_nobody_can_draw():
    b = Batch()
    b.tokens = b.tokens.clamp(max=V - 2)
    for full in ("p_all", "now_all"):
        setattr(b, full, getattr(b, full).index_fill(-1, torch.tensor([V - 1]), -INF).log_softmax(-1))
    narrow = Batch()
    narrow.tokens = b.tokens
    narrow.p_all, narrow.now_all = (x[..., : V - 1] for x in (b.p_all, b.now_all))
    (value, gradient), (expected, expected_gradient) = (value_and_gradient("dpg", x) for x in (b, narrow))
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(gradient[..., : V - 1], expected_gradient)
    assert torch.equal(gradient[..., V - 1], torch.zeros(P, N, T, dtype=torch.float64))


# Returns


def test_kl_in_the_reward():
    log_p = double([[[-1.0, -2.0, NAN], [-1.0, NAN, NAN], [INF, NAN, NAN]]])
    log_ref = double([[[-3.0, -1.0, 0.0]] * 3])
    mask, reward = torch.tensor([[[1, 1, 0], [1, 0, 0], [0, 0, 0]]]), double([[10.0, 20.0, 30.0]])
    tokens = kl_token_rewards(log_p, log_ref, reward, 0.5, mask)
    assert torch.equal(tokens, double([[[-1.0, 10.5, 0.0], [19.0, 0.0, 0.0], [0.0, 0.0, 0.0]]]))
    returns = kl_penalized_returns(log_p, log_ref, reward, 0.5, mask)
    assert torch.equal(returns, double([[9.5, 19.0, 30.0]]))  # the empty completion keeps its reward


def test_kl_leaves_nan_rewards_and_gradients_alone():
    log_p = torch.zeros(1, 2, 2).requires_grad_()
    returns = kl_penalized_returns(log_p, torch.zeros(1, 2, 2), torch.tensor([[NAN, 1.0]]), 0.1, torch.ones(1, 2, 2))
    assert returns.isnan().tolist() == [[True, False]] and not returns.requires_grad
