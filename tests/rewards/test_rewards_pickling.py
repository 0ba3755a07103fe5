"""Every kind of reward survives pickling, as data loaders and launchers of processes need it."""

import pickle

import pytest
from trl.trainer.utils import get_callable_name

from trl_repulse import rewards
from trl_repulse.rewards import RemoteReward, load_reward_function

from ..reward_models import ANSWERS, QUESTIONS
from .test_rewards_server import build


KINDS = {
    "SequencePairReward": "pair",
    "ChatReward": "chat",
    "GuardReward": "guard",
    "ToxicityReward": "toxicity",
    "load_reward_function": "function",
    "RemoteReward": "remote",
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
            reward = load_reward_function(f"{tmp_path}/mine.py:brief")
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
