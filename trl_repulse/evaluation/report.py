"""The tail report: what held-out samples say about the lower tail of a reward, in figures and as a table."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .._numbers import plain, with_unit
from . import tails
from ._files import header_difference, remedy
from .records import SampleSet
from .seed_intervals import crossed_interval
from .tails import Estimate


MEANS = (
    "return",
    "return_transformed",
    "kl",
    "entropy",
    "length",
)  # reported with the reward, if the samples have them
MIN_PROMPTS = 6  # fewer draws of anything miss its median, all on one side, more than once in twenty times
MIN_SEEDS = 3  # two cannot tell what differs between prompts from what differs between seeds


@dataclass(frozen=True)
class TailReport:
    """
    Estimates of one reward's lower tail.

    Args:
        column (`str`):
            The column that was read.
        seeds, prompts, samples (`int`):
            Models, prompts, and completions of each prompt by each model.
        confidence (`float`):
            Nominal coverage of all intervals.
        overall (`dict[str, Estimate]`):
            By name of the quantity: `"mean"`, `"P(r < η)"`, `"quantile a"`, `"CVaR a"`, and means of other columns.
        per_prompt (`dict[str, dict[str, Estimate]]`):
            The same for each prompt; of one model only.
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
        """What the intervals are for."""
        if self.seeds == 1:
            return "this model and these prompts"
        return "other seeds and " + (
            "other prompts" if _speak_for_others(self.seeds, self.prompts) else "these prompts"
        )

    @property
    def one_sided(self) -> list[str]:
        """
        Quantities of several models whose interval is for these models and prompts all the same: probabilities where none or all
        are bad, and CVaR where hardly a sample lies under the quantile.
        """
        if self.seeds == 1:
            return []
        shares = [name for name, it in self.overall.items() if name.startswith("P(") and it.value in (0.0, 1.0)]
        tails = [name for name, it in self.overall.items() if name.startswith("CVaR") and it.low == -math.inf]
        return shares + [name for name in tails if math.isfinite(self.overall[name].high)]

    def to_dict(self) -> dict[str, Any]:
        """
        The report as a JSON value.

        Returns:
            `dict`: As the attributes, `scope` and `one_sided`; ends of intervals that are infinite become `None`.
        """

        def plain(estimates: dict[str, Estimate]) -> dict[str, dict[str, float | None]]:
            return {
                name: {key: value if math.isfinite(value) else None for key, value in vars(estimate).items()}
                for name, estimate in estimates.items()
            }

        per_prompt = {prompt: plain(estimates) for prompt, estimates in self.per_prompt.items()}
        return vars(self) | {
            "scope": self.scope,
            "one_sided": self.one_sided,
            "overall": plain(self.overall),
            "per_prompt": per_prompt,
        }

    def to_markdown(self, per_prompt: bool = False) -> str:
        """
        The report as tables.

        Args:
            per_prompt (`bool`, *optional*, defaults to `False`):
                Whether a table for each prompt follows, of one model.

        Returns:
            `str`: Markdown.
        """
        models = "" if self.seeds == 1 else f" by each of {self.seeds} models"
        lines = [f"`{self.column}`: {self.samples:,} completions of each of {self.prompts:,} prompts{models}"]
        lines += [f"Intervals are for {self.scope}.", ""]
        lines += _table(self.overall, self.confidence)
        if self.one_sided:
            lines += [
                "",
                f"No sample, hardly one, or every one lies under the threshold or quantile: the interval of {', '.join(self.one_sided)} is for these models "
                "and prompts.",
            ]
        for prompt, estimates in self.per_prompt.items() if per_prompt else ():
            lines += ["", f"Prompt {prompt!r}", "", *_table(estimates, self.confidence)]
        return "\n".join(lines)


def _speak_for_others(seeds: int, prompts: int) -> bool:
    """Whether prompts are enough, and seeds enough to tell, for intervals over prompts as well as over seeds."""
    return seeds >= MIN_SEEDS and prompts >= MIN_PROMPTS


