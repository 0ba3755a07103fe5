"""Models, tokenizers, prompts and outputs that evaluation cannot use, each said with its name before anything is drawn."""

import json

import pytest
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from trl_repulse.cli.main import main
from trl_repulse.evaluation.callback import TailReportCallback
from trl_repulse.evaluation.exact import ExactEvaluator
from trl_repulse.evaluation.rare.sampling import draw, find_temperature
from trl_repulse.evaluation.sampling import SamplingSettings, sample_completions
from trl_repulse.models._loading import load_model, load_tokenizer

from ..conftest import build_model, word_reward
from ..reward_models import save_model


@pytest.fixture
def command(tmp_path, model_dirs):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "the cat"}\n{"prompt": "fish"}\n')
    (tmp_path / "mine.py").write_text("def reward(completions, **kwargs):\n    return [0.0 for _ in completions]\n")

    def command(name, *changes):
        start = ["evaluate", str(tmp_path / "s"), "--model", model_dirs["gpt2"], "--num_samples", "2"]
        if name == "rare-events":
            start = ["rare-events", model_dirs["gpt2"], "--num_samples", "4", "--threshold", "-5"]
        start += ["--prompts", str(tmp_path / "prompts.jsonl"), "--reward_type", f"{tmp_path / 'mine.py'}:reward"]
        return main([*start, "--max_completion_length", "2", *map(str, changes)])

    return command


@pytest.fixture
def classifier(tmp_path, tokenizer):
    return save_model(tmp_path / "classifier", "llama", tokenizer, num_labels=1)[0]


def test_a_head_of_random_numbers_is_refused(model_dirs, classifier, tmp_path, tokenizer):
    with pytest.raises(ValueError, match=r"The reward model `.*` has no weights for score.weight.*ForSequenceClass"):
        load_model(AutoModelForSequenceClassification, model_dirs["gpt2"], "reward model", num_labels=1)
    with pytest.raises(
        ValueError, match=r"The proposal `.*` is a LlamaForSequenceClass.*, which predicts no next token"
    ):
        load_model(AutoModelForCausalLM, str(classifier), "proposal")
    build_model("llama", len(tokenizer)).model.save_pretrained(tmp_path / "headless")
    with pytest.raises(ValueError, match=r"The proposal `.*` has no weights for lm_head.weight"):
        load_model(AutoModelForCausalLM, str(tmp_path / "headless"), "proposal")
    assert load_model(AutoModelForCausalLM, model_dirs["gpt2"], "policy").config.tie_word_embeddings


def test_what_cannot_be_loaded_is_named(tmp_path, tokenizer):
    with pytest.raises(ValueError, match=r"The reference `.*nothing` cannot be loaded"):
        load_model(AutoModelForCausalLM, str(tmp_path / "nothing"), "reference")
    build_model("gpt2", len(tokenizer)).save_pretrained(tmp_path / "bare")
    with pytest.raises(ValueError, match=r"The policy `.*bare` has no tokenizer"):
        load_tokenizer(str(tmp_path / "bare"), "policy")
    weights = tmp_path / "bare" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:200])
    with pytest.raises(ValueError, match=r"The policy `.*bare` cannot be loaded"):
        load_model(AutoModelForCausalLM, str(tmp_path / "bare"), "policy")


@pytest.mark.parametrize("name", ["evaluate", "rare-events"])
def test_commands_say_which_part_is_at_fault(command, name, model_dirs, classifier, tmp_path, capsys):
    judge = ["--reward_model_path", model_dirs["gpt2"]]
    without_function = ["--reward_type", "sequence_pair"]
    other = {"evaluate": "reference", "rare-events": "proposal"}[name]
    assert command(name, f"--{other}", classifier) == 1
    assert (
        f"The {other} `{classifier}` is a LlamaForSequenceClassification, which predicts no next"
        in capsys.readouterr().err
    )
    assert command(name, f"--{other}", tmp_path / "nothing") == 1
    assert f"The {other} `{tmp_path / 'nothing'}` cannot be loaded" in capsys.readouterr().err
    assert command(name, *without_function, *judge) == 1
    assert "has no weights for" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["evaluate", "rare-events"])
def test_an_output_that_cannot_be_written_is_refused_first(command, name, tmp_path, capsys):
    assert command(name, "--output", tmp_path, "--reward_model_path", "never loaded") == 1
    assert f"`--output {tmp_path}` is a folder" in capsys.readouterr().err
    assert command(name, "--output", tmp_path / "prompts.jsonl" / "report.json") == 1
    assert "cannot be written" in capsys.readouterr().err
    assert not (tmp_path / "s").exists() and not list(tmp_path.glob("*.partial"))


def test_rare_events_read_the_columns_of_the_prompts(command, tmp_path, capsys):
    rows = [
        {"prompt": "the cat", "answer": -9.0},
        {"prompt": "fish", "answer": 0.0},
    ]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "mine.py").write_text("def reward(completions, answer, **kwargs):\n    return answer\n")
    assert command("rare-events", "--output", tmp_path / "report.json") == 0
    found = json.loads((tmp_path / "report.json").read_text())["prob_bad"][0]
    assert found["value"] == 0.5 and [each["value"] for each in found["per_prompt"]] == [1.0, 0.0]


@pytest.mark.parametrize("name", ["evaluate", "rare-events"])
def test_an_error_of_a_reward_names_its_line(command, name, tmp_path, capsys):
    (tmp_path / "mine.py").write_text("def reward(completions, **kwargs):\n    return [float('abc')]\n")
    assert command(name) == 1
    error = capsys.readouterr().err
    assert "'abc'. Raised by the reward function 'reward'. In " in error and "mine.py, line 2." in error


