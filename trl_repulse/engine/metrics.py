"""What our trainers log of samples and tokens, pooled over the batches since the last log and over processes.

TRL logs the mean over batches of what each batch gave, in which a sample of a small batch counts more than others.
"""

import contextlib
import functools
import math
import operator
from collections.abc import Callable, Iterator, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate.data_loader import IterableDatasetShard
from accelerate.logging import get_logger
from accelerate.utils import gather_object

from .._numbers import is_bad
from ..data._checks import check_eval_batch, check_rewards
from ..data._texts import completion_texts
from ..math.importance import distinct_share
from .diagnosis import AT_ONCE, UPDATES, diagnose
from .trl_bridge import logged_apart


logger = get_logger(__name__)


@dataclass(frozen=True)
class Moments:
    """Number of some values, their mean, sum of squared distances from it, smallest and largest. Two add up to that of all."""

    count: float = 0.0
    mean: float = 0.0
    squares: float = 0.0
    low: float = math.inf
    high: float = -math.inf

    @classmethod
    def of(cls, values: torch.Tensor) -> "Moments":
        """Of a tensor's values; NaN counts for nothing."""
        values = values.detach().flatten().cpu().double()
        values = values[~values.isnan()]
        if not len(values):
            return cls()
        squares = (values - values.mean()).square().sum()
        return cls(len(values), *(x.item() for x in (values.mean(), squares, values.min(), values.max())))

    @classmethod
    def alike(cls, value: float, count: float) -> "Moments":
        """Of `count` values of which the mean alone is known; NaN counts for nothing."""
        return cls() if math.isnan(value) or count <= 0 else cls(count, value, 0.0, value, value)

    def __add__(self, other: "Moments") -> "Moments":
        count = self.count + other.count
        if not count:
            return self
        gap, share = other.mean - self.mean, other.count / count
        return Moments(
            count,
            self.mean + gap * share,
            self.squares + other.squares + gap * gap * share * self.count,
            min(self.low, other.low),
            max(self.high, other.high),
        )


def mean(values: Moments) -> float:
    """The mean; NaN of no values."""
    return values.mean if values.count else math.nan


def std(values: Moments) -> float:
    """The unbiased standard deviation; NaN of fewer than two values."""
    return math.sqrt(values.squares / (values.count - 1)) if values.count > 1 else math.nan


def lowest(values: Moments) -> float:
    """The smallest value; NaN of none."""
    return values.low if values.count else math.nan


def highest(values: Moments) -> float:
    """The largest value; NaN of none."""
    return values.high if values.count else math.nan


def share_explained(targets: Moments, errors: Moments) -> float:
    """1 − Var(errors) / Var(targets): 1 is perfect, 0 no better than a constant; NaN where the targets do not vary."""
    return 1 - errors.squares / targets.squares if targets.squares > 0 else math.nan


class Pooled(float):
    """A metric of one batch, as a number that `statistic` makes of moments, which knows how to become that of several batches."""

    def __new__(cls, statistic: Callable[..., float], *moments: Moments):
        metric = super().__new__(cls, statistic(*moments))
        metric.statistic, metric.moments = statistic, moments
        return metric


class ShareUnder(Pooled):
    """
    Share of one batch's `rewards` (B_all,) under a `threshold`, which may come to be known until it is logged; NaN where it is `None`. NaN
    among the rewards counts for nothing.
    """

    def __new__(cls, rewards: torch.Tensor, threshold: Callable[[], float | None]):
        metric = float.__new__(cls, math.nan)
        metric.statistic, metric._rewards, metric._threshold = mean, rewards, threshold
        return metric

    @property
    def moments(self) -> tuple[Moments]:
        threshold = self._threshold()
        if threshold is None:
            return (Moments(),)
        return (Moments.of(is_bad(self._rewards, threshold).float().masked_fill(self._rewards.isnan(), math.nan)),)


def pool(metrics: Sequence[Pooled]) -> float:
    """One metric of all batches, at least one, over all their values together."""
    totals = [sum(batches[1:], batches[0]) for batches in zip(*(metric.moments for metric in metrics), strict=True)]
    return metrics[0].statistic(*totals)


