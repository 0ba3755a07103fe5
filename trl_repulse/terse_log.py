"""The log of a training run in one line of plain words, in place of the dictionary that `Trainer` prints."""

import re
from typing import Any

from tqdm import tqdm
from transformers import (
    PrinterCallback,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from ._numbers import kl_per_completion, percent, plain


# Metric -> how it is printed
_WORDS = {
    "reward": "reward {}",
    "bad_fraction": "bad {} %",
    "kl": "KL {} nats/completion",
    "entropy": "entropy {} nats/token",
    "completions/mean_length": "length {} tokens",
    "proposal/reward": "proposal reward {}",
    "proposal/bad_fraction": "proposal bad {} %",
    "proposal/ess": "ESS {} samples",
    "negative/ess": "ESS {} samples",
    "value/explained_variance": "explained variance {}",
    "step_time": "{} s/update",
}


def format_logs(logs: dict[str, Any], update: int, updates: int) -> str:
    """
    The main metrics of one log in a line, with their units.

    Args:
        logs (`dict`):
            What a trainer logs, of training or of an evaluation, whose names begin with `eval_` or with that and a set's name.
        update (`int`):
            Updates made.
        updates (`int`):
            Updates of the whole run.

    Returns:
        `str`: The line; empty if the log has no reward, as the summary at the end of training.
    """
    prefixes = [name.removesuffix("reward") for name in logs if re.fullmatch(r"(eval_(.+_)?)?reward", name)]
    if not prefixes:
        return ""
    prefix = min(prefixes, key=len)  # a function may log a metric that ends in `_reward`
    values = {name: logs.get(prefix + name) for name in _WORDS} | {"kl": kl_per_completion(logs, prefix)}
    parts = [
        _WORDS[name].format(percent(value) if name.endswith("bad_fraction") else plain(value, 3))
        for name, value in values.items()
        if value is not None
    ]
    evaluated = prefix.removeprefix("eval_").removesuffix("_")
    where = f"evaluation{f' of {evaluated}' * bool(evaluated)} at " if prefix else ""
    return " | ".join([f"{where}update {update}/{updates}", *parts])


class TerseLogCallback(TrainerCallback):
    """
    Prints a line at each log, in the main process. What goes to trackers and to `trainer_state.json` stays as it is.

    Example:

    ```python
    >>> trainer.remove_callback(PrinterCallback)
    >>> trainer.add_callback(TerseLogCallback)
    ```
    """

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        line = format_logs(logs or {}, state.global_step, state.max_steps)
        if state.is_world_process_zero and line:
            tqdm.write(line)  # above a progress bar, if there is one


class TerseProgressCallback(TerseLogCallback, ProgressCallback):
    """As [`TerseLogCallback`], with the progress bars of [`~transformers.ProgressCallback`], whose place it takes."""


def use_terse_log(trainer: Trainer) -> None:
    """
    Replaces the callback that prints a trainer's logs; the progress bar stays if there is one.

    Args:
        trainer ([`~transformers.Trainer`]):
            Trainer that has not started.
    """
    plain = trainer.args.disable_tqdm
    trainer.remove_callback(PrinterCallback if plain else ProgressCallback)
    trainer.add_callback(TerseLogCallback if plain else TerseProgressCallback)
