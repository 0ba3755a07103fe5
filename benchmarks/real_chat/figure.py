"""
Reward and KL of training runs against the seconds that they took.

    python -m benchmarks.real_chat.figure runs/reinforce runs/repulse --output docs/assets/real_chat.png
"""

import argparse
import json
from pathlib import Path

from matplotlib.figure import Figure

from trl_repulse._numbers import kl_per_completion


PANELS = {"Reward of samples": "reward", "KL to the initial policy": "nats per completion"}
COLOURS = ("#1f5fa8", "#c8502d", "#3f8f4f", "#7b52a1")


def curves(run: Path) -> tuple[str, list[tuple[float, ...]]]:
    """The method of a run, and seconds, reward and KL of each entry of its log."""
    results = json.loads((run / "results.json").read_text(encoding="utf-8"))
    log = json.loads((run / "trainer_state.json").read_text(encoding="utf-8"))["log_history"]
    an_update = results["seconds"] / results["policy_updates"]
    entries = [entry for entry in log if "reward" in entry]
    return results["method"], [(e["step"] * an_update, e["reward"], kl_per_completion(e)) for e in entries]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="folders of training commands")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args(argv)
    figure = Figure(figsize=(8.4, 3.2), layout="constrained")
    panels = figure.subplots(1, 2)
    for run, colour in zip(options.runs, COLOURS, strict=False):
        method, points = curves(run)
        seconds, *series = zip(*points, strict=True)
        for panel, values in zip(panels, series, strict=True):
            panel.plot(seconds, values, color=colour, linewidth=2.0, marker="o", markersize=3.5, label=method)
    for panel, (title, unit) in zip(panels, PANELS.items(), strict=True):
        panel.set_title(title, loc="left", fontsize=11, fontweight="bold")
        panel.set(xlabel="seconds of training", ylabel=unit, xlim=(0, None))
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="y", color="#dddddd", linewidth=0.8)
    panels[0].legend(frameon=False, fontsize=9)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.output, dpi=120, facecolor="white")


if __name__ == "__main__":
    main()