def pool_all(metrics: dict[str, list[Any]]) -> None:
    """
    Leaves one value, in place, of each metric that is [`Pooled`], and none of one of which nothing is known, for which TRL (1.16) would
    log `None`. What is not stays as it is, for TRL's mean over batches.
    """
    for name, values in list(metrics.items()):
        if values and all(isinstance(value, Pooled) for value in values):
            metrics[name] = [pool(values)]
            if math.isnan(metrics[name][0]):
                del metrics[name]


def drop_batch_means(metrics: dict[str, list[Any]], *prefixes: str) -> None:
    """Takes TRL's values, of one batch whatever it is filled up with, out of the metrics with these beginnings, in place."""
    for name in metrics:
        if name.startswith(prefixes):
            metrics[name] = [value for value in metrics[name] if isinstance(value, Pooled)]


def weighted(name: str, value: float, count: float) -> Pooled:
    """A metric that TRL has taken of one batch, of `count` samples or tokens of all processes; its name tells minima and maxima."""
    statistic = lowest if name.endswith("min") else highest if name.endswith("max") else mean
    return value if isinstance(value, Pooled) else Pooled(statistic, Moments.alike(value, count))


_CONSTANT = 10  # batches of equal rewards after which a function is warned of


@dataclass
class _Evaluation:
    """An evaluation under way: its rows, as far as they can be told, those seen, those of the batch, and the losses."""

    rows: Callable[[], int] | None
    seen: int = 0
    real: int | None = None
    losses: list[Pooled] = field(default_factory=list)


class _Counted:
    """A stream of rows that counts those it has given."""

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


