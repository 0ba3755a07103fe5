"""Strict readers of CSV and JSON files written by users, where what could be misread is refused, and data sets of rows that keep their
nested values as they are."""

import csv
import io
import json
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
from datasets import Dataset, Features
from datasets.features.features import register_feature


_LINE_BREAK = re.compile(r"\r\n|[\r\n]")
# Arrow's errors for a column that it cannot hold
UNFIT = (OverflowError, UnicodeEncodeError, RecursionError, pa.ArrowInvalid, pa.ArrowTypeError)


def read_csv(path: Path) -> list[dict[str, str]]:
    """
    Rows of a CSV file with a header, by column name. Every field is text: no numbers, no missing values.

    A quoted field may span lines, so two stray quotes can turn several rows into one field. That cannot be told from
    intended text; a warning is given if the lines of a field look like rows. Raises `ValueError` if the file is not
    UTF-8, a quote is not balanced, two columns share a name, or a row has more or fewer fields than the header.
    """
    # Strict: pandas and pyarrow add text after a closing quote to the field, and rows with it
    reader = csv.reader(io.StringIO(_read_text(path), newline=""), strict=True)
    header: list[str] = []
    rows, doubtful, next_line = [], [], 1
    try:
        for fields in reader:
            line, next_line = next_line, reader.line_num + 1
            if not any(fields):  # an empty line, or a row of commas, as spreadsheets add
                continue
            if not header:
                header = fields
                check_names(header, path)
                if len(header) == 1 and re.search(r"[;\t]", header[0]):
                    raise ValueError(
                        f"`{path}` has one column, named {header[0]!r}; separate its fields with commas (a spreadsheet may write semicolons)."
                    )
            elif len(fields) != len(header):
                than = "more" if len(fields) > len(header) else "fewer"
                raise ValueError(
                    f"Row {len(rows) + 1} of `{path}`, at line {line}, has {than} fields than the header ({len(fields)}, not "
                    f"{len(header)}); put text that holds a comma in quotes, and leave no field out."
                )
            else:
                rows.append(dict(zip(header, fields, strict=True)))
                if any(_looks_like_rows(text, place, len(header)) for place, text in enumerate(fields)):
                    doubtful.append(f"{line} to {reader.line_num}")
    except csv.Error as error:
        remedy = 'close it, and write a quote inside quotes as ""'
        if "field limit" in str(error):
            remedy += "; a field that is so long on purpose needs a file of JSON lines"
        raise ValueError(
            f"Line {reader.line_num} of `{path}`, in the row that begins at line {next_line}, has a quote that is not balanced "
            f"({error}): {remedy}."
        ) from error
    if doubtful:
        more = ", ..." if len(doubtful) > 3 else ""
        warnings.warn(
            f"`{path}` has fields that span lines which look like rows of their own (lines {', '.join(doubtful[:3])}{more}). If "
            "they are rows, two quotes there are stray: remove them."
        )
    return rows


def read_json(path: Path) -> list[dict[str, Any]]:
    """Rows of a JSON file: a list of objects, or one object a line. Raises `ValueError` if the file is not UTF-8 or
    not JSON, is nested too deeply, repeats a key, or has a row that is no object."""
    text = _read_text(path)
    is_list = text.lstrip().startswith("[")
    rows = enumerate(_parse(text, f"`{path}`"), 1) if is_list else read_json_lines(path, text)
    objects = []
    for number, row in rows:
        if not isinstance(row, dict):
            raise ValueError(f'Row {number} of `{path}` is not an object; write each row as {{"prompt": ...}}.')
        objects.append(row)
    return objects


def read_json_lines(path: Path, text: str | None = None) -> Iterator[tuple[int, Any]]:
    """Line number and value of each non-empty line of a file of JSON lines, or of its `text`. Raises `ValueError` like [`read_json`]."""
    text = _read_text(path) if text is None else text
    for number, line in enumerate(_LINE_BREAK.split(text), 1):  # JSON strings may hold other line separators
        if line.strip():
            yield number, _parse(line, f"Line {number} of `{path}`")


def check_names(columns: list[str], path: Path) -> None:
    """Raises `ValueError` if two columns share a name."""
    for name in columns:
        if columns.count(name) > 1:
            which = f"named '{name}'; rename or remove all but one" if name else "without a name; name or remove them"
            raise ValueError(f"`{path}` has {columns.count(name)} columns {which}.")


