"""Data sets of rows that keep their nested values as they are."""

import json
import warnings
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pyarrow as pa
from datasets import Dataset, Features
from datasets.features.features import register_feature


# Arrow's errors for a column that it cannot hold
UNFIT = (OverflowError, UnicodeEncodeError, RecursionError, pa.ArrowInvalid, pa.ArrowTypeError)


@dataclass
class ExactJson:
    """
    Type of a column of lists and objects, stored as JSON text and read back unchanged.

    Arrow has one structure for all rows: each row gets the keys of the others, and 1 next to 2.5 becomes 1.0.
    [`~datasets.Json`] changes the last digits of floats (datasets 5.2).
    """

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


def from_columns(columns: dict[str, list[Any]]) -> Dataset:
    """A data set of columns; lists and objects that Arrow would change are [`ExactJson`]. Raises one of `UNFIT` if a
    column does not fit."""
    return Dataset.from_dict(columns, features=Features({name: _type_of(column) for name, column in columns.items()}))


def _type_of(values: list[Any]) -> Any:
    nested = all(isinstance(value, dict | list) for value in values if value is not None)
    try:
        dataset = Dataset.from_dict({"values": values})
    except UNFIT:
        if nested:
            return ExactJson()
        raise
    # Compared as text: 1 == 1.0, and objects with keys in another order are equal
    if nested and any(repr(a) != repr(b) for a, b in zip(values, dataset["values"], strict=True)):
        return ExactJson()
    return dataset.features["values"]
