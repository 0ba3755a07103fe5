"""`--card`: what `evaluate` and `gcg-report` measured, on the card of a model."""

import json
import math

import pytest
from huggingface_hub import ModelCard

from trl_repulse._commands._card import write_on_card
from trl_repulse.cli import main
from trl_repulse.evaluation.tails import Estimate

from .evaluation_support import write_samples


TRAINED = """\
---
library_name: transformers
tags:
- trl
---

# Model Card for out

### Framework versions

- TRL: 1.16.0
"""


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


def test_a_card_of_a_trainer_gets_sections_and_metrics(model):
    (model / "README.md").write_text(TRAINED)
    for value in (0.001, 0.002):
        estimates = {"P(r < -4)": Estimate(value, 0.0, 0.1, 5), "CVaR 0.01": Estimate(-3, -math.inf, -2, 1)}
        estimates["kl"] = Estimate(math.nan, math.nan, math.nan, 0)
        write_on_card(model, "Held-out samples", f"| P | {value} |", estimates, "4 prompts", 0.95)
        write_on_card(model, "Attacks (GCG)", "text", {"success": Estimate(1, math.nan, 1, 3)}, "3 targets", 0.9)
    card = ModelCard.load(model / "README.md")
    places = [card.text.index(f"### {name}") for name in ("Held-out samples", "Attacks (GCG)", "Framework versions")]
    assert places == sorted(places) and card.text.count("| P |") == 1 and "| P | 0.002 |" in card.text
    found = {
        each.metric_name: (each.metric_value, each.metric_args, each.dataset_name) for each in card.data.eval_results
    }
    assert found == {
        "P(r < -4)": (0.002, {"confidence": 0.95, "low": 0.0, "high": 0.1}, "4 prompts"),
        "CVaR 0.01": (-3.0, {"confidence": 0.95, "high": -2.0}, "4 prompts"),
        "success": (1.0, {"confidence": 0.9, "high": 1.0}, "3 targets"),
    }
    assert card.data.tags == ["trl"]


def test_evaluate_writes_its_report_on_a_new_card(model, tmp_path, capsys):
    write_samples(tmp_path / "s", [[-5.0, 1.0, 2.0], [0.0, 1.0, 2.0]])
    assert main(["evaluate", str(tmp_path / "s"), "--thresholds", "-4", "--card", str(model)]) == 0
    card = ModelCard.load(model / "README.md")
    assert capsys.readouterr().out.strip() in card.text
    found = {each.metric_name: each.metric_value for each in card.data.eval_results}
    assert found["P(r < -4)"] == pytest.approx(1 / 6, rel=1e-5) and found["mean reward"] == pytest.approx(
        1 / 6, rel=1e-5
    )
    assert card.data.eval_results[0].dataset_name == "3 completions of each of 2 prompts"
    assert (card.data.library_name, card.data.model_name) == ("transformers", "model")


def test_what_has_no_card_is_refused_first(model, tmp_path, capsys):
    write_samples(tmp_path / "s", [[-5.0, 1.0]])
    (model / "config.json").unlink()
    for folders, words in (
        (["s"], f"`--card {model}` holds no model; name the folder of the model that was measured."),
        (["s", "s"], "`--card` is for one model; leave it out for several."),
    ):
        assert main(["evaluate", *(str(tmp_path / name) for name in folders), "--card", str(model)]) == 1
        captured = capsys.readouterr()
        assert words in captured.err and not captured.out
    (tmp_path / "r.jsonl").write_text(json.dumps({}))
    assert main(["gcg-report", str(tmp_path / "r.jsonl"), "--threshold", "0", "--card", str(model)]) == 1
    assert "holds no model" in capsys.readouterr().err and not list(model.iterdir())
