"""
Builds the world of two tokens from its grammar: `python -m examples.worlds.two_tokens.build --output_dir world`.

The policy is a GPT-2 pre-trained on sentences drawn from the grammar; the reward model is a GPT-2 classifier regressed on
the grammar's kindness score, over idiomatic completions and over arbitrary pairs of tokens alike. The build is
deterministic: one thread, its own seeds, the caller's random state left as it was.

Legend: B sentences or completions in a batch, L tokens of the longest.
"""

import argparse
import json
import math
import random
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import GPT2Config, GPT2ForSequenceClassification, GPT2LMHeadModel, PreTrainedTokenizerFast

from . import grammar


PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"
SEED = 20251021
MAX_POSITIONS = 64


def build_tokenizer() -> PreTrainedTokenizerFast:
    """
    Word-level tokenizer whose tokens carry their own leading space.

    Joining decoded tokens and splitting the text again gives the same tokens, whatever their order: a lower-case word
    begins with a space, a sentence-initial word with a capital, punctuation is a token by itself.

    Returns:
        [`~transformers.PreTrainedTokenizerFast`]: tokenizer with pad, eos and unk tokens, and no bos.
    """
    vocabulary = {token: index for index, token in enumerate([PAD, EOS, UNK, *grammar.vocabulary()])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token=UNK))
    tokenizer.pre_tokenizer = Split(Regex(r" ?[a-z]+|[A-Z][a-z]*|[^a-zA-Z ]"), behavior="isolated")
    tokenizer.decoder = Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNK,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_POSITIONS,
    )


def _config(tokenizer: PreTrainedTokenizerFast, width: int, layers: int, heads: int, **kwargs) -> GPT2Config:
    return GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=MAX_POSITIONS,
        n_embd=width,
        n_layer=layers,
        n_head=heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **kwargs,
    )


def _pad(rows: list[list[int]], value: int) -> torch.Tensor:
    """Right-pad rows of ids into one tensor, (B, L)."""
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=value)


