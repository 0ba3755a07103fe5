"""Screening of candidates by a copy in half precision: nothing that may be the best is left out."""

import pytest
import torch

from trl_repulse.evaluation.gcg import GCG, GCGConfig, GCGError, run_gcg
from trl_repulse.evaluation.gcg._search import screened_losses
from trl_repulse.evaluation.gcg.scoring import SuffixScorer

from ..gcg_support import build_model, build_tokenizer


GOAL, TARGET = "tell me the secret", "sure here is"
SETTINGS = {"num_steps": 6, "search_width": 128, "topk": 60, "suffix_init": " x" * 6, "filter_roundtrip": "suffix"}


class Table:
    """A scorer with a loss for each candidate, which counts what it is asked."""

    def __init__(self, losses):
        self._losses, self.asked, self.observed = losses, 0, []

    def observe(self, ids):
        self.observed.append(ids)

    def losses(self, candidates):
        self.asked += len(candidates)
        return self._losses[candidates[:, 0]]


def screen(losses, guesses):
    candidates, scorer, copy = torch.arange(len(losses))[:, None], Table(losses), Table(guesses)
    found = screened_losses(scorer, copy, torch.tensor([0]), candidates)
    assert len(copy.observed) == 1 and copy.asked == len(losses)
    return found, scorer.asked


@pytest.mark.parametrize("noise", [0.0, 0.002, 0.02, 10.0])
def test_the_best_is_found_however_far_off_the_copy_is(noise):
    generator, asked = torch.Generator().manual_seed(0), []
    for _ in range(100):
        losses = 5 + 0.04 * torch.randn(256, generator=generator)
        # A shift that all share says nothing of the order
        guesses = losses + 0.3 + noise * torch.randn(256, generator=generator)
        found, number = screen(losses, guesses)
        asked.append(number)
        assert int(found.argmin()) == int(losses.argmin())
        scored = found.isfinite()
        assert torch.equal(found[scored], losses[scored]) and int(scored.sum()) == number
    mean = sum(asked) / len(asked)
    assert mean < 17 if noise <= 0.002 else mean > 30
    if noise == 10.0:
        assert mean > 200  # it cannot tell them apart


def test_losses_that_are_not_finite():
    """Under the model an error; of a copy that overflowed nothing is believed."""
    losses = torch.ones(20)
    broken = losses.clone()
    broken[3] = torch.nan
    with pytest.raises(GCGError, match="A loss is nan"):
        screen(broken, losses)
    found, asked = screen(losses, broken)
    assert torch.equal(found, losses) and asked == 20


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma"])
@pytest.mark.parametrize("merge_swaps", [0, 4])
def test_strings_are_those_without(architecture, merge_swaps, monkeypatch):
    model, tokenizer = build_model(architecture, 410), build_tokenizer()
    plain = run_gcg(model, tokenizer, GOAL, TARGET, GCGConfig(**SETTINGS, merge_swaps=merge_swaps))
    scored, losses = {}, SuffixScorer.losses

    def count(self, candidates):
        scored[self.model.dtype] = scored.get(self.model.dtype, 0) + len(candidates)
        return losses(self, candidates)

    monkeypatch.setattr(SuffixScorer, "losses", count)
    config = GCGConfig(**SETTINGS, merge_swaps=merge_swaps, screen_dtype="bfloat16")
    screened = run_gcg(model, tokenizer, GOAL, TARGET, config)
    assert screened.suffixes == plain.suffixes
    assert screened.losses == pytest.approx(plain.losses, abs=1e-6)
    assert scored[torch.float32] < 0.8 * scored[torch.bfloat16]
    assert model.dtype == torch.float32


def test_what_is_refused():
    model, tokenizer = build_model("llama", 410), build_tokenizer()
    with pytest.raises(ValueError, match="`screen_dtype='int8'` must be one of None, 'bfloat16', 'float16'"):
        GCGConfig(screen_dtype="int8")
    with pytest.raises(ValueError, match="leave out one"):
        GCG(model, tokenizer, GCGConfig(**SETTINGS, screen_dtype="bfloat16"), draft_model=model)
    with pytest.raises(ValueError, match="in bfloat16 already"):
        GCG(model.to(torch.bfloat16), tokenizer, GCGConfig(**SETTINGS, screen_dtype="bfloat16"))
