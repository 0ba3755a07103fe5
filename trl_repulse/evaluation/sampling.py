"""
Held-out sampling: completions of a model with all that a reader may ask of them, written once.

Legend: P prompts, N completions per prompt, F reward functions.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import torch
from datasets import Dataset
from torch import nn
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from .._causal import check_causal
from .._checks import as_dataset, check_prompt_lengths
from .._loading import load_model, load_tokenizer
from .._prompts import check_template_variables, dated, warn_of_date
from .._texts import completion_texts
from .._vocabulary import check_reference
from ..rewards.transforms import transform_rewards
from . import _files
from ._generation import (
    EngineName,
    Prompt,
    as_function,
    check_dtype,
    check_template_kwargs,
    end_tokens,
    evaluate_rewards,
    process_state,
    prompt_text,
    prompt_tokens,
    transformers_engine,
    vllm_engine,
    vllm_version,
)
from ._identity import identify_model, identify_reward, known_by_name_alone, warn_of_name
from .log_probs import completion_log_probs
from .records import SampleSet, load_samples


Reward = str | nn.Module | Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class SamplingSettings:
    """
    Settings of held-out sampling.

    Args:
        num_samples (`int`, *optional*, defaults to `16`):
            N, completions of each prompt.
        max_completion_length (`int`, *optional*, defaults to `256`):
            Tokens of a completion.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the draws. Each shard draws with a seed of its own, made of this one, its number and the model's weights.
        batch_size (`int`, *optional*, defaults to `32`):
            Completions of one pass.
        shard_size (`int`, *optional*, defaults to `1024`):
            Completions written at a time: what a kill can cost.
        beta (`float`, *optional*, defaults to `0.0`):
            KL coefficient of the returns, in units of reward per nat. Not 0 needs a reference model.
        reward_weights (`tuple[float, ...]`, *optional*):
            Weights of the F reward functions in `reward`, by default 1 each.
        reward_transform (`str`, *optional*):
            Transform of `return_transformed`: `"exponential"` (r − a·exp(b·r)) or `"indicator"` (r − a·1[r < threshold]).
        reward_transform_alpha (`float`, *optional*, defaults to `1.0`):
            The transform's a.
        reward_transform_beta (`float`, *optional*, defaults to `-1.0`):
            The exponential transform's b, below 0.
        reward_transform_threshold (`float`, *optional*):
            The indicator transform's threshold, in units of reward.
        dtype (`str`, *optional*, defaults to `"auto"`):
            Precision of models that are loaded by name.
        revision (`str`, *optional*):
            Revision of the model on the Hub.
        engine (`str`, *optional*, defaults to `"transformers"`):
            What draws: `"transformers"`, or `"vllm"`, which draws the same completions again only on the same machine.
        chat_template_kwargs (`dict`, *optional*):
            Further variables of the chat template of prompts that are messages, as in TRL's configurations. Reward models
            given by path read messages with them too.

    Raises:
        `ValueError`: If a value is out of range.
    """

    num_samples: int = 16
    max_completion_length: int = 256
    seed: int = 0
    batch_size: int = 32
    shard_size: int = 1024
    beta: float = 0.0
    reward_weights: tuple[float, ...] | None = None
    reward_transform: Literal["exponential", "indicator"] | None = None
    reward_transform_alpha: float = 1.0
    reward_transform_beta: float = -1.0
    reward_transform_threshold: float | None = None
    dtype: str = "auto"
    revision: str | None = None
    engine: EngineName = "transformers"
    chat_template_kwargs: dict[str, Any] | None = None

    def __post_init__(self):
        check_template_variables(self.chat_template_kwargs, ("tools",))
        for name in ("num_samples", "max_completion_length", "batch_size", "shard_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}={getattr(self, name)}` must be at least 1.")
        numbers = ("beta", "reward_transform_alpha", "reward_transform_beta", "reward_transform_threshold")
        for name in numbers:
            if getattr(self, name) is not None and not math.isfinite(getattr(self, name)):
                raise ValueError(f"`{name}={getattr(self, name)}` must be a finite number.")
        if not all(map(math.isfinite, self.reward_weights or ())):
            raise ValueError(f"`reward_weights={self.reward_weights}` must be finite numbers.")
        if self.seed < 0:
            raise ValueError(f"`seed={self.seed}` must be at least 0.")
        if self.reward_transform not in (None, "exponential", "indicator"):
            raise ValueError(f"`reward_transform={self.reward_transform!r}` must be 'exponential' or 'indicator'.")
        if self.reward_transform == "indicator" and self.reward_transform_threshold is None:
            raise ValueError("`reward_transform='indicator'` needs `reward_transform_threshold`; set it to a reward.")
        check_dtype(self.dtype)
        if self.engine not in ("transformers", "vllm"):
            raise ValueError(f"`engine={self.engine!r}` must be 'transformers' or 'vllm'.")
        if not self.reward_transform_alpha >= 0:
            raise ValueError(f"`reward_transform_alpha={self.reward_transform_alpha}` must be at least 0.")
        if self.reward_transform == "exponential" and not self.reward_transform_beta < 0:
            raise ValueError(f"`reward_transform_beta={self.reward_transform_beta}` must be below 0.")


def check_early(
    folder: Path, settings: SamplingSettings, rewards: int, engine_kwargs: dict[str, Any] | None = None
) -> None:
    """
    Refuses what can be known to be wrong before any model is loaded.

    Args:
        folder (`Path`):
            Folder to write to.
        settings ([`SamplingSettings`]):
            The settings.
        rewards (`int`):
            Number of rewards.
        engine_kwargs (`dict`, *optional*):
            Further arguments of vLLM's engine.

    Raises:
        `ValueError`: If the folder holds something else, rewards and weights differ in number, or an engine argument is set by sampling itself.
    """
    _files.check_folder(folder)
    if settings.reward_weights is not None and len(settings.reward_weights) != rewards:
        raise ValueError(f"`reward_weights` has {len(settings.reward_weights)} weights for {rewards} rewards.")
    for name in ("model", "dtype", "revision", "generation_config"):
        if name in (engine_kwargs or {}):
            raise ValueError(
                f"`engine_kwargs` has `{name}`, which sampling itself sets; leave it out"
                + (f" and set `{name}`." if name != "generation_config" else ".")
            )


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
) -> SampleSet:
    """
    Draws N completions of each prompt, rewards and scores them, and writes them down; goes on where a kill stopped it.

    Sampling is pure: temperature 1, all tokens, whatever the model was saved with. Log-probabilities come from passes over
    the finished completions, never from generation. Each shard has a seed of its own and is written as a whole, so that the
    files do not depend on where a run was killed, nor on the number of processes: started with `accelerate launch`, every
    process draws some of the shards.

    The rows, prompt by prompt, have `prompt_index`, `sample_index`, `prompt` (as the model reads it), `prompt_ids`,
    `completion` (without special tokens, as it reads behind the prompt), `completion_ids`, `length`, `ended` (by an end token, and not at
    `max_completion_length`), `log_prob` and `entropy` (both in nats, as in
    [`~trl_repulse.evaluation.log_probs.completion_log_probs`]), `rewards/NAME` for each reward function, and `reward`, their
    weighted sum; with a reference `log_prob_reference` and `kl` (log p − log p_0, one sample each, can be negative); `return`
    (reward − beta·kl); with a transform, `return_transformed` (transformed reward − beta·kl). A sample that no function
    rewards has no `reward`.

    Args:
        output_dir (`str` or `Path`):
            Folder to write to: new, empty, or begun by the same call.
        model (`str` or [`~transformers.PreTrainedModel`]):
            Model to sample from, or its path or Hub id.
        prompts ([`~datasets.Dataset`] or `Sequence`):
            The P prompts, plain text or messages, or rows with a `"prompt"`, whose other columns reach the reward functions.
        reward_funcs (`str`, `Callable`, [`~transformers.PreTrainedModel`] or a list of them):
            Rewards, as TRL's trainers take them.
        settings ([`SamplingSettings`], *optional*):
            All else.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`], *optional*):
            The model's; by default loaded from where the model was.
        reference (`str` or [`~transformers.PreTrainedModel`], *optional*):
            Model that `kl` is measured against.
        reward_processing_classes (`Sequence`, *optional*):
            Tokenizers of the rewards that are models, `None` for the others.
        engine_kwargs (`dict`, *optional*):
            Further arguments of `vllm.LLM`, such as `gpu_memory_utilization`: the model that scores needs room beside it.
        trust_remote_code (`bool`, *optional*, defaults to `False`):
            Whether to run Python code that comes with models that are loaded by name.
        progress (`bool`, *optional*, defaults to `True`):
            Whether to show a progress bar.

    Returns:
        [`~trl_repulse.evaluation.records.SampleSet`]: the samples, read back from the files.

    Raises:
        `ValueError`: If the prompts are empty or too long, or messages that no chat template reads, a reward is no finite
            number, arguments contradict one another, the folder holds something else, or a model is not causal.

    Example:

    ```python
    >>> from trl_repulse.evaluation.sampling import SamplingSettings, sample_completions

    >>> settings = SamplingSettings(num_samples=64, max_completion_length=128)
    >>> samples = sample_completions("samples", "out", ["The weather is"], "reward_model", settings, reference="gpt2")
    >>> samples.column("kl").mean()
    ```
    """
    settings, folder, state = settings or SamplingSettings(), Path(output_dir).expanduser(), process_state()
    dataset = as_dataset(prompts)
    check_early(folder, settings, len(reward_funcs) if isinstance(reward_funcs, list | tuple) else 1, engine_kwargs)
    check_template_kwargs(dataset[:1]["prompt"], settings.chat_template_kwargs)
    if settings.beta and reference is None:
        raise ValueError(f"`beta={settings.beta}` needs a `reference` model to measure the KL against.")
    if settings.engine == "vllm" and not isinstance(model, str):
        raise ValueError("`engine='vllm'` loads the model itself; pass its path or Hub id as `model`.")
    if settings.engine == "vllm" and state.num_processes > 1:
        raise ValueError("`engine='vllm'` runs in one process; give it several devices with `tensor_parallel_size`.")
    name = model if isinstance(model, str) else model.config._name_or_path
    if settings.revision is not None and isinstance(model, str) and Path(model).is_dir():
        raise ValueError(
            f"`revision={settings.revision!r}` is of a model on the Hub, and `{model}` is a folder; leave it out."
        )
    code: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    tokenizer = tokenizer or load_tokenizer(name, "model", revision=settings.revision, **code)
    rows = dataset["prompt"][:]
    prompt_ids = prompt_tokens(tokenizer, rows, settings.chat_template_kwargs)  # refuses what has no template
    model = _load(model, "model", settings.dtype, settings.revision, state.device, **code)
    if settings.engine == "vllm" and getattr(model, "_hf_peft_config_loaded", False):
        raise ValueError(
            f"`{name}` is an adapter, and `engine='vllm'` takes whole weights; merge it with `trl-repulse merge`, or set "
            "`engine='transformers'`."
        )
    reference_name = reference if isinstance(reference, str) else None
    reference = _load(reference, "reference", settings.dtype, None, state.device, **code)
    functions = _functions(reward_funcs, reward_processing_classes, settings, state.device, trust_remote_code, rows[0])

    limit = (engine_kwargs or {}).get("max_model_len") if settings.engine == "vllm" else None
    check_prompt_lengths(
        *(prompt_ids, rows, model.config, settings.max_completion_length),
        limit
        if isinstance(limit, int) and limit > 0
        else None,  # vLLM takes text and -1 as well, for what it finds out
        "`max_model_len` of `engine_kwargs`",
    )
    if reference is not None:
        check_reference(reference_name, reference, model, tokenizer, prompt_ids, trust_remote_code)
    header = {
        "model": identify_model(model, name),
        "reference": None if reference is None else identify_model(reference, reference_name),
        "rewards": {key: description for key, (_, description) in functions.items()},
        "prompts": {
            "count": len(rows),
            "sha256": _files.digest([dataset[i] for i in range(len(rows))]),
            "token_ids_sha256": _files.digest(prompt_ids),  # they depend on tokenizer and chat template as well
        },
        "settings": asdict(settings) | {"reward_weights": list(settings.reward_weights or [1.0] * len(functions))},
        "device": state.device.type,
        "versions": {name: version(name) for name in ("trl-repulse", "torch", "transformers")},
    }
    header["settings"]["end_token_ids"] = sorted(end_tokens(model, tokenizer))
    if settings.engine == "vllm":
        header["settings"]["engine_kwargs"] = _files.plain_json(_what_decides(engine_kwargs or {}))
        header["versions"]["vllm"] = vllm_version()
    with state.main_process_first():
        begun = _files.open_folder(folder, header)

    total = len(rows) * settings.num_samples
    shards = -(-total // settings.shard_size)
    mine = range(state.process_index, shards, state.num_processes)
    sizes = {number: min(settings.shard_size, total - number * settings.shard_size) for number in mine}
    missing = [number for number, size in sizes.items() if not _files.has_shard(folder, number, size)]
    if missing and begun:
        for each, identity in header["rewards"].items():
            if known_by_name_alone(identity):
                warn_of_name(folder, each)
    if missing:
        if settings.engine == "vllm":
            end = end_tokens(model, tokenizer)
            dtype = str(model.dtype).removeprefix("torch.")  # left to itself, vLLM would halve float32
            options = (settings.max_completion_length, dtype, settings.revision)
            engine = vllm_engine(name, end, *options, **(code if trust_remote_code else {}) | (engine_kwargs or {}))
        else:
            engine = transformers_engine(model, tokenizer, settings.max_completion_length, settings.batch_size)
    bar = tqdm(
        total=sum(sizes.values()),
        initial=sum(size for number, size in sizes.items() if number not in missing),
        disable=not (progress and state.is_main_process),
        unit="completion",
        desc="sampling",
    )
    with bar:
        for number in missing:
            start = number * settings.shard_size
            places = [divmod(place, settings.num_samples) for place in range(start, start + sizes[number])]
            ids = [prompt_ids[prompt] for prompt, _ in places]
            # Models that drew with the same numbers would err alike, and be no independent runs to a report
            entropy = [settings.seed, number, int(header["model"]["weights"][:16], 16)]
            words = [int(word) for word in np.random.SeedSequence(entropy).generate_state(4)]
            # vLLM's requests have seeds of their own, made of this one: by 32 bits alone many shards would share some
            seed = words[0] if settings.engine == "transformers" else sum(w << 32 * i for i, w in enumerate(words))
            completions = engine(ids, seed)
            table = _rows(dataset, tokenizer, model, reference, settings, functions, places, ids, completions)
            _files.write_shard(folder, number, table)
            bar.update(sizes[number])
    state.wait_for_everyone()
    if state.is_main_process and not (folder / _files.COMPLETE).is_file():
        _files.close_folder(folder, shards)
    state.wait_for_everyone()
    return load_samples(folder)


def _rows(dataset, tokenizer, model, reference, settings, functions, places, prompt_ids, completion_ids) -> pa.Table:
    """The rows of one shard."""
    chosen = dataset[[prompt for prompt, _ in places]]
    prompts = chosen.pop("prompt")
    texts = completion_texts(tokenizer, prompts, prompt_ids, completion_ids)
    end = set(end_tokens(model, tokenizer))
    log_prob, entropy = completion_log_probs(model, prompt_ids, completion_ids, settings.batch_size)
    rewards = evaluate_rewards(
        {name: function for name, (function, _) in functions.items()},
        *(prompts, texts, completion_ids, chosen, settings.batch_size),
    )
    per_function = torch.tensor(
        [[torch.nan if value is None else value for value in values] for values in rewards.values()],
        dtype=torch.float64,
    )  # (F, B)
    weights = torch.tensor(settings.reward_weights or [1.0] * len(functions), dtype=torch.float64)
    reward = (per_function * weights[:, None]).nansum(dim=0)
    reward[per_function.isnan().all(dim=0)] = torch.nan
    columns: dict[str, Any] = {
        "prompt_index": pa.array([prompt for prompt, _ in places], pa.int32()),
        "sample_index": pa.array([sample for _, sample in places], pa.int32()),
        "prompt": pa.array(
            [prompt_text(tokenizer, prompt, settings.chat_template_kwargs) for prompt in prompts], pa.string()
        ),
        "prompt_ids": pa.array(prompt_ids, pa.list_(pa.int32())),
        "completion": pa.array(texts, pa.string()),
        "completion_ids": pa.array(completion_ids, pa.list_(pa.int32())),
        "length": pa.array([len(ids) for ids in completion_ids], pa.int32()),
        "ended": pa.array([bool(ids) and ids[-1] in end for ids in completion_ids], pa.bool_()),
        "log_prob": _numbers(log_prob),
        "entropy": _numbers(entropy),
    }
    columns |= {f"rewards/{name}": _numbers(row) for name, row in zip(functions, per_function, strict=True)}
    kl = torch.zeros_like(reward)
    if reference is not None:
        log_prob_reference, _ = completion_log_probs(reference, prompt_ids, completion_ids, settings.batch_size)
        kl = log_prob - log_prob_reference
        columns |= {"log_prob_reference": _numbers(log_prob_reference), "kl": _numbers(kl)}
    penalty = settings.beta * kl if settings.beta else torch.zeros_like(kl)  # 0 times an infinite KL is no number
    columns |= {"reward": _numbers(reward), "return": _numbers(reward - penalty)}
    if settings.reward_transform is not None:
        columns["return_transformed"] = _numbers(transform_rewards(settings, reward) - penalty)
    return pa.table(columns)


def _numbers(values: torch.Tensor) -> pa.Array:
    """A column of float64; NaN, the mark of a missing reward, becomes null."""
    return pa.array(values.numpy(), pa.float64(), from_pandas=True)


def _what_decides(engine_kwargs: dict[str, Any]) -> dict[str, Any]:
    """Without a secret, and without what another machine may need otherwise and no sample depends on."""
    return {key: value for key, value in engine_kwargs.items() if key not in ("hf_token", "gpu_memory_utilization")}


def _load(
    model: str | PreTrainedModel | None,
    part: str,
    dtype: str,
    revision: str | None,
    device: torch.device,
    **code: bool,
) -> Any:
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
) -> dict[str, tuple[Callable[..., list[float | None]], Any]]:
    """Name -> reward function, and what the header says of it. `prompt` is the first."""
    rewards = list(reward_funcs) if isinstance(reward_funcs, list | tuple) else [reward_funcs]
    tokenizers = list(tokenizers) if tokenizers is not None else [None] * len(rewards)
    if not rewards or len(tokenizers) != len(rewards):
        raise ValueError(f"`reward_funcs` has {len(rewards)} rewards and {len(tokenizers)} tokenizers; give one each.")
    functions = {}
    for reward, tokenizer in zip(rewards, tokenizers, strict=True):
        description = identify_reward(reward)
        if isinstance(reward, str):
            tokenizer = tokenizer or load_tokenizer(reward, "reward model", trust_remote_code=trust_remote_code)
        if isinstance(reward, str | nn.Module) and tokenizer is not None and not isinstance(prompt, str):
            warn_of_date(tokenizer, prompt, settings.chat_template_kwargs)
            description |= dated(tokenizer, prompt, settings.chat_template_kwargs)
        name, function = as_function(reward, tokenizer, device, settings.chat_template_kwargs, trust_remote_code)
        if name in functions:
            raise ValueError(f"Two rewards have the name '{name}'; set the `__name__` or `name` of one.")
        functions[name] = (function, description)
    return functions
