"""Draws by inverting the cumulative distribution, as a CPU does with a large vocabulary, and the cache of a prompt that grows in place."""

import pytest
import torch
from transformers import GenerationConfig, WatermarkingConfig, set_seed
from transformers.cache_utils import DynamicLayer

from benchmarks.architectures import build
from trl_repulse.generation import drawing as _samplers
from trl_repulse.generation.drawing import (
    _NAMES,
    GrowingLayer,
    InverseTransform,
    Sampler,
    drawn_by_inversion,
    growing_cache,
    prompts_read_once,
    rows_drawn_by,
    with_cache,
)

from ..conftest import DEVICE, build_model


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
    "setting",
    [
        *({"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.2}, {"typical_p": 0.5}, {"do_sample": False}),
        {"watermarking_config": WatermarkingConfig(bias=9.0, seeding_scheme="lefthash")},
    ],
)
def test_other_settings_are_left_to_transformers(model, inversions, setting):
    before = draw(model, **setting)
    with drawn_by_inversion(model):
        after = draw(model, **setting)
    assert torch.equal(before, after) and not inversions


def test_what_cannot_be_drawn_from_is_refused(model, inversions):
    with drawn_by_inversion(model):
        for temperature in (0.0, -1.0):
            with pytest.raises(ValueError, match="has to be a strictly positive float"):
                draw(model, temperature=temperature)
    with pytest.raises(RuntimeError, match="probabilities that are not numbers"):
        InverseTransform()(None, torch.tensor([[0.0, 1.0], [torch.nan, 1.0]]))


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


# The cache of a prompt holds what transformers' cache holds


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def states(tokens, rows=2):
    """Keys and values of some tokens, of different size, as multi-head latent attention has them."""
    return torch.randn(rows, 3, tokens, 4), torch.randn(rows, 3, tokens, 5)


CHANGES = {  # what is done to a layer, and how many rows it has then
    "selected": (lambda layer: layer.batch_select_indices(torch.tensor([1, 1, 0])), 3),
    "repeated": (lambda layer: layer.batch_repeat_interleave(2), 4),
    "reordered": (lambda layer: layer.reorder_cache(torch.tensor([1, 0])), 2),
    "cropped": (lambda layer: layer.crop(-3), 2),
    "reset": (lambda layer: layer.reset(), 2),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("tokens", [(7, 1, 1), (1, 80, 1, 1), (*[1] * 70,)])
def test_a_layer_holds_what_transformers_layer_holds(change, tokens):
    layers = GrowingLayer(), DynamicLayer()
    torch.manual_seed(0)

    def grow(rows):
        for count in tokens:
            added = states(count, rows)
            for found, expected in zip(*(layer.update(*added) for layer in layers), strict=True):
                assert torch.equal(found, expected)
            assert layers[0].get_seq_length() == layers[1].get_seq_length()
            assert layers[0].get_mask_sizes(1) == layers[1].get_mask_sizes(1)

    grow(2)
    changed, rows = CHANGES[change]
    for layer in layers:
        changed(layer)
    grow(rows)


def test_a_token_is_written_where_there_is_room():
    layer, places = GrowingLayer(), set()
    layer.update(*states(10))
    for _ in range(64):
        keys, values = layer.update(*states(1))
        places.add((keys.data_ptr(), values.data_ptr()))
    assert keys.size(2) == values.size(2) == 74 and len(places) <= 3


def test_states_of_another_precision_are_not_rounded():
    layers = GrowingLayer(), DynamicLayer()
    for dtype in (torch.bfloat16, torch.float32, torch.bfloat16):
        added = [x.to(dtype) for x in states(2)]
        for found, expected in zip(*(layer.update(*added) for layer in layers), strict=True):
            assert found.dtype == expected.dtype and torch.equal(found, expected)


def test_gradients_pass_through():
    layer, start = GrowingLayer(), torch.randn(2, 3, 4, 5, requires_grad=True)
    with torch.enable_grad():
        first = layer.update(start, start)[0].square()
        second = layer.update(start, start)[0]
        (first.sum() + second.sum()).backward()
    torch.testing.assert_close(start.grad, 2 * start.detach() + 2)


def test_layers_with_a_window_are_transformers_own():
    kinds = {type(layer).__name__ for layer in growing_cache(build("gemma2", 40)).layers}
    assert kinds == {"GrowingLayer", "DynamicSlidingWindowLayer"}


@pytest.mark.filterwarnings("error::FutureWarning")
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
def test_long_completions_are_drawn_as_without_it(name):
    """Beyond the room that is made at once, and with no word of transformers about the cache's name."""
    model = build(name, 40).to(DEVICE).eval()
    model.generation_config.eos_token_id = None
    ids = torch.tensor([[5, 9, 7], [5, 9, 7], [8, 6, 4]], device=DEVICE)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 80, "do_sample": True}
    set_seed(0)
    expected = model.generate(**inputs)
    set_seed(0)
    with prompts_read_once(model):
        assert torch.equal(model.generate(**inputs), expected)


def test_a_model_from_elsewhere_is_given_the_name_that_it_knows():
    class Elsewhere(torch.nn.Module):
        def forward(self, input_ids, past_key_values=None, use_cache=None): ...

    class Renamed(torch.nn.Module):
        def forward(self, input_ids, cache=None, use_cache=None): ...

    found = [set(with_cache(model, None)) - {"use_cache"} for model in (Renamed(), Elsewhere())]
    assert found == [{name} for name in _NAMES]
