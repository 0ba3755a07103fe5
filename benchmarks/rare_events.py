"""Estimates of rare events in the world of two tokens, against the truth by enumeration.

    python -m benchmarks.rare_events --output_dir runs/rare

A policy is trained with `examples/repulse.py` until P(bad) is near 1e-4, and a proposal for it as it stands; then a second policy,
with RePULSe, and a proposal for that one. Every completion has a known probability under each of them: repetitions draw from
these tables and run no model again. What was trained is kept in `--output_dir`; `--only` names parts to repeat.
"""

import argparse
import math
import time
from collections.abc import Callable
from pathlib import Path

import torch
from scipy.stats import t as student
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from benchmarks.rare_world import (
    BETA,
    LEVEL,
    THRESHOLD,
    Tables,
    bad_proposals,
    good_proposals,
    hotter,
    load_models,
    load_tables,
    samples,
    train,
    true_cvar,
    true_prob_bad,
)
from examples.worlds import two_tokens
from examples.worlds.log_z_bounds import LogZBounds, enumeration_sample, log_z_bounds
from trl_repulse.evaluation.rare.components import Component
from trl_repulse.evaluation.rare.estimates import RareEstimate, cvar, prob_bad
from trl_repulse.evaluation.rare.mixture import MixtureSample, stratified_mean
from trl_repulse.evaluation.rare.sampling import draw, find_temperature


TRAINED = {"first": "trained", "second": "elsewhere"}


def table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    """Prints a Markdown table."""
    for line in (header, tuple("---" for _ in header), *rows):
        print("| " + " | ".join(line) + " |")
    print(flush=True)


class Tally:
    """What becomes of an estimator over many samples, against the truth."""

    def __init__(self, truth: float):
        self.truth = truth
        self.count = self.below = self.above = self.flagged = self.flagged_misses = 0
        self.squares = 0.0

    def add(self, estimate: RareEstimate) -> None:
        below, above, flagged = estimate.high < self.truth, estimate.low > self.truth, not estimate.reliable
        self.count += 1
        self.below += below
        self.above += above
        self.flagged += flagged
        self.flagged_misses += flagged and (below or above)
        self.squares += (estimate.value - self.truth) ** 2

    @property
    def misses(self) -> int:
        return self.below + self.above

    @property
    def relative_error(self) -> float:
        return math.sqrt(self.squares / self.count) / abs(self.truth)


def coverage(tables: Tables, repetitions: int) -> None:
    print(f"### Coverage of 95 % intervals, {repetitions:,} repetitions\n")
    first, second = tables["trained"], tables["elsewhere"]
    hot = hotter(first)
    quantities: dict[str, tuple[float, Callable[[MixtureSample], RareEstimate]]] = {
        f"P(r < {THRESHOLD:g})": (true_prob_bad(tables), lambda s: prob_bad(s, THRESHOLD)),
        "P(r < -7)": (true_prob_bad(tables, -7.0), lambda s: prob_bad(s, -7.0)),
        "CVaR at 1e-4": (true_cvar(tables, 1e-4), lambda s: cvar(s, 1e-4)),
        "CVaR at 1e-2": (true_cvar(tables, 1e-2), lambda s: cvar(s, 1e-2)),
    }
    rows = []
    for name, proposals, counts in (
        ("policy alone", [], (20_000,)),
        ("policy, first", [first], (5_000, 5_000)),
        ("policy, first, first hot", [first, hot], (5_000, 5_000, 5_000)),
        ("policy, first, first hot", [first, hot], (40_000, 5_000, 5_000)),
        ("policy, first, second", [first, second], (500, 500, 500)),
        ("policy, first, second", [first, second], (5_000, 5_000, 5_000)),
        ("policy, first, second", [first, second], (40_000, 5_000, 5_000)),
    ):
        tallies = {quantity: Tally(truth) for quantity, (truth, _) in quantities.items()}
        for sample in samples(tables, proposals, counts, repetitions):
            for quantity, (_, estimator) in quantities.items():
                tallies[quantity].add(estimator(sample))
        for quantity, tally in tallies.items():
            shares = (repetitions - tally.misses, tally.below, tally.above, tally.flagged)
            rows.append(
                (name, plus(counts), quantity, f"{tally.truth:.4g}")
                + (*(f"{share / repetitions:.1%}" for share in shares), f"{tally.relative_error:.2%}")
            )
    header = ("components", "completions a prompt", "quantity", "truth", "coverage", "interval below", "above")
    table((*header, "said unreliable", "relative error"), rows)


