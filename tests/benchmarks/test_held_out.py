"""What `benchmarks/held_out` promises: prompts, replies and constructions of its worlds, and samples of its evaluation."""

import itertools
import json
import math
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from datasets import Dataset
from scipy.stats import ttest_ind
from transformers import DynamicCache, GPT2Config

from benchmarks.held_out import build, evaluate, offline, run, table
from benchmarks.held_out.build import TRAINING_PROMPTS, UNSEEN_PROMPTS, build_tokenizer, draw_prompts
from benchmarks.held_out.grammar import split_tokens
from benchmarks.held_out.widen import HOT_TEMPERATURE, names, widen
from benchmarks.held_out.worlds import WORLDS
from trl_repulse.evaluation.preferences import RewardedCompletion

from ..conftest import build_model


@pytest.fixture(params=WORLDS)
def world(request):
    return WORLDS[request.param]


def test_prompts(world):
    training, unseen = draw_prompts(world)
    texts = [prompt.text for prompt in [*training, *unseen]]
    assert (len(training), len(unseen)) == (TRAINING_PROMPTS, UNSEEN_PROMPTS) == (240, 120)
    assert len(set(texts)) == 360
    assert [prompt.text for prompt in draw_prompts(world)[0]] == texts[:240]
    rates = sorted(prompt.rude_rate for prompt in unseen)
    assert 3e-3 < sum(rates) / 120 < 3e-2 and rates[-1] > 4 * rates[0]  # prompts differ


def test_replies(world):
    tokenizer, rng = build_tokenizer(world), random.Random(1)
    lengths, decent = [], []
    for prompt in draw_prompts(world)[1] * 8:
        for rate in (0.0, 1.0):
            reply = world.draw_reply(prompt, rng, rate)
            ids = tokenizer(prompt.text + reply.text)["input_ids"]
            assert tokenizer.unk_token_id not in ids and tokenizer.decode(ids) == prompt.text + reply.text
            assert ids[: -len(split_tokens(reply.text))] == tokenizer(prompt.text)["input_ids"]
            lengths.append(len(split_tokens(reply.text)) + 1)
            if rate:
                assert reply.score < -4 and world.construction_of(reply.text) == reply.construction
            else:
                decent.append(reply.score)
    assert min(lengths) >= 10 and sum(length <= 20 for length in lengths) > 0.99 * len(lengths)
    # Smooth between good and bad, and hardly ever as low as rudeness
    assert min(decent) < -2.5 and max(decent) > 3 and sum(score < -4 for score in decent) < 0.02 * len(decent)


def test_constructions(world):
    assert len(world.constructions) >= 8
    rng, found = random.Random(2), set()
    prompts = draw_prompts(world)[1]
    for _ in range(1000):
        found.add(world.draw_reply(rng.choice(prompts), rng, 1.0).construction)
    assert found == {*world.constructions, "slip"}
    assert world.construction_of(" have a lovely day.") == "other"
    # Some insult words stand in decent replies too, so that a list of words does not tell bad replies
    replies = [world.draw_reply(rng.choice(prompts), rng, 0.0) for _ in range(2000)]
    words = [reply for reply in replies if world.insults & set(reply.text.strip(" .").replace(",", "").split())]
    assert 0.01 < len(words) / 2000 < 0.2 and all(reply.score > -4.5 for reply in words)


class Chain(torch.nn.Module):
    """A language model of four tokens, the second of which ends; each token's distribution depends on the one before."""

    def __init__(self):
        super().__init__()
        self.config = GPT2Config(vocab_size=4, n_embd=4, n_layer=1, n_head=1)
        table = torch.tensor([[0.0, 1, 2, -3], [0, 0, 0, 0], [1, 0, 1, -2], [2, 2, 0, 0]])
        self.table = torch.nn.Parameter(table, requires_grad=False)

    def forward(self, input_ids, past_key_values=None, use_cache=None):
        return SimpleNamespace(logits=self.table[input_ids])


