"""The policy drawn by another sampler of its own logits, in the place of a proposal.

Axis letters: U units of n policy samples and m hot ones, P prompts, N policy samples and K hot ones of a prompt, T
completion tokens.
"""

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch

from .._adapters import base_of
from ..generation._joint_draw import JointDraw
from ..generation._samplers import POLICY, Sampler
from ..importance import log_mixture_weights, normalize_weights, sequence_log_prob
from ._bad_threshold import MeasuredThreshold
from ._beside import PROPOSAL_FOLDER
from ._collapse import CollapseWatch
from ._negative_term import COEFFICIENTS, NEGATIVE, OWN, DrawnTerm
from ._records import log_importance
from ._sampler_choice import SamplerChoice
from ._scoring import takes_bias
from ._units import UnitSampling


class HotPolicy(DrawnTerm):
    """
    Finds the policy's bad outputs by drawing from the policy itself by another sampler, and weighs them.

    A hot sample's probability is known exactly, under the policy and by its sampler: a prompt's N samples and its K hot ones are weighed
    together against their mixture ([`~trl_repulse.importance.log_mixture_weights`]). Only what is bad has a weight, so that a
    prompt for which nothing bad was drawn is not pushed at all.

    Args:
        trainer ([`UnitSampling`]):
            Trainer of the policy.
    """

    drawn_log_p = "proposal_drawn_log_p"

    def __init__(self, trainer: UnitSampling):
        super().__init__(trainer)
        args, base = trainer.args, base_of(trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False))
        served = args.use_transformers_continuous_batching or (args.use_vllm and args.vllm_mode == "server")
        tilts = not served and (takes_bias(base) or not trainer._guard.fused_head)
        self.choice = SamplerChoice(trainer, args.proposal_temperature, tilts)
        self.measured = MeasuredThreshold(trainer) if trainer.args.bad_reward_threshold is None else None
        self._watch = CollapseWatch(self)

    @contextlib.contextmanager
    def drawing(self) -> Iterator[None]:
        """As [`DrawnTerm.drawing`]; without vLLM too, hot samples are drawn in the call of the model that draws the policy's own."""
        trainer = self.trainer
        if self.mode == "train":
            self.choice.choose()
        # Continuous batching has no temperature of a row; where prompts are drawn one length at a time rows change places
        separate = trainer.args.use_transformers_continuous_batching or trainer._guard.sample_by_length
        # Environments may begin otherwise for each trajectory: what was drawn for the policy's prompts would be dropped
        separate = separate or trainer.use_vllm or trainer.environment_factories is not None
        trainer._joint_draw = None if separate else JointDraw(*self.unit_sizes, self.sampler)
        try:
            with super().drawing():
                yield
        except BaseException:
            trainer._joint_draw = None
            raise

    def draw(self, rows: list[dict[str, Any]], batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """As [`NegativeTerm.draw`]."""
        if self.measured is not None:
            self.measured.observe(batch["rewards"])
        try:
            drawn = super().draw(rows, batch)
        finally:
            self.trainer._joint_draw = None
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
        threshold = self.trainer.bad_reward_threshold
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
        trainer, args = self.trainer, self.trainer.args
        sizes = trainer._num_generations(self.mode), self.size(self.mode)

        def whole(own: torch.Tensor, hot: torch.Tensor) -> torch.Tensor:
            return torch.cat([trainer._to_prompts(x, size) for x, size in zip((own, hot), sizes, strict=True)], dim=1)

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
        if trainer.bad_reward_threshold is not None:
            log_importance(trainer, "negative", log_w[found], scored[found])
            trainer._log_mean("negative/p_bad", p_bad)
        if trainer._constraint is not None:
            trainer._constraint.observe(p_bad, resolution=0.0)
        alpha = self.scheduled("alpha") / (sizes[1] if args.alpha_normalization == "samples" else 1)
        # The policy loss divides by the number of each kind
        own, hot = (-alpha * w * w.size(1) for w in normalize_weights(log_w).split(sizes, dim=1))
        return {
            COEFFICIENTS[OWN]: trainer._to_units(own, batch["rewards"]),
            COEFFICIENTS[NEGATIVE]: trainer._to_units(hot, batch["proposal_rewards"]),
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
            self.trainer._log_engine(inputs, NEGATIVE, drawn, f"{PROPOSAL_FOLDER}/")
        return super().learn(inputs, log_p, log_p_negative)
