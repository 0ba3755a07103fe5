"""What samples, attacks and their results know of a reward or judge: its code, and of a server neither address nor key."""

import copy
import functools
import linecache
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset

from trl_repulse.evaluation._identity import identify_reward, known_by_name_alone
from trl_repulse.evaluation.attacks import Attack, run_attacks
from trl_repulse.evaluation.gcg import RefusalJudge, evaluate_gcg
from trl_repulse.evaluation.sampling import SamplingSettings, sample_completions
from trl_repulse.rewards import RemoteReward

from ..conftest import word_reward
from ..gcg_trigger import ROWS, build_trigger_model, build_trigger_tokenizer, evaluation_config
from ..reward_models import build_tokenizer as build_reward_tokenizer
from ..reward_models import save_model


URL = "http://127.0.0.1:1/get_reward"


@pytest.fixture
def remote(monkeypatch):
    """Rewards that ask no server."""
    monkeypatch.setattr(
        RemoteReward, "__call__", lambda self, prompts, completions, **_: word_reward([*map(str, completions)])
    )
    return RemoteReward


def sample(folder, model, reward, **settings):
    settings = SamplingSettings(num_samples=4, max_completion_length=2, shard_size=3, **settings)
    return sample_completions(folder, model, ["the cat", "fish"], reward, settings, progress=False)


def interrupt(folder):
    """As if the last shard had not been drawn."""
    (folder / "complete.json").unlink()
    sorted(folder.glob("shard-*"))[-1].unlink()


def test_a_folder_does_not_know_where_its_server_was(remote, tmp_path, model_dirs):
    """Another port, time limit or batch size draws the same samples."""
    first = remote(URL)
    samples = sample(tmp_path / "s", model_dirs["gpt2"], first).table
    interrupt(tmp_path / "s")
    moved = remote("https://10.0.0.1:99/other", timeout=1, batch_size=2, retries=0)
    assert sample(tmp_path / "s", model_dirs["gpt2"], moved).table == samples
    interrupt(tmp_path / "s")
    with pytest.raises(ValueError, match="begun with another `rewards"):
        sample(tmp_path / "s", model_dirs["gpt2"], remote(URL, name="other"))
    assert identify_reward(remote(URL, label_column="answer")) != identify_reward(first)


def make(source, **names):
    """A function `f` of that source, as of a cell of a notebook."""
    cell, module = f"<cell {source}>", {"__name__": "mine", **names}
    linecache.cache[cell] = (len(source), None, source.splitlines(keepends=True), cell)
    exec(compile(source, cell, "exec"), module)
    return module["f"]


REWARD = "def f(completions, **_): return [float(len(c)) for c in completions]\n"


def test_a_folder_is_not_gone_on_with_other_code_of_the_same_name(tmp_path, model_dirs, caplog):
    folder, model = tmp_path / "s", model_dirs["gpt2"]
    samples = sample(folder, model, make(REWARD)).table
    interrupt(folder)
    with pytest.raises(ValueError, match="begun with another `rewards.f.code`"):
        sample(folder, model, make(REWARD.replace("len(c)", "-len(c)")))
    assert sample(folder, model, make(REWARD)).table == samples
    assert "identified by its name alone" not in caplog.text


def test_a_folder_of_a_reward_without_code_is_gone_on_with_a_warning(remote, tmp_path, model_dirs, caplog):
    samples = sample(tmp_path / "s", model_dirs["gpt2"], remote(URL)).table
    assert "identified by its name alone" not in caplog.text  # there is nothing to mix it with
    interrupt(tmp_path / "s")
    assert sample(tmp_path / "s", model_dirs["gpt2"], remote(URL)).table == samples
    assert "reward or judge `RemoteReward`, which is identified by its name alone" in caplog.text


