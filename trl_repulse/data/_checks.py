"""Checks of arguments and data sets, with one message that names what is wrong and the remedy. All raise `ValueError`."""

import math
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import is_peft_model
from datasets import Dataset, IterableDataset
from transformers import PretrainedConfig

from ..models._model_checks import check_forward_pass, check_token_ids
from ._prompts import check_conversations, conversations
from ._tables import ExactJson, from_columns


# Names that TRL (1.16) passes to all reward functions, besides the data set's columns
ALWAYS_PASSED = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
_PLAIN_ROWS = "`dataset.with_format(None)`, whose rows are dictionaries"


def check_arguments(config_cls: type, args: Any, **models: Any) -> None:
    """Refuses a configuration of another trainer, and path objects passed as models."""
    if args is not None and not isinstance(args, config_cls):
        raise ValueError(f"`args` is of the class {type(args).__name__}; pass a `{config_cls.__name__}`.")
    for name, model in models.items():
        if isinstance(model, Path):
            raise ValueError(f"`{name}` is a path object; pass the path as text, `{str(model)!r}`.")


def check_reward_funcs(reward_funcs: Any) -> None:
    """Refuses training without a reward."""
    if reward_funcs is None or (isinstance(reward_funcs, list | tuple) and not reward_funcs):
        raise ValueError(f"`reward_funcs={reward_funcs!r}` gives no reward; pass a function or a reward model.")


def check_dataset(dataset: Dataset | IterableDataset | None, name: str) -> None:
    """Refuses what is no data set, several splits, rows that are tables, no rows, no `"prompt"` column, images, and columns that
    [`check_column_names`] refuses. `None` passes."""
    if dataset is None:
        return
    if isinstance(dataset, Mapping):
        splits = ", ".join(map(repr, dataset))[:60]
        raise ValueError(f"`{name}` has several parts ({splits}); pass one of them, such as `dataset['train']`.")
    if not isinstance(dataset, Dataset | IterableDataset):
        raise ValueError(
            f"`{name}` is a {type(dataset).__name__} and no data set; make one, e.g. with `datasets.Dataset.from_list(rows)`."
        )
    if isinstance(dataset, Dataset) and dataset.format["type"] in ("arrow", "pandas", "polars"):
        raise ValueError(f"The rows of `{name}` are tables ({dataset.format['type']}); pass {_PLAIN_ROWS}.")
    if isinstance(dataset, Dataset) and len(dataset) == 0:
        raise ValueError(f"`{name}` is empty; give it at least one row with a `prompt`.")
    columns = dataset.column_names
    if columns is None:  # a stream with unknown columns
        return
    if "prompt" not in columns:
        raise ValueError(
            f"`{name}` has no column `prompt`, only {', '.join(columns) or 'no columns'}; load the data with `load_prompts(column=...)`, "
            "naming the one that holds the prompts, or rename that one with `dataset.rename_column(..., 'prompt')`."
        )
    check_column_names(columns, f"`{name}`")
    for column in {"image", "images"} & set(columns):
        raise ValueError(f"`{name}` has a column `{column}`, but only text prompts are supported; remove the column.")


def check_column_names(columns: Iterable[str], name: str) -> None:
    """Refuses columns whose names reward functions get with other values, and columns that would not be read."""
    for column in columns:
        if column in (*ALWAYS_PASSED, "environments", "self"):  # `self`: rewards may be objects
            raise ValueError(
                f"{name} has a column `{column}`, and reward functions get something else by that name; rename or remove it."
            )
        if column == "chat_template_kwargs":
            raise ValueError(
                f"{name} has a column `chat_template_kwargs`, which is not read; remove it, and set the configuration's field."
            )


def check_rows(rows: Sequence[Mapping[str, Any]], features: Mapping[str, Any] | None = None) -> None:
    """Refuses rows of a batch without a prompt of text or messages; `features` are the data set's column types, if known."""
    for row in rows:
        if not isinstance(row, Mapping):
            raise ValueError(f"The data set's rows are of the class {type(row).__name__}; pass {_PLAIN_ROWS}.")
        check_column_names(row, "The data set")
        if row.get("prompt") is None:
            raise ValueError(
                f"The data set has a row without a `prompt` (its columns: {', '.join(row) or 'none'}); rename the column "
                "that holds the prompts, or filter such rows out."
            )
    stored = not isinstance((features or {}).get("prompt"), ExactJson)
    check_conversations((row["prompt"] for row in rows), "a batch of the data set", stored)


