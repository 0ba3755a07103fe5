"""Reward functions from a user's own file."""

import pickle
import sys
import textwrap

import pytest
from trl.trainer.utils import get_callable_name

from trl_repulse.rewards import load_reward_function


PROMPTS, COMPLETIONS = ["the", "the cat", "a"], [" dog", "", " fish ran"]


@pytest.fixture
def load(tmp_path):
    def load(source, name="reward", **options):
        file = tmp_path / "my rewards.py"
        file.write_text(textwrap.dedent(source), encoding="utf-8")
        return load_reward_function(f"{file}:{name}", **options)

    return load


def call(reward, **columns):
    """As TRL calls it."""
    extra = {"trainer_state": object(), "log_extra": print, "log_metric": print}
    return reward(prompts=PROMPTS, completions=COMPLETIONS, completion_ids=[[1], [], [2, 3]], **columns, **extra)


@pytest.mark.parametrize(
    "source",
    [
        "def reward(prompts, completions, completion_ids, **kwargs): return [len(c) for c in completions]",
        "def reward(prompts, completions, **kwargs): return [len(c) for c in completions]",
        "def reward(completions): return [len(c) for c in completions]",
        "def reward(completions, *, scale=1): return [scale * len(c) for c in completions]",
        "def reward(**kwargs): return [len(c) for c in kwargs['completions']] if 'trainer_state' in kwargs else []",
        "reward = lambda completions: (len(c) for c in completions)",
        "import functools\ndef f(completions, scale): return [scale * len(c) for c in completions]\n"
        "reward = functools.partial(f, scale=1)",
        "class Reward:\n  def __call__(self, completions): return [len(c) for c in completions]\nreward = Reward()",
        "import torch\ndef reward(completions): return torch.tensor([[len(c)] for c in completions])",
        "import numpy as np\ndef reward(completions): return np.array([len(c) for c in completions])",
        "import torch\ndef reward(completions): return [torch.tensor(len(c)) for c in completions]",
        "def reward(queries, prompts, labels): return [len(q) - len(p) for q, p in zip(queries, prompts)]",
        "def reward(queries, prompts, labels, **kwargs): return [len(q) - len(p) for q, p in zip(queries, prompts)]",
        "import torch\ndef reward(queries, prompts, labels):\n"
        "  r = torch.tensor([len(q) - len(p) for q, p in zip(queries, prompts)], dtype=torch.float32)\n"
        "  return {'rewards': r, 'scores': r, 'extra_logs': {}}",
    ],
)
def test_signatures_and_results(load, source):
    result = call(load(source))
    assert result == [4.0, 0.0, 9.0] and all(type(value) is float for value in result)


def test_columns_of_the_data_set(load):
    source = "def reward(completions, answer): return [a == c.strip() for a, c in zip(answer, completions)]"
    assert call(load(source), answer=["dog", "dog", "dog"], other=[1, 2, 3]) == [1.0, 0.0, 0.0]
    with pytest.raises(ValueError, match="The reward function `reward` of .*py` needs `answer`, but the data set has"):
        call(load(source))


def test_labels(load):
    source = "def reward(queries, prompts, labels): return [len(label) for label in labels]"
    assert call(load(source), labels=["a", "bb", "ccc"]) == [0.0, 0.0, 0.0]
    assert call(load(source, label_column="answer"), answer=["a", "bb", "ccc"]) == [1.0, 2.0, 3.0]
    with pytest.raises(ValueError, match="has no column `answer` of labels"):
        call(load(source, label_column="answer"))
    # of which a function without labels needs none
    assert call(load("def reward(completions): return [1.0] * 3", label_column="answer")) == [1.0] * 3


