"""
Rejection sampling (RAFT): sample, keep the best completions of each prompt, fine-tune on them, and repeat.

    python examples/recipes/raft.py    # the embedded world
    python examples/recipes/raft.py --model my/model --reward_model_path judge --prompts p.jsonl --learning_rate 1e-5

`output_dir` then has the samples of each round and of the trained model (`samples-0` and so on), and the model (`model`).
Hardware: the embedded policy has 0.25 million parameters. CPU: not measured. One GPU of 24 GB, of 80 GB: not measured.
"""

import argparse
from collections import defaultdict

import torch
from datasets import Dataset
from trl import SFTConfig, SFTTrainer

from trl_repulse import embedded
from trl_repulse.cli.main import Parser
from trl_repulse.cli.scripts import main_or_exit
from trl_repulse.data import load_prompts
from trl_repulse.evaluation.preferences import RewardedCompletion, read_rewarded
from trl_repulse.evaluation.sampling import SamplingSettings, sample_completions
from trl_repulse.rewards.loading import load_reward


def keep_best(drawn: list[RewardedCompletion], keep: int) -> Dataset:
    """The distinct completions of each prompt with the highest rewards, as a data set for `SFTTrainer`."""
    groups: dict[str, dict[str, float]] = defaultdict(dict)
    for each in drawn:
        groups[each.prompt][each.completion] = each.reward
    best = {prompt: sorted(rewards, key=rewards.__getitem__)[-keep:] for prompt, rewards in groups.items()}
    return Dataset.from_list([{"prompt": prompt, "completion": text} for prompt in best for text in best[prompt]])


def main() -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=embedded.policy_path(), help="path or Hub id of the model to train")
    parser.add_argument("--reward_model_path", default=embedded.reward_model_path(), help="path or Hub id")
    parser.add_argument("--reward_type", help="kind of reward, as in the training commands")
    parser.add_argument("--prompts", default=embedded.prompts_path(), help="file or data set of prompts")
    parser.add_argument("--output_dir", default="raft")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--num_samples", type=int, default=16, help="completions of each prompt in a round")
    parser.add_argument("--keep", type=int, default=4, help="of them, how many are trained on")
    parser.add_argument("--max_completion_length", type=int, default=24)
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--num_train_epochs", type=float, default=2, help="of a round")
    options = parser.parse_args()
    if not 1 <= options.keep <= options.num_samples or options.rounds < 1:
        parser.error("`--rounds` must be at least 1, and `--keep` between 1 and `--num_samples`")

    prompts, reward = load_prompts(options.prompts), load_reward(options.reward_type, options.reward_model_path)
    if not isinstance(prompts[0]["prompt"], str):
        raise ValueError(f"`{options.prompts}` has conversations; this recipe takes prompts that are plain text.")
    args = SFTConfig(
        output_dir=f"{options.output_dir}/model",
        learning_rate=options.learning_rate,
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
        samples = sample_completions(folder, model, prompts, reward, settings, progress=False)
        print(f"after {number} rounds: mean reward {samples.column('reward').mean():.3f}")
        if number < options.rounds:
            trainer = SFTTrainer(model, args, train_dataset=keep_best(read_rewarded(folder), options.keep))
            trainer.train()
            model = args.output_dir
            trainer.save_model(model)


if __name__ == "__main__":
    main_or_exit(main)
