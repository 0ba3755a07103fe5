"""What trainers log of samples and tokens, pooled over the batches since the last log and over processes, and tables of completions.

TRL logs the mean over batches of what each batch gave, in which a sample of a small batch counts more than others.
"""

import contextlib
import copy
import functools
import json
import math
import numbers
import operator
from collections.abc import Callable, Iterator, Sequence, Sized
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd  # type: ignore[import-untyped]
import torch
from accelerate import Accelerator
from accelerate.data_loader import IterableDatasetShard
from accelerate.logging import get_logger
from accelerate.utils import gather_object
from torch import nn
from transformers import is_trackio_available, is_wandb_available
from transformers.utils import is_rich_available

from .._numbers import is_bad
from .._trl import TensorBoardCallback, TrackioCallback, print_prompt_completions_sample
from ..math.importance import distinct_share, effective_sample_size, log_z_estimate, max_weight_share
from ..math.objective import is_below
from .diagnosis import AT_ONCE, PATIENCE, SYMPTOMS, UPDATES, RunLog, diagnose
from .trl_bridge import logged_apart


logger = get_logger(__name__)


@dataclass(frozen=True)
class Moments:
    """Count, mean, sum of squared deviations, minimum and maximum of values; mean and extremes of none are NaN. The sum of two is that of all
    their values."""

    count: float = 0.0
    mean: float = math.nan
    squares: float = 0.0
    low: float = math.nan
    high: float = math.nan

    @classmethod
    def of(cls, values: torch.Tensor) -> "Moments":
        """Moments of a tensor's values, without NaN."""
        values = values.detach().flatten().cpu().double()
        values = values[~values.isnan()]
        if not len(values):
            return cls()
        squares = (values - values.mean()).square().sum()
        return cls(len(values), *(x.item() for x in (values.mean(), squares, values.min(), values.max())))

    @classmethod
    def alike(cls, value: float, count: float) -> "Moments":
        """Moments of `count` values of which only the mean is known; of no values if it is NaN."""
        return cls() if math.isnan(value) or count <= 0 else cls(count, value, 0.0, value, value)

    def __add__(self, other: "Moments") -> "Moments":
        """The moments of the values of both; the distance of their means adds to the squared deviations."""
        if not (self.count and other.count):
            return self if self.count else other
        count = self.count + other.count
        gap, share = other.mean - self.mean, other.count / count
        return Moments(
            count,
            self.mean + gap * share,
            self.squares + other.squares + gap * gap * share * self.count,
            min(self.low, other.low),
            max(self.high, other.high),
        )


mean: Callable[[Moments], float] = operator.attrgetter("mean")
lowest: Callable[[Moments], float] = operator.attrgetter("low")
highest: Callable[[Moments], float] = operator.attrgetter("high")


def std(values: Moments) -> float:
    """The unbiased standard deviation; NaN of fewer than two values."""
    return math.sqrt(values.squares / (values.count - 1)) if values.count > 1 else math.nan


def share_explained(targets: Moments, errors: Moments) -> float:
    """1 − Var(errors) / Var(targets): 1 is perfect, 0 no better than a constant; NaN where the targets do not vary."""
    return 1 - errors.squares / targets.squares if targets.squares > 0 else math.nan


class Pooled(float):
    """A metric of one batch: a `statistic` of moments. [`pool`] computes the metric of several batches from their moments."""

    statistic: Callable[..., float]
    _moments: tuple[Moments, ...]

    def __new__(cls, statistic: Callable[..., float], *moments: Moments) -> "Pooled":
        metric = super().__new__(cls, statistic(*moments))
        metric.statistic, metric._moments = statistic, moments
        return metric

    @property
    def moments(self) -> tuple[Moments, ...]:
        return self._moments


class ShareUnder(Pooled):
    """Share of a batch's `rewards` (B_all,), without NaN, under a threshold. The threshold is read when the metric is logged, since it may be
    measured in between; the metric is NaN if it is `None`."""

    _rewards: torch.Tensor
    _threshold: Callable[[], float | None]

    def __new__(cls, rewards: torch.Tensor, threshold: Callable[[], float | None]) -> "ShareUnder":
        """As a number NaN: the share is known once [`moments`] reads the threshold."""
        metric = float.__new__(cls, math.nan)
        metric.statistic, metric._rewards, metric._threshold = mean, rewards, threshold
        return metric

    @property
    def moments(self) -> tuple[Moments, ...]:
        threshold = self._threshold()
        if threshold is None:
            return (Moments(),)
        return (Moments.of(is_below(self._rewards, threshold).float().masked_fill(self._rewards.isnan(), math.nan)),)


