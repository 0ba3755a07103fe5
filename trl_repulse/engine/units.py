"""One batch, typed: what was drawn, by which sampler, with which rewards, log-probabilities and weights.

This is the only file that spells the keys of the dictionaries that TRL shuffles, splits and buffers.

Axis letters: P prompts, N policy samples and K extra samples of a prompt, L prompt tokens, T completion tokens. U units of a buffer,
each of n policy samples and m extra samples of one prompt: all of them (n = N) where a micro-batch holds whole prompts, and one
policy sample (n = 1) where it does not.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from accelerate import Accelerator


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
        early (`bool`): Whether weights are computed when samples are drawn, and not from the pass with gradient.
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
    def mode(self) -> str:
        """`"train"` or `"eval"`."""
        return "train" if self.training else "eval"

    @property
    def extra_unit(self) -> int:
        """m, extra samples of a unit."""
        return self.extra * self.unit // self.generations


@dataclass
class CompletionSet:
    """
    Completions of one sampler, in units.

    `mask` is 1 at the tokens that the model wrote; only these count in log-probabilities of completions. Log-probabilities are in nats,
    of each token, `(U, n, T)`.
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
    ref_log_p: torch.Tensor | None = None  # (U, n), of completions under the reference
    coefficients: torch.Tensor | None = None  # (U, n): what the negative term multiplies log-probabilities with
    weights: torch.Tensor | None = None  # (U, n): normalized importance weights under the proposal's target
    contrast: torch.Tensor | None = (
        None  # (U, n) or (U, n, T): what the proposal's loss needs of all samples of a prompt
    )

    @property
    def read(self) -> torch.Tensor:
        """Mask of the tokens that models read, `(U, n, T)`."""
        return self.mask if self.attended is None else self.attended


_KEYS = {
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
    named = {name: batch.get(f"{prefix}{key}") for name, key in _FIELDS.items()}
    return CompletionSet(**{name: value for name, value in named.items() if value is not None})


@dataclass
class Units:
    """Prompts with the policy's samples and, for a negative term, extra samples; what each step adds to them."""

    prompt_ids: torch.Tensor  # (U, L), left-padded
    prompt_mask: torch.Tensor  # (U, L)
    own: CompletionSet
    extra: CompletionSet | None = None
    advantages: torch.Tensor | None = None  # (U, n)
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
        """What a negative term adds to a batch of TRL's GRPO trainer, with its rows first."""
        names = [key for key in self.to_batch() if key.startswith(_PREFIXES[EXTRA]) or key == _FIELDS["coefficients"]]
        return {name: x for name, x in self.to_batch().items() if name in names}

    def sets(self) -> dict[str, CompletionSet]:
        """The sets of samples by name."""
        return {OWN: self.own} if self.extra is None else {OWN: self.own, EXTRA: self.extra}

    def split(self, parts: int) -> list["Units"]:
        """As many parts of neighbouring units."""
        batch = self.to_batch()
        chunks = [x.chunk(parts) for x in batch.values()]
        return [Units.of(dict(zip(batch, values, strict=True))) for values in zip(*chunks, strict=True)]

    def with_extra(self, **values: Any) -> "Units":
        """A copy with other fields of the extra samples."""
        return replace(self, extra=replace(self.extra_samples, **values))

    @property
    def extra_samples(self) -> CompletionSet:
        """The extra samples, where there must be some."""
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
