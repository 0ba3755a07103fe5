"""`trl-repulse evaluate`: held-out samples of a model, and what they say about the lower tail of its reward."""

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from .._numbers import with_unit
from ._card import add_card, check_card, check_measured, write_on_card
from ._fields import SHARED, add_options, add_prompts, add_reward, named_prompts, parse_object


SIZES = ("num_samples", "max_completion_length", "batch_size", "shard_size")
# Fields of `SamplingSettings`, by their names; those not given keep the class's default
SETTINGS: dict[str, dict[str, Any]] = {
    "num_samples": {"type": int, "help": "completions of each prompt (16)"},
    "max_completion_length": {"type": int, "help": "tokens of a completion (256)"},
    "seed": {"type": int, "help": "seed of the draws (0)"},
    "batch_size": {"type": int, "help": "completions of one pass (32)"},
    "shard_size": {"type": int, "help": "completions written at a time (256)"},
    "beta": {"type": float, "help": "KL coefficient of the returns (0)"},
    "reward_weights": {"type": float, "nargs": "+", "help": "weight of each reward (1)"},
    "dtype": {"help": "precision of model and reference (that of each checkpoint)"},
    "revision": {"help": "branch, tag or commit of the model on the Hub"},
    "engine": {"choices": ("transformers", "vllm"), "help": "what draws (transformers)"},
    "chat_template_kwargs": SHARED["chat_template_kwargs"],
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = "folder of samples: with --model to write to or to finish, without it to read; several are several models"
    parser.add_argument("folders", metavar="SAMPLES_DIR", type=Path, nargs="+", help=text)
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--model", help="path or Hub id of the model to sample from; none: only read")
    add_prompts(sampling, required=False)
    add_reward(sampling)
    text = "in place of the three above, and once for each of several rewards: type, path and further arguments in one, such as "
    text += """'{"reward_type": "toxicity", "reward_model_path": "my/model", "max_length": 300}'"""
    sampling.add_argument("--reward", dest="rewards", metavar="JSON", type=parse_object, action="append", help=text)
    sampling.add_argument("--reference", help="path or Hub id of the model that the KL is measured against")
    text = "further arguments of vLLM's engine"
    sampling.add_argument("--engine_kwargs", metavar="JSON", type=parse_object, help=text)
    add_options(sampling, "trust_remote_code")
    for name, options in SETTINGS.items():
        sampling.add_argument(f"--{name}", default=argparse.SUPPRESS, **options)
    reading = parser.add_argument_group("report")
    add_options(reading, "thresholds", default=[])
    reading.add_argument("--levels", type=float, nargs="+", default=[], help="levels of CVaR, such as 0.01")
    reading.add_argument("--quantiles", type=float, nargs="+", default=[], help="levels of quantiles; of one model")
    reading.add_argument("--column", default="reward", help="column to read (reward)")
    add_options(reading, "confidence", "output")
    text = "print a table for each prompt as well; of one model"
    reading.add_argument("--per_prompt", action="store_true", help=text)
    add_options(reading, "partial", "inspect_log")
    add_card(reading)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Samples what is missing, writes and prints the report, and returns 0."""
    _check(args)
    from ..evaluation._generation import process_state
    from ..evaluation.records import load_samples
    from ..evaluation.report import tail_report

    state = process_state()
    if args.model is not None:
        _sample(args)
    samples = [load_samples(folder, args.partial) for folder in args.folders]
    report = tail_report(samples, args.thresholds, args.levels, args.quantiles, args.column, args.confidence)
    if state.is_main_process:
        _write(args, samples, report)
    state.destroy_process_group()
    return 0


def _check(args: argparse.Namespace) -> None:
    """Refuses what can be refused before torch is imported."""
    from ..evaluation.report import estimates
    from ..evaluation.tails import check_sizes

    if args.partial and (args.model is not None or args.card is not None):
        raise ValueError("`--partial` reads what there is so far; leave out `--model` and `--card`.")
    check_card(args.card, len(args.folders))
    if args.card is not None and args.folders[0].suffix == ".eval":
        raise ValueError(
            f"`--card` needs weights to compare, which the log `{args.folders[0]}` does not identify; leave it out."
        )
    if args.per_prompt and len(args.folders) > 1:
        raise ValueError("`--per_prompt` is for one model; leave it out for several.")
    estimates(np.zeros((1, 1, 1)), args.thresholds, args.levels, args.quantiles, args.confidence)
    if args.model is None:
        names = "prompts dataset_config reward_model_path reward_type rewards reference engine_kwargs".split()
        unset: dict[str, Any] = dict.fromkeys((*names, *SETTINGS))
        unset |= {"reward_kwargs": {}, "apply_chat_template": False, "trust_remote_code": False}
        unset |= {"split": "train", "prompt_column": "prompt"}
        if given := [name for name, default in unset.items() if getattr(args, name, default) != default]:
            raise ValueError(f"`--{given[0]}` has no effect without `--model`; name the model, or leave it out.")
        return
    if len(args.folders) > 1:
        raise ValueError("`--model` samples into one folder; sample each model by itself, then name all folders.")
    if args.prompts is None:
        raise ValueError("`--prompts` is needed with `--model`; give a file or a data set.")
    if args.engine_kwargs is not None and getattr(args, "engine", None) != "vllm":
        raise ValueError("`--engine_kwargs` has no effect without `--engine vllm`; leave it out.")
    check_sizes(**{name: getattr(args, name) for name in SIZES if name in args})


def _sample(args: argparse.Namespace) -> None:
    """Samples from the model that the arguments name, into the first folder."""
    from ..evaluation.sampling import SamplingSettings, check_early, sample_completions

    settings = SamplingSettings(**{name: value for name, value in vars(args).items() if name in SETTINGS})
    check_early(args.folders[0].expanduser(), settings, len(args.rewards or [None]), args.engine_kwargs)
    options = {name: getattr(args, name) for name in ("reference", "engine_kwargs", "trust_remote_code")}
    sample_completions(args.folders[0], args.model, named_prompts(args), _load_rewards(args), settings, **options)


def _load_rewards(args: argparse.Namespace) -> Any:
    """The reward that the arguments name, or a list of those of `--reward`. Raises a `ValueError` if they contradict one another."""
    from ..rewards.loading import load_reward

    if args.rewards is None:
        return load_reward(args.reward_type, args.reward_model_path, **args.reward_kwargs)
    if args.reward_type is not None or args.reward_model_path is not None or args.reward_kwargs:
        raise ValueError("`--reward` holds all of a reward; leave out the other arguments of rewards.")
    return [
        load_reward(options.pop("reward_type", None), options.pop("reward_model_path", None), **options)
        for options in map(dict, args.rewards)  # copies, out of which `pop` takes
    ]


def write_log(path: Path, samples: Any, thresholds: list[float], column: str = "reward") -> None:
    """Writes answers for Inspect's viewer: sample sets in a list, shown by folder, or by name; with P(bad) under the first threshold."""
    from ..evaluation.inspect import write_inspect_log

    if not isinstance(samples, dict):
        short = {Path(each.folder).name: each for each in samples}
        samples = short if len(short) == len(samples) else {str(each.folder): each for each in samples}
    write_inspect_log(path, samples, thresholds[0] if thresholds else None, column)


def _write(args: argparse.Namespace, samples: list[Any], report: Any) -> None:
    """Prints the report, and writes it to the files that the arguments name."""
    from ..evaluation.records import write_report

    text = report.to_markdown(args.per_prompt)
    for folder, sample_set in zip(args.folders, samples, strict=True):
        if (total := sample_set.header["prompts"].get("of")) is not None:
            text = f"`{folder}` is partial: the first {len(sample_set.prompts)} of {total} prompts.\n{text}"
    write_report(args.output, report.to_dict() | {"folders": args.folders})
    if args.inspect_log is not None:
        write_log(args.inspect_log, samples, args.thresholds, args.column)
    print(text)
    if args.card is not None:
        check_measured(args.card, *(samples[0].header["model"][name] for name in ("weights", "name")))
        data = f"{report.samples:,} completions of each of {report.prompts:,} prompts"
        mean = f"mean {report.column}"
        metrics = {with_unit(mean if name == "mean" else name): estimate for name, estimate in report.overall.items()}
        text = f"{report.to_markdown()}\n\n{samples[0].conditions}"
        write_on_card(args.card, "Held-out samples", text, metrics, data, report.confidence)