def pool(metrics: Sequence[Pooled]) -> float:
    """One metric over all values of at least one batch."""
    totals = [sum(batches[1:], batches[0]) for batches in zip(*(metric.moments for metric in metrics), strict=True)]
    return metrics[0].statistic(*totals)


def pool_all(metrics: dict[str, list[Any]]) -> None:
    """Pools each metric whose values are all [`Pooled`], in place, and removes it if it has no values: TRL (1.16) would log `None`. TRL
    logs the mean over batches of the other metrics."""
    for name, values in list(metrics.items()):
        if values and all(isinstance(value, Pooled) for value in values):
            metrics[name] = [pool(values)]
            if math.isnan(metrics[name][0]):
                del metrics[name]


def drop_batch_means(metrics: dict[str, list[Any]], *prefixes: str) -> None:
    """Removes TRL's values of single batches, which include padding rows, from metrics with these prefixes, in place."""
    for name in metrics:
        if name.startswith(prefixes):
            metrics[name] = [value for value in metrics[name] if isinstance(value, Pooled)]


def weighted(name: str, value: float, count: float) -> Pooled:
    """A metric that TRL computed over `count` samples or tokens of all processes. Names that end in `min` or `max` are pooled as such,
    others as means."""
    statistic = lowest if name.endswith("min") else highest if name.endswith("max") else mean
    return value if isinstance(value, Pooled) else Pooled(statistic, Moments.alike(value, count))


NEGATIVES = "negatives.jsonl"
ENGINE_GAP = 0.1  # nats a token between the engine's log-probabilities and the model's; above it there is a warning
# Folders of second models inside `output_dir` and inside each checkpoint, and prefixes of their metrics
PROPOSAL_FOLDER = "proposal"
VALUE_FOLDER = "value"


@dataclass
class _Evaluation:
    """An evaluation in progress."""

    rows: Callable[[], int] | None  # total rows, if known
    seen: int = 0  # rows
    real: int | None = None  # rows of the current batch that are no padding
    losses: list[Pooled] = field(default_factory=list)


class _Counted:
    """A stream that counts the rows it has given. TRL (1.16) reads streams in this process, whatever `dataloader_num_workers` is."""

    def __init__(self, stream: Any):
        self.stream, self._rows = stream, 0

    def __iter__(self) -> Iterator[Any]:
        for row in self.stream:
            self._rows += 1
            yield row

    def so_far(self) -> int:
        """Rows given so far: all of them once the last batch is made."""
        return self._rows

    def set_epoch(self, epoch: int) -> None:
        self.stream.set_epoch(epoch)


