"""Five PPO updates on the completions of `recorded`, launched by `test_distributed`."""

import sys

from datasets import Dataset

from trl_repulse import PPOConfig, PPOTrainer

from .conftest import QUIET, build_model, build_tokenizer, word_reward
from .distributed_support import STEPS, finish, leave, start
from .recorded import POLICY, PROMPTS, N, build_reward_model, recorded


class Shortened(recorded(PPOTrainer)):
    """The first prompt's completions, all on the first of two processes, are shorter than the second's."""

    def _generate(self, prompts):
        prompt_ids, completions, tool_mask, texts, *rest = super()._generate(prompts)
        completions = [c[:2] if c in POLICY[0] else c for c in completions]
        texts = self.processing_class.batch_decode(completions, skip_special_tokens=True)
        return prompt_ids, completions, tool_mask, texts, *rest


def main(folder: str, batch_size: str, accumulation: str, variant: str) -> None:
    tokenizer = build_tokenizer()
    args = PPOConfig(
        output_dir=f"{folder}/run",
        **QUIET,
        max_steps=STEPS,
        per_device_train_batch_size=int(batch_size),
        gradient_accumulation_steps=int(accumulation),
        num_generations=N,
        num_iterations=2,
        max_completion_length=3,
        optim="sgd",  # Adam would blow up the rounding noise of gradients that are 0
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        shuffle_dataset=False,
        beta=0.3,
        value_clip=0.01,
        whiten_advantages=variant == "plain",
    )
    policy = build_model("gpt2", len(tokenizer), seed=0)
    policy.config._name_or_path = f"{folder}/reference"  # saved by the test
    trainer = Shortened(
        model=policy,
        reward_funcs=word_reward,
        args=args,
        train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
        processing_class=tokenizer,
        value_model=build_reward_model("gpt2", len(tokenizer), seed=1),
    )
    trainer.train()
    finish(trainer, {"policy": policy, "value": trainer.value.module}, folder)


if __name__ == "__main__":
    start()
    main(*sys.argv[1:])
    leave()
