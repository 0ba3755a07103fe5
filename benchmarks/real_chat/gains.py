"""
How much other samplers would help to estimate P(r < 0) of policies that `race` trained, on the unseen prompts.

    python -m benchmarks.real_chat.gains runs/real_chat --runs runs/early/REINFORCE-50-seed0 runs/early/REINFORCE-50-seed1 --finds runs/finds

The gain is that of `proposal/gain`: the second moment of an estimate from n samples of the policy p, over that from n / 2 of p and n / 2 of
the sampler q, weighed by their mixture m. It is 1 / mean of p / m over bad samples of p, so that nothing is drawn from q: the held-out samples
of the runs are enough. A gain of 1 is no better than the policy, 0.5 is useless. Token effects, head and copy learn from samples of the
initial policy on the training prompts (`--finds`, drawn once).
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from trl_repulse.evaluation.log_probs import completion_logits
from trl_repulse.evaluation.records import COMPLETE, load_samples
from trl_repulse.evaluation.sampling import SamplingSettings, sample_completions
from trl_repulse.math.importance import TILTS, TokenEffects, deviations_of, reward_scale

from . import judge, race


ROWS = 16  # completions of a pass
TEMPERATURES, GAMMAS, EPOCHS, HEAD_STEPS = (1.1, 1.3), (0.25, 0.5, 1.0), (1, 3), (4, 8, 16)
RATE_OF_COPY, RATE_OF_HEAD = 1e-5, 3e-5

Samples = list[dict[str, Any]]


def load(folder: Path | str) -> Any:
    """A model in float32."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def bad_samples(folder: Path) -> Samples:
    """Rows with a reward under 0 of a folder of samples."""
    return [row for row in load_samples(folder).table.to_pylist() if row["reward"] < 0]


def passes(model: Any, samples: Samples) -> Any:
    """Hidden states before the head, logits, tokens and mask of samples, some at a time."""
    for start in range(0, len(samples), ROWS):
        rows = samples[start : start + ROWS]
        hidden: list[torch.Tensor] = []
        hook = model.lm_head.register_forward_pre_hook(lambda _, inputs, into=hidden: into.append(inputs[0]))
        prompts, completions = ([row[key] for row in rows] for key in ("prompt_ids", "completion_ids"))
        logits, tokens, mask = completion_logits(model, prompts, completions, share=False)
        hook.remove()
        yield hidden[0][:, :-1], logits, tokens, mask


def log_prob(logits: torch.Tensor, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of completions (B,), nats."""
    of_token = logits.log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    return of_token.masked_fill(~mask, 0.0).double().sum(-1)


def fine_tuned(start: Path, finds: Samples) -> dict[int, Any]:
    """Copies of the initial policy after some epochs on the finds."""
    model, order, copies = load(start), np.random.default_rng(0), {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE_OF_COPY, weight_decay=0.0)
    for epoch in range(1, max(EPOCHS) + 1):
        for chosen in np.array_split(order.permutation(len(finds)), -(-len(finds) // ROWS)):
            rows = [finds[i] for i in chosen]
            width = max(len(row["prompt_ids"] + row["completion_ids"]) for row in rows)
            ids, labels = torch.zeros(len(rows), width, dtype=torch.long), torch.full((len(rows), width), -100)
            mask = torch.zeros_like(ids)
            for i, row in enumerate(rows):
                both, before = row["prompt_ids"] + row["completion_ids"], len(row["prompt_ids"])
                ids[i, : len(both)], mask[i, : len(both)] = torch.tensor(both), 1
                labels[i, before : len(both)] = torch.tensor(row["completion_ids"])
            model(input_ids=ids, attention_mask=mask, labels=labels).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if epoch in EPOCHS:
            copies[epoch] = load(start)
            copies[epoch].load_state_dict(model.state_dict())
    return copies


def fitted_heads(model: Any, finds: Samples) -> dict[int, torch.Tensor]:
    """Linear heads (V, D) on the policy's last hidden state, added to its logits, after some steps of cross-entropy on the finds from 0."""
    parts = [(h[mask], logits[mask], tokens[mask]) for h, logits, tokens, mask in passes(model, finds)]
    head = torch.zeros_like(model.lm_head.weight, requires_grad=True)
    optimizer, heads, total = torch.optim.Adam([head], lr=RATE_OF_HEAD), {}, sum(len(part[2]) for part in parts)
    for step in range(1, max(HEAD_STEPS) + 1):
        for hidden, logits, tokens in parts:
            loss = torch.nn.functional.cross_entropy(logits + hidden @ head.T, tokens, reduction="sum") / total
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step in HEAD_STEPS:
            heads[step] = head.detach().clone()
    return heads


def token_biases(folder: Path, vocabulary: int) -> list[torch.Tensor]:
    """Biases (V,) of the hot policy, from all samples of a folder."""
    rows, effects = load_samples(folder).table.to_pylist(), TokenEffects(vocabulary)
    rewards = torch.tensor([row["reward"] for row in rows])
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(row["completion_ids"]) for row in rows], True, -1)
    deviations = deviations_of(rewards, *reward_scale(rewards.tolist()))
    effects.sums += effects.of(ids.clamp(min=0), ids >= 0, deviations, vocabulary).double()
    return effects.biases()


