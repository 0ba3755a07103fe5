"""The sampler of the hot policy, chosen during training by how often its samples are bad.

Axis letters: V tokens of the vocabulary, B completions of T tokens.
"""

from collections import deque
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object

from ..engine.scorer import Scorer
from ..generation._samplers import POLICY, Sampler


TEMPERATURES = (1.3, 1.6, 2.0)
TILTS = (0.5, 1.0, 1.5)  # nats by which a token is raised whose completions have rewards one spread lower
HIGHEST = 3.0  # nats: the most that a token is raised
_KEPT = 0.98  # share of the counts that the next generation batch keeps
_REWARDS, _FINDS = 1024, 200  # latest rewards and finds that are kept
_FARTHEST = 6.0  # spreads: the largest deviation of a reward


class TokenEffects:
    """
    Effect of each of V tokens on the reward of completions that have it: the mean deviation of their rewards, shrunk towards 0.
    """

    def __init__(self, vocabulary: int):
        # Completions that have the token, and the sum of their rewards' deviations
        self.sums = torch.zeros(2, vocabulary, dtype=torch.float64)

    @staticmethod
    def of(ids: torch.Tensor, mask: torch.Tensor, deviations: torch.Tensor, vocabulary: int) -> torch.Tensor:
        """The sums, (2, V), of completions (B, T) with deviations (B,); NaN leaves a completion out."""
        ids = ids.masked_fill((mask == 0) | deviations.isnan().unsqueeze(1), -1).sort(dim=1).values
        first = torch.ones_like(ids, dtype=torch.bool)
        first[:, 1:] = ids[:, 1:] != ids[:, :-1]
        row, column = torch.where(first & (ids >= 0) & (ids < vocabulary))
        sums = torch.zeros(2, vocabulary, device=ids.device)
        values = torch.stack([torch.ones_like(deviations), deviations]).float()[:, row]
        return sums.index_add_(1, ids[row, column], values)

    def __call__(self) -> torch.Tensor:
        """Effects (V,), in spreads of the reward. A token that was seen once has half the deviation of its completion."""
        return self.sums[1] / (self.sums[0] + 1.0)


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
            raised = -self.effects().float().to(self._scorer.trainer.accelerator.device)
            self.samplers[-len(TILTS) :] = [Sampler(bias=(size * raised).clamp(max=HIGHEST)) for size in TILTS]

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
                self.counts[:, index] += (rewards < threshold).sum().item(), (rewards >= threshold).sum().item()
        for rewards in everyone:
            self._rewards.extend(rewards[rewards.isfinite()].tolist())
        if not self._rewards or not self._tilts:
            return
        low, middle, high = np.quantile(self._rewards, (0.16, 0.5, 0.84))
        spread = (high - low) / 2 or float(np.std(self._rewards))
        if spread == 0:
            return
        new: torch.Tensor | float = 0.0
        for (ids, mask, rewards), of_all in zip(sets, everyone, strict=True):
            mean = ((of_all - middle) / spread).clamp(-_FARTHEST, _FARTHEST).nanmean()
            deviations = ((rewards.flatten() - middle) / spread).clamp(-_FARTHEST, _FARTHEST) - mean
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
