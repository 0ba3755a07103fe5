"""What a batch's longest row, or float64, changes in how models are read."""

import pytest
import torch
from transformers import AutoModelForCausalLM, BloomConfig, Phi3Config, set_seed

from trl_repulse.data._checks import check_prompt_lengths
from trl_repulse.generation._probe import Passes


LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 16}
LONGROPE |= {"short_factor": [1.0] * 4, "long_factor": [1.5, 2.0, 3.0, 4.0]}


@pytest.fixture(scope="module")
def phi3():
    set_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
    sizes |= {"num_hidden_layers": 1, "vocab_size": 40, "pad_token_id": 0, "initializer_range": 0.4}
    return AutoModelForCausalLM.from_config(
        Phi3Config(**sizes, max_position_embeddings=64, original_max_position_embeddings=16, rope_parameters=LONGROPE)
    )


@torch.no_grad()
def test_longrope_reads_short_rows_by_the_longest_of_a_batch(phi3):
    """What the refusal is for, in transformers alone."""
    row = torch.arange(3, 31)
    batches = {length: torch.stack([row[:length], row[:length].flip(0)]) for length in (12, 28)}
    batches[12.5] = batches[12][:1]  # the control
    first = {length: phi3.eval()(input_ids=ids, use_cache=False).logits[0, :12] for length, ids in batches.items()}
    assert (first[12] - first[28]).abs().max() > 1e-4 > 1e-6 > (first[12] - first[12.5]).abs().max()


@pytest.mark.parametrize(
    ("lengths", "refused"), [((4, 12), False), ((4, 13), True), ((4, 20), True), ((17, 20), False), ((16, 20), True)]
)
def test_lengths_on_both_sides_of_longrope_are_refused(phi3, lengths, refused):
    prompts = [[5] * length for length in lengths]
    if not refused:
        check_prompt_lengths(prompts, prompts, phi3.config, 4)
        return
    with pytest.raises(ValueError, match=r"more than 16 tokens \(longrope\).*lower `max_completion_length`"):
        check_prompt_lengths(prompts, prompts, phi3.config, 4)


@torch.no_grad()
@pytest.mark.parametrize("initializer_range", [0.002, 0.02, 0.4])
def test_float64_is_compared_in_float32(initializer_range):
    set_seed(0)
    sizes = {"vocab_size": 40, "hidden_size": 16, "n_layer": 2, "n_head": 2, "initializer_range": initializer_range}
    model = AutoModelForCausalLM.from_config(BloomConfig(**sizes)).double().eval()
    passes = Passes(model, lambda ids, mask: model(input_ids=ids).logits.float().log_softmax(-1))
    found, expected = passes.together()
    assert passes.agree(lambda: (found * (1 + 2**-23), expected))  # BLOOM's softmax is in float32
    assert not passes.agree(lambda: (found * 1.001, expected))
