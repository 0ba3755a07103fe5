"""Plain prompts for a model with a chat template: one warning that names the flag, in every command and trainer."""

import pytest

from examples.worlds import two_tokens
from trl_repulse import RePULSeGRPOTrainer, RePULSeTrainer
from trl_repulse.cli._suggest_rules import Updates
from trl_repulse.cli.main import main
from trl_repulse.cli.methods import train
from trl_repulse.data import _prompts
from trl_repulse.generation.completions import tokenize

from ..conftest import build_tokenizer
from ..evaluation_support import save_chat, write_inputs


TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }} {% endfor %}{% if add_generation_prompt %}[answer]{% endif %}"


@pytest.fixture
def said(monkeypatch):
    said = []
    monkeypatch.setattr(_prompts.logger, "warning_once", said.append)
    return said


@pytest.fixture
def chat(tmp_path):
    """A folder of a chat model."""
    return save_chat(tmp_path / "chat", TEMPLATE)[0]


@pytest.mark.parametrize(
    ("template", "prompt", "warns"),
    [
        (TEMPLATE, "the cat", True),
        (TEMPLATE, "[system] Be brief. [user] the cat [answer] a", False),  # as a template wrote it, with a beginning
        (TEMPLATE, [{"role": "user", "content": "the cat"}], False),
        (None, "the cat", False),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "the cat", False),  # which writes nothing around it
        ("{{ raise_exception('no') }}", "the cat", True),
    ],
)
def test_what_is_warned_of(said, template, prompt, warns):
    tokenizer = build_tokenizer()
    tokenizer.chat_template, tokenizer.name_or_path = template, "my/model"
    tokenize(tokenizer, [prompt])
    assert len(said) == warns and all("`--apply_chat_template`" in each and "my/model" in each for each in said)


@pytest.mark.parametrize("trainer_cls", [RePULSeTrainer, RePULSeGRPOTrainer])
def test_trainers_warn(make, said, chat, trainer_cls):
    make(trainer_cls, model=chat, bad_reward_threshold=0.0)
    assert set(said) == {said[0]} and "`load_prompts(..., as_conversation=True)`" in said[0]


def test_trls_own_trainer_warns_once(said, chat, tmp_path):
    flags = "--max_steps 1 --max_completion_length 2 --num_table_completions 0 --num_final_samples 0".split()
    train("grpo", [*flags, *two_tokens.paths(), "--model_name_or_path", chat, "--output_dir", str(tmp_path)])
    assert len(said) == 1 and "`--apply_chat_template`" in said[0]


@pytest.mark.parametrize(
    "command",
    [
        "evaluate {folder} --model {chat} --num_samples 2 --thresholds 0.5",
        "rare-events {chat} --num_samples 2 --num_proposal_samples 0 --threshold 0.5",
        "attacks {folder} --model {chat} --num_samples 2 --threshold 0.5",
        "suggest --model {chat} --num_samples 50 --minutes 2",
    ],
)
def test_commands_warn(said, chat, tmp_path, monkeypatch, command):
    took = Updates(10, {"float32": 10.0, "bfloat16": 5.0}, "cpu", 2**33)
    monkeypatch.setattr("trl_repulse.cli._suggest_measure.measure_updates", lambda *args: took)
    inputs = write_inputs(tmp_path, "[float('fish' in str(each)) + len(str(each)) / 99 for each in completions]")
    for flags in ([], ["--apply_chat_template"]):
        said.clear()
        words = command.format(chat=chat, folder=tmp_path / f"samples{len(flags)}").split()
        assert main([*words, *inputs, *flags]) == 0
        assert bool(said) != bool(flags)
