"""Rewards by name."""

import json

import pytest

from trl_repulse.rewards import ChatReward, GuardReward, SequencePairReward, ToxicityReward
from trl_repulse.rewards.loading import load_reward

from ..reward_models import CHAT_TEMPLATE, build_tokenizer, save_causal_model, save_model


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rewards")
    chat = build_tokenizer(chat_template=CHAT_TEMPLATE)
    return {
        "sequence_pair": save_model(folder / "pair", "deberta", build_tokenizer("pair"))[0],
        "chat": save_model(folder / "chat", "llama", chat)[0],
        "toxicity": save_model(folder / "toxicity", "roberta", build_tokenizer("pair"))[0],
        "guard": save_causal_model(folder / "guard", "llama", chat)[0],
    }


@pytest.mark.parametrize(
    "reward_type, cls, kwargs",
    [
        ("sequence_pair", SequencePairReward, {"max_length": 5}),
        ("chat", ChatReward, {"drop_system": True}),
        ("toxicity", ToxicityReward, {"negate": True}),
        ("guard", GuardReward, {"safe": "cat", "unsafe": "dog", "leads": ("",)}),
    ],
)
def test_models(folders, reward_type, cls, kwargs):
    reward = load_reward(reward_type, folders[reward_type], **kwargs)
    assert type(reward) is cls
    assert {name: getattr(reward, name) for name in kwargs} == kwargs
    direct = cls(folders[reward_type], **kwargs)
    assert reward(["the cat"], [" ran"]) == direct(["the cat"], [" ran"])


def test_no_type_leaves_the_path_to_trl():
    assert load_reward(None, "some/model") == "some/model"


def test_no_code_runs_to_see_what_a_reward_model_is(tmp_path):
    (tmp_path / "code.py").write_text("raise SystemExit('ran')\n")
    config = {"auto_map": {"AutoConfig": "code.Config"}, "architectures": ["OwnRewardModel"], "model_type": "own"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_reward(None, str(tmp_path)) == str(tmp_path)


def test_a_language_model_is_no_reward_model(model_dirs):
    with pytest.raises(ValueError, match=r"`reward_model_path=.* is a GPT2LMHeadModel and no classifier"):
        load_reward(None, model_dirs["gpt2"])


@pytest.mark.parametrize(
    "arguments, kwargs, words",
    [
        ((None,), {}, "`reward_model_path` is needed"),
        ((None, "m"), {"max_length": 3}, r"`reward_kwargs` \(max_length\) has no effect without `reward_type`"),
        (("pair", "m"), {}, "`reward_type='pair'` is not one of 'sequence_pair', 'chat'"),
        (("chat",), {}, "`reward_type='chat'` needs `reward_model_path`"),
        (("chat", "m"), {"max_length": 3}, "`reward_kwargs` has `max_length`, which `reward_type='chat'` does not"),
        (("own.py:f", "m"), {}, "`reward_model_path` has no effect with the function 'own.py:f'"),
        (("own.py:f",), {"max_length": 3}, "does not take; it takes label_column"),
        (("own.py:f",), {}, "There is no file `.*own.py`; give the path of a Python file"),
        (("remote", "a,b"), {}, "`url` must be like"),
    ],
)
def test_refuses(arguments, kwargs, words):
    with pytest.raises(ValueError, match=words):
        load_reward(*arguments, **kwargs)
