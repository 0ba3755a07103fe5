"""How time and memory of a completion grow with N and with the prompt's length, ours against TRL's RLOO; draws a figure.

    python benchmarks/cost_growth.py --output_dir runs/growth
    python benchmarks/cost_growth.py --model 135m --prompts 1 --output_dir runs/growth   # on an accelerator

Each point is a shape of `step_cost.py`, measured as there. `growth.json` holds the points, `growth.png` the figure.
"""

import argparse
import json
import warnings
from pathlib import Path

import matplotlib


matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import LogLocator
from step_cost import SHAPES, Shape, arguments, measure, on_what
from transformers.utils import logging


METHODS = {"RLOO": ("TRL's RLOO", "#767676", "s"), "REINFORCE": ("REINFORCE, ours", "#3b7dd8", "o")}
METHODS["RePULSe"] = ("RePULSe", "#d1495b", "D")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="tiny")
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--counts", type=int, nargs="+", default=[2, 4, 8, 16, 32, 64], help="N, at prompts of 128")
    parser.add_argument("--lengths", type=int, nargs="+", default=[16, 64, 256, 1024, 2048], help="at N = 8")
    parser.add_argument("--new", type=int, default=20, help="tokens of a completion")
    parser.add_argument("--prompts", type=int, default=1, help="P, prompts of a RePULSe step")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3, help="steps of a turn, the first of them warm-up")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.set_verbosity_error()
    own = vars(options) | {"yardsticks": [name for name in options.methods if name == "RLOO"]}
    settings = argparse.Namespace(**vars(arguments().parse_args([])) | own)
    sweeps = {
        "completions of a prompt, N": {n: Shape(128, options.new, n) for n in options.counts},
        "tokens of a prompt": {length: Shape(length, options.new, 8) for length in options.lengths},
    }
    points: dict[str, dict[int, dict]] = {}
    for axis, shapes in sweeps.items():
        points[axis] = {}
        for x, shape in shapes.items():
            points[axis][x] = measure(shape, settings)
            print(axis, x, {name: [round(v, 5) for v in found] for name, found in points[axis][x].items()}, flush=True)
    options.output_dir.mkdir(parents=True, exist_ok=True)
    on = f"Llama, shape {options.model}, {on_what()}, P = {options.prompts}, {options.new} new tokens"
    (options.output_dir / "growth.json").write_text(json.dumps({"on": on, "points": points}), encoding="utf-8")
    draw(points, on, options)


def draw(points: dict, on: str, options: argparse.Namespace) -> None:
    """The figure: time above, memory below, a column a sweep."""
    figure, axes = plt.subplots(2, len(points), figsize=(9, 6), sharex="col", constrained_layout=True)
    for column, (axis, found) in enumerate(points.items()):
        for row, (label, scale, place) in enumerate((("ms a completion", 1e3, 0), ("peak MiB a completion", 1.0, 2))):
            panel = axes[row][column]
            for name in options.methods:
                title, colour, marker = METHODS[name]
                drawn = {
                    x: 2 * options.prompts * (x if axis.endswith("N") else 8) if row else 1 for x in found
                }  # completions of a step
                values = [scale * measured[name][place] / drawn[x] for x, measured in found.items()]
                panel.plot(list(found), values, color=colour, marker=marker, markersize=4, linewidth=1.4, label=title)
            panel.set_xscale("log", base=2)
            panel.set_yscale("log")
            panel.set_xticks(list(found), [str(x) for x in found])
            panel.minorticks_off()
            panel.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            panel.yaxis.set_major_formatter("{x:g}")
            panel.set_ylabel(label)
            panel.grid(alpha=0.25)
            if row:
                panel.set_xlabel(axis)
    axes[0][0].legend(frameon=False)
    axes[0][0].set_title("prompts of 128 tokens", fontsize=10)
    axes[0][1].set_title("N = 8", fontsize=10)
    figure.suptitle(on, fontsize=9)
    figure.savefig(options.output_dir / "growth.png", dpi=160)


if __name__ == "__main__":
    main()
