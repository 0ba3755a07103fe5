"""
Text of a folder, a tokenizer of it, and a small Llama trained on it.

Everything is drawn by fixed seeds. Training goes on from its last checkpoint when it is killed. On an accelerator it computes in bfloat16
where that is safe (autocast), and is not repeatable to the last bit.

Axis letters: B windows of a batch, T tokens of a window.
"""

import hashlib
import json
import math
import random
import re
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed


SEED = 20261125
SPECIAL = ["<pad>", "<eos>", "<unk>"]
CPU = torch.device("cpu")
WINDOW = 128  # tokens, also the model's most
HELD_OUT = 0.08  # share of the paragraphs: of them are the prompts, and the validation perplexity
PROMPT_TOKENS = (6, 10)
SAVE_STEPS, SAVE_STEPS_ACCELERATOR = 100, 1000
_PARAGRAPHS = re.compile(r"\n\s*\n|\n%\n")
_SENTENCES = re.compile(r"(?<=[.!?])[\"')]*\s+(?=[\"(]?[A-Z])")


@dataclass(frozen=True)
class PolicySettings:
    """What a policy depends on, but for the text."""

    vocabulary: int = 8192
    layers: int = 4
    width: int = 256
    epochs: float = 1.0
    batch: int = 8
    learning_rate: float = 2e-3
    steps: int | None = None  # in the place of epochs


def read_paragraphs(folder: Path) -> list[str]:
    """
    Paragraphs of all files under a folder, in a random order, each once: text between blank lines, or lines with a `%` as
    in fortunes. Those of fewer than six words, and those of which a fifth is neither letters nor spaces (tables, code), are left out.
    """
    found: dict[str, None] = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        for part in _PARAGRAPHS.split(path.read_text(encoding="utf-8", errors="replace")):
            text = " ".join(part.split())
            if text.count(" ") > 4 and sum(c.isalpha() or c == " " for c in text) > 0.8 * len(text):
                found[text] = None
    paragraphs = list(found)
    random.Random(SEED).shuffle(paragraphs)
    return paragraphs


