"""Kills training runs with SIGKILL, resumes them, and compares what they end with to runs that were left alone.

    python benchmarks/kill_and_resume.py --kills 20

A run trains a small GPT-2 and its proposal and writes a checkpoint at every update. Half of the kills come at random times after a random
checkpoint was begun, the others at named places: while the policy or the proposal is sampled, between the two backward passes, and while a checkpoint is being written.
A killed run is resumed from its last complete checkpoint, or started anew if it has none.
"""

import argparse
import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from accelerate import PartialState
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, set_seed
from transformers.trainer import TRAINER_STATE_NAME

from trl_repulse import RePULSeConfig, RePULSeTrainer
from trl_repulse.engine import resume as _resume
from trl_repulse.engine.second_model import SecondModel
from trl_repulse.method.learned_proposal import LearnedProposal


PLACES = (
    "sampling the policy",
    "sampling the proposal",
    "between backward passes",
    "writing the proposal",
    "writing weights",
)
UPDATES = 12


def reward(completion_ids, **kwargs):
    return [float(len(set(ids))) - 3.0 * (3 in ids) for ids in completion_ids]


def kill_at(place: str, after: int) -> None:
    """Makes the process kill itself the `after`-th time it comes to a place."""
    owner, name = {
        "sampling the policy": (RePULSeTrainer, "_draw"),
        "sampling the proposal": (LearnedProposal, "draw"),
        "between backward passes": (LearnedProposal, "_accumulate"),
        "writing the proposal": (SecondModel, "save_state"),
        "writing weights": (_resume, "save_position"),
    }[place]
    original, calls = getattr(owner, name), []

    def hooked(*args, **kwargs):
        calls.append(None)
        if len(calls) < after:
            return original(*args, **kwargs)
        if place == "between backward passes":  # the proposal's has been made, the policy's not
            original(*args, **kwargs)
        if place == "writing the proposal":  # half of it is there
            args[1].mkdir(parents=True, exist_ok=True)
            (args[1] / "optimizer.json").write_text("{")
        if place == "writing weights":  # all is there, and the Trainer's state is cut off
            original(*args, **kwargs)
            (args[1] / TRAINER_STATE_NAME).write_text("{")
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(owner, name, hooked)
    if place == "writing weights":
        import trl_repulse.trainers.base_trainer as hooks

        hooks.save_position = hooked


def train(options: argparse.Namespace) -> None:
    """One run, in a process of its own."""
    torch.set_num_threads(1)
    if options.place:
        kill_at(options.place, options.after)
    set_seed(0)
    special = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_embd=32, n_layer=2, n_head=2, n_positions=32, **special))
    backend = Tokenizer(models.WordLevel({f"w{i}": i for i in range(32)}, unk_token="w2"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="w0", eos_token="w1", padding_side="left")
    block = options.steps_per_generation
    args = RePULSeConfig(
        output_dir=options.output_dir,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="steps",
        save_steps=1,
        max_steps=UPDATES,
        per_device_train_batch_size=16 // block,
        steps_per_generation=block,
        gradient_accumulation_steps=1,
        num_generations=4,
        max_completion_length=4,
        learning_rate=1e-3,
        proposal="learned",
        target_dist_beta=-1.0,
        alpha=1.0,
        beta=0.0,
        bad_reward_threshold=0.0,
        save_negatives=True,
        disable_tqdm=True,
    )
    data = Dataset.from_dict({"prompt": [f"w{i} w{i + 1}" for i in range(4, 20)]})
    trainer = RePULSeTrainer(model, reward, args, data, processing_class=tokenizer)
    trainer.train(resume_from_checkpoint=options.resume or None)
    trainer.save_model()


def digest(folder: Path) -> str:
    """SHA-256 over what a run ends with: both models and the negative data."""
    names = ("model.safetensors", "proposal/model.safetensors", "negatives.jsonl")
    return hashlib.sha256(b"".join((folder / name).read_bytes() for name in names)).hexdigest()


def start(folder: Path, block: int, *extra: str) -> subprocess.Popen:
    argv = [sys.executable, __file__, "--output_dir", str(folder), "--steps_per_generation", str(block), *extra]
    return subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def finish(process: subprocess.Popen) -> None:
    errors = process.communicate()[1].decode()
    if process.returncode:
        sys.exit(errors[-2000:])


def resumed_digest(folder: Path, block: int) -> tuple[str, str]:
    """What a killed run ends with once it is resumed, and from where that was."""
    try:
        checkpoint = Path(_resume.find_checkpoint(True, str(folder))).name
        finish(start(folder, block, "--resume"))
    except ValueError:
        checkpoint = "the start"
        shutil.rmtree(folder, ignore_errors=True)
        finish(start(folder, block))
    return digest(folder), checkpoint


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="for each number of steps a generation")
    parser.add_argument("--seed", type=int, default=0)
    for name in ("--output_dir", "--place"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    for name in ("--steps_per_generation", "--after"):
        parser.add_argument(name, type=int, help=argparse.SUPPRESS)
    parser.add_argument("--resume", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.output_dir:
        train(options)
        return

    PartialState(cpu=True)  # for the log
    draw = random.Random(options.seed)
    print("| steps a generation | killed | resumed from | same bits |\n|---|---|---|---|", flush=True)
    equal = total = 0
    for block in (1, 4):
        with tempfile.TemporaryDirectory() as directory:
            whole = Path(directory) / "whole"
            finish(start(whole, block))
            expected = digest(whole)
            for kill in range(options.kills):
                folder = Path(directory) / f"run-{kill}"
                if kill % 2:
                    place, after = PLACES[kill // 2 % len(PLACES)], draw.randint(1, UPDATES // block)
                    process = start(folder, block, "--place", place, "--after", str(after))
                    process.wait()
                    killed = f"{place}, time {after}"
                else:
                    last, wait = draw.randint(1, UPDATES - 1), draw.uniform(0.0, 0.2)
                    process = start(folder, block)
                    while not (folder / f"checkpoint-{last}").exists():
                        time.sleep(0.002)
                    time.sleep(wait)
                    process.kill()
                    process.wait()
                    killed = f"{1000 * wait:.0f} ms after checkpoint {last} was begun"
                result, checkpoint = resumed_digest(folder, block)
                equal, total = equal + (result == expected), total + 1
                answer = "yes" if result == expected else "no"
                print(f"| {block} | {killed} | {checkpoint} | {answer} |", flush=True)
                shutil.rmtree(folder)
    print(f"\n{equal} of {total} runs ended with the bits of a run that was left alone.")


if __name__ == "__main__":
    main()