@dataclass
class CheckedRows:
    """Data collator that returns rows as they are, and refuses those without a usable prompt."""

    features: Any  # the data set's column types, if they are known

    def __call__(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        check_rows(rows, self.features)
        return rows


def as_dataset(prompts: Dataset | Sequence[Any]) -> Dataset:
    """A data set of prompts. Refuses a single text, rows of a data set, what is no prompt, and what [`check_dataset`] refuses."""
    if isinstance(prompts, str | Path):
        raise ValueError(f"`prompts` is the text {str(prompts)[:60]!r}; pass a list, or `load_prompts` of a file.")
    if hasattr(prompts, "columns"):
        raise ValueError(
            f"`prompts` is a table ({type(prompts).__name__}); pass `Dataset.from_pandas(...)` of it, or its column of prompts."
        )
    if not isinstance(prompts, Dataset | Mapping):
        prompts = prompts if isinstance(prompts, IterableDataset) else list(prompts)
        if any(isinstance(prompt, Mapping) for prompt in prompts):
            raise ValueError("`prompts` holds rows of a data set; pass `Dataset.from_list(...)` of them.")
        check_conversations(prompts, "`prompts`")  # before Arrow, whose errors name no row
        prompts = from_columns({"prompt": prompts})
    check_dataset(prompts, "prompts")
    if prompts.format["type"] not in (None, "custom"):
        shown = prompts.format["columns"], prompts.format["output_all_columns"]
        prompts = prompts.with_format(None, *shown)  # rewards get lists, as in training
    _check_conversations(prompts, "prompts")
    return prompts


def check_dataset_size(rows: int, prompts_per_batch: int) -> None:
    """Refuses a training set with fewer rows than one generation batch, which TRL would drop, training nothing."""
    if rows < prompts_per_batch:
        raise ValueError(
            f"`train_dataset` has {rows} prompts, but one batch of generations takes {prompts_per_batch} "
            "(`generation_batch_size` / `num_generations`), so nothing would be trained; use smaller batches, more "
            "generations, or repeat the prompts with `dataset.repeat`."
        )


def check_datasets(
    train_dataset: Dataset | IterableDataset | None,
    eval_dataset: Dataset | IterableDataset | dict[str, Any] | None,
    prompts_per_batch: int,
) -> None:
    """Checks a trainer's data sets, and the size of the training set; `prompts_per_batch` is of one generation batch over all processes."""
    datasets = by_name(train_dataset, eval_dataset)
    for name, dataset in datasets.items():
        check_dataset(dataset, name)
    if isinstance(train_dataset, Dataset):
        check_dataset_size(len(train_dataset), prompts_per_batch)
    for name, dataset in datasets.items():
        _check_conversations(dataset, name)


def by_name(train_dataset: Any, eval_dataset: Any) -> dict[str, Any]:
    """A trainer's data sets by their names in messages."""
    evals = eval_dataset if isinstance(eval_dataset, dict) else {"eval_dataset": eval_dataset}
    return {"train_dataset": train_dataset, **evals}


def _check_conversations(dataset: Dataset | IterableDataset | None, name: str) -> None:
    """Refuses rows whose prompt is `None`, and what [`check_conversations`] refuses."""
    if not isinstance(dataset, Dataset):
        return
    if dataset.data.column("prompt").null_count:  # also of rows that were not selected
        for row, prompt in enumerate(dataset.with_format(None)["prompt"], 1):
            if prompt is None:
                raise ValueError(f"Row {row} of `{name}` has no `prompt`; drop such rows, e.g. with `dataset.filter`.")
    stored = not isinstance(dataset.features["prompt"], ExactJson)
    check_conversations(conversations(dataset), f"`{name}`", stored)


def check_output_dir(args: Any) -> None:
    """Refuses an `output_dir` that is a file or not writable. No folder is made."""
    path = Path(args.output_dir)
    if path.is_file():
        raise ValueError(f"`output_dir={args.output_dir!r}` is a file; name a folder, which may be new.")
    nearest = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    try:
        tempfile.TemporaryFile(dir=nearest).close()
    except OSError as error:
        raise ValueError(
            f"`output_dir={args.output_dir!r}` cannot be written ({nearest}: {error.strerror}); name another folder."
        ) from error


def check_eval_batch(args: Any) -> None:
    """Refuses an evaluation batch that would split a prompt's completions."""
    size = args.per_device_eval_batch_size * args.world_size
    generations = args.num_generations_eval or args.num_generations
    if size % generations:
        raise ValueError(
            f"`per_device_eval_batch_size={args.per_device_eval_batch_size}` on {args.world_size} processes is no multiple "
            f"of the {generations} completions of each prompt in evaluation; change it, or `num_generations_eval`."
        )


def check_best_metric(args: Any, eval_dataset: Any) -> None:
    """Refuses, before training, a `metric_for_best_model` that belongs to none of several evaluation sets, or needs a threshold."""
    best = args.metric_for_best_model
    known = args.bad_reward_threshold is not None or getattr(args, "draws_hot", False)  # the hot policy measures it
    if best is not None and best.endswith("bad_fraction") and not known:
        raise ValueError(
            f"`metric_for_best_model={best!r}` needs `bad_reward_threshold`, the reward below which a completion is bad."
        )
    if best is None or not isinstance(eval_dataset, dict):
        return
    if not best.removeprefix("eval_").startswith(tuple(f"{name}_" for name in eval_dataset)):
        raise ValueError(
            f"`metric_for_best_model={best!r}` is of none of the evaluation sets; begin it with 'eval_{next(iter(eval_dataset), 'NAME')}_'."
        )


def check_adapters(model: Any, *configs: Any, beta: float = 0.0) -> None:
    """Refuses adapters with a forward pass of their own, folders of an adapter alone and, with `beta`, what gives TRL another reference."""
    if isinstance(model, str) and (Path(model) / "adapter_config.json").is_file():
        if not (Path(model) / "config.json").is_file():
            raise ValueError(
                f"`model={model!r}` is the folder of an adapter, without its base; pass `PeftModel.from_pretrained(base, "
                f"{model!r}, is_trainable=True)`, with the base model as `base`, or merge the two with `merge_and_unload`."
            )
    copied = beta and not isinstance(model, str) and is_peft_model(model)  # TRL (1.16) copies "default" to "ref"
    if copied and (model.active_adapters != ["default"] or "ref" in model.peft_config):
        raise ValueError(
            f"The policy's adapter is named {', '.join(model.active_adapters)!r}, of {', '.join(map(repr, model.peft_config))}; for a KL "
            "penalty load it under PEFT's name, 'default', and drop an earlier trainer's with `model.delete_adapter('ref')`."
        )
    for config in (*getattr(model, "peft_config", {}).values(), *configs):
        if config is not None:
            check_forward_pass(config, refused=("ADALORA",))


def check_prompt_lengths(
    prompt_ids: list[list[int]],
    prompts: list[Any],
    config: PretrainedConfig,
    max_completion_length: int,
    max_length: int | None = None,
    max_length_name: str = "`vllm_max_model_length`",
) -> None:
    """Refuses prompts without tokens, with unknown tokens, or that leave no room in the context for `max_completion_length` tokens; also
    batches that longrope would read with two sets of factors. `max_length` is a limit below the model's."""
    if not all(prompt_ids):
        place = next(place for place, ids in enumerate(prompt_ids) if not ids)
        raise ValueError(
            f"Prompt {place}, {str(prompts[place])[:60]!r}, has no tokens for a completion to follow; drop it."
        )
    check_token_ids(prompt_ids, config, prompts)
    _check_rotary_factors([len(ids) for ids in prompt_ids], config, max_completion_length)
    context, name = getattr(config.get_text_config(), "max_position_embeddings", None), "the model's context"
    if max_length is not None and (context is None or max_length < context):
        context, name = max_length, max_length_name
    for ids, prompt in zip(prompt_ids, prompts, strict=True):
        if context is not None and len(ids) + max_completion_length > context:
            raise ValueError(
                f"A prompt of {len(ids)} tokens and `max_completion_length={max_completion_length}` exceed "
                f"{name} of {context} tokens; shorten or drop the prompt that begins {str(prompt)[:60]!r}."
            )


def fitting_prompts(
    config: PretrainedConfig, max_completion_length: int, max_length: int | None = None
) -> tuple[float, float]:
    """Up to how many tokens a prompt may have, and under which number its tokens must be, for [`check_prompt_lengths`] to pass whatever else
    is in the batch; 0 tokens where it depends on the batch."""
    text_config = config.get_text_config()
    lengths = (getattr(text_config, "max_position_embeddings", None), max_length)
    context = min((length for length in lengths if length is not None), default=math.inf)
    return 0 if _longrope(config) else context - max_completion_length, text_config.vocab_size


def check_rewards(rewards_per_func: torch.Tensor, names: list[str], are_models: list[bool]) -> None:
    """Refuses rewards of models that are not finite. Those of functions have been checked, and NaN stands for `None`. `rewards_per_func`
    has shape (B, F), one column for each of F reward functions."""
    refused = ~rewards_per_func.isfinite() & torch.tensor(are_models, device=rewards_per_func.device)
    if refused.any():
        row, column = refused.nonzero()[0].tolist()
        value = rewards_per_func[row, column].item()
        raise ValueError(
            f"The reward model '{names[column]}' returned {value} for a completion; check its weights and precision."
        )


def _longrope(config: PretrainedConfig) -> list[dict[str, Any]]:
    """Parameters of longrope, of the model or of each kind of layer that has it."""
    parameters = getattr(config.get_text_config(), "rope_parameters", None) or {}
    each_kind = [value for value in (parameters, *parameters.values()) if isinstance(value, dict)]
    return [value for value in each_kind if value.get("rope_type") == "longrope"]


def _check_rotary_factors(lengths: list[int], config: PretrainedConfig, max_completion_length: int) -> None:
    """Refuses lengths on both sides of the limit at which longrope changes its factors for a whole batch."""
    for parameters in _longrope(config):
        original = parameters["original_max_position_embeddings"]
        if min(lengths) <= original < max(lengths) + max_completion_length:
            raise ValueError(
                f"The model reads a whole batch otherwise once a row of it has more than {original} tokens (longrope), so that "
                f"samples would not be scored as they were drawn: prompts have {min(lengths)} to {max(lengths)} tokens and "
                f"`max_completion_length={max_completion_length}`. Keep both together within {original} tokens (shorter prompts, a "
                f"lower `max_completion_length`), or use only prompts of more than {original}."
            )
