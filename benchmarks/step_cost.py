"""Time and peak memory of a step against those of TRL's RLOO and GRPO with the same model, shapes and number of samples.

    python benchmarks/step_cost.py --shapes 128,20,5 512,20,10 16,100,5
    python benchmarks/step_cost.py --model 135m --prompts 1 --methods RePULSe REINFORCE
    python -m benchmarks.step_cost --world runs/real_chat --prompts 10 --beta 0.2 --methods prototype REINFORCE RePULSe --rounds 3 --steps 2

With `--world` the model, the prompts and the reward are those of `benchmarks/real_chat`, in bfloat16, and a plain REINFORCE written for
speed can take part. One draw of it is P = 2·`--prompts`, as that of REINFORCE.

All but RePULSe draw 2·P prompts × N completions a step, RePULSe P × N from the policy and P × N from the hot policy or from a
proposal that learns: all generate, score and learn from 2·P·N completions. The trainers take turns in one process, `--rounds` times `--steps` steps each; the first step
of a turn is warm-up and dropped. Beside the time on the clock stands the time that all threads of the process spent on a CPU: other
processes disturb it less. Peak memory is measured in a process of its own for each. With `--apart` every turn has a process of its own,
for models of which memory does not hold all methods' at once.
"""

import argparse
import contextlib
import io
import json
import math
import re
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback, set_seed
from transformers.utils import logging
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from trl_repulse import (
    PPOConfig,
    PPOTrainer,
    ReinforceConfig,
    ReinforceTrainer,
    RePULSeConfig,
    RePULSeGRPOConfig,
    RePULSeGRPOTrainer,
    RePULSePPOConfig,
    RePULSePPOTrainer,
    RePULSeTrainer,
)


SHAPES = {
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 2048,
    },
    "135m": {  # the shape of SmolLM-135M
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
    },
}


ON_ACCELERATOR = torch.accelerator.is_available()
YARDSTICKS = ("RLOO", "GRPO")
BAD = {"bad_reward_threshold": 0.0}
# Trainer, configuration with its fields, and what completions of one set are multiplied with to make 2·P·N
METHODS = {
    "RLOO": (RLOOTrainer, RLOOConfig, {}, 2),
    "GRPO": (GRPOTrainer, GRPOConfig, {}, 2),
    "REINFORCE": (ReinforceTrainer, ReinforceConfig, {}, 2),
    "RePULSe": (RePULSeTrainer, RePULSeConfig, BAD, 1),
    "learned proposal": (RePULSeTrainer, RePULSeConfig, {"proposal": "learned"}, 1),
    "PPO": (PPOTrainer, PPOConfig, {}, 2),
    "RePULSe on PPO": (RePULSePPOTrainer, RePULSePPOConfig, BAD, 1),
    "RePULSe on GRPO": (RePULSeGRPOTrainer, RePULSeGRPOConfig, BAD, 1),
}


class StepTimes(TrainerCallback):
    """Seconds of each step, and those that all threads spent on a CPU."""

    def __init__(self):
        self.seconds = []

    def on_step_begin(self, args, state, control, **kwargs):
        self._start = time.perf_counter(), time.process_time()

    def on_step_end(self, args, state, control, **kwargs):
        if ON_ACCELERATOR:
            torch.accelerator.synchronize()
        now = time.perf_counter(), time.process_time()
        self.seconds.append(tuple(end - start for start, end in zip(self._start, now, strict=True)))


def reward(completion_ids, **kwargs):
    """How many different tokens there are; below 0 of one completion in ten, which are bad."""
    return [float(len(set(ids)) if sum(ids) % 10 else -1.0) for ids in completion_ids]


@dataclass(frozen=True)
class Shape:
    """Tokens of a prompt and of a completion, and N, completions of a prompt (of each model, where there are two)."""

    prompt: int
    completion: int
    generations: int

    @classmethod
    def of(cls, text: str) -> "Shape":
        return cls(*map(int, text.split(",")))

    def __str__(self) -> str:
        return f"{self.prompt},{self.completion},{self.generations}"


class PrototypeRun:
    """The plain REINFORCE of `benchmarks/real_chat`, which takes its turn as a trainer does."""

    def __init__(self, shape: Shape, options: argparse.Namespace):
        from benchmarks.real_chat.prototype import Prototype

        self._prototype = Prototype(options.world, shape.generations, shape.completion, options.attention)
        self._options, self.timer = options, StepTimes()

    def train(self) -> None:
        for _ in range(self._options.steps):
            self.timer.on_step_begin(None, None, None)
            self._prototype.update(2 * self._options.prompts)
            self.timer.on_step_end(None, None, None)


