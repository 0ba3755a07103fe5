"""Two updates of RePULSe on PPO and GRPO on recorded completions, one for each row, for `test_distributed`.

It is launched in one process and in two, which DDP, DeepSpeed or FSDP2 brings together.

Usage: `python -m tests.rows_run FOLDER ROWS_A_PROCESS`
"""

import sys
from pathlib import Path

import torch
from accelerate import PartialState
from datasets import Dataset

from trl_repulse import RePULSeGRPOConfig, RePULSeGRPOTrainer, RePULSePPOConfig, RePULSePPOTrainer
from trl_repulse.models._deepspeed import gathered
from trl_repulse.models._fsdp import whole

from .conftest import QUIET, build_model, build_tokenizer, word_reward
from .distributed_support import engine_name, leave, start
from .recorded import POLICY, PROPOSAL, build_reward_model


OWN, OTHERS = POLICY[0] + POLICY[1], PROPOSAL[0] + PROPOSAL[1]  # of one prompt
HOT = {"proposal": "hot_policy", "potential": "tilted", "proposal_temperature": 1.7, "bad_reward_threshold": 0.1}
METHODS = {
    "PPO, hot": (RePULSePPOConfig, HOT | {"num_proposal_generations": 16}),
    "PPO, proposal": (RePULSePPOConfig, {"proposal": "learned"}),
    "GRPO, hot": (RePULSeGRPOConfig, HOT),
    "GRPO, own": (RePULSeGRPOConfig, {"proposal": "policy"}),
    "GRPO, proposal": (RePULSeGRPOConfig, {"proposal": "learned", "num_proposal_generations": 16}),
}


class Recorded:
    """Mixin that gives each row of all processes its completion."""

    def _generate(self, prompts):
        sampled = self.proposal is not None and self.model_wrapped is self.proposal.engine
        table = OTHERS if sampled or self.generation_config.temperature != 1.0 else OWN
        first = self.accelerator.process_index * len(prompts)
        completions = [table[(first + i) % len(table)] for i in range(len(prompts))]
        texts = self.processing_class.batch_decode(completions, skip_special_tokens=True)
        return [self.processing_class(p)["input_ids"] for p in prompts], completions, None, texts, None, {}, None, []


class RecordedPPO(Recorded, RePULSePPOTrainer):
    pass


class RecordedGRPO(Recorded, RePULSeGRPOTrainer):
    pass


def train(folder, rows, method):
    """
    Parameters of all models after two updates, the last log, the number of processes, what cuts models apart, and how many
    completions at most shared a row of each process.
    """
    config_cls, settings = METHODS[method]
    args = config_cls(
        output_dir=str(folder / "out"),
        **QUIET,
        max_steps=2,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=2,
        shuffle_dataset=False,
        num_generations=8,
        max_completion_length=3,
        max_grad_norm=0.0,
        learning_rate=0.1,
        optim="sgd",
        lr_scheduler_type="constant",
        beta=0.0,
        alpha=2.0,
        target_dist_beta=-0.7,
        **settings,
    )
    tokenizer = build_tokenizer()
    extra = {"proposal_model": build_model("gpt2", len(tokenizer), 1) if args.has_proposal else None}
    on_ppo = config_cls is RePULSePPOConfig
    if on_ppo:
        extra["value_model"] = build_reward_model("gpt2", len(tokenizer), 1)
    trainer = (RecordedPPO if on_ppo else RecordedGRPO)(
        model=build_model("gpt2", len(tokenizer)),
        reward_funcs=word_reward,
        args=args,
        # Two processes have runs of other lengths: 12 rows of the first prompt, and 4 of it before 8 of the second, which is
        # longer, so that without gradient they read other numbers of rows
        train_dataset=Dataset.from_dict({"prompt": ["the"] * 2 + ["a dog sat the fish ate"]}),
        processing_class=tokenizer,
        **extra,
    )
    policy, shared = trainer.model, []
    policy.register_forward_pre_hook(
        lambda module, args, kwargs: shared.append(getattr(kwargs.get("layout"), "count", 1)),
        with_kwargs=True,
        prepend=True,
    )
    trainer.train()
    beside = [vars(trainer)[name] for name in ("proposal", "value") if vars(trainer).get(name)]
    parameters = []
    for module in (policy, *(model.module for model in beside)):
        with gathered(module):
            parameters += [whole(p.detach()).clone() for p in module.parameters()]
    engines = {engine_name(engine) for engine in (trainer.model_wrapped, *(model.engine for model in beside))}
    shared = trainer.accelerator.gather(torch.tensor([max(shared)])).tolist()
    return parameters, trainer.state.log_history[1], trainer.accelerator.num_processes, engines, shared


if __name__ == "__main__":
    start()
    torch.set_num_threads(1)
    found = {method: train(Path(sys.argv[1]), int(sys.argv[2]), method) for method in METHODS}
    if PartialState().is_main_process:
        torch.save(found, Path(sys.argv[1]) / "found.pt")
    leave()
