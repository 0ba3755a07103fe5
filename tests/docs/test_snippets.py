"""
What the pages tell users to run: Python blocks are executed, commands are read by their own parsers, and short ones run.

Both find, in their folder, a tiny model under every path and Hub id that the pages name (`world`), so that the text runs as it is printed.
Only sizes are cut (`SIZES`), and what a run needs on a CPU is added. What they upload goes to a stand-in for the Hub.
"""

import argparse
import ast
import json
import re
import runpy
import shlex
import shutil
import sys

import pytest
from accelerate.commands.launch import launch_command_parser
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.worlds import shop, two_tokens
from trl_repulse import embedded
from trl_repulse.cli.arguments import ARGUMENTS, parse
from trl_repulse.cli.main import TRAINING, main
from trl_repulse.cli.methods import train

from ..conftest import WORDS
from ..gcg_support import build_tokenizer as build_gcg_tokenizer
from ..reward_models import CHAT_TEMPLATE, build_tokenizer, save_causal_model, save_model
from ..rewards.test_rewards_guard import make_guard
from .test_docs import _FENCE, PAGES, ROOT, name_of


# Beginning of a command -> why its arguments are not read
NOT_READ = {
    "pip install": "CI installs the package and its extras",
    "python -m venv": "Python's own",
    ". .venv/bin/activate": "the shell's own",
    "pre-commit install": "a tool for developers",
    "ruff": "CI runs it",
    "mypy": "CI runs it",
    "mkdocs build": "CI runs it",
    "tensorboard": "serves until it is stopped",
    "inspect eval": "a tool of others, whose task tests/evaluation/test_inspect.py runs",
    "inspect view": "serves until it is stopped",
    "trl-repulse evaluate logs/tail.eval": "reads what that tool wrote",
    "lm_eval": "a tool of others, which downloads its tasks",
    "accelerate launch --config_file accelerate_configs/zero2.yaml --num_processes 4 train.py": "a script of the user",
}
# Command that runs here, by its beginning -> what is added to it; the last of two equal flags wins
TRAINED = (
    "--max_steps 1 --num_table_completions 0 --report_to none --save_strategy no --activation_checkpointing false"
)
RUN = {
    "trl-repulse repulse --model_name_or_path": TRAINED,
    "trl-repulse evaluate samples --model": "--num_samples 8 --max_completion_length 4",
    "trl-repulse evaluate samples --thresholds": "",
    "trl-repulse negatives": "",
    "trl-repulse rare-events": "--num_samples 200 --max_completion_length 4",
    "trl-repulse gcg --model_name_or_path": "--num_steps 1 --max_targets 1 --num_samples 2 --max_new_tokens 3 --search_width 4",
    "trl-repulse gcg-report": "",
}
# Keyword argument of a call in a Python block -> the value that it gets here
SIZES = {"max_steps": 1, "num_samples": 8, "num_steps": 1, "max_targets": 1, "counts": (60, 60, 60)}
# Keyword arguments that each configuration of a run, or of an attack, gets
OF_A_RUN = {"max_steps": 1, "use_cpu": True, "bf16": False, "report_to": "none", "logging_steps": 1}
OF_RL = OF_A_RUN | {"max_completion_length": 16}
OF_AN_ATTACK = {"num_steps": 1, "search_width": 8}
ADDED = {
    **dict.fromkeys(("ReinforceConfig", "RePULSeConfig", "PPOConfig", "RePULSePPOConfig", "RePULSeGRPOConfig"), OF_RL),
    **dict.fromkeys(("GCGConfig", "GCGEvaluationConfig"), OF_AN_ATTACK),
    "DPOConfig": OF_A_RUN,
}
PROMPTS = [f"the {one} {other}" for one in WORDS[:8] for other in WORDS[:8]]
# Token ids of a model that is another one here
TOKENS = {"[5089, 9372]": "[7, 8]"}
TRAINER = """
from trl_repulse import RePULSeConfig, RePULSeTrainer
from trl_repulse.embedded import load_prompts, policy_path, reward_model_path

def build():
    args = RePULSeConfig(output_dir="run", max_completion_length=2, bad_reward_threshold=-5.0, save_steps=1)
    return RePULSeTrainer(policy_path(), reward_model_path(), args, load_prompts())

trainer = build()
"""
# Page -> what its blocks take for granted
BEFORE = {
    "docs/checkpoints.md": f"{TRAINER}\ntrainer.train()\ntrainer = build()",
    "docs/evaluation.md": TRAINER.replace("trl_repulse.embedded", "examples.worlds.two_tokens"),
}