class Logs:
    """
    Metrics of a trainer in which all samples (or tokens, or prompts) since the last log count the same.

    *Padding rows*, with which accelerate completes the last batch of an evaluation, do not count. Values of this process wait until
    [`flush`], which gathers all of them in one collective call; each process must record the same names.

    Args:
        accelerator ([`~accelerate.Accelerator`]): The trainer's accelerator.
        metrics (`dict[str, dict[str, list]]`): TRL's metrics of `"train"` and `"eval"`, which are added to.
        model (`torch.nn.Module`): The policy; metrics are of training while it is in training mode.
    """

    def __init__(self, accelerator: Accelerator, metrics: dict[str, dict[str, list[Any]]], model: nn.Module):
        self.accelerator, self._metrics, self._model = accelerator, metrics, model
        self.prefix = ""  # of the names of what waits
        self.loss_count = 0.0  # samples or tokens of all processes that the latest loss is a mean of
        self._evaluation: _Evaluation | None = None
        # Statistics by name, and what they are of: moments of values of this process, or a sum and a number of tokens
        self._waiting: list[tuple[dict[str, Callable[..., float]], list[Moments] | tuple[float, float]]] = []

    @property
    def mode(self) -> str:
        """`"train"` or `"eval"`."""
        return "train" if self._model.training else "eval"

    @property
    def metrics(self) -> dict[str, list[Any]]:
        """The metrics of this mode."""
        return self._metrics[self.mode]

    # Rows of an evaluation

    @contextlib.contextmanager
    def counting(self, dataloader: Any, generations: int) -> Iterator[_Evaluation]:
        """Context of an evaluation with so many `generations` a prompt, in which it is known which rows are padding."""
        dataset = dataloader.dataset
        shard = dataset if isinstance(dataset, IterableDatasetShard) else None
        rows = None
        if shard is not None:
            counted = shard.dataset = _Counted(shard.dataset)
            rows = counted.so_far
        elif isinstance(dataset, Sized):
            rows = functools.partial(operator.mul, len(dataset), generations)
        self._evaluation = _Evaluation(rows)
        try:
            yield self._evaluation
        finally:
            self._evaluation = None
            if shard is not None:
                shard.dataset = counted.stream

    def begin_batch(self, local_rows: int) -> None:
        """Counts the rows of an evaluation's next batch."""
        evaluation, rows = self._evaluation, local_rows * self.accelerator.num_processes
        if evaluation is not None and evaluation.rows is not None:
            evaluation.real = max(0, min(rows, evaluation.rows() - evaluation.seen))
            evaluation.seen += rows

    def end_batch(self, loss: torch.Tensor) -> torch.Tensor:
        """Returns the mean loss of an evaluation batch over processes, and adds it to the evaluation's. A collective call."""
        loss = self.accelerator.reduce(loss, reduction="mean")
        if self._evaluation is not None:
            self._evaluation.losses.append(Pooled(mean, Moments.alike(loss.item(), self.loss_count)))
        return loss

    def real_rows(self, local_rows: int) -> int:
        """Number of rows of a batch, over all processes, that are no padding. These come first, in the order of the processes."""
        rows = local_rows * self.accelerator.num_processes
        return rows if self._evaluation is None or self._evaluation.real is None else self._evaluation.real

    def are_real(self, local_rows: int) -> torch.Tensor:
        """Mask `(B,)` of the rows of this process that are no padding."""
        first = self.accelerator.process_index * local_rows
        rows = torch.arange(first, first + local_rows, device=self.accelerator.device)
        return rows < self.real_rows(local_rows)

    def mean_of_real(self, loss: torch.Tensor, rows: int) -> torch.Tensor:
        """Scales a loss, a mean over `rows` of this process, so that its mean over processes is that over rows that are no padding, whose
        number `loss_count` becomes. In training there is no padding."""
        self.loss_count = self.real_rows(rows)
        if self._model.training or not self.loss_count:  # padding rows add 0, and do not count
            return loss
        return loss * (rows * self.accelerator.num_processes / self.loss_count)

    # Recording

    def record_moments(self, statistics: dict[str, Callable[[Moments], float]], moments: Moments) -> None:
        """Records statistics, by the name of the metric, of values of all processes with these moments."""
        for name, statistic in statistics.items():
            self.metrics[name].append(Pooled(statistic, moments))

    def gathered(self, moments: Moments) -> Moments:
        """Moments over the values of all processes. A collective call."""
        table = torch.tensor([list(vars(moments).values())], dtype=torch.float32, device=self.accelerator.device)
        return sum((Moments(*row) for row in self.accelerator.gather(table).tolist()), Moments())

    def record_later(self, statistics: dict[str, Callable[..., float]], *values: torch.Tensor) -> None:
        """Records, at [`flush`], statistics of tensors over all processes, without NaN. Processes may have different numbers of values."""
        named = {f"{self.prefix}{name}": statistic for name, statistic in statistics.items()}
        self._waiting.append((named, [Moments.of(x) for x in values]))

    def drop(self) -> None:
        """Discards values that wait for [`flush`], such as those of a step that failed."""
        self._waiting.clear()

    def flush(self) -> None:
        """Gathers and records the values that wait. A collective call."""
        waiting, self._waiting = self._waiting, []
        rows = []
        for _, of_process in waiting:
            if isinstance(of_process, tuple):
                rows.append([*of_process, 0.0, 0.0, 0.0])
            else:
                rows += [list(vars(moments).values()) for moments in of_process]
        if not rows:
            return
        table = torch.tensor([rows], dtype=torch.float32, device=self.accelerator.device)
        of_all = iter(zip(*self.accelerator.gather(table).tolist(), strict=True))  # of each row those of all processes
        for statistics, of_process in waiting:
            if isinstance(of_process, tuple):
                total, tokens = (sum(column) for column in list(zip(*next(of_all), strict=True))[:2])
                moments = [Moments.alike(total / max(tokens, 1), tokens)]
            else:
                moments = [sum((Moments(*row) for row in next(of_all)), Moments()) for _ in of_process]
            for name, statistic in statistics.items():
                self.metrics[name].append(Pooled(statistic, *moments))

    def mean(self, name: str, values: torch.Tensor) -> None:
        """Records the mean of values; NaN is left out."""
        self.record_later({name: mean}, values)

    def token_mean(self, name: str, total: torch.Tensor, tokens: torch.Tensor) -> None:
        """Records a mean over tokens from this process's sum and number of them."""
        of_process = torch.stack([total.detach(), tokens.to(total.dtype)]).tolist()
        self._waiting.append(({f"{self.prefix}{name}": mean}, (of_process[0], of_process[1])))

    def value(self, name: str, value: float) -> None:
        """Records a number that is the same in all processes, as a metric of training."""
        self._metrics["train"][name].append(value)

    def importance(self, prefix: str, log_w: torch.Tensor, scored: torch.Tensor) -> None:
        """
        Records diagnostics of importance weights under names that begin with `prefix`.

        Args:
            log_w (`torch.Tensor` of shape `(P, K)`): Log-weights, −inf for samples without a reward.
            scored (`torch.Tensor` of shape `(P, K)`): Which samples have a reward.
        """
        known = scored.any(dim=1)  # (P,)
        self.record_later({f"{prefix}/ess": mean, f"{prefix}/ess_min": lowest}, effective_sample_size(log_w)[known])
        self.mean(f"{prefix}/max_weight", max_weight_share(log_w)[known])
        log_z = log_z_estimate(log_w, scored)
        self.mean(f"{prefix}/log_z", torch.where(log_z.isinf(), torch.nan, log_z))

    def distinct(self, ids: torch.Tensor, mask: torch.Tensor, rewards: torch.Tensor) -> None:
        """Records the share of distinct completions of a prompt, from tokens and mask `(P, N, T)`; prompts without a reward `(P, N)` are left out."""
        self.mean("completions/distinct", distinct_share(ids, mask)[~rewards.isnan().all(dim=1)])

    def rewards(
        self, names: list[str], per_func: torch.Tensor, rewards: torch.Tensor, threshold: Callable[[], float | None]
    ) -> None:
        """
        Records the rewards of all processes.

        Args:
            names (`list[str]`): Names of the F reward functions.
            per_func (`torch.Tensor` of shape `(B_all, F)`), rewards (`torch.Tensor` of shape `(B_all,)`): Rewards of each function, and
                their weighted sum.
            threshold (`Callable`): Gives the reward under which a sample is bad when the metrics are logged, `None` if it is not known.
        """
        for name, column in zip(names, per_func.T, strict=True):
            self.record_moments({f"rewards/{name}/mean": mean, f"rewards/{name}/std": std}, Moments.of(column))
        self.record_moments({"reward": mean, "reward_std": std}, Moments.of(rewards))
        self.metrics["bad_fraction"].append(ShareUnder(rewards, threshold))

    def record_pending(self, values: dict[str, list[float]], rows: float) -> None:
        """Records and clears what reward functions logged for a batch of this process, of which `rows` count. A collective call."""
        for name in sorted(set(gather_object(list(values)))):  # sorted, so that all processes gather the same one
            average = torch.tensor(values.get(name, []), dtype=torch.float32).nanmean().item()
            self.record_moments({name: mean}, self.gathered(Moments.alike(average, rows)))
        values.clear()

    def lengths(self, lengths: torch.Tensor, truncated: torch.Tensor) -> None:
        """Records lengths (tokens) of completions of this process, `(B,)`, and which were `truncated`."""
        real = self.are_real(len(lengths))
        self.mean("completions/clipped_ratio", truncated[real].float())
        for kind, counted in (("length", real), ("terminated_length", real & ~truncated)):
            statistics = {"mean": mean, "min": lowest, "max": highest}
            names = {f"completions/{name}_{kind}": statistic for name, statistic in statistics.items()}
            self.record_later(names, lengths[counted])

    def weighing(
        self, count: float, samples: float = 0.0, of_samples: tuple[str, ...] = ()
    ) -> contextlib.AbstractContextManager[dict[str, list]]:
        """Context in which TRL's new metrics go to a separate table, which it yields. On exit they join the others as [`Pooled`] metrics of
        `count` samples or tokens of all processes, or of `samples` if their names start with one of `of_samples`."""

        def joined(name: str, value: Any) -> tuple[str, Any]:
            return name, weighted(name, value, samples if name.startswith(of_samples) else count)

        return logged_apart(self._metrics, self.mode, joined)

    # vLLM

    def compare_engine(self, samples: Any, log_p: torch.Tensor, prefix: str = "") -> None:
        """[`engine_gap`] of a [`~trl_repulse.engine.units.CompletionSet`], if an engine drew it; `log_p` `(U, n, T)` are the model's. A
        collective call."""
        if samples.engine_log_p is not None:
            self.engine_gap((samples.engine_log_p - log_p).abs()[samples.mask == 1], prefix)

    def engine_gap(self, gap: torch.Tensor, prefix: str = "") -> None:
        """Records distances (nats) from the engine's log-probabilities, one for each token and NaN without one; warns if they are large on
        average. A collective call."""
        name = f"{prefix}sampling/sampling_logp_difference"
        moments = self.gathered(Moments.of(gap))
        self.record_moments({f"{name}/mean": mean, f"{name}/max": highest}, moments)
        if moments.mean > ENGINE_GAP:
            logger.warning_once(
                "vLLM's log-probabilities of the samples are %.3f nats a token from the trainer's: the engine samples from another "
                "distribution than the model's, and importance weights are off. Give both the same precision (`bf16`, the model's `dtype`).",
                moments.mean,
            )

    def engine_ratio(self, ratio: torch.Tensor, mask: torch.Tensor, prefix: str = "") -> None:
        """Records corrections of the engine's log-probabilities: of tokens `(B, T)`, or of whole completions `(B, 1)`."""
        counted = mask if ratio.shape == mask.shape else self.are_real(len(mask)).unsqueeze(1)
        names = {"min": lowest, "mean": mean, "max": highest}
        names = {f"{prefix}sampling/importance_sampling_ratio/{name}": statistic for name, statistic in names.items()}
        self.record_later(names, ratio[counted])


