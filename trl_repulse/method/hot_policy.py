"""The policy itself, drawn by another sampler of its logits, in place of a proposal.

Axis letters: U units of n policy samples and m hot ones, P prompts, N policy samples and K hot ones of a prompt, T
completion tokens, V tokens of the vocabulary, B completions.
"""

import contextlib
import math
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from accelerate.logging import get_logger
from accelerate.utils import gather_object

from .._numbers import is_bad
from .._rules_of_thumb import bad_threshold_for
from ..engine.sampling import Scorer, UnitSampling
from ..generation._samplers import POLICY, Sampler
from ..math.importance import log_mixture_weights, normalize_weights, sequence_log_prob
from ..math.token_effects import TILTS, TokenEffects, deviations_of, reward_scale
from .collapse import CollapseWatch
from .negative_term import COEFFICIENTS, NEGATIVE, OWN, DrawnTerm


logger = get_logger(__name__)

TEMPERATURES = (1.3, 1.6, 2.0)
_KEPT = 0.98  # share of the counts that the next generation batch keeps
_REWARDS, _FINDS = 1024, 200  # latest rewards and finds that are kept
# Samples that are used, but no more than this share of a run's, and at least the last
_SAMPLES, _SHARE, _LEAST = 500, 0.1, 50
_MOST_BAD = 0.1  # largest share of the samples that may be under a threshold


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
        return is_bad(rewards, self._threshold) | rewards.isnan()

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
        self,
        batch: dict[str, torch.Tensor],
        log_p: torch.Tensor | None = None,
        log_p_negative: torch.Tensor | None = None,
    ) -> dict[str, torch.Tensor]:
        """As [`NegativeTerm.weigh`]: own and other samples that are bad. Log-probabilities under the sampler are in the batch."""
        scorer, args = self.scorer, self.trainer.args
        sizes = scorer.num_generations, self.size

        def whole(own: torch.Tensor, hot: torch.Tensor) -> torch.Tensor:
            return torch.cat([scorer.by_prompt(x, size) for x, size in zip((own, hot), sizes, strict=True)], dim=1)

        rewards = whole(batch["rewards"], batch["proposal_rewards"])  # (P, N + K)
        by_policy = {OWN: log_p, NEGATIVE: log_p_negative}
        by_sampler = {name: batch.get(f"{name}_by_sampler", x) for name, x in by_policy.items()}
        in_policy, in_sampler = (
            whole(*(sequence_log_prob(x, batch[f"{name}_mask"]) for name, x in each.items()))  # (P, N + K)
            for each in (by_policy, by_sampler)
        )
        log_potential = self.log_potential(rewards)
        log_potential = log_potential.masked_fill(~self._may_be_bad(rewards), -torch.inf)
        log_w = log_mixture_weights(in_policy, in_sampler, log_potential, *sizes)  # (P, N + K)
        if self.mode == "train":
            self.choice.judge(in_policy, in_sampler, log_w - log_potential.nan_to_num(neginf=0.0))

        self._watch.look(batch, log_p, log_p_negative, self._may_be_bad(batch["proposal_rewards"]))
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


