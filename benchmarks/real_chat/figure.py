"""
Reward and KL of training runs against the seconds that they took; or, of the stored runs, P(bad) against seconds and against KL.

    python -m benchmarks.real_chat.figure runs/reinforce runs/repulse --output docs/assets/real_chat.png
    python -m benchmarks.real_chat.figure --store benchmarks/real_chat/results.json --output docs/assets/real_chat_tails.png
"""

import argparse
import json
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from scipy import stats

from trl_repulse._numbers import kl_per_completion

from .results import Row, read


PANELS = {"Reward of samples": "reward", "KL to the initial policy": "nats per completion"}
SHOWN = ("REINFORCE", "RePULSe, 3 extra")  # of the stored methods, in these colours
PREFIXES = ("REINFORCE, prefixes", "REINFORCE, prefixes, KL coefficient 0.13")
COLOURS = ("#1f5fa8", "#c8502d", "#3f8f4f", "#7b52a1")

Point = tuple[float, float, float]  # seconds, KL in nats, and the share of answers with a reward under 0


def curves(run: Path) -> tuple[str, list[tuple[float, ...]]]:
    """The method of a run, and seconds, reward and KL of each entry of its log."""
    results = json.loads((run / "results.json").read_text(encoding="utf-8"))
    log = json.loads((run / "trainer_state.json").read_text(encoding="utf-8"))["log_history"]
    an_update = results["seconds"] / results["policy_updates"]
    entries = [entry for entry in log if "reward" in entry]
    return results["method"], [(e["step"] * an_update, e["reward"], kl_per_completion(e)) for e in entries]


def draw_curves(figure: Figure, runs: list[Path]) -> None:
    """Reward and KL against seconds, a line for each run."""
    panels = figure.subplots(1, 2)
    for run, colour in zip(runs, COLOURS, strict=False):
        method, points = curves(run)
        seconds, *series = zip(*points, strict=True)
        for panel, values in zip(panels, series, strict=True):
            panel.plot(seconds, values, color=colour, linewidth=2.0, marker="o", markersize=3.5, label=method)
    for panel, (title, unit) in zip(panels, PANELS.items(), strict=True):
        panel.set_title(title, loc="left", fontsize=11, fontweight="bold")
        panel.set(xlabel="seconds of training", ylabel=unit, xlim=(0, None))


def shares(rows: list[Row]) -> dict[str, list[Point]]:
    """The points of each method's runs for equal seconds."""
    found: dict[str, list[Point]] = {}
    for row in (row for row in rows if row.get("budget")):
        answers = row["samples"] * len(row["sums"]["reward"])
        kl, bad = (sum(row["sums"][name]) / answers for name in ("KL, nats", "P(r < 0)"))
        found.setdefault(row["method"], []).append((row["budget"], kl, bad))
    return found


def at_equal_kl(base: list[Point], other: list[Point]) -> tuple[float, float, float]:
    """
    P(r < 0) of other runs over that of `base` at the same KL, with the ends of a 95 % interval over runs: least squares of log P(r < 0) on
    KL and method, with weights as counts have them.
    """
    runs = [(kl, bad, points is other) for points in (base, other) for _, kl, bad in points]
    kl, bad, is_other = np.array(runs).T
    weights, columns = np.sqrt(bad), np.stack([np.ones_like(kl), kl, is_other], axis=1)
    weighted, target = columns * weights[:, None], np.log(bad) * weights
    solution, *_ = np.linalg.lstsq(weighted, target)
    degrees = len(runs) - len(solution)
    variance = np.sum((target - weighted @ solution) ** 2) / degrees * np.linalg.inv(weighted.T @ weighted)
    half = stats.t.ppf(0.975, degrees) * np.sqrt(variance[2, 2])
    factor, low, high = np.exp(solution[2] + np.array([0, -half, half]))
    return float(factor), float(low), float(high)


def draw_shares(figure: Figure, of_method: dict[str, list[Point]]) -> None:
    """A point a run: REINFORCE, RePULSe with the means of their seeds, and all other methods in grey, against KL alone."""
    by_time, by_kl = figure.subplots(1, 2, sharey=True)
    shown = dict(zip(SHOWN, COLOURS, strict=False))
    for method, points in of_method.items():
        seconds, kl, bad = zip(*points, strict=True)
        colour = shown.get(method, "#aaaaaa")
        by_kl.plot(kl, bad, "o", color=colour, markersize=4.5)
        if method in shown:
            by_time.plot(seconds, bad, "o", color=colour, markersize=4.5)
            means = [
                (at, np.mean([y for x, y in zip(seconds, bad, strict=True) if x == at])) for at in sorted({*seconds})
            ]
            by_time.plot(*zip(*means, strict=True), color=colour, linewidth=2.0, label=method.split(",")[0])
    by_kl.plot([], [], "o", color="#aaaaaa", label="all other runs")
    by_time.set(yscale="log", ylabel="P(r < 0), unseen prompts", xlabel="CPU seconds of training", xlim=(0, None))
    by_kl.set(xlabel="KL to the initial policy, nats", xlim=(0, None))
    by_kl.legend(frameon=False, fontsize=9)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="*", help="folders of training commands")
    parser.add_argument("--store", type=Path, help="file that `benchmarks.real_chat.race --store` has written")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args(argv)
    figure = Figure(figsize=(8.4, 3.2), layout="constrained")
    if options.store is not None:
        of_method = shares(read(options.store))
        draw_shares(figure, of_method)
        base = of_method.get(SHOWN[0], [])
        for names in (SHOWN[1:], PREFIXES):
            other = [point for name in names for point in of_method.get(name, ())]
            if min(len(base), len(other)) > 2 and all(bad for *_, bad in base + other):
                ends = "{:.2g} ({:.2g} to {:.2g})".format(*at_equal_kl(base, other))
                print(f"At equal KL, P(r < 0) of {names[0]} over REINFORCE's: {ends}")
    else:
        draw_curves(figure, options.runs)
    for panel in figure.axes:
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="y", color="#dddddd", linewidth=0.8)
    if figure.axes[0].lines:
        figure.axes[0].legend(frameon=False, fontsize=9)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.output, dpi=120, facecolor="white")


if __name__ == "__main__":
    main()
