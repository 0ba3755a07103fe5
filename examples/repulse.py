"""
Trains a policy with RePULSe, or with plain REINFORCE (`--alpha 0`), and says what became of it.

    accelerate launch examples/repulse.py              # the embedded world, on a CPU or any accelerator
    accelerate launch examples/repulse.py --alpha 0    # the same with REINFORCE
    accelerate launch examples/repulse.py --model_name_or_path Qwen/Qwen3-0.6B --reward_model_path my/reward-model \
        --dataset_name prompts.jsonl --max_completion_length 64

Without `--model_name_or_path` and `--config`, the settings are those of `examples/configs/embedded.yaml`. Flags win.
"""

import sys
from argparse import ArgumentError
from dataclasses import dataclass, field
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, Trainer
from trl import ModelConfig, ScriptArguments, TrlParser, get_peft_config, get_quantization_config

from trl_repulse import RePULSeConfig, RePULSeTrainer, embedded
from trl_repulse.data import load_prompts
from trl_repulse.evaluation.tracking import ExactTrackingCallback, TrackingCallback, format_table, write_results
from trl_repulse.plots import plot_training


# Of the metrics logged last, where nothing can be computed exactly
SHOWN = ("reward", "return", "kl", "bad_fraction", "entropy", "proposal/reward", "proposal/ess")


@dataclass
class RePULSeScriptArguments(ScriptArguments):
    """TRL's script arguments; `dataset_name` may also be a .jsonl, .json, .csv or .parquet file of prompts."""

    reward_model_path: str | None = field(default=None, metadata={"help": "Reward model: a path or a Hub name."})
    tracking_every: int = field(default=10, metadata={"help": "Updates between two exact evaluations."})


def parse(argv: list[str], classes: tuple = (RePULSeScriptArguments, RePULSeConfig), embedded_yaml="embedded.yaml"):
    if not {"--config", "--model_name_or_path"} & {arg.split("=")[0] for arg in argv}:
        argv = ["--config", str(Path(__file__).parent / "configs" / embedded_yaml), *argv]
    parser = TrlParser((*classes, ModelConfig), exit_on_error=False)
    if not torch.accelerator.is_available():
        parser.set_defaults_with_config(use_cpu=True, bf16=False)
    script_args, args, model_args = parser.parse_args_and_config(argv)
    if model_args.model_name_or_path is None:
        script_args.reward_model_path = script_args.reward_model_path or embedded.reward_model_path()
        script_args.dataset_name = script_args.dataset_name or embedded.prompts_path()
    for name in ("reward_model_path", "dataset_name"):
        if getattr(script_args, name) is None:
            raise ValueError(f"`--{name}` is needed with `--model_name_or_path`; give a path or a Hub name.")
    model_init_kwargs = {
        "revision": model_args.model_revision,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
    }
    args.model_init_kwargs = model_init_kwargs | (args.model_init_kwargs or {})
    return script_args, args, model_args


def track_exactly(trainer: Trainer, prompts: list[str], every: int) -> ExactTrackingCallback:
    bad = embedded.bad_token_ids(trainer.processing_class)
    initial = AutoModelForCausalLM.from_pretrained(embedded.policy_path())
    return ExactTrackingCallback.from_trainer(trainer, prompts, bad, initial, every)


def report(trainer: Trainer, tracking: TrackingCallback, method: str) -> None:
    args, output_dir = trainer.args, Path(trainer.args.output_dir)
    metrics = next((logs for logs in reversed(trainer.state.log_history) if "reward" in logs), {})
    write_results(output_dir / "results.json", method, args.seed, tracking, args.to_dict(), metrics)
    shown = {name: metrics[name] for name in SHOWN if name in metrics}
    print(f"\n{method}, seed {args.seed}\n{format_table(tracking, shown)}\n")
    if isinstance(tracking, ExactTrackingCallback):
        plot_training(tracking.history, output_dir / "training.png")
    print(f"Saved to {output_dir.resolve()}")


def run(trainer_cls: type[Trainer], script_args, args, model_args, method: str, **kwargs) -> None:
    name, options = script_args.dataset_name, (script_args.dataset_config, script_args.dataset_streaming)
    splits = [script_args.dataset_train_split] + [script_args.dataset_test_split] * (args.eval_strategy != "no")
    dataset, *held_out = (load_prompts(name, split, *options) for split in splits)
    prompts = [row["prompt"] for row in dataset] if model_args.model_name_or_path is None else None
    if isinstance(dataset, Dataset):  # an update on several devices may need more prompts than there are
        dataset = dataset.repeat(-(-args.generation_batch_size // args.num_generations // len(dataset)))
    trainer = trainer_cls(
        model=model_args.model_name_or_path or embedded.policy_path(),
        reward_funcs=script_args.reward_model_path,
        args=args,
        train_dataset=dataset,
        eval_dataset=held_out[0] if held_out else None,
        quantization_config=get_quantization_config(model_args),
        peft_config=get_peft_config(model_args),
        **kwargs,
    )
    tracking = TrackingCallback(trainer)
    if prompts is not None:
        tracking = track_exactly(trainer, prompts, script_args.tracking_every)
    trainer.add_callback(tracking)
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model(args.output_dir)
    if trainer.is_world_process_zero():
        report(trainer, tracking, method)
    if args.push_to_hub:
        trainer.push_to_hub(dataset_name=None if Path(name).is_file() else name)
    trainer.end()


def main(argv: list[str] | None = None) -> None:
    script_args, args, model_args = parse(sys.argv[1:] if argv is None else argv)
    method = "RePULSe (policy as proposal)" if args.use_policy_as_proposal else "RePULSe"
    run(RePULSeTrainer, script_args, args, model_args, method if args.alpha else "REINFORCE")


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError, ArgumentError) as error:
        sys.exit(f"error: {' '.join(str(error).split())}")
