"""
Coverage of the intervals for P(truly bad), on simulated judges whose errors are known exactly.

A truly bad completion has a score from N(−separation, 1), another one from N(0, 1); the judge calls it bad under the
quantile of N(0, 1) at the judge's false-positive rate. Each run draws scores, draws completions to label, labels them without
an error, and compares the interval with the prevalence. The method was chosen on `CHOICE`, with seed 0, between those of `METHODS`.
The table to report is that of `WORLDS`, with seed 2.

    python -m benchmarks.audit            # the worlds to report
    python -m benchmarks.audit --choice   # the worlds that the method was chosen on
"""

import argparse
import math
import time

import numpy as np
from scipy.stats import norm

from trl_repulse.evaluation.audit import audit_judge, known_errors
from trl_repulse.evaluation.audit_labels import Labels, Scored, choose


RUNS = 400
SAMPLES = 20_000  # completions of the policy
LABELLED = 300
ELSEWHERE = 200  # truly bad and other completions labelled elsewhere
# Prevalence, false-positive rate, separation of the scores
CHOICE = [(0.05, 0.02, 2.0), (0.003, 0.003, 3.0)]
WORLDS = [
    *((1e-1, rate, separation) for rate, separation in ((1e-1, 2.0), (1e-2, 3.0))),
    *((1e-2, rate, separation) for rate, separation in ((1e-2, 2.0), (1e-3, 3.0))),
    *((1e-3, rate, separation) for rate, separation in ((1e-2, 3.0), (1e-3, 4.0))),
    # Common events, as of attacks
    *((5e-1, rate, separation) for rate, separation in ((1e-1, 2.0), (1e-2, 3.0))),
    *((2e-1, rate, separation) for rate, separation in ((1e-1, 2.0), (1e-2, 3.0))),
    (5e-2, 1e-1, 2.0),
]


def draw(world, rng):
    """Scores and truth."""
    prevalence, _, separation = world
    truth = rng.random(SAMPLES) < prevalence
    scores = rng.normal(size=SAMPLES) - separation * truth
    return Scored([""] * SAMPLES, [""] * SAMPLES, scores[None]), truth


def label(scored, truth, threshold, seed):
    """The labels of a draw."""
    near_up_to, chosen = choose(scored, threshold, LABELLED, seed)
    counts = [(len(indices), int(truth[indices].sum())) for indices in chosen]
    return Labels(threshold, near_up_to, tuple(m for m, _ in counts), tuple(k for _, k in counts))


def double_sample(world, scored, truth, threshold, seed, rng):
    audit = audit_judge(scored, label(scored, truth, threshold, seed))
    return audit.estimates, audit.verdict


def normal_double_sample(world, scored, truth, threshold, seed, rng):
    """The textbook's variance of a double sample, with a normal interval."""
    labels = label(scored, truth, threshold, seed)
    strata = scored.strata(threshold, labels.near_up_to)
    value = variance = 0.0
    for number, (m, k) in enumerate(zip(labels.labelled, labels.truly_bad, strict=True)):
        inside = strata == number
        share, theta = float(inside.mean()), k / m if m else 0.0
        value += share * theta
        variance += theta**2 * float(inside.var()) / inside.size + share**2 * theta * (1 - theta) / max(m, 1)
    half = 1.96 * math.sqrt(variance)
    return {"P(truly bad)": (value, value - half, value + half)}, ""


def jeffreys_double_sample(world, scored, truth, threshold, seed, rng):
    """Posterior draws with Jeffreys's priors, on the same sums."""
    labels = label(scored, truth, threshold, seed)
    strata = scored.strata(threshold, labels.near_up_to)
    total = np.zeros(10_000)
    rest = np.ones(10_000)
    for number, (m, k) in enumerate(zip(labels.labelled, labels.truly_bad, strict=True)):
        count = int((strata == number).sum())
        share = rng.beta(count + 0.5, strata.size - count + 0.5, 10_000) if number < 2 else rest
        rest = rest - share
        total += share * rng.beta(k + 0.5, m - k + 0.5, 10_000)
    return {"P(truly bad)": (float("nan"), *np.quantile(total, [0.025, 0.975]))}, ""


def elsewhere(world, rng):
    """Right answers among so many labels of truly bad completions, and of others."""
    _, rate, separation = world
    sensitivity = norm.cdf(norm.ppf(rate) + separation)
    counts = rng.binomial(ELSEWHERE, sensitivity), rng.binomial(ELSEWHERE, 1 - rate)
    return [(int(count), ELSEWHERE) for count in counts]


