"""The exact probability of bad tokens: against every completion enumerated, and over a real vocabulary."""

import itertools
import math

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel, set_seed

from examples.worlds import two_tokens
from examples.worlds.exact import ExactEvaluator
from examples.worlds.exact_tracking import exact_log_prob_bad

from ..conftest import build_model


V, EOS, BAD = 19, 1, [4, 10, 18]
PROMPTS = [[3, 5, 7], [8], [2, 2, 9, 11]]


def brute_force(model, prompt, bad, length, eos):
    """Σ P(completion) over every completion with a bad token, each scored by itself."""
    total = 0.0
    for completion in itertools.product(range(V), repeat=length):
        ends = [i for i, token in enumerate(completion) if token in eos]
        stop = ends[0] + 1 if ends else length
        if any(completion[stop:]):  # the same completion, ended earlier: counted with zeros after the end alone
            continue
        completion = completion[:stop]
        if not set(completion) & set(bad):
            continue
        ids = torch.tensor([[*prompt, *completion]])
        log_probs = model(ids).logits[0, len(prompt) - 1 : -1].double().log_softmax(dim=-1)
        total += log_probs[range(stop), list(completion)].sum().exp().item()
    return math.log(total)


@pytest.mark.thorough
@pytest.mark.exact
@pytest.mark.parametrize("length", [1, 2])
@pytest.mark.parametrize(
    "bad, eos", [(BAD, [EOS]), (BAD, [EOS, 3]), ([EOS, 5], [EOS]), (BAD, [])], ids=["one", "two", "bad_end", "endless"]
)
@torch.no_grad()
def test_equals_the_sum_over_all_completions(architecture, length, bad, eos):
    model = build_model(architecture, V).double().eval()
    expected = [brute_force(model, prompt, bad, length, eos) for prompt in PROMPTS[:2]]
    for batch_size in (None, 5):
        found = exact_log_prob_bad(model, PROMPTS[:2], bad, length, eos, batch_size)
        torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), atol=1e-12, rtol=0)


@pytest.mark.exact
@pytest.mark.parametrize("length", [1, 2])
def test_equals_the_evaluator(length):
    """The other implementation, which also enumerates second tokens, on a trained policy in float32."""
    tokenizer = AutoTokenizer.from_pretrained(two_tokens.policy_path())
    policy = AutoModelForCausalLM.from_pretrained(two_tokens.policy_path())
    bad, prompts = two_tokens.bad_token_ids(tokenizer), two_tokens.load_prompts()["prompt"]
    evaluator = ExactEvaluator(tokenizer, prompts, lambda texts: torch.zeros(len(texts)), bad, length)
    expected = torch.tensor(evaluator.evaluate(policy).log_prob_bad_per_prompt, dtype=torch.float64)
    ids = [tokenizer(prompt)["input_ids"] for prompt in prompts]
    found = exact_log_prob_bad(policy, ids, bad, length, [tokenizer.eos_token_id])
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@pytest.mark.exact
def test_far_below_what_a_probability_holds():
    model = build_model("gpt2", V).eval()
    with torch.no_grad():  # a last feature that is always 10, which bad tokens dislike and all others ignore
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
        model.transformer.ln_f.weight[-1], model.transformer.ln_f.bias[-1] = 0.0, 10.0
        model.lm_head.weight[:, -1] = 0.0
        before = exact_log_prob_bad(model, PROMPTS, BAD, 1, [EOS])
        model.lm_head.weight[BAD, -1] = -500.0
        after = exact_log_prob_bad(model, PROMPTS, BAD, 1, [EOS])
    log_odds = before - torch.log1p(-before.exp())  # P(bad) / P(not bad) shrinks by exp(-5000)
    torch.testing.assert_close(after, log_odds - 5000.0, atol=1e-3, rtol=0)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"max_completion_length": 3}, "`max_completion_length=3` must be 1 or 2"),
        ({"batch_size": 0}, "`batch_size=0` must be at least 1"),
        ({"prompt_ids": []}, "`prompt_ids` must hold at least one prompt"),
        ({"prompt_ids": [[3], []]}, "each prompt at least one token"),
        ({"bad_token_ids": [4, V]}, f"`bad_token_ids` has {V}, but the model's vocabulary is 0 to {V - 1}"),
        ({"bad_token_ids": [-1]}, "`bad_token_ids` has -1"),
        ({"eos_token_ids": [50256]}, "`eos_token_ids` has 50256"),
    ],
)
def test_refuses(changes, words):
    arguments = {"prompt_ids": PROMPTS, "bad_token_ids": BAD, "max_completion_length": 2, "eos_token_ids": [EOS]}
    with pytest.raises(ValueError, match=words):
        exact_log_prob_bad(build_model("gpt2", V), **arguments | changes)


TOY_BAD = [5089, 9372, 20654, 25617, 30998, 31699, 34094, 46733, 21551, 40267]
TOY_BAD += [7510, 16211, 20041, 32574, 41356, 31030, 47209, 18185, 29836]


@pytest.mark.thorough
@pytest.mark.exact
def test_the_vocabulary_of_gpt2():
    """50,257 tokens and two steps, about 10 seconds; against an estimate from 2,000 first tokens, drawn evenly."""
    set_seed(0)
    sizes = {"n_embd": 8, "n_layer": 1, "n_head": 1, "n_positions": 8}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=50257, initializer_range=0.5, **sizes)).eval()
    prompt = [1212, 582, 318, 257]
    found = exact_log_prob_bad(model, [prompt], TOY_BAD, 2, [50256]).item()
    chosen = torch.randperm(50257)[:2000]
    with torch.no_grad():
        first = model(torch.tensor([prompt])).logits[0, -1].double().softmax(dim=-1)
        rows = torch.cat([torch.tensor([prompt]).expand(2000, -1), chosen[:, None]], dim=1)
        second = model(rows).logits[:, -1].double().softmax(dim=-1)[:, TOY_BAD].sum(dim=1)
    live = torch.ones(50257, dtype=torch.bool)
    live[[*TOY_BAD, 50256]] = False
    assert first[TOY_BAD].sum().log().item() < found < 0
    # The 2,000 first tokens drawn stand for all: their estimate of the second token's part agrees within its error
    parts = (first[chosen] * second * live[chosen]) * 50257
    estimate = parts.mean() + first[TOY_BAD].sum()
    error = parts.std() / math.sqrt(len(parts))
    assert abs(math.exp(found) - estimate) < 4 * error
