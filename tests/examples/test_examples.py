"""The example script: what it writes and prints, what its flags do, and what it says to a mistaken user."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GPT2Config,
    GPT2ForSequenceClassification,
)

from examples.worlds import two_tokens
from examples.worlds.exact_tracking import ARGUMENTS
from trl_repulse import embedded
from trl_repulse.cli import arguments

from ..conftest import load_script, without_others
from .test_two_tokens import exact_evaluator


pytestmark = pytest.mark.trainer

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPT, WORLD = EXAMPLES / "repulse.py", two_tokens.flags("repulse")

# Completions of one token: every exact evaluation takes milliseconds
QUICK = ["--max_completion_length", "1", "--max_steps", "2", "--disable_tqdm", "true"]
HOT = ["--proposal", "hot_policy", "--potential", "indicator", "--proposal_temperature", "2"]
# Flags for models of the user's own, where nothing comes from embedded.yaml
OWN = [
    *QUICK,
    *"--per_device_train_batch_size 8 --num_generations 4 --report_to none --save_strategy no".split(),
    *"--proposal learned --target_dist_beta -1 --activation_checkpointing false".split(),
]


@pytest.fixture(scope="module")
def example():
    return load_script(SCRIPT, "repulse_example")


@pytest.fixture(scope="module")
def evaluator():
    """The evaluator of the world of two tokens at one token, built by hand."""
    return exact_evaluator(two_tokens.load_prompts()["prompt"], 1)


@pytest.fixture(scope="module")
def reward_dir(tmp_path_factory, tokenizer):
    """A random reward model over the tiny models' vocabulary."""
    folder = tmp_path_factory.mktemp("reward")
    torch.manual_seed(0)
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32, "num_labels": 1, "pad_token_id": 0}
    GPT2ForSequenceClassification(GPT2Config(vocab_size=len(tokenizer), **sizes)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def parse(flags):
    return arguments.parse(flags, ARGUMENTS["repulse"], embedded.settings_path("repulse"))


def read_results(folder):
    return json.loads((folder / "results.json").read_text())


def exact(evaluator, folder):
    report = evaluator.evaluate(AutoModelForCausalLM.from_pretrained(folder))
    return {"expected_reward": report.expected_reward, "log_prob_bad": report.log_prob_bad, "kl": report.kl}


def table_of(output):
    """The printed table, name to (start, end)."""
    names = ("expected reward", "exact log P(bad), nats", "KL to reference, nats per completion")
    names += ("samples drawn", "seconds")
    rows = (line.rsplit(maxsplit=2) for line in output.splitlines())
    return {cells[0]: cells[1:] for cells in rows if len(cells) == 3 and cells[0] in names}


# What a run leaves behind


@pytest.mark.thorough
@pytest.mark.parametrize(
    "flags, method, samples",
    [
        ([], "RePULSe", 512),
        (["--alpha", "0"], "REINFORCE", 256),
        (["--proposal", "policy"], "RePULSe (policy as proposal)", 256),
        (HOT, "RePULSe (hot policy)", 512),
        (["--num_proposal_generations", "4", "--proposal_updates_per_step", "2"], "RePULSe", 320),
    ],
    ids=["repulse", "reinforce", "policy_as_proposal", "hot_policy", "proposal_draws"],
)
def test_exact_run(example, evaluator, tmp_path, capsys, flags, method, samples):
    example.main([*WORLD, *QUICK, "--seed", "3", "--output_dir", str(tmp_path), *flags])

    results = read_results(tmp_path)
    assert (results["method"], results["seed"], results["policy_updates"]) == (method, 3, 2)
    assert results["samples"] == samples
    assert results["initial"] == pytest.approx(exact(evaluator, two_tokens.policy_path()), abs=1e-6)
    assert results["final"] == pytest.approx(exact(evaluator, tmp_path), abs=1e-6)
    assert results["final"] != results["initial"]
    assert results["seconds"] > 0
    assert results["settings"]["seed"] == 3
    assert results["settings"]["target_dist_beta"] == -5.0
    assert results["metrics"]["step"] == 2
    assert [entry["update"] for entry in results["history"]] == [0, 2]

    has_proposal = method == "RePULSe"
    assert (tmp_path / "proposal").is_dir() == has_proposal
    last = results["history"][-1].get("proposal")
    if has_proposal:
        assert last == pytest.approx(exact(evaluator, tmp_path / "proposal"), abs=1e-6)
    else:
        assert last is None

    output = capsys.readouterr().out
    assert f"{method}, seed 3" in output
    table = table_of(output)
    for row, key in zip(list(table)[:3], ("expected_reward", "log_prob_bad", "kl"), strict=True):
        assert table[row] == [f"{results[name][key]:.4f}" for name in ("initial", "final")]
    assert table["samples drawn"] == ["0", str(samples)]
    assert table["seconds"] == ["0.0", f"{results['seconds']:.1f}"]
    assert f"Saved to {tmp_path}" in output
    assert (tmp_path / "training.png").read_bytes().startswith(b"\x89PNG")


def test_tracking_every(example, tmp_path):
    example.main([*WORLD, *QUICK, "--output_dir", str(tmp_path), "--tracking_every", "1"])
    assert [entry["update"] for entry in read_results(tmp_path)["history"]] == [0, 1, 2]


@pytest.mark.thorough
def test_more_prompts_an_update_than_there_are(example, tmp_path):
    example.main([*WORLD, *QUICK, "--output_dir", str(tmp_path), "--gradient_accumulation_steps", "2"])
    results = read_results(tmp_path)
    assert (results["policy_updates"], results["samples"]) == (2, 1024)


@pytest.mark.thorough
def test_evaluation_by_sampling(example, tmp_path):
    flags = ["--eval_strategy", "steps", "--eval_steps", "1", "--per_device_eval_batch_size", "64"]
    example.main([*WORLD, *QUICK, "--output_dir", str(tmp_path), "--dataset_test_split", "train", *flags])
    assert read_results(tmp_path)["samples"] == 512  # those drawn for training


def test_own_models_and_plain_prompts(example, tmp_path, capsys, model_dirs, reward_dir):
    path, prompts = tmp_path / "prompts.csv", ["the cat", "the dog ran", "fish"]
    path.write_text("\n".join(["prompt", *prompts]))
    models = ["--model_name_or_path", model_dirs["llama"], "--reward_model_path", reward_dir]
    example.main([*OWN, *models, "--dataset_name", str(path), "--output_dir", str(tmp_path / "out")])
    results = read_results(tmp_path / "out")
    assert results["method"] == "RePULSe"
    assert results["samples"] == 32
    assert not {"initial", "final", "history"} & set(results)
    assert "reward" in results["metrics"]
    assert (tmp_path / "out" / "model.safetensors").exists()
    assert (tmp_path / "out" / "training.png").read_bytes().startswith(b"\x89PNG")
    table = (tmp_path / "out" / "completions" / "before_after.md").read_text().splitlines()
    assert len(table) == 12 and table[0] == "| prompt | update 0 | reward | update 2 | reward |"
    assert [line.split(" | ")[0] for line in table[2:6]] == [f"| {prompt}" for prompt in (*prompts, prompts[0])]
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["samples", "drawn", "32"] in lines
    assert ["reward", f"{results['metrics']['reward']:.4f}"] in lines


# PPO, which shares all but the method


def test_ppo_run(evaluator, tmp_path, capsys):
    flags = ["--seed", "3", "--output_dir", str(tmp_path), "--value_model_path", two_tokens.reward_model_path()]
    load_script(EXAMPLES / "ppo.py", "ppo_example").main([*two_tokens.flags("ppo"), *QUICK, *flags])
    results = read_results(tmp_path)
    assert (results["method"], results["seed"], results["policy_updates"], results["samples"]) == ("PPO", 3, 2, 256)
    assert results["final"] == pytest.approx(exact(evaluator, tmp_path), abs=1e-6)
    assert results["final"] != results["initial"]
    settings = yaml.safe_load(Path(two_tokens.config_path("ppo")).read_text())
    for name in ("learning_rate", "value_learning_rate", "num_generations", "gae_lambda"):
        assert results["settings"][name] == settings[name]
    value = json.loads((tmp_path / "value" / "config.json").read_text())
    assert value["architectures"] == ["GPT2ForTokenClassification"]
    assert value["n_embd"] == json.loads((Path(two_tokens.reward_model_path()) / "config.json").read_text())["n_embd"]
    output = capsys.readouterr().out
    assert "PPO, seed 3" in output and table_of(output)["samples drawn"] == ["0", "256"]
    assert (tmp_path / "training.png").exists()


# Flags and files of settings


def test_default_settings_are_those_of_the_file(example):
    settings = yaml.safe_load(Path(embedded.settings_path("repulse")).read_text())
    script_args, args, model_args = parse([])
    assert model_args.model_name_or_path is None
    assert script_args.reward_model_path == embedded.reward_model_path()
    assert script_args.dataset_name == embedded.prompts_path()
    assert script_args.eval_dataset_name == embedded.prompts_path("unseen")
    assert script_args.num_final_samples == settings.pop("num_final_samples")
    assert args.report_to == []
    assert settings.pop("report_to") == "none"
    assert {name: getattr(args, name) for name in settings} == settings
    assert args.use_cpu == (not torch.accelerator.is_available())


def test_flags_win_over_the_file(example, tmp_path):
    assert parse(["--learning_rate", "0.5", "--output_dir=x"])[1].learning_rate == 0.5
    config = tmp_path / "own.yaml"
    config.write_text("proposal: learned\nalpha: 0.25\nlearning_rate: 0.25\nnum_generations: 4\ndtype: bfloat16\n")
    _, args, model_args = parse(["--config", str(config), "--alpha", "0.75"])
    assert (args.alpha, args.learning_rate, args.num_generations) == (0.75, 0.25, 4)
    assert model_args.model_name_or_path is None  # so this is the embedded world too
    assert args.model_init_kwargs["dtype"] == "bfloat16"


def test_model_arguments_reach_the_model(example):
    flags = ["--model_name_or_path", "a", "--reward_model_path", "b", "--dataset_name", "c", "--model_revision", "d"]
    flags += ["--bad_reward_threshold", "-4"]
    flags += ["--attn_implementation", "eager", "--model_init_kwargs", '{"use_cache": false}']
    _, args, model_args = parse(flags)
    assert model_args.model_name_or_path == "a"
    expected = {"revision": "d", "attn_implementation": "eager", "dtype": "float32", "use_cache": False}
    assert args.model_init_kwargs == expected


# Mistakes


def fail(monkeypatch, *flags):
    """Runs the script as `python repulse.py` does and returns what it says on its way out."""
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *flags])
    with pytest.raises(SystemExit) as exit_:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    message = exit_.value.code
    assert isinstance(message, str)  # printed to stderr, with exit code 1
    assert message.startswith("error: ")
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--tracking_every", "0"], "`every=0` must be at least 1"),
        (["--max_completion_length", "3"], "set a smaller max_completion_length, or evaluate by sampling"),
        (["--dataset_name", "nowhere.jsonl"], "There is no file `nowhere.jsonl`"),
        (["--eval_strategy", "steps", "--per_device_eval_batch_size", "32"], "has no split 'test'; name one"),
        (["--model_name_or_path", "m", "--alpha", "0"], "`--reward_model_path` is needed with `--model_name_or_path`"),
    ],
    ids=lambda value: " ".join(value) if value[0].startswith("--") else "",
)
def test_mistaken_flags(monkeypatch, tmp_path, flags, words):
    monkeypatch.chdir(tmp_path)
    world = [] if flags[0] == "--model_name_or_path" else WORLD
    assert words in fail(monkeypatch, *world, *QUICK, "--output_dir", "out", *flags)
    assert not Path("out", "results.json").exists()


