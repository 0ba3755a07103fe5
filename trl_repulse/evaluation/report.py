"""The tail report: the lower tail of a reward from held-out samples, as figures and as a table."""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from .._numbers import is_bad, plain, with_unit
from . import tails
from .records import SampleSet, header_difference, plain_json, remedy
from .tails import Estimate, crossed_interval


MEANS = ("return", "kl", "entropy", "length")  # reported with the reward where they are complete
MIN_PROMPTS = 6  # five draws all lie on one side of the median more than once in twenty times
MIN_SEEDS = 3  # two cannot separate differences between prompts from those between seeds


@dataclass(frozen=True)
class TailReport:
    """
    Estimates of one reward's lower tail.

    Args:
        column (`str`): The column that was read.
        seeds, prompts, samples (`int`): Models, prompts, and completions of each prompt by each model.
        confidence (`float`): Nominal coverage of all intervals.
        overall (`dict[str, Estimate]`): By quantity: `"mean"`, `"P(r < η)"`, `"quantile a"`, `"CVaR a"`, and means of other columns.
        per_prompt (`dict[str, dict[str, Estimate]]`): The same for each prompt; only for one model.
    """

    column: str
    seeds: int
    prompts: int
    samples: int
    confidence: float
    overall: dict[str, Estimate]
    per_prompt: dict[str, dict[str, Estimate]]

    @property
    def scope(self) -> str:
        """The population that the intervals are for."""
        if self.seeds == 1:
            return "this model and these prompts"
        return f"other seeds and {'other' if _speak_for_others(self.seeds, self.prompts) else 'these'} prompts"

    @property
    def one_sided(self) -> list[str]:
        """For several models, what has an interval only for these models and prompts: probabilities of 0 or 1, CVaR of hardly a sample."""
        if self.seeds == 1:
            return []
        shares = [name for name, est in self.overall.items() if name.startswith("P(") and est.value in (0.0, 1.0)]
        tails = [name for name, est in self.overall.items() if name.startswith("CVaR") and est.low == -math.inf]
        return shares + [name for name in tails if math.isfinite(self.overall[name].high)]

    def to_dict(self) -> dict[str, Any]:
        """The attributes, `scope` and `one_sided` as a JSON value; infinite ends of intervals become `None`."""
        return plain_json(asdict(self) | {"scope": self.scope, "one_sided": self.one_sided})

    def to_markdown(self, per_prompt: bool = False) -> str:
        """The report as Markdown tables, with one for each prompt if `per_prompt`."""
        models = "" if self.seeds == 1 else f" by each of {self.seeds} models"
        column = with_unit(f"mean {self.column}").removeprefix("mean ").replace(self.column, f"`{self.column}`", 1)
        lines = [f"{column}: {self.samples:,} completions of each of {self.prompts:,} prompts{models}"]
        lines += [f"Intervals are for {self.scope}.", "", *_markdown_table(self.overall, self.confidence)]
        if self.one_sided:
            lines += [
                "",
                "No sample, hardly one, or every one lies under the threshold or quantile: the interval of "
                f"{', '.join(self.one_sided)} is for these models and prompts.",
            ]
        for prompt, estimates in self.per_prompt.items() if per_prompt else ():
            lines += ["", f"Prompt {prompt!r}", "", *_markdown_table(estimates, self.confidence)]
        return "\n".join(lines)


def text_table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a plain-text table: a header, a rule, and the other rows, with the first column on the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]
    return [lines[0], "-" * len(lines[0]), *lines[1:]]


def _speak_for_others(seeds: int, prompts: int) -> bool:
    """Whether there are enough seeds and prompts for intervals over both."""
    return seeds >= MIN_SEEDS and prompts >= MIN_PROMPTS


def _markdown_table(estimates: dict[str, Estimate], confidence: float) -> list[str]:
    rows = [f"| quantity | estimate | {100 * confidence:g} % interval | rests on |", "|---|---|---|---|"]
    for name, est in estimates.items():
        interval = interval_text(est.low, est.high)
        rows.append(f"| {with_unit(name)} | {plain(est.value)} | {interval} | {est.samples:,.10g} samples |")
    return rows


def interval_text(low: float, high: float, show: Callable[[float], str] = plain) -> str:
    """An interval as reports print it; its ends may be infinite."""
    if math.isinf(low):
        return "no interval" if math.isinf(high) else f"at most {show(high)}"
    return f"at least {show(low)}" if math.isinf(high) else f"{show(low)} to {show(high)}"


