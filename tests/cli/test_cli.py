"""The console command, in a process of its own where it serves."""

import os
import signal
import subprocess
import sys
import threading
import time
import tomllib
from pathlib import Path

import pytest

from trl_repulse import __version__
from trl_repulse._errors import EXTRAS, describe_error
from trl_repulse.cli.main import COMMANDS, TRAINING, build_parser, main
from trl_repulse.rewards import RemoteReward


ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("unbuffered", [False, True])
def test_streams_that_nobody_reads(tmp_path, unbuffered):
    """A reader that leaves, letters that a locale lacks, streams that the shell has closed: none of them ends a program."""
    code = (
        "import sys; from trl_repulse.cli.main import keep_writing; keep_writing(); keep_writing()\n"
        "for i in range(100_000): print('☕', i)\n"
        "print('☕', file=sys.stderr); open('written', 'w').close(); sys.exit(3)"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    environment |= {"PYTHONUNBUFFERED": "1"} if unbuffered else {}
    for streams in ("2>&1 | head -1", ">&- 2>&-"):
        shell = f'({sys.executable} -c "$CODE"; echo $? > status) {streams}'
        done = subprocess.run(shell, shell=True, cwd=tmp_path, env=environment | {"CODE": code}, capture_output=True)
        assert done.stdout.decode() == ("\\u2615 0\n" if "head" in streams else "") and done.stderr == b""
        assert (tmp_path / "status").read_text() == "3\n"
        (tmp_path / "written").unlink()


def test_a_function_served_by_the_command_answers_before_it_ends(tmp_path, monkeypatch):
    file, started = tmp_path / "mine.py", tmp_path / "started"
    file.write_text(
        "import pathlib, time\n"
        "def slow(queries, prompts, labels):\n"
        f"    pathlib.Path({str(started)!r}).touch()\n"
        "    time.sleep(1)\n"
        "    return [len(q) + 100 * len(x) for q, x in zip(queries, labels)]\n"
    )
    monkeypatch.setenv("REWARD_TOKEN", "geheim")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    command = [sys.executable, "-m", "trl_repulse.cli", "serve-reward", "--reward_type", f"{file}:slow"]
    command += ["--token_variable", "REWARD_TOKEN", "--port", "0"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    results = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd="/") as process:
        try:
            line = process.stdout.readline()
            assert line.startswith("Serving ") and line.endswith("; stop with Ctrl+C.\n")
            url = line.split(" at ")[1].split(";")[0]
            with pytest.raises(ValueError, match="status 401"):
                RemoteReward(url)(["a"], ["bc"])
            reward = RemoteReward(url, retries=0, label_column="answer", token_variable="REWARD_TOKEN")
            asking = threading.Thread(target=lambda: results.append(reward(["a"], ["bc"], answer=["xx"])))
            asking.start()
            deadline = time.monotonic() + 30
            while not started.exists():
                assert time.monotonic() < deadline
                time.sleep(0.01)
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=30) == 0 and process.stdout.read() == "Stopped.\n"
        finally:
            process.kill()
    asking.join(timeout=30)
    assert results == [[203.0]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "arguments are required: COMMAND"),
        (["serve-reward", "--reward_kwargs", "[1]"], "'[1]' is no JSON object"),
        (["serve-reward", "--reward_kwargs", "{"], "'{' is not JSON"),
    ],
)
def test_wrong_arguments(capsys, arguments, message):
    with pytest.raises(SystemExit) as exit:
        main(arguments)
    assert exit.value.code == 2 and message in capsys.readouterr().err


def test_a_reward_that_cannot_be_served(capsys):
    refused = ([], "`--reward_type` is needed"), (["--reward_type", "ppl"], "`reward_type='ppl'` is not")
    for arguments, message in refused:
        assert main(["serve-reward", *arguments]) == 1
        assert (error := capsys.readouterr().err).startswith("trl-repulse serve-reward: ") and message in error


@pytest.mark.parametrize("number", ["-1e1", "-1E-1", "-.5", "-5.", "-1_000", "-inf", "-Infinity", "-nan"])
def test_negative_numbers_are_no_options(number):
    for command, flag, more in (
        ("evaluate", "thresholds", ["samples"]),
        ("rare-events", "threshold", ["m", "--prompts", "p", "--max_completion_length", "1"]),
        ("gcg-report", "threshold", ["results.jsonl"]),
    ):
        args = build_parser(command).parse_args([command, *more, f"--{flag}", number, "-2"])
        assert str(getattr(args, flag)) == str([float(number), -2.0])


def test_what_is_no_number_is_an_option(capsys):
    for argument in ("-information", "-e1", "--1"):
        with pytest.raises(SystemExit):
            build_parser("evaluate").parse_args(["evaluate", "samples", "--thresholds", argument])
        assert "expected at least one argument" in capsys.readouterr().err
    drawing = "rare-events m --prompts p --max_completion_length 1 --threshold"
    for command, message in (
        (f"{drawing} -inf", "`--threshold -inf` must be a finite number"),
        (f"{drawing} -1 --seed -1", "`--seed -1` must be at least 0"),
        ("compare a b --thresholds -1 nan", "`--thresholds nan` must be a finite number"),
        ("gcg-report a --threshold -1 --confidence 95", "`confidence=95.0` must be between 0 and 1"),
    ):
        assert main(command.split()) == 1 and message in capsys.readouterr().err


