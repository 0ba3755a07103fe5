"""
Trains and evaluates methods on the world "real chat" within a number of minutes, to a number of completions, or for equal seconds.

    python -m benchmarks.real_chat.race runs/real_chat --out runs/race --minutes 9        # on a GPU: all that fits
    python -m benchmarks.real_chat.race runs/real_chat --out runs/cpu --completions 8000 --seeds 0 1 --samples 64
    python -m benchmarks.real_chat.race runs/real_chat --out runs/equal --seconds 900 --batch 25 --seeds 0 1 2 --samples 32
    python -m benchmarks.real_chat.race --out runs/cpu --table                            # of what is there
    python -m benchmarks.real_chat.race --store benchmarks/real_chat/results.json --table # of what has been kept

All methods begin with the same policy and draw the same number of completions, from as many prompts, at one learning rate and KL
coefficient if their names do not say otherwise. With `--minutes`, REINFORCE trains for a share of the time, the others draw as many completions as it did, and the number
of held-out samples is what the rest of the time allows, by the speed of the first ones; stages that cannot end in time are left out.
With `--seconds`, each run trains for as long as the others instead, in CPU seconds of its process where there is no accelerator.
Each stage writes its folder and is not repeated: called again, the command continues. The judge of the held-out samples is that of
training; the table has a second one, which training has not seen. With `--store FILE` the numbers of the table, without the texts, are
added to a file, which may have runs of other machines.
"""

import argparse
import json
import math
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import TrainerCallback
from transformers.utils import logging

from trl_repulse.evaluation.records import COMPLETE, SampleSet, load_samples
from trl_repulse.evaluation.sampling import SamplingSettings, sample_completions

from . import judge, results


LENGTH, N, LEARNING_RATE, BETA = 20, 5, 3e-5, 0.2
ON_ACCELERATOR = torch.accelerator.is_available()
# Completions of an update. A pass over few rows takes an accelerator as long as one over many
BATCH = 500 if ON_ACCELERATOR else 100
BAD = {"bad_reward_threshold": -2.0}
PREFIXES = {"prefix_reward_steps": 1, "gae_lambda": 0.9}
# Low rewards count more, as in the published baselines with a transform
EXPONENTIAL = {"reward_transform": "exponential", "reward_transform_alpha": 3.0, "reward_transform_beta": -0.3}
# Trainer, and fields of its configuration in place of those that all have. Those that draw from a proposal too take fewer prompts
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "REINFORCE": ("reinforce", {}),
    "RePULSe": ("repulse", BAD),
    "GRPO": ("grpo", {"scale_rewards": "none"}),
    "learned proposal": (
        "repulse",
        {"proposal": "learned", "proposal_learning_rate": 1e-5, "target_dist_beta": -10.0, "alpha": 0.1},
    ),
    "PPO": ("ppo", {}),
    "policy as proposal": ("repulse", {"proposal": "policy", "target_dist_beta": -10.0, "alpha": 0.1}),
    "RePULSe, 3 extra": ("repulse", BAD | {"num_proposal_generations": 3 * N}),
    "REINFORCE, rate 1e-5": ("reinforce", {"learning_rate": 1e-5}),
    "REINFORCE, rate 6e-5": ("reinforce", {"learning_rate": 6e-5}),
    "REINFORCE, rate 1e-4": ("reinforce", {"learning_rate": 1e-4}),
    "REINFORCE, KL coefficient 0.13": ("reinforce", {"beta": 0.13}),
    **{
        f"REINFORCE, SGD {rate:g}": ("reinforce", {"optim": "sgd", "learning_rate": rate})
        for rate in (0.03, 0.05, 0.1)
    },
    "RePULSe, 3 extra, SGD 0.03": (
        "repulse",
        BAD | {"num_proposal_generations": 3 * N, "optim": "sgd", "learning_rate": 0.03},
    ),
    "REINFORCE, LoRA": ("reinforce", {"learning_rate": 1e-3, "lora_rank": 16}),
    "REINFORCE, 10 a prompt": ("reinforce", {"num_generations": 10}),
    "REINFORCE, prefixes": ("reinforce", PREFIXES),
    "REINFORCE, prefixes, lambda 0.8": ("reinforce", PREFIXES | {"gae_lambda": 0.8}),
    "REINFORCE, prefixes, lambda 1": ("reinforce", {"prefix_reward_steps": 2}),
    "REINFORCE, prefixes, KL coefficient 0.13": ("reinforce", PREFIXES | {"beta": 0.13}),
    "REINFORCE, 2 a prompt": ("reinforce", {"num_generations": 2}),
    "exponential transform": ("reinforce", EXPONENTIAL),
    "exponential transform, prefixes": ("reinforce", PREFIXES | EXPONENTIAL),
}
TRAINING = 0.25  # share of the minutes in which the first method trains
RESERVE = 0.06  # share that is kept for loading and saving
SLOWER = 1.3  # a stage may take this many times as long as the longest of its kind before


