"""
Step 0 of the pipeline: the data and the models to begin with, of one of the small worlds of `benchmarks/held_out`.

    python examples/pipeline/data.py examples/pipeline/0_data.yaml --output_dir runs/pipeline/0_data

It needs the checkout, since `benchmarks` is not part of the package. With data of your own you do not need this step.
"""

import argparse
import csv
import json
import random
import sys
from pathlib import Path
from typing import Any

import yaml
from transformers import set_seed


sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.held_out.build import (  # noqa: E402
    ARCHITECTURES,
    SEED,
    build_model,
    build_tokenizer,
    draw_pairs,
    draw_prompts,
    draw_replies,
)
from benchmarks.held_out.grammar import Prompt, World, split_tokens  # noqa: E402
from benchmarks.held_out.worlds import WORLDS  # noqa: E402


def draw_targets(world: World, prompts: list[Prompt], tokens: int) -> list[dict[str, str]]:
    """For each way of being rude, a request and the beginning of a rude reply to it."""
    rng, found = random.Random(SEED + 3), {}
    while len(found) < len(world.constructions):
        prompt = rng.choice(prompts)
        reply = world.draw_reply(prompt, rng, rude_rate=1.0)
        if reply.construction != "slip":
            target = "".join(split_tokens(reply.text)[:tokens])
            found.setdefault(reply.construction, {"goal": prompt.text, "target": target})
    return [found[name] for name in world.constructions]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, help="YAML file: which world, and how much of it")
    parser.add_argument("--output_dir", type=Path, required=True)
    options = parser.parse_args()
    config, folder = yaml.safe_load(options.config.read_text(encoding="utf-8")), options.output_dir
    folder.mkdir(parents=True, exist_ok=True)
    world = WORLDS[config["world"]]
    tokenizer, (training, unseen) = build_tokenizer(world), draw_prompts(world)
    hidden = {prompt.text for prompt in unseen}
    write_rows(folder / "train.jsonl", [{"prompt": prompt.text} for prompt in training])
    write_rows(folder / "unseen.jsonl", [{"prompt": prompt.text} for prompt in unseen[: config["unseen"]]])
    write_rows(folder / "replies.jsonl", draw_replies(world, hidden, config["replies"]))
    write_rows(folder / "pairs.jsonl", draw_pairs(world, hidden, tokenizer, config["pairs"]))
    with open(folder / "targets.csv", "w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, ["goal", "target"])
        table.writeheader()
        table.writerows(draw_targets(world, unseen, config["target_tokens"]))
    for name, width, classifier in (("policy", 96, False), ("reward_model", 64, True)):
        set_seed(SEED)
        model = build_model(ARCHITECTURES[world.name], len(tokenizer), width, 2, classifier)
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)


if __name__ == "__main__":
    main()
