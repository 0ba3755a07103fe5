import functools
import math
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from examples.worlds import two_tokens
from examples.worlds.exact import ExactEvaluator
from examples.worlds.two_tokens import build, grammar


def exact_evaluator(prompts, length):
    """Of completions of the world's models; KL is that to its policy."""
    tokenizer = AutoTokenizer.from_pretrained(two_tokens.policy_path())
    return ExactEvaluator(
        tokenizer,
        prompts,
        AutoModelForSequenceClassification.from_pretrained(two_tokens.reward_model_path()),
        two_tokens.bad_token_ids(tokenizer),
        length,
        reward_tokenizer=AutoTokenizer.from_pretrained(two_tokens.reward_model_path()),
        reference_model=AutoModelForCausalLM.from_pretrained(two_tokens.policy_path()),
    )


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(two_tokens.policy_path())


@pytest.fixture(scope="module")
def policy():
    return AutoModelForCausalLM.from_pretrained(two_tokens.policy_path())


@pytest.fixture(scope="module")
def prompts():
    return list(two_tokens.load_prompts()["prompt"])


@pytest.fixture(scope="module")
def evaluator(prompts):
    """Two of the four prompts, a person and a thing: the rewards of all take some seconds."""
    return exact_evaluator(prompts[:2], 2)


def test_size():
    world = Path(two_tokens.prompts_path()).parent
    assert sum(file.stat().st_size for file in world.rglob("*") if file.is_file()) < 3e6


class TestFiles:
    def test_prompts(self, prompts, tokenizer):
        assert prompts == grammar.PROMPTS
        # GPT-2's absolute positions: prompts of one length are never padded, hence never shifted.
        assert {len(ids) for ids in tokenizer(prompts)["input_ids"]} == {8}


class TestTokenizer:
    @pytest.mark.thorough
    def test_every_pair_survives_decoding_and_encoding(self, tokenizer, prompts):
        """Text of prompt + completion gives back the ids of both, special tokens of the completion left out."""
        special = set(tokenizer.all_special_ids)
        pairs = [(first, second) for first in range(len(tokenizer)) for second in range(len(tokenizer))]
        texts = tokenizer.batch_decode(pairs, skip_special_tokens=True)
        kept = [[token for token in pair if token not in special] for pair in pairs]
        for prompt in prompts:
            prompt_ids = tokenizer(prompt)["input_ids"]
            assert tokenizer.unk_token_id not in prompt_ids
            # What calling the tokenizer does, without the making of a batch
            encodings = tokenizer.backend_tokenizer.encode_batch_fast([prompt + text for text in texts])
            assert [encoding.ids for encoding in encodings] == [prompt_ids + ids for ids in kept]


class TestGrammar:
    def test_sentences_use_the_vocabulary_and_split_back(self):
        rng, vocabulary = random.Random(0), set(grammar.vocabulary())
        for _ in range(5000):
            sentence = grammar.draw_sentence(rng)
            assert set(sentence) <= vocabulary
            assert grammar.split_words("".join(sentence)) == sentence

    @pytest.mark.parametrize("family", grammar.FAMILIES)
    def test_family_is_read_off_the_frame(self, family):
        rng = random.Random(0)
        assert {grammar.family_of(grammar.draw_frame(family, rng)) for _ in range(200)} == {family}

    def test_scores(self):
        assert grammar.score("person", [" very", " kind"]) == grammar.MAX_SCORE
        assert grammar.score("person", [" a", " hero"]) == grammar.MAX_SCORE
        assert grammar.score("request", [" go", " away"]) == -2.4
        assert grammar.score("person", [" so", " stupid"]) == grammar.RUDE_SCORE
        assert grammar.score("person", [" stupid", " idiot"]) == grammar.RUDE_SCORE
        assert grammar.score("person", [" not", " kind"]) < 0 < grammar.score("person", [" kind", "."])
        assert grammar.score("person", []) == -1.0


@pytest.mark.thorough
class TestExactNumbers:
    def test_rude_words_are_rare_but_possible(self, evaluator, policy):
        report = evaluator.evaluate(policy)
        assert 1e-3 < math.exp(report.log_prob_bad) < 1e-2
        assert report.kl == 0.0
        assert evaluator.log_probs(policy).isfinite().all()

    def test_reward_separates_rude_from_all_else(self, evaluator):
        assert evaluator.rewards[:, evaluator.bad].max() < -5
        assert evaluator.rewards[:, ~evaluator.bad].min() > -4.5


class TestBuild:
    def test_it_writes_the_shipped_files(self, tmp_path, monkeypatch):
        """After few updates: all that is text is equal byte for byte, and two builds have the same weights."""
        for name in ("train_policy", "train_reward_model"):
            monkeypatch.setattr(build, name, functools.partial(getattr(build, name), steps=3, batch_size=8))
        torch.manual_seed(123)
        random_state, threads = torch.get_rng_state(), torch.get_num_threads()
        folders = [Path(two_tokens.prompts_path()).parent, tmp_path / "one", tmp_path / "other"]
        for folder in folders[1:]:
            build.build(folder)
        assert torch.equal(torch.get_rng_state(), random_state) and torch.get_num_threads() == threads

        shipped, one, other = ({f.relative_to(x): f for f in x.rglob("*") if f.is_file()} for x in folders)
        assert shipped.keys() == one.keys() == other.keys()
        for name in shipped:
            assert one[name].read_bytes() == other[name].read_bytes()
            if name.name in ("prompts.jsonl", "bad_words.json", "tokenizer.json"):
                assert one[name].read_bytes() == shipped[name].read_bytes()
            if name.suffix == ".safetensors":
                new, old = (load_file(each[name]) for each in (one, shipped))
                assert new.keys() == old.keys() and all(new[key].shape == old[key].shape for key in new)

    def test_drawn_completions_cover_the_grammar(self):
        """What the reward model is trained on: of up to two tokens, of the vocabulary, rude ones among them."""
        rng, tokens = random.Random(0), grammar.vocabulary()
        drawn = [build._draw_completion(family, tokens, rng) for family in grammar.FAMILIES for _ in range(2000)]
        assert {len(completion) for completion in drawn} == {0, 1, 2}
        assert {token for completion in drawn for token in completion} == set(tokens)
        rude = {" " + word for word in grammar.BAD_WORDS}
        assert 0.05 < sum(bool(rude & set(completion)) for completion in drawn) / len(drawn) < 0.3