def test_infinite_reward(monkeypatch, tmp_path):
    model = AutoModelForSequenceClassification.from_pretrained(two_tokens.reward_model_path())
    with torch.no_grad():  # a feature that is always 10, times a weight near the largest float
        model.transformer.ln_f.weight[0], model.transformer.ln_f.bias[0] = 0.0, 10.0
        model.score.weight[:, 0] = 3e38
    model.save_pretrained(tmp_path / "reward")
    AutoTokenizer.from_pretrained(two_tokens.reward_model_path()).save_pretrained(tmp_path / "reward")
    flags = ["--reward_model_path", str(tmp_path / "reward"), "--output_dir", str(tmp_path / "out")]
    assert "return one finite number a text" in fail(monkeypatch, *WORLD, *QUICK, *flags)


# As a command


def launch(folder, *flags, launcher=("-m", "accelerate.commands.launch"), script=SCRIPT):
    command = [sys.executable, *launcher, str(script), *flags]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600, env=os.environ.copy())


@pytest.mark.slow
def test_default_run_in_full(tmp_path):
    """The README's first command, beside the stored run of REINFORCE that it prints."""
    done = launch(tmp_path, script=EXAMPLES / "repulse.py")
    assert done.returncode == 0, done.stderr
    lines = without_others(done.stderr).splitlines()  # the launcher has a notice of its own
    assert not [line for line in lines if "warn" in line.lower() and "`accelerate config`" not in line]
    metrics, stored = read_results(tmp_path / "repulse-embedded")["metrics"], embedded.stored_results()
    assert metrics["eval_p_bad"] < stored["REINFORCE"]["eval_p_bad_low"]
    assert metrics["eval_p_bad_high"] < stored["initial policy"]["eval_p_bad_low"]
    assert metrics["eval_reward"] > stored["REINFORCE"]["eval_reward"] - 0.1
    assert all(name in done.stdout for name in ("initial policy", "REINFORCE", "95% interval"))
