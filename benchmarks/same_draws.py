"""The world of two tokens with vLLM and without, both by the same random numbers: are the weights the same?

    VLLM_CPU_KVCACHE_SPACE=1 python -m benchmarks.same_draws --seed 0

Both ways draw a token as the largest of probability over exponential noise, from torch's generator. So with the generator in one state
when training begins they draw the same completions from the same weights, and go on to the same weights, until rounding of a
probability turns one draw. Two things are taken from the engine for that: vLLM's CPU build draws its noise in a compiled function, with
random numbers of its own, and rows that have ended are not drawn for, as transformers does.

After each update the weights of policy and proposal are compared, to the bit. Needs a CPU and vLLM's build for it.

    python -m benchmarks.same_draws --check_compiled 100000

asks instead whether that compiled function draws what it should: so many batches of 128 tokens from known probabilities, by chi-square.
"""

import argparse
import hashlib
import json
import tempfile
from pathlib import Path

import torch
from scipy.stats import chi2
from transformers import TrainerCallback
from trl.generation.vllm_generation import VLLMGeneration

from examples.worlds import two_tokens
from examples.worlds.exact_tracking import ARGUMENTS, make_tracking
from trl_repulse import RePULSeTrainer
from trl_repulse.cli.arguments import parse
from trl_repulse.cli.scripts import run


class Watched(RePULSeTrainer):
    """Notes the weights of both models after each update; all runs begin with the generator as it was in the first."""

    state_of_torch: torch.Tensor | None = None
    weights: list[list[str]] = []  # of all runs, in order

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        trainer = self

        class Watch(TrainerCallback):
            def on_train_begin(self, *args, **kwargs):
                if Watched.state_of_torch is None:
                    Watched.state_of_torch = torch.get_rng_state()
                torch.set_rng_state(Watched.state_of_torch)
                Watched.weights.append([])

            def on_step_end(self, *args, **kwargs):
                digest = hashlib.sha256()
                for model in (trainer.accelerator.unwrap_model(trainer.model), trainer.proposal.module):
                    for parameter in model.parameters():
                        digest.update(parameter.detach().contiguous().numpy().tobytes())
                Watched.weights[-1].append(digest.hexdigest())

        self.add_callback(Watch())


def draw_like_transformers() -> None:
    """Takes from vLLM's CPU build what makes its draws others than transformers'."""
    from vllm.v1.sample.ops import topk_topp_sampler

    def sample(logits: torch.Tensor) -> torch.Tensor:
        probs = logits.softmax(dim=-1, dtype=torch.float32)
        return probs.div_(torch.empty_like(probs).exponential_()).argmax(dim=-1)

    def generate(engine, *args, **kwargs):
        ends = engine.generation_kwargs.get("stop_token_ids") or engine.ends
        engine.ends, engine.generation_kwargs = ends, {"ignore_eos": True}
        prompts, drawn, *said = original(engine, *args, **kwargs)
        sizes = [next((i + 1 for i, token in enumerate(row) if token in ends), len(row)) for row in drawn]
        return prompts, *([row[:size] for row, size in zip(each, sizes, strict=True)] for each in (drawn, *said))

    original, VLLMGeneration.generate = VLLMGeneration.generate, generate
    topk_topp_sampler.compiled_random_sample = sample


def check_compiled(batches: int) -> None:
    """Counts of drawn tokens, with probabilities from 1/12 down to 1e-7, against what is expected of independent draws."""
    from vllm.v1.sample.ops.topk_topp_sampler import compiled_random_sample

    torch.manual_seed(0)
    log_p = torch.linspace(0, -14, 164).log_softmax(-1)
    counts = torch.zeros(164, dtype=torch.int64)
    for _ in range(batches):
        counts += torch.bincount(compiled_random_sample(log_p.repeat(128, 1)), minlength=164)
    expected = log_p.double().softmax(-1) * 128 * batches
    rare = expected < 5  # taken as one
    seen, wanted = (torch.cat([each[~rare], each[rare].sum(0, keepdim=True)]) for each in (counts, expected))
    statistic, freedom = ((seen - wanted) ** 2 / wanted).sum().item(), len(wanted) - 1
    print(f"{128 * batches:,} draws: chi-square {statistic:.0f}, {freedom} degrees of freedom, p = ", end="")
    print(f"{chi2.sf(statistic, freedom):.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max_steps", type=int, default=800)
    parser.add_argument("--check_compiled", type=int, metavar="BATCHES", help="check vLLM's compiled draws alone")
    options = parser.parse_args()
    if options.check_compiled:
        return check_compiled(options.check_compiled)
    draw_like_transformers()
    ends = []
    with tempfile.TemporaryDirectory() as folder:
        for name in ("transformers", "vllm"):
            place = Path(folder, name)
            argv = [
                *two_tokens.flags("repulse"),
                "--use_cpu",
                "true",
                "--seed",
                str(options.seed),
                "--max_steps",
                str(options.max_steps),
            ]
            argv += ["--output_dir", str(place), "--use_vllm", str(name == "vllm").lower(), "--disable_tqdm", "true"]
            arguments = parse(argv, ARGUMENTS["repulse"], two_tokens.config_path("repulse"))
            run(Watched, *arguments, f"RePULSe, {name}", make_tracking)
            final = json.loads((place / "results.json").read_text())["final"]
            ends.append(f"{final['expected_reward']:.2f} / {final['log_prob_bad']:.1f}")
    same = [one == other for one, other in zip(*Watched.weights, strict=True)]
    first = str(same.index(False) + 1) if False in same else "none"
    print("| seed | updates | with the same weights | first with others | reward / log P(bad), transformers | vLLM |")
    print(f"{'|---' * 6}|\n| {options.seed} | {len(same)} | {sum(same)} | {first} | {' | '.join(ends)} |")


if __name__ == "__main__":
    main()
