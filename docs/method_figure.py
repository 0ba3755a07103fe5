"""
The picture of the method in the README and in method.md, for light and dark pages. Completions and bars are made up.

    python docs/method_figure.py
"""

from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle


ASSETS = Path(__file__).parent / "assets"
# Ink, faint ink, fill of boxes, good, bad, policy, hot samples
THEMES = {
    "light": ("#24292f", "#6e7781", "#f3f5f7", "#1a7f37", "#c8352d", "#1f5fa8", "#b35900"),
    "dark": ("#e6edf3", "#9198a1", "#1b222b", "#56c26a", "#ff7b72", "#79b8ff", "#f0a34a"),
}
# Completion and reward
POLICY_SAMPLES = [("friendly", 3.1), ("helpful", 2.9), ("late", 0.4), ("quick", 2.4)]
HOT_SAMPLES = [("friendly", 3.1), ("▇▇▇▇ ▇▇▇", -6.2), ("early", 1.0), ("▇▇▇ ▇▇▇▇▇", -5.4)]
WEIGHTS = [0.0, 0.75, 0.0, 0.25]  # normalised over the bad ones; the likelier under the policy, the larger
THRESHOLD = -4.0  # rewards under it are bad
TOP, BOTTOM = 3.55, 1.25  # centres of the two rows


def draw(theme: str, path: Path) -> None:
    """Draws the picture in the colours of a theme."""
    ink, faint, fill, good, bad, policy, hot = THEMES[theme]
    figure = Figure(figsize=(10.4, 4.6))
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, 10.4), ylim=(0.3, 4.9))
    axes.axis("off")

    def box(x: float, y: float, width: float, height: float, colour: str, text: str, note: str = "") -> None:
        shape = {"boxstyle": "round,pad=0,rounding_size=0.1", "facecolor": fill, "edgecolor": colour, "linewidth": 1.4}
        axes.add_patch(FancyBboxPatch((x, y - height / 2), width, height, **shape))
        middle = x + width / 2
        axes.text(
            middle, y + (0.19 if note else 0), text, color=ink, ha="center", va="center", fontsize=12, weight="bold"
        )
        if note:
            axes.text(middle, y - 0.2, note, color=faint, ha="center", va="center", fontsize=10, linespacing=1.25)

    titles = {3.9: "completion", 5.15: "reward", 6.5: "advantage", 9.1: "update of the policy"}
    for x, title in titles.items():
        axes.text(x, 4.68, title, color=faint, ha="center", va="center", fontsize=11, style="italic")
    box(0.15, 2.4, 1.2, 1.0, faint, "prompt", "“The waiter\nwas …”")
    box(1.7, TOP, 1.5, 1.0, policy, "policy", "temperature 1")
    box(1.7, BOTTOM, 1.5, 1.0, hot, "hot policy", "or a learned\nproposal")
    arrow(axes, (1.35, 2.6), (1.7, TOP - 0.2), ink)
    arrow(axes, (1.35, 2.2), (1.7, BOTTOM + 0.2), ink)

    total = sum(reward for _, reward in POLICY_SAMPLES)
    others = [(total - reward) / (len(POLICY_SAMPLES) - 1) for _, reward in POLICY_SAMPLES]
    advantages = [0.4 * (reward - mean) for (_, reward), mean in zip(POLICY_SAMPLES, others, strict=True)]
    rows = {TOP: (POLICY_SAMPLES, advantages, 6.8), BOTTOM: (HOT_SAMPLES, [1.2 * w for w in WEIGHTS], 6.0)}
    for centre, (samples, sizes, zero) in rows.items():
        arrow(axes, (3.2, centre), (3.42, centre), ink)
        arrow(axes, (7.5, centre), (7.9, centre), ink)
        axes.plot([zero, zero], [centre - 0.8, centre + 0.8], color=faint, linewidth=1)
        for place, ((text, reward), size) in enumerate(zip(samples, sizes, strict=True)):
            y = centre + 0.6 - 0.4 * place
            is_bad = reward < THRESHOLD
            colour = bad if is_bad else good if size > 0 else faint
            axes.text(3.5, y, text, color=bad if is_bad else ink, va="center", fontsize=11.5)
            number = f"{reward:.1f}".replace("-", "−")
            axes.text(5.4, y, number, color=bad if is_bad else ink, ha="right", va="center", fontsize=11.5)
            axes.add_patch(Rectangle((min(zero, zero + size), y - 0.1), abs(size), 0.2, color=colour, linewidth=0))
    axes.text(6.5, 2.37, "importance weight", color=faint, ha="center", va="center", fontsize=11, style="italic")
    box(7.9, TOP, 2.35, 1.0, good, "policy gradient", "raises what scores\nabove the others")
    box(7.9, BOTTOM, 2.35, 1.0, bad, "α × negative term", "lowers what is bad,\nhowever rare it is")
    axes.text(9.08, 2.4, "+", color=ink, ha="center", va="center", fontsize=20, weight="bold")
    figure.savefig(path, transparent=True, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=100)


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], colour: str) -> None:
    style = {"arrowstyle": "-|>", "mutation_scale": 13, "shrinkA": 0, "shrinkB": 0}
    axes.add_patch(FancyArrowPatch(start, end, color=colour, linewidth=1.4, **style))


if __name__ == "__main__":
    matplotlib.rcParams["svg.hashsalt"] = "trl-repulse"
    for theme in THEMES:
        draw(theme, ASSETS / f"method_{theme}.svg")
