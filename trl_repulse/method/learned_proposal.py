"""A proposal that learns to draw the policy's bad outputs, as the negative term of a policy's loss.

Axis letters: U units of n policy samples and m proposal samples, P prompts, N policy samples and K proposal samples of a prompt,
T completion tokens, V vocabulary.
"""

from typing import Any

import torch
from transformers import TrainerCallback

from ..engine.second_model import PROPOSAL_FOLDER, SecondModel
from ..engine.trl_bridge import split_tensor_dict
from ..math.importance import log_importance_weights, normalize_weights
from ..math.losses import scale_gradient
from ..math.proposal_losses import (
    ctl_coefficients,
    dpg_loss,
    log_ratio_loss,
    sixo_loss,
    sixo_negative_weights,
    vargrad_loss,
    vargrad_targets,
)
from .collapse import CollapseWatch
from .negative_term import COEFFICIENTS, NEGATIVE, DrawnTerm


class _UpdateAfterPolicy(TrainerCallback):
    """Runs the proposal's update once the policy's optimizer has stepped (`proposal_update_order="after"`)."""

    def __init__(self, part: "LearnedProposal"):
        self._part = part

    def on_optimizer_step(self, args, state, control, **kwargs):
        pending, self._part.pending = self._part.pending, []
        self._part.update(pending)


