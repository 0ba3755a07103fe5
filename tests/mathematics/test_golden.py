"""Losses, weights, transforms and potentials against numbers from the published research code.

`GOLDEN_LOSSES=path` makes the same tests read another file. Axis letters: P prompts, N completions, T tokens.
"""

import json
import os
import re
from pathlib import Path

import pytest
import torch

from trl_repulse.math.importance import log_importance_weights, normalize_weights
from trl_repulse.math.objective import (
    class_log_potential,
    exponential_transform,
    indicator_log_potential,
    indicator_transform,
    kl_token_rewards,
    negative_reinforce_coefficients,
    policy_gradient_loss,
)
from trl_repulse.math.proposal_losses import dpg_loss, sixo_loss, sixo_negative_weights

from ..whole_losses import ctl_loss, eq_4, kl_penalized_returns, reinforce_loss


SHIPPED = Path(__file__).parents[1] / "golden" / "golden_losses.json"
GOLDEN = Path(os.environ.get("GOLDEN_LOSSES", SHIPPED))
TOLERANCE = 1e-9
NUMBER = r"(-?[\d.]+(?:e-?\d+)?)"
NEGATIVE_BASELINES = {"None": "none", "expectation": "proposal", "other_expectation": "policy"}


def weights(i, suffix=""):
    log_p = i["log_p" + suffix]
    log_w = log_importance_weights(log_p, i["log_q" + suffix], i["log_phi" + suffix], i["mask" + suffix])
    return normalize_weights(log_w)


def reinforce(i, kind):
    constant = re.fullmatch(rf"constant\({NUMBER}\)", kind)
    if constant:
        return {"loss": reinforce_loss(i["log_p"], i["mask"], i["returns"], "constant", float(constant[1]))}
    return {"loss": reinforce_loss(i["log_p"], i["mask"], i["returns"], kind)}


def repulse(i, alpha, beta):
    negative = i["log_p_neg"], i["mask_neg"], weights(i, "_neg")
    return {"loss": eq_4(i["log_p"], i["mask"], i["returns"], *negative, alpha=float(alpha))}


def negative_reinforce(i, alpha, baseline, beta):
    coefficients = negative_reinforce_coefficients(
        weights(i, "_neg"), i["returns_neg"], float(alpha), NEGATIVE_BASELINES[baseline], i["returns"]
    )
    negative = policy_gradient_loss(i["log_p_neg"], i["mask_neg"], coefficients)
    return {"loss": reinforce_loss(i["log_p"], i["mask"], i["returns"]) + negative}


def ctl(i, no_second_term, parameterization, beta):
    inputs = i["log_q_now"], i["log_q"], i["log_p"], weights(i), i["mask"]
    name = {"per_token": "token", "prefix": "prefix"}[parameterization]
    return {"loss": ctl_loss(*inputs, second_term=not no_second_term, parameterization=name)}


def sixo(i, beta):
    w = weights(i)
    negative_w = sixo_negative_weights(i["log_q"], i["log_p"], w, i["mask"])
    return {"loss": sixo_loss(i["log_q_now"], i["log_p"], w, negative_w, i["mask"])}


def dpg(i, beta):
    log_p = i["log_p_all"].gather(-1, i["tokens"].unsqueeze(-1)).squeeze(-1)
    w = normalize_weights(log_importance_weights(log_p, i["log_q"], i["log_phi"], i["mask"]))
    return {"loss": dpg_loss(i["log_q_all"], i["log_p_all"], i["tokens"], w, i["mask"])}


def kl_in_reward(i, coefficient):
    # Flattened samples stand as P = 1. The research code forms log p - log p_0 in float32 and adds rewards in float64.
    log_p, log_ref, mask = (i[name].float().unsqueeze(0) for name in ("log_p", "log_ref", "mask"))
    inputs = log_p, log_ref, i["reward"].unsqueeze(0), float(coefficient), mask
    return {"token_rewards": kl_token_rewards(*inputs)[0], "returns": kl_penalized_returns(*inputs)[0]}