class Tables:
    """
    Tables of completions of the policy and of extra samples, and the file of negative data.

    Args:
        logs ([`Logs`]): The trainer's metrics, by which rows are counted.
        args ([`~transformers.TrainingArguments`]): The trainer's configuration.
        own (`dict`): TRL's table of the policy's completions.
        reward_names (`list[str]`): Names of the reward functions.
        pending (`dict[str, list]`): Columns that reward functions logged for the latest samples.
        transform (`Callable`): Transforms rewards; whether it does anything is told by `transforms`.
        transforms (`bool`): Whether the policy maximizes transformed rewards.
        step (`Callable`): Gives the number of updates made.
    """

    def __init__(
        self,
        logs: Logs,
        args: Any,
        own: dict[str, Any],
        reward_names: list[str],
        pending: dict[str, list[Any]],
        transform: Callable[[torch.Tensor], torch.Tensor],
        transforms: bool,
        step: Callable[[], int],
    ):
        self._logs, self._args, self._names, self._pending = logs, args, reward_names, pending
        self.own, self.extra = own, copy.deepcopy(own)  # empty as yet
        self._transform, self._transforms, self._step = transform, transforms, step

    def record(self, samples: Any, is_extra: bool = False) -> None:
        """Appends samples of all processes to their table, with the columns that reward functions logged for them; with `save_negatives`,
        also the bad ones to the negative data. All processes must call it."""
        table = self.extra if is_extra else self.own
        real, pending = self._logs.real_rows(len(samples.prompts)), self._pending
        rewards = samples.completion_set.rewards.flatten()
        if len(self._names) > 1:  # a column of the same name that a reward function logged stays
            pending.setdefault("reward", rewards.tolist())
        if self._transforms:
            pending.setdefault("reward_transformed", self._transform(rewards).tolist())
        parts = gather_object([(samples.prompts, samples.completions, dict(pending))])
        pending.clear()
        prompts, completions = ([x for part in parts for x in part[i]][:real] for i in (0, 1))
        table["prompt"].extend(prompts)
        table["completion"].extend(completions)
        for name, column in zip(self._names, samples.rewards_per_func.T, strict=True):
            table["rewards"][name].extend(column[:real].tolist())
        table["advantages"].extend([math.nan] * len(prompts))

        for column in sorted({name for *_, columns in parts for name in columns}):
            values = [x for part in parts for x in part[2].get(column, [None] * len(part[0]))]
            table["extra"][column].extend(values[:real])
        if self._args.save_negatives and self._logs.mode == "train":
            self.append_negatives(prompts, completions, self._logs.accelerator.gather(rewards), is_extra)

    def append_negatives(
        self, prompts: list, completions: list, rewards: torch.Tensor, is_extra: bool = False
    ) -> None:
        """Appends the bad ones among completions of all processes to the negative data, in the main process; `rewards` `(B_all,)` may be NaN."""
        if not self._logs.accelerator.is_main_process:
            return
        rows = zip(prompts, completions, rewards.tolist(), self._transform(rewards).tolist(), strict=True)
        path = Path(self._args.output_dir) / NEGATIVES
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            for prompt, completion, reward, transformed in rows:
                if is_bad(reward, self._args.bad_reward_threshold):
                    row = {"step": self._step(), "source": "proposal" if is_extra else "policy"}
                    row |= {"prompt": prompt, "completion": completion, "reward": reward}
                    if self._transforms:
                        row["reward_transformed"] = transformed
                    file.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")

    def record_advantages(self, rows: torch.Tensor, advantages: torch.Tensor, local: int) -> None:
        """Adds the latest batch's advantages to the policy's table; `rows` are their places among this process's `local` rows, of the same
        shape. All processes must call it."""
        if not self._args.log_completions:
            return
        accelerator = self._logs.accelerator
        rows = accelerator.gather(rows.flatten()).view(accelerator.num_processes, -1)
        advantages = accelerator.gather(advantages.flatten()).view_as(rows)
        column = self.own["advantages"]
        start = len(column) - self._logs.real_rows(local)
        for process in range(accelerator.num_processes):
            for row, advantage in zip(rows[process].tolist(), advantages[process].tolist(), strict=True):
                place = start + process * local + row
                if 0 <= place < len(column):  # evaluation batches may be longer than what is kept, or padded
                    column[place] = advantage

    def trim(self, rows: int) -> None:
        """Removes the last rows, which are padding, from the policy's table."""
        columns = [self.own[name] for name in ("prompt", "completion", "advantages")]
        for column in (*columns, *self.own["rewards"].values(), *self.own["extra"].values()):
            for _ in range(min(rows, len(column))):
                column.pop()

    def show(self, trackers: "Trackers") -> None:
        """Prints the table of extra samples, as TRL does with its own, and sends it with the worst of all samples to the trackers."""
        step, tables = self._step(), {}
        worst: list[tuple[Any, ...]] = []
        for model, logs in (("policy", self.own), ("proposal", self.extra)):
            known: list[Any] = logs["extra"].get("reward") or next(iter(logs["rewards"].values()), [])
            for reward, *texts in zip(known, logs["prompt"], logs["completion"], strict=bool(known)):
                if isinstance(reward, numbers.Real) and not math.isnan(reward):  # a function may log others
                    worst.append((step, model, *map(_text, texts), float(reward)))
        if (logs := self.extra)["prompt"]:
            if is_rich_available():
                extra = {"model": ["proposal"] * len(logs["prompt"]), **logs["extra"]}
                shown = (logs["prompt"], logs["completion"], logs["rewards"], None, step)
                print_prompt_completions_sample(*shown, self._args.num_completions_to_print, extra=extra)
            both = {"prompt": logs["prompt"], "completion": logs["completion"]}
            table = pd.DataFrame({"step": [step] * len(logs["prompt"]), **both, **logs["rewards"], **logs["extra"]})
            if self._args.log_unique_prompts:
                table = table[~table["prompt"].astype(str).duplicated()]
            tables["proposal_completions"] = table
        if worst:  # behind the other tables: trackio shows the last one first
            lowest_first = sorted(worst, key=lambda row: row[-1])[:_WORST]
            columns = ["step", "model", "prompt", "completion", "reward"]
            tables["worst_completions"] = pd.DataFrame(lowest_first, columns=columns)
        trackers.tables(tables, step)


