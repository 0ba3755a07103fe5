"""Five RePULSe or PPO updates on the completions of `recorded`, launched by `test_distributed`."""

import os
import sys

import torch
from datasets import Dataset
from peft import LoraConfig
from trl.trainer import grpo_trainer

from trl_repulse import PPOConfig, PPOTrainer, RePULSeConfig, RePULSeTrainer
from trl_repulse.engine.second_model import SecondAdapter
from trl_repulse.evaluation.callback import TailReportCallback
from trl_repulse.method import hot_policy as _hot_policy
from trl_repulse.models._adapters import adapter_layers
from trl_repulse.trainers import reinforce_trainer

from .conftest import QUIET, build_model, build_tokenizer, word_reward
from .distributed_support import STEPS, finish, leave, start
from .recorded import PROMPTS, N, build_reward_model, recorded


class Shortened:
    """Mixin: the first prompt's completions, all on the first of two processes, are shorter than the second's."""

    def _generate(self, prompts):
        prompt_ids, completions, tool_mask, _, *rest = super()._generate(prompts)
        completions = [c[:2] if prompt == PROMPTS[0] else c for prompt, c in zip(prompts, completions, strict=True)]
        texts = self.processing_class.batch_decode(completions, skip_special_tokens=True)
        return prompt_ids, completions, tool_mask, texts, *rest


class RecordedPPO(Shortened, recorded(PPOTrainer)):
    pass


class RecordedByRow(Shortened, recorded(RePULSeTrainer)):
    def _draws_others(self):
        if isinstance(self.proposal, SecondAdapter):
            return adapter_layers(self.model)[0].active_adapters == ["proposal"]
        return super()._draws_others()


class Sampled(RePULSeTrainer):
    """Drawn, not recorded; the first process has done before the others, and draws with its own random numbers."""

    def _generate_single_turn(self, *args, **kwargs):
        self.generation_config.max_new_tokens = 2 + 4 * self.accelerator.process_index
        return super()._generate_single_turn(*args, **kwargs)


class Reused(RecordedByRow):
    """Generations of two updates, used twice, in the order in which two processes come to them."""

    def _prepare_inputs(self, *args, **kwargs):
        grpo_trainer.shuffle_sequence_dict = self._in_order
        return super()._prepare_inputs(*args, **kwargs)

    def _in_order(self, batch):
        rows = torch.arange(len(batch["rewards"]))
        if self.accelerator.num_processes == 1:  # prompts, updates and their samples of a prompt
            rows = rows.view(len(PROMPTS), 2, -1).transpose(0, 1).flatten()
        return {name: value[rows] for name, value in batch.items()}


