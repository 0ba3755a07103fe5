"""Models that sampling has to take care with: other vocabularies, padding that they cannot read or cannot ignore."""

import copy

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, RecurrentGemmaConfig, RwkvConfig, set_seed

from examples.worlds.exact import ExactEvaluator
from trl_repulse.evaluation.log_probs import completion_log_probs
from trl_repulse.evaluation.rare.sampling import draw
from trl_repulse.generation._probe import probe

from ..conftest import BAD, WORDS, build_model, build_tokenizer, word_reward
from ..evaluation_support import sample


def save(folder, tokenizer, size=None, seed=1):
    build_model("gpt2", size or len(tokenizer), seed).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


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


def recurrent(architecture, size):
    """Models whose state reads what is left of a prompt, masked or not."""
    set_seed(0)
    if architecture == "rwkv":
        config = RwkvConfig(vocab_size=size, hidden_size=32, num_hidden_layers=2, context_length=32, eos_token_id=1)
    else:
        shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
        more = {"initializer_range": 0.3, "w_init_variance_scale": 0.3, "eos_token_id": 1, "pad_token_id": 2}
        config = RecurrentGemmaConfig(vocab_size=size, lru_width=32, attention_window_size=8, **shape, **more)
    return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("architecture", ["rwkv", "recurrent_gemma"])
def test_models_that_read_padding_see_none(tmp_path, tokenizer, prompts, architecture):
    model, texts = recurrent(architecture, len(tokenizer)), prompts["prompt"][:]
    assert probe(model, samples=False).score_by_length
    rows = [tokenizer(text)["input_ids"] for text in texts]
    together = completion_log_probs(model, rows, [[12, 1]] * 4)
    alone = [completion_log_probs(model, [row], [[12, 1]]) for row in rows]
    for both, single in zip(together, zip(*alone, strict=True), strict=True):
        assert both.tolist() == pytest.approx(torch.cat(single).tolist(), abs=1e-4)
    settings = {"num_samples": 600, "shard_size": 2400, "batch_size": 1200, "max_completion_length": 2}
    found = sample(tmp_path / "s", model, texts, tokenizer=tokenizer, **settings)
    evaluator = ExactEvaluator(tokenizer, texts, lambda t: torch.zeros(len(t)), [BAD], 2)
    probs = evaluator.log_probs(model).exp()  # of a prompt at a time
    drawn = [[token for token in row if token >= 0] for row in evaluator.completion_ids.tolist()]
    rewards = torch.tensor(word_reward(tokenizer.batch_decode(drawn, skip_special_tokens=True)), dtype=torch.float64)
    for values, exact in zip(found.column(), (probs @ rewards).tolist(), strict=True):
        assert abs(values.mean() - exact) < 4.5 * values.std() / 600**0.5
    surprise = -found.column("log_prob") - found.column("entropy")  # 0 in expectation, if drawn as scored
    assert np.all(np.abs(surprise.mean(axis=1)) < 4.5 * surprise.std(axis=1) / 600**0.5)
