"""What a training run cost, and the file and table of its results."""

import math
import time
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from trl import GRPOTrainer, RLOOTrainer

from ..configs import NegativeTermConfig
from .records import write_report
from .report import text_table


class TrackingCallback(TrainerCallback):
    """
    Counts the cost of one call of `trainer.train()`: updates, completions drawn, seconds. A resumed run counts from
    its checkpoint. `trainer` is the trainer to follow.

    Attributes:
        samples (`int`): Completions drawn so far for training, from policy and proposal, by all processes.
        updates (`int`): Updates of the policy so far, including those before the checkpoint of a resumed run.
        seconds (`float`): Training time so far, without the time spent in this callback.
        history (`list[dict]`):
            Evaluations along the run, of a subclass; empty here. An entry has `"update"`, `"samples"`, `"seconds"`, `"policy"` and
            `"proposal"`.
    """

    def __init__(self, trainer: RLOOTrainer | GRPOTrainer):
        self.trainer = trainer
        self.updates = 0
        self.history: list[dict[str, Any]] = []
        self._micro_batches = 0
        self._seconds = 0.0
        self._since: float | None = None  # start of the current stretch; `None` while paused

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


def write_results(
    path: str | Path,
    method: str,
    seed: int,
    callback: TrackingCallback,
    settings: dict[str, Any],
    metrics: dict[str, Any] | None = None,
) -> None:
    """
    Writes the results of a finished run as JSON, and makes the folder if needed.

    The keys are `method` (the trainer's name), `seed`, `samples` (completions drawn), `policy_updates`, `initial` and `final` (the policy's
    `expected_reward`, `log_prob_bad` in nats and `kl` in nats per completion, as far as they are tracked), `seconds`,
    `metrics` (the last that were logged), `history` and `settings`, without those that are `None`. Without exact evaluation,
    `initial` and `final` are missing and `history` is empty. Numbers that are not finite are written as `None`.
    """
    history = callback.history
    results = {
        "method": method,
        "seed": seed,
        "samples": callback.samples,
        "policy_updates": callback.updates,
        "seconds": callback.seconds,
        "metrics": metrics or {},
        "history": history,
        "settings": {name: value for name, value in settings.items() if value is not None},
    }
    if history:
        results |= {"initial": history[0]["policy"], "final": history[-1]["policy"]}
    write_report(Path(path), results)


def format_table(callback: TrackingCallback, metrics: dict[str, Any] | None = None) -> str:
    """A table of a run's start and end: the policy's exact expected reward, log P(bad) and KL to the reference, as far
    as they are tracked, the samples drawn, and the seconds of training. The last logged metrics are shown if the
    expected reward is not known exactly."""
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
