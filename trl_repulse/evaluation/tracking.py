"""Exact evaluation along a training run, and the file and table of its results."""

import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from trl import GRPOTrainer, RLOOTrainer

from ..configs import NegativeTermConfig
from ..data._checks import check_prompt_lengths
from ..data._texts import check_added_tokens
from ..models._deepspeed import is_partitioned
from .exact import ExactEvaluator, exact_log_prob_bad, log_mean_exp, reward_of_model
from .report import text_table
from .tails import check_sizes


class TrackingCallback(TrainerCallback):
    """
    Counts the cost of one call of `trainer.train()`: updates, completions drawn, seconds. A resumed run counts from
    its checkpoint.

    Attributes:
        samples (`int`): Completions drawn so far for training, from policy and proposal, by all processes.
        updates (`int`): Updates of the policy so far, including those before the checkpoint of a resumed run.
        seconds (`float`): Training time so far, without the time spent in this callback.
        history (`list[dict]`): Evaluations along the run; empty if nothing is evaluated.
    """

    def __init__(self, trainer: RLOOTrainer | GRPOTrainer):
        self.trainer = trainer
        self.updates = 0
        self.history: list[dict[str, Any]] = []
        self._proposal = trainer.proposal if isinstance(trainer.args, NegativeTermConfig) else None
        self._micro_batches = 0
        self._seconds = 0.0
        self._since: float | None = None

    @property
    def samples(self) -> int:
        args = self.trainer.args
        rounds = math.ceil(self._micro_batches / (args.steps_per_generation * args.num_iterations))
        a_round = args.generation_batch_size
        if isinstance(args, NegativeTermConfig) and args.draws_twice:
            prompts = args.generation_batch_size // args.num_generations
            draws = args.num_proposal_generations or args.num_generations
            a_round += prompts * draws * args.proposal_updates_per_step
        return rounds * a_round

    @property
    def seconds(self) -> float:
        return self._seconds + (0.0 if self._since is None else time.perf_counter() - self._since)

    def _pause(self) -> None:
        self._seconds, self._since = self.seconds, None

    def _resume(self) -> None:
        self._since = time.perf_counter()

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        self.updates = state.global_step
        self._micro_batches, self._seconds = 0, 0.0
        self._resume()

    def on_substep_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        self._micro_batches += 1

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        self._micro_batches += 1
        self.updates = state.global_step

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        self._pause()


class _PeriodicTracking(TrackingCallback):
    """Evaluates policy and proposal at the start, every few updates, and at the end."""

    def __init__(self, trainer: RLOOTrainer | GRPOTrainer, every: int):
        check_sizes(every=every)
        super().__init__(trainer)
        self.every = every

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

    def _record(self) -> None:
        # With models sharded by ZeRO-3 or FSDP2, a forward pass takes all processes; all get the same result
        cut_apart = self.trainer.is_fsdp_enabled or is_partitioned(self.trainer.model)
        if not self.trainer.is_world_process_zero() and not cut_apart:
            return
        self._pause()
        entry = {
            "update": self.updates,
            "samples": self.samples,
            "seconds": self.seconds,
            "policy": self._evaluate(self.trainer.accelerator.unwrap_model(self.trainer.model)),
            "proposal": None if self._proposal is None else self._evaluate(self._proposal.module),
        }
        self.history.append(entry)
        self._resume()

    def _evaluate(self, model: PreTrainedModel) -> dict[str, float | None]:
        """Any of `"expected_reward"`, `"log_prob_bad"` and `"kl"` of one model."""
        raise NotImplementedError


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
            prompts, bad_token_ids, reference_model: As for [`~trl_repulse.evaluation.exact.ExactEvaluator`].
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
        batch_size (`int`, *optional*): As in [`~trl_repulse.evaluation.exact.exact_log_prob_bad`].
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


def write_results(
    path: str | Path,
    method: str,
    seed: int,
    callback: TrackingCallback,
    settings: dict[str, Any],
    metrics: dict[str, Any] | None = None,
) -> None:
    """
    Writes a finished run as JSON, with its folder.

    The keys are `method`, `seed`, `samples` (completions drawn), `policy_updates`, `initial` and `final` (the policy's
    `expected_reward`, `log_prob_bad` in nats and `kl` in nats per completion, as far as they are tracked), `seconds`,
    `metrics` (the last that were logged), `history` and `settings`. Without exact evaluation, `initial` and `final`
    are missing and `history` is empty. Entries that are `None` or not finite are left out; values unknown to JSON are
    written as text.
    """
    history = callback.history
    results = {
        "method": method,
        "seed": seed,
        "samples": callback.samples,
        "policy_updates": callback.updates,
        "initial": history[0]["policy"] if history else None,
        "final": history[-1]["policy"] if history else None,
        "seconds": callback.seconds,
        "metrics": metrics or {},
        "history": history,
        "settings": settings,
    }
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(_known(results), indent=2, default=str, allow_nan=False, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")


def _known(value: Any) -> Any:
    """The value without dictionary entries that are `None` or not finite; such items of lists become text."""
    if isinstance(value, dict):
        return {str(key): _known(item) for key, item in value.items() if not _is_missing(item)}
    if isinstance(value, list | tuple):
        return [str(item) if _is_missing(item) else _known(item) for item in value]
    return value


def _is_missing(value: Any) -> bool:
    return value is None or isinstance(value, float) and not math.isfinite(value)


def format_table(callback: TrackingCallback, metrics: dict[str, Any] | None = None) -> str:
    """
    A table of a run's start and end: the policy's exact expected reward, log P(bad) and KL to the reference, as far as
    they are tracked, the samples drawn, and the seconds of training. The last logged metrics are shown if the expected
    reward is not known exactly.
    """
    rows = [("samples drawn", "0", f"{callback.samples:,}"), ("seconds", "0.0", f"{callback.seconds:.1f}")]
    if callback.history:
        start, end = callback.history[0]["policy"], callback.history[-1]["policy"]
        shown = {
            "expected reward": "expected_reward",
            "exact log P(bad), nats": "log_prob_bad",
            "KL to reference, nats per completion": "kl",
        }
        exact = [(name, _number(start[key]), _number(end[key])) for name, key in shown.items() if key in end]
        rows = [("", "start", "end"), *exact, *rows]
        if "expected_reward" not in end:
            rows += [(name, "", _number(value)) for name, value in (metrics or {}).items()]
    else:
        rows = [("", "end"), *((name, end) for name, _, end in rows)]
        rows += [(name, _number(value)) for name, value in (metrics or {}).items()]
    return "\n".join(text_table(rows))


def _number(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4f}" if isinstance(value, float) else str(value)
