"""Parts of the training commands: prompts, rewards, tracking, the run, and the report at its end."""

import logging
import shlex
import sys
from argparse import ArgumentError
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset, IterableDataset
from torch import nn
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, ProgressCallback, Trainer
from trl import ModelConfig, get_peft_config, get_quantization_config

from .. import embedded
from .._errors import describe_error, from_reward
from .._numbers import format_logs, kl_per_completion, with_unit
from ..configs.shared_config import without_secrets
from ..data._checks import check_eval_batch, check_output_dir
from ..data._prompts import as_templates_read, check_template_variables, warn_of_template
from ..data.loading import drop_long_prompts, load_prompts
from ..engine.preparation import check_loadable
from ..engine.resume import find_checkpoint, how_to_resume, naming_a_full_disk, warn_of_a_run, without_tied
from ..engine.reward_functions import all_with_checks, check_tokenizers
from ..engine.trl_bridge import withheld_from_uploads
from ..evaluation.callback import BeforeAfterCallback
from ..evaluation.plots import plot_training
from ..evaluation.rare.report import estimate_prob_bad, format_unseen
from ..evaluation.records import write_report
from ..evaluation.tracking import TrackingCallback
from ..models._loading import load_model
from ..rewards.loading import load_reward
from ..trainers.base_trainer import BaseTrainer
from ._fields import keep_writing
from .arguments import PPOScriptArguments, TrainingScriptArguments


logger = logging.getLogger(__name__)

# Metrics of the last log that are reported if the expected reward is not computed exactly
P_BAD = ("p_bad", "p_bad_low", "p_bad_high")  # on unseen prompts, behind `eval_`
SHOWN = ("reward", "return", "kl", "bad_fraction", "entropy", "proposal/reward", "proposal/ess")


def load_data(
    script_args: TrainingScriptArguments, args: Any, model_name: str
) -> tuple[Dataset | IterableDataset, Dataset | IterableDataset | None]:
    """Loads the prompts to train on, and the held-out ones, which may be `None` if `args.eval_strategy` is "no". `model_name` is the policy,
    whose tokenizer counts the tokens of prompts. Raises a `ValueError` if prompts cannot be used."""
    check_template_variables(args.chat_template_kwargs)  # of TRL's own configurations too
    options = (script_args.dataset_config, script_args.dataset_streaming)
    column, chat = script_args.prompt_column, script_args.apply_chat_template
    if script_args.single_prompt is not None:
        train = Dataset.from_dict({"prompt": [script_args.single_prompt]})
        if chat:
            raise ValueError("`single_prompt` is plain text; leave `apply_chat_template` out, or write a file.")
    else:
        train = load_prompts(script_args.dataset_name, script_args.dataset_train_split, *options, column, chat)
    held_out = None
    if script_args.eval_dataset_name is not None:
        name, split = script_args.eval_dataset_name, script_args.dataset_test_split
        if split == "test" and Path(name).expanduser().is_file():  # the default; a file has one split
            split = "train"
        column = script_args.eval_prompt_column or column
        # `dataset_config` is of the training data
        streaming = script_args.dataset_streaming and not script_args.num_final_samples  # these need all rows
        held_out = load_prompts(name, split, None, streaming, column, chat)
    elif args.eval_strategy != "no":
        held_out = load_prompts(script_args.dataset_name, script_args.dataset_test_split, *options, column, chat)
    if script_args.max_prompt_length is not None:
        revision, code = (args.model_init_kwargs or {}).get("revision"), args.trust_remote_code
        tokenizer = AutoTokenizer.from_pretrained(model_name, revision=revision, trust_remote_code=code)
        limit = (tokenizer, script_args.max_prompt_length, args.chat_template_kwargs)
        train, held_out = (data if data is None else drop_long_prompts(data, *limit) for data in (train, held_out))
    return train, held_out


