"""Tiny models of other architectures: what is sampled and scored is their own, or they are refused."""

import time

import pytest

from benchmarks.architectures import NAMES, TooLong, examine, limited, sweep
from trl_repulse.generation._probe import holds

from ..conftest import build_tokenizer


pytestmark = pytest.mark.trainer


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "reverse", "expected"),
    [
        ("minimax", True, ("guarded", "sampled by length")),
        ("nemotron_h", False, ("guarded", "no cache")),
        ("bart", False, ("guarded", "scored by length, sampled by length")),
        ("falcon_h1", False, ("agrees", "")),
        ("roberta", False, ("refused", "RobertaForCausalLM predicts something else for a text in a batch")),
    ],
)
def test_nothing_disagrees(name, reverse, expected):
    tokenizer = build_tokenizer()
    tokenizer.bos_token = "<unk>"
    line = examine(name, tokenizer, reverse)
    assert line["result"] == expected[0] and line["how"].startswith(expected[1])
    assert line["noise"] in ("", "none", "off")


def test_no_check_takes_the_limit_for_an_answer():
    with pytest.raises(TooLong), limited(1):
        holds(lambda: time.sleep(30))


@pytest.mark.slow
def test_no_architecture_disagrees():
    lines = sweep(NAMES)
    results = [line["result"] for line in lines]
    assert not [line for line in lines if line["result"] == "**disagrees**"]
    assert sum(result in ("agrees", "guarded") for result in results) > 140
