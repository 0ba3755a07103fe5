"""The policy itself, drawn by another sampler of its logits, in place of a proposal.

Axis letters: U units of n policy samples and m hot ones, P prompts, N policy samples and K hot ones of a prompt, T
completion tokens, V tokens of the vocabulary, B completions.
"""

import math
from collections import deque
from typing import Any

import numpy as np
import torch
from accelerate.logging import get_logger
from accelerate.utils import gather_object

from .._numbers import is_bad
from .._rules_of_thumb import bad_threshold_for
from ..engine.scoring import SetScores, Wanted
from ..engine.units import EXTRA, OWN, CompletionSet, Shape, Source, Units
from ..generation.drawing import POLICY, Sampler
from ..math.importance import (
    TILTS,
    TokenEffects,
    deviations_of,
    log_mixture_weights,
    normalize_weights,
    reward_scale,
    sequence_log_prob,
)
from ..math.objective import is_below
from ..models._model_checks import vocab_size
from .negative_term import ExtraSamplesTerm, Services, Weights


logger = get_logger(__name__)

TEMPERATURES = (1.3, 1.6, 2.0)
_KEPT = 0.98  # share of the counts that the next generation batch keeps
_REWARDS, _FINDS = 1024, 200  # latest rewards and finds that are kept
_SAMPLES = 500  # that measure the threshold
_SHARE = 0.1  # the most that they may be of a run's samples
_LEAST = 50  # the fewest that measure it
_MOST_BAD = 0.1  # largest share of the samples that may be under a threshold