def test_samples_as_counts(monkeypatch):
    """Counts over distinct completions are distributed as samples drawn one by one, and together with hot ones they give P."""
    monkeypatch.setattr(evaluate, "MAX_COMPLETION_LENGTH", 3)
    monkeypatch.setattr(DynamicCache, "batch_select_indices", lambda self, rows: None)

    class Tokenizer:
        eos_token_id, pad_token_id = 1, 0

        def __call__(self, text):
            return {"input_ids": [2]}

    model = Chain()
    log_p = model.table.log_softmax(-1)
    exact = {}
    for tokens in itertools.product(range(4), repeat=3):
        end = tokens.index(1) + 1 if 1 in tokens else 3
        key = tokens[:end] + (0,) * (3 - end)
        exact[key] = sum(log_p[a, b].item() for a, b in zip((2, *tokens), tokens[:end], strict=False))
    own, hot = (
        evaluate.draw(model, Tokenizer(), ["x"], 20_000, seed, temperature)[0]
        for seed, temperature in ((1, 1.0), (2, evaluate.TEMPERATURE))
    )
    assert own.counts.sum() == hot.counts.sum() == 20_000
    keys = [tuple(row.tolist()) for row in own.completions]
    assert len(set(keys)) == len(keys)
    for key, count, value in zip(keys, own.counts, own.log_probs, strict=True):
        assert value == pytest.approx(exact[key], abs=1e-5)
        p = math.exp(exact[key])
        assert abs(count - 20_000 * p) < 5 * math.sqrt(20_000 * p) + 1
    rare = [key for key, value in exact.items() if value < -7]
    expected, found = sum(math.exp(exact[key]) for key in rare), 0.0
    for samples in (own, hot):
        weights = evaluate.mixture_weights(samples, 20_000, 20_000)
        found += sum(w for row, w in zip(samples.completions, weights, strict=True) if tuple(row.tolist()) in rare)
    assert 1e-4 < expected < 2e-2 and found == pytest.approx(expected, rel=0.1)


def test_log_probs_read_the_prompt_once(tokenizer):
    """They are those of passes over the whole text, row by row, whatever stands behind the end token."""
    model = build_model("gpt2", len(tokenizer)).eval()
    torch.manual_seed(0)
    completions = torch.randint(3, len(tokenizer), (7, 6))
    completions[2] = completions[5, 4:] = tokenizer.eos_token_id
    lead = tokenizer("the cat sat")["input_ids"]
    expected = []
    for row in completions.tolist():
        row = row[: row.index(tokenizer.eos_token_id) + 1] if tokenizer.eos_token_id in row else row
        logits = model(torch.tensor([lead + row])).logits[0, len(lead) - 1 : -1]
        expected.append(sum(logits.log_softmax(dim=-1)[range(len(row)), row].tolist()))
    for rows in (1, 3):  # alone, one of them is an end token and nothing else
        found = evaluate.log_probs(model, tokenizer, "the cat sat", completions, rows)
        assert found == pytest.approx(expected, abs=1e-4)


def test_offline_data():
    drawn = [RewardedCompletion("a", f" {r}", float(r)) for r in (-6, -5, -1, 0, 1, 2, 3, 4)]
    drawn += [RewardedCompletion("b", f" {r}", float(r)) for r in (1, 7)] + [RewardedCompletion("c", " x", 2.0)]
    pairs = offline.data_of("dpo", drawn, -4.0)
    expected = [("a", " 4", " -6"), ("a", " 3", " -5"), ("b", " 7", " 1")]
    assert [(row["prompt"], row["chosen"], row["rejected"]) for row in pairs] == expected
    unpaired = [tuple(row.values()) for row in offline.data_of("kto", drawn, -4.0)]
    sides = ("chosen", "rejected")
    assert unpaired == [(row["prompt"], row[side], side == "chosen") for row in pairs for side in sides]
    assert [row["completion"] for row in offline.data_of("npo", drawn, -4.0)] == [" -6", " -5"]
    assert [row["completion"] for row in offline.data_of("raft", drawn, -4.0)] == [" 4", " 7", " x"]


def test_tags_of_conditional_fine_tuning():
    drawn = [RewardedCompletion("a", f" {r}", float(r)) for r in range(10, 0, -1)]
    rows = offline.tagged(drawn, [" v", " w", " x", " y", " z"])
    assert [row["prompt"] for row in rows] == [f"a {tag}" for tag in "zzyyxxwwvv"]
    assert [row["completion"] for row in rows] == [each.completion for each in drawn]


