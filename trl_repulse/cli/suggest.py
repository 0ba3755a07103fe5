"""`trl-repulse suggest`: settings for RePULSe with a model, a reward and prompts, from samples of the initial policy."""

import argparse
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from .._errors import describe_error, from_reward
from ._fields import add_prompts, add_reward, check_output, parse_object


LEAST = 50  # samples


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments."""
    parser.add_argument("--model", required=True, help="path or Hub id of the model to train")
    add_prompts(parser, required=True)
    parser.add_argument("--max_prompt_length", type=int, help="prompts of more tokens are left out")
    parser.add_argument(
        "--chat_template_kwargs",
        metavar="JSON",
        type=parse_object,
        help="""further variables of the chat template, such as '{"enable_thinking": false}'""",
    )
    add_reward(parser)
    parser.add_argument("--bad_reward_threshold", type=float, help="reward under which an output is bad, if you know")
    parser.add_argument("--use_peft", action="store_true", help="suggest for a LoRA adapter, not for all weights")
    parser.add_argument("--max_steps", type=int, help="updates of the training run (800)")
    parser.add_argument("--num_samples", type=int, default=500, help="completions to draw, over all prompts (500)")
    parser.add_argument("--max_completion_length", type=int, default=256, help="tokens of a completion (256)")
    parser.add_argument("--batch_size", type=int, default=32, help="completions of one pass (32)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draws (0)")
    parser.add_argument("--dtype", default="auto", help="precision of the model's weights (that of the checkpoint)")
    parser.add_argument("--trust_remote_code", action="store_true", help="run Python code that comes with models")
    parser.add_argument(
        "--output", metavar="FILE", type=Path, help="YAML file for `trl-repulse repulse --config FILE`"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Samples, suggests and returns 0, or 1 with a message if that cannot be done."""
    from ..evaluation._files import write_atomically

    try:
        measured, suggestion = suggest(args)
        if args.output is not None:
            given, command = _given(args), f"  trl-repulse repulse --config {args.output}"
            if given.get("reward_model_path") != args.reward_model_path:
                command += " --reward_model_path ADDRESS\nThe server's address stands here without its user info and query. Give the whole "
                command += "address when you train, or put a bearer token into an environment variable and set `token_variable`."
            head = f"RePULSe with {args.model}, as `trl-repulse suggest` proposes it from {measured.own.rewards.size} samples. "
            text = suggestion.to_yaml(f"{head}Run it with\n{command}", given)
            write_atomically(args.output, lambda path: path.write_text(text, encoding="utf-8"))
        print(f"{_samples(measured, suggestion)}\n{suggestion.to_text()}")
        if args.output is not None:
            print(f"\nWritten to {args.output}. Read it, and train with\n{command}")
    except Exception as error:  # a reward may fail with any
        if not (isinstance(error, ValueError | OSError | RuntimeError | ImportError) or from_reward(error)):
            raise
        print(f"trl-repulse suggest: {describe_error(error)}", file=sys.stderr)
        return 1
    return 0


def suggest(args: argparse.Namespace) -> tuple[Any, Any]:
    """
    Draws samples of the initial policy, rewards them, and concludes.

    Args:
        args (`argparse.Namespace`):
            Arguments of the command.

    Returns:
        `tuple`: the [`~trl_repulse.cli._suggestion.Measured`] and the [`~trl_repulse.cli._suggestion.Suggestion`].

    Raises:
        `ValueError`: If an argument is out of range, something cannot be used, or all rewards are the same.
        `OSError`: If a model or a file cannot be loaded.
    """
    from ..data._checks import check_adapters
    from ..data._prompts import check_template_variables
    from ..data.loading import drop_long_prompts, load_prompts
    from ..evaluation._generation import check_dtype, check_template_kwargs, process_state
    from ..evaluation.rare.sampling import check_sizes
    from ..rewards.loading import load_reward
    from ._suggestion import UPDATES, suggest_settings

    steps = UPDATES if args.max_steps is None else args.max_steps
    check_sizes(max_completion_length=args.max_completion_length, batch_size=args.batch_size, max_steps=steps)
    if args.num_samples < LEAST:
        raise ValueError(f"`num_samples={args.num_samples}` is too few to suggest from; draw at least {LEAST}.")
    if args.bad_reward_threshold is not None and not math.isfinite(args.bad_reward_threshold):
        raise ValueError(f"`bad_reward_threshold={args.bad_reward_threshold}` must be a finite number.")
    if args.seed < 0:
        raise ValueError(f"`seed={args.seed}` must be at least 0.")
    check_dtype(args.dtype)
    check_output(args.output)
    check_adapters(args.model)
    if process_state().num_processes > 1:
        raise ValueError("`suggest` runs in one process; start it without `accelerate launch`.")
    prompts: Any = load_prompts(
        args.prompts, args.split, column=args.prompt_column, as_conversation=args.apply_chat_template
    )
    check_template_variables(args.chat_template_kwargs)  # also `tools`, which the trainer takes by itself
    check_template_kwargs(prompts[:1]["prompt"], args.chat_template_kwargs)
    reward = load_reward(args.reward_type, args.reward_model_path, **args.reward_kwargs)
    model, tokenizer = _load_policy(args)
    if args.max_prompt_length is not None:
        prompts = drop_long_prompts(prompts, tokenizer, args.max_prompt_length, args.chat_template_kwargs)
    measured = _measure(args, model, tokenizer, prompts, *_as_function(reward, args))
    return measured, suggest_settings(
        measured,
        max_completion_length=args.max_completion_length,
        max_steps=steps,
        use_peft=args.use_peft,
        bad_reward_threshold=args.bad_reward_threshold,
    )


