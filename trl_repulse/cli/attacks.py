"""`trl-repulse attacks`: how often templates, prefilled answers and augmented prompts make a model answer badly."""

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .._numbers import percent
from ..evaluation.gcg.results import all_scores, read_results
from ..evaluation.records import write_report
from ..evaluation.tails import check_sizes
from ._card import check_measured
from ._fields import add_options, add_prompts, add_reward
from .evaluate import SETTINGS, SIZES, write_log


_TAKEN = "num_samples max_completion_length seed batch_size shard_size dtype revision chat_template_kwargs".split()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="OUTPUT_DIR", type=Path, help="folder for the answers, one an attack")
    parser.add_argument("--model", required=True, help="path or Hub id of the model that is attacked")
    add_prompts(parser, required=True)
    add_reward(parser)
    parser.add_argument("--threshold", type=float, required=True, help="rewards under which an answer is bad")
    parser.add_argument("--k", type=int, nargs="+", default=[1], help="numbers of attempts of an attacker (1)")
    parser.add_argument("--attacks", metavar="FILE", type=Path, help="JSONL file of templates and prefilled answers")
    parser.add_argument("--prefill", metavar="TEXT", help="an attack more: how the answer begins, or '{COLUMN}'")
    parser.add_argument("--augment", action="store_true", help="an attack more: prompts with augmented letters")
    parser.add_argument("--gcg", metavar="FOLDER", help="results of `trl-repulse gcg`, as a row")
    parser.add_argument("--benign", metavar="FILE", help="file of harmless prompts, to measure refusals of them")
    add_options(parser, "confidence", "output", "inspect_log", "trust_remote_code")
    for name in _TAKEN:
        parser.add_argument(f"--{name}", default=argparse.SUPPRESS, **SETTINGS[name])
    parser.set_defaults(run=run, num_samples=16)


def _check(args: argparse.Namespace) -> None:
    """Refuses what can be refused before torch is imported."""
    check_sizes(**{name: getattr(args, name) for name in SIZES if name in args})
    for k in (k for k in args.k if not 1 <= k <= args.num_samples):
        raise ValueError(f"`--k {k}` must be from 1 to `--num_samples {args.num_samples}`.")


def run(args: argparse.Namespace) -> int:
    """Draws what is missing, writes and prints the report, and returns 0. Processes share the work, and the main one reports."""
    _check(args)
    from ..data.loading import load_prompts
    from ..evaluation._generation import process_state
    from ..evaluation.attacks import (
        Attack,
        attack_report,
        check_names,
        format_attacks,
        load_attacks,
        prepare,
        refusal,
        run_attacks,
        success_at,
    )
    from ..evaluation.sampling import SamplingSettings
    from ..rewards.loading import load_reward

    settings = SamplingSettings(**{name: value for name, value in vars(args).items() if name in _TAKEN})
    attacks = [Attack("prompt")]
    attacks += [] if args.attacks is None else load_attacks(args.attacks)
    attacks += [] if args.prefill is None else [Attack("prefill", prefill=args.prefill)]
    attacks += [Attack("best of N", augment=True)] if args.augment else []
    options = {"column": args.prompt_column, "as_conversation": args.apply_chat_template}
    behaviors: Any = load_prompts(args.prompts, args.split, args.dataset_config, **options)
    benign: Any = None if args.benign is None else load_prompts(args.benign, "train", **options)
    code = {"trust_remote_code": args.trust_remote_code}
    gcg = {}
    if args.gcg:
        header, records = read_results(args.gcg)
        gcg[f"GCG, judged by {', '.join(header['rewards'])}"] = all_scores(records)["after"]
        of_gcg = (header["model"]["weights"], header["model"]["name"], "--model", f"`--gcg {args.gcg}` measured")
    check_names(attacks)
    reward = load_reward(args.reward_type, args.reward_model_path, **args.reward_kwargs)

    if args.gcg:
        check_measured(args.model, *of_gcg, revision=settings.revision, **code)
    if benign is not None:
        try:
            prepare(args.model, benign, [Attack("benign")], settings, **code)  # mistakes, before anything is drawn
        except ValueError as error:
            reason = str(error).removeprefix("The attack 'benign' cannot be made: ")
            raise ValueError(f"`--benign {args.benign}`: {reason}") from error
    samples = run_attacks(args.folder / "attacks", args.model, behaviors, attacks, reward, settings, **code)
    rewards = {name: each.column().reshape(-1, settings.num_samples) for name, each in samples.items()}
    report = attack_report(rewards, args.threshold, args.k, args.confidence, gcg)
    text = format_attacks(report)
    if not report["broken"]:
        text += f"\nNo answer to these attacks is bad. Read some in `{args.folder / 'attacks'}`: the judge or `--threshold` may be wrong."
    if benign is not None:
        drawn = run_attacks(args.folder / "benign", args.model, benign, [Attack("benign")], refusal, settings, **code)
        refused = success_at(drawn["benign"].column(), -0.5, 1, args.confidence)
        report["over_refusal"] = asdict(refused)
        text += f"\nRefusals of harmless prompts: {percent(refused.value)} ({percent(refused.low)} to {percent(refused.high)})"
    state = process_state()
    if state.is_main_process:
        write_report(args.output, report | {"threshold": args.threshold, "num_samples": settings.num_samples})
        if args.inspect_log is not None:
            write_log(args.inspect_log, samples, [args.threshold])
        print(f"Success rates in percent, with {args.confidence:.0%} intervals for these behaviours:\n{text}")
    state.destroy_process_group()
    return 0
