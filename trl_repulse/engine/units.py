"""One batch, typed: what was drawn, by which sampler, with which rewards, log-probabilities and weights.

This is the only file that spells the keys of the dictionaries that REINFORCE and RePULSe give TRL to shuffle, split and buffer.

Axis letters: P prompts, N policy samples and K extra samples of a prompt, L prompt tokens, T completion tokens. U units of a buffer,
each of n policy samples and m extra samples of one prompt: all of them (n = N) where a micro-batch holds whole prompts, and one
policy sample (n = 1) where it does not.
"""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator

from .._trl import pad
from ..generation.drawing import POLICY, JointDraw, Sampler
from .logs import PROPOSAL_FOLDER, Logs, Tables
from .trl_bridge import sampling_from


OWN, EXTRA = "own", "extra"  # the two sets of samples: the policy's, and those that are drawn for a negative term


@dataclass(frozen=True)
class Shape:
    """
    How the batches of a phase are cut.

    Args:
        training (`bool`): Whether this is training; otherwise it is an evaluation.
        generations (`int`): N, policy samples of a prompt.
        extra (`int`): K, extra samples of a prompt.
        unit (`int`): n, policy samples of a unit.
        whole (`bool`): Whether a unit holds all samples of its prompt.
        early (`bool`): Whether weights are computed when samples are drawn, since a prompt is cut apart or a batch serves several updates, and
            not from the pass with gradient.
        micro_batch (`int`): Policy samples of a micro-batch on one process.
    """

    training: bool
    generations: int
    extra: int
    unit: int
    whole: bool
    early: bool
    micro_batch: int

    @property
    def extra_unit(self) -> int:
        """m, extra samples of a unit."""
        return self.extra * self.unit // self.generations


@dataclass
class CompletionSet:
    """
    Completions of one sampler, in units; of extra samples, n stands for m.

    `mask` is 1 at the tokens that the model wrote, and 0 in rows that do not count: padding, and truncated ones if
    `mask_truncated_completions`. Only these tokens count in log-probabilities of completions, which are in nats, of each token, `(U, n, T)`.
    """

    ids: torch.Tensor  # (U, n, T), right-padded
    mask: torch.Tensor  # (U, n, T)
    rewards: torch.Tensor  # (U, n); NaN without a reward
    attended: torch.Tensor | None = None  # (U, n, T): mask of all tokens, where tools or environments wrote some
    prompt_ids: torch.Tensor | None = None  # (U, n, L): prompts of their own, where environments began otherwise
    prompt_mask: torch.Tensor | None = None  # (U, n, L)
    engine_log_p: torch.Tensor | None = None  # by the vLLM engine, to be compared
    engine_ratio: torch.Tensor | None = None  # (U, n, T) or (U, n, 1): TRL's correction of the engine's probabilities
    log_p: torch.Tensor | None = None  # under the policy that was sampled
    drawn_log_p: torch.Tensor | None = None  # under the sampler or proposal that drew them
    ref_log_p: torch.Tensor | None = None  # under the reference
    values: torch.Tensor | None = None  # (U, n, T): what the rewards of prefixes predict of the whole one
    coefficients: torch.Tensor | None = None  # (U, n): what the negative term multiplies log-probabilities with
    weights: torch.Tensor | None = None  # (U, n): normalized importance weights under the proposal's target
    contrast: torch.Tensor | None = None  # (U, n) or (U, n, T): what a proposal's loss needs of a whole prompt

    @property
    def read(self) -> torch.Tensor:
        """Mask of the tokens that models read, `(U, n, T)`."""
        return self.mask if self.attended is None else self.attended


_KEYS = {  # field -> key, if they differ
    "ids": "completion_ids",
    "mask": "completion_mask",
    "attended": "completion_attended",
    "prompt_ids": "completion_prompt_ids",
    "prompt_mask": "completion_prompt_mask",
    "engine_log_p": "completion_engine_log_p",
    "log_p": "old_log_p",
    "ref_log_p": "ref_log_prob",
    "coefficients": "negative_coefficients",
}
_FIELDS = {field.name: _KEYS.get(field.name, field.name) for field in fields(CompletionSet)}
_PREFIXES = {OWN: "", EXTRA: "proposal_"}


