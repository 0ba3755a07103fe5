"""
What draws the samples of a negative term: a sampler of the policy's own logits, chosen as training goes by how much each one helps.

Axis letters: V tokens of the vocabulary, P prompts, N policy samples and K others of a prompt, B completions of T tokens, S samplers.
"""

from collections import deque
from typing import Any

import numpy as np
import torch
from accelerate.logging import get_logger
from accelerate.utils import gather_object

from ..generation._samplers import POLICY, Sampler


logger = get_logger(__name__)

TEMPERATURES = (1.3, 1.6, 2.0)
TILTS = (0.5, 1.0, 1.5)  # nats by which a token is raised whose completions have rewards one spread lower
HIGHEST = 3.0  # nats: no token is raised by more
ELITE = 0.02  # share of the lowest rewards by which samplers are judged, where fewer are bad
_REWARDS, _FINDS, _PRIOR = 1024, 200, 3  # latest rewards and finds that are kept; finds that say that nothing helps
_FARTHEST = 6.0  # spreads: no reward counts as farther from the others


class TokenEffects:
    """
    By how much each token moves the reward of a completion that has it: the mean deviation of these rewards, shrunk towards 0.

    Args:
        vocabulary (`int`):
            V.
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
        """Effects (V,), in spreads of the reward. A token that was seen once has half of what its completion says."""
        return self.sums[1] / (self.sums[0] + 1.0)


class SamplerChoice:
    """
    The samplers among which a negative term may draw, and their gains.

    The *gain* of a sampler q is by how much extra samples from it help to estimate P(bad): the second moment of n samples of the policy p,
    over that of n / 2 of each that are weighed by their mixture m. It is 1 where they are worth as much as more of the policy's own, 0.5 where
    they are wasted. All samplers' gains come from the bad samples that were found, whatever drew them: Σw / Σw·(p / m), w being their
    importance weights. Where few are bad, the lowest 2 % of the rewards serve in their place, as in the cross-entropy method ([Rubinstein,
    1999](https://doi.org/10.1023/A:1010091220143)).

    One sampler is the policy itself, some are the policy at higher temperatures, and some raise the logits of tokens whose completions
    had low rewards.

    Args:
        trainer ([`UnitSampling`]):
            Trainer of the policy.
        temperature (`float`, *optional*):
            The one temperature to draw at. If `None`, the sampler with the largest gain draws.
        tilts (`bool`):
            Whether logits of tokens can be raised where samples are drawn and scored.
    """

    def __init__(self, trainer: Any, temperature: float | None, tilts: bool):
        self._trainer, self._temperature, self._tilts = trainer, temperature, tilts
        self._vocabulary = trainer.model.config.get_text_config().vocab_size
        self.effects = TokenEffects(self._vocabulary)
        self._rewards: deque[float] = deque(maxlen=_REWARDS)
        self._finds: deque[list[float]] = deque(maxlen=_FINDS)  # weight, and p / m of each sampler after the first
        self._new: list[list[float]] = []
        self.index = 0 if temperature is None else 1
        self._warned = False
        self._make()

    def _make(self) -> None:
        """The samplers, with effects as they are now."""
        device = self._trainer.accelerator.device
        if self._temperature is not None:
            self.samplers = [POLICY, Sampler(self._temperature)]
            return
        self.samplers = [POLICY, *map(Sampler, TEMPERATURES)]
        if self._tilts:
            raised = -self.effects().float().to(device)
            self.samplers += [Sampler(bias=(size * raised).clamp(max=HIGHEST)) for size in TILTS]

    @property
    def sampler(self) -> Sampler:
        """What draws."""
        return self.samplers[self.index]

    def update(self) -> None:
        """Takes up what was seen since the last update, and chooses. All processes must call it."""
        trainer = self._trainer
        self._finds.extend(gather_object(self._new) if trainer._whole("train") else self._new)
        self._new = []
        self._make()
        gains, high = self.gains()
        if self._temperature is None:
            self.index = int(gains.argmax())
        elif high[1] < 1 and not self._warned:
            self._warned = True
            logger.warning(
                f"Samples at `proposal_temperature={self._temperature:g}` find less than as many more of the policy's own would: their gain "
                f"is {gains[1]:.2f} (`proposal/gain`; at most {high[1]:.2f}). Leave `proposal_temperature` unset: it is then chosen by the gain."
            )
        metrics = trainer._metrics["train"]
        metrics["proposal/gain"].append(float(gains[self.index]))
        metrics["proposal/temperature"].append(self.sampler.temperature)
        tilts = (0.0,) * (1 + len(TEMPERATURES)) + TILTS
        metrics["proposal/tilt"].append(tilts[self.index])

    def gains(self) -> tuple[np.ndarray, np.ndarray]:
        """Gain of each sampler (S,), and the upper end of its interval of 95 %."""
        prior = [[1.0] * len(self.samplers)] * _PRIOR
        weight, *ratios = np.array([*self._finds, *prior]).T
        ratio = np.array([np.ones_like(weight), *ratios])  # (S, finds)
        mean = ratio @ weight / weight.sum()
        error = np.sqrt(((ratio - mean[:, None]) ** 2) @ weight**2) / weight.sum()
        return 1 / mean, 1 / np.maximum(mean - 1.96 * error, 1e-9)

    def observe(self, *sets: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
        """
        Takes note of completions that this process has drawn: tokens and mask `(..., T)` and rewards `(...)` of each set, which one
        sampler drew. All processes must call it.
        """
        gather = self._trainer.accelerator.gather
        everyone = [gather(rewards.flatten()) for _, _, rewards in sets]
        for rewards in everyone:
            self._rewards.extend(rewards[rewards.isfinite()].tolist())
        if not self._rewards or self._temperature is not None or not self._tilts:
            return
        low, middle, high = np.quantile(self._rewards, (0.16, 0.5, 0.84))
        spread = (high - low) / 2 or float(np.std(self._rewards))
        if spread == 0:
            return
        new = 0.0
        for (ids, mask, rewards), of_all in zip(sets, everyone, strict=True):
            mean = ((of_all - middle) / spread).clamp(-_FARTHEST, _FARTHEST).nanmean()
            deviations = ((rewards.flatten() - middle) / spread).clamp(-_FARTHEST, _FARTHEST) - mean
            new = new + TokenEffects.of(ids.flatten(0, -2), mask.flatten(0, -2), deviations, self._vocabulary)
        self.effects.sums += self._trainer.accelerator.reduce(new, "sum").cpu().double()

    def elite_below(self, threshold: float) -> float:
        """The reward under which a sample tells of gains, `threshold` being that under which it is bad."""
        return max(threshold, float(np.quantile(self._rewards, ELITE))) if self._rewards else threshold

    def judge(self, log_p: torch.Tensor, log_q: torch.Tensor, log_w: torch.Tensor) -> None:
        """
        Takes note of finds.

        Args:
            log_p (`torch.Tensor` of shape `(P, N + K)`): Log-probabilities (nats) of samples under the policy.
            log_q (`torch.Tensor` of shape `(P, N + K, S)`): The same by each sampler.
            log_w (`torch.Tensor` of shape `(P, N + K)`): Log-weights, −inf of samples that are no finds.
        """
        found = log_w > -torch.inf
        ratio = 2 * torch.sigmoid(log_p[found].unsqueeze(1) - log_q[found])  # p / m, (finds, S)
        self._new += torch.cat([log_w[found].exp().unsqueeze(1), ratio[:, 1:]], dim=1).tolist()

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, as JSON takes it to the bit; the effects' sums are kept as a tensor."""
        return {"rewards": [*self._rewards], "finds": [*self._finds], "new": self._new, "index": self.index}

    def load_state(self, state: dict[str, Any], sums: torch.Tensor) -> None:
        """Takes up what [`state`] gave, and the effects' sums."""
        self._rewards.extend(state["rewards"])
        self._finds.extend(state["finds"])
        self._new, self.index, self.effects.sums = state["new"], state["index"], sums
        self._make()