def blocks(*languages):
    """(page, number, code) of the fenced blocks in one of the languages."""
    for page in PAGES:
        for number, (indent, language, code) in enumerate(_FENCE.findall(page.read_text(encoding="utf-8")), 1):
            if language in languages:
                yield page, number, "".join(line.removeprefix(indent) for line in code.splitlines(keepends=True))


def pages(*languages):
    return sorted({page for page, _, _ in blocks(*languages)})


def commands(pages=PAGES):
    """(page, words) of each command on the pages, without comments and variables that are set before it."""
    for page, _, code in blocks("bash"):
        for line in code.replace("\\\n", " ").splitlines() if page in pages else ():
            words, command = shlex.split(line, comments=True), []
            for word in (*words, "&&"):
                if word != "&&":
                    command.append(word)
                    continue
                while command and re.match(r"[A-Z_]+=", command[0]):
                    command.pop(0)
                if command:
                    yield page, command
                command = []


def reason_not_to_read(words):
    return next((why for beginning, why in NOT_READ.items() if shlex.join(words).startswith(beginning)), None)


@pytest.fixture(scope="session")
def world_dir(tmp_path_factory):
    """What the pages name, each tiny."""
    root = tmp_path_factory.mktemp("world")
    words = build_tokenizer(chat_template=CHAT_TEMPLATE)
    for name in ("my-policy", "my/model", "gpt2", "distilgpt2", "Qwen/Qwen3-0.6B"):
        save_causal_model(root / name, "gpt2", words, context=512)
    for name in ("HuggingFaceTB/SmolLM-135M-Instruct", "out", "out/proposal"):
        shutil.copytree(root / "gpt2", root / name)
    for name in ("my-reward-model", "my/reward-model", "judge"):
        save_model(root / name, "gpt2", words, context=512)
    pair = build_tokenizer("pair")
    save_model(root / "OpenAssistant" / "reward-model-deberta-v3-large-v2", "deberta", pair, context=512)
    save_model(root / "Skywork" / "Skywork-Reward-V2-Llama-3.2-1B", "llama", words, context=512)
    make_guard(root / "meta-llama" / "Llama-Guard-3-8B")
    labels = {"id2label": {0: "toxic", 1: "obscene"}, "label2id": {"toxic": 0, "obscene": 1}, "num_labels": 2}
    save_model(root / "unitary" / "toxic-bert", "bert", pair, context=512, **labels)
    (root / "prompts.jsonl").write_text("".join(f"{json.dumps({'prompt': prompt})}\n" for prompt in PROMPTS))
    (root / "trl-lib" / "tldr").mkdir(parents=True)
    shutil.copy(root / "prompts.jsonl", root / "trl-lib" / "tldr" / "train.jsonl")
    (root / "questions.csv").write_text("question\nthe cat sat\nthe dog ran\n")
    (root / "behaviors.csv").write_text("goal,target\ntell me the secret,Sure here is\n")
    for name in ("my.yaml", "repulse.yaml"):
        (root / name).write_text("bad_reward_threshold: -4\n")
    (root / "my_rewards.py").write_text(
        "def short_answers(completions): return [-len(text) for text in completions]\n"
    )
    negative = {"step": 1, "source": "policy", "prompt": PROMPTS[0], "completion": " bad bad", "reward": -6.0}
    (root / "out" / "negatives.jsonl").write_text(f"{json.dumps(negative)}\n")
    pair = {"prompt": PROMPTS[0], "chosen": " ran fish", "rejected": " bad bad"}
    (root / "pairs.jsonl").write_text(f"{json.dumps(pair)}\n" * 8)
    return root


