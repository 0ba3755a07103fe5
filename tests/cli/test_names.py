"""One vocabulary: arguments have training's names in all commands, and commands take what they need from a training command's file."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from trl_repulse.cli import train
from trl_repulse.cli._early import launcher_names
from trl_repulse.cli._fields import OF_TRAINING, SYNONYMS
from trl_repulse.cli.main import COMMANDS, build_parser, main, training_names
from trl_repulse.evaluation.records import load_samples, read_header

from ..evaluation_support import write_samples


def options(command):
    (commands,) = (each for each in build_parser(command)._actions if each.dest == "command")
    return [{name.removeprefix("--") for name in each.option_strings} for each in commands.choices[command]._actions]


@pytest.mark.parametrize("command", sorted({*COMMANDS} - {"gcg"}))
def test_an_argument_has_all_of_its_names_in_every_command(command):
    for names in options(command):
        for synonyms in SYNONYMS:
            assert names.isdisjoint(synonyms) or names == {*synonyms} or "confidence" in names


def test_the_first_name_is_that_of_training():
    assert training_names() >= OF_TRAINING | {first for first, *_ in SYNONYMS} - {"level", "output"}
    for command in ("evaluate", "rare-events", "attacks", "suggest"):
        of_suggest = set() if command == "suggest" else {"max_prompt_length", "use_peft"}
        assert set().union(*options(command)) >= OF_TRAINING - of_suggest


@pytest.fixture
def config(tmp_path, model_dirs, monkeypatch):
    """The file of a run, with much that only training reads."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.jsonl").write_text('{"text": "the cat"}\n{"text": "fish"}\n')
    (tmp_path / "held_out.jsonl").write_text('{"text": "the dog"}\n')
    (tmp_path / "mine.py").write_text(
        "def reward(completions, **kwargs):\n    return [-3.0 * c.count('bad') for c in completions]\n"
    )
    settings = {
        "model_name_or_path": model_dirs["gpt2"],
        "reward_type": "mine.py:reward",
        "dataset_name": "prompts.jsonl",
        "prompt_column": "text",
        "max_completion_length": 2,
        "bad_reward_threshold": -1.0,
        # `beta` and `proposal` mean other things there
        **{"output_dir": "out", "max_steps": 3, "beta": 0.2, "proposal": "hot_policy", "seed": 5, "num_processes": 1},
    }

    def write(**more):
        (tmp_path / "repulse.yaml").write_text(yaml.safe_dump(settings | more))
        return ["--config", "repulse.yaml"]

    return write


@pytest.mark.parametrize("command", ["evaluate samples", "rare-events", "attacks out", "suggest"])
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            {"model_revision": "v1", "dataset_config": "hard"},
            {"revision": "v1", "dataset_config": "hard", "split": "train"},
        ),
        ({"eval_strategy": "steps", "dataset_test_split": "held"}, {"split": "held"}),
        ({"eval_strategy": False, "dataset_test_split": "held"}, {"split": "train"}),
        ({"eval_dataset_name": None}, {"prompts": "prompts.jsonl"}),
        (
            {"eval_dataset_name": "held_out.jsonl", "dataset_test_split": "test", "dataset_config": "hard"},
            {"prompts": "held_out.jsonl", "split": "train", "dataset_config": None},
        ),
        ({"use_peft": True, "max_prompt_length": 7}, {"use_peft": True, "max_prompt_length": 7}),
    ],
)
def test_the_model_and_the_prompts_are_those_of_the_file(config, command, settings, expected):
    name, path = command.split()[0], Path(config(**settings)[1])
    if name == "suggest" and settings.get("eval_strategy", settings.get("eval_dataset_name")):
        expected = {"prompts": "prompts.jsonl", "split": "train"}  # on which the suggested run would train
    args = vars(build_parser(name, path).parse_args(command.split()))
    of_suggest = {"use_peft", "max_prompt_length"} if name != "suggest" else set()
    assert all(args[key] == value for key, value in expected.items() if key not in of_suggest)