def test_help_and_version(capsys):
    for arguments, expected in (
        (["--help"], [*TRAINING, *COMMANDS]),
        (["serve-reward", "--help"], ["--reward_type", "--token_variable", "--config"]),
        (["--version"], [f"trl-repulse {__version__}"]),
    ):
        with pytest.raises(SystemExit) as exit:
            main(arguments)
        printed = capsys.readouterr().out
        assert exit.value.code == 0 and all(text in printed for text in expected)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["evalute", "folder"], "there is no command `evalute`. Did you mean `evaluate`?"),
        (["repluse", "--alpha", "0"], "there is no command `repluse`. Did you mean `repulse`?"),
        (["evaluate", "folder", "--modle", "m"], "`--modle` is no argument; remove it. Did you mean `--model`?"),
        (["evaluate", "folder", "--modle=http://user:key@host"], "`--modle` is no argument; remove it. Did you mean"),
        (["evaluate", "folder", "--num-sample=3"], "Did you mean `--num_samples`?"),
        (["zzz"], "there is no command `zzz`. The commands are repulse, "),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_unknown_names_are_answered_with_the_nearest(capsys, arguments, words):
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2 and words in capsys.readouterr().err


def test_a_field_by_the_name_it_has_in_other_commands_is_answered_with_its_own(capsys):
    assert main(["repulse", "--model", "m"]) == 1
    assert "Did you mean `--model_name_or_path`?" in capsys.readouterr().err


def test_a_missing_package_is_one_line_with_its_remedy(monkeypatch, capsys):
    def run(args):
        raise ModuleNotFoundError("No module named 'peft.tuners'", name="peft.tuners")

    class Module:
        @staticmethod
        def add_arguments(parser):
            parser.set_defaults(run=run)

    monkeypatch.setattr("trl_repulse.cli.main.import_module", lambda name: Module)
    assert main(["evaluate"]) == 1
    assert capsys.readouterr().err == (
        "trl-repulse evaluate: No module named 'peft.tuners'. Run `pip install \"trl-repulse[peft]\"`.\n"
    )


def test_extras_that_messages_name_exist():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(EXTRAS.values()) <= set(project["optional-dependencies"])
    error = ModuleNotFoundError("No module named 'yours'", name="yours")
    assert describe_error(error) == (
        "No module named 'yours'. Install the package that has it, or put its folder on `PYTHONPATH`."
    )
    told = ModuleNotFoundError("it needs peft: pip install peft", name="peft")
    assert describe_error(told) == "it needs peft: pip install peft"


def test_arguments_from_a_file(tmp_path):
    """By the names of their flags, of all kinds; what is on the command line wins."""
    path = tmp_path / "a.yaml"
    path.write_text(
        "folders: [one, two]\nmodel: m\nthresholds: -4\nlevels: [1e-2]\nper_prompt: true\ntrust_remote_code: false\n"
        "reward: [{reward_type: toxicity}]\nchat_template_kwargs: {thinking: false}\ndtype: null\nengine: vllm\n"
    )
    args = build_parser("evaluate", path).parse_args(["evaluate"])
    assert args.folders == [Path("one"), Path("two")] and (args.thresholds, args.levels) == ([-4.0], [0.01])
    assert (args.per_prompt, args.trust_remote_code) == (True, False) and "dtype" not in args
    assert args.rewards == [{"reward_type": "toxicity"}] and args.chat_template_kwargs == {"thinking": False}
    args = build_parser("evaluate", path).parse_args(["evaluate", "three", "--thresholds", "1", "2"])
    assert (args.folders, args.thresholds, args.model) == ([Path("three")], [1.0, 2.0], "m")
    args = build_parser("evaluate", path).parse_args(["evaluate", "--reward", '{"a": 1}', "--reward", '{"b": 2}'])
    assert args.rewards == [{"a": 1}, {"b": 2}]  # in the place of the file's


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "There is no file `{}`"),
        (
            "level: 1\nbacth_size: 1\n",
            "`{}` has `bacth_size`, which is no argument; remove it. Did you mean `batch_size`?",
        ),
        ("help: a\n", "has `help`, which is no argument"),
        ("engine: gpu\n", "has `engine: gpu`, which must be one of transformers, vllm"),
        ("per_prompt: maybe\n", "has `per_prompt: maybe`, which cannot be read"),
        ("model: [a, b]\n", "has `model: ['a', 'b']`, which takes one value; give it without the brackets"),
        ("- a\n", "must hold arguments by name"),
    ],
)
def test_a_file_that_is_refused_is_one_line(tmp_path, capsys, text, words):
    path = tmp_path / "a.yaml"
    if text is not None:
        path.write_text(text)
    assert main(["evaluate", "--config", str(path)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("trl-repulse evaluate: ") and words.format(path) in error and error.count("\n") == 1


def test_the_file_is_named_once_and_in_full(tmp_path, capsys):
    path = tmp_path / "a.yaml"
    path.write_text("model: a\n")
    assert main(["evaluate", "--config", str(path), f"--config={path}"]) == 1
    assert "`--config` is to be given once" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["evaluate", "--conf", str(path), "a"])
    assert "`--conf` is no argument; remove it. Did you mean `--config`?" in capsys.readouterr().err


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "gcg"])
def test_what_is_missing_in_a_file_is_asked_for(tmp_path, capsys, name):
    """An empty file leaves required arguments required."""
    (tmp_path / "a.yaml").write_text("")
    parser = build_parser(name)
    sub = parser._subparsers._group_actions[0].choices[name]
    if any(action.required for action in sub._actions):
        with pytest.raises(SystemExit):
            main([name, "--config", str(tmp_path / "a.yaml")])
        assert "are required" in capsys.readouterr().err
