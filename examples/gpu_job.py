# /// script
# requires-python = ">=3.11"
# dependencies = ["trl-repulse[peft,quantization]"]
# ///
"""
A training run as one file, for a machine with a GPU: `uv run examples/gpu_job.py --model my/model --reward my/reward-model --prompts my/prompts`.

uv reads the dependencies above and makes an environment of its own. In a checkout add `--with-editable .`. The policy is a LoRA adapter over the
model, which `--load_in_4bit` loads in 4 bits (QLoRA); it is pushed to the Hub if `--push_to` names a repository. A proposal, negatives and
completions stay on the machine.

Hardware: weights of 7 billion parameters take 14 GB in bfloat16, and 4 GB in 4 bits (computed). A run on one GPU of 24 GB, of 80 GB: memory and
time not measured.
"""

import argparse

import torch
from peft import LoraConfig
from transformers import BitsAndBytesConfig

from trl_repulse import RePULSeConfig, RePULSeTrainer
from trl_repulse.data import load_prompts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="path or Hub id of a causal language model")
    parser.add_argument("--reward", required=True, help="path or Hub id of a sequence classifier with one label")
    parser.add_argument("--prompts", required=True, help="file or data set of prompts")
    parser.add_argument("--threshold", type=float, help="reward under which a completion is bad; by default measured")
    parser.add_argument("--max_steps", type=int, default=800)
    parser.add_argument("--max_completion_length", type=int, default=64)
    parser.add_argument("--push_to", help="repository on the Hub, which is created private")
    parser.add_argument("--load_in_4bit", action="store_true")
    parser.add_argument("--use_cpu", action="store_true")
    options = parser.parse_args()
    precision = torch.float32 if options.use_cpu else torch.bfloat16
    nf4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": precision}
    args = RePULSeConfig(
        output_dir="out",
        max_steps=options.max_steps,
        max_completion_length=options.max_completion_length,
        per_device_train_batch_size=48,  # 12 prompts, 4 completions each
        bad_reward_threshold=options.threshold,
        use_cpu=options.use_cpu,
        bf16=not options.use_cpu,
        push_to_hub=options.push_to is not None,
        hub_model_id=options.push_to,
        hub_private_repo=True,
    )
    trainer = RePULSeTrainer(
        model=options.model,
        reward_funcs=options.reward,
        args=args,
        train_dataset=load_prompts(options.prompts),
        quantization_config=BitsAndBytesConfig(**nf4) if options.load_in_4bit else None,
        peft_config=LoraConfig(task_type="CAUSAL_LM", r=16, lora_alpha=32, target_modules="all-linear"),
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
