"""
Sampling behind a prompt's cache that grows in place, against transformers' cache, which copies all it holds for each token; and scoring
completions behind it, as `trl-repulse evaluate` does, against reading the prompt with each.

    python benchmarks/growing_cache.py --model 135m --shapes 1,128,20,10 1,512,20,20

Both ways draw the same tokens from the same random numbers, take turns, and start from the cache of the same prompts; medians.
"""

import argparse
import statistics
import time
import warnings

import torch
from step_cost import ON_ACCELERATOR, SHAPES, on_what
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from trl_repulse.evaluation.log_probs import completion_log_probs
from trl_repulse.generation._probe import Guard
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


def score(model: LlamaForCausalLM, ids: torch.Tensor, drawn: torch.Tensor, share: bool) -> tuple[float, torch.Tensor]:
    """Seconds of scoring what was drawn behind `ids` (P, L), and its log-probabilities."""
    prompts, completions = drawn.tensor_split([ids.size(1)], dim=1)
    rows, start = (prompts.tolist(), completions.tolist()), time.perf_counter()
    found, _ = completion_log_probs(model, *rows, len(drawn), guard=Guard(share_prompts=share))
    return time.perf_counter() - start, found


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
    print("| prompts, prompt, new, completions | copied, ms | in place, ms | in place / copied |", end="")
    print(" scored with each prompt, ms | once, ms | once / each |\n|---|---|---|---|---|---|---|")
    for prompts, length, new, n in options.shapes:
        torch.manual_seed(0)
        config = LlamaConfig(**SHAPES[options.model], tie_word_embeddings=True, max_position_embeddings=length + new)
        model = LlamaForCausalLM(config).eval().to(DEVICE, torch.bfloat16 if ON_ACCELERATOR else torch.float32)
        ids = torch.randint(4, config.vocab_size, (prompts, length), device=DEVICE)
        drawn = {name: sample(model, make(model), ids, new, n)[1] for name, make in CACHES.items()}  # warm-up
        if not torch.equal(*drawn.values()):
            raise SystemExit("The two draw different tokens.")
        tokens = drawn["copied"]
        once, each = (score(model, ids, tokens, share)[1] for share in (True, False))
        torch.testing.assert_close(once, each, rtol=0, atol=1e-3 if model.dtype == torch.float32 else 1.0)
        seconds: dict[str | bool, list[float]] = {name: [] for name in (*CACHES, False, True)}
        for _ in range(options.rounds):
            for name, make in CACHES.items():
                seconds[name].append(sample(model, make(model), ids, new, n)[0])
            for share in (False, True):
                seconds[share].append(score(model, ids, tokens, share)[0])
        copied, grown, each, once = (1e3 * statistics.median(values) for values in seconds.values())
        print(f"| {prompts}, {length}, {new}, {n} | {copied:.0f} | {grown:.0f} | {grown / copied:.2f} |", end="")
        print(f" {each:.0f} | {once:.0f} | {once / each:.2f} |", flush=True)


if __name__ == "__main__":
    main()
