"""Figures of a training run."""

import math
from pathlib import Path
from typing import Any, Literal

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator


_MODELS = {  # label, colour, line style
    "policy": ("policy", "#1f5fa8", "-"),
    "proposal": ("proposal", "#c8502d", (0, (5, 1.6))),
}
_PANELS = {
    "expected_reward": ("Expected reward", "reward"),
    "log_prob_bad": ("Exact log P(bad)", "nats"),
}
_AXES = {"samples": "samples drawn", "update": "policy updates"}
_INK, _FAINT = "#333333", "#dddddd"


def plot_training(
    history: list[dict[str, Any]], path: str | Path, x: Literal["samples", "update"] = "samples"
) -> None:
    """
    Draws expected reward and exact log P(bad) of policy and proposal along a training run.

    Args:
        history (`list[dict]`):
            [`~trl_repulse.evaluation.tracking.ExactTrackingCallback.history`], or the `history` of a results file.
            Where it has log P(bad) alone, so has the figure.
        path (`str` or `Path`):
            File to write; its suffix decides the format, its folder is created if missing.
        x (`str`, *optional*, defaults to `"samples"`):
            The horizontal axis: completions drawn (`"samples"`) or updates of the policy (`"update"`).
    """
    both = any(entry["proposal"] is not None for entry in history)
    axis = "samples drawn (policy + proposal)" if both and x == "samples" else _AXES[x]
    panels = {key: value for key, value in _PANELS.items() if any(key in entry["policy"] for entry in history)}
    figure = Figure(figsize=(4.2 * len(panels), 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    figure.get_layout_engine().set(w_pad=0.08, h_pad=0.06, wspace=0.06)
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for panel, (quantity, (title, unit)) in zip(axes, panels.items(), strict=True):
        for model, (label, colour, style) in _MODELS.items():
            points = [(entry[x], entry[model][quantity]) for entry in history if entry[model] is not None]
            points = [(place, value) for place, value in points if value is not None and math.isfinite(value)]
            if not points:
                continue
            panel.plot(*zip(*points, strict=True), color=colour, linestyle=style, linewidth=2.0, label=label)
            panel.plot(*points[-1], "o", color=colour, markersize=4.5)
        panel.set_title(title, loc="left", fontsize=11, color=_INK, fontweight="bold")
        panel.set_ylabel(unit, color=_INK)
        panel.set_xlabel(axis, color=_INK)
        panel.xaxis.set_major_formatter(EngFormatter(sep=""))
        panel.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        panel.margins(x=0.02, y=0.08)
        panel.set_xlim(left=0)
        panel.grid(axis="y", color=_FAINT, linewidth=0.8)
        panel.set_axisbelow(True)
        panel.spines[["top", "right"]].set_visible(False)
        panel.spines[["left", "bottom"]].set_color("#999999")
        panel.tick_params(colors=_INK, labelsize=9, length=3)
    if both:
        axes[0].legend(frameon=False, fontsize=9, labelcolor=_INK)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160, facecolor="white")
