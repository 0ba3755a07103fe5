"""
`trl-repulse suggest`: settings for RePULSe with a model, a reward and prompts, from samples of the initial policy.

Each reason says whether it is a measurement of these samples, was measured elsewhere (and where), or is a rule of thumb.

Legend: P prompts, N completions of a prompt.
"""

import argparse
import math
import os
import sys
import textwrap
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from .._errors import describe_error, from_reward
from .._numbers import is_bad
from .._rules_of_thumb import LOW, bad_threshold_for, learning_rate_for, rounded
from ..evaluation.tails import prob_below
from ._fields import add_options, add_prompts, add_reward, check_output, named_prompts


LEAST = 50  # samples
# What was measured in the three held-out worlds (docs/held_out.md): the spread of the initial policy's reward within a prompt,
# and the settings that belong to it
SPREAD, KL_COEFFICIENT, ALPHA = 1.5, 0.2, 1.0
TARGET_NATS = 35.0  # target_dist_beta times the range of the reward, as in the embedded world's settings
UPDATES = 800  # of the published setting 1; 640 in the held-out worlds
WARM_UP = 20  # updates, in the held-out worlds
HIGH = 0.98  # quantile


@dataclass(frozen=True)
class DrawnSamples:
    """Completions of the initial policy: P · N texts, prompt by prompt."""

    rewards: np.ndarray  # (P, N), NaN where there is none
    lengths: np.ndarray  # (P, N), in tokens
    ended: np.ndarray  # (P, N), whether it ended by itself
    texts: list[str]
    seconds: float  # to draw one


@dataclass(frozen=True)
class Machine:
    """What training will need and have."""

    parameters: int
    adapter: int  # parameters of a LoRA adapter of rank 16 on all linear layers
    layers: int
    width: int  # hidden size
    inner: int  # size of the MLP
    cache: int  # numbers that a layer keeps of a token for later ones
    reward_bytes: int  # 0 if the reward model is not in this process
    number: int  # bytes of an activation: 2 in bf16, on an accelerator, else 4
    memory: float | None  # of the device in bytes, if it can be found out
    device: str


@dataclass(frozen=True)
class Measured:
    """All that was measured."""

    own: DrawnSamples
    empty_rewards: np.ndarray | None  # of empty completions; `None` where the reward failed
    num_prompts: int  # of which samples may cover a part
    prompt_tokens: int  # of the longest prompt that was sampled
    reward_seconds: float  # of a completion
    score_seconds: float  # of a pass of the policy over a completion, without gradient
    machine: Machine


