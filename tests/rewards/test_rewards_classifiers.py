"""Rewards from sequence classifiers against plain forward passes, one text at a time, without padding."""

import inspect
import math

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForSequenceClassification
from trl.trainer.utils import get_callable_name, is_async_callable

from trl_repulse import rewards
from trl_repulse.rewards import ChatReward, SequencePairReward, ToxicityReward

from ..reward_models import (
    ANSWERS,
    CHAT_TEMPLATE,
    QUESTIONS,
    build_tokenizer,
    logits_of,
    messages,
    save_causal_model,
    save_model,
)


CPU = {"device": "cpu"}


@pytest.fixture
def pair(tmp_path):
    tokenizer = build_tokenizer("pair")
    return *save_model(tmp_path / "pair-model", "deberta", tokenizer), tokenizer


@pytest.fixture
def chat(tmp_path):
    tokenizer = build_tokenizer("bos", CHAT_TEMPLATE)
    return *save_model(tmp_path / "chat-model", "llama", tokenizer), tokenizer


def conversations():
    both = [messages(question, answer) for question, answer in zip(QUESTIONS, ANSWERS, strict=True)]
    return [prompt for prompt, _ in both], [completion for _, completion in both]


def close(result, expected):
    assert type(result) is list and all(type(value) is float for value in result)
    assert len({round(value, 3) for value in expected}) > 1  # an all-equal model would agree with anything
    torch.testing.assert_close(torch.tensor(result), torch.tensor(expected), rtol=1e-4, atol=1e-5)


def expect_pair(model, tokenizer, questions, answers, **options):
    rows = [tokenizer(*pair, **options)["input_ids"] for pair in zip(questions, answers, strict=True)]
    return [logits_of(model, row)[0].item() for row in rows]


@pytest.mark.parametrize("batch_size", [1, 2, 16])
def test_pairs(pair, batch_size):
    folder, model, tokenizer = pair
    reward = SequencePairReward(folder, batch_size=batch_size, **CPU)
    expected = expect_pair(model, tokenizer, QUESTIONS, ANSWERS)
    close(reward(prompts=QUESTIONS, completions=ANSWERS, completion_ids=None, trainer_state=None), expected)
    prompts, completions = conversations()
    close(reward(prompts, completions), expected)


def test_pairs_are_cut(pair):
    folder, model, tokenizer = pair
    expected = expect_pair(model, tokenizer, QUESTIONS, ANSWERS, truncation=True, max_length=7)
    close(SequencePairReward(folder, max_length=7, **CPU)(QUESTIONS, ANSWERS), expected)
    assert expected != expect_pair(model, tokenizer, QUESTIONS, ANSWERS)


@pytest.mark.parametrize("limit", ["tokenizer", "model"])
def test_limits_of_tokenizer_and_model_cut_by_default(tmp_path, limit):
    tokenizer = build_tokenizer("pair")
    context = 8 if limit == "model" else 64
    if limit == "tokenizer":
        tokenizer.model_max_length = 8
    folder, model = save_model(tmp_path, "bert", tokenizer, context=context)
    questions, answers = ["the cat " * 6, "dog"], [" ran" * 9, " sat"]
    inputs = [tokenizer(*texts, truncation=True, max_length=8) for texts in zip(questions, answers, strict=True)]
    expected = [
        logits_of(model, row["input_ids"], token_type_ids=torch.tensor([row["token_type_ids"]]))[0].item()
        for row in inputs
    ]
    assert [len(row["input_ids"]) for row in inputs] == [8, 5]
    close(SequencePairReward(folder, **CPU)(questions, answers), expected)


@pytest.mark.parametrize("architecture", ["roberta", "mpnet"])
def test_positions_that_begin_after_the_padding_token(tmp_path, architecture):
    """RoBERTa's and MPNet's: of 10 positions 8 are usable, and the padding that counts is the model's, not the tokenizer's."""
    tokenizer = build_tokenizer("pair")
    folder, model = save_model(tmp_path, architecture, tokenizer, context=10, pad_token_id=1, type_vocab_size=1)
    texts = ["the cat ran sat ate the fish bad dog", "dog"]
    ids = [tokenizer(text, truncation=True, max_length=8)["input_ids"] for text in texts]
    assert [len(row) for row in ids] == [8, 3]
    close(ToxicityReward(folder, **CPU)(["", ""], texts), [logits_of(model, row)[0].item() for row in ids])


