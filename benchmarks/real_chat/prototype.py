"""
A plain REINFORCE on the world "real chat", written for speed alone: what an update of the package is compared with.

    python -m benchmarks.step_cost --world runs/real_chat --methods prototype REINFORCE RePULSe

Float32 weights with AdamW, a bfloat16 copy that draws, autocast for the pass with gradients; each prompt is read once for its N
completions. It logs nothing, checks nothing and saves nothing.

Axis letters: P prompts, N completions of each, T tokens of a completion, V vocabulary.
"""

import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from trl_repulse.generation.drawing import with_cache

from .judge import reward


BETA, LEARNING_RATE = 0.2, 3e-5
PROMPTS_PER_PASS = 5  # with gradients


class Prototype:
    """A policy in a world's folder, and its updates."""

    def __init__(self, world: Path, n: int = 5, length: int = 20, attention: str = "eager"):
        def load(dtype: torch.dtype) -> torch.nn.Module:
            return AutoModelForCausalLM.from_pretrained(world / "policy", dtype=dtype, attn_implementation=attention)

        self.n, self.length = n, length
        self.tokenizer = AutoTokenizer.from_pretrained(world / "policy", padding_side="left")
        rows = (world / "train.jsonl").read_text(encoding="utf-8").splitlines()
        self.prompts = [
            self.tokenizer.apply_chat_template(json.loads(row)["prompt"], tokenize=False, add_generation_prompt=True)
            for row in rows
        ]
        self.policy = load(torch.float32)
        self.fast, self.reference = load(torch.bfloat16).eval(), load(torch.bfloat16).eval()
        self.optimizer = torch.optim.AdamW(self.policy.parameters(), lr=LEARNING_RATE, weight_decay=0.0)

    def read(self, model: torch.nn.Module, x: dict[str, torch.Tensor]) -> tuple[torch.Tensor, object]:
        """Last logits (P·N, V) and cache of prompts that are read once."""
        positions = (x["attention_mask"].cumsum(-1) - 1).clamp(min=0)
        out = model(**x, position_ids=positions, use_cache=True, logits_to_keep=1)
        out.past_key_values.batch_repeat_interleave(self.n)
        return out.logits[:, -1].repeat_interleave(self.n, 0), out.past_key_values

    @torch.no_grad()
    def draw(self, x: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Completion ids (P·N, T) and which of them the model wrote."""
        end = self.tokenizer.eos_token_id
        logits, cache = self.read(self.fast, x)
        mask = x["attention_mask"].repeat_interleave(self.n, 0)
        position = mask.sum(1) - 1
        ids = torch.full((len(mask), self.length), end)
        live = torch.zeros_like(ids, dtype=torch.bool)
        done = torch.zeros(len(mask), dtype=torch.bool)
        for t in range(self.length):
            cumulative = logits.float().softmax(-1).cumsum(-1)
            drawn = torch.rand(len(cumulative), 1) * cumulative[:, -1:]
            token = torch.searchsorted(cumulative, drawn).squeeze(1).clamp(max=cumulative.size(1) - 1)
            ids[:, t], live[:, t] = torch.where(done, end, token), ~done
            done |= token.eq(end)
            if done.all() or t == self.length - 1:
                break
            mask, position = torch.cat([mask, mask.new_ones(len(mask), 1)], 1), position + 1
            options = {"attention_mask": mask, "position_ids": position[:, None]} | with_cache(self.fast, cache)
            logits = self.fast(input_ids=ids[:, t : t + 1], **options).logits[:, -1]
        return ids, live

    def log_probs(
        self, model: torch.nn.Module, x: dict[str, torch.Tensor], ids: torch.Tensor, live: torch.Tensor
    ) -> torch.Tensor:
        """log p of completions, nats, (P·N,)."""
        first, cache = self.read(model, x)
        mask = torch.cat([x["attention_mask"].repeat_interleave(self.n, 0), live.long()], 1)
        before = x["attention_mask"].sum(1).repeat_interleave(self.n) - 1
        position = before[:, None] + live.long().cumsum(1)
        options = {"attention_mask": mask[:, :-1], "position_ids": position[:, :-1]} | with_cache(model, cache)
        rest = model(input_ids=ids[:, :-1], **options).logits
        logits = torch.cat([first[:, None], rest], 1).float()
        log_p = logits.gather(-1, ids[..., None]).squeeze(-1) - logits.logsumexp(-1)
        return log_p.masked_fill(~live, 0).sum(1)

    def update(self, prompts: int = 20) -> float:
        """One update on so many prompts. Returns the mean reward."""
        chosen = [self.prompts[i] for i in torch.randperm(len(self.prompts))[:prompts].tolist()]

        def tokens(texts: list[str]) -> dict[str, torch.Tensor]:
            return dict(self.tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False))

        self.fast.load_state_dict(self.policy.state_dict())
        ids, live = self.draw(tokens(chosen))
        parts = [row[mask] for row, mask in zip(ids, live, strict=True)]
        rewards = torch.tensor(reward(self.tokenizer.batch_decode(parts, skip_special_tokens=True)))
        for start in range(0, prompts, PROMPTS_PER_PASS):
            x = tokens(chosen[start : start + PROMPTS_PER_PASS])
            rows = slice(start * self.n, (start + PROMPTS_PER_PASS) * self.n)
            with torch.no_grad():
                log_ref = self.log_probs(self.reference, x, ids[rows], live[rows])
            with torch.autocast("cpu", torch.bfloat16):
                log_p = self.log_probs(self.policy, x, ids[rows], live[rows])
            returns = (rewards[rows] - BETA * (log_p.detach() - log_ref)).view(-1, self.n)
            advantages = (returns - returns.mean(1, keepdim=True)) * self.n / (self.n - 1)
            (-(advantages.flatten() * log_p / live[rows].sum(1)).sum() / len(ids)).backward()
        torch.nn.utils.clip_grad_norm_(self.policy.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return rewards.mean().item()