def build(method: str, shape: Shape, options: argparse.Namespace, folder: str):
    """A trainer of a method, which draws 2·P·N completions a step, and the times of its steps."""
    set_seed(0)
    if method == "prototype":
        run = PrototypeRun(shape, options)
        return run, run.timer
    if options.world:
        return build_trainer(method, shape, options, folder, *world_of(options))
    config = LlamaConfig(
        **SHAPES[options.model],
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        # Room for all completions of a prompt in one row, those of two models
        max_position_embeddings=max(2048, shape.prompt + 2 * shape.generations * shape.completion),
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(f"{folder}/{method}")
    model.config._name_or_path = f"{folder}/{method}"  # the reference, where there is one
    words = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{i}" for i in range(4, config.vocab_size))]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "eos_token": "</s>", "padding_side": "left"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **special)
    ids = torch.randint(4, config.vocab_size, (64, shape.prompt)).tolist()
    data = Dataset.from_dict({"prompt": [" ".join(f"w{i}" for i in row) for row in ids]})
    return build_trainer(method, shape, options, folder, model, reward, data, tokenizer)


def world_of(options: argparse.Namespace) -> tuple:
    """Policy, reward, prompts and tokenizer of a world of `benchmarks/real_chat`."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from benchmarks.real_chat import judge

    policy = options.world / "policy"
    attention = {"attn_implementation": options.attention}
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32, **attention)
    tokenizer = AutoTokenizer.from_pretrained(policy, padding_side="left")
    rows = [json.loads(row) for row in (options.world / "train.jsonl").read_text(encoding="utf-8").splitlines()]
    return model, judge.reward, Dataset.from_list(rows), tokenizer


def build_trainer(
    method: str, shape: Shape, options: argparse.Namespace, folder: str, model, reward_func, data, tokenizer
):
    """A trainer of a method and the times of its steps."""
    trainer_class, config_class, fields, draws = METHODS[method]
    timer = StepTimes()
    own = fields if method in YARDSTICKS else fields | {"share_prompts": options.share_prompts}
    args = config_class(
        output_dir=f"{folder}/out",
        use_cpu=not ON_ACCELERATOR,
        bf16=ON_ACCELERATOR or options.world is not None,
        gradient_checkpointing=options.gradient_checkpointing,
        per_device_train_batch_size=draws * options.prompts * shape.generations // options.micro_batches,
        gradient_accumulation_steps=options.micro_batches,
        num_generations=shape.generations,
        max_completion_length=shape.completion,
        max_steps=options.steps,
        beta=options.beta,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        **own,
    )
    peft_config = LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM") if options.adapters else None
    trainer = trainer_class(
        model,
        reward_func,
        args,
        train_dataset=data,
        processing_class=tokenizer,
        callbacks=[timer],
        peft_config=peft_config,
    )
    return trainer, timer


def turn_apart(method: str, shape: Shape, options: argparse.Namespace, steps: int) -> tuple[float, list, float]:
    """
    A turn in a process of its own. Returns peak memory in MiB (the device's, or the process's resident set on CPU), the times of its
    steps after the first, and seconds of set-up.
    """
    argv = [
        sys.executable,
        "-m",
        "benchmarks.step_cost",
        "--turn-of",
        method,
        "--steps",
        str(steps),
        "--shapes",
        str(shape),
        "--model",
        options.model,
    ]
    argv += ["--prompts", str(options.prompts), "--beta", str(options.beta)]
    argv += ["--micro-batches", str(options.micro_batches)]
    argv += ["--adapters"] * options.adapters + ["--gradient-checkpointing"] * options.gradient_checkpointing
    argv += ["--share_prompts", str(options.share_prompts), "--attention", options.attention]
    argv += ["--world", str(options.world.resolve())] if options.world else []
    done = subprocess.run(argv, capture_output=True, text=True, cwd=Path(__file__).parents[1])
    if done.returncode and ON_ACCELERATOR and "OutOfMemoryError" in done.stderr:
        return math.inf, [], math.nan
    done.check_returncode()
    return tuple(json.loads(done.stdout.splitlines()[-1]))


def print_turn(options: argparse.Namespace) -> None:
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        trainer, timer = build(options.turn_of, options.shapes[0], options, folder)
        set_up = time.perf_counter() - start
        trainer.train()
    if ON_ACCELERATOR:
        peak = torch.accelerator.max_memory_allocated() / 2**20
    else:
        # Not getrusage: its maximum survives exec, so that a child starts with its parent's
        peak = int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) / 2**10
    print(json.dumps([peak, timer.seconds[1:], set_up]))


def measure(shape: Shape, options: argparse.Namespace) -> dict[str, tuple[float, float, float, float]]:
    """
    Median seconds and seconds of CPU a completion, peak MiB, and seconds of set-up (model, trainer and its checks), of each
    method; the methods take turns.
    """
    names = dict.fromkeys([*options.yardsticks, *options.methods])
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    set_up, peaks = {}, dict.fromkeys(names, math.nan)
    if options.apart:
        for _ in range(options.rounds):
            for name in names:
                peaks[name], times, set_up[name] = turn_apart(name, shape, options, options.steps)
                seconds[name].extend(times)
    else:
        set_up = take_turns(shape, options, seconds)
    if not (options.apart or options.no_memory):
        # An accelerator's memory is a process's own, whoever runs beside it
        with ThreadPoolExecutor(4 if ON_ACCELERATOR else 1) as pool:
            of_all = pool.map(lambda name: turn_apart(name, shape, options, 2)[0], names)
            peaks = dict(zip(names, of_all, strict=True))
    samples = 2 * options.prompts * shape.generations
    medians = {
        name: [statistics.median(x) / samples for x in zip(*values, strict=True)] for name, values in seconds.items()
    }
    return {name: (*times, peaks[name], set_up[name]) for name, times in medians.items()}


def take_turns(shape: Shape, options: argparse.Namespace, seconds: dict[str, list]) -> dict[str, float]:
    """Lets methods take turns in this process, and adds the times of their steps; returns seconds of set-up."""
    runs, set_up = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        for name in seconds:
            start = time.perf_counter()
            runs[name] = build(name, shape, options, folder)
            set_up[name] = time.perf_counter() - start
        for _ in range(options.rounds):
            for name, (trainer, timer) in runs.items():
                timer.seconds.clear()
                with contextlib.redirect_stdout(io.StringIO()):
                    trainer.train()
                seconds[name].extend(timer.seconds[1:])
    return set_up


def on_what() -> str:
    """The device, in words."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return torch.accelerator.current_accelerator().type if ON_ACCELERATOR else f"{torch.get_num_threads()} threads"


def arguments() -> argparse.ArgumentParser:
    """The options of a measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="tiny")
    parser.add_argument("--world", type=Path, help="a folder of `benchmarks.real_chat.build`, in place of --model")
    parser.add_argument("--attention", choices=("eager", "sdpa"), default="eager", help="of a --world's model")
    names = ["prototype", *METHODS]
    parser.add_argument("--methods", nargs="+", choices=names, default=["RePULSe"], help="beside the yardsticks")
    parser.add_argument(
        "--shapes",
        nargs="+",
        type=Shape.of,
        default=[Shape(128, 20, 5)],
        help="tokens of a prompt, tokens of a completion, N: e.g. 128,20,5 512,20,10",
    )
    parser.add_argument("--prompts", type=int, default=2, help="P, prompts of a RePULSe step")
    parser.add_argument("--micro-batches", type=int, default=1, help="in how many parts a step's gradient is made")
    parser.add_argument("--beta", type=float, default=0.0, help="KL coefficient; above 0 all methods run a reference")
    parser.add_argument("--adapters", action="store_true", help="LoRA of rank 16 in place of all weights")
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--share_prompts", choices=("auto", "False"), default="auto", help="of our trainers")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="steps of a turn, the first of them warm-up")
    parser.add_argument("--yardsticks", nargs="+", choices=names, default=list(YARDSTICKS))
    parser.add_argument("--no-memory", action="store_true", help="leave out the processes that measure peak memory")
    parser.add_argument("--apart", action="store_true", help="a process of its own for each turn")
    parser.add_argument("--turn-of", choices=names, help=argparse.SUPPRESS)
    return parser


def main() -> None:
    options = arguments().parse_args()
    options.share_prompts = options.share_prompts == "auto" and "auto"
    warnings.filterwarnings("ignore")
    logging.set_verbosity_error()
    if options.turn_of:
        print_turn(options)
        return
    print(
        f"model {options.world or options.model}, {'adapters' if options.adapters else 'all weights'}, P = {options.prompts}, "
        f"{options.micro_batches} micro-batches, beta {options.beta}, gradient checkpointing {options.gradient_checkpointing}, share_prompts {options.share_prompts}, "
        f"{on_what()}, medians of {options.rounds * (options.steps - 1)} steps"
    )
    over = " | ".join(f"/ {name}" for name in options.yardsticks)
    print(f"| prompt, new, N | method | ms a completion | {over} | CPU ms | {over} | peak MiB | {over} | set-up, s |")
    print("|---" * (6 + 3 * len(options.yardsticks)) + "|")
    for shape in options.shapes:
        found = measure(shape, options)
        for name, figures in found.items():
            of = [[value / found[other][i] for other in options.yardsticks] for i, value in enumerate(figures[:3])]
            wall, cpu, memory = (" | ".join(f"{ratio:.2f}" for ratio in ratios) for ratios in of)
            cells = f"{1e3 * figures[0]:.1f} | {wall} | {1e3 * figures[1]:.1f} | {cpu} | {figures[2]:.0f} | {memory}"
            print(f"| {shape} | {name} | {cells} | {figures[3]:.1f} |", flush=True)


if __name__ == "__main__":
    main()
