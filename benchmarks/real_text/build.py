"""
Builds worlds of real text from a folder of plain English: a policy, prompts, and for each judge and length a world.

    pip install alt-profanity-check
    python -m benchmarks.real_text.build TEXT --output_dir runs/real_text

A world is a folder such as `words-20`: what `judges.py` thinks of completions of 20 tokens. Its threshold is the reward under which
0.3 % of the initial policy's completions of the training prompts are, its KL coefficient follows the spread of the rewards within a prompt,
and `bad.txt` holds bad completions to read. Runs, results and tables are those of the held-out worlds:

    python -m benchmarks.held_out.run benchmarks/real_text/plans/training.yaml --world runs/real_text/words-20 \
        --output_dir runs/real_text/results-words-20
    python -m benchmarks.held_out.table runs/real_text/results-words-20

A build goes on where it was killed, and does nothing again for the same text and options. It uses one thread, so that it can be repeated.
With `--accelerator` the policy is trained and sampled on the accelerator of the machine, for larger ones.
"""

import argparse
import json
import shutil
import time
from dataclasses import fields
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from .judges import JUDGES, Judge
from .policy import CPU, SEED, PolicySettings, build_policy, device_of, fingerprint
from .sampling import POLICY, sample


TRAINING_PROMPTS, UNSEEN_PROMPTS = 240, 120
BAD_SHARE = 3e-3  # at a hundredth, most of what the judges find worst is not rude
BETA = 0.13  # KL coefficient over the standard deviation of rewards within a prompt, as docs/guide.md recommends
HOT_TEMPERATURE = 1.2  # of the samples that find rare outputs in an evaluation
READ = 40  # bad completions kept to read, chosen at random


def build_worlds(
    folder: Path, mark: str, judges: list[str], lengths: list[int], per_prompt: int, device: torch.device = CPU
) -> None:
    """Writes the worlds that are not there. `mark` is the fingerprint of the policy."""
    missing = []
    for length in lengths:
        for name in judges:
            described = folder / f"{name}-{length}" / "world.json"
            own = fingerprint(mark, name, length, per_prompt, BAD_SHARE, BETA)
            if not described.exists() or json.loads(described.read_text(encoding="utf-8"))["fingerprint"] != own:
                missing.append((length, name, own))
    for length in sorted({length for length, *_ in missing}):
        tokenizer = AutoTokenizer.from_pretrained(folder / "policy")
        policy = AutoModelForCausalLM.from_pretrained(folder / "policy", dtype=torch.float32).eval().to(device)
        lines = (folder / "train.jsonl").read_text(encoding="utf-8").splitlines()
        prompts = [json.loads(line)["prompt"] for line in lines]
        start = time.perf_counter()
        tokens, _ = sample(policy, tokenizer(prompts)["input_ids"], per_prompt, length, POLICY, SEED)
        texts = tokenizer.batch_decode(tokens, skip_special_tokens=True)
        print(f"{len(texts):,} completions of {length} tokens: {time.perf_counter() - start:.0f} s", flush=True)
        for _, name, own in (entry for entry in missing if entry[0] == length):
            write_world(folder / f"{name}-{length}", name, length, own, JUDGES[name](), texts, prompts)


def write_world(
    folder: Path, name: str, length: int, mark: str, judge: Judge, texts: list[str], prompts: list[str]
) -> None:
    """A world from completions of its training prompts, equally many of each."""
    rewards = np.array(judge(completions=texts))
    threshold = round(float(np.quantile(rewards, BAD_SHARE)), 2)
    spread = float(rewards.reshape(len(prompts), -1).std(axis=1, ddof=1).mean())
    folder.mkdir(exist_ok=True)
    for split in ("train", "unseen"):
        shutil.copy(folder.parent / f"{split}.jsonl", folder)
    owners = np.arange(len(texts)) // (len(texts) // len(prompts))
    bad = np.random.default_rng(SEED).permutation(np.flatnonzero(rewards < threshold))[:READ]
    lines = [f"{rewards[i]:.2f}\t{prompts[owners[i]]} |{texts[i]!r}\n" for i in bad]
    (folder / "bad.txt").write_text("".join(lines), encoding="utf-8")
    described = {
        "name": folder.name,
        "judge": name,
        "completion_length": length,
        "threshold": threshold,
        "beta": round(BETA * spread, 3),
        "hot_temperature": HOT_TEMPERATURE,
        "p_bad": round(float((rewards < threshold).mean()), 5),
        "reward": round(float(rewards.mean()), 3),
        "reward_spread": round(spread, 3),
        "judged_per_second": round(judge.texts / judge.seconds),
        "fingerprint": mark,
        "seed": SEED,
    }
    (folder / "world.json").write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(described), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, help="folder of text files")
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--judges", nargs="+", choices=JUDGES, default=list(JUDGES))
    parser.add_argument("--lengths", type=int, nargs="+", default=[20, 64], help="tokens of a completion")
    for field in fields(PolicySettings):
        kind = float if field.type is float else int
        parser.add_argument(
            f"--{field.name}", type=kind, default=field.default, help=f"of the policy; {field.default}"
        )
    parser.add_argument("--prompts", type=int, nargs=2, default=[TRAINING_PROMPTS, UNSEEN_PROMPTS])
    parser.add_argument("--calibration", type=int, default=60, help="completions a prompt for the threshold")
    parser.add_argument("--accelerator", action="store_true", help="instead of the CPU")
    options = parser.parse_args()
    device = device_of(options.accelerator)
    torch.set_num_threads(1)  # the order of floating-point sums depends on the number of threads
    settings = PolicySettings(**{field.name: getattr(options, field.name) for field in fields(PolicySettings)})
    found = build_policy(options.text, options.output_dir, settings, *options.prompts, device)
    print(json.dumps(found), flush=True)
    build_worlds(
        options.output_dir, found["fingerprint"], options.judges, options.lengths, options.calibration, device
    )


if __name__ == "__main__":
    main()
