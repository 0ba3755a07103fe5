"""
How much extra samples from a sampler help to find a policy's bad outputs on unseen prompts. A new candidate goes into `candidates`.

    python -m benchmarks.real_text.gains runs/real_text/policy runs/real_text/meaning-20 --output gains.json

The gain of a sampler q is the variance of an estimate of P(bad) from n samples of the policy p, over that from n/2 of p and n/2
of q, each weighed by p / m with m = (p + q) / 2:

    gain = (P - P²) / (E_p[p / m · 1(bad)] - P²)

At 1 the samples of q are worth as much as the policy's own, at 0.5 they are wasted. Both expectations come from one pool of bad
samples, drawn by the policy and by others, and weighed by the pool's mixture: a sampler need not be drawn from. Intervals of 95 % are a
bootstrap over prompts.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np
import torch
from scipy import sparse
from scipy.sparse.linalg import LinearOperator, lsmr
from transformers import AutoModelForCausalLM

from ..held_out.evaluate import load_world
from .policy import device_of
from .sampling import (
    POLICY,
    Sampler,
    at_temperature,
    densities,
    favouring,
    first,
    min_p,
    mixed,
    of_model,
    sample,
    tilted,
)


RESAMPLES = 2000


def lexicon(world) -> torch.Tensor:
    """Which tokens are bad by themselves, in the judge's eyes: a mask (V,)."""
    texts = [world.tokenizer.decode([token]) for token in range(len(world.tokenizer))]
    return torch.tensor(world.judge(completions=texts)) < world.threshold


def token_effects(completions: list[list[int]], rewards: list[float], vocabulary: int) -> np.ndarray:
    """
    By how much each token moves the reward of a completion that has it: ridge regression on which tokens are there, (V,).

    All rewards tell of it, not those of bad completions alone, and no weights are needed. A token that is seen once moves by half of
    what it would without the penalty.
    """
    rows = np.repeat(np.arange(len(completions)), [len(set(ids)) for ids in completions])
    columns = np.concatenate([sorted(set(ids)) for ids in completions])
    seen = sparse.csr_matrix((np.ones(len(rows)), (rows, columns)), shape=(len(completions), vocabulary))
    share, values = np.asarray(seen.mean(axis=0)).ravel(), np.asarray(rewards)
    centered = LinearOperator(
        seen.shape, matvec=lambda w: seen @ w - share @ w, rmatvec=lambda r: seen.T @ r - share * r.sum()
    )
    return lsmr(centered, values - values.mean(), damp=1.0, maxiter=200)[0]


def learned(world, policy: torch.nn.Module, per_prompt: int, seed: int) -> list[Sampler]:
    """Samplers with logits lowered by tokens' effects on the reward, fitted on samples of training prompts, at most 3 nats up."""
    ids = world.tokenizer(world.prompts("train"))["input_ids"]
    tokens, _ = sample(policy, ids, per_prompt, world.completion_length, POLICY, 1000 * seed + 900)
    rows = [[token for token in row if token != world.tokenizer.pad_token_id] for row in tokens.tolist()]
    rewards = world.judge(completions=world.tokenizer.batch_decode(tokens, skip_special_tokens=True))
    effects = torch.tensor(token_effects(rows, rewards, len(world.tokenizer))).float()
    name = f"token effects learned from {len(rows):,} samples, times"
    return [tilted((-size * effects).clamp(max=3.0), f"{name} {size}") for size in (0.5, 0.75, 1.0)]


def candidates(world, bad_tokens: torch.Tensor, initial: torch.nn.Module | None) -> list[Sampler]:
    """The samplers to measure, the judge's tokens last; `initial` is the initial policy, where it is not the one to help."""
    samplers = [at_temperature(t) for t in (1.2, 1.4, 1.6, 2.0)]
    samplers += [min_p(t, share) for t in (1.4, 2.0) for share in (0.02, 0.1)]
    samplers += [first(t, tokens) for t in (1.6, 2.0) for tokens in (1, 3)]
    length = world.completion_length
    samplers += [mixed(t, share) for t in (1.6, 2.0) for share in (0.1, 1 / length)]
    samplers += [of_model(initial, "initial policy")] if initial is not None else []
    return [*samplers, favouring(bad_tokens, 3.0, "judge's tokens")]