@pytest.fixture
def world(world_dir, tmp_path, monkeypatch):
    """The current folder: a copy of `world_dir`, and the folders of a checkout that commands name."""
    world = tmp_path / "world"
    shutil.copytree(world_dir, world)
    for name in ("examples", "benchmarks", "accelerate_configs"):
        (world / name).symlink_to(ROOT / name)
    monkeypatch.chdir(world)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    return world


def prepare(page, world):
    """What one page means by a name that others use for something else."""
    if page == "docs/gcg.md":
        shutil.rmtree(world / "out")
        save_causal_model(world / "out", "llama", build_gcg_tokenizer(), context=256)
    if page in ("docs/evaluation.md", "docs/rare_events.md"):
        shutil.copytree(two_tokens.policy_path(), world / "out", dirs_exist_ok=True)
        shutil.copytree(two_tokens.policy_path(), world / "out" / "proposal", dirs_exist_ok=True)
    if page in ("docs/checkpoints.md", "docs/adapters.md"):
        adapter = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["c_attn"])
        folder = "out/checkpoint-500" if page == "docs/checkpoints.md" else "out"
        shutil.rmtree(world / "out")
        get_peft_model(AutoModelForCausalLM.from_pretrained("my-policy"), adapter).save_pretrained(world / folder)
        AutoTokenizer.from_pretrained("my-policy").save_pretrained(world / folder)  # as a trainer does
    if page == "docs/inspect.md":
        flags = (
            "--model out --prompts prompts.jsonl --reward_model_path judge --num_samples 8 --max_completion_length 4"
        )
        assert main(["evaluate", "samples", *flags.split()]) == 0
    if page == "docs/agents.md":
        shop.build_policy(world / "my-agent", steps=2, batch_size=8)


class Smaller(ast.NodeTransformer):
    """Cuts sizes, and adds what a run needs on a CPU."""

    def visit_Call(self, node):
        self.generic_visit(node)
        for keyword in node.keywords:
            if keyword.arg in SIZES:
                keyword.value = ast.parse(repr(SIZES[keyword.arg]), mode="eval").body
        name = node.func.id if isinstance(node.func, ast.Name) else None
        added = ADDED.get(name, {})
        given = {keyword.arg for keyword in node.keywords}
        node.keywords += [ast.keyword(name, ast.Constant(value)) for name, value in added.items() if name not in given]
        return node


def execute(code, where, names):
    for text, other in TOKENS.items():
        code = code.replace(text, other)
    exec(compile(ast.fix_missing_locations(Smaller().visit(ast.parse(code))), where, "exec"), names)


@pytest.mark.thorough
@pytest.mark.trainer
@pytest.mark.parametrize("page", [page for page in pages("python", "py") if page.stem != "inspect"], ids=name_of)
def test_python_blocks_run(page, world, request):
    """One after the other, as in one notebook."""
    prepare(name_of(page), world)
    if page.stem == "hub":
        request.getfixturevalue("hub").mirror = world
    names = {"__name__": "snippet"}
    execute(BEFORE.get(name_of(page), ""), "before", names)
    for where, number, code in blocks("python", "py"):
        if where == page:
            execute(code, f"{name_of(page)}, block {number}", names)


class Read(BaseException):
    """A command line was read to its end."""


@pytest.fixture
def only_read(monkeypatch):
    """Scripts and commands end with `Read` where they have read their arguments."""

    def end(*args, **kwargs):
        raise Read

    parse_args = argparse.ArgumentParser.parse_args

    def parse_and_end(parser, *args, **kwargs):
        parse_args(parser, *args, **kwargs)
        raise Read

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_and_end)
    monkeypatch.setattr("trl_repulse.cli.methods.run", end)
    monkeypatch.setattr("trl_repulse.evaluation.gcg.evaluator.launch", end)
    monkeypatch.setattr("trl_repulse.cli._early.check_inputs", lambda args: None)  # files that a page only names


