"""`trl-repulse audit`: from the draw to the report, and each mistake's one line."""

import csv
import json

import numpy as np
import pandas as pd
import pytest

from trl_repulse.cli.main import main

from ..evaluation_support import save_chat, write_inputs, write_samples


ROWS = {"reward": np.concatenate([np.full(10, -2.0), -0.9 + np.arange(90) / 25])}


def relabel(path, change):
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = list(csv.DictReader(file))
    for number, row in enumerate(rows):
        change(number, row)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)


def by_index(number, row):
    row["label"] = str(int(int(row["index"]) < 8))


@pytest.fixture
def drawn(tmp_path, capsys):
    """Samples, and a file of 40 completions to label."""
    write_samples(tmp_path / "samples", ROWS["reward"].reshape(1, -1))
    labels = tmp_path / "labels.csv"
    assert main(["audit", str(tmp_path / "samples"), str(labels), "--draw", "40", "--threshold", "-1"]) == 0
    assert "10 bad, 10 near, 20 ordinary completions" in capsys.readouterr().out
    return tmp_path / "samples", labels


def test_labels_say_how_often_the_model_is_truly_bad(drawn, tmp_path, capsys):
    samples, labels = drawn
    relabel(labels, by_index)
    assert main(["audit", str(samples), str(labels), "--output", str(tmp_path / "audit.json")]) == 0
    printed = capsys.readouterr().out
    audit = json.loads((tmp_path / "audit.json").read_text())
    assert audit["estimates"]["P(truly bad)"]["value"] == pytest.approx(0.08)
    assert audit["estimates"]["sensitivity of r < -1"]["value"] == 1 and audit["verdict"] == "bounds"
    assert "Labels: bounds only. P(truly bad) is between" in printed
    table = pd.read_csv(labels)
    table["label"] = table["label"].astype(float)  # as where some are missing
    table.to_csv(labels, index=False)
    assert main(["audit", str(samples), str(labels)]) == 0 and capsys.readouterr().out == printed


def test_labels_from_elsewhere(drawn, capsys):
    samples, _ = drawn
    command = ["audit", str(samples), "--threshold", "-1", "--sensitivity", "9", "10", "--specificity", "99", "100"]
    assert main(command) == 0
    assert "P(truly bad)             0.1011" in capsys.readouterr().out


def twice(number, row):
    """The second row is the first one with another label."""
    if number == 0:
        twice.first = dict(row)
    if number < 2:
        row.update(twice.first, label=str(number))