class HotPolicy(ExtraSamplesTerm):
    """
    Draws from the policy with another sampler to find bad outputs, and weighs them.

    The probability of a hot sample is known exactly, under the policy and under its sampler: a prompt's N samples and K hot ones are
    weighed together against their mixture ([`~trl_repulse.math.importance.log_mixture_weights`]). Only bad samples have a weight.

    Args:
        services ([`Services`]): What the trainer gives.
    """

    def __init__(self, services: Services):
        super().__init__(services)
        self.choice = SamplerChoice(services, self.args.proposal_temperature)
        self.measured = MeasuredThreshold(services) if self.args.bad_reward_threshold is None else None

    @property
    def bad_reward_threshold(self) -> float | None:
        """As [`NegativeTerm.bad_reward_threshold`]; measured if it is not set."""
        return self.args.bad_reward_threshold if self.measured is None else self.measured.value

    def source(self, shape: Shape) -> Source:
        """The sampler of the next generation batch, which is chosen anew in training. A collective call."""
        if shape.training:
            # Samples of prompts that are cut apart have been gathered
            self.choice.choose(gathers=shape.unit == shape.generations)
        return Source(self.choice.sampler)

    def after_drawing(self, units: Units, shape: Shape) -> Units:
        """Updates threshold and counts, and drops the engine's log-probabilities of samples that are not scored."""
        own, extra = units.own, units.extra_samples
        if shape.training:
            if self.measured is not None:
                self.measured.observe(own.rewards)
            self.choice.observe(own, extra, self.bad_reward_threshold)
        if extra.engine_log_p is not None:
            compared = extra.engine_log_p.masked_fill(~self._may_be_bad(extra.rewards).unsqueeze(2), torch.nan)
            return units.with_extra(engine_log_p=compared)
        return units

    def _may_be_bad(self, rewards: torch.Tensor) -> torch.Tensor:
        """Samples under the threshold (none if it is unknown), and samples without a reward."""
        threshold = self.bad_reward_threshold
        return is_below(rewards, -math.inf if threshold is None else threshold) | rewards.isnan()

    def wanted(self, units: Units) -> Wanted:
        """As [`NegativeTerm.wanted`]. Until samples are weighed, the extra samples that may be bad, and all bad samples under the sampler
        too: no others have a weight."""
        extra = units.extra_samples
        if extra.coefficients is not None:
            return super().wanted(units)
        bad = {OWN: self._may_be_bad(units.own.rewards), EXTRA: self._may_be_bad(extra.rewards)}
        sampler = None if self.choice.sampler is POLICY else self.choice.sampler
        return Wanted((OWN, EXTRA), {EXTRA: bad[EXTRA]}, sampler, {} if sampler is None else bad)

    def drawn_log_p(self, extra: CompletionSet, scores: SetScores) -> torch.Tensor:
        """As [`ExtraSamplesTerm.drawn_log_p`]: as stored, else under the sampler, which may be the policy as it is."""
        if extra.drawn_log_p is not None:
            return extra.drawn_log_p
        return scores.by_sampler[EXTRA] if EXTRA in scores.by_sampler else scores.of(EXTRA, extra)

    def weigh(self, units: Units, scores: SetScores, shape: Shape) -> Weights:
        """As [`NegativeTerm.weigh`]. Weighs policy samples and hot samples against their mixture; only bad ones have a weight,
        so that the others need no scores. A collective call where prompts are cut apart."""
        own, extra, sizes = units.own, units.extra_samples, (shape.generations, shape.extra)

        def whole(of_own: torch.Tensor, of_extra: torch.Tensor) -> torch.Tensor:
            """Values of policy samples (U, n) and of hot ones (U, m), prompt by prompt."""
            parts = zip((of_own, of_extra), sizes, strict=True)
            return torch.cat([self.services.by_prompt(x, size) for x, size in parts], dim=1)  # (P, N + K)

        rewards = whole(own.rewards, extra.rewards)
        log_potential = self.log_potential(rewards).masked_fill(~self._may_be_bad(rewards), -torch.inf)
        in_policy = {OWN: scores.of(OWN, own), EXTRA: scores.of(EXTRA, extra)}
        in_sampler = in_policy | scores.by_sampler
        log_p, log_q = (
            whole(sequence_log_prob(x[OWN], own.mask), sequence_log_prob(x[EXTRA], extra.mask))
            for x in (in_policy, in_sampler)
        )
        log_w = log_mixture_weights(log_p, log_q, log_potential, *sizes)
        alpha = self.scheduled("alpha") / (sizes[1] if self.args.alpha_normalization == "samples" else 1)
        # The policy loss divides by the number of each kind
        of_own, of_extra = (-alpha * w * w.size(1) for w in normalize_weights(log_w).split(sizes, dim=1))
        by_unit = self.services.by_unit(of_own, own.rewards), self.services.by_unit(of_extra, extra.rewards)
        return Weights(*by_unit, log_w=log_w, log_potential=log_potential, log_p=log_p, log_q=log_q)

    def observe(self, units: Units, scores: SetScores, weights: Weights, shape: Shape) -> None:
        """As [`NegativeTerm.observe`]; also logs P(bad), and passes the bad samples to the choice of samplers."""
        log_w, log_potential = weights.log_w, weights.log_potential
        log_p, log_q = weights.log_p, weights.log_q
        assert log_w is not None and log_potential is not None and log_p is not None and log_q is not None
        if shape.training:
            self.choice.keep_finds(log_p, log_q, log_w - log_potential.nan_to_num(neginf=0.0))
        self.log_extra_samples(units, scores, shape, self._may_be_bad(units.extra_samples.rewards))
        scored, has_bad = ~log_potential.isnan(), (log_w > -torch.inf).any(dim=1)
        if self.bad_reward_threshold is not None:
            self.logs.importance("negative", log_w[has_bad], scored[has_bad])
            # P(bad) of a prompt: the mean of p / m over its samples with a reward, of which bad ones alone count
            p_bad = (log_w - log_potential).exp().masked_fill(log_w == -torch.inf, 0.0)
            self.logs.mean("negative/p_bad", (p_bad.sum(dim=1) / scored.sum(dim=1))[scored.any(dim=1)])

    def state(self) -> dict[str, Any]:
        return {"threshold": None if self.measured is None else self.measured.state(), "choice": self.choice.state()}

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"effects": self.choice.effects.sums}

    def load_state(self, state: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        if self.measured is not None and state["threshold"] is not None:
            self.measured.load_state(state["threshold"])
        self.choice.load_state(state["choice"], tensors["effects"])


class SamplerChoice:
    """
    Chooses among the policy itself, the policy at higher temperatures, and the policy with raised logits of tokens whose completions had
    low rewards.

    Before each generation batch one is chosen by Thompson sampling: each sampler's share of bad samples has a Beta distribution from its
    counts, which decay slowly, and the one with the highest draw is taken.

    Args:
        services ([`Services`]):
            What the trainer gives.
        temperature (`float`, *optional*):
            A fixed temperature, in place of a choice.
    """

    def __init__(self, services: Services, temperature: float | None):
        self._services, self._temperature = services, temperature
        self._tilts = temperature is None and services.takes_bias
        self._vocabulary = vocab_size(services.model)
        self.effects = TokenEffects(self._vocabulary)
        self._rewards: deque[float] = deque(maxlen=_REWARDS)
        self._finds: deque[list[float]] = deque(maxlen=_FINDS)  # weight, and p / m by what drew at that time
        self._new: list[list[float]] = []  # since the last choice
        self._random = np.random.default_rng(services.args.seed)  # the same on all processes
        if temperature is None:
            self.samplers = [POLICY, *map(Sampler, TEMPERATURES), *[POLICY] * (len(TILTS) if self._tilts else 0)]
        else:
            self.samplers = [Sampler(temperature)]
        self._tilt_of = [0.0] * (1 + len(TEMPERATURES)) + [*TILTS]  # by sampler
        self.counts = np.zeros((2, len(self.samplers)))  # bad and other samples of each
        self.index = 0

    @property
    def sampler(self) -> Sampler:
        """The chosen sampler."""
        return self.samplers[self.index]

    def choose(self, gathers: bool = True) -> None:
        """Adds the bad samples found since the last choice, gathered from all processes if `gathers`, and chooses the next sampler unless
        the temperature is fixed. A collective call: all processes draw the same choice."""
        self._finds.extend(gather_object(self._new) if gathers else self._new)
        self._new = []
        self._raise_tokens()
        if self._temperature is None:
            self.index = int(np.argmax(self._random.beta(*self.counts + 0.5)))  # 0.5: Jeffreys' prior
            self._services.logs.value("proposal/temperature", self.sampler.temperature)
        if (gain := self.gain()) is not None:
            self._services.logs.value("proposal/gain", gain)
        if self._tilts:
            self._services.logs.value("proposal/tilt", self._tilt_of[self.index])

    def _raise_tokens(self) -> None:
        """Replaces the tilted samplers by ones with the biases that were learned so far."""
        if self._tilts:
            device = self._services.accelerator.device
            self.samplers[-len(TILTS) :] = [Sampler(bias=bias.to(device)) for bias in self.effects.biases()]

    def gain(self) -> float | None:
        """How much the latest extra samples helped to estimate P(bad): the second moment of n samples of the policy p, over that of n / 2 of
        each, weighed by their mixture m. From bad samples with importance weights w: Σw / Σw·(p / m). It is 1 if extra samples were worth
        as much as more of the policy's own, 0.5 if they were useless, and `None` if nothing bad was found."""
        if not self._finds:
            return None
        weight, ratio = np.array(self._finds).T
        return float(weight.sum() / (weight @ ratio))

    def observe(self, own: CompletionSet, extra: CompletionSet, threshold: float | None) -> None:
        """Adds completions of all processes to the counts of what drew them, bad ones under the `threshold` (none are counted without one),
        and to the effects of tokens; `own` and `extra` are this process's. With a fixed temperature nothing happens. A collective call."""
        if self._temperature is not None:
            return
        accelerator = self._services.accelerator
        of_process = torch.cat([own.rewards.flatten(), extra.rewards.flatten()])
        of_all = accelerator.gather(of_process).view(accelerator.num_processes, -1)
        rewards_by_set = [x.flatten() for x in of_all.tensor_split([own.rewards.numel()], dim=1)]
        if threshold is not None:
            self.counts *= _KEPT
            for index, rewards in zip((0, self.index), rewards_by_set, strict=True):
                bad = int(is_below(rewards, threshold).sum())
                self.counts[:, index] += bad, int((~rewards.isnan()).sum()) - bad
        for rewards in rewards_by_set:
            self._rewards.extend(rewards[rewards.isfinite()].tolist())
        if not self._rewards or not self._tilts:
            return
        middle, spread = reward_scale(self._rewards)
        if spread == 0:
            return
        new_sums: torch.Tensor | float = 0.0
        for samples, rewards in zip((own, extra), rewards_by_set, strict=True):
            deviations = deviations_of(samples.rewards.flatten(), middle, spread)
            # From the mean of what one sampler drew: its own level says nothing about single tokens
            deviations = deviations - deviations_of(rewards, middle, spread).nanmean()
            ids, mask = samples.ids.flatten(0, -2), samples.mask.flatten(0, -2)
            new_sums = new_sums + TokenEffects.of(ids, mask, deviations, self._vocabulary)
        self.effects.sums += accelerator.reduce(new_sums, "sum").cpu().double()

    def keep_finds(self, log_p: torch.Tensor, log_q: torch.Tensor, log_w: torch.Tensor) -> None:
        """Keeps bad samples for [`gain`]. `log_p` and `log_q` (P, N + K) are log-probabilities (nats) of samples under the policy and the
        sampler, and `log_w` (P, N + K) log-weights without the potential, −inf for samples that are not bad. They count from the next
        [`choose`]."""
        is_find = log_w > -torch.inf
        ratio = 2 * torch.sigmoid(log_p[is_find] - log_q[is_find])  # p / m, where m = (p + q) / 2
        self._new += torch.stack([log_w[is_find].exp(), ratio], dim=1).tolist()

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, for JSON; the effects' sums are kept as a tensor."""
        return {
            "rewards": [*self._rewards],
            "finds": [*self._finds],
            "new": self._new,
            "index": self.index,
            "counts": self.counts.tolist(),
            "random": self._random.bit_generator.state,
        }

    def load_state(self, state: dict[str, Any], sums: torch.Tensor) -> None:
        """Restores what [`state`] gave, and the effects' sums."""
        self._rewards = deque(state["rewards"], maxlen=_REWARDS)
        self._finds = deque(state["finds"], maxlen=_FINDS)
        self._new, self.index, self.effects.sums = state["new"], state["index"], sums
        self.counts = np.array(state["counts"])
        self._random.bit_generator.state = state["random"]
        self._raise_tokens()


class MeasuredThreshold:
    """
    About the 2 % quantile of the rewards of the policy's first samples in all processes: 500, or a tenth of all if a run draws fewer
    than 5,000, and at least 50.

    Args:
        services ([`Services`]):
            What the trainer gives.
    """

    def __init__(self, services: Services):
        self.value: float | None = None  # until enough samples were drawn
        self._rewards: list[float] = []
        self._services = services
        self._has_begun = False

    def observe(self, rewards: torch.Tensor) -> None:
        """
        Adds the rewards of this process's samples, without NaN, until the threshold is measured. All processes must call it.

        Raises:
            `ValueError`: If more than a tenth of the rewards are the lowest, which is not rare.
        """
        if self.value is None:
            args, accelerator = self._services.args, self._services.accelerator
            batch = args.per_device_train_batch_size * accelerator.num_processes
            # Samples that the whole run draws
            max_steps = self._services.state().max_steps
            drawn = batch * max_steps * args.gradient_accumulation_steps // args.num_iterations
            if not self._has_begun and drawn < _LEAST:
                logger.warning(
                    f"`bad_reward_threshold` is not set, and takes {_LEAST} samples to measure. This run draws {drawn}, so that nothing "
                    "is pushed down. Set it, or train longer."
                )
            self._has_begun = True
            of_all = accelerator.gather(rewards.flatten())
            self._rewards += of_all[of_all.isfinite()].tolist()
            wanted = max(_LEAST, min(_SAMPLES, int(_SHARE * drawn)))
            if len(self._rewards) >= wanted and len(set(self._rewards)) > 1:
                self._measure()
        if self.value is not None:
            self._services.logs.value("negative/bad_reward_threshold", self.value)

    def _measure(self) -> None:
        """Sets the threshold from the rewards so far, and says so. Raises a `ValueError` if it would make too many of them bad."""
        rewards = np.array(self._rewards)
        value = bad_threshold_for(rewards)
        share = float(is_bad(rewards, value).mean())
        if share > _MOST_BAD:
            raise ValueError(
                f"`bad_reward_threshold` is not set and cannot be measured: {share:.0%} of the first {rewards.size} rewards are under {value:g}, "
                "the lowest possible threshold, and bad outputs should be rare. Set it to the reward under which an output is bad, or use `alpha=0`."
            )
        self._rewards, self.value = [], value
        logger.warning(
            f"`bad_reward_threshold` is not set. It is now {value:g}: {share:.1%} of the first {rewards.size} rewards are under it. From here "
            "on such completions are pushed down. Read some (`log_completions=True`), and set `bad_reward_threshold` to what you call bad."
        )

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, for JSON."""
        return {"value": self.value, "rewards": self._rewards}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restores what [`state`] gave."""
        self.value, self._rewards = state["value"], state["rewards"]
