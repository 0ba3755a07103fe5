"""Drawing and rewarding completions outside a trainer."""

import asyncio
import functools
import hashlib
import inspect
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from importlib.metadata import packages_distributions, version
from typing import Any, Literal

import torch
from accelerate import PartialState
from torch import nn
from transformers import AutoModelForSequenceClassification, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from .._trl import is_async_callable
from ..data._prompts import check_template_variables, render
from ..engine.reward_functions import with_checks
from ..generation._probe import Guard, probe_shared
from ..generation.drawing import end_tokens, until_end
from ..generation.transformers_generator import draw
from ..models._adapters import in_mode
from ..models._loading import load_model, load_tokenizer
from ..models._model_checks import check_reward_model, check_reward_tokens
from ..rewards.functions import FunctionReward
from ..rewards.remote import RemoteReward


logger = logging.get_logger(__name__)

Prompt = str | list[dict[str, str]]
# Prompt tokens of each completion, and a seed -> completion tokens, including end tokens
Engine = Callable[[list[list[int]], int], list[list[int]]]
EngineName = Literal["transformers", "vllm"]
_NO_VLLM = '`engine="vllm"` needs vLLM: pip install "trl-repulse[vllm]".'


def process_state(cpu: bool | None = None) -> PartialState:
    """The state of this process, on CPU without an accelerator. Raises `ValueError` if several processes were started, but Accelerate was
    set up for another number."""
    cpu = not torch.accelerator.is_available() if cpu is None else cpu
    state = PartialState(cpu=cpu, timeout=timedelta(days=7))  # how long the other processes wait for the last one
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if state.num_processes != started:
        raise ValueError(
            f"{started} processes were started, but Accelerate was set up for {state.num_processes}; on CPU, call "
            "`accelerate.PartialState(cpu=True)` before anything else uses Accelerate."
        )
    return state


def hash_model(model: PreTrainedModel, dtype: torch.dtype | None = None) -> str:
    """SHA-256 of a model's weights: names, shapes and bytes, hexadecimal. `dtype` converts floating-point weights first."""
    hashed = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        if dtype is not None and tensor.is_floating_point():
            tensor = tensor.to(dtype)
        hashed.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        hashed.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return hashed.hexdigest()


def check_dtype(name: str) -> None:
    """Refuses anything but `"auto"` and floating-point types."""
    dtype = getattr(torch, name, None)
    if name != "auto" and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"`dtype={name!r}` must be 'auto', 'float32', 'bfloat16' or 'float16'.")


def check_template_kwargs(prompts: Sequence[Prompt], chat_template_kwargs: dict[str, Any] | None) -> None:
    """Refuses variables for a chat template that prompts of plain text do not use, and reserved ones."""
    check_template_variables(chat_template_kwargs, allowed=("tools",))
    if chat_template_kwargs and len(prompts) and isinstance(prompts[0], str):
        raise ValueError(
            "`chat_template_kwargs` has no effect on prompts of plain text; pass messages, or leave it out."
        )


def transformers_engine(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    max_completion_length: int,
    batch_size: int,
    *,
    end: list[int] | None = None,
    on_drawn: Callable[[int], object] = lambda count: None,
    guard: Guard | None = None,
) -> Engine:
    """An [`Engine`] that draws as [`~trl_repulse.generation.transformers_generator.draw`] does, `batch_size` completions at a time. The
    global random state is restored. `end` are the end tokens, by default those of model and tokenizer; `on_drawn` gets the number of
    completions of each batch; `guard` is what `probe_shared` has found out, by default here."""
    end = end_tokens(model, tokenizer) if end is None else end
    if not end:
        logger.warning_once(
            "Neither model nor tokenizer has an end token: each completion has `max_completion_length` tokens. Set "
            "`tokenizer.eos_token` if completions are to end."
        )
    device, guard = next(model.parameters()).device, guard or probe_shared(model)
    settings = {"max_new_tokens": max_completion_length, "eos_token_id": end or None}

    def engine(prompt_ids: list[list[int]], seed: int) -> list[list[int]]:
        with torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type):
            torch.manual_seed(seed)
            return draw(model, tokenizer, prompt_ids, guard, batch_size, on_drawn, **settings)

    return engine


def vllm_version() -> str:
    """Version of vLLM, without loading it; builds for other devices have other names. Raises an `ImportError` if there is none."""
    packages = packages_distributions().get("vllm")
    if not packages:
        raise ImportError(_NO_VLLM)
    return version(packages[0])


def hashed_seed(text: str) -> int:
    """A seed of 63 bits made from a text."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def vllm_engine(
    model: str, end: list[int], max_completion_length: int, dtype: str, revision: str | None, **kwargs: Any
) -> Engine:
    """An [`Engine`] that draws with vLLM in this process, from the same distribution; each completion has its own seed. `end` are the end
    tokens, `kwargs` further arguments of `vllm.LLM`. Raises an `ImportError` without vLLM."""
    try:
        from vllm import LLM, SamplingParams
    except ImportError as error:
        raise ImportError(_NO_VLLM) from error

    # "vllm": no defaults from the model's generation_config
    llm = LLM(model=model, dtype=dtype, revision=revision, generation_config="vllm", **kwargs)

    def engine(prompt_ids: list[list[int]], seed: int) -> list[list[int]]:
        """Token ids of one completion for each prompt, up to its end."""
        params = [
            SamplingParams(
                temperature=1.0,
                top_p=1.0,
                top_k=0,
                max_tokens=max_completion_length,
                stop_token_ids=end,
                seed=hashed_seed(f"{seed} {row}"),  # consecutive seeds would repeat completions across shards
                detokenize=False,
            )
            for row in range(len(prompt_ids))
        ]
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompt_ids], params, use_tqdm=False)
        return [until_end(list(output.outputs[0].token_ids), end) for output in outputs]

    return engine


def reward_of_model(model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> Callable[[list[str]], torch.Tensor]:
    """The reward function that TRL makes of a sequence-classification model: the first label's logit (B,) of each of B texts."""

    def reward(texts: list[str]) -> torch.Tensor:
        batch = tokenizer(texts, return_tensors="pt", padding=True, padding_side="right", add_special_tokens=False)
        with in_mode(model, training=False):
            return model(**batch.to(next(model.parameters()).device)).logits[:, 0]

    return reward


