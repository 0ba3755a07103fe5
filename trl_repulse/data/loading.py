"""Prompts from a file or from the Hugging Face Hub."""

import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Dataset, IterableDataset, Value, load_dataset, load_from_disk
from datasets.exceptions import DatasetsError
from huggingface_hub.errors import HFValidationError
from transformers import PreTrainedTokenizerBase

from ._checks import check_dataset
from ._prompts import check_conversations, messages_fault, render
from ._tables import check_names, columns_of, from_columns, read_csv, read_json


LOCAL_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
# Names with these suffixes are files, never data sets on the Hub, even if the file is missing.
_FILE_SUFFIXES = (*LOCAL_SUFFIXES, ".arrow", ".gz", ".md", ".tsv", ".txt", ".xlsx", ".yaml", ".yml", ".zip", ".zst")

CONTEXT = "ContextString"  # HarmBench's column of a text that its `Behavior` is about, empty in most rows
_NAME_SPLIT = (
    "name one that it has with `load_prompts(split=...)`, on the command line `--split` (in training, `--dataset_train_split`, "
    "and for held-out prompts `--dataset_test_split`)"
)


def load_prompts(
    path_or_name: str | Path,
    split: str = "train",
    config: str | None = None,
    streaming: bool = False,
    column: str = "prompt",
    as_conversation: bool = False,
) -> Dataset | IterableDataset:
    """
    Loads prompts and checks that a trainer can use them.

    A prompt is plain text, or a conversation: a list of messages `{"role": ..., "content": ...}`. A file has one
    prompt a row in the column `"prompt"`; other columns are kept and passed to custom reward functions. A `.json` file
    is a list of rows, or has one row a line. CSV holds plain text only: numbers and `NA` are read as text.

    Args:
        path_or_name (`str` or `Path`): A `.jsonl`, `.json`, `.csv` or `.parquet` file, a folder, or the name of a data set on the Hub.
        split (`str`, *optional*, defaults to `"train"`): Split to load. A file only has `"train"`.
        config (`str`, *optional*): Configuration of a data set on the Hub.
        streaming (`bool`, *optional*, defaults to `False`):
            Whether to stream. A file is still read whole. Rows streamed from the Hub are checked during training.
        column (`str`, *optional*, defaults to `"prompt"`):
            Column with the prompts; it is renamed to `"prompt"` and replaces a column of that name. HarmBench's `"Behavior"` gets
            the row's `"ContextString"` in front of it, as HarmBench asks.
        as_conversation (`bool`, *optional*, defaults to `False`):
            Whether to turn a plain prompt into a user's message, so that the chat template is applied.

    Returns:
        [`~datasets.Dataset`], or [`~datasets.IterableDataset`] if `streaming`: Rows with a `"prompt"`.

    Raises:
        `ValueError`: If a file is missing, has another suffix, cannot be read or has no such split; if a quote in CSV
            is not balanced, or a column or an object's key is repeated; if there are no rows or no such column; if a
            prompt is empty, or neither text nor messages.
    """
    name, path = str(path_or_name), Path(path_or_name).expanduser()
    if not name.strip():
        raise ValueError("The name of the prompts is empty; give the path of a file, or the name of a data set.")
    named_as_file = path.suffix.lower() in _FILE_SUFFIXES or name.startswith(("/", "./", "../", "~"))
    if path.is_file() or (named_as_file and not path.is_dir()):
        dataset = _load_file(path, split, column)
        dataset = dataset.to_iterable_dataset() if streaming else dataset
    else:
        place = str(path) if path.is_dir() else name
        dataset = _with_prompts(_load_by_name(place, path, config, split, streaming), column, name)
    dataset.info.dataset_name = path.name if path.is_file() else name  # by which reports know it
    if column == "Behavior" and CONTEXT in (dataset.column_names or ()):
        dataset = dataset.map(lambda row: {"prompt": in_context(row["prompt"], row[CONTEXT])})
    if not as_conversation or not (dataset.features is None or isinstance(dataset.features["prompt"], Value)):
        return dataset

    def as_messages(row: dict[str, Any]) -> dict[str, Any]:
        prompt = row["prompt"]
        return {"prompt": [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt}

    return dataset.map(as_messages)


def in_context(behavior: str, context: str | None) -> str:
    """A behaviour of HarmBench behind its context, as HarmBench asks for it."""
    return f"{context}\n\n---\n\n{behavior}" if context else behavior


def drop_long_prompts(
    dataset: Dataset | IterableDataset,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    chat_template_kwargs: dict[str, Any] | None = None,
) -> Dataset | IterableDataset:
    """
    Removes prompts with more than `max_length` tokens, and warns how many.

    Prompts are not cut, which would change them, and one that exceeds the model's context would end a run.

    Args:
        dataset ([`~datasets.Dataset`] or [`~datasets.IterableDataset`]):
            Rows with a `"prompt"`, plain text or messages. A stream is filtered while it is read.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]): The policy's; its chat template is applied to messages.
        max_length (`int`): Most tokens of a prompt.
        chat_template_kwargs (`dict`, *optional*): Further variables of the template, as in training.

    Raises:
        `ValueError`: If `max_length` is less than 1, no prompt is left, or the chat template is missing or fails.
    """
    if max_length < 1:
        raise ValueError(f"`max_prompt_length={max_length}` must be at least 1.")

    def fits(row: dict[str, Any], index: int) -> bool:
        prompt, plain = row["prompt"], isinstance(row["prompt"], str)
        if fault := messages_fault(prompt):
            raise ValueError(f"Row {index + 1} of the prompts {fault}.")
        text = prompt if plain else render(tokenizer, prompt, f"Row {index + 1} of the prompts", chat_template_kwargs)
        return len(tokenizer(text, add_special_tokens=plain)["input_ids"]) <= max_length  # a template adds them

    kept = dataset.filter(fits, with_indices=True)
    if isinstance(kept, Dataset) and len(kept) < len(dataset):
        if len(kept) == 0:
            raise ValueError(f"`max_prompt_length={max_length}` leaves out every prompt; raise it.")
        warnings.warn(
            f"{len(dataset) - len(kept)} of {len(dataset)} prompts have more than `max_prompt_length={max_length}` tokens and are left out."
        )
    return kept


def _load_by_name(name: str, path: Path, config: str | None, split: str, streaming: bool) -> Dataset | IterableDataset:
    """Loads a folder, or a data set from the Hub. Raises a `ValueError` with the reason if it cannot be read, or lacks the split."""
    try:
        if split == "train" and (path / "state.json").is_file():  # of `save_to_disk`, which `load_dataset` refuses
            dataset = load_from_disk(name)
            return dataset.to_iterable_dataset() if streaming else dataset
        return load_dataset(name, config, split=split, streaming=streaming)
    except (OSError, DatasetsError, HFValidationError, RuntimeError) as error:
        # Errors in a file of the data set are the cause
        reason = " ".join(str(error.__cause__ or error).split()).rstrip(".")
        if path.is_dir():
            raise ValueError(f"The folder `{name}` cannot be read as a data set ({reason}); name one file.") from error
        raise ValueError(
            f"There is no file or folder `{name}`, and no data set of that name could be loaded from the Hugging Face Hub "
            f"({reason}); correct the path or the name."
        ) from error
    except ValueError as error:
        if not any(word in str(error).lower() for word in ("split", "save_to_disk")):
            raise
        raise ValueError(f"`{name}` has no split '{split}' ({str(error).rstrip('.')}); {_NAME_SPLIT}.") from error


def _with_prompts(dataset: Dataset | IterableDataset, column: str, name: str) -> Dataset | IterableDataset:
    """A stored data set with `column` as its `"prompt"`, checked; a stream's rows are not. `name` is what messages call it."""
    columns = dataset.column_names
    if columns is not None:
        _check_column(columns, column, name)
    if column != "prompt":
        dataset = dataset.remove_columns("prompt") if "prompt" in (columns or ()) else dataset
        dataset = dataset.rename_column(column, "prompt")
    check_dataset(dataset, name)
    if isinstance(dataset, Dataset):
        _check_prompts(dataset["prompt"], name, stored=True)
    return dataset


def _check_column(columns: Iterable[str], column: str, name: str) -> None:
    """Raises `ValueError` unless the columns have the one that holds the prompts."""
    if column not in columns:
        raise ValueError(
            f"`{name}` has no column `{column}`, only {', '.join(columns) or 'no columns'}; name the one that holds the prompts "
            "with `load_prompts(column=...)`, on the command line `--prompt_column` (in training, with `--eval_dataset_name`: "
            "`--eval_prompt_column`)."
        )


def _load_file(path: Path, split: str, column: str) -> Dataset:
    """The rows of a file with `column` as their `"prompt"`, checked. Raises a `ValueError` as [`load_prompts`]."""
    readable = f"{', '.join(LOCAL_SUFFIXES[:-1])} or {LOCAL_SUFFIXES[-1]}"
    if not path.is_file():
        raise ValueError(f"There is no file `{path}`; give the path of a {readable} file of prompts.")
    if path.suffix.lower() not in LOCAL_SUFFIXES:
        raise ValueError(f"`{path}` has the suffix '{path.suffix}'; convert it to a {readable} file.")
    if split != "train":
        raise ValueError(f"`{path}` is one file with one split, 'train', and has no split '{split}'; {_NAME_SPLIT}.")
    if path.suffix.lower() == ".parquet":
        return _with_prompts(_read_parquet(path), column, str(path))
    rows = read_csv(path) if path.suffix.lower() == ".csv" else read_json(path)
    if not rows:
        raise ValueError(f"`{path}` is empty; give it at least one row with a `{column}`.")
    columns = columns_of(rows)
    _check_column(columns, column, str(path))
    if column != "prompt":
        columns["prompt"] = columns.pop(column)
    # Before Arrow, whose error about mixed text and messages does not name the row
    _check_prompts(columns["prompt"], str(path))
    dataset = from_columns(columns, f"`{path}`")
    check_dataset(dataset, str(path))
    return dataset


def _read_parquet(path: Path) -> Dataset:
    """The rows of a parquet file. Raises a `ValueError` if it cannot be read or has a type that `datasets` lacks."""
    try:
        check_names(pq.read_schema(path).names, path)
        table = pq.read_table(path)
    except (pa.ArrowInvalid, OSError) as error:
        raise ValueError(f"`{path}` cannot be read as parquet ({error}); fix the file, or its suffix.") from error
    try:
        return Dataset(table)
    except ValueError as error:
        raise ValueError(f"`{path}` has a type that data sets lack ({error}); write a struct or text.") from error


def _check_prompts(prompts: Iterable[Any], name: str, stored: bool = False) -> None:
    """Raises `ValueError` naming the first row whose prompt is empty, neither text nor messages, or of another kind."""
    blank = (None if isinstance(prompt, str) and not prompt.strip() else prompt for prompt in prompts)
    check_conversations(blank, f"`{name}`", stored)
