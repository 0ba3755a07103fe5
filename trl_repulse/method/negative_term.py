"""The negative term of a policy's loss: weighted samples of the policy's bad outputs, which are pushed down.

A trainer with such a term, whatever the rest of its loss is, calls for each generation batch `source` (what draws extra samples) and
`draw`, and for each micro-batch `wanted` (what to score), `score`, `weigh`, `observe` and `learn`. Where weights cannot wait
for the pass with gradient, `draw` computes them too. `end_of_update` follows once the gradient is complete.

Axis letters: U units of n policy samples and m extra samples, P prompts, N policy samples and K extra samples of a prompt, T completion
tokens.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from accelerate import Accelerator
from transformers import TrainerState

from ..engine.logs import PROPOSAL_FOLDER, Logs
from ..engine.scoring import Scoring, SetScores, Wanted, takes_bias
from ..engine.units import EXTRA, OWN, CompletionSet, Drawing, Shape, Source, Units, to_prompts, to_units
from ..math.importance import distinct_share, normalize_weights, rank_among, sequence_log_prob
from ..math.objective import (
    class_log_potential,
    geometric_schedule,
    indicator_log_potential,
    is_below,
    negative_coefficients,
    negative_reinforce_coefficients,
    tilted_log_potential,
)
from ..models._adapters import base_of


@dataclass(frozen=True)
class Services:
    """
    What a negative term is given by a trainer.

    Args:
        args ([`~trl_repulse.configs.NegativeTermConfig`]): The trainer's configuration.
        accelerator ([`~accelerate.Accelerator`]): The trainer's accelerator.
        policy (`Callable`): Gives the policy, which FSDP replaces when training begins.
        drawing ([`Drawing`]), scoring ([`Scoring`]), logs ([`Logs`]): What draws, scores and records.
        engine ([`~trl_repulse.generation.VLLMGenerator`], *optional*): The vLLM engine.
        beta (`float`): KL coefficient.
        state (`Callable`): Gives the state of training.
        micro_batches (`Callable`): Gives the number of micro-batches of the current update.
        reference_log_prob (`Callable`): Takes units and a set of their samples, and gives the log-probabilities (nats) of tokens
            under the reference, `(U, n, T)`.
        returns (`Callable`): Takes a set of samples and their log-probabilities under the policy, and gives transformed rewards less the
            KL penalty, `(U, n)`.
    """

    args: Any
    accelerator: Accelerator
    policy: Callable[[], Any]
    drawing: Drawing
    scoring: Scoring
    logs: Logs
    engine: Any
    beta: float
    state: Callable[[], TrainerState]
    micro_batches: Callable[[], int]
    reference_log_prob: Callable[[Units, CompletionSet], torch.Tensor]
    returns: Callable[[CompletionSet, torch.Tensor], torch.Tensor]

    @property
    def model(self) -> Any:
        """The policy, as it is wrapped now."""
        return self.policy()

    @property
    def takes_bias(self) -> bool:
        """Whether the policy can be drawn and scored with a bias of its logits."""
        on_server = self.args.use_vllm and self.args.vllm_mode == "server"
        served = on_server or self.args.use_transformers_continuous_batching
        policy = base_of(self.accelerator.unwrap_model(self.model, keep_torch_compile=False))
        return not served and (takes_bias(policy) or not self.scoring.guard.fused_head)

    def by_prompt(self, units: torch.Tensor, size: int) -> torch.Tensor:
        """`(U, n, ...)` as `(P, size, ...)`. A collective call where prompts are cut apart."""
        return to_prompts(self.accelerator, units, size)

    def by_unit(self, prompts: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """`(P, N, ...)` as this process's `(U, n, ...)`, where `like` has the shape `(U, n)`."""
        return to_units(self.accelerator, prompts, like)