def _load_policy(args: argparse.Namespace) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM

    from ..evaluation._generation import process_state
    from ..models._loading import load_model, load_tokenizer
    from ..models._model_checks import check_causal

    code = {"trust_remote_code": args.trust_remote_code}
    tokenizer = load_tokenizer(args.model, "model", **code)
    model = load_model(AutoModelForCausalLM, args.model, "model", dtype=args.dtype, **code)
    model.to(process_state().device)
    check_causal(model, "`model`")
    return model, tokenizer


def _as_function(reward: Any, args: argparse.Namespace) -> tuple[str, Any, int]:
    """Name and function of the reward, and the bytes of its model, 0 if it has none in this process."""
    from transformers import AutoModelForSequenceClassification, PreTrainedModel

    from ..evaluation._generation import as_function, process_state
    from ..models._loading import load_model, load_tokenizer
    from ..rewards.models import ModelReward

    device, tokenizer = process_state().device, None
    if isinstance(reward, str):
        code = {"trust_remote_code": args.trust_remote_code}
        tokenizer = load_tokenizer(reward, "reward model", **code)
        reward = load_model(AutoModelForSequenceClassification, reward, "reward model", num_labels=1, **code)
        reward.to(device)
    model = reward._module if isinstance(reward, ModelReward) else reward
    size = model.get_memory_footprint() if isinstance(model, PreTrainedModel) else 0
    return *as_function(reward, tokenizer, device, args.chat_template_kwargs), size