def _set_of(batch: Mapping[str, Any], prefix: str) -> CompletionSet:
    """The set of samples whose keys begin with `prefix`."""
    named = {name: batch.get(f"{prefix}{key}") for name, key in _FIELDS.items()}
    return CompletionSet(**{name: value for name, value in named.items() if value is not None})


@dataclass
class Units:
    """Prompts with the policy's samples and, for a negative term, extra samples; what each step adds to them."""

    prompt_ids: torch.Tensor  # (U, L), left-padded
    prompt_mask: torch.Tensor  # (U, L)
    own: CompletionSet
    extra: CompletionSet | None = None
    advantages: torch.Tensor | None = None  # (U, n), or (U, n, T) with the rewards of prefixes
    returns: torch.Tensor | None = None  # (U, n)
    rows: torch.Tensor | None = None  # (U, n): places among this process's rows of the generation batch

    @classmethod
    def of(cls, batch: Mapping[str, Any]) -> "Units":
        """The units of a dictionary that [`to_batch`] made."""
        extra = _set_of(batch, _PREFIXES[EXTRA]) if f"{_PREFIXES[EXTRA]}{_FIELDS['ids']}" in batch else None
        credit = (batch.get(name) for name in ("advantages", "returns", "rows"))
        return cls(batch["prompt_ids"], batch["prompt_mask"], _set_of(batch, _PREFIXES[OWN]), extra, *credit)

    @classmethod
    def of_rows(cls, rows: Mapping[str, Any]) -> "Units":
        """Units of one policy sample, from a batch of TRL's GRPO trainer and what [`added_to_rows`] added to it."""
        mask = rows["completion_mask"].unsqueeze(1)
        own = CompletionSet(rows["completion_ids"].unsqueeze(1), mask, rows["rewards"].unsqueeze(1))
        if "tool_mask" in rows:
            own.attended, own.mask = mask, mask * rows["tool_mask"].unsqueeze(1)
        # TRL's, or PPO's for its KL penalty
        log_p = rows.get("old_per_token_logps", rows.get("sampling_log_p"))
        own.log_p = None if log_p is None else log_p.unsqueeze(1)
        ratio = rows.get("importance_sampling_ratio")
        own.engine_ratio = None if ratio is None else ratio.unsqueeze(1)
        own.coefficients = rows.get(_FIELDS["coefficients"])
        extra = _set_of(rows, _PREFIXES[EXTRA]) if f"{_PREFIXES[EXTRA]}{_FIELDS['ids']}" in rows else None
        return cls(rows["prompt_ids"], rows["prompt_mask"], own, extra)

    def to_batch(self) -> dict[str, torch.Tensor]:
        """A dictionary of tensors with U first, which TRL can shuffle and split."""
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, torch.Tensor)}
        for which, samples in self.sets().items():
            values = vars(samples).items()
            tensors |= {f"{_PREFIXES[which]}{_FIELDS[name]}": x for name, x in values if x is not None}
        return tensors

    def added_to_rows(self) -> dict[str, torch.Tensor]:
        """The tensors that a negative term adds to a batch of TRL's GRPO trainer, with rows as the first axis."""
        names = [key for key in self.to_batch() if key.startswith(_PREFIXES[EXTRA]) or key == _FIELDS["coefficients"]]
        return {name: x for name, x in self.to_batch().items() if name in names}

    def sets(self) -> dict[str, CompletionSet]:
        """The sets of samples by name."""
        return {OWN: self.own} if self.extra is None else {OWN: self.own, EXTRA: self.extra}

    def split(self, parts: int) -> list["Units"]:
        """Splits the units into this number of parts."""
        batch = self.to_batch()
        chunks = [x.chunk(parts) for x in batch.values()]
        return [Units.of(dict(zip(batch, values, strict=True))) for values in zip(*chunks, strict=True)]

    def with_extra(self, **values: Any) -> "Units":
        """A copy with other fields of the extra samples."""
        return replace(self, extra=replace(self.extra_samples, **values))

    @property
    def extra_samples(self) -> CompletionSet:
        """The extra samples. Raises a `ValueError` if there are none."""
        if self.extra is None:
            raise ValueError("No extra samples were drawn for this batch.")
        return self.extra


