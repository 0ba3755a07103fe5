"""
A candidate: training prompts drawn in proportion to their estimated contribution to P(bad), instead of by epochs.

Axis letters: X training prompts, P prompts of a generation batch, S samples of a prompt (its own and hot ones).
"""

from typing import Any

import numpy as np
import torch

from trl_repulse import RePULSeTrainer
from trl_repulse.method.hot_policy import HotPolicy
from trl_repulse.method.negative_term import COEFFICIENTS


_KEPT = 0.98  # share of what is known of a prompt that the next update keeps, as the policy moves
_KEPT_MEAN = 0.95  # the same of the mean over prompts
_KEPT_SIZE = 0.5  # share of the sums that say what weight is typical, of those before a batch that found something


class PromptDraws:
    """
    Which of X prompts a generation batch has, and how much each of them counts.

    A prompt's contribution is estimated by its bad samples, each with its importance weight w, in units of the mean over prompts at that
    time. It has a Gamma prior of mean 1: few prompts have been seen more than once or twice.

    Args:
        number (`int`): X.
        seed (`int`): Of the draws.
        floor (`float`): Share of the draws that are uniform, so that no prompt counts more than 1 / floor.
        prior (`float`): Finds of a typical weight that the mean over prompts is worth in a prompt's estimate.
        weighted (`bool`, *optional*): Whether the negative term has the weights too, as an unbiased gradient takes.
    """

    def __init__(self, number: int, seed: int, floor: float, prior: float, weighted: bool = True):
        self.number, self.floor, self.prior, self.weighted = number, floor, prior, weighted
        self._random = np.random.default_rng(seed)
        self.finds, self.expected = np.zeros(number), np.zeros(number)
        self._mean = np.zeros(2)  # sums over prompts of finds, weighted, and of the weights
        self._sizes = np.zeros(2)  # sums over finds of w and of w squared

    def probabilities(self) -> np.ndarray:
        """Of each prompt, (X,); they sum to 1."""
        estimates = (self.prior + self.finds) / (self.prior + self.expected)
        return self.floor / self.number + (1 - self.floor) * estimates / estimates.sum()

    def draw(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """
        Prompts of a batch and their weights 1 / (X · π), each (P,). A systematic sample in a random order: each prompt is drawn P · π
        times on average, and no more than once where that is below 1.
        """
        probabilities = self.probabilities()
        order = self._random.permutation(self.number)
        ends = probabilities[order].cumsum()
        ends[-1] = 1.0
        drawn = order[np.searchsorted(ends, (self._random.random() + np.arange(count)) / count, side="right")]
        return drawn, 1 / (self.number * probabilities[drawn])

    def observe(self, prompts: np.ndarray, counts: np.ndarray, w: np.ndarray) -> None:
        """Adds a batch: its prompts (P,), their weights (P,) and w (P, S) of their samples, 0 of those that are not bad."""
        self.finds *= _KEPT
        self.expected *= _KEPT
        if w.any():
            self._sizes = _KEPT_SIZE * self._sizes + np.array([w.sum(), (w**2).sum()])
        if not self._sizes.any():
            return
        finds = w.sum(axis=1) * self._sizes[0] / self._sizes[1]  # in units of a typical w
        self._mean = _KEPT_MEAN * self._mean + np.array([counts @ finds, counts.sum()])
        np.add.at(self.finds, prompts, finds)
        np.add.at(self.expected, prompts, self._mean[0] / self._mean[1])


class _HotPolicy(HotPolicy):
    """The hot policy, which tells what it found of each prompt, and weighs prompts."""

    def __init__(self, trainer: Any):
        super().__init__(trainer)
        judge = self.choice.judge

        def keeping(log_p: torch.Tensor, log_q: torch.Tensor, log_w: torch.Tensor) -> None:
            self._log_w = log_w
            judge(log_p, log_q, log_w)

        self.choice.judge = keeping

    def weigh(self, batch: dict[str, torch.Tensor], *log_p: torch.Tensor | None) -> dict[str, torch.Tensor]:
        coefficients = super().weigh(batch, *log_p)
        counts, draws = batch["prompt_weight"], self.trainer.draws
        draws.observe(batch["prompt_index"].numpy(), counts.double().numpy(), self._log_w.double().exp().numpy())
        probabilities = draws.probabilities()
        self.scorer.log_value("prompts/highest", float(draws.number * probabilities.max()))
        self.scorer.log_value("prompts/spread", float(draws.number * probabilities.std()))
        if draws.weighted:
            coefficients |= {name: coefficients[name] * counts.unsqueeze(1) for name in COEFFICIENTS.values()}
        return coefficients


class DrawnPromptsTrainer(RePULSeTrainer):
    """RePULSe on one process, on-policy, with prompts from [`PromptDraws`], whose arguments are `drawn`."""

    def __init__(self, *args: Any, drawn: dict[str, Any], **options: Any):
        super().__init__(*args, **options)
        self.draws = PromptDraws(len(self.train_dataset), self.args.seed, **drawn)

    def build_negative_term(self) -> HotPolicy:
        return _HotPolicy(self)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        prompts, counts = self.draws.draw(len(inputs) // self.num_generations)
        inputs = [self.train_dataset[int(i)] for i in prompts for _ in range(self.num_generations)]
        drawn = {"prompt_index": torch.from_numpy(prompts), "prompt_weight": torch.from_numpy(counts).float()}
        return super()._generate_and_score_completions(inputs) | drawn

    def _credit(self, batch: dict[str, torch.Tensor], log_p: torch.Tensor | None) -> dict[str, torch.Tensor]:
        credit = super()._credit(batch, log_p)
        return credit | {"coefficients": credit["coefficients"] * batch["prompt_weight"].unsqueeze(1)}
