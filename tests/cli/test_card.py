"""`--card`: what `evaluate` and `gcg-report` measured, on the card of a model."""

import math
import re
import shutil

import pytest
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM

from trl_repulse.cli._card import write_on_card
from trl_repulse.cli.main import main
from trl_repulse.evaluation._generation import hash_model
from trl_repulse.evaluation.tails import Estimate

from ..evaluation_support import write_samples
from ..gcg_trigger import build_trigger_model, build_trigger_tokenizer


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
    build_trigger_model(build_trigger_tokenizer(), steps=1).save_pretrained(folder)
    return folder


@pytest.fixture
def weights(model):
    return hash_model(AutoModelForCausalLM.from_pretrained(model))


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
    results = card.data.eval_results
    found = {each.metric_name: (each.metric_value, each.metric_args, each.dataset_name) for each in results}
    assert found == {
        "P(r < -4)": (0.002, {"confidence": 0.95, "low": 0.0, "high": 0.1}, "4 prompts"),
        "CVaR 0.01": (-3.0, {"confidence": 0.95, "high": -2.0}, "4 prompts"),
        "success": (1.0, {"confidence": 0.9, "high": 1.0}, "3 targets"),
    }
    assert card.data.tags == ["trl"]


def test_evaluate_writes_its_report_on_a_new_card(model, weights, tmp_path, capsys):
    write_samples(tmp_path / "s", [[-5.0, 1.0, 2.0], [0.0, 1.0, 2.0]], weights)
    assert main(["evaluate", str(tmp_path / "s"), "--thresholds", "-4", "--card", str(model)]) == 0
    card = ModelCard.load(model / "README.md")
    assert capsys.readouterr().out.strip() in card.text
    found = {each.metric_name: each.metric_value for each in card.data.eval_results}
    assert [found["P(r < -4)"], found["mean reward"]] == pytest.approx([1 / 6] * 2, rel=1e-5)
    assert card.data.eval_results[0].dataset_name == "3 completions of each of 2 prompts"
    assert (card.data.library_name, card.data.model_name) == ("transformers", "model")


INDEXED = """\
---
license: "no"
model-index:
- name: A
  results:
  - task: {type: text-generation}
    dataset: {name: d, type: d}
    metrics:
    - {type: m, value: 1.0, name: of A}
---
text
"""