@pytest.mark.trainer
@pytest.mark.thorough
def test_conditional_fine_tuning(tiny_world, tmp_path):
    """The model learns what has which tag, and is evaluated after the best one."""
    config = {"learning_rate": 1e-2, "num_train_epochs": 20, "per_device_train_batch_size": 16}
    rows, read, make = [], [], offline.tagged
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offline, "tagged", lambda *args: rows.extend(make(*args)) or rows)
        trainer, _ = offline.train(tiny_world, {"trainer": "conditional", "config": config}, 0, 160, tmp_path)
        draw = evaluate.draw
        patch.setattr(evaluate, "draw", lambda *args, **rest: read.append(args[2]) or draw(*args, **rest))
        run.evaluate(tiny_world, trainer.model, 0, 5, 5, suffix=offline.tags_of(tiny_world)[-1])
    tags, tokenizer, model = offline.tags_of(tiny_world), tiny_world.tokenizer, trainer.model.eval()
    assert len(set(tags)) == 5 and not set(tags) & set(tokenizer.all_special_tokens)
    assert all(prompt.endswith(tags[-1]) for prompts in read for prompt in prompts) and len(read) == 2

    def score(prompt, completion):
        ids = torch.tensor([tokenizer(completion + tokenizer.eos_token)["input_ids"]])
        return evaluate.log_probs(model, tokenizer, prompt, ids)[0]

    other = {tag: tags[(place + 2) % 5] for place, tag in enumerate(tags)}
    gaps = []
    for row in rows:
        tag = next(tag for tag in tags if row["prompt"].endswith(tag))
        swapped = row["prompt"].removesuffix(tag) + other[tag]
        gaps.append(score(row["prompt"], row["completion"]) - score(swapped, row["completion"]))
    assert np.mean(gaps) > 0.5


@pytest.mark.thorough
@pytest.mark.trainer
def test_npo(tmp_path, tokenizer):
    """The loss is the paper's; training lowers the probability of the completions, and leaves the reference."""
    model, reference = (build_model("gpt2", len(tokenizer)) for _ in range(2))
    rows = Dataset.from_dict({"prompt": ["the cat", "the dog"], "completion": [" ate bad", " bad"]})
    settings = {"output_dir": str(tmp_path), "learning_rate": 1e-2, "beta": 0.5, "max_steps": 10}
    args = offline.NPOConfig(**offline.COMMON | settings)
    trainer = offline.NPOTrainer(model, args, train_dataset=rows, processing_class=tokenizer, ref_model=reference)

    def score(of):
        of.eval()
        texts = [(row["prompt"], tokenizer(row["completion"] + tokenizer.eos_token)["input_ids"]) for row in rows]
        return [evaluate.log_probs(of, tokenizer, lead, torch.tensor([ids]))[0] for lead, ids in texts]

    before = score(model)
    trainer.train()
    after = score(model)
    assert score(reference) == pytest.approx(before, abs=1e-5)
    assert all(late < early - 1 for early, late in zip(before, after, strict=True))
    batch = next(iter(trainer.get_eval_dataloader(trainer.train_dataset)))
    ratios = torch.tensor(after) - torch.tensor(before)
    expected = (-2 / 0.5 * torch.nn.functional.logsigmoid(-0.5 * ratios)).mean()
    with torch.no_grad():
        assert trainer.compute_loss(model, batch).item() == pytest.approx(expected.item(), abs=1e-3)


@pytest.fixture
def tiny_world(tmp_path):
    """A folder like those that `build.py` writes, with random models and eight prompts."""
    world = WORLDS["shop"]
    tokenizer, prompts = build_tokenizer(world), draw_prompts(world)[0][:8]
    torch.manual_seed(0)
    for name, classifier in (("policy", False), ("reward_model", True)):
        build.build_model("gpt2", len(tokenizer), 16, 1, classifier=classifier).save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    for split in ("train", "unseen"):
        rows = "".join(json.dumps({"prompt": prompt.text}) + "\n" for prompt in prompts)
        (tmp_path / f"{split}.jsonl").write_text(rows)
    (tmp_path / "world.json").write_text(json.dumps({"name": "shop", "threshold": 0.0}))
    return evaluate.HeldOutWorld(tmp_path)


