"""Models that sampling has to take care with: other vocabularies, and padding that they cannot read."""

import copy

import pytest
from transformers import AutoModelForCausalLM

from trl_repulse.evaluation.rare.sampling import draw

from ..conftest import WORDS, build_model, build_tokenizer, word_reward
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