def _measure(
    args: argparse.Namespace, model: Any, tokenizer: Any, prompts: Any, name: str, function: Any, reward_bytes: int
) -> Any:
    """Draws, rewards and scores samples of the policy."""
    from tqdm.auto import tqdm

    from ..data._checks import check_prompt_lengths
    from ..data._texts import completion_texts
    from ..evaluation._generation import end_tokens, evaluate_rewards, prompt_tokens, transformers_engine
    from ..evaluation.log_probs import completion_log_probs
    from ._suggestion import DrawnSamples, Measured

    completions = max(5, args.num_samples // len(prompts))  # of a prompt: rewards are compared within one
    count = min(len(prompts), args.num_samples // completions)
    chosen = prompts.shuffle(seed=args.seed).select(range(count))
    rows = [place for place in range(count) for _ in range(completions)]
    ids = prompt_tokens(tokenizer, chosen["prompt"][:], args.chat_template_kwargs)
    check_prompt_lengths(ids, chosen["prompt"][:], model.config, args.max_completion_length)
    end = set(end_tokens(model, tokenizer))
    spent = 0.0

    def reward(places: list[int], texts: list[str], tokens: list[list[int]]) -> np.ndarray:
        nonlocal spent
        columns = chosen[places]
        asked = columns.pop("prompt")
        start = time.perf_counter()
        given = evaluate_rewards({name: function}, asked, texts, tokens, columns, args.batch_size)[name]
        spent += time.perf_counter() - start
        return np.array([np.nan if value is None else value for value in given])

    prompt_ids = [ids[place] for place in rows]
    start = time.perf_counter()
    with tqdm(total=len(rows), desc="samples", unit="completion") as bar:
        engine = transformers_engine(
            model, tokenizer, args.max_completion_length, args.batch_size, on_drawn=bar.update
        )
        tokens = engine(prompt_ids, args.seed)
    seconds = (time.perf_counter() - start) / len(rows)
    texts = completion_texts(tokenizer, chosen[rows]["prompt"], prompt_ids, tokens)
    rewards = reward(rows, texts, tokens)
    start = time.perf_counter()
    completion_log_probs(model, prompt_ids, tokens, args.batch_size)
    score_seconds, reward_seconds = (time.perf_counter() - start) / len(rows), spent / len(rows)
    lengths, ended = [len(row) for row in tokens], [bool(row) and row[-1] in end for row in tokens]
    shaped = (np.reshape(x, (-1, completions)) for x in (rewards, lengths, ended))
    own = DrawnSamples(*shaped, texts, seconds)
    places = list(range(min(count, 32)))
    try:
        empty = reward(places, [""] * len(places), [[] for _ in places])
    except Exception as error:
        if not from_reward(error):
            raise
        empty = None
    machine = _machine(model, reward_bytes)
    longest = max(map(len, ids))
    return Measured(own, empty, len(prompts), longest, reward_seconds, score_seconds, machine)


def _machine(model: Any, reward_bytes: int) -> Any:
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    from ._suggestion import Machine

    config, head = model.config.get_text_config(), model.get_output_embeddings()
    width, heads = config.hidden_size, getattr(config, "num_attention_heads", None) or 1
    head_size = getattr(config, "head_dim", None) or width // heads
    device = next(model.parameters()).device
    linear = [layer for layer in model.modules() if isinstance(layer, nn.Linear | Conv1D) and layer is not head]
    return Machine(
        parameters=model.num_parameters(),
        adapter=sum(16 * sum(layer.weight.shape) for layer in linear),
        layers=config.num_hidden_layers,
        width=width,
        inner=getattr(config, "intermediate_size", None) or 4 * width,
        cache=2 * head_size * (getattr(config, "num_key_value_heads", None) or heads),
        reward_bytes=reward_bytes,
        number=4 if device.type == "cpu" else 2,
        memory=_memory(device),
        device=device.type,
    )


def _memory(device: Any) -> float | None:
    """Memory of a device in bytes, `None` if it does not say."""
    import torch

    try:
        if device.type == "cpu":
            return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
        return float(torch.get_device_module(device).mem_get_info(device)[1])
    except (AttributeError, ValueError, OSError):  # not every system and kind of device tells
        return None


def _given(args: argparse.Namespace) -> dict[str, Any]:
    """What the user has named, as the training commands call it, without what is secret of a server's address."""
    from ..rewards.remote import parse_address

    path = args.reward_model_path
    if args.reward_type == "remote":
        addresses = [parse_address(url) for url in path.split(",")]
        if any(address.secrets for address in addresses):
            path = ",".join(address.shown for address in addresses)
    values = {
        "model_name_or_path": args.model,
        "reward_model_path": path,
        "reward_type": args.reward_type,
        "reward_kwargs": args.reward_kwargs or None,
        "dataset_name": args.prompts,
        "dataset_train_split": None if args.split == "train" else args.split,
        "prompt_column": None if args.prompt_column == "prompt" else args.prompt_column,
        "apply_chat_template": args.apply_chat_template or None,
        "chat_template_kwargs": args.chat_template_kwargs,
        "max_prompt_length": args.max_prompt_length,
        "trust_remote_code": args.trust_remote_code or None,
        "output_dir": "out",
    }
    if args.use_peft:
        values |= {"use_peft": True, "lora_r": 16, "lora_alpha": 32, "lora_target_modules": ["all-linear"]}
    return {name: value for name, value in values.items() if value is not None}


def _samples(measured: Any, suggestion: Any) -> str:
    """The samples in a few numbers, and those with the lowest rewards."""
    own = measured.own
    rewards = own.rewards[np.isfinite(own.rewards)]
    quantiles = ", ".join(
        f"{np.quantile(rewards, level):.3g} ({level:.0%})" for level in (0.02, 0.25, 0.5, 0.75, 0.98)
    )
    lines = [
        f"{own.rewards.size} samples of {len(own.rewards)} prompts: reward {rewards.mean():.3g} on average, {rewards.min():.3g} to "
        f"{rewards.max():.3g}, quantiles {quantiles}; {own.lengths.mean():.0f} tokens on average.",
        "",
    ]
    values = own.rewards.ravel()
    for place in np.argsort(values)[:5]:
        lines.append(f"lowest: {values[place]:.3g}  {own.texts[place].strip()[:160]!r}")
    return "\n".join([*lines, ""])
