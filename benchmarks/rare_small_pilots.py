"""Rules for pilots that are too small to tell, against the pilot's own, in worlds whose completions can be enumerated.

    python -m benchmarks.rare_small_pilots --worlds 0 1

A pilot is too small if the lowest rewards of 50 effective completions are not rare. Columns are squared errors over that of the
pilot's own rule. Axis letters: P prompts, N completions a prompt, K components.
"""

import argparse
from functools import partial
from unittest import mock

import torch

from benchmarks import rare_pilot
from benchmarks.rare_pilot import World, random_world
from trl_repulse.evaluation.rare import estimates
from trl_repulse.evaluation.rare.estimates import ENOUGH, prob_bad, widened
from trl_repulse.evaluation.rare.mixture import MixtureSample
from trl_repulse.evaluation.rare.pilot import choose_counts, choose_shares, tail


def second_moment(pilot: MixtureSample, part: torch.Tensor, shares: torch.Tensor) -> float:
    """Sum of contributions (P, N) times the policy's probability over that of the mixture with these shares (K,)."""
    mixture = (pilot.log_density.double() + shares.log()).logsumexp(dim=-1)
    return float((part * (pilot.log_density[..., 0].double() - mixture).exp()).sum())


def lowest(pilot: MixtureSample, threshold: float) -> torch.Tensor:
    """Contributions (P, N) of the lowest rewards of 50 effective completions, however common these are."""
    with mock.patch.object(estimates, "RARE", 1.0):
        return widened(pilot, pilot.log_w.exp() * (pilot.rewards < threshold))


def too_small(pilot: MixtureSample, threshold: float) -> bool:
    found = tail(pilot, threshold)
    return not found.any() or float(found.sum().square() / found.square().sum()) < ENOUGH


def plain(pilot: MixtureSample, number: int) -> list[int]:
    return [number, *[0] * (len(pilot.counts) - 1)]


def rest_to_policy(pilot: MixtureSample, number: int, thresholds: list[float]) -> list[int]:
    return plain(pilot, number) if too_small(pilot, *thresholds) else choose_counts(pilot, number, thresholds)


def checked_halves(pilot: MixtureSample, number: int, thresholds: list[float]) -> list[int]:
    """By the lowest rewards; plain if the shares chosen by one half of the pilot would lose on the other."""
    part, half = lowest(pilot, *thresholds), torch.arange(pilot.rewards.size(1)) % 2
    gains = [part * (half == k) for k in (0, 1)]
    lost = sum(
        second_moment(pilot, gains[1 - k], choose_shares(pilot, gains[k]))
        if gains[k].any()
        else float(gains[1 - k].sum())
        for k in (0, 1)
    )
    if lost > float(part.sum()):
        return plain(pilot, number)
    counts = [int(number * share) for share in choose_shares(pilot, part).tolist()]
    counts = [0 if k and n < 2 else n for k, n in enumerate(counts)]
    counts[0] += number - sum(counts)
    return counts


def unless_all_lose(pilot: MixtureSample, number: int, thresholds: list[float]) -> list[int]:
    """Plain if the pilot is too small and all components alike would lose on the lowest rewards."""
    others, part = len(pilot.counts) - 1, lowest(pilot, *thresholds)
    alike = torch.tensor([0.5, *[0.5 / others] * others], dtype=torch.float64)
    loses = second_moment(pilot, part, alike) > float(part.sum())
    return (
        plain(pilot, number) if loses and too_small(pilot, *thresholds) else choose_counts(pilot, number, thresholds)
    )


RULES = {
    "the pilot's own": choose_counts,
    "rest to the policy": rest_to_policy,
    "checked halves": checked_halves,
    "unless all lose": unless_all_lose,
}


def squared_error(world: World, rule, total: int, seeds: int) -> float:
    with mock.patch.object(rare_pilot, "choose_counts", rule):
        values = [
            prob_bad(world.drawn_by_pilot(total, torch.Generator().manual_seed(seed)), world.threshold).value
            for seed in range(seeds)
        ]
    return sum((value / world.truth - 1) ** 2 for value in values) / seeds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--total", type=int, default=300, help="completions a prompt")
    parser.add_argument("--seeds", type=int, default=200)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| world | P(bad) | gain over plain | " + " | ".join(list(RULES)[1:]) + " |\n|---|---|---|---|---|---|")
    kinds = ({}, {"reference": False}, {"noise": 2.0}, {"reference": False, "blind": True})
    for seed in options.worlds:
        for make in (partial(random_world, seed, rare, **kind) for rare in (1e-3, 1e-4) for kind in kinds):
            world = make()
            own, *others = (squared_error(world, rule, options.total, options.seeds) for rule in RULES.values())
            gain = world.squared_error({0: 1.0}, options.total) / own
            cells = world.name, f"{world.truth:.1e}", f"{gain:.1f}", *(f"{other / own:.2f}" for other in others)
            print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
