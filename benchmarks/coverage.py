"""Coverage of the evaluation's intervals, in the world of two tokens, where the truth is known by enumeration.

    python -m benchmarks.coverage

Every completion of two tokens is enumerated, for several prompts and models; a repetition draws completions (and models and
prompts, for the intervals over these) from the enumerated distribution, as the models themselves would, and asks each interval
whether it holds the truth. "Seeds" are the embedded policy with noise on its weights, one population a method, so that the
mean over all possible seeds is known as well. Also counted is on which side an interval misses.
"""

import argparse
import copy
import random
from collections.abc import Callable

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from examples.worlds import two_tokens
from examples.worlds.exact import ExactEvaluator
from examples.worlds.two_tokens import grammar
from trl_repulse.evaluation import tails
from trl_repulse.evaluation.report import MIN_PROMPTS, MIN_SEEDS, estimates
from trl_repulse.evaluation.tails import Estimate, crossed_interval


THRESHOLD = -5.0
ONE_MODEL = ((1, 1000, (0.05,)), (4, 250, (0.05,)), (4, 2500, (0.05, 0.01)), (4, 25000, (0.001,)))  # with quantiles
SEEDS_PROMPTS_SAMPLES = (
    *((3, 4, 250), (3, 16, 100), (5, 4, 250), (5, 6, 250), (5, 8, 250), (5, 16, 100)),
    *((10, 4, 250), (10, 16, 100)),
)
# Seeds, prompts, and how much they differ
NORMAL_CELLS = (
    *((3, 16, 0.0, 0.0), (3, 16, 0.4, 0.1), (3, 16, 2.0, 1.0), (3, 50, 0.2, 0.0), (3, 50, 1.0, 2.0)),
    *((3, 200, 0.1, 0.0), (3, 200, 0.4, 1.0), (5, 50, 1.0, 1.0), (10, 50, 1.0, 1.0)),
)
TWO_SEEDS = ((2, 4, 250), (2, 16, 100))


