"""
Trains a policy with RePULSe, or with plain REINFORCE (`--alpha 0`), and says what became of it.

    accelerate launch examples/repulse.py              # the embedded world, on a CPU or any accelerator
    accelerate launch examples/repulse.py --alpha 0    # the same with REINFORCE
    accelerate launch examples/repulse.py --model_name_or_path HuggingFaceTB/SmolLM-135M-Instruct --learning_rate 3e-5 \
        --reward_model_path my/reward-model --dataset_name prompts.jsonl --apply_chat_template --max_completion_length 64 --bad_reward_threshold -4
    accelerate launch examples/repulse.py --config examples/configs/smollm/repulse-1.yaml    # a published run

`trl-repulse repulse` does the same without a checkout, but for exact values. Without `--model_name_or_path` and `--config`, the settings are those
of `trl_repulse/embedded/settings/repulse.yaml`. Flags win.

Hardware: the embedded policy has 0.25 million parameters. CPU: 0.8 GB, 2.3 minutes of one core. One GPU of 24 GB, of 80 GB: not measured.
"""

from worlds.exact_tracking import train

from trl_repulse.cli.scripts import main_or_exit


def main(argv: list[str] | None = None) -> None:
    train("repulse", argv)


if __name__ == "__main__":
    main_or_exit(main)
