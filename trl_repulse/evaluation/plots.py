"""Figures of training runs and evaluations."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from .._numbers import kl_per_completion
from .comparison import Comparison


MODELS = {  # label, colour, line style
    "policy": ("policy", "#1f5fa8", "-"),
    "proposal": ("proposal", "#c8502d", (0, (5, 1.6))),
}
_Metrics = dict[tuple[str, str], dict[str, tuple[str, ...]]]
_LOGGED: _Metrics = {  # title and unit -> metric of each model
    ("Reward of samples", "reward"): {"policy": ("reward",), "proposal": ("proposal/reward",)},
    ("Bad samples", "share"): {"policy": ("bad_fraction",), "proposal": ("proposal/bad_fraction",)},
    ("KL to reference", "nats per completion"): {"policy": ("kl_per_completion",)},
    ("Estimated P(bad)", "probability"): {"policy": ("negative/p_bad",)},
    ("Effective sample size", "samples"): {"proposal": ("proposal/ess", "negative/ess")},
    ("Collapse gauge: gap of log Z", "nats; above 3: collapse"): {"proposal": ("proposal/log_z_gap",)},
}
_LOGARITHMIC = {"Bad samples", "Estimated P(bad)"}  # 0 is not drawn
# Title, unit and horizontal axis of a panel, and the points of each model
Panel = tuple[str, str, str, dict[str, list[tuple[float, float]]]]
INK, _FAINT = "#333333", "#dddddd"


def plot_training(logs: Sequence[dict[str, Any]], path: str | Path, panels: Sequence[Panel] = ()) -> None:
    """
    Draws a training run: the main metrics that were logged. Raises `ValueError` if there is nothing to draw.

    Args:
        logs (`Sequence[dict]`): `trainer.state.log_history`.
        path (`str` or `Path`): File to write. Its suffix is the format; its folder is created.
        panels (`Sequence`, *optional*): Further panels, before those of the metrics.
    """
    panels = [*panels, *logged_panels(logs)]
    if not panels:
        raise ValueError("There is nothing to draw; log at least once.")
    figure, axes = draw_panels(panels)
    for ax, (*_, series) in zip(axes, panels, strict=True):
        if len(series) > 1:
            ax.legend(frameon=False, fontsize=9, labelcolor=INK)
            break
    _save(figure, path)


def draw_panels(panels: Sequence[Panel]) -> tuple[Figure, list[Axes]]:
    """A figure of panels, and their axes."""
    columns = min(len(panels), 4)
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(4.2 * columns, 3.4 * rows), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.08, h_pad=0.06, wspace=0.06)
    axes = list(figure.subplots(rows, columns, squeeze=False).flatten())
    for ax in axes[len(panels) :]:
        ax.remove()
    for ax, (title, unit, axis, series) in zip(axes, panels, strict=False):
        # Logarithmic where all that is shown is above 0
        if title in _LOGARITHMIC and any(value > 0 for points in series.values() for _, value in points):
            ax.set_yscale("log", nonpositive="mask")
        for model, points in series.items():
            label, colour, style = MODELS[model]
            ax.plot(*zip(*points, strict=True), color=colour, linestyle=style, linewidth=2.0, label=label)
            ax.plot(*points[-1], "o", color=colour, markersize=4.5)
        ax.set_title(title, loc="left", fontsize=11, color=INK, fontweight="bold")
        ax.xaxis.set_major_formatter(EngFormatter(sep=""))
        ax.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        ax.margins(x=0.02, y=0.08)
        ax.set_xlim(left=0)
        _tidy(ax, axis, unit)
    return figure, axes[: len(panels)]


def logged_panels(logs: Sequence[dict[str, Any]], metrics: _Metrics = _LOGGED) -> list[Panel]:
    """Panels of logged metrics. `metrics` has by title and unit each model's names of the metric; those not logged are left out."""
    panels = []
    known = [entry | {"kl_per_completion": kl_per_completion(entry)} for entry in logs]
    # The hot policy's sample size says nothing: most prompts with a bad sample have one
    left_out = "negative/ess" if any("negative/p_bad" in entry for entry in logs) else None
    for (title, unit), models in metrics.items():
        series = {}
        for model, names in models.items():
            values = [(entry["step"], entry.get(name)) for entry in known for name in names if name != left_out]
            points = [(step, value) for step, value in values if value is not None and math.isfinite(value)]
            if points:
                series[model] = points
        if series:
            panels.append((title, unit, "policy updates", series))
    return panels


def plot_comparison(comparisons: Sequence[Comparison], path: str | Path) -> None:
    """Draws P(r < η) of each model, and the differences to the first one with their paired intervals, a row for each η."""
    first = comparisons[0]
    names = [name for name in first.differences if name.startswith("P(")]
    figure = Figure(figsize=(8.4, 1.0 + (0.6 + 0.3 * len(comparisons)) * max(len(names), 1)), layout="constrained")
    for (shares, changes), name in zip(figure.subplots(len(names), 2, squeeze=False), names, strict=True):
        models = [first.names[0], *(each.names[1] for each in comparisons)]
        diffs = [each.differences[name] for each in comparisons]
        shares.barh(models, [diffs[0].first, *(each.second for each in diffs)], color=MODELS["policy"][1], height=0.5)
        for model, each in zip(models[1:], diffs, strict=True):
            changes.plot([each.low, each.high], [model, model], color=MODELS["proposal"][1], linewidth=2.0)
            changes.plot(each.value, model, "o", color=MODELS["proposal"][1], markersize=5)
        changes.axvline(0, color="#999999", linewidth=1.2, zorder=0)
        _tidy(shares, name, "")
        _tidy(changes, f"difference to {models[0]}, {100 * first.confidence:g} % interval", "")
        for panel in (shares, changes):
            panel.grid(axis="x", color=_FAINT, linewidth=0.8)
            panel.margins(y=0.3)
            panel.invert_yaxis()
    _save(figure, path)


def _tidy(panel: Axes, x_label: str, y_label: str) -> None:
    panel.set_xlabel(x_label, color=INK)
    panel.set_ylabel(y_label, color=INK)
    panel.grid(axis="y", color=_FAINT, linewidth=0.8)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)
    panel.spines[["left", "bottom"]].set_color("#999999")
    panel.tick_params(colors=INK, labelsize=9, length=3)


def _save(figure: Figure, path: str | Path) -> None:
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160, facecolor="white")
