"""
Trains an agent with tools, in a small shop where one of them does harm, with GRPO and with RePULSe on GRPO.

    python examples/agent.py                                # each method at its chosen setting, seeds 10 to 14
    python examples/agent.py --methods GRPO --seeds 7       # one run
    python examples/agent.py --tune                         # every setting instead, on the tuning seeds

All runs have the same number of completions, KL coefficient, batch and linear decay of the learning rate, and each method has three
settings. Of those within 0.01 of the method's best mean reward on the tuning seeds, the one with the lowest mean log P(bad) is chosen. Bad is a
closed account. Both quantities are exact. The policy is pre-trained first (half a minute). Finished runs are not repeated. Hardware: a policy of
0.1 million parameters. CPU, one GPU of 24 GB, of 80 GB: not measured.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import PrinterCallback
from worlds import shop
from worlds.results import by_method, format_table

from trl_repulse import RePULSeGRPOConfig, RePULSeGRPOTrainer
from trl_repulse.cli.main import Parser
from trl_repulse.cli.scripts import main_or_exit


ROWS = 64  # completions of an update; where others are drawn for the negative term, as many again
TUNING_SEEDS = [100, 101, 102, 103]  # of no run that is reported
LOGGING = {"report_to": "none", "save_strategy": "no", "logging_steps": 10, "disable_tqdm": True}
TEMPERATURES = [1.6, 2.0, 2.5, 3.0]  # at which the trained policy is evaluated as well
RATES = [{"learning_rate": rate} for rate in (5e-4, 1e-3, 2e-3)]

# Fixed fields of each method, settings to tune over, and which was chosen.
# `proposal_tools` lets the proposal call the tools: here nothing that it does with them matters.
# `alpha_start` keeps the negative term small until the proposal has found something
LEARNED = {"proposal": "learned", "proposal_tools": True, "alpha": 0.5, "alpha_start": 0.05}
METHODS: dict[str, tuple[dict[str, Any], list[dict[str, Any]], int]] = {
    "GRPO": ({"alpha": 0.0}, RATES, 2),
    "RePULSe, learned proposal": (LEARNED, RATES, 2),
}


def run(method: str, setting: dict[str, Any], seed: int, completions: int, output_dir: Path) -> Path:
    """Trains once, if there is no `results.json` of this run yet; returns the path of that file."""
    values = "-".join(f"{name}{value}" for name, value in setting.items())
    folder = output_dir / f"{method}-{values}-{completions}-seed{seed}".replace(" ", "_").replace(",", "")
    fields, policy = METHODS[method][0] | setting, str(output_dir / "policy")
    if (results := folder / "results.json").exists():
        if json.loads(results.read_text(encoding="utf-8"))["fields"] != fields:
            sys.exit(f"error: {folder} is a run with other fields; name another --output_dir, or remove it.")
        return results
    drawn = ROWS if fields.get("alpha") == 0.0 else 2 * ROWS
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
        **(LOGGING | fields),
    )
    trainer = RePULSeGRPOTrainer(
        model=policy,
        reward_funcs=shop.reward,
        args=args,
        train_dataset=shop.load_prompts(),
        environment_factory=shop.Shop,
        proposal_environment_factory=shop.Shop if args.draws_twice else None,
    )
    trainer.remove_callback(PrinterCallback)  # logs go to `trainer_state.json`, which `trl-repulse diagnose` reads
    trainer.train()
    trainer.save_state()
    tokenizer, found = trainer.processing_class, {}
    for part, model in (("initial", policy), ("final", trainer.model)):
        exact = shop.evaluate(model, tokenizer)
        found[part] = {"expected_reward": exact.expected_reward, "log_prob_bad": exact.log_prob_closed}
    hot = {x: shop.evaluate(trainer.model, tokenizer, x).log_prob_closed for x in TEMPERATURES}
    row = {"method": f"{method}, " + ", ".join(f"{name} {value}" for name, value in setting.items()), "seed": seed}
    row |= {
        "samples": args.max_steps * drawn,
        "policy_updates": args.max_steps,
        "fields": fields,
        **found,
        "log_prob_bad_at_temperature": hot,
    }
    results.write_text(json.dumps(row, indent=2), encoding="utf-8")
    return results


def main(argv: list[str] | None = None) -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, default=Path("runs/agent"))
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[10, 11, 12, 13, 14])
    parser.add_argument("--completions", type=int, default=25_600, help="of a run")
    parser.add_argument("--tune", action="store_true", help="run every setting on the tuning seeds instead")
    options = parser.parse_args(argv)

    if not (options.output_dir / "policy" / "config.json").exists():
        shop.build_policy(options.output_dir / "policy")
    seeds, files = TUNING_SEEDS if options.tune else options.seeds, []
    for method in options.methods:
        _, settings, chosen = METHODS[method]
        for setting in settings if options.tune else [settings[chosen]]:
            files += [run(method, setting, seed, options.completions, options.output_dir) for seed in seeds]
    print(f"\n{options.completions:,} completions each; mean ± 95 % interval over the seeds\n")
    print(format_table(by_method(files)))


if __name__ == "__main__":
    main_or_exit(main)
