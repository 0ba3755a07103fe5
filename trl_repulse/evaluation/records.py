"""Reading held-out samples."""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ._files import COMPLETE, hash_file, read_header


@dataclass(frozen=True)
class SampleSet:
    """
    Held-out samples: N completions of each of P prompts, prompt by prompt.

    Args:
        folder (`Path`):
            Folder of the samples.
        header (`dict`):
            Models, prompts, rewards and settings of the samples.
        table (`pyarrow.Table`):
            P times N rows.
    """

    folder: Path
    header: dict[str, Any]
    table: pa.Table

    @property
    def num_samples(self) -> int:
        """N."""
        return self.header["settings"]["num_samples"]

    @cached_property
    def prompts(self) -> list[str]:
        """The P prompts, as text."""
        return self.table["prompt"].to_pylist()[:: self.num_samples]

    def column(self, name: str = "reward") -> np.ndarray:
        """
        A column of numbers.

        Args:
            name (`str`, *optional*, defaults to `"reward"`):
                `"reward"`, `"return"`, `"kl"`, `"rewards/NAME"`, ...

        Returns:
            `numpy.ndarray` of shape `(P, N)`, float64.

        Raises:
            `ValueError`: If there is no such column, it holds no numbers, or a value is missing or not finite.
        """
        kinds = {field.name: field.type for field in self.table.schema}
        numeric = [key for key, kind in kinds.items() if pa.types.is_integer(kind) or pa.types.is_floating(kind)]
        if name not in numeric:
            raise ValueError(
                f"`{self.folder}` has no column of numbers `{name}`; it has {', '.join(numeric)}."
                + (" Sample with a reference model to have it." if name in ("kl", "log_prob_reference") else "")
            )
        column = self.table[name]
        values = column.to_numpy().astype(np.float64)  # null becomes NaN
        refused = int((~np.isfinite(values)).sum())
        if refused:
            raise ValueError(
                f"{refused} of {len(values)} samples in `{self.folder}` have no finite `{name}`; fix the reward, "
                "or read another column."
            )
        return values.reshape(-1, self.num_samples)


def load_samples(folder: str | Path) -> SampleSet:
    """
    Reads complete samples.

    Args:
        folder (`str` or `Path`):
            Folder that [`~trl_repulse.evaluation.sampling.sample_completions`] wrote, or an `.eval` log of Inspect.

    Returns:
        [`SampleSet`]

    Raises:
        `ValueError`: If the samples are not complete, or a file is missing or was changed.
    """
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
        done = len(list(folder.glob("shard-*.parquet")))
        raise ValueError(
            f"`{folder}` is not complete ({done} shards so far); run the same command again to finish it."
        )
    try:
        complete = json.loads((folder / COMPLETE).read_text(encoding="utf-8"))
        of_header = complete["hash"] == header["hash"]
        shards = [(folder / each["file"], each["sha256"]) for each in complete["shards"]]
    except (ValueError, RecursionError, KeyError, TypeError) as error:
        raise ValueError(f"`{folder / COMPLETE}` cannot be read ({error!r}); delete it, and sample again.") from error
    if not of_header or not shards:
        raise ValueError(f"`{folder / COMPLETE}` belongs to another header; delete it, and sample again.")
    tables = []
    for path, sha256 in shards:
        if not path.is_file() or hash_file(path) != sha256:
            raise ValueError(f"`{path}` is missing or was changed; delete it and `{COMPLETE}`, and sample again.")
        tables.append(pq.read_table(path))
    table = pa.concat_tables(tables)
    if len(table) != header["prompts"]["count"] * header["settings"]["num_samples"]:
        raise ValueError(f"`{folder}` has {len(table)} rows, not those its header promises; sample again.")
    return SampleSet(folder, header, table)
