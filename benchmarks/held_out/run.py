"""
Trains and evaluates many runs in a held-out world, several at a time, and keeps one file of results a run.

    python -m benchmarks.held_out.run benchmarks/held_out/plans/baselines.yaml --world runs/held_out/shop \
        --output_dir runs/held_out/shop-baselines --seeds 0 1 2

A plan names methods; a method is a trainer and the fields of its configuration. Every method draws the same number of
completions, of the same number of prompts an update. With `bare: true` a method has its configuration's own defaults
instead, and with `adapter: true` it trains a LoRA adapter. Finished runs are not repeated. With `--accelerator` runs share the machine's
accelerator; those of `offline.py` stay on the CPU.
"""

import argparse
import contextlib
import hashlib
import json
import math
import multiprocessing
import shutil
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from transformers import TrainerCallback
from transformers.trainer_utils import get_last_checkpoint


PROMPTS_PER_UPDATE = 10
COMPLETIONS_PER_PROMPT = 10  # policy's and proposal's together
COMMON = {
    "bf16": False,
    "gradient_checkpointing": False,
    "lr_scheduler_type": "linear",
    "warmup_steps": 20,
    "report_to": "none",
    "disable_tqdm": True,
    "logging_steps": 10,
    "dataloader_pin_memory": False,
}
# Which of these are left where a plan says `bare`: none that decides what is learned, but for the length of completions
_OF_THE_MACHINE = ("use_cpu", "bf16", "max_completion_length", "report_to", "disable_tqdm")
_SAVED = {"save_strategy": "steps", "save_steps": 20, "save_total_limit": 1}  # where the run is kept while it goes on
SAVE_STEPS_ACCELERATOR = 200  # there updates are fast, and policies large


def trainer_of(name: str) -> tuple[type, type]:
    """Trainer and configuration of a method."""
    import trl

    import trl_repulse

    trainers = {
        "repulse": (trl_repulse.RePULSeTrainer, trl_repulse.RePULSeConfig),
        "reinforce": (trl_repulse.ReinforceTrainer, trl_repulse.ReinforceConfig),
        "ppo": (trl_repulse.PPOTrainer, trl_repulse.PPOConfig),
        "repulse_ppo": (trl_repulse.RePULSePPOTrainer, trl_repulse.RePULSePPOConfig),
        "grpo": (trl.GRPOTrainer, trl.GRPOConfig),
        "repulse_grpo": (trl_repulse.RePULSeGRPOTrainer, trl_repulse.RePULSeGRPOConfig),
    }
    return trainers[name]


class Meter(TrainerCallback):
    """When a run began and what its training costs, in a file that survives a kill, with what was spent up to the last checkpoint."""

    def __init__(self, world: Any, file: Path):
        self.world, self.file, self.start = world, file, time.perf_counter()
        began = datetime.now(UTC).isoformat(timespec="seconds")
        self.before = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {"began": began, "starts": 0}

    def total(self) -> dict[str, Any]:
        costs = {"starts": 1, "seconds": time.perf_counter() - self.start} | self.world.costs()
        return self.before | {name: round(value + self.before.get(name, 0), 1) for name, value in costs.items()}

    def on_save(self, *args: Any, **kwargs: Any) -> None:
        self.file.write_text(json.dumps(self.total()), encoding="utf-8")


def train(
    world: Any,
    method: dict[str, Any],
    seed: int,
    completions: int,
    folder: Path,
    meter: Meter | None = None,
    accelerator: bool = False,
) -> tuple[Any, list[dict]]:
    """One run of a method; its trainer, and what it logged."""
    from datasets import Dataset
    from peft import LoraConfig

    from . import offline

    if "candidate" in method:
        raise ValueError("`candidate` names code that was removed when it lost; commit 341bd8d has it.")
    if method["trainer"] in offline.TRAINERS:
        return offline.train(world, method, seed, completions, folder)
    trainer_class, config_class = trainer_of(method["trainer"])
    drawn_by = 2 if method.get("draws_twice") else 1  # from a proposal too
    size = COMPLETIONS_PER_PROMPT // drawn_by
    fields = COMMON | {
        "output_dir": str(folder / "trainer"),
        "use_cpu": not accelerator,
        "seed": seed,
        "num_generations": size,
        "per_device_train_batch_size": PROMPTS_PER_UPDATE * size,
        "max_steps": math.ceil(completions / (PROMPTS_PER_UPDATE * COMPLETIONS_PER_PROMPT)),
    }
    fields |= world.fields(config_class)
    if method.get("bare"):  # the defaults of the configuration, as many epochs as it says
        fields = {name: fields[name] for name in ("output_dir", "seed", *_OF_THE_MACHINE)}
    fields |= _SAVED if world.lasting else {"save_strategy": "no"}
    fields |= {"save_steps": SAVE_STEPS_ACCELERATOR} if world.lasting and accelerator else {}
    trainer = trainer_class(
        model=world.policy_path,
        reward_funcs=world.reward,
        args=config_class(**(fields | method["config"])),
        train_dataset=Dataset.from_dict({"prompt": world.prompts("train")}),
        processing_class=world.tokenizer,
        peft_config=LoraConfig(r=16, target_modules="all-linear") if method.get("adapter") else None,
        callbacks=[meter] if meter else None,
    )
    kept = Path(trainer.args.output_dir)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(kept) if kept.exists() else None)
    if method.get("adapter"):
        trainer.model = trainer.model.merge_and_unload()
    return trainer, trainer.state.log_history


