"""
Measurements that `trl-repulse suggest` draws conclusions from: samples of the initial policy and extra ones, and updates of training.

Legend: P prompts, N completions of a prompt.
"""

import argparse
import gc
import math
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tqdm.auto import tqdm
from transformers import PrinterCallback, TrainerCallback
from trl import ModelConfig, get_peft_config

from .._errors import from_reward
from .._numbers import is_bad
from .._rules_of_thumb import bad_threshold_for
from ..configs import RePULSeConfig
from ..data._checks import check_prompt_lengths
from ..data._texts import completion_texts
from ..evaluation._generation import end_tokens, evaluate_rewards, transformers_engine
from ..evaluation.log_probs import completion_log_probs
from ..evaluation.rare.pilot import raised_by
from ..generation._probe import probe_shared
from ..generation.completions import tokenize
from ..generation.drawing import POLICY, Sampler, rows_drawn_by
from ..math.objective import compute_advantages, prefix_values
from ..models._model_checks import vocab_size
from ..trainers import RePULSeTrainer
from ._suggest_rules import (
    ADAPTER,
    FEWEST,
    LEAST,
    PREFIXES,
    SAMPLING,
    Measured,
    Suggestion,
    Updates,
    duration,
    largest_divisor,
    planned_update,
    say,
)


FINDS = 5  # bad samples from which a gain is told
A_MEASUREMENT = 20.0  # seconds, about, of an update that is measured


class _Policy:
    """The initial policy: draws and scores completions of prompts, which are named by their places."""

    def __init__(self, args: argparse.Namespace, model: Any, tokenizer: Any, prompts: Any, reward: tuple[str, Any]):
        self.args, self.model, self.tokenizer, self.prompts, self.reward = args, model, tokenizer, prompts, reward
        self.ids = tokenize(tokenizer, prompts["prompt"][:], args.chat_template_kwargs)
        check_prompt_lengths(self.ids, prompts["prompt"][:], model.config, args.max_completion_length)
        self.guard = probe_shared(model)

    def draw(self, places: list[int], seed: int, sampler: Any) -> tuple[list[list[int]], list[str], np.ndarray]:
        """Draws one completion at each of B places with `sampler`. Returns tokens, texts and rewards (B,), NaN where there is none."""
        rows, sizes = [self.ids[place] for place in places], (self.args.max_completion_length, self.args.batch_size)
        with tqdm(total=len(rows), desc="samples", unit="completion") as bar:
            engine = transformers_engine(self.model, self.tokenizer, *sizes, on_drawn=bar.update, guard=self.guard)
            with rows_drawn_by(self.model, [True], sampler):
                tokens = engine(rows, seed)
        texts = completion_texts(self.tokenizer, self.prompts[places]["prompt"], rows, tokens)
        return tokens, texts, self.rewards(places, tokens, texts)

    def rewards(self, places: list[int], tokens: list[list[int]], texts: list[str]) -> np.ndarray:
        """Rewards (B,) of the completions at B places; NaN where there is none."""
        columns, (name, function) = self.prompts[places], self.reward
        prompts = columns.pop("prompt")
        values = evaluate_rewards({name: function}, prompts, texts, tokens, columns, self.args.batch_size)[name]
        return np.array([np.nan if value is None else value for value in values])

    def log_p(self, places: list[int], tokens: list[list[int]], sampler: Any) -> np.ndarray:
        """Log-probabilities (B,) in nats of completions at B places, as `sampler` draws."""
        rows = [self.ids[place] for place in places]
        return completion_log_probs(self.model, rows, tokens, self.args.batch_size, sampler, self.guard)[0].numpy()


