"""
Atomic writing of files, and the folder of held-out samples, of which a kill costs one shard at most.

    header.json            what the samples depend on: models, prompts, rewards, settings, versions, and a hash of it all
    shard-00000.parquet    rows, in order
    complete.json          written last: rows and SHA-256 of every shard
"""

import hashlib
import itertools
import json
import os
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from .._errors import KEEP_DATE


KINDS = {"samples": "trl-repulse evaluate", "attacks": "trl-repulse gcg"}  # what a folder may hold: what writes it
HEADER, COMPLETE = "header.json", "complete.json"


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Writes a file so that it exists as a whole or not at all, even if killed or written by several processes."""
    partial = path.with_name(f"{path.name}.{uuid.uuid4().hex}.partial")
    try:
        write(partial)
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(partial, path)
    except FileNotFoundError:
        if not path.is_file():  # else another process has finished and cleaned the folder
            raise
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # writes the file's name to the disk too
    finally:
        os.close(folder)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes strict JSON, atomically; the same content gives the same bytes."""
    text = json.dumps(content, indent=2, sort_keys=True, allow_nan=False, ensure_ascii=False) + "\n"
    write_atomically(path, lambda partial: partial.write_text(text, encoding="utf-8"))


def write_report(path: Path | None, content: dict[str, Any]) -> None:
    """Writes JSON as [`write_json`], with its folder, unless the path is `None`; unknown values become text, and numbers not finite `None`."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, plain_json(content))


def digest(content: Any) -> str:
    """SHA-256 of a value, hexadecimal; values unknown to JSON, such as dates and bytes, count by their text."""
    text = json.dumps(content, sort_keys=True, ensure_ascii=False, default=_as_text)
    return hashlib.sha256(text.encode()).hexdigest()


def plain_json(content: Any) -> Any:
    """A value as it is after it was written as JSON and read again, with `None` in place of numbers that are not finite."""
    return json.loads(json.dumps(content, default=_as_text), parse_constant=lambda name: None)


def _as_text(value: Any) -> Any:
    """A value unknown to JSON. Of long arrays, `str` would leave numbers out."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def check_folder(folder: Path) -> None:
    """Refuses a folder with other files. One with only a partial header counts as empty."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"`{folder}` is a file; name a folder that is new or empty.")
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    if HEADER not in names and any(not name.startswith(HEADER) for name in names):
        raise ValueError(f"`{folder}` holds something else; name a folder that is new or empty.")


def open_folder(folder: Path, header: dict[str, Any], kind: str = "samples") -> bool:
    """Begins a folder of one of the [`KINDS`] with a header. Returns whether it had been begun. Raises `ValueError` if with another one."""
    header = plain_json({"format": f"trl-repulse {kind} 1", **header})
    header["hash"] = digest(header)
    check_folder(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / HEADER).is_file():
        write_json(folder / HEADER, header)
        return False
    if (name := header_difference(read_header(folder, kind), header)) is not None:
        raise ValueError(
            f"`{folder}` was begun with another `{name}`; go on with the old settings{remedy(name)}, or name another folder."
        )
    return True


def header_difference(one: dict[str, Any], other: dict[str, Any], ignored: Sequence[str] = ()) -> str | None:
    """Dotted name of the first difference between two headers of samples, apart from names. Names and revisions may differ where there is a
    hash of the weights. Variables of a chat template may differ, as the texts that it makes with them are compared."""
    one, other = dict(_flat(one)), dict(_flat(other))
    hashed = [name.removesuffix("weights") for name in (*one, *other) if name.endswith(".weights")]
    labels = {parent + label for parent in hashed for label in ("name", "revision", "base")}
    names = {*one, *other} - {"hash", "settings.revision", "prompts.name", *labels, *ignored}
    for name in sorted(names, key=lambda name: (name != "settings.dtype", name)):  # on which the weights depend
        in_both = name in one and name in other
        may_lack = (".rendering", ".template")  # earlier headers have none, or the variables of a judge's template
        if name.startswith("settings.chat_template_kwargs") or (name.endswith(may_lack) and not in_both):
            continue
        if not in_both or one[name] != other[name]:
            return name
    return None


def remedy(name: str) -> str:
    """How to avoid a difference in `name`, in brackets, where the name does not tell."""
    return f" ({KEEP_DATE})" if name.endswith((".token_ids_sha256", ".rendering")) else ""


def _flat(value: Any, name: str = "") -> list[tuple[str, Any]]:
    """Values of nested dictionaries with their dotted names."""
    if isinstance(value, dict) and value:
        return [pair for key, item in value.items() for pair in _flat(item, f"{name}.{key}" if name else str(key))]
    return [(name, value)]


def shard_path(folder: Path, number: int) -> Path:
    return folder / f"shard-{number:05d}.parquet"


def has_shard(folder: Path, number: int, rows: int) -> bool:
    """Whether a shard exists with all of its rows and is not cut off."""
    try:
        return pq.read_metadata(shard_path(folder, number)).num_rows == rows
    except (FileNotFoundError, pa.ArrowInvalid):
        return False


def write_shard(folder: Path, number: int, table: pa.Table) -> None:
    write_atomically(shard_path(folder, number), lambda partial: pq.write_table(table, partial, compression="zstd"))


def close_folder(folder: Path, shards: int) -> None:
    """Marks samples as complete, and removes partial files that a kill left."""
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


def read_header(folder: Path, kind: str = "samples") -> dict[str, Any]:
    """The header of samples or attacks, complete or not. Raises `ValueError` if there is none of that kind, or it was changed."""
    try:
        header = json.loads((folder / HEADER).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(
            f"`{folder}` holds no {kind}: it has no `{HEADER}`; name a folder that `{KINDS[kind]}` has written."
        ) from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"`{folder / HEADER}` cannot be read ({error}); start again in another folder.") from error
    content = {key: value for key, value in header.items() if key != "hash"} if isinstance(header, dict) else {}
    if content.get("format") != f"trl-repulse {kind} 1" or header.get("hash") != digest(content):
        raise ValueError(
            f"`{folder / HEADER}` is not of {kind}, or was changed after it was written; start again in another folder."
        )
    return header


@dataclass(frozen=True)
class SampleSet:
    """Held-out samples, N completions of each of P prompts, prompt by prompt: the folder, its header (models, prompts,
    rewards and settings), and a table of P times N rows."""

    folder: Path
    header: dict[str, Any]
    table: pa.Table

    @property
    def num_samples(self) -> int:
        """N."""
        return self.header["settings"]["num_samples"]

    @cached_property
    def prompts(self) -> list[str]:
        """The P prompts, as a person reads them."""
        if "messages" not in self.table.column_names:
            return self.table["prompt"].to_pylist()[:: self.num_samples]
        return [readable(json.loads(each)) for each in self.table["messages"].to_pylist()[:: self.num_samples]]

    @property
    def conditions(self) -> str:
        """A sentence of Markdown that says how the samples were drawn and scored."""
        prompts, settings = self.header["prompts"].get("name"), self.header["settings"]
        facts = {
            "prompts": prompts and f"`{prompts}`",
            "precision": self.header["model"].get("dtype"),
            "temperature": "1 from all tokens",
            "tokens of a completion": settings.get("max_completion_length"),
            "seed": settings.get("seed"),
            "judge": " and ".join(f"`{name}`" for name in self.header["rewards"]),
        }
        return f"Conditions: {', '.join(f'{name} {fact}' for name, fact in facts.items() if fact is not None)}."

    def column(self, name: str = "reward") -> np.ndarray:
        """A column of numbers, such as `"reward"`, `"return"`, `"kl"` or `"rewards/NAME"`, as float64 of shape (P, N).
        Raises `ValueError` if there is none, it holds no numbers, or a value is missing or not finite."""
        kinds = {field.name: field.type for field in self.table.schema}
        numeric = [key for key, kind in kinds.items() if pa.types.is_integer(kind) or pa.types.is_floating(kind)]
        if name not in numeric:
            raise ValueError(
                f"`{self.folder}` has no column of numbers `{name}`; it has {', '.join(numeric)}."
                + (" Sample with a reference model to have it." if name in ("kl", "log_prob_reference") else "")
            )
        values = self.table[name].to_numpy().astype(np.float64)  # null becomes NaN
        if refused := int((~np.isfinite(values)).sum()):
            raise ValueError(
                f"{refused} of {len(values)} samples in `{self.folder}` have no finite `{name}`; fix the reward, or read another column."
            )
        return values.reshape(-1, self.num_samples)


def readable(prompt: str | list[dict[str, Any]]) -> str:
    """A prompt as a person reads it: text, the user's only message, or all messages with their roles; without a chat template."""
    if isinstance(prompt, str):
        return prompt
    if len(prompt) == 1 and prompt[0]["role"] == "user":
        return prompt[0]["content"]
    contents = [each.get("content") or json.dumps(each.get("tool_calls"), ensure_ascii=False) for each in prompt]
    return "\n\n".join(f"{each['role']}: {content}" for each, content in zip(prompt, contents, strict=True))


