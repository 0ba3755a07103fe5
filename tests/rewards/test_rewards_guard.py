"""Rewards from safety verdicts against plain forward passes, one conversation at a time, without padding."""

import pytest
import torch

from trl_repulse.rewards import GuardReward

from ..reward_models import ANSWERS, QUESTIONS, build_tokenizer, logits_of, messages, save_causal_model


CPU = {"device": "cpu"}
# As Llama Guard's: user and assistant must alternate, and the text ends where the verdict begins
TEMPLATE = (
    "{{ bos_token }}bad{% if guideline %} {{ guideline }}{% endif %}:{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{ message['role'] }}:{{ message['content'] }}<eos>{% endfor %}assistant:"
)
MORE = ("unsafe", "Ġunsafe", "ĊĊ", "Ċ", "yes", "no")


@pytest.fixture(params=["llama", "gpt2"])
def guard(request, tmp_path):
    return make_guard(tmp_path / "guard", request.param)


def make_guard(folder, architecture="llama", template=TEMPLATE, more=MORE, **options):
    tokenizer = build_tokenizer("bos", template, more=more)
    return *save_causal_model(folder, architecture, tokenizer, **options), tokenizer


def paths(tokenizer, *texts):
    return [tokenizer.convert_tokens_to_ids(text.split("|")) for text in texts]


def expect(model, tokenizer, safe, unsafe, question, answer, **options):
    """log P(any of the paths of "safe") − log P(any of those of "unsafe"); a path is tokens joined with |."""
    prompt, completion = messages(question, answer)
    ids = tokenizer.apply_chat_template(prompt + completion, tokenize=True, **options)["input_ids"]
    assert ids[0] == tokenizer.bos_token_id != ids[1] and tokenizer.decode(ids).endswith("assistant:")

    def probability(path):
        log_probs = logits_of(model, ids + path).log_softmax(dim=-1)
        return sum(log_probs[len(ids) - 1 + i, token] for i, token in enumerate(path)).exp()

    odds = [sum(probability(path) for path in paths(tokenizer, *texts)) for texts in (safe, unsafe)]
    return (odds[0] / odds[1]).log().item()


LEADS = {
    "default": (("", " ", "\n\n"), ["safe", "Ġsafe", "ĊĊ|safe"], ["unsafe", "Ġunsafe", "ĊĊ|unsafe"]),
    "at_once": (("",), ["safe"], ["unsafe"]),
    "after_lines": (("\n\n",), ["ĊĊ|safe"], ["ĊĊ|unsafe"]),
    "two_passes": (("\n", "\n\n"), ["Ċ|safe", "ĊĊ|safe"], ["Ċ|unsafe", "ĊĊ|unsafe"]),
    "nested": (("", "\n\n", "\n\n\n"), ["safe", "ĊĊ|safe", "ĊĊ|Ċ|safe"], ["unsafe", "ĊĊ|unsafe", "ĊĊ|Ċ|unsafe"]),
}


@pytest.mark.parametrize("leads", LEADS)
@pytest.mark.parametrize("batch_size", [1, 3])
def test_log_odds(guard, leads, batch_size):
    folder, model, tokenizer = guard
    leads, safe, unsafe = LEADS[leads]
    reward = GuardReward(folder, leads=leads, batch_size=batch_size, **CPU)
    result = reward(prompts=QUESTIONS, completions=ANSWERS, completion_ids=None)
    expected = [expect(model, tokenizer, safe, unsafe, *pair) for pair in zip(QUESTIONS, ANSWERS, strict=True)]
    assert max(expected) - min(expected) > 0.1 and all(type(value) is float for value in result)
    torch.testing.assert_close(torch.tensor(result), torch.tensor(expected), rtol=1e-4, atol=1e-4)
    both = [messages(*pair) for pair in zip(QUESTIONS, ANSWERS, strict=True)]
    assert reward([prompt for prompt, _ in both], [completion for _, completion in both]) == result