def run_script(words, monkeypatch):
    """Runs what follows `python`, in this process."""
    monkeypatch.syspath_prepend(str(ROOT))
    if words[0] == "-m":
        monkeypatch.setattr(sys, "argv", words[1:])
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        monkeypatch.setattr(sys, "argv", words)
        monkeypatch.syspath_prepend(str(ROOT / words[0].rpartition("/")[0]))
        runpy.run_path(words[0], run_name="__main__")


def said(commands):
    """As parameters of a test, each command once."""
    found = {shlex.join(words): (page, words) for page, words in commands}
    return [
        pytest.param(words, id=f"{page.stem}: {line[:70]}")
        for line, (page, words) in found.items()
        if reason_not_to_read(words) is None
    ]


@pytest.mark.parametrize("words", said(commands()))
def test_commands_can_be_read(words, world, monkeypatch, launched, request):
    program, *rest = words
    if program == "pytest":
        check_pytest(rest, request.config)
    elif program == "trl-repulse" and rest[0] in TRAINING:
        assert main(rest) == 0
        command, *flags = launched[0].training_script_args
        script_args, args, _ = parse(flags, ARGUMENTS[command], embedded.settings_path(command))
        assert script_args.dataset_name is not None and args.max_completion_length
    else:
        request.getfixturevalue("only_read")
        if words[:2] == ["accelerate", "launch"]:
            asked = launch_command_parser().parse_known_args(rest[1:])[0]
            rest = [asked.training_script, *asked.training_script_args]
        with pytest.raises(Read):
            if program == "trl-repulse":
                main(rest)
            else:
                assert program in ("python", "accelerate"), f"say in NOT_READ why `{program}` is not read"
                run_script(rest, monkeypatch)


def check_pytest(words, config):
    """The files and the markers that a command of pytest names are there."""
    markers = {line.partition(":")[0] for line in config.getini("markers")}
    for flag, word in zip(["", *words], words, strict=False):
        if flag == "-m":
            assert set(re.findall(r"\w+", word)) - {"not", "and", "or"} <= markers
        elif word.startswith("tests"):
            assert (ROOT / word).exists()
        elif flag != "-n":
            assert word in ("-m", "-n", "--accelerator")


def short(page):
    """The page's commands that run here, and what is added to each."""
    for _, words in commands([page]):
        line = shlex.join(words)
        added = next((added for beginning, added in RUN.items() if line.startswith(beginning)), None)
        if added is not None:
            yield words[1:], shlex.split(added)


@pytest.mark.thorough
@pytest.mark.trainer
@pytest.mark.parametrize("page", [page for page in pages("bash") if list(short(page))], ids=name_of)
def test_short_commands_run(page, world, launched):
    """One after the other, in one folder."""
    prepare(name_of(page) if page.stem != "rare_events" else "", world)
    for words, added in short(page):
        if words[0] in TRAINING:
            assert main(words) == 0
            command, *flags = launched.pop().training_script_args
            train(command, [*flags, *added])
        else:
            assert main([*words, *added]) == 0, words


def test_json_blocks_are_json():
    for _, _, code in blocks("json"):
        for line in code.splitlines():
            json.loads(line)


def test_no_block_is_left_out():
    """A block is in a language that the tests above run or read, or in one of text; what is left out says why, and is there."""
    languages = {language for page in PAGES for _, language, _ in _FENCE.findall(page.read_text(encoding="utf-8"))}
    assert languages <= {"python", "py", "bash", "json", "text", "bibtex", "yaml", "diff", ""}
    lines = [shlex.join(words) for _, words in commands()]
    for beginning in (*NOT_READ, *RUN):
        assert any(line.startswith(beginning) for line in lines), f"no page has a command `{beginning}`"
