"""Draws from a mixture whose components a pilot chose, and says how many completions each drew.

Axis letters: P prompts, N completions per prompt, K components, V vocabulary.

A first pilot draws from the policy and from it at a higher temperature; tokens' effects on the reward are learned from its
completions. A second one draws from all components, among them the policy with such tokens raised. The rest is drawn from the
mixture that is nearest to the bad completions of this pilot. The second pilot and the rest are one sample.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from datasets import Dataset
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...math.importance import TILTS, TokenEffects, deviations_of, reward_scale
from ...math.objective import is_below
from .._generation import Prompt
from ..tails import check_share
from .components import Component
from .counts import OF_POLICY, OF_REFERENCE, pilot_counts
from .estimates import weighted_quantiles, widened
from .mixture import MixtureSample
from .sampling import Draws, draw


LEAST_OF_THE_POLICY = 0.5  # share of the completions
_STEPS = 200
_LEARNED_AT = 1.6  # temperature of half of the first pilot


def policy_components(policy: Any, reference: Any = None) -> dict[str, Component]:
    """What finds bad outputs of a policy, a model, without a proposal; `reference` is the model before training."""
    found = {}
    for temperature, tokens in OF_POLICY:
        name = f"policy{'' if tokens is None else f', first {tokens}'} at temperature {temperature:g}"
        found[name] = Component(policy, temperature=temperature, tokens=tokens)
    if reference is not None:
        for share, temperature in OF_REFERENCE:
            name = "reference" if share == 1 else "between policy and reference"
            name += "" if temperature == 1 else f", temperature {temperature:g}"
            found[name] = Component(reference, share=share, temperature=temperature)
    return found


def draw_by_pilot(
    policy: PreTrainedModel,
    components: Mapping[str, Component],
    tokenizer: PreTrainedTokenizerBase,
    prompts: Dataset | Sequence[Prompt],
    reward: Callable[..., Any] | nn.Module,
    num_samples: int,
    max_completion_length: int,
    *,
    thresholds: Sequence[float] = (),
    levels: Sequence[float] = (),
    seed: int = 0,
    **kwargs: Any,
) -> tuple[Draws, list[str]]:
    """
    Draws completions of each prompt: at least half from the policy, the others from components that a pilot chose. Raises `ValueError` if
    `num_samples` is too low for the pilots. All processes must call it, and get the same.

    Args:
        policy, tokenizer, prompts, reward, max_completion_length, kwargs: As in [`~trl_repulse.evaluation.rare.sampling.draw`].
        components (`Mapping[str, Component]`): Candidates by name, beside the policy with raised tokens.
        num_samples (`int`): Completions of each prompt in all.
        thresholds, levels (`Sequence[float]`): The quantities P(r < threshold) and CVaR at a level to choose for, at least one.
        seed (`int`, *optional*, defaults to `0`): Seed of the draws.

    Returns:
        `tuple[Draws, list[str]]`: The completions, without those of the first pilot, and the names of the components.
    """
    if not (thresholds or levels) or any(math.isnan(each) for each in thresholds):
        raise ValueError("Give `thresholds`, numbers, or `levels` to choose for.")
    for level in levels:
        check_share("levels", level)
    names = ["policy", *components, *(f"policy, raised tokens × {size:g}" for size in TILTS)]
    first, counts = pilot_counts(num_samples, len(names) - 1)
    given = tokenizer, prompts, reward
    options: dict[str, Any] = {"rewarded": {}, **kwargs}

    def drawn(parts: Sequence[Component], counts: Sequence[int], stage: int) -> Draws:
        return draw(parts, *given, counts, max_completion_length, seed=3 * seed + stage, **options)  # three stages

    hot = Component(policy, temperature=_LEARNED_AT)
    given_parts = [Component(policy), hot, *components.values()]  # all are checked before anything is drawn
    learning = drawn(given_parts, [first, first, *[0] * len(components)], 0)
    biases = raised_tokens(learning, policy.config.get_text_config().vocab_size)
    broadcast_object_list(biases)  # devices of two kinds may round otherwise
    parts = [Component(policy), *components.values(), *(Component(policy, bias=bias) for bias in biases)]
    pilot = drawn(parts, counts, 1)
    counts = choose_counts(pilot.sample, num_samples - 2 * first - sum(counts), thresholds, levels)
    broadcast_object_list(counts)
    return pilot.joined(drawn(parts, counts, 2)), names


def raised_tokens(draws: Draws, vocabulary: int) -> list[torch.Tensor]:
    """Biases (V,) of logits, nats, that make low rewards more frequent, learned from completions: one for each of `TILTS`."""
    return raised_by(draws.sample.rewards.flatten(), [row for prompt in draws.ids for row in prompt], vocabulary)


def raised_by(rewards: torch.Tensor, rows: Sequence[Sequence[int]], vocabulary: int) -> list[torch.Tensor]:
    """As [`raised_tokens`], of B completions: their rewards (B,) and their tokens."""
    effects = TokenEffects(vocabulary)
    middle, spread = reward_scale(rewards.tolist())
    if spread:
        ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(row, dtype=torch.long) for row in rows], batch_first=True)
        mask = torch.arange(ids.size(1)) < torch.tensor([[len(row)] for row in rows])
        deviations = deviations_of(rewards, middle, spread)
        effects.sums += TokenEffects.of(ids, mask.long(), deviations - deviations.mean(), vocabulary).double()
    return effects.biases()


def choose_counts(
    pilot: MixtureSample, number: int, thresholds: Sequence[float] = (), levels: Sequence[float] = ()
) -> list[int]:
    """Completions of each prompt from each of the K components, `number` in all, that find most of the tail of a pilot. A component
    with fewer than 2 gets none, and the policy what is left."""
    tails = [tail(pilot, threshold) for threshold in thresholds]
    tails += [tail(pilot, quantile, quantile) for quantile in weighted_quantiles(pilot, levels)]
    tails = [part / part.sum() for part in tails if bool(part.any())]
    if tails:
        shares = choose_shares(pilot, torch.stack(tails).sum(dim=0))
    else:  # nothing was found
        others = len(pilot.counts) - 1
        shares = torch.tensor([LEAST_OF_THE_POLICY, *[(1 - LEAST_OF_THE_POLICY) / others] * others])
    counts = [int(number * share) for share in shares.tolist()]
    counts = [0 if k and n < 2 else n for k, n in enumerate(counts)]
    counts[0] += number - sum(counts)
    return counts


def tail(sample: MixtureSample, threshold: float, depth_from: float | None = None) -> torch.Tensor:
    """What each completion (P, N) contributes to P(r < threshold), or, by its depth, to the mean of (`depth_from` − r)₊. If too few
    effective completions do, the next lowest rewards count as well, as long as they are rare. All 0 if nothing was found."""
    own = sample.log_w.exp() * is_below(sample.rewards, threshold)
    if depth_from is not None:
        own = own * (depth_from - sample.rewards).clamp(min=0)
    return widened(sample, own)


def choose_shares(
    sample: MixtureSample, contributions: torch.Tensor, least: float = LEAST_OF_THE_POLICY
) -> torch.Tensor:
    """Shares (K,) of the components of the mixture m for which the cross-entropy −Σ contribution · log m is lowest, with at least so much
    for the policy (the cross-entropy method of Rubinstein, 1999). The problem is convex; expectation-maximisation solves it, over the F
    completions that contribute (`contributions` (P, N) above 0)."""
    in_tail = contributions > 0
    weight = contributions[in_tail].double()  # (F,)
    log_ratio = sample.log_density[in_tail].double() - sample.log_mixture[in_tail].unsqueeze(1)
    ratio = log_ratio.exp()  # (F, K): q over that of the pilot
    policy_alone = torch.zeros(ratio.size(1), dtype=torch.float64)
    policy_alone[0] = 1.0
    shares = torch.full_like(policy_alone, 1 / len(policy_alone))
    for _ in range(_STEPS):
        mixture = ratio @ (least * policy_alone + (1 - least) * shares)
        shares = shares * (ratio.T @ (weight / mixture))
        shares = shares / shares.sum()
    return least * policy_alone + (1 - least) * shares
