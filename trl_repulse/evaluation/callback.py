"""The tail report along a training run, by sampling."""

import contextlib
import inspect
import math
import random
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from accelerate.logging import get_logger
from accelerate.utils import gather_object
from datasets import Dataset
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from trl import GRPOTrainer, RLOOTrainer

from .._checks import ALWAYS_PASSED, as_dataset, check_prompt_lengths
from .._texts import completion_texts
from ..rewards.functions import FunctionReward
from ..trainers._trl_bridge import unwrap_model_for_generation
from ._generation import Prompt, as_function, evaluate_rewards, prompt_tokens, transformers_engine
from .report import estimates
from .tails import Estimate


logger = get_logger(__name__)


class TailReportCallback(TrainerCallback):
    """
    Samples from the policy every few updates and at the end of training, and logs the lower tail of its reward. With
    `load_best_model_at_end` the last report is of the model that was loaded.

    For [`~trl_repulse.RePULSeTrainer`], [`~trl_repulse.ReinforceTrainer`] and TRL's own [`~trl.RLOOTrainer`] and
    [`~trl.GRPOTrainer`]. All processes sample. The draws have seeds of their own, so that training goes on as without the
    callback. Rewards are the trainer's `reward_funcs` with its weights, before any transform that the trainer applies. They
    get `trainer_state` as in training; what they say to `log_extra` and `log_metric` of held-out completions is not logged.
    Messages are read with the trainer's `chat_template_kwargs`.

    Logged are `tail/mean`, `tail/prob_below_η` with `_low` and `_high`, and `tail/cvar_a` with both ends. Callbacks of
    several sets of prompts need a `metric_key_prefix` each.

    Args:
        trainer ([`~trl.RLOOTrainer`] or [`~trl.GRPOTrainer`]):
            Trainer to follow.
        prompts ([`~datasets.Dataset`] or `Sequence`):
            Held-out prompts, plain text or messages, or rows with a `"prompt"`.
        num_samples (`int`, *optional*, defaults to `16`):
            Completions of each prompt.
        thresholds (`Sequence[float]`, *optional*):
            η of each P(r < η), in units of reward.
        levels (`Sequence[float]`, *optional*, defaults to `(0.1,)`):
            Levels of the CVaR.
        every (`int`, *optional*, defaults to `100`):
            Updates between two reports.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the draws: the same at every report, which makes reports of one run comparable.
        metric_key_prefix (`str`, *optional*, defaults to `"tail"`):
            What the names of the metrics begin with.

    Attributes:
        history (`list[dict]`):
            One entry a report: `"update"`, and `"report"`, an [`~trl_repulse.evaluation.tails.Estimate`] by name of the
            quantity, as in [`~trl_repulse.evaluation.report.TailReport`].

    Raises:
        `ValueError`: If the prompts are empty or too long, lack a column that a reward function needs, or a number is out of
            range. At the start of training, if another callback of the trainer has the same `metric_key_prefix`.

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
        for name, value in (("every", every), ("num_samples", num_samples)):
            if value < 1:
                raise ValueError(f"`{name}={value}` must be at least 1.")
        if seed < 0:
            raise ValueError(f"`seed={seed}` must be at least 0.")
        self.dataset = as_dataset(prompts)
        check_columns(trainer, self.dataset.column_names)
        self.trainer = trainer
        self.num_samples, self.every, self.seed = num_samples, every, seed
        self.thresholds, self.levels = list(thresholds), list(levels)
        self.history: list[dict[str, Any]] = []
        self.metric_key_prefix = metric_key_prefix
        self._prompt_ids = prompt_tokens(
            trainer.processing_class, self.dataset["prompt"], trainer.chat_template_kwargs
        )
        length = trainer.max_completion_length
        check_prompt_lengths(self._prompt_ids, self.dataset["prompt"][:], trainer.model.config, length)
        estimates(np.zeros((1, 1, 1)), self.thresholds, self.levels)  # refuses levels out of range

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        callbacks = self.trainer.callback_handler.callbacks
        prefixes = [each.metric_key_prefix for each in callbacks if isinstance(each, TailReportCallback)]
        if prefixes.count(self.metric_key_prefix) > 1:
            raise ValueError(
                f"Several tail reports have `metric_key_prefix={self.metric_key_prefix!r}`; give each one of its own."
            )

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.global_step % self.every == 0:
            self._report(state.global_step, control)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        due = bool(state.global_step % self.every)
        best = state.best_global_step if args.load_best_model_at_end else None
        if not due and best not in (None, state.global_step):  # the model just reported is not the one that stays
            if self.history and self.history[-1]["update"] == state.global_step:
                self.history.pop()
            due = True
        if due:
            self._report(state.global_step, control)

    def _report(self, update: int, control: TrainerControl) -> None:
        rewards = self._sample()
        lost = int(np.isnan(rewards).sum())
        if lost:  # a run is worth more than its report
            logger.warning(
                "No tail report at update %d: %d of %d held-out completions got no reward, and it needs one for each.",
                *(update, lost, rewards.size),
            )
            return
        found = estimates(rewards, self.thresholds, self.levels)
        self.history.append({"update": update, "report": found})
        due = control.should_log
        # The base class: TRL's `log` would close the window over which it averages its own metrics
        Trainer.log(self.trainer, _metrics(found, self.metric_key_prefix))
        control.should_log = due  # any log takes the update's own for done

    def _sample(self) -> np.ndarray:
        """Rewards of shape (1, P, N), the same on all processes; NaN where no function gave one."""
        drawn = draw(self.trainer, self.dataset, self._prompt_ids, self.num_samples, self.seed)
        return np.array([reward for _, reward in drawn]).reshape(1, -1, self.num_samples)


def draw(
    trainer: RLOOTrainer | GRPOTrainer, dataset: Dataset, prompt_ids: list[list[int]], num_samples: int, seed: int
) -> list[tuple[str, float]]:
    """
    Completions of the policy as it stands, drawn by all processes. A collective call.

    Args:
        trainer ([`~trl.RLOOTrainer`] or [`~trl.GRPOTrainer`]):
            Gives the policy and the rewards. Its random state stays as it is.
        dataset ([`~datasets.Dataset`]):
            Prompts, with the columns that its rewards need.
        prompt_ids (`list[list[int]]`):
            Tokens of each.
        num_samples (`int`):
            Completions of each.
        seed (`int`):
            Seed of the draws.

    Returns:
        `list[tuple[str, float]]`: completion and reward, those of a prompt one after the other, the same on all processes. The
        reward is the weighted sum, NaN where no function gave one.
    """
    accelerator = trainer.accelerator
    total = len(dataset) * num_samples
    # As many on each process, since a model that is cut apart generates on all of them at once; places past the end are dropped
    share = -(-total // accelerator.num_processes)
    mine = [accelerator.process_index + i * accelerator.num_processes for i in range(share)]
    chosen = [place % total // num_samples for place in mine]
    size = trainer.args.per_device_train_batch_size
    columns = dataset[chosen]
    prompts = columns.pop("prompt")
    wrapped, whole = trainer.model_wrapped, contextlib.nullcontext()
    if isinstance(wrapped, FullyShardedDataParallel):
        whole = FullyShardedDataParallel.summon_full_params(wrapped, recurse=False)
    unwrapped = unwrap_model_for_generation(
        wrapped,
        accelerator,
        gather_deepspeed3_params=trainer.args.ds3_gather_for_generation,
        gradient_checkpointing_kwargs=trainer.args.gradient_checkpointing_kwargs,
    )
    with unwrapped as model, whole:
        engine = transformers_engine(model, trainer.processing_class, trainer.max_completion_length, size)
        own_seed = np.random.SeedSequence([seed, accelerator.process_index]).generate_state(1)[0]
        ids = engine([prompt_ids[prompt] for prompt in chosen], int(own_seed))
    texts = completion_texts(trainer.processing_class, prompts, [prompt_ids[prompt] for prompt in chosen], ids)
    functions, given = {}, {"trainer_state": trainer.state, "log_extra": _ignore, "log_metric": _ignore}
    for name, reward, tokenizer in zip(
        trainer.reward_func_names, trainer.reward_funcs, trainer.reward_processing_classes, strict=True
    ):
        if isinstance(reward, nn.Module):
            reward = accelerator.unwrap_model(reward)  # of DeepSpeed's engine
        reward = getattr(reward, "unchecked", reward)  # which `as_function` checks again
        function = as_function(reward, tokenizer, accelerator.device, trainer.chat_template_kwargs)[1]
        functions[name] = partial(function, **given)
    loop = getattr(trainer, "async_loop", None)  # which an asynchronous reward's client is tied to
    with _random_states_kept(accelerator.device):
        rewards = evaluate_rewards(functions, prompts, texts, ids, columns, size, loop)
    weights = trainer.reward_weights.tolist()
    rows = []
    for place, text, values in zip(mine, texts, zip(*rewards.values(), strict=True), strict=True):
        known = [weight * value for weight, value in zip(weights, values, strict=True) if value is not None]
        rows.append((place, (text, sum(known) if known else math.nan)))
    gathered = dict(gather_object(rows))
    return [gathered[place] for place in range(total)]


@contextlib.contextmanager
def _random_states_kept(device: torch.device) -> Iterator[None]:
    """Context after which Python's, NumPy's and torch's random numbers go on as before; a reward may draw some."""
    states = random.getstate(), np.random.get_state()
    devices = [] if device.type == "cpu" else [device]
    try:
        with torch.random.fork_rng(devices, device_type=device.type):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


