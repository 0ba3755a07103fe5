"""Evaluations of recorded completions, one for each row, for `test_metrics`; launched by it in two processes too."""

import json
import math
import sys
from pathlib import Path

import torch
from datasets import Dataset

from trl_repulse import PPOConfig, PPOTrainer, ReinforceConfig, ReinforceTrainer, RePULSeConfig, RePULSeTrainer

from .conftest import QUIET, build_model, build_tokenizer
from .distributed_support import leave, start


PROMPTS = ["the cat", "the dog ran the cat ate", "fish", "the fish sat bad", "dog", "the"]
PROMPTS += ["cat sat", "bad", "ran fish"]
END, BAD, FISH = 1, 18, 17
# Of row i of an evaluation; the last is bad, and the third has no reward
POLICY = [[11 + i % 6, *([12] * (i % 4)), *([END] if i % 3 else [])][:4] for i in range(18)]
POLICY[2], POLICY[8], POLICY[17] = [FISH, FISH], [BAD, END], [BAD, 12, END]
PROPOSAL = [[BAD if i % 3 else 13, *([14] * (i % 3)), *([END] if i % 2 else [])] for i in range(18)]


def rewards(completions, log_metric, **kwargs):
    """−3 a bad word, +0.3 a word, none for two fishes; logs the mean number of letters of the batch."""
    log_metric("letters", sum(map(len, completions)) / len(completions))
    return [
        None if text == " fish fish" else 0.3 * len(text.split()) - 3.3 * text.split().count("bad")
        for text in completions
    ]


class Recorded:
    """Mixin whose completions are those above, by the row's place in the evaluation."""

    def evaluation_loop(self, *args, **kwargs):
        self.places = {"policy": 0, "proposal": 0}
        return super().evaluation_loop(*args, **kwargs)

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        sampled = self.accelerator.unwrap_model(self.model_wrapped)
        is_policy = sampled is self.accelerator.unwrap_model(self.model)
        who, table = ("policy", POLICY) if is_policy else ("proposal", PROPOSAL)
        first = self.places[who] + self.accelerator.process_index * len(prompt_ids)
        self.places[who] += self.accelerator.num_processes * len(prompt_ids)
        rows = len(PROMPTS) * self.num_generations_eval  # accelerate begins anew where it fills up a batch
        drawn = [list(table[(first + i) % rows]) for i in range(len(prompt_ids))]
        return drawn, None


class RecordedReinforce(Recorded, ReinforceTrainer):
    pass


class RecordedRePULSe(Recorded, RePULSeTrainer):
    pass


class RecordedPPO(Recorded, PPOTrainer):
    pass


TRAINERS = {"reinforce": RecordedReinforce, "repulse": RecordedRePULSe, "ppo": RecordedPPO}
# Losses that do not depend on how rows are put into batches
OWN = {
    ReinforceConfig: {"reward_transform": "indicator", "reward_transform_threshold": -1.0},
    RePULSeConfig: {"proposal": "learned", "target_dist_beta": -2.0, "alpha": 1.0},
    PPOConfig: {"whiten_advantages": False, "reward_transform": "exponential", "reward_transform_beta": -0.1},
}


def evaluate(folder, name: str, batch_size: int, generations: int, stream: bool = False, **kwargs) -> dict[str, float]:
    """What `evaluate` gives of the nine prompts, in batches of so many rows a process."""
    trainer_cls, tokenizer = TRAINERS[name], build_tokenizer()
    args = trainer_cls._config_cls(
        output_dir=f"{folder}/{name}",
        **QUIET,
        per_device_train_batch_size=8,
        per_device_eval_batch_size=batch_size,
        num_generations=2,
        num_generations_eval=generations,
        max_completion_length=4,
        beta=0.2,
        bad_reward_threshold=-1.0,
        log_completions=True,
        **OWN[trainer_cls._config_cls],
        **kwargs,
    )
    policy = build_model("gpt2", len(tokenizer), seed=0)
    policy.config._name_or_path = str(Path(folder, "reference"))  # saved by the test
    extra = {"proposal_model": build_model("gpt2", len(tokenizer), seed=1)} if name == "repulse" else {}
    prompts = Dataset.from_dict({"prompt": PROMPTS})
    trainer = trainer_cls(
        model=policy,
        reward_funcs=rewards,
        args=args,
        train_dataset=prompts,
        eval_dataset=prompts.to_iterable_dataset() if stream else prompts,
        processing_class=tokenizer,
        **extra,
    )
    torch.manual_seed(0)
    if name == "ppo":
        torch.nn.init.normal_(trainer.value.module.classifier.weight)
    metrics = trainer.evaluate()
    without_reward = sum(map(math.isnan, trainer._logs["rewards"]["rewards"]))  # in the completions table
    timing = ("runtime", "per_second", "preparation_time")
    return {key: value for key, value in metrics.items() if not key.endswith(timing)} | {
        "without_reward": without_reward
    }


def main(folder: str) -> None:
    found = {name: evaluate(folder, name, 4, 1 if name == "ppo" else 2) for name in TRAINERS}
    found["stream"] = evaluate(folder, "reinforce", 4, 2, stream=True)
    found["cut"] = evaluate(folder, "repulse", 5, 2)  # a prompt's completions on two processes
    if torch.distributed.get_rank() == 0:
        Path(folder, "result.json").write_text(json.dumps(found))


if __name__ == "__main__":
    start()
    main(*sys.argv[1:])
    leave()
