"""Time and peak memory of a RePULSe step against a TRL RLOO step with the same model, shapes and number of samples.

    python benchmarks/step_cost.py --model tiny
    python benchmarks/step_cost.py --model 135m

RLOO draws 2·P prompts × N completions a step, RePULSe P × N from each of its two models: both generate, score and learn
from 2·P·N completions. The two trainers take turns in one process, `--rounds` times `--steps` steps each; the first step
of a turn is warm-up and dropped. Peak memory is measured in a process of its own for each.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback, set_seed
from transformers.utils import logging
from trl import RLOOConfig, RLOOTrainer

from trl_repulse import RePULSeConfig, RePULSeTrainer


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


class StepTimes(TrainerCallback):
    """Seconds of each step."""

    def __init__(self):
        self.seconds = []

    def on_step_begin(self, args, state, control, **kwargs):
        self._start = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        self.seconds.append(time.perf_counter() - self._start)


def reward(completion_ids, **kwargs):
    return [float(len(set(ids))) for ids in completion_ids]


def build(method: str, options: argparse.Namespace, folder: str, peft_config=None):
    set_seed(0)
    config = LlamaConfig(
        **SHAPES[options.model], tie_word_embeddings=True, bos_token_id=1, eos_token_id=2, pad_token_id=0
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(f"{folder}/{method}")
    model.config._name_or_path = f"{folder}/{method}"  # the reference, where there is one
    vocabulary = {f"w{i}": i for i in range(config.vocab_size)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="w3"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="w0", eos_token="w2", padding_side="left")
    ids = torch.randint(4, config.vocab_size, (64, options.prompt_length)).tolist()
    data = Dataset.from_dict({"prompt": [" ".join(f"w{i}" for i in row) for row in ids]})
    rows = options.prompts * options.generations
    common = {
        "output_dir": f"{folder}/out",
        "use_cpu": not torch.accelerator.is_available(),
        "bf16": torch.accelerator.is_available(),
        "gradient_checkpointing": options.gradient_checkpointing,
        "num_generations": options.generations,
        "max_completion_length": options.completion_length,
        "max_steps": options.steps,
        "beta": options.beta,
        "report_to": "none",
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
    }
    timer = StepTimes()
    arguments = {
        "train_dataset": data,
        "processing_class": tokenizer,
        "callbacks": [timer],
        "peft_config": peft_config,
    }
    if method == "RLOO":
        args = RLOOConfig(per_device_train_batch_size=2 * rows, **common)
        return RLOOTrainer(model, reward, args, **arguments), timer
    args = RePULSeConfig(per_device_train_batch_size=rows, **common)
    return RePULSeTrainer(model, reward, args, **arguments), timer


def peak_memory(method: str, options: argparse.Namespace) -> float:
    """Peak memory of two steps in a process of its own, in MiB: the device's, or the process's resident set on CPU."""
    argv = [sys.executable, __file__, *sys.argv[1:], "--memory-of", method]
    output = subprocess.run(argv, check=True, capture_output=True, text=True).stdout
    return json.loads(output.splitlines()[-1])


def print_peak_memory(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        options.steps = 2
        build(options.memory_of, options, folder)[0].train()
    if torch.accelerator.is_available():
        print(torch.accelerator.max_memory_allocated() / 2**20)
    else:
        # Not getrusage: its maximum survives exec, so that a child starts with its parent's
        status = Path("/proc/self/status").read_text()
        print(int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) / 2**10)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="tiny")
    parser.add_argument("--prompts", type=int, default=2, help="P, prompts of a RePULSe step")
    parser.add_argument("--generations", type=int, default=5, help="N, completions a prompt and model")
    parser.add_argument("--prompt-length", type=int, default=128)
    parser.add_argument("--completion-length", type=int, default=20)
    parser.add_argument("--beta", type=float, default=0.0, help="KL coefficient; above 0 both methods run a reference")
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="steps of a turn, the first of them warm-up")
    parser.add_argument("--memory-of", choices=("RLOO", "RePULSe"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.set_verbosity_error()
    if options.memory_of:
        print_peak_memory(options)
        return

    with tempfile.TemporaryDirectory() as folder:
        runs = {method: build(method, options, folder) for method in ("RLOO", "RePULSe")}
        seconds: dict[str, list[float]] = {method: [] for method in runs}
        for _ in range(options.rounds):
            for method, (trainer, timer) in runs.items():
                timer.seconds.clear()
                trainer.train()
                seconds[method].extend(timer.seconds[1:])
    samples = 2 * options.prompts * options.generations
    medians = {method: statistics.median(values) / samples for method, values in seconds.items()}
    memory = {method: peak_memory(method, options) for method in runs}
    print(
        f"model {options.model}, {samples} completions a step (N = {options.generations}) of "
        f"{options.completion_length} tokens to prompts of {options.prompt_length}, beta {options.beta}, "
        f"gradient checkpointing {options.gradient_checkpointing}, {torch.get_num_threads()} threads, "
        f"{len(seconds['RLOO'])} steps each"
    )
    print(f"{'':10}{'ms a sample':>14}{'min':>10}{'max':>10}{'peak MiB':>12}")
    for method, values in seconds.items():
        low, high = min(values) / samples, max(values) / samples
        print(f"{method:10}{1e3 * medians[method]:14.1f}{1e3 * low:10.1f}{1e3 * high:10.1f}{memory[method]:12.0f}")
    print(f"{'ratio':10}{medians['RePULSe'] / medians['RLOO']:14.3f}{'':20}{memory['RePULSe'] / memory['RLOO']:12.3f}")


if __name__ == "__main__":
    main()
