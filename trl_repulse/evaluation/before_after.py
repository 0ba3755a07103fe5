"""A table of completions from before and after training."""

import math
from itertools import cycle, islice
from pathlib import Path

from datasets import Dataset, IterableDataset
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from trl import GRPOTrainer, RLOOTrainer

from ..data._tables import columns_of, from_columns
from ..rewards._texts import message_text
from ._generation import Prompt
from .callback import draw_completions, prepare_prompts


class BeforeAfterCallback(TrainerCallback):
    """
    Samples a few completions when training begins, and from the same prompts when [`write`] is called.

    Sampling is that of [`~trl_repulse.evaluation.callback.TailReportCallback`]: by all processes, with `generate`, and with its
    own seeds, so that training is not affected.

    Args:
        trainer ([`~trl.RLOOTrainer`] or [`~trl.GRPOTrainer`]):
            Trainer to follow.
        prompts ([`~datasets.Dataset`] or [`~datasets.IterableDataset`]):
            Rows with a `"prompt"` and the columns that the rewards need. The first are used, repeated if there are too few.
        num_completions (`int`, *optional*, defaults to `10`):
            Completions to sample.

    Raises:
        `ValueError`: If a prompt is too long, or a column that a reward function needs is missing.

    Example:

    ```python
    >>> table = BeforeAfterCallback(trainer, dataset)
    >>> trainer.add_callback(table)
    >>> trainer.train()
    >>> table.write("before_after.md")
    ```
    """

    def __init__(
        self, trainer: RLOOTrainer | GRPOTrainer, prompts: Dataset | IterableDataset, num_completions: int = 10
    ):
        rows = list(prompts.take(num_completions))
        self.trainer = trainer
        repeated = from_columns(columns_of(list(islice(cycle(rows), num_completions))))
        self.dataset, self._prompt_ids = prepare_prompts(trainer, repeated)
        self._start = 0
        self._before: list[tuple[str, float]] = []

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        self._start, self._before = state.global_step, self._draw()

    def write(self, path: str | Path) -> None:
        """
        Samples again and writes a Markdown table with rewards. All processes must call it; the main one writes.

        Args:
            path (`str` or `Path`):
                File to write; its folder is created if missing.
        """
        after = self._draw()
        if not self.trainer.is_world_process_zero():
            return
        header = ("prompt", f"update {self._start}", "reward", f"update {self.trainer.state.global_step}", "reward")
        rows = [header, ("---",) * len(header)]
        for prompt, before, end in zip(self.dataset["prompt"], self._before, after, strict=True):
            rows.append((_cell(_text(prompt)), *_cells(before), *_cells(end)))
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"| {' | '.join(row)} |\n" for row in rows), encoding="utf-8")

    def _draw(self) -> list[tuple[str, float]]:
        return draw_completions(self.trainer, self.dataset, self._prompt_ids, 1, self.trainer.args.seed)


def _text(prompt: Prompt) -> str:
    if isinstance(prompt, str):
        return prompt
    return "\n".join(f"{message['role']}: {message_text(message)}" for message in prompt)


def _cells(drawn: tuple[str, float]) -> tuple[str, str]:
    text, reward = drawn
    return _cell(text), "" if math.isnan(reward) else f"{reward:.3g}"


def _cell(text: str) -> str:
    return "<br>".join(text.replace("\\", "\\\\").replace("|", "\\|").splitlines())