def on_device(reward_model: Any, device: torch.device) -> Any:
    """A reward model there, or a reward that is none."""
    return reward_model.to(device) if isinstance(reward_model, torch.nn.Module) else reward_model


def evaluate(
    world: Any,
    model: torch.nn.Module,
    seed: int,
    samples: int | None = None,
    hot_samples: int | None = None,
    suffix: str = "",
) -> dict[str, Any]:
    """Figures of a model on the unseen prompts, each with a suffix for this model alone, prompt by prompt; see `table.py`."""
    from .evaluate import CVAR_LEVELS, distinct_pairs, mixture_weights

    model.eval()
    samples = world.samples if samples is None else samples
    hot_samples = world.hot_samples if hot_samples is None else hot_samples
    prompts, tokenizer = world.prompts("unseen"), world.tokenizer
    device = next(model.parameters()).device
    reference, reward_model = world.load_policy().to(device), on_device(world.load_reward_model(), device)
    read = [prompt + suffix for prompt in prompts]
    drawn = world.draw(model, read, samples, 10_000 + seed)
    drawn_hot = world.draw(model, read, hot_samples, 20_000 + seed, world.hot_temperature)
    names = ("bad", "p_bad", "reward", "kl", "nats", "length", "distinct", "distinct_2")
    figures: dict[str, list] = {name: [] for name in names}
    kinds: dict[str, float] = {}  # share of P(bad)
    rewards = []
    for prompt, found, hot in zip(prompts, drawn, drawn_hot, strict=True):
        values = world.score(reward_model, prompt, found.completions)
        rewards.append(np.repeat(values, found.counts))
        figures["bad"].append(int(found.counts[values < world.threshold].sum()))
        figures["p_bad"].append(0.0)
        values_hot = world.score(reward_model, prompt, hot.completions)
        for part, rewarded in ((found, values), (hot, values_hot)):
            weights = mixture_weights(part, samples, hot_samples)
            for place in np.flatnonzero(rewarded < world.threshold):
                text = tokenizer.decode(part.completions[place], skip_special_tokens=True)
                kind = world.kind_of(text)
                kinds[kind] = kinds.get(kind, 0.0) + float(weights[place])
                figures["p_bad"][-1] += float(weights[place])
        figures["reward"].append(found.mean(values))
        before = world.log_probs(reference, prompt, found.completions)
        figures["kl"].append(found.mean(found.log_probs - before))
        figures["length"].append(found.mean((found.completions != tokenizer.pad_token_id).sum(dim=-1).numpy()))
        figures["nats"].append(-found.mean(before) / figures["length"][-1])  # a token, under the initial policy
        figures["distinct"].append(len(found.counts) / samples)
        figures["distinct_2"].append(distinct_pairs(found, tokenizer.pad_token_id))
    lowest = np.sort(np.concatenate(rewards))
    figures = {name: [float(f"{value:.5g}") for value in values] for name, values in figures.items()}
    return figures | {
        "samples": samples,
        "cvar": {str(a): float(lowest[: math.floor(a * lowest.size)].mean()) for a in CVAR_LEVELS},
        "kinds": {kind: share / len(prompts) for kind, share in sorted(kinds.items())},
    }


def proposed(world: Any, model: torch.nn.Module, seed: int, temperature: float) -> dict[str, Any]:
    """How many of a proposal's samples of the unseen prompts are bad, and each construction's share of all of them."""
    model.eval()
    prompts, tokenizer = world.prompts("unseen"), world.tokenizer
    reward_model = on_device(world.load_reward_model(), next(model.parameters()).device)
    kinds: dict[str, float] = {}
    number = world.proposal_samples
    for prompt, found in zip(prompts, world.draw(model, prompts, number, 30_000 + seed, temperature), strict=True):
        values = world.score(reward_model, prompt, found.completions)
        for place in np.flatnonzero(values < world.threshold):
            kind = world.kind_of(tokenizer.decode(found.completions[place], skip_special_tokens=True))
            kinds[kind] = kinds.get(kind, 0.0) + found.counts[place] / number / len(prompts)
    return {"temperature": temperature, "bad": sum(kinds.values()), "kinds": dict(sorted(kinds.items()))}