class SamplerChoice:
    """
    Chooses among the policy itself, the policy at higher temperatures, and the policy with raised logits of tokens whose completions had
    low rewards.

    Before each generation batch one is chosen by Thompson sampling: each sampler's share of bad samples has a Beta distribution from its
    counts, which decay slowly, and the one with the highest draw is taken.

    Args:
        scorer ([`Scorer`]):
            The trainer's services.
        temperature (`float`, *optional*):
            A fixed temperature, in place of a choice.
    """

    def __init__(self, scorer: Scorer, temperature: float | None):
        self._scorer, self._temperature = scorer, temperature
        self._tilts = temperature is None and scorer.takes_bias
        self._vocabulary = scorer.trainer.model.config.get_text_config().vocab_size
        self.effects = TokenEffects(self._vocabulary)
        self._rewards: deque[float] = deque(maxlen=_REWARDS)
        self._finds: deque[list[float]] = deque(maxlen=_FINDS)  # weight, and p / m by what drew at that time
        self._new: list[list[float]] = []
        self._random = np.random.default_rng(scorer.trainer.args.seed)  # the same on all processes
        if temperature is None:
            self.samplers = [POLICY, *map(Sampler, TEMPERATURES), *[POLICY] * (len(TILTS) if self._tilts else 0)]
        else:
            self.samplers = [Sampler(temperature)]
        self.counts = np.zeros((2, len(self.samplers)))  # bad and other samples of each
        self.index = 0

    @property
    def sampler(self) -> Sampler:
        """The chosen sampler."""
        return self.samplers[self.index]

    def choose(self) -> None:
        """Counts what was found since the last choice, and chooses the next sampler. All processes must call it."""
        self._finds.extend(gather_object(self._new) if self._scorer.holds_whole_prompts else self._new)
        self._new = []
        self._raise_tokens()
        if self._temperature is None:
            self.index = int(np.argmax(self._random.beta(*self.counts + 0.5)))
            self._scorer.log_value("proposal/temperature", self.sampler.temperature)
        if (gain := self.gain()) is not None:
            self._scorer.log_value("proposal/gain", gain)
        if self._tilts:
            self._scorer.log_value("proposal/tilt", ([0.0] * (1 + len(TEMPERATURES)) + [*TILTS])[self.index])

    def _raise_tokens(self) -> None:
        if self._tilts:
            biases = self.effects.biases()
            device = self._scorer.trainer.accelerator.device
            self.samplers[-len(TILTS) :] = [Sampler(bias=bias.to(device)) for bias in biases]

    def gain(self) -> float | None:
        """
        How much the latest extra samples helped to estimate P(bad): the second moment of n samples of the policy p, over that of n / 2 of
        each, weighed by their mixture m. From bad samples with importance weights w: Σw / Σw·(p / m). It is 1 if extra samples were worth
        as much as more of the policy's own, 0.5 if they were useless, and `None` if nothing bad was found.
        """
        if not self._finds:
            return None
        weight, ratio = np.array(self._finds).T
        return float(weight.sum() / (weight @ ratio))

    def observe(self, *sets: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
        """
        Counts completions of this process: tokens and mask `(..., T)` and rewards `(...)` of the policy's own and of the others. All
        processes must call it.
        """
        if self._temperature is not None:
            return
        everyone = [self._scorer.trainer.accelerator.gather(rewards.flatten()) for _, _, rewards in sets]
        threshold = self._scorer.bad_reward_threshold
        if threshold is not None:
            self.counts *= _KEPT
            for index, rewards in zip((0, self.index), everyone, strict=True):
                bad = int(is_bad(rewards, threshold).sum())
                self.counts[:, index] += bad, int((~rewards.isnan()).sum()) - bad
        for rewards in everyone:
            self._rewards.extend(rewards[rewards.isfinite()].tolist())
        if not self._rewards or not self._tilts:
            return
        middle, spread = reward_scale(self._rewards)
        if spread == 0:
            return
        new: torch.Tensor | float = 0.0
        for (ids, mask, rewards), of_all in zip(sets, everyone, strict=True):
            deviations = (
                deviations_of(rewards.flatten(), middle, spread) - deviations_of(of_all, middle, spread).nanmean()
            )
            new = new + TokenEffects.of(ids.flatten(0, -2), mask.flatten(0, -2), deviations, self._vocabulary)
        self.effects.sums += self._scorer.trainer.accelerator.reduce(new, "sum").cpu().double()

    def judge(self, log_p: torch.Tensor, log_q: torch.Tensor, log_w: torch.Tensor) -> None:
        """
        Keeps bad samples for [`gain`]. `log_p` and `log_q` (P, N + K) are log-probabilities (nats) of samples under the policy and the
        sampler, and `log_w` (P, N + K) log-weights, −inf of samples that are not bad.
        """
        found = log_w > -torch.inf
        ratio = 2 * torch.sigmoid(log_p[found] - log_q[found])  # p / m
        self._new += torch.stack([log_w[found].exp(), ratio], dim=1).tolist()

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
        self._rewards.extend(state["rewards"])
        self._finds.extend(state["finds"])
        self._new, self.index, self.effects.sums = state["new"], state["index"], sums
        self.counts = np.array(state["counts"])
        self._random.bit_generator.state = state["random"]
        self._raise_tokens()


class MeasuredThreshold:
    """
    About the 2 % quantile of the rewards of the policy's first samples in all processes: 500, or a tenth of all if a run draws fewer
    than 5,000, and at least 50.

    Args:
        scorer ([`Scorer`]):
            The trainer's services.
    """

    def __init__(self, scorer: Scorer):
        self.value: float | None = None  # until enough samples were drawn
        self._rewards: list[float] = []
        self._scorer = scorer
        self._has_begun = False

    def observe(self, rewards: torch.Tensor) -> None:
        """
        Adds the rewards of this process's samples, without NaN, until the threshold is measured. All processes must call it.

        Raises:
            `ValueError`: If more than a tenth of the rewards are the lowest, which is not rare.
        """
        if self._scorer.mode != "train":
            return
        if self.value is None:
            trainer: Any = self._scorer.trainer
            args, batch = trainer.args, trainer.args.per_device_train_batch_size * trainer.accelerator.num_processes
            # In the run
            drawn = batch * trainer.state.max_steps * args.gradient_accumulation_steps // args.num_iterations
            if not self._has_begun and drawn < _LEAST:
                logger.warning(
                    f"`bad_reward_threshold` is not set, and takes {_LEAST} samples to measure. This run draws {drawn}, so that nothing "
                    "is pushed down. Set it, or train longer."
                )
            self._has_begun = True
            everyone = trainer.accelerator.gather(rewards.flatten())
            self._rewards += everyone[everyone.isfinite()].tolist()
            wanted = max(_LEAST, min(_SAMPLES, int(_SHARE * drawn)))
            if len(self._rewards) >= wanted and len(set(self._rewards)) > 1:
                self._measure()
        if self.value is not None:
            self._scorer.log_value("negative/bad_reward_threshold", self.value)

    def _measure(self) -> None:
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
