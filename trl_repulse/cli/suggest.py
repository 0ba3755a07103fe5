"""`trl-repulse suggest`: settings for RePULSe with a model, a reward and prompts, from samples of the initial policy."""

import argparse
import math
import shlex
from pathlib import Path
from typing import Any

from ..evaluation.tails import check_sizes
from ._fields import add_options, add_prompts, add_reward, named_prompts
from ._suggest_rules import ADAPTER, LEAST, UPDATES, Measured, Suggestion, plan, sample_report, say, suggest_settings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help="path or Hub id of the model to train")
    parser.add_argument("--revision", help="branch, tag or commit of the model on the Hub")
    add_prompts(parser, required=True)
    parser.add_argument("--max_prompt_length", type=int, help="prompts of more tokens are left out")
    add_options(parser, "chat_template_kwargs", "seed", "dtype", "trust_remote_code")
    add_options(parser, "batch_size", default=32)
    add_reward(parser)
    parser.add_argument("--bad_reward_threshold", type=float, help="reward under which an output is bad, if you know")
    parser.add_argument("--use_peft", action="store_true", help="suggest for a LoRA adapter, not for all weights")
    parser.add_argument("--max_steps", type=int, help="updates of the training run (800)")
    text = "time for training and evaluation on this machine, in place of it"
    parser.add_argument("--minutes", type=float, metavar="N", help=text)
    text = "completions to draw, over all prompts, at most if minutes are given (500)"
    parser.add_argument("--num_samples", type=int, default=500, help=text)
    parser.add_argument("--max_completion_length", type=int, default=256, help="tokens of a completion (256)")
    parser.add_argument("--output", metavar="FILE", type=Path, help="YAML file for `trl-repulse repulse --config`")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Samples, suggests and returns 0."""
    from ..evaluation.records import write_atomically

    measured, suggestion = suggest(args)
    text = f"{sample_report(measured)}\n{suggestion.to_text()}"
    if args.output is not None:
        command = f"  trl-repulse repulse --config {shlex.quote(str(args.output))}"
        head = f"RePULSe with {args.model}, as `trl-repulse suggest` proposes it from {measured.rewards.size} samples. Run it with\n{command}"
        content = suggestion.to_yaml(head, _given(args))
        write_atomically(args.output, lambda path: path.write_text(content, encoding="utf-8"))
        text += f"\n\nWritten to {args.output}. Read it, and train with\n{command}"
    print(text)
    return 0


def _check(args: argparse.Namespace) -> None:
    """Refuses what can be refused before torch is imported."""
    sizes = {"max_completion_length": args.max_completion_length, "batch_size": args.batch_size}
    check_sizes(**sizes, max_steps=UPDATES if args.max_steps is None else args.max_steps)
    if args.minutes is not None and args.max_steps is not None:
        raise ValueError("`--minutes` decides `max_steps`; leave one of them out.")
    if args.minutes is not None and not 0 < args.minutes < math.inf:
        raise ValueError(f"`--minutes {args.minutes:g}` must be above 0, and finite.")
    if args.num_samples < LEAST:
        raise ValueError(f"`num_samples={args.num_samples}` is too few to suggest from; draw at least {LEAST}.")


def suggest(args: argparse.Namespace) -> tuple[Measured, Suggestion]:
    """Draws samples of the initial policy, rewards them, trains for a few updates, and concludes."""
    _check(args)
    say(f"reading {args.model} and the prompts")
    from transformers import AutoModelForCausalLM

    from ..data._checks import check_adapters
    from ..data._prompts import check_template_variables
    from ..data.loading import drop_long_prompts
    from ..evaluation._generation import as_function, check_dtype, check_template_kwargs, process_state
    from ..models._loading import load_model, load_tokenizer
    from ..models._model_checks import check_causal
    from ..rewards.loading import load_reward
    from ._suggest_measure import measure, measure_updates

    check_dtype(args.dtype)
    check_adapters(args.model)
    if process_state().num_processes > 1:
        raise ValueError("`suggest` runs in one process; start it without `accelerate launch`.")
    prompts = named_prompts(args)
    check_template_variables(args.chat_template_kwargs)  # also `tools`, which the trainer takes by itself
    check_template_kwargs(prompts[:1]["prompt"], args.chat_template_kwargs)
    reward = load_reward(args.reward_type, args.reward_model_path, **args.reward_kwargs)
    device = process_state().device
    place = {"revision": args.revision, "trust_remote_code": args.trust_remote_code}
    tokenizer = load_tokenizer(args.model, "model", **place)
    model = load_model(AutoModelForCausalLM, args.model, "model", dtype=args.dtype, **place).to(device)
    check_causal(model, "`model`")
    if args.max_prompt_length is not None:
        prompts = drop_long_prompts(prompts, tokenizer, args.max_prompt_length, args.chat_template_kwargs)
    named = as_function(reward, None, device, args.chat_template_kwargs, args.trust_remote_code)
    measured = measure(args, model, tokenizer, prompts, named)
    suggestion = suggest_settings(
        measured,
        max_completion_length=args.max_completion_length,
        use_peft=args.use_peft,
        bad_reward_threshold=args.bad_reward_threshold,
    )
    del model  # training loads its own
    updates = measure_updates(args, suggestion, measured, prompts, named[1])
    plan(suggestion, measured, updates, args.max_steps, args.minutes)
    return measured, suggestion


def _given(args: argparse.Namespace) -> dict[str, Any]:
    """What the user has named, as the training commands call it."""
    values = {
        "model_name_or_path": args.model,
        "model_revision": args.revision,
        "reward_model_path": args.reward_model_path,
        "reward_type": args.reward_type,
        "reward_kwargs": args.reward_kwargs or None,
        "dataset_name": args.prompts,
        "dataset_config": args.dataset_config,
        "dataset_train_split": None if args.split == "train" else args.split,
        "prompt_column": None if args.prompt_column == "prompt" else args.prompt_column,
        "apply_chat_template": args.apply_chat_template or None,
        "chat_template_kwargs": args.chat_template_kwargs,
        "max_prompt_length": args.max_prompt_length,
        "trust_remote_code": args.trust_remote_code or None,
        "output_dir": "out",
    }
    if args.use_peft:
        values |= ADAPTER
    return {name: value for name, value in values.items() if value is not None}
