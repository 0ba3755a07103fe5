"""Models, tokenizers, prompts and outputs that evaluation cannot use, each said with its name before anything is drawn."""

import json
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from trl_repulse.cli.main import main
from trl_repulse.data._checks import as_dataset
from trl_repulse.evaluation._generation import hash_model
from trl_repulse.evaluation.callback import TailReportCallback
from trl_repulse.evaluation.sampling import SamplingSettings, sample_completions
from trl_repulse.models._loading import load_model, load_tokenizer

from ..conftest import build_model, word_reward
from ..evaluation_support import write_inputs
from ..reward_models import build_tokenizer, save_model


@pytest.fixture
def command(tmp_path, model_dirs):
    inputs = write_inputs(tmp_path)

    def command(name, *changes):
        start = ["evaluate", str(tmp_path / "s"), "--model", model_dirs["gpt2"], "--num_samples", "2"]
        if name == "rare-events":
            start = ["rare-events", model_dirs["gpt2"], "--num_samples", "120", "--threshold", "-5"]
        return main([*start, *inputs, *map(str, changes)])

    return command


@pytest.fixture
def classifier(tmp_path, tokenizer):
    return save_model(tmp_path / "classifier", "llama", tokenizer, num_labels=1)[0]


def test_a_head_of_random_numbers_is_refused(model_dirs, classifier, tmp_path, tokenizer):
    with pytest.raises(ValueError, match=r"The reward model `.*` has no weights for score.weight.*ForSequenceClass"):
        load_model(AutoModelForSequenceClassification, model_dirs["gpt2"], "reward model", num_labels=1)
    with pytest.raises(ValueError, match=r"The proposal `.*` is a LlamaForSequenceClass.*, which predicts no next"):
        load_model(AutoModelForCausalLM, str(classifier), "proposal")
    build_model("llama", len(tokenizer)).model.save_pretrained(tmp_path / "headless")
    with pytest.raises(ValueError, match=r"The proposal `.*` has no weights for lm_head.weight"):
        load_model(AutoModelForCausalLM, str(tmp_path / "headless"), "proposal")
    assert load_model(AutoModelForCausalLM, model_dirs["gpt2"], "policy").config.tie_word_embeddings


def test_what_cannot_be_loaded_is_named(tmp_path, tokenizer):
    (tmp_path / "empty").mkdir()
    build_model("gpt2", len(tokenizer)).save_pretrained(tmp_path / "bare")
    for name in ("empty", "bare"):
        with pytest.raises(ValueError, match=rf"The model `.*{name}` has no tokenizer beside its weights"):
            load_tokenizer(str(tmp_path / name), "model")
    for load in (load_tokenizer, lambda *options: load_model(AutoModelForCausalLM, *options)):
        with pytest.raises(ValueError, match=r"The model `./nosuch` cannot be loaded: there is no such folder"):
            load("./nosuch", "model")
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
    message = f"The {other} `{classifier}` is a LlamaForSequenceClassification, which predicts no next"
    assert message in capsys.readouterr().err
    assert command(name, f"--{other}", tmp_path / "nothing") == 1
    err = capsys.readouterr().err
    assert f"`{tmp_path / 'nothing'}`, which `{other}` names" in err or f"The {other} `{tmp_path / 'nothing'}`" in err
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
    rows = [{"prompt": "the cat", "answer": -9.0}, {"prompt": "fish", "answer": 0.0}]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "mine.py").write_text("def reward(completions, answer, **kwargs):\n    return answer\n")
    assert command("rare-events", "--output", tmp_path / "report.json") == 0
    found = json.loads((tmp_path / "report.json").read_text())["prob_bad"][0]
    assert found["value"] == 0.5 and [each["value"] for each in found["per_prompt"]] == [1.0, 0.0]


