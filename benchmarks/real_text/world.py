"""A world of real text, in the form of the held-out worlds, so that their runs, results and tables are its own."""

from dataclasses import fields
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from ..held_out.evaluate import HeldOutWorld, Samples, log_probs
from .judges import JUDGES, Judge
from .sampling import POLICY, at_temperature, sample


class RealTextWorld(HeldOutWorld):
    """A world that `build.py` wrote: a judge and a length of completions, for the policy and the prompts of the folder above."""

    samples = 500  # a prompt: 60,000 in all
    hot_samples = 100
    proposal_samples = 50
    lasting = True

    def __init__(self, folder: Any):
        super().__init__(folder)
        self.judge: Judge = JUDGES[self.described["judge"]]()

    @property
    def policy_path(self) -> str:
        return str(self.folder.parent / "policy")

    @property
    def reward(self) -> Judge:
        return self.judge

    def costs(self) -> dict[str, float]:
        judge = self.judge
        return {"judge_calls": judge.calls, "judge_texts": judge.texts, "judge_seconds": judge.seconds}

    def fields(self, config_class: type) -> dict[str, Any]:
        own = {"beta": self.described["beta"], "bad_reward_threshold": self.threshold}
        known = {field.name for field in fields(config_class)}
        return super().fields(config_class) | {name: value for name, value in own.items() if name in known}

    def load_policy(self) -> torch.nn.Module:
        return AutoModelForCausalLM.from_pretrained(self.policy_path, dtype=torch.float32).eval()

    def load_reward_model(self) -> Judge:
        return self.judge

    def draw(
        self, model: torch.nn.Module, prompts: list[str], per_prompt: int, seed: int, temperature: float = 1.0
    ) -> list[Samples]:
        ids = self.tokenizer(prompts)["input_ids"]
        sampler, scored = at_temperature(temperature), (POLICY, at_temperature(self.hot_temperature))
        tokens, values = sample(model, ids, per_prompt, self.completion_length, sampler, seed, scored)
        drawn = []
        for part, scores in zip(tokens.split(per_prompt), values.split(per_prompt), strict=True):
            _, places, counts = np.unique(part.numpy(), axis=0, return_index=True, return_counts=True)
            drawn.append(Samples(part[places], counts, scores[places, 0].numpy(), scores[places, 1].numpy()))
        return drawn

    def score(self, reward_model: Judge, prompt: str, completions: torch.Tensor) -> np.ndarray:
        texts = self.tokenizer.batch_decode(completions, skip_special_tokens=True)
        return np.array(reward_model(completions=texts))

    def log_probs(self, model: torch.nn.Module, prompt: str, completions: torch.Tensor) -> np.ndarray:
        rows = 64 if next(model.parameters()).device.type == "cpu" else 512
        return log_probs(model, self.tokenizer, prompt, completions, rows=rows)

    def kind_of(self, text: str) -> str:
        return "bad"