@pytest.mark.parametrize(
    "text", [INDEXED, INDEXED.replace("\n", "\r\n"), "# no metadata\n\n---\nhere\n---\n", "---\n---\n", ""]
)
def test_all_else_on_a_card_stays(tmp_path, text):
    """What is written is only added, once, and loads as it should."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "README.md").write_bytes(text.encode())
    for number in (1.0, 2.0, 3.0):
        for heading in ("Held-out samples", "Attacks (GCG)"):
            write_on_card(model, heading, f"says {number}", {"P: #1": Estimate(number, 0.0, 9.0, 5)}, "4 prompts", 0.9)
    card, before = ModelCard.load(model / "README.md"), ModelCard(text)
    assert card.text.startswith(before.text) and card.text.count("says") == card.text.count("says 3.0") == 2
    assert card.data.license == before.data.license and card.data.model_name == (before.data.model_name or "model")
    found = [(each.metric_name, each.metric_value) for each in card.data.eval_results]
    kept = [(each.metric_name, each.metric_value) for each in before.data.eval_results or []]
    assert found == [*kept, ("P: #1", 3.0), ("P: #1", 3.0)]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"---\na: [1\n---\n", "while parsing a flow sequence"),
        ("---\na: \u00e9\n---\n".encode("latin-1"), "codec can't decode"),
        (b"---\nmodel-index: 3\n---\n", "Invalid `model_index`"),
        (b"---\nmodel-index:\n- results: []\n---\n", "Invalid `model_index`"),
    ],
    ids=["yaml", "encoding", "number", "no name"],
)
def test_a_card_that_cannot_be_read_is_refused_before_anything_is_drawn(tmp_path, capsys, content, message):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "README.md").write_bytes(content)
    words = ["evaluate", str(tmp_path / "s"), "--model", str(model), "--prompts", "none", "--card", str(model)]
    assert main(words) == 1
    err = capsys.readouterr().err
    assert re.search(f"`{model}/README.md` cannot be read as a model card .*{message}.*; correct it", err)
    assert len(err.splitlines()) == 1
    assert (model / "README.md").read_bytes() == content


def test_the_conditions_are_on_the_card(tmp_path, model_dirs):
    """Also of samples that were drawn before; and with the table, if the model is another."""
    (tmp_path / "mine.py").write_text(
        "def judge(completions, **_):\n    return [float(len(each)) for each in completions]\n"
    )
    (tmp_path / "held_out.jsonl").write_text('{"prompt": "fish"}\n')
    folder = shutil.copytree(model_dirs["gpt2"], tmp_path / "model")
    words = ["evaluate", str(tmp_path / "s"), "--thresholds", "1"]
    draw = ["--model", str(folder), "--prompts", str(tmp_path / "held_out.jsonl"), "--num_samples", "4"]
    draw += ["--reward_type", f"{tmp_path / 'mine.py'}:judge", "--max_completion_length", "3", "--dtype", "bfloat16"]
    assert main([*words, *draw]) == 0
    shutil.move(tmp_path / "held_out.jsonl", tmp_path / "renamed.jsonl")
    draw[3] = str(tmp_path / "renamed.jsonl")
    assert main([*words, *draw]) == 0  # the name changes no sample
    assert main([*words, "--card", str(folder)]) == 0
    text = (folder / "README.md").read_text()
    assert (
        "Conditions: prompts `held_out.jsonl`, precision bfloat16, temperature 1 from all tokens, tokens of a completion 3, "
        "seed 0, judge `judge`." in text
    )
    assert "name: 4 completions of each of 1 prompts" in text


def test_the_card_of_another_model_is_refused(model, weights, tmp_path, capsys):
    write_samples(tmp_path / "s", [[-5.0, 1.0]], weights)
    write_samples(tmp_path / "half", [[-5.0, 1.0]], hash_model(AutoModelForCausalLM.from_pretrained(model).bfloat16()))
    write_samples(tmp_path / "other", [[-5.0, 1.0]])
    for name, code in (("s", 0), ("half", 0), ("other", 1)):
        (model / "README.md").unlink(missing_ok=True)
        assert main(["evaluate", str(tmp_path / name), "--thresholds", "-4", "--card", str(model)]) == code
        assert (model / "README.md").exists() == (code == 0)
    captured = capsys.readouterr()
    assert f"`--card {model}` holds other weights than the model that was measured, `m`" in captured.err
    assert captured.out.count("| P(r < -4) |") == 3  # what was measured is not lost
    (model / "model.safetensors").unlink()  # cannot be loaded, so that nothing can be said
    assert main(["evaluate", str(tmp_path / "s"), "--thresholds", "-4", "--card", str(model)]) == 0
    assert (model / "README.md").exists()


def test_the_card_of_a_log_is_refused(model, tmp_path, capsys):
    """It does not identify the weights, of which it would be said that they are others."""
    assert main(["evaluate", str(tmp_path / "log.eval"), "--card", str(model)]) == 1
    assert "which the log `" in (err := capsys.readouterr().err) and "does not identify; leave it out" in err


def test_what_has_no_card_is_refused_first(model, tmp_path, capsys):
    write_samples(tmp_path / "s", [[-5.0, 1.0]])
    for path in model.iterdir():
        path.unlink()
    for folders, words in (
        (["s"], f"`--card {model}` holds no model; name the folder of the model that was measured."),
        (["s", "s"], "`--card` is for one model; leave it out for several."),
    ):
        assert main(["evaluate", *(str(tmp_path / name) for name in folders), "--card", str(model)]) == 1
        captured = capsys.readouterr()
        assert words in captured.err and not captured.out
    assert main(["gcg-report", str(tmp_path / "r"), "--threshold", "0", "--card", str(model)]) == 1
    assert "holds no model" in capsys.readouterr().err and not list(model.iterdir())
