"""Small trainings whose weights and logs must stay the same, to the bit, while code is moved.

    python -m benchmarks.same_bits --write before.json      # before the change
    python -m benchmarks.same_bits --compare before.json    # after it: which runs differ, and which numbers of their logs first

All trainers train tiny models made from configurations, a few updates each, in one process and one thread. The file has, of each
run, the digests of the trained weights, as `save_model` writes them, and of the log, and all numbers of the log but times. Bits
depend on the processor and on the versions of libraries: write and compare on one machine, in one environment.
"""

import argparse
import hashlib
import json
import platform
import re
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from safetensors import safe_open
from transformers import PrinterCallback, set_seed
from transformers.utils import logging

from examples.worlds import shop
from tests.conftest import build_model, build_tokenizer, build_trainer, word_reward
from tests.recorded import build_reward_model
from trl_repulse import PPOTrainer, ReinforceTrainer, RePULSeGRPOTrainer, RePULSePPOTrainer, RePULSeTrainer


LIBRARIES = ("torch", "transformers", "trl", "accelerate", "peft", "datasets", "tokenizers")
SHOWN = 5  # numbers of a log
TIMES = re.compile(r"time|per_second")
TEXTS = ["the cat", "the dog ran the cat ate", "fish", "the fish sat bad"]
CHAT = "{% for message in messages %}{{ message['content'] }}{% endfor %}"

# What finds bad outputs; without either, a learned proposal. `None` stands for the package's defaults
DEFAULTS = dict.fromkeys(("potential", "target_dist_beta", "alpha", "alpha_normalization"))
HOT = {"proposal": "hot_policy", "bad_reward_threshold": -1.0, **DEFAULTS}
OWN = {"proposal": "policy"}
# How batches are cut: without any of these, all prompts are in one micro-batch
MANY_UPDATES = {"per_device_train_batch_size": 8, "steps_per_generation": 2, "num_iterations": 2, "max_steps": 6}
ACCUMULATED = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2}
CUT = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 8}  # half of a prompt's completions
READ_AGAIN = {"share_prompts": False}  # completions do not share rows

