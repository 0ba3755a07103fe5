"""Runs made to fail on purpose, and the figures of docs/reading_a_run.md.

    python -m benchmarks.failing_runs collapse     # one of them; without a name, all
    trl-repulse diagnose runs/failing/collapse     # what is wrong with it

Every run is `examples/repulse.py` in the world of two tokens, seed 0, with something made wrong, `sound` with nothing. A figure shows
one beside the sound run. A run that left a `trainer_state.json` is not repeated. Each takes about a minute on one CPU core.
"""

import argparse
import json
import math
import os
import shlex
import subprocess
import sys
from pathlib import Path

from PIL import Image

from examples.worlds import two_tokens
from trl_repulse.engine.diagnosis import load_log
from trl_repulse.evaluation.plots import INK, MODELS, draw_panels, logged_panels


ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "repulse.py"
UPDATES = 160
THIS = "benchmarks/failing_runs.py"
# Completions are long enough to end, so that nothing is enumerated
LONG = {
    "max_completion_length": 5,
    "per_device_train_batch_size": 32,
    "num_generations": 8,
}
HOT = {"proposal": "hot_policy", "potential": "indicator", "alpha_normalization": "none"}

# Name of a run -> the flags that make it fail
RUNS: dict[str, dict[str, object]] = {
    "sound": {"beta": 0.2},
    "sound_hot": HOT | {"beta": 0.2},
    "narrow": {"learning_rate": 1e-3},
    "collapse": {"proposal_learning_rate": 0.03},
    "turned_target": {"target_dist_beta": -0.3},
    "ess": {"target_dist_beta": -50, "proposal_learning_rate": 1e-6},
    "rising_kl": {"beta": 0.001, "learning_rate": 0.01},
    "falling_return": {"alpha": 1000},
    "empty": {
        **{"reward_type": f"{THIS}:silence_is_best", "alpha": 0, "num_generations": 128},
        "single_prompt": "The guest said that our new waiter was",
    },
    "cut": LONG | {"reward_type": f"{THIS}:longer_is_better"},
    "nothing_bad": HOT | {"bad_reward_threshold": -20},
    "not_finite": {"reward_type": f"{THIS}:on_a_huge_scale"},
    "constant_reward": {"reward_type": f"{THIS}:constant"},
}


def silence_is_best(completions: list[str], **kwargs: object) -> list[float]:
    """A judge who finds fault with whatever is said."""
    return [-1.0 if completion.strip() else 0.0 for completion in completions]


def longer_is_better(completions: list[str], **kwargs: object) -> list[float]:
    """Pays for each word."""
    return [float(len(completion.split())) for completion in completions]


def on_a_huge_scale(completions: list[str], **kwargs: object) -> list[float]:
    """Numbers whose squares no float32 holds."""
    return [-1e25 * len(completion) for completion in completions]


def constant(completions: list[str], **kwargs: object) -> list[float]:
    """The same for all, as that of a parser that never finds what it looks for."""
    return [0.0 for _ in completions]


# Title and unit of a panel -> what it shows of each model
REWARD = {("Reward of samples", "reward"): {"policy": ("reward",), "proposal": ("proposal/reward",)}}
GAP = {("Gap of log Z", "nats"): {"proposal": ("proposal/log_z_gap",)}}
DISTINCT = {("Distinct samples of a prompt", "share"): {"proposal": ("proposal/distinct",)}}
OWN_DISTINCT = {("Distinct completions of a prompt", "share"): {"policy": ("completions/distinct",)}}
ESS = {("Effective sample size", "samples"): {"proposal": ("proposal/ess",)}}
WEIGHT = {("Largest weight of a prompt", "share"): {"proposal": ("proposal/max_weight",)}}
BAD = {("Bad samples", "share"): {"policy": ("bad_fraction",), "proposal": ("proposal/bad_fraction",)}}
KL = {("KL to reference", "nats per token"): {"policy": ("kl",)}}
RETURN = {("Return", "reward"): {"policy": ("return",)}}
LENGTH = {
    ("Mean length", "tokens"): {
        "policy": ("completions/mean_length",),
        "proposal": ("proposal/completions/mean_length",),
    }
}
CUT = {
    ("Completions cut off", "share"): {
        "policy": ("completions/clipped_ratio",),
        "proposal": ("proposal/completions/clipped_ratio",),
    }
}
ENTROPY = {("Entropy", "nats per token"): {"policy": ("entropy",)}}
SPREAD = {("Standard deviation of the reward", "reward"): {"policy": ("reward_std",)}}
# Name of a run -> the panels of its figure
PANELS = {
    "collapse": DISTINCT | ESS | GAP,
    "turned_target": REWARD | BAD,
    "ess": ESS | WEIGHT,
    "rising_kl": REWARD | KL,
    "falling_return": RETURN | BAD,
    "empty": LENGTH | REWARD,
    "cut": CUT | LENGTH,
    "narrow": ENTROPY | OWN_DISTINCT,
    "nothing_bad": BAD | REWARD,
    "not_finite": REWARD | ENTROPY,
    "constant_reward": SPREAD | DISTINCT,
}
# Name of a run -> the sound one beside it, where that is another, or none
BESIDE = {"nothing_bad": "sound_hot", "cut": None, "empty": None}
# What the fixture of the tests keeps of a log and of the settings
KEPT = (
    *("loss", "grad_norm", "kl", "reward", "return", "reward_std", "bad_fraction", "negative/p_bad", "negative/ess"),
    *("entropy", "completions/distinct"),
    *("completions/mean_length", "completions/max_length", "completions/clipped_ratio"),
    *("proposal/loss", "proposal/grad_norm", "proposal/reward", "proposal/bad_fraction", "proposal/ess"),
    *("proposal/distinct", "proposal/log_z_gap"),
    *("proposal/completions/mean_length", "proposal/completions/clipped_ratio"),
)
KEPT_SETTINGS = ("num_generations", "num_proposal_generations", "max_completion_length", "potential")


