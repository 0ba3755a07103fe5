"""RePULSe with reports of the tail while it trains; launched by `test_distributed`."""

import json
import sys

from datasets import Dataset
from transformers import AutoTokenizer

from trl_repulse import RePULSeConfig, RePULSeTrainer
from trl_repulse.evaluation.callback import TailReportCallback

from .distributed_support import leave, start


PROMPTS = ["the cat", "fish", "a dog ran"]


def reward(prompts, completions, **kwargs):
    """Which prompt it was, and a little for the completion: means tell whether rewards went to their prompts."""
    return [
        10.0 * PROMPTS.index(prompt) + 0.01 * len(completion)
        for prompt, completion in zip(prompts, completions, strict=True)
    ]


def main(folder: str) -> None:
    args = RePULSeConfig(
        output_dir=f"{folder}/run",
        use_cpu=True,
        bf16=False,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
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
        reports = [
            {
                "update": entry["update"],
                "mean": entry["report"]["mean"].value,
                "samples": entry["report"]["mean"].samples,
            }
            for entry in callback.history
        ]
        print(json.dumps({"world_size": trainer.accelerator.num_processes, "reports": reports}))
    leave()


if __name__ == "__main__":
    start()
    main(*sys.argv[1:])
