"""Prompts from a file or from the Hugging Face Hub."""

import csv
import json
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Dataset, IterableDataset, load_dataset
from transformers import PreTrainedTokenizerBase

from ._checks import check_dataset


LOCAL_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
# A name that ends like this is taken for a file even where there is none, and not for a data set on the Hub.
_FILE_SUFFIXES = (*LOCAL_SUFFIXES, ".arrow", ".gz", ".md", ".tsv", ".txt", ".xlsx", ".yaml", ".yml", ".zip", ".zst")


def load_prompts(
    path_or_name: str | Path,
    split: str = "train",
    config: str | None = None,
    streaming: bool = False,
    column: str = "prompt",
    as_conversation: bool = False,
) -> Dataset | IterableDataset:
    """
    Loads prompts, and refuses what a trainer could not use with one line that says what to mend.

    A prompt is plain text, or a conversation: a list of messages `{"role": ..., "content": ...}`. A file has one
    prompt a row in the column `"prompt"`; its other columns are kept, and reach custom reward functions. A `.json` file
    is a list of rows or has one row a line. CSV holds plain text only.

    Args:
        path_or_name (`str` or `Path`):
            A `.jsonl`, `.json`, `.csv` or `.parquet` file, or what [`~datasets.load_dataset`] takes: the name of a data
            set on the Hugging Face Hub, or a folder.
        split (`str`, *optional*, defaults to `"train"`):
            Split to load. A file has one, `"train"`.
        config (`str`, *optional*):
            Configuration of a data set on the Hub.
        streaming (`bool`, *optional*, defaults to `False`):
            Whether to stream. A file is read whole all the same. Rows that are streamed from the Hub are not checked.
        column (`str`, *optional*, defaults to `"prompt"`):
            Column that holds the prompts; it is renamed to `"prompt"`, in place of one of that name.
        as_conversation (`bool`, *optional*, defaults to `False`):
            Whether to make a plain prompt the message of a user, so that the tokenizer's chat template is applied.
            Conversations stay as they are.

    Returns:
        [`~datasets.Dataset`], or [`~datasets.IterableDataset`] if `streaming`: rows with a `"prompt"`.

    Raises:
        `ValueError`: If a file is missing, has another suffix, cannot be read or has no such split; if there is no row
            or no such column; if a prompt is empty, or neither text nor messages.

    Example:

    ```python
    >>> from trl_repulse.data import load_prompts

    >>> prompts = load_prompts("prompts.jsonl")
    >>> prompts[0]["prompt"]
    ```
    """
    name, path = str(path_or_name), Path(path_or_name).expanduser()
    named_as_file = path.suffix.lower() in _FILE_SUFFIXES or name.startswith(("/", "./", "../", "~"))
    if path.is_file() or (named_as_file and not path.is_dir()):
        dataset = _load_file(path, split, column)
        dataset = dataset.to_iterable_dataset() if streaming else dataset
    else:
        dataset = _rename(load_dataset(name, config, split=split, streaming=streaming), column, name)
        check_dataset(dataset, name)
        if isinstance(dataset, Dataset):
            _check_prompts(dataset["prompt"], name)
    return dataset.map(_as_conversation) if as_conversation else dataset


def drop_long_prompts(
    dataset: Dataset | IterableDataset,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    chat_template_kwargs: dict[str, Any] | None = None,
) -> Dataset | IterableDataset:
    """
    Leaves out the prompts that have more tokens than `max_length`, and says how many.

    A prompt that was cut would be another prompt, and one that exceeds the model's context ends a run in the middle.

    Args:
        dataset ([`~datasets.Dataset`] or [`~datasets.IterableDataset`]):
            Rows with a `"prompt"`, plain text or messages.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            The policy's tokenizer; messages are counted in its chat template.
        max_length (`int`):
            Tokens a prompt may have.
        chat_template_kwargs (`dict`, *optional*):
            Further variables of the template, as the trainer's configuration has them.

    Returns:
        [`~datasets.Dataset`] or [`~datasets.IterableDataset`]: the other rows. A stream is filtered while it is read.

    Raises:
        `ValueError`: If `max_length` is less than 1 or no prompt is left.
    """
    if max_length < 1:
        raise ValueError(f"`max_prompt_length={max_length}` must be at least 1.")

    def fits(row: dict[str, Any]) -> bool:
        text, options = row["prompt"], {}
        if not isinstance(text, str):
            variables = chat_template_kwargs or {}
            text = tokenizer.apply_chat_template(text, tokenize=False, add_generation_prompt=True, **variables)
            options = {"add_special_tokens": False}  # the template wrote them
        return len(tokenizer(text, **options)["input_ids"]) <= max_length

    kept = dataset.filter(fits)
    if isinstance(kept, Dataset) and len(kept) < len(dataset):
        if len(kept) == 0:
            raise ValueError(f"`max_prompt_length={max_length}` leaves out every prompt; raise it.")
        warnings.warn(
            f"{len(dataset) - len(kept)} of {len(dataset)} prompts have more than `max_prompt_length={max_length}` "
            "tokens and are left out."
        )
    return kept


