"""
Compares methods in the world of two tokens at equal numbers of completions: a table and a figure.

    python examples/compare.py                 # each method's chosen setting, seeds 0 to 4
    python examples/compare.py --tune          # instead, every setting of every method, on four other seeds
    python examples/compare.py --seeds 0 1 2 --methods REINFORCE RePULSe --output_dir runs

Methods and settings are in `examples/configs/compare.yaml`. A run is one of the training commands with other flags, in one
of `--workers` processes. Finished runs are not repeated: an interrupted comparison goes on where it stopped.

Hardware: the world of two tokens, a policy of 0.1 million parameters. CPU: not measured. One GPU of 24 GB, of 80 GB: not measured.
"""

import argparse
import contextlib
import json
import multiprocessing
import shutil
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch
import yaml
from worlds import two_tokens
from worlds.exact_tracking import train
from worlds.results import by_method, draw, format_table

from trl_repulse.cli.main import Parser
from trl_repulse.cli.scripts import main_or_exit


EXAMPLES = Path(__file__).parent
TUNING_SEEDS = [100, 101, 102, 103]  # of no run that is compared


def prepare_worker() -> None:
    torch.set_num_threads(1)  # as many runs as there are cores are faster than a run on many


def text_of(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def run(command: str, method: str, flags: dict[str, Any], folder: Path) -> None:
    """Runs a training command in this process; what it prints goes to `log.txt`, `results.json` appears when it is done."""
    shutil.rmtree(folder, ignore_errors=True)
    running = folder.with_name(f"{folder.name}.running")
    shutil.rmtree(running, ignore_errors=True)
    running.mkdir(parents=True)
    (running / "flags.json").write_text(json.dumps(flags, indent=2), encoding="utf-8")
    argv = [*two_tokens.flags(command), *(part for name, value in flags.items() for part in (f"--{name}", str(value)))]
    with open(running / "log.txt", "w", encoding="utf-8") as log:
        with contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
            train(command, [*argv, "--output_dir", str(running)])
    results = json.loads((running / "results.json").read_text(encoding="utf-8"))
    (running / "results.json").write_text(json.dumps(results | {"method": method}, indent=2), encoding="utf-8")
    running.rename(folder)


def plan(config: dict[str, Any], options: argparse.Namespace) -> list[tuple[str, str, dict[str, Any], Path]]:
    """What to run: training command, method, flags and folder of each."""
    runs = []
    for name, method in config["methods"].items():
        if options.methods and name not in options.methods:
            continue
        updates = config["samples"] // (config["samples_per_update"] * method.get("models_sampled", 1))
        schedule = {"max_steps": updates, "tracking_every": max(updates // 20, 1)}
        settings = method["settings"] if options.tune else [method["settings"][method["chosen"]]]
        for setting in settings:
            for seed in TUNING_SEEDS if options.tune else options.seeds:
                values = ", ".join(f"{key} {text_of(value)}" for key, value in setting.items())
                label = f"{name}, {values}" if options.tune else name
                values = "-".join(f"{key}{text_of(value)}" for key, value in setting.items())
                folder = options.output_dir / f"{name}-{values}-seed{seed}".replace(" ", "_").replace("/", "_")
                flags = config["common"] | method.get("flags", {}) | schedule | setting | {"seed": seed}
                runs.append((method["command"], label, flags, folder))
    return runs


def main() -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=EXAMPLES / "configs" / "compare.yaml")
    parser.add_argument("--output_dir", type=Path, default=Path("runs/compare"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--methods", nargs="+", help="some of the methods; by default all")
    parser.add_argument("--tune", action="store_true", help="run every setting instead of the chosen ones")
    parser.add_argument("--workers", type=int, default=2, help="runs at the same time")
    options = parser.parse_args()
    config = yaml.safe_load(options.config.read_text(encoding="utf-8"))
    unknown = set(options.methods or ()) - set(config["methods"])
    if unknown:
        sys.exit(f"error: {options.config} has no method {sorted(unknown)}; it has {', '.join(config['methods'])}.")

    runs = plan(config, options)
    for *_, flags, folder in runs:
        made = folder / "flags.json"
        if made.exists() and json.loads(made.read_text(encoding="utf-8")) != flags:
            sys.exit(f"error: {folder} is a run with other flags; name another --output_dir, or remove it.")
    missing = [entry for entry in runs if not (entry[-1] / "results.json").exists()]
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.workers, mp_context=spawn, initializer=prepare_worker) as pool:
        waiting = {pool.submit(run, *entry): entry[-1] for entry in missing}
        for done, future in enumerate(as_completed(waiting), len(runs) - len(missing) + 1):
            if future.exception() is not None:
                pool.shutdown(cancel_futures=True)
                log = waiting[future].with_name(f"{waiting[future].name}.running") / "log.txt"
                sys.exit(f"error: {waiting[future].name} failed: {future.exception()} (see {log})")
            print(f"{done} of {len(runs)}: {waiting[future].name}", flush=True)
    methods = by_method(entry[-1] / "results.json" for entry in runs)
    figure = options.output_dir / ("tuning.png" if options.tune else "frontier.png")
    draw(methods, config["largest_reward"], figure)
    samples = next(iter(methods.values()))[0]["samples"]
    print(f"\n{samples:,} completions each; mean ± 95 % interval over the seeds\n")
    print(f"{format_table(methods)}\n\nFigure: {figure}")


if __name__ == "__main__":
    main_or_exit(main)
