"""What a training run cost."""

import math
import time
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from trl import GRPOTrainer, RLOOTrainer

from ..configs import NegativeTermConfig
from .plots import Panel
from .report import text_table


class TrackingCallback(TrainerCallback):
    """
    Counts the cost of one call of `trainer.train()`: updates, completions drawn, seconds. A resumed run counts from
    its checkpoint. `trainer` is the trainer to follow.

    Attributes:
        samples (`int`): Completions drawn so far for training, from policy and proposal, by all processes.
        updates (`int`): Updates of the policy so far, including those before the checkpoint of a resumed run.
        seconds (`float`): Training time so far.
    """

    def __init__(self, trainer: RLOOTrainer | GRPOTrainer):
        self.trainer, self.updates, self._micro_batches = trainer, 0, 0
        self._seconds = 0.0  # of the stretches that are over
        self._since: float | None = None  # start of the current one

    @property
    def samples(self) -> int:
        args = self.trainer.args
        # TRL draws a generation batch each `steps_per_generation * num_iterations` micro-batches
        batches = math.ceil(self._micro_batches / (args.steps_per_generation * args.num_iterations))
        size = args.generation_batch_size
        if isinstance(args, NegativeTermConfig) and args.draws_twice:
            prompts = args.generation_batch_size // args.num_generations
            extra = args.num_proposal_generations or args.num_generations
            size += prompts * extra * args.proposal_updates_per_step
        return batches * size

    @property
    def seconds(self) -> float:
        return self._seconds + (0.0 if self._since is None else time.perf_counter() - self._since)

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        self.updates = state.global_step
        self._micro_batches, self._seconds, self._since = 0, 0.0, time.perf_counter()

    def on_substep_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        self._micro_batches += 1

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        self._micro_batches += 1
        self.updates = state.global_step

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        self._seconds, self._since = self.seconds, None

    def results(self) -> dict[str, Any]:
        """What `results.json` says of the run."""
        return {"samples": self.samples, "policy_updates": self.updates, "seconds": self.seconds}

    def table(self, metrics: dict[str, Any]) -> str:
        """The printed table: what the run cost, and the last logged metrics."""
        rows = [("", "end"), ("samples drawn", f"{self.samples:,}"), ("seconds", f"{self.seconds:.1f}")]
        numbers = {name: f"{it:.4f}" if isinstance(it, float) else str(it) for name, it in metrics.items()}
        return "\n".join(text_table([*rows, *numbers.items()]))

    def panels(self) -> list[Panel]:
        """Panels of the figure, before those of logged metrics; none here, for subclasses to give."""
        return []