def _as_conversation(row: dict[str, Any]) -> dict[str, Any]:
    prompt = row["prompt"]
    return {"prompt": [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt}


def _rename(dataset: Dataset | IterableDataset, column: str, name: str) -> Dataset | IterableDataset:
    if column == "prompt":
        return dataset
    columns = dataset.column_names
    if columns is not None:
        _check_column(columns, column, name)
        dataset = dataset.remove_columns("prompt") if "prompt" in columns else dataset
    return dataset.rename_column(column, "prompt")


def _check_column(columns: Iterable[str], column: str, name: str) -> None:
    if column not in columns:
        raise ValueError(
            f"`{name}` has no column `{column}`, only {', '.join(columns) or 'no columns'}; name one of those."
        )


def _load_file(path: Path, split: str, column: str) -> Dataset:
    readable = f"{', '.join(LOCAL_SUFFIXES[:-1])} or {LOCAL_SUFFIXES[-1]}"
    if not path.is_file():
        raise ValueError(f"There is no file `{path}`; give the path of a {readable} file of prompts.")
    if path.suffix.lower() not in LOCAL_SUFFIXES:
        raise ValueError(f"`{path}` has the suffix '{path.suffix}'; convert it to a {readable} file.")
    if split != "train":
        raise ValueError(f"`{path}` is one file with one split, 'train', and has no split '{split}'; ask for 'train'.")
    try:
        rows = _read_rows(path)
    except (UnicodeDecodeError, csv.Error, pa.ArrowInvalid) as error:
        kind = path.suffix[1:].lower()
        raise ValueError(f"`{path}` cannot be read as {kind} ({error}); mend the file, or its suffix.") from error
    columns = {name: [row.get(name) for row in rows] for name in dict.fromkeys(name for row in rows for name in row)}
    if column != "prompt":
        _check_column(columns, column, str(path))
        columns["prompt"] = columns.pop(column)
    # Before Arrow meets the column: it refuses text beside messages, without saying where
    _check_prompts(columns.get("prompt", []), str(path))
    try:
        dataset = Dataset.from_dict(columns)
    except (OverflowError, UnicodeEncodeError) as error:
        raise ValueError(
            f"A column of `{path}` has a value that a data set cannot hold ({error}): a whole number of more than 64 bits, or "
            "half of a surrogate pair in a text; correct it, or write numbers as text."
        ) from error
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise ValueError(f"A column of `{path}` mixes types ({error}); give each column one type.") from error
    check_dataset(dataset, str(path))
    return dataset


def _read_rows(path: Path) -> list[dict[str, Any]]:
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        return pq.read_table(path).to_pylist()
    if suffix == ".csv":
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = list(csv.DictReader(file))
        for number, row in enumerate(rows, 1):
            if None in row:
                raise ValueError(
                    f"Row {number} of `{path}` has more fields than the header; put text that holds a comma in quotes."
                )
        return rows
    text = path.read_text(encoding="utf-8-sig")
    if text.lstrip().startswith("["):
        rows = [*enumerate(_parse(text, f"`{path}`"), 1)]
    else:  # split at "\n" alone: JSON strings may hold other line separators
        lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
        rows = [(number, _parse(line, f"Line {number} of `{path}`")) for number, line in lines]
    for number, row in rows:
        if not isinstance(row, dict):
            raise ValueError(f'Row {number} of `{path}` is not an object; write each row as {{"prompt": ...}}.')
    return [row for _, row in rows]


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not valid JSON ({error}); write one object a line.") from error


def _check_prompts(prompts: Iterable[Any], name: str) -> None:
    """Raises `ValueError` naming the first row whose prompt is empty, no text and no conversation, or of another kind."""
    kind = None
    for number, prompt in enumerate(prompts, 1):
        where = f"Row {number} of `{name}`"
        if prompt is None or prompt == [] or (isinstance(prompt, str) and not prompt.strip()):
            raise ValueError(f"{where} has an empty `prompt`; fill it in or drop the row.")
        messages = isinstance(prompt, list) and all(_is_message(message) for message in prompt)
        if not (isinstance(prompt, str) or messages):
            raise ValueError(
                f"{where} has a `prompt` that is neither text nor a list of messages "
                '{"role": ..., "content": ...} with text in both; write it as one or the other.'
            )
        kind = kind or type(prompt)
        if type(prompt) is not kind:
            raise ValueError(f"{where} differs in kind from row 1; make every `prompt` text, or every one messages.")


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))
