"""The cache of a prompt that grows in place holds what transformers' cache holds."""

import pytest
import torch
from transformers import set_seed
from transformers.cache_utils import DynamicLayer

from benchmarks.architectures import build
from trl_repulse.generation.drawing import _NAMES, GrowingLayer, growing_cache, prompts_read_once, with_cache

from ..conftest import DEVICE


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
