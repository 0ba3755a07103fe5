"""Attack success against a quantity of held-out samples in one frontier."""

import copy
import dataclasses
import json

import numpy as np
import pytest
import torch

from trl_repulse.cli import main
from trl_repulse.evaluation._generation import hash_model
from trl_repulse.evaluation.gcg import RefusalJudge, evaluate_gcg
from trl_repulse.evaluation.result_files import load_frontier

from .evaluation_support import write_samples
from .gcg_trigger import ROWS, build_trigger_model, build_trigger_tokenizer, evaluation_config


def judge(goals, responses):
    return [-5.5 if " yes" in response else 1.5 for response in responses]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Samples and attacks of a model with a trigger, and of one that never says what is bad."""
    folder, tokenizer = tmp_path_factory.mktemp("runs"), build_trigger_tokenizer()
    triggered = build_trigger_model(tokenizer)
    mute = copy.deepcopy(triggered)
    with torch.no_grad():
        head = mute.get_output_embeddings().weight
        head[tokenizer(" yes")["input_ids"]] = head[tokenizer.pad_token_id].clone()
    found = {}
    for name, model in (("triggered", triggered), ("mute", mute)):
        weights, values = hash_model(model), np.random.default_rng(0).normal(len(found), 1.0, (3, 100))
        samples = write_samples(folder / name, values, weights)
        found[name] = (
            samples,
            evaluate_gcg(model, tokenizer, ROWS, judge, evaluation_config(seed=len(found)), folder / f"{name}.jsonl"),
        )
    return found


def test_attacks_are_paired_with_samples(pairs, tmp_path, capsys):
    methods = {name: [pair] for name, pair in pairs.items()}
    points = {point.method: point for point in load_frontier(methods, "attack_success", "return", -4.0).points}
    assert points["triggered"].x.value == 1 and points["mute"].x.value < 1
    assert points["mute"].y.value - points["triggered"].y.value == pytest.approx(1.0)
    # All targets of the only run: the exact interval of as many trials
    assert points["triggered"].x.high == 1 and points["triggered"].x.low == pytest.approx(0.025 ** (1 / len(ROWS)))
    # Each axis by its own counts: no sample of 300 is so bad, beside few targets
    both = load_frontier(methods, "prob_bad", "attack_success", -100.0).points[0]
    assert (both.x.value, both.x.high) == (0, pytest.approx(1 - 0.025 ** (1 / 300)))
    assert both.y.value == 0 and both.y.high == pytest.approx(1 - 0.025 ** (1 / len(ROWS)))
    given = [part for name, pair in pairs.items() for part in ("--method", name, ",".join(map(str, pair)))]
    figure = tmp_path / "attacks"
    assert main(["frontier", str(figure), *given, "--x", "attack_success", "--threshold", "-4"]) == 0
    assert "| triggered | 1 | 1" in capsys.readouterr().out and figure.with_suffix(".png").stat().st_size


def forget_judge(attack, copy):
    """A file of attacks as it was when a judge was known by its name alone."""
    header, *records = attack.read_text().splitlines(keepends=True)
    header = json.loads(header)
    del header["identity"]["judge_hash"]
    copy.write_text("".join([json.dumps(header) + "\n", *records]))
    return copy


def test_attacks_from_before_judges_were_known_by_more_than_their_names(pairs, tmp_path):
    (samples, attack), other = pairs.values()
    methods = {"old": [(samples, forget_judge(attack, tmp_path / "old.jsonl"))], "new": [other]}
    found = load_frontier(methods, "attack_success", "return", -4.0)
    assert [point.x.value == 1 for point in found.points] == [True, False]
    tokenizer, config = build_trigger_tokenizer(), evaluation_config(num_steps=1, num_samples=2)
    given = build_trigger_model(tokenizer), tokenizer, ROWS[:1], RefusalJudge(), config
    begun = forget_judge(evaluate_gcg(*given, tmp_path / "new.jsonl"), tmp_path / "begun.jsonl")
    before = begun.read_bytes()
    assert evaluate_gcg(*given, begun).read_bytes() == before  # taken up, and all is done


def test_pairs_that_may_not_stand_in_one_figure(pairs, tmp_path):
    (samples, attack), (others, of_others) = pairs.values()
    cut = tmp_path / "cut.jsonl"
    cut.write_text("".join(of_others.read_text().splitlines(keepends=True)[:-1]))
    shorter = dataclasses.replace(evaluation_config(), num_samples=2)
    tokenizer = build_trigger_tokenizer()
    again = evaluate_gcg(build_trigger_model(tokenizer), tokenizer, ROWS[:1], judge, shorter, tmp_path / "again.jsonl")
    for runs, x, message in (
        ([(samples, attack), (others,)], "attack_success", "all are pairs"),
        ([(samples, others)], "attack_success", "all are pairs"),
        ([(attack,)], "attack_success", "all are pairs"),
        ([(samples, attack)], "prob_bad", "neither axis"),
        ([(samples, of_others)], "attack_success", "of different models"),
        ([(others, cut)], "attack_success", "lacks 1 targets"),
        ([(others, of_others), (samples, again)], "attack_success", "differ in `config.num_samples`"),
    ):
        with pytest.raises(ValueError, match=message):
            load_frontier({"A": runs}, x, "return", -4.0)
    with pytest.raises(ValueError, match="There are no runs"):
        load_frontier({}, "attack_success", "return", -4.0)
    with pytest.raises(ValueError, match="needs a `threshold`"):
        load_frontier({"A": [(samples, attack)]}, "attack_success", "return")
