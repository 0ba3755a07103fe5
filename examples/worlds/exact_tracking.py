"""
Exact values along a training run, where completions have one or two tokens: expected reward, log P(bad) and KL by enumeration of all
completions over a tiny vocabulary, and log P(bad) of bad tokens over one of any size, as in the paper's toy experiment.

`train` is that of the training commands, with the flags `--bad_token_ids`, `--exact_tracking` and `--tracking_every`.
"""

import math
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from datasets import Dataset, IterableDataset
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
    Trainer,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from trl import GRPOTrainer, RLOOTrainer

from trl_repulse.cli import arguments, methods
from trl_repulse.configs import NegativeTermConfig
from trl_repulse.configs.shared_config import documented
from trl_repulse.data._checks import check_prompt_lengths
from trl_repulse.data._texts import check_added_tokens
from trl_repulse.evaluation._generation import reward_of_model
from trl_repulse.evaluation.plots import MODELS, Panel
from trl_repulse.evaluation.report import text_table
from trl_repulse.evaluation.tails import check_sizes
from trl_repulse.evaluation.tracking import TrackingCallback
from trl_repulse.models._adapters import in_mode
from trl_repulse.models._deepspeed import gathered, is_partitioned
from trl_repulse.models._loading import load_model, load_tokenizer
from trl_repulse.models._model_checks import check_causal, check_token_ids

from .exact import ExactEvaluator, log_mean_exp


# Quantity -> its row of the table, and the title and the unit of its panel, if it has one
QUANTITIES = {
    "expected_reward": ("expected reward", "Expected reward", "reward"),
    "log_prob_bad": ("exact log P(bad), nats", "Exact log P(bad)", "nats"),
    "kl": ("KL to reference, nats per completion", None, None),
}
# An exact evaluation takes tens of thousands of sequences a prompt for a vocabulary as large as GPT-2's
MAX_EXACT_PROMPTS = 64


@documented
@dataclass
class ExactArguments:
    """
    Further arguments of the training commands.

    Args:
        bad_token_ids (`list[int]`, *optional*):
            Tokens that make a completion bad: tracks the exact log P(bad), for completions of one or two tokens.
        exact_tracking (`bool`, *optional*, defaults to `False`):
            Whether to track the reward of a reward model and KL exactly too, by enumeration of all completions; for tiny vocabularies.
        tracking_every (`int`, *optional*, defaults to `10`):
            Updates between two exact evaluations.
    """

    bad_token_ids: list[int] | None = None
    exact_tracking: bool = False
    tracking_every: int = 10


def make_tracking(
    trainer: Trainer, script_args: ExactArguments, prompts: Dataset | IterableDataset
) -> TrackingCallback:
    """
    Makes the callback that tracks a run: by exact evaluations of the training prompts if `script_args` names bad tokens, else by
    the run's costs alone. Raises a `ValueError` if bad tokens are given, and the prompts are too many to enumerate completions.
    """
    bad, every = script_args.bad_token_ids, script_args.tracking_every
    if not bad:
        return TrackingCallback(trainer)
    if not isinstance(prompts, Dataset) or len(prompts) > MAX_EXACT_PROMPTS:
        raise ValueError(
            f"`bad_token_ids` asks for the exact log P(bad) of each prompt; give at most {MAX_EXACT_PROMPTS} prompts, or "
            "a `single_prompt`, and no stream."
        )
    texts = [row["prompt"] for row in prompts]
    if script_args.exact_tracking and isinstance(trainer.reward_funcs[0], nn.Module):
        tokenize_prompts(trainer, texts)  # refuses what cannot be evaluated
        # Loaded once more: the trainer's own may be wrapped and cut apart
        reference = load_model(AutoModelForCausalLM, trainer.model.config._name_or_path, "policy")
        path = script_args.reward_model_path
        reward = load_model(AutoModelForSequenceClassification, path, "reward model", num_labels=1)
        with gathered(reference), gathered(reward):
            evaluator = ExactEvaluator(
                trainer.processing_class,
                texts,
                reward,
                bad,
                trainer.max_completion_length,
                reward_tokenizer=load_tokenizer(path, "reward model"),
                reference_model=reference,
            )
        return ExactTrackingCallback(evaluator, trainer, every)
    return BadTokenTrackingCallback(trainer, texts, bad, every)


