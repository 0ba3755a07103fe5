"""The world of two tokens's policies and proposals that `rare_events.py` estimates with, and what enumeration knows of them."""

import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from examples.worlds import two_tokens
from examples.worlds.exact import ExactEvaluator
from trl_repulse import RePULSeConfig, RePULSeTrainer
from trl_repulse.evaluation.rare.mixture import MixtureSample


THRESHOLD, LEVEL, BETA = -5.0, 1e-4, -5.0
Tables = dict[str, torch.Tensor]  # log-probabilities (P, S) of every completion, and `rewards` (P, S)


def train(folder: Path) -> None:
    """A policy trained with REINFORCE, one with RePULSe and the proposal beside it, and for each a proposal afterwards."""
    example = Path(__file__).parents[1] / "examples" / "repulse.py"
    for name, flags in (("policy", {"alpha": 0.0, "learning_rate": 1e-3}), ("beside", {})):
        if (folder / name / "results.json").exists():
            continue
        flags = flags | {"output_dir": folder / name, "max_steps": 120, "disable_tqdm": "true"}
        config = str(example.parent / "configs" / "two_tokens" / "repulse.yaml")
        command = [
            sys.executable,
            str(example),
            "--config",
            config,
            *(part for k, v in flags.items() for part in (f"--{k}", str(v))),
        ]
        subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True, stdout=subprocess.DEVNULL)
    train_proposal(folder / "trained", folder / "policy", 512, 120)
    train_proposal(folder / "elsewhere", folder / "beside", 256, 300)


