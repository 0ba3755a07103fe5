"""Trainers of two processes whose engine draws completions of another length in each, as engines do: a script to launch."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

from accelerate import PartialState
from datasets import Dataset
from transformers import AutoTokenizer
from trl.generation import vllm_generation
from trl.trainer import grpo_trainer

from trl_repulse import PPOConfig, PPOTrainer, ReinforceConfig, ReinforceTrainer, RePULSeConfig, RePULSeTrainer
from trl_repulse.generation import _engine

from .conftest import QUIET, word_reward


LOG_P = -2.5
TRAINERS = {
    "RePULSe": (RePULSeTrainer, RePULSeConfig, {"proposal": "learned", "target_dist_beta": -1.0}),
    "REINFORCE": (ReinforceTrainer, ReinforceConfig, {}),
    "PPO": (PPOTrainer, PPOConfig, {}),
}


class Engine:
    """`VLLMGeneration`, but for a server; completions are a token longer in the second process, and none ends."""

    def __init__(self, model, *args, **options):
        self.model, self.mode, self.enable_sleep_mode = model, "server", False
        modes = {"model_config": {"logprobs_mode": "processed_logprobs"}}
        self.vllm_client = SimpleNamespace(get_server_info=lambda: modes)
        self.logprobs, self.generation_kwargs = options["logprobs"], options["generation_kwargs"]
        self.temperature = options["temperature"]

    def generate(self, prompts, images=None, num_generations=1, profiler=None):
        drawn = [4] * (2 + PartialState().process_index)
        token_ids = [[[token] for token in drawn]] * len(prompts)
        return prompts, [drawn] * len(prompts), [[[LOG_P] for _ in drawn]] * len(prompts), token_ids


def main(model: str, output: str) -> None:
    vllm_generation.LLM = None
    grpo_trainer.VLLMGeneration = Engine
    _engine.check_vllm = lambda: None
    _engine.push_weights = lambda *args, **options: None
    tokenizer, logs = AutoTokenizer.from_pretrained(model), {}
    prompts = Dataset.from_dict({"prompt": ["the cat", "fish", "the dog", "cat dog"]})
    for name, (trainer_cls, config_cls, settings) in TRAINERS.items():
        args = config_cls(
            output_dir=str(Path(output).parent / name),
            **QUIET,
            max_steps=1,
            per_device_train_batch_size=4,
            num_generations=4,
            max_completion_length=8,
            beta=0.0,
            use_vllm=True,
            vllm_mode="server",
            **settings,
        )
        trainer = trainer_cls(model, word_reward, args=args, train_dataset=prompts, processing_class=tokenizer)
        trainer.train()
        assert trainer.accelerator.num_processes == 2
        logs[name] = trainer.state.log_history[0]
    if PartialState().is_main_process:
        Path(output).write_text(json.dumps(logs))


if __name__ == "__main__":
    main(*sys.argv[1:])
