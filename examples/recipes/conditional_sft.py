"""
Conditional fine-tuning: the reward stands before the answer as one of five tags, and the trained model is asked for the best.

    python examples/recipes/conditional_sft.py [--model my/model --reward_model_path judge --prompts p.jsonl]

A tag is a token, `<|reward_0|>` to `<|reward_4|>` for the worst to the best fifth of all samples, and follows the prompt, as in
Quark (arXiv 2205.13636). Prompts are plain text. `output_dir` then has the model and the samples.
Hardware: the embedded policy has 0.25 million parameters. CPU: not measured. One GPU of 24 GB, of 80 GB: not measured.
"""

import argparse

import numpy as np
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline
from trl import SFTConfig, SFTTrainer

from trl_repulse import embedded
from trl_repulse.cli.main import Parser
from trl_repulse.cli.scripts import main_or_exit
from trl_repulse.data import load_prompts
from trl_repulse.evaluation.sampling import SamplingSettings, sample_completions
from trl_repulse.rewards.loading import check_classifier


TAGS = [f"<|reward_{number}|>" for number in range(5)]


def main() -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=embedded.policy_path(), help="path or Hub id of the model to train")
    parser.add_argument("--reward_model_path", default=embedded.reward_model_path(), help="a one-label classifier")
    parser.add_argument("--prompts", default=embedded.prompts_path(), help="file or data set of prompts")
    parser.add_argument("--output_dir", default="conditional-sft")
    parser.add_argument("--num_samples", type=int, default=16, help="completions of each prompt")
    parser.add_argument("--max_completion_length", type=int, default=24)
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--num_train_epochs", type=float, default=4)
    options = parser.parse_args()

    prompts = load_prompts(options.prompts)["prompt"][:]
    if not isinstance(prompts[0], str):
        raise ValueError(f"`{options.prompts}` has conversations; this recipe takes prompts that are plain text.")
    lengths = {"num_samples": options.num_samples, "max_completion_length": options.max_completion_length}
    settings = SamplingSettings(**lengths, batch_size=256)
    check_classifier(options.reward_model_path)
    score = pipeline("text-classification", options.reward_model_path, function_to_apply="none")
    if score.model.config.num_labels != 1:
        raise ValueError(f"`{options.reward_model_path}` has several labels; this recipe takes a classifier with one.")

    def reward(completions: list[str], question: list[str], **columns: list) -> list[float]:  # without the tag
        return [row["score"] for row in score([a + b for a, b in zip(question, completions, strict=True)])]

    def sample(name: str, model: str, tag: str = "") -> tuple[list[str], np.ndarray]:
        rows = Dataset.from_dict({"prompt": [prompt + tag for prompt in prompts], "question": prompts})
        samples = sample_completions(f"{options.output_dir}/{name}", model, rows, reward, settings, progress=False)
        print(f"{name}: mean reward {samples.column('reward').mean():.3f}")
        return samples.table["completion"].to_pylist(), samples.column("reward").ravel()

    completions, rewards = sample("before", options.model)
    tags = np.searchsorted(np.quantile(rewards, [0.2, 0.4, 0.6, 0.8]), rewards, side="right")
    tagged = [prompts[place // options.num_samples] + TAGS[tag] for place, tag in enumerate(tags)]
    rows = Dataset.from_dict({"prompt": tagged, "completion": completions})

    tokenizer, model = (kind.from_pretrained(options.model) for kind in (AutoTokenizer, AutoModelForCausalLM))
    model.resize_token_embeddings(len(tokenizer) + tokenizer.add_tokens(TAGS))
    fields = {name: getattr(options, name) for name in ("learning_rate", "num_train_epochs")}
    fields |= {"bf16": torch.accelerator.is_available(), "save_strategy": "no", "report_to": "none"}
    args = SFTConfig(f"{options.output_dir}/model", **fields)
    trainer = SFTTrainer(model, args, train_dataset=rows, processing_class=tokenizer)
    trainer.train()
    trainer.save_model(args.output_dir)
    sample("asked-for-the-worst", args.output_dir, TAGS[0])
    sample("asked-for-the-best", args.output_dir, TAGS[-1])


if __name__ == "__main__":
    main_or_exit(main)