@pytest.mark.parametrize("name", ["evaluate", "rare-events"])
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("[][0]", "list index out of range."),
        ("{}['key']", "KeyError: 'key'."),
        ("[float('abc')]", "could not convert string to float: 'abc'."),
    ],
)
def test_any_error_of_a_reward_ends_a_command_with_one_line(command, name, tmp_path, capsys, fault, said):
    write_inputs(tmp_path, fault)
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
        (["--confidence", "95"], "`confidence=95.0`"),
        (["--levels", "2"], "`level=2.0`"),
        (["--prompts", "none.jsonl"], "There is no file"),
        (["--reward_type", "toxicity"], "`reward_model_path`"),
        (["--beta", "1"], "needs a `reference`"),
        (["--engine_kwargs", "{}"], "`--engine_kwargs` has no effect without `--engine vllm`"),
        (["--reward_weights", "1", "2"], "`reward_weights` has 2 weights for 1 rewards"),
        (["--model", "./nosuch"], "There is no file or folder `./nosuch`, which `model` names"),
        (["--engine", "vllm", "--engine_kwargs", '{"dtype": "bfloat16"}'], "`engine_kwargs` has `dtype`"),
        (["--chat_template_kwargs", '{"a": 1}'], "`chat_template_kwargs` has no effect on prompts of plain"),
    ],
)
def test_evaluate_refuses_before_it_samples(command, tmp_path, capsys, changes, message):
    assert command("evaluate", *changes) == 1
    error = capsys.readouterr().err
    assert "trl-repulse evaluate: " in error and message in error and not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("prompts.jsonl", "`prompts` is the text 'prompts.jsonl'"),
        (
            Dataset.from_dict({"prompt": ["a"]}).to_pandas(),
            "`prompts` is a table .DataFrame.; pass `Dataset.from_pandas",
        ),
        ([{"prompt": "fish"}], "rows of a data set"),
        ({"train": ["fish"]}, "has several parts .'train'"),
    ],
)
def test_what_is_taken_for_prompts(tmp_path, given, message):
    """By the one function that all readers of prompts use."""
    with pytest.raises(ValueError, match=message):
        as_dataset(given)
    with pytest.raises(ValueError, match=message):
        sample_completions(tmp_path / "s", "no model", given, word_reward, SamplingSettings())


@pytest.mark.parametrize("kind", [None, "numpy"])
def test_columns_that_a_format_hides_stay_hidden(kind):
    rows = Dataset.from_dict({"prompt": ["a"], "answer": ["b"]})
    assert as_dataset(rows.with_format(kind, columns=["prompt"]))[:] == {"prompt": ["a"]}


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
    settings = SamplingSettings(num_samples=2, max_completion_length=2)
    found = sample_completions("~/s", model_dirs["gpt2"], ["fish"], word_reward, settings, progress=False)
    assert found.folder == tmp_path / "s" and (tmp_path / "s").is_dir()


# Adapters are loaded as PEFT does, over their bases


IDS = torch.arange(4, 10).view(1, -1)


@pytest.fixture
def save(tmp_path, model_dirs):
    """Saves a random adapter over a saved model, without a tokenizer; returns its folder and its logits."""

    def save(base=None, rows=None, auto_class=AutoModelForCausalLM, name="adapter", **changes):
        torch.manual_seed(0)
        model = auto_class.from_pretrained(base or model_dirs["llama"])
        if rows is not None:
            model.resize_token_embeddings(rows)
        task = "CAUSAL_LM" if auto_class is AutoModelForCausalLM else "SEQ_CLS"
        options = {"target_modules": ["q_proj"], "r": 4, "init_lora_weights": False, "task_type": task} | changes
        adapted = get_peft_model(model, LoraConfig(**options)).eval()
        for key, weights in adapted.named_parameters():
            if "magnitude" in key or "modules_to_save" in key:
                weights.data *= 1.5  # as if trained
        adapted.save_pretrained(tmp_path / name)
        with torch.no_grad():
            return str(tmp_path / name), adapted(IDS).logits

    return save


def assert_loaded(folder, expected):
    model = load_model(AutoModelForCausalLM, folder, "model")
    with torch.no_grad():
        torch.testing.assert_close(model(IDS).logits, expected)
    return model


LARGER = 21  # rows of a vocabulary that was resized


