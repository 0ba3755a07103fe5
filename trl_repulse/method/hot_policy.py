"""The policy drawn by another sampler of its own logits, in the place of a proposal.

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
    Finds the policy's bad outputs by drawing from the policy itself by another sampler, and weighs them.

    A hot sample's probability is known exactly, under the policy and by its sampler: a prompt's N samples and its K hot ones are weighed
    together against their mixture ([`~trl_repulse.math.importance.log_mixture_weights`]). Only what is bad has a weight, so that a
    prompt for which nothing bad was drawn is not pushed at all.

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
        """As [`NegativeTerm.draw`]."""
        if self.measured is not None:
            self.measured.observe(batch["rewards"])
        try:
            drawn = super().draw(rows, batch)
        finally:
            self.scorer.end_joint_draw()
        if self.mode == "train":
            sets = ((batch, "completion", "rewards"), (drawn, NEGATIVE, "proposal_rewards"))
            self.choice.observe(*((x[f"{name}_ids"], x[f"{name}_mask"], x[rewards]) for x, name, rewards in sets))
        said = f"{NEGATIVE}_engine_log_p"
        if said in drawn:  # what is not scored is not compared
            drawn[said] = drawn[said].masked_fill(~self.needed(drawn)[NEGATIVE].unsqueeze(2), torch.nan)
        return drawn

    @property
    def _threshold(self) -> float:
        """Reward under which a sample is bad; −inf, under which nothing is, as long as it is not known."""
        threshold = self.scorer.bad_reward_threshold
        return -math.inf if threshold is None else threshold

    def _may_be_bad(self, rewards: torch.Tensor) -> torch.Tensor:
        return ~(rewards >= self._threshold)  # without a reward too

    @property
    def sampler(self) -> Sampler:
        """What draws hot samples."""
        return self.choice.sampler

    def needed(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """As [`NegativeTerm.needed`]: of the hot samples, what may be bad."""
        return super().needed(batch) or {NEGATIVE: self._may_be_bad(batch["proposal_rewards"])}

    def by_sampler(self, batch: dict[str, torch.Tensor]) -> tuple[Sampler, dict[str, torch.Tensor]] | None:
        """As [`NegativeTerm.by_sampler`]: what draws hot samples, until they are weighed, of what may be bad: nothing else has a weight."""
        if COEFFICIENTS[NEGATIVE] in batch or self.sampler is POLICY:
            return None
        rewards = {OWN: batch["rewards"], NEGATIVE: batch["proposal_rewards"]}
        return self.sampler, {name: self._may_be_bad(x) for name, x in rewards.items()}

    def weigh_early(
        self, batch: dict[str, torch.Tensor], log_p: torch.Tensor, log_p_negative: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """As [`DrawnTerm.weigh_early`]."""
        drawn = batch.get(f"{NEGATIVE}_by_sampler", log_p_negative)
        return self.weigh(batch, log_p, log_p_negative) | {self.drawn_log_p: drawn}

    def weigh(
        self, batch: dict[str, torch.Tensor], log_p: torch.Tensor, log_p_hot: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """
        What the policy makes of the bad ones among its samples and the hot ones, `log_p` and `log_p_hot` being their log-probabilities
        (nats) under the sampling-time policy, detached, and those by the sampler in the batch.

        Returns:
            `dict[str, torch.Tensor]`: `own_negative_coefficients` of shape `(U, n)` and `negative_coefficients` of shape
            `(U, m)`, for the policy loss.
        """
        scorer, args = self.scorer, self.trainer.args
        sizes = scorer.num_generations, self.size

        def whole(own: torch.Tensor, hot: torch.Tensor) -> torch.Tensor:
            return torch.cat([scorer.by_prompt(x, size) for x, size in zip((own, hot), sizes, strict=True)], dim=1)

        rewards = whole(batch["rewards"], batch["proposal_rewards"])  # (P, N + K)
        sets = ((log_p, OWN), (log_p_hot, NEGATIVE))
        in_policy = whole(*(sequence_log_prob(x, batch[f"{name}_mask"]) for x, name in sets))  # (P, N + K)
        drawn = (batch.get(f"{name}_by_sampler", x) for x, name in sets)
        in_sampler = whole(
            *(sequence_log_prob(x, batch[f"{name}_mask"]) for x, (_, name) in zip(drawn, sets, strict=True))
        )
        log_potential = self.log_potential(rewards, args.reweighting_beta)
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
        """As [`NegativeTerm.state`]."""
        measured = None if self.measured is None else self.measured.state()
        return {"threshold": measured, "choice": self.choice.state()}

    def tensors(self) -> dict[str, torch.Tensor]:
        """As [`NegativeTerm.tensors`]."""
        return {"effects": self.choice.effects.sums}

    def load_state(self, state: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        """As [`NegativeTerm.load_state`]."""
        if self.measured is not None and state["threshold"] is not None:
            self.measured.load_state(state["threshold"])
        self.choice.load_state(state["choice"], tensors["effects"])

    def learn(
        self, inputs: dict[str, torch.Tensor], log_p: torch.Tensor | None, log_p_negative: torch.Tensor | None
    ) -> dict[str, torch.Tensor]:
        """As [`NegativeTerm.learn`]."""
        if f"{NEGATIVE}_engine_log_p" in inputs:
            drawn = inputs.get(self.drawn_log_p, inputs.get(f"{NEGATIVE}_by_sampler", log_p_negative))
            self.scorer.log_engine(inputs, NEGATIVE, drawn)
        return super().learn(inputs, log_p, log_p_negative)
