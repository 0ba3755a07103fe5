"""A negative term beside the loss of TRL's GRPO trainer, whose batches are of rows: units of one policy sample.

Axis letters: B rows of a generation batch or of a micro-batch, each with m samples beside its own, T completion tokens.
"""

import contextlib
from typing import Any

import torch

from ..engine.sampling import UnitSampling
from ..engine.second_model import PROPOSAL_FOLDER, SecondAdapter
from ..math.importance import engine_ratios
from ..math.losses import scale_gradient
from ..method.negative_term import COEFFICIENTS, NEGATIVE, OWN
from ..models._adapters import trainable_kept
from ._with_negative_term import WithNegativeTerm


_OLD = {OWN: "old_log_p", NEGATIVE: "proposal_old_log_p"}
_RATIOS = {OWN: "engine_ratio", NEGATIVE: "proposal_engine_ratio"}


class GRPOWithNegativeTerm(WithNegativeTerm, UnitSampling):
    """
    Mixin before a trainer on TRL's GRPO, whose generation batches hold `rewards`: it has a negative term unless `alpha` is 0.

    All weights are made as samples are drawn, since TRL cuts prompts apart. One pass serves both terms of the loss.
    """

    # Of the micro-batch whose loss TRL computes: the pass that TRL asks for is over all its samples, and scores are kept
    _units: dict[str, torch.Tensor] | None = None

    def _unit_size(self, mode: str) -> int:
        return 1

    def _weighs_early(self, mode: str) -> bool:
        return True

    def _whole(self, mode: str) -> bool:
        return False

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, torch.Tensor | Any]:
        # TRL turns adapters off for the reference, and PEFT then freezes the proposal's
        is_adapter = isinstance(self.proposal, SecondAdapter)
        with trainable_kept(self.model) if is_adapter else contextlib.nullcontext():
            batch = super()._generate_and_score_completions(inputs)
        if self._negative is None:
            return batch
        drawn = self._negative.sample(inputs, _in_units(batch))
        if "importance_sampling_ratio" in batch and NEGATIVE in self._negative.completions:
            drawn["proposal_engine_ratio"] = self._engine_ratios(drawn)
        return batch | drawn

    def _engine_ratios(self, drawn: dict[str, torch.Tensor]) -> torch.Tensor:
        """TRL's correction of what the engine drew otherwise than its model, for the negative term's samples: (B, m, T) or (B, m, 1)."""
        mask = drawn[f"{NEGATIVE}_mask"]
        ratio = engine_ratios(
            drawn[self._negative.drawn_log_p],
            drawn[f"{NEGATIVE}_engine_log_p"],
            mask,
            self.vllm_importance_sampling_mode,
            self.vllm_importance_sampling_clip_min,
            self.vllm_importance_sampling_clip_max,
        )
        self._log_engine_ratio(ratio.flatten(0, 1), mask.flatten(0, 1).bool(), f"{PROPOSAL_FOLDER}/")
        return ratio

    def _compute_loss(self, model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        if self._negative is None:
            return super()._compute_loss(model, inputs)
        units = _in_units(inputs)
        self._negative.learn(units, None, None)  # a proposal's activations are gone before the policy's come
        self._units = units
        try:
            loss = super()._compute_loss(model, inputs)
        finally:
            self._units = None

        pushed, rows = 0.0, len(inputs["completion_mask"])
        for name, log_p in self._scored.items():
            if COEFFICIENTS[name] in units:
                old_log_p = None if self._on_policy else units.get(_OLD[name])
                if _RATIOS[name] in units:  # each token's gradient is multiplied, as in TRL
                    log_p = scale_gradient(log_p, units[_RATIOS[name]])
                pushed = pushed + self._policy_loss(log_p, units[f"{name}_mask"], units[COEFFICIENTS[name]], old_log_p)
        if self.model.training:
            return loss + pushed / self.current_gradient_accumulation_steps
        # Rows that fill up a batch add 0, and do not count
        return loss + pushed * (rows * self.accelerator.num_processes / max(self._real_rows(rows), 1))

    def _get_per_token_logps_and_entropies(self, model, input_ids, attention_mask, logits_to_keep, **options: Any):
        if self._units is None:
            return super()._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, logits_to_keep, **options
            )
        negative, units = self._negative, self._units
        scores, entropy, aux_loss, _ = self._score(model, units, negative.completions, needed=negative.needed(units))
        self._scored = dict(zip(negative.completions, scores, strict=True))  # (B, 1, T) and (B, m, T)
        log_p = scores[0].squeeze(1)
        self._scored_log_p = log_p.detach()
        return log_p, entropy.squeeze(1), aux_loss


def _in_units(rows: dict[str, torch.Tensor | Any]) -> dict[str, torch.Tensor]:
    """What a negative term reads of rows, as units of one policy sample."""
    units = {name: rows[name] for name in ("prompt_ids", "prompt_mask")}
    units |= {name: rows[name].unsqueeze(1) for name in ("completion_ids", "completion_mask", "rewards")}
    if "tool_mask" in rows:
        units["completion_attended"] = units["completion_mask"]
        units["completion_mask"] = units["completion_mask"] * rows["tool_mask"].unsqueeze(1)
    # TRL's, or PPO's for its KL penalty
    if (old_log_p := rows.get("old_per_token_logps", rows.get("sampling_log_p"))) is not None:
        units["old_log_p"] = old_log_p.unsqueeze(1)
    if "importance_sampling_ratio" in rows:
        units["engine_ratio"] = rows["importance_sampling_ratio"].unsqueeze(1)
    drawn = {name: value for name, value in rows.items() if name.startswith("proposal_")}
    return units | drawn | {name: rows[name] for name in COEFFICIENTS.values() if name in rows}