def ratios(
    run: Path, initial: Any, copies: dict[int, Any], biases: list[torch.Tensor], finds: Samples
) -> dict[str, Any]:
    """Of a run's bad samples: their prompts, and p / m with the mixture m of the policy p and each sampler, by its name."""
    policy, samples = load(run / "policy"), bad_samples(run / "samples")
    heads = fitted_heads(policy, finds)
    found: dict[str, list[torch.Tensor]] = {}
    with torch.no_grad():
        for of_policy, *of_others in zip(
            *(passes(model, samples) for model in (policy, initial, *copies.values())), strict=True
        ):
            hidden, z, tokens, mask = of_policy
            z0, *of_copies = (logits for _, logits, _, _ in of_others)
            samplers = {f"temperature {t}": z / t for t in TEMPERATURES}
            samplers |= {f"token effects × {size:g}": z + bias for size, bias in zip(TILTS, biases, strict=True)}
            log_p, log_p0 = z.log_softmax(-1), z0.log_softmax(-1)
            samplers |= {f"reference tilt, γ {g}": log_p + g * (log_p0 - log_p) for g in GAMMAS}
            samplers |= {f"linear head, {step} steps": z + hidden @ head.T for step, head in heads.items()}
            for epoch, logits in zip(copies, of_copies, strict=True):
                samplers[f"copy fine-tuned on finds, epoch {epoch}"] = logits
                samplers[f"policy with half of the copy's change, epoch {epoch}"] = (
                    log_p + (logits.log_softmax(-1) - log_p0) / 2
                )
            own = log_prob(z, tokens, mask)
            for name, logits in samplers.items():
                found.setdefault(name, []).append(2 * torch.sigmoid(own - log_prob(logits, tokens, mask)))
    return {"prompts": np.array([row["prompt_index"] for row in samples])} | {
        name: torch.cat(parts).numpy() for name, parts in found.items()
    }


def interval(prompts: np.ndarray, ratio: np.ndarray) -> tuple[float, float, float]:
    """The gain and its 95 % interval, by bootstrap over prompts."""
    number = prompts.max() + 1
    counts = np.random.default_rng(0).multinomial(number, np.full(number, 1 / number), 4000)[:, prompts]
    return (float(1 / ratio.mean()), *np.quantile(counts.sum(axis=1) / (counts @ ratio), (0.025, 0.975)))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("world", type=Path, help="folder of `benchmarks.real_chat.build`")
    parser.add_argument(
        "--runs", type=Path, nargs="+", required=True, help="folders of runs, with `policy` and `samples`"
    )
    parser.add_argument(
        "--finds", type=Path, required=True, help="folder of the initial policy's samples; drawn if new"
    )
    options = parser.parse_args(argv)
    logging.set_verbosity_error()
    start = options.world / "policy"
    if not (options.finds / COMPLETE).is_file():
        settings = SamplingSettings(
            num_samples=12, max_completion_length=race.LENGTH, seed=11, batch_size=128, dtype="bfloat16"
        )
        rows = Dataset.from_list(race.read_rows(options.world, "train"))
        sample_completions(options.finds, str(start), rows, judge.reward, settings, progress=False)
    finds, initial = bad_samples(options.finds), load(start)
    print(f"{len(finds)} finds", flush=True)
    copies, biases = fine_tuned(start, finds), token_biases(options.finds, initial.config.vocab_size)
    runs = []
    for run in options.runs:
        runs.append(ratios(run, initial, copies, biases, finds))
        print(f"{run.name}: {len(runs[-1]['prompts'])} bad samples", flush=True)
    prompts = np.concatenate([run["prompts"] for run in runs])
    print("| sampler | gain |\n|---|---|")
    for name in list(runs[0])[1:]:
        gain, low, high = interval(prompts, np.concatenate([run[name] for run in runs]))
        print(f"| {name} | {gain:.2f} ({low:.2f} to {high:.2f}) |")


if __name__ == "__main__":
    main()