CASES = {
    r"reinforce/(leave_one_out|none|constant\(.*\))": reinforce,
    r"sigma_weights": lambda i: {"weights": weights(i)},
    rf"repulse/neg_training\(alpha={NUMBER},beta={NUMBER}\)": repulse,
    rf"neg_reinforce\(alpha={NUMBER},neg_baseline=(\w+),beta={NUMBER}\)": negative_reinforce,
    rf"ctl(_no_second_term)?/(per_token|prefix)\(beta={NUMBER}\)": ctl,
    rf"dpg\(beta={NUMBER}\)": dpg,
    rf"sixo_approx_neg\(beta={NUMBER}\)": sixo,
    rf"kl_in_reward\(coef={NUMBER}\)": kl_in_reward,
    rf"reward_transform/minus_alpha_exp_beta_r\(alpha={NUMBER},beta={NUMBER}\)": lambda i, alpha, beta: {
        "transformed": exponential_transform(i["reward"], float(alpha), float(beta))
    },
    rf"reward_transform/minus_alpha_indicator\(alpha={NUMBER},threshold={NUMBER}\)": lambda i, alpha, threshold: {
        "transformed": indicator_transform(i["reward"], float(alpha), float(threshold))
    },
    rf"potential/toxic_class_logprob\(beta={NUMBER}\)": lambda i, beta: {
        "log_phi": class_log_potential(i["reward"], float(beta), target_class=0)
    },
    rf"potential/indicator_below_threshold\(threshold={NUMBER},eps={NUMBER}\)": lambda i, threshold, eps: {
        "log_phi": indicator_log_potential(i["reward"], float(threshold), float(eps))
    },
}


def compute(name, inputs):
    for pattern, function in CASES.items():
        match = re.fullmatch(pattern, name)
        if match:
            return function(inputs, *match.groups())
    raise LookupError(f"no public function is mapped to the golden case {name!r}")


def check(case):
    inputs = {
        name: torch.tensor(value, dtype=torch.long if name == "tokens" else torch.float64)
        for name, value in case["inputs"].items()
    }
    for name in case["grads"]:
        inputs[name].requires_grad_()
    results = compute(case["name"], inputs)
    expected = {name: value for name, value in case.items() if name not in ("name", "inputs", "grads")}
    assert expected, "a case must expect something"
    assert set(expected) == set(results)
    for name, value in expected.items():
        value = torch.tensor(value, dtype=torch.float64)
        torch.testing.assert_close(results[name].detach().double(), value, rtol=0, atol=TOLERANCE, msg=name)
    if case["grads"]:
        gradients = torch.autograd.grad(results["loss"], [inputs[name] for name in case["grads"]])
        for gradient, (name, value) in zip(gradients, case["grads"].items(), strict=True):
            value = torch.tensor(value, dtype=torch.float64)
            torch.testing.assert_close(gradient, value, rtol=0, atol=TOLERANCE, msg=f"gradient of {name}")


GOLDEN_CASES = json.loads(GOLDEN.read_text())


@pytest.mark.parametrize("case", GOLDEN_CASES, ids=[f"{n}-{case['name']}" for n, case in enumerate(GOLDEN_CASES)])
def test_golden(case):
    check(case)


def test_shipped_file_is_complete():
    cases = json.loads(SHIPPED.read_text())
    assert len(cases) == 90
    assert all(any(re.fullmatch(pattern, case["name"]) for case in cases) for pattern in CASES)


def shipped(name):
    return next(case for case in json.loads(SHIPPED.read_text()) if case["name"] == name)


def test_a_wrong_name_value_or_gradient_fails():
    case = shipped("ctl/prefix(beta=-1.0)")
    check(case)
    with pytest.raises(LookupError, match="ctl/unheard_of"):
        check(case | {"name": "ctl/unheard_of(beta=-1.0)"})
    with pytest.raises(AssertionError, match="loss"):
        check(case | {"loss": case["loss"] + 1e-8})
    case["grads"]["log_q_now"][0][0][0] += 1e-8
    with pytest.raises(AssertionError, match="gradient of log_q_now"):
        check(case)


def test_kl_in_float64_agrees_to_single_precision():
    case = shipped("kl_in_reward(coef=0.2)")
    log_p, log_ref, reward, mask = (
        torch.tensor(case["inputs"][key], dtype=torch.float64).unsqueeze(0)
        for key in ("log_p", "log_ref", "reward", "mask")
    )
    returns = kl_penalized_returns(log_p, log_ref, reward, 0.2, mask)
    expected = reward - 0.2 * ((log_p - log_ref) * mask).sum(-1)
    torch.testing.assert_close(returns, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(returns[0], torch.tensor(case["returns"], dtype=torch.float64), rtol=0, atol=1e-6)