def to_prompts(accelerator: Accelerator, units: torch.Tensor, size: int) -> torch.Tensor:
    """`(U, n, ...)` of this process as `(P, size, ...)`, over all processes where prompts are cut apart, which is a collective call."""
    if units.size(1) == size:
        return units
    rows = accelerator.gather(units.flatten(0, 1))
    return rows.view(-1, size, *rows.shape[1:])


def to_units(accelerator: Accelerator, prompts: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The inverse of [`to_prompts`]: `(P, size, ...)` as this process's `(U, n, ...)`, where `like` has the shape `(U, n)`."""
    if prompts.size(1) == like.size(1):
        return prompts
    local = prompts.flatten(0, 1)[local_rows(accelerator, like.numel())]
    return local.view(*like.shape, *prompts.shape[2:])


def local_rows(accelerator: Accelerator, rows: int) -> slice:
    """Where this process's `rows` are among those of all processes."""
    return slice(accelerator.process_index * rows, (accelerator.process_index + 1) * rows)


@dataclass
class Source:
    """
    What draws extra samples.

    Args:
        sampler ([`Sampler`]): How tokens are drawn from the model's logits.
        engine (`torch.nn.Module`, *optional*): Model to draw from; the policy if `None`.
    """

    sampler: Sampler = POLICY
    engine: Any = None


@dataclass
class Samples:
    """Completions drawn for the B local rows of a generation batch, with their rewards."""

    prompts: list  # text or messages, one a row
    completions: list  # in the same form
    prompt_ids: torch.Tensor  # (B, L), left-padded
    prompt_mask: torch.Tensor  # (B, L)
    completion_set: CompletionSet  # in units of n neighbouring rows
    rewards_per_func: torch.Tensor  # (B_all, F), of all processes' rows


class Drawing:
    """
    Draws samples through a trainer's hooks for generation and rewards. All processes call each method.

    A draw passes through [`draw_own`], the trainer's `_generate`, TRL's, and the trainer's `_generate_single_turn`, where `joint` draws extra
    samples in the same call of the model.

    Args:
        trainer ([`~trl.GRPOTrainer`]): Owner of TRL's hooks `_generate` and `_calculate_rewards`.
        logs ([`Logs`]), tables ([`Tables`]): The trainer's metrics and tables.
    """

    def __init__(self, trainer: Any, logs: Logs, tables: Tables):
        self._trainer, self._logs, self._tables = trainer, logs, tables
        self.joint: JointDraw | None = (
            None  # while policy samples and extra ones are drawn in one call; it keeps the extra ones
        )

    # One call of a model for both kinds of samples

    @contextlib.contextmanager
    def together(self, shape: Shape, source: Source | None) -> Iterator[None]:
        """Context in which policy samples are drawn, and the extra ones in the same call of the model where that is possible."""
        if source is None:
            yield
            return
        trainer, sizes = self._trainer, (shape.unit, shape.extra_unit)
        if trainer.use_vllm:
            name = "policy" if source.engine is None else PROPOSAL_FOLDER
            with trainer.vllm_generation.together(name, sizes, source.sampler):
                yield
            return
        # Continuous batching has no temperature of a row; where prompts are drawn one length at a time rows change places.
        # Environments may begin otherwise for each trajectory: what was drawn for the policy's prompts would be dropped
        separate = trainer.args.use_transformers_continuous_batching or trainer._guard.sample_by_length
        if separate or source.engine is not None or trainer.environment_factories is not None:
            yield
            return
        self.joint = JointDraw(*sizes, source.sampler)  # which keeps the extra ones for `draw_extra`
        try:
            yield
        except BaseException:
            self.joint = None
            raise

    # Samples with rewards

    def draw_own(self, rows: list[dict[str, Any]], shape: Shape) -> Units:
        """Draws a policy sample for each row, scores it with the reward functions, and logs it."""
        n = shape.unit
        samples = self._draw(rows, shape, n)
        self._tables.record(samples)
        places = torch.arange(len(rows), device=samples.prompt_ids.device).view(-1, n)
        return Units(samples.prompt_ids[::n], samples.prompt_mask[::n], samples.completion_set, rows=places)

    def draw_extra(self, rows: list[dict[str, Any]], units: Units, shape: Shape, source: Source) -> CompletionSet:
        """
        Draws extra samples for the prompts of a generation batch, scores them with the reward functions, and logs them.

        Args:
            rows (`list[dict]`): This process's rows of the dataset, one a policy sample.
            units ([`Units`]): Their units.
            shape ([`Shape`]): How the batch is cut.
            source ([`Source`]): What draws.
        """
        trainer, n, m = self._trainer, shape.unit, shape.extra_unit
        if m != n:
            rows = [row for row in rows[::n] for _ in range(m)]
        if self.joint is not None:
            self.joint.expect_others()
        self._logs.prefix = f"{PROPOSAL_FOLDER}/"
        try:
            with sampling_from(trainer, source.engine, PROPOSAL_FOLDER, shape.extra, source.sampler):
                with trainer._acting(rows) as acting_rows:
                    samples = self._draw(acting_rows, shape, m)
        finally:
            self.joint, self._logs.prefix = None, ""
        self._tables.record(samples, is_extra=True)
        # Where an environment does not always begin in the same way, extra samples have prompts of their own
        pairs = [(samples.prompt_ids, samples.prompt_mask), (units.prompt_ids, units.prompt_mask)]
        length = max(ids.size(1) for ids, _ in pairs)
        of_samples, of_units = (
            F.pad(ids.masked_fill(mask == 0, -1), (length - ids.size(1), 0), value=-1) for ids, mask in pairs
        )
        if torch.equal(of_samples, of_units.repeat_interleave(m, 0)):
            return samples.completion_set
        prompt_ids, prompt_mask = (x.unflatten(0, (-1, m)) for x in (samples.prompt_ids, samples.prompt_mask))
        return replace(samples.completion_set, prompt_ids=prompt_ids, prompt_mask=prompt_mask)

    def _draw(self, rows: list[dict[str, Any]], shape: Shape, n: int) -> Samples:
        """Draws and rewards one completion a row, in units of n neighbouring rows, and records metrics."""
        trainer, device = self._trainer, self._logs.accelerator.device
        prompts = [row["prompt"] for row in rows]
        prompt_ids, completion_ids, tool_mask, completions, log_probs, *_ = trainer._generate(prompts)
        engine_log_p = trainer.vllm_generation.log_probs if trainer.use_vllm else []  # a reward function may draw too
        if tool_mask is not None and trainer.use_vllm:
            engine_log_p = log_probs  # of all turns
        rewards_per_func = trainer._calculate_rewards(rows, prompts, completions, completion_ids)
        rewards = trainer._weigh_rewards(rewards_per_func)

        def padded(rows: list[list[int]], side: str) -> tuple[torch.Tensor, torch.Tensor]:
            """Token ids and their mask, each (B, length), padded on a side."""
            ids = [torch.tensor(row, dtype=torch.long) for row in rows]
            both = []
            for parts, value in ((ids, trainer._tokenizer.pad_token_id), ([torch.ones_like(row) for row in ids], 0)):
                x = pad(parts, value, side, trainer.pad_to_multiple_of).to(device)
                if side == "right" and shape.unit == 1:  # processes share a prompt: pad to one width
                    x = self._logs.accelerator.pad_across_processes(x, dim=1, pad_index=value)
                both.append(x)
            return both[0], both[1]

        ids, mask = padded(completion_ids, "right")
        tensors = {"ids": ids, "rewards": rewards[local_rows(self._logs.accelerator, len(rows))]}
        if trainer.use_vllm:
            tensors["engine_log_p"] = torch.full(mask.shape, torch.nan, device=device)
            for row, values in zip(tensors["engine_log_p"], engine_log_p, strict=True):
                row[: len(values)] = torch.tensor([torch.nan if value is None else value for value in values])
            self._logs.metrics["sampling/weights_version"].append(trainer.vllm_generation.version)
        if trainer.mask_truncated_completions:
            mask = mask * torch.tensor([trainer._has_ended(row) for row in completion_ids], device=device).unsqueeze(1)
        mask = mask * self._logs.are_real(len(rows)).unsqueeze(1)
        tensors["mask"] = mask
        if tool_mask is not None:
            tensors |= {"attended": mask, "mask": mask * padded(tool_mask, "right")[0]}
        completion_set = CompletionSet(**{name: x.unflatten(0, (-1, n)) for name, x in tensors.items()})
        return Samples(prompts, completions, *padded(prompt_ids, "left"), completion_set, rewards_per_func)
