"""The LM Evaluation Harness: its task gives what `trl-repulse evaluate` gives of the same completions."""

import json

import numpy as np
import pytest

from trl_repulse import embedded
from trl_repulse.evaluation import tails


pytestmark = [pytest.mark.thorough, pytest.mark.filterwarnings("ignore")]
lm_eval = pytest.importorskip("lm_eval")
integration = pytest.importorskip("trl_repulse.evaluation.lm_eval")


def test_the_task_reports_the_tail_of_what_was_drawn(tmp_path):
    rows = embedded.load_prompts("unseen").select(range(3))
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    reward_model = str(embedded.reward_model_path())
    task = integration.tail_task(str(path), 0.0, reward_model, num_samples=40, max_completion_length=8, level=0.9)
    model = {"pretrained": str(embedded.policy_path()), "device": "cpu"}
    found = lm_eval.simple_evaluate("hf", model, tasks=[task], batch_size=8, bootstrap_iters=0)

    samples = found["samples"]["trl_repulse_tail"]
    assert [each["doc"]["prompt"] for each in samples] == rows["prompt"]
    completions = [each["resps"][0] for each in samples]
    assert len({text for row in completions for text in row}) > 40  # drawn, not the likeliest
    reward = integration.as_function(reward_model, None, "cpu")[1]
    again = [
        reward(prompts=[row["prompt"]] * 40, completions=drawn) for row, drawn in zip(rows, completions, strict=True)
    ]
    rewards = np.array([each["filtered_resps"][0] for each in samples])
    assert rewards == pytest.approx(np.array(again), abs=1e-4)

    results = found["results"]["trl_repulse_tail"]
    for name, expected in {"prob_bad": tails.prob_below(rewards, 0.0), "cvar": tails.cvar(rewards, 0.9)}.items():
        ends = [results[f"{name}{end},reward"] for end in ("", "_low", "_high")]
        assert ends == [expected.value, expected.low, expected.high]
        assert np.isfinite(ends).all()


def test_prompts_of_several_messages_are_refused(tmp_path):
    path = tmp_path / "prompts.jsonl"
    messages = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hello"}]
    path.write_text(json.dumps({"prompt": messages}) + "\n", encoding="utf-8")
    with pytest.raises(ValueError, match="Prompt 0 has messages other than one of a user"):
        integration.tail_task(str(path), 0.0, str(embedded.reward_model_path()))


def test_numbers_out_of_range_are_refused_before_anything_is_drawn():
    reward = str(embedded.reward_model_path())
    for threshold, level in ((np.nan, 0.01), (0.0, 2.0)):
        with pytest.raises(ValueError, match="`threshold` is NaN|`level=2.0`"):
            integration.tail_task(embedded.prompts_path("unseen"), threshold, reward, level=level)


def test_a_completion_without_a_reward_is_refused():
    made = integration.RewardFilter(lambda prompts, completions: [1.0, None])
    with pytest.raises(ValueError, match="no finite reward"):
        made.apply([["a", "b"]], [{"prompt": "hello"}])