def run(
    trainer_cls: type[Trainer],
    script_args: TrainingScriptArguments,
    args: Any,
    model_args: ModelConfig,
    method: str,
    make_tracking: Callable[..., TrackingCallback] | None = None,
) -> None:
    """
    Trains, saves and reports: prints a table, and writes `results.json`, a figure, and completions to `output_dir`. All processes must call it.

    Args:
        trainer_cls (`type`): Class of the trainer.
        script_args, args, model_args: Returned by [`~trl_repulse.cli.arguments.parse`].
        method (`str`): Name of the method in the report.
        make_tracking (`Callable`, *optional*):
            Makes the callback that follows the run, of the trainer, `script_args` and the prompts. If unset, [`TrackingCallback`].
    """
    is_embedded = model_args.model_name_or_path is None
    name, model_name = script_args.dataset_name, model_args.model_name_or_path or embedded.policy_path()
    check_output_dir(args)
    resume = _checkpoint(args)  # before models are loaded
    if not resume and args.should_save and not issubclass(trainer_cls, BaseTrainer):  # ours warn themselves
        warn_of_a_run(args.output_dir)
    check_loadable(args, None, model=model_name)  # TRL's trainers do not say which argument cannot be loaded
    dataset, held_out = load_data(script_args, args, model_name)
    if held_out is not None:
        check_eval_batch(args)
    prompts = dataset
    if isinstance(dataset, Dataset):  # an update on several devices may need more prompts than there are
        dataset = dataset.repeat(-(-args.generation_batch_size // args.num_generations // len(dataset)))
    reward = load_reward(script_args.reward_type, script_args.reward_model_path, **(script_args.reward_kwargs or {}))
    check_loadable(args, None, model=model_name, reward_funcs=reward)
    critic = {"value_model": script_args.value_model_path} if isinstance(script_args, PPOScriptArguments) else {}
    trainer = trainer_cls(
        model=model_name,
        reward_funcs=reward,
        args=args,
        train_dataset=dataset,
        eval_dataset=held_out,
        quantization_config=get_quantization_config(model_args),
        peft_config=get_peft_config(model_args),
        **critic,
    )
    tracking = make_tracking(trainer, script_args, prompts) if make_tracking else TrackingCallback(trainer)
    trainer.add_callback(tracking)
    table = None
    if count := script_args.num_table_completions:
        table = BeforeAfterCallback(trainer, prompts if held_out is None else held_out, count)
        trainer.add_callback(table)
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, PrinterCallback | ProgressCallback):
            callback.on_log = _print_log
    if not isinstance(trainer, BaseTrainer):
        _check_as_ours(trainer, prompts)
    with withheld_from_uploads(BaseTrainer._withheld), naming_a_full_disk(args.output_dir):  # for TRL's trainers too
        try:
            trainer.train(resume_from_checkpoint=resume)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(how_to_resume(args.output_dir) if args.should_save else "") from None
        trainer.save_model(args.output_dir)
        trainer.save_state()  # the log of all metrics, which `trl-repulse diagnose` reads
        unseen, others = {}, {}
        if script_args.eval_dataset_name is not None:
            unseen, others = _evaluate(trainer, script_args, held_out, None if is_embedded else model_name)
        notes = ["(the other columns are stored results)"] * is_embedded
        if trainer.is_world_process_zero():
            report(trainer, tracking, method, unseen, embedded.stored_results() if is_embedded else others, notes)
        if args.push_to_hub:
            is_local = name is None or Path(name).expanduser().exists()  # a file or a folder is no name on the Hub
            trainer.push_to_hub(dataset_name=None if is_local else name)
        else:
            trainer.create_model_card(Path(args.output_dir).name)  # with what was measured
        if table is not None:
            table.write(Path(args.output_dir) / "completions" / "before_after.md")
    trainer.end()


def _checkpoint(args: Any) -> str | None:
    """The checkpoint that `resume_from_checkpoint` names, which is text on the command line: a path, or `true` for the last one, or `false`.
    The main process prints it. Raises a `ValueError` if there is none."""
    given = args.resume_from_checkpoint
    given = {"true": True, "false": None}.get(str(given).lower(), given)
    if not given:
        return None
    found = find_checkpoint(given, args.output_dir)
    if args.should_save:
        print(f"Training goes on from {found}.")
    return found


def _evaluate(
    trainer: Trainer, script_args: TrainingScriptArguments, held_out: Any, initial: str | None
) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """Evaluates on held-out prompts. Returns P(bad) of the policy, with the ends of its interval, as metrics, and that of the `initial` model
    (if any) by its name in the report; nothing without `num_final_samples` and a threshold. All processes must call it."""
    args, threshold = trainer.args, getattr(trainer, "bad_reward_threshold", None)
    trainer.evaluate()
    if script_args.num_final_samples and threshold is None and args.should_log:
        logger.warning("`num_final_samples` measures P(bad) under a `bad_reward_threshold`, and this run has none.")
    if not script_args.num_final_samples or threshold is None:
        return {}, {}
    reward = trainer.reward_funcs[0]
    if isinstance(reward, nn.Module):
        reward = trainer.accelerator.unwrap_model(reward)

    def measured(model: str, **options: Any) -> dict[str, float]:
        """P(bad) of the policy in a folder, with its interval, under the names of metrics."""
        policy = load_model(AutoModelForCausalLM, model, "policy", trust_remote_code=args.trust_remote_code, **options)
        p_bad = estimate_prob_bad(
            policy.to(trainer.accelerator.device),
            trainer.processing_class,
            held_out,
            reward,
            threshold,
            trainer.max_completion_length,
            script_args.num_final_samples,
            reward_tokenizer=trainer.reward_processing_classes[0],
            chat_template_kwargs=None if isinstance(held_out[0]["prompt"], str) else trainer.chat_template_kwargs,
            batch_size=max(args.per_device_eval_batch_size, 64),
            seed=args.seed,
        )
        return dict(zip((f"eval_{name}" for name in P_BAD), (p_bad.value, p_bad.low, p_bad.high), strict=True))

    unseen, others = measured(args.output_dir), {}
    if initial is not None:
        before = measured(initial, revision=(args.model_init_kwargs or {}).get("revision"))
        others = {"initial policy": before | {"kl": 0.0, "samples": 0}}
    Trainer.log(trainer, dict(unseen))  # to the trackers
    return unseen, others


def _check_as_ours(trainer: Trainer, prompts: Dataset | IterableDataset) -> None:
    """Gives TRL's trainer the checks of prompts and rewards that ours have, which name the function that an error came through."""
    check_tokenizers(trainer.reward_funcs, trainer.reward_processing_classes)
    trainer.reward_funcs = all_with_checks(trainer.reward_funcs, trainer.reward_func_names)
    warn_of_template(trainer.processing_class, next(iter(prompts))["prompt"], trainer.args.chat_template_kwargs)
    tokenize = trainer._tokenize_prompts
    trainer._tokenize_prompts = lambda prompts: tokenize(as_templates_read(prompts))
    warn = trainer._issue_warnings_after_load
    trainer._issue_warnings_after_load = lambda result: warn(without_tied(result, trainer.model))


def _print_log(args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
    """Replaces what transformers' callbacks print, a dictionary. Trackers and `trainer_state.json` get all metrics."""
    line = format_logs(logs or {}, state.global_step, state.max_steps)
    if state.is_world_process_zero and line:
        tqdm.write(line)  # above a progress bar, if there is one


def report(
    trainer: Trainer,
    tracking: TrackingCallback,
    method: str,
    unseen: Mapping[str, float],
    others: Mapping[str, Mapping[str, float]],
    notes: Sequence[str] = (),
) -> None:
    """Writes `results.json` and a figure to the `output_dir` of a trainer that has finished, and prints a table. `unseen` has P(bad) of the
    policy on held-out prompts, or nothing; `others` has, by name, what is known of other policies on the same held-out prompts, and `notes`
    are lines below the table. Only the main process calls it. What it sets on the trainer is for the model card."""
    args, output_dir = trainer.args, Path(trainer.args.output_dir)
    history = list(reversed(trainer.state.log_history))
    metrics = next((logs for logs in history if "reward" in logs), {})
    held_out = next((logs for logs in history if "eval_reward" in logs), {})
    metrics = metrics | {key: value for key, value in held_out.items() if key.startswith("eval_")} | dict(unseen)
    settings = without_secrets(args.to_dict()) | {"mixed_precision": trainer.accelerator.mixed_precision}
    settings = {name: value for name, value in settings.items() if value is not None}
    results = {"method": method, "seed": args.seed, **tracking.results(), "metrics": metrics, "settings": settings}
    write_report(output_dir / "results.json", results)
    values = {name: metrics[name] for key in SHOWN for name in (key, f"eval_{key}") if name in metrics}
    values |= {name: kl_per_completion(metrics, name[:-2]) for name in ("kl", "eval_kl") if name in values}
    table = tracking.table({with_unit(name): value for name, value in values.items()})
    sampled = {name: value for name, value in values.items() if "proposal/" not in name}
    trainer.measured = sampled | (getattr(trainer, "measured", None) or {})  # that of a callback
    if unseen:
        own = metrics | {"samples": tracking.samples}
        if "eval_kl" in values:
            own["kl"] = values["eval_kl"]
        table = format_unseen({**others, method: own}, notes)
        trainer.measured |= unseen
        before = others.get("initial policy", {})
        trainer.measured |= {f"initial_{name}": before[f"eval_{name}"] for name in P_BAD if f"eval_{name}" in before}
        trainer.tail_report = f"On prompts that were not trained on:\n\n```text\n{table}\n```"
    if (panels := tracking.panels()) or metrics:
        plot_training(trainer.state.log_history, output_dir / "training.png", panels)
    print(
        f"\n{method}, seed {args.seed}\n{table}\n\nSaved to {output_dir.resolve()}; to check the run: trl-repulse diagnose {shlex.quote(args.output_dir)}"
    )


def main_or_exit(main: Callable[[], None]) -> None:
    """Runs a script's main function. A mistake of the user, an error of a reward function or Ctrl-C ends it with one line and exit
    status 1; other errors are raised."""
    keep_writing()
    try:
        main()
    except KeyboardInterrupt as error:
        sys.exit(f"Interrupted. {error}".strip())
    except Exception as error:
        if not (isinstance(error, ValueError | OSError | ImportError | ArgumentError) or from_reward(error)):
            raise
        sys.exit(f"error: {describe_error(error)}")
