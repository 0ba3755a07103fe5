"""Records of completions: the table that is logged, and the negative data."""

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from accelerate.logging import get_logger
from accelerate.utils import gather_object
from transformers import is_trackio_available, is_wandb_available
from transformers.utils import is_rich_available

from .trl_bridge import print_prompt_completions_sample


logger = get_logger(__name__)

NEGATIVES = "negatives.jsonl"
EARLIER_NEGATIVES = "negatives-*.jsonl"  # of earlier runs in the same folder


def record_samples(trainer: Any, samples: Any, logs: dict[str, Any], source: str) -> None:
    """
    Appends samples of all processes to a completions table and, with `save_negatives`, the bad ones to the negative data.

    Columns that reward functions logged for these samples are flushed; [`record_advantages`] adds advantages later. `source` is the
    model that drew them, `"policy"` or `"proposal"`.
    """
    real = trainer._real_rows(len(samples.prompts))
    prompts, completions = gather_object(samples.prompts)[:real], gather_object(samples.completions)[:real]
    logs["prompt"].extend(prompts)
    logs["completion"].extend(completions)
    for name, column in zip(trainer.reward_func_names, samples.rewards_per_func.T, strict=True):
        logs["rewards"][name].extend(column[:real].tolist())
    logs["advantages"].extend([math.nan] * len(prompts))

    pending = trainer._pending_extra_logs  # a column of the same name that a reward function logged stays
    if len(trainer.reward_func_names) > 1:
        pending.setdefault("reward", samples.rewards.tolist())
    if trainer.transforms_rewards:
        pending.setdefault("reward_transformed", trainer._transform(samples.rewards).tolist())

    # Sorted, so that all processes gather the same column at the same time
    for column in sorted(set(gather_object(list(pending)))):
        values = pending.get(column, [None] * len(samples.prompts))
        logs["extra"][column].extend(gather_object(values)[:real])
    pending.clear()

    if trainer.args.save_negatives and trainer.model.training:
        append_negatives(trainer, source, prompts, completions, trainer.accelerator.gather(samples.rewards))


def set_negatives_aside(output_dir: str) -> None:
    """Renames negative data of an earlier run, with a warning; for the main process alone."""
    path = Path(output_dir) / NEGATIVES
    if not path.is_file() or not path.stat().st_size:
        return
    numbered = (path.with_stem(f"{path.stem}-{number}") for number in itertools.count(1))
    aside = next(each for each in numbered if not each.exists())
    path.rename(aside)
    logger.warning(
        "%s is of an earlier run and is now %s: this run writes its own. To resume the earlier run, first move it back.",
        *(path, aside),
    )


def append_negatives(trainer: Any, source: str, prompts: list, completions: list, rewards: torch.Tensor) -> None:
    """
    Appends the bad ones among completions of all processes to the negative data, in the main process, with transformed rewards if there
    are any. `rewards` (B_all,) may hold NaN, which is not bad.
    """
    if not trainer.accelerator.is_main_process:
        return
    rows = zip(prompts, completions, rewards.tolist(), trainer._transform(rewards).tolist(), strict=True)
    path = Path(trainer.args.output_dir) / NEGATIVES
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        for prompt, completion, reward, transformed in rows:
            if reward < trainer.args.bad_reward_threshold:  # False for NaN
                row = {"step": trainer.state.global_step, "source": source}
                row |= {"prompt": prompt, "completion": completion, "reward": reward}
                if trainer.transforms_rewards:
                    row["reward_transformed"] = transformed
                file.write(json.dumps(row, ensure_ascii=False) + "\n")


def record_advantages(trainer: Any, rows: torch.Tensor, advantages: torch.Tensor, local: int) -> None:
    """
    Adds the latest generation batch's advantages to the policy's completions table. `rows` are the indices of the samples among the
    `local` rows of the batch in this process, in the shape of `advantages`.
    """
    if not trainer.log_completions:
        return
    rows = trainer.accelerator.gather(rows.flatten()).view(trainer.accelerator.num_processes, -1)
    advantages = trainer.accelerator.gather(advantages.flatten()).view_as(rows)
    column = trainer._logs["advantages"]
    start = len(column) - trainer._real_rows(local)
    for process in range(trainer.accelerator.num_processes):
        for row, advantage in zip(rows[process].tolist(), advantages[process].tolist(), strict=True):
            place = start + process * local + row
            if 0 <= place < len(column):  # a batch of evaluation can be longer than what is kept, or filled up
                column[place] = advantage


def show_completions(trainer: Any, logs: dict[str, Any], name: str) -> None:
    """Prints a completions table and logs it as `name` to wandb and trackio if the run reports to them, as TRL does."""
    if not (trainer.accelerator.is_main_process and trainer.log_completions) or not logs["prompt"]:
        return
    step = trainer.state.global_step
    if is_rich_available():
        extra = {"model": [name.split("_")[0]] * len(logs["prompt"]), **logs["extra"]}
        shown = logs["prompt"], logs["completion"], logs["rewards"], None, step, trainer.num_completions_to_print
        print_prompt_completions_sample(*shown, extra=extra)
    columns = {"prompt": logs["prompt"], "completion": logs["completion"], **logs["rewards"], **logs["extra"]}
    table = pd.DataFrame({"step": [step] * len(logs["prompt"]), **columns})
    if trainer.log_unique_prompts:
        table = table[~table["prompt"].astype(str).duplicated()]
    report_to = trainer.args.report_to or []
    if "wandb" in report_to and is_wandb_available():
        import wandb

        if wandb.run is not None:
            wandb.log({name: wandb.Table(dataframe=table)})
    if "trackio" in report_to and is_trackio_available():
        import trackio

        trackio.log({name: trackio.Table(dataframe=table)})