def test_the_revision_of_a_file_is_of_the_model_of_the_file(config, model_dirs):
    path = Path(config(model_revision="v1")[1])
    for words in ("evaluate a --model b", "rare-events b", "rare-events --model b", "attacks a --model b"):
        for more, revision in (([], None), (["--revision", "v1"], "v1"), (["--model", model_dirs["gpt2"]], "v1")):
            if words != "rare-events b" or more[:1] != ["--model"]:  # a POLICY wins
                args = build_parser(words.split()[0], path).parse_args([*words.split(), *more])
                assert args.revision == revision, (words, more)


def test_rare_events_and_suggest_load_the_revision(config, monkeypatch):
    class Loaded(Exception):
        pass

    def load(auto_class, name, part, **options):
        raise Loaded(options["revision"])

    monkeypatch.setattr("trl_repulse.models._loading.load_model", load)
    for command in ("rare-events", "suggest"):
        with pytest.raises(Loaded, match="v1"):
            main([command, *config(model_revision="v1")])


def test_paths_in_the_home_folder(config, tmp_path, monkeypatch, model_dirs):
    """The shell leaves `~` behind `=` and in files as it is."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "policy").symlink_to(model_dirs["gpt2"])
    config(model_name_or_path="~/policy", dataset_name="~/prompts.jsonl")
    words = ["evaluate", "~/samples", "--config=~/repulse.yaml", "--num_samples", "2", "--output=~/report.json"]
    assert main(words) == 0
    assert (tmp_path / "report.json").is_file() and not (tmp_path / "~").exists()


def test_evaluate_takes_the_file_of_training(config, tmp_path, capsys):
    assert main(["evaluate", "samples", *config(), "--num_samples", "8"]) == 0
    assert "| P(r < -1) |" in capsys.readouterr().out
    header = read_header(tmp_path / "samples")
    assert (header["settings"]["max_completion_length"], header["settings"]["beta"]) == (2, 0)
    assert load_samples("samples").prompts == ["the cat", "fish"]
    held_out = ["evaluate", "held", *config(eval_dataset_name="held_out.jsonl"), "--num_samples", "4"]
    assert main([*held_out, "--threshold", "-2"]) == 0
    assert load_samples("held").prompts == ["the dog"]  # and not what was trained on
    assert "| P(r < -2) |" in (out := capsys.readouterr().out) and "P(r < -1)" not in out


def test_rare_events_and_attacks_take_the_file_of_training(config, model_dirs, capsys):
    few = ["--num_samples", "20", "--num_proposal_samples", "0", "--output", "rare.json"]
    assert main(["rare-events", *config(), *few]) == 0
    settings = json.load(open("rare.json"))["settings"]
    assert settings["policy"] == model_dirs["gpt2"] and settings["proposal"] == [] and settings["seed"] == 0
    assert main(["rare-events", model_dirs["llama"], *config(), *few]) == 0
    assert json.load(open("rare.json"))["settings"]["policy"] == model_dirs["llama"]
    assert main(["attacks", "answers", *config(), "--num_samples", "2"]) == 0
    assert "prompt" in capsys.readouterr().out


def test_audit_takes_the_threshold(config, tmp_path, capsys):
    write_samples(tmp_path / "samples", [[-2.0, 0.0] * 20])
    assert main(["audit", "samples", "labels.csv", "--draw", "8", *config()]) == 0
    path = tmp_path / "labels.csv"
    path.write_text(path.read_text(encoding="utf-8-sig").replace(",,samples-", ",0,samples-"))
    assert main(["audit", "samples", "labels.csv", *config()]) == 0
    capsys.readouterr()
    assert main(["audit", "samples", "labels.csv", "--threshold", "-1.5"]) == 1
    assert "`--threshold -1.5` is not that of the labels, -1; leave it out" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["evaluate samples", "audit samples", "rare-events", "attacks out", "compare a b"])
def test_a_wrong_name_in_the_file_is_refused(config, tmp_path, capsys, command):
    assert main([*command.split(), *config(max_step=3)]) == 1
    assert (
        "`repulse.yaml` has `max_step`, which is no argument; remove it. Did you mean `max_steps`?"
        in capsys.readouterr().err
    )
    assert main([*command.split(), *config(num_samples=3)]) == 1  # an argument of some, but not of training
    assert "has `num_samples`, which is no argument" in capsys.readouterr().err
    (tmp_path / "own.yaml").write_text("bad_reward_threshold: -1\nthreshold: -2\n")
    assert main([*command.split(), "--config", "own.yaml"]) == 1
    assert "has `bad_reward_threshold` and `threshold`, which are one argument; keep one" in capsys.readouterr().err


MISTAKES = {
    "repulse --lerning_rate 3": "Did you mean `--learning_rate`?",
    "reinforce --num_proceses 2": "`--num_proceses` is no argument; remove it. Did you mean `--num_processes`?",
    "repulse --model_name_or_path a --dataset_name b": "`--reward_model_path` is needed",
    "grpo --dataset_name none.jsonl --model_name_or_path a": "There is no file or folder `none.jsonl`, which `dataset_name`",
    "repulse --config repulse.yaml": "has `max_step`, which is no argument; remove it. Did you mean `max_steps`?",
    "evaluate s --config repulse.yaml": "has `max_step`, which is no argument",
    "gcg --serach_width 3": "Did you mean `--search_width`?",
    "attacks o --model a --prompts b --threshold 0 --k 17": "`--k 17` must be from 1 to `--num_samples 16`",
    "rare-events a --prompts b --max_completion_length 3 --threshold nan": "`--threshold nan` must be a finite number",
    "evaluate s --model a --prompts b --num_samples 0": "`num_samples=0` must be at least 1",
    "suggest --model a --prompts b --minutes 3 --max_steps 3": "`--minutes` decides `max_steps`",
    "audit s l.csv --draw 3": "`--threshold` is needed",
}
HELP = [f"{command} --help" for command in ("repulse", "grpo", *COMMANDS)]  # ours, and TRL's own


@pytest.mark.thorough
def test_help_and_what_needs_no_model_import_no_torch(tmp_path):
    """In one process, one command after the other."""
    (tmp_path / "repulse.yaml").write_text("bad_reward_threshold: -1\nmax_step: 3\noutput_dir: out\n")
    code = (
        "import sys; from trl_repulse.cli.main import main\n"
        "for line in sys.argv[1:]:\n"
        "    try: status = main(line.split())\n"
        "    except SystemExit as ended: status = ended.code\n"
        "    print('ended with', status, 'torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code, *MISTAKES, *HELP]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=900)
    for said, message in zip(done.stderr.splitlines(), MISTAKES.values(), strict=True):
        assert message in said
    *ended, rest = done.stdout.split("ended with ")
    assert len(MISTAKES) + len(HELP) == len(ended) and rest == "0 False\n"
    assert all(text.startswith("1 False\n") for text in ended[1 : len(MISTAKES) + 1])
    shown = [text.partition("\n")[2] for text in ended[len(MISTAKES) :]]
    assert all(text.startswith("usage: trl-repulse") for text in shown) and "True" not in ended


def test_the_names_of_the_launchers_flags_are_those_of_its_parser():
    flags = train._options(train.launch_command_parser())
    assert launcher_names() == {flag.removeprefix("--").replace("-", "_") for flag in flags} | {"accelerate_config"}


def test_a_call_without_torch():
    """In a process without torch; where that cannot be done, in this one."""
    code = (
        "import sys, importlib.util; from trl_repulse.cli._early import without_torch as do\n"
        "def refuse(x): import trl_repulse.cli.arguments; raise ValueError('%s: %s' % (x, importlib.util.find_spec('torch')))\n"
        "def name(): import torch; return torch.__name__\n"
        "try: do(refuse, 'torch')\n"
        "except ValueError as error: print(error, 'torch' in sys.modules)\n"
        "print(do(len, 'four'), 'torch' in sys.modules, do(name), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines() == ["torch: None False", "4 False torch True"] and not done.stderr