_WORST = 10  # rows of the table of the worst completions


def _text(messages: Any) -> str:
    """A prompt or a completion as text."""
    if isinstance(messages, str):
        return messages
    return "\n\n".join(str(message.get("content") or "") for message in messages)


class Trackers:
    """wandb, trackio and TensorBoard, as far as a run reports to them. For the main process alone, except for [`reopen`]."""

    def __init__(self, args: Any, handler: Any):
        self._args, self._report_to, self._handler = args, args.report_to or [], handler
        self._completions: Any = None  # TensorBoard's writer of completions

    def _of(self, kind: type) -> Any:
        """The Trainer's callback for a tracker."""
        return next((callback for callback in self._handler.callbacks if isinstance(callback, kind)), None)

    def _modules(self) -> Iterator[Any]:
        """The modules of trackers whose runs are open: they have `Table` and `log`."""
        if "wandb" in self._report_to and is_wandb_available():
            import wandb

            if wandb.run is not None:
                yield wandb
        if "trackio" in self._report_to and is_trackio_available():
            import trackio

            yield trackio

    def tables(self, tables: dict[str, pd.DataFrame], step: int) -> None:
        """Sends tables by name; TensorBoard gets the worst completions alone, as a text."""
        for module in self._modules() if tables else ():
            module.log({name: module.Table(dataframe=table) for name, table in tables.items()})
        writer = getattr(self._of(TensorBoardCallback), "tb_writer", None)
        if writer is None or "worst_completions" not in tables:
            return
        # Not among the metrics, which are uploaded with `output_dir`; tables of completions are not
        self._completions = self._completions or type(writer)(str(Path(self._args.output_dir) / "completions"))
        columns = ["model", "reward", "prompt", "completion"]
        rows = tables["worst_completions"][columns].astype(str)
        rows = rows.replace({r"\|": r"\\|", r"\n": "<br>"}, regex=True).values.tolist()
        _write(self._completions, "worst_completions", [columns, ["---"] * 4, *rows], step)

    def alert(self, title: str, text: str, step: int) -> None:
        """Sends an alert."""
        for module in self._modules():
            module.alert(title=title, text=text)
        writer = getattr(self._of(TensorBoardCallback), "tb_writer", None)
        if writer is not None:
            _write(writer, "alert", [[title], ["---"], [text]], step)

    def reopen(self, state: Any, model: nn.Module) -> None:
        """Opens trackio's run again, which ends with training, to report what is measured before or after it."""
        callback = self._of(TrackioCallback)
        if callback is not None and not callback._initialized:
            callback.setup(self._args, state, model)


