"""Each use of a model in evaluation checks that it is what it is passed as; beside each, the neighbour that is right."""

import pytest
import torch
from transformers.utils.logging import warning_once

from examples.worlds.exact import ExactEvaluator
from examples.worlds.exact_tracking import exact_log_prob_bad
from trl_repulse.evaluation._generation import as_function, transformers_engine
from trl_repulse.evaluation.gcg import GCGConfig, run_gcg
from trl_repulse.evaluation.log_probs import completion_log_probs
from trl_repulse.evaluation.rare.sampling import draw, find_temperature
from trl_repulse.evaluation.sampling import SamplingSettings, sample_completions
from trl_repulse.generation import TransformersGenerator

from ..conftest import build_tokenizer, word_reward
from ..models.test_model_checks import MESSAGES, MODELS, V, classifier, gpt2


PROMPTS = ["the cat", "fish"]
GCG = GCGConfig(num_steps=1, prompt_format="raw", suffix_init=" dog dog")
SETTINGS = SamplingSettings(num_samples=2, max_completion_length=2)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "samples"


def held_out(folder, tokenizer, model, reference=None, prompts=PROMPTS):
    options = {"tokenizer": tokenizer, "reference": reference, "progress": False}
    return sample_completions(folder, model, prompts, word_reward, SETTINGS, **options)


USES = {
    "held-out sampling": held_out,
    "reference": lambda folder, tokenizer, model: held_out(folder, tokenizer, gpt2(), model),
    "rare events": lambda folder, tokenizer, model: draw([model], tokenizer, PROMPTS, word_reward, [2], 2),
    "proposal": lambda folder, tokenizer, model: draw([gpt2(), model], tokenizer, PROMPTS, word_reward, [2, 2], 2),
    "temperature": lambda folder, tokenizer, model: find_temperature(model, tokenizer, PROMPTS, 2),
    "exact": lambda folder, tokenizer, model: ExactEvaluator(
        tokenizer, PROMPTS, lambda texts: torch.zeros(len(texts)), [3], 2
    ).evaluate(model),
    "bad tokens": lambda folder, tokenizer, model: exact_log_prob_bad(model, [[3]], [4], 1, [1]),
    "log-probabilities": lambda folder, tokenizer, model: completion_log_probs(model, [[3]], [[4]]),
    "generator": lambda folder, tokenizer, model: TransformersGenerator({"policy": model}, tokenizer),
    "attack": lambda folder, tokenizer, model: run_gcg(model, tokenizer, "the", " cat", GCG),
}


@pytest.mark.parametrize("use", USES)
def test_what_is_no_causal_language_model(tokenizer, folder, use):
    with pytest.raises(ValueError, match=MESSAGES["bert"]):
        USES[use](folder, tokenizer, MODELS["bert"]())


def test_a_reward_that_is_no_classifier_of_one_label(tokenizer):
    for model, message in (
        (gpt2(), "no classifier"),
        (classifier(num_labels=2), "has 2 labels"),
        (gpt2().transformer, "no class"),
    ):
        with pytest.raises(ValueError, match=message):
            as_function(model, tokenizer, torch.device("cpu"))
        with pytest.raises(ValueError, match=message):
            ExactEvaluator(tokenizer, PROMPTS, model, [3], 2, reward_tokenizer=tokenizer)
    assert as_function(classifier(), tokenizer, torch.device("cpu"))[1](prompts=["the"], completions=[" cat"])


@pytest.mark.parametrize("use", ["held-out sampling", "rare events", "bad tokens", "attack"])
def test_prompts_with_tokens_that_the_model_lacks(folder, use):
    larger = build_tokenizer()
    larger.add_tokens([" zebra"])
    uses = {
        "held-out sampling": lambda: held_out(folder, larger, gpt2(), prompts=["the zebra"]),
        "rare events": lambda: draw([gpt2()], larger, ["the zebra"], word_reward, [2], 2),
        "bad tokens": lambda: exact_log_prob_bad(gpt2(), [[3, V]], [4], 1, [1]),
        "attack": lambda: run_gcg(gpt2(), larger, "the zebra", " cat", GCG),
    }
    with pytest.raises(ValueError, match="has the token 19, but the model has embeddings for 19 tokens"):
        uses[use]()


def test_exact_evaluation_with_more_tokens_than_the_model(tokenizer):
    larger = build_tokenizer()
    larger.add_tokens([" zebra"])
    evaluator = ExactEvaluator(larger, ["the zebra"], lambda texts: torch.zeros(len(texts)), [3], 1)
    with pytest.raises(ValueError, match="The model has 19 logits, the tokenizer 20 tokens"):
        evaluator.evaluate(gpt2())


def test_completions_without_an_end_have_one_length_and_a_warning(caplog):
    endless, model = build_tokenizer(), gpt2()
    engine = transformers_engine(model, endless, 3, 4)
    assert not [record for record in caplog.records if "end token" in record.message]
    endless.eos_token = model.generation_config.eos_token_id = None
    caplog.clear()
    warning_once.cache_clear()  # another test may have had it
    engine = transformers_engine(model, endless, 3, 4)
    assert "has an end token" in caplog.text
    assert [len(row) for row in engine([[3], [4, 5]], 0)] == [3, 3]