class WithinProcess(RecordedByRow):
    """The mistake to be noticed: a baseline over the completions at hand instead of the prompt's on all processes."""

    def _credit(self, *args):
        right = reinforce_trainer.to_prompts, reinforce_trainer.to_units
        reinforce_trainer.to_prompts, reinforce_trainer.to_units = self.of_process, self.of_rows
        try:
            return super()._credit(*args)
        finally:
            reinforce_trainer.to_prompts, reinforce_trainer.to_units = right

    @staticmethod
    def of_process(accelerator, units, generations):
        if units.size(1) == generations:
            return units
        return units.flatten(0, 1).view(-1, generations // 2, *units.shape[2:])

    @staticmethod
    def of_rows(accelerator, prompts, like):
        if prompts.size(1) == like.size(1):
            return prompts
        return prompts.flatten(0, 1).view(*like.shape, *prompts.shape[2:])


ADAPTER_CLIP = 0.05
CLASSES = {
    "within a process": WithinProcess,
    "reused": Reused,
    "PPO": RecordedPPO,
    "PPO, adapter": RecordedPPO,
    "tails": RePULSeTrainer,
}
TERM = {"proposal": "learned", "potential": "tilted", "alpha": 2.0, "target_dist_beta": -0.7}
CHECKPOINTS = {"save_strategy": "steps", "save_steps": 2, "optim": "adamw_torch", "max_steps": 4}
METHODS = {
    "leave one out": {},
    "within a process": {},
    "prefixes": {"prefix_reward_steps": 1, "gae_lambda": 0.8},
    "bf16": {"bf16": True},
    "fp16": {"fp16": True},
    "checkpointed": {"gradient_checkpointing": True},
    "reused": {"generation_batch_size": 8, "num_iterations": 2},
    "iterable": {},
    "evaluated": {"eval_strategy": "steps", "eval_steps": 2},
    "sampled": {"max_completion_length": 8},
    "sampled, a prompt of one token": {"max_completion_length": 8},
    "sampled in bf16": {"max_completion_length": 8, "bf16": True},
    "checkpoints": CHECKPOINTS,
    "checkpoints in a block": {
        **CHECKPOINTS,
        **{"per_device_train_batch_size": 1, "steps_per_generation": 4, "gradient_accumulation_steps": 1},
    },
    "checkpoints in fp16": CHECKPOINTS | {"fp16": True},
    "checkpoints, moving reference": CHECKPOINTS | {"sync_ref_model": True, "ref_model_sync_steps": 1},
    "adapters": {},
    "adapters, checkpointed": {"gradient_checkpointing": True},
    "adapters, fp16": {"fp16": True},
    "adapters, clipped": {"max_grad_norm": ADAPTER_CLIP, "learning_rate": 1.0},
    "adapters, checkpoints": CHECKPOINTS,
    "adapters, checkpoints in bf16": CHECKPOINTS | {"bf16": True},
    "adapters, checkpoints in fp16": CHECKPOINTS | {"fp16": True},
    "adapters, after": {"proposal_update_order": "after", "proposal_updates_per_step": 2},
    "hot": {"proposal": "hot_policy", "proposal_temperature": 2.0, "bad_reward_threshold": -1.0},
    "hot, threshold measured": {"proposal": "hot_policy", "proposal_temperature": 2.0},
    "REINFORCE++": {"baseline": "none", "normalize_advantages": True},
    "REINFORCE++-baseline": {"baseline": "group_mean", "normalize_advantages": True},
    "PPO": {"num_iterations": 2, "value_clip": 0.01},
    "PPO, adapter": {"num_iterations": 2, "value_clip": 0.01},
    "tails": {"max_steps": 3},
}


HELD_OUT = [*PROMPTS, "fish"]


def place_reward(prompts, completions, **kwargs):
    """Which prompt it was, and a little for the completion: means tell whether rewards went to their prompts."""
    pairs = zip(prompts, completions, strict=True)
    return [10.0 * HELD_OUT.index(prompt) + 0.01 * len(completion) for prompt, completion in pairs]


def models_of(method: str, tokenizer) -> dict:
    """What makes the second model: one of its own, or an adapter beside the policy's; nothing for the hot policy."""
    if method.startswith("hot"):
        return {}
    # ZeRO-3 cuts apart what is larger than ten times the hidden size, hence the rank
    config = LoraConfig(task_type="CAUSAL_LM", target_modules=["c_attn"], r=16, init_lora_weights=False)
    adapter = {"peft_config": config} if "adapter" in method else {}
    if method.startswith("PPO"):
        return {"value_model": build_reward_model("gpt2", len(tokenizer), seed=1)} | adapter
    return adapter or {"proposal_model": build_model("gpt2", len(tokenizer), seed=1)}


def main(folder: str, batch_size: str, accumulation: str, method: str, checkpoint: str | None = None) -> None:
    tokenizer = build_tokenizer()
    settings = {
        "output_dir": f"{folder}/run",
        **QUIET,
        "max_steps": STEPS,
        "per_device_train_batch_size": int(batch_size),
        "per_device_eval_batch_size": N // int(os.environ.get("WORLD_SIZE", "1")),  # a prompt, cut over processes
        "gradient_accumulation_steps": int(accumulation),
        "num_generations": N,
        "max_completion_length": 3,
        "optim": "sgd",  # Adam would blow up the rounding noise of gradients that are 0
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "shuffle_dataset": False,
        "beta": 0.3,
    }
    on_ppo = method.startswith("PPO")
    args = (PPOConfig if on_ppo else RePULSeConfig)(**settings | ({} if on_ppo else TERM) | METHODS[method])
    _hot_policy._LEAST, _hot_policy._MOST_BAD = 12, 0.5  # 16 samples, of the first two of five updates
    policy = build_model("gpt2", len(tokenizer), seed=0)
    policy.config._name_or_path = f"{folder}/reference"  # saved by the test
    # Of one token: nothing of it can be read ahead, by one of two processes
    prompts = [PROMPTS[0], PROMPTS[1].split()[0]] if method.endswith("of one token") else PROMPTS
    dataset = Dataset.from_dict({"prompt": prompts})
    trainer = (Sampled if method.startswith("sampled") else CLASSES.get(method, RecordedByRow))(
        model=policy,
        reward_funcs=place_reward if method == "tails" else word_reward,
        args=args,
        train_dataset=dataset.to_iterable_dataset() if method == "iterable" else dataset,
        eval_dataset=dataset,
        processing_class=tokenizer,
        **models_of(method, tokenizer),
    )
    if method.startswith("adapters"):
        torch.manual_seed(1)
        with torch.no_grad():
            for p in trainer.proposal.module.parameters():
                p.add_(0.1 * torch.randn_like(p))
    assert trainer._guard.repeat_cache and trainer._guard.share_prompts
    # 9 completions on two processes would be 5 and 4, which two batches and one would hold
    tails = [TailReportCallback(trainer, HELD_OUT, num_samples=3, every=2)] if method == "tails" else []
    for callback in tails:
        trainer.add_callback(callback)
    trainer.train(resume_from_checkpoint=checkpoint)
    if "checkpoints" in method:
        trainer.save_model()
    models = {"policy": policy} | {name: second.module for name, second in trainer.second_models.items()}
    if method.startswith("adapters"):
        own = [p for name, p in trainer.model.named_parameters() if "default" in name.split(".")]
        models["adapter"] = torch.nn.ParameterList(own)
    means = [(entry["update"], entry["report"]["mean"]) for callback in tails for entry in callback.history]
    finish(trainer, models, folder, tails=[(update, mean.samples, mean.value) for update, mean in means])


if __name__ == "__main__":
    start()
    main(*sys.argv[1:])
    leave()
