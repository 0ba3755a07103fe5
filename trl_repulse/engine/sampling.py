"""Drawing: completions of the policy, of another model, or by another sampler, for the rows of a generation batch, with their rewards.

Axis letters: P prompts, N policy samples and K extra samples of a prompt, B rows of a generation batch on one process, L prompt
tokens, T completion tokens, F reward functions. U units of n policy samples and m extra samples.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from ..generation._samplers import POLICY, JointDraw, Sampler
from .logs import Logs, Tables
from .second_model import PROPOSAL_FOLDER
from .trl_bridge import pad, sampling_from
from .units import CompletionSet, Shape, Units, local_rows


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
    completion_ids: torch.Tensor  # (B, T), right-padded
    completion_mask: torch.Tensor  # (B, T): 1 at the tokens that the model wrote
    rewards: torch.Tensor  # (B,), weighted; NaN where no reward function gave one
    rewards_per_func: torch.Tensor  # (B_all, F), of all processes' rows
    engine_log_p: torch.Tensor | None = None  # (B, T), nats, by a vLLM engine, to be compared, not used
    attended: torch.Tensor | None = None  # (B, T), mask of all tokens, where tools may have written some

    def in_units(self, n: int) -> CompletionSet:
        """Completions in units of n neighbouring rows."""
        named = {
            "ids": self.completion_ids,
            "mask": self.completion_mask,
            "rewards": self.rewards,
            "attended": self.attended,
            "engine_log_p": self.engine_log_p,
        }
        return CompletionSet(**{name: x.unflatten(0, (-1, n)) for name, x in named.items() if x is not None})


def own_prompts(samples: Samples, units: Units, m: int) -> dict[str, torch.Tensor]:
    """
    Prompts of extra samples, m for each unit, `(U, m, L)`, if they differ from those of the units.

    Prompts differ where an environment does not always begin in the same way.
    """
    pairs = [(samples.prompt_ids, samples.prompt_mask), (units.prompt_ids, units.prompt_mask)]
    length = max(ids.size(1) for ids, _ in pairs)
    of_samples, of_units = (
        F.pad(ids.masked_fill(mask == 0, -1), (length - ids.size(1), 0), value=-1) for ids, mask in pairs
    )
    if torch.equal(of_samples, of_units.repeat_interleave(m, 0)):
        return {}
    named = {"prompt_ids": samples.prompt_ids, "prompt_mask": samples.prompt_mask}
    return {name: x.unflatten(0, (-1, m)) for name, x in named.items()}


class Drawing:
    """
    Draws samples through a trainer's hooks for generation and rewards.

    All processes call each method.

    Args:
        trainer ([`~trl.GRPOTrainer`]): Owner of TRL's hooks `_generate` and `_calculate_rewards`.
        logs ([`Logs`]), tables ([`Tables`]): The trainer's metrics and tables.
    """

    def __init__(self, trainer: Any, logs: Logs, tables: Tables):
        self._trainer, self._logs, self._tables = trainer, logs, tables
        self._joint: JointDraw | None = None  # while policy samples and extra ones are drawn in one call

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
        self._joint = JointDraw(*sizes, source.sampler)  # which keeps the extra ones for `draw_extra`
        try:
            yield
        except BaseException:
            self._joint = None
            raise

    def generate_single_turn(self, prompt_ids: list[list[int]], generate: Callable[..., Any]) -> Any:
        """What TRL's hook returns for prompts; `generate` takes prompts and, as `drawn_by`, which rows another sampler draws."""
        return generate(prompt_ids) if self._joint is None else self._joint.draw(prompt_ids, generate)

    # Samples with rewards

    def draw_own(self, rows: list[dict[str, Any]], shape: Shape) -> Units:
        """Draws a policy sample for each row, scores it with the reward functions, and logs it."""
        samples = self._draw(rows, shape)
        self._tables.record(samples)
        n = shape.unit
        places = torch.arange(len(rows), device=samples.rewards.device).view(-1, n)
        return Units(samples.prompt_ids[::n], samples.prompt_mask[::n], samples.in_units(n), rows=places)

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
        if self._joint is not None:
            self._joint.expect_others()
        self._logs.prefix = f"{PROPOSAL_FOLDER}/"
        try:
            with sampling_from(trainer, source.engine, PROPOSAL_FOLDER, shape.extra, source.sampler):
                with trainer._acting(rows) as acting_rows:
                    samples = self._draw(acting_rows, shape)
        finally:
            self._joint, self._logs.prefix = None, ""
        self._tables.record(samples, is_extra=True)
        extra = samples.in_units(m)
        for name, prompts in own_prompts(samples, units, m).items():
            setattr(extra, name, prompts)
        return extra

    def _draw(self, rows: list[dict[str, Any]], shape: Shape) -> Samples:
        """Draws one completion a row, and records metrics."""
        trainer, device = self._trainer, self._logs.accelerator.device
        prompts = [row["prompt"] for row in rows]
        prompt_ids, completion_ids, tool_mask, completions, log_probs, *_ = trainer._generate(prompts)
        engine_log_p = trainer.vllm_generation.log_probs if trainer.use_vllm else []  # a reward function may draw too
        if tool_mask is not None and trainer.use_vllm:
            engine_log_p = log_probs  # of all turns
        rewards_per_func = trainer._calculate_rewards(rows, prompts, completions, completion_ids)
        rewards = trainer._weigh_rewards(rewards_per_func)

        def padded(rows: list[list[int]], side: str) -> tuple[torch.Tensor, torch.Tensor]:
            ids = [torch.tensor(row, dtype=torch.long) for row in rows]
            both = []
            for parts, value in ((ids, trainer._tokenizer.pad_token_id), ([torch.ones_like(row) for row in ids], 0)):
                x = pad(parts, value, side, trainer.pad_to_multiple_of).to(device)
                if side == "right" and shape.unit == 1:  # tokens of one prompt meet over processes
                    x = self._logs.accelerator.pad_across_processes(x, dim=1, pad_index=value)
                both.append(x)
            return both[0], both[1]

        samples = Samples(
            prompts,
            completions,
            *padded(prompt_ids, "left"),
            *padded(completion_ids, "right"),
            rewards[local_rows(self._logs.accelerator, len(rows))],
            rewards_per_func,
        )
        if trainer.use_vllm:
            samples.engine_log_p = torch.full(samples.completion_mask.shape, torch.nan, device=device)
            for row, values in zip(samples.engine_log_p, engine_log_p, strict=True):
                row[: len(values)] = torch.tensor([torch.nan if value is None else value for value in values])
            self._logs.metrics["sampling/weights_version"].append(trainer.vllm_generation.version)
        if trainer.mask_truncated_completions:
            complete = torch.tensor([trainer._has_ended(row) for row in completion_ids], device=device)
            samples.completion_mask = samples.completion_mask * complete.unsqueeze(1)
        samples.completion_mask = samples.completion_mask * self._logs.are_real(len(rows)).unsqueeze(1)
        if tool_mask is not None:
            samples.attended = samples.completion_mask
            samples.completion_mask = samples.attended * padded(tool_mask, "right")[0]
        return samples
