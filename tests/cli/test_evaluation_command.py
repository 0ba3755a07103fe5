"""`trl-repulse evaluate`: what is wrong of its arguments is said in one line, before anything slow; templates and remote code."""

import json

import pytest
from datasets import Dataset

from trl_repulse.cli import evaluate
from trl_repulse.cli.main import main
from trl_repulse.evaluation.negatives import negative_log_probs
from trl_repulse.evaluation.records import load_samples, read_header
from trl_repulse.evaluation.sampling import SamplingSettings, sample_completions

from ..conftest import build_model, build_tokenizer


TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if not thinking | default(true) %} bad{% endif %}"


@pytest.fixture
def command(tmp_path, model_dirs):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "the cat"}\n{"prompt": "fish"}\n')
    (tmp_path / "mine.py").write_text("def reward(completions, **kwargs):\n    return [0.0 for _ in completions]\n")
    start = ["evaluate", str(tmp_path / "s"), "--prompts", str(tmp_path / "prompts.jsonl"), "--num_samples", "2"]
    start += ["--max_completion_length", "2"]

    def command(*changes, model=model_dirs["gpt2"], reward=("--reward_type", f"{tmp_path / 'mine.py'}:reward")):
        return main([*start, "--model", str(model), *reward, *map(str, changes)])

    return command


@pytest.fixture
def never(monkeypatch):
    """No model may be loaded."""

    def load(*_, **__):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("trl_repulse.evaluation.sampling.load_model", load)
    monkeypatch.setattr("trl_repulse.evaluation.sampling.load_tokenizer", load)


def test_the_columns_that_are_foretold_are_those_that_are_written(command, tmp_path, model_dirs, monkeypatch):
    known = []
    check = evaluate._check_column
    monkeypatch.setattr(evaluate, "_check_column", lambda *given: known.append(given) or check(*given))
    transform = ["--reward_transform", "exponential", "--reference", model_dirs["gpt2"]]
    assert command(*transform, "--column", "rewards/reward") == 0
    samples = load_samples(tmp_path / "s")
    with pytest.raises(ValueError, match="it has ") as written:
        samples.column("none")
    with pytest.raises(ValueError, match="will have: ") as foretold:
        check("none", *known[0][1:])

    def names(error, before):
        return set(str(error.value).rpartition(before)[2].rstrip(".").split(", "))

    assert names(foretold, "will have: ") == names(written, "it has ")


@pytest.mark.usefixtures("never")
def test_a_folder_of_something_else_is_refused_first(command, tmp_path, capsys):
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "thesis.tex").write_text("mine")
    assert command() == 1
    assert "holds something else than samples" in capsys.readouterr().err
    (tmp_path / "s" / "thesis.tex").unlink()
    (tmp_path / "s").rmdir()
    (tmp_path / "s").write_text("mine")
    assert command() == 1
    assert f"`{tmp_path / 's'}` is a file; name a folder that is new or empty" in capsys.readouterr().err
    assert main(["evaluate", str(tmp_path / "s")]) == 1
    assert f"`{tmp_path / 's'}` is a file; name a folder of samples" in capsys.readouterr().err


@pytest.mark.usefixtures("never")
@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (["--reward", '{"reward_model_path": 3}'], "`reward_model_path=3` must be text"),
        (["--reward", '{"reward_type": 3}'], "`reward_type=3` must be text"),
        (["--reward", '{"reward_type": "chat", "reward_model_path": "x", "reward_kwargs": 3}'], "`reward_kwargs` 3"),
        (["--reward", '{"reward_type": "chat", "path": "x"}'], "name the model with `reward_model_path`"),
        (["--reward_kwargs", '{"batch_size": "a"}'], "`reward_kwargs` has `batch_size='a'`, which is no `int`"),
        (["--reward_kwargs", '{"max_length": 1.5}'], "`reward_kwargs` has `max_length=1.5`"),
        (["--reward_kwargs", '{"label": [1]}'], "`reward_kwargs` has `label=[1]`"),
    ],
)
def test_wrong_types_in_json_are_no_tracebacks(command, capsys, reward, message):
    start = ["--reward_type", "sequence_pair", "--reward_model_path", "x"] if reward[0] == "--reward_kwargs" else []
    assert command(reward=[*start, *reward]) == 1
    assert message in capsys.readouterr().err


def silent(completions, **kwargs):
    return [0.0 for _ in completions]


def test_a_template_takes_further_variables(tmp_path, model_dirs, command):
    tokenizer = build_tokenizer()
    tokenizer.chat_template = TEMPLATE
    build_model("gpt2", len(tokenizer)).save_pretrained(tmp_path / "chat")
    tokenizer.save_pretrained(tmp_path / "chat")
    assert command("--apply_chat_template", model=tmp_path / "chat") == 0
    plain = load_samples(tmp_path / "s")
    assert plain.prompts == ["the cat", "fish"]
    messages = [[{"role": "user", "content": text}] for text in ("the cat", "fish")]
    options = {"num_samples": 2, "max_completion_length": 2, "chat_template_kwargs": {"thinking": False}}
    arguments = (str(tmp_path / "chat"), Dataset.from_dict({"prompt": messages}), silent)
    there = sample_completions(tmp_path / "t", *arguments, SamplingSettings(**options), progress=False)
    assert there.prompts == ["the cat bad", "fish bad"]
    assert tokenizer.decode(there.table["prompt_ids"][0].as_py()) == "the cat bad"
    assert read_header(tmp_path / "t")["settings"]["chat_template_kwargs"] == {"thinking": False}


def test_negatives_are_read_with_the_template_too(tmp_path, tokenizer):
    tokenizer = build_tokenizer()
    tokenizer.chat_template = TEMPLATE
    row = {"prompt": [{"role": "user", "content": "the cat"}], "completion": " bad"}
    (tmp_path / "negatives.jsonl").write_text(json.dumps(row))
    model = build_model("gpt2", len(tokenizer))
    found = negative_log_probs(
        model, tokenizer, tmp_path / "negatives.jsonl", chat_template_kwargs={"thinking": False}
    )
    assert list(found.per_prompt) == ["the cat bad"]


def test_a_negative_that_is_too_long_is_named(tmp_path, tokenizer):
    row = {"prompt": "the cat", "completion": " bad" * 40}
    (tmp_path / "negatives.jsonl").write_text(json.dumps(row))
    with pytest.raises(
        ValueError, match=r"that begins ' bad.* has 40 tokens, which with its prompt's 2 exceed .* of 32"
    ):
        negative_log_probs(build_model("gpt2", len(tokenizer)), tokenizer, tmp_path / "negatives.jsonl")


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
