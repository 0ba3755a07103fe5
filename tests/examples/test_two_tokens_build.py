import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from examples.worlds import two_tokens
from examples.worlds.two_tokens import build, grammar


def random_inputs(tokenizer):
    """Prompts followed by arbitrary pairs of tokens, (512, 10)."""
    rng = random.Random(0)
    texts = ["".join([rng.choice(grammar.PROMPTS), *rng.choices(grammar.vocabulary(), k=2)]) for _ in range(512)]
    return tokenizer(texts, return_tensors="pt")


@pytest.mark.slow
def test_build_reproduces_the_shipped_world(tmp_path):
    """
    Text files are equal byte for byte. So are the weights on the machine that built the shipped world; another processor
    or torch version sums in another order, and thousands of updates amplify the rounding, so that there the models are
    compared by what they predict.
    """
    torch.manual_seed(123)
    random_state, threads = torch.get_rng_state(), torch.get_num_threads()
    build.build(tmp_path)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert torch.get_num_threads() == threads

    shipped = Path(two_tokens.prompts_path()).parent
    names = {file.relative_to(shipped) for file in shipped.rglob("*") if file.is_file()}
    assert {file.relative_to(tmp_path) for file in tmp_path.rglob("*") if file.is_file()} == names
    for name in names:
        if name.name in ("prompts.jsonl", "bad_words.json", "tokenizer.json"):
            assert (tmp_path / name).read_bytes() == (shipped / name).read_bytes()
    exact = True
    for model in ("policy", "reward_model"):
        new, old = (load_file(folder / model / "model.safetensors") for folder in (tmp_path, shipped))
        assert {key: value.shape for key, value in new.items()} == {key: value.shape for key, value in old.items()}
        exact = exact and all(torch.equal(new[key], old[key]) for key in old)
    if exact:
        return

    inputs = random_inputs(AutoTokenizer.from_pretrained(tmp_path / "policy"))
    policies = [AutoModelForCausalLM.from_pretrained(folder / "policy") for folder in (tmp_path, shipped)]
    rewards = [
        AutoModelForSequenceClassification.from_pretrained(folder / "reward_model") for folder in (tmp_path, shipped)
    ]
    with torch.no_grad():
        # Where the prompt ends, over the tokens; total variation distance of the two policies, (512,).
        new, old = (policy(**inputs).logits[:, -3].softmax(dim=-1) for policy in policies)
        assert (new - old).abs().sum(dim=-1).max() / 2 < 0.15
        new, old = (reward(**inputs).logits[:, 0] for reward in rewards)
        assert (new - old).abs().mean() < 0.15


def test_drawn_completions_cover_the_grammar():
    """What the reward model is trained on: of up to two tokens, of the vocabulary, rude ones among them."""
    rng, tokens = random.Random(0), grammar.vocabulary()
    drawn = [build._draw_completion(family, tokens, rng) for family in grammar.FAMILIES for _ in range(2000)]
    assert {len(completion) for completion in drawn} == {0, 1, 2}
    assert {token for completion in drawn for token in completion} == set(tokens)
    rude = {" " + word for word in grammar.BAD_WORDS}
    assert 0.05 < sum(bool(rude & set(completion)) for completion in drawn) / len(drawn) < 0.3
