"""Trainers that keep the loss of TRL's GRPO trainer, with a negative term beside it where there is one: PPO, and RePULSe on both.

TRL cuts prompts apart: batches are of rows, and units of one policy sample. All weights are computed as samples are drawn.

Axis letters: B rows of a generation batch or of a micro-batch, each with m extra samples, L prompt tokens, T completion tokens.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from .._trl import require_known_options
from ..engine.logs import PROPOSAL_FOLDER, drop_batch_means
from ..engine.scoring import Layout, Scores, SetScores, token_log_probs
from ..engine.second_model import SecondAdapter
from ..engine.units import OWN, Units, local_rows
from ..math.importance import engine_ratios
from ..math.objective import policy_gradient_loss, scale_gradient
from ..models._adapters import trainable_kept
from .base_trainer import BaseTrainer


# Losses that are sums over a batch's tokens; the others are means over its completions
_OVER_TOKENS = ("dapo", "cispo", "vespo", "bnpo")


class GRPOLossTrainer(BaseTrainer):
    """Trainer with the loss of TRL's GRPO trainer."""

    # Of the micro-batch whose loss TRL computes: the pass that TRL asks for is over all its samples, and scores are kept
    _units: Units | None = None
    _set_scores: SetScores | None = None

    # Sampling

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, torch.Tensor | Any]:
        """TRL's batch of B rows, with what [`_credit`] and a negative term add to it. A collective call."""
        shape, source = self.shape, None if self._negative is None else self._negative.source(self.shape)
        # TRL turns adapters off for the reference, and PEFT then freezes the proposal's
        is_adapter = isinstance(self.proposal, SecondAdapter)
        with trainable_kept(self.model) if is_adapter else contextlib.nullcontext():
            with self._drawing.together(shape, source):
                batch = self._draw_rows(inputs)
            batch |= self._credit(batch)
        if self._negative is None:
            return batch
        units = self._negative.draw(inputs, Units.of_rows(batch), shape, source)
        if "importance_sampling_ratio" in batch and units.extra is not None:
            units = units.with_extra(engine_ratio=self._engine_ratios(units))
        return batch | units.added_to_rows()

    def _draw_rows(self, inputs: list[dict[str, Any]]) -> dict[str, torch.Tensor | Any]:
        """TRL's generation batch, with `rewards` `(B,)`, logged without padding rows. A collective call."""
        logs, tables = self._logs_of_run, self._tables
        with logs.weighing(logs.real_rows(len(inputs))) as metrics, self._keeping_rewards():
            batch = super()._generate_and_score_completions(inputs)
            drop_batch_means(metrics, *self._dropped)
        batch["completion_mask"] = batch["completion_mask"] * logs.are_real(len(inputs)).unsqueeze(1)
        if not self.model.training:
            counted = batch["completion_mask"] * batch.get("tool_mask", 1)
            batch["num_items_in_batch"] = self.accelerator.gather(counted.sum()).sum()
        tables.trim(len(inputs) * self.accelerator.num_processes - logs.real_rows(len(inputs)))
        self._log_sampling(batch)
        rewards = self._weigh_rewards(self._rewards_per_func)
        if self.args.save_negatives and self.model.training:
            tables.append_negatives(tables.own["prompt"], tables.own["completion"], rewards)
        generations, of_process = self.shape.generations, (batch["completion_ids"], batch["completion_mask"])
        padded = (self.accelerator.pad_across_processes(x, dim=1) for x in of_process)
        ids, mask = (self.accelerator.gather(x).unflatten(0, (-1, generations)) for x in padded)
        logs.distinct(ids, mask, rewards.view(-1, generations))
        first = self.accelerator.process_index * len(inputs)
        return batch | {"rewards": rewards[first : first + len(inputs)]}  # (B,)

    @contextlib.contextmanager
    def _keeping_rewards(self) -> Iterator[None]:
        """Context in which rewards are kept, and shown in the table, as `_calculate_rewards` returns them, also a subclass's."""
        calculate = self._calculate_rewards
        before = {name: value for name, value in vars(self).items() if name == "_calculate_rewards"}

        def kept(inputs: Any, *args: Any) -> torch.Tensor:
            per_func = self._rewards_per_func = calculate(inputs, *args)
            if len(self.reward_func_names) > 1:  # a column of the same name that a reward function logged stays
                rewards = self._weighted(per_func)[local_rows(self.accelerator, len(inputs))]
                self._pending_extra_logs.setdefault("reward", rewards.tolist())
            return per_func

        vars(self)["_calculate_rewards"] = kept
        try:
            yield
        finally:
            del vars(self)["_calculate_rewards"]
            vars(self).update(before)

    def _credit(self, batch: dict[str, torch.Tensor | Any]) -> dict[str, torch.Tensor]:
        """What a trainer adds to TRL's batch, in place of GRPO's advantages."""
        return {}

    def _log_sampling(self, batch: dict[str, torch.Tensor]) -> None:
        """Logs how far vLLM's log-probabilities are from the trainer's, and TRL's corrections of them. A collective call."""
        if "importance_sampling_ratio" not in batch:
            return
        mask = (batch["completion_mask"] * batch.get("tool_mask", 1)).bool()
        self._logs_of_run.engine_gap((batch["old_per_token_logps"] - batch["sampling_per_token_logps"]).abs()[mask])
        self._logs_of_run.engine_ratio(batch["importance_sampling_ratio"], mask)

    def _engine_ratios(self, units: Units) -> torch.Tensor:
        """TRL's importance ratios of extra samples, which correct for the engine's probabilities: (B, m, T) or (B, m, 1)."""
        extra = units.extra_samples
        assert extra.drawn_log_p is not None and extra.engine_log_p is not None
        ratio = engine_ratios(
            extra.drawn_log_p,
            extra.engine_log_p,
            extra.mask,
            self.vllm_importance_sampling_mode,
            self.vllm_importance_sampling_clip_min,
            self.vllm_importance_sampling_clip_max,
        )
        self._logs_of_run.engine_ratio(ratio.flatten(0, 1), extra.mask.flatten(0, 1).bool(), f"{PROPOSAL_FOLDER}/")
        return ratio

    # Loss

    def _compute_loss(self, model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """The trainer's own loss, and the negative term's on all weighted samples. A learned proposal takes its step first."""
        if self._negative is None:
            return self._own_loss(model, inputs)
        negative, shape, units = self._negative, self.shape, Units.of_rows(inputs)
        # Its activations are gone before the policy's come
        negative.learn(units, negative.score(units, SetScores(), shape), shape)
        self._units = units
        try:
            loss = self._own_loss(model, inputs)
        finally:
            self._units = None

        rows, scores = len(inputs["completion_mask"]), self._set_scores
        pushed: torch.Tensor | float = 0.0
        assert scores is not None  # of the pass that TRL has asked for
        for name, samples in units.sets().items():
            if samples.coefficients is not None:
                log_p, old_log_p = scores.log_p[name], None if self._on_policy else samples.log_p
                if samples.engine_ratio is not None:  # each token's gradient is multiplied, as in TRL
                    log_p = scale_gradient(log_p, samples.engine_ratio)
                pushed = pushed + policy_gradient_loss(
                    log_p,
                    samples.mask,
                    samples.coefficients,
                    reduction=self.args.logprob_reduction,
                    old_log_p=old_log_p,
                    epsilon_low=self.epsilon_low,
                    epsilon_high=self.epsilon_high,
                )
        self._set_scores = None
        if self.model.training:
            return loss + pushed / self.current_gradient_accumulation_steps
        # Padding rows add 0, and do not count
        real = max(self._logs_of_run.real_rows(rows), 1)
        return loss + pushed * (rows * self.accelerator.num_processes / real)

    def _own_loss(self, model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """TRL's loss of the policy's own samples; metrics count all tokens alike. A collective call."""
        counted = self.accelerator.reduce((inputs["completion_mask"] * inputs.get("tool_mask", 1)).sum(), "sum").item()
        logs, rows = self._logs_of_run, len(inputs["completion_mask"])
        of_samples = ("vespo/", "clip_ratio/") if self.importance_sampling_level == "sequence" else ("vespo/",)
        with logs.weighing(counted, rows * self.accelerator.num_processes, of_samples):
            loss = super()._compute_loss(model, inputs)
        if self.args.loss_type in _OVER_TOKENS:
            logs.loss_count = inputs["num_items_in_batch"].item()
            return loss
        return logs.mean_of_real(loss, rows)

    def _get_per_token_logps_and_entropies(self, model, input_ids, attention_mask, logits_to_keep, **options: Any):
        """As TRL's, (B, T) in nats, at the positions of generation. Of `_units` one pass scores extra samples too, for `_set_scores`."""
        if self._leaves_passes_to_trl:
            return super()._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, logits_to_keep, **options
            )
        require_known_options(options)
        if self._units is not None and self._negative is not None:
            scores = self._scoring.score(model, self._units, self.shape, self._negative.wanted(self._units))
            self._set_scores = scores  # (B, 1, T) and (B, m, T)
            assert scores.entropy is not None
            log_p = scores.log_p[OWN].squeeze(1)
            self._scored_log_p = log_p.detach()
            return log_p, scores.entropy.squeeze(1), scores.aux_loss
        aux_loss = options.get("compute_aux_loss", False)

        def log_probs(ids: torch.Tensor, mask: torch.Tensor, layout: Layout) -> Scores:
            return token_log_probs(model, self.accelerator, ids, mask, layout, aux_loss)

        rows = (input_ids, attention_mask, logits_to_keep)
        log_p, entropy, router_loss, _ = self._scoring.in_rows(log_probs, *rows, options.get("batch_size"))
        self._scored_log_p = log_p.detach()
        return log_p, entropy if options.get("compute_entropy") else None, router_loss if aux_loss else None
