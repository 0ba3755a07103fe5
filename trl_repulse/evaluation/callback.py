"""Callbacks: the tail report along a training run, and completions from before and after it."""

import contextlib
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
from accelerate.logging import get_logger
from accelerate.utils import gather_object
from datasets import Dataset, IterableDataset
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from trl import GRPOTrainer, RLOOTrainer

from ..data._checks import ALWAYS_PASSED, as_dataset, check_prompt_lengths
from ..data._tables import columns_of, from_columns
from ..data._texts import completion_texts
from ..engine.trl_bridge import unwrapped_for_generation
from ..generation._probe import probe
from ..generation.completions import tokenize
from ..models._adapters import random_states_kept
from ._generation import Prompt, as_function, check_columns, evaluate_rewards, transformers_engine
from .records import readable
from .report import estimates
from .tails import Estimate, check_sizes


logger = get_logger(__name__)


class TailReportCallback(TrainerCallback):
    """
    Samples from the policy every few updates and at the end of training, and logs the lower tail of its reward. With
    `load_best_model_at_end`, the last report is of the model that was loaded.

    Works with this package's trainers, and TRL's [`~trl.RLOOTrainer`] and [`~trl.GRPOTrainer`]. All processes sample,
    with their own seeds, so that training is not affected. Rewards are the trainer's `reward_funcs` and weights,
    without the trainer's transform. They get `trainer_state` as in training; their calls of `log_extra` and
    `log_metric` are ignored. Messages are rendered with the trainer's `chat_template_kwargs`.

    Logs `tail/mean`, `tail/prob_below_η` and `tail/cvar_a`, the last two with `_low` and `_high`. Callbacks for
    several sets of prompts need different values of `metric_key_prefix`.

    Args:
        trainer ([`~trl.RLOOTrainer`] or [`~trl.GRPOTrainer`]): Trainer to follow.
        prompts ([`~datasets.Dataset`] or `Sequence`): Held-out prompts: plain text, messages, or rows with a `"prompt"`.
        num_samples (`int`, *optional*, defaults to `16`): Completions of each prompt.
        thresholds (`Sequence[float]`, *optional*): η of each P(r < η), in units of reward.
        levels (`Sequence[float]`, *optional*, defaults to `(0.1,)`): Levels of the CVaR.
        every (`int`, *optional*, defaults to `100`): Updates between two reports.
        seed (`int`, *optional*, defaults to `0`): Seed of the draws, the same at every report.
        metric_key_prefix (`str`, *optional*, defaults to `"tail"`): Prefix of the names of the metrics.

    Attributes:
        history (`list[dict]`):
            One entry a report: `"update"`, and `"report"`, as `overall` of [`~trl_repulse.evaluation.report.TailReport`].

    Raises:
        `ValueError`: If prompts are empty, too long or lack a column that a reward function needs, or a number is out of range.

    Example:

    ```python
    >>> trainer.add_callback(TailReportCallback(trainer, held_out, num_samples=64, thresholds=[-5.0], every=50))
    ```
    """

    def __init__(
        self,
        trainer: RLOOTrainer | GRPOTrainer,
        prompts: Dataset | Sequence[Prompt],
        num_samples: int = 16,
        thresholds: Sequence[float] = (),
        levels: Sequence[float] = (0.1,),
        every: int = 100,
        seed: int = 0,
        metric_key_prefix: str = "tail",
    ):
        check_sizes(every=every, num_samples=num_samples)
        if seed < 0:
            raise ValueError(f"`seed={seed}` must be at least 0.")
        self.trainer = trainer
        self.dataset, self._prompt_ids = prepare_prompts(trainer, prompts)
        self.num_samples, self.every, self.seed = num_samples, every, seed
        self.thresholds, self.levels = list(thresholds), list(levels)
        self.history: list[dict[str, Any]] = []
        self.metric_key_prefix = metric_key_prefix
        estimates(np.zeros((1, 1, 1)), self.thresholds, self.levels)  # raises for levels out of range

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        """Raises a `ValueError` if two reports of the trainer would write the same metrics."""
        callbacks = self.trainer.callback_handler.callbacks
        prefixes = [each.metric_key_prefix for each in callbacks if isinstance(each, TailReportCallback)]
        if prefixes.count(self.metric_key_prefix) > 1:
            raise ValueError(
                f"Several tail reports have `metric_key_prefix={self.metric_key_prefix!r}`; give each one of its own."
            )

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        if state.global_step % self.every == 0:
            self._report(state.global_step, control)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        best_was_loaded = args.load_best_model_at_end and state.best_global_step not in (None, state.global_step)
        if best_was_loaded and self.history and self.history[-1]["update"] == state.global_step:
            self.history.pop()  # of the model before the best one was loaded
        if best_was_loaded or state.global_step % self.every:
            self._report(state.global_step, control)

    def _report(self, update: int, control: TrainerControl) -> None:
        """Samples, estimates and logs; an update whose samples lack rewards gets no report. All processes must call it."""
        rewards = self._draw_rewards()
        if num_missing := int(np.isnan(rewards).sum()):  # do not end a run for its report
            logger.warning(
                "No tail report at update %d: %d of %d held-out completions got no reward, and it needs one for each.",
                *(update, num_missing, rewards.size),
            )
            return
        by_quantity = estimates(rewards, self.thresholds, self.levels)
        self.history.append({"update": update, "report": by_quantity})
        due = control.should_log
        # The base class: TRL's `log` would close the window over which it averages its own metrics
        Trainer.log(self.trainer, _metrics(by_quantity, self.metric_key_prefix))
        control.should_log = due  # `log` marks the update's own logging as done

    def _draw_rewards(self) -> np.ndarray:
        """Weighted rewards of new completions, (1, P, N), NaN where no function gave one. All processes must call it, and get the same."""
        drawn = draw_completions(self.trainer, self.dataset, self._prompt_ids, self.num_samples, self.seed)
        return np.array([reward for _, reward in drawn]).reshape(1, -1, self.num_samples)