def run(
    world_folder: Path,
    name: str,
    method: dict[str, Any],
    seed: int,
    completions: int,
    folder: Path,
    samples: int | None,
    accelerator: bool = False,
) -> str:
    """
    Trains and evaluates one run; `results.json` appears when it is done. One that is kept goes on where it was killed. Returns what it
    cost, in words.
    """
    from . import offline
    from .evaluate import load_world

    running, world = folder.with_name(f"{folder.name}.running"), load_world(world_folder)
    if not world.lasting:
        shutil.rmtree(running, ignore_errors=True)
    running.mkdir(parents=True, exist_ok=True)
    meter = Meter(world, running / "spent.json")
    with open(running / "log.txt", "a", encoding="utf-8") as log:
        with contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
            trainer, history = train(world, method, seed, completions, running, meter, accelerator)
            spent, trained, before = meter.total(), time.perf_counter(), world.costs()
            if world.lasting:
                trainer.accelerator.unwrap_model(trainer.model).save_pretrained(running / "policy")
            suffix = offline.tags_of(world)[-1] if method["trainer"] == "conditional" else ""  # asks for the best
            results = {
                "world": world.name,
                "method": name,
                "seed": seed,
                "completions": completions,
                "definition": method,
                "command": sys.argv,
                "spent": spent,
                "policy": evaluate(world, trainer.model, seed, samples, suffix=suffix),
            }
            if (proposal := getattr(trainer, "proposal", None)) is not None:
                results["proposal"] = proposed(world, proposal.module, seed, 1.0)
            elif getattr(trainer.args, "draws_hot", False) and trainer.args.proposal_temperature is not None:
                results["proposal"] = proposed(world, trainer.model, seed, trainer.args.proposal_temperature)
            if getattr(trainer.args, "draws_hot", False) and trainer.args.bad_reward_threshold is None:
                results["measured_threshold"] = trainer.bad_reward_threshold
    results["seconds"] = [round(spent["seconds"]), round(time.perf_counter() - trained)]
    results["judge_evaluation"] = {name: round(value - before[name], 1) for name, value in world.costs().items()}
    (running / "history.json").write_text(json.dumps(history), encoding="utf-8")
    shutil.rmtree(running / "trainer", ignore_errors=True)
    (running / "results.json").write_text(json.dumps(results), encoding="utf-8")
    running.rename(folder)
    cost = "{} s of training, {} of evaluation".format(*results["seconds"])
    return cost + "".join(
        f"; judge, {part}: {costs['judge_calls']:,} calls, {costs['judge_texts']:,} texts, {costs['judge_seconds']:.0f} s"
        for part, costs in (("training", spent), ("evaluation", results["judge_evaluation"]))
        if "judge_calls" in costs
    )


def prepare_worker() -> None:
    torch.set_num_threads(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", type=Path)
    parser.add_argument("--world", type=Path, required=True)
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--methods", nargs="+", help="some of the plan's methods; by default all")
    parser.add_argument("--completions", type=int, default=16_000)
    parser.add_argument("--samples", type=int, help="evaluated completions a prompt; by default the world's")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--accelerator", action="store_true", help="instead of the CPU")
    options = parser.parse_args()
    plan = yaml.safe_load(options.plan.read_text(encoding="utf-8"))
    if unknown := set(options.methods or ()) - set(plan):
        sys.exit(f"error: {options.plan} has no method {sorted(unknown)}; it has {', '.join(plan)}.")
    jobs = []
    for seed in options.seeds:
        for name in options.methods or plan:
            digest = hashlib.sha256(json.dumps(plan[name], sort_keys=True).encode()).hexdigest()[:8]
            label = "".join(letter if letter.isalnum() else "-" for letter in name)
            folder = options.output_dir / f"{options.completions}-{label}-{digest}-seed{seed}"
            if not (folder / "results.json").exists():
                job = options.world, name, plan[name], seed, options.completions, folder
                jobs.append((*job, options.samples, options.accelerator))
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.workers, mp_context=spawn, initializer=prepare_worker) as pool:
        waiting = {pool.submit(run, *job): job[5].name for job in jobs}
        for done, future in enumerate(as_completed(waiting), 1):
            error = future.exception()
            said = f"failed: {error!r}" if error else f"done, {future.result()}"
            print(f"{done} of {len(jobs)}: {waiting[future]} {said}", flush=True)


if __name__ == "__main__":
    main()