class _PeriodicTracking(TrackingCallback):
    """Evaluates policy and proposal at the start, every few updates, and at the end, and puts the values into the run's results, table,
    figure and card."""

    def __init__(self, trainer: RLOOTrainer | GRPOTrainer, every: int):
        check_sizes(every=every)
        super().__init__(trainer)
        self.every = every
        self.history: list[dict[str, Any]] = []
        self._proposal = trainer.proposal if isinstance(trainer.args, NegativeTermConfig) else None

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        super().on_train_begin(args, state, control, **kwargs)
        self.history = []
        self._record()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        super().on_step_end(args, state, control, **kwargs)
        if self.updates % self.every == 0:
            self._record()

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        # Even if the last update was just evaluated: the Trainer may have loaded its best checkpoint since
        if self.history and self.history[-1]["update"] == self.updates:
            self.history.pop()
        self._record()
        super().on_train_end(args, state, control, **kwargs)
        if self.history:
            first = self.history[0]["update"]
            start = f"at update {first}, where training was resumed," if first else "at the start"
            self.trainer.measured = self.history[-1]["policy"]
            self.trainer.tail_report = (
                f"Exact values, by enumeration of all completions to the prompts followed, {start} and at the end of "
                f"training:\n\n```text\n{self.table({})}\n```"
            )

    def results(self) -> dict[str, Any]:
        """With `history`, and the values of the policy before and after training, as `initial` and `final`."""
        ends = {"initial": self.history[0]["policy"], "final": self.history[-1]["policy"]}
        return super().results() | ends | {"history": self.history}

    def table(self, metrics: dict[str, Any]) -> str:
        """The policy's exact values at the start and the end. Metrics are shown if the expected reward is not among them."""
        start, end = self.history[0]["policy"], self.history[-1]["policy"]
        rows = [(row, _number(start[key]), _number(end[key])) for key, (row, *_) in QUANTITIES.items() if key in end]
        rows += [("samples drawn", "0", f"{self.samples:,}"), ("seconds", "0.0", f"{self.seconds:.1f}")]
        if "expected_reward" not in end:
            rows += [(name, "", _number(value)) for name, value in metrics.items()]
        return "\n".join(text_table([("", "start", "end"), *rows]))

    def panels(self) -> list[Panel]:
        """Expected reward and exact log P(bad) against the samples drawn, as far as they are tracked and finite."""
        axis = "samples drawn (policy + proposal)" if self._proposal is not None else "samples drawn"
        panels = []
        for quantity, (_, title, unit) in QUANTITIES.items():
            if title is None or quantity not in self.history[-1]["policy"]:
                continue
            points = {
                model: [
                    (entry["samples"], values[quantity])
                    for entry in self.history
                    if (values := entry[model]) and values[quantity] is not None and math.isfinite(values[quantity])
                ]
                for model in MODELS
            }
            panels.append((title, unit, axis, {model: series for model, series in points.items() if series}))
        return panels

    def _record(self) -> None:
        # With models sharded by ZeRO-3 or FSDP2, a forward pass takes all processes; all get the same result
        cut_apart = self.trainer.is_fsdp_enabled or is_partitioned(self.trainer.model)
        if not self.trainer.is_world_process_zero() and not cut_apart:
            return
        self._seconds, self._since = self.seconds, None  # the clock stands still
        entry = {
            "update": self.updates,
            "samples": self.samples,
            "seconds": self.seconds,
            "policy": self._evaluate(self.trainer.accelerator.unwrap_model(self.trainer.model)),
            "proposal": None if self._proposal is None else self._evaluate(self._proposal.module),
        }
        self.history.append(entry)
        self._since = time.perf_counter()

    def _evaluate(self, model: PreTrainedModel) -> dict[str, float | None]:
        """Any of `"expected_reward"`, `"log_prob_bad"` and `"kl"` of one model."""
        raise NotImplementedError