@pytest.mark.parametrize(
    "changes",
    [
        {"use_dora": True},
        {"modules_to_save": ["lm_head"]},
        {"rows": LARGER},
        {"rows": LARGER, "modules_to_save": ["embed_tokens", "lm_head"]},
    ],
)
def test_kinds_of_adapters(save, changes):
    assert_loaded(*save(**changes))


def test_a_resized_vocabulary_that_was_not_saved(save):
    folder, _ = save(rows=LARGER, target_modules=["embed_tokens"])
    with pytest.raises(ValueError, match=r"The model `.*` cannot be loaded: .* without its new rows of `lm_head`"):
        load_model(AutoModelForCausalLM, folder, "model")


def test_an_adapter_is_the_model_that_transformers_loads(save, tokenizer):
    """By the hash of its weights too, of which the seeds of held-out samples are made; its tokenizer is that of its base."""
    folder, expected = save()
    loaded = assert_loaded(folder, expected)
    assert hash_model(loaded) == hash_model(AutoModelForCausalLM.from_pretrained(folder))
    assert loaded._hf_peft_config_loaded and not loaded.training
    assert load_tokenizer(folder, "model").get_vocab() == tokenizer.get_vocab()


def test_what_an_adapter_lacks_is_said(save, tmp_path, model_dirs):
    folder, _ = save()
    weights = load_file(f"{folder}/adapter_model.safetensors")
    save_file(dict(list(weights.items())[1:]), f"{folder}/adapter_model.safetensors")
    with pytest.raises(ValueError, match=r"The model `.*adapter` cannot be loaded: the adapter lacks weights"):
        load_model(AutoModelForCausalLM, folder, "model")
    for name, config in (
        ("PROMPT_TUNING", PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)),
        ("aLoRA", LoraConfig(task_type="CAUSAL_LM", alora_invocation_tokens=[1, 2])),
    ):
        base = AutoModelForCausalLM.from_pretrained(model_dirs["llama"])
        get_peft_model(base, config).save_pretrained(tmp_path / name)
        with pytest.raises(ValueError, match=rf"The model `.*{name}` cannot be loaded: Adapters of the kind {name}"):
            load_model(AutoModelForCausalLM, str(tmp_path / name), "model")


def test_the_head_of_a_classifier_comes_from_its_adapter_or_not_at_all(save, model_dirs):
    folder, expected = save(auto_class=AutoModelForSequenceClassification, modules_to_save=["score"])
    with pytest.raises(ValueError, match=r"The reward model `.*` cannot be loaded: .*size mismatch"):  # two labels
        load_model(AutoModelForSequenceClassification, folder, "reward model", num_labels=1)
    loaded = load_model(AutoModelForSequenceClassification, folder, "reward model")
    with torch.no_grad():
        torch.testing.assert_close(loaded(IDS).logits, expected)
    with pytest.raises(ValueError, match=r"The model `.*` cannot be loaded: the adapter is of another kind"):
        load_model(AutoModelForCausalLM, folder, "model")
    language, _ = save(name="language")
    with pytest.raises(ValueError, match=r"The reward model `.*` cannot be loaded: the adapter is of another kind"):
        load_model(AutoModelForSequenceClassification, language, "reward model", num_labels=1)
    bare, _ = save(name="bare", task_type=None)  # it has no head to bring
    with pytest.raises(ValueError, match=r"`.*bare` cannot be loaded: its base `.*` has no weights for score.weight"):
        load_model(AutoModelForSequenceClassification, bare, "reward model", num_labels=1)


def test_several_labels_where_one_is_read(tmp_path):
    folder, _ = save_model(tmp_path / "two", "llama", build_tokenizer(), num_labels=2)
    message = r"The reward model `.*two` cannot be loaded: its head has the size of 2 labels.*--reward_type"
    with pytest.raises(ValueError, match=message):
        load_model(AutoModelForSequenceClassification, folder, "reward model", num_labels=1)


def test_an_adapter_whose_base_is_unknown(save):
    folder, _ = save()
    path = Path(folder, "adapter_config.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"base_model_name_or_path": None}))
    with pytest.raises(ValueError, match="does not say over which model it was trained"):
        load_model(AutoModelForCausalLM, folder, "model")