class PooledMetrics:
    """
    Mixin before a TRL trainer that samples: all samples (or tokens, or prompts) since the last log count the same in a metric. Rows with
    which accelerate fills up the last batch of an evaluation take part in nothing.
    """

    _evaluation: _Evaluation | None = None
    _next_look = 1  # update from which the log is looked at again
    _told: frozenset[str] = frozenset()  # symptoms
    _loss_count: float  # samples or tokens of all processes that the latest loss is a mean of

    # Evaluation

    def evaluation_loop(
        self, dataloader, description, prediction_loss_only=None, ignore_keys=None, metric_key_prefix="eval"
    ):
        check_eval_batch(self.args)
        metrics = self._metrics["eval"]
        metrics.clear()  # of an evaluation that failed
        with self._counting(dataloader) as evaluation:
            output = super().evaluation_loop(
                dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
            )
        if evaluation.losses:  # transformers (5.23) counts prompts in the last batch, though its rows are completions
            output.metrics[f"{metric_key_prefix}_loss"] = pool(evaluation.losses)
        # Here, since TRL's `log` (1.16) begins the names of all evaluation sets with `eval_`
        pool_all(metrics)
        for name, values in metrics.items():
            known = [value for value in values if not math.isnan(value)]
            output.metrics[f"{metric_key_prefix}_{name}"] = sum(known) / len(known) if known else None
        metrics.clear()
        return output

    @contextlib.contextmanager
    def _counting(self, dataloader: Any) -> Iterator[_Evaluation]:
        """Context in which it is known which rows only fill up the last batch, so that each process has as many."""
        dataset = dataloader.dataset
        shard = dataset if isinstance(dataset, IterableDatasetShard) else None
        rows = None
        if shard is not None:
            counted = shard.dataset = _Counted(shard.dataset)
            rows = counted.so_far
        elif isinstance(dataset, Sized):
            rows = functools.partial(operator.mul, len(dataset), self.num_generations_eval)
        self._evaluation = _Evaluation(rows)
        try:
            yield self._evaluation
        finally:
            self._evaluation = None
            if shard is not None:
                shard.dataset = counted.stream

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        evaluation, rows = self._evaluation, len(inputs) * self.accelerator.num_processes
        if evaluation is not None and evaluation.rows is not None:
            evaluation.real = max(0, min(rows, evaluation.rows() - evaluation.seen))
            evaluation.seen += rows
        loss, *rest = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        loss = self.accelerator.reduce(loss, reduction="mean")
        if evaluation is not None:
            evaluation.losses.append(Pooled(mean, Moments.alike(loss.item(), self._loss_count)))
        return loss, *rest

    def _real_rows(self, local_rows: int) -> int:
        """How many of all processes' rows of a batch, the first ones, do not merely fill it up."""
        rows = local_rows * self.accelerator.num_processes
        return rows if self._evaluation is None or self._evaluation.real is None else self._evaluation.real

    def _are_real(self, local_rows: int) -> torch.Tensor:
        """Which of this process's (B,) rows do not merely fill up the batch."""
        first = self.accelerator.process_index * local_rows
        rows = torch.arange(first, first + local_rows, device=self.accelerator.device)
        return rows < self._real_rows(local_rows)

    def _mean_of_real(self, loss: torch.Tensor, rows: int) -> torch.Tensor:
        """A loss that is a mean over a batch's `rows` of this process as one over those that do not merely fill it up."""
        self._loss_count = self._real_rows(rows)
        if self.model.training or not self._loss_count:  # rows that fill up a batch add 0, and do not count
            return loss
        return loss * (rows * self.accelerator.num_processes / self._loss_count)

    # Recording

    def _record(self, statistics: dict[str, Callable[[Moments], float]], moments: Moments) -> None:
        """Records metrics, each a statistic, of values of all processes whose moments are given."""
        metrics = self._metrics["train" if self.model.training else "eval"]
        for name, statistic in statistics.items():
            metrics[name].append(Pooled(statistic, moments))

    def _gathered(self, moments: Moments) -> Moments:
        """Moments of all processes' values from those of each."""
        table = torch.tensor([list(vars(moments).values())], dtype=torch.float32, device=self.accelerator.device)
        return sum((Moments(*row) for row in self.accelerator.gather(table).tolist()), Moments())

    def _gathered_moments(self, values: torch.Tensor) -> Moments:
        """Moments of all processes' values, of which each may have another number; NaN counts for nothing."""
        return self._gathered(Moments.of(values))

    def _log_mean(self, name: str, values: torch.Tensor) -> None:
        """Logs the mean over all processes, without the samples that have no reward."""
        self._record({name: mean}, self._gathered_moments(values))

    def _log_token_mean(self, name: str, total: torch.Tensor, tokens: torch.Tensor) -> None:
        """Logs a mean over tokens from this process's sum and number of them."""
        total, tokens = self.accelerator.reduce(torch.stack([total.detach(), tokens.to(total.dtype)])).tolist()
        self._record({name: mean}, Moments.alike(total / max(tokens, 1), tokens))

    def _weighing(
        self, count: float, samples: float | None = None, of_samples: tuple[str, ...] = ()
    ) -> contextlib.AbstractContextManager[dict[str, list]]:
        """
        Context in which what TRL logs, which it gives, is of `count` samples or tokens of all processes, and where its name begins as one
        in `of_samples` of so many `samples`.
        """
        mode = "train" if self.model.training else "eval"

        def joined(name: str, value: Any) -> tuple[str, Any]:
            return name, weighted(name, value, samples if name.startswith(of_samples) else count)

        return logged_apart(self._metrics, mode, joined)

    # What TRL logs of batches, filled up as they are

    def _generate(self, prompts: list):
        real = self._are_real(len(prompts))
        with self._weighing(self._real_rows(len(prompts))) as metrics:
            generated = super()._generate(prompts)
            drop_batch_means(metrics, "completions/")
            if "tools/failure_frequency" in metrics:  # of calls
                calls = metrics["tools/call_frequency"][-1] * len(real) * self.accelerator.num_processes
                failed = metrics["tools/failure_frequency"].pop()
                metrics["tools/failure_frequency"].append(Pooled(mean, Moments.alike(failed, calls)))
        if isinstance(prompts[0], str):  # TRL (1.16) decodes completions by themselves
            texts = completion_texts(self._tokenizer, prompts, *generated[:2])
            generated = (*generated[:3], texts, *generated[4:])
        ends = [*self.eos_token_ids, self._tokenizer.pad_token_id]
        truncated = torch.tensor([ids[-1] not in ends for ids in generated[1]], device=real.device)
        # Of tokens, or of marks: 1 where the model wrote, not a tool
        lengths = (
            [len(ids) for ids in generated[1]] if generated[2] is None else [sum(marks) for marks in generated[2]]
        )
        lengths = torch.tensor(lengths, dtype=torch.float32, device=real.device)
        self._log_mean("completions/clipped_ratio", truncated[real].float())
        for kind, counted in (("length", real), ("terminated_length", real & ~truncated)):
            statistics = {"mean": mean, "min": lowest, "max": highest}
            names = {f"completions/{name}_{kind}": statistic for name, statistic in statistics.items()}
            self._record(names, self._gathered_moments(lengths[counted]))
        return generated

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        rewards_per_func = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        are_models = [isinstance(function, torch.nn.Module) for function in self.reward_funcs]
        check_rewards(rewards_per_func, self.reward_func_names, are_models)
        # Like a sample without a reward, a row that fills up the batch takes part in nothing
        rewards_per_func[self._real_rows(len(prompts)) :] = torch.nan
        # What the functions logged, each value of a batch of this process; sorted, so that all gather the same one
        rows = self._are_real(len(prompts)).sum().item()
        for name in sorted(set(gather_object(list(self._pending_metrics)))):
            values = torch.tensor(self._pending_metrics.get(name, []), dtype=torch.float32)
            self._record({name: mean}, self._gathered(Moments.alike(values.nanmean().item(), rows)))
        self._pending_metrics.clear()
        self._rewards_per_func = rewards_per_func  # (B_all, F)
        return rewards_per_func

    def _weigh_rewards(self, rewards_per_func: torch.Tensor) -> torch.Tensor:
        """
        Weighted rewards of all processes, (B_all,), from the functions' (B_all, F), which are logged: NaN where no function gave one,
        which is not a reward of 0.
        """
        rewards = (rewards_per_func * self.reward_weights.to(rewards_per_func.device)).nansum(dim=1)
        rewards[rewards_per_func.isnan().all(dim=1)] = torch.nan
        for name, column in zip(self.reward_func_names, rewards_per_func.T, strict=True):
            self._record({f"rewards/{name}/mean": mean, f"rewards/{name}/std": std}, Moments.of(column))
            self._note_constant(name, column[~column.isnan()])
        self._record({"reward": mean, "reward_std": std}, Moments.of(rewards))
        metrics = self._metrics["train" if self.model.training else "eval"]
        metrics["bad_fraction"].append(ShareUnder(rewards, lambda: self.bad_reward_threshold))
        return rewards

    @functools.cached_property
    def _constant(self) -> dict[str, tuple[float, float, int]]:
        """Of each reward function its first reward, for how many batches it was the only one (∞ if it is not), and of how many samples."""
        return {}

    def _note_constant(self, name: str, rewards: torch.Tensor) -> None:
        """Warns once of a function whose rewards in training, of all processes, were all the same for so many batches."""
        if not self.model.training or not len(rewards):
            return
        first, batches, count = self._constant.get(name, (rewards[0].item(), 0, 0))
        batches = batches + 1 if (rewards == first).all() else math.inf
        self._constant[name] = first, batches, count + len(rewards)
        if batches == _CONSTANT:
            logger.warning(
                f"The reward function '{name}' gave all {count + len(rewards)} completions so far the reward {first:g}, from which nothing is "
                "learned. See whether it reads what it should: of a conversation a completion is a list of messages, with the text in "
                "`completion[0]['content']`."
            )

    def _log_distinct(self, ids: torch.Tensor, mask: torch.Tensor, rewards: torch.Tensor) -> None:
        """Logs how many of a prompt's completions, tokens and mask `(P, N, T)`, are distinct; prompts without a reward `(P, N)` are left out."""
        self._log_mean("completions/distinct", distinct_share(ids, mask)[~rewards.isnan().all(dim=1)])

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        pool_all(self._metrics["train" if self.model.training else "eval"])
        super().log(logs, start_time)
        step = self.state.global_step
        if self.model.training and step >= self._next_look:
            # Reads the whole log, and therefore ever less often
            self._next_look = max(step + (UPDATES if step >= UPDATES else 1), round(1.1 * step))
            for finding in diagnose(self.state.log_history, vars(self.args)).findings:
                if finding.symptom in AT_ONCE and finding.symptom not in self._told:
                    logger.warning(str(finding))
                    self._told |= {finding.symptom}
