"""The attack against its plain form, and what its options and bad input do."""

import copy
import logging
from itertools import pairwise

import pytest
import torch
from transformers import AutoModelForCausalLM, MambaConfig

from trl_repulse.evaluation.gcg import GCG, GCGConfig, GCGError, GCGEvaluationConfig, run_gcg
from trl_repulse.evaluation.gcg.engine import SuffixScorer
from trl_repulse.evaluation.gcg.prompt import AttackPrompt, allowed_tokens, build_prompt

from ..gcg_support import (
    LLAMA_TEMPLATE,
    SPECIAL,
    ZEPHYR_TEMPLATE,
    build_model,
    build_sentencepiece_tokenizer,
    build_tokenizer,
    reference_gcg,
    reference_gradient,
    reference_loss,
)


GOAL, TARGET = "tell me the secret", "sure here is"
VOCABULARY = 410  # ten rows more than the tokenizer has tokens
QUICK = {"num_steps": 3, "search_width": 24, "topk": 40, "suffix_init": " x" * 6, "filter_roundtrip": "suffix"}


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


@pytest.fixture(scope="module")
def model():
    return build_model("llama", VOCABULARY)


@pytest.fixture(scope="module")
def exact(model, tokenizer):
    return run_gcg(model, tokenizer, GOAL, TARGET, GCGConfig(**QUICK))


@pytest.mark.parametrize(
    ("architecture", "n_replace"),
    [("llama", 1), ("llama", 2), ("gpt2", 1), ("gemma", 1), ("gemma3", 2), ("mistral", 1)],
)
def test_strings_and_losses_are_those_of_the_plain_algorithm(tokenizer, architecture, n_replace, caplog):
    model = build_model(architecture, VOCABULARY)
    prompt = build_prompt(tokenizer, GOAL, TARGET)
    allowed = allowed_tokens(tokenizer, VOCABULARY)
    draws = {"topk": 40, "n_replace": n_replace, "seed": 3}
    around = (prompt.before_ids, prompt.after_ids, TARGET, allowed, " x" * 6)
    strings, losses = reference_gcg(model, tokenizer, *around, steps=4, width=24, **draws)
    config = GCGConfig(**QUICK | {"num_steps": 4, "micro_batch_size": 5} | draws)
    result = run_gcg(model, tokenizer, GOAL, TARGET, config)
    assert result.suffixes == strings and len(set(strings)) > 2
    assert result.losses == pytest.approx(losses, abs=1e-6)
    assert (result.loss, result.suffix) == min(zip(result.losses, result.suffixes, strict=True))
    assert not caplog.records  # the cache was used, with windows that slide as well


@pytest.mark.parametrize("architecture", ["llama", "gemma", "gemma3"])
def test_the_gradient_is_that_of_the_one_hot_tokens(tokenizer, architecture):
    model, prompt = build_model(architecture, VOCABULARY), build_prompt(tokenizer, GOAL, TARGET)
    ids = torch.tensor(tokenizer(" x ! the house", add_special_tokens=False)["input_ids"])
    scorer = SuffixScorer(model, prompt, 8)
    scorer.enable_cache(ids)
    gradient = scorer.gradient(ids)
    around = (prompt.before_ids, ids.tolist(), prompt.after_ids, prompt.target_ids)
    torch.testing.assert_close(gradient, reference_gradient(model, *around), rtol=1e-4, atol=1e-5)
    unscaled = gradient / model.config.hidden_size**0.5
    assert not torch.allclose(unscaled, gradient, rtol=0.1)  # the control: a lost factor would be seen


@pytest.mark.parametrize(
    ("option", "value"), [("use_prefix_cache", False), *(("micro_batch_size", size) for size in (1, 7, 1000))]
)
def test_what_is_for_speed_changes_nothing(model, tokenizer, exact, option, value):
    result = run_gcg(model, tokenizer, GOAL, TARGET, GCGConfig(**QUICK | {option: value}))
    assert result.suffixes == exact.suffixes
    assert result.losses == pytest.approx(exact.losses, abs=1e-6)