def as_function(
    reward: str | nn.Module | Callable[..., Any],
    tokenizer: PreTrainedTokenizerBase | None,
    device: torch.device,
    chat_template_kwargs: dict[str, Any] | None = None,
    trust_remote_code: bool = False,
) -> tuple[str, Callable[..., Any]]:
    """Name and function of a reward as TRL takes it: a path, a classifier, or a function, asynchronous or not. `tokenizer` is that of a
    model, by default loaded from its path. The function checks what it returns. Raises a `ValueError` if a model cannot be used."""
    if isinstance(reward, str):
        code: dict[str, Any] = {"trust_remote_code": trust_remote_code}
        tokenizer = tokenizer or load_tokenizer(reward, "reward model", **code)
        auto_class = AutoModelForSequenceClassification
        reward = load_model(auto_class, reward, "reward model", num_labels=1, **code).to(device)
    if not isinstance(reward, nn.Module):
        name = getattr(reward, "__name__", type(reward).__name__)
        return name, with_checks(reward, name)
    check_reward_model(reward, "A reward")
    check_reward_tokens(reward, tokenizer, "A reward model")
    if tokenizer is None:
        raise ValueError("A reward is a model; pass its tokenizer in `reward_processing_classes`.")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    name, of_texts = type(reward).__name__, reward_of_model(reward, tokenizer)
    if hasattr(reward, "config"):  # as TRL does
        reward.config.get_text_config().pad_token_id = tokenizer.pad_token_id
        name = reward.config._name_or_path.rstrip("/").split("/")[-1]

    def function(prompts: list[Any], completions: list[Any], **_: Any) -> list[float]:
        where = f"A prompt with its completion, as the reward model '{name}' reads it,"
        texts = [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
        if prompts and not isinstance(prompts[0], str):
            texts = [render(tokenizer, text, where, chat_template_kwargs, False) for text in texts]
        return of_texts(texts).tolist()

    return name, with_checks(function, name)


def _required_columns(function: Any) -> list[str]:
    """Names of what a reward needs: its `required_columns`, or the parameters without a default of a function; none of a model, or if there
    is no signature."""
    if isinstance(function, FunctionReward | RemoteReward):
        return function.required_columns
    if isinstance(function, nn.Module):
        return []
    try:  # a decorator may supply arguments of the wrapped function
        parameters = inspect.signature(function, follow_wrapped=False).parameters.values()
    except (TypeError, ValueError):
        return []
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [each.name for each in parameters if each.kind in named and each.default is each.empty]


def check_columns(function: Any, name: str, columns: Iterable[str], remedy: str) -> None:
    """Raises `ValueError` if a reward, called `name`, needs more than prompts, completions and these columns."""
    required = {*_required_columns(getattr(function, "unchecked", function))}
    if lacking := sorted(required - {"prompts", "completions", *columns}):
        raise ValueError(f"The reward function '{name}' needs `{lacking[0]}`, {remedy}.")


@functools.cache
def event_loop() -> asyncio.AbstractEventLoop:
    """The loop of asynchronous rewards, in its own thread, as the caller's thread may have a running loop. There is
    one for all batches, since a client is tied to its first loop."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="trl-repulse rewards", daemon=True).start()
    return loop


def evaluate_rewards(
    functions: dict[str, Callable[..., Any]],
    prompts: list[Prompt],
    completions: list[str],
    completion_ids: list[list[int]] | None,
    columns: dict[str, list],
    batch_size: int,
    loop: asyncio.AbstractEventLoop | None = None,
) -> dict[str, list[float | None]]:
    """One reward a completion from each function, or `None`. If prompts are messages, completions become messages too. `columns` are the
    data set's others, one value a completion. Asynchronous functions run in `loop`, by default [`event_loop`]."""
    rewards: dict[str, list[float | None]] = {name: [] for name in functions}
    arguments = {key: values for key, values in columns.items() if key != "completion"}  # as TRL (1.16) does
    if completion_ids is not None:
        arguments["completion_ids"] = completion_ids
    for start in range(0, len(prompts), batch_size):
        batch = slice(start, start + batch_size)
        texts: list[Any] = completions[batch]
        if not isinstance(prompts[0], str):
            texts = [[{"role": "assistant", "content": text}] for text in texts]
        for name, function in functions.items():
            more = {key: values[batch] for key, values in arguments.items()}
            given = function(prompts=prompts[batch], completions=texts, **more)
            if is_async_callable(function):
                given = asyncio.run_coroutine_threadsafe(given, loop or event_loop()).result()
            rewards[name] += given
    return rewards
