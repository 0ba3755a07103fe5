"""`trl-repulse rare-events`: how often a model does what it hardly ever does, by importance sampling."""

import argparse
import math
from pathlib import Path
from typing import Any

from ..evaluation.records import write_report
from ._fields import add_options, add_prompts, add_reward, named_prompts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    models = parser.add_argument_group("models")
    text = "path or Hub id of the model, full weights or an adapter"
    models.add_argument("policy", metavar="POLICY", nargs="?", help=text)
    models.add_argument("--model", help="the same, as in the file of a training command; POLICY wins over it")
    models.add_argument("--revision", help="branch, tag or commit of the policy on the Hub")
    text = "the model before training, which may still draw outputs that the policy has unlearned"
    models.add_argument("--reference", metavar="MODEL", help=text)
    models.add_argument("--proposal", metavar="MODEL", nargs="+", default=[], help="proposals, of one or several runs")
    add_options(models, "dtype", "trust_remote_code")
    add_reward(parser.add_argument_group("reward"))
    drawing = parser.add_argument_group("completions")
    add_prompts(drawing, required=True)
    add_options(drawing, "chat_template_kwargs", "seed")
    add_options(drawing, "batch_size", default=64)
    drawing.add_argument("--max_completion_length", type=int, required=True, help="tokens of a completion")
    text = "completions a prompt: at least half from the policy, 1/16 for a first pilot (1000)"
    drawing.add_argument("--num_samples", type=int, default=1000, help=text)
    text = "completions a prompt from each proposal and each hotter copy, without a pilot; 0: plain sampling"
    drawing.add_argument("--num_proposal_samples", type=int, help=text)
    text = "nats from each proposal to a hotter copy of it, which draws too; 0: none (2)"
    drawing.add_argument("--divergence", metavar="NATS", type=float, help=text)
    estimates = parser.add_argument_group("estimates")
    text = "rewards under which an output is bad"
    estimates.add_argument("--threshold", type=float, nargs="+", default=[], help=text)
    estimates.add_argument("--level", type=float, nargs="+", default=[], help="levels of CVaR, such as 1e-4")
    add_options(estimates, "confidence", "output")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Estimates, writes and prints the report, and returns 0."""
    _check(args)
    from ..evaluation._generation import process_state
    from ..evaluation.rare.report import format_report

    state = process_state()
    report = estimate(args)
    if state.is_main_process:
        write_report(args.output, report)
        print(format_report(report))
    state.destroy_process_group()
    return 0


def _check(args: argparse.Namespace) -> None:
    """Refuses what can be refused before torch is imported. Moves `--model` into `args.policy`, and sets the default `args.divergence`."""
    from ..evaluation.rare.counts import OF_POLICY, OF_REFERENCE, TILTED, check_counts, pilot_counts
    from ..evaluation.tails import check_share, check_sizes

    args.policy = args.policy or args.model
    del args.model
    if args.policy is None:
        raise ValueError("No model is named; give a POLICY, or `--model_name_or_path`.")
    if not (args.threshold or args.level):
        raise ValueError("Nothing is asked for; give a `--threshold` or a `--level`.")
    for name in args.proposal:
        folder = Path(name)
        if folder.name == "proposal" and folder.parent.is_dir() and not folder.exists():
            raise ValueError(
                f"There is no `{name}`: only a run with `proposal='learned'` saves one. Leave `--proposal` out, or train a proposal "
                "for this policy."
            )
    if args.divergence is not None and not args.proposal:
        raise ValueError("`--divergence` has no effect without `--proposal`; name a proposal, or leave it out.")
    if args.divergence is None:
        args.divergence = 2.0
    if not 0 <= args.divergence < math.inf:
        raise ValueError(f"`--divergence {args.divergence:g}` must be 0, for none, or above, and finite.")
    if args.reference is not None and args.num_proposal_samples is not None:
        raise ValueError("`--reference` is for the pilot, which `--num_proposal_samples` leaves out; leave one out.")
    if args.num_proposal_samples and not args.proposal:
        raise ValueError("`--num_proposal_samples` has no effect without `--proposal`; name one, or leave it out.")
    if args.num_proposal_samples == 0 and args.proposal:
        raise ValueError("`--num_proposal_samples 0` is plain sampling; leave out `--proposal`.")
    if len({*args.proposal}) < len(args.proposal):
        raise ValueError(f"`--proposal {' '.join(args.proposal)}` names a proposal twice; name each once.")
    for name in ("num_samples", "num_proposal_samples"):
        if (value := getattr(args, name)) is not None and (value < 0 or value == 1):
            raise ValueError(f"`--{name} {value}` must be 0, or at least 2.")
    for level in args.level:
        check_share("level", level)
    check_sizes(max_completion_length=args.max_completion_length, batch_size=args.batch_size)
    if args.num_proposal_samples is not None:
        check_counts([args.num_samples, *(args.num_proposal_samples for _ in args.proposal)])
    else:
        candidates = len(OF_POLICY) + len(OF_REFERENCE) * (args.reference is not None) + TILTED
        pilot_counts(args.num_samples, candidates + len(args.proposal) * (1 + bool(args.divergence)))


def estimate(args: argparse.Namespace) -> dict[str, Any]:
    """Loads, draws and estimates. Returns what [`~trl_repulse.evaluation.rare.report.rare_event_report`] does, with `settings` and
    the names of the `components`. All processes must call it."""
    from accelerate.utils import broadcast_object_list
    from transformers import AutoModelForCausalLM

    from ..evaluation._generation import as_function, check_dtype, check_template_kwargs, process_state
    from ..evaluation.rare.components import Component
    from ..evaluation.rare.pilot import draw_by_pilot, policy_components
    from ..evaluation.rare.report import rare_event_report
    from ..evaluation.rare.sampling import draw, find_temperature
    from ..generation.completions import tokenize
    from ..models._loading import check_same_tokens, load_model, load_tokenizer
    from ..rewards.loading import load_reward

    check_dtype(args.dtype)
    device, code = process_state().device, {"trust_remote_code": args.trust_remote_code}
    prompts = named_prompts(args)
    template = args.chat_template_kwargs
    check_template_kwargs(prompts[:1]["prompt"], template)
    tokenizer, texts = load_tokenizer(args.policy, "policy", revision=args.revision, **code), prompts["prompt"][:]
    tokenize(tokenizer, texts, template)  # refuses what has no template, before a model is loaded
    others = [("reference", args.reference, None)] if args.reference is not None else []
    others += [("proposal", name, None) for name in args.proposal]
    for part, name, _ in others:
        check_same_tokens(name, f"The {part} `{name}`", tokenizer, args.trust_remote_code)
    loaded = load_reward(args.reward_type, args.reward_model_path, **args.reward_kwargs)
    reward = as_function(loaded, None, device, template, args.trust_remote_code)[1]
    policy, *models = (
        load_model(AutoModelForCausalLM, name, part, dtype=args.dtype, revision=revision, **code).to(device)
        for part, name, revision in (("policy", args.policy, args.revision), *others)
    )
    reference = models.pop(0) if args.reference is not None else None
    shared = {"batch_size": args.batch_size, "seed": args.seed, "chat_template_kwargs": template}
    components: dict[str, Component] = {}
    for path, model in zip(args.proposal, models, strict=True):
        name = f"proposal {path}"
        components[name] = Component(model)
        if args.divergence:
            hot = [find_temperature(model, tokenizer, texts, args.max_completion_length, args.divergence, **shared)]
            broadcast_object_list(hot)  # devices of two kinds may round otherwise
            components[f"{name} at temperature {hot[0]:.3g}"] = Component(model, temperature=hot[0])
    if args.num_proposal_samples is None:
        components |= policy_components(policy, reference)
        draws, names = draw_by_pilot(
            *(policy, components, tokenizer, prompts, reward, args.num_samples, args.max_completion_length),
            thresholds=args.threshold,
            levels=args.level,
            **shared,
        )
    else:
        names, parts = ["policy", *components], [policy, *components.values()]
        counts = [args.num_samples, *(args.num_proposal_samples for _ in components)]
        draws = draw(parts, tokenizer, prompts, reward, counts, args.max_completion_length, **shared)
    report = rare_event_report(draws.sample, args.threshold, args.level, args.confidence)
    settings = {key: value for key, value in vars(args).items() if key not in ("run", "command")}
    return {"settings": settings, "components": names, **report}
