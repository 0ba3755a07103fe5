"""
Trains a policy with TRL's own GRPO or Dr. GRPO, to compare with.

    accelerate launch examples/grpo.py                                           # the embedded world, plain GRPO
    accelerate launch examples/grpo.py --loss_type dr_grpo --scale_rewards none  # Dr. GRPO
    accelerate launch examples/grpo.py --model_name_or_path HuggingFaceTB/SmolLM-135M-Instruct --learning_rate 3e-5 \
        --reward_model_path my/reward-model --dataset_name prompts.jsonl --apply_chat_template --max_completion_length 64 --loss_type grpo

TRL's default `loss_type` is neither of the two but "dapo".

`trl-repulse grpo` does the same without a checkout, but for exact values. Without `--model_name_or_path` and `--config`, the settings are those
of `trl_repulse/embedded/settings/grpo.yaml`. Flags win.

Hardware: the embedded policy has 0.25 million parameters. CPU: not measured, as many completions as repulse.py. One GPU of 24 GB, of 80 GB: not measured.
"""

from worlds.exact_tracking import train

from trl_repulse.cli.scripts import main_or_exit


def main(argv: list[str] | None = None) -> None:
    train("grpo", argv)


if __name__ == "__main__":
    main_or_exit(main)
