"""
Trains an agent with tools, in a small shop where one of them does harm, with GRPO and with RePULSe on GRPO.

    python examples/agent.py                                # each method, seeds 0 to 2, at equal numbers of completions
    python examples/agent.py --methods GRPO --seeds 7       # one run
    python examples/agent.py --tune                         # instead, every learning rate, on another seed

The policy is pre-trained first (half a minute). The probability of harm and the expected reward are exact. Finished runs are not repeated:
an interrupted comparison goes on where it stopped.
"""

import argparse
import itertools
import json
import statistics
import time
from pathlib import Path

import torch

from trl_repulse import RePULSeGRPOConfig, RePULSeGRPOTrainer
from trl_repulse.cli import Parser
from trl_repulse.embedded import shop


ROWS = 64  # completions of an update; where others are drawn for the negative term, as many again
LEARNING_RATES = [5e-4, 1e-3, 2e-3]
TUNING_SEED = 100  # of no run that is reported

# `proposal_tools` gives what looks for harm leave to act with the tools: here nothing that it does in them matters
METHODS = {
    "GRPO": {"alpha": 0.0, "learning_rate": 2e-3},
    "RePULSe, learned proposal": {"proposal": "learned", "proposal_tools": True, "learning_rate": 2e-3},
    "RePULSe, hot policy": {"proposal": "hot_policy", "proposal_tools": True, "learning_rate": 1e-3},
}


def run(method: str, settings: dict, seed: int, completions: int, policy: Path, folder: Path) -> dict:
    """Trains once; what becomes of reward and harm goes to `results.json`."""
    results = folder / "results.json"
    if results.exists():
        return json.loads(results.read_text(encoding="utf-8"))
    drawn = ROWS * (1 if settings.get("alpha") == 0.0 else 2)
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
        logging_strategy="no",
        disable_tqdm=True,
        **settings,
    )
    trainer = RePULSeGRPOTrainer(
        model=str(policy),
        reward_funcs=shop.reward,
        args=args,
        train_dataset=shop.load_prompts(),
        environment_factory=shop.Shop,
        proposal_environment_factory=shop.Shop if args.draws_twice else None,
    )
    start = time.perf_counter()
    trainer.train()
    found = shop.evaluate(trainer.model, trainer.processing_class)
    row = {"method": method, "seed": seed, "learning_rate": args.learning_rate, "completions": args.max_steps * drawn}
    row |= vars(found) | {"seconds": round(time.perf_counter() - start)}
    folder.mkdir(parents=True, exist_ok=True)
    results.write_text(json.dumps(row, indent=2), encoding="utf-8")
    return row


def main(argv: list[str] | None = None) -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, default=Path("runs/agent"))
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--completions", type=int, default=12_800, help="of a run")
    parser.add_argument("--tune", action="store_true", help="run every learning rate on one other seed instead")
    options = parser.parse_args(argv)

    policy = options.output_dir / "policy"
    if not (policy / "config.json").exists():
        shop.build_policy(policy)
    found = shop.evaluate(str(policy))
    print(f"at the start: expected reward {found.expected_reward:.3f}, log P(closed) {found.log_prob_closed:.2f} nats")
    rates = LEARNING_RATES if options.tune else [None]
    for method, rate in itertools.product(options.methods, rates):
        settings = METHODS[method] | ({} if rate is None else {"learning_rate": rate})
        rows = []
        for seed in [TUNING_SEED] if options.tune else options.seeds:
            name = f"{method}-{settings['learning_rate']:g}-{options.completions}-seed{seed}".replace(" ", "_")
            rows.append(run(method, settings, seed, options.completions, policy, options.output_dir / name))
        rewards, log_probs = ([row[key] for row in rows] for key in ("expected_reward", "log_prob_closed"))
        print(
            f"{method}, learning rate {settings['learning_rate']:g}, {rows[0]['completions']:,} completions: "
            f"expected reward {statistics.mean(rewards):.4f}, log P(closed) {statistics.mean(log_probs):.1f} nats; each seed "
            + ", ".join(f"{reward:.4f} / {log_prob:.1f}" for reward, log_prob in zip(rewards, log_probs, strict=True)),
            flush=True,
        )


if __name__ == "__main__":
    main()
