"""Two updates of an agent in the shop, for `test_distributed`, which launches it in two processes.

The second process's episodes begin with an observation, the first one's with none: only there samples have prompts of their own.

Usage: `python -m tests.acting_run FOLDER POLICY METHOD`
"""

import json
import sys
from pathlib import Path

import torch
from accelerate import PartialState

from examples.worlds import shop
from trl_repulse import RePULSeGRPOConfig, RePULSeGRPOTrainer

from .conftest import QUIET
from .distributed_support import leave, start


METHODS = {
    "proposal": {"proposal": "learned", "bad_reward_threshold": 1.0},
    "hot": {"proposal": "hot_policy", "proposal_temperature": 2.0, "bad_reward_threshold": 1.0},
}


class Told(shop.Shop):
    def reset(self, **row):
        super().reset(**row)
        return ":" if PartialState().process_index and self.is_lost else None


def main(folder, policy, method):
    start()
    args = RePULSeGRPOConfig(
        output_dir=folder,
        **QUIET,
        max_steps=2,
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=shop.MAX_LENGTH,
        max_tool_calling_iterations=shop.MAX_CALLS,
        learning_rate=1e-3,
        proposal_tools=True,
        **METHODS[method],
    )
    try:
        trainer = RePULSeGRPOTrainer(
            model=policy,
            reward_funcs=shop.reward,
            args=args,
            train_dataset=shop.load_prompts(),
            environment_factory=Told,
            proposal_environment_factory=Told,
        )
    except ValueError as error:
        print(error)
        leave()
    trainer.train()
    models = [trainer.model, *([] if trainer.proposal is None else [trainer.proposal.module])]
    total = torch.stack([sum(p.double().sum() for model in models for p in model.parameters())])
    everyone = trainer.accelerator.gather(total).tolist()
    if trainer.accelerator.is_main_process:
        found = {
            "world_size": trainer.accelerator.num_processes,
            "weights": everyone,
            "log": trainer.state.log_history,
        }
        Path(folder, "result.json").write_text(json.dumps(found))
    leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