def _finished_prompts(folder: Path, header: dict[str, Any], partial: bool) -> SampleSet:
    """The prompts that are done; `of` in the header says of how many. Raises `ValueError` if there is none, or not `partial`."""
    count, size = header["prompts"]["count"], header["settings"]["num_samples"]
    paths = itertools.takewhile(Path.is_file, (shard_path(folder, number) for number in itertools.count()))
    tables = [pq.read_table(path) for path in paths]
    done = sum(map(len, tables)) // size
    if not partial or not done:
        raise ValueError(
            f"`{folder}` is not complete ({done} of {count} prompts so far); run the same command again to finish it, or read "
            "the prompts that are done with `--partial` (`trl-repulse evaluate` and `compare`)."
        )
    header = header | {"prompts": header["prompts"] | {"count": done, "of": count}}
    return SampleSet(folder, header, pa.concat_tables(tables).slice(0, done * size))


def load_samples(folder: str | Path, partial: bool = False) -> SampleSet:
    """Reads the samples that [`~trl_repulse.evaluation.sampling.sample_completions`] wrote, or an `.eval` log of
    Inspect. Raises `ValueError` if they are not complete, or a file is missing or was changed. With `partial`,
    incomplete samples are read up to the last prompt that is done."""
    folder = Path(folder).expanduser()
    if folder.is_file() and folder.suffix == ".eval":
        try:
            from .inspect import load_inspect_log
        except ModuleNotFoundError as error:
            raise ValueError(
                f"`{folder}` is a log of Inspect; run `pip install trl-repulse[inspect]` to read it."
            ) from error
        return load_inspect_log(folder)
    header = read_header(folder)
    if not (folder / COMPLETE).is_file():
        return _finished_prompts(folder, header, partial)
    try:
        complete = json.loads((folder / COMPLETE).read_text(encoding="utf-8"))
        same_header = complete["hash"] == header["hash"]
        shards = [(folder / each["file"], each["sha256"]) for each in complete["shards"]]
    except (ValueError, RecursionError, KeyError, TypeError) as error:
        raise ValueError(f"`{folder / COMPLETE}` cannot be read ({error!r}); delete it, and sample again.") from error
    if not same_header or not shards:
        raise ValueError(f"`{folder / COMPLETE}` belongs to another header; delete it, and sample again.")
    tables = []
    for path, sha256 in shards:
        if not path.is_file() or hash_file(path) != sha256:
            raise ValueError(f"`{path}` is missing or was changed; delete it and `{COMPLETE}`, and sample again.")
        tables.append(pq.read_table(path))
    return SampleSet(folder, header, pa.concat_tables(tables))