@dataclass
class Weights:
    """
    Weights of a micro-batch's samples.

    Args:
        own (`torch.Tensor` of shape `(U, n)`, *optional*): What the loss multiplies log-probabilities of policy samples with.
        extra (`torch.Tensor` of shape `(U, m)`, *optional*): The same of extra samples.
        target (`torch.Tensor` of shape `(U, m)`, *optional*): Normalized weights of extra samples under a proposal's target.
        log_w, log_potential, log_p, log_q (`torch.Tensor` of shape `(P, K)`, *optional*): What these were made of, for
            [`NegativeTerm.observe`]: log-weights, log-potentials, and log-probabilities (nats) under policy and sampler.
    """

    own: torch.Tensor | None = None
    extra: torch.Tensor | None = None
    target: torch.Tensor | None = None
    log_w: torch.Tensor | None = None
    log_potential: torch.Tensor | None = None
    log_p: torch.Tensor | None = None
    log_q: torch.Tensor | None = None

    def added_to(self, units: Units) -> Units:
        """A copy of units with these weights."""
        if self.own is not None:
            units = replace(units, own=replace(units.own, coefficients=self.own))
        if self.extra is not None:
            units = units.with_extra(coefficients=self.extra, weights=self.target)
        return units


class NegativeTerm:
    """
    The negative term of a policy that is its own proposal: its samples, weighted by the potential alone.

    Args:
        services ([`Services`]): What the trainer gives.
    """

    def __init__(self, services: Services):
        self.services = services
        self.args, self.logs = services.args, services.logs

    # Draw

    def source(self, shape: Shape) -> Source | None:
        """What draws extra samples for the next generation batch; `None` if none are drawn. A collective call."""
        return None

    def draw(self, rows: list[dict[str, Any]], units: Units, shape: Shape, source: Source | None) -> Units:
        """
        Adds extra samples to the units of a generation batch, and weights where these cannot wait.

        Args:
            rows (`list[dict]`): This process's rows of the dataset, one a policy sample.
            units ([`Units`]): Units with the policy's samples.
            shape ([`Shape`]): How the batch is cut.
            source ([`Source`], *optional*): What [`source`] gave before the policy's samples were drawn.
        """
        return self.weigh_early(units, shape) if shape.early else units

    def weigh_early(self, units: Units, shape: Shape) -> Units:
        """Adds weights to the samples of a generation batch when they are drawn."""
        weights = self.weigh(units, SetScores(), shape)
        self.observe(units, SetScores(), weights, shape)
        return weights.added_to(units)

    # Score

    def wanted(self, units: Units) -> Wanted:
        """What the policy's pass has to score."""
        return Wanted()

    def score(self, units: Units, scores: SetScores, shape: Shape) -> SetScores:
        """Hook that adds the scores of a proposal to those of the policy; there is none here."""
        return scores

    # Weigh

    def is_weighed(self, units: Units) -> bool:
        """Whether the units carry weights from when they were drawn."""
        return units.own.coefficients is not None

    def weigh(self, units: Units, scores: SetScores, shape: Shape) -> Weights:
        """
        Computes the weights of samples, without side effects. The base class weighs the policy's own samples, and does not need their
        log-probabilities. A collective call where prompts are cut apart.

        Args:
            units ([`Units`]): Units with rewards and, for `negative_loss="reinforce"`, `returns`.
            scores ([`SetScores`]): Log-probabilities under the policy.
            shape ([`Shape`]): How the batch is cut.
        """
        log_potential = self.services.by_prompt(self.log_potential(units.own.rewards), shape.generations)  # (P, N)
        log_w = torch.where(log_potential.isnan(), -torch.inf, log_potential)
        # Good samples have ε, not 0: if nothing is bad, it would push all samples of a prompt down alike
        if self.args.potential == "indicator":
            assert self.bad_reward_threshold is not None
            is_bad = is_below(units.own.rewards, self.bad_reward_threshold)
            log_w = log_w.masked_fill(~self.services.by_prompt(is_bad, shape.generations), -torch.inf)
        returns = None
        if self.args.negative_loss == "reinforce":
            assert units.returns is not None
            returns = self.services.by_prompt(units.returns, shape.generations)
        own = self.coefficients(log_w, returns, returns)
        return Weights(own=self.services.by_unit(own, units.own.rewards), log_w=log_w, log_potential=log_potential)

    def observe(self, units: Units, scores: SetScores, weights: Weights, shape: Shape) -> None:
        """Logs the weights, and passes them to what adapts to them, such as the choice of samplers. A collective call."""
        if weights.log_w is not None and weights.log_potential is not None:
            self.logs.importance("negative", weights.log_w, ~weights.log_potential.isnan())

    # Learn

    def learn(self, units: Units, scores: SetScores, shape: Shape) -> None:
        """Hook in which a proposal accumulates its gradient from the extra samples of a micro-batch."""

    def end_of_update(self) -> None:
        """Hook in which a proposal takes its step, once the gradient of an update is complete."""

    def drop(self) -> None:
        """Hook that discards samples that wait for the end of an update, such as those of a run that failed."""

    # What a checkpoint keeps

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, for JSON."""
        return {}

    def tensors(self) -> dict[str, torch.Tensor]:
        """Tensors that a checkpoint keeps as well."""
        return {}

    def load_state(self, state: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        """Restores what [`state`] and [`tensors`] gave."""

    # Parts of weights

    @property
    def bad_reward_threshold(self) -> float | None:
        """Reward under which a sample is bad; `None` if it is not known."""
        return self.args.bad_reward_threshold

    def scheduled(self, name: str) -> float:
        """`alpha` or `target_dist_beta`, by name, at this update: constant, or moving geometrically from its `_start` over all updates."""
        start, end = getattr(self.args, f"{name}_start"), getattr(self.args, name)
        if start is None:
            return end
        state = self.services.state()
        return geometric_schedule(start, end, min(state.global_step / max(state.max_steps - 1, 1), 1.0))

    def log_potential(self, rewards: torch.Tensor) -> torch.Tensor:
        """log φ (nats) of each sample, of the shape of its raw (not transformed) rewards; NaN without a reward."""
        args, beta = self.args, self.scheduled("target_dist_beta")
        if args.potential == "indicator":
            threshold = self.bad_reward_threshold
            return indicator_log_potential(rewards, -math.inf if threshold is None else threshold)
        if args.potential == "class":
            return class_log_potential(rewards, beta, args.target_class)
        return tilted_log_potential(rewards, beta, args.reward_cap)

    def coefficients(
        self, log_w: torch.Tensor, returns_negative: torch.Tensor | None, returns: torch.Tensor | None
    ) -> torch.Tensor:
        """
        Coefficients of weighted samples in the policy loss, of shape `(P, K)`.

        Args:
            log_w (`torch.Tensor` of shape `(P, K)`):
                Log-weights, −inf for samples without a reward.
            returns_negative, returns (`torch.Tensor` of shape `(P, K)` and `(P, N)`, *optional*):
                Returns of these samples and of the policy's, which `negative_loss="reinforce"` needs.
        """
        args, alpha = self.args, self.scheduled("alpha")
        normalized_w = normalize_weights(log_w)
        if args.negative_loss == "push_down":
            return negative_coefficients(normalized_w, alpha, args.alpha_normalization)
        assert returns_negative is not None
        baseline: Any = args.negative_baseline if log_w.size(1) > 1 else "none"  # one sample: only in evaluation
        return negative_reinforce_coefficients(
            normalized_w, returns_negative, alpha, baseline, returns, args.alpha_normalization
        )


class ExtraSamplesTerm(NegativeTerm):
    """A negative term of samples that are drawn for it, in addition to the policy's own."""

    def draw(self, rows: list[dict[str, Any]], units: Units, shape: Shape, source: Source | None) -> Units:
        """As [`NegativeTerm.draw`], with extra samples from `source`."""
        units = replace(units, extra=self.services.drawing.draw_extra(rows, units, shape, source or Source()))
        units = self.after_drawing(units, shape)
        return self.weigh_early(units, shape) if shape.early else units

    def after_drawing(self, units: Units, shape: Shape) -> Units:
        """Hook that may read and extend a generation batch with its extra samples before it is scored. All processes call it."""
        return units

    def weigh_early(self, units: Units, shape: Shape) -> Units:
        """As [`NegativeTerm.weigh_early`]. The scores are kept with the samples, since the policy changes before these are used."""
        wanted, extra = self.wanted(units), units.extra_samples
        if units.own.log_p is None:
            wanted = replace(wanted, sets=(EXTRA, OWN))
        elif wanted.sampler is None:
            wanted = replace(wanted, sets=(EXTRA,))
        else:  # of the policy's own, only those that are scored under the sampler
            wanted = replace(wanted, sets=(EXTRA, OWN), needed=wanted.needed | {OWN: wanted.by_sampler[OWN]})
        scores = self.services.scoring.score(self.services.model, units, shape, wanted, gradient=False)
        scores = self.score_early(units, scores, shape)
        units = units.with_extra(log_p=scores.log_p[EXTRA], drawn_log_p=self.drawn_log_p(extra, scores))
        weights = self.weigh(units, scores, shape)
        self.observe(units, scores, weights, shape)
        return weights.added_to(units)

    def score_early(self, units: Units, scores: SetScores, shape: Shape) -> SetScores:
        """As [`score`], without gradient, of samples that were just drawn."""
        return scores

    def drawn_log_p(self, extra: CompletionSet, scores: SetScores) -> torch.Tensor:
        """Log-probabilities (nats) of extra samples under what drew them, `(U, m, T)`, detached."""
        return scores.of(EXTRA, extra)

    def wanted(self, units: Units) -> Wanted:
        """As [`NegativeTerm.wanted`]: the policy's samples and, of the extra ones, those that have a weight."""
        coefficients = units.extra_samples.coefficients
        return Wanted((OWN, EXTRA), {} if coefficients is None else {EXTRA: coefficients != 0})

    def score(self, units: Units, scores: SetScores, shape: Shape) -> SetScores:
        """As [`NegativeTerm.score`]; compares a vLLM engine's log-probabilities with the model's."""
        extra = units.extra_samples
        if extra.engine_log_p is not None:
            self.logs.compare_engine(extra, self.drawn_log_p(extra, scores), f"{PROPOSAL_FOLDER}/")
        return scores

    def is_weighed(self, units: Units) -> bool:
        return super().is_weighed(units) or units.extra_samples.coefficients is not None

    def log_extra_samples(
        self, units: Units, scores: SetScores, shape: Shape, ranked: torch.Tensor | None = None
    ) -> None:
        """
        Logs how extra samples compare with the policy's: the share of distinct ones, and the rank of their log-probabilities. A collective
        call where prompts are cut apart.

        Args:
            units ([`Units`]): Samples of both kinds.
            scores ([`SetScores`]): Their log-probabilities under the policy.
            shape ([`Shape`]): How the batch is cut.
            ranked (`torch.Tensor` of shape `(U, m)`, *optional*): Which extra samples are ranked, by default all.
        """
        by_prompt, extra, size = self.services.by_prompt, units.extra_samples, shape.extra
        mask = by_prompt(extra.mask, size)
        has_reward = (~by_prompt(extra.rewards, size).isnan()).any(dim=1)  # other prompts may only fill up a batch
        self.logs.mean("proposal/distinct", distinct_share(by_prompt(extra.ids, size), mask)[has_reward])
        own = by_prompt(sequence_log_prob(scores.of(OWN, units.own), units.own.mask), shape.generations)
        ranked = None if ranked is None else by_prompt(ranked, size)
        log_p = sequence_log_prob(by_prompt(scores.of(EXTRA, extra), size), mask)
        self.logs.mean("proposal/log_p_rank", rank_among(log_p, own, ranked)[has_reward])
