"""
Gives a held-out world a long tail of words, as the vocabulary of a language model has: tokens that hardly ever come, and break a text.

    python -m benchmarks.held_out.widen runs/held_out/shop --output_dir runs/held_out/shop-wide

Worlds have some 200 words, so that a policy drawn at temperature 2 still writes words that fit. With `--words` more, which together have the
probability `--share` of each token, they take most of the tokens at temperature 2. Nothing is trained: the new words' rows of the head predict the
log-probability that they should have, by least squares over the policy's own samples. Prompts and their texts stay as they are.
"""

import argparse
import json
import math
import shutil
from pathlib import Path

import torch
from transformers import set_seed

from .evaluate import HeldOutWorld


CONTEXTS = 200  # samples of the policy on which the rows are fitted
# Of the samples that find rare outputs in an evaluation: at 1.5 three of four tokens are new words
HOT_TEMPERATURE = 1.2
SPREAD = 1.0  # standard deviation of the new words' logits, nats


def names(count: int) -> list[str]:
    """New words of five letters, each with the space before it."""
    letters = "bcdfghjklmnpqrstvwxz"
    return [" " + "".join(letters[i // 20**place % 20] for place in range(5)) for i in range(count)]


@torch.no_grad()
def widen(world: HeldOutWorld, words: int, share: float, folder: Path) -> None:
    """Writes the world with `words` more words, which together have about `share` of each token's probability."""
    set_seed(0)
    policy, reward_model, tokenizer = world.load_policy(), world.load_reward_model(), world.tokenizer
    old = policy.config.vocab_size
    vocabulary = json.loads(tokenizer.backend_tokenizer.to_str())
    vocabulary["model"]["vocab"] |= {name: old + i for i, name in enumerate(names(words))}
    tokenizer._tokenizer = type(tokenizer.backend_tokenizer).from_str(json.dumps(vocabulary))

    # States that predict the tokens of samples, and the logarithm of their logits' normaliser
    states, normalisers = [], []
    for prompt in world.prompts("train")[:CONTEXTS]:
        lead = torch.tensor([tokenizer(prompt)["input_ids"]])
        rows = policy.generate(lead, attention_mask=torch.ones_like(lead), do_sample=True, max_new_tokens=24)
        output = policy(rows, output_hidden_states=True)
        states.append(output.hidden_states[-1][0, lead.size(1) - 1 : -1])
        normalisers.append(output.logits[0, lead.size(1) - 1 : -1].logsumexp(-1))
    x, y = torch.cat(states).double(), torch.cat(normalisers).double()
    row = torch.linalg.lstsq(x, y.unsqueeze(1)).solution[:, 0].float()
    constant = torch.linalg.lstsq(x, torch.ones_like(y).unsqueeze(1)).solution[:, 0].float()  # gives any state 1
    if (x.float() @ constant - 1).abs().max() > 0.01:
        raise ValueError("No direction moves all logits alike: the last norm needs a bias, as in shop and school.")
    print(f"the new words' logits are off by {(x.float() @ row - y.float()).std():.2f} nats")
    offsets = math.log(share / (1 - share) / words) - SPREAD**2 / 2 + SPREAD * torch.randn(words)
    head = row + offsets.unsqueeze(1) * constant

    embeddings = policy.get_input_embeddings().weight
    inputs = torch.randn(words, embeddings.size(1)) * embeddings.std(dim=0) + embeddings.mean(dim=0)
    head = torch.cat([policy.get_output_embeddings().weight, head])
    inputs = torch.cat([embeddings, inputs])
    policy.config.tie_word_embeddings = False
    policy.lm_head = torch.nn.Linear(head.size(1), old + words, bias=False)
    policy.lm_head.weight.copy_(head)
    policy.resize_token_embeddings(old + words)
    policy.get_input_embeddings().weight.copy_(inputs)
    policy.lm_head.weight.copy_(head)

    seen = reward_model.get_input_embeddings().weight.clone()
    reward_model.resize_token_embeddings(old + words)
    broken = torch.randn(words, seen.size(1)) * seen.std(dim=0) + seen.mean(dim=0)
    reward_model.get_input_embeddings().weight.copy_(torch.cat([seen, broken]))

    for name, model in (("policy", policy), ("reward_model", reward_model)):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    for name in ("train.jsonl", "unseen.jsonl"):
        shutil.copy(world.folder / name, folder / name)
    described = json.loads((world.folder / "world.json").read_text(encoding="utf-8"))
    text = json.dumps(described | {"hot_temperature": HOT_TEMPERATURE}, indent=2)
    (folder / "world.json").write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("world", type=Path)
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--words", type=int, default=20_000)
    parser.add_argument("--share", type=float, default=0.01)
    options = parser.parse_args()
    widen(HeldOutWorld(options.world), options.words, options.share, options.output_dir)


if __name__ == "__main__":
    main()
