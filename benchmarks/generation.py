"""Completions per second from two models, with one vLLM engine and with transformers; engine start and push times.

    python benchmarks/generation.py --model 135m
    python benchmarks/generation.py --model 1b --dtype bfloat16

Random weights of the real shapes. The two ways take turns in one process, `--rounds` times: each draws `--completions`
completions from the policy and as many from the proposal, whose weights count as changed each time. Times are medians.
"""

import argparse
import statistics
import tempfile
import time

import torch
from accelerate import Accelerator
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from transformers.utils import logging

from trl_repulse.generation import TransformersGenerator, VLLMGenerator


SHAPES = {
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
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
    "1b": {  # the shape of Llama-3.2-1B
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
}
NAMES = ("policy", "proposal")


def build_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    special = ["<pad>", "<s>", "</s>", "<unk>"]
    words = special + [f"w{i}" for i in range(len(special), vocab_size)]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", padding_side="left"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="135m")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--completions", type=int, default=5, help="of each prompt and model")
    parser.add_argument("--prompt_length", type=int, default=128)
    parser.add_argument("--completion_length", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--gpu_memory_utilization", type=float, default=0.3)
    options = parser.parse_args()
    logging.disable_progress_bar()

    set_seed(0)
    accelerator = Accelerator()
    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = LlamaConfig(**SHAPES[options.model], tie_word_embeddings=True, **special)
    tokenizer = build_tokenizer(config.vocab_size)
    dtype = getattr(torch, options.dtype)
    policy = LlamaForCausalLM(config).to(dtype)
    with tempfile.TemporaryDirectory() as folder:
        policy.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        pair = {name: LlamaForCausalLM.from_pretrained(folder, dtype=dtype).eval() for name in NAMES}
        del policy
        pair = {name: model.to(accelerator.device) for name, model in pair.items()}
        start = time.perf_counter()
        vllm = VLLMGenerator(
            pair,
            tokenizer,
            accelerator,
            max_completion_length=options.completion_length,
            max_model_length=options.prompt_length + options.completion_length,
            max_num_seqs=options.prompts * options.completions,
            gpu_memory_utilization=options.gpu_memory_utilization,
            generation_kwargs={"ignore_eos": True},
        )
        started = time.perf_counter() - start
    rows = options.prompts * options.completions
    length = {"min_new_tokens": options.completion_length}
    plain = TransformersGenerator(pair, tokenizer, options.completion_length, rows, **length)
    ways = {"vLLM": vllm, "transformers": plain}
    ids = torch.randint(4, config.vocab_size, (options.prompts, options.prompt_length)).tolist()
    prompts = [" ".join(f"w{i}" for i in row) for row in ids]

    seconds, pushes = {way: [] for way in ways}, []
    for turn in range(options.rounds + 1):  # the first is warm-up
        for way, generator in ways.items():
            start, tokens = time.perf_counter(), 0
            for name in NAMES:
                if way == "vLLM":
                    vllm.changed(name)
                    before = time.perf_counter()
                    with vllm.using(name):
                        vllm.sync_weights()
                    pushes.append(time.perf_counter() - before)
                drawn = generator.complete(prompts, model=name, num_completions=options.completions)
                tokens += sum(len(completion.token_ids) for group in drawn for completion in group)
            if turn:  # per completion of full length; hardly any ends before
                full = tokens / options.completion_length
                seconds[way].append((time.perf_counter() - start) / full)

    medians = {way: statistics.median(times) for way, times in seconds.items()}
    print(
        f"\n{options.model}, {options.dtype}, {accelerator.device.type}: {config.vocab_size:,} tokens of vocabulary, ",
        end="",
    )
    print(f"prompts of {options.prompt_length}, completions of {options.completion_length} tokens, {rows} a model\n")
    print("| way | completions per second, both models | ratio | engine start, s | push, s |\n|---|---|---|---|---|")
    for way, median in medians.items():
        extra = (f"{started:.1f}", f"{statistics.median(pushes):.3f}") if way == "vLLM" else ("–", "–")
        speed, ratio = 1 / median, medians["transformers"] / median
        print(f"| {way} | {speed:.1f} | {ratio:.2f} | {extra[0]} | {extra[1]} |")


if __name__ == "__main__":
    main()
