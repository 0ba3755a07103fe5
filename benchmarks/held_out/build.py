"""
Builds a held-out world: prompts, a policy, a reward model and the threshold under which a reward is bad.

    python -m benchmarks.held_out.build shop --output_dir runs/held_out/shop

The pipeline is a user's: TRL's `SFTTrainer` trains the policy on replies of the grammar, TRL's `RewardTrainer` the reward
model on pairs of replies to one prompt, chosen and rejected as a Bradley-Terry model of the grammar's scores decides. The
reward model never sees an empty or a broken reply. The build is deterministic: one thread, fixed seeds.
"""

import argparse
import json
import random
import time
from pathlib import Path

import torch
from datasets import Dataset
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import (
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    set_seed,
)
from trl import RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

from .grammar import TOKEN, Prompt, World
from .worlds import WORLDS


SEED = 20261122
TRAINING_PROMPTS, UNSEEN_PROMPTS = 240, 120
MAX_POSITIONS = 64
SPECIAL = ["<pad>", "<eos>", "<unk>"]
THRESHOLD = -4.0  # below all decent replies, above nearly all rude ones
# Worlds differ in architecture too: a result must not hang on learned positions
ARCHITECTURES = {"shop": "gpt2", "letters": "llama", "school": "gpt2"}


def build_tokenizer(world: World) -> PreTrainedTokenizerFast:
    """Word-level tokenizer of a world; texts concatenate as tokens do."""
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *world.vocabulary()])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Split(Regex(TOKEN), behavior="isolated")
    tokenizer.decoder = Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_POSITIONS,
    )


def build_model(architecture: str, vocabulary: int, width: int, layers: int, classifier: bool) -> torch.nn.Module:
    """A small model with random weights."""
    special = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
    if classifier:
        special["num_labels"] = 1
    if architecture == "gpt2":
        config = GPT2Config(
            vocab_size=vocabulary,
            n_positions=MAX_POSITIONS,
            n_embd=width,
            n_layer=layers,
            n_head=4,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            **special,
        )
        return GPT2ForSequenceClassification(config) if classifier else GPT2LMHeadModel(config)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=width * 8 // 3,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        **special,
    )
    return LlamaForSequenceClassification(config) if classifier else LlamaForCausalLM(config)


def draw_prompts(world: World) -> tuple[list[Prompt], list[Prompt]]:
    """Prompts to train on and unseen ones: other texts, of the same shapes and words."""
    rng, prompts = random.Random(SEED), {}
    while len(prompts) < TRAINING_PROMPTS + UNSEEN_PROMPTS:
        prompt = world.draw_prompt(rng)
        prompts.setdefault(prompt.text, prompt)
    drawn = list(prompts.values())
    return drawn[:TRAINING_PROMPTS], drawn[TRAINING_PROMPTS:]


def draw_replies(world: World, unseen: set[str], count: int) -> list[dict[str, str]]:
    """Replies to all prompts but the unseen ones, in the columns of `SFTTrainer`."""
    rng, rows = random.Random(SEED + 1), []
    while len(rows) < count:
        prompt = world.draw_prompt(rng)
        if prompt.text not in unseen:
            rows.append({"prompt": prompt.text, "completion": world.draw_reply(prompt, rng).text})
    return rows


def draw_pairs(world: World, unseen: set[str], tokenizer, count: int) -> list[dict[str, list[int]]]:
    """Pairs of replies, a fifth of them to be rude, in the columns of `RewardTrainer`."""
    rng, rows = random.Random(SEED + 2), []
    while len(rows) < count:
        prompt = world.draw_prompt(rng)
        if prompt.text in unseen:
            continue
        first, second = (world.draw_reply(prompt, rng, rude_rate=0.2) for _ in range(2))
        gap = torch.tensor(first.score - second.score)
        chosen, rejected = (first, second) if rng.random() < gap.sigmoid().item() else (second, first)
        # Tokens and not texts: to texts `RewardTrainer` (TRL 1.16) adds an end token, which trainers do not when they score
        texts = {"chosen_ids": prompt.text + chosen.text, "rejected_ids": prompt.text + rejected.text}
        rows.append({name: tokenizer(text)["input_ids"] for name, text in texts.items()})
    return rows


def train_policy(world: World, unseen: set[str], tokenizer, folder: Path, replies: int, epochs: float) -> None:
    """Fine-tunes a policy from random weights on replies to all prompts but the unseen ones."""
    rows = draw_replies(world, unseen, replies)
    set_seed(SEED + 1)
    args = SFTConfig(
        output_dir=str(folder / "sft"),
        num_train_epochs=epochs,
        per_device_train_batch_size=64,
        learning_rate=2e-3,
        lr_scheduler_type="cosine",
        warmup_steps=100,
        **_common_settings(),
    )
    model = build_model(ARCHITECTURES[world.name], len(tokenizer), 96, 2, classifier=False)
    trainer = SFTTrainer(model, args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
    trainer.train()
    model.save_pretrained(folder / "policy")
    tokenizer.save_pretrained(folder / "policy")


def train_reward_model(world: World, unseen: set[str], tokenizer, folder: Path, pairs: int, epochs: float) -> None:
    """Trains a reward model from random weights on pairs of replies."""
    rows = draw_pairs(world, unseen, tokenizer, pairs)
    set_seed(SEED + 2)
    args = RewardConfig(
        output_dir=str(folder / "reward_training"),
        num_train_epochs=epochs,
        per_device_train_batch_size=64,
        learning_rate=1e-3,
        lr_scheduler_type="cosine",
        warmup_steps=100,
        center_rewards_coefficient=2e-4,
        **_common_settings(),
    )
    model = build_model(ARCHITECTURES[world.name], len(tokenizer), 64, 2, classifier=True)
    trainer = RewardTrainer(model, args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
    trainer.train()
    model.save_pretrained(folder / "reward_model")
    tokenizer.save_pretrained(folder / "reward_model")


def _common_settings() -> dict:
    return {
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "weight_decay": 0.01,
        "max_length": MAX_POSITIONS,
        "save_strategy": "no",
        "report_to": "none",
        "logging_steps": 100,
        "disable_tqdm": True,
        "seed": SEED,
        "dataloader_pin_memory": False,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("world", choices=WORLDS)
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--replies", type=int, default=80_000, help="replies to fine-tune the policy on")
    parser.add_argument("--pairs", type=int, default=60_000, help="pairs to train the reward model on")
    parser.add_argument("--epochs", type=float, default=1.0)
    options = parser.parse_args()
    torch.set_num_threads(1)  # the order of floating-point sums depends on the number of threads
    start = time.perf_counter()
    world, folder = WORLDS[options.world], options.output_dir
    folder.mkdir(parents=True, exist_ok=True)
    training, unseen = draw_prompts(world)
    for name, prompts in (("train", training), ("unseen", unseen)):
        lines = [json.dumps({"prompt": prompt.text, "rude_rate": prompt.rude_rate}) + "\n" for prompt in prompts]
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    tokenizer, hidden = build_tokenizer(world), {prompt.text for prompt in unseen}
    train_policy(world, hidden, tokenizer, folder, options.replies, options.epochs)
    print(f"policy: {time.perf_counter() - start:.0f} s", flush=True)
    train_reward_model(world, hidden, tokenizer, folder, options.pairs, options.epochs)
    described = {"name": world.name, "threshold": THRESHOLD, "seed": SEED}
    (folder / "world.json").write_text(
        json.dumps(described, indent=2) + "\n", encoding="utf-8"
    )  # last: says it is whole
    print(f"built in {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
