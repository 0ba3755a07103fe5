"""Rewards by name, in pickles, and transforms around a reward function."""

import json
import math
import pickle

import pytest
import torch
from transformers import AutoModelForSequenceClassification
from trl.trainer.utils import get_callable_name

from examples.worlds import two_tokens
from trl_repulse import rewards
from trl_repulse.rewards import ChatReward, GuardReward, RemoteReward, SequencePairReward, ToxicityReward
from trl_repulse.rewards.loading import load_reward
from trl_repulse.rewards.transformed import TransformedReward

from ..reward_models import ANSWERS, CHAT_TEMPLATE, QUESTIONS, build_tokenizer, save_causal_model, save_model
from .test_rewards_server import build


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


# Pickling, as data loaders and launchers of processes need it


KINDS = {
    **{"SequencePairReward": "pair", "ChatReward": "chat", "GuardReward": "guard", "ToxicityReward": "toxicity"},
    **{"load_reward_function": "function", "RemoteReward": "remote"},
}


@pytest.mark.parametrize("kind", KINDS.values())
def test_a_pickled_reward_is_the_same(kind, tmp_path):
    if kind == "remote":
        reward = RemoteReward("http://127.0.0.1:1/", name="judge", label_column="answer")
        again = pickle.loads(pickle.dumps(reward))
        assert vars(again) == vars(reward)
    else:
        if kind == "function":
            (tmp_path / "mine.py").write_text("def brief(completions): return [-len(c) for c in completions]")
            reward = rewards.load_reward_function(f"{tmp_path}/mine.py:brief")
        else:
            reward = build(kind, tmp_path)
        fresh = pickle.dumps(reward)
        expected = reward(QUESTIONS, ANSWERS)
        used = pickle.dumps(reward)
        assert max(len(fresh), len(used)) < 3000  # no weights in it
        assert pickle.loads(fresh)(QUESTIONS, ANSWERS) == pickle.loads(used)(QUESTIONS, ANSWERS) == expected
        again = pickle.loads(used)
    assert get_callable_name(again) == get_callable_name(reward)


def test_no_kind_is_forgotten():
    assert set(rewards.__all__) - {"RewardServer"} == set(KINDS)


# Transforms


def own(prompts, completions, scale=(1.0,), **kwargs):
    """Rewards -2, -1, ... of the completions, times a column of the data set; none for an empty one."""
    return [float(text) * factor if text else None for text, factor in zip(completions, scale, strict=True)]


def test_transforms_what_the_function_returns():
    logged = {}
    arguments = {"prompts": [""] * 3, "completions": ["-2", "", "0.5"], "scale": [1.0, 1.0, 2.0]}
    reward = TransformedReward(own, "exponential", alpha=0.3, beta=-0.5)
    found = reward(**arguments, log_metric=logged.__setitem__)
    assert found[0] == pytest.approx(-2 - 0.3 * math.exp(1.0))
    assert found[1] is None
    assert found[2] == pytest.approx(1 - 0.3 * math.exp(-0.5))
    with pytest.raises(ValueError, match="The reward function 'own' returned nan for completion 0 of 1"):
        reward(prompts=[""], completions=["nan"], scale=[1.0])
    assert logged == {"rewards/own/mean": -0.5}
    assert reward.__name__ == "own_transformed"
    indicator = TransformedReward(own, "indicator", alpha=10.0, threshold=0.5)
    assert indicator(**arguments) == [-12.0, None, 1.0]


def test_transforms_what_a_generator_gives():
    def reward(completions, **kwargs):
        return (float(text) for text in completions)

    transformed = TransformedReward(reward, "indicator", 2.0, threshold=0)
    assert transformed(prompts=[""] * 3, completions=["-1", "1", "0"]) == [-3.0, 1.0, 0.0]
    with pytest.raises(ValueError, match="The reward function '<lambda>' returned 1.0; it must return a list"):
        TransformedReward(lambda **kwargs: 1.0)(prompts=[""], completions=["a"])


async def asynchronous(prompts, completions, **kwargs):
    return [1.0] * len(completions)


class Asynchronous:
    __call__ = staticmethod(asynchronous)


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("some/model",), "A reward transform needs a reward function, got 'some/model'"),
        ((torch.nn.Linear(1, 1),), "A reward transform needs a reward function"),
        ((asynchronous,), "<function asynchronous .* is asynchronous; transform inside it"),
        ((Asynchronous(),), "is asynchronous; transform inside it"),
        ((own, "square"), "`transform='square'` must be one of 'exponential', 'indicator'"),
        ((own, "indicator"), "`reward_transform_threshold=None` is needed by `reward_transform='indicator'`"),
        (
            (own, "exponential", 1.0, -1.0, -5.0),
            "`reward_transform_threshold=-5.0` has no effect with .* leave it at None",
        ),
        ((own, "indicator", 1.0, -0.5, -5.0), "`reward_transform_beta=-0.5` has no effect with .* leave it at -1.0"),
        ((own, "exponential", 1.0, 0.5), "`reward_transform_beta=0.5` must be below 0"),
        ((own, "exponential", -1.0), "`reward_transform_alpha=-1.0` must be at least 0"),
    ],
)
def test_refuses_transforms(arguments, words):
    with pytest.raises(ValueError, match=words):
        TransformedReward(*arguments)


def test_refuses_what_overflows():
    with pytest.raises(ValueError, match=r"of the reward -100.0 overflows \(`reward_transform_beta=-1.0`\)"):
        TransformedReward(own)(prompts=[""], completions=["-100"])


def test_toxicity_reads_what_trl_reads():
    """In the embedded world the named reward and TRL's own treatment of the path agree."""
    model = AutoModelForSequenceClassification.from_pretrained(two_tokens.reward_model_path())
    reward = load_reward("toxicity", two_tokens.reward_model_path())
    ids = reward._tokenizer("the guest", add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0, 0].item()
    assert reward(["the"], [" guest"]) == [pytest.approx(expected, abs=1e-5)]