class LearnedProposal(DrawnTerm):
    """
    Finds the policy's bad outputs with a second model, which learns from each batch of its samples.

    Args:
        trainer ([`UnitSampling`]):
            Trainer of the policy.
        proposal ([`SecondModel`]):
            The proposal.
    """

    drawn_log_p = "proposal_old_log_q"

    def __init__(self, trainer: Any, proposal: SecondModel):
        super().__init__(trainer)
        self.proposal = proposal
        self.pending: list[dict[str, torch.Tensor]] = []  # micro-batches that an update after the policy's learns from
        self._watch = CollapseWatch(self)
        if trainer.args.proposal_update_order == "after":
            trainer.add_callback(_UpdateAfterPolicy(self))

    @property
    def engine(self) -> Any:
        return self.proposal.engine

    # The calls of a trainer

    def sample(self, rows: list[dict[str, Any]], batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """As [`NegativeTerm.sample`]; all but the last of `proposal_updates_per_step` updates are made here."""
        args = self.trainer.args
        if self.mode == "train":
            for _ in range(args.proposal_updates_per_step - 1):
                chunks = split_tensor_dict(self.draw(rows, batch), args.steps_per_generation)
                self.update(chunks, advance_schedule=False)
        return super().sample(rows, batch)

    def draw(self, rows: list[dict[str, Any]], batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        drawn = super().draw(rows, batch)
        if self.trainer.args.negative_loss == "reinforce" and self.trainer.beta != 0.0:
            drawn["proposal_ref_log_prob"] = self.scorer.reference_log_prob(drawn, NEGATIVE)
        return drawn

    def weigh_early(
        self, batch: dict[str, torch.Tensor], log_p: torch.Tensor, log_p_negative: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        log_q = self.scorer.score(self.proposal.module, batch, (NEGATIVE,), gradient=False).log_p[0]
        made = {"proposal_old_log_q": log_q}  # (U, m, T)
        made |= self.weigh(batch | made, log_p, log_p_negative)
        if self.mode == "train" and not self.scorer.holds_whole_prompts:
            made |= self._contrast(batch | made, log_p_negative, log_q, log_q)
        return made

    def learn(
        self, inputs: dict[str, torch.Tensor], log_p: torch.Tensor | None, log_p_negative: torch.Tensor | None
    ) -> dict[str, torch.Tensor]:
        """As [`NegativeTerm.learn`]; in training the proposal's gradient is accumulated."""
        trainer = self.trainer
        learns = trainer.model.training and trainer.args.proposal_update_order == "before"
        log_p_negative = inputs.get("proposal_old_log_p", log_p_negative)
        with self.proposal.gradient_sync(not learns or trainer.accelerator.sync_gradients):
            # Without gradient the bare model serves; wrappers are for passes that carry one
            model = self.proposal.engine if learns else self.proposal.module
            log_q_now = self.scorer.score(model, inputs, (NEGATIVE,), gradient=learns).log_p[0]
            log_q = inputs.get("proposal_old_log_q", log_q_now.detach())
            self.scorer.log_engine(inputs, NEGATIVE, log_q)
            made = {}
            if COEFFICIENTS[NEGATIVE] not in inputs:
                made = self.weigh(inputs | {"proposal_old_log_q": log_q}, log_p, log_p_negative)
            if learns:
                batch = inputs | made
                if "proposal_coefficients" not in batch:
                    batch |= self._contrast(batch, log_p_negative, log_q, log_q_now.detach())
                self._accumulate(batch, log_q_now, log_p_negative, trainer.current_gradient_accumulation_steps)
        if trainer.model.training and not learns:
            # What an update needs of its samples; the policy's own are for its loss
            drawn = {name: x for name, x in inputs.items() if name.startswith(("prompt_", "proposal_"))}
            self.pending.append(drawn)
        return made

    def end_of_micro_batch(self) -> None:
        """Updates the proposal once its gradient is complete, unless it waits for the policy."""
        if self.trainer.args.proposal_update_order == "before" and self.trainer.accelerator.sync_gradients:
            self._step()

    # Weights

    def weigh(
        self,
        batch: dict[str, torch.Tensor],
        log_p: torch.Tensor | None = None,
        log_p_negative: torch.Tensor | None = None,
    ) -> dict[str, torch.Tensor]:
        """
        As [`NegativeTerm.weigh`]. The batch has proposal samples with `proposal_old_log_q` of shape `(U, m, T)`, log-probabilities (nats)
        under the proposal that drew them, and the policy's own samples if these weights serve its loss.

        Returns:
            `dict[str, torch.Tensor]`: `proposal_w`, the weights under the proposal's target, and `negative_coefficients` of the policy
            loss, each of shape `(U, m)`.
        """
        scorer, args, size = self.scorer, self.trainer.args, self.size
        rewards = batch["proposal_rewards"]
        log_q, mask = batch["proposal_old_log_q"], batch[f"{NEGATIVE}_mask"]
        samples = [scorer.by_prompt(x, size) for x in (log_p_negative, log_q, mask)]

        log_potential = scorer.by_prompt(self.log_potential(rewards), size)
        log_w = log_importance_weights(samples[0], samples[1], log_potential, samples[2])  # (P, K)
        weights = {"proposal_w": scorer.by_unit(normalize_weights(log_w), rewards)}
        if "rewards" in batch:  # of the policy's samples: this draw serves its loss
            scorer.log_importance(PROPOSAL_FOLDER, log_w, scorer.by_prompt(~rewards.isnan(), size))
            self._watch.compare(batch, log_w, self._watch.look(batch, log_p, log_p_negative))
            returns_negative = returns = None
            if args.negative_loss == "reinforce":
                returns_negative = scorer.by_prompt(scorer.returns(batch, log_p_negative, "proposal_"), size)
                returns = scorer.by_prompt(batch["returns"], scorer.num_generations)
            negative = self.coefficients(log_w, returns_negative, returns)
            weights[COEFFICIENTS[NEGATIVE]] = scorer.by_unit(negative, rewards)
        return weights

    # Learning

    def update(self, chunks: list[dict[str, torch.Tensor]], advance_schedule: bool = True) -> None:
        trainer = self.trainer
        for i, chunk in enumerate(chunks):
            with self.proposal.gradient_sync(i == len(chunks) - 1):
                log_p = self.scorer.score(trainer.model, chunk, (NEGATIVE,), gradient=False).log_p[0]
                log_q_now = self.scorer.score(self.proposal.engine, chunk, (NEGATIVE,)).log_p[0]
                log_q = chunk.get("proposal_old_log_q", log_q_now.detach())
                batch = chunk | self.weigh(chunk | {"proposal_old_log_q": log_q}, None, log_p)
                batch |= self._contrast(batch, log_p, log_q, log_q_now.detach())
                self._accumulate(batch, log_q_now, log_p, len(chunks))
        self._step(advance_schedule)

    def _accumulate(
        self, batch: dict[str, torch.Tensor], log_q_now: torch.Tensor, log_p: torch.Tensor, micro_batches: int
    ) -> None:
        """Accumulates the gradient of one of `micro_batches` micro-batches of proposal samples."""
        loss = self._loss(batch, log_q_now, log_p)
        self.proposal.backward(loss / micro_batches)
        self.scorer.log(f"{PROPOSAL_FOLDER}/loss", loss.view(1))

    def _step(self, advance_schedule: bool = True) -> None:
        """Updates the proposal with the gradient it has."""
        self.scorer.step(advance_schedule)
        if self.trainer.use_vllm:
            self.trainer.vllm_generation.changed(PROPOSAL_FOLDER)

    def _contrast(
        self, batch: dict[str, torch.Tensor], log_p: torch.Tensor, log_q: torch.Tensor, log_q_now: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """
        `proposal_coefficients`, detached, which take all samples of a prompt that have a reward: for CTL the token coefficients w − w⁻_t
        (w without its second term) of shape `(U, m, T)`; for SIXO the weights towards the policy and for VarGrad the target
        log-probabilities (nats), of shape `(U, m)`. DPG needs none and gets its weights back.

        `log_p`, `log_q` and `log_q_now` (U, m, T) are log-probabilities (nats) under the policy, and under the proposal as it was when it
        was sampled and as it is now; detached.
        """
        scorer, args, rewards = self.scorer, self.trainer.args, batch["proposal_rewards"]
        if args.proposal_loss == "dpg":
            return {"proposal_coefficients": batch["proposal_w"]}
        units = (log_q, log_p, batch["proposal_w"], batch[f"{NEGATIVE}_mask"], ~rewards.isnan(), log_q_now)
        log_q, log_p, weights, mask, scored, log_q_now = (scorer.by_prompt(x, self.size) for x in units)
        if args.proposal_loss == "sixo":
            coefficients = sixo_negative_weights(log_q, log_p, weights, mask, scored)
        elif args.proposal_loss == "vargrad":
            log_potential = scorer.by_prompt(self.log_potential(rewards), self.size)
            coefficients = vargrad_targets(log_q_now, log_p, log_potential, mask)
        else:
            coefficients = ctl_coefficients(
                *(log_q_now, log_q, log_p, weights, mask),
                second_term=args.proposal_loss != "ctl_no_second_term",
                parameterization=args.proposal_parameterization,
                scored=scored,
            )
        return {"proposal_coefficients": scorer.by_unit(coefficients, rewards)}

    def _loss(self, batch: dict[str, torch.Tensor], log_q_now: torch.Tensor, log_p: torch.Tensor) -> torch.Tensor:
        """
        The proposal's loss on one micro-batch, a mean over its samples. `log_q_now` and `log_p` (U, m, T) are log-probabilities (nats)
        under the proposal, with gradient, and under the sampling-time policy.
        """
        args, mask = self.trainer.args, batch[f"{NEGATIVE}_mask"]
        if "proposal_engine_ratio" in batch:
            log_q_now = scale_gradient(log_q_now, batch["proposal_engine_ratio"])
        weights = batch["proposal_w"], batch["proposal_coefficients"]
        if args.proposal_loss == "dpg":
            with torch.no_grad():
                log_p_all = self._all_log_probs(self.trainer.model, batch)
            log_q_all = self._all_log_probs(self.proposal.engine, batch)
            return dpg_loss(log_q_all, log_p_all, batch[f"{NEGATIVE}_ids"], weights[0], mask)
        if args.proposal_loss == "sixo":
            return sixo_loss(log_q_now, log_p, *weights, mask)
        if args.proposal_loss == "vargrad":
            return vargrad_loss(log_q_now, weights[1], mask)
        return log_ratio_loss(log_q_now, log_p, weights[1], mask, parameterization=args.proposal_parameterization)

    def _all_log_probs(self, model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """log-probabilities of the whole vocabulary at each completion token, shape (U, m, T, V), nats."""
        ids, mask = batch[f"{NEGATIVE}_ids"], batch[f"{NEGATIVE}_mask"]
        units, m, width = ids.shape
        input_ids = torch.cat([batch["prompt_ids"].repeat_interleave(m, 0), ids.flatten(0, 1)], dim=1)
        attention_mask = torch.cat([batch["prompt_mask"].repeat_interleave(m, 0), mask.flatten(0, 1)], dim=1)

        def log_probs(ids: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor]:
            positions = (mask.long().cumsum(dim=-1) - 1).clamp(min=0)
            logits = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits
            return (logits[:, -width - 1 : -1].float().log_softmax(dim=-1),)

        return self.scorer.score_rows(log_probs, input_ids, attention_mask)[0].view(units, m, width, -1)
