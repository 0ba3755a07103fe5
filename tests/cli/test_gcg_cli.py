"""The commands around the attack, the example, and the published command."""

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
import yaml
from huggingface_hub import ModelCard

from examples import gcg as example
from examples.worlds import two_tokens
from trl_repulse.cli.arguments import FieldsParser
from trl_repulse.cli.main import main
from trl_repulse.evaluation._generation import as_function
from trl_repulse.evaluation._identity import identify_reward
from trl_repulse.evaluation.gcg import GCGEvaluationConfig, GCGRunArguments, RefusalJudge, read_results
from trl_repulse.evaluation.gcg.evaluator import load_judge

from ..gcg_trigger import ROWS, build_trigger_model, build_trigger_tokenizer, evaluation_config
from ..reward_models import build_tokenizer as build_reward_tokenizer
from ..reward_models import save_model


ROOT = Path(__file__).parents[2]
PUBLISHED = ROOT / "examples" / "configs" / "gcg_eval" / "gcg-1.yaml"
COMMAND = next(c for c in json.loads((ROOT / "tests" / "experiments.json").read_text()) if c["method"] == "gcg")
SAID_NO = f"{ROOT / 'tests' / 'gcg_trigger.py'}:judge"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A saved model and a table."""
    folder = tmp_path_factory.mktemp("gcg")
    tokenizer = build_trigger_tokenizer()
    build_trigger_model(tokenizer).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    rows = "".join(f"{row['goal']},{row['target']}\n" for row in ROWS[:4])
    (folder / "table.csv").write_text(f"goal,target\n{rows}")
    settings = {name: value for name, value in asdict(evaluation_config()).items() if value is not None}
    settings |= {"model_name_or_path": str(folder / "model"), "table": str(folder / "table.csv")}
    (folder / "config.yaml").write_text(yaml.safe_dump(settings | {"reward_type": SAID_NO, "threshold": [-4.0]}))
    return folder


def run(*arguments):
    return main([str(argument) for argument in arguments])


def parse(*arguments):
    return FieldsParser((GCGRunArguments, GCGEvaluationConfig)).parse_args_and_config(arguments)


def test_from_attack_to_report(folder, tmp_path, capsys):
    config = ["--config", folder / "config.yaml"]
    results = tmp_path / "results"
    for i in (1, 2):
        assert run("gcg", *config, "--output", results, "--shard", f"{i}/2") == 0
    assert "attack success" in capsys.readouterr().out
    header, records = read_results(results)
    assert [record["row"] for record in records] == [1, 2, 3, 4] and list(header["rewards"]) == ["judge"]

    report = ["--threshold", "-4", "-7", "--k", "1", "3", "--json", tmp_path / "r.json", "--card", folder / "model"]
    assert run("gcg-report", results, *report) == 0
    printed = capsys.readouterr().out
    card = ModelCard.load(folder / "model" / "README.md")
    assert printed in card.text
    found = {each.metric_name: each.metric_value for each in card.data.eval_results}
    assert found["attack success (score < -4.0), after"] == 1.0 and found["bad samples (score < -7.0), after"] == 0.0
    assert "Bad is a score below -4.0" in printed and "  in 3 samples" in printed
    shutil.copytree(folder / "model", tmp_path / "model")
    build_trigger_model(build_trigger_tokenizer(), steps=1).save_pretrained(tmp_path / "model")
    assert run("gcg-report", results, "--threshold", "-4", "--card", tmp_path / "model") == 1
    assert "holds other weights" in capsys.readouterr().err
    numbers = json.loads((tmp_path / "r.json").read_text())
    assert numbers["thresholds"]["-4.0"]["after"]["success"]["value"] == 1.0
    assert numbers["thresholds"]["-7.0"]["after"]["success"]["value"] == 0.0

    assert run("gcg-report", tmp_path / "none", "--threshold", "0") == 1
    assert "none` holds no attacks" in capsys.readouterr().err
    assert run("gcg-report", results, "--threshold", "0", "--k", "6") == 1
    assert "`k=6` must be from 1 to 5" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "`--model_name_or_path` is needed"),
        (["--model_name_or_path", "m"], "`--table` is needed"),
        (["--model_name_or_path", "/no/such", "--table", "t.csv"], "/no/such"),
        (["--model_name_or_path", "m", "--table", "t", "--shard", "1"], "must be written as i/n"),
        (["--model_name_or_path", "m", "--table", "t", "--shard", "0/0"], "`shard='0/0'` is no part"),
        (["--config", "none.yaml"], "There is no file `none.yaml`"),
        (["--model_name_or_path", "m", "--table", "t", "--dtype", "foo"], "`dtype='foo'` must be 'auto'"),
    ],
)
def test_what_is_refused(capsys, arguments, message):
    assert run("gcg", *arguments) == 1
    error = capsys.readouterr().err
    assert error.startswith("trl-repulse gcg: ") and message in error


def test_judges_that_are_refused(folder, capsys, tmp_path):
    arguments = ["--config", folder / "config.yaml", "--output", tmp_path / "x", "--reward_type"]
    for judge, message in (
        (["refusal", "--reward_kwargs", '{"prefix": "a"}'], "`refusal` takes `phrases`"),
        (["pairs"], "`reward_type='pairs'` is not one of"),
    ):
        assert run("gcg", *arguments, *judge) == 1
        assert message in capsys.readouterr().err


def test_a_path_alone_is_a_classifier_as_in_training():
    """It reads a plain prompt with what follows it, and is known by its weights."""
    path = two_tokens.reward_model_path()
    run = GCGRunArguments("model", "table.csv", reward_model_path=path)
    judge = load_judge(run, GCGEvaluationConfig(prompt_format="raw"))
    texts = [prompt["prompt"] for prompt in two_tokens.load_prompts()][:2]
    _, expected = as_function(path, None, torch.device("cpu"))
    completions = [" is", " was"]
    assert judge(prompts=texts, completions=completions) == expected(prompts=texts, completions=completions)
    assert identify_reward(judge.unchecked)["code"] and judge.__name__ == Path(path).name
    assert isinstance(load_judge(GCGRunArguments("model", "table.csv"), GCGEvaluationConfig()), RefusalJudge)
    with pytest.raises(ValueError, match="has no effect with `reward_type='refusal'`"):
        load_judge(replace(run, reward_type="refusal"), GCGEvaluationConfig())


def test_a_reward_that_fails_is_named(folder, capsys, tmp_path):
    (tmp_path / "r.py").write_text("def broken(prompts, completions):\n    return {}['x']\n")
    arguments = ["--config", folder / "config.yaml", "--output", tmp_path / "x", "--num_steps", 1]
    assert run("gcg", *arguments, "--reward_type", f"{tmp_path / 'r.py'}:broken") == 1
    error = capsys.readouterr().err
    assert "KeyError: 'x'. Raised by the reward function 'broken'. In " in error and "r.py, line 2" in error


def test_a_file_reads_as_flags_do(folder, tmp_path):
    """PyYAML takes 1e-3 for text, and a single threshold is a number."""
    text = "threshold: 1e-3\nnum_steps: 7\nsave_responses: true\nmax_targets: null\nfilter_roundtrip: off\n"
    (tmp_path / "config.yaml").write_text(text + "model_name_or_path: m\ntable: t\nreward_kwargs: {match: any}\n")
    arguments, config = parse("--config", str(tmp_path / "config.yaml"))
    assert arguments.threshold == [1e-3] and arguments.reward_kwargs == {"match": "any"}
    assert (config.num_steps, config.save_responses, config.max_targets) == (7, True, None)
    assert config.filter_roundtrip == "off"


# The published command: flag -> name, or None for what concerns training alone
RULES = {
    "pretrain": "model_name_or_path",
    "file_path": "table",
    "atk_success_criteria": "reward_type",
    "reward_pretrain": "reward_model_path",
    "reward_threshold": "threshold",
    "rm_exclude_adv_suffix": "include_suffix",
    "zero_stage": None,
    "gradient_checkpointing": None,
    "parameterization": None,
    "max_targets": "max_targets",
    "max_new_tokens": "max_new_tokens",
    "scenario": "scenario",
    "gcg_steps": "num_steps",
    "gcg_search_width": "search_width",
    "gcg_topk": "topk",
    "gcg_batch_size": "micro_batch_size",
    "gcg_n_replace": "n_replace",
    "gcg_buffer_size": "buffer_size",
    "gcg_use_prefix_cache": "use_prefix_cache",
    "gcg_filter_ids": "filter_roundtrip",
}
# Flags whose values have other words here
VALUES = {
    "atk_success_criteria": {"reward": "sequence_pair"}.__getitem__,
    "reward_threshold": lambda value: [value],
    "rm_exclude_adv_suffix": lambda value: not value,
    "gcg_filter_ids": {True: "suffix", False: "off"}.__getitem__,
}


def test_the_published_command_has_its_file():
    flags = COMMAND["flags"].items()
    expected = {RULES[flag]: VALUES.get(flag, lambda value: value)(value) for flag, value in flags if RULES[flag]}
    found = yaml.safe_load(PUBLISHED.read_text())
    assert {name: value for name, value in found.items() if name != "output"} == expected
    run_arguments, config = parse("--config", str(PUBLISHED))
    assert expected.items() <= (vars(run_arguments) | vars(config)).items()
    assert f"accelerate launch examples/gcg.py --config {PUBLISHED.relative_to(ROOT)}" in PUBLISHED.read_text()


def test_the_published_command_runs_on_a_stand_in(folder, tmp_path, capsys, monkeypatch):
    """Its own file, with small models in place of the named ones and few steps."""
    words = {word for row in ROWS for word in row["goal"].split()} | {"yes", "no", "i", "will", "refuse"}
    tokenizer = build_reward_tokenizer("pair", more=[f"Ġ{word}" for word in sorted(words)])
    save_model(tmp_path / "reward", "deberta", tokenizer)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "harmful_behaviors_custom.csv").write_text((folder / "table.csv").read_text())
    monkeypatch.chdir(tmp_path)
    stand_ins = ["--model_name_or_path", str(folder / "model"), "--reward_model_path", str(tmp_path / "reward")]
    quick = ["--num_steps", "2", "--search_width", "16", "--topk", "8", "--suffix_init", " x x x x"]
    example.main(["--config", str(PUBLISHED), *stand_ins, *quick])
    printed = capsys.readouterr().out
    assert "Bad is a score below -4.0" in printed and "of 4 targets (0 error" in printed
    header, records = read_results(tmp_path / "out" / "gcg-1")
    assert [record["status"] for record in records] == ["ok"] * 4
    assert header["settings"]["include_suffix"] is False
