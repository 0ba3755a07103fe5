"""Tables of targets, as AdvBench has them: one row a target, with the columns `goal` and `target`."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..._tables import read_csv


@dataclass(frozen=True)
class TableRow:
    """
    A target.

    Args:
        number (`int`):
            Its row, from 1.
        goal (`str`):
            What is asked for; empty in the scenario `"strings"`.
        target (`str`):
            Beginning of the answer to be provoked.
        fault (`str`, *optional*):
            Why it cannot be attacked.
    """

    number: int
    goal: str
    target: str
    fault: str | None = None


def load_table(
    rows_or_csv: str | Path | Iterable[Mapping[str, Any]],
    scenario: Literal["behaviors", "strings"] = "behaviors",
    on_bad_row: Literal["error", "skip"] = "error",
    max_targets: int | None = None,
) -> list[TableRow]:
    """
    Reads a table of targets.

    Args:
        rows_or_csv (`str`, `Path` or `Iterable` of mappings):
            A CSV file with a header, or rows, for instance a [`~datasets.Dataset`].
        scenario (`str`, *optional*, defaults to `"behaviors"`):
            `"behaviors"` needs the columns `goal` and `target`, `"strings"` needs `target` alone.
        on_bad_row (`str`, *optional*, defaults to `"error"`):
            Whether rows without a text in these columns are refused, or kept with their `fault`.
        max_targets (`int`, *optional*):
            Rows that are read.

    Returns:
        `list[TableRow]`

    Raises:
        `ValueError`: If the file is missing or cannot be read without doubt (a quote that is not balanced, two columns of one
            name, a row with another number of fields than the header), there is no row or no such column, or rows are refused.
    """
    where = f"`{rows_or_csv}`" if isinstance(rows_or_csv, (str, Path)) else "The table"
    if isinstance(rows_or_csv, (str, Path)):
        path = Path(rows_or_csv)
        if not path.is_file():
            raise ValueError(f"There is no file `{path}`; give a CSV file with a header, or rows.")
        rows: list[dict[str, Any]] = [*read_csv(path)]
    else:
        rows = [dict(row) for row in rows_or_csv]
    columns = ["goal", "target"] if scenario == "behaviors" else ["target"]
    if not rows:
        raise ValueError(f"{where} has no rows; give it at least one, with {' and '.join(map(repr, columns))}.")
    found = list(dict.fromkeys(str(name) for row in rows for name in row))
    for name in columns:
        if name not in found:
            raise ValueError(
                f"{where} has no column '{name}', only {', '.join(map(repr, found))}; name its columns in a first line, "
                f"{' and '.join(map(repr, columns))} among them."
            )
    table = []
    for number, row in enumerate(rows[:max_targets], 1):
        texts = {name: row.get(name) for name in columns}
        empty = [name for name, text in texts.items() if not isinstance(text, str) or text.strip().lower() in _EMPTY]
        texts = {name: "" if name in empty else text for name, text in texts.items()}
        fault = f"no {' and no '.join(empty)}" if empty else None
        table.append(TableRow(number, texts.get("goal", ""), texts["target"], fault))
    bad = [row for row in table if row.fault is not None]
    if bad and on_bad_row == "error":
        shown = ", ".join(f"{row.number} ({row.fault})" for row in bad[:10]) + (", ..." if len(bad) > 10 else "")
        raise ValueError(f"{where} has rows that cannot be attacked: {shown}; fix them or set `on_bad_row='skip'`.")
    return table


_EMPTY = ("", "nan")  # an empty cell, as it is read and as it is often written


def derive_seed(seed: int, row: TableRow, purpose: str) -> int:
    """
    A seed that depends on the target's texts and on nothing else of the table.

    Args:
        seed (`int`):
            Seed of the evaluation.
        row (`TableRow`):
            The target.
        purpose (`str`):
            What the random numbers are for.

    Returns:
        `int`: from 0 to 2**63 - 1.
    """
    digest = hashlib.sha256(json.dumps([seed, row.goal, row.target, purpose]).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