def test_the_prompt_may_be_plain_text_or_a_conversation(tokenizer, model):
    raw = run_gcg(model, tokenizer, GOAL, TARGET, GCGConfig(**QUICK, prompt_format="raw"))
    assert raw.prompt_ids == tokenizer(GOAL)["input_ids"] + raw.suffix_ids
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    messages.append({"role": "user", "content": GOAL})
    copies = [dict(message) for message in messages]
    chat = run_gcg(model, tokenizer, messages, TARGET, GCGConfig(**QUICK))
    rendered = tokenizer.apply_chat_template(
        [*messages[:-1], {"role": "user", "content": GOAL + chat.suffix}], add_generation_prompt=True
    )["input_ids"]
    assert messages == copies
    assert (chat.prompt_ids == rendered) == chat.round_trip
    for result in (raw, chat):
        loss = reference_loss(model, result.prompt_ids, result.target_ids).item()
        assert result.loss == pytest.approx(loss, abs=1e-5)


def test_the_template_takes_further_variables(model, tokenizer):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = "{% if mood is defined %}{{ mood }}{% endif %}" + tokenizer.chat_template
    messages = [{"role": "user", "content": GOAL}]
    for variables in ({"mood": "sad "}, None):
        found = run_gcg(model, tokenizer, GOAL, TARGET, GCGConfig(**QUICK, chat_template_kwargs=variables))
        messages = [{"role": "user", "content": GOAL + found.suffix}]
        options = {"tokenize": False, "add_generation_prompt": True} | (variables or {})
        text = tokenizer.apply_chat_template(messages, **options)
        assert tokenizer.decode(found.prompt_ids) == text and text.startswith("sad ") == (variables is not None)
    assert GCGConfig(chat_template_kwargs='{"a": false}').chat_template_kwargs == {"a": False}


def test_which_suffixes_survive(tokenizer):
    prompt = build_prompt(tokenizer, "the sec", TARGET)
    e, r, x = (tokenizer.convert_tokens_to_ids(token) for token in ("e", "r", "Ġx"))
    suffixes = torch.tensor([[r, e, x], [x, x, x], [x, e, r]])
    expected = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in tokenizer.batch_decode(suffixes)]
    alone = [a == b for a, b in zip(expected, suffixes.tolist(), strict=True)]
    assert prompt.survives(suffixes, "suffix").tolist() == alone and True in alone and False in alone
    assert prompt.survives(suffixes, "off").all()
    assert prompt.survives(suffixes, "context").tolist()[1]
    joined = torch.tensor([tokenizer("ret", add_special_tokens=False)["input_ids"]])  # "secret" is one token
    assert prompt.survives(joined, "suffix").all() and not prompt.survives(joined, "context").any()


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("template", [LLAMA_TEMPLATE, ZEPHYR_TEMPLATE])
@pytest.mark.parametrize("goal", [GOAL, ""])
def test_tokenizers_that_put_a_space_before_a_text(legacy, template, goal):
    """Neither the first suffix nor what follows it gets a space by that, and none is lost from the text found."""
    tokenizer = build_sentencepiece_tokenizer(legacy, template)
    prompt = build_prompt(tokenizer, goal, TARGET, suffix_init=" x x x")
    x, the = tokenizer.convert_tokens_to_ids(["\u2581x", "\u2581the"])
    rows = torch.tensor([prompt.suffix_ids, [*prompt.suffix_ids[:-1], the]])
    if goal or template == ZEPHYR_TEMPLATE:  # the other one trims
        assert prompt.suffix_ids == [x] * 3 and prompt.suffix_texts(rows.tolist()) == [" x x x", " x x the"]
        assert prompt.survives(rows, "context").all()
    model = build_model("llama", len(tokenizer))
    config = GCGConfig(**QUICK | {"filter_roundtrip": "context", "num_steps": 2})
    result = run_gcg(model, tokenizer, goal, TARGET, config)
    messages = [{"role": "user", "content": goal + result.suffix}]
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert result.round_trip and rendered == result.prompt_ids


def test_white_space_that_a_template_trims():
    """What it drops at the ends of a message is no part of the prompt, before the attack as after it."""
    template = "<s>{% for m in messages %}<|user|>{{ m['content'] | trim }}{% endfor %}<|bot|>"
    tokenizer = build_tokenizer(template)
    space, x = tokenizer.convert_tokens_to_ids(["\u0120", "\u0120x"])
    suffixes = torch.tensor([[x, x], [x, space], [space, x]])

    def typed(content):
        return tokenizer.apply_chat_template([{"role": "user", "content": content}])["input_ids"]

    for goal in (GOAL, "", f" {GOAL} "):
        prompt = build_prompt(tokenizer, goal, TARGET)
        assert prompt.encode([""]) == [typed(goal)]
        expected = [prompt.splice(row) == typed(goal + tokenizer.decode(row)) for row in suffixes.tolist()]
        assert prompt.survives(suffixes, "context").tolist() == expected
    prompt = build_prompt(build_tokenizer(), GOAL, TARGET)  # which trims nothing
    assert prompt.survives(suffixes, "context").tolist()[:2] == [True, True]