def measure(args: argparse.Namespace, model: Any, tokenizer: Any, prompts: Any, reward: tuple[str, Any]) -> Measured:
    """Draws, rewards and scores `args.num_samples` of the policy, or as many as fit into a share of `args.minutes`, and extra ones."""
    completions = max(5, args.num_samples // len(prompts))  # of a prompt: rewards are compared within one
    chosen = prompts.shuffle(seed=args.seed).select(range(min(len(prompts), args.num_samples // completions)))
    policy = _Policy(args, model, tokenizer, chosen, reward)
    places = [place for place in range(len(chosen)) for _ in range(completions)]
    first = min(len(places), completions * math.ceil(LEAST / completions))  # which say how long one takes
    say(f"drawing {first} completions of at most {args.max_completion_length} tokens")
    start = time.perf_counter()
    tokens, texts, rewards = policy.draw(places[:first], args.seed, POLICY)
    drawn = time.perf_counter() - start
    policy.log_p(places[:first], tokens, POLICY)
    scored = (time.perf_counter() - start - drawn) / first
    if args.minutes is not None:
        fit = int(60 * args.minutes * SAMPLING * first / drawn)
        places = places[: max(first, fit // completions * completions)]
    if len(places) > first:
        say(f"drawing {len(places) - first} more, which takes about {duration((len(places) / first - 1) * drawn)}")
        start = time.perf_counter()
        more = policy.draw(places[first:], args.seed + 1, POLICY)
        drawn += time.perf_counter() - start
        tokens, texts, rewards = tokens + more[0], texts + more[1], np.append(rewards, more[2])
    end = set(end_tokens(model, tokenizer))
    ended = [bool(row) and row[-1] in end for row in tokens]
    shaped = (np.reshape(x, (-1, completions)) for x in (rewards, [len(row) for row in tokens], ended))  # (P, N)
    few_places = list(range(min(len(chosen), 32)))
    empty = _unless_it_fails(lambda: policy.rewards(few_places, [[] for _ in few_places], [""] * len(few_places)))
    return Measured(
        *shaped,
        texts,
        empty,
        len(prompts),
        model.num_parameters(),
        seconds=drawn / len(places) + 2 * scored,  # by the model and the reference
        gain=_gain(policy, places, tokens, rewards),
        prefixes=_unless_it_fails(lambda: _prefixes(policy, places, tokens, rewards, completions)),
    )


def _unless_it_fails(measure: Callable[[], Any]) -> Any:
    """What is measured, or `None` if the reward fails."""
    try:
        return measure()
    except Exception as error:
        if not from_reward(error):
            raise
        return None


def _prefixes(
    policy: _Policy, places: list[int], tokens: list[list[int]], rewards: np.ndarray, completions: int
) -> tuple[int, float] | None:
    """Tokens a step of at most [`PREFIXES`] rewards of prefixes, and the mean square of what their values leave of whole rewards, over that
    of what the mean of a prompt's other completions leaves. `None` if rewards do not differ, or fail on a prefix."""
    count = min(len(places), completions * math.ceil(LEAST / completions))
    places, tokens, of_whole = places[:count], tokens[:count], torch.tensor(rewards[:count])
    steps = math.ceil(max(map(len, tokens)) / PREFIXES)
    prompts, rows = policy.prompts[places]["prompt"], [policy.ids[place] for place in places]
    by_prompt = compute_advantages(of_whole.view(-1, completions)).flatten()
    of_prefixes = [torch.zeros_like(of_whole)]
    say(f"rewarding the first {steps}, {2 * steps}, ... tokens of {count} completions")
    for length in range(steps, max(map(len, tokens)), steps):
        cut = [row[:length] for row in tokens]
        texts = completion_texts(policy.tokenizer, prompts, rows, cut)
        of_prefixes.append(torch.tensor(policy.rewards(places, cut, texts)))
    left = (of_whole.unsqueeze(1) - prefix_values(of_whole, torch.stack(of_prefixes, dim=1))).nan_to_num(0.0).square()
    counted = torch.tensor([[min(max(len(row) - steps * n, 0), steps) for n in range(left.size(1))] for row in tokens])
    # Without prefixes: of the batch or, if that is less, of the prompt
    whole = torch.stack([left[:, 0], by_prompt.square()]).mul(counted.sum(1)).sum(1).min()
    return (steps, ((left * counted).sum() / whole).item()) if whole > 0 else None


def _gain(
    policy: _Policy, places: list[int], tokens: list[list[int]], rewards: np.ndarray
) -> tuple[float, float] | None:
    """The gain of the extra samples that training would draw, with the better of two samplers, and its standard error: the second moment of
    an estimate of P(bad) from 2n samples of the policy p, over that from n of it and n extra ones, weighed by their mixture m. From bad
    samples with importance weights w: Σw / Σw·(p / m). `None` if too few are bad to tell."""
    finite = rewards[np.isfinite(rewards)]
    if finite.size < 2 or finite.min() == finite.max():
        return None  # which is refused
    threshold = policy.args.bad_reward_threshold
    threshold = bad_threshold_for(finite) if threshold is None else threshold
    say("drawing extra samples, as training would, to see whether they find bad outputs")
    halves = np.array_split(np.arange(len(places)), 2)
    finds: list[list[np.ndarray]] = [[], []]  # w and p / m, by sampler
    for number, half in enumerate(halves):
        learning = [i for i in halves[1 - number] if np.isfinite(rewards[i])]  # what does not judge the tokens
        if not learning:
            continue  # no completion of that half has a reward
        biases = raised_by(torch.tensor(rewards[learning]), [tokens[i] for i in learning], vocab_size(policy.model))
        for kind, sampler in enumerate((Sampler(1.3), Sampler(bias=biases[1]))):
            extra_at = [places[i] for i in half[kind::4]]
            extra_ids, _, extra_r = policy.draw(extra_at, policy.args.seed + 2 + 2 * number + kind, sampler)
            bad = [(places[i], tokens[i]) for i in half if is_bad(rewards[i], threshold)]
            bad += [(at, row) for at, row, r in zip(extra_at, extra_ids, extra_r, strict=True) if is_bad(r, threshold)]
            if bad:
                bad_at, rows = (list(each) for each in zip(*bad, strict=True))
                ratio = np.exp(policy.log_p(bad_at, rows, sampler) - policy.log_p(bad_at, rows, Sampler()))  # q / p
                share = len(half) / (len(half) + len(extra_at))
                finds[kind].append(np.stack([1 / (share + (1 - share) * ratio), 2 / (1 + ratio)]))
    gains = []
    for of_kind in finds:
        w, ratio = np.concatenate([*of_kind, np.empty((2, 0))], axis=1)
        if w.size >= FINDS:
            gain = w.sum() / (w @ ratio)
            gains.append((float(gain), float(np.sqrt(((w - gain * w * ratio) ** 2).sum()) / (w @ ratio))))
    return max(gains, default=None)


def measure_updates(
    args: argparse.Namespace, found: Suggestion, measured: Measured, prompts: Any, function: Any
) -> Updates:
    """Trains the model that `args` name, on `prompts` with the reward `function`, with the settings `found`, for two updates in each
    precision: of at least [`FEWEST`] prompts, and once more of as many as the plan has in an update, or as do not take long, since a prompt
    takes less time in a large update. Says what it does, and keeps no file. Returns what the last updates that fit into memory took. Raises
    a `ValueError` if not even one prompt fits."""
    n = found.values["num_generations"]
    most = found.values["train_batch_size"] // n
    aim = A_MEASUREMENT if args.minutes is None else min(A_MEASUREMENT, 60 * args.minutes / 50)
    count, updates = largest_divisor(most, max(FEWEST, aim / (3 * n * measured.seconds))), None
    while True:
        try:
            seconds = {}
            for precision in ("float32", "bfloat16"):
                say(f"training for two updates of {count * n} completions and as many extra ones in {precision}")
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
        _, a_prompt, planned = planned_update(found, updates, args.minutes)
        count = largest_divisor(min(planned, most), 2 * aim / a_prompt)
        if is_last or count <= updates.prompts:
            return updates


class _Clock(TrainerCallback):
    """Seconds of each update, without what is between them."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_begin(self, *_: Any, **kwargs: Any) -> None:
        self.start = time.perf_counter()

    def on_step_end(self, *_: Any, **kwargs: Any) -> None:
        self.seconds.append(time.perf_counter() - self.start)


def _train(args: argparse.Namespace, found: Suggestion, prompts: Any, function: Any, count: int, bf16: bool) -> float:
    """Trains for two updates of `count` prompts, and returns the seconds of the faster one: the first one may include a warm-up."""
    gc.collect()  # models of the run before
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()
    values = {name: value for name, value in found.values.items() if name != "train_batch_size"}
    more = {"chat_template_kwargs": args.chat_template_kwargs, "trust_remote_code": args.trust_remote_code}
    more |= {"model_init_kwargs": {"revision": args.revision}} if args.revision else {}
    with tempfile.TemporaryDirectory() as folder:
        config = RePULSeConfig(
            output_dir=folder,
            per_device_train_batch_size=count * found.values["num_generations"],
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
        clock = _Clock()
        trainer.add_callback(clock)
        trainer.train()
    return min(clock.seconds)
