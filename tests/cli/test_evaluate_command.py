"""`trl-repulse evaluate`: what it does, its mistakes in one line before anything slow, templates and remote code."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
from datasets import Dataset

from trl_repulse.cli.evaluate import SETTINGS
from trl_repulse.cli.main import main
from trl_repulse.evaluation.records import load_samples, read_header
from trl_repulse.evaluation.sampling import SamplingSettings, sample_completions

from ..conftest import build_model, silent
from ..evaluation_support import TEMPLATE, save_chat, write_inputs, write_samples


def test_each_setting_of_the_sampler_is_an_option():
    assert set(SETTINGS) == {field.name for field in dataclasses.fields(SamplingSettings)}


@pytest.fixture
def command(tmp_path, model_dirs):
    prompts, file, *judge, length, most = write_inputs(tmp_path, "[-3.0 * c.count('bad') for c in completions]")
    start = ["evaluate", str(tmp_path / "s"), prompts, file, length, most, "--num_samples", "2"]

    def command(*changes, model=model_dirs["gpt2"], reward=judge):
        return main([*start, "--model", str(model), *reward, *map(str, changes)])

    return command


def test_evaluate_command_samples_once_and_reads_often(command, tmp_path, model_dirs, capsys):
    folder, output = str(tmp_path / "s"), tmp_path / "new" / "report.json"
    options = ["--reference", model_dirs["gpt2"], "--beta", "0.1", "--reward_weights", "2"]
    assert command("--num_samples", "50", *options, "--thresholds", "-1", "-99", "--output", str(output)) == 0
    out = capsys.readouterr().out
    assert "| P(r < -1) |" in out and "| P(r < -99) | 0 | 0 to 0.036" in out
    assert set(json.loads(output.read_text())["per_prompt"]) == {"the cat", "fish"}
    assert main(["evaluate", folder, "--thresholds", "-5", "--quantiles", "0.5", "--per_prompt"]) == 0
    out = capsys.readouterr().out
    assert "| P(r < -5) |" in out and "| quantile 0.5 |" in out and "Prompt 'fish'" in out


def test_the_files_do_not_depend_on_what_can_be_printed(tmp_path, poor_stdout):
    write_samples(tmp_path / "samples", np.arange(100.0).reshape(2, 50), prompts=["☕", "fish"])
    output = tmp_path / "report.json"
    with poor_stdout():
        assert main(["evaluate", str(tmp_path / "samples"), "--per_prompt", "--output", str(output)]) == 0
    assert "☕" in json.loads(output.read_text())["per_prompt"]


def test_evaluate_command_takes_several_rewards(command, tmp_path, capsys):
    (tmp_path / "second.py").write_text(
        "def length(completions, **kwargs):\n    return [float(len(c)) for c in completions]\n"
    )
    rewards = {"reward_type": f"{tmp_path / 'mine.py'}:reward"}, {"reward_type": f"{tmp_path / 'second.py'}:length"}
    given = [word for each in rewards for word in ("--reward", json.dumps(each))]
    assert command("--num_samples", "50", "--reward_weights", "1", "0.5", reward=given) == 0
    table = load_samples(tmp_path / "s").table.to_pandas()
    assert (table["rewards/length"] == table["completion"].str.len()).all()
    assert np.allclose(table["reward"], table["rewards/reward"] + 0.5 * table["rewards/length"])
    capsys.readouterr()
    assert main(["evaluate", str(tmp_path / "s"), "--column", "rewards/length", "--thresholds", "1"]) == 0
    assert "| P(r < 1) |" in capsys.readouterr().out
    shutil.rmtree(tmp_path / "s")
    assert command("--reward_type", "toxicity", reward=given) == 1
    assert "`--reward` holds all" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["--seed", "1"], "`--seed` has no effect without `--model`"),
        (["--apply_chat_template"], "`--apply_chat_template` has no effect without `--model`"),
        (["--reward_kwargs", '{"negate": true}'], "`--reward_kwargs` has no effect without `--model`"),
        (["--split", "test"], "`--split` has no effect without `--model`"),
        ([], "holds no samples"),
        (["--model", "m"], "`--prompts` is needed"),
        (["other", "--model", "m"], "samples into one folder"),
        (["other", "--per_prompt"], "`--per_prompt` is for one model"),
    ],
)
def test_reading_needs_samples(tmp_path, capsys, changes, message):
    assert main(["evaluate", str(tmp_path / "s"), *changes]) == 1
    assert message in capsys.readouterr().err


@pytest.fixture
def never(monkeypatch):
    """No model may be loaded."""

    def load(*_, **__):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("trl_repulse.evaluation.sampling.load_model", load)
    monkeypatch.setattr("trl_repulse.evaluation.sampling.load_tokenizer", load)


@pytest.mark.usefixtures("never")
def test_a_folder_of_something_else_is_refused_first(command, tmp_path, capsys):
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "thesis.tex").write_text("mine")
    assert command() == 1
    assert "holds something else" in capsys.readouterr().err
    (tmp_path / "s" / "thesis.tex").unlink()
    (tmp_path / "s").rmdir()
    (tmp_path / "s").write_text("mine")
    assert command() == 1
    assert f"`{tmp_path / 's'}` is a file; name a folder that is new or empty" in capsys.readouterr().err
    assert main(["evaluate", str(tmp_path / "s")]) == 1
    assert f"`{tmp_path / 's'}` holds no samples: it has no `header.json`; name a folder" in capsys.readouterr().err


@pytest.mark.usefixtures("never")
@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (["--reward", '{"reward_model_path": 3}'], "`reward_model_path=3` must be text"),
        (["--reward", '{"reward_type": 3}'], "`reward_type=3` must be text"),
        (
            ["--reward", '{"reward_type": "chat", "reward_model_path": "x", "reward_kwargs": 3}'],
            "`reward_kwargs` has `reward_kwargs`",
        ),
        (["--reward", '{"reward_type": "chat", "path": "x"}'], "`reward_type='chat'` needs `reward_model_path`"),
        (["--reward_kwargs", '{"batch_size": "a"}'], "`reward_kwargs` has `batch_size='a'`, which is no `int`"),
        (["--reward_kwargs", '{"max_length": 1.5}'], "`reward_kwargs` has `max_length=1.5`"),
        (["--reward_kwargs", '{"label": [1]}'], "`reward_kwargs` has `label=[1]`"),
    ],
)
def test_wrong_types_in_json_are_no_tracebacks(command, capsys, reward, message):
    start = ["--reward_type", "sequence_pair", "--reward_model_path", "x"] if reward[0] == "--reward_kwargs" else []
    assert command(reward=[*start, *reward]) == 1
    assert message in capsys.readouterr().err


def test_a_template_takes_further_variables(tmp_path, command):
    chat, tokenizer = save_chat(tmp_path / "chat", TEMPLATE)
    assert command("--apply_chat_template", model=chat) == 0
    assert load_samples(tmp_path / "s").prompts == ["the cat", "fish"]
    messages = [[{"role": "user", "content": text}] for text in ("the cat", "fish")]
    options = {"num_samples": 2, "max_completion_length": 2, "chat_template_kwargs": {"thinking": False}}
    arguments = (chat, Dataset.from_dict({"prompt": messages}), silent)
    there = sample_completions(tmp_path / "t", *arguments, SamplingSettings(**options), progress=False)
    assert there.table["prompt"].to_pylist()[::2] == ["the cat bad", "fish bad"]
    assert there.prompts == ["the cat", "fish"]  # as a person reads them
    assert tokenizer.decode(there.table["prompt_ids"][0].as_py()) == "the cat bad"
    assert read_header(tmp_path / "t")["settings"]["chat_template_kwargs"] == {"thinking": False}


CODE = """
from transformers import GPT2Config, GPT2LMHeadModel

class OwnConfig(GPT2Config):
    model_type = "own"

class OwnModel(GPT2LMHeadModel):
    config_class = OwnConfig
"""


def test_code_of_a_model_runs_only_if_asked_for(command, tmp_path, tokenizer, capsys, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked on the terminal"))
    folder = tmp_path / "own"
    build_model("gpt2", len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "own.py").write_text(CODE)
    config = json.loads((folder / "config.json").read_text())
    own = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "own", "auto_map": own}))
    assert command(model=folder) == 1
    assert "trust_remote_code" in capsys.readouterr().err
    assert command("--trust_remote_code", model=folder) == 0
