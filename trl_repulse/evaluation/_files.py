"""
Files that are there as a whole or not at all, and the folder of held-out samples, of which a kill costs one shard at most.

    header.json            what the samples depend on: models, prompts, rewards, settings, versions, and a hash of it all
    shard-00000.parquet    rows, in order
    complete.json          written last: rows and SHA-256 of every shard
"""

import hashlib
import json
import math
import os
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from .._dates import KEEP_DATE


FORMAT = "trl-repulse samples 1"
HEADER, COMPLETE = "header.json", "complete.json"


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Writes a file so that it is there as a whole or not at all, even if the process is killed or another writes it too."""
    partial = path.with_name(f"{path.name}.{uuid.uuid4().hex}.partial")
    try:
        write(partial)
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(partial, path)
    except FileNotFoundError:
        if not path.is_file():  # else another process has finished the folder, and swept it
            raise
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the name, too, is on the disk
    finally:
        os.close(folder)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes strict JSON, atomically; the same content gives the same bytes."""
    text = json.dumps(content, indent=2, sort_keys=True, allow_nan=False, ensure_ascii=False) + "\n"
    write_atomically(path, lambda partial: partial.write_text(text, encoding="utf-8"))


def write_report(path: Path, content: dict[str, Any]) -> None:
    """As [`write_json`], in a folder that is made; what JSON does not know becomes text, and what is not finite `None`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, plain_json(_finite(content)))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def digest(content: Any) -> str:
    """SHA-256 of a value, in hexadecimal digits; what JSON does not know, such as dates and bytes, counts by its text."""
    text = json.dumps(content, sort_keys=True, ensure_ascii=False, default=_as_text)
    return hashlib.sha256(text.encode()).hexdigest()


def plain_json(content: Any) -> Any:
    """A value as it is after it was written as JSON and read again."""
    return json.loads(json.dumps(content, default=_as_text))


def _as_text(value: Any) -> Any:
    """What JSON does not know; of long arrays `str` would leave numbers out."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def check_folder(folder: Path) -> None:
    """Refuses a folder that samples cannot be written to; one that was killed while it began is as good as empty."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"`{folder}` is a file; name a folder that is new or empty.")
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    if HEADER not in names and any(not name.startswith(HEADER) for name in names):
        raise ValueError(f"`{folder}` holds something else than samples; name a folder that is new or empty.")


def open_folder(folder: Path, header: dict[str, Any]) -> bool:
    """Begins a folder of samples with a header, to which format and hash are added; whether it was begun before, with the same."""
    header = {"format": FORMAT, **header}
    header["hash"] = digest(header)
    check_folder(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / HEADER).is_file():
        write_json(folder / HEADER, header)
        return False
    name = header_difference(read_header(folder), header)
    if name is not None:
        raise ValueError(
            f"`{folder}` was begun with another `{name}`; go on with the old settings{remedy(name)}, or name another folder."
        )
    return True


def header_difference(one: dict[str, Any], other: dict[str, Any], ignored: Sequence[str] = ()) -> str | None:
    """
    Dotted name of the first difference between two headers of samples, other than how something was called.

    What has a hash of its weights may have been found under another path, name or revision. Variables of a chat template may
    differ, since the texts that it makes with them are compared.
    """
    one, other = dict(_flat(one)), dict(_flat(other))
    hashed = [name.removesuffix("weights") for name in (*one, *other) if name.endswith(".weights")]
    labels = {parent + label for parent in hashed for label in ("name", "revision", "base")}
    for name in sorted({*one, *other} - {"hash", "settings.revision", *labels, *ignored}):
        in_both = name in one and name in other
        if name.startswith("settings.chat_template_kwargs") or (name.endswith(".rendering") and not in_both):
            continue  # a template into which the date was written is no longer rendered for its date
        if not in_both or one[name] != other[name]:
            return name
    return None


def remedy(name: str) -> str:
    """How a difference in `name` is avoided, in brackets, if the name does not show it."""
    return f" ({KEEP_DATE})" if name.endswith((".token_ids_sha256", ".rendering")) else ""


def _flat(value: Any, name: str = "") -> list[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        return [pair for key, item in value.items() for pair in _flat(item, f"{name}.{key}" if name else str(key))]
    return [(name, value)]


def shard_path(folder: Path, number: int) -> Path:
    """Where a shard is kept."""
    return folder / f"shard-{number:05d}.parquet"


def has_shard(folder: Path, number: int, rows: int) -> bool:
    """Whether a shard is there with all of its rows; `False` too for a file that was cut off, as a disk that fails may do."""
    try:
        return pq.read_metadata(shard_path(folder, number)).num_rows == rows
    except (FileNotFoundError, pa.ArrowInvalid):
        return False


def write_shard(folder: Path, number: int, table: pa.Table) -> None:
    """Writes a shard."""
    write_atomically(shard_path(folder, number), lambda partial: pq.write_table(table, partial, compression="zstd"))


def close_folder(folder: Path, shards: int) -> None:
    """Marks samples as complete, and clears away what a kill left of files."""
    paths = [shard_path(folder, number) for number in range(shards)]
    entries = [
        {"file": path.name, "rows": pq.read_metadata(path).num_rows, "sha256": hash_file(path)} for path in paths
    ]
    write_json(folder / COMPLETE, {"hash": read_header(folder)["hash"], "shards": entries})
    for name in (HEADER, COMPLETE, "shard-*.parquet"):
        for partial in folder.glob(f"{name}.*partial"):
            partial.unlink(missing_ok=True)


def hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_header(folder: Path) -> dict[str, Any]:
    """The header of samples, complete or not."""
    try:
        header = json.loads((folder / HEADER).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"`{folder}` holds no samples: it has no `{HEADER}`.") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"`{folder / HEADER}` cannot be read ({error}); sample again into another folder.") from error
    content = {key: value for key, value in header.items() if key != "hash"} if isinstance(header, dict) else {}
    if content.get("format") != FORMAT or header.get("hash") != digest(content):
        raise ValueError(
            f"`{folder / HEADER}` is of another format, or was changed after it was written; sample again into another folder."
        )
    return header