KL = {"beta": 0.1}
MOVING = {"beta": 0.3, "sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.3}
EVALUATED = {"eval_strategy": "steps", "eval_steps": 1}
AFTER = {"proposal_update_order": "after"}
TOOLS = {"proposal_tools": True}
LORA = {"task_type": "CAUSAL_LM", "r": 4, "init_lora_weights": False}
TARGETS = ["c_attn", "c_proj", "q_proj", "v_proj", "down_proj"]
ADAPTER, TWO_ADAPTERS = ("peft_config",), ("peft_config", "value_peft_config")


@dataclass
class Case:
    """A training: trainer, fields of its configuration, architecture, and where prompts and rewards come from."""

    trainer: type
    settings: dict[str, Any] = field(default_factory=dict)
    model: str = "gpt2"
    world: str = "texts"
    adapters: tuple[str, ...] = ()  # arguments of the trainer that are LoRA configurations
    resumed: bool = False  # from the second update


CASES = {
    # REINFORCE
    "reinforce": Case(ReinforceTrainer, KL | EVALUATED),
    "reinforce, normalized": Case(
        ReinforceTrainer,
        {"baseline": "group_mean", "normalize_advantages": True, "logprob_reduction": "sum"},
        "llama",
    ),
    "reinforce, transform, dropout": Case(
        ReinforceTrainer,
        {
            "reward_transform": "exponential",
            "reward_clip_range": [-2, 1],
            "baseline": "none",
            "disable_dropout": False,
        },
    ),
    "reinforce, cut": Case(ReinforceTrainer, CUT),
    "reinforce, adapter": Case(ReinforceTrainer, KL | MANY_UPDATES, adapters=ADAPTER, resumed=True),
    # RePULSe: the hot policy, the policy's own samples, a learned proposal
    "hot": Case(RePULSeTrainer, HOT | KL | EVALUATED | {"save_negatives": True}),
    "hot, threshold measured": Case(RePULSeTrainer, HOT | {"bad_reward_threshold": None, "max_steps": 6}, "llama"),
    "hot, many updates": Case(RePULSeTrainer, HOT | KL | MANY_UPDATES, resumed=True),
    "hot, accumulated": Case(RePULSeTrainer, HOT | ACCUMULATED | {"num_proposal_generations": 8}),
    "hot, cut, tilted": Case(RePULSeTrainer, HOT | CUT | {"potential": "tilted", "target_dist_beta": -1.0}),
    "hot, read again": Case(RePULSeTrainer, HOT | READ_AGAIN),
    "hot, adapter": Case(RePULSeTrainer, HOT | KL, adapters=ADAPTER),
    "hot, resumed": Case(RePULSeTrainer, HOT, resumed=True),
    "hot, conversations": Case(RePULSeTrainer, HOT | KL, "llama", "chats"),
    "own": Case(RePULSeTrainer, OWN | KL),
    "own, many updates": Case(RePULSeTrainer, OWN | MANY_UPDATES, "llama"),
    "learned": Case(RePULSeTrainer, KL | EVALUATED, "llama"),
    "learned, prefix, after": Case(
        RePULSeTrainer, AFTER | {"proposal_parameterization": "prefix", "proposal_updates_per_step": 2}
    ),
    "learned, DPG, class": Case(
        RePULSeTrainer, {"proposal_loss": "dpg", "potential": "class", "target_dist_beta": 2.0, "target_class": 0}
    ),
    "learned, SIXO, reinforce": Case(
        RePULSeTrainer, {"proposal_loss": "sixo", "negative_loss": "reinforce", "negative_baseline": "policy"}
    ),
    "learned, VarGrad, indicator": Case(
        RePULSeTrainer,
        {"proposal_loss": "vargrad", "potential": "indicator", "bad_reward_threshold": -1.0},
    ),
    "learned, schedules": Case(
        RePULSeTrainer,
        {"alpha_start": 0.1, "target_dist_beta_start": -0.5, "reward_cap": 0.5, "proposal_learning_rate": 3e-2},
    ),
    "learned, many updates": Case(RePULSeTrainer, KL | MANY_UPDATES, resumed=True),
    "learned, cut, read again": Case(RePULSeTrainer, CUT | READ_AGAIN),
    "learned, adapters": Case(RePULSeTrainer, KL | {"gradient_checkpointing": True}, adapters=ADAPTER),
    "learned, adapters, accumulated": Case(
        RePULSeTrainer, KL | ACCUMULATED | AFTER, "llama", adapters=ADAPTER, resumed=True
    ),
    "learned, moving reference": Case(RePULSeTrainer, MOVING, resumed=True),
    "learned, conversations, bfloat16": Case(RePULSeTrainer, KL | ACCUMULATED | {"bf16": True}, world="chats"),
    # PPO
    "ppo": Case(PPOTrainer, KL | EVALUATED | {"num_generations": 1, "per_device_train_batch_size": 4}),
    "ppo, many updates": Case(PPOTrainer, MANY_UPDATES | {"value_warmup_steps": 2}, "llama", resumed=True),
    "ppo, reward model": Case(PPOTrainer, KL | ACCUMULATED | {"gamma": 0.9, "value_clip": None}, world="reward model"),
    "ppo, adapters": Case(PPOTrainer, KL, adapters=TWO_ADAPTERS, resumed=True),
    # RePULSe on PPO
    "hot on ppo": Case(RePULSePPOTrainer, HOT | KL | MANY_UPDATES),
    "learned on ppo": Case(RePULSePPOTrainer, KL | ACCUMULATED | EVALUATED, resumed=True),
    "learned on ppo, adapters": Case(RePULSePPOTrainer, KL | MANY_UPDATES, adapters=TWO_ADAPTERS),
    # RePULSe on GRPO
    "hot on grpo": Case(RePULSeGRPOTrainer, HOT | KL | EVALUATED),
    "own on grpo, BNPO": Case(RePULSeGRPOTrainer, OWN | CUT | {"loss_type": "bnpo"}),
    "learned on grpo, CISPO": Case(
        RePULSeGRPOTrainer, KL | MANY_UPDATES | {"loss_type": "cispo", "scale_rewards": "none"}, resumed=True
    ),
    "learned on grpo, sequences, adapters": Case(
        RePULSeGRPOTrainer,
        KL | ACCUMULATED | {"loss_type": "grpo", "importance_sampling_level": "sequence"},
        adapters=ADAPTER,
    ),
    "hot on grpo, tools": Case(RePULSeGRPOTrainer, HOT | TOOLS, world="shop"),
    "own on grpo, tools": Case(RePULSeGRPOTrainer, OWN | ACCUMULATED, world="shop"),
    "learned on grpo, tools": Case(RePULSeGRPOTrainer, KL | TOOLS, world="shop", resumed=True),
}


def build_models(folder: Path) -> None:
    """All policies, and a reward model, with their tokenizers."""
    tokenizer = build_tokenizer()
    models = {name: build_model(name, len(tokenizer)) for name in ("gpt2", "llama")}
    models["reward"] = build_reward_model("gpt2", len(tokenizer), seed=1)
    for suffix, template in (("", None), (" chats", CHAT)):
        tokenizer.chat_template = template
        for name, model in models.items():
            model.save_pretrained(folder / f"{name}{suffix}")
            tokenizer.save_pretrained(folder / f"{name}{suffix}")
    shop.build_policy(folder / "shop", steps=60, batch_size=32)


def tool_reward(completions: Any, environments: list[shop.Shop], **kwargs: Any) -> list[float]:
    return [len(each.calls) - 4.0 * ("resend" in each.calls) for each in environments]


def chat_reward(completions: list[list[dict[str, str]]], **kwargs: Any) -> list[float]:
    return word_reward([messages[0]["content"] for messages in completions])


def world_of(case: Case, models: Path) -> tuple[str, Any, Dataset, dict[str, Any]]:
    """Policy, reward, prompts, and fields of the configuration."""
    if case.world == "shop":
        settings = {"max_completion_length": shop.MAX_LENGTH, "max_tool_calling_iterations": shop.MAX_CALLS}
        return str(models / "shop"), tool_reward, shop.load_prompts(), settings
    prompts: list[Any] = TEXTS
    reward: Any = str(models / "reward") if case.world == "reward model" else word_reward
    policy = models / case.model
    if case.world == "chats":
        prompts = [[{"role": "user", "content": text}] for text in TEXTS]
        policy, reward = models / f"{case.model} chats", chat_reward
    return str(policy), reward, Dataset.from_dict({"prompt": prompts}), {"max_completion_length": 4}


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of each saved model's weights, by the model's folder."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*.safetensors")):
        digest = found.setdefault(str(path.parent.relative_to(folder)).replace(".", "policy"), hashlib.sha256())
        with safe_open(path, "pt") as tensors:
            for name in sorted(tensors.keys()):
                tensor = tensors.get_tensor(name)
                digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
                digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return {name: digest.hexdigest() for name, digest in found.items()}


