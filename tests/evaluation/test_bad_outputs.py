"""What is bad: a reward under the threshold, by one comparison everywhere."""

import ast
import json
from pathlib import Path

import numpy as np
import pytest
import torch

import trl_repulse
from trl_repulse import RePULSeTrainer
from trl_repulse._numbers import is_bad
from trl_repulse._rules_of_thumb import bad_threshold_for
from trl_repulse.evaluation.attacks import success_at
from trl_repulse.evaluation.audit_labels import Scored
from trl_repulse.evaluation.gcg.results import _rates
from trl_repulse.evaluation.preferences import RewardedCompletion, _sides
from trl_repulse.evaluation.rare.estimates import prob_bad
from trl_repulse.evaluation.rare.mixture import MixtureSample
from trl_repulse.evaluation.report import estimates
from trl_repulse.math.objective import indicator_log_potential, indicator_transform, is_below


OTHERS = [9.0] * 15


def counts(equal: float, threshold: float) -> dict[str, float]:
    """How many of 16 rewards are bad, of which one is `equal` and the others are high, by all that count them."""
    rewards = [equal, *OTHERS]
    array, tensor = np.array([rewards]), torch.tensor([rewards], dtype=torch.float64)
    sample = MixtureSample(tensor, torch.zeros(1, 16, 1, dtype=torch.float64), (16,))
    sides = _sides([RewardedCompletion("p", f"c{i}", x) for i, x in enumerate(rewards)], threshold, 0.0, None)
    return {
        "trainer": (tensor.float() < threshold).sum().item(),
        "transform": (tensor - indicator_transform(tensor, 1.0, threshold)).sum().item(),
        "potential": (indicator_log_potential(tensor, threshold, 0.0) == 0).sum().item(),
        "evaluate": 16 * estimates(array[None], [threshold], [])[f"P(r < {threshold:g})"].value,
        "rare events": 16 * prob_bad(sample, threshold).value,
        "attacks": 16 * success_at(array, threshold, 1).value,
        "gcg": 16 * _rates({"before": array, "after": array}, threshold, [1], 0.95)["after"]["bad_share"]["value"],
        "audit": (Scored(["p"] * 16, ["c"] * 16, array).strata(threshold, threshold) == 0).sum(),
        "negatives": len(sides[0][1]),
        "not negatives": 16 - len(sides[0][0]),
        "number": float(is_bad(equal, threshold)),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("threshold", [0.7, -0.3])
def test_all_count_the_same_rewards(threshold, dtype):
    equal = torch.tensor(threshold, dtype=dtype)
    counted = counts(equal.item(), threshold)
    expected = float(equal.float() < threshold) if dtype is torch.bfloat16 else 0.0  # 0.7 is 0.699 in bfloat16
    assert counted == pytest.approx(dict.fromkeys(counted, expected))
    assert counts(equal.item() - 0.01, threshold) == pytest.approx(dict.fromkeys(counted, 1.0))
    assert set(counts(equal.item() + 0.01, threshold).values()) == {0.0}


def test_a_reward_equal_to_the_threshold_is_not_written_as_negative_data(make, tmp_path):
    def reward(completions, **kwargs):
        return [torch.tensor(0.7 if i % 2 else 0.2) for i, _ in enumerate(completions)]

    settings = {"proposal": "policy", "potential": "indicator", "target_dist_beta": None, "save_negatives": True}
    settings |= {"alpha_normalization": "none", "bad_reward_threshold": 0.7}
    trainer = make(RePULSeTrainer, reward_funcs=reward, **settings)
    trainer.train()
    rows = (tmp_path / "out" / "negatives.jsonl").read_text(encoding="utf-8").splitlines()
    assert {round(json.loads(row)["reward"], 3) for row in rows} == {0.2}
    fractions = [row["bad_fraction"] for row in trainer.state.log_history if "bad_fraction" in row]
    assert fractions == [0.5, 0.5] and len(rows) == 16


def test_a_measured_threshold_counts_as_training_does():
    """The 2 % quantile is a reward that many samples have; in float64 these would be under its decimal."""
    lower = -5, -2, -1, -0.5, -0.2, 0, 0.2, 0.35, 0.45, 0.55, 0.62
    rewards = np.array([*lower, *[0.7] * 500, *[0.9] * 89], np.float32).astype(np.float64)
    threshold = bad_threshold_for(rewards)
    assert threshold == 0.7 and (torch.tensor(rewards).float() < threshold).sum() == 11


def test_rewards_without_a_number_and_large_ones():
    values = np.array([np.nan, 1e300, -1e300, np.inf])
    assert is_bad(values, 0.0).tolist() == is_below(torch.tensor(values), 0.0).tolist() == [False, False, True, False]
    assert not is_bad(float("nan"), 0.0) and is_bad(-1, 0.0) and is_bad(np.float32(-1), 1e300)
    assert is_below(torch.tensor([-1.0, 1.0]), 1e300).all()


def test_nothing_else_compares_rewards_with_a_threshold():
    names = {"threshold", "bad_reward_threshold", "_threshold", "eta"}
    for path in Path(trl_repulse.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Compare) and not isinstance(node.ops[0], ast.Is | ast.IsNot | ast.In | ast.NotIn):
                last = node.comparators[-1]
                assert getattr(last, "id", getattr(last, "attr", None)) not in names, f"{path}:{node.lineno}"
