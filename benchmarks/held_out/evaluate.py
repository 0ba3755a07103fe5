"""
Samples of a model on the unseen prompts of a held-out world: rewards, P(bad), CVaR, KL, and how bad outputs are bad.

Everything is drawn at temperature 1 from the whole vocabulary. Rewards are those of the texts, as a trainer computes them:
without end, padding or unknown tokens.

Axis letters: P prompts, S samples a prompt, T completion tokens.
"""

import json
from pathlib import Path

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
)

from .worlds import WORLDS


MAX_COMPLETION_LENGTH = 24
CVAR_LEVELS = (1e-2, 1e-3)


class HeldOutWorld:
    """A world that `build.py` wrote: prompts, policy, reward model, and the reward under which an output is bad."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        described = json.loads((self.folder / "world.json").read_text(encoding="utf-8"))
        self.grammar = WORLDS[described["name"]]
        self.threshold = described["threshold"]
        self.tokenizer = AutoTokenizer.from_pretrained(self.folder / "policy")

    @property
    def policy_path(self) -> str:
        return str(self.folder / "policy")

    @property
    def reward_model_path(self) -> str:
        return str(self.folder / "reward_model")

    def prompts(self, split: str) -> list[str]:
        """The prompts of a split, `train` or `unseen`."""
        lines = (self.folder / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
        return [json.loads(line)["prompt"] for line in lines]

    def load_policy(self) -> torch.nn.Module:
        return AutoModelForCausalLM.from_pretrained(self.policy_path).eval()

    def load_reward_model(self) -> torch.nn.Module:
        return AutoModelForSequenceClassification.from_pretrained(self.reward_model_path).eval()


@torch.no_grad()
def draw(model, tokenizer, prompts: list[str], per_prompt: int, seed: int, rows: int = 256) -> torch.Tensor:
    """
    Completions, shape (P, S, T): tokens up to the first end token, padding behind it.

    Prompts are drawn for one after another, so that none is padded and all samples of a prompt share its length.
    """
    config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=MAX_COMPLETION_LENGTH,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(seed)
    drawn = torch.full((len(prompts), per_prompt, MAX_COMPLETION_LENGTH), tokenizer.pad_token_id)
    for place, prompt in enumerate(prompts):
        ids = torch.tensor([tokenizer(prompt)["input_ids"]])
        for start in range(0, per_prompt, rows):
            count = min(rows, per_prompt - start)
            batch = ids.expand(count, -1)
            output = model.generate(input_ids=batch, attention_mask=torch.ones_like(batch), generation_config=config)
            completions = output[:, ids.size(1) :]
            drawn[place, start : start + count, : completions.size(1)] = completions
    return drawn


@torch.no_grad()
def score(reward_model, tokenizer, prompts: list[str], completions: torch.Tensor, rows: int = 512) -> np.ndarray:
    """Rewards of shape (P, S); equal completions of a prompt are scored once."""
    special = torch.tensor([tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id])
    rewards = np.empty(completions.shape[:2], dtype=np.float32)
    for place, prompt in enumerate(prompts):
        lead = tokenizer(prompt)["input_ids"]
        distinct, inverse = completions[place].unique(dim=0, return_inverse=True)
        texts = [[*lead, *row[~torch.isin(row, special)].tolist()] for row in distinct]
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        found = torch.empty(len(texts))
        for start in range(0, len(order), rows):
            chosen = order[start : start + rows]
            width = max(len(texts[i]) for i in chosen)
            ids = torch.tensor([texts[i] + [tokenizer.pad_token_id] * (width - len(texts[i])) for i in chosen])
            mask = (ids != tokenizer.pad_token_id).long()
            found[chosen] = reward_model(input_ids=ids, attention_mask=mask).logits[:, 0].float()
        rewards[place] = found[inverse].numpy()
    return rewards


@torch.no_grad()
def log_probs(model, tokenizer, prompts: list[str], completions: torch.Tensor, rows: int = 256) -> np.ndarray:
    """Log-probabilities of whole completions, end token included, shape (P, S), nats."""
    values = np.empty(completions.shape[:2], dtype=np.float64)
    for place, prompt in enumerate(prompts):
        lead = torch.tensor(tokenizer(prompt)["input_ids"])
        for start in range(0, completions.shape[1], rows):
            drawn = completions[place, start : start + rows]
            ended = (drawn == tokenizer.eos_token_id).long()
            counts = ended.cumsum(dim=1) - ended == 0  # up to the first end token
            ids = torch.cat([lead.expand(len(drawn), -1), drawn], dim=1)
            logits = model(input_ids=ids).logits[:, len(lead) - 1 : -1].float()
            chosen = logits.log_softmax(dim=-1).gather(2, drawn.unsqueeze(2)).squeeze(2)
            values[place, start : start + rows] = (chosen * counts).sum(dim=1).double().numpy()
    return values