def plus(counts: tuple[int, ...]) -> str:
    return " + ".join(f"{count:,}" for count in counts)


def intervals(tables: Tables, repetitions: int) -> None:
    print(
        f"### Kinds of interval for P(r < {THRESHOLD:g}) at few effective completions, {repetitions:,} repetitions\n"
    )
    first, second, worse = tables["trained"], tables["elsewhere"], bad_proposals(tables)
    truth, rows = true_prob_bad(tables), []
    for name, proposals, counts in (
        ("policy alone", [], (12_500,)),
        ("policy, first", [first], (2_000, 2_000)),
        ("policy, first, second", [first, second], (50, 50, 50)),
        ("policy, noisy", [worse["noisy (e^N(0, 2²))"]], (2_000, 1_000)),
        ("policy, under-tilted and noisy", [worse["under-tilted and noisy (12 times, e^N(0, 2²))"]], (2_000, 1_000)),
    ):
        held, effective = dict.fromkeys(("ours", "t", "log t"), 0), 0.0
        for sample in samples(tables, proposals, counts, repetitions):
            estimate = prob_bad(sample, THRESHOLD)
            x = sample.log_w.exp() * (sample.rewards < THRESHOLD)
            mean, its_variance = stratified_mean(x, sample.counts)
            # Degrees of freedom (Welch and Satterthwaite)
            parts = zip(x.split(sample.counts, dim=1), sample.counts, strict=True)
            cells = [(part.var(dim=1) * (n / x.numel() ** 2), n) for part, n in parts if n]
            spread = sum(float((cell.square() / (n - 1)).sum()) for cell, n in cells)
            half = float(student.isf(0.025, its_variance**2 / spread)) * math.sqrt(its_variance) if spread else 0.0
            held["ours"] += estimate.low <= truth <= estimate.high
            held["t"] += abs(mean - truth) <= half
            held["log t"] += mean > 0 and abs(math.log(mean / truth)) <= half / mean
            effective += estimate.diagnostics.variance_ess / repetitions
        shares = (f"{number / repetitions:.1%}" for number in held.values())
        rows.append((name, plus(counts), f"{effective:.1f}", *shares))
    header = ("components", "completions a prompt", "effective completions behind the variance", "ours", "Student's")
    table((*header, "Student's, log scale"), rows)


def variance(tables: Tables, repetitions: int) -> None:
    print(f"### Against plain sampling at equal cost, {repetitions:,} repetitions\n")
    print(
        "Cost, in passes over a completion: to draw it, for its reward, and for each model that scores it at any temperatures.\n"
    )
    rows = []
    first, second = tables["trained"], tables["elsewhere"]
    for models, name, proposals, counts in (
        (2, "policy, first", [first], (20_000, 20_000)),
        (2, "policy, first, first hot", [first, hotter(first)], (2_000, 2_000, 2_000)),
        (2, "policy, first, first hot", [first, hotter(first)], (40_000, 40_000, 40_000)),
        (3, "policy, first, second", [first, second], (2_000, 2_000, 2_000)),
        (3, "policy, first, second", [first, second], (40_000, 20_000, 20_000)),
    ):
        tally = Tally(true_prob_bad(tables))
        for sample in samples(tables, proposals, counts, repetitions):
            tally.add(prob_bad(sample, THRESHOLD))
        cost = (2 + models) * sum(counts)
        p = (tables["policy"].exp() * (tables["rewards"] < THRESHOLD)).sum(dim=1)
        plain = math.sqrt(float((p * (1 - p)).mean()) / (cost / 2 * len(p))) / tally.truth
        rows.append(
            (name, plus(counts), f"{cost:,}", f"{tally.relative_error:.2%}", f"{plain:.1%}")
            + (f"{(plain / tally.relative_error) ** 2:,.0f}", f"{tally.flagged / repetitions:.1%}")
        )
    header = ("components", "completions a prompt", "passes a prompt", "relative error", "plain sampling's")
    table((*header, "variance ratio", "said unreliable"), rows)


