"""
`trl-repulse suggest`: settings for RePULSe with a model, a reward and prompts, from samples of the initial policy.

Each reason says whether it is a measurement of these samples, was measured elsewhere (and where), or is a rule of thumb.

Legend: P prompts, N completions of a prompt.
"""

import argparse
import gc
import math
import sys
import tempfile
import textwrap
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from .._errors import from_reward
from .._numbers import is_bad
from .._rules_of_thumb import LOW, bad_threshold_for, learning_rate_for, rounded
from ..evaluation.tails import prob_below
from ._fields import add_options, add_prompts, add_reward, named_prompts


LEAST = 50  # samples
# What was measured in the three held-out worlds (docs/held_out.md): the spread of the initial policy's reward within a prompt,
# and the settings that belong to it
SPREAD, KL_COEFFICIENT, ALPHA = 1.5, 0.2, 1.0
TARGET_NATS = 35.0  # target_dist_beta times the range of the reward, as in the embedded world's settings
UPDATES = 800  # of the published setting 1; 640 in the held-out worlds
WARM_UP, FEW = 20, 160  # updates, in the held-out worlds: of the warm-up, and the fewest
HIGH = 0.98  # quantile
MOST = 1.0  # gain and its standard error, of extra samples that gain nothing
FINDS = 5  # bad samples from which a gain is told
FEWEST = 5  # prompts of an update
A_MEASUREMENT = 20.0  # seconds, about, of an update that is measured
CLEARLY = 1.2  # how many times faster the other precision must be
SAMPLING, EVALUATION = 0.1, 0.25  # shares of `--minutes`: of what suggests, on top, and of what evaluates
ADAPTER = {"use_peft": True, "lora_r": 16, "lora_alpha": 32, "lora_target_modules": ["all-linear"]}


@dataclass(frozen=True)
class Measured:
    """What samples of the initial policy show."""

    rewards: np.ndarray  # (P, N), NaN where there is none
    lengths: np.ndarray  # (P, N), in tokens
    ended: np.ndarray  # (P, N), whether it ended by itself
    texts: list[str]  # P · N, prompt by prompt
    empty_rewards: np.ndarray | None  # of empty completions; `None` where the reward failed
    num_prompts: int  # of which samples may cover a part
    parameters: int
    seconds: float  # to draw, reward and score a completion, as `evaluate` does
    # Of extra samples over as many of the policy's own, if enough bad ones were found to tell, and its standard error
    gain: tuple[float, float] | None = None