def _write(writer: Any, name: str, rows: list[list[str]], step: int) -> None:
    """Writes a table as a text of TensorBoard's."""
    writer.add_text(name, "\n".join(f"| {' | '.join(row)} |" for row in rows), step)
    writer.flush()


class Watch:
    """Looks for symptoms in a run's log, and warns of each one once, here and at the trackers."""

    _next = 1  # update from which the log is looked at again

    def __init__(self, args: Any, handler: Any):
        self.trackers, self._args = Trackers(args, handler), args
        self._told: set[str] = set()

    def look(self, state: Any) -> None:
        """Looks at the log of a [`~transformers.TrainerState`]. Reads all of it, and therefore looks ever less often."""
        step = state.global_step
        if step < self._next:
            return
        self._next = max(step + (UPDATES if step >= UPDATES else 1), round(1.1 * step))
        if not RunLog(state.log_history, {}).updates:  # a callback's own log, before any reward or loss
            return
        for finding in diagnose(state.log_history, vars(self._args)).findings:
            early = step < PATIENCE and finding.symptom not in AT_ONCE  # when most symptoms are common
            if finding.symptom not in self._told and not early:
                self._told.add(finding.symptom)
                logger.warning(str(finding))
                if state.is_world_process_zero:
                    title = SYMPTOMS[finding.symptom].title
                    self.trackers.alert(title, str(finding).removeprefix(f"{title}: "), step)