def _number(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4f}" if isinstance(value, float) else str(value)


class ExactTrackingCallback(_PeriodicTracking):
    """
    Evaluates policy and proposal exactly at the start of training, every few updates, and at the end.

    Only the main process evaluates, except with DeepSpeed ZeRO-3 and FSDP2, where all do.

    Args:
        evaluator ([`ExactEvaluator`]): Evaluator; with a `reference_model`, the KL divergence from it is tracked too.
        trainer ([`~trl.RLOOTrainer`] or [`~trl.GRPOTrainer`]): Trainer to follow.
        every (`int`, *optional*, defaults to `10`): Updates between two evaluations.

    Attributes:
        history (`list[dict]`):
            One entry an evaluation: `"update"`, `"samples"` and `"seconds"` as in [`TrackingCallback`], `"policy"`,
            and `"proposal"` (`None` if there is none). A model's entry has `"expected_reward"` (in reward units),
            `"log_prob_bad"` (nats) and `"kl"` (nats per completion; `None` without a reference).

    Example:

    ```python
    >>> tracking = ExactTrackingCallback.from_trainer(trainer, prompts, bad_token_ids)
    >>> trainer.add_callback(tracking)
    >>> trainer.train()
    >>> tracking.history[-1]["policy"]["log_prob_bad"]
    >>> plot_training(trainer.state.log_history, "training.png", tracking.panels())
    ```
    """

    def __init__(self, evaluator: ExactEvaluator, trainer: RLOOTrainer | GRPOTrainer, every: int = 10):
        super().__init__(trainer, every)
        self.evaluator = evaluator

    @classmethod
    def from_trainer(
        cls,
        trainer: RLOOTrainer | GRPOTrainer,
        prompts: Sequence[str],
        bad_token_ids: Sequence[int],
        reference_model: PreTrainedModel | None = None,
        every: int = 10,
    ) -> "ExactTrackingCallback":
        """
        Builds the evaluator with the trainer's tokenizer, weighted reward model, completion length and end tokens.

        Args:
            trainer ([`~trl.RLOOTrainer`] or [`~trl.GRPOTrainer`]):
                Trainer to follow. Its only reward is a reward model.
            prompts, bad_token_ids, reference_model: As for [`ExactEvaluator`].
            every (`int`, *optional*, defaults to `10`): Updates between two evaluations.

        Raises:
            `ValueError`: If the reward is not one model, a prompt is no text or too long, or there are too many
            completions to
                enumerate.
        """
        reward, tokenizer = trainer.reward_funcs[0], trainer.processing_class
        if len(trainer.reward_funcs) != 1 or not isinstance(reward, nn.Module):
            raise ValueError(
                "Exact tracking needs `reward_funcs` to be one reward model; build `ExactEvaluator` for others."
            )
        tokenize_prompts(trainer, prompts)  # raises for prompts that cannot be evaluated
        unweighted = reward_of_model(reward, trainer.reward_processing_classes[0])
        weight = trainer.reward_weights[0].item()
        evaluator = ExactEvaluator(
            tokenizer,
            prompts,
            lambda texts: weight * unweighted(texts),
            bad_token_ids,
            trainer.max_completion_length,
            reference_model=reference_model,
            eos_token_ids=trainer.eos_token_ids,
        )
        return cls(evaluator, trainer, every)

    def _evaluate(self, model: PreTrainedModel) -> dict[str, float | None]:
        report = self.evaluator.evaluate(model)
        return {"expected_reward": report.expected_reward, "log_prob_bad": report.log_prob_bad, "kl": report.kl}


