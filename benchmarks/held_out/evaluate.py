"""
Samples of a model on the unseen prompts of a held-out world: rewards, P(bad), CVaR, KL, and how bad outputs are bad.

Completions are drawn from the whole vocabulary, at temperature 1 and, to find what is rare, at a higher one: both sets together
estimate P(bad), each sample weighed by p / m with m the mixture of both. Rewards are those of the texts, as a trainer computes
them: without end, padding or unknown tokens.

Axis letters: D distinct completions of a prompt, T completion tokens.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DynamicCache,
)
from transformers.activations import NewGELUActivation

from trl_repulse.generation.drawing import with_cache

from .worlds import WORLDS


MAX_COMPLETION_LENGTH = 24
TEMPERATURE = 1.5  # of the samples that find rare outputs, where the world does not say another
CVAR_LEVELS = (1e-2, 1e-3)


class HeldOutWorld:
    """A world that `build.py` wrote: prompts, policy, reward model, and the reward under which an output is bad."""

    samples = 2500  # evaluated completions a prompt
    hot_samples = 500  # more of them at a higher temperature, for P(bad) alone
    proposal_samples = 200
    lasting = False  # whether a run takes so long that it is kept while it goes on, and its policy at the end

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.described = json.loads((self.folder / "world.json").read_text(encoding="utf-8"))
        self.name = self.described["name"]
        self.threshold = self.described["threshold"]
        self.hot_temperature = self.described.get("hot_temperature", TEMPERATURE)
        self.completion_length = self.described.get("completion_length", MAX_COMPLETION_LENGTH)
        self.tokenizer = AutoTokenizer.from_pretrained(self.policy_path)

    @property
    def policy_path(self) -> str:
        return str(self.folder / "policy")

    @property
    def reward_model_path(self) -> str:
        return str(self.folder / "reward_model")

    @property
    def reward(self) -> Any:
        """What a trainer takes for its reward."""
        return self.reward_model_path

    def costs(self) -> dict[str, float]:
        """What the reward has cost so far, where it is counted."""
        return {}

    def fields(self, config_class: type) -> dict[str, Any]:
        """Fields of a trainer's configuration that hang on the world."""
        return {"max_completion_length": self.completion_length}

    def prompts(self, split: str) -> list[str]:
        """The prompts of a split, `train` or `unseen`."""
        lines = (self.folder / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
        return [json.loads(line)["prompt"] for line in lines]

    def load_policy(self) -> torch.nn.Module:
        return with_fused_activations(AutoModelForCausalLM.from_pretrained(self.policy_path).eval())

    def load_reward_model(self) -> torch.nn.Module:
        return with_fused_activations(
            AutoModelForSequenceClassification.from_pretrained(self.reward_model_path).eval()
        )

    def draw(
        self, model: torch.nn.Module, prompts: list[str], per_prompt: int, seed: int, temperature: float = 1.0
    ) -> list["Samples"]:
        """Samples of a model; see `draw`."""
        return draw(model, self.tokenizer, prompts, per_prompt, seed, temperature, self.hot_temperature)

    def score(self, reward_model: torch.nn.Module, prompt: str, completions: torch.Tensor) -> np.ndarray:
        """Rewards of a prompt's completions (D, T), shape (D,)."""
        return score(reward_model, self.tokenizer, prompt, completions)

    def log_probs(self, model: torch.nn.Module, prompt: str, completions: torch.Tensor) -> np.ndarray:
        """Log-probabilities of a prompt's completions (D, T), shape (D,), nats."""
        return log_probs(model, self.tokenizer, prompt, completions)

    def kind_of(self, text: str) -> str:
        """In which way a bad completion is bad."""
        return WORLDS[self.name].construction_of(text)


def load_world(folder: str | Path) -> HeldOutWorld:
    """The world of a folder, of a grammar or of real text."""
    described = json.loads((Path(folder) / "world.json").read_text(encoding="utf-8"))
    if "judge" in described:
        from ..real_text.world import RealTextWorld

        return RealTextWorld(folder)
    return HeldOutWorld(folder)


def with_fused_activations(model: torch.nn.Module) -> torch.nn.Module:
    """The model with GPT-2's activation in one operation instead of eight, which takes a third off its time on a CPU."""
    for module in model.modules():
        for name, child in module.named_children():
            if isinstance(child, NewGELUActivation):
                setattr(module, name, torch.nn.GELU(approximate="tanh"))
    return model


@dataclass
class Samples:
    """
    Samples of one prompt: distinct completions (D, T), how often each was drawn (D,), its log-probability (D,) under the model
    and under the model at a higher temperature, nats.
    """

    completions: torch.Tensor
    counts: np.ndarray
    log_probs: np.ndarray
    log_probs_hot: np.ndarray

    def mean(self, values: np.ndarray) -> float:
        """Mean over the samples of a value (D,) of each distinct completion."""
        return float(np.average(values, weights=self.counts))


@torch.no_grad()
def draw(
    model,
    tokenizer,
    prompts: list[str],
    per_prompt: int,
    seed: int,
    temperature: float = 1.0,
    hot_temperature: float = TEMPERATURE,
) -> list[Samples]:
    """
    Independent samples of each prompt at a temperature, with their log-probabilities at 1 and at `hot_temperature`: tokens up to
    the first end token, padding behind it.

    A prefix that several samples share is read once: a multinomial draw splits their number among its next tokens. The
    numbers are distributed as those of samples drawn one by one.
    """
    rng, device = np.random.default_rng(seed), next(model.parameters()).device
    drawn = []
    for prompt in prompts:
        cache = DynamicCache(config=model.config)
        tokens = torch.tensor([tokenizer(prompt)["input_ids"]])
        counts, scores = np.array([per_prompt]), np.zeros((1, 2))
        prefixes, done = torch.empty((1, 0), dtype=torch.long), []
        for step in range(1, MAX_COMPLETION_LENGTH + 1):
            logits = model(input_ids=tokens.to(device), **with_cache(model, cache)).logits[:, -1].cpu()
            log_probs = torch.stack([logits, logits / hot_temperature], dim=-1).double().log_softmax(dim=1).numpy()
            probs = (logits / temperature).double().softmax(dim=-1).numpy()
            split = rng.multinomial(counts, probs / probs.sum(axis=1, keepdims=True))
            rows, chosen = np.nonzero(split)
            counts, scores = split[rows, chosen], scores[rows] + log_probs[rows, chosen]
            prefixes = torch.cat([prefixes[rows], torch.from_numpy(chosen)[:, None]], dim=1)
            ended = chosen == tokenizer.eos_token_id if step < MAX_COMPLETION_LENGTH else np.full(len(chosen), True)
            padding = (0, MAX_COMPLETION_LENGTH - step)
            ends = torch.from_numpy(ended)
            done.append(
                (functional.pad(prefixes[ends], padding, value=tokenizer.pad_token_id), counts[ended], scores[ended])
            )
            counts, scores, prefixes = counts[~ended], scores[~ended], prefixes[~ends]
            if not len(counts):
                break
            cache.batch_select_indices(torch.from_numpy(rows)[~ends].to(device))
            tokens = prefixes[:, -1:]
        completions, numbers, values = zip(*done, strict=True)
        values = np.concatenate(values)
        drawn.append(Samples(torch.cat(completions), np.concatenate(numbers), values[:, 0], values[:, 1]))
    return drawn


def distinct_pairs(samples: Samples, padding: int) -> float:
    """Of the pairs of neighbouring tokens in all samples, the share of different ones (distinct-2)."""
    tokens = samples.completions
    real = (tokens[:, 1:] != padding).numpy()
    number = int((real.sum(axis=1) * samples.counts).sum())
    pairs = torch.stack([tokens[:, :-1], tokens[:, 1:]], dim=-1)[torch.from_numpy(real)]
    return len(pairs.unique(dim=0)) / max(1, number)


def mixture_weights(samples: Samples, own: int, hot: int) -> np.ndarray:
    """
    What each distinct completion adds to a mean under the model: its count · p / m over the number of samples, shape (D,), where
    `own` samples at temperature 1 and `hot` ones at the higher one are taken for samples of their mixture m.
    """
    log_m = np.logaddexp(samples.log_probs + np.log(own), samples.log_probs_hot + np.log(hot))  # times own + hot
    return samples.counts * np.exp(samples.log_probs - log_m)


@torch.no_grad()
def score(reward_model, tokenizer, prompt: str, completions: torch.Tensor, rows: int = 512) -> np.ndarray:
    """Rewards of a prompt's completions (D, T), shape (D,)."""
    special = torch.tensor([tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id])
    lead = tokenizer(prompt)["input_ids"]
    texts = [[*lead, *row[~torch.isin(row, special)].tolist()] for row in completions]
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    found, device = torch.empty(len(texts)), next(reward_model.parameters()).device
    for start in range(0, len(order), rows):
        chosen = order[start : start + rows]
        width = max(len(texts[i]) for i in chosen)
        padded = [texts[i] + [tokenizer.pad_token_id] * (width - len(texts[i])) for i in chosen]
        ids = torch.tensor(padded, device=device)
        mask = (ids != tokenizer.pad_token_id).long()
        found[chosen] = reward_model(input_ids=ids, attention_mask=mask).logits[:, 0].float().cpu()
    return found.numpy()


@torch.no_grad()
def log_probs(model, tokenizer, prompt: str, completions: torch.Tensor, rows: int = 512) -> np.ndarray:
    """Log-probabilities of a prompt's completions (D, T), end token included, shape (D,), nats."""
    device = next(model.parameters()).device
    completions, lead = completions.to(device), torch.tensor([tokenizer(prompt)["input_ids"]], device=device)
    ended = (completions == tokenizer.eos_token_id).long()
    counts = ended.cumsum(dim=1) - ended == 0  # up to the first end token
    order = counts.sum(dim=1).argsort()
    values = torch.empty(len(completions), dtype=torch.double)
    for chosen in order.split(rows):
        counted = counts[chosen, : counts[chosen].sum(dim=1).max()]
        part = completions[chosen, : counted.shape[1]]
        cache = DynamicCache(config=model.config)  # the prompt is read once
        logits = model(input_ids=lead, **with_cache(model, cache)).logits[:, -1:].expand(len(part), -1, -1)
        if part.shape[1] > 1:
            cache.batch_repeat_interleave(len(part))
            others = model(input_ids=part[:, :-1], **with_cache(model, cache)).logits
            logits = torch.cat([logits, others], dim=1)
        found = logits.float().log_softmax(dim=-1).gather(2, part.unsqueeze(2)).squeeze(2)
        values[chosen.cpu()] = (found * counted).double().sum(dim=1).cpu()
    return values.numpy()
