"""Each use of a model in evaluation checks that it is what it is passed as; beside each, the neighbour that is right."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.utils.logging import warning_once

from examples.worlds.exact import ExactEvaluator
from examples.worlds.exact_tracking import exact_log_prob_bad
from trl_repulse.evaluation._generation import as_function, transformers_engine
from trl_repulse.evaluation.gcg import GCGConfig, run_gcg
from trl_repulse.evaluation.log_probs import completion_log_probs
from trl_repulse.evaluation.rare.sampling import draw, find_temperature
from trl_repulse.evaluation.sampling import SamplingSettings, sample_completions
from trl_repulse.generation import TransformersGenerator

from ..conftest import WORDS, build_model, build_tokenizer, word_reward
from ..evaluation_support import sample
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


# Other vocabularies, and padding that models cannot read


def save(path, tokenizer, size=None, seed=1):
    build_model("gpt2", size or len(tokenizer), seed).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


def test_a_reference_of_another_vocabulary_is_refused(tmp_path, model_dirs):
    shuffled = save(tmp_path / "shuffled", build_tokenizer(WORDS[::-1]))
    with pytest.raises(ValueError, match=r"The reference `.*shuffled` has another vocabulary .*'bad' for its token 3"):
        sample(tmp_path / "s", model_dirs["gpt2"], ["unknown"], reference=shuffled)
    one = save(tmp_path / "one", build_tokenizer([*WORDS[:-2], "bird", WORDS[-1]]))
    with pytest.raises(ValueError, match="'bird' for its token 9, 'fish'; give a reference with the model's"):
        sample(tmp_path / "s", model_dirs["gpt2"], ["the cat", "fish"], reference=one)
    assert not (tmp_path / "s").exists()
    sample(tmp_path / "s", model_dirs["gpt2"], ["the cat"], reference=one)  # none of the prompts' tokens


def test_a_reference_of_fewer_tokens_is_refused(tmp_path, model_dirs, tokenizer):
    small = build_model("gpt2", len(tokenizer) - 2)
    small.save_pretrained(tmp_path / "small")  # without a tokenizer
    for reference, name in ((small, ""), (str(tmp_path / "small"), str(tmp_path / "small"))):
        message = rf"The reference `{name}` has a vocabulary of 17 tokens and the model one of 19; resize"
        with pytest.raises(ValueError, match=message):
            sample(tmp_path / "s", model_dirs["gpt2"], ["fish"], reference=reference)
    assert not (tmp_path / "s").exists()


def test_a_base_model_is_a_reference_for_its_chat_model(tmp_path, tokenizer):
    """Which has further tokens, and another name for one that the base had in reserve."""
    base, chat = build_tokenizer(), build_tokenizer()
    base.add_tokens(["<reserved>"], special_tokens=True)
    chat.add_tokens(["<user>", "<more>"], special_tokens=True)
    chat.chat_template = "{% for m in messages %}<user>{{ m.content }}{% endfor %}"
    model = save(tmp_path / "chat", chat)
    reference = save(tmp_path / "base", base, size=len(chat) + 5)
    prompts = [[{"role": "user", "content": "the cat"}]]
    found = sample(tmp_path / "s", model, prompts, lambda completions, **_: [0.0] * len(completions), reference)
    assert found.column("kl").shape == (1, 4)


def test_a_padding_token_beyond_the_embeddings(tmp_path, model_dirs, tokenizer):
    """As of a tokenizer that was given one, and a model that was not resized."""
    padded = copy.deepcopy(tokenizer)
    padded.add_special_tokens({"pad_token": "<more>"})
    model = AutoModelForCausalLM.from_pretrained(model_dirs["llama"])
    assert padded.pad_token_id >= model.get_input_embeddings().num_embeddings
    arguments = (model, ["the cat", "fish", "the dog ran"], word_reward)
    found = sample(tmp_path / "a", *arguments, reference=model, tokenizer=padded)
    usual = sample(tmp_path / "b", *arguments, tokenizer=tokenizer)
    assert found.table["completion_ids"] == usual.table["completion_ids"]
    assert draw([model], padded, arguments[1], word_reward, (4,), 2).sample.rewards.shape == (3, 4)