class BadTokenTrackingCallback(_PeriodicTracking):
    """
    Follows the exact log P(bad) of policy and proposal, for completions of up to two tokens over a vocabulary of any
    size.

    For vocabularies that are too large for [`ExactTrackingCallback`]: evaluates as that does, with the same `history`,
    but a model's entry has only `"log_prob_bad"` (nats).

    Args:
        trainer ([`~trl.RLOOTrainer`] or [`~trl.GRPOTrainer`]):
            Trainer to follow; gives `max_completion_length`, of at most 2, and the end tokens.
        prompts (`Sequence[str]`): Plain-text prompts to evaluate on, about 50,000 sequences each for GPT-2.
        bad_token_ids (`Sequence[int]`): Tokens that make a completion bad, anywhere in it.
        every (`int`, *optional*, defaults to `10`): Updates between two evaluations.
        batch_size (`int`, *optional*): As in [`exact_log_prob_bad`].
    """

    def __init__(
        self,
        trainer: RLOOTrainer | GRPOTrainer,
        prompts: Sequence[str],
        bad_token_ids: Sequence[int],
        every: int = 10,
        batch_size: int | None = None,
    ):
        super().__init__(trainer, every)
        length = trainer.max_completion_length
        if length > 2:
            raise ValueError(
                f"`max_completion_length={length}` is too long to compute log P(bad) exactly; leave out the bad tokens, "
                "or set it to 1 or 2."
            )
        self._prompt_ids = tokenize_prompts(trainer, prompts)
        self._bad_token_ids, self._batch_size = list(bad_token_ids), batch_size

    def _evaluate(self, model: PreTrainedModel) -> dict[str, float | None]:
        trainer = self.trainer
        log_prob_bad = exact_log_prob_bad(
            *(model, self._prompt_ids, self._bad_token_ids, trainer.max_completion_length),
            *(trainer.eos_token_ids, self._batch_size),
        )
        return {"log_prob_bad": log_mean_exp(log_prob_bad)}


def tokenize_prompts(trainer: RLOOTrainer | GRPOTrainer, prompts: Sequence[str]) -> list[list[int]]:
    """
    Tokens of prompts for exact evaluation. Raises `ValueError` if one is not plain text, or leaves no room for a completion.
    """
    if not all(isinstance(prompt, str) for prompt in prompts):
        raise ValueError("Exact tracking needs plain-text prompts; evaluate conversations by sampling.")
    ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
    check_prompt_lengths(ids, prompts, trainer.model.config, trainer.max_completion_length)
    check_added_tokens(trainer.processing_class, prompts, ids)
    return ids


@torch.no_grad()
def exact_log_prob_bad(
    model: nn.Module,
    prompt_ids: Sequence[Sequence[int]],
    bad_token_ids: Collection[int],
    max_completion_length: int,
    eos_token_ids: Collection[int],
    batch_size: int | None = None,
) -> torch.Tensor:
    """
    Log-probability that any token of a completion of up to two tokens is bad, by enumeration of the first, for a
    vocabulary of any size.

    A completion ends with an end-of-sequence token or at T tokens. For T = 2,

        P(bad) = Σ_{s₁ bad} P(s₁) + Σ_{s₁ neither bad nor end} P(s₁) · P(s₂ bad | s₁),

    which takes up to V + 1 sequences a prompt (about 50,000 for GPT-2) and no reward model. Prompts are not padded.
    The model runs in its own precision; the rest is in log space, so that tiny probabilities are exact.

    Args:
        model ([`~transformers.PreTrainedModel`]):
            Causal language model whose forward takes `logits_to_keep`. Its training mode is restored.
        prompt_ids (`Sequence[Sequence[int]]`): Tokens of each of the P prompts.
        bad_token_ids, eos_token_ids (`Collection[int]`):
            Tokens that make a completion bad, anywhere in it, and those that end one; may be empty.
        max_completion_length (`int`): T, 1 or 2.
        batch_size (`int`, *optional*):
            Sequences of one forward pass; by default 64 on a CPU and 512 elsewhere. Logits take about 8·B·V bytes in
            float32.

    Returns:
        `torch.Tensor` of shape `(P,)`: log P(bad) of each prompt in nats, float64, on the CPU; −inf without bad
        tokens.

    Raises:
        `ValueError`: If an argument is out of range, a prompt is empty, or the model is not causal.
    """
    if max_completion_length not in (1, 2):
        raise ValueError(
            f"`max_completion_length={max_completion_length}` must be 1 or 2; estimate others by sampling."
        )
    if batch_size is None:
        batch_size = 64 if next(model.parameters()).device.type == "cpu" else 512
    check_sizes(batch_size=batch_size)
    if not prompt_ids or not all(len(ids) for ids in prompt_ids):
        raise ValueError("`prompt_ids` must hold at least one prompt, and each prompt at least one token.")
    config: Any = model.config
    check_token_ids(prompt_ids, config)
    check_causal(model, "`model`")
    bad, eos = sorted(set(bad_token_ids)), sorted(set(eos_token_ids))
    with in_mode(model, training=False):
        first = [
            _first_token_log_prob_bad(model, ids, bad, eos, max_completion_length, batch_size) for ids in prompt_ids
        ]
    return torch.stack([row.logsumexp(dim=0).cpu() for row in first])


