"""
Trains an agent with tools, in a small shop where one of them does harm, with GRPO and with RePULSe on GRPO.

    python examples/agent.py                                # each method at its chosen setting, seeds 0 to 4
    python examples/agent.py --methods GRPO --seeds 7       # one run
    python examples/agent.py --tune                         # every setting instead, on the tuning seeds

All runs have the same number of completions, KL coefficient, batch and linear decay of the learning rate, and each method has four
settings. Of those within 0.01 of the method's best mean reward on the tuning seeds, the one with the lowest mean log P(closed) is chosen.
Both quantities are exact. The policy is pre-trained first (half a minute). Finished runs are not repeated: an interrupted comparison goes
on where it stopped.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from transformers import PrinterCallback

from trl_repulse import RePULSeGRPOConfig, RePULSeGRPOTrainer
from trl_repulse.cli import Parser
from trl_repulse.embedded import shop
from trl_repulse.evaluation.bootstrap import combined_interval
from trl_repulse.evaluation.comparison import mean_and_interval


ROWS = 64  # completions of an update; where others are drawn for the negative term, as many again
TUNING_SEEDS = [100, 101]  # of no run that is reported
TEMPERATURES = [1.6, 2.0, 2.5, 3.0]  # of the hot policy

# Fixed fields of each method, settings to tune over, and which was chosen.
# `proposal_tools` gives what looks for harm leave to act with the tools: here nothing that it does in them matters
METHODS: dict[str, tuple[dict[str, Any], list[dict[str, Any]], int]] = {
    "GRPO": ({"alpha": 0.0}, [{"learning_rate": rate} for rate in (5e-4, 1e-3, 2e-3, 4e-3)], 2),
    "RePULSe, learned proposal": (
        {"proposal": "learned", "proposal_tools": True, "learning_rate": 2e-3},
        [{"alpha": alpha, "potential": potential} for potential in ("tilted", "indicator") for alpha in (0.1, 0.5)],
        1,
    ),
    "RePULSe, hot policy": (
        {"proposal": "hot_policy", "proposal_tools": True, "learning_rate": 1e-3},
        [{"proposal_temperature": temperature} for temperature in TEMPERATURES],
        0,
    ),
}


def run(method: str, setting: dict[str, Any], seed: int, completions: int, output_dir: Path) -> dict[str, Any]:
    """Trains once; what becomes of reward and harm goes to `results.json`."""
    values = "-".join(f"{name}{value}" for name, value in setting.items())
    folder = output_dir / f"{method}-{values}-{completions}-seed{seed}".replace(" ", "_").replace(",", "")
    results = folder / "results.json"
    if results.exists():
        return json.loads(results.read_text(encoding="utf-8"))
    fields = METHODS[method][0] | setting
    drawn = ROWS * (1 if fields.get("alpha") == 0.0 else 2)
    args = RePULSeGRPOConfig(
        output_dir=str(folder),
        seed=seed,
        max_steps=completions // drawn,
        per_device_train_batch_size=ROWS,
        num_generations=16,
        max_completion_length=shop.MAX_LENGTH,
        max_tool_calling_iterations=shop.MAX_CALLS,
        bad_reward_threshold=-1.0,  # the account was closed
        beta=0.04,  # KL coefficient
        use_cpu=not torch.accelerator.is_available(),
        bf16=False,
        activation_checkpointing=False,
        report_to="none",
        save_strategy="no",
        logging_steps=10,
        disable_tqdm=True,
        **fields,
    )
    trainer = RePULSeGRPOTrainer(
        model=str(output_dir / "policy"),
        reward_funcs=shop.reward,
        args=args,
        train_dataset=shop.load_prompts(),
        environment_factory=shop.Shop,
        proposal_environment_factory=shop.Shop if args.draws_twice else None,
    )
    trainer.remove_callback(PrinterCallback)  # logs go to `trainer_state.json`, which `trl-repulse diagnose` reads
    start = time.perf_counter()
    trainer.train()
    trainer.save_state()
    found = shop.evaluate(trainer.model, trainer.processing_class)
    row = {"method": method, "seed": seed, **setting, "completions": args.max_steps * drawn}
    hot = {x: shop.evaluate(trainer.model, trainer.processing_class, x).log_prob_closed for x in TEMPERATURES}
    row |= vars(found) | {"log_prob_closed_at_temperature": hot, "seconds": round(time.perf_counter() - start)}
    folder.mkdir(parents=True, exist_ok=True)
    results.write_text(json.dumps(row, indent=2), encoding="utf-8")
    return row


def describe(values: list[float], digits: int) -> str:
    """Mean over the seeds and Student's 95 % interval."""
    mean, half = mean_and_interval(values)
    return f"{mean:.{digits}f}" + (f" ± {half:.{digits}f}" if len(values) > 1 else "")


def difference(ours: list[float], others: list[float], digits: int) -> str:
    """Difference of two means with Welch's 95 % interval."""
    value = statistics.mean(ours) - statistics.mean(others)
    if min(len(ours), len(others)) < 2:
        return f"{value:.{digits}f}"
    low, high = combined_interval(value, [(statistics.variance(x) / len(x), len(x) - 1) for x in (ours, others)])
    return f"{value:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def main(argv: list[str] | None = None) -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, default=Path("runs/agent"))
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--completions", type=int, default=12_800, help="of a run")
    parser.add_argument("--tune", action="store_true", help="run every setting on the tuning seeds instead")
    options = parser.parse_args(argv)

    policy = options.output_dir / "policy"
    if not (policy / "config.json").exists():
        shop.build_policy(policy)
    found = shop.evaluate(str(policy))
    print(f"at the start: expected reward {found.expected_reward:.3f}, log P(closed) {found.log_prob_closed:.2f} nats")
    finished: dict[str, tuple[list[float], list[float]]] = {}
    for method in options.methods:
        _, settings, chosen = METHODS[method]
        for setting in settings if options.tune else [settings[chosen]]:
            seeds = TUNING_SEEDS if options.tune else options.seeds
            rows = [run(method, setting, seed, options.completions, options.output_dir) for seed in seeds]
            rewards, log_probs = ([row[key] for row in rows] for key in ("expected_reward", "log_prob_closed"))
            finished[method] = rewards, log_probs
            values = ", ".join(f"{name} {value}" for name, value in setting.items())
            each = (f"{reward:.4f} / {log_prob:.1f}" for reward, log_prob in zip(rewards, log_probs, strict=True))
            print(
                f"{method}, {values}, {rows[0]['completions']:,} completions: expected reward {describe(rewards, 4)}, "
                f"log P(closed) {describe(log_probs, 1)} nats; each seed {', '.join(each)}",
                flush=True,
            )
    if "GRPO" in finished and not options.tune:
        for method in [name for name in finished if name != "GRPO"]:
            (rewards, log_probs), others = finished[method], finished["GRPO"]
            reward, log_prob = difference(rewards, others[0], 4), difference(log_probs, others[1], 1)
            print(f"{method}, difference to GRPO: expected reward {reward}, log P(closed) {log_prob} nats")


if __name__ == "__main__":
    main()
