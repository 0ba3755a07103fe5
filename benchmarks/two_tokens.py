"""RePULSe against REINFORCE in the world of two tokens: exact log P(bad) at equal numbers of samples.

    python -m benchmarks.two_tokens --output_dir runs/two_tokens --workers 2

Every run is `examples/repulse.py` with other flags, in a process of one thread. Each method runs with the same number of settings,
every setting with five seeds, and all are shown; marked is, of a method's settings within 0.1 of its best mean reward, the
one with the lowest mean log P(bad). RePULSe draws as many completions from its proposal as from the policy, so it makes half
as many policy updates. Runs that left a `results.json` are not repeated.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from examples.worlds import two_tokens


EXAMPLE = Path(__file__).parents[1] / "examples" / "repulse.py"
UPDATES = 1600  # of REINFORCE; RePULSe makes half as many
SEEDS = range(5)
SETTINGS: dict[str, list[dict[str, float]]] = {
    "REINFORCE": [{"alpha": 0.0, "learning_rate": rate} for rate in (1e-3, 2e-3)],
    "RePULSe": [{"alpha": 1.0, "learning_rate": rate} for rate in (4e-4, 5e-4)],
}


def run(folder: Path, method: str, beta: float, setting: dict[str, float], seed: int) -> dict:
    """One training run, unless it is there already; its results."""
    name = "-".join([method, f"beta{beta}", *(f"{key}{value:g}" for key, value in setting.items()), f"seed{seed}"])
    output_dir = folder / name
    if not (output_dir / "results.json").exists():
        updates = UPDATES if method == "REINFORCE" else UPDATES // 2
        flags = {"output_dir": output_dir, "seed": seed, "beta": beta, "max_steps": updates, **setting}
        flags |= {"tracking_every": updates // 20, "logging_steps": updates // 4, "disable_tqdm": "true"}
        command = [
            sys.executable,
            str(EXAMPLE),
            *two_tokens.flags("repulse"),
            *(part for key, value in flags.items() for part in (f"--{key}", str(value))),
        ]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{name} failed:\n{done.stderr[-2000:]}")
        print(f"done: {name}", flush=True)
    return json.loads((output_dir / "results.json").read_text())


def choose(compared: list[tuple]) -> list[tuple]:
    """Of each KL coefficient and method: among settings within 0.1 of the best mean reward, that with the lowest log P(bad)."""

    def mean(row: tuple, key: str) -> float:
        return statistics.mean(r["final"][key] for r in row[-1])

    chosen = []
    for group in dict.fromkeys(row[:2] for row in compared):
        rows = [row for row in compared if row[:2] == group]
        best = max(mean(row, "expected_reward") for row in rows)
        close = [row for row in rows if mean(row, "expected_reward") > best - 0.1]
        chosen.append(min(close, key=lambda row: mean(row, "log_prob_bad")))
    return chosen


def interval(values: list[float]) -> str:
    """Mean and half-width of the 95 % t-interval over five seeds."""
    half = 2.776 * statistics.stdev(values) / math.sqrt(len(values))
    return f"{statistics.mean(values):.2f} ± {half:.2f}"


def show(setting: dict[str, float]) -> str:
    return ", ".join(f"{key} {value:g}" for key, value in setting.items())


def table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A Markdown table."""
    lines = [header, tuple("---" for _ in header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, default=Path("runs/two_tokens"))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--betas", type=float, nargs="+", default=[0.0, 0.2], help="KL coefficients")
    options = parser.parse_args()

    with ThreadPoolExecutor(options.workers) as pool:
        futures = [
            (beta, method, setting, [pool.submit(run, options.output_dir, method, beta, setting, s) for s in SEEDS])
            for beta in options.betas
            for method, settings in SETTINGS.items()
            for setting in settings
        ]
        compared = [(*key, [future.result() for future in runs]) for *key, runs in futures]
    chosen = choose(compared)

    print(f"\nEvery setting, seeds {min(SEEDS)} to {max(SEEDS)}: mean ± 95 % interval (* chosen)\n")
    rows = []
    for row in compared:
        beta, method, setting, results = row
        finals = {key: [r["final"][key] for r in results] for key in ("expected_reward", "log_prob_bad", "kl")}
        updates, samples = results[0]["policy_updates"], results[0]["samples"]
        each = ", ".join(f"{r['final']['expected_reward']:.2f} / {r['final']['log_prob_bad']:.1f}" for r in results)
        rows.append(
            (f"{beta:g}", method, show(setting) + "*" * (row in chosen), f"{updates:,}", f"{samples:,}")
            + (*(interval(values) for values in finals.values()), each)
        )
    header = ("KL coefficient", "method", "setting", "updates", "samples", "expected reward", "log P(bad), nats", "KL")
    print(table((*header, "each seed: reward / log P(bad)"), rows))

    print("\nOn the way, chosen settings, means over the seeds\n")
    rows = []
    for beta, method, setting, results in chosen:
        for share in (0.1, 0.25, 0.5, 1.0):
            points = [
                min(r["history"], key=lambda point, r=r: abs(point["samples"] - share * r["samples"]))["policy"]
                for r in results
            ]
            means = [statistics.mean(p[key] for p in points) for key in ("expected_reward", "log_prob_bad", "kl")]
            rows.append((f"{beta:g}", method, show(setting), f"{share:.0%}", *(f"{value:.2f}" for value in means)))
    print(
        table(
            ("KL coefficient", "method", "setting", "samples drawn", "expected reward", "log P(bad), nats", "KL"), rows
        )
    )


if __name__ == "__main__":
    main()