def train_tokenizer(paragraphs: list[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        paragraphs,
        trainers.BpeTrainer(
            vocab_size=vocabulary, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=WINDOW,
    )


def draw_prompts(paragraphs: list[str], tokenizer, count: int) -> list[str]:
    """The first 6 to 10 tokens of so many sentences, all different."""
    rng, prompts = random.Random(SEED + 1), {}
    for paragraph in paragraphs:
        for sentence in _SENTENCES.split(paragraph):
            ids, size = tokenizer(sentence)["input_ids"], rng.randint(*PROMPT_TOKENS)
            prompt = tokenizer.decode(ids[:size])
            whole = tokenizer(prompt)["input_ids"] == ids[:size]  # read by itself, it has the same tokens
            if whole and len(ids) >= size + 4 and sentence[0].isalpha() and sentence[0].isupper():
                prompts[prompt] = None
    if len(prompts) < count:
        raise ValueError(f"The held-out text has {len(prompts)} sentences to take prompts from; {count} are needed.")
    return rng.sample(list(prompts), count)


def tokenize(paragraphs: list[str], tokenizer) -> torch.Tensor:
    """One row of tokens (T,) of all paragraphs, with an end token before and behind each."""
    ids = [tokenizer.eos_token_id]
    for encoding in tokenizer(paragraphs)["input_ids"]:
        ids += [*encoding, tokenizer.eos_token_id]
    return torch.tensor(ids)


def build_model(settings: PolicySettings, vocabulary: int) -> LlamaForCausalLM:
    """A Llama with random weights."""
    heads = max(4, settings.width // 64)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=settings.width,
            intermediate_size=settings.width * 8 // 3,
            num_hidden_layers=settings.layers,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            max_position_embeddings=WINDOW,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=1,
            pad_token_id=0,
        )
    )


def windows(tokens: torch.Tensor, number: int, batch: int) -> torch.Tensor:
    """Batch (B, T) of a step: an epoch cuts the tokens into windows anew, and reads them in a new order."""
    per_epoch = max(1, (len(tokens) // WINDOW - 1) // batch)
    epoch, place = divmod(number, per_epoch)
    generator = torch.Generator().manual_seed(SEED + epoch)
    offset = int(torch.randint(WINDOW, (1,), generator=generator))
    order = torch.randperm(len(tokens) // WINDOW - 1, generator=generator)[place * batch : (place + 1) * batch]
    return tokens[offset + order.unsqueeze(1) * WINDOW + torch.arange(WINDOW)]


@torch.no_grad()
def perplexity(model: LlamaForCausalLM, tokens: torch.Tensor, batch: int = 32) -> float:
    """Perplexity of tokens (T,), in windows, of all tokens of a window but the first."""
    parts = tokens[: len(tokens) // WINDOW * WINDOW].view(-1, WINDOW).split(batch)
    parts = [part.to(model.device) for part in parts]
    losses = [model(input_ids=part, labels=part).loss.item() * len(part) for part in parts]
    return math.exp(sum(losses) / sum(map(len, parts)))


def save_training(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, step: int, seconds: float) -> None:
    """Parameters, and what the optimizer keeps of each."""
    tensors = {f"{name}/value": x.data for name, x in model.named_parameters()}
    for name, x in model.named_parameters():
        tensors |= {f"{name}/{key}": value for key, value in optimizer.state[x].items()}
    save_file(tensors, path.with_suffix(".new"), metadata={"step": str(step), "seconds": str(seconds)})
    path.with_suffix(".new").rename(path)


def load_training(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[int, float]:
    """The steps that were done, and the seconds that they took."""
    parameters = dict(model.named_parameters())
    with safe_open(path, "pt") as file:
        for key in file.keys():  # noqa: SIM118 - no mapping
            name, part = key.split("/")
            if part == "value":
                parameters[name].data.copy_(file.get_tensor(key))
            else:
                kept = file.get_tensor(key)
                optimizer.state[parameters[name]][part] = kept if part == "step" else kept.to(parameters[name].device)
        return int(file.metadata()["step"]), float(file.metadata()["seconds"])


def train_policy(
    tokens: torch.Tensor, settings: PolicySettings, vocabulary: int, checkpoint: Path, device: torch.device = CPU
) -> tuple[LlamaForCausalLM, float]:
    """A policy trained on tokens (T,), and the seconds that it took, those before the last checkpoint included."""
    set_seed(SEED)
    model, fast = build_model(settings, vocabulary).to(device), device.type != "cpu"
    matrices = [x for x in model.parameters() if x.dim() > 1]
    others = [x for x in model.parameters() if x.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=settings.learning_rate, betas=(0.9, 0.95))
    steps = settings.steps or round(settings.epochs * (len(tokens) // WINDOW - 1) / settings.batch)
    warm_up, first, spent = min(200, steps // 10 + 1), 0, 0.0
    if checkpoint.exists():
        first, spent = load_training(checkpoint, model, optimizer)
    start, loss = time.perf_counter() - spent, torch.zeros(())
    model.train()
    for step in range(first, steps):
        decay = 0.55 + 0.45 * math.cos(math.pi * step / steps)
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * min((step + 1) / warm_up, decay)
        batch = windows(tokens, step, settings.batch).to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=fast):
            loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if (step + 1) % (SAVE_STEPS_ACCELERATOR if fast else SAVE_STEPS) == 0:
            seconds = time.perf_counter() - start
            save_training(checkpoint, model, optimizer, step + 1, seconds)
            print(f"step {step + 1} of {steps}: loss {loss.item():.3f}, {seconds:.0f} s", flush=True)
    return model.eval(), time.perf_counter() - start


def device_of(accelerator: bool) -> torch.device:
    """The accelerator of this machine, or the CPU."""
    found = torch.accelerator.current_accelerator() if accelerator else CPU
    if found is None:
        raise SystemExit("error: PyTorch finds no accelerator here; leave out --accelerator.")
    return found


def fingerprint(*parts: object) -> str:
    """Of texts, settings and numbers: what is made of the same ones is not made again."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def build_policy(
    text: Path, folder: Path, settings: PolicySettings, training: int, unseen: int, device: torch.device = CPU
) -> dict:
    """
    Writes tokenizer, policy and prompts, unless they are there; returns what is known of them, with a `fingerprint` of the text and
    the settings. `policy.json` appears last.
    """
    paragraphs = read_paragraphs(text)
    where = () if device.type == "cpu" else (device.type,)
    mark, described = fingerprint(paragraphs, asdict(settings), training, unseen, SEED, *where), folder / "policy.json"
    if described.exists() and (found := json.loads(described.read_text(encoding="utf-8")))["fingerprint"] == mark:
        return found
    folder.mkdir(parents=True, exist_ok=True)
    count = max(1, round(HELD_OUT * len(paragraphs)))
    held_out, known = paragraphs[:count], paragraphs[count:]
    tokenizer = train_tokenizer(known, settings.vocabulary)
    prompts = draw_prompts(held_out, tokenizer, training + unseen)
    for name, part in (("train", prompts[:training]), ("unseen", prompts[training:])):
        lines = "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in part)
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    tokens = tokenize(known, tokenizer)
    checkpoint = folder / f"training-{mark}.safetensors"
    model, seconds = train_policy(tokens, settings, len(tokenizer), checkpoint, device)
    model.save_pretrained(folder / "policy")
    tokenizer.save_pretrained(folder / "policy")
    found = {
        "fingerprint": mark,
        "seed": SEED,
        "settings": asdict(settings),
        "paragraphs": len(paragraphs),
        "tokens": len(tokens),
        "parameters": sum(x.numel() for x in model.parameters()),
        "perplexity": round(perplexity(model, tokenize(held_out, tokenizer)), 2),
        "seconds": round(seconds),
    }
    described.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    checkpoint.unlink(missing_ok=True)
    return found