def prepare_prompts(
    trainer: RLOOTrainer | GRPOTrainer, prompts: Dataset | Sequence[Prompt]
) -> tuple[Dataset, list[list[int]]]:
    """The prompts as a data set, and the tokens of each. Raises `ValueError` if one is too long, or a reward's column is missing."""
    dataset = as_dataset(prompts)
    passed = {*ALWAYS_PASSED, *dataset.column_names} - {"prompt", "completion"}
    remedy = "but the held-out prompts have no such column; pass rows with it, or give the parameter a default"
    for reward, name in zip(trainer.reward_funcs, trainer.reward_func_names, strict=True):
        check_columns(reward, name, passed, remedy)
    rows = dataset["prompt"][:]
    ids = tokenize(trainer.processing_class, rows, trainer.chat_template_kwargs)
    check_prompt_lengths(ids, rows, trainer.model.config, trainer.max_completion_length)
    return dataset, ids


def draw_completions(
    trainer: RLOOTrainer | GRPOTrainer, dataset: Dataset, prompt_ids: list[list[int]], num_samples: int, seed: int
) -> list[tuple[str, float]]:
    """Completions of the current policy, `num_samples` of each prompt, each with its weighted sum of rewards (NaN where no function gave
    one), prompt by prompt. All processes draw, must call this, and get the same. The trainer's random state is not changed."""
    accelerator = trainer.accelerator
    total = len(dataset) * num_samples
    # As many on each process, as a sharded model generates on all of them at once; places past the end are dropped
    share = -(-total // accelerator.num_processes)
    places = [accelerator.process_index + i * accelerator.num_processes for i in range(share)]
    chosen = [place % total // num_samples for place in places]
    size = trainer.args.per_device_train_batch_size
    columns = dataset[chosen]
    prompts = columns.pop("prompt")
    wrapped, whole_weights = trainer.model_wrapped, contextlib.nullcontext()
    if isinstance(wrapped, FullyShardedDataParallel):
        whole_weights = FullyShardedDataParallel.summon_full_params(wrapped, recurse=False)
    with unwrapped_for_generation(trainer) as model, whole_weights:
        guard = replace(probe(model), repeat_cache=False)  # processes that share weights make as many passes each
        engine = transformers_engine(model, trainer.processing_class, trainer.max_completion_length, size, guard=guard)
        own_seed = np.random.SeedSequence([seed, accelerator.process_index]).generate_state(1)[0]
        ids = engine([prompt_ids[prompt] for prompt in chosen], int(own_seed))
    texts = completion_texts(trainer.processing_class, prompts, [prompt_ids[prompt] for prompt in chosen], ids)
    functions, given = {}, {"trainer_state": trainer.state, "log_extra": _ignore, "log_metric": _ignore}
    named = zip(trainer.reward_func_names, trainer.reward_funcs, trainer.reward_processing_classes, strict=True)
    for name, reward, tokenizer in named:
        if isinstance(reward, nn.Module):
            reward = accelerator.unwrap_model(reward)  # from DeepSpeed's engine
        function = as_function(reward, tokenizer, accelerator.device, trainer.chat_template_kwargs)[1]
        functions[f"{len(functions)} {name}"] = partial(function, **given)  # two may share a name
    loop = getattr(trainer, "async_loop", None)  # the client of an asynchronous reward belongs to it
    with random_states_kept(accelerator.device):
        rewards = evaluate_rewards(functions, prompts, texts, ids, columns, size, loop)
    weights = trainer.reward_weights.tolist()
    rows = []
    for place, text, values in zip(places, texts, zip(*rewards.values(), strict=True), strict=True):
        known = [weight * value for weight, value in zip(weights, values, strict=True) if value is not None]
        rows.append((place, (text, sum(known) if known else math.nan)))
    gathered = dict(gather_object(rows))
    return [gathered[place] for place in range(total)]


def _ignore(*_: Any, **__: Any) -> None:
    """Replaces TRL's logging functions, whose tables and means are of the trainer's own completions."""


def _metrics(found: dict[str, Estimate], prefix: str) -> dict[str, float]:
    """The logged metrics of a report, without infinite ends of intervals."""
    metrics = {}
    for name, estimate in found.items():
        key = name.replace("P(r < ", "prob_below_").replace(")", "").replace("CVaR ", "cvar_")
        ends = {"_low": estimate.low, "_high": estimate.high} if name != "mean" else {}
        metrics |= {f"{prefix}/{key}{end}": value for end, value in {"": estimate.value, **ends}.items()}
    return {key: value for key, value in metrics.items() if np.isfinite(value)}


class BeforeAfterCallback(TrainerCallback):
    """
    Samples a few completions when training begins, and from the same prompts when [`write`] is called, as
    [`~trl_repulse.evaluation.callback.TailReportCallback`] does. Raises `ValueError` if a prompt is too long, or a column that a reward
    function needs is missing.

    Args:
        trainer ([`~trl.RLOOTrainer`] or [`~trl.GRPOTrainer`]): Trainer to follow.
        prompts ([`~datasets.Dataset`] or [`~datasets.IterableDataset`]):
            Rows with a `"prompt"` and the columns that the rewards need. The first are used, repeated if there are too few.
        num_completions (`int`, *optional*, defaults to `10`): Completions to sample.
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
        """Samples again and writes a Markdown table with rewards. All processes must call it; the main one writes."""
        after = self._draw()
        if not self.trainer.is_world_process_zero():
            return
        header = ("prompt", f"update {self._start}", "reward", f"update {self.trainer.state.global_step}", "reward")
        rows = [header, ("---",) * len(header)]
        for prompt, before, end in zip(self.dataset["prompt"], self._before, after, strict=True):
            rows.append((_cell(readable(prompt)), *_cells(before), *_cells(end)))
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"| {' | '.join(row)} |\n" for row in rows), encoding="utf-8")

    def _draw(self) -> list[tuple[str, float]]:
        """A completion of each prompt with its reward, NaN without one. All processes must call it."""
        return draw_completions(self.trainer, self.dataset, self._prompt_ids, 1, self.trainer.args.seed)


def _cells(drawn: tuple[str, float]) -> tuple[str, str]:
    """Cells of a completion and of its reward, empty without one."""
    text, reward = drawn
    return _cell(text), "" if math.isnan(reward) else f"{reward:.3g}"


def _cell(text: str) -> str:
    """A text as a cell of a Markdown table."""
    return "<br>".join(text.replace("\\", "\\\\").replace("|", "\\|").splitlines())
