"""Completions of two models side by side, text in, text out, without a trainer.

python examples/repulse.py --proposal learned --target_dist_beta -3 --output_dir out    # trains both in the embedded world
python examples/generate.py --policy out --proposal out/proposal
python examples/generate.py --policy out --proposal out/proposal --use_vllm  # both on one vLLM engine

Hardware: the embedded policy has 0.25 million parameters. CPU: not measured. One GPU of 24 GB, of 80 GB: not measured.
"""

import argparse

from accelerate import Accelerator
from transformers import AutoModelForCausalLM, AutoTokenizer

from trl_repulse.cli.scripts import main_or_exit
from trl_repulse.embedded import policy_path
from trl_repulse.generation import TransformersGenerator, VLLMGenerator


PROMPTS = ["Customer: how much is the old kettle? Clerk:", "Customer: can you repair my clock? Clerk:"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", default=policy_path(), help="path or id of a causal language model")
    parser.add_argument("--proposal", help="another one of the same architecture; by default the policy")
    parser.add_argument("--prompts", nargs="+", default=PROMPTS)
    parser.add_argument("--num_completions", type=int, default=3)
    parser.add_argument("--max_new_tokens", type=int, default=24)
    parser.add_argument("--use_vllm", action="store_true")
    options = parser.parse_args()

    accelerator = Accelerator()
    tokenizer = AutoTokenizer.from_pretrained(options.policy)
    paths = {"policy": options.policy, "proposal": options.proposal or options.policy}
    models = {name: AutoModelForCausalLM.from_pretrained(path) for name, path in paths.items()}
    models = {name: model.to(accelerator.device).eval() for name, model in models.items()}
    if options.use_vllm:
        longest = max(len(tokenizer(prompt)["input_ids"]) for prompt in options.prompts)
        generator = VLLMGenerator(
            models,
            tokenizer,
            accelerator,
            max_completion_length=options.max_new_tokens,
            max_model_length=longest + options.max_new_tokens,
            gpu_memory_utilization=0.3,
        )
    else:
        generator = TransformersGenerator(models, tokenizer, max_completion_length=options.max_new_tokens)
    for name in models:
        groups = generator.complete(options.prompts, model=name, num_completions=options.num_completions)
        for prompt, completions in zip(options.prompts, groups, strict=True):
            for completion in completions:
                print(f"{name:>8} | {prompt}{completion.text}")


if __name__ == "__main__":
    main_or_exit(main)
