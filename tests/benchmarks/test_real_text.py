"""What `benchmarks/real_text` promises: policies that go on where they were killed, exact densities, a judge that counts."""

import itertools
import json
import random
import sys
from dataclasses import asdict

import numpy as np
import pytest
import torch

from benchmarks.held_out import evaluate, run, table
from benchmarks.real_text import build, judges, policy, sampling
from benchmarks.real_text.policy import PolicySettings

from ..conftest import DEVICE, USE_CPU, build_model


ACCELERATOR = [] if USE_CPU else ["--accelerator"]
SETTINGS = PolicySettings(vocabulary=300, layers=1, width=16, batch=2, steps=8)


class Length(judges.Judge):
    """Long words are bad. After `left` calls it kills the run."""

    left = 10**9

    def load(self):
        return len

    def rate(self, texts):
        Length.left -= 1
        if Length.left < 0:
            raise KeyboardInterrupt
        return np.array([2.0 - max(map(self._loaded, text.split()), default=0) / 2 for text in texts])


@pytest.fixture
def text(tmp_path):
    """A folder of sentences, with a table and a duplicate that are to be left out."""
    rng, words = random.Random(0), "the old man saw a river and some birds that were far away from his house".split()
    sentences = [" ".join(rng.choices(words, k=20)).capitalize() + "." for _ in range(300)]
    (tmp_path / "text" / "more").mkdir(parents=True)
    (tmp_path / "text" / "a.txt").write_text("\n\n".join([*sentences[:200], sentences[0]]) + "\n\n1 2 3 | 4 5 6 | 7 8")
    (tmp_path / "text" / "more" / "b").write_text("\n%\n".join(sentences[200:]))
    return tmp_path / "text"