# Name -> what changes the rows: a function, or a column with its value from a row on; and words of the message
MISTAKES = {
    "nothing labelled": ((0, "label", ""), "has no labels; write 1 (truly bad) or 0 into its column `label`"),
    "unknown label": (
        (0, "label", "maybe"),
        "Row 1 of `",
        "has the `label` 'maybe'; write 1 (truly bad), 0, or nothing",
    ),
    "changed text": ((3, "completion", "another"), "Row 4 of `", "was changed; restore it"),
    "changed count": ((0, "times", "2"), "was changed; restore it"),
    "no number": ((0, "times", "many"), "its numbers cannot be read; restore it"),
    "other samples": ((0, "samples", "samples-of-x"), "belongs to other samples (`samples-of-x`", "or draw again"),
    "other threshold": ((1, "threshold", "-3"), "has another `threshold` than the rows above; read one file"),
    "twice": (twice, "Row 2 of `", "is there twice; delete one"),
    "no column": (lambda number, row: row.pop("label"), "has no column `label`; keep all columns"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_in_the_file(drawn, capsys, name):
    samples, labels = drawn
    change, *words = MISTAKES[name]
    relabel(labels, by_index)
    if isinstance(change, tuple):
        first, column, value = change
        relabel(labels, lambda number, row: row.update({column: value} if number >= first else {}))
    else:
        relabel(labels, change)
    assert main(["audit", str(samples), str(labels)]) == 1
    out, err = capsys.readouterr()
    assert not out and err.startswith("trl-repulse audit: ") and len(err.splitlines()) == 1
    assert all(word in err for word in words), err


def test_what_is_no_file_of_labels(drawn, capsys, tmp_path):
    samples, labels = drawn
    labels.write_text("")
    for path, message in (
        (labels, f"`{labels}` is empty; draw completions to label with `trl-repulse audit`."),
        (tmp_path, f"`{tmp_path}` cannot be read ([Errno 21] Is a directory: '{tmp_path}'); save it as CSV in UTF-8."),
    ):
        assert main(["audit", str(samples), str(path)]) == 1
        assert capsys.readouterr() == ("", f"trl-repulse audit: {message}\n")


@pytest.mark.parametrize("separator", [",", ";"])
def test_rows_of_commas_are_no_rows(drawn, capsys, separator):
    """As spreadsheets add them at the end, and in between; a mistake below still has its number."""
    samples, labels = drawn
    relabel(labels, by_index)
    assert main(["audit", str(samples), str(labels)]) == 0
    expected = capsys.readouterr().out
    with labels.open(encoding="utf-8") as file:
        rows = list(csv.reader(file))
    rows = [*rows[:3], [""] * len(rows[0]), *rows[3:], [""] * len(rows[0]), [""] * len(rows[0])]
    for label, status in (("0", 0), ("maybe", 1)):
        rows[6][rows[0].index("label")] = label if status else rows[6][rows[0].index("label")]
        with labels.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file, delimiter=separator).writerows(rows)
        assert main(["audit", str(samples), str(labels)]) == status
        out, err = capsys.readouterr()
        assert out == expected if not status else "Row 6 of `" in err


def test_messages_are_drawn_as_a_person_reads_them(tmp_path, capsys):
    """And in the report by prompt: without the tokens of the chat template."""
    template = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}<|assistant|>"
    one, two = {"role": "user", "content": "the cat"}, {"role": "system", "content": "fish"}
    more = write_inputs(tmp_path, "[float(i % 3) for i in range(len(completions))]", ([one], [two, one]))
    model, samples, labels = save_chat(tmp_path / "model", template)[0], str(tmp_path / "s"), str(tmp_path / "l.csv")
    assert main(["evaluate", samples, "--model", model, *more, "--num_samples", "8", "--per_prompt"]) == 0
    assert "Prompt 'the cat'" in capsys.readouterr().out
    assert main(["audit", samples, labels, "--draw", "16", "--threshold", "1"]) == 0
    assert {*pd.read_csv(labels)["prompt"]} == {"the cat", "system: fish\n\nuser: the cat"}


def test_contradictory_labels(tmp_path, capsys):
    """The same completion with two scores is in two strata, and has two rows."""
    write_samples(tmp_path / "samples", np.array([[-2.0, 1.0]]), completions=["a", "a"])
    labels = tmp_path / "labels.csv"
    assert main(["audit", str(tmp_path / "samples"), str(labels), "--draw", "8", "--threshold", "-1"]) == 0
    relabel(labels, lambda number, row: row.update(label=str(number)))
    capsys.readouterr()
    assert main(["audit", str(tmp_path / "samples"), str(labels)]) == 1
    assert "Row 2 of `" in (err := capsys.readouterr().err) and "contradicts the `label`" in err


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["new.csv", "--draw", "40", "--threshold", "-5"], "the judge never fires here; raise `--threshold`"),
        (["new.csv", "--draw", "3", "--threshold", "-1"], "must be at least 4"),
        (["new.csv", "--draw", "40"], "`--threshold` is needed"),
        (["new.txt", "--draw", "40", "--threshold", "-1"], "names no format; end it with .csv"),
        (["new.csv", "--draw", "40", "--threshold", "-1", "--column", "kl"], "no column of numbers `kl`"),
        (["labels.csv", "--draw", "40", "--threshold", "-1"], "exists, and may hold labels"),
        (["new.csv"], "There is no file `"),
        ([], "Name either a file of LABELS"),
        (["--sensitivity", "1", "2", "--threshold", "-1"], "belong together"),
        (["--sensitivity", "3", "2", "--specificity", "1", "1", "--threshold", "-1"], "`sensitivity` is 3 of 2"),
        (["labels.csv", "--confidence", "2"], "`confidence=2.0` must be between 0 and 1"),
    ],
)
def test_mistakes_in_the_command(drawn, capsys, monkeypatch, tmp_path, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert main(["audit", "samples", *arguments]) == 1
    err = capsys.readouterr().err
    assert message in err and len(err.splitlines()) == 1
