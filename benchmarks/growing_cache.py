"""Sampling behind a prompt's cache that grows in place, against transformers' cache, which copies all it holds for each token.

    python benchmarks/growing_cache.py --model 135m --shapes 1,128,20,10 1,512,20,20

Both draw the same tokens from the same random numbers, take turns, and start from the cache of the same prompts; medians.
"""

import argparse
import statistics
import time
import warnings

import torch
from step_cost import ON_ACCELERATOR, SHAPES, on_what
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from trl_repulse.generation.drawing import growing_cache, to_generate, with_cache


DEVICE = torch.accelerator.current_accelerator() if ON_ACCELERATOR else torch.device("cpu")
CACHES = {"copied": lambda model: DynamicCache(config=model.config), "in place": growing_cache}


def sample(model: LlamaForCausalLM, cache: DynamicCache, ids: torch.Tensor, new: int, n: int):
    """Seconds that `new` tokens of n completions a prompt take behind `ids` (P, L), and what was drawn."""
    with torch.no_grad():
        model(input_ids=ids[:, :-1], logits_to_keep=1, **with_cache(model, cache))
    rows = torch.arange(len(ids), device=DEVICE).repeat_interleave(n)
    cache.batch_select_indices(rows)
    torch.manual_seed(0)
    if ON_ACCELERATOR:
        torch.accelerator.synchronize()
    start = time.perf_counter()
    drawn = model.generate(
        input_ids=ids[rows],
        attention_mask=torch.ones_like(ids[rows]),
        max_new_tokens=new,
        do_sample=True,
        eos_token_id=None,
        **to_generate(cache),
    )
    if ON_ACCELERATOR:
        torch.accelerator.synchronize()
    return time.perf_counter() - start, drawn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="tiny")
    parser.add_argument(
        "--shapes",
        nargs="+",
        type=lambda text: tuple(map(int, text.split(","))),
        default=[(8, 128, 20, 10)],
        help="prompts, tokens of a prompt, tokens of a completion, completions of a prompt: e.g. 8,128,20,10 1,512,20,20",
    )
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.set_verbosity_error()
    print(f"model {options.model}, {on_what()}, medians of {options.rounds} rounds")
    print("| prompts, prompt, new, completions | copied, ms | in place, ms | in place / copied |\n|---|---|---|---|")
    for prompts, length, new, n in options.shapes:
        torch.manual_seed(0)
        config = LlamaConfig(**SHAPES[options.model], tie_word_embeddings=True, max_position_embeddings=length + new)
        model = LlamaForCausalLM(config).eval().to(DEVICE, torch.bfloat16 if ON_ACCELERATOR else torch.float32)
        ids = torch.randint(4, config.vocab_size, (prompts, length), device=DEVICE)
        drawn = {name: sample(model, make(model), ids, new, n)[1] for name, make in CACHES.items()}  # warm-up
        if not torch.equal(*drawn.values()):
            raise SystemExit("The two draw different tokens.")
        seconds: dict[str, list[float]] = {name: [] for name in CACHES}
        for _ in range(options.rounds):
            for name, make in CACHES.items():
                seconds[name].append(sample(model, make(model), ids, new, n)[0])
        copied, grown = (1e3 * statistics.median(values) for values in seconds.values())
        print(f"| {prompts}, {length}, {new}, {n} | {copied:.0f} | {grown:.0f} | {grown / copied:.2f} |", flush=True)


if __name__ == "__main__":
    main()