def test_what_a_reward_or_a_seed_may_be(tmp_path, model_dirs, monkeypatch):
    """An adapter counts with its configuration, numbers may be numpy's, and rows may be in a format."""
    monkeypatch.setattr(
        "trl_repulse.evaluation._identity.find_adapter_config_file", lambda name: f"/snapshots/{'a' * 40}/a.json"
    )
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert identify_reward("nobody/adapter") == {"name": "nobody/adapter", "revision": "a" * 40}
    (tmp_path / "adapter_config.json").write_text("4")
    one = identify_reward(str(tmp_path))
    (tmp_path / "adapter_config.json").write_text("400")
    assert identify_reward(str(tmp_path)) != one
    samples = sample(tmp_path / "s", model_dirs["gpt2"], make(REWARD), seed=np.int64(3)).table
    interrupt(tmp_path / "s")
    assert sample(tmp_path / "s", model_dirs["gpt2"], make(REWARD), seed=3).table == samples
    tokenizer = build_reward_tokenizer("bos")
    module = save_model(tmp_path / "judge", "llama", tokenizer)[1]
    rows, settings = Dataset.from_dict({"prompt": ["the cat", "fish"]}), SamplingSettings(max_completion_length=2)
    options = {"reward_processing_classes": tokenizer, "progress": False}
    drawn = [
        sample_completions(tmp_path / name, model_dirs["gpt2"], each, module, settings, **options).table
        for name, each in (("a", rows), ("b", rows.with_format("numpy")))
    ]
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize("name", ["answer", "prompt"])
def test_a_column_that_a_reward_needs_is_missed_before_anything_is_drawn(tmp_path, model_dirs, name):
    reward = make(f"def f(completions, {name}): return [0.0 for _ in {name}]\n")
    with pytest.raises(ValueError, match=f"'f' needs `{name}`, but the prompts have no such column"):
        sample(tmp_path / "s", model_dirs["gpt2"], reward)
    behaviors, settings = Dataset.from_dict({"prompt": ["fish"]}), SamplingSettings(max_completion_length=2)
    with pytest.raises(ValueError, match=f"'f' needs `{name}`, but the behaviours have no such column"):
        run_attacks(tmp_path / "s", model_dirs["gpt2"], behaviors, [Attack("a")], reward, settings)
    assert not (tmp_path / "s").exists()


@pytest.fixture(scope="module")
def attacked():
    tokenizer = build_trigger_tokenizer()
    return build_trigger_model(tokenizer, steps=1), tokenizer


def attack(attacked, judge, output, rows=ROWS[:2]):
    return evaluate_gcg(*attacked, rows, judge, evaluation_config(num_steps=1, num_samples=1), output)


def cut(output):
    """As if the last target had not been attacked."""
    (output / "target-00002.json").unlink()


def test_attacks_of_a_judge_without_code_are_gone_on_with_a_warning(attacked, remote, tmp_path, caplog):
    output = attack(attacked, remote(URL), tmp_path / "out")
    assert "identified by its name alone" not in caplog.text  # there is nothing to mix it with
    cut(output)
    attack(attacked, remote(URL), output)
    assert "reward or judge `RemoteReward`, which is identified by its name alone" in caplog.text
    caplog.clear()
    attack(attacked, remote(URL), output)  # which is done
    assert not caplog.text


JUDGE = "def f(goals, responses): return [float(len(each)) for each in responses]\n"


def hash_judge(judge):
    identity = identify_reward(judge)
    return None if known_by_name_alone(identity) else identity["code"]


class Judge:
    """Counts what it is asked, which is nothing that scores depend on."""

    scale = 1.0

    def __init__(self, threshold, api_key="", url="http://a"):
        self.threshold, self.api_key, self.url, self.asked = threshold, api_key, url, 0

    def __call__(self, goals, responses):
        self.asked += 1
        return [self.scale * (len(each) > self.threshold) for each in responses]

    def other(self, goals, responses):
        return [0.0 for _ in responses]


@dataclass(slots=True)
class Slotted:
    threshold: float

    def __call__(self, goals, responses):
        return [float(len(each) > self.threshold) for each in responses]


class Stricter(Judge):
    scale = 2.0


class Renamed(Judge):
    def __init__(self, limit, **options):
        super().__init__(limit, **options)
        self.weights = np.arange(3)


class Scorer:
    """It is not called itself."""

    def __init__(self, threshold):
        self.threshold = threshold

    def score(self, goals, responses):
        return [float(len(each) > self.threshold) for each in responses]