def test_question_of_a_conversation(pair):
    folder, model, tokenizer = pair
    before = [{"role": "system", "content": "the dog"}, *messages("fish", "ran")[0], *messages("", "ate")[1]]
    prompt, completion = messages("the cat", " sat", *before)
    last = SequencePairReward(folder, **CPU)([prompt], [completion])
    whole = SequencePairReward(folder, question="conversation", **CPU)([prompt], [completion])
    questions = ["the cat", "the dog\nfish\nate\nthe cat"]
    close(last + whole, expect_pair(model, tokenizer, questions, [" sat", " sat"]))
    with pytest.raises(ValueError, match="'the dog' has no message of the role 'user'.*`question='conversation'`"):
        SequencePairReward(folder, **CPU)([before[:1]], [completion])


def test_content_in_parts(pair):
    folder, *_ = pair
    reward = SequencePairReward(folder, **CPU)
    parts = [{"type": "text", "text": "the"}, {"type": "image"}, {"type": "text", "text": " cat"}]
    prompt, completion = messages("the cat", " sat")
    assert reward([[{"role": "user", "content": parts}]], [completion]) == reward([prompt], [completion])
    assert reward([prompt], [[{"role": "assistant", "content": None}]]) == reward(["the cat"], [""])


def test_precision_is_the_checkpoints_or_the_chosen_one(pair):
    folder, model, tokenizer = pair
    expected = expect_pair(model.to(torch.bfloat16), tokenizer, QUESTIONS, ANSWERS)
    reward = SequencePairReward(folder, dtype="bfloat16", batch_size=1, **CPU)
    assert reward(QUESTIONS, ANSWERS) == expected
    model.save_pretrained(folder)
    assert SequencePairReward(folder, batch_size=1, **CPU)(QUESTIONS, ANSWERS) == expected


def expect_chat(model, tokenizer, **options):
    prompts, completions = conversations()
    expected = []
    for prompt, completion in zip(prompts, completions, strict=True):
        ids = tokenizer.apply_chat_template(prompt + completion, tokenize=True, **options)["input_ids"]
        assert ids.count(tokenizer.bos_token_id) == 1
        expected.append(logits_of(model, ids)[0].item())
    return expected


@pytest.mark.parametrize("kind", ["bos", "plain"])
@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_chats(tmp_path, kind, architecture, batch_size):
    tokenizer = build_tokenizer(kind, CHAT_TEMPLATE)
    folder, model = save_model(tmp_path, architecture, tokenizer)
    reward = ChatReward(folder, batch_size=batch_size, **CPU)
    expected = expect_chat(model, tokenizer)
    close(reward(*conversations()), expected)
    close(reward(QUESTIONS, ANSWERS), expected)


def test_a_token_in_front_that_a_prompt_already_has_is_not_added(tmp_path):
    folder, _ = save_model(tmp_path, "llama", build_tokenizer("bos"))
    reward = ToxicityReward(folder, **CPU)
    assert reward(["<s>the cat"], [" ran"]) == reward(["the cat"], [" ran"]) != reward(["<s><s>the cat"], [" ran"])


def test_a_token_in_front_is_left_where_only_the_tokenizer_adds_it(tmp_path):
    tokenizer = build_tokenizer("bos", CHAT_TEMPLATE.removeprefix("{{ bos_token }}"))
    folder, model = save_model(tmp_path, "llama", tokenizer)
    ids = tokenizer("user:the cat<eos>assistant: ran<eos>")["input_ids"]
    assert ids.count(tokenizer.bos_token_id) == 1
    result = ChatReward(folder, **CPU)(["the cat"], [" ran"])
    assert result == pytest.approx([logits_of(model, ids)[0].item()], rel=1e-5)


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_a_model_without_padding_reads_the_last_token(tmp_path, architecture):
    """The texts end with EOS, which could not serve as padding: the classifier would look past it."""
    tokenizer = build_tokenizer("plain", CHAT_TEMPLATE, pad=None)
    folder, model = save_model(tmp_path, architecture, tokenizer, pad_token_id=None)
    close(ChatReward(folder, **CPU)(*conversations()), expect_chat(model, tokenizer))


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_the_padding_of_one_batch_does_not_end_the_texts_of_the_next(tmp_path, architecture):
    """Token 0 pads the first batch; it ends the text of the second, as GPT-2's "!" does."""
    tokenizer = build_tokenizer("plain", pad=None)
    tokenizer.add_tokens(["<pad>"])
    folder, model = save_model(tmp_path, architecture, tokenizer, pad_token_id=None)
    texts = ["dog", "the cat ran", "the cat sat ate<pad>", "the cat ate the fish<pad>"]
    ids = [tokenizer(text)["input_ids"] for text in texts]
    assert [row[-1] == 0 for row in ids] == [False, False, True, True]
    result = ToxicityReward(folder, batch_size=2, **CPU)([""] * 4, texts)
    close(result, [logits_of(model, row)[0].item() for row in ids])