def train_proposal(folder: Path, policy: Path, generations: int, updates: int) -> None:
    """A proposal for a policy that stays as it is, from the initial policy: that draws bad outputs more often."""
    if (folder / "proposal").exists():
        return
    args = RePULSeConfig(
        output_dir=str(folder),
        learning_rate=0.0,
        alpha=1e-6,
        beta=0.0,
        proposal="learned",
        target_dist_beta=BETA,
        proposal_learning_rate=1e-3,
        lr_scheduler_type="cosine",
        max_grad_norm=1.0,
        weight_decay=0.0,
        max_steps=updates,
        per_device_train_batch_size=128,
        num_generations=32,
        num_proposal_generations=generations,
        max_completion_length=2,
        bf16=False,
        gradient_checkpointing=False,
        logging_steps=updates,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = RePULSeTrainer(
        model=str(policy),
        reward_funcs=two_tokens.reward_model_path(),
        args=args,
        train_dataset=two_tokens.load_prompts(),
        proposal_model=two_tokens.policy_path(),
    )
    trainer.train()
    trainer.save_model(str(folder))


def load_models(folder: Path) -> dict[str, AutoModelForCausalLM]:
    paths = {
        "policy": folder / "policy",
        "trained": folder / "trained" / "proposal",
        "elsewhere": folder / "elsewhere" / "proposal",
        "beside_policy": folder / "beside",
        "beside": folder / "beside" / "proposal",
    }
    return {name: AutoModelForCausalLM.from_pretrained(path) for name, path in paths.items()}


def load_tables(folder: Path) -> Tables:
    """Rewards, and every model's log-probability of every completion."""
    path = folder / "tables.safetensors"
    if not path.exists():
        tokenizer = AutoTokenizer.from_pretrained(two_tokens.policy_path())
        evaluator = ExactEvaluator(
            tokenizer,
            two_tokens.load_prompts()["prompt"],
            AutoModelForSequenceClassification.from_pretrained(two_tokens.reward_model_path()),
            two_tokens.bad_token_ids(tokenizer),
            2,
            reward_tokenizer=AutoTokenizer.from_pretrained(two_tokens.reward_model_path()),
        )
        tables = {name: evaluator.log_probs(model) for name, model in load_models(folder).items()}
        save_file(tables | {"rewards": evaluator.rewards}, path)
    return load_file(path)


def pool(tables: Tables) -> torch.Tensor:
    """Both proposals as one, half each: a good one."""
    return torch.logaddexp(tables["trained"], tables["elsewhere"]) - math.log(2)


def hotter(log_q: torch.Tensor, divergence: float = 2.0) -> torch.Tensor:
    """A proposal at the temperature at which it diverges from itself by so many nats, (P, S), as `find_temperature` does.

    Completions are the end token alone, or any other token and then any.
    """
    vocabulary = round((1 + math.sqrt(4 * log_q.size(1) - 3)) / 2)  # V: S = 1 + (V - 1) V
    pairs = log_q[:, 1:].view(len(log_q), -1, vocabulary)  # (P, V - 1, V)
    first = torch.cat([log_q[:, :1], pairs.logsumexp(dim=-1)], dim=1)  # (P, V), the end token first
    second = pairs - first[:, 1:, None]

    def at(inverse: float) -> torch.Tensor:
        first_hot, second_hot = (inverse * first).log_softmax(dim=-1), (inverse * second).log_softmax(dim=-1)
        return torch.cat([first_hot[:, :1], (first_hot[:, 1:, None] + second_hot).flatten(1)], dim=1)

    low, high = 0.1, 1.0
    for _ in range(20):
        middle = (low + high) / 2
        far = float((log_q.exp() * (log_q - at(middle))).sum(dim=1).mean()) > divergence
        low, high = (middle, high) if far else (low, middle)
    return at(high)


def good_proposals(tables: Tables, seed: int = 2) -> Tables:
    """Proposals that find the bad outputs: the trained ones together, and the target, both also with some noise."""
    q, target = pool(tables), (tables["policy"] + BETA * tables["rewards"]).log_softmax(dim=1)
    noise = noise_like(target, seed)
    return {
        "first and second, half each": q,
        "the same, noisy (e^N(0, 0.5²))": (q + 0.5 * noise).log_softmax(dim=1),
        "the target itself": target,
        "the target, noisy (e^N(0, 0.5²))": (target + 0.5 * noise).log_softmax(dim=1),
        "the target, noisy (e^N(0, 1))": (target + noise).log_softmax(dim=1),
    }


def bad_proposals(tables: Tables, seed: int = 1) -> Tables:
    """Proposals made bad on purpose: under-tilted from the policy p; noisy, or with modes dropped, from a good one q."""
    q, p, noise = pool(tables), tables["policy"], noise_like(tables["policy"], seed)
    bad = tables["rewards"] < THRESHOLD
    # The likeliest bad outputs of each prompt, up to half of its bad probability
    log_bad = p.masked_fill(~bad, -math.inf)
    ordered, order = log_bad.sort(dim=1, descending=True)
    share = ordered.softmax(dim=1).cumsum(dim=1)
    half = torch.zeros_like(bad).scatter(1, order, (share - ordered.softmax(dim=1)) < 0.5) & bad
    made = {
        f"under-tilted (bad outputs {times} times as likely)": p + math.log(times) * bad for times in (2, 5, 12, 30)
    }
    made["under-tilted and noisy (12 times, e^N(0, 2²))"] = p + math.log(12) * bad + 2 * noise
    made |= {f"noisy (e^N(0, {scale}²))": q + scale * noise for scale in (2, 3, 4)}
    made["mode dropped (half of P(bad) or more, by e⁻¹²)"] = q - 12.0 * half
    made["all modes but one dropped"] = q - 12.0 * (bad & ~top_one(log_bad))
    return {name: log_q.log_softmax(dim=1) for name, log_q in made.items()}


def noise_like(values: torch.Tensor, seed: int) -> torch.Tensor:
    return torch.randn(values.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def top_one(values: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(values, dtype=torch.bool).scatter(1, values.argmax(dim=1, keepdim=True), True)


def samples(
    tables: Tables, proposals: list[torch.Tensor], counts: tuple[int, ...], repetitions: int, seed: int = 0
) -> Iterator[MixtureSample]:
    """Independent mixture samples, drawn from tables."""
    generator = torch.Generator().manual_seed(seed)
    models = [tables["policy"], *proposals]
    cumulative = [model.exp().cumsum(dim=1) for model in models]
    stacked = torch.stack(models, dim=-1)  # (P, S, K)
    for _ in range(repetitions):
        parts = []
        for steps, count in zip(cumulative, counts, strict=True):
            points = torch.rand(len(steps), count, generator=generator, dtype=torch.float64) * steps[:, -1:]
            parts.append(torch.searchsorted(steps, points))
        index = torch.cat(parts, dim=1)  # (P, N)
        density = stacked.gather(1, index.unsqueeze(-1).expand(-1, -1, len(models)))
        yield MixtureSample(tables["rewards"].gather(1, index), density, counts)


def true_prob_bad(tables: Tables, threshold: float = THRESHOLD) -> float:
    return float((tables["policy"].exp() * (tables["rewards"] < threshold)).sum(dim=1).mean())


def true_cvar(tables: Tables, level: float) -> float:
    rewards, order = tables["rewards"].flatten().sort()
    mass = (tables["policy"].exp().flatten() / len(tables["policy"]))[order].cumsum(dim=0).clamp(max=level)
    return float((mass.diff(prepend=torch.zeros(1, dtype=torch.float64)) * rewards).sum() / level)
