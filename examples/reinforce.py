"""
Trains a policy with REINFORCE as the RePULSe paper runs it, with or without a reward transform.

    accelerate launch examples/reinforce.py                                      # the embedded world
    accelerate launch examples/reinforce.py --reward_transform exponential --reward_transform_beta -0.5
    accelerate launch examples/reinforce.py --model_name_or_path HuggingFaceTB/SmolLM-135M-Instruct --learning_rate 3e-5 \
        --reward_model_path my/reward-model --dataset_name prompts.jsonl --apply_chat_template --max_completion_length 64
    accelerate launch examples/reinforce.py --config examples/configs/smollm/reinforce-1.yaml    # a published run

`trl-repulse reinforce` does the same without a checkout, but for exact values. Without `--model_name_or_path` and `--config`, the settings are those
of `trl_repulse/embedded/settings/reinforce.yaml`. Flags win.

Hardware: the embedded policy has 0.25 million parameters. CPU: 1.0 GB, 2.3 minutes of one core. One GPU of 24 GB, of 80 GB: not measured.
"""

from worlds.exact_tracking import train

from trl_repulse.cli.scripts import main_or_exit


def main(argv: list[str] | None = None) -> None:
    train("reinforce", argv)


if __name__ == "__main__":
    main_or_exit(main)