def test_template_variables_and_system_messages(chat):
    folder, model, tokenizer = chat
    reward = ChatReward(folder, chat_template_kwargs={"extra": "fish"}, **CPU)
    close(reward(*conversations()), expect_chat(model, tokenizer, extra="fish"))
    prompt, completion = messages("the cat", " ran", {"role": "system", "content": "bad dog"})
    kept, dropped = (ChatReward(folder, drop_system=drop, **CPU)([prompt], [completion]) for drop in (False, True))
    assert dropped == ChatReward(folder, **CPU)(["the cat"], [" ran"]) != kept


PARTS_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] }}:{% for part in message['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}<eos>{% endfor %}"
)


@pytest.mark.parametrize(
    "refusing", ["", "{% if messages[0]['content'] is string %}{{ raise_exception('text') }}{% endif %}"]
)
def test_templates_of_content_in_parts(chat, refusing):
    folder, model, tokenizer = chat
    expected = expect_chat(model, tokenizer)
    tokenizer.chat_template = refusing + PARTS_TEMPLATE
    tokenizer.save_pretrained(folder)
    assert refusing or "cat" not in tokenizer.apply_chat_template(conversations()[0][0], tokenize=False)  # the control
    close(ChatReward(folder, **CPU)(*conversations()), expected)


def test_chats_that_cannot_be_read_are_refused(tmp_path, chat, pair):
    folder, _, tokenizer = chat
    with pytest.raises(ValueError, match="has no chat template; save one with it, or use a reward that reads plain"):
        ChatReward(pair[0], **CPU)
    with pytest.raises(ValueError, match=r"conversation of 10\d tokens, more than the context .*\(64\).*'the cat ran"):
        ChatReward(folder, **CPU)(["the cat"], [" ran" * 100])
    for template, message in (
        ("{{ messages[0]['content'] }}", "leaves out what the assistant said"),
        (
            "{{ raise_exception('no ' + messages[0]['role']) }}",
            r"refuses the roles \['user', 'assistant'\].*'Is this .*no user",
        ),
    ):
        tokenizer.chat_template = template
        tokenizer.save_pretrained(folder)
        with pytest.raises(ValueError, match=message):
            ChatReward(folder, **CPU)


@pytest.mark.parametrize("architecture", ["gpt2", "bert"])
@pytest.mark.parametrize("include_prompt", [True, False])
def test_whole_texts(tmp_path, architecture, include_prompt):
    tokenizer = build_tokenizer("pair" if architecture == "bert" else "plain")
    names = {"id2label": {0: "kind", 1: "rude", 2: "toxic"}}
    folder, model = save_model(tmp_path, architecture, tokenizer, num_labels=3, **names)
    reward = ToxicityReward(folder, label="toxic", include_prompt=include_prompt, batch_size=2, **CPU)
    texts = [q + a if include_prompt else a for q, a in zip(QUESTIONS, ANSWERS, strict=True)]
    logits = [logits_of(model, tokenizer(text)["input_ids"] or [tokenizer.eos_token_id]) for text in texts]
    toxic = [row[2].item() for row in logits]
    close(reward(QUESTIONS, ANSWERS), toxic)
    close(reward(QUESTIONS[::-1], ANSWERS[::-1]), toxic[::-1])  # an empty one may be first or last
    negated = ToxicityReward(folder, label=2, include_prompt=include_prompt, negate=True, **CPU)
    close(negated(QUESTIONS, ANSWERS), [-x for x in toxic])
    probabilities = [row.softmax(0)[2].item() for row in logits]
    odds = ToxicityReward(folder, label=2, output="log_odds", include_prompt=include_prompt, **CPU)
    close(odds(QUESTIONS, ANSWERS), [math.log(p / (1 - p)) for p in probabilities])


def test_whole_texts_of_conversations_and_truncation(tmp_path):
    tokenizer = build_tokenizer()
    folder, model = save_model(tmp_path, "gpt2", tokenizer)
    prompt, completion = messages("the cat", "ran", {"role": "system", "content": "bad dog"})
    ids = tokenizer("bad dog\nthe cat\nran")["input_ids"]
    whole, cut = (ToxicityReward(folder, max_length=most, **CPU)([prompt], [completion]) for most in (None, 2))
    close(whole + cut, [logits_of(model, ids)[0].item(), logits_of(model, ids[:2])[0].item()])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"label": None}, "has 2 labels and `label=None` is none of them; choose a number below 2 or one of 'kind'"),
        ({"label": "toxic"}, "`label='toxic'` is none of them"),
        ({"label": 2}, "`label=2` is none of them"),
        ({"label": 0, "output": "probability"}, "`output='probability'` must be one of 'logit', 'log_odds'"),
        ({"label": 0, "max_length": 0}, "`max_length=0` must be at least 1"),
        ({"label": 0, "batch_size": 0}, "`batch_size=0` must be at least 1"),
        ({"label": 0, "dtype": "bfloat"}, "`dtype='bfloat'` is none of torch's; give 'auto', or one such as"),
    ],
)
def test_bad_arguments_are_refused(tmp_path, options, message):
    folder, _ = save_model(tmp_path, "gpt2", build_tokenizer(), num_labels=2, id2label={0: "kind", 1: "rude"})
    with pytest.raises(ValueError, match=message):
        ToxicityReward(folder, **CPU | options)