def _first_token_log_prob_bad(
    model: nn.Module, prompt_ids: Sequence[int], bad: list[int], eos: list[int], length: int, batch_size: int
) -> torch.Tensor:
    """Log P(first token, and a bad token among the first `length`) for each first token, (V,), float64."""
    prompt = torch.tensor(list(prompt_ids), device=next(model.parameters()).device)  # (L,)
    first = _next_log_prob(model, prompt.unsqueeze(0))[0]  # (V,)
    for name, tokens in (("bad_token_ids", bad), ("eos_token_ids", eos)):
        if tokens and not 0 <= tokens[0] <= tokens[-1] < len(first):
            raise ValueError(
                f"`{name}` has {tokens[0] if tokens[0] < 0 else tokens[-1]}, but the model's vocabulary is "
                f"0 to {len(first) - 1}; use the ids of the model's own tokenizer."
            )
    joint = torch.full_like(first, -torch.inf)
    joint[bad] = first[bad]
    if length == 2 and bad:
        live = torch.ones_like(first, dtype=torch.bool)
        live[bad + eos] = False
        others = live.nonzero()  # (A, 1)
        for start in range(0, len(others), batch_size):
            batch = others[start : start + batch_size]
            rows = torch.cat([prompt.expand(len(batch), -1), batch], dim=1)  # (B, L + 1)
            second = _next_log_prob(model, rows, bad).logsumexp(dim=1)  # log P(s₂ bad | s₁), (B,)
            joint[batch[:, 0]] = first[batch[:, 0]] + second
    return joint


def _next_log_prob(model: nn.Module, rows: torch.Tensor, chosen: list[int] | None = None) -> torch.Tensor:
    """Log-probabilities of the token after each row, (B, V) or only those of `chosen`, float64."""
    logits = model(input_ids=rows, attention_mask=torch.ones_like(rows), logits_to_keep=1, use_cache=False).logits
    logits = logits[:, -1].to(torch.promote_types(logits.dtype, torch.float32))  # (B, V)
    logits.sub_(logits.amax(dim=1, keepdim=True))  # in place: nothing else uses this output
    kept = (logits if chosen is None else logits[:, chosen]).to(torch.float64, copy=True)
    # Exponentials in the model's precision and their sum in float64: an error of 1e-7 nats in float32
    return kept - logits.exp_().sum(dim=1, keepdim=True, dtype=torch.float64).log()


# The training commands' dataclasses, with these arguments
ARGUMENTS = {
    command: (dataclass(type(f"Exact{script.__name__}", (script, ExactArguments), {})), config)
    for command, (script, config) in arguments.ARGUMENTS.items()
}
train = partial(methods.train, arguments=ARGUMENTS, make_tracking=make_tracking)
