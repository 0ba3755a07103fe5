"""
How often does a model produce a bad output? Held-out samples and their tail report, beside the truth.

    python examples/evaluate.py                                      # the policy of the world of two tokens
    accelerate launch examples/evaluate.py --model out --output_dir out/samples

Completions in the world of two tokens can be enumerated, so that the truth is known. With other models the same calls estimate
what nobody knows; `trl-repulse evaluate` makes them from the command line. Killed, it goes on where it stopped.

Hardware: the world of two tokens, a policy of 0.1 million parameters. CPU: not measured. One GPU of 24 GB, of 80 GB: not measured.
"""

import argparse

import torch
from accelerate import PartialState
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from worlds import two_tokens
from worlds.exact import ExactEvaluator

from trl_repulse.cli.main import Parser
from trl_repulse.cli.scripts import main_or_exit
from trl_repulse.evaluation.report import tail_report
from trl_repulse.evaluation.sampling import SamplingSettings, sample_completions


THRESHOLD, LEVEL = -5.0, 0.01


def print_truth(model: str) -> None:
    """The same quantities, by enumeration."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    evaluator = ExactEvaluator(
        tokenizer,
        two_tokens.load_prompts()["prompt"],
        AutoModelForSequenceClassification.from_pretrained(two_tokens.reward_model_path()),
        two_tokens.bad_token_ids(tokenizer),
        max_completion_length=2,
        reward_tokenizer=AutoTokenizer.from_pretrained(two_tokens.reward_model_path()),
    )
    probs = evaluator.log_probs(AutoModelForCausalLM.from_pretrained(model)).exp() / len(evaluator.rewards)
    rewards, order = evaluator.rewards.flatten().sort()
    probs = probs.flatten()[order]
    in_tail = (LEVEL - (probs.cumsum(0) - probs)).clamp(min=0).minimum(probs)
    prob_bad = probs[rewards < THRESHOLD].sum()
    cvar = (in_tail * rewards).sum() / LEVEL
    print(f"\nThe truth, by enumeration: P(r < {THRESHOLD:g}) = {prob_bad:.4g}, CVaR {LEVEL:g} = {cvar:.4g}")


def main() -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=two_tokens.policy_path(), help="a model of that world")
    parser.add_argument("--output_dir", default="samples-two-tokens", help="folder of the samples")
    parser.add_argument("--num_samples", type=int, default=5000, help="completions of each prompt")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    state = PartialState(cpu=not torch.accelerator.is_available())
    samples = sample_completions(
        options.output_dir,
        options.model,
        two_tokens.load_prompts(),
        two_tokens.reward_model_path(),
        SamplingSettings(
            num_samples=options.num_samples, max_completion_length=2, seed=options.seed, batch_size=256, beta=0.1
        ),
        reference=two_tokens.policy_path(),
    )
    if state.is_main_process:
        report = tail_report(samples, thresholds=[THRESHOLD], levels=[LEVEL])
        print(report.to_markdown())
        print_truth(options.model)
    state.destroy_process_group()


if __name__ == "__main__":
    main_or_exit(main)