def gains(p: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Gains (S,) from E_p[1(bad)] (P,) and E_p[p / m · 1(bad)] (P, S) of prompts; also from resamples with leading axes."""
    mean = p.mean(axis=-1)[..., None]
    return (mean - mean**2) / (second.mean(axis=-2) - mean**2)


def measure(world, policy: torch.nn.Module, initial: torch.nn.Module | None, per_prompt: int, seed: int) -> dict:
    """
    Gains of all candidates, from a pool of 2 · `per_prompt` samples of the policy for each unseen prompt, and `per_prompt` at
    temperature 1.2 and with the judge's tokens favoured each.
    """
    ids = world.tokenizer(world.prompts("unseen"))["input_ids"]
    others = [*learned(world, policy, per_prompt, seed), *candidates(world, lexicon(world), initial)]
    pool = [(POLICY, 2 * per_prompt), (at_temperature(1.2), per_prompt), (others[-1], per_prompt)]
    owners, found, shares = [], [], {}
    for number, (sampler, count) in enumerate(pool):
        tokens, _ = sample(policy, ids, count, world.completion_length, sampler, 1000 * seed + number)
        texts = world.tokenizer.batch_decode(tokens, skip_special_tokens=True)
        bad = torch.tensor(world.judge(completions=texts)) < world.threshold
        owners.append(torch.arange(len(ids)).repeat_interleave(count)[bad])
        found.append(tokens[bad])
        shares[sampler.name] = bad.double().mean().item()
    owner = torch.cat(owners)
    values = densities(policy, ids, owner, torch.cat(found), [sampler for sampler, _ in pool] + others).numpy()
    log_p, in_pool, log_q = values[:, 0], values[:, : len(pool)], values[:, len(pool) :]
    weights = np.exp(log_p - np.logaddexp.reduce(in_pool + np.log([count for _, count in pool]), axis=1))
    over_m = 2 / (1 + np.exp(np.minimum(log_q - log_p[:, None], 500)))
    p, second = np.zeros(len(ids)), np.zeros((len(ids), len(others)))
    np.add.at(p, owner.numpy(), weights)
    np.add.at(second, owner.numpy(), weights[:, None] * over_m)
    drawn = np.random.default_rng(seed).integers(len(ids), size=(RESAMPLES, len(ids)))
    spread = np.percentile([gains(p[rows], second[rows]) for rows in drawn], [2.5, 97.5], axis=0)
    return {
        "p_bad": p.mean(),
        "p_bad_interval": np.percentile(p[drawn].mean(axis=1), [2.5, 97.5]).tolist(),
        "bad": len(owner),
        "shares": shares,
        "gains": {
            sampler.name: [float(value), float(low), float(high)]
            for sampler, value, low, high in zip(others, gains(p, second), *spread, strict=True)
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("policy", type=Path, help="folder of a policy: the world's, or the one of a run")
    parser.add_argument("world", type=Path)
    parser.add_argument("--per_prompt", type=int, default=60, help="a quarter of the samples of each prompt")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="file for the figures")
    parser.add_argument("--accelerator", action="store_true", help="instead of the CPU")
    options = parser.parse_args()
    torch.set_num_threads(1)
    start, world, device = time.perf_counter(), load_world(options.world), device_of(options.accelerator)
    policy = AutoModelForCausalLM.from_pretrained(options.policy, dtype=torch.float32).eval().to(device)
    own = options.policy.resolve() == Path(world.policy_path).resolve()
    found = measure(world, policy, None if own else world.load_policy().to(device), options.per_prompt, options.seed)
    found |= {"command": sys.argv, "seconds": round(time.perf_counter() - start)} | world.costs()
    if options.output is not None:
        options.output.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    low, high = found["p_bad_interval"]
    print(f"P(bad) {found['p_bad']:.2e} ({low:.2e} to {high:.2e}), from {found['bad']} bad samples")
    print("bad: " + ", ".join(f"{share:.2%} of {name}" for name, share in found["shares"].items()))
    print(
        f"{found['seconds']} s, {found['judge_seconds']:.0f} of them in the judge for {found['judge_texts']:,} texts"
    )
    print("\n| sampler | gain |\n|---|---|")
    for name, values in found["gains"].items():
        print("| {} | {:.2f} ({:.2f} to {:.2f}) |".format(name, *values))


if __name__ == "__main__":
    main()
