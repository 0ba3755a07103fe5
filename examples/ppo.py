"""
Trains a policy with PPO and says what became of it.

    accelerate launch examples/ppo.py              # the embedded world, on a CPU or any accelerator
    accelerate launch examples/ppo.py --model_name_or_path HuggingFaceTB/SmolLM-135M-Instruct --learning_rate 3e-5 \
        --reward_model_path my/reward-model --value_model_path my/reward-model --dataset_name prompts.jsonl --apply_chat_template \
        --max_completion_length 64
    accelerate launch examples/ppo.py --config examples/configs/smollm/ppo-1.yaml    # a published run

`trl-repulse ppo` does the same without a checkout, but for exact values. Without `--model_name_or_path` and `--config`, the settings are those
of `trl_repulse/embedded/settings/ppo.yaml`. Flags win.

Hardware: the embedded policy has 0.25 million parameters. CPU: not measured, as many completions as repulse.py. One GPU of 24 GB, of 80 GB: not measured.
"""

from worlds.exact_tracking import train

from trl_repulse.cli.scripts import main_or_exit


def main(argv: list[str] | None = None) -> None:
    train("ppo", argv)


if __name__ == "__main__":
    main_or_exit(main)
