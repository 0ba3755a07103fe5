"""
How often does a trained policy produce a bad output? Importance sampling with its proposal, beside the truth.

    python examples/repulse.py --config examples/configs/two_tokens/repulse.yaml --output_dir out --max_steps 120
    python examples/rare_events.py --output_dir out

Completions in the world of two tokens can be enumerated, so that P(bad), CVaR and log Z are known. With other models the same calls
estimate what nobody knows; `trl-repulse rare-events` makes them from the command line.

Hardware: the world of two tokens, a policy of 0.1 million parameters. CPU: not measured. One GPU of 24 GB, of 80 GB: not measured.
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from worlds import two_tokens
from worlds.exact import ExactEvaluator
from worlds.log_z_bounds import enumeration_sample, log_z_bounds

from trl_repulse.cli.main import Parser
from trl_repulse.cli.scripts import main_or_exit
from trl_repulse.evaluation.rare.components import Component
from trl_repulse.evaluation.rare.report import format_report, rare_event_report
from trl_repulse.evaluation.rare.sampling import draw, find_temperature


THRESHOLD, LEVEL, BETA = -5.0, 1e-4, -5.0


def print_bounds(
    evaluator: ExactEvaluator, log_p: torch.Tensor, log_q: torch.Tensor, groups: int = 16, size: int = 256
):
    """Bounds on log Z of each prompt, from draws out of the enumerated proposal and target."""
    generator = torch.Generator().manual_seed(0)
    log_target = log_p + BETA * evaluator.rewards
    log_w = log_target - log_q
    drawn = enumeration_sample(log_q, groups * size, generator)
    target = enumeration_sample(log_target, groups, generator)
    bounds = log_z_bounds(log_w.gather(1, drawn).view(-1, groups, size), log_w.gather(1, target))
    print(f"\nlog Z of each prompt, {groups} groups of {size} draws: the ends of an interval, and the truth")
    for bound, truth in zip(bounds, log_target.logsumexp(dim=1).tolist(), strict=True):
        print(f"{bound.lower_end:9.3f} to {bound.upper_end:.3f}, truth {truth:.3f}")


def main() -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", default="repulse-two-tokens", help="folder of a run of examples/repulse.py")
    parser.add_argument("--num_samples", type=int, default=5000, help="completions a prompt from each component")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    folder = Path(options.output_dir)
    if folder.is_dir() and not (folder / "proposal").is_dir():
        raise ValueError(
            f"`{folder}` holds no proposal; train with `proposal='learned'`, as examples/repulse.py does by default."
        )

    policy = AutoModelForCausalLM.from_pretrained(options.output_dir)
    proposal = AutoModelForCausalLM.from_pretrained(f"{options.output_dir}/proposal")
    tokenizer = AutoTokenizer.from_pretrained(options.output_dir)
    reward_model = AutoModelForSequenceClassification.from_pretrained(two_tokens.reward_model_path())
    reward_tokenizer = AutoTokenizer.from_pretrained(two_tokens.reward_model_path())
    prompts = list(two_tokens.load_prompts()["prompt"])

    # At a higher temperature the proposal also draws what training made it neglect
    temperature = find_temperature(proposal, tokenizer, prompts, max_completion_length=2)
    draws = draw(
        [policy, proposal, Component(proposal, temperature=temperature)],
        tokenizer,
        prompts,
        reward_model,
        counts=(options.num_samples,) * 3,
        max_completion_length=2,
        reward_tokenizer=reward_tokenizer,
        batch_size=500,
        seed=options.seed,
    )
    report = rare_event_report(draws.sample, [THRESHOLD], [LEVEL])
    print(format_report(report))

    bad_tokens = two_tokens.bad_token_ids(tokenizer)
    evaluator = ExactEvaluator(tokenizer, prompts, reward_model, bad_tokens, 2, reward_tokenizer=reward_tokenizer)
    log_p, log_q = evaluator.log_probs(policy), evaluator.log_probs(proposal)
    truth = float((log_p.exp() * (evaluator.rewards < THRESHOLD)).sum(dim=1).mean())
    print(f"\nThe truth, by enumeration: P(r < {THRESHOLD:g}) = {truth:.4g}")
    print_bounds(evaluator, log_p, log_q)


if __name__ == "__main__":
    main_or_exit(main)