@pytest.mark.parametrize("parameters", ["completions, labels", "completions, labels=None", "completions, **kwargs"])
def test_labels_of_a_function_of_completions(load, parameters):
    labels = "kwargs['labels']" if "kwargs" in parameters else "labels"
    source = f"def reward({parameters}): return [len(label) for label in {labels}]"
    assert call(load(source, label_column="answer"), answer=["a", "bb", "ccc"]) == [1.0, 2.0, 3.0]
    assert call(load(source), labels=["a", "bb", "ccc"]) == [1.0, 2.0, 3.0]
    with pytest.raises(ValueError, match="has no column `answer` of labels"):
        call(load(source, label_column="answer"), labels=["a", "bb", "ccc"])


def test_conversations(load):
    prompt, completion = [{"role": "user", "content": "the"}], [{"role": "assistant", "content": "cat"}]
    source = "def reward(queries, prompts, labels): return [len(q[0]['content'] + q[1]['content']) for q in queries]"
    assert load(source)([prompt], [completion]) == [6.0]


def test_none_leaves_a_completion_out(load):
    source = "def reward(completions): return [None if not c else 1 for c in completions]"
    assert call(load(source)) == [1.0, None, 1.0]


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ("[1.0]", "returned 1 rewards for 3 completions; return one for each"),
        ("[1.0, float('nan'), 1.0]", "returned nan for completion 1 of 3; return a finite number, or `None`"),
        ("[1.0, 1.0, float('inf')]", "returned inf for completion 2 of 3"),
        ("['1', '2', '3']", "returned '1' for completion 0 of 3"),
        ("[[1], [2], [3]]", r"returned \[1\] for completion 0 of 3"),
        ("[torch.ones(2)] * 3", r"returned tensor\(\[1., 1.\]\) for completion 0"),
        ("torch.tensor([1, float('nan'), 1])", "returned nan for completion 1"),
        ("__import__('numpy').array(1.0)", r"returned array\(1.\); it must return a list"),
        ("1.0", "returned 1.0; it must return a list"),
        ("'good'", "returned 'good'; it must return a list"),
        ("None", "returned None; it must return a list"),
        ("{'scores': [1, 2, 3]}", "returned None; it must return a list"),
    ],
)
def test_bad_results_are_refused(load, returned, message):
    reward = load(f"import torch\ndef reward(completions): return {returned}")
    with pytest.raises(ValueError, match=rf"^The reward function `reward` of `.*my rewards.py` {message}"):
        call(reward)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def other(completions): ...", "has no function `reward`, only other; name one of those"),
        ("x = 1", "has no function `reward`, only none"),
        ("reward = 3", "`reward` in .* is no function but 3; name a function"),
        ("class reward: ...", "is no function but <class"),
        (
            "def reward(text): ...",
            r"`reward\(text\)` in .* has no signature of a reward function; write `\(prompts, c",
        ),
        ("def reward(): ...", r"`reward\(\)` in .* has no signature"),
        ("def reward(completions, /): ...", "has no signature"),
        ("def reward(queries, prompts, labels, more): ...", "has no signature .* or `\\(queries, prompts, labels\\)`"),
        ("async def reward(completions): ...", "is asynchronous; import it and give it to the trainer itself"),
        ("class R:\n  async def __call__(self, completions): ...\nreward = R()", "is asynchronous"),
        ("import no_such_module", r"cannot be run \(ModuleNotFoundError: No module named 'no_such_module'\)"),
        ("def reward(:", r"cannot be run \(SyntaxError: "),
    ],
)
def test_bad_files_are_refused(load, source, message):
    with pytest.raises(ValueError, match=message):
        load(source)


@pytest.mark.parametrize("spec", ["rewards.py", "rewards:reward", "rewards.py:", "rewards.py:a b", ":reward", ""])
def test_bad_names_are_refused(spec):
    with pytest.raises(ValueError, match=rf"named as 'path/to/file.py:function', got '{spec}'"):
        load_reward_function(spec)


def test_a_file_may_define_dataclasses(load):
    """Which look their module up."""
    source = """
    from __future__ import annotations
    from dataclasses import dataclass, KW_ONLY

    @dataclass
    class Point:
        x: int
        _: KW_ONLY
        y: int = 0

    def brief(completions): return [-Point(len(c)).x for c in completions]
    """
    reward = load(source, "brief")
    assert call(reward) == [-4.0, 0.0, -9.0] and get_callable_name(reward) == "brief"