@dataclass
class Suggestion:
    """Settings by name with the reason of each; notes by what they are about; and what to look at before training."""

    values: dict[str, Any] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    def set(self, name: str, value: Any, reason: str) -> None:
        """Adds a setting."""
        self.values[name], self.reasons[name] = value, reason

    def to_text(self) -> str:
        """A line for each setting, note and warning."""
        width = max(map(len, self.reasons))
        lines = [f"{name:<{width}}  {_plain(self.values[name]):<10}  {self.reasons[name]}" for name in self.reasons]
        return "\n".join([*lines, "", *self._remarks()])

    def to_yaml(self, head: str, more: dict[str, Any]) -> str:
        """The file of a training command: `more` settings without a reason first, then each with its reason above it."""
        lines = [f"# {line}" for line in head.splitlines()] + [""]
        lines += [yaml.safe_dump({name: value}, allow_unicode=True).rstrip() for name, value in more.items()]
        for name, value in self.values.items():
            lines += ["", *_comment(self.reasons[name]), yaml.safe_dump({name: value}).rstrip()]
        for remark in self._remarks():
            lines += ["", *_comment(remark)]
        return "\n".join(lines) + "\n"

    def _remarks(self) -> list[str]:
        notes = [f"{name}: {text}" for name, text in self.notes.items()]
        return [*notes, *(f"WARNING: {text}" for text in self.warnings)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments."""
    parser.add_argument("--model", required=True, help="path or Hub id of the model to train")
    add_prompts(parser, required=True)
    parser.add_argument("--max_prompt_length", type=int, help="prompts of more tokens are left out")
    add_options(parser, "chat_template_kwargs", "seed", "dtype", "trust_remote_code")
    add_options(parser, "batch_size", default=32)
    add_reward(parser)
    parser.add_argument("--bad_reward_threshold", type=float, help="reward under which an output is bad, if you know")
    parser.add_argument("--use_peft", action="store_true", help="suggest for a LoRA adapter, not for all weights")
    parser.add_argument("--max_steps", type=int, help="updates of the training run (800)")
    parser.add_argument("--num_samples", type=int, default=500, help="completions to draw, over all prompts (500)")
    parser.add_argument("--max_completion_length", type=int, default=256, help="tokens of a completion (256)")
    parser.add_argument(
        "--output", metavar="FILE", type=Path, help="YAML file for `trl-repulse repulse --config FILE`"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Samples, suggests and returns 0, or 1 with a message if that cannot be done."""
    from ..evaluation.records import write_atomically

    try:
        measured, suggestion = suggest(args)
        if args.output is not None:
            given, command = _given(args), f"  trl-repulse repulse --config {args.output}"
            if given.get("reward_model_path") != args.reward_model_path:
                command += " --reward_model_path ADDRESS\nThe server's address stands here without its user info and query. Give the whole "
                command += "address when you train, or put a bearer token into an environment variable and set `token_variable`."
            head = f"RePULSe with {args.model}, as `trl-repulse suggest` proposes it from {measured.own.rewards.size} samples. "
            text = suggestion.to_yaml(f"{head}Run it with\n{command}", given)
            write_atomically(args.output, lambda path: path.write_text(text, encoding="utf-8"))
        print(f"{_samples(measured, suggestion)}\n{suggestion.to_text()}")
        if args.output is not None:
            print(f"\nWritten to {args.output}. Read it, and train with\n{command}")
    except Exception as error:  # a reward may fail with any
        if not (isinstance(error, ValueError | OSError | RuntimeError | ImportError) or from_reward(error)):
            raise
        print(f"trl-repulse suggest: {describe_error(error)}", file=sys.stderr)
        return 1
    return 0


def suggest(args: argparse.Namespace) -> tuple[Measured, Suggestion]:
    """Draws samples of the initial policy, rewards them, and concludes."""
    from ..data._checks import check_adapters
    from ..data._prompts import check_template_variables
    from ..data.loading import drop_long_prompts
    from ..evaluation._generation import check_dtype, check_template_kwargs, process_state
    from ..evaluation.rare.sampling import check_sizes
    from ..rewards.loading import load_reward

    steps = UPDATES if args.max_steps is None else args.max_steps
    check_sizes(max_completion_length=args.max_completion_length, batch_size=args.batch_size, max_steps=steps)
    if args.num_samples < LEAST:
        raise ValueError(f"`num_samples={args.num_samples}` is too few to suggest from; draw at least {LEAST}.")
    if args.bad_reward_threshold is not None and not math.isfinite(args.bad_reward_threshold):
        raise ValueError(f"`bad_reward_threshold={args.bad_reward_threshold}` must be a finite number.")
    if args.seed < 0:
        raise ValueError(f"`seed={args.seed}` must be at least 0.")
    check_dtype(args.dtype)
    check_output(args.output)
    check_adapters(args.model)
    if process_state().num_processes > 1:
        raise ValueError("`suggest` runs in one process; start it without `accelerate launch`.")
    prompts = named_prompts(args)
    check_template_variables(args.chat_template_kwargs)  # also `tools`, which the trainer takes by itself
    check_template_kwargs(prompts[:1]["prompt"], args.chat_template_kwargs)
    reward = load_reward(args.reward_type, args.reward_model_path, **args.reward_kwargs)
    model, tokenizer = _load_policy(args)
    if args.max_prompt_length is not None:
        prompts = drop_long_prompts(prompts, tokenizer, args.max_prompt_length, args.chat_template_kwargs)
    measured = _measure(args, model, tokenizer, prompts, *_as_function(reward, args))
    return measured, suggest_settings(
        measured,
        max_completion_length=args.max_completion_length,
        max_steps=steps,
        use_peft=args.use_peft,
        bad_reward_threshold=args.bad_reward_threshold,
    )


def _load_policy(args: argparse.Namespace) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM

    from ..evaluation._generation import process_state
    from ..models._loading import load_model, load_tokenizer
    from ..models._model_checks import check_causal

    code = {"trust_remote_code": args.trust_remote_code}
    tokenizer = load_tokenizer(args.model, "model", **code)
    model = load_model(AutoModelForCausalLM, args.model, "model", dtype=args.dtype, **code)
    model.to(process_state().device)
    check_causal(model, "`model`")
    return model, tokenizer


def _as_function(reward: Any, args: argparse.Namespace) -> tuple[str, Any, int]:
    """Name and function of the reward, and the bytes of its model, 0 if it has none in this process."""
    from transformers import AutoModelForSequenceClassification, PreTrainedModel

    from ..evaluation._generation import as_function, process_state
    from ..models._loading import load_model, load_tokenizer
    from ..rewards.models import ModelReward

    device, tokenizer = process_state().device, None
    if isinstance(reward, str):
        code = {"trust_remote_code": args.trust_remote_code}
        tokenizer = load_tokenizer(reward, "reward model", **code)
        reward = load_model(AutoModelForSequenceClassification, reward, "reward model", num_labels=1, **code)
        reward.to(device)
    model = reward._module if isinstance(reward, ModelReward) else reward
    size = model.get_memory_footprint() if isinstance(model, PreTrainedModel) else 0
    return *as_function(reward, tokenizer, device, args.chat_template_kwargs), size


def _measure(
    args: argparse.Namespace, model: Any, tokenizer: Any, prompts: Any, name: str, function: Any, reward_bytes: int
) -> Any:
    """Draws, rewards and scores samples of the policy."""
    from tqdm.auto import tqdm

    from ..data._checks import check_prompt_lengths
    from ..data._texts import completion_texts
    from ..evaluation._generation import end_tokens, evaluate_rewards, prompt_tokens, transformers_engine
    from ..evaluation.log_probs import completion_log_probs

    completions = max(5, args.num_samples // len(prompts))  # of a prompt: rewards are compared within one
    count = min(len(prompts), args.num_samples // completions)
    chosen = prompts.shuffle(seed=args.seed).select(range(count))
    rows = [place for place in range(count) for _ in range(completions)]
    ids = prompt_tokens(tokenizer, chosen["prompt"][:], args.chat_template_kwargs)
    check_prompt_lengths(ids, chosen["prompt"][:], model.config, args.max_completion_length)
    end = set(end_tokens(model, tokenizer))
    spent = 0.0

    def reward(places: list[int], texts: list[str], tokens: list[list[int]]) -> np.ndarray:
        nonlocal spent
        columns = chosen[places]
        asked = columns.pop("prompt")
        start = time.perf_counter()
        given = evaluate_rewards({name: function}, asked, texts, tokens, columns, args.batch_size)[name]
        spent += time.perf_counter() - start
        return np.array([np.nan if value is None else value for value in given])

    prompt_ids = [ids[place] for place in rows]
    start = time.perf_counter()
    with tqdm(total=len(rows), desc="samples", unit="completion") as bar:
        engine = transformers_engine(
            model, tokenizer, args.max_completion_length, args.batch_size, on_drawn=bar.update
        )
        tokens = engine(prompt_ids, args.seed)
    seconds = (time.perf_counter() - start) / len(rows)
    texts = completion_texts(tokenizer, chosen[rows]["prompt"], prompt_ids, tokens)
    rewards = reward(rows, texts, tokens)
    start = time.perf_counter()
    completion_log_probs(model, prompt_ids, tokens, args.batch_size)
    score_seconds, reward_seconds = (time.perf_counter() - start) / len(rows), spent / len(rows)
    lengths, ended = [len(row) for row in tokens], [bool(row) and row[-1] in end for row in tokens]
    shaped = (np.reshape(x, (-1, completions)) for x in (rewards, lengths, ended))
    own = DrawnSamples(*shaped, texts, seconds)
    places = list(range(min(count, 32)))
    try:
        empty = reward(places, [""] * len(places), [[] for _ in places])
    except Exception as error:
        if not from_reward(error):
            raise
        empty = None
    machine = _machine(model, reward_bytes)
    longest = max(map(len, ids))
    return Measured(own, empty, len(prompts), longest, reward_seconds, score_seconds, machine)


def _machine(model: Any, reward_bytes: int) -> Any:
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    config, head = model.config.get_text_config(), model.get_output_embeddings()
    width, heads = config.hidden_size, getattr(config, "num_attention_heads", None) or 1
    head_size = getattr(config, "head_dim", None) or width // heads
    device = next(model.parameters()).device
    linear = [layer for layer in model.modules() if isinstance(layer, nn.Linear | Conv1D) and layer is not head]
    return Machine(
        parameters=model.num_parameters(),
        adapter=sum(16 * sum(layer.weight.shape) for layer in linear),
        layers=config.num_hidden_layers,
        width=width,
        inner=getattr(config, "intermediate_size", None) or 4 * width,
        cache=2 * head_size * (getattr(config, "num_key_value_heads", None) or heads),
        reward_bytes=reward_bytes,
        number=4 if device.type == "cpu" else 2,
        memory=_memory(device),
        device=device.type,
    )


def _memory(device: Any) -> float | None:
    """Memory of a device in bytes, `None` if it does not say."""
    import torch

    try:
        if device.type == "cpu":
            return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
        return float(torch.get_device_module(device).mem_get_info(device)[1])
    except (AttributeError, ValueError, OSError):  # not every system and kind of device tells
        return None


def _given(args: argparse.Namespace) -> dict[str, Any]:
    """What the user has named, as the training commands call it, without what is secret of a server's address."""
    from ..rewards.remote import parse_address

    path = args.reward_model_path
    if args.reward_type == "remote":
        addresses = [parse_address(url) for url in path.split(",")]
        if any(address.secrets for address in addresses):
            path = ",".join(address.shown for address in addresses)
    values = {
        "model_name_or_path": args.model,
        "reward_model_path": path,
        "reward_type": args.reward_type,
        "reward_kwargs": args.reward_kwargs or None,
        "dataset_name": args.prompts,
        "dataset_train_split": None if args.split == "train" else args.split,
        "prompt_column": None if args.prompt_column == "prompt" else args.prompt_column,
        "apply_chat_template": args.apply_chat_template or None,
        "chat_template_kwargs": args.chat_template_kwargs,
        "max_prompt_length": args.max_prompt_length,
        "trust_remote_code": args.trust_remote_code or None,
        "output_dir": "out",
    }
    if args.use_peft:
        values |= {"use_peft": True, "lora_r": 16, "lora_alpha": 32, "lora_target_modules": ["all-linear"]}
    return {name: value for name, value in values.items() if value is not None}


def _samples(measured: Any, suggestion: Any) -> str:
    """The samples in a few numbers, and those with the lowest rewards."""
    own = measured.own
    rewards = own.rewards[np.isfinite(own.rewards)]
    quantiles = ", ".join(
        f"{np.quantile(rewards, level):.3g} ({level:.0%})" for level in (0.02, 0.25, 0.5, 0.75, 0.98)
    )
    lines = [
        f"{own.rewards.size} samples of {len(own.rewards)} prompts: reward {rewards.mean():.3g} on average, {rewards.min():.3g} to "
        f"{rewards.max():.3g}, quantiles {quantiles}; {own.lengths.mean():.0f} tokens on average.",
        "",
    ]
    values = own.rewards.ravel()
    for place in np.argsort(values)[:5]:
        lines.append(f"lowest: {values[place]:.3g}  {own.texts[place].strip()[:160]!r}")
    return "\n".join([*lines, ""])


def suggest_settings(
    measured: Measured,
    *,
    max_completion_length: int,
    max_steps: int = UPDATES,
    use_peft: bool = False,
    bad_reward_threshold: float | None = None,
) -> Suggestion:
    """
    Settings for `trl-repulse repulse`, from samples of the initial policy, which had at most `max_completion_length` tokens.
    Raises a `ValueError` if all samples have the same reward, or fewer than two have any.
    """
    found, own = Suggestion(), measured.own
    rewards = own.rewards[np.isfinite(own.rewards)]
    if rewards.size < 2 or rewards.min() == rewards.max():
        what = f"the reward {rewards[0]:g}" if rewards.size else "no reward"
        raise ValueError(
            f"All {own.rewards.size} samples have {what}, so that there is nothing to learn; check the reward function, or "
            "give other prompts."
        )
    threshold = _threshold(found, own.rewards.size, rewards, bad_reward_threshold)
    _reward_warnings(found, measured, rewards, threshold)
    share = float(is_bad(rewards, threshold).mean())
    found.set(
        "proposal",
        "hot_policy",
        "The default: there is no second model. Extra samples are drawn from the policy as it is, at a higher temperature, or with the "
        "logits of tokens raised that lower the reward, whichever finds bad outputs most often as training goes on.",
    )
    _length(found, own, max_completion_length)
    prompts = _counts(found, measured, share)
    _weights(found, own.rewards, rewards, threshold)
    _learning_rate(found, measured.machine.parameters, use_peft)
    _batch(found, measured, prompts, use_peft)
    reason = "Rule of thumb: as many updates as the published setting 1; the held-out worlds had 160 and 640."
    found.set("max_steps", max_steps, reason if max_steps == UPDATES else "The value is yours.")
    reason = "Rule of thumb: as in the held-out worlds, and no more than an eighth of the updates."
    found.set("warmup_steps", min(WARM_UP, max_steps // 8), reason)
    found.notes["other methods"] = (
        "`repulse-ppo` takes this file too. `repulse-grpo` takes it with `--scale_rewards none`. By default it divides rewards by their "
        "standard deviation within a prompt, and `alpha` and `beta`, which are in units of the reward, would no longer fit."
    )
    found.notes["time"] = _hours(measured, prompts * found.values["num_generations"], max_steps, share)
    return found


def _reward_warnings(found: Suggestion, measured: Measured, rewards: np.ndarray, threshold: float) -> None:
    own, (low, middle) = measured.own, np.quantile(rewards, (LOW, 0.5))
    missing = own.rewards.size - rewards.size
    if missing:
        found.warnings.append(
            f"{missing} of {own.rewards.size} samples have no reward. Training leaves such samples out; check that this is meant."
        )
    within = _spread_within(own.rewards)
    if within is not None and within**2 < 0.01 * rewards.var():
        found.warnings.append(
            "The reward hardly differs between completions of one prompt, and training compares those alone: there is little to "
            "learn from it."
        )
    floor = float((rewards == rewards.min()).mean())
    quarter = float(np.quantile(rewards, 0.25))
    if floor >= 0.05:
        found.warnings.append(
            f"{floor:.0%} of the samples share the lowest reward ({rewards.min():g}): the reward has no low tail, and what is worse "
            "than bad cannot be told from what is bad."
        )
    elif middle - low < 2 * (middle - quarter):  # 3.0 times for a normal distribution, 1.9 for an even one
        found.warnings.append(
            f"The reward has no low tail: the worst 2 % of the samples ({low:.3g}) are hardly farther from the median ({middle:.3g}) "
            f"than the worst quarter ({quarter:.3g}). RePULSe is made for outputs that are rare and much worse."
        )
    groups = {"An empty completion": measured.empty_rewards}
    cut = own.rewards[~own.ended]
    if 10 <= cut.size < own.rewards.size:
        groups["A completion that was cut"] = cut
    for name, values in groups.items():
        if values is None:
            found.warnings.append(
                "The reward function fails on an empty completion, which a policy may draw at any time."
            )
            continue
        values = values[np.isfinite(values)]
        if not values.size:
            continue
        value = float(np.median(values))
        rank = float((rewards < value).mean() + (rewards == value).mean() / 2)
        if is_bad(value, threshold):
            found.warnings.append(
                f"{name} gets {value:.3g} and counts as bad: the negative term will find such completions, and be "
                "spent on them. If they are not what you call bad, give them an ordinary reward."
            )
        elif rank <= 0.05:
            found.warnings.append(
                f"{name} gets {value:.3g}, among the lowest rewards there are, though it does not count as bad: training will avoid such "
                "completions. Check that this is meant."
            )
        if rank >= 0.95:
            found.warnings.append(
                f"{name} gets {value:.3g}, among the highest rewards there are: training will make such completions common. Give "
                "them a low reward."
            )


def _threshold(found: Suggestion, drawn: int, rewards: np.ndarray, given: float | None) -> float:
    threshold = bad_threshold_for(rewards) if given is None else given
    below = prob_below(rewards[None], threshold)
    advice = "Rule of thumb: about the 2 % quantile, or a gap near it. Read the lowest samples, and move it to what you call bad."
    found.set(
        "bad_reward_threshold",
        threshold,
        f"Measured: {below.samples:.0f} of {drawn} samples lie under it ({below.value:.1%}; 95 % interval {below.low:.1%} to "
        f"{below.high:.1%}). {advice if given is None else 'The value is yours.'}",
    )
    if below.value > 0.1:
        found.warnings.append(
            f"{below.value:.0%} of the samples are bad. REINFORCE learns from outputs that common; RePULSe is for the rare ones "
            "that it leaves. Train with `--alpha 0` first, or lower the threshold."
        )
    return threshold


def _length(found: Suggestion, own: DrawnSamples, limit: int) -> None:
    cut = 1 - float(own.ended.mean())
    if cut > 0.05:
        reason = f"Measured: {cut:.0%} of the samples were cut at this length, which they were drawn with."
        found.set("max_completion_length", limit, reason)
        found.warnings.append(
            f"{cut:.0%} of the samples did not end within {limit} tokens, so that their rewards are of text that breaks off. Run this "
            "again with a larger `--max_completion_length`, or ask for shorter answers in the prompts."
        )
        return
    high = float(np.quantile(own.lengths[own.ended], HIGH))
    reason = f"Measured: 98 % of the samples that ended have at most {high:.0f} tokens. Rule of thumb: a tenth more, in eights."
    found.set("max_completion_length", min(limit, 8 * math.ceil(1.1 * high / 8)), reason)


def _counts(found: Suggestion, measured: Measured, share: float) -> int:
    """Sets N, and returns the prompts of an update."""
    completions = 5 if measured.num_prompts >= 10 else math.ceil(50 / measured.num_prompts)
    reason = "As in the held-out worlds and the published setting 1. As many extra samples come on top."
    if completions != 5:
        reason = f"Rule of thumb: about 50 completions in an update, of your {measured.num_prompts} prompts. As many extra samples come on top."
    found.set("num_generations", completions, reason)
    each = 2 * completions * share  # bad samples of a prompt, if extra samples find no more than the policy
    prompts = next((count for count in (10, 20, 30, 40) if count * each >= 10), 50)
    prompts = min(prompts, measured.num_prompts)
    found.set(
        "train_batch_size",
        prompts * completions,
        f"Completions of an update: {completions} of each of {prompts} prompts. At first about {prompts * each:.0f} samples of an update "
        "or more will be bad. Rule of thumb: 10, with 10 prompts (held-out worlds) to 50 (published setting 1).",
    )
    return prompts


def _weights(found: Suggestion, drawn: np.ndarray, rewards: np.ndarray, threshold: float) -> None:
    within = _spread_within(drawn)
    spread = within or float(rewards.std())
    bad, high = rewards[is_bad(rewards, threshold)], np.quantile(rewards, HIGH)
    low = np.median(bad) if bad.size else rewards.min()
    if low == high:
        high = rewards.max()
    found.set(
        "beta",
        rounded(KL_COEFFICIENT * spread / SPREAD),
        f"KL penalty. Measured: the reward's standard deviation {'within a prompt' if within else 'over all samples'} is {spread:.3g}. "
        f"Rule of thumb: {KL_COEFFICIENT / SPREAD:.2f} of it, as in the held-out worlds ({KL_COEFFICIENT:g} at {SPREAD:g}). Twice as much "
        "stays nearer to the initial policy.",
    )
    found.set(
        "alpha",
        rounded(ALPHA * spread / SPREAD),
        f"Weight of the negative term. Rule of thumb: {ALPHA / SPREAD:.1f} of that standard deviation, as in the held-out worlds "
        f"({ALPHA:g} at {SPREAD:g}). With Adam a reward in other units makes the same updates, if `beta` and `alpha` are in these units.",
    )
    found.notes["learned proposal"] = (
        f"with `proposal: learned` set `target_dist_beta: {-rounded(TARGET_NATS / (high - low), 2):g}`. Rule of thumb: "
        f"{TARGET_NATS:g} nats from a bad output to a good one ({low:.3g} to {high:.3g}: the median of the bad samples and the 98 % quantile, "
        f"measured), as in the embedded world. The target then prefers bad outputs down to a probability of about e^-{TARGET_NATS:g}."
    )


def _learning_rate(found: Suggestion, parameters: int, use_peft: bool) -> None:
    full, adapter = (learning_rate_for(parameters, each) for each in (False, True))
    found.set(
        "learning_rate",
        adapter if use_peft else full,
        f"Rule of thumb for {_count(parameters)} parameters: {full:g} for all weights, {adapter:g} for an adapter. It interpolates 6e-4 "
        "at 0.24M (held-out worlds), 3e-5 at 135M and 3e-7 at 1.24B (published). Five times as much for an adapter "
        "was chosen in held-out worlds. Try a third and three times as much, and keep what has the highest reward - beta * KL.",
    )


def _batch(found: Suggestion, measured: Measured, prompts: int, use_peft: bool) -> None:
    """Sets the micro-batch, and estimates memory."""
    machine, n, have = measured.machine, found.values["num_generations"], measured.machine.memory
    fixed = _fixed_memory(machine, use_peft)
    tokens = measured.prompt_tokens + found.values["max_completion_length"]
    # An own and an extra completion: inputs of all layers, which checkpointing keeps, and one layer whole. The factors of the latter
    # are those at which the formula without checkpointing gives what was measured on an H100 (benchmarks/notes/shared_prompts.md)
    a_row = 2 * tokens * machine.number * ((machine.layers + 20) * machine.width + 8 * machine.inner)
    cache = 2 * prompts * n * tokens * machine.layers * machine.cache * machine.number
    sizes = [n * k for k in range(prompts, 0, -1) if prompts % k == 0]
    size = next((size for size in sizes if have is None or sum(fixed.values()) + size * a_row <= 0.8 * have), n)
    need = sum(fixed.values()) + max(size * a_row, cache)
    passes = prompts * n // size
    reason = f"Whole prompts, in {passes} passes to an update." if passes > 1 else "An update in one pass."
    fits = have is not None and need <= have
    reason += " By the estimate of memory below." if fits else ""
    found.set("per_device_train_batch_size", size, reason)
    parts = ", ".join(f"{name} {_gib(value)}" for name, value in fixed.items() if value)
    found.notes["memory"] = (
        f"{_gib(need)}: {parts}, and the larger of {_gib(size * a_row)} (activations of a pass) and {_gib(cache)} (keys and values "
        "while sampling). Weights are counted, with TRL's defaults: float32, Adam, gradient checkpointing. Activations may be off by a "
        f"factor of 2, and a reward that is a function or a server is not counted.{'' if have is None else f' This device has {_gib(have)}.'}"
    )
    if have is not None and need > have:
        remedy = (
            "a smaller model, or ZeRO-3 on several devices" if use_peft else "`--use_peft`, or ZeRO on several devices"
        )
        found.warnings.append(
            f"Training needs about {_gib(need)} of memory, and this device has {_gib(have)}. Try {remedy}."
        )


def _fixed_memory(machine: Machine, use_peft: bool) -> dict[str, float]:
    trained = machine.adapter if use_peft else machine.parameters
    return {
        "weights": 4 * machine.parameters + (4 * trained if use_peft else 0),
        "copies in bf16": 2 * machine.parameters if machine.number == 2 else 0,
        "gradients": 4 * trained,
        "Adam": 8 * trained,
        "reference": 0 if use_peft else 4 * machine.parameters,
        "reward model": machine.reward_bytes,
    }


def _hours(measured: Measured, completions: int, updates: int, bad: float) -> str:
    own = measured.own.seconds
    drawing = 2 * completions * (own + measured.reward_seconds)
    # Forward, recomputed forward, and a backward pass of two for own samples and bad extra ones; the reference's for the own
    passes = 4 * (1 + bad) + 1
    training = completions * measured.score_seconds * passes
    return (
        f"{_time(updates * (drawing + training))} for {updates} updates on this device ({measured.machine.device}). Measured: {own:.2g} s to "
        f"draw a completion and {measured.reward_seconds:.2g} s to reward it, hence {_time(drawing)} for the "
        f"{2 * completions} of an update. Rule of thumb: {_time(training)} of training, {passes:.1f} forward passes ({measured.score_seconds:.2g} s, "
        "measured) for each own completion with its extra one, which is read if it is bad. Larger batches than those of these samples take less time."
    )


def _spread_within(rewards: np.ndarray) -> float | None:
    """Standard deviation within a prompt, or `None` if no prompt has two samples."""
    counts = np.isfinite(rewards).sum(axis=1)
    several = rewards[counts > 1]
    if not len(several):
        return None
    return float(np.sqrt(np.nanvar(several, axis=1, ddof=1).mean()))


def _comment(text: str) -> list[str]:
    return textwrap.wrap(text, 117, initial_indent="# ", subsequent_indent="# ")


def _plain(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _count(number: float) -> str:
    return next(
        (f"{number / size:.3g}{unit}" for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")) if number >= size),
        f"{number:g}",
    )


def _gib(value: float) -> str:
    return f"{value / 2**30:.2g} GiB" if value >= 2**30 / 10 else f"{value / 2**20:.2g} MiB"


def _time(seconds: float) -> str:
    return next(
        (f"{seconds / size:.2g} {unit}" for size, unit in ((3600, "hours"), (60, "minutes")) if seconds >= size),
        f"{seconds:.2g} seconds",
    )
