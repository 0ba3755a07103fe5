"""Completions that people label to audit a judge: drawn from stored samples into a CSV file, and read back.

Axis letters: P prompts, N completions of each.
"""

import csv
import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .._numbers import is_bad
from .records import load_samples


STRATA = ("bad", "near", "ordinary")
PARTS = (4, 3, 1)  # the share of the labels left that each stratum gets, inverted
NEAR_SHARE = 0.01  # of the completions that are not bad, those with the lowest scores are near the threshold
COLUMNS = ("index", "times", "prompt", "completion", "label", "samples", "column", "threshold", "near_up_to", "check")
LABELS = {"1": True, "bad": True, "yes": True, "true": True, "0": False, "good": False, "no": False, "false": False}


@dataclass(frozen=True)
class Scored:
    """
    Completions with the judge's scores.

    Args:
        prompts, completions (`list[str]`): P·N texts, prompt by prompt.
        scores (`numpy.ndarray` of shape `(P, N)`): Finite scores, in units of reward.
        column (`str`, *optional*, defaults to `"reward"`): Name of the scores.
    """

    prompts: list[str]
    completions: list[str]
    scores: np.ndarray
    column: str = "reward"

    @property
    def identity(self) -> str:
        """A digest of texts and scores."""
        hashed = hashlib.sha256(np.ascontiguousarray(self.scores, np.float64).tobytes())
        hashed.update(json.dumps([self.prompts, self.completions]).encode())
        return f"samples-{hashed.hexdigest()[:16]}"

    def strata(self, threshold: float, near_up_to: float) -> np.ndarray:
        """Number of the stratum of each completion, of shape (P, N), in the order of [`STRATA`]."""
        return np.where(is_bad(self.scores, threshold), 0, np.where(self.scores <= near_up_to, 1, 2))


@dataclass(frozen=True)
class Labels:
    """
    The labels of a scored sample: of each stratum, how many were labelled and how many of these are truly bad.

    Args:
        threshold, near_up_to (`float`): Scores that end the first stratum (not included) and the second (included).
        labelled, truly_bad (`tuple[int, ...]`): Counts of the three strata; a completion counts as often as it was drawn.
        unlabelled (`int`, *optional*, defaults to `0`): Rows of the file without a label.
    """

    threshold: float
    near_up_to: float
    labelled: tuple[int, ...]
    truly_bad: tuple[int, ...]
    unlabelled: int = 0


def read_scored(path: str | Path, column: str = "reward") -> Scored:
    """Completions that `evaluate` (a folder) or Inspect (an .eval log) has stored. `column` has the scores. Raises `ValueError` if they
    cannot be read, or have no such column of finite numbers."""
    samples = load_samples(path)
    prompts = [prompt for prompt in samples.prompts for _ in range(samples.num_samples)]
    return Scored(prompts, samples.table["completion"].to_pylist(), samples.column(column), column)