def check_columns(trainer: RLOOTrainer | GRPOTrainer, columns: list[str]) -> None:
    """
    Refuses prompts without a column that a reward function would fail for, in the middle of a run.

    Args:
        trainer ([`~trl.RLOOTrainer`] or [`~trl.GRPOTrainer`]):
            Gives the rewards.
        columns (`list[str]`):
            Columns of the prompts' data set.

    Raises:
        `ValueError`: If a reward function needs another.
    """
    known = {*ALWAYS_PASSED, *columns} - {"prompt", "completion"}
    for reward, name in zip(trainer.reward_funcs, trainer.reward_func_names, strict=True):
        for parameter in _required(getattr(reward, "unchecked", reward)):
            if parameter not in known:
                raise ValueError(
                    f"The reward function '{name}' needs `{parameter}`, but the held-out prompts have no such column; pass "
                    "rows with it, or give the parameter a default."
                )


def _required(function: Any) -> list[str]:
    """Parameters that a reward function must be given by name, as far as its own signature says."""
    if isinstance(function, FunctionReward):
        return [] if function._queries else sorted(function._required)
    if isinstance(function, nn.Module):
        return []
    try:  # a decorator may supply what the function that it wraps needs
        parameters = inspect.signature(function, follow_wrapped=False).parameters.values()
    except (TypeError, ValueError):
        return []
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [each.name for each in parameters if each.kind in named and each.default is each.empty]


def _ignore(*_: Any, **__: Any) -> None:
    """In the place of TRL's functions that log: the tables and means of a trainer are of its own completions."""


def _metrics(found: dict[str, Estimate], prefix: str) -> dict[str, float]:
    """What is logged of a report; ends of intervals that are infinite are left out."""
    metrics = {}
    for name, estimate in found.items():
        key = name.replace("P(r < ", "prob_below_").replace(")", "").replace("CVaR ", "cvar_")
        ends = {"_low": estimate.low, "_high": estimate.high} if name != "mean" else {}
        metrics |= {f"{prefix}/{key}{end}": value for end, value in {"": estimate.value, **ends}.items()}
    return {key: value for key, value in metrics.items() if np.isfinite(value)}
