"""Held-out sampling: draws, rewards and scores completions, and writes them to a folder.

Legend: P prompts, N completions per prompt, F reward functions.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from datasets import Dataset
from torch import nn
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from ..configs._checks import check_choices, require, require_at_least, require_finite
from ..data._checks import as_dataset, check_prompt_lengths
from ..data._prompts import check_template_variables, render, rendering_hash, warn_of_template
from ..data._texts import completion_texts
from ..generation._probe import Guard, probe_shared
from ..generation.completions import tokenize
from ..models._loading import check_reference, load_model, load_tokenizer
from ..models._model_checks import check_causal
from . import records
from ._generation import (
    EngineName,
    Prompt,
    as_function,
    check_columns,
    check_dtype,
    check_template_kwargs,
    end_tokens,
    evaluate_rewards,
    process_state,
    transformers_engine,
    vllm_engine,
    vllm_version,
)
from ._identity import identify_model, identify_reward, warn_of_names
from .log_probs import completion_log_probs


Reward = str | nn.Module | Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class SamplingSettings:
    """
    Settings of held-out sampling. Raises `ValueError` if a value is out of range.

    Args:
        num_samples (`int`, *optional*, defaults to `16`): N, completions of each prompt.
        max_completion_length (`int`, *optional*, defaults to `256`): Tokens of a completion.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the draws. Each shard has its own seed, made of this one, its number and the model's weights.
        batch_size (`int`, *optional*, defaults to `32`): Completions of one pass.
        shard_size (`int`, *optional*, defaults to `256`):
            Completions written at a time, and lost at most when a run is killed; a pass has no more.
        beta (`float`, *optional*, defaults to `0.0`):
            KL coefficient of the returns, in units of reward per nat. Needs a reference model unless 0.
        reward_weights (`tuple[float, ...]`, *optional*): Weights of the F reward functions in `reward`, by default 1 each.
        dtype (`str`, *optional*, defaults to `"auto"`): Precision of models that are loaded by name.
        revision (`str`, *optional*): Revision of the model on the Hub.
        engine (`str`, *optional*, defaults to `"transformers"`):
            `"transformers"`, or `"vllm"`, whose draws can be repeated only on the same machine.
        chat_template_kwargs (`dict`, *optional*):
            Variables for the chat template, as in TRL's configurations; also for reward models given by path.
    """

    num_samples: int = 16
    max_completion_length: int = 256
    seed: int = 0
    batch_size: int = 32
    shard_size: int = 256
    beta: float = 0.0
    reward_weights: tuple[float, ...] | None = None
    dtype: str = "auto"
    revision: str | None = None
    engine: EngineName = "transformers"
    chat_template_kwargs: dict[str, Any] | None = None

    def __post_init__(self):
        check_template_variables(self.chat_template_kwargs, ("tools",))
        require_at_least(self, 1, "num_samples", "max_completion_length", "batch_size", "shard_size")
        check_choices(self)
        require_finite(self, "beta")
        require(self, all(map(math.isfinite, self.reward_weights or ())), "reward_weights", "must be finite numbers")
        require_at_least(self, 0, "seed")
        check_dtype(self.dtype)


def check_early(
    folder: Path, settings: SamplingSettings, rewards: int, engine_kwargs: dict[str, Any] | None = None
) -> None:
    """Checks arguments before any model is loaded: the folder holds nothing else, each reward has a weight, and no engine
    argument is one that sampling sets itself. Raises `ValueError` otherwise."""
    records.check_folder(folder)
    if settings.reward_weights is not None and len(settings.reward_weights) != rewards:
        raise ValueError(f"`reward_weights` has {len(settings.reward_weights)} weights for {rewards} rewards.")
    for name in ("model", "dtype", "revision", "generation_config"):
        if name in (engine_kwargs or {}):
            raise ValueError(f"`engine_kwargs` has `{name}`, which sampling itself sets; leave it out.")


def sample_completions(
    output_dir: str | Path,
    model: str | PreTrainedModel,
    prompts: Dataset | Sequence[Prompt],
    reward_funcs: Reward | Sequence[Reward],
    settings: SamplingSettings | None = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    reference: str | PreTrainedModel | None = None,
    reward_processing_classes: Sequence[PreTrainedTokenizerBase | None] | None = None,
    engine_kwargs: dict[str, Any] | None = None,
    trust_remote_code: bool = False,
    progress: bool = True,
) -> records.SampleSet:
    """
    Draws N completions of each prompt, rewards and scores them, and writes them to a folder. Called again after a kill, it continues.

    Sampling is at temperature 1 from all tokens, whatever the model's generation configuration. Log-probabilities come from separate passes
    over the finished completions. Each shard has its own seed and is written as a whole, so that the files do not depend on interruptions
    or on the number of processes, which share the shards under `accelerate launch`.

    The rows, prompt by prompt, have these columns: `prompt_index`, `sample_index`, `prompt` (as the model reads it),
    `messages` (JSON, of conversations), `prompt_ids`, `completion` (without special tokens), `completion_ids`, `length`, `ended` (whether by an end token),
    `log_prob` and `entropy` (in nats, see [`~trl_repulse.evaluation.log_probs.completion_log_probs`]), `rewards/NAME`
    for each reward function, `reward` (their weighted sum, missing if no function gave one) and `return` (reward −
    beta·kl). With a reference, also `log_prob_reference` and `kl` (log p − log p_0 of the sample, can be negative).

    Args:
        output_dir (`str` or `Path`): Folder to write to: new, empty, or begun by the same call.
        model, reference (`str` or [`~transformers.PreTrainedModel`]):
            Model to sample from, and optionally one for `kl`, or their paths or Hub ids.
        prompts ([`~datasets.Dataset`] or `Sequence`):
            The P prompts: plain text, messages, or rows with a `"prompt"`, whose other columns reach the reward functions.
        reward_funcs, reward_processing_classes: Rewards and their tokenizers, as TRL's trainers take them.
        settings ([`SamplingSettings`], *optional*): Settings.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`], *optional*): By default loaded from the model's place.
        engine_kwargs (`dict`, *optional*):
            Further arguments of `vllm.LLM`, such as `gpu_memory_utilization`: the model that scores needs memory too.
        trust_remote_code (`bool`, *optional*, defaults to `False`): Whether to run Python code of models loaded by name.
        progress (`bool`, *optional*, defaults to `True`): Whether to show a progress bar.

    Raises:
        `ValueError`: If prompts are empty, too long or without a chat template, a reward is not finite, arguments contradict
            each other, the folder holds something else, or a model is not causal.

    Example:

    ```python
    >>> settings = SamplingSettings(num_samples=64, max_completion_length=128)
    >>> samples = sample_completions("samples", "out", ["The weather is"], "reward_model", settings, reference="gpt2")
    >>> samples.column("kl").mean()
    ```
    """
    settings, folder, state = settings or SamplingSettings(), Path(output_dir).expanduser(), process_state()
    dataset = as_dataset(prompts)
    check_early(folder, settings, len(reward_funcs) if isinstance(reward_funcs, list | tuple) else 1, engine_kwargs)
    check_template_kwargs(dataset[:1]["prompt"], settings.chat_template_kwargs)
    _check_models(model, reference, settings, state.num_processes)
    engine_kwargs, code = engine_kwargs or {}, {"trust_remote_code": trust_remote_code}
    name = model if isinstance(model, str) else model.config._name_or_path
    tokenizer = tokenizer or load_tokenizer(name, "model", revision=settings.revision, **code)
    rows = dataset["prompt"][:]
    prompt_ids = tokenize(tokenizer, rows, settings.chat_template_kwargs)  # fails without a chat template
    model = _load(model, "model", settings.dtype, settings.revision, state.device, **code)
    if settings.engine == "vllm" and getattr(model, "_hf_peft_config_loaded", False):
        raise ValueError(
            f"`{name}` is an adapter, and `engine='vllm'` takes whole weights; merge it with PEFT's `merge_and_unload`, or set "
            "`engine='transformers'`."
        )
    reference_name = reference if isinstance(reference, str) else None
    reference = _load(reference, "reference", settings.dtype, None, state.device, **code)
    given = reward_funcs, reward_processing_classes, settings, state.device, trust_remote_code, rows[0]
    functions = _functions(*given, {"completion_ids", *dataset.column_names} - {"prompt", "completion"})
    limit = engine_kwargs.get("max_model_len") if settings.engine == "vllm" else None
    check_prompt_lengths(
        *(prompt_ids, rows, model.config, settings.max_completion_length),
        limit if isinstance(limit, int) and limit > 0 else None,  # vLLM also takes text, and -1 to find a length
        "`max_model_len` of `engine_kwargs`",
    )
    if reference is not None:
        check_reference(reference_name, reference, model, tokenizer, prompt_ids, trust_remote_code)
    end = sorted(end_tokens(model, tokenizer))
    header = {
        "model": identify_model(model, name),
        "reference": None if reference is None else identify_model(reference, reference_name),
        "rewards": {key: description for key, (_, description) in functions.items()},
        "prompts": {
            "name": dataset.info.dataset_name,  # that of `load_prompts`
            "count": len(dataset),
            "sha256": records.digest(list(dataset)),
            "token_ids_sha256": records.digest(prompt_ids),  # depend on tokenizer and chat template too
        },
        "settings": asdict(settings) | {"reward_weights": list(settings.reward_weights or [1.0] * len(functions))},
        "device": state.device.type,
        "versions": {name: version(name) for name in ("trl-repulse", "torch", "transformers")},
    }
    header["settings"]["end_token_ids"] = end
    if settings.engine == "vllm":
        # Without secrets, and without arguments that depend on the machine and change no sample
        irrelevant = ("hf_token", "gpu_memory_utilization")
        kept = {key: value for key, value in engine_kwargs.items() if key not in irrelevant}
        header["settings"]["engine_kwargs"] = records.plain_json(kept)
        header["versions"]["vllm"] = vllm_version()
    with state.main_process_first():
        begun = records.open_folder(folder, header)

    total = len(rows) * settings.num_samples
    shards = -(-total // settings.shard_size)
    mine = range(state.process_index, shards, state.num_processes)
    sizes = {number: min(settings.shard_size, total - number * settings.shard_size) for number in mine}
    missing = {number: size for number, size in sizes.items() if not records.has_shard(folder, number, size)}
    if missing and begun:
        warn_of_names(folder, header["rewards"])
    done, hidden = sum(sizes.values()) - sum(missing.values()), not (progress and state.is_main_process)
    bar = tqdm(total=sum(sizes.values()), initial=done, disable=hidden, unit="completion", desc="sampling")
    draws = settings.engine == "transformers"
    read = [each for each in (model, reference) if missing and each is not None]
    guards = [probe_shared(each, draws and each is model) for each in read]
    if missing and not draws:
        dtype = str(model.dtype).removeprefix("torch.")  # by default vLLM turns float32 into half precision
        options = (settings.max_completion_length, dtype, settings.revision)
        engine = vllm_engine(name, end, *options, **(code if trust_remote_code else {}) | engine_kwargs)
    elif missing:
        options = (settings.max_completion_length, settings.batch_size)
        engine = transformers_engine(model, tokenizer, *options, on_drawn=bar.update, guard=guards[0])
    with bar:
        for number, size in missing.items():
            start = number * settings.shard_size
            places = [divmod(place, settings.num_samples) for place in range(start, start + size)]
            ids = [prompt_ids[prompt] for prompt, _ in places]
            bar.set_description("sampling")
            completions = engine(ids, _shard_seed(settings, number, header["model"]["weights"]))
            bar.update(done + size - bar.n)  # vLLM draws all at once
            done += size
            bar.set_description("scoring")
            table = _shard_table(
                dataset, tokenizer, model, reference, settings, functions, places, ids, completions, guards
            )
            records.write_shard(folder, number, table)
    state.wait_for_everyone()
    if state.is_main_process and not (folder / records.COMPLETE).is_file():
        records.close_folder(folder, shards)
    state.wait_for_everyone()
    return records.load_samples(folder)


def _check_models(model: Any, reference: Any, settings: SamplingSettings, processes: int) -> None:
    """Refuses settings that do not fit the models as they were passed."""
    if settings.beta and reference is None:
        raise ValueError(f"`beta={settings.beta}` needs a `reference` model to measure the KL against.")
    if settings.engine == "vllm" and not isinstance(model, str):
        raise ValueError("`engine='vllm'` loads the model itself; pass its path or Hub id as `model`.")
    if settings.engine == "vllm" and processes > 1:
        raise ValueError("`engine='vllm'` runs in one process; give it several devices with `tensor_parallel_size`.")
    if settings.revision is not None and isinstance(model, str) and Path(model).is_dir():
        raise ValueError(
            f"`revision={settings.revision!r}` is of a model on the Hub, and `{model}` is a folder; leave it out."
        )


def _shard_seed(settings: SamplingSettings, number: int, weights: str) -> int:
    """Seed of a shard. It depends on the weights, as models that share random numbers would not be independent runs."""
    words = np.random.SeedSequence([settings.seed, number, int(weights[:16], 16)]).generate_state(4)
    if settings.engine == "transformers":
        return int(words[0])
    # vLLM's requests get seeds made from this one: with 32 bits many shards would share some
    return sum(int(word) << 32 * i for i, word in enumerate(words))


def _shard_table(
    dataset: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    model: PreTrainedModel,
    reference: PreTrainedModel | None,
    settings: SamplingSettings,
    functions: dict[str, tuple[Callable[..., Any], Any]],
    places: list[tuple[int, int]],
    prompt_ids: list[list[int]],
    completion_ids: list[list[int]],
    guards: list[Guard],
) -> pa.Table:
    """The table of one shard of B completions, which it rewards and scores. `functions` are as [`_functions`] returns them, `places` pairs of
    prompt and sample, and `guards` those of the model and the reference."""
    chosen = dataset[[prompt for prompt, _ in places]]
    prompts = chosen.pop("prompt")
    texts = completion_texts(tokenizer, prompts, prompt_ids, completion_ids)
    template, end = settings.chat_template_kwargs, end_tokens(model, tokenizer)
    as_read = [each if isinstance(each, str) else render(tokenizer, each, "A prompt", template) for each in prompts]
    drawn = prompt_ids, completion_ids, settings.batch_size
    log_prob, entropy = completion_log_probs(model, *drawn, guard=guards[0])
    rewards = evaluate_rewards(
        {name: function for name, (function, _) in functions.items()},
        *(prompts, texts, completion_ids, chosen, settings.batch_size),
    )
    with_nan = [[torch.nan if value is None else value for value in values] for values in rewards.values()]
    per_function = torch.tensor(with_nan, dtype=torch.float64)  # (F, B)
    weights = torch.tensor(settings.reward_weights or [1.0] * len(functions), dtype=torch.float64)
    reward = (per_function * weights[:, None]).nansum(dim=0)
    reward[per_function.isnan().all(dim=0)] = torch.nan
    columns: dict[str, Any] = {
        "prompt_index": pa.array([prompt for prompt, _ in places], pa.int32()),
        "sample_index": pa.array([sample for _, sample in places], pa.int32()),
        "prompt": pa.array(as_read, pa.string()),
        "prompt_ids": pa.array(prompt_ids, pa.list_(pa.int32())),
        "completion": pa.array(texts, pa.string()),
        "completion_ids": pa.array(completion_ids, pa.list_(pa.int32())),
        "length": pa.array([len(ids) for ids in completion_ids], pa.int32()),
        "ended": pa.array([bool(ids) and ids[-1] in end for ids in completion_ids], pa.bool_()),
        "log_prob": _numbers(log_prob),
        "entropy": _numbers(entropy),
    }
    columns |= {f"rewards/{name}": _numbers(row) for name, row in zip(functions, per_function, strict=True)}
    if not isinstance(prompts[0], str):
        columns["messages"] = pa.array([json.dumps(prompt, ensure_ascii=False) for prompt in prompts], pa.string())
    kl = torch.zeros_like(reward)
    if reference is not None:
        log_prob_reference, _ = completion_log_probs(reference, *drawn, guard=guards[1])
        kl = log_prob - log_prob_reference
        columns |= {"log_prob_reference": _numbers(log_prob_reference), "kl": _numbers(kl)}
    penalty = settings.beta * kl if settings.beta else torch.zeros_like(kl)  # 0 times an infinite KL would be NaN
    return pa.table(columns | {"reward": _numbers(reward), "return": _numbers(reward - penalty)})


def _numbers(values: torch.Tensor) -> pa.Array:
    """A column of float64; NaN, which marks a missing reward, becomes null."""
    return pa.array(values.numpy(), pa.float64(), from_pandas=True)


def _load(model: Any, part: str, dtype: str, revision: str | None, device: torch.device, **code: bool) -> Any:
    """A model that was passed, or the one of that name; `None` as it is. Raises `ValueError` about `part` if it is not causal."""
    if isinstance(model, str):
        model = load_model(AutoModelForCausalLM, model, part, dtype=dtype, revision=revision, **code).to(device)
    if model is not None:
        check_causal(model, f"`{part}`")
    return model


def _functions(
    reward_funcs: Any,
    tokenizers: Sequence[Any] | None,
    settings: SamplingSettings,
    device: torch.device,
    trust_remote_code: bool,
    prompt: str | list[dict[str, Any]],
    columns: set[str],
) -> dict[str, tuple[Callable[..., list[float | None]], Any]]:
    """Reward functions by name, with their descriptions for the header. `prompt` is the first, and `columns` what they get beside prompts and
    completions. Raises `ValueError` if two have one name, or one needs another column."""
    rewards = list(reward_funcs) if isinstance(reward_funcs, list | tuple) else [reward_funcs]
    tokenizers = [None] * len(rewards) if tokenizers is None else tokenizers
    tokenizers = list(tokenizers) if isinstance(tokenizers, list | tuple) else [tokenizers]
    if not rewards or len(tokenizers) != len(rewards):
        raise ValueError(f"`reward_funcs` has {len(rewards)} rewards and {len(tokenizers)} tokenizers; give one each.")
    functions = {}
    for reward, tokenizer in zip(rewards, tokenizers, strict=True):
        description = identify_reward(reward)
        if isinstance(reward, str):
            tokenizer = tokenizer or load_tokenizer(reward, "reward model", trust_remote_code=trust_remote_code)
        name, function = as_function(reward, tokenizer, device, settings.chat_template_kwargs, trust_remote_code)
        check_columns(reward, name, columns, "but the prompts have no such column; add it, or give it a default")
        if isinstance(reward, str | nn.Module) and tokenizer is not None and not isinstance(prompt, str):
            warn_of_template(tokenizer, prompt, settings.chat_template_kwargs)
            answered = [*prompt, {"role": "assistant", "content": "An answer."}]
            where = f"A prompt with its completion, as the reward model '{name}' reads it,"
            description |= rendering_hash(render(tokenizer, answered, where, settings.chat_template_kwargs, False))
        if name in functions:
            raise ValueError(f"Two rewards have the name '{name}'; set the `__name__` or `name` of one.")
        functions[name] = (function, description)
    return functions
