"""
Iterative DPO: sample, pair good and bad completions of a prompt, train on the pairs, and repeat with the trained model.

    python examples/recipes/iterative_dpo.py                                    # the embedded world
    python examples/recipes/iterative_dpo.py --model my/model --reward_model_path judge --prompts prompts.jsonl \
        --threshold -4 --max_completion_length 64 --learning_rate 1e-6

The reference is the first model, in every round. `output_dir` then has the samples of each round (`samples-0` ...) and the model.
Hardware: the embedded policy has 0.25 million parameters. CPU: not measured. One GPU of 24 GB, of 80 GB: not measured.
"""

import argparse

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM
from trl import DPOConfig, DPOTrainer

from trl_repulse import embedded
from trl_repulse.cli.main import Parser
from trl_repulse.cli.scripts import main_or_exit
from trl_repulse.data import load_prompts
from trl_repulse.evaluation.preferences import preference_rows, read_rewarded
from trl_repulse.evaluation.sampling import SamplingSettings, sample_completions
from trl_repulse.evaluation.tails import prob_below
from trl_repulse.rewards.loading import load_reward


def main() -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=embedded.policy_path(), help="path or Hub id of the model to train")
    parser.add_argument("--reward_model_path", default=embedded.reward_model_path(), help="path or Hub id")
    parser.add_argument("--reward_type", help="kind of reward, as in the training commands")
    parser.add_argument("--prompts", default=embedded.prompts_path(), help="file or data set of prompts")
    parser.add_argument("--output_dir", default="iterative-dpo")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--num_samples", type=int, default=16, help="completions of each prompt in a round")
    parser.add_argument("--threshold", type=float, default=0.0, help="reward under which a completion is rejected")
    parser.add_argument("--max_bad", type=int, default=4, help="rejected completions of a prompt, the worst ones")
    parser.add_argument("--max_completion_length", type=int, default=24)
    parser.add_argument("--learning_rate", type=float, default=3e-4)
    parser.add_argument("--beta", type=float, default=0.1, help="of DPO")
    parser.add_argument("--num_train_epochs", type=float, default=2, help="of a round")
    options = parser.parse_args()
    if options.rounds < 1 or options.max_bad < 1:
        parser.error("`--rounds` and `--max_bad` must be at least 1")

    prompts, reward = load_prompts(options.prompts), load_reward(options.reward_type, options.reward_model_path)
    if not isinstance(prompts["prompt"][0], str):  # DPO would begin the template's text with a second BOS
        raise ValueError(f"`{options.prompts}` has conversations; this recipe takes prompts that are plain text.")
    args = DPOConfig(
        output_dir=f"{options.output_dir}/model",
        learning_rate=options.learning_rate,
        beta=options.beta,
        num_train_epochs=options.num_train_epochs,
        bf16=torch.accelerator.is_available(),
        save_strategy="no",
        report_to="none",
    )
    settings = SamplingSettings(
        num_samples=options.num_samples, max_completion_length=options.max_completion_length, batch_size=256
    )
    model = options.model
    for number in range(options.rounds + 1):
        folder = f"{options.output_dir}/samples-{number}"
        rewards = sample_completions(folder, model, prompts, reward, settings, progress=False).column("reward")
        share = prob_below(rewards, options.threshold).value
        print(f"after {number} rounds: mean reward {rewards.mean():.3f}, {share:.1%} under {options.threshold:g}")
        if number < options.rounds:
            pairs = preference_rows(read_rewarded(folder), options.threshold, max_bad=options.max_bad)
            reference = AutoModelForCausalLM.from_pretrained(options.model)
            trainer = DPOTrainer(model, reference, args=args, train_dataset=Dataset.from_list(pairs))
            trainer.train()
            model = args.output_dir
            trainer.save_model(model)


if __name__ == "__main__":
    main_or_exit(main)