def test_policy_goes_on_where_it_was_killed(text, tmp_path, monkeypatch):
    assert len(policy.read_paragraphs(text)) == 300
    monkeypatch.setattr(policy, "SAVE_STEPS", 3)
    whole = policy.build_policy(text, tmp_path / "whole", SETTINGS, 6, 4)
    save, saved = policy.save_training, []

    def killed(*args):
        save(*args)
        saved.append(args[3])
        raise KeyboardInterrupt

    monkeypatch.setattr(policy, "save_training", killed)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            policy.build_policy(text, tmp_path / "parts", SETTINGS, 6, 4)
    parts = policy.build_policy(text, tmp_path / "parts", SETTINGS, 6, 4)
    assert saved == [3, 6] and parts | {"seconds": 0} == whole | {"seconds": 0}
    assert not list((tmp_path / "parts").glob("training-*"))
    for name in ("policy/model.safetensors", "policy/tokenizer.json", "train.jsonl", "unseen.jsonl"):
        assert (tmp_path / "parts" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    prompts = [json.loads(line)["prompt"] for line in (tmp_path / "whole" / "train.jsonl").read_text().splitlines()]
    prompts += [json.loads(line)["prompt"] for line in (tmp_path / "whole" / "unseen.jsonl").read_text().splitlines()]
    assert len(set(prompts)) == 10
    monkeypatch.setattr(policy, "train_policy", None)
    assert policy.build_policy(text, tmp_path / "whole", SETTINGS, 6, 4) == whole  # found, not made again
    with pytest.raises(TypeError):  # another text, another policy
        (text / "c").write_text("A sentence of its own that has not been seen yet.")
        policy.build_policy(text, tmp_path / "whole", SETTINGS, 6, 4)


@pytest.fixture
def chain():
    """A policy of six tokens, prompts of two lengths, and all completions of up to three tokens (N, T)."""
    tokens = []
    for row in itertools.product(range(6), repeat=3):
        end = row.index(1) + 1 if 1 in row else 3
        tokens.append((*row[:end], *[0] * (3 - end)))
    return build_model("llama", 6).eval().to(DEVICE), [[2, 3], [4, 5, 2]], torch.tensor(sorted(set(tokens)))


def test_densities_and_samples(chain):
    model, prompts, every = chain
    samplers, places = [sampling.POLICY, sampling.at_temperature(2.0)], torch.zeros(len(every), dtype=torch.long)
    exact = torch.stack([sampling.densities(model, prompts, places + i, every, samplers) for i in (0, 1)])
    # A token 0 in the midst of a completion is padding only behind an end token, so completions differ by their tokens alone
    torch.testing.assert_close(exact.exp().sum(dim=1), torch.ones(2, len(samplers), dtype=torch.double))
    place = {tuple(row): i for i, row in enumerate(every.tolist())}
    for column, sampler in enumerate(samplers):
        tokens, values = sampling.sample(model, prompts, 2000, 3, sampler, column, samplers, rows=1500)
        places = torch.tensor([place[tuple(row)] for row in tokens.tolist()])
        for i, part in enumerate(places.split(2000)):
            torch.testing.assert_close(values[2000 * i : 2000 * (i + 1)], exact[i, part], rtol=1e-4, atol=1e-4)
            p = exact[i, :, column].exp()
            shares = part.bincount(minlength=len(every)) / 2000
            assert ((shares - p).abs() < 5 * (p / 2000).sqrt() + 1e-3).all()


def test_distinct_pairs():
    samples = evaluate.Samples(torch.tensor([[3, 4, 3, 4], [3, 1, 0, 0]]), np.array([2, 1]), None, None)
    assert evaluate.distinct_pairs(samples, 0) == 3 / 7  # (3, 4), (4, 3), (3, 1)


@pytest.fixture
def world(text, tmp_path, monkeypatch):
    """A world as `build.py` writes it, with a judge of word lengths."""
    monkeypatch.setitem(judges.JUDGES, "length", Length)
    monkeypatch.setattr(Length, "left", 10**9)
    options = "--judges length --lengths 6 --prompts 10 4 --calibration 30".split()
    settings = [f"--{name}={value}" for name, value in asdict(SETTINGS).items()]
    argv = ["build", str(text), f"--output_dir={tmp_path / 'rt'}", *options, *settings, *ACCELERATOR]
    monkeypatch.setattr(sys, "argv", argv)
    for _ in range(2):  # the second time it is there
        build.main()
        monkeypatch.setattr(build, "sample", None)
    return evaluate.load_world(tmp_path / "rt" / "length-6")


def test_world(world):
    assert world.described["completion_length"] == 6 and world.described["p_bad"] <= 0.01
    prompts, model = world.prompts("unseen"), world.load_policy().to(DEVICE)
    for prompt, drawn in zip(prompts, world.draw(model, prompts, 40, 3, 1.2), strict=True):
        assert drawn.counts.sum() == 40 and drawn.completions.size(1) == 6
        np.testing.assert_allclose(drawn.log_probs, world.log_probs(model, prompt, drawn.completions), atol=1e-4)
        assert (drawn.log_probs < drawn.log_probs_hot).mean() > 0.2
    before = world.costs()["judge_texts"]
    assert len(world.score(world.load_reward_model(), prompts[0], drawn.completions)) == len(drawn.counts)
    assert world.costs()["judge_texts"] == before + len(drawn.counts)


@pytest.mark.trainer
def test_killed_run_goes_on(world, tmp_path, monkeypatch):
    monkeypatch.setitem(run._SAVED, "save_steps", 1)
    monkeypatch.setattr(run, "SAVE_STEPS_ACCELERATOR", 1)
    method = {"trainer": "reinforce", "config": {"learning_rate": 1e-3, "logging_steps": 1}}
    job = (world.folder, "REINFORCE", method, 0, 400, tmp_path / "run", 20, not USE_CPU)
    Length.left = 2
    with pytest.raises(KeyboardInterrupt):
        run.run(*job)
    Length.left = 10**9
    assert "judge, training: 4 calls, 400 texts" in run.run(*job)  # two of them before it was killed
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results["spent"]["starts"] == 2 and (tmp_path / "run" / "policy").exists()
    steps = [row["step"] for row in json.loads((tmp_path / "run" / "history.json").read_text()) if "loss" in row]
    assert steps == [1, 2, 3, 4]
    row = table.summarize([results])
    assert row["perplexity"][0] > 10 and 0 < row["distinct_2"][0] <= 1 and np.isfinite(row["kl"][0])


def test_the_judge():
    pytest.importorskip("profanity_check")
    judge = judges.JUDGES["words"]()
    rude = ["shut up you stupid bastard", " you are a worthless idiot, and I hate you."]
    plain = [" the meeting was held in the afternoon", "it is a lovely garden", "", " and the old house"]
    rewards = judge(prompts=None, completions=[*rude, *plain])
    assert max(rewards[:2]) < -1 and min(rewards[2:]) > 0 and judge(completions=[]) == []
    alone = [judge(completions=[text])[0] for text in [*rude, *plain]]
    assert alone == pytest.approx(rewards, abs=1e-4) and (judge.calls, judge.texts) == (8, 12)