@pytest.mark.parametrize("name", ["evaluate", "rare-events"])
@pytest.mark.parametrize(("fault", "said"), [("[][0]", "list index out of range."), ("{}['key']", "KeyError: 'key'.")])
def test_any_error_of_a_reward_ends_a_command_with_one_line(command, name, tmp_path, capsys, fault, said):
    (tmp_path / "mine.py").write_text(f"def reward(completions, **kwargs):\n    return {fault}\n")
    assert command(name) == 1
    error = capsys.readouterr().err
    assert f"trl-repulse {name}: {said} Raised by the reward function 'reward'. In " in error
    assert "mine.py, line 2." in error and "Traceback" not in error


def test_an_error_that_is_no_rewards_keeps_its_traceback(command, monkeypatch):
    def broken(*_, **__):
        raise IndexError("ours")

    monkeypatch.setattr("trl_repulse.evaluation.sampling.sample_completions", broken)
    with pytest.raises(IndexError, match="ours"):
        command("evaluate")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["--levels", "2"], "`level=2.0`"),
        (["--quantiles", "0"], "`level=0.0`"),
        (["--thresholds", "nan"], "`threshold` is NaN"),
        (["--confidence", "95"], "`confidence=95.0`"),
        (["--negatives", "none.jsonl"], "There is no file `none.jsonl`"),
        (["--engine_kwargs", "{}"], "`--engine_kwargs` has no effect without `--engine vllm`"),
        (["--column", "rewards/typo"], "`--column rewards/typo` is none of what these samples will have: reward, "),
        (["--column", "kl"], "`--column kl` is none"),
        (["--reward_weights", "1", "2"], "`reward_weights` has 2 weights for 1 rewards"),
        (["--model", "./nosuch"], "The model `./nosuch` cannot be loaded: there is no such folder"),
        (["--engine", "vllm", "--engine_kwargs", '{"dtype": "bfloat16"}'], "`engine_kwargs` has `dtype`"),
        (
            ["--engine", "vllm", "--engine_kwargs", '{"generation_config": "x"}'],
            "`engine_kwargs` has `generation_config`",
        ),
        (
            ["--chat_template_kwargs", '{"thinking": false}'],
            "`chat_template_kwargs` has no effect on prompts of plain",
        ),
        (["--reward_transform_alpha", "2"], "`--reward_transform_alpha` has no effect without `--reward_transform`"),
    ],
)
def test_evaluate_refuses_before_it_samples(command, tmp_path, capsys, changes, message):
    assert command("evaluate", *changes) == 1
    assert message in capsys.readouterr().err and not (tmp_path / "s").exists()


@pytest.mark.parametrize("flag", ["divergence", "num_proposal_samples"])
def test_rare_events_take_no_arguments_of_proposals_without_one(command, capsys, flag):
    assert command("rare-events", f"--{flag}", 2) == 1
    assert f"`--{flag}` has no effect without `--proposal`" in capsys.readouterr().err


def test_rare_events_say_which_runs_have_a_proposal(command, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    assert command("rare-events", "--proposal", tmp_path / "out" / "proposal") == 1
    error = capsys.readouterr().err
    assert "only a run with `proposal='learned'` saves one. Leave `--proposal` out" in error and error.count("\n") == 1


def test_rare_events_make_messages_of_prompts(command, capsys):
    assert command("rare-events", "--apply_chat_template") == 1
    assert "chat template" in capsys.readouterr().err


def test_rare_events_refuse_variables_of_no_template(command, capsys, monkeypatch):
    monkeypatch.setattr("trl_repulse.rewards.loading.load_reward", None)  # before anything is loaded
    assert command("rare-events", "--chat_template_kwargs", '{"thinking": false}') == 1
    assert "`chat_template_kwargs` has no effect on prompts of plain text" in capsys.readouterr().err


@pytest.mark.trainer
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("prompts.jsonl", "`prompts` is the text 'prompts.jsonl'"),
        ([{"prompt": "fish"}], "rows of a data set"),
        ({"train": ["fish"]}, "has the parts train"),
    ],
)
def test_what_is_taken_for_prompts(make, tmp_path, tokenizer, model_dirs, given, message):
    model = build_model("gpt2", len(tokenizer))
    calls = (
        lambda: sample_completions(tmp_path / "s", model_dirs["gpt2"], given, word_reward, SamplingSettings()),
        lambda: draw([model], tokenizer, given, word_reward, (4,), 2),
        lambda: find_temperature(model, tokenizer, given, 2),
        lambda: ExactEvaluator(tokenizer, given, lambda texts: [0.0] * len(texts), [1], 2),
        lambda: TailReportCallback(make(), given),
    )
    for call in calls:
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.trainer
def test_a_completion_without_a_reward_costs_the_report_and_not_the_run(make, prompts, caplog):
    trainer = make(max_steps=2)
    callback = TailReportCallback(trainer, prompts, 20, thresholds=[-1.0])
    trainer.add_callback(callback)
    judged = trainer.reward_funcs[0]
    trainer.reward_funcs[0] = lambda completions, **columns: [
        None if text == completions[0] else value
        for text, value in zip(completions, judged(completions=completions, **columns), strict=True)
    ]
    trainer.train()
    assert trainer.state.global_step == 2 and callback.history == []
    assert "No tail report at update 2" in caplog.text and "got no reward" in caplog.text


def test_a_home_folder_is_found(tmp_path, monkeypatch, model_dirs):
    monkeypatch.setenv("HOME", str(tmp_path))
    prompts, settings = (
        Dataset.from_dict({"prompt": ["fish"]}),
        SamplingSettings(num_samples=2, max_completion_length=2),
    )
    found = sample_completions("~/s", model_dirs["gpt2"], prompts, word_reward, settings, progress=False)
    assert found.folder == tmp_path / "s" and (tmp_path / "s").is_dir()