class World:
    """Rewards of all completions of each prompt in order, and their probabilities under each model."""

    def __init__(self, prompts: list[str], models: list[torch.nn.Module], tokenizer, reward, reward_tokenizer):
        bad = two_tokens.bad_token_ids(tokenizer)
        evaluator = ExactEvaluator(tokenizer, prompts, reward, bad, 2, reward_tokenizer=reward_tokenizer)
        rewards, order = evaluator.rewards.sort(dim=1)
        self.rewards = rewards.numpy()  # (P, C)
        probs = [evaluator.log_probs(model).exp().gather(1, order).numpy() for model in models]
        self.below = np.stack([each.cumsum(axis=1) / each.sum(axis=1, keepdims=True) for each in probs])  # (S, P, C)

    def draw(self, rng: np.random.Generator, models: np.ndarray, prompts: np.ndarray, samples: int) -> np.ndarray:
        """Rewards of completions of some prompts by some models, (S, P, N)."""
        uniform = rng.random((len(models), len(prompts), samples))
        last = self.rewards.shape[1] - 1
        cells = [
            [
                self.rewards[p, np.minimum(np.searchsorted(self.below[m, p], uniform[i, j], side="right"), last)]
                for j, p in enumerate(prompts)
            ]
            for i, m in enumerate(models)
        ]
        return np.array(cells)

    def mixture(self, models: np.ndarray, prompts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """All rewards in order, and the probability of each for a model and a prompt chosen uniformly."""
        probs = np.diff(self.below[models][:, prompts].mean(axis=0), axis=1, prepend=0.0) / len(prompts)
        rewards = self.rewards[prompts].ravel()
        order = np.argsort(rewards, kind="stable")
        return rewards[order], probs.ravel()[order]

    def positions(self, rng: np.random.Generator, model: int, prompts: np.ndarray, samples: int) -> np.ndarray:
        """
        Places of drawn completions in the order of rewards, (P, N), ties split: the share of a prompt's chance that lies lower.

        Over all prompts together places are uniform on (0, 1), so that the quantile of level a is a.
        """
        probs = np.diff(self.below[model, prompts], axis=1, prepend=0.0) / len(prompts)  # (P, C)
        order = np.argsort(self.rewards[prompts], axis=None, kind="stable")
        start = np.empty(probs.size)
        start[order] = probs.ravel()[order].cumsum() - probs.ravel()[order]
        start = start.reshape(probs.shape)
        last, found = probs.shape[1] - 1, np.empty((len(prompts), samples))
        for i, p in enumerate(prompts):
            drawn = np.minimum(np.searchsorted(self.below[model, p], rng.random(samples), side="right"), last)
            found[i] = start[i, drawn] + rng.random(samples) * probs[i, drawn]
        return found


def truths(rewards: np.ndarray, probs: np.ndarray, quantiles: tuple, levels: tuple) -> dict[str, float]:
    """The same quantities as `estimates`, exactly."""
    cumulative = probs.cumsum()
    found = {"mean": float(rewards @ probs), f"P(r < {THRESHOLD:g})": float(probs[rewards < THRESHOLD].sum())}
    for level in quantiles:
        found[f"quantile {level:g}"] = float(rewards[np.searchsorted(cumulative, level)])
    for level in levels:
        weight = np.clip(level - (cumulative - probs), 0.0, probs)
        found[f"CVaR {level:g}"] = float(weight @ rewards) / level
    return found


class Tally:
    """Counts, for each interval, how often it holds the truth, and on which side it misses."""

    def __init__(self) -> None:
        self.counts: dict[str, list[int]] = {}

    def add(self, name: str, estimate: Estimate, truth: float) -> None:
        count = self.counts.setdefault(name, [0, 0, 0])
        count[1 + (truth < estimate.low) - (truth > estimate.high)] += 1

    def show(self, setting: str) -> None:
        for name, (above, inside, below) in self.counts.items():
            total = above + inside + below
            shares = (f"{100 * count / total:.1f} %" for count in (inside, below, above))
            print(f"| {setting} | {name} | {' | '.join(shares)} |", flush=True)


def repeat(count: int, setting: str, once: Callable[[Tally], None]) -> None:
    tally = Tally()
    for _ in range(count):
        once(tally)
    tally.show(setting)


def perturbed(model: torch.nn.Module, scale: float, generator: torch.Generator) -> torch.nn.Module:
    """The model with normal noise on each matrix, `scale` times the spread of its entries."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter += scale * parameter.std() * noise
    return model


def build(num_models: int, num_prompts: int) -> World:
    """Two populations of models, half of them each, and prompts of the grammar, the embedded four first."""
    tokenizer = AutoTokenizer.from_pretrained(two_tokens.policy_path())
    policy = AutoModelForCausalLM.from_pretrained(two_tokens.policy_path())
    reward = AutoModelForSequenceClassification.from_pretrained(two_tokens.reward_model_path())
    generator, rng = torch.Generator().manual_seed(0), random.Random(0)
    prompts = dict.fromkeys(two_tokens.load_prompts()["prompt"])
    while len(prompts) < num_prompts:
        prompts["".join(grammar.draw_frame(rng.choice(grammar.FAMILIES), rng))] = None
    models = [policy] + [perturbed(policy, scale, generator) for scale in (0.1, 0.2) for _ in range(num_models // 2)]
    reward_tokenizer = AutoTokenizer.from_pretrained(two_tokens.reward_model_path())
    return World(list(prompts), models, tokenizer, reward, reward_tokenizer)


def one_model(world: World, rng: np.random.Generator, repetitions: int) -> None:
    """Intervals for one model and its prompts: those of a report on one folder of samples."""
    policy = np.array([0])
    for (prompts, samples, quantiles), levels in zip(
        ONE_MODEL, ((0.1,), (0.1,), (0.1, 0.01), (0.01, 0.001)), strict=True
    ):
        chosen = np.arange(prompts)
        truth = truths(*world.mixture(policy, chosen), quantiles, levels)

        def once(
            tally: Tally, chosen=chosen, samples=samples, quantiles=quantiles, levels=levels, truth=truth
        ) -> None:
            values = world.draw(rng, policy, chosen, samples)
            for name, estimate in estimates(values, [THRESHOLD], levels, quantiles).items():
                tally.add(name, estimate, truth[name])

        repeat(repetitions, f"{prompts} × {samples:,} completions", once)


def split_ties(world: World, rng: np.random.Generator, repetitions: int) -> None:
    """Intervals of quantiles where no two completions share a reward: what the atoms of the world of two tokens add."""
    for prompts, samples, levels in ONE_MODEL:

        def once(tally: Tally, prompts=prompts, samples=samples, levels=levels) -> None:
            places = world.positions(rng, 0, np.arange(prompts), samples)
            for level in levels:
                tally.add(f"quantile {level:g}, ties split", tails.quantile(places, level), level)

        repeat(repetitions, f"{prompts} × {samples:,} completions", once)


def several_seeds(
    world: World, rng: np.random.Generator, repetitions: int, population: np.ndarray, settings: tuple
) -> None:
    """Intervals over seeds and prompts: those of a report on several folders."""
    every = np.arange(len(world.rewards))
    overall = truths(*world.mixture(population, every), (), (0.1,))
    for seeds, prompts, samples in settings:

        def once(tally: Tally, seeds=seeds, prompts=prompts, samples=samples) -> None:
            chosen = rng.choice(every, prompts)
            values = world.draw(rng, rng.choice(population, seeds), chosen, samples)
            truth = overall
            if seeds < MIN_SEEDS or prompts < MIN_PROMPTS:  # intervals are for these prompts
                truth = truths(*world.mixture(population, chosen), (), (0.1,))
            for name, estimate in estimates(values, [THRESHOLD], (0.1,)).items():
                tally.add(name, estimate, truth[name])

        repeat(repetitions, f"{seeds} seeds, {prompts} prompts, {samples} completions each", once)


def normal_cells(rng: np.random.Generator, repetitions: int, settings: tuple) -> None:
    """The interval over seeds and prompts where cells are normal with standard deviation 1, and seeds and prompts differ."""
    for seeds, prompts, of_seeds, of_prompts in settings:

        def once(tally: Tally, shape=(seeds, prompts), spread=(of_seeds, of_prompts)) -> None:
            cells = spread[0] * rng.normal(size=(shape[0], 1)) + spread[1] * rng.normal(size=(1, shape[1]))
            cells = cells + rng.normal(size=shape)
            ends = crossed_interval(cells)
            tally.add("mean", Estimate(float(cells.mean()), *ends, cells.size), 0.0)

        setting = f"normal cells, {seeds} seeds and {prompts} prompts, which differ by {of_seeds:g} and {of_prompts:g}"
        repeat(repetitions, setting, once)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=1000)
    parser.add_argument("--models", type=int, default=60, help="in both populations together")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    world = build(options.models, options.prompts)
    half = options.models // 2
    populations = [1 + np.arange(half), 1 + half + np.arange(half)]
    print("| samples | interval | covers | truth below | truth above |\n|---|---|---|---|---|", flush=True)
    one_model(world, np.random.default_rng([options.seed, 0]), options.repetitions)
    several_seeds(
        world, np.random.default_rng([options.seed, 1]), options.repetitions, populations[0], SEEDS_PROMPTS_SAMPLES
    )
    normal_cells(np.random.default_rng([options.seed, 3]), options.repetitions, NORMAL_CELLS)
    several_seeds(world, np.random.default_rng([options.seed, 4]), options.repetitions, populations[0], TWO_SEEDS)
    split_ties(world, np.random.default_rng([options.seed, 6]), options.repetitions)


if __name__ == "__main__":
    main()
