"""Importance weights, their diagnostics, and their edges. Axis letters: P prompts, N completions, T tokens."""

import math

import pytest
import torch

from trl_repulse.math.importance import (
    effective_sample_size,
    engine_ratios,
    log_importance_weights,
    log_z_estimate,
    max_weight_share,
    normalize_weights,
    sequence_log_prob,
)


INF = math.inf
DEAD = torch.tensor([[-INF, -INF, -INF], [0.0, 1.0, -INF]], dtype=torch.float64)


def random_inputs(shape=(2, 3, 4), seed=0):
    generator = torch.Generator().manual_seed(seed)
    log_p, log_q = (-torch.rand(shape, generator=generator, dtype=torch.float64) * 3 for _ in range(2))
    potential = torch.randn(shape[:2], generator=generator, dtype=torch.float64)
    mask = torch.ones(shape)
    mask[0, 0, 2:] = 0
    mask[1, 2] = 0
    return log_p, log_q, potential, mask


def test_sequence_log_prob():
    log_p = torch.tensor([[[-1.0, -2.0, -4.0], [-8.0, -16.0, -32.0], [-64.0, -128.0, -256.0]]])
    mask = torch.tensor([[[1, 1, 1], [1, 1, 0], [0, 0, 0]]])
    expected = torch.tensor([[-7.0, -24.0, 0.0]])
    for kind in (mask, mask.bool(), mask.float()):
        assert torch.equal(sequence_log_prob(log_p, kind), expected)


def test_sequence_log_prob_sums_half_precision_in_float32():
    log_p = torch.full((1, 1, 4096), -1.0, dtype=torch.bfloat16)
    total = sequence_log_prob(log_p, torch.ones(1, 1, 4096))
    assert total.dtype == torch.float32 and total.item() == -4096


def test_log_weights_by_hand():
    log_p = torch.tensor([[[-1.0, -2.0], [-3.0, -99.0]]], requires_grad=True)
    log_q = torch.tensor([[[-0.5, -0.25], [-1.0, 77.0]]], requires_grad=True)
    mask = torch.tensor([[[1, 1], [1, 0]]])
    log_w = log_importance_weights(log_p, log_q, torch.tensor([[10.0, 20.0]]), mask)
    torch.testing.assert_close(log_w, torch.tensor([[-3 + 10 + 0.75, -3 + 20 + 1.0]]))
    assert not log_w.requires_grad


@pytest.mark.parametrize("junk", [123.0, INF, -INF, math.nan])
def test_padding_does_not_matter(junk):
    log_p, log_q, potential, mask = random_inputs()
    expected = log_importance_weights(log_p, log_q, potential, mask)
    dirty = [x.masked_fill(mask == 0, junk) for x in (log_p, log_q)]
    assert torch.equal(log_importance_weights(*dirty, potential, mask), expected)
    wider = [torch.cat([x, torch.full((2, 3, 2), junk)], -1) for x in dirty]
    wider_mask = torch.cat([mask, torch.zeros(2, 3, 2)], -1)
    torch.testing.assert_close(log_importance_weights(*wider, potential, wider_mask), expected)


@pytest.mark.parametrize("excluded", [math.nan, -INF])
def test_excluded_sample(excluded):
    log_p, log_q, potential, mask = random_inputs()
    potential[0, 1] = excluded
    log_w = log_importance_weights(log_p, log_q, potential, mask)
    assert log_w[0, 1] == -INF and log_w[log_w != -INF].numel() == 5
    w = normalize_weights(log_w)
    assert w[0, 1] == 0
    torch.testing.assert_close(w[0, [0, 2]], log_w[0, [0, 2]].softmax(-1))
    log_q[0, 1] = math.nan  # nothing of an excluded sample matters
    assert torch.equal(log_importance_weights(log_p, log_q, potential, mask), log_w)


def test_inputs_are_not_mutated():
    inputs = random_inputs()
    copies = [x.clone() for x in inputs]
    normalize_weights(log_importance_weights(*inputs))
    assert all(torch.equal(a, b) for a, b in zip(inputs, copies, strict=True))


def test_normalization_is_within_prompts_and_stable():
    log_w = torch.tensor([[1e4, 1e4 + 1, 0.0], [-1e4, -1e4, -1e4]], dtype=torch.float64)
    w = normalize_weights(log_w)
    torch.testing.assert_close(w.sum(-1), torch.ones(2, dtype=torch.float64))
    torch.testing.assert_close(w[0, 1] / w[0, 0], torch.tensor(math.e, dtype=torch.float64))
    torch.testing.assert_close(w[1], torch.full((3,), 1 / 3, dtype=torch.float64))
    torch.testing.assert_close(normalize_weights(log_w + torch.tensor([[5.0], [-7.0]])), w)


def test_all_weights_minus_inf():
    w = normalize_weights(DEAD)
    assert torch.equal(w[0], torch.zeros(3, dtype=torch.float64))
    torch.testing.assert_close(w[1, :2], torch.tensor([0.0, 1.0], dtype=torch.float64).softmax(0))
    ess, share, log_z = effective_sample_size(DEAD), max_weight_share(DEAD), log_z_estimate(DEAD)
    assert ess[0] == 0 and share[0] == 0 and log_z[0] == -INF
    assert ess[1] > 1 and share[1] > 0.7 and not any(x.isnan().any() for x in (w, ess, share, log_z))