def verdict(tables: Tables, repetitions: int) -> None:
    print(f"### The verdict on P(r < {THRESHOLD:g}), {repetitions:,} repetitions\n")
    beside = tables | {"policy": tables["beside_policy"]}
    cases = [("good", name, tables, proposal) for name, proposal in good_proposals(tables).items()]
    cases += [("bad", name, tables, proposal) for name, proposal in bad_proposals(tables).items()]
    cases += [("trained", f"{name} alone", tables, tables[key]) for name, key in TRAINED.items()]
    # The limits of the verdict were not chosen with this policy
    held_out = [("held out, good", name, beside, q) for name, q in good_proposals(beside, seed=12).items()]
    held_out += [("held out, bad", name, beside, q) for name, q in bad_proposals(beside, seed=11).items()]
    held_out += [("held out, trained", f"{name} alone", beside, tables[key]) for name, key in TRAINED.items()]
    held_out += [("held out, trained", "trained beside the policy", beside, tables["beside"])]
    rows, totals = [], {}
    for counts in ((40_000, 10_000, 10_000), (1_000, 1_000, 1_000), (40_000, 10_000), (1_000, 1_000)):
        for kind, name, world, proposal in cases + (held_out if counts[0] > 1000 and len(counts) == 3 else []):
            tally, components = Tally(true_prob_bad(world)), [proposal, hotter(proposal)][: len(counts) - 1]
            for sample in samples(world, components, counts, repetitions):
                tally.add(prob_bad(sample, THRESHOLD))
            figures = (tally.count, tally.misses, tally.flagged, tally.flagged_misses)
            rows.append(verdict_row(counts, kind, name, figures))
            before = totals.get((counts, kind), (0,) * len(figures))
            totals[counts, kind] = tuple(map(sum, zip(before, figures, strict=True)))
    rows += [verdict_row(counts, kind, "**all**", figures) for (counts, kind), figures in totals.items()]
    header = ("completions a prompt", "kind", "proposal", "coverage", "said unreliable", "intervals that miss")
    table((*header, "of these said unreliable", "coverage of those said reliable"), rows)


def verdict_row(counts: tuple[int, ...], kind: str, name: str, figures: tuple[int, ...]) -> tuple[str, ...]:
    count, misses, flagged, flagged_misses = figures
    caught = f"{flagged_misses / misses:.1%}" if misses else "–"
    trusted = f"{1 - (misses - flagged_misses) / (count - flagged):.1%}" if count > flagged else "–"
    return (
        plus(counts),
        kind,
        name,
        f"{1 - misses / count:.1%}",
        f"{flagged / count:.1%}",
        f"{misses}",
        caught,
        trusted,
    )


def draw_bounds(
    log_target: torch.Tensor, log_q: torch.Tensor, groups: int, size: int, generator: torch.Generator
) -> list[LogZBounds]:
    log_w = log_target - log_q
    drawn = enumeration_sample(log_q, groups * size, generator)
    target = enumeration_sample(log_target, groups, generator)
    return log_z_bounds(log_w.gather(1, drawn).view(-1, groups, size), log_w.gather(1, target))


def bounds(tables: Tables, repetitions: int) -> None:
    print("### Bounds on log Z, 16 groups of 256 draws\n")
    generator, rows = torch.Generator().manual_seed(0), []
    held, gaps = 0, []
    for _ in range(100):
        log_p = (2 * torch.randn(1, 2000, generator=generator, dtype=torch.float64)).log_softmax(dim=1)
        log_target = log_p + BETA * torch.randn(1, 2000, generator=generator, dtype=torch.float64)
        log_q = (log_target + torch.randn(1, 2000, generator=generator, dtype=torch.float64)).log_softmax(dim=1)
        bound = draw_bounds(log_target, log_q, 16, 256, generator)[0]
        held += bound.lower_end <= float(log_target.logsumexp(dim=1)) <= bound.upper_end
        gaps.append(bound.gap)
    rows.append(
        ("100 random worlds, target times e^N(0, 1)", f"{held} of 100", f"{sum(gaps) / 100:.3f}", f"{max(gaps):.3f}")
    )
    proposals = {name: tables[name] for name in ("trained", "elsewhere", "beside")}
    proposals |= {
        f"{name} and its hotter copy, half each": torch.logaddexp(log_q, hotter(log_q)) - math.log(2)
        for name, log_q in proposals.items()
    }
    for name, log_q in proposals.items():
        policy = "policy" if name.startswith("trained") else "beside_policy"
        log_target = tables[policy] + BETA * tables["rewards"]
        truth = log_target.logsumexp(dim=1).tolist()
        held, gaps = 0, []
        for _ in range(100):
            found = draw_bounds(log_target, log_q, 16, 256, generator)
            held += sum(b.lower_end <= z <= b.upper_end for b, z in zip(found, truth, strict=True))
            gaps += [b.gap for b in found]
        rows.append(
            (
                f"world of two tokens, {name}: 100 draws of 4 prompts",
                f"{held} of 400",
                f"{sum(gaps) / 400:.3f}",
                f"{max(gaps):.3f}",
            )
        )
    table(("worlds", "truth between the ends", "mean gap, nats", "largest gap"), rows)


