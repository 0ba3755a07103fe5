"""
Result files: a header line, then one line a target, each on the disk before the next target begins.

A file can be cut off anywhere. The rest of its last line is then removed, and that target evaluated again.
"""

import json
import os
from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from ..._errors import changed_prompt
from .._files import write_atomically


SCHEMA = "trl-repulse/gcg/1"
STATUSES = ("ok", "skipped", "error")


class ResultsFile(AbstractContextManager):
    """
    A results file that is written line by line and can be continued.

    Args:
        path (`str` or `Path`):
            The file; its folder is created if missing.
        header (`dict`):
            The first line. Its `"identity"` is what the results depend on.

    Raises:
        `ValueError`: If the file exists and holds something else, or results of another identity.
    """

    def __init__(self, path: str | Path, header: dict[str, Any]):
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.finished: set[int] = set()
        kept = _complete_lines(self.path) if has_results(self.path) else b""
        if kept:
            found, records = _parse(kept, self.path)
            check_identity(found, header, self.path)
            self.finished = {record["row"] for record in records}
        self._file = open(self.path, "ab")
        self._file.truncate(len(kept))
        if not kept:
            self._write(header)

    def __exit__(self, *exception):
        self._file.close()

    def append(self, record: dict[str, Any]) -> None:
        """Writes a target's line and waits until it is on the disk."""
        self._write(record)
        self.finished.add(record["row"])

    def _write(self, entry: dict[str, Any]) -> None:
        self._file.write(_as_line(entry))
        self._file.flush()
        os.fsync(self._file.fileno())


def has_results(path: Path) -> bool:
    """
    Whether a file has a complete first line. Raises `ValueError` if it has no line break and does not begin as results do:
    it is something else, and must be kept.
    """
    if not path.exists():
        return False
    content = path.read_bytes()
    begin = _as_line({"schema": SCHEMA})[:-3]  # an incomplete header may be shorter
    if b"\n" not in content and content[: len(begin)] != begin[: len(content)]:
        raise ValueError(f"`{path}` is no file of attack results; use another file.")
    return b"\n" in content


def read_results(*paths: str | Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """
    Reads results, of several files if they are parts of one evaluation.

    Args:
        paths (`str` or `Path`):
            Files.

    Returns:
        `tuple[dict, list[dict]]`: the first file's header, and one line a target, sorted by row. An incomplete last line of a
        file is left out.

    Raises:
        `ValueError`: If a file is missing, empty or no results file, or the files belong to different evaluations.
    """
    header: dict[str, Any] | None = None
    rows: dict[int, dict[str, Any]] = {}
    for path in map(Path, paths):
        if not path.is_file():
            raise ValueError(f"There is no file `{path}`; give the results of an evaluation.")
        found, records = _parse(_complete_lines(path), path)
        header = header or found
        check_identity(found, header, path)
        for record in records:
            rows.setdefault(record["row"], record)
    if header is None:
        raise ValueError("No file of results is given.")
    return header, [rows[number] for number in sorted(rows)]


def merge_results(paths: Iterable[str | Path], output: str | Path) -> int:
    """
    Merges the results of an evaluation's shards into one file.

    Args:
        paths (`Iterable` of `str` or `Path`):
            Results files of one configuration.
        output (`str` or `Path`):
            File to write, which may be one of them. It is replaced as a whole.

    Returns:
        `int`: targets in the merged file.

    Raises:
        `ValueError`: If a file is missing or no results file, or the files belong to different evaluations.
    """
    header, records = read_results(*paths)
    content = b"".join(_as_line(entry) for entry in [header, *records])
    write_atomically(Path(output), lambda partial: partial.write_bytes(content))
    return len(records)


def check_identity(found: dict[str, Any], expected: dict[str, Any], path: Path) -> None:
    """Raises `ValueError` if two headers differ in what results depend on; `path` is where `found` comes from."""
    ours, theirs = _flatten(expected["identity"]), _flatten(found["identity"])
    differing = sorted(name for name in ours | theirs if ours.get(name) != theirs.get(name))
    if differing == ["prompt"]:
        changed = changed_prompt(ours["prompt"], theirs["prompt"])
        raise ValueError(f"`{path}` holds results of other prompts: {changed}, or use another output file.")
    if differing:
        shown = ", ".join(f"{name} ({theirs.get(name)!r:.40}, not {ours.get(name)!r:.40})" for name in differing[:5])
        raise ValueError(f"`{path}` holds results of another evaluation: {shown}; use another output file.")


def _flatten(identity: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in identity.items() if name != "config"} | identity["config"]


def _as_line(entry: dict[str, Any]) -> bytes:
    return json.dumps(entry, allow_nan=False).encode() + b"\n"


def _complete_lines(path: Path) -> bytes:
    """The file up to its last line break."""
    content = path.read_bytes()
    return content[: content.rfind(b"\n") + 1]


def _parse(content: bytes, path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Header and lines of a file."""
    try:
        header, *records = [json.loads(line) for line in content.splitlines()]
        if header["schema"] != SCHEMA:
            raise ValueError(f"`{path}` has the schema {header['schema']!r}, not {SCHEMA!r}; use another file.")
        if not all(record["status"] in STATUSES and record["row"] >= 1 for record in records):
            raise KeyError
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError, KeyError, TypeError) as error:
        raise ValueError(f"`{path}` is no file of attack results; use another file.") from error
    except ValueError as error:
        if "schema" in str(error):
            raise
        raise ValueError(f"`{path}` is empty; it holds no results.") from error
    return header, records
