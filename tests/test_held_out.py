"""The grammars of the held-out worlds: what `benchmarks/held_out` promises of prompts, replies and constructions."""

import random

import pytest

from benchmarks.held_out.build import TRAINING_PROMPTS, UNSEEN_PROMPTS, build_tokenizer, draw_prompts
from benchmarks.held_out.grammar import split_tokens
from benchmarks.held_out.worlds import WORLDS


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


def test_harmless_insults(world):
    """Some insult words stand in decent replies too, so that a list of words does not tell bad replies."""
    rng, prompts = random.Random(3), draw_prompts(world)[1]
    replies = [world.draw_reply(rng.choice(prompts), rng, 0.0) for _ in range(2000)]
    words = [reply for reply in replies if world.insults & set(reply.text.strip(" .").replace(",", "").split())]
    assert 0.01 < len(words) / 2000 < 0.2 and all(reply.score > -4.5 for reply in words)