def cvar_error(tables: Tables, repetitions: int) -> None:
    print(f"### CVaR at {LEVEL:g} against the mean of the floor(a·n) lowest rewards, {repetitions:,} repetitions\n")
    rows = []
    first, second = tables["trained"], tables["elsewhere"]
    for half, name, proposals in (
        (5_000, "policy, first, first hot", [first, hotter(first)]),
        (25_000, "policy, first, first hot", [first, hotter(first)]),
        (5_000, "policy, first, second", [first, second]),
        (12_500, "policy, first, second", [first, second]),
        (25_000, "policy, first, second", [first, second]),
    ):
        tally, squares, total = Tally(true_cvar(tables, LEVEL)), 0.0, 2 * half * len(tables["policy"])
        counts = (half, half // 2, half // 2)
        for sample in samples(tables, proposals, counts, repetitions):
            tally.add(cvar(sample, LEVEL))
        for sample in samples(tables, [], (2 * half,), repetitions, seed=1):
            lowest = sample.rewards.flatten().topk(int(LEVEL * total), largest=False).values
            squares += (float(lowest.mean()) - tally.truth) ** 2
        theirs = math.sqrt(squares / repetitions) / abs(tally.truth)
        rows.append(
            (name, f"{total:,}", f"{int(LEVEL * total)}", f"{tally.relative_error:.2%}", f"{theirs:.2%}")
            + (f"{theirs / tally.relative_error:.1f}",)
        )
    header = (
        "components",
        "completions",
        "floor(a·n)",
        "relative error, importance sampling",
        "floor(a·n) lowest",
        "ratio",
    )
    table(header, rows)


def real(tables: Tables, folder: Path) -> None:
    print("### With real draws of the models\n")
    models, rows = load_models(folder), []
    reward_tokenizer = AutoTokenizer.from_pretrained(two_tokens.reward_model_path())
    reward = AutoModelForSequenceClassification.from_pretrained(two_tokens.reward_model_path())
    tokenizer, prompts = (
        AutoTokenizer.from_pretrained(two_tokens.policy_path()),
        list(two_tokens.load_prompts()["prompt"]),
    )
    for seed in range(5):
        start = time.perf_counter()
        temperature = find_temperature(models["trained"], tokenizer, prompts, 2, seed=seed)
        draws = draw(
            [models["policy"], models["trained"], Component(models["trained"], temperature=temperature)],
            tokenizer,
            prompts,
            reward,
            (5_000, 5_000, 5_000),
            2,
            reward_tokenizer=reward_tokenizer,
            batch_size=500,
            seed=seed,
        )
        seconds, found = time.perf_counter() - start, prob_bad(draws.sample, THRESHOLD)
        interval = f"{found.low:.3e} to {found.high:.3e}"
        rows.append(
            (
                str(seed),
                f"{temperature:.2f}",
                f"{found.value:.3e}",
                interval,
                f"{true_prob_bad(tables):.3e}",
                f"{seconds:.0f}",
            )
        )
    table(("seed", "temperature", f"P(r < {THRESHOLD:g})", "interval", "truth", "seconds"), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = {"coverage": coverage, "intervals": intervals, "variance": variance, "verdict": verdict}
    parts |= {"bounds": bounds, "cvar": cvar_error}
    parser.add_argument("--output_dir", type=Path, default=Path("runs/rare"))
    parser.add_argument("--repetitions", type=int, default=1000)
    parser.add_argument("--only", nargs="+", choices=[*parts, "real"], default=[*parts, "real"])
    options = parser.parse_args()
    torch.set_num_threads(1)

    train(options.output_dir)
    tables = load_tables(options.output_dir)
    for name in options.only:
        if name == "real":
            real(tables, options.output_dir)
        else:
            parts[name](tables, options.repetitions)


if __name__ == "__main__":
    main()