def _table(estimates: dict[str, Estimate], confidence: float) -> list[str]:
    rows = [f"| quantity | estimate | {100 * confidence:g} % interval | rests on |", "|---|---|---|---|"]
    for name, estimate in estimates.items():
        ends = ("none" if math.isinf(end) else plain(end) for end in (estimate.low, estimate.high))
        rows.append(
            f"| {with_unit(name)} | {plain(estimate.value)} | {' to '.join(ends)} | {estimate.samples:,.10g} samples |"
        )
    return rows


def tail_report(
    samples: SampleSet | Sequence[SampleSet],
    thresholds: Sequence[float] = (),
    levels: Sequence[float] = (0.01,),
    quantiles: Sequence[float] = (),
    column: str = "reward",
    confidence: float = 0.95,
) -> TailReport:
    """
    Reads held-out samples.

    Of one model, all intervals are for the prompts at hand. Of several, one a training seed, mean, probabilities and CVaR have
    intervals over seeds and prompts ([`~trl_repulse.evaluation.seed_intervals.crossed_interval`]): what to expect of another run on
    other prompts. Fewer than six prompts cannot speak for others, as all of them often lie on one side of the typical one, and two
    seeds cannot tell how prompts differ: the intervals are over seeds alone then, for these prompts. An interval of a probability over seeds holds that
    of Clopper and Pearson for all samples. Where none or all are under the threshold it is that interval, which is for these
    models and prompts and says nothing of others; `one_sided` names these.

    Args:
        samples ([`~trl_repulse.evaluation.records.SampleSet`] or a sequence of them):
            Samples of one model, or of several that were sampled with the same settings, prompts and rewards.
        thresholds (`Sequence[float]`, *optional*):
            η of each P(r < η), in units of reward.
        levels (`Sequence[float]`, *optional*, defaults to `(0.01,)`):
            Levels of the CVaR.
        quantiles (`Sequence[float]`, *optional*):
            Levels of quantiles; of one model only.
        column (`str`, *optional*, defaults to `"reward"`):
            Column to read: `"reward"`, `"rewards/NAME"`, `"return"`, ... Means of the others are reported beside it, of those that
            have a finite number for every sample.
        confidence (`float`, *optional*, defaults to `0.95`):
            Nominal coverage of the intervals.

    Returns:
        [`TailReport`]

    Raises:
        `ValueError`: If a column is missing or holds no finite numbers, a level is out of range, or the samples do not belong
            together.

    Example:

    ```python
    >>> from trl_repulse.evaluation.records import load_samples
    >>> from trl_repulse.evaluation.report import tail_report

    >>> report = tail_report(load_samples("samples"), thresholds=[-5.0, -7.0], levels=[0.1, 0.01])
    >>> report.overall["P(r < -5)"]
    ```
    """
    sets = [samples] if isinstance(samples, SampleSet) else list(samples)
    check_same_settings(sets)
    if len(sets) > 1 and quantiles:
        raise ValueError("`quantiles` are those of one model; leave them out for several.")
    values = np.stack([each.column(column) for each in sets])  # (S, P, N)
    others = {
        name: np.stack([each.column(name) for each in sets])
        for name in MEANS
        if name != column and all(_has_numbers(each, name) for each in sets)
    }
    options = (thresholds, levels, quantiles, confidence)
    per_prompt = {}
    if len(sets) == 1 and len(values[0]) > 1:
        for i, prompt in enumerate(sets[0].prompts):
            key = prompt if prompt not in per_prompt else f"{prompt} (prompt {i})"
            rows = {name: array[:, i : i + 1] for name, array in others.items()}
            per_prompt[key] = estimates(values[:, i : i + 1], *options, others=rows)
    overall = estimates(values, *options, others=others)
    return TailReport(column, *values.shape, confidence, overall, per_prompt)


def _has_numbers(samples: SampleSet, name: str) -> bool:
    """Whether there is such a column, with a finite number for every sample. Means of incomplete columns are left out."""
    if name not in samples.table.column_names:
        return False
    values = samples.table[name].to_numpy().astype(np.float64)  # null becomes NaN
    return bool(np.isfinite(values).all())


