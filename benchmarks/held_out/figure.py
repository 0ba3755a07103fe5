"""
The README's figure: P(bad) against KL of finished runs in a held-out world, at several KL coefficients a method: a point a run, open where nothing bad was
found, and the arithmetic mean of each.

    python -m benchmarks.held_out.figure benchmarks/held_out/results/school docs/assets/held_out.png
    python -m benchmarks.held_out.figure benchmarks/held_out/results/school docs/assets/held_out_all.png --all --completions 16000
"""

import argparse
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from .table import load


# Label, colour, marker -> names of its runs, by KL coefficient
METHODS = {
    ("REINFORCE", "#8a8a8a", "s"): {
        0.2: "REINFORCE, learning rate 6e-4",
        0.4: "REINFORCE, KL coefficient 0.4",
    },
    ("RePULSe", "#c8502d", "o"): {
        0.2: "RePULSe, temperature 2, KL coefficient 0.2",
        0.4: "RePULSe, temperature 2, KL coefficient 0.4",
    },
    ("PPO", "#1f5fa8", "D"): {
        0.2: "PPO, learning rate 1.2e-3",
        0.4: "PPO, KL coefficient 0.4",
    },
    ("GRPO", "#d88fb4", "<"): {0.4: "GRPO, rewards not scaled, KL coefficient 0.4"},
    ("RePULSe on GRPO", "#7d4fa8", "P"): {0.4: "RePULSe on GRPO, rewards not scaled, KL coefficient 0.4, alpha 1"},
    ("RePULSe on PPO", "#d99a00", "^"): {
        0.2: "PPO, temperature 2, KL coefficient 0.2",
        0.35: "PPO, temperature 2, KL coefficient 0.35",
        0.4: "PPO, temperature 2, KL coefficient 0.4",
    },
    (
        "policy as proposal",
        "#3f8f4f",
        "v",
    ): {  # nearly all of its objective is the worst sample of a prompt, so that KL weighs less
        0.4: "policy as proposal, KL coefficient 0.4",
        2.0: "policy as proposal, KL coefficient 2",
    },
}
# What else there is at a KL coefficient of 0.2, or without one
OTHERS = {
    ("REINFORCE, transformed rewards", "#5a5a5a", "x"): "REINFORCE, transformed rewards, learning rate 6e-4",
    ("REINFORCE, CVaR", "#7d4fa8", "P"): "REINFORCE, CVaR 0.2, learning rate 6e-4",
    ("REINFORCE, constraint", "#8a6a1f", "X"): "REINFORCE, constraint 1e-5, learning rate 1.2e-3",
    ("GRPO", "#d88fb4", "<"): "GRPO, rewards not scaled, learning rate 6e-4",
    ("policy as proposal", "#3f8f4f", "v"): "policy as proposal, learning rate 1.2e-3",
    ("DPO", "#1fa3a3", "*"): "DPO, beta 2, learning rate 1e-4",
    ("iterative DPO", "#0f5f6f", "h"): "iterative DPO, beta 2, learning rate 1e-4",
    ("KTO", "#6fb7e8", "p"): "KTO, beta 2, learning rate 1e-4",
    ("NPO", "#2b2b6f", "d"): "NPO, learning rate 3e-5",
    ("RAFT", "#e07b5a", ">"): "RAFT, learning rate 1e-4",
    ("conditional fine-tuning", "#9fbf3f", "8"): "conditional SFT, learning rate 1e-3",
}
LEAST = 1e-9  # what no sample showed is drawn here


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("figure", type=Path)
    parser.add_argument("--completions", type=int, default=64_000)
    parser.add_argument("--all", action="store_true", help="every method, at a KL coefficient of 0.2 alone")
    options = parser.parse_args()
    found = load([options.folder])

    methods = METHODS
    if options.all:
        ours = {style: names for style, names in METHODS.items() if style not in OTHERS}
        methods = {style: {0.2: names[0.2]} for style, names in ours.items() if 0.2 in names}
        methods |= {style: {0.2: name} for style, name in OTHERS.items()}

    figure = Figure(figsize=(8.4 if options.all else 6.4, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for (label, colour, marker), names in methods.items():
        means = []
        for coefficient, name in names.items():
            runs = [run["policy"] for run in found[name, options.completions]]
            kl, p_bad = (np.array([np.mean(run[key]) for run in runs]) for key in ("kl", "p_bad"))
            for part, face in ((p_bad > 0, colour), (p_bad == 0, "none")):
                style = {
                    "color": colour,
                    "markerfacecolor": face,
                    "alpha": 0.45,
                    "markersize": 4,
                    "markeredgewidth": 0.8,
                }
                axes.plot(kl[part], p_bad[part].clip(LEAST), marker, linestyle="none", **style)
            means.append((kl.mean(), p_bad.mean().clip(LEAST)))
            print(
                f"{label}, KL coefficient {coefficient}: KL {means[-1][0]:.2f}, P(bad) {means[-1][1]:.1e}, {len(runs)} runs"
            )
        axes.plot(*zip(*means, strict=True), color=colour, marker=marker, markersize=9, linewidth=1.6, label=label)
    axes.set_yscale("log")
    axes.set_xlabel("KL to the initial policy, nats")
    axes.set_ylabel("P(bad) on unseen prompts")
    axes.grid(axis="y", color="#dddddd", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    if options.all:
        figure.legend(frameon=False, fontsize=9, loc="outside right upper")
    else:
        axes.legend(frameon=False, fontsize=9)
    options.figure.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.figure, dpi=160)


if __name__ == "__main__":
    main()
