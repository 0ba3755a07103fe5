"""Draws by inverting the cumulative distribution, as a CPU does with a large vocabulary."""

import pytest
import torch
from transformers import GenerationConfig

from trl_repulse.generation import drawing as _samplers
from trl_repulse.generation.drawing import InverseTransform, Sampler, drawn_by_inversion, rows_drawn_by

from ..conftest import build_model


ROWS = 20_000


@pytest.fixture
def model(monkeypatch):
    """A model whose vocabulary counts as large."""
    monkeypatch.setattr(_samplers, "_LARGE_VOCABULARY", 8)
    return build_model("llama", 32).eval()


@pytest.fixture
def inversions(monkeypatch):
    """Temperatures of the draws by inversion."""
    made, init = [], InverseTransform.__init__

    def counted(self, temperature=1.0):
        made.append(temperature)
        init(self, temperature)

    monkeypatch.setattr(InverseTransform, "__init__", counted)
    return made


def draw(model, seed=0, **settings):
    """First tokens of many completions of one prompt."""
    torch.manual_seed(seed)
    options = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "max_new_tokens": 1, "pad_token_id": 0}
    ids = torch.tensor([[5, 6, 7]]).expand(ROWS, -1)
    config = GenerationConfig(**options | settings)
    return model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=config)[:, 3]


def logits_of(model):
    with torch.no_grad():
        return model(torch.tensor([[5, 6, 7]])).logits[0, -1].float()


def distance(tokens, logits):
    """Chi-square statistic over its degrees of freedom: about 1 if the tokens are draws from the softmax of the logits."""
    expected = logits.softmax(-1) * len(tokens)
    counts = torch.bincount(tokens, minlength=len(expected))
    return ((counts - expected).square() / expected).sum().item() / (len(expected) - 1)


@pytest.mark.parametrize("temperature", [1.0, 1.7])
def test_distribution(model, inversions, temperature):
    with drawn_by_inversion(model):
        tokens = draw(model, temperature=temperature)
    assert inversions == [temperature]
    assert distance(tokens, logits_of(model) / temperature) < 1.8
    assert distance(tokens, logits_of(model) / (temperature + 0.5)) > 1.8 or temperature > 1  # the test can fail


@pytest.mark.parametrize("outside", [True, False])
def test_another_sampler_in_some_rows(model, inversions, outside):
    bias = torch.zeros(32)
    bias[3] = 2.0
    sampler, others = Sampler(bias=bias), [False, True] * (ROWS // 2)
    contexts = [rows_drawn_by(model, others, sampler), drawn_by_inversion(model)]
    first, second = contexts if outside else contexts[::-1]
    with first, second:
        tokens = draw(model)
    assert inversions == [1.0]
    assert distance(tokens[::2], logits_of(model)) < 1.8
    assert distance(tokens[1::2], logits_of(model) + bias) < 1.8
    assert distance(tokens[1::2], logits_of(model)) > 1.8


@pytest.mark.parametrize(
    "setting", [{"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.2}, {"typical_p": 0.5}, {"do_sample": False}]
)
def test_other_settings_are_left_to_transformers(model, inversions, setting):
    before = draw(model, **setting)
    with drawn_by_inversion(model):
        after = draw(model, **setting)
    assert torch.equal(before, after) and not inversions


def test_small_vocabulary_keeps_its_draws(model, inversions, monkeypatch):
    monkeypatch.setattr(_samplers, "_LARGE_VOCABULARY", 33)
    before = draw(model)
    with drawn_by_inversion(model):
        after = draw(model)
    assert torch.equal(before, after) and not inversions


def test_tokens_of_small_probability(monkeypatch):
    # The last token has 1e-8, which float32 sums that are near 1 cannot hold
    scores = torch.tensor([[0.5, 0.5, 1e-8]]).log()
    for u, token in ((0.0, 0), (0.49, 0), (0.51, 1), (1 - 2e-8, 1), (1 - 5e-9, 2)):
        monkeypatch.setattr(torch, "rand_like", lambda x, u=u: torch.full_like(x, u))
        assert InverseTransform()(None, scores).argmax().item() == token, u


def test_impossible_tokens_are_not_drawn(monkeypatch):
    scores = torch.tensor([[-torch.inf, 0.0, -torch.inf]])
    for u in (0.0, 0.5, 1 - 1e-16):
        monkeypatch.setattr(torch, "rand_like", lambda x, u=u: torch.full_like(x, u))
        assert InverseTransform()(None, scores).argmax().item() == 1