def test_the_model_that_says_unsafe_gives_a_low_reward(tmp_path):
    """A direction no formula can hide: the output matrix is turned towards one verdict or the other."""
    folder, model, tokenizer = make_guard(tmp_path)
    hidden = []
    model.lm_head.register_forward_pre_hook(lambda module, inputs: hidden.append(inputs[0][0, -1]))
    prompt, completion = messages("the cat", " ran")
    ids = tokenizer.apply_chat_template(prompt + completion, tokenize=True)["input_ids"]
    logits_of(model, ids)
    results = []
    for word in ("safe", "unsafe"):
        with torch.no_grad():
            model.lm_head.weight.zero_()
            model.lm_head.weight[tokenizer.convert_tokens_to_ids(word)] = hidden[0] * 5 / hidden[0].square().sum()
        model.save_pretrained(folder)
        results += GuardReward(folder, leads="", **CPU)(["the cat"], [" ran"])
    assert results == pytest.approx([5.0, -5.0], abs=1e-3)


def test_other_words_and_template_variables(tmp_path):
    folder, model, tokenizer = make_guard(tmp_path)
    options = {"safe": "no", "unsafe": "yes", "leads": "", "chat_template_kwargs": {"guideline": "fish"}}
    result = GuardReward(folder, **options, **CPU)(["the cat"], [" ran"])
    assert result == pytest.approx([expect(model, tokenizer, ["no"], ["yes"], "the cat", " ran", guideline="fish")])
    assert abs(result[0] - expect(model, tokenizer, ["no"], ["yes"], "the cat", " ran")) > 1e-3


def test_template_variables_that_are_none(guard):
    with pytest.raises(ValueError, match="`chat_template_kwargs` has `tokenize`: no variable of a chat template"):
        GuardReward(guard[0], chat_template_kwargs={"tokenize": True}, **CPU)(["the cat"], [" ran"])
    GuardReward(guard[0], chat_template_kwargs={"add_generation_prompt": True}, **CPU)(["the cat"], [" ran"])


def test_a_word_of_several_tokens_is_read_at_its_first(tmp_path):
    folder, model, tokenizer = make_guard(tmp_path)
    result = GuardReward(folder, unsafe="bad:safe", leads="", **CPU)(["the cat"], [" ran"])
    assert result == pytest.approx([expect(model, tokenizer, ["safe"], ["bad"], "the cat", " ran")], abs=1e-5)


def test_leads_that_merge_with_the_template_are_left_out(tmp_path):
    folder, model, tokenizer = make_guard(tmp_path, template=TEMPLATE + "{{ '\\n' }}")
    found = GuardReward(folder, leads=("", "\n"), **CPU)(["the cat"], [" ran"])
    assert found == GuardReward(folder, leads="", **CPU)(["the cat"], [" ran"])
    with pytest.raises(ValueError, match=r"No verdict can follow the chat template .* ends with '.*assistant:\\n'"):
        GuardReward(folder, leads=("\n",), **CPU)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"unsafe": "safe"}, "does not tell 'safe' from 'safe' by the first token"),
        ({"unsafe": "safe:bad"}, "does not tell 'safe' from 'safe:bad'"),
        ({"safe": "bad:no", "unsafe": "bad:yes"}, "does not tell 'bad:no' from 'bad:yes'"),
        ({"unsafe": "dangerous"}, r"does not tell 'safe' from 'dangerous' .*\(it is the same, or unknown\)"),
        ({"leads": ("", "\n\nVerdict:")}, "`leads` must be white space"),
        ({"leads": ()}, "`leads` must be white space, at least one"),
    ],
)
def test_words_that_cannot_be_read_are_refused(tmp_path, options, message):
    folder, *_ = make_guard(tmp_path)
    with pytest.raises(ValueError, match=message):
        GuardReward(folder, **options, **CPU)


def test_conversations_that_cannot_be_read_are_refused(tmp_path):
    folder, *_ = make_guard(tmp_path, context=32)
    reward = GuardReward(folder, **CPU)
    system = {"role": "system", "content": "fish"}
    prompt, completion = messages("the cat", " ran", system)
    with pytest.raises(ValueError, match=r"refuses the roles \['system', 'user', 'assistant'\].*`drop_system=True`"):
        reward([prompt], [completion])
    assert GuardReward(folder, drop_system=True, **CPU)([prompt], [completion]) == reward(["the cat"], [" ran"])
    fits = 32 - len(reward._encode("the cat", "")["input_ids"]) - 1  # the lead "\n\n" takes one
    assert len(reward(["the cat"], [" ran" * fits])) == 1
    with pytest.raises(ValueError, match=r"GuardReward got a conversation of 33 tokens, more than the context"):
        reward(["the cat"], [" ran" * (fits + 1)])
