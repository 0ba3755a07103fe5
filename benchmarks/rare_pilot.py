"""Components that a pilot chooses, against fixed mixtures and plain sampling, in worlds whose completions can be enumerated.

    python -m benchmarks.rare_pilot
    python -m benchmarks.rare_pilot --tables runs/rare --worlds
    python -m benchmarks.rare_pilot --models runs/policy runs/held_out/shop --total 400 --seeds 100
    python -m benchmarks.rare_pilot --models runs/policy runs/held_out/shop --runs runs/shop.jsonl --prompts 4 --seeds 200
    python -m benchmarks.rare_pilot --mbar

Every completion's probability under every component is known, and repetitions draw from these tables as `draw_by_pilot` does from
models. The *grid* is the policy with each component alone, half of the completions each, and with all of them alike; the mean squared
error of each is known exactly.

A random world has prompts of its own, completions of four tokens of ten, a reference in which a token depends on the last, a reward of
tokens and pairs of them, and the policy that is best for reward minus KL. A *blind* world has rewards at random, so that nothing can be
learned, and its reference for a policy. A *noisy* world adds noise to the logits of that policy, N(0, 2²) for each token after each
prefix: components then miss some of its bad outputs, and few completions carry the estimate. `--tables` adds the two policies of
`rare_events.py` in the world of two tokens, which are trained first if they are not there.

With `--models` nothing is enumerated, and pilots are taken from one pool of completions. With `--runs` too, each seed is a whole run of
`draw_by_pilot`. The file keeps the runs, and their mean is taken for the truth. Processes can share the work, each with a `--first_seed`
and a file of its own; join the files for the report.
"""

import argparse
import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.held_out.evaluate import load_world
from benchmarks.rare_world import load_tables, train
from benchmarks.real_text.policy import device_of
from examples.worlds import two_tokens
from trl_repulse.evaluation.log_probs import completion_logits
from trl_repulse.evaluation.rare.components import Component
from trl_repulse.evaluation.rare.estimates import cvar, prob_bad
from trl_repulse.evaluation.rare.mixture import MixtureSample, largest_normalization_error
from trl_repulse.evaluation.rare.pilot import (
    choose_counts,
    draw_by_pilot,
    pilot_counts,
    policy_components,
    raised_tokens,
)
from trl_repulse.evaluation.rare.sampling import Draws, draw
from trl_repulse.math.importance import TILTS


POLICY, REFERENCE = "policy", "reference"
LENGTH, VOCABULARY, PROMPTS, STRENGTH = 4, 10, 6, 0.7


@dataclass
class World:
    """
    Logits (P, S, T, V) by model, all S completions of each prompt (P, S, T), which tokens count, and rewards (P, S). S is the same for
    all prompts.
    """

    name: str
    logits: dict[str, torch.Tensor]
    completion: torch.Tensor
    counts: torch.Tensor
    rewards: torch.Tensor
    threshold: float

    def __post_init__(self) -> None:
        self.bad = self.rewards < self.threshold
        self.components = policy_components(POLICY, REFERENCE if REFERENCE in self.logits else None)
        self.columns = [self.log_prob(each) for each in (Component(POLICY), *self.components.values())]
        tail = self.columns[0].exp() * self.bad  # (P, S)
        self.truth = float(tail.sum(dim=1).mean())
        self.cvar = float((tail * self.rewards).sum(dim=1).mean()) / self.truth  # at the level P(bad)

    def log_prob(self, component: Component) -> torch.Tensor:
        models = self.logits[POLICY], self.logits[component.model]
        return torch.stack(
            [component.log_prob(*each) for each in zip(*models, self.completion, self.counts, strict=True)]
        )

    def draw(
        self,
        columns: list[torch.Tensor],
        counts: list[int],
        generator: torch.Generator,
        scored: list[torch.Tensor] | None = None,
        ids: bool = False,
    ) -> Draws:
        """Completions from tables (P, S) of log-probabilities, by which they are also scored unless others are given."""
        parts = []
        for log_q, count in zip(columns, counts, strict=True):
            steps = log_q.exp().cumsum(dim=1)
            points = torch.rand(len(steps), count, generator=generator, dtype=torch.float64) * steps[:, -1:]
            parts.append(torch.searchsorted(steps, points))
        index = torch.cat(parts, dim=1)  # (P, N)
        density = torch.stack([log_q.gather(1, index) for log_q in scored or columns], dim=-1)
        sample = MixtureSample(self.rewards.gather(1, index), density, tuple(counts))
        lengths = self.counts.sum(dim=2)
        rows = (
            [[self.completion[p, i, : lengths[p, i]].tolist() for i in row] for p, row in enumerate(index)]
            if ids
            else []
        )
        return Draws(sample, [[] for _ in rows], rows)

    def drawn_by_pilot(self, total: int, generator: torch.Generator) -> MixtureSample:
        """As `draw_by_pilot`."""
        first, pilot = pilot_counts(total, len(self.columns) + 2)
        hot = self.columns[1 + [*self.components].index("policy at temperature 1.6")]
        biases = raised_tokens(
            self.draw([self.columns[0], hot], [first, first], generator, ids=True), self.logits[POLICY].size(-1)
        )
        columns = [*self.columns, *(self.log_prob(Component(POLICY, bias=bias)) for bias in biases)]
        seen = self.draw(columns, pilot, generator).sample
        counts = choose_counts(seen, total - 2 * first - sum(pilot), [self.threshold])
        return seen.joined(self.draw(columns, counts, generator).sample)

    def squared_error(self, shares: dict[int, float], total: int) -> float:
        """Mean squared error of the mixture of components with these shares, relative to P(bad)²."""
        mixture = torch.stack([self.columns[k] + math.log(share) for k, share in shares.items()]).logsumexp(dim=0)
        second = ((2 * self.columns[0] - mixture).exp() * self.bad).sum(dim=1).mean()
        return float(second / self.truth**2 - 1) / (total * len(self.rewards))


