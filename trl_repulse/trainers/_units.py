"""Batches in units: drawing completions from any of a trainer's models, scoring them, and prompts that are cut apart.

Axis letters: P prompts, N completions per prompt, B rows of a generation batch, L prompt tokens, T completion tokens. U units
of a buffer that TRL shuffles and splits into micro-batches, each of n of a prompt's completions: all of them (n = N) where a
micro-batch holds whole prompts, a single one (n = 1) where it does not. R rows of a pass.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from .._checks import check_rows
from ..generation._ahead import Ahead, rows_at
from ..importance import sequence_log_prob
from ..losses import policy_gradient_loss
from ._hooks import TrainerHooks
from ._scoring import Scores, tempered_log_probs, token_log_probs
from ._trl_bridge import disable_gradient_checkpointing, pad, use_reference


@dataclass
class Samples:
    """
    Completions drawn for the B local rows of a generation batch, with their rewards.

    Args:
        prompts (`list`): Prompts, text or messages, one a row.
        completions (`list`): Completions in the same form.
        prompt_ids, prompt_mask (`torch.Tensor` of shape `(B, L)`): Left-padded prompts.
        completion_ids, completion_mask (`torch.Tensor` of shape `(B, T)`): Right-padded completions.
        rewards (`torch.Tensor` of shape `(B,)`): Weighted rewards; NaN where no reward function gave one.
        rewards_per_func (`torch.Tensor` of shape `(B_all, F)`): The functions' rewards of all processes' rows.
        engine_log_p (`torch.Tensor` of shape `(B, T)`, *optional*): What a vLLM engine says of the tokens' log-probabilities
            (nats), to be compared and not to be used.
    """

    prompts: list
    completions: list
    prompt_ids: torch.Tensor
    prompt_mask: torch.Tensor
    completion_ids: torch.Tensor
    completion_mask: torch.Tensor
    rewards: torch.Tensor
    rewards_per_func: torch.Tensor
    engine_log_p: torch.Tensor | None = None

    def in_units(self, n: int, prefix: str = "") -> dict[str, torch.Tensor]:
        """Completions in units of n neighbouring rows, by name: tokens `(U, n, T)`, rewards `(U, n)`."""
        named = {
            "completion_ids": self.completion_ids,
            "completion_mask": self.completion_mask,
            "rewards": self.rewards,
            "completion_engine_log_p": self.engine_log_p,
        }
        return {f"{prefix}{name}": x.unflatten(0, (-1, n)) for name, x in named.items() if x is not None}


class UnitSampling(TrainerHooks):
    """
    Mixin before a TRL trainer: completions drawn and scored in units, on which a negative term stands.
    """

    # Two sets of completions in one call of the policy: the policy's own are about to be drawn; the others have been
    _ahead: Ahead | None = None
    _kept: Ahead | None = None

    # Sampling

    def _generate_single_turn(self, prompt_ids: list[list[int]], *args: Any, **kwargs: Any):
        kept, self._kept = self._kept, None
        if kept is not None and (others := kept.take(prompt_ids)) is not None:
            return others
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            return super()._generate_single_turn(prompt_ids, *args, **kwargs)
        rows, temperatures = ahead.widened(prompt_ids)
        with rows_at(self.accelerator.unwrap_model(self.model_wrapped), temperatures):
            return ahead.keep(rows, super()._generate_single_turn(rows, *args, **kwargs))

    def _draw(self, inputs: list[dict[str, Any]]) -> Samples:
        """Draws one completion a row, scores it, and logs rewards."""
        mode = "train" if self.model.training else "eval"
        device = self.accelerator.device
        check_rows(inputs)
        prompts = [row["prompt"] for row in inputs]
        prompt_ids, completion_ids, _, completions, *_ = self._generate(prompts)
        engine_log_p = self.vllm_generation.log_probs if self.use_vllm else []  # a reward function may draw too
        rewards_per_func = self._calculate_rewards(inputs, prompts, completions, completion_ids)
        rewards = self._weigh_rewards(rewards_per_func)

        def padded(rows: list[list[int]], side: str) -> tuple[torch.Tensor, torch.Tensor]:
            values = (self._tokenizer.pad_token_id, 0)
            ids = pad([torch.tensor(row, dtype=torch.long) for row in rows], values[0], side, self.pad_to_multiple_of)
            position = torch.arange(ids.size(1)) if side == "right" else torch.arange(ids.size(1) - 1, -1, -1)
            mask = (position < torch.tensor([len(row) for row in rows]).unsqueeze(1)).long()
            both = [ids.to(device), mask.to(device)]
            if side == "right" and self._unit_size(mode) == 1:  # tokens of one prompt meet over processes
                both = [
                    self.accelerator.pad_across_processes(x, dim=1, pad_index=value)
                    for x, value in zip(both, values, strict=True)
                ]
            return both[0], both[1]

        samples = Samples(
            prompts,
            completions,
            *padded(prompt_ids, "left"),
            *padded(completion_ids, "right"),
            rewards[self._local_rows(len(inputs))],
            rewards_per_func,
        )
        if self.use_vllm:
            samples.engine_log_p = self._engine_log_probs(engine_log_p, samples.completion_mask)
            self._metrics[mode]["sampling/weights_version"].append(self.vllm_generation.version)
        if self.mask_truncated_completions:
            ends = [*self.eos_token_ids, self._tokenizer.pad_token_id]
            complete = torch.tensor([row[-1] in ends for row in completion_ids], device=device)
            samples.completion_mask = samples.completion_mask * complete.unsqueeze(1)
        samples.completion_mask = samples.completion_mask * self._are_real(len(inputs)).unsqueeze(1)
        return samples

    def _num_generations(self, mode: str) -> int:
        return self.num_generations if mode == "train" else self.num_generations_eval

    def _unit_size(self, mode: str) -> int:
        """n: all N completions of a prompt where each micro-batch of each process holds whole prompts, else 1."""
        n = self._num_generations(mode)
        return n if self._micro_batch_size() % n == 0 else 1

    def _local_rows(self, rows: int) -> slice:
        return slice(self.accelerator.process_index * rows, (self.accelerator.process_index + 1) * rows)

    def _to_prompts(self, units: torch.Tensor, generations: int) -> torch.Tensor:
        """(U, n, ...) of this process to (P, N, ...), over all processes where prompts are cut into units of one."""
        if units.size(1) == generations:
            return units
        rows = self.accelerator.gather(units.flatten(0, 1))
        return rows.view(-1, generations, *rows.shape[1:])

    def _to_units(self, prompts: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """The inverse of [`_to_prompts`]: (P, N, ...) to this process's (U, n, ...), (U, n) being the shape of `like`."""
        if prompts.size(1) == like.size(1):
            return prompts
        local = prompts.flatten(0, 1)[self._local_rows(like.numel())]
        return local.view(*like.shape, *prompts.shape[2:])

    # Scoring

    def _score(
        self,
        model: torch.nn.Module,
        batch: dict[str, torch.Tensor],
        names: tuple[str, ...] = ("completion",),
        gradient: bool = True,
        temperature: float | None = None,
    ) -> tuple[list[torch.Tensor] | torch.Tensor, ...]:
        """
        Per-token log-probabilities of sets of completions to the same prompts, in one forward pass.

        Args:
            model (`torch.nn.Module`):
                Model to score with.
            batch (`dict[str, torch.Tensor]`):
                `prompt_ids` and `prompt_mask` of shape `(U, L)`; for each name, `{name}_ids` and `{name}_mask` of
                shape `(U, n, T)`, where n and T may differ from name to name.
            names (`tuple[str, ...]`):
                Sets of completions to score.
            gradient (`bool`):
                Whether the pass carries gradient. Without, rows are scored in chunks of the micro-batch's size or, where they share
                prompts, of whole units.
            temperature (`float`, *optional*):
                Another temperature than that of training, for a pass without gradient.

        Returns:
            A `(U, n, T)` tensor of log-probabilities (nats) for each name, then the entropies (nats) of the first
            name's tokens, which a pass with gradient through the policy gives, and the auxiliary loss of a
            mixture-of-experts model; each `None` otherwise.
        """
        width = max(batch[f"{name}_ids"].size(2) for name in names)  # T

        def joined(kind: str, value: int) -> torch.Tensor:
            parts = [batch[f"{name}_{kind}"] for name in names]
            return torch.cat([F.pad(part, (0, width - part.size(2)), value=value) for part in parts], dim=1)

        ids, mask = joined("ids", self._tokenizer.pad_token_id), joined("mask", 0)  # (U, Σn, T)
        n = ids.size(1)
        layout = self._layout(batch["prompt_ids"].size(1), width, n)
        rows = layout.rows(batch["prompt_ids"], ids), layout.rows(batch["prompt_mask"], mask)  # (R, S) each

        def log_probs(ids: torch.Tensor, mask: torch.Tensor) -> Scores:
            cut = replace(layout, prompt=ids.size(1) - layout.count * width)
            if temperature is not None:
                return tempered_log_probs(model, self.accelerator, ids, mask, cut, temperature)
            return token_log_probs(model, self.accelerator, ids, mask, cut, gradient and self.aux_loss_enabled)

        if gradient:
            log_p, entropy, aux_loss = self._by_length(log_probs, *rows)
        else:
            size = self._micro_batch_size()
            if self._guard.share_prompts:  # whole units, so that all processes make as many passes
                size = max(1, size // n) * (n // layout.count)
            with torch.no_grad(), disable_gradient_checkpointing(model, self.args.gradient_checkpointing_kwargs):
                chunks = [
                    self._by_length(log_probs, *chunk)[0] for chunk in zip(*(x.split(size) for x in rows), strict=True)
                ]
            log_p, entropy, aux_loss = torch.cat(chunks), None, None
        sizes = [batch[f"{name}_ids"].size(1) for name in names]
        scores = [
            part[..., : batch[f"{name}_ids"].size(2)]
            for part, name in zip(log_p.view(-1, n, width).split(sizes, dim=1), names, strict=True)
        ]
        if entropy is not None:
            entropy = entropy.view(-1, n, width)[:, : sizes[0], : scores[0].size(2)]
        return *scores, entropy, aux_loss

    def _reference_log_prob(self, batch: dict[str, torch.Tensor], name: str = "completion") -> torch.Tensor:
        """Log-probability of each completion under the reference model, shape (U, n), nats."""
        if self.ref_model is not None:
            log_ref = self._score(self.ref_model, batch, (name,), gradient=False)[0]
        else:  # an adapter over the reference, or beside a frozen copy of itself
            model = self.accelerator.unwrap_model(self.model)
            with use_reference(model):
                log_ref = self._score(self.model, batch, (name,), gradient=False)[0]
        return sequence_log_prob(log_ref, batch[f"{name}_mask"])

    # Loss

    @property
    def _on_policy(self) -> bool:
        """Whether every update is made with generations of the current policy: no ratio, no second pass."""
        return self.args.gradient_accumulation_steps % (self.args.steps_per_generation * self.num_iterations) == 0

    def _whole(self, mode: str) -> bool:
        """Whether a unit holds all of the policy's samples of its prompt."""
        return self._unit_size(mode) == self._num_generations(mode)

    def _weighs_early(self, mode: str) -> bool:
        """Whether weights are made as samples are drawn, and not from the pass that carries the gradient."""
        return (mode == "train" and not self._on_policy) or not self._whole(mode)

    def _policy_loss(
        self,
        log_p: torch.Tensor,
        mask: torch.Tensor,
        coefficients: torch.Tensor,
        old_log_p: torch.Tensor | None,
    ) -> torch.Tensor:
        """Σ −c·ℓ over samples (U, n, T), a mean over them; clipped against `old_log_p` where that is given."""
        return policy_gradient_loss(
            log_p,
            mask,
            coefficients,
            reduction=self.args.logprob_reduction,
            old_log_p=old_log_p,
            epsilon_low=self.epsilon_low,
            epsilon_high=self.epsilon_high,
        )