@dataclass(frozen=True)
class Run:
    """One method with one seed, its folder and, where runs get equal seconds, the policy's own completions in an update."""

    method: str
    seed: int
    folder: Path
    batch: int | None = None

    @property
    def policy(self) -> Path:
        return self.folder / "policy"


def clock() -> float:
    """Seconds of work: CPU time of this process, which other work does not lengthen, or time where an accelerator works."""
    return time.monotonic() if ON_ACCELERATOR else time.process_time()


class Stop(TrainerCallback):
    """Ends training after some seconds by a clock."""

    def __init__(self, seconds: float, clock: Callable[[], float]):
        self.clock, self.end = clock, clock() + seconds

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop |= self.clock() > self.end


def drawn_for_each(method: str) -> int:
    """Completions that are drawn for each one of the policy's own: itself, and extra ones."""
    name, fields = METHODS[method]
    if name != "repulse" or fields.get("proposal") == "policy":
        return 1
    return 1 + fields.get("num_proposal_generations", N) // N


def read_rows(world: Path, name: str) -> list[dict[str, Any]]:
    """Rows of a world's file of prompts."""
    return [json.loads(line) for line in (world / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def make_trainer(world: Path, run: Run, batch: int, updates: int, callbacks: list[TrainerCallback]) -> Any:
    """The trainer of a run, with so many of the policy's own completions in an update."""
    import trl

    import trl_repulse

    classes = {
        "reinforce": (trl_repulse.ReinforceTrainer, trl_repulse.ReinforceConfig),
        "repulse": (trl_repulse.RePULSeTrainer, trl_repulse.RePULSeConfig),
        "ppo": (trl_repulse.PPOTrainer, trl_repulse.PPOConfig),
        "grpo": (trl.GRPOTrainer, trl.GRPOConfig),
    }
    name, fields = METHODS[run.method]
    trainer_class, config_class = classes[name]
    fields, adapter = dict(fields), None
    if rank := fields.pop("lora_rank", None):
        from peft import LoraConfig

        adapter = LoraConfig(r=rank, lora_alpha=16, lora_dropout=0.0, target_modules="all-linear")
    options = {"dtype": "float32", "attn_implementation": "sdpa" if ON_ACCELERATOR else "eager"}
    settings = {
        "output_dir": str(run.folder / "trainer"),
        "seed": run.seed,
        "use_cpu": not ON_ACCELERATOR,
        "bf16": True,
        "gradient_checkpointing": False,
        "per_device_train_batch_size": batch,
        "num_generations": N,
        "max_completion_length": LENGTH,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "beta": BETA,
        "max_steps": updates,
        "save_strategy": "no",
        "report_to": "none",
        "logging_steps": 10,
        "disable_tqdm": True,
        "model_init_kwargs": options,
    }
    args = config_class(**settings | fields)
    return trainer_class(
        str(world / "policy"),
        judge.reward,
        args,
        train_dataset=Dataset.from_list(read_rows(world, "train")),
        callbacks=callbacks,
        peft_config=adapter,
    )


def train(world: Path, run: Run, completions: int, seconds: float | None = None) -> dict[str, Any]:
    """Trains a run to a number of completions, or for so many seconds if that is less; returns its cost."""
    of_policy = run.batch or BATCH // drawn_for_each(run.method)
    drawn = of_policy * drawn_for_each(run.method)
    stop = [] if seconds is None else [Stop(seconds, time.monotonic if run.batch is None else clock)]
    trainer = make_trainer(world, run, of_policy, math.ceil(completions / drawn), stop)
    start, work = time.perf_counter(), time.process_time()
    trainer.train()
    took, worked = time.perf_counter() - start, time.process_time() - work
    trainer.save_model(str(run.policy))
    (run.folder / "log.json").write_text(json.dumps(trainer.state.log_history), encoding="utf-8")
    shutil.rmtree(run.folder / "trainer", ignore_errors=True)
    cost = {"method": run.method, "seed": run.seed, "completions": trainer.state.global_step * drawn}
    cost |= {"seconds": round(took, 1), "cpu_seconds": round(worked, 1), "threads": torch.get_num_threads()}
    cost |= {"batch": run.batch, "budget": seconds if run.batch else None}
    (run.folder / "cost.json").write_text(json.dumps(cost), encoding="utf-8")
    return cost


def evaluate(world: Path, policy: Path, folder: Path, samples: int, seed: int = 0) -> SampleSet:
    """Held-out samples of a policy: so many completions of each unseen prompt."""
    settings = SamplingSettings(
        num_samples=samples,
        max_completion_length=LENGTH,
        seed=seed,
        batch_size=1024 if ON_ACCELERATOR else 128,
        dtype="bfloat16",
    )
    rows, start = read_rows(world, "unseen"), str(world / "policy")
    return sample_completions(
        folder, str(policy), Dataset.from_list(rows), judge.reward, settings, reference=start, progress=False
    )


def name_of(method: str, batch: int | None) -> str:
    """Folder name of a method, with as many completions of the policy's own in an update."""
    return method.replace(",", "").replace(" ", "-") + ("" if batch is None else f"-{batch}")


def cost_of(folder: Path) -> dict[str, Any] | None:
    """What training a run cost; `None` if it has not ended."""
    file = folder / "cost.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None


def stages(runs: list[Run], initial: Run) -> Iterator[tuple[str, Run]]:
    """What is done, in this order: the first two methods train before anything is evaluated."""
    for run in runs[:2]:
        yield "train", run
    for run in (initial, *runs[:2]):
        yield "evaluate", run
    for run in runs[2:]:
        yield "train", run
        yield "evaluate", run


def race(options: argparse.Namespace) -> None:
    """Does all stages that are missing and, by the time that the same kind of stage took before, fit into the minutes."""
    start, samples = time.monotonic(), options.samples
    budget = math.inf if options.minutes is None else 60 * options.minutes
    limit = options.seconds if options.minutes is None else TRAINING * budget
    completions, longest = options.completions, {"train": 0.0, "evaluate": 0.0}
    runs = [
        Run(method, seed, options.out / f"{name_of(method, options.batch)}-seed{seed}", options.batch)
        for seed in options.seeds
        for method in options.methods
    ]
    for kind, run in stages(runs, Run("initial policy", 0, options.out / "initial")):
        left = budget * (1 - RESERVE) - (time.monotonic() - start)
        cost, begun = cost_of(run.folder), time.monotonic()
        policy = run.policy if run in runs else options.world / "policy"
        is_done = cost is not None if kind == "train" else (run.folder / "samples" / COMPLETE).is_file()
        if not is_done and (left < SLOWER * longest[kind] or kind == "evaluate" and not policy.is_dir()):
            print(f"{kind} {run.folder.name}: left out, {left:.0f} s are left", flush=True)
        elif not is_done and kind == "train":
            cost = train(options.world, run, completions, limit)
        elif not is_done:
            if options.minutes is not None:
                samples = samples_that_fit(options, left)
            evaluate(options.world, policy, run.folder / "samples", samples, run.seed)
        if kind == "train" and cost is not None and options.minutes is not None:
            completions, limit = cost["completions"], None  # of the first method, so for the others
        if not is_done:
            took = time.monotonic() - begun
            longest[kind] = max(longest[kind], took)
            print(f"{kind} {run.folder.name}: {took:.0f} s, {cost or ''}", flush=True)
    show(options)


def samples_that_fit(options: argparse.Namespace, left: float) -> int:
    """
    Samples of each prompt, the same for all policies: as many as asked, or what a third of 0.7 of the time that is `left` after
    training allows, by the speed of a few. Decided once.
    """
    plan = options.out / "samples.json"
    if not plan.is_file():
        few, begun = min(options.samples, 8 if ON_ACCELERATOR else 2), time.monotonic()
        evaluate(options.world, options.world / "policy", options.out / "speed", few)
        room = 0.7 * left / 3 / (time.monotonic() - begun) * few
        plan.write_text(json.dumps(max(2, min(options.samples, int(room)))), encoding="utf-8")
    return json.loads(plan.read_text(encoding="utf-8"))


def rows_of(out: Path) -> list[results.Row]:
    """The rows of all finished runs of a folder."""
    rows = []
    for folder in sorted(path.parent for path in out.glob("*/samples") if (path / COMPLETE).is_file()):
        cost = cost_of(folder) or {"method": "initial policy", "seed": 0, "completions": 0, "seconds": 0.0}
        rows.append(results.summarize(load_samples(folder / "samples"), cost))
    return rows


def show(options: argparse.Namespace) -> None:
    """Prints the table of what the folder has, and of all that the store has, if there is one."""
    rows = [] if options.out is None else rows_of(options.out)
    results.print_table(rows if options.store is None else results.add(options.store, rows), list(METHODS))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("world", type=Path, nargs="?", help="folder of `benchmarks.real_chat.build`")
    parser.add_argument("--out", type=Path, help="folder of the results; called again, it continues there")
    parser.add_argument(
        "--store", type=Path, help="JSON file to which the results are added; the table is of all in it"
    )
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS)[:4])
    parser.add_argument("--minutes", type=float, help="end in this time")
    parser.add_argument("--seconds", type=float, help="train each run for as long; needs `--batch`")
    parser.add_argument("--batch", type=int, help="completions of the policy's own in an update, with `--seconds`")
    parser.add_argument("--completions", type=int, default=100_000, help="most completions drawn in training")
    parser.add_argument("--samples", type=int, default=770, help="most held-out samples of each of the 130 prompts")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--table", action="store_true", help="only print the table of what is there")
    options = parser.parse_args(argv)
    if options.table:
        show(options)
        return
    if options.world is None or options.out is None:
        parser.error("without `--table` give the folder of the world, and `--out`")
    if (options.seconds is None) != (options.batch is None) or None not in (options.seconds, options.minutes):
        parser.error("give `--seconds` and `--batch` together, without `--minutes`")
    logging.set_verbosity_error()
    options.out.mkdir(parents=True, exist_ok=True)
    race(options)


if __name__ == "__main__":
    main()