def run(folder: Path, name: str) -> list[dict]:
    """One run, unless it is there already; its log."""
    output_dir = folder / name
    if not (output_dir / "trainer_state.json").exists():
        flags = {"output_dir": output_dir, "max_steps": UPDATES, "logging_steps": 5, "disable_tqdm": "true"}
        flags |= {"num_table_completions": 0, "beta": 0.0, "learning_rate": 4e-4} | RUNS[name]
        arguments = two_tokens.flags("repulse")
        own = "reward_type" in flags  # a function in the place of the reward model
        if own or "max_completion_length" in flags:  # nothing is enumerated then
            lines = Path(arguments[1]).read_text(encoding="utf-8").splitlines(keepends=True)
            arguments[1] = str(folder / f"{name}.yaml")
            left_out = ("exact_tracking:", "bad_token_ids:", *(["reward_model_path:"] if own else []))
            folder.mkdir(parents=True, exist_ok=True)
            Path(arguments[1]).write_text("".join(x for x in lines if not x.startswith(left_out)), encoding="utf-8")
        if own:
            place = arguments.index("--reward_model_path")
            del arguments[place : place + 2]
        arguments += [part for key, value in flags.items() for part in (f"--{key}", str(value))]
        print(shlex.join(["trl-repulse", "repulse", *arguments]), flush=True)
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, str(EXAMPLE), *arguments], env=environment, cwd=ROOT, capture_output=True, text=True
        )
        if done.returncode:
            raise RuntimeError(f"{name} failed:\n{done.stderr[-2000:]}")
    return json.loads((output_dir / "trainer_state.json").read_text(encoding="utf-8"))["log_history"]


def draw(name: str, log: list[dict], sound: list[dict]) -> None:
    """The figure of a run, in few colours, so that it is small."""
    path = ROOT / "docs" / "assets" / f"failing_{name}.png"
    panels = logged_panels(log, PANELS[name])
    figure, places = draw_panels(panels)
    thin = {title: series for title, *_, series in logged_panels(sound, PANELS[name])}
    for place, (title, *_) in zip(places, panels, strict=True):
        for model, points in thin.get(title, {}).items():
            label, colour, style = MODELS[model]
            line = {"color": colour, "linestyle": style, "linewidth": 1.2, "alpha": 0.7, "zorder": 1}
            place.plot(*zip(*points, strict=True), label=f"{label}, sound run", **line)
    drawn = [place.get_legend_handles_labels() for place in places]
    named = {name: handle for handles, names in drawn for handle, name in zip(handles, names, strict=True)}
    style = {"frameon": False, "fontsize": 9, "labelcolor": INK, "ncols": len(named)}
    figure.legend(named.values(), named, loc="outside lower center", **style)
    figure.savefig(path, dpi=160, facecolor="white")
    Image.open(path).convert("RGB").quantize(48).save(path, optimize=True)


def fixture(folder: Path, names: list[str]) -> str:
    """What the tests keep of runs: columns of their logs, and settings."""
    kept = {}
    for name in names:
        _, log, settings = load_log(folder / name)
        log = [entry for entry in log if "reward" in entry]
        columns = {key: [_short(entry[key]) for entry in log] for key in KEPT if key in log[0]}
        kept[name] = {
            "settings": {key: settings[key] for key in KEPT_SETTINGS if settings.get(key) is not None},
            "columns": {"step": [entry["step"] for entry in log], **columns},
        }
    runs = (f'"{name}": {json.dumps(run)}' for name, run in kept.items())
    return "{\n" + ",\n".join(runs) + "\n}\n"


def _short(value: float | None) -> float | None:
    """A number of which four digits are kept."""
    return float(f"{value:.4g}") if value is not None and math.isfinite(value) else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", metavar="NAME", nargs="*", help=f"runs to make: {', '.join(RUNS)} (all)")
    parser.add_argument("--output_dir", type=Path, default=Path("runs/failing"))
    parser.add_argument(
        "--fixture", type=Path, help="write the logs, as tests/failing_runs.json has them, to this file"
    )
    options = parser.parse_args()
    folder, names = options.output_dir.resolve(), options.names or list(RUNS)
    for name in names:
        log = run(folder, name)
        if name in PANELS:
            beside = BESIDE.get(name, "sound")
            draw(name, log, [] if beside is None else run(folder, beside))
    if options.fixture is not None:
        options.fixture.write_text(fixture(folder, names), encoding="utf-8")


if __name__ == "__main__":
    main()
