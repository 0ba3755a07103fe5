"""
The README's figure: P(bad) against KL of finished runs in a held-out world, a point a run and a mean a method.

    python -m benchmarks.held_out.figure benchmarks/held_out/results/school docs/assets/held_out.png
"""

import argparse
import math
from dataclasses import replace
from pathlib import Path

import numpy as np

from trl_repulse.evaluation.frontier import Point, Run, make_frontier
from trl_repulse.plots import plot_frontier

from .table import load


METHODS = {  # as the runs' files name them: as the figure does
    "RePULSe, hot policy, learning rate 6e-4": "RePULSe (lr 6e-4)",
    "REINFORCE, learning rate 6e-4": "REINFORCE (lr 6e-4)",
    "PPO, learning rate 1.2e-3": "PPO (lr 1.2e-3)",
    "REINFORCE, learning rate 1.2e-3": "REINFORCE (lr 1.2e-3)",
}


def without_interval_of_two(point: Point) -> Point:
    """Student's interval of two runs would be wider than the figure."""
    if len(point.runs) > 2:
        return point
    x, y = (replace(it, low=-math.inf, high=math.inf) for it in (point.x, point.y))
    return replace(point, x=x, y=y)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("figure", type=Path)
    parser.add_argument("--completions", type=int, default=64_000)
    options = parser.parse_args()
    found = load([options.folder])
    runs = []
    for method, label in METHODS.items():
        for run in found[method, options.completions]:
            p_bad, kl = (float(np.mean(run["policy"][name])) for name in ("p_bad", "kl"))
            runs.append(Run(label, kl, math.log(p_bad)))
    frontier = make_frontier(runs, "kl", "log_prob_bad")
    frontier = replace(frontier, points=tuple(without_interval_of_two(point) for point in frontier.points))
    plot_frontier(frontier, options.figure)
    print(frontier.to_markdown())


if __name__ == "__main__":
    main()
