"""The log of a training run, by metric. Needs only the standard library."""

import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple


_STATE = "trainer_state.json"
# Metric that not every run logs -> with what it is logged
_WHEN = {
    "kl": "`beta` above 0",
    "proposal/log_z_gap": "a learned proposal",
    "proposal/distinct": "a learned proposal or the hot policy",
    "proposal/reward": "a learned proposal",
    "proposal/ess": "a learned proposal",
    "negative/p_bad": "the hot policy",
}


class Unknown(Exception):
    """Why a symptom cannot be looked for; not an error of the user."""


class Span(NamedTuple):
    """The mean of a metric over the updates from `first` to `last`."""

    first: int
    last: int
    mean: float

    def __str__(self) -> str:
        return f"updates {self.first} to {self.last}"


class RunLog:
    """A run's `log_history`, by metric, with the known fields of its configuration. Means are over `needed` updates."""

    def __init__(self, history: Iterable[dict[str, Any]], settings: dict[str, Any], needed: float):
        self.settings, self.needed = settings, needed
        self.columns: dict[str, list[tuple[int, float]]] = {}  # metric -> update and value, in order
        for entry in history:
            step = entry.get("step")
            step = int(step) if isinstance(step, int | float) and math.isfinite(step) else 0
            for name, value in entry.items():
                if name != "step" and (value is None or isinstance(value, int | float)):  # TRL logs `None` for NaN
                    self.columns.setdefault(name, []).append((step, math.nan if value is None else float(value)))
        # A value describes the updates since the log before it
        self.steps = sorted(
            {step for name in ("reward", "loss") for step, _ in self.columns.get(name, ()) if step > 0}
        )
        self._before = dict(zip(self.steps, [0, *self.steps], strict=False))

    @property
    def updates(self) -> int:
        return self.steps[-1] if self.steps else 0

    def spans(self, name: str) -> list[Span]:
        """For each log, the mean of a metric over the fewest logs up to it that cover enough updates; raises [`Unknown`] without."""
        if name not in self.columns:
            when = f": it is logged with {_WHEN[name]}" if name in _WHEN else ""
            raise Unknown(f"the log has no `{name}`{when}")
        points = [(step, value) for step, value in self.columns[name] if step in self._before and math.isfinite(value)]
        spans: list[Span] = []
        for i in range(len(points)):
            covered, total = 0, 0.0
            for step, value in reversed(points[: i + 1]):
                covered, total = covered + step - self._before[step], total + value * (step - self._before[step])
                if covered >= self.needed:
                    spans.append(Span(self._before[step] + 1, points[i][0], total / covered))
                    break
        if not spans:
            raise Unknown(f"the log has `{name}` for fewer than the {self.needed:g} updates that it takes to judge")
        return spans

    def longest(self, name: str, holds: Callable[[float], bool], after: float = 0.0) -> Span | None:
        """The longest stretch of means for which `holds` is true, of those that begin after a share of the run."""
        found: list[list[Span]] = [[]]
        for span in self.spans(name):
            if span.first > after * self.updates and holds(span.mean):
                found[-1].append(span)
            elif found[-1]:
                found.append([])
        best = max(found, key=lambda spans: spans[-1].last - spans[0].first if spans else -1)
        return Span(best[0].first, best[-1].last, sum(span.mean for span in best) / len(best)) if best else None

    def standard_error(self, name: str) -> float:
        """Standard error of a mean of [`spans`], from the differences of successive logs."""
        points = [value for _, value in self.columns[name] if math.isfinite(value)]
        squares = [(one - other) ** 2 / 2 for one, other in zip(points, points[1:], strict=False)]
        logs = max(1.0, self.needed * len(self.steps) / self.updates)  # of a mean
        return math.sqrt(sum(squares) / len(squares) / logs) if squares else 0.0

    def count(self, name: str) -> int:
        """An integer field of the configuration, 0 if unknown."""
        value = self.settings.get(name)
        return value if isinstance(value, int) else 0

    @property
    def proposal_samples(self) -> int:
        """K: the proposal's samples of a prompt, 0 if unknown."""
        return self.count("num_proposal_generations") or self.count("num_generations")

    @property
    def is_hot(self) -> bool:
        return "negative/p_bad" in self.columns

    @property
    def spread(self) -> float:
        """Standard deviation of the reward at the start."""
        spread = self.spans("reward_std")[0].mean
        if spread <= 0:
            raise Unknown("`reward_std` is 0 at the start")
        return spread


def load_log(folder: str | Path) -> tuple[Path, list[dict[str, Any]], dict[str, Any]]:
    """
    Reads the log of a run from its `output_dir`, or from a checkpoint that has gone further.

    Returns the file that was read, its log, and the run's settings, which are empty if no `results.json` or checkpoint has them.
    Raises a `ValueError` if there is no log, or it cannot be read.
    """
    folder = Path(folder)
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise ValueError(f"`{folder}` {what}; name the folder of a run.")
    paths = [path for path in (folder / _STATE, *folder.glob(f"checkpoint-*/{_STATE}")) if path.is_file()]
    if not paths:
        raise ValueError(
            f"There is no `{_STATE}` in `{folder}` or in a checkpoint there; name the folder of a run, and call "
            "`trainer.save_state()` at the end of a script of your own."
        )
    states: list[tuple[Path, dict[str, Any]]] = []
    unreadable = []
    for path in paths:
        try:
            states.append((path, _read_json(path)))
        except ValueError as error:  # the last checkpoint of a run that was interrupted
            unreadable.append(error)
    if not states:
        raise unreadable[0]
    states.sort(key=lambda each: each[1].get("global_step") or 0, reverse=True)
    path, state = states[0]
    history = state.get("log_history")
    if not isinstance(history, list) or not all(isinstance(entry, dict) for entry in history):
        raise ValueError(f"`{path}` has no `log_history`; name the folder of a run that a Trainer has written.")
    known = [path.with_name("results.json"), *(each.with_name("position-0.json") for each, _ in states)]
    settings = next((_read_json(file).get("settings") for file in known if file.is_file()), None)
    return path, history, settings if isinstance(settings, dict) else {}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"`{path}` cannot be read ({error}); name another folder, or a checkpoint.") from error
    if not isinstance(content, dict):
        raise ValueError(f"`{path}` is no JSON object; name the folder of a run that a Trainer has written.")
    return content