def random_world(
    seed: int, probability: float, reference: bool = True, blind: bool = False, noise: float = 0.0
) -> World:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float) -> torch.Tensor:
        return scale * torch.randn(*shape, generator=generator, dtype=torch.float64)

    grid = torch.cartesian_prod(*[torch.arange(VOCABULARY)] * LENGTH)  # (S, T)
    last, start = normal(VOCABULARY, VOCABULARY, scale=1.5), normal(PROMPTS, VOCABULARY, scale=1.5)
    worth, pairs = normal(VOCABULARY, scale=1.0), normal(VOCABULARY, VOCABULARY, scale=0.7)
    of_prompt = normal(PROMPTS, VOCABULARY, scale=0.5)
    rewards = worth[grid].sum(dim=1) + pairs[grid[:, :-1], grid[:, 1:]].sum(dim=1) + of_prompt[:, grid].sum(dim=2)
    if blind:
        rewards = normal(PROMPTS, len(grid), scale=1.0)
    steps = [start[:, None, :].expand(PROMPTS, len(grid), -1)]
    steps += [last[grid[:, t]] + 0.5 * start[:, None, :] for t in range(LENGTH - 1)]
    before = torch.stack(steps, dim=2)  # (P, S, T, V)
    completion = grid.expand(PROMPTS, -1, -1)

    def of_completions(logits: torch.Tensor) -> torch.Tensor:
        return logits.log_softmax(-1).gather(-1, completion.unsqueeze(-1)).squeeze(-1).sum(-1)

    joint, steps = of_completions(before) + (0.0 if blind else rewards / STRENGTH), []
    joint = joint.view(PROMPTS, *[VOCABULARY] * LENGTH)
    for t in range(LENGTH):
        step = joint.flatten(t + 2).logsumexp(-1) if t + 1 < LENGTH else joint
        places = VOCABULARY**t
        steps.append(step.reshape(PROMPTS, places, VOCABULARY).repeat_interleave(len(grid) // places, dim=1))
    if noise:
        steps = [
            step
            + normal(PROMPTS, VOCABULARY**t, VOCABULARY, scale=noise).repeat_interleave(len(grid) // VOCABULARY**t, 1)
            for t, step in enumerate(steps)
        ]
    policy = torch.stack(steps, dim=2)
    ordered, order = rewards.flatten().sort()
    mass = (of_completions(policy).exp() / PROMPTS).flatten()[order].cumsum(0)
    threshold = float(ordered[int((mass < probability).sum())])
    logits = {POLICY: policy.float()} | ({REFERENCE: before.float()} if reference else {})
    kind = "blind" if blind else ("noisy" if noise else "random") + ("" if reference else ", no reference")
    counts = torch.ones_like(completion, dtype=torch.bool)
    return World(f"{kind} {seed}", logits, completion, counts, rewards, threshold)


def two_token_world(folder: Path, name: str) -> World:
    """A policy of `rare_events.py`; the reference is the policy before training."""
    tokenizer = AutoTokenizer.from_pretrained(two_tokens.policy_path())
    end, words = tokenizer.eos_token_id, len(tokenizer)
    rest = torch.tensor([i for i in range(words) if i != end])
    pairs = torch.stack([rest.repeat_interleave(words), torch.arange(words).repeat(len(rest))], dim=1)
    rows = torch.cat([torch.tensor([[end, end]]), pairs])  # as the tables have them is checked below
    prompts = [tokenizer(prompt)["input_ids"] for prompt in two_tokens.load_prompts()["prompt"]]
    logits, tables = {}, load_tables(folder)
    for key, path in ((POLICY, folder / name), (REFERENCE, two_tokens.policy_path())):
        model = AutoModelForCausalLM.from_pretrained(path)
        found = [completion_logits(model, [ids] * len(rows), [[end], *pairs.tolist()]) for ids in prompts]
        logits[key] = torch.stack([each[0] for each in found])
    counts = torch.stack([each[2] for each in found])
    world = World(f"two tokens, {name}", logits, rows.expand(len(prompts), -1, -1), counts, tables["rewards"], -5.0)
    expected = tables[name if name == POLICY else f"{name}_policy"]
    if not torch.allclose(world.columns[0], expected, atol=1e-4):
        raise ValueError("The tables list completions in another order; they are of another version.")
    return world


def report(world: World, total: int, seeds: int) -> tuple[str, ...]:
    others = len(world.components)
    grid = {name: world.squared_error({0: 0.5, k: 0.5}, total) for k, name in enumerate(world.components, 1)}
    grid["all alike"] = world.squared_error({0: 0.5} | dict.fromkeys(range(1, others + 1), 0.5 / others), total)
    plain = world.squared_error({0: 1.0}, total)
    best = min([*grid, "plain"], key=lambda name: (grid | {"plain": plain})[name])
    squares, held, cvars_held, found = [], 0, 0, 0.0
    for seed in range(seeds):
        sample = world.drawn_by_pilot(total, torch.Generator().manual_seed(seed))
        estimate, mean = prob_bad(sample, world.threshold), cvar(sample, world.truth)
        cvars_held += mean.low <= world.cvar <= mean.high
        squares.append((estimate.value / world.truth - 1) ** 2)
        held += estimate.low <= world.truth <= estimate.high
        found += estimate.value / world.truth / seeds
    error, spread = (float(each) for each in (torch.tensor(squares).mean(), torch.tensor(squares).std() / seeds**0.5))
    least = (grid | {"plain": plain})[best]
    numbers = f"{error:.4f} ± {spread:.4f}", best, f"{error / least:.2f}", f"{grid['all alike'] / error:.1f}"
    return (
        world.name,
        f"{world.truth:.1e}",
        *numbers,
        f"{plain / error:.1f}",
        f"{held / seeds:.1%}",
        f"{cvars_held / seeds:.1%}",
        f"{found - 1:+.1%}",
    )


def gain_of_prompts(known: torch.Tensor, moments: torch.Tensor, floor: float = 0.5) -> float:
    """
    The factor on the squared error if prompts got completions by the square root of their second moments (P,), as `known` has them,
    mixed with as many for each; `moments` (P,) are those that count.
    """
    roots = known.sqrt()
    share = floor / len(roots) + (1 - floor) * roots / roots.sum() if float(roots.sum()) else roots + 1 / len(roots)
    return float((moments / (len(roots) * share)).sum() / moments.sum())


class Models:
    """A policy of a held-out world, or of one of real text, with the initial policy as reference, and what `draw` takes."""

    def __init__(self, policy: Path, folder: Path, prompts: int, accelerator: bool = False) -> None:
        world, device = load_world(folder), device_of(accelerator)
        self.name, self.threshold, self.rest = world.name, world.threshold, (world.completion_length,)
        self.policy, reference = (
            AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(device)
            for path in (policy, world.policy_path)
        )
        reward = world.load_reward_model()
        self.options = {"batch_size": 256 if device.type == "cpu" else 1024, "progress": False}
        if isinstance(reward, torch.nn.Module):
            reward = reward.to(device)
            self.options["reward_tokenizer"] = AutoTokenizer.from_pretrained(world.reward_model_path)
        self.given = world.tokenizer, world.prompts("unseen")[:prompts], reward
        self.components = policy_components(self.policy, reference)


def runs_report(models: Models, path: Path, total: int, seeds: int, threshold: float, first_seed: int = 0) -> None:
    """Coverage of the interval over so many whole runs, and their squared error against plain sampling's."""
    policy, *given = models.policy, *models.given
    path.parent.mkdir(parents=True, exist_ok=True)
    done = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    setting = [models.name, threshold, total, len(models.given[1])]
    if any(run["setting"] != setting for run in done):
        raise ValueError(f"`{path}` holds runs of other settings; name another file.")
    for seed in range(first_seed + len(done), first_seed + seeds):
        drawn, _ = draw_by_pilot(
            *(policy, models.components, *given, total, *models.rest),
            **{"thresholds": [threshold], "seed": seed, **models.options},
        )
        found = prob_bad(drawn.sample, threshold)
        done.append(
            {"seed": seed, "value": found.value, "low": found.low, "high": found.high, "verdict": found.verdict}
            | {"bounds": found.bounds, "ess": found.diagnostics.ess, "setting": setting}
        )
        with path.open("a") as file:
            file.write(json.dumps(done[-1]) + "\n")
    done = done[:seeds]
    values = torch.tensor([run["value"] for run in done], dtype=torch.float64)
    truth, size = float(values.mean()), total * len(models.given[1])
    spread, plain = float(values.std()) / truth, math.sqrt((1 - truth) / truth / size)
    low, high = (
        sum(holds(run) for run in done) for holds in (lambda r: r["low"] > truth, lambda r: r["high"] < truth)
    )
    outside = sum(not run["bounds"][0] <= truth <= run["bounds"][1] for run in done)
    width = float(torch.tensor([run["high"] / max(run["low"], 1e-300) for run in done]).median())
    print(
        f"{models.name}, r < {threshold:g}: {len(done)} runs of {size:,} completions, P(bad) {truth:.2e} ± {spread / len(done) ** 0.5:.0%}"
    )
    print(f"spread {spread:.0%} (plain sampling {plain:.0%}): gain {(plain / spread) ** 2:.1f}")
    print(
        f"coverage {1 - (low + high) / len(done):.1%}; above the truth {low}, below {high}; bounds miss {outside}; high / low {width:.0f}"
    )
    print(
        {verdict: sum(run["verdict"] == verdict for run in done) for verdict in ("reliable", "bounds", "unreliable")}
    )


def models_report(models: Models, size: int, total: int, seeds: int, threshold: float) -> None:
    """
    Squared errors of mixtures. `size` completions of each prompt are drawn from each component once, and twice as many from the policy.
    A repetition takes a pilot from them, and the squared error of what it chose is estimated by all of them, as that of the grid is.
    """
    model, given, rest, options = models.policy, models.given, models.rest, models.options
    components, prompts = dict(models.components), len(models.given[1])
    first, pilot = pilot_counts(total, len(components) + 3)
    learning = draw([model, Component(model, temperature=1.6)], *given, [first, first], *rest, seed=1, **options)
    for size_of, bias in zip(TILTS, raised_tokens(learning, model.config.vocab_size), strict=True):
        components[f"policy, raised tokens × {size_of:g}"] = Component(model, bias=bias)
    counts = [2 * size, *[size] * len(components)]
    pool = draw([model, *components.values()], *given, counts, *rest, seed=2, **options).sample
    found = pool.log_w.exp() * (pool.rewards < threshold)
    truth, effective = float(found.mean()), float(found.sum() ** 2 / found.square().sum())

    def second(shares: list[float]) -> torch.Tensor:
        mixture = (pool.log_density + torch.tensor(shares, dtype=torch.float64).log()).logsumexp(dim=-1)
        return found * (pool.log_density[..., 0] - mixture).exp()  # (P, N)

    def error(shares: list[float]) -> float:
        return (float(second(shares).mean()) / truth**2 - 1) / (total * prompts)

    others = len(components)
    grid = {name: error([0.5, *(0.5 * (k == other) for other in range(others))]) for k, name in enumerate(components)}
    grid |= {"all alike": error([0.5, *[0.5 / others] * others]), "plain": error([1.0, *[0.0] * others])}
    best, generator, errors = min(grid, key=grid.__getitem__), torch.Generator().manual_seed(0), []
    by_prompt, by_half = [], []
    for _ in range(seeds):
        starts = [sum(counts[:k]) for k in range(len(counts))]
        places = [
            start + torch.rand(len(found), n, generator=generator).argsort(dim=1)[:, :m]
            for start, n, m in zip(starts, counts, pilot, strict=True)
        ]
        index = torch.cat(places, dim=1)
        density = pool.log_density.gather(1, index.unsqueeze(-1).expand(-1, -1, len(counts)))
        seen = MixtureSample(pool.rewards.gather(1, index), density, tuple(pilot))
        chosen = choose_counts(seen, total - 2 * first - sum(pilot), [threshold])
        drawn = [a + b for a, b in zip(pilot, chosen, strict=True)]
        shares = [n / sum(drawn) for n in drawn]
        errors.append(error(shares) * total / sum(drawn))
        moments = second(shares)
        seen_moments = moments.gather(1, index).sum(dim=1)  # (P,), of the pilot's completions alone
        by_prompt.append(gain_of_prompts(seen_moments, moments.sum(dim=1)))
        by_half.append(gain_of_prompts(moments[:, ::2].sum(dim=1), moments[:, 1::2].sum(dim=1)))
    known = [float(torch.tensor(each).mean()) for each in (by_prompt, by_half)]
    middle, low, high = (float(torch.tensor(errors).quantile(q)) for q in (0.5, 0.05, 0.95))
    print(
        f"{models.name}, r < {threshold:g}: P(bad) {truth:.1e}, from {effective:.0f} effective completions; normalisation is off by"
    )
    print(f"{largest_normalization_error(pool):.1f} standard errors. Gain of each over plain sampling:")
    for name, value in sorted(grid.items(), key=lambda item: item[1]):
        print(f"| {name} | {grid['plain'] / value:.2f} |")
    print(
        f"| **chosen by a pilot** (5 % and 95 % of {seeds}) | {grid['plain'] / middle:.1f} ({grid['plain'] / high:.1f}, {grid['plain'] / low:.1f}) |"
    )
    print(
        f"Squared error over that of the best, {best}: {middle / grid[best]:.2f} ({low / grid[best]:.2f}, {high / grid[best]:.2f})"
    )
    print(
        f"Completions shared out over prompts: squared error × {known[0]:.2f} by the pilot, × {known[1]:.2f} by half of all"
    )


def mbar(sample: MixtureSample, bad: torch.Tensor) -> tuple[float, float]:
    """
    P(bad) by the multistate Bennett acceptance ratio (Shirts and Chodera, 2008), which takes the components' normalisation for unknown,
    and how many standard errors it differs from the mean of the weights. Its influence function is that of the estimating equations.
    """
    density = sample.log_density.double().flatten(0, 1)
    drawn = torch.tensor(sample.counts, dtype=torch.float64) * sample.num_prompts
    log_z = torch.zeros(len(drawn), dtype=torch.float64)
    for _ in range(100):
        total = (density + drawn.log() - log_z).logsumexp(dim=1)
        new = (density - total[:, None]).logsumexp(dim=0)
        log_z, before = new - new[0], log_z
        if float((log_z - before).abs().max()) < 1e-10:
            break
    u = (density - log_z - (density + drawn.log() - log_z).logsumexp(dim=1)[:, None]).exp()
    u, event = u / u[:, 0].sum(), bad.flatten()
    jacobian = drawn * (u.T @ u) - torch.eye(len(drawn), dtype=torch.float64)
    slope = drawn * (u[event, 0] @ u[event])
    slope[0] -= u[event, 0].sum()
    influence = event * u[:, 0] - u @ torch.linalg.pinv(jacobian, rtol=1e-8).T @ slope
    difference = (sample.log_w.exp().flatten() * event / len(event) - influence).view(bad.shape)
    variance = sum(float(part.var()) * part.numel() for part in difference.split(list(sample.counts), dim=1))
    value = float(u[event, 0].sum())
    apart = float((sample.log_w.exp() * bad).mean()) - value
    return value, abs(apart) / math.sqrt(variance) if variance else 0.0


FAULTS = {
    "none": lambda world, columns: columns,
    "a component is drawn at temperature 2.2, and scored at 2": lambda world, columns: [
        world.log_prob(Component(POLICY, temperature=2.2)) if k == 3 else column for k, column in enumerate(columns)
    ],
    "the same at 3": lambda world, columns: [
        world.log_prob(Component(POLICY, temperature=3.0)) if k == 3 else column for k, column in enumerate(columns)
    ],
    "the policy is drawn at temperature 1.1": lambda world, columns: [
        world.log_prob(Component(POLICY, temperature=1.1)),
        *columns[1:],
    ],
    "the policy never draws the likeliest half of its bad outputs": lambda world, columns: [
        (columns[0] - 30.0 * likeliest(world)).log_softmax(dim=1),
        *columns[1:],
    ],
}


def likeliest(world: World) -> torch.Tensor:
    """The likeliest bad completions (P, S) of each prompt, up to half of its P(bad)."""
    ordered, order = world.columns[0].masked_fill(~world.bad, -math.inf).sort(dim=1, descending=True)
    share = ordered.softmax(dim=1)
    return torch.zeros_like(world.bad).scatter(1, order, share.cumsum(dim=1) - share < 0.5) & world.bad


def second_opinion(worlds: list[World], total: int, seeds: int) -> None:
    """Whether MBAR finds faults that the check of normalisation does not, at 4 standard errors each."""
    print("| fault | MBAR differs | check of normalisation fails | error, weights | error, MBAR |")
    print("|---|---|---|---|---|")
    for name, fault in FAULTS.items():
        differs = fails = 0
        errors = torch.zeros(2, dtype=torch.float64)
        for world in worlds:
            others = len(world.components)
            counts = [total // 2, *[total // 2 // others] * others]
            wrong = fault(world, world.columns)
            for seed in range(seeds):
                sample = world.draw(wrong, counts, torch.Generator().manual_seed(seed), world.columns).sample
                bad = sample.rewards < world.threshold
                value, apart = mbar(sample, bad)
                differs, fails = differs + (apart > 4), fails + (largest_normalization_error(sample) > 4)
                mean = float((sample.log_w.exp() * bad).mean())
                errors += torch.tensor([mean, value], dtype=torch.float64).div(world.truth).sub(1).square()
        runs = seeds * len(worlds)
        shown = (errors / runs).sqrt().tolist()
        print(f"| {name} | {differs / runs:.1%} | {fails / runs:.1%} | {shown[0]:.1%} | {shown[1]:.1%} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--total", type=int, default=2000, help="completions a prompt")
    parser.add_argument("--seeds", type=int, default=400)
    parser.add_argument("--worlds", type=int, nargs="*", default=[10, 11, 12, 13], help="seeds of random worlds")
    parser.add_argument("--noisy", type=int, nargs="*", default=[20, 21, 22, 23], help="seeds of noisy worlds")
    parser.add_argument("--tables", type=Path, help="folder of `rare_events.py`")
    parser.add_argument(
        "--models", type=Path, nargs=2, metavar=("POLICY", "WORLD"), help="a policy of a held-out world alone"
    )
    parser.add_argument("--prompts", type=int, default=30, help="of those, how many")
    parser.add_argument("--size", type=int, default=100, help="completions of each from each component")
    parser.add_argument("--threshold", type=float, help="in place of the world's")
    parser.add_argument("--runs", type=Path, help="file (JSON lines) of whole runs of those; made ones are kept")
    parser.add_argument("--first_seed", type=int, default=0, help="of the runs in a file")
    parser.add_argument("--accelerator", action="store_true", help="for --models, instead of the CPU")
    parser.add_argument("--mbar", action="store_true", help="the second opinion alone")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.models:
        models = Models(*options.models, options.prompts, options.accelerator)
        threshold = models.threshold if options.threshold is None else options.threshold
        if options.runs:
            runs_report(models, options.runs, options.total, options.seeds, threshold, options.first_seed)
        else:
            models_report(models, options.size, options.total, options.seeds, threshold)
        return
    if options.mbar:
        second_opinion([random_world(seed, 1e-4) for seed in options.worlds], options.total, options.seeds)
        return
    header = "world", "P(bad)", "squared error", "best of the grid", "ratio to it", "gain over all alike"
    for line in ((*header, "gain over plain", "coverage", "coverage, CVaR", "bias"), ("---",) * 10):
        print("| " + " | ".join(line) + " |")
    makers = [
        lambda seed=seed, known=known: random_world(seed, 1e-4, known)
        for seed in options.worlds
        for known in (True, False)
    ]
    makers += [lambda seed=seed: random_world(seed, 1e-3, False, blind=True) for seed in options.worlds[:2]]
    makers += [
        lambda seed=seed, rare=rare: random_world(seed, rare, noise=2.0)
        for seed in options.noisy
        for rare in (1e-4, 1e-5)
    ]
    if options.tables:
        train(options.tables)
        makers += [lambda name=name: two_token_world(options.tables, name) for name in (POLICY, "beside")]
    for make in makers:
        print("| " + " | ".join(report(make(), options.total, options.seeds)) + " |", flush=True)


if __name__ == "__main__":
    main()
