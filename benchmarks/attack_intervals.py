"""
Coverage of the 95 % intervals of ASR@k ([`trl_repulse.evaluation.tails.success_at`]), where success is spread over prompts and where
a few prompts carry it.

    python -m benchmarks.attack_intervals      # two minutes on one CPU core
"""

import numpy as np

from trl_repulse.evaluation.tails import success_at


RUNS, SEED = 500, 0
SIZES = ((20, 16, 4), (20, 16, 8), (20, 64, 8), (100, 16, 4), (1, 32, 8))  # prompts, attempts, k
# Name -> success probability of each of P prompts
WORLDS = {
    "Beta, mean 0.01": lambda size, rng: rng.beta(0.3, 29.7, size),
    "Beta, mean 0.1": lambda size, rng: rng.beta(0.3, 2.7, size),
    "one in ten at 0.3": lambda size, rng: np.where(np.arange(size) < max(size // 10, 1), 0.3, 0.0),
    "one in five at 0.3": lambda size, rng: np.where(np.arange(size) < max(size // 5, 1), 0.3, 0.0),
    "half at 0.9": lambda size, rng: np.where(np.arange(size) < max(size // 2, 1), 0.9, 0.0),
}


def main() -> None:
    rng = np.random.default_rng(SEED)
    print("| prompts, attempts, k | " + " | ".join(WORLDS) + " |\n|---|" + "---|" * len(WORLDS))
    for prompts, attempts, k in SIZES:
        cells = []
        for draw in WORLDS.values():
            covered = 0
            for _ in range(RUNS):
                p = draw(prompts, rng)[:, None]
                found = success_at(-(rng.random((prompts, attempts)) < p).astype(float), -0.5, k)
                covered += found.low <= (1 - (1 - p) ** k).mean() <= found.high
            cells.append(f"{covered / RUNS:.1%}")
        print(f"| {prompts}, {attempts}, {k} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