def test_a_file_may_import_modules_beside_it(tmp_path):
    """At its top and inside its functions; a module beside it does not hide one that is installed, once the file has run."""
    (tmp_path / "beside_it.py").write_text("VALUE = 2.0\n", encoding="utf-8")
    (tmp_path / "beside_it_too.py").write_text("VALUE = 3.0\n", encoding="utf-8")
    (tmp_path / "colorsys.py").write_text("raise RuntimeError\n", encoding="utf-8")
    source = "from beside_it import VALUE\ndef reward(completions):\n    from beside_it_too import VALUE as more\n    import colorsys\n    return [VALUE * more]\n"
    (tmp_path / "judge.py").write_text(source, encoding="utf-8")
    reward = load_reward_function(f"{tmp_path}/judge.py:reward")
    assert reward(prompts=["a"], completions=["b"]) == [6.0]
    load_reward_function(f"{tmp_path}/judge.py:reward")
    assert sys.path.count(str(tmp_path)) == 1 and sys.path[-1] == str(tmp_path)
    sys.path.remove(str(tmp_path))


def test_files_in_different_folders_may_import_modules_of_one_name(tmp_path):
    rewards = []
    for value in ("1.0", "-5.0"):
        folder = tmp_path / value
        folder.mkdir()
        (folder / "helpers_of_rewards.py").write_text(f"VALUE = {value}\n")
        (folder / "judge.py").write_text(
            "from helpers_of_rewards import VALUE\ndef judge(completions): return [VALUE]\n"
        )
        rewards.append(load_reward_function(f"{folder}/judge.py:judge"))
        sys.path.remove(str(folder))
    assert [reward(prompts=["a"], completions=["b"]) for reward in rewards] == [[1.0], [-5.0]]
    assert sys.modules.pop("helpers_of_rewards").VALUE == 1.0


def test_functions_of_one_file_share_its_module(tmp_path, load):
    """So that what the file loads is loaded once, and its functions can be pickled."""
    source = "model = object()\ndef reward(completions): return [id(model)] * 3\ndef judge(completions): return reward(completions)\n"
    first, second = load(source), load(source, "judge")
    assert call(first) == call(second) and pickle.loads(pickle.dumps(first._call)) is first._call
    assert call(load(source.replace("id(model)", "7"))) == [7.0] * 3  # a file that has changed is run again
    interrupted = f"import sys\nif sys.__dict__.pop('slow', 0): raise KeyboardInterrupt\n{source}"
    sys.slow = True
    with pytest.raises(KeyboardInterrupt):
        load(interrupted)
    assert len(set(call(load(interrupted)))) == 1  # so is one that a user interrupted


def test_a_file_in_the_cache_of_the_hub(tmp_path):
    """Which links to a file without a suffix."""
    (tmp_path / "blob").write_text("def reward(completions): return [len(c) for c in completions]")
    (tmp_path / "rewards.py").symlink_to(tmp_path / "blob")
    assert call(load_reward_function(f"{tmp_path}/rewards.py:reward")) == [4.0, 0.0, 9.0]


@pytest.mark.parametrize(
    ("given", "expected"), [("completions, **columns", [4.0, -1.0, -1.0]), ("*args, **columns", [4.0, 0.0, 9.0])]
)
def test_decorated_functions(load, given, expected):
    """A decorator gets the columns that it takes; one that passes everything on gets what the function takes."""
    passed = "*args, **columns" if "args" in given else "completions"
    source = f"""
    import functools
    def decorated(function):
        @functools.wraps(function)
        def wrapper({given}):
            rewards = function({passed})
            return [r if good else -1.0 for r, good in zip(rewards, columns.get("good", [True] * 3))]
        return wrapper
    @decorated
    def reward(completions): return [len(c) for c in completions]
    """
    assert call(load(source), good=[True, False, False]) == expected