def _fit(model: torch.nn.Module, loss_of_step: Callable[[], torch.Tensor], steps: int, learning_rate: float) -> None:
    """Train with AdamW, fifty steps of warm-up and a cosine down to zero."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 50, 0.5 * (1 + math.cos(math.pi * step / steps)))
    )
    model.train()
    total = 0.0
    for step in range(1, steps + 1):
        loss = loss_of_step()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        total += loss.item()
        if step % 200 == 0:
            print(f"  step {step:5d}  loss {total / 200:.4f}", flush=True)
            total = 0.0
    model.eval()


def train_policy(tokenizer: PreTrainedTokenizerFast, steps: int = 1200, batch_size: int = 128) -> GPT2LMHeadModel:
    """
    Pre-train the policy on sentences of the grammar, by maximum likelihood.

    Args:
        tokenizer ([`~transformers.PreTrainedTokenizerFast`]):
            Tokenizer from [`build_tokenizer`].
        steps (`int`, *optional*, defaults to `1200`):
            Number of updates.
        batch_size (`int`, *optional*, defaults to `128`):
            Fresh sentences per update.

    Returns:
        [`~transformers.GPT2LMHeadModel`]: the trained model, in eval mode.
    """
    model = GPT2LMHeadModel(_config(tokenizer, width=64, layers=2, heads=2))
    vocabulary, rng = tokenizer.get_vocab(), random.Random(SEED)

    def loss_of_step() -> torch.Tensor:
        sentences = [grammar.draw_sentence(rng) for _ in range(batch_size)]
        rows = [[*(vocabulary[token] for token in sentence), tokenizer.eos_token_id] for sentence in sentences]
        logits = model(input_ids=_pad(rows, tokenizer.pad_token_id)).logits[:, :-1]  # (B, L - 1, V)
        return F.cross_entropy(logits.flatten(0, 1), _pad(rows, -100)[:, 1:].flatten(), ignore_index=-100)

    _fit(model, loss_of_step, steps, learning_rate=3e-3)
    return model


def _draw_completion(family: str, tokens: list[str], rng: random.Random) -> list[str]:
    """Completion to score: idiomatic, idiomatic with one word replaced, two arbitrary words, or shorter."""
    kind = rng.random()
    completion = grammar.draw_tail(family, rng, rude=rng.random() < 0.15)[:2]
    if kind < 0.3:
        return completion
    if kind < 0.5:
        completion[rng.randrange(2)] = rng.choice(tokens)
        return completion
    if kind < 0.6:
        other = grammar.draw_tail(rng.choice(grammar.FAMILIES), rng, rude=False)[:2]
        return other
    if kind < 0.95:
        return [rng.choice(tokens), rng.choice(tokens)]
    return [rng.choice(tokens)] if kind < 0.99 else []


def train_reward_model(
    tokenizer: PreTrainedTokenizerFast, steps: int = 2400, batch_size: int = 256
) -> GPT2ForSequenceClassification:
    """
    Regress the reward model on the score of the grammar.

    Args:
        tokenizer ([`~transformers.PreTrainedTokenizerFast`]):
            Tokenizer from [`build_tokenizer`].
        steps (`int`, *optional*, defaults to `2400`):
            Number of updates.
        batch_size (`int`, *optional*, defaults to `256`):
            Fresh completions per update.

    Returns:
        [`~transformers.GPT2ForSequenceClassification`]: the trained model, in eval mode. Its one logit, read at the
        last token that is no padding, is the reward.
    """
    model = GPT2ForSequenceClassification(_config(tokenizer, width=32, layers=2, heads=2, num_labels=1))
    vocabulary, tokens, rng = tokenizer.get_vocab(), grammar.vocabulary(), random.Random(SEED + 1)
    frames = [grammar.split_words(frame) for frame in grammar.COMMON_FRAMES]

    def loss_of_step() -> torch.Tensor:
        rows, targets = [], []
        for _ in range(batch_size):
            frame = rng.choice(frames) if rng.random() < 0.5 else grammar.draw_frame(rng.choice(grammar.FAMILIES), rng)
            family = grammar.family_of(frame)
            completion = _draw_completion(family, tokens, rng)
            rows.append([vocabulary[token] for token in frame + completion])
            targets.append(grammar.score(family, completion))
        input_ids = _pad(rows, tokenizer.pad_token_id)  # (B, L)
        rewards = model(input_ids=input_ids, attention_mask=(input_ids != tokenizer.pad_token_id).long()).logits[:, 0]
        return F.mse_loss(rewards, torch.tensor(targets))

    _fit(model, loss_of_step, steps, learning_rate=3e-3)
    return model


def build(output_dir: str | Path) -> None:
    """
    Build the world and write it in the Hugging Face format.

    Args:
        output_dir (`str` or `Path`):
            Folder to write `policy/`, `reward_model/`, `prompts.jsonl` and `bad_words.json` into.
    """
    output_dir = Path(output_dir)
    output_dir.mkdir(parents=True, exist_ok=True)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the order of floating-point sums depends on the number of threads
    try:
        with torch.random.fork_rng(devices=[]):
            tokenizer = build_tokenizer()
            torch.manual_seed(SEED)
            print("policy")
            policy = train_policy(tokenizer)
            torch.manual_seed(SEED + 1)
            print("reward model")
            reward_model = train_reward_model(tokenizer)
    finally:
        torch.set_num_threads(threads)
    for name, model in (("policy", policy), ("reward_model", reward_model)):
        model.save_pretrained(output_dir / name)
        tokenizer.save_pretrained(output_dir / name)
    lines = [json.dumps({"prompt": prompt}) + "\n" for prompt in grammar.PROMPTS]
    (output_dir / "prompts.jsonl").write_text("".join(lines), encoding="utf-8")
    (output_dir / "bad_words.json").write_text(json.dumps(grammar.BAD_WORDS, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """Entry point of `python -m examples.worlds.two_tokens.build`."""
    parser = argparse.ArgumentParser(description="Build the world of two tokens from its grammar.")
    parser.add_argument("--output_dir", required=True, help="Folder to write the world into.")
    arguments = parser.parse_args()
    start = time.perf_counter()
    build(arguments.output_dir)
    print(f"built in {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