@dataclass(frozen=True)
class Updates:
    """What updates of training took on this device."""

    prompts: int  # in an update
    seconds: dict[str, float]  # of an update, by precision
    device: str
    memory: float | None = None  # most bytes that the device held, if it says


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
        lines = [f"{name:<{width}}  {_plain(self.values[name]):<10}  {why}" for name, why in self.reasons.items()]
        return "\n".join([*lines, "", *self._remarks()])

    def to_yaml(self, head: str, more: dict[str, Any]) -> str:
        """The file of a training command: `more` settings without a reason first, then each with its reason above it."""
        lines = [f"# {line}".rstrip() for line in head.splitlines()] + [""]
        lines += [yaml.safe_dump({name: value}, allow_unicode=True).rstrip() for name, value in more.items()]
        for name, value in self.values.items():
            lines += ["", *_comment(self.reasons[name]), yaml.safe_dump({name: value}).rstrip()]
        return "\n".join([*lines, *(line for remark in self._remarks() for line in ("", *_comment(remark))), ""])

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
    parser.add_argument(
        "--minutes", type=float, metavar="N", help="time for training and evaluation on this machine, in place of it"
    )
    parser.add_argument(
        "--num_samples",
        type=int,
        default=500,
        help="completions to draw, over all prompts, at most if minutes are given (500)",
    )
    parser.add_argument("--max_completion_length", type=int, default=256, help="tokens of a completion (256)")
    parser.add_argument(
        "--output", metavar="FILE", type=Path, help="YAML file for `trl-repulse repulse --config FILE`"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Samples, suggests and returns 0."""
    from ..evaluation.records import write_atomically

    measured, suggestion = suggest(args)
    text = f"{_samples(measured)}\n{suggestion.to_text()}"
    if args.output is not None:
        command = f"  trl-repulse repulse --config {args.output}"
        head = f"RePULSe with {args.model}, as `trl-repulse suggest` proposes it from {measured.rewards.size} samples. Run it with\n{command}"
        content = suggestion.to_yaml(head, _given(args))
        write_atomically(args.output, lambda path: path.write_text(content, encoding="utf-8"))
        text += f"\n\nWritten to {args.output}. Read it, and train with\n{command}"
    print(text)
    return 0


def _say(text: str) -> None:
    """Says what is being done, where reports do not go."""
    print(f"suggest: {text} ...", file=sys.stderr, flush=True)


def _check(args: argparse.Namespace) -> None:
    """Refuses what can be refused before torch is imported."""
    from ..evaluation.tails import check_sizes

    sizes = {"max_completion_length": args.max_completion_length, "batch_size": args.batch_size}
    check_sizes(**sizes, max_steps=UPDATES if args.max_steps is None else args.max_steps)
    if args.minutes is not None and args.max_steps is not None:
        raise ValueError("`--minutes` decides `max_steps`; leave one of them out.")
    if args.minutes is not None and not 0 < args.minutes < math.inf:
        raise ValueError(f"`--minutes {args.minutes:g}` must be above 0, and finite.")
    if args.num_samples < LEAST:
        raise ValueError(f"`num_samples={args.num_samples}` is too few to suggest from; draw at least {LEAST}.")
    if args.bad_reward_threshold is not None and not math.isfinite(args.bad_reward_threshold):
        raise ValueError(f"`bad_reward_threshold={args.bad_reward_threshold}` must be a finite number.")
    if args.seed < 0:
        raise ValueError(f"`seed={args.seed}` must be at least 0.")


def suggest(args: argparse.Namespace) -> tuple[Measured, Suggestion]:
    """Draws samples of the initial policy, rewards them, trains for a few updates, and concludes."""
    _check(args)
    _say(f"reading {args.model} and the prompts")
    from transformers import AutoModelForCausalLM

    from ..data._checks import check_adapters
    from ..data._prompts import check_template_variables
    from ..data.loading import drop_long_prompts
    from ..evaluation._generation import as_function, check_dtype, check_template_kwargs, process_state
    from ..models._loading import load_with_tokenizer
    from ..models._model_checks import check_causal
    from ..rewards.loading import load_reward

    check_dtype(args.dtype)
    check_adapters(args.model)
    if process_state().num_processes > 1:
        raise ValueError("`suggest` runs in one process; start it without `accelerate launch`.")
    prompts = named_prompts(args)
    check_template_variables(args.chat_template_kwargs)  # also `tools`, which the trainer takes by itself
    check_template_kwargs(prompts[:1]["prompt"], args.chat_template_kwargs)
    reward = load_reward(args.reward_type, args.reward_model_path, **args.reward_kwargs)
    device, options = process_state().device, {"dtype": args.dtype, "trust_remote_code": args.trust_remote_code}
    model, tokenizer = load_with_tokenizer(AutoModelForCausalLM, args.model, "model", device, **options)
    check_causal(model, "`model`")
    if args.max_prompt_length is not None:
        prompts = drop_long_prompts(prompts, tokenizer, args.max_prompt_length, args.chat_template_kwargs)
    named = as_function(reward, None, device, args.chat_template_kwargs, args.trust_remote_code)
    measured = _measure(args, model, tokenizer, prompts, named)
    suggestion = suggest_settings(
        measured,
        max_completion_length=args.max_completion_length,
        use_peft=args.use_peft,
        bad_reward_threshold=args.bad_reward_threshold,
    )
    del model  # training loads its own
    updates = _measure_updates(args, suggestion, measured, prompts, named[1])
    plan(suggestion, measured, updates, args.max_steps, args.minutes)
    return measured, suggestion


class _Policy:
    """The initial policy: draws and scores completions of prompts, which are named by their places."""

    def __init__(self, args: argparse.Namespace, model: Any, tokenizer: Any, prompts: Any, reward: tuple[str, Any]):
        from ..data._checks import check_prompt_lengths
        from ..evaluation._generation import prompt_tokens
        from ..generation._probe import probe_shared

        self.args, self.model, self.tokenizer, self.prompts, self.reward = args, model, tokenizer, prompts, reward
        self.ids = prompt_tokens(tokenizer, prompts["prompt"][:], args.chat_template_kwargs)
        check_prompt_lengths(self.ids, prompts["prompt"][:], model.config, args.max_completion_length)
        self.guard = probe_shared(model)

    def draw(self, places: list[int], seed: int, sampler: Any) -> tuple[list[list[int]], list[str], np.ndarray]:
        """Tokens, texts and rewards of a completion of each prompt."""
        from tqdm.auto import tqdm

        from ..data._texts import completion_texts
        from ..evaluation._generation import transformers_engine
        from ..generation.drawing import rows_drawn_by

        rows, sizes = [self.ids[place] for place in places], (self.args.max_completion_length, self.args.batch_size)
        with tqdm(total=len(rows), desc="samples", unit="completion") as bar:
            engine = transformers_engine(self.model, self.tokenizer, *sizes, on_drawn=bar.update, guard=self.guard)
            with rows_drawn_by(self.model, [True], sampler):
                tokens = engine(rows, seed)
        texts = completion_texts(self.tokenizer, self.prompts[places]["prompt"], rows, tokens)
        return tokens, texts, self.rewards(places, tokens, texts)

    def rewards(self, places: list[int], tokens: list[list[int]], texts: list[str]) -> np.ndarray:
        """Rewards of completions; NaN where there is none."""
        from ..evaluation._generation import evaluate_rewards

        columns, (name, function) = self.prompts[places], self.reward
        asked = columns.pop("prompt")
        given = evaluate_rewards({name: function}, asked, texts, tokens, columns, self.args.batch_size)[name]
        return np.array([np.nan if value is None else value for value in given])

    def log_p(self, places: list[int], tokens: list[list[int]], sampler: Any) -> np.ndarray:
        """Log-probabilities of completions, in nats."""
        from ..evaluation.log_probs import completion_log_probs

        rows = [self.ids[place] for place in places]
        log_p, _ = completion_log_probs(
            self.model, rows, tokens, self.args.batch_size, sampler=sampler, guard=self.guard
        )
        return log_p.numpy()


def _measure(args: argparse.Namespace, model: Any, tokenizer: Any, prompts: Any, reward: tuple[str, Any]) -> Measured:
    """Draws, rewards and scores samples of the policy, and extra ones."""
    from ..evaluation._generation import end_tokens
    from ..generation.drawing import POLICY

    completions = max(5, args.num_samples // len(prompts))  # of a prompt: rewards are compared within one
    chosen = prompts.shuffle(seed=args.seed).select(range(min(len(prompts), args.num_samples // completions)))
    policy = _Policy(args, model, tokenizer, chosen, reward)
    places = [place for place in range(len(chosen)) for _ in range(completions)]
    first = min(len(places), completions * math.ceil(LEAST / completions))  # which say how long one takes
    _say(f"drawing {first} completions of at most {args.max_completion_length} tokens")
    start = time.perf_counter()
    tokens, texts, rewards = policy.draw(places[:first], args.seed, POLICY)
    drawn = time.perf_counter() - start
    policy.log_p(places[:first], tokens, POLICY)
    scored = (time.perf_counter() - start - drawn) / first
    if args.minutes is not None:
        fit = int(60 * args.minutes * SAMPLING * first / drawn)
        places = places[: max(first, fit // completions * completions)]
    if len(places) > first:
        _say(f"drawing {len(places) - first} more, which takes about {_time((len(places) / first - 1) * drawn)}")
        start = time.perf_counter()
        more = policy.draw(places[first:], args.seed + 1, POLICY)
        drawn += time.perf_counter() - start
        tokens, texts, rewards = tokens + more[0], texts + more[1], np.append(rewards, more[2])
    end = set(end_tokens(model, tokenizer))
    ended = [bool(row) and row[-1] in end for row in tokens]
    shaped = (np.reshape(x, (-1, completions)) for x in (rewards, [len(row) for row in tokens], ended))
    few = list(range(min(len(chosen), 32)))
    try:
        empty = policy.rewards(few, [[] for _ in few], [""] * len(few))
    except Exception as error:
        if not from_reward(error):
            raise
        empty = None
    return Measured(
        *shaped,
        texts,
        empty,
        len(prompts),
        model.num_parameters(),
        seconds=drawn / len(places) + 2 * scored,  # by the model and the reference
        gain=_gain(policy, places, tokens, rewards),
    )


def _gain(
    policy: _Policy, places: list[int], tokens: list[list[int]], rewards: np.ndarray
) -> tuple[float, float] | None:
    """
    The gain of the extra samples that training would draw, with the better of two samplers, and its standard error: the second moment of an
    estimate of P(bad) from 2n samples of the policy p, over that from n of it and n extra ones, weighed by their mixture m. From bad
    samples with importance weights w: Σw / Σw·(p / m). `None` if too few are bad to tell.
    """
    import torch

    from ..evaluation.rare.pilot import raised_by
    from ..generation.drawing import Sampler

    finite = rewards[np.isfinite(rewards)]
    if finite.size < 2 or finite.min() == finite.max():
        return None  # which is refused
    threshold = policy.args.bad_reward_threshold
    threshold = bad_threshold_for(finite) if threshold is None else threshold
    _say("drawing extra samples, as training would, to see whether they find bad outputs")
    halves = np.array_split(np.arange(len(places)), 2)
    finds: list[list[np.ndarray]] = [[], []]  # w and p / m, by sampler
    for number, half in enumerate(halves):
        learning = [i for i in halves[1 - number] if np.isfinite(rewards[i])]  # what does not judge the tokens
        biases = raised_by(
            torch.tensor(rewards[learning]),
            [tokens[i] for i in learning],
            policy.model.config.get_text_config().vocab_size,
        )
        for kind, sampler in enumerate((Sampler(1.3), Sampler(bias=biases[1]))):
            asked = [places[i] for i in half[kind::4]]
            more, _, of_more = policy.draw(asked, policy.args.seed + 2 + 2 * number + kind, sampler)
            found = [(places[i], tokens[i]) for i in half if is_bad(rewards[i], threshold)]
            found += [(at, row) for at, row, r in zip(asked, more, of_more, strict=True) if is_bad(r, threshold)]
            if found:
                at, rows = (list(each) for each in zip(*found, strict=True))
                ratio = np.exp(policy.log_p(at, rows, sampler) - policy.log_p(at, rows, Sampler()))  # q / p
                share = len(half) / (len(half) + len(asked))
                finds[kind].append(np.stack([1 / (share + (1 - share) * ratio), 2 / (1 + ratio)]))
    gains = []
    for of_kind in finds:
        w, ratio = np.concatenate([*of_kind, np.empty((2, 0))], axis=1)
        if w.size >= FINDS:
            gain = w.sum() / (w @ ratio)
            gains.append((float(gain), float(np.sqrt(((w - gain * w * ratio) ** 2).sum()) / (w @ ratio))))
    return max(gains, default=None)


def _measure_updates(
    args: argparse.Namespace, found: Suggestion, measured: Measured, prompts: Any, function: Any
) -> Updates:
    """
    Trains with the suggested settings for two updates in each precision: of at least [`FEWEST`] prompts, and once more of as many as the
    plan has in an update, or as do not take long, since a prompt takes less time in a large update.
    """
    import torch

    n = found.values["num_generations"]
    most = found.values["train_batch_size"] // n
    aim = A_MEASUREMENT if args.minutes is None else min(A_MEASUREMENT, 60 * args.minutes / 50)
    count, updates = largest_divisor(most, max(FEWEST, aim / (3 * n * measured.seconds))), None
    while True:
        try:
            seconds = {}
            for precision in ("float32", "bfloat16"):
                _say(f"training for two updates of {count * n} completions and as many extra ones in {precision}")
                seconds[precision] = _train(args, found, prompts, function, count, precision == "bfloat16")
        except torch.OutOfMemoryError as error:
            if updates is not None:
                return updates
            if count == 1:
                remedy = "a smaller model, or ZeRO-3" if args.use_peft else "`--use_peft`, or ZeRO"
                raise ValueError(
                    f"The memory of this device is too small to train on {n} completions at a time; try {remedy} on several devices."
                ) from error
            most = count = largest_divisor(most, count / 2)
            continue
        device, memory = "cpu", None
        if torch.accelerator.is_available():
            device, memory = torch.accelerator.current_accelerator().type, torch.accelerator.max_memory_allocated()
        is_last, updates = updates is not None, Updates(count, seconds, device, memory)
        _, a_prompt, planned = _planned_update(found, updates, args.minutes)
        count = largest_divisor(min(planned, most), 2 * aim / a_prompt)
        if is_last or count <= updates.prompts:
            return updates


def _train(args: argparse.Namespace, found: Suggestion, prompts: Any, function: Any, count: int, bf16: bool) -> float:
    """Seconds of an update of `count` prompts."""
    import torch
    from transformers import PrinterCallback, TrainerCallback
    from trl import ModelConfig, get_peft_config

    from ..configs import RePULSeConfig
    from ..trainers import RePULSeTrainer

    class Clock(TrainerCallback):
        seconds: list[float] = []

        def on_step_begin(self, *_: Any, **kwargs: Any) -> None:
            self.start = time.perf_counter()

        def on_step_end(self, *_: Any, **kwargs: Any) -> None:
            self.seconds.append(time.perf_counter() - self.start)

    gc.collect()  # models of the run before
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()
    values = {name: value for name, value in found.values.items() if name != "train_batch_size"}
    size = count * found.values["num_generations"]
    more = {"chat_template_kwargs": args.chat_template_kwargs, "trust_remote_code": args.trust_remote_code}
    with tempfile.TemporaryDirectory() as folder:
        config = RePULSeConfig(
            output_dir=folder,
            per_device_train_batch_size=size,
            max_steps=2,
            bf16=bf16,
            use_cpu=not torch.accelerator.is_available(),
            seed=args.seed,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            **values,
            **more,
        )
        adapter = get_peft_config(ModelConfig(**ADAPTER)) if args.use_peft else None
        dataset = prompts.repeat(-(-count // len(prompts)))
        trainer = RePULSeTrainer(args.model, function, config, dataset, peft_config=adapter)
        trainer.remove_callback(PrinterCallback)
        clock = Clock()
        trainer.add_callback(clock)
        trainer.train()
    return min(clock.seconds)


def largest_divisor(number: int, most: float) -> int:
    """The largest divisor that is at most `most`, or 1."""
    return max((each for each in range(1, number + 1) if number % each == 0 and each <= most), default=1)


def _given(args: argparse.Namespace) -> dict[str, Any]:
    """What the user has named, as the training commands call it."""
    values = {
        "model_name_or_path": args.model,
        "reward_model_path": args.reward_model_path,
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
        values |= ADAPTER
    return {name: value for name, value in values.items() if value is not None}


def _samples(measured: Measured) -> str:
    """The samples in a few numbers, and those with the lowest rewards."""
    values, lengths = measured.rewards.ravel(), measured.lengths
    rewards = values[np.isfinite(values)]
    quantiles = ", ".join(
        f"{np.quantile(rewards, level):.3g} ({level:.0%})" for level in (0.02, 0.25, 0.5, 0.75, 0.98)
    )
    lines = [
        f"{values.size} samples of {len(lengths)} prompts: reward {rewards.mean():.3g} on average, {rewards.min():.3g} to "
        f"{rewards.max():.3g}, quantiles {quantiles}; {lengths.mean():.0f} tokens on average.",
        "",
    ]
    lines += [f"lowest: {values[i]:.3g}  {measured.texts[i].strip()[:160]!r}" for i in np.argsort(values)[:5]]
    return "\n".join([*lines, ""])


def suggest_settings(
    measured: Measured,
    *,
    max_completion_length: int,
    use_peft: bool = False,
    bad_reward_threshold: float | None = None,
) -> Suggestion:
    """
    Settings for `trl-repulse repulse`, from samples of the initial policy, which had at most `max_completion_length` tokens.
    Raises a `ValueError` if all samples have the same reward, or fewer than two have any.
    """
    found, rewards = Suggestion(), measured.rewards[np.isfinite(measured.rewards)]
    if rewards.size < 2 or rewards.min() == rewards.max():
        what = f"the reward {rewards[0]:g}" if rewards.size else "no reward"
        raise ValueError(
            f"All {measured.rewards.size} samples have {what}, so that there is nothing to learn; check the reward function."
        )
    threshold = _threshold(found, measured.rewards.size, rewards, bad_reward_threshold)
    _reward_warnings(found, measured, rewards, threshold)
    found.set(
        "proposal",
        "hot_policy",
        "The default: there is no second model. Extra samples are drawn from the policy as it is, at a higher temperature, or with the "
        "logits of tokens raised that lower the reward, whichever finds bad outputs most often as training goes on.",
    )
    _length(found, measured, max_completion_length)
    _counts(found, measured, share=float(is_bad(rewards, threshold).mean()))
    _weights(found, measured.rewards, rewards, threshold)
    _learning_rate(found, measured.parameters, use_peft)
    found.notes["other methods"] = (
        "`repulse-ppo` takes this file too. `repulse-grpo` takes it with `--scale_rewards none`. By default it divides rewards by their "
        "standard deviation within a prompt, and `alpha` and `beta`, which are in units of the reward, would no longer fit."
    )
    if measured.gain is not None and sum(measured.gain) <= MOST:
        found.warnings.append(
            f"Use REINFORCE (`trl-repulse reinforce` takes this file too): extra samples gain nothing here. Measured: one is worth about "
            f"{measured.gain[0]:.2g} of the policy's own in an estimate of P(bad), and costs as much."
        )
    return found


def _reward_warnings(found: Suggestion, measured: Measured, rewards: np.ndarray, threshold: float) -> None:
    """Warns of rewards from which RePULSe learns little, or what is not meant."""
    warn, size = found.warnings.append, measured.rewards.size
    if missing := size - rewards.size:
        warn(f"{missing} of {size} samples have no reward, and training leaves such out; check that this is meant.")
    within = _spread_within(measured.rewards)
    if within is not None and within**2 < 0.01 * rewards.var():
        warn("The reward hardly differs between completions of one prompt, which are all that training compares.")
    low, quarter, middle = np.quantile(rewards, (LOW, 0.25, 0.5))
    floor = float((rewards == rewards.min()).mean())
    if floor >= 0.05:
        warn(
            f"{floor:.0%} of the samples share the lowest reward ({rewards.min():g}): the reward has no low tail, and what is worse "
            "than bad cannot be told from what is bad."
        )
    elif middle - low < 2 * (middle - quarter):  # 3.0 times for a normal distribution, 1.9 for an even one
        warn(
            f"The reward has no low tail: the worst 2 % of the samples ({low:.3g}) are hardly farther from the median ({middle:.3g}) "
            f"than the worst quarter ({quarter:.3g}). RePULSe is made for outputs that are rare and much worse."
        )
    if measured.empty_rewards is None:
        warn("The reward function fails on an empty completion, which a policy may draw at any time.")
    groups = {"An empty completion": measured.empty_rewards}
    cut = measured.rewards[~measured.ended]
    if 10 <= cut.size < size:
        groups["A completion that was cut"] = cut
    for name, values in groups.items():
        if values is None or not np.isfinite(values).any():
            continue
        value = float(np.nanmedian(values))
        rank = float((rewards < value).mean() + (rewards == value).mean() / 2)
        if is_bad(value, threshold):
            effect = "and counts as bad: the negative term will be spent on such completions"
        elif rank <= 0.05:
            effect = "among the lowest rewards there are: training will avoid such completions"
        elif rank >= 0.95:
            effect = "among the highest rewards there are: training will make such completions common"
        else:
            continue
        warn(f"{name} gets {value:.3g}, {effect}. Give it an ordinary reward, unless you mean that.")


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


def _length(found: Suggestion, measured: Measured, limit: int) -> None:
    cut = 1 - float(measured.ended.mean())
    if cut > 0.05:
        reason = f"Measured: {cut:.0%} of the samples were cut at this length, which they were drawn with."
        found.set("max_completion_length", limit, reason)
        found.warnings.append(
            f"{cut:.0%} of the samples did not end within {limit} tokens, so that their rewards are of text that breaks off. Run this "
            "again with a larger `--max_completion_length`, or ask for shorter answers in the prompts."
        )
        return
    high = float(np.quantile(measured.lengths[measured.ended], HIGH))
    reason = f"Measured: 98 % of the samples that ended have at most {high:.0f} tokens. Rule of thumb: a tenth more, in eights."
    found.set("max_completion_length", min(limit, 8 * math.ceil(1.1 * high / 8)), reason)


def _counts(found: Suggestion, measured: Measured, share: float) -> None:
    """Sets N and the batch."""
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


def _planned_update(found: Suggestion, updates: Updates, minutes: float | None) -> tuple[str, float, int]:
    """The precision, the seconds of a prompt, and the prompts of an update: fewer if [`FEW`] updates would not fit into `minutes`."""
    usual, fastest = (
        "float32" if updates.device == "cpu" else "bfloat16",
        min(updates.seconds, key=updates.seconds.get),
    )
    precision = fastest if updates.seconds[usual] > CLEARLY * updates.seconds[fastest] else usual
    a_prompt = updates.seconds[precision] / updates.prompts
    most = found.values["train_batch_size"] // found.values["num_generations"]
    sizes = [most, *(size for size in (40, 30, 20, 10, FEWEST) if size < most)]
    training = math.inf if minutes is None else 60 * minutes * (1 - EVALUATION)
    return precision, a_prompt, next((size for size in sizes if FEW * size * a_prompt <= training), sizes[-1])


def plan(
    found: Suggestion,
    measured: Measured,
    updates: Updates,
    max_steps: int | None = None,
    minutes: float | None = None,
) -> None:
    """
    Sets precision, batch and number of updates from what updates took, so that training and an evaluation fit into `minutes`. Raises a
    `ValueError` if no update fits.
    """
    n, (precision, a_prompt, prompts) = found.values["num_generations"], _planned_update(found, updates, minutes)
    seconds, fits = prompts * a_prompt, None
    if minutes is not None:
        fits = min(int(60 * minutes * (1 - EVALUATION) / seconds), UPDATES)
        if not fits:
            raise ValueError(
                f"An update of {prompts * n} completions takes {_time(seconds)}, too long for `--minutes {minutes:g}`; give "
                f"{math.ceil(10 * seconds / 60 / (1 - EVALUATION))} or more."
            )
        if prompts * n < found.values["train_batch_size"]:
            reason = f"Completions of an update: {n} of each of {prompts} prompts, so that {FEW} updates fit, as in the shortest runs of the "
            found.set("train_batch_size", prompts * n, f"{reason}held-out worlds, or as many as can.")
    rates = " and ".join(f"{value:.2g} s in {name}" for name, value in updates.seconds.items())
    reason = f"Measured: an update of {updates.prompts * n} completions and as many extra ones took {rates}."
    found.set("bf16", precision == "bfloat16", reason)
    size = largest_divisor(prompts, updates.prompts) * n
    memory = "" if updates.memory is None else f", in {updates.memory / 2**30:.2g} GiB of memory"
    passes = f" in {prompts * n // size} passes" if size < prompts * n else ""
    reason = f"Measured: {updates.prompts * n} completions of a pass fit on this device ({updates.device}){memory}. An update{passes} is the same."
    found.set("per_device_train_batch_size", size, reason)
    steps = fits or max_steps or UPDATES
    reason = "Rule of thumb: as many updates as the published setting 1; the held-out worlds had 160 and 640."
    reason = "The value is yours." if max_steps else f"As many as fit into {minutes:g} minutes." if fits else reason
    found.set("max_steps", steps, reason)
    reason = "Rule of thumb: as in the held-out worlds, and no more than an eighth of the updates."
    found.set("warmup_steps", min(WARM_UP, steps // 8), reason)
    found.notes["time"] = f"about {_time(steps * seconds)} for {steps} updates of {_time(seconds)}, as measured."
    if minutes is not None:
        _evaluation(found, measured, max(1, int(60 * minutes * EVALUATION / 2 / measured.seconds)), steps)


def _evaluation(found: Suggestion, measured: Measured, count: int, steps: int) -> None:
    """Notes what evaluation fits, of `count` completions of the policy before and after training, and what it can show."""
    rewards = measured.rewards[np.isfinite(measured.rewards)]
    p = float((rewards < found.values["bad_reward_threshold"]).mean())
    each = max(1, count // measured.num_prompts)
    found.notes["evaluation"] = (
        f"{count:,} completions before training and {count:,} after it: `trl-repulse evaluate`, with this file as `--config`, another "
        f"folder and `--model out` after training, {count // each} prompts and `--num_samples {each}`; then `trl-repulse compare`."
    )
    # A difference of 2.8 standard errors is seen four times of five
    lowest = [
        q for q in p * np.linspace(0, 1, 200, endpoint=False) if p - q > 2.8 * math.sqrt((p - p**2 + q - q**2) / count)
    ]
    shown = f"that P(bad) falls from {p:.2g} to {max(lowest):.2g} or less" if lowest else "no fall of P(bad)"
    few = f" Rule of thumb: P(bad) has hardly moved by update {steps}; {FEW} are few." if steps < FEW else ""
    found.notes["what this can show"] = (
        f"{shown}, and that the reward changes by {2.8 * rewards.std() * math.sqrt(2 / count):.2g} or more (four times of five).{few}"
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


def _time(seconds: float) -> str:
    return next(
        (f"{seconds / size:.2g} {unit}" for size, unit in ((3600, "hours"), (60, "minutes")) if seconds >= size),
        f"{seconds:.2g} seconds",
    )
