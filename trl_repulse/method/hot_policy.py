"""The policy itself, drawn by another sampler of its logits, in place of a proposal.

Axis letters: U units of n policy samples and m hot ones, P prompts, N policy samples and K hot ones of a prompt, T
completion tokens.
"""

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch

from ..engine.sampling import UnitSampling
from ..generation._samplers import POLICY, Sampler
from ..math.importance import log_mixture_weights, normalize_weights, sequence_log_prob
from .bad_threshold import MeasuredThreshold
from .collapse import CollapseWatch
from .negative_term import COEFFICIENTS, NEGATIVE, OWN, DrawnTerm
from .sampler_choice import SamplerChoice


class HotPolicy(DrawnTerm):
    """
    Draws from the policy with another sampler to find bad outputs, and weighs them.

    The probability of a hot sample is known exactly, under the policy and under its sampler: a prompt's N samples and K hot ones are
    weighed together against their mixture ([`~trl_repulse.math.importance.log_mixture_weights`]). Only bad samples have a weight.

    Args:
        trainer ([`UnitSampling`]):
            Trainer of the policy.
    """

    drawn_log_p = "proposal_drawn_log_p"

    def __init__(self, trainer: UnitSampling):
        super().__init__(trainer)
        self.choice = SamplerChoice(self.scorer, trainer.args.proposal_temperature)
        self.measured = MeasuredThreshold(self.scorer) if trainer.args.bad_reward_threshold is None else None
        self._watch = CollapseWatch(self)

    @contextlib.contextmanager
    def drawing(self) -> Iterator[None]:
        """As [`DrawnTerm.drawing`]; without vLLM too, hot samples are drawn in the call of the model that draws the policy's own."""
        if self.mode == "train":
            self.choice.choose()
        self.scorer.draw_jointly(*self.unit_sizes, self.sampler)
        try:
            with super().drawing():
                yield
        except BaseException:
            self.scorer.end_joint_draw()
            raise

    def draw(self, rows: list[dict[str, Any]], batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if self.measured is not None:
            self.measured.observe(batch["rewards"])
        try:
            drawn = super().draw(rows, batch)
        finally:
            self.scorer.end_joint_draw()
        if self.mode == "train":
            sets = ((batch, "completion", "rewards"), (drawn, NEGATIVE, "proposal_rewards"))
            self.choice.observe(*((x[f"{name}_ids"], x[f"{name}_mask"], x[rewards]) for x, name, rewards in sets))
        engine = f"{NEGATIVE}_engine_log_p"
        if engine in drawn:  # samples that are not scored are not compared
            drawn[engine] = drawn[engine].masked_fill(~self.needed(drawn)[NEGATIVE].unsqueeze(2), torch.nan)
        return drawn

    @property
    def _threshold(self) -> float:
        """Reward under which a sample is bad; −inf until it is known."""
        threshold = self.scorer.bad_reward_threshold
        return -math.inf if threshold is None else threshold

    def _may_be_bad(self, rewards: torch.Tensor) -> torch.Tensor:
        return ~(rewards >= self._threshold)  # true for NaN

    @property
    def sampler(self) -> Sampler:
        """The sampler of hot samples."""
        return self.choice.sampler

    def needed(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """As [`NegativeTerm.needed`]: the hot samples that may be bad."""
        return super().needed(batch) or {NEGATIVE: self._may_be_bad(batch["proposal_rewards"])}

    def by_sampler(self, batch: dict[str, torch.Tensor]) -> tuple[Sampler, dict[str, torch.Tensor]] | None:
        """As [`NegativeTerm.by_sampler`]: the samples that may be bad, until they are weighed; no others have a weight."""
        if COEFFICIENTS[NEGATIVE] in batch or self.sampler is POLICY:
            return None
        rewards = {OWN: batch["rewards"], NEGATIVE: batch["proposal_rewards"]}
        return self.sampler, {name: self._may_be_bad(x) for name, x in rewards.items()}

    def weigh_early(
        self, batch: dict[str, torch.Tensor], log_p: torch.Tensor, log_p_negative: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        drawn = batch.get(f"{NEGATIVE}_by_sampler", log_p_negative)
        return self.weigh(batch, log_p, log_p_negative) | {self.drawn_log_p: drawn}

    def weigh(
        self, batch: dict[str, torch.Tensor], log_p: torch.Tensor, log_p_hot: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """
        Weighs the bad samples. `log_p` and `log_p_hot` are log-probabilities (nats) of own and hot samples under the sampling-time
        policy, detached; those under the sampler are in the batch.

        Returns:
            `dict[str, torch.Tensor]`: `own_negative_coefficients` of shape `(U, n)` and `negative_coefficients` of shape
            `(U, m)`, for the policy loss.
        """
        scorer, args = self.scorer, self.trainer.args
        sizes = scorer.num_generations, self.size

        def whole(own: torch.Tensor, hot: torch.Tensor) -> torch.Tensor:
            return torch.cat([scorer.by_prompt(x, size) for x, size in zip((own, hot), sizes, strict=True)], dim=1)

        rewards = whole(batch["rewards"], batch["proposal_rewards"])  # (P, N + K)
        by_policy = {OWN: log_p, NEGATIVE: log_p_hot}
        by_sampler = {name: batch.get(f"{name}_by_sampler", x) for name, x in by_policy.items()}
        in_policy, in_sampler = (
            whole(*(sequence_log_prob(x, batch[f"{name}_mask"]) for name, x in each.items()))  # (P, N + K)
            for each in (by_policy, by_sampler)
        )
        log_potential = self.log_potential(rewards)
        log_potential = log_potential.masked_fill(rewards >= self._threshold, -torch.inf)
        log_w = log_mixture_weights(in_policy, in_sampler, log_potential, *sizes)  # (P, N + K)
        if self.mode == "train":
            self.choice.judge(in_policy, in_sampler, log_w - log_potential.nan_to_num(neginf=0.0))

        self._watch.look(batch, log_p, log_p_hot, self._may_be_bad(batch["proposal_rewards"]))
        scored = ~rewards.isnan()
        found = (log_w > -torch.inf).any(dim=1)
        p_bad = (log_w - log_potential).exp().masked_fill(log_w == -torch.inf, 0.0)
        p_bad = p_bad.sum(dim=1)[scored.any(dim=1)] / scored.sum(dim=1)[scored.any(dim=1)]
        if scorer.bad_reward_threshold is not None:
            scorer.log_importance("negative", log_w[found], scored[found])
            scorer.log("negative/p_bad", p_bad)
        if scorer.constraint is not None:
            scorer.constraint.observe(p_bad, resolution=0.0)
        alpha = self.scheduled("alpha") / (sizes[1] if args.alpha_normalization == "samples" else 1)
        # The policy loss divides by the number of each kind
        own, hot = (-alpha * w * w.size(1) for w in normalize_weights(log_w).split(sizes, dim=1))
        return {
            COEFFICIENTS[OWN]: scorer.by_unit(own, batch["rewards"]),
            COEFFICIENTS[NEGATIVE]: scorer.by_unit(hot, batch["proposal_rewards"]),
        }

    def state(self) -> dict[str, Any]:
        measured = None if self.measured is None else self.measured.state()
        return {"threshold": measured, "choice": self.choice.state()}

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"effects": self.choice.effects.sums}

    def load_state(self, state: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        if self.measured is not None and state["threshold"] is not None:
            self.measured.load_state(state["threshold"])
        self.choice.load_state(state["choice"], tensors["effects"])

    def learn(
        self, inputs: dict[str, torch.Tensor], log_p: torch.Tensor | None, log_p_negative: torch.Tensor | None
    ) -> dict[str, torch.Tensor]:
        if f"{NEGATIVE}_engine_log_p" in inputs:
            drawn = inputs.get(self.drawn_log_p, inputs.get(f"{NEGATIVE}_by_sampler", log_p_negative))
            self.scorer.log_engine(inputs, NEGATIVE, drawn)
        return super().learn(inputs, log_p, log_p_negative)