def train(case: Case, models: Path, folder: Path) -> dict[str, Any]:
    """Digests and log of a run; one that is resumed goes on from its checkpoint in a new trainer."""
    model, reward, prompts, settings = world_of(case, models)
    settings = {"max_steps": 3, "learning_rate": 3e-3} | settings | case.settings
    if case.resumed:
        settings |= {"max_steps": max(4, settings["max_steps"]), "save_strategy": "steps", "save_steps": 2}
    for checkpoint in [None, *([str(folder / "checkpoint-2")] if case.resumed else [])]:
        set_seed(0)
        extra: dict[str, Any] = {name: LoraConfig(target_modules=TARGETS, **LORA) for name in case.adapters}
        if "eval_strategy" in settings:
            extra["eval_dataset"] = prompts
        if case.world == "shop":
            extra["environment_factory"] = shop.Shop
        if "proposal_tools" in settings:
            extra["proposal_environment_factory"] = shop.Shop
        trainer = build_trainer(case.trainer, model, reward, prompts, folder, extra, **settings)
        trainer.remove_callback(PrinterCallback)
        trainer.train(resume_from_checkpoint=checkpoint)
    log = [
        {name: value for name, value in entry.items() if isinstance(value, int | float) and not TIMES.search(name)}
        for entry in trainer.state.log_history
    ]
    trainer.save_model(str(folder / "trained"))
    found = digests(folder / "trained") | {"log": hashlib.sha256(json.dumps(log).encode()).hexdigest()}
    if (folder / "negatives.jsonl").exists():
        found["negatives"] = hashlib.sha256((folder / "negatives.jsonl").read_bytes()).hexdigest()
    return {"digests": found, "log": log}


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Which digests of a run differ, and which numbers in the first entry of its log that does."""
    names = before["digests"] | after["digests"]
    found = [name for name in names if before["digests"].get(name) != after["digests"].get(name)]
    if len(before["log"]) != len(after["log"]):
        found.append(f"{len(after['log'])} entries in the log in place of {len(before['log'])}")
    for old, new in zip(before["log"], after["log"], strict=False):
        shown = {name: [json.dumps(log[name]) if name in log else "none" for log in (old, new)] for name in old | new}
        moved = [f"{name} ({one} -> {other})" for name, (one, other) in shown.items() if one != other]
        if moved:
            more = f" and {len(moved) - SHOWN} more" if len(moved) > SHOWN else ""
            return [*found, f"first after update {old['step']} in {', '.join(moved[:SHOWN])}{more}"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--write", type=Path, metavar="FILE", help="where digests and logs of the runs go")
    what.add_argument("--compare", type=Path, metavar="FILE", help="what the runs are compared to")
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="WORD", help="runs with one of these in their names"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    environment = {"processor": platform.processor() or platform.machine(), "python": platform.python_version()}
    environment |= {name: version(name) for name in LIBRARIES}
    before = json.loads(options.compare.read_text()) if options.compare else {"environment": environment}
    if before["environment"] != environment:
        raise SystemExit(f"{options.compare} is of {before['environment']}, and here is {environment}: bits differ")

    runs = {}
    with tempfile.TemporaryDirectory() as folder:
        build_models(Path(folder))
        for name in [name for name in CASES if any(word in name for word in options.only)]:
            start = time.perf_counter()
            try:
                runs[name] = train(CASES[name], Path(folder), Path(folder, f"run {name}"))
            except Exception as error:
                error.add_note(f"In the run {name!r}")
                raise
            print(f"{time.perf_counter() - start:5.1f} s  {name}", file=sys.stderr, flush=True)
    if options.write:
        options.write.write_text(json.dumps({"environment": environment, "runs": runs}))
        return
    different = 0
    for name in runs | {name: {} for name in before["runs"] if any(word in name for word in options.only)}:
        missing = [f"not in {where}" for where, has in (("FILE", before["runs"]), ("CASES", runs)) if name not in has]
        found = missing or differences(before["runs"][name], runs[name])
        different += bool(found)
        if found:
            print(f"{name}: {'; '.join(found)}")
    if different:
        raise SystemExit(f"{different} of {len(runs)} runs differ")
    print(f"All {len(runs)} runs end in the same bits")


if __name__ == "__main__":
    main()
