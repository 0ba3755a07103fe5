"""Ways of reading a prompt once for its k completions, against reading it k times: forward and backward of a Llama's layers.

    python benchmarks/shared_attention.py --shapes 4,128,20,10 2,512,20,20 1,2048,100,16

- `separate`: a row each, with PyTorch's causal attention (the fused kernel, where the device has one).
- `mask`: one row, with a dense mask of pairs of tokens. This is what the trainers do.
- `blocks`: one row, with FlexAttention's block mask, which skips blocks that are wholly hidden. Compiles; needs an accelerator.
- `prefix_grouper`: one row whose prompt and completions attend in two calls (the package of that name, where it is installed).
  It is made for FlashAttention 2, which builds causal masks by itself; here they are given to PyTorch's attention.

The ways take turns; medians. Outputs are compared with those of `separate`.
"""

import argparse
import functools
import importlib.util
import statistics
import time
import warnings
from collections.abc import Callable

import torch
from transformers import AttentionInterface, LlamaConfig, LlamaModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from trl_repulse.engine.scoring import Layout


LAYERS = {
    "tiny": {"hidden_size": 64, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2},
    "135m": {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3},
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8},
}
ON_ACCELERATOR = torch.accelerator.is_available()
DEVICE = torch.accelerator.current_accelerator() if ON_ACCELERATOR else torch.device("cpu")


def block_mask(layout: Layout, rows: int):
    """FlexAttention's mask of rows of a layout without padding."""
    from torch.nn.attention.flex_attention import create_block_mask

    def sees(batch, head, query, key):
        own = (query - layout.prompt) // layout.width == (key - layout.prompt) // layout.width
        return (query >= key) & ((key < layout.prompt) | own)

    return torch.compile(create_block_mask)(
        sees, rows, None, *[layout.prompt + layout.count * layout.width] * 2, device=str(DEVICE)
    )


def causal(module, query, key, value, attention_mask, **kwargs):
    """PyTorch's attention of the last tokens of full sequences, whatever mask of padding it is given."""
    mask, (new, length) = None, (query.size(2), key.size(2))
    if new < length:
        mask = torch.ones(new, length, dtype=torch.bool, device=query.device).tril(length - new)[None, None]
    return sdpa_attention_forward(module, query, key, value, mask, **kwargs)


def ways(model: LlamaModel, ids: torch.Tensor, layout: Layout) -> dict[str, Callable[[], torch.Tensor]]:
    """By name, what gives the hidden states (P·k, T, d) of completions; `ids` are rows (P, S)."""
    rows, kept = len(ids), (layout.count, layout.width)
    real = torch.ones_like(ids)
    positions = layout.positions(real)
    prompts = ids[:, : layout.prompt].repeat_interleave(layout.count, 0)
    apart = torch.cat([prompts, ids[:, layout.prompt :].reshape(-1, layout.width)], dim=1)

    def separate() -> torch.Tensor:
        model.set_attn_implementation("sdpa")
        return model(apart, use_cache=False).last_hidden_state[:, layout.prompt :]

    def together(implementation: str, make: Callable[[], dict]) -> torch.Tensor:
        model.set_attn_implementation(implementation)
        states = model(ids, position_ids=positions, use_cache=False, **make()).last_hidden_state
        return states[:, layout.prompt :].reshape(rows * kept[0], kept[1], -1)

    def dense() -> dict:
        return {"attention_mask": layout.masks(model.config, model.dtype, real)}

    found = {"separate": separate, "mask": functools.partial(together, "sdpa", dense)}
    if ON_ACCELERATOR:
        mask = block_mask(layout, rows)
        found["blocks"] = functools.partial(together, "flex_attention", lambda: {"attention_mask": mask})
    if importlib.util.find_spec("prefix_grouper"):
        from prefix_grouper import PrefixGrouper
        from prefix_grouper.utils.register_transformers import register_attention

        register_attention()
        AttentionInterface.register("causal", causal)
        groups = [[layout.prompt, *[layout.width] * layout.count]] * rows

        def grouped() -> dict:
            grouper = PrefixGrouper(groups, device=DEVICE)
            return {"prefix_grouper": grouper, "prefix_grouper_attn_func": "causal"}

        found["prefix_grouper"] = functools.partial(together, "prefix_grouper_attention", grouped)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=LAYERS, default="tiny")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument(
        "--shapes",
        nargs="+",
        default=["2,128,20,5", "2,512,20,10"],
        help="prompts, tokens of a prompt, tokens of a completion, completions of a prompt: e.g. 2,128,20,5",
    )
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.manual_seed(0)
    config = LlamaConfig(
        **LAYERS[options.model], num_hidden_layers=options.layers, vocab_size=1024, max_position_embeddings=8192
    )
    dtype = torch.bfloat16 if ON_ACCELERATOR else torch.float32
    model = LlamaModel(config).to(DEVICE, dtype)
    print(
        f"model {options.model}, {options.layers} layers, {dtype}, {DEVICE}, torch {torch.__version__}, medians of {options.rounds}"
    )
    print("| prompts, prompt, new, k | way | ms | / separate | peak MiB | largest difference |")
    print("|---|---|---|---|---|---|")
    for shape in options.shapes:
        rows, prompt, width, count = map(int, shape.split(","))
        layout = Layout(prompt, width, count)
        ids = torch.randint(4, 1024, (rows, layout.prompt + layout.count * layout.width), device=DEVICE)
        found = ways(model, ids, layout)
        seconds: dict[str, list[float]] = {name: [] for name in found}
        peaks, states = {}, {}
        for turn in range(options.rounds + 2):
            for name, way in found.items():
                model.zero_grad()
                if ON_ACCELERATOR:
                    torch.accelerator.synchronize()
                    torch.accelerator.reset_peak_memory_stats()
                start = time.perf_counter()
                hidden = way()
                hidden.float().square().mean().backward()
                if ON_ACCELERATOR:
                    torch.accelerator.synchronize()
                    peaks[name] = torch.accelerator.max_memory_allocated() / 2**20
                if turn > 1:  # the first two compile, and choose kernels
                    seconds[name].append(time.perf_counter() - start)
                states[name] = hidden.detach().float()
        for name, values in seconds.items():
            median = statistics.median(values)
            ratio = median / statistics.median(seconds["separate"])
            gap = (states[name] - states["separate"]).abs().max().item()
            print(
                f"| {shape} | {name} | {1e3 * median:.1f} | {ratio:.2f} | {peaks.get(name, float('nan')):.0f} | {gap:.1e} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
