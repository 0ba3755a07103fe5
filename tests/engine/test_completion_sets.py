"""Sets of completions side by side: each gets back the scores of its own tokens."""

import pytest
import torch

from trl_repulse.engine.completion_sets import CompletionSets
from trl_repulse.models._layout import Layout


PAD = 99


def build_batch():
    """4 units with a set of 2 completions of 3 tokens and one of 3 of 5 tokens, each token a number of its own."""
    ids = torch.arange(4 * 2 * 3 + 4 * 3 * 5) + 100
    first, second = ids[:24].view(4, 2, 3), ids[24:].view(4, 3, 5)
    mask = {"a_mask": torch.ones_like(first), "b_mask": torch.ones_like(second)}
    mask["b_mask"][:, 1, 3:] = 0
    return {"a_ids": first, "b_ids": second} | mask


@pytest.mark.parametrize("joint", [1, 2, 4])
@pytest.mark.parametrize("slots", [None, 3, 5])
def test_each_set_gets_its_own_scores(joint, slots):
    batch = build_batch()
    needed = torch.zeros(4, 3, dtype=torch.bool)
    needed[1, 2] = needed[2, 0] = True
    sets = CompletionSets.of(batch, ("a", "b"), PAD, {} if slots is None else {"b": needed}, None)
    assert sets.ids.shape == (4, 5, 5) and sets.ids[:, :2, 3:].eq(PAD).all() and sets.mask[:, :2, 3:].eq(0).all()
    if joint > 1:
        sets.join(joint)
    if slots is not None:
        sets.keep_needed(joint * slots)
    assert sets.completions == joint * (slots or 5)
    prompts = torch.arange(4 // joint).unsqueeze(1)
    ids, mask, _ = sets.rows(Layout(1, 5, sets.completions), (prompts, torch.ones_like(prompts)))
    scores = (ids * mask)[:, 1:].reshape(-1, 5)  # a token's score is the token
    first, second = sets.split(scores)
    torch.testing.assert_close(first, batch["a_ids"])
    expected = batch["b_ids"] * batch["b_mask"]
    torch.testing.assert_close(second, expected if slots is None else expected * needed.unsqueeze(2))


def test_what_is_kept_is_what_is_needed():
    batch = build_batch()
    needed, asked = (torch.tensor([[1, 0, 0], [0, 0, 1], [1, 1, 1], [0, 0, 0]]) == x for x in (1, 0))
    sets = CompletionSets.of(batch, ("a", "b"), PAD, {"b": needed}, {"b": asked})
    before = {
        int(ids[0]): bool(wanted) for ids, wanted in zip(sets.ids.flatten(0, 1), sets.asked.flatten(), strict=True)
    }
    sets.keep_needed(4)
    assert sets.read.tolist() == [[True] * 3 + [False], [True] * 3 + [False], [True] * 4, [True] * 2 + [False] * 2]
    assert sets.mask[~sets.read].eq(0).all()
    for ids, wanted in zip(sets.ids.flatten(0, 1), sets.asked.flatten(), strict=True):
        assert bool(wanted) == before[int(ids[0])]


def test_tools_write_what_is_read_and_not_counted():
    batch = build_batch()
    batch["a_attended"] = batch["a_mask"].clone()
    batch["a_mask"][:, :, 1] = 0
    sets = CompletionSets.of(batch, ("a",), PAD, {}, None)
    assert sets.mask.eq(1).all() and sets.asked is None