def _read_text(path: Path) -> str:
    """The file's text without a byte-order mark; line breaks stay as they are."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ValueError(f"Line {line} of `{path}` is not UTF-8 text ({error}); save the file as UTF-8.") from error
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        raise ValueError(f"Line {line} of `{path}` has a NUL byte, so it is not UTF-8 text; save the file as UTF-8.")
    return text


def _looks_like_rows(text: str, place: int, columns: int) -> bool:
    """Whether a field, number `place` (from 0) of a row, looks like rows that two stray quotes joined: its first line has the parts from
    `place` on, its last those up to `place`, others all `columns`, and none is empty or begins with a space. Never true of one column,
    where it would hold for any text."""
    if columns == 1 or not _LINE_BREAK.search(text):
        return False
    lines = [line.split(",") for line in _LINE_BREAK.split(text)]
    counts = [columns - place, *[columns] * (len(lines) - 2), place + 1]
    parts = [part for line in lines for part in line]
    return [len(line) for line in lines] == counts and all(part and not part[0].isspace() for part in parts)


def _parse(text: str, where: str) -> Any:
    """The value of a JSON text. Raises a `ValueError` that begins with `where`."""
    try:
        return json.loads(text, object_pairs_hook=_without_repeats)
    except ValueError as error:  # also for numbers with thousands of digits
        raise ValueError(f"{where} is not valid JSON ({error}); write one object a line.") from error
    except RecursionError:
        raise ValueError(f"{where} is nested too deeply to be read; flatten it, or write the value as text.") from None


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON. Raises `ValueError` for a key that is there twice, of which `json` would keep the last."""
    unique: dict[str, Any] = {}
    for key, value in pairs:
        if key in unique:
            raise ValueError(
                f"an object has the key '{key}' twice, with {unique[key]!r:.40} and {value!r:.40}: keep one"
            )
        unique[key] = value
    return unique


@dataclass
class ExactJson:
    """Type of a column of lists and objects, or of whole numbers beside others, stored as JSON text and read back unchanged. Arrow has one
    structure for all rows: each row gets the keys of the others, and 1 next to 2.5 becomes 1.0. [`~datasets.Json`] changes the last digits
    of floats (datasets 5.2). The methods are those that `datasets` calls of a column's type."""

    pa_type: ClassVar[Any] = pa.string()
    _type: str = field(default="ExactJson", init=False, repr=False)

    def __call__(self) -> Any:
        return self.pa_type

    def encode_example(self, value: Any) -> str:
        return json.dumps(value, ensure_ascii=False)

    def decode_example(self, value: str, token_per_repo_id: dict[str, Any] | None = None) -> Any:
        return json.loads(value)


with warnings.catch_warnings(action="ignore"):  # registering is experimental (datasets 5.2)
    register_feature(ExactJson, "ExactJson")


def columns_of(rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Values by column name, `None` where a row lacks one."""
    return {name: [row.get(name) for row in rows] for name in dict.fromkeys(name for row in rows for name in row)}


def from_columns(columns: dict[str, list[Any]], of: str = "the data set") -> Dataset:
    """A data set of columns; columns of lists, objects or mixed numbers that Arrow would change are [`ExactJson`]. Raises a `ValueError` that names
    a column that a data set cannot hold; `of` says in the message where it comes from."""
    features = {}
    for name, values in columns.items():
        try:
            features[name] = _type_of(values)
            if isinstance(features[name], ExactJson):  # only to see whether it can be stored
                Dataset.from_dict({name: values}, features=Features({name: features[name]}))
        except UNFIT as error:
            fault, remedy = f"mixes types ({error})", "give each column one type"
            if isinstance(error, RecursionError) or "Recursion level" in str(error):
                fault, remedy = "has values that are nested too deeply", "flatten them, or write them as text"
            elif isinstance(error, OverflowError | UnicodeEncodeError):
                fault = f"has a value that a data set cannot hold ({error})"
                remedy = "a whole number of more than 63 bits, or half of a surrogate pair in a text; correct it, or write numbers as text"
            raise ValueError(f"The column `{name}` of {of} {fault}: {remedy}.") from error
    return Dataset.from_dict(columns, features=Features(features))


def _type_of(values: list[Any]) -> Any:
    """The type of a column: that of Arrow if it keeps all values as they are, else [`ExactJson`]. Raises as Arrow does for what neither can hold."""
    nested = all(isinstance(value, dict | list) for value in values if value is not None)
    try:
        dataset = Dataset.from_dict({"values": values})
    except UNFIT:
        if nested:
            return ExactJson()
        raise
    # Compared as text: 1 == 1.0, and objects with keys in another order are equal
    exact = nested or len({bool, int, float} & {*map(type, values)}) > 1
    if exact and any(repr(a) != repr(b) for a, b in zip(values, dataset["values"], strict=True)):
        return ExactJson()
    return dataset.features["values"]