@pytest.mark.trainer
@pytest.mark.thorough
@pytest.mark.parametrize("name, rounds", [("dpo", 2), ("kto", 1), ("npo", 1), ("raft", 4)])
def test_offline_methods(tiny_world, tmp_path, name, rounds):
    """All draw what they are told to draw, in as many rounds, and learn from the rows of the last one what they are to learn."""
    method = {"trainer": name, "rounds": rounds, "config": {"learning_rate": 3e-3, "num_train_epochs": 3}}
    counts, rows = [], []
    with pytest.MonkeyPatch.context() as patch:
        make, draw = offline.data_of, evaluate.draw
        patch.setattr(evaluate, "draw", lambda *args: counts.append(len(args[2]) * args[3]) or draw(*args))
        patch.setattr(offline, "data_of", lambda *args: rows.append(make(*args)) or rows[-1])
        trainer, history = offline.train(tiny_world, method, 0, 330, tmp_path)
    assert sum(counts) == 330 and [row["round"] for row in history if "rows" in row] == [*range(rounds)]

    def gain(column, label=None):
        """Mean log-probability of the rows' completions under the trained policy, over that under the initial one."""
        tokenizer, values = tiny_world.tokenizer, []
        for row in rows[-1]:
            if row.get("label") is not label:
                continue
            ids = torch.tensor([tokenizer(row[column] + tokenizer.eos_token)["input_ids"]])
            late, early = (
                evaluate.log_probs(model, tokenizer, row["prompt"], ids)[0]
                for model in (trainer.model.eval(), tiny_world.load_policy())
            )
            values.append(late - early)
        return sum(values) / len(values)

    if name == "dpo":
        assert gain("chosen") > gain("rejected") + 1
    elif name == "kto":
        assert gain("completion", True) > gain("completion", False) + 1
    else:
        assert gain("completion") * {"npo": -1, "raft": 1}[name] > 1


@pytest.mark.thorough
def test_wide_worlds_have_a_tail_of_words(tiny_world, tmp_path):
    """New words have their share of each token's probability, and the others theirs as before."""
    old = tiny_world.load_policy()
    torch.nn.init.ones_(old.transformer.ln_f.bias)  # a trained model has one, through which logits can be moved
    old.save_pretrained(tiny_world.policy_path)
    widen(tiny_world, words=300, share=0.01, folder=tmp_path / "wide")
    wide = evaluate.HeldOutWorld(tmp_path / "wide")
    policy, tokenizer = wide.load_policy(), wide.tokenizer
    size = old.config.vocab_size
    assert tokenizer(" bbbbb")["input_ids"] == [size] and tokenizer.decode([size + 299]) == names(300)[-1]
    tails = []
    for prompt in wide.prompts("unseen"):
        ids = torch.tensor([tokenizer(prompt)["input_ids"]])
        assert ids.tolist() == [tiny_world.tokenizer(prompt)["input_ids"]]
        with torch.no_grad():
            before, after = (model(ids).logits[0, -1].softmax(-1) for model in (old, policy))
        tails.append(after[size:].sum())
        torch.testing.assert_close(after[:size] / (1 - tails[-1]), before, atol=1e-5, rtol=1e-4)
    assert 0.003 < torch.stack(tails).mean() < 0.03
    assert wide.load_reward_model().config.vocab_size == size + 300 and wide.hot_temperature == HOT_TEMPERATURE < 1.5


def test_factor_of_two_methods_is_welchs():
    generator = np.random.default_rng(0)
    a, b = generator.normal(1.0, 0.5, 7), generator.normal(0.0, 1.5, 5)
    scipys = ttest_ind(a, b, equal_var=False)
    value, low, high, p = table.factor([(a, b)])
    interval = scipys.confidence_interval()
    assert np.log([value, low, high]) == pytest.approx([a.mean() - b.mean(), interval.low, interval.high])
    assert p == pytest.approx(scipys.pvalue)
    # What both methods have in a world does not count
    shifted = table.factor([(a, b), (a + 3.0, b + 3.0)])
    assert shifted[0] == pytest.approx(value) and low < shifted[1] < shifted[2] < high