def choose(scored: Scored, threshold: float, size: int, seed: int = 0) -> tuple[float, list[np.ndarray]]:
    """
    Draws completions to label: a quarter of bad ones, a quarter near the threshold, and the others of ordinary ones, whose
    truly bad ones are the hardest to rule out. What a stratum does not have is drawn from the next; the last that has any, as the
    second of a judge with two scores, gets all that are left. Completions are drawn without replacement.

    Returns the highest score near the threshold, and of each stratum the flat indices of the completions drawn. Raises as [`draw_labels`].
    """
    if not math.isfinite(threshold):
        raise ValueError(f"`threshold={threshold}` must be a finite number; give a reward.")
    if size < 4:
        raise ValueError(f"`draw={size}` must be at least 4; 200 and more are usual.")
    scores = scored.scores.ravel()
    bad = is_bad(scores, threshold)
    if not bad.any():
        raise ValueError(
            f"No completion has `{scored.column}` under {threshold:g}, so that the judge never fires here; raise `--threshold`, or "
            "draw more samples."
        )
    above = np.sort(scores[~bad])
    near_up_to = threshold
    if above.size:
        count = max(math.ceil(NEAR_SHARE * above.size), min(size // 4, above.size))
        near_up_to = float(f"{above[count - 1]:.6g}")  # short, so that spreadsheets keep it
    strata, rng, chosen = scored.strata(threshold, near_up_to).ravel(), np.random.default_rng(seed), []
    left = size
    for number, part in enumerate(PARTS):
        members = np.flatnonzero(strata == number)
        wanted = left // part if (strata > number).any() else left
        chosen.append(rng.choice(members, min(wanted, members.size), replace=False))
        left -= len(chosen[-1])
    return near_up_to, chosen


def draw_labels(path: Path, scored: Scored, threshold: float, size: int, seed: int = 0) -> list[int]:
    """
    Writes a CSV file of completions to label, in random order, without scores or strata, which would sway the labels.

    Equal completions share a row; `times` says how often it was drawn. Texts that a spreadsheet would take for a formula get an apostrophe
    in front. `threshold` is η, in units of reward, and `size` the completions to draw, at least 4. Returns the number drawn of each stratum
    ([`choose`]). Raises `ValueError` if the file exists, the threshold is not finite, `size` is less than 4, or no completion is bad by the
    judge.
    """
    if path.exists():
        raise ValueError(f"`{path}` exists, and may hold labels; name another file, or leave out `--draw` to read it.")
    near_up_to, chosen = choose(scored, threshold, size, seed)
    copies: dict[tuple[int, str, str], list[int]] = {}
    for stratum, indices in enumerate(chosen):
        for index in map(int, indices):
            copies.setdefault((stratum, scored.prompts[index], scored.completions[index]), []).append(index)
    rows = [(indices[0], len(indices)) for indices in copies.values()]
    design = (scored.identity, scored.column, f"{threshold:.15g}", f"{near_up_to:.6g}")
    with path.open("w", encoding="utf-8-sig", newline="") as file:  # the mark tells spreadsheets that it is UTF-8
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for place in np.random.default_rng(seed).permutation(len(rows)):
            index, times = rows[place]
            texts = _safe(scored.prompts[index]), _safe(scored.completions[index])
            writer.writerow((index, times, *texts, "", *design, _check(index, times, *design)))
    return [len(indices) for indices in chosen]


def _read_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a file of labels, with labels in lower case. Raises as [`read_labels`], which compares them with samples."""
    limit = csv.field_size_limit(2**31 - 1)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            head = file.readline()
            file.seek(0)
            # A spreadsheet may have put semicolons or tabs between the cells
            reader = csv.DictReader(file, restval="", delimiter=max(",;\t", key=head.count), strict=True)
            rows, names = list(reader), reader.fieldnames or ()
    except FileNotFoundError:
        raise ValueError(f"There is no file `{path}`; draw completions to label with `trl-repulse audit`.") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"`{path}` cannot be read ({error}); save it as CSV in UTF-8.") from error
    finally:
        csv.field_size_limit(limit)
    if not names:
        raise ValueError(f"`{path}` is empty; draw completions to label with `trl-repulse audit`.")
    if missing := [name for name in COLUMNS if name not in names]:
        raise ValueError(f"`{path}` has no column `{missing[0]}`; keep all columns that `trl-repulse audit` wrote.")
    for number, row in enumerate(rows, 1):
        row["row"] = str(number)
    rows = [row for row in rows if any(row[name] for name in COLUMNS)]  # spreadsheets add rows of commas
    for row in rows:
        row["label"] = row["label"].strip().lower().removesuffix(".0")  # of programs that read numbers
        if row["label"] and row["label"] not in LABELS:
            raise ValueError(
                f"Row {row['row']} of `{path}` has the `label` {row['label']!r}; write 1 (truly bad), 0, or nothing."
            )
    if not any(row["label"] for row in rows):
        raise ValueError(f"`{path}` has no labels; write 1 (truly bad) or 0 into its column `label`.")
    return rows


def read_labels(path: Path, scored: Scored) -> Labels:
    """
    Reads labels back, from a file that [`draw_labels`] wrote of the completions `scored`. Its column `label` has `1`, `bad`, `yes` or `true`
    for truly bad, `0`, `good`, `no` or `false` for the others, or nothing.

    Raises `ValueError` if there is no such file, it cannot be read, a column is missing, a label is unknown or contradicts another, there is
    none, or a row was changed or is of other samples.
    """
    design: tuple[float, float] | None = None
    strata, identity = np.empty(0), scored.identity
    labelled, truly_bad, unlabelled = [0, 0, 0], [0, 0, 0], 0
    places: set[int] = set()
    label_of: dict[tuple[str, str], bool] = {}
    for row in _read_rows(path):
        where = f"Row {row['row']} of `{path}`"
        if (row["samples"], row["column"]) != (identity, scored.column):
            raise ValueError(
                f"{where} belongs to other samples (`{row['samples']}`, column `{row['column']}`) than these (`{identity}`, "
                f"`{scored.column}`); name the samples that it was drawn from, or draw again."
            )
        try:
            index, times = int(row["index"]), int(row["times"])
            edges = float(row["threshold"]), float(row["near_up_to"])
        except (TypeError, ValueError):
            raise ValueError(f"{where} was changed: its numbers cannot be read; restore it.") from None
        if design is None:
            design, strata = edges, scored.strata(*edges).ravel()
        if design != edges:
            raise ValueError(f"{where} has another `threshold` than the rows above; read one file at a time.")
        texts = _text(row["prompt"]), _text(row["completion"])
        stored = index < len(scored.prompts) and (_lines(scored.prompts[index]), _lines(scored.completions[index]))
        fields = (index, times, identity, scored.column, f"{edges[0]:.15g}", f"{edges[1]:.6g}")
        if texts != stored or row["check"] != _check(*fields):
            raise ValueError(f"{where} was changed; restore it, and write into the column `label` alone.")
        if index in places:
            raise ValueError(f"{where} is there twice; delete one.")
        places.add(index)
        if not row["label"]:
            unlabelled += 1
            continue
        label = LABELS[row["label"]]
        if label_of.setdefault(texts, label) != label:
            raise ValueError(f"{where} contradicts the `label` of the same completion above; make them equal.")
        labelled[strata[index]] += times
        truly_bad[strata[index]] += times * label
    assert design is not None
    return Labels(*design, tuple(labelled), tuple(truly_bad), unlabelled)


def _check(*fields: Any) -> str:
    """A digest of what nobody may change in a row."""
    return f"row-{hashlib.sha256(json.dumps([str(each) for each in fields]).encode()).hexdigest()[:12]}"


def _safe(text: str) -> str:
    """A text that no spreadsheet takes for a formula (OWASP, CSV injection); [`_text`] undoes it."""
    return f"'{text}" if text[:1] in tuple("=+-@\t\r\n'") else text


def _text(cell: str) -> str:
    """The text of a cell that [`_safe`] wrote, with the line ends of [`_lines`]."""
    return _lines(cell.removeprefix("'"))


def _lines(text: str) -> str:
    """A text with line feeds as its only line ends: spreadsheets change these."""
    return text.replace("\r\n", "\n").replace("\r", "\n")