def test_gradient_through_dead_weights_is_zero():
    log_w = DEAD.clone().requires_grad_()
    gradient = torch.autograd.grad(normalize_weights(log_w).square().sum(), log_w)[0]
    assert torch.equal(gradient[0], torch.zeros(3, dtype=torch.float64)) and not gradient.isnan().any()


@pytest.mark.parametrize("bad", [INF, math.nan])
@pytest.mark.parametrize(
    "function", [normalize_weights, effective_sample_size, max_weight_share, log_z_estimate], ids=lambda f: f.__name__
)
def test_impossible_weights_are_refused(function, bad):
    with pytest.raises(ValueError, match="to leave a sample out"):
        function(torch.tensor([[0.0, bad]]))


def test_effective_sample_size_and_share():
    equal = torch.full((1, 8), 3.0, dtype=torch.float64)
    one = torch.tensor([[0.0] + [-INF] * 7], dtype=torch.float64)
    half = torch.tensor([[2.0, 2.0] + [-INF] * 6], dtype=torch.float64)
    log_w = torch.cat([equal, one, half])
    torch.testing.assert_close(effective_sample_size(log_w), torch.tensor([8.0, 1.0, 2.0], dtype=torch.float64))
    torch.testing.assert_close(max_weight_share(log_w), torch.tensor([1 / 8, 1.0, 1 / 2], dtype=torch.float64))
    unequal = torch.tensor([[1.0, 2.0, 3.0]], dtype=torch.float64)
    torch.testing.assert_close(effective_sample_size(unequal.log()), torch.tensor([36 / 14], dtype=torch.float64))


def test_log_z_is_the_log_of_the_mean():
    weights = torch.tensor([[1.0, 2.0, 6.0], [0.0, 0.0, 3.0]], dtype=torch.float64)
    torch.testing.assert_close(log_z_estimate(weights.log()), torch.tensor([3.0, 1.0], dtype=torch.float64).log())
    shifted = log_z_estimate(weights.log() - 2000)
    torch.testing.assert_close(shifted, torch.tensor([3.0, 1.0], dtype=torch.float64).log() - 2000)


def test_shapes_are_checked():
    log_p, log_q, potential, mask = random_inputs()
    for function, inputs, name in (
        (log_importance_weights, (log_p, log_q, potential[0], mask), "log_potential"),
        (log_importance_weights, (log_p, log_q[:1], potential, mask), "log_q"),
        (sequence_log_prob, (log_p, mask[:, :1]), "mask"),
        (sequence_log_prob, (log_p[0], mask[0]), "unsqueeze"),
        (normalize_weights, (potential[0],), "log_w"),
    ):
        with pytest.raises(ValueError, match=name):
            function(*inputs)


def test_log_z_counts_the_samples_that_have_a_reward():
    log_w = torch.tensor([[0.5, -1.0, -math.inf], [-math.inf] * 3], dtype=torch.float64)
    scored = torch.tensor([[True, True, False], [False] * 3])
    without = log_z_estimate(log_w[:1, :2])
    torch.testing.assert_close(
        log_z_estimate(log_w, scored), torch.cat([without, torch.full_like(without, -math.inf)])
    )
    assert log_z_estimate(log_w)[0] == pytest.approx(without.item() + math.log(2 / 3))  # as a weight of 0, it counts
    torch.testing.assert_close(log_z_estimate(log_w, torch.ones_like(scored)), log_z_estimate(log_w))
    with pytest.raises(ValueError, match="`scored` has shape"):
        log_z_estimate(log_w, scored[:, :2])


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token_truncate", [[0.5, 2.0, 1.0]]),
        ("token_mask", [[0.0, 0.0, 1.0]]),
        ("sequence_truncate", [[1.0]]),
        ("sequence_mask", [[1.0]]),
    ],
)
def test_engine_ratios_by_hand(mode, expected):
    """1/4, 4 and, where the engine said nothing, 1; a token that does not count has none."""
    log_q = torch.tensor([[1.0, 4.0, 3.0, 5.0]]).log().requires_grad_()
    engine = torch.tensor([[4.0, 1.0, math.nan, 0.1]]).log()
    mask = torch.tensor([[1, 1, 1, 0]])
    found = engine_ratios(log_q, engine, mask, mode, 0.5, 2.0)
    torch.testing.assert_close(found[:, :3], torch.tensor(expected))
    assert not found.requires_grad
    whole = mode.startswith("sequence")
    assert engine_ratios(log_q, engine, 1 - mask, mode, None, None).tolist() == [
        [pytest.approx(50.0)] if whole else [1.0, 1.0, 1.0, pytest.approx(50.0)]
    ]
    with pytest.raises(ValueError, match="`mode='token'` must be"):
        engine_ratios(log_q, engine, mask, "token")