def held(threshold, api_key=""):
    def judge(goals, responses):
        return [float(len(each) > threshold) for each in responses if api_key is not None]

    return judge


DIFFERENT = {
    "code": [make(JUDGE), make(JUDGE.replace("len", "-len"))],
    "lambdas of two lines": make("f = [lambda goals, responses: [1.0],\n     lambda goals, responses: [2.0]]"),
    "lambdas of one line": make("f = [lambda goals, responses: [1.0], lambda goals, responses: [2.0]]"),
    "attribute": [Judge(1), Judge(2)],
    "slots": [Slotted(1), Slotted(2)],
    "attribute of another name": [Renamed(1), Renamed(2)],
    "method of what is not called": [Scorer(1).score, Scorer(2).score],
    "class": [Judge(1), Stricter(1)],
    "method": [Judge(1).other, Judge(1).__call__],
    "method of another": [Judge(1).other, Judge(2).other],
    "closure": [held(1), held(2)],
    "default": [make("def f(goals, responses, limit=limit): return [limit]", limit=each) for each in (1, 2)],
    "constant": [make(f"LIMIT = {each}\ndef f(goals, responses): return [LIMIT]") for each in ([1], [2])],
    "function of its file": [
        make(f"def help(): return {each}\ndef f(goals, responses): return [help()]") for each in (1, 2)
    ],
    "partial": [functools.partial(held(1), goals=[each]) for each in "ab"],
    "partial of another": [functools.partial(Judge(each), goals=[]) for each in (1, 2)],
}
STABLE = [
    *(pair[0] for pair in DIFFERENT.values()),
    make("def f(goals, responses): return [float(each in {'a', 'b', 'c', 'd'}) for each in responses]"),
]
ALIKE = {
    "loaded twice": [make(JUDGE), make(JUDGE)],
    "closure": [held(1), held(1, api_key="key")],
    "attribute": [Judge(1), Judge(1, "key", "http://b")],
    "slots": [Slotted(1), Slotted(1)],
    "copy": [Judge(1), copy.deepcopy(Judge(1))],
    "partial": [functools.partial(held(1), []) for _ in range(2)],
    "server": [RemoteReward(URL), RemoteReward("http://h/", timeout=1)],
    "refusals": [RefusalJudge(["no"]), RefusalJudge(["NO"])],
}


@pytest.mark.parametrize("kind", DIFFERENT)
def test_judges_of_other_code_or_values(kind):
    one, other = DIFFERENT[kind]
    assert hash_judge(one) and hash_judge(one) != hash_judge(other)


@pytest.mark.parametrize("kind", ALIKE)
def test_judges_that_give_the_same_scores(kind):
    one, other = ALIKE[kind]
    assert hash_judge(one) == hash_judge(other)


def test_a_judge_stays_itself_while_it_works():
    judge = Judge(1)
    before = hash_judge(judge)
    judge([], ["a"])
    assert judge.asked == 1 and hash_judge(judge) == before
    assert hash_judge(Judge(1)) == before  # that of the next process


def held_by_itself():
    values = []
    values.append(values)
    return held(values)


UNKNOWN = {
    "built in": len,
    "partial": functools.partial(len),
    "cache": functools.lru_cache(held(1)),
    "circle": held_by_itself(),
    "no file": eval("lambda goals, responses: [1.0]"),
    "weights that are not in memory": held(torch.nn.Linear(2, 2, device="meta")),
}


@pytest.mark.parametrize("judge", UNKNOWN.values(), ids=UNKNOWN)
def test_what_has_no_code_is_known_by_its_name_alone(judge):
    assert hash_judge(judge) is None


HASHES = "import tests.evaluation.test_reward_identity as it; print(*map(it.hash_judge, it.STABLE))"


@pytest.mark.thorough
def test_another_process_finds_the_same_hashes():
    """In which sets have another order."""
    environment = os.environ | {"PYTHONHASHSEED": "1"}
    command = [sys.executable, "-c", HASHES]
    found = subprocess.run(command, env=environment, cwd=Path(__file__).parents[2], capture_output=True, check=True)
    assert found.stdout.decode().split() == [*map(hash_judge, STABLE)]