def estimates(
    values: np.ndarray,
    thresholds: Sequence[float],
    levels: Sequence[float],
    quantiles: Sequence[float] = (),
    confidence: float = 0.95,
    others: dict[str, np.ndarray] | None = None,
) -> dict[str, Estimate]:
    """
    All quantities of a report.

    Args:
        values (`numpy.ndarray` of shape `(S, P, N)`):
            Rewards: S models, P prompts, N samples.
        thresholds, levels, quantiles, confidence:
            As for [`tail_report`].
        others (`dict[str, numpy.ndarray]`, *optional*):
            Further arrays of that shape, of which the means are taken.

    Returns:
        `dict[str, Estimate]`: By name.

    Raises:
        `ValueError`: If a level or a value is out of range.
    """
    seeds, prompts, samples = values.shape
    pooled = values.reshape(-1, samples)

    def over_seeds(estimate: Estimate, influence: np.ndarray) -> Estimate:
        """The interval over seeds, and over prompts if both are enough, in place of that for these seeds and prompts."""
        if seeds == 1:
            return estimate
        cells = influence.reshape(seeds, prompts, samples).mean(axis=2)
        if not _speak_for_others(seeds, prompts):
            cells = cells.mean(axis=1, keepdims=True)
        ends = crossed_interval(cells, confidence)
        # Where seeds agree to the last digit, as rates may, the samples still leave room. A standard deviation would square
        spread = float(np.abs(influence - influence.mean()).mean())
        if math.isclose(*ends, rel_tol=1e-9, abs_tol=1e-9 * spread):
            return estimate
        return Estimate(estimate.value, *ends, estimate.samples)

    found = {"mean": over_seeds(tails.mean(pooled, confidence), values)}
    for threshold in thresholds:
        estimate = tails.prob_below(pooled, threshold, confidence)
        if 0.0 < estimate.value < 1.0:
            # Seeds that agree by chance do not make counts more certain than they are
            wider = over_seeds(estimate, (values < threshold).astype(np.float64))
            low, high = min(estimate.low, max(wider.low, 0.0)), max(estimate.high, min(wider.high, 1.0))
            estimate = Estimate(estimate.value, low, high, estimate.samples)
        found[f"P(r < {_exact(threshold)})"] = estimate
    for level in quantiles:
        found[f"quantile {_exact(level)}"] = tails.quantile(pooled, level, confidence)
    for level in levels:
        estimate = tails.cvar(pooled, level, confidence)
        if math.isfinite(estimate.low):
            estimate = over_seeds(estimate, tails.tail_influence(values, level))
        found[f"CVaR {_exact(level)}"] = estimate
    for name, array in (others or {}).items():
        found[f"mean {name}"] = over_seeds(tails.mean(array.reshape(-1, samples), confidence), array)
    return found


def _exact(number: float) -> str:
    """Short, and different for different numbers."""
    short = f"{number:g}"
    return short if float(short) == number else repr(float(number))


def check_same_settings(samples: Sequence[SampleSet]) -> None:
    """
    Refuses samples that were not drawn alike, and those of one model twice.

    Args:
        samples (`Sequence[SampleSet]`):
            Samples, one a model.

    Raises:
        `ValueError`: If there are none, or prompts, rewards, reference or settings differ, or two are of the same weights.
    """
    if not samples:
        raise ValueError("There are no samples; name at least one folder.")
    models: dict[str, SampleSet] = {}
    first = samples[0]
    for each in samples:
        one, other = ({key: value for key, value in it.header.items() if key != "model"} for it in (first, each))
        name = header_difference(one, other, ["settings.seed"])
        if name is not None:
            raise ValueError(
                f"`{each.folder}` and `{first.folder}` were sampled with another `{name}`; compare samples of the same "
                f"prompts, rewards and settings{remedy(name)}."
            )
        weights = each.header["model"]["weights"]
        if weights in models:
            raise ValueError(f"`{each.folder}` and `{models[weights].folder}` are of the same model; leave one out.")
        models[weights] = each