def tail_report(
    samples: SampleSet | Sequence[SampleSet],
    thresholds: Sequence[float] = (),
    levels: Sequence[float] = (0.01,),
    quantiles: Sequence[float] = (),
    column: str = "reward",
    confidence: float = 0.95,
) -> TailReport:
    """
    Estimates the lower tail of a reward from held-out samples.

    For one model, intervals are for the given prompts. For several (one a training seed), mean, probabilities and CVaR have intervals over
    seeds and prompts ([`~trl_repulse.evaluation.tails.crossed_interval`]): what to expect of another run on other prompts. With fewer than
    six prompts or three seeds, they are over seeds only, for these prompts. An interval of a probability over seeds contains that of
    Clopper and Pearson for all samples. If no sample or every sample is below the threshold, it is that interval, which is only for these
    models and prompts; `one_sided` names these.

    Args:
        samples ([`~trl_repulse.evaluation.records.SampleSet`] or a sequence of them):
            Samples of one model, or of several with the same settings, prompts and rewards.
        thresholds (`Sequence[float]`, *optional*): η of each P(r < η), in units of reward.
        levels (`Sequence[float]`, *optional*, defaults to `(0.01,)`): Levels of the CVaR.
        quantiles (`Sequence[float]`, *optional*): Levels of quantiles; only for one model.
        column (`str`, *optional*, defaults to `"reward"`):
            Column to read: `"reward"`, `"rewards/NAME"`, `"return"`, ... Means of other columns are reported too, if these are complete.
        confidence (`float`, *optional*, defaults to `0.95`): Nominal coverage of the intervals.

    Raises:
        `ValueError`: If a column is missing or holds no finite numbers, a level is out of range, or samples do not fit.

    Example:

    ```python
    >>> report = tail_report(load_samples("samples"), thresholds=[-5.0, -7.0], levels=[0.1, 0.01])
    >>> report.overall["P(r < -5)"]
    ```
    """
    sets = [samples] if isinstance(samples, SampleSet) else list(samples)
    check_same_settings(sets)
    if len(sets) > 1 and quantiles:
        raise ValueError("`quantiles` are those of one model; leave them out for several.")
    values = np.stack([each.column(column) for each in sets])  # (S, P, N)
    others = {}
    for name in MEANS:
        with suppress(ValueError):  # the column is missing, or incomplete
            array = np.stack([each.column(name) for each in sets])
            if not np.array_equal(array, values):  # as the return without a KL
                others[name] = array
    options = (thresholds, levels, quantiles, confidence)
    per_prompt = {}
    if len(sets) == 1 and len(values[0]) > 1:
        for i, prompt in enumerate(sets[0].prompts):
            key = prompt if prompt not in per_prompt else f"{prompt} (prompt {i})"
            rows = {name: array[:, i : i + 1] for name, array in others.items()}
            per_prompt[key] = estimates(values[:, i : i + 1], *options, others=rows)
    overall = estimates(values, *options, others=others)
    seeds, prompts, completions = values.shape
    return TailReport(column, seeds, prompts, completions, confidence, overall, per_prompt)


def estimates(
    values: np.ndarray,
    thresholds: Sequence[float],
    levels: Sequence[float],
    quantiles: Sequence[float] = (),
    confidence: float = 0.95,
    others: dict[str, np.ndarray] | None = None,
) -> dict[str, Estimate]:
    """All quantities of a report, by name, from rewards (S, P, N) of S models, P prompts, N samples; `others` are
    further arrays of that shape, whose means are estimated."""
    seeds, prompts, samples = values.shape
    pooled = values.reshape(-1, samples)

    def over_seeds(estimate: Estimate, influence: np.ndarray) -> Estimate:
        """The interval over seeds, and over prompts if both are enough, in place of that for these seeds and prompts. `influence` (S, P, N)
        has the values whose mean the estimate is, to first order."""
        if seeds == 1:
            return estimate
        cells = influence.reshape(seeds, prompts, samples).mean(axis=2)
        if not _speak_for_others(seeds, prompts):
            cells = cells.mean(axis=1, keepdims=True)
        ends = crossed_interval(cells, confidence)
        # If all seeds agree, as rates may, keep the interval of the samples. A standard deviation would overflow in squares
        spread = float(np.abs(influence - influence.mean()).mean())
        if math.isclose(*ends, rel_tol=1e-9, abs_tol=1e-9 * spread):
            return estimate
        return Estimate(estimate.value, *ends, estimate.samples)

    by_quantity = {"mean": over_seeds(tails.mean(pooled, confidence), values)}
    for threshold in thresholds:
        estimate = tails.prob_below(pooled, threshold, confidence)
        if 0.0 < estimate.value < 1.0:
            # At least as wide as the interval of the counts, in case seeds agree by chance
            wider = over_seeds(estimate, is_bad(values, threshold).astype(np.float64))
            low, high = min(estimate.low, max(wider.low, 0.0)), max(estimate.high, min(wider.high, 1.0))
            estimate = Estimate(estimate.value, low, high, estimate.samples)
        by_quantity[f"P(r < {threshold:.15g})"] = estimate
    for level in quantiles:
        by_quantity[f"quantile {level:.15g}"] = tails.quantile(pooled, level, confidence)
    for level in levels:
        estimate = tails.cvar(pooled, level, confidence)
        if math.isfinite(estimate.low):
            estimate = over_seeds(estimate, tails.tail_influence(values, level))
        by_quantity[f"CVaR {level:.15g}"] = estimate
    for name, array in (others or {}).items():
        by_quantity[f"mean {name}"] = over_seeds(tails.mean(array.reshape(-1, samples), confidence), array)
    return by_quantity


def check_same_settings(samples: Sequence[SampleSet]) -> None:
    """Raises `ValueError` unless the samples, one set a model, differ in nothing but model and seed, and are of different models."""
    if not samples:
        raise ValueError("There are no samples; name at least one folder.")
    models: dict[str, SampleSet] = {}
    first = samples[0]
    for each in samples:
        one, other = ({key: value for key, value in it.header.items() if key != "model"} for it in (first, each))
        if (name := header_difference(one, other, ["settings.seed"])) is not None:
            raise ValueError(
                f"`{each.folder}` and `{first.folder}` were sampled with another `{name}`; compare samples of the same "
                f"prompts, rewards and settings{remedy(name)}."
            )
        weights = each.header["model"]["weights"]
        if weights in models:
            raise ValueError(f"`{each.folder}` and `{models[weights].folder}` are of the same model; leave one out.")
        models[weights] = each
