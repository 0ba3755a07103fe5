"""
Methods of a plan that learn from samples drawn beforehand, with TRL's own trainers: `dpo`, `kto`, `npo`, `raft` and `conditional`.

A method has `rounds` (1 by default). In each, the policy as it is then draws its share of the completions on the training prompts at
temperature 1, the world's reward model scores them, and the policy is trained on what `data_of` makes of them. The reference is the
initial policy in every round.
"""

from collections import defaultdict
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch.nn import functional
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, SFTConfig, SFTTrainer

from trl_repulse.evaluation.preferences import RewardedCompletion, preference_rows

from .evaluate import HeldOutWorld, load_world


REJECTED_SHARE = 0.25  # of a prompt's completions, for `dpo` and `kto`
COMMON = {
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "lr_scheduler_type": "linear",
    "warmup_steps": 0.1,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "logging_steps": 10,
    "dataloader_pin_memory": False,
}


@dataclass
class NPOConfig(SFTConfig):
    """`beta` as in DPO."""

    beta: float = 0.1


class NPOTrainer(SFTTrainer):
    """
    Negative preference optimisation (arXiv 2404.05868, eq. 3): -2 / beta · E log sigmoid(-beta · log(p / p_ref)) over the completions,
    all of which are bad ones.
    """

    def __init__(self, *args: Any, ref_model: torch.nn.Module, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.ref_model = ref_model.eval()

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        with torch.no_grad():
            reference = self._log_probs(self.ref_model, inputs)
        ratio = self._log_probs(model, inputs) - reference
        return -2 / self.args.beta * functional.logsigmoid(-self.args.beta * ratio).mean()

    @staticmethod
    def _log_probs(model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """Of the completions (B,), nats."""
        logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits[:, :-1]
        labels = inputs["labels"][:, 1:]
        found = logits.log_softmax(dim=-1).gather(2, labels.clamp(min=0).unsqueeze(2)).squeeze(2)
        return (found * (labels >= 0)).sum(dim=1)


TRAINERS: dict[str, tuple[type, type]] = {
    "dpo": (DPOTrainer, DPOConfig),
    "kto": (KTOTrainer, KTOConfig),
    "npo": (NPOTrainer, NPOConfig),
    "raft": (SFTTrainer, SFTConfig),
    "conditional": (SFTTrainer, SFTConfig),
}


@lru_cache(maxsize=1)
def collect_initial(folder: Path, number: int, seed: int) -> list[RewardedCompletion]:
    """What the initial policy of a world draws; methods with the same seed and number learn from the same completions."""
    world = load_world(folder)
    return collect(world, world.load_policy(), number, seed)


def collect(world: HeldOutWorld, model: torch.nn.Module, number: int, seed: int) -> list[RewardedCompletion]:
    """As many completions of the training prompts as `number` says, with their rewards; each distinct one once."""
    prompts, found = world.prompts("train"), []
    share, rest = divmod(number, len(prompts))
    reward_model = world.load_reward_model()
    model.eval()
    for part, each, offset in ((prompts[:rest], share + 1, 0), (prompts[rest:], share, 500_000)):
        for prompt, samples in zip(part, world.draw(model, part, each, seed + offset), strict=True):
            rewards = world.score(reward_model, prompt, samples.completions)
            texts = world.tokenizer.batch_decode(samples.completions, skip_special_tokens=True)
            found += [RewardedCompletion(prompt, text, float(r)) for text, r in zip(texts, rewards, strict=True)]
    return found


def tags_of(world: HeldOutWorld) -> list[str]:
    """What stands between prompt and completion for `conditional`, from the worst fifth of rewards to the best: words of the world."""
    return [world.tokenizer.decode([token]) for token in range(3, 8)]  # no special tokens


def tagged(drawn: list[RewardedCompletion], tags: list[str]) -> list[dict[str, Any]]:
    """All completions, each prompt followed by the tag of the fifth that the completion's reward is in."""
    rewards = [each.reward for each in drawn]
    fifths = np.searchsorted(np.quantile(rewards, [0.2, 0.4, 0.6, 0.8]), rewards, side="right")
    return [
        {"prompt": each.prompt + tags[fifth], "completion": each.completion}
        for each, fifth in zip(drawn, fifths, strict=True)
    ]


def data_of(trainer: str, drawn: list[RewardedCompletion], threshold: float) -> list[dict[str, Any]]:
    """
    Rows in TRL's formats, by trainer.

    - `dpo`: the worst quarter of each prompt's completions, each against one of its best, the worst against the best. Pairs of bad
      completions alone would be a few hundred, of some prompts, and would leave the reward of all others as it is.
    - `kto`: the completions of these pairs, each once, the chosen ones as good and the rejected ones as bad.
    - `npo`: the completions with a reward under `threshold`, and nothing else.
    - `raft`: the best completion of each prompt.
    """
    groups: dict[str, list[RewardedCompletion]] = defaultdict(list)
    for each in drawn:
        groups[each.prompt].append(each)
    if trainer == "npo":
        return [{"prompt": each.prompt, "completion": each.completion} for each in drawn if each.reward < threshold]
    if trainer == "raft":
        best = [max(group, key=lambda each: each.reward) for group in groups.values()]
        return [{"prompt": each.prompt, "completion": each.completion} for each in best]
    rows = []
    for group in groups.values():
        middle = median(each.reward for each in group)
        centred = [replace(each, reward=each.reward - middle) for each in group]
        if any(each.reward < 0 for each in centred):  # else there is nothing to choose between
            rows += preference_rows(centred, threshold=0.0, max_bad=max(1, round(REJECTED_SHARE * len(group))))
    if trainer == "kto":
        sides = dict.fromkeys(
            (row["prompt"], row[side], side == "chosen") for row in rows for side in ("chosen", "rejected")
        )
        return [{"prompt": prompt, "completion": text, "label": good} for prompt, text, good in sides]
    return rows


def train(
    world: HeldOutWorld, method: dict[str, Any], seed: int, completions: int, folder: Path
) -> tuple[Any, list[dict]]:
    """One run of a method; the trainer of its last round, and what all of them logged. `tags_of` ends `conditional`'s prompts."""
    trainer_class, config_class = TRAINERS[method["trainer"]]
    model, rounds, history = world.load_policy(), method.get("rounds", 1), []
    for number in range(rounds):
        share = completions * (number + 1) // rounds - completions * number // rounds
        draws = 1_000_000 * (number + 1) + seed
        drawn = collect(world, model, share, draws) if number else collect_initial(world.folder, share, draws)
        if method["trainer"] == "conditional":
            found = tagged(drawn, tags_of(world))
        else:
            found = data_of(method["trainer"], drawn, world.threshold)
        rows = Dataset.from_list(found).shuffle(seed=seed)
        keep = ("prompt", "chosen", "rejected", "completion", "label")
        rows = rows.select_columns([name for name in rows.column_names if name in keep])
        trainer = trainer_class(
            model=model,
            args=config_class(**(COMMON | {"output_dir": str(folder / "trainer"), "seed": seed} | method["config"])),
            train_dataset=rows,
            processing_class=world.tokenizer,
            **({} if trainer_class is SFTTrainer else {"ref_model": world.load_policy()}),
        )
        trainer.train()
        history += [{"round": number, "rows": len(rows)}, *trainer.state.log_history]
    return trainer, history
