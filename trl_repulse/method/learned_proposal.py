"""A proposal that learns to draw the policy's bad outputs, as the negative term of a policy's loss.

Axis letters: U units of n policy samples and m proposal samples, P prompts, N policy samples and K proposal samples of a prompt,
T completion tokens, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from transformers import TrainerCallback

from ..engine.scoring import SetScores, Wanted
from ..engine.second_model import PROPOSAL_FOLDER, SecondModel
from ..engine.units import EXTRA, CompletionSet, Shape, Source, Units
from ..math.importance import log_importance_weights, log_z_estimate, normalize_weights
from ..math.objective import scale_gradient
from ..math.proposal_losses import (
    ctl_coefficients,
    dpg_loss,
    log_ratio_loss,
    sixo_loss,
    sixo_negative_weights,
    vargrad_loss,
    vargrad_targets,
)
from .negative_term import ExtraSamplesTerm, Services, Weights


class _UpdateAfterPolicy(TrainerCallback):
    """Runs the proposal's update once the policy's optimizer has stepped (`proposal_update_order="after"`)."""

    def __init__(self, term: "LearnedProposal"):
        self._term = term

    def on_optimizer_step(self, args, state, control, **kwargs):
        pending, self._term.pending = self._term.pending, []
        self._term.update([units for units, _ in pending], pending[0][1])


class LearnedProposal(ExtraSamplesTerm):
    """
    Finds the policy's bad outputs with a second model, which learns from each batch of its samples.

    Args:
        services ([`Services`]): What the trainer gives.
        proposal ([`SecondModel`]): The proposal.
        add_callback (`Callable`): Adds a callback to the trainer.
    """

    def __init__(self, services: Services, proposal: SecondModel, add_callback: Callable[[TrainerCallback], None]):
        super().__init__(services)
        self.proposal = proposal
        self.pending: list[tuple[Units, Shape]] = []  # micro-batches that an update after the policy's learns from
        self._updates_first = self.args.proposal_update_order == "before"
        if not self._updates_first:
            add_callback(_UpdateAfterPolicy(self))

    # Draw

    def source(self, shape: Shape) -> Source:
        """As [`NegativeTerm.source`]: the proposal as it is wrapped for training."""
        return Source(engine=self.proposal.engine)

    def draw(self, rows: list[dict[str, Any]], units: Units, shape: Shape, source: Source | None) -> Units:
        """As [`NegativeTerm.draw`]; all but the last of `proposal_updates_per_step` updates are made here."""
        if shape.training:
            for _ in range(self.args.proposal_updates_per_step - 1):
                extra = self.services.drawing.draw_extra(rows, units, shape, self.source(shape))
                drawn = self.after_drawing(replace(units, extra=extra), shape)
                self.update(drawn.split(self.args.steps_per_generation), shape, advance_schedule=False)
        return super().draw(rows, units, shape, source)

    def after_drawing(self, units: Units, shape: Shape) -> Units:
        """Adds log-probabilities under the reference, which the returns of negative-REINFORCE need with a KL penalty."""
        if self.args.negative_loss == "reinforce" and self.services.beta != 0.0:
            return units.with_extra(ref_log_p=self.services.reference_log_prob(units, units.extra_samples))
        return units

    # Score

    def score(self, units: Units, scores: SetScores, shape: Shape) -> SetScores:
        """As [`NegativeTerm.score`]: log-probabilities under the proposal, with gradient where it learns now."""
        learns = shape.training and self._updates_first
        if not learns and units.extra_samples.drawn_log_p is not None:
            return super().score(units, scores, shape)
        with self.proposal.gradient_sync(not learns or self.services.accelerator.sync_gradients):
            scores = replace(scores, proposal=self._log_q(units, shape, gradient=learns))
        return super().score(units, scores, shape)

    def score_early(self, units: Units, scores: SetScores, shape: Shape) -> SetScores:
        """As [`ExtraSamplesTerm.score_early`], under the proposal."""
        return replace(scores, proposal=self._log_q(units, shape, gradient=False))

    def _log_q(self, units: Units, shape: Shape, gradient: bool) -> torch.Tensor:
        """Log-probabilities (nats) of the extra samples under the proposal as it is now, `(U, m, T)`."""
        # Without gradient the bare model serves; wrappers are for passes that carry one
        model = self.proposal.engine if gradient else self.proposal.module
        return self.services.scoring.score(model, units, shape, Wanted((EXTRA,)), gradient=gradient).log_p[EXTRA]

    def drawn_log_p(self, extra: CompletionSet, scores: SetScores) -> torch.Tensor:
        """As [`ExtraSamplesTerm.drawn_log_p`]: as stored, else under the proposal, which then has not changed since it drew."""
        if extra.drawn_log_p is not None:
            return extra.drawn_log_p
        assert scores.proposal is not None  # `score` has set it
        return scores.proposal.detach()

    # Weigh

    def weigh(self, units: Units, scores: SetScores, shape: Shape) -> Weights:
        """As [`NegativeTerm.weigh`]: of the proposal's samples, under its target and for the policy's loss."""
        services, extra, size = self.services, units.extra_samples, shape.extra
        log_w = self._log_weights_of_extra(extra, scores, shape)
        returns_negative = returns = None
        if self.args.negative_loss == "reinforce":
            assert units.returns is not None
            returns_negative = services.by_prompt(services.returns(extra, scores.of(EXTRA, extra)), size)
            returns = services.by_prompt(units.returns, shape.generations)
        coefficients = services.by_unit(self.coefficients(log_w, returns_negative, returns), extra.rewards)
        return Weights(None, coefficients, services.by_unit(normalize_weights(log_w), extra.rewards), log_w)

    def _log_weights_of_extra(self, extra: CompletionSet, scores: SetScores, shape: Shape) -> torch.Tensor:
        """Log-weights of the extra samples under the target, `(P, K)`. A collective call where prompts are cut apart."""
        by_unit = scores.of(EXTRA, extra), self.drawn_log_p(extra, scores), extra.mask
        log_p, log_q, mask = (self.services.by_prompt(x, shape.extra) for x in by_unit)
        log_potential = self.services.by_prompt(self.log_potential(extra.rewards), shape.extra)
        return log_importance_weights(log_p, log_q, log_potential, mask)  # (P, K)

    def observe(self, units: Units, scores: SetScores, weights: Weights, shape: Shape) -> None:
        """Logs effective sample sizes, and how far the proposal's estimate of log Z is below what the policy's samples give."""
        assert weights.log_w is not None
        scored = ~self.services.by_prompt(units.extra_samples.rewards, shape.extra).isnan()
        self.logs.importance(PROPOSAL_FOLDER, weights.log_w, scored)
        self.log_extra_samples(units, scores, shape)
        # If all samples of a prompt are the same, their weights are equal, and the effective sample size is large. But the policy's own
        # samples bound log Z from below: a proposal whose estimate is lower finds less of the target than no proposal
        log_potential = self.services.by_prompt(self.log_potential(units.own.rewards), shape.generations)  # (P, N)
        bound = torch.where(log_potential.isnan(), -torch.inf, log_potential)
        gaps = log_z_estimate(bound, ~log_potential.isnan()) - log_z_estimate(weights.log_w, scored)  # (P,)
        self.logs.mean("proposal/log_z_gap", torch.where(gaps.isinf(), torch.nan, gaps))

    def weigh_early(self, units: Units, shape: Shape) -> Units:
        """As [`NegativeTerm.weigh_early`]; where prompts are cut apart, also what the proposal's loss needs of a whole prompt."""
        units = super().weigh_early(units, shape)
        if shape.training and not shape.whole:
            log_p, log_q = units.extra_samples.log_p, units.extra_samples.drawn_log_p
            assert log_p is not None and log_q is not None  # kept when they were scored
            units = units.with_extra(contrast=self._contrast(units, log_p, log_q, log_q, shape))
        return units

    # Learn

    def learn(self, units: Units, scores: SetScores, shape: Shape) -> None:
        """As [`NegativeTerm.learn`]. With `proposal_update_order="after"`, keeps the samples for the update after the policy's."""
        if not shape.training:
            return
        if not self._updates_first:
            self.pending.append((units, shape))
            return
        with self.proposal.gradient_sync(self.services.accelerator.sync_gradients):
            log_q = self.drawn_log_p(units.extra_samples, scores)
            self._accumulate(units, scores, log_q, shape, self.services.micro_batches())

    def update(self, chunks: list[Units], shape: Shape, advance_schedule: bool = True) -> None:
        """
        One update of the proposal on samples that were drawn, against the policy as it is now.

        Args:
            chunks (`list[Units]`): Micro-batches, each of whole prompts.
            shape ([`Shape`]): How they were cut.
            advance_schedule (`bool`): Whether the learning rate moves on, as it does once for each update of the policy.
        """
        for i, units in enumerate(chunks):
            with self.proposal.gradient_sync(i == len(chunks) - 1):
                wanted = Wanted((EXTRA,))
                scores = self.services.scoring.score(self.services.model, units, shape, wanted, gradient=False)
                now = units.with_extra(log_p=None)  # against the policy as it is now
                scores = replace(scores, proposal=self._log_q(units, shape, gradient=True))
                log_q = self.drawn_log_p(units.extra_samples, scores)
                log_w = self._log_weights_of_extra(now.extra_samples, scores, shape)
                target = self.services.by_unit(normalize_weights(log_w), units.extra_samples.rewards)
                self._accumulate(now.with_extra(weights=target, contrast=None), scores, log_q, shape, len(chunks))
        self._step(advance_schedule)
        self.logs.flush()  # it may come between a step and its log

    def end_of_update(self) -> None:
        """Updates the proposal, unless it waits for the policy."""
        if self._updates_first:
            self._step()

    def drop(self) -> None:
        self.pending = []

    def _step(self, advance_schedule: bool = True) -> None:
        """Updates the proposal with the gradient it has."""
        self.proposal.update(self.logs, PROPOSAL_FOLDER, advance_schedule)
        if self.services.engine is not None:
            self.services.engine.changed(PROPOSAL_FOLDER)

    def _accumulate(
        self, units: Units, scores: SetScores, log_q: torch.Tensor, shape: Shape, micro_batches: int
    ) -> None:
        """Accumulates the proposal's gradient from one of `micro_batches` micro-batches. `log_q` (U, m, T) are log-probabilities (nats) under
        the proposal when it drew the samples."""
        log_p, log_q_now = scores.of(EXTRA, units.extra_samples), scores.proposal
        assert log_q_now is not None  # `score` has set it
        if units.extra_samples.contrast is None:
            units = units.with_extra(contrast=self._contrast(units, log_p, log_q, log_q_now.detach(), shape))
        loss = self._loss(units, log_q_now, log_p)
        self.proposal.backward(loss / micro_batches)
        self.logs.mean(f"{PROPOSAL_FOLDER}/loss", loss.view(1))

    def _contrast(
        self, units: Units, log_p: torch.Tensor, log_q: torch.Tensor, log_q_now: torch.Tensor, shape: Shape
    ) -> torch.Tensor:
        """
        What the loss needs of all samples of a prompt that have a reward, detached: for CTL the token coefficients w − w⁻_t (w without its
        second term) of shape `(U, m, T)`; for SIXO the weights towards the policy and for VarGrad the target log-probabilities (nats), of
        shape `(U, m)`. DPG needs none and gets its weights back. A collective call where prompts are cut apart.

        `log_p`, `log_q` and `log_q_now` (U, m, T) are log-probabilities (nats) under the policy, and under the proposal as it was when it
        was sampled and as it is now; detached.
        """
        args, extra, size = self.args, units.extra_samples, shape.extra
        assert extra.weights is not None
        if args.proposal_loss == "dpg":
            return extra.weights
        by_unit = (log_q, log_p, extra.weights, extra.mask, ~extra.rewards.isnan(), log_q_now)
        log_q, log_p, weights, mask, scored, log_q_now = (self.services.by_prompt(x, size) for x in by_unit)
        if args.proposal_loss == "sixo":
            coefficients = sixo_negative_weights(log_q, log_p, weights, mask, scored)
        elif args.proposal_loss == "vargrad":
            log_potential = self.services.by_prompt(self.log_potential(extra.rewards), size)
            coefficients = vargrad_targets(log_q_now, log_p, log_potential, mask)
        else:
            coefficients = ctl_coefficients(
                *(log_q_now, log_q, log_p, weights, mask),
                second_term=args.proposal_loss != "ctl_no_second_term",
                parameterization=args.proposal_parameterization,
                scored=scored,
            )
        return self.services.by_unit(coefficients, extra.rewards)

    def _loss(self, units: Units, log_q_now: torch.Tensor, log_p: torch.Tensor) -> torch.Tensor:
        """The proposal's loss on one micro-batch, a mean over its samples. `log_q_now` and `log_p` (U, m, T) are log-probabilities (nats)
        under the proposal, with gradient, and under the policy: as it was at sampling time or, in [`update`], as it is now. DPG uses
        neither; it reads the whole vocabulary under both models."""
        args, extra = self.args, units.extra_samples
        weights, contrast = extra.weights, extra.contrast
        assert weights is not None and contrast is not None
        if args.proposal_loss == "dpg":
            with torch.no_grad():
                log_p_all = self._all_log_probs(self.services.model, units)
            log_q_all = self._all_log_probs(self.proposal.engine, units)
            return dpg_loss(log_q_all, log_p_all, extra.ids, weights, extra.mask)
        if extra.engine_ratio is not None:
            log_q_now = scale_gradient(log_q_now, extra.engine_ratio)
        if args.proposal_loss == "sixo":
            return sixo_loss(log_q_now, log_p, weights, contrast, extra.mask)
        if args.proposal_loss == "vargrad":
            return vargrad_loss(log_q_now, contrast, extra.mask)
        return log_ratio_loss(log_q_now, log_p, contrast, extra.mask, parameterization=args.proposal_parameterization)

    def _all_log_probs(self, model: torch.nn.Module, units: Units) -> torch.Tensor:
        """Log-probabilities (nats) of the whole vocabulary at each token of the extra samples, (U, m, T, V)."""
        extra = units.extra_samples
        count, m, width = extra.ids.shape
        input_ids = torch.cat([units.prompt_ids.repeat_interleave(m, 0), extra.ids.flatten(0, 1)], dim=1)
        attention_mask = torch.cat([units.prompt_mask.repeat_interleave(m, 0), extra.mask.flatten(0, 1)], dim=1)

        def log_probs(ids: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor]:
            """Those of rows (R, L + T) with left-padded prompts, (R, T, V)."""
            positions = (mask.long().cumsum(dim=-1) - 1).clamp(min=0)
            logits = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits
            return (logits[:, -width - 1 : -1].float().log_softmax(dim=-1),)

        return self.services.scoring.by_length(log_probs, input_ids, attention_mask)[0].view(count, m, width, -1)