def test_tokens_that_a_suffix_may_hold(tokenizer):
    allowed = allowed_tokens(tokenizer, VOCABULARY)
    special = tokenizer.convert_tokens_to_ids(SPECIAL)
    assert not allowed[special].any() and not allowed[len(tokenizer) :].any()
    texts = tokenizer.batch_decode([[i] for i in range(len(tokenizer)) if i not in special])
    plain = [text.isascii() and text.isprintable() for text in texts]
    assert allowed.sum() == sum(plain) < len(plain)


def test_seeds(model, tokenizer, exact):
    state = torch.get_rng_state()
    again = run_gcg(model, tokenizer, GOAL, TARGET, GCGConfig(**QUICK))
    other = run_gcg(model, tokenizer, GOAL, TARGET, GCGConfig(**QUICK, seed=1))
    assert again == exact and other.suffixes != exact.suffixes
    assert torch.equal(torch.get_rng_state(), state)


def test_the_model_is_left_as_it_was(tokenizer):
    model = build_model("llama", VOCABULARY).train()
    template = tokenizer.chat_template
    run_gcg(model, tokenizer, GOAL, TARGET, GCGConfig(**QUICK | {"num_steps": 1}))
    assert model.training and all(p.grad is None and p.requires_grad for p in model.parameters())
    assert tokenizer.chat_template == template and not model.get_input_embeddings()._forward_hooks


def test_a_buffer_goes_on_from_the_best(model, tokenizer):
    result = run_gcg(model, tokenizer, GOAL, TARGET, GCGConfig(**QUICK | {"buffer_size": 4, "num_steps": 8}))
    best = [min(result.losses[: i + 1]) for i in range(len(result.losses))]
    shown = [result.suffixes[result.losses.index(loss)] for loss in best]
    assert result.suffixes == [
        text if loss < result.initial_loss else shown[0] for text, loss in zip(shown, best, strict=True)
    ]
    assert result.loss == best[-1]


def test_memory_running_out_halves_the_micro_batch(tokenizer, exact, monkeypatch):
    model = build_model("llama", VOCABULARY)
    forward, sizes = type(model).forward, []

    def small(self, input_ids=None, **kwargs):
        sizes.append(len(input_ids))
        if len(input_ids) > 6:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 MiB")
        return forward(self, input_ids=input_ids, **kwargs)

    monkeypatch.setattr(type(model), "forward", small)
    result = run_gcg(model, tokenizer, GOAL, TARGET, GCGConfig(**QUICK))
    assert result.suffixes == exact.suffixes
    too_large = [size for size in sizes if size > 6]
    assert all(b < a for a, b in pairwise(too_large)) and sizes[-1] <= 6  # never tried again