def test_more_bad_arguments_are_refused(pair):
    with pytest.raises(ValueError, match="`question='first'` must be one of 'last', 'conversation'"):
        SequencePairReward(pair[0], question="first", **CPU)
    with pytest.raises(ValueError, match="has one label, whose logit is its log-odds"):
        ToxicityReward(pair[0], output="log_odds", **CPU)
    message = "The reward model `no/such/folder` cannot be loaded: there is no such folder"
    with pytest.raises(ValueError, match=message):
        SequencePairReward("no/such/folder", **CPU)


def save_adapter(folder, labels, **options):
    """An adapter for a classifier over a language model, without a tokenizer, as TRL's RewardTrainer leaves one."""
    tokenizer = build_tokenizer()
    base, _ = save_causal_model(folder / "base", "llama", tokenizer, num_labels=2)
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=labels)
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False, **options))
    adapted.save_pretrained(folder / "adapter")
    return str(folder / "adapter"), adapted.eval(), tokenizer


@pytest.mark.parametrize("labels", [1, 2])
def test_adapters_over_a_language_model(tmp_path, labels):
    folder, model, tokenizer = save_adapter(tmp_path, labels, task_type="SEQ_CLS")
    texts = ["the cat ran", "dog", "the fish sat bad"]
    reward = ToxicityReward(folder, label=labels - 1, **CPU)
    expected = [logits_of(model, tokenizer(text)["input_ids"])[-1].item() for text in texts]
    close(reward([""] * 3, texts), expected)
    assert reward.__name__ == "adapter"
    half = ToxicityReward(folder, label=labels - 1, dtype="bfloat16", **CPU)
    assert {weights.dtype for weights in half._module.parameters()} == {torch.bfloat16}


def test_an_adapter_saved_without_its_head_is_refused(tmp_path):
    folder, *_ = save_adapter(tmp_path, 1)
    with pytest.raises(ValueError, match=r"adapter` cannot be loaded: its base .* has no weights for score\.weight"):
        ToxicityReward(folder, label=0, **CPU)


def test_results_that_are_not_finite_are_refused(pair):
    folder, model, _ = pair
    with torch.no_grad():
        model.classifier.bias.fill_(torch.nan)
    model.save_pretrained(folder)
    with pytest.raises(ValueError, match="SequencePairReward got nan from .* text that begins 'the cat ran'"):
        SequencePairReward(folder, **CPU)(["the cat"], [" ran"])


def test_names(pair):
    reward = SequencePairReward(pair[0], **CPU)
    assert get_callable_name(reward) == reward.__name__ == "pair-model"
    assert SequencePairReward(pair[0], name="helpful", **CPU).__name__ == "helpful"
    assert reward([], []) == []
    assert SequencePairReward.__name__ == "SequencePairReward" and not is_async_callable(reward)
    assert next(iter(inspect.signature(SequencePairReward).parameters)) == "model"


def test_device_by_default(pair, monkeypatch):
    folder, *_ = pair
    reward = SequencePairReward(folder)
    monkeypatch.setattr("trl_repulse.rewards.models.is_initialized", lambda: False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert str(reward._resolve_device()) == "cpu"
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("meta"))
    assert str(reward._resolve_device()) == "meta"
    assert SequencePairReward(folder, device="cpu")._resolve_device() == "cpu"


def test_public_names():
    assert set(rewards.__all__) <= set(dir(rewards))
    assert all(getattr(rewards, name).__name__ == name for name in rewards.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'NoSuchReward'"):
        rewards.NoSuchReward  # noqa: B018