def rogan_gladen(world, scored, truth, threshold, seed, rng):
    audit = known_errors(scored, threshold, *elsewhere(world, rng))
    return {"P(truly bad)": audit.estimates["P(truly bad)"]}, audit.verdict


def normal_rogan_gladen(world, scored, truth, threshold, seed, rng):
    """The corrected point, with the normal interval of the variance in Rogan and Gladen (1978)."""
    se, sp = (k / m for k, m in elsewhere(world, rng))
    if se + sp <= 1:
        return {"P(truly bad)": (0.0, 0.0, 1.0)}, ""
    inside = scored.scores < threshold
    margin = se + sp - 1
    value = (float(inside.mean()) + sp - 1) / margin
    variance = float(inside.var()) / inside.size
    variance += (value**2 * se * (1 - se) + (1 - value) ** 2 * sp * (1 - sp)) / ELSEWHERE
    half = 1.96 * math.sqrt(variance) / margin
    return {"P(truly bad)": (value, value - half, value + half)}, ""


def garak(world, scored, truth, threshold, seed, rng):
    """As garak (0.17.1) corrects rates of hits: a bootstrap of the judge's verdicts, with sensitivity and specificity as exact."""
    se, sp = (k / m for k, m in elsewhere(world, rng))
    if abs(se + sp - 1) < 0.01:
        se = sp = 1.0
    hits = scored.scores < threshold
    rates = rng.binomial(hits.size, hits.mean(), 10_000) / hits.size  # what resampling gives
    corrected = np.clip((rates + sp - 1) / (se + sp - 1), 0, 1)
    return {"P(truly bad)": (float("nan"), *np.quantile(corrected, [0.025, 0.975]))}, ""


OURS = "double sample, melded"
METHODS = {
    OURS: double_sample,
    "double sample, Jeffreys": jeffreys_double_sample,
    "double sample, normal": normal_double_sample,
    "Rogan-Gladen, melded": rogan_gladen,
    "Rogan-Gladen, normal": normal_rogan_gladen,
    "Rogan-Gladen, as garak": garak,
}


def truths(world):
    prevalence, rate, separation = world
    threshold = norm.ppf(rate)
    sensitivity = norm.cdf(threshold + separation)
    return threshold, (prevalence, prevalence * sensitivity, sensitivity, 1 - rate)


def main() -> None:
    global SAMPLES
    parser = argparse.ArgumentParser()
    parser.add_argument("--choice", action="store_true")
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--samples", type=int, default=SAMPLES)
    args = parser.parse_args()
    SAMPLES = args.samples
    worlds, first = (CHOICE, 0) if args.choice else (WORLDS, 2)
    start = time.time()
    heads = [
        "prevalence",
        "false positives",
        "sensitivity",
        *METHODS,
        "bounds only",
        "bad and truly bad",
        "sensitivity",
        "specificity",
    ]
    print(f"| {' | '.join(heads)} |\n{'|---' * len(heads)}|")
    for number, world in enumerate(worlds):
        threshold, true = truths(world)
        found = {name: [] for name in METHODS}  # low, high
        verdicts, others = [], []
        for run in range(args.runs):
            rng = np.random.default_rng([first, number, run])
            scored, truth = draw(world, rng)
            if not (scored.scores < threshold).any():
                continue
            for name, method in METHODS.items():
                estimates, verdict = method(world, scored, truth, threshold, run, rng)
                one, *rest = (
                    it if isinstance(it, tuple) else (it.value, it.low, it.high) for it in estimates.values()
                )
                found[name].append(one[1:])
                if name == OURS:
                    verdicts.append(verdict == "bounds")
                    others.append([low <= at <= high for (_, low, high), at in zip(rest, true[1:], strict=True)])
        cells = [f"{world[0]:g}", f"{world[1]:g}", f"{true[2]:.3f}"]
        for ends in filter(len, found.values()):
            low, high = np.array(ends).T
            covered = ((low <= world[0]) & (world[0] <= high)).mean()
            cells.append(f"{covered:.1%} ({np.median(high - low) / world[0]:.2g})")
        cells += [""] * (len(METHODS) + 3 - len(cells))
        cells += [f"{share:.1%}" for share in (np.mean(verdicts), *np.mean(others, axis=0))]
        print(f"| {' | '.join(cells)} |" + f" only {len(verdicts)} runs" * (len(verdicts) < args.runs), flush=True)
    print(f"\nCoverage (median width, in prevalences) over {args.runs} runs; {time.time() - start:.0f} s")


if __name__ == "__main__":
    main()
