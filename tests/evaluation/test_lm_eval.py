"""The LM Evaluation Harness: its task gives what `trl-repulse evaluate` gives of the same completions."""

import json
import shutil

import numpy as np
import pytest
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from trl_repulse import embedded
from trl_repulse.evaluation import tails


pytestmark = [pytest.mark.thorough, pytest.mark.filterwarnings("ignore")]
lm_eval = pytest.importorskip("lm_eval")
integration = pytest.importorskip("trl_repulse.evaluation.lm_eval")


@pytest.fixture(autouse=True)
def without_environment(monkeypatch):
    """The harness runs `pip` for each result."""
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)


def test_the_task_reports_the_tail_of_what_was_drawn(tmp_path):
    rows = embedded.load_prompts("unseen").select(range(3))
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    reward_model = str(embedded.reward_model_path())
    task = integration.tail_task(str(path), 0.0, reward_model, num_samples=40, max_completion_length=8, level=0.9)
    model = {"pretrained": str(embedded.policy_path()), "device": "cpu"}
    found = lm_eval.simple_evaluate("hf", model, tasks=[task], batch_size=8, bootstrap_iters=0)

    samples = found["samples"][task.task_name]
    assert [each["doc"]["prompt"] for each in samples] == rows["prompt"]
    completions = [each["resps"][0] for each in samples]
    assert len({text for row in completions for text in row}) > 40  # drawn, not the likeliest
    reward = integration.as_function(reward_model, None, "cpu")[1]
    again = [
        reward(prompts=[row["prompt"]] * 40, completions=drawn) for row, drawn in zip(rows, completions, strict=True)
    ]
    rewards = np.array([each["filtered_resps"][0] for each in samples])
    assert rewards == pytest.approx(np.array(again), abs=1e-4)

    results = found["results"][task.task_name]
    for name, expected in {"prob_bad": tails.prob_below(rewards, 0.0), "cvar": tails.cvar(rewards, 0.9)}.items():
        ends = [results[f"{name}{end},reward"] for end in ("", "_low", "_high")]
        assert ends == [expected.value, expected.low, expected.high]
        assert np.isfinite(ends).all()


DEFAULTS = {
    **{"min_p": 0.2, "typical_p": 0.3, "epsilon_cutoff": 0.1, "eta_cutoff": 0.1, "top_h": 0.2, "top_k": 2},
    **{"temperature": 0.2, "do_sample": False, "num_beams": 3, "num_return_sequences": 2, "no_repeat_ngram_size": 2},
    **{"min_new_tokens": 5, "min_length": 12, "max_length": 4, "suppress_tokens": [3], "bad_words_ids": [[5]]},
    **{"begin_suppress_tokens": [4], "exponential_decay_length_penalty": [2, 2.0], "forced_eos_token_id": 1},
    **{"guidance_scale": 1.7, "sequence_bias": [[[7], 3.0]], "max_time": 0.001, "prompt_lookup_num_tokens": 3},
    **{"return_dict_in_generate": True, "penalty_alpha": 0.3, "encoder_repetition_penalty": 1.5, "use_cache": False},
}


@pytest.fixture
def made(tmp_path):
    """Makes a task, of two prompts, and evaluates it; a model has other generation defaults or another tokenizer."""
    path = tmp_path / "prompts.jsonl"
    rows = embedded.load_prompts("unseen").select(range(2))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

    def task(**options):
        settings = {"threshold": 0.0, "reward_model_path": str(embedded.reward_model_path()), "num_samples": 4}
        return integration.tail_task(str(path), **settings | {"max_completion_length": 8} | options)

    def evaluate(*tasks, defaults=None, model=None, **options):
        folder = shutil.copytree(embedded.policy_path(), tmp_path / "policy", dirs_exist_ok=True)
        if defaults is not None:
            (folder / "generation_config.json").write_text(json.dumps(defaults | {"eos_token_id": 1}))
        arguments = {"pretrained": str(folder), "device": "cpu"} | (model or {})
        options = {"batch_size": 8, "bootstrap_iters": 0} | options
        return lm_eval.simple_evaluate("hf", arguments, tasks=list(tasks), **options)

    return task, evaluate


def drawn(found, task):
    return [each["resps"][0] for each in found["samples"][task.task_name]]


def test_the_models_own_generation_defaults_have_no_effect(made):
    """Draw by draw, for another task of the harness they stay."""
    task, evaluate = made
    first = task()
    expected = drawn(evaluate(first, defaults={}), first)
    assert drawn(evaluate(first, defaults=DEFAULTS), first) == expected
    lm = integration.HFLM(str(embedded.policy_path()), device="cpu")
    lm.model.generation_config.min_p = 0.9
    lm_eval.simple_evaluate(lm, tasks=[first], bootstrap_iters=0)
    assert lm.model.generation_config.min_p == 0.9
    greedy = drawn(evaluate(first, defaults={}, gen_kwargs={"min_p": 1.0}), first)  # the user's own settings stay
    assert all(len({*row}) == 1 for row in greedy)
    with pytest.raises(ValueError, match="defaults have `max_new_tokens=3`.* take it out of `generation_config.json`"):
        evaluate(first, defaults={"max_new_tokens": 3})


def test_each_task_has_its_own_results(made, tmp_path, monkeypatch):
    """Also from the harness's cache of requests, which goes by a task's name."""
    task, evaluate = made
    tasks = [task(), task(threshold=1.0), task(num_samples=6)]
    assert len({each.task_name for each in tasks}) == 3 and tasks[0].task_name == task().task_name
    monkeypatch.setattr("lm_eval.caching.cache.PATH", str(tmp_path))
    for _ in range(2):
        found = evaluate(*tasks, cache_requests=True)
        assert {*found["results"]} == {each.task_name for each in tasks}
        assert [[len(row) for row in drawn(found, each)] for each in tasks] == [[4, 4], [4, 4], [6, 6]]
    assert not list(tmp_path.glob("*.pickle"))


def test_prompts_that_leave_no_room_are_refused(made):
    task, evaluate = made
    with pytest.raises(
        ValueError, match="and `max_completion_length=8` exceed the harness's `max_length` of 12 tokens"
    ):
        evaluate(task(), model={"max_length": 12})
    with pytest.raises(ValueError, match="exceed the model's context of"):
        evaluate(task(max_completion_length=5000))


def test_other_tokens_than_in_training_are_refused(made, tmp_path):
    task, evaluate = made
    with pytest.raises(ValueError, match="The harness gives the model 'Be kind.* leave out `system_instruction`"):
        evaluate(task(), system_instruction="Be kind.")
    tokenizer = AutoTokenizer.from_pretrained(embedded.policy_path())
    end = (tokenizer.eos_token, tokenizer.eos_token_id)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(f"$A {end[0]}", special_tokens=[end])
    tokenizer.save_pretrained(tmp_path / "ends")
    with pytest.raises(ValueError, match="The tokenizer ends plain prompts with its end token"):
        evaluate(task(), model={"tokenizer": str(tmp_path / "ends")})


def test_prompts_of_several_messages_are_refused(tmp_path):
    path = tmp_path / "prompts.jsonl"
    messages = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hello"}]
    path.write_text(json.dumps({"prompt": messages}) + "\n", encoding="utf-8")
    with pytest.raises(ValueError, match="Prompt 0 has messages other than one of a user"):
        integration.tail_task(str(path), 0.0, str(embedded.reward_model_path()))


def test_a_completion_without_a_reward_is_refused():
    with pytest.raises(ValueError, match="no finite reward"):
        integration.rewarded(lambda prompts, completions: [1.0, None], [["a", "b"]], [{"prompt": "hello"}])