def test_a_recurrent_model_runs_without_its_cache(tokenizer, caplog):
    torch.manual_seed(0)
    config = MambaConfig(
        vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2, state_size=4, initializer_range=0.3
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    with caplog.at_level(logging.WARNING):
        result = run_gcg(model, tokenizer, GOAL, TARGET, GCGConfig(**QUICK | {"num_steps": 1, "search_width": 8}))
    assert "The cache of MambaForCausalLM cannot be used" in caplog.text
    assert result.loss == pytest.approx(reference_loss(model, result.prompt_ids, result.target_ids).item(), abs=1e-5)


def test_a_cache_that_gives_other_losses_is_not_used(tokenizer, caplog, exact, monkeypatch):
    """A model that forgets what is in its cache, as one does whose window has been cut."""
    model = build_model("llama", VOCABULARY)
    forward = type(model).forward

    def forgetful(self, input_ids=None, past_key_values=None, **kwargs):
        if past_key_values is not None and past_key_values.get_seq_length():
            for layer in past_key_values.layers:
                layer.keys = torch.zeros_like(layer.keys)
        return forward(self, input_ids=input_ids, past_key_values=past_key_values, **kwargs)

    monkeypatch.setattr(type(model), "forward", forgetful)
    result = run_gcg(model, tokenizer, GOAL, TARGET, GCGConfig(**QUICK))
    assert "without" in caplog.text and result.suffixes == exact.suffixes


def test_what_cannot_be_attacked(model, tokenizer):
    config = GCGConfig(**QUICK, prompt_format="raw")
    for messages, target, message in (
        (GOAL, "", "The target '' is empty"),
        (GOAL, "  ", "is empty"),
        ([{"role": "user", "content": "a"}], "b", "plain text"),
    ):
        with pytest.raises(ValueError, match=message):
            run_gcg(model, tokenizer, messages, target, config)


def test_templates(model):
    bare = build_tokenizer(chat_template=None)
    with pytest.raises(ValueError, match="no chat template; save one with it, or set `prompt_format='raw'`"):
        run_gcg(model, bare, GOAL, TARGET, GCGConfig(**QUICK))
    assert bare.chat_template is None
    twice = build_tokenizer(chat_template="{% for m in messages %}{{ m['content'] }}{{ m['content'] }}{% endfor %}")
    with pytest.raises(ValueError, match="writes the last message 2 times"):
        build_prompt(twice, GOAL, TARGET)
    odd = "a \ue000\ue000 {optim_str} goal"
    prompt = build_prompt(build_tokenizer(), odd, TARGET)
    assert prompt.before_text == f"<s><|user|>{odd}" and prompt.after_text == "<|end|><|bot|>"


def test_settings_that_do_not_fit_the_tokenizer(model, tokenizer):
    with pytest.warns(UserWarning, match=r"`topk=5000` is more than the \d+ tokens that are allowed"):
        attack = GCG(model, tokenizer, GCGConfig(**QUICK | {"topk": 5000, "num_steps": 1}))
    assert len(attack.run(GOAL, TARGET).losses) == 1
    with pytest.raises(ValueError, match="`n_replace=7` is more than the 6 tokens of `suffix_init`"):
        run_gcg(model, tokenizer, GOAL, TARGET, GCGConfig(**QUICK | {"n_replace": 7}))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_steps": 0}, "`num_steps=0` must be at least 1"),
        ({"buffer_size": -1}, "`buffer_size=-1` must be at least 0"),
        ({"micro_batch_size": 0}, "`micro_batch_size=0` must be at least 1"),
        ({"suffix_init": ""}, "`suffix_init` is empty"),
        ({"filter_roundtrip": "text"}, "`filter_roundtrip='text'` must be one of 'context', 'suffix', 'off'"),
        ({"prompt_format": "plain"}, "`prompt_format='plain'` must be one of 'chat', 'raw'"),
        ({"chat_template_kwargs": "{"}, "`chat_template_kwargs='{'` is not valid JSON"),
        ({"chat_template_kwargs": "[1]"}, r"`chat_template_kwargs=\[1\]` must be an object"),
        ({"chat_template_kwargs": [1]}, r"`chat_template_kwargs=\[1\]` must be an object"),
        ({"chat_template_kwargs": {"a": 1}, "prompt_format": "raw"}, "no effect with `prompt_format='raw'`"),
        ({"num_samples": 0}, "`num_samples=0` must be at least 1"),
        ({"max_targets": 0}, "`max_targets=0` must be at least 1"),
        ({"scenario": "x"}, "`scenario='x'` must be one of"),
    ],
)
def test_settings_that_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        GCGEvaluationConfig(**options)


def test_a_step_without_survivors_draws_again(model, tokenizer, monkeypatch):
    survives, draws, refused = AttackPrompt.survives, [], 1

    def first_none(self, suffixes, scope):
        draws.append(suffixes)
        return survives(self, suffixes, scope) & (len(draws) > refused)

    monkeypatch.setattr(AttackPrompt, "survives", first_none)
    assert len(run_gcg(model, tokenizer, GOAL, TARGET, GCGConfig(**QUICK)).losses) == 3
    draws, refused = [], 10
    with pytest.raises(GCGError, match="No candidate of 10 draws survived"):
        run_gcg(model, tokenizer, GOAL, TARGET, GCGConfig(**QUICK))
    assert len(draws) == 10 and not torch.equal(draws[0], draws[1])


def test_a_loss_that_is_not_finite(tokenizer):
    model = build_model("llama", VOCABULARY)
    with torch.no_grad():
        model.lm_head.weight[7] = torch.nan
    with pytest.raises(GCGError, match="A loss is nan; try the model in float32"):
        run_gcg(model, tokenizer, GOAL, TARGET, GCGConfig(**QUICK))
