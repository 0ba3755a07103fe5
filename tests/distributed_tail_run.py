"""RePULSe with reports of the tail while it trains; launched by `test_distributed`."""

import json
import sys

from datasets import Dataset
from transformers import AutoTokenizer

from trl_repulse import RePULSeConfig, RePULSeTrainer
from trl_repulse.evaluation.callback import TailReportCallback

from .conftest import QUIET
from .distributed_support import leave, start


PROMPTS = ["the cat", "fish", "a dog ran"]


def reward(prompts, completions, **kwargs):
    """Which prompt it was, and a little for the completion: means tell whether rewards went to their prompts."""
    pairs = zip(prompts, completions, strict=True)
    return [10.0 * PROMPTS.index(prompt) + 0.01 * len(completion) for prompt, completion in pairs]


def main(folder: str) -> None:
    args = RePULSeConfig(
        output_dir=f"{folder}/run",
        **QUIET,
        max_steps=3,
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=4,
        proposal="learned",
        target_dist_beta=-1.0,
    )
    trainer = RePULSeTrainer(
        model=f"{folder}/model",
        reward_funcs=reward,
        args=args,
        train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
        processing_class=AutoTokenizer.from_pretrained(f"{folder}/model"),
    )
    # 9 completions on two processes would be 5 and 4, which two batches and one would hold
    callback = TailReportCallback(trainer, PROMPTS, num_samples=3, every=2)
    trainer.add_callback(callback)
    trainer.train()
    if trainer.accelerator.is_main_process:
        found = [(entry["update"], entry["report"]["mean"]) for entry in callback.history]
        reports = [{"update": update, "mean": mean.value, "samples": mean.samples} for update, mean in found]
        print(json.dumps({"world_size": trainer.accelerator.num_processes, "reports": reports}))
    leave()


if __name__ == "__main__":
    start()
    main(*sys.argv[1:])
