"""What trainers and commands do with the names in `_trl.py`: each entry has the version, the reason, and a way out."""

import contextlib
import copy
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from .._trl import transformers_trainer, trl_utils, unwrap_model_for_generation, use_adapter
from ..generation.drawing import POLICY, Sampler, rows_drawn_by
from ..models._adapters import AdapterView, trainable_kept
from ..models._deepspeed import gathered


def unwrapped_for_generation(trainer: Any) -> Any:
    """A context with a trainer's policy, whole and ready for `generate`. TRL 1.15 takes no `gradient_checkpointing_kwargs`."""
    options = {"gather_deepspeed3_params": trainer.args.ds3_gather_for_generation}
    if "gradient_checkpointing_kwargs" in inspect.signature(unwrap_model_for_generation).parameters:
        options["gradient_checkpointing_kwargs"] = trainer.args.gradient_checkpointing_kwargs
    return unwrap_model_for_generation(trainer.model_wrapped, trainer.accelerator, **options)


@contextlib.contextmanager
def use_reference(model: Any) -> Iterator[None]:
    """
    Makes a PEFT model, unwrapped, the reference: TRL's frozen adapter `ref` if there is one, else the base model.

    TRL (1.16) adds `ref` to a PEFT model passed as it is. Way out: a method of TRL's trainer that scores with the reference.
    """
    with trainable_kept(model), use_adapter(model, adapter_name="ref" if "ref" in model.peft_config else None):
        yield


@contextlib.contextmanager
def logged_apart(
    tables: dict[str, dict[str, list[Any]]], mode: str, joined: Callable[[str, Any], tuple[str, Any]]
) -> Iterator[dict[str, list[Any]]]:
    """Context in which TRL logs to a new table, which it gives. Afterwards `joined` gives the name and value with which each entry is added
    to the others; the running total of tokens, which is no mean, is kept as it is."""
    inner: dict[str, list[Any]] = defaultdict(list)
    metrics, tables[mode] = tables[mode], inner
    try:
        yield inner
    finally:
        tables[mode] = metrics
        if "num_tokens" in inner:
            metrics["num_tokens"] = inner.pop("num_tokens")
        for old_name, values in inner.items():
            for value in values:
                name, value = joined(old_name, value)
                metrics[name].append(value)


@contextlib.contextmanager
def sampling_from(
    trainer: Any, engine: nn.Module | AdapterView | None, name: str, num_generations: int, sampler: Sampler = POLICY
) -> Iterator[None]:
    """
    Lets TRL's generation and reward hooks work on another model, with its `name` before their metrics: `"proposal/..."`.

    `engine` is the model, wrapped as it was prepared, or an adapter of the trainer's own, which is activated; if `None`, the policy
    samples. `num_generations`, completions a prompt, is used by vLLM alone; `sampler` changes the model's logits.

    TRL (1.16) generates from `trainer.model_wrapped`, at the temperature of `trainer.generation_config`, and logs to
    `trainer._metrics[mode]`. All are replaced inside the context. With vLLM the engine gets name, number and sampler, and the temperature
    stays. Way out: arguments `model` and `logits_processor` on TRL's generation hook.
    """
    mode = "train" if trainer.model.training else "eval"
    policy = trainer.model_wrapped
    config = None if trainer.use_vllm else trainer.generation_config
    own_temperature: Any = None if config is None else config.temperature
    if engine is not None and not isinstance(engine, AdapterView):
        trainer.model_wrapped = engine
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(logged_apart(trainer._metrics, mode, lambda key, value: (f"{name}/{key}", value)))
            if isinstance(engine, AdapterView):
                stack.enter_context(engine.active())
            if config is None:
                served = "policy" if engine is None else name
                stack.enter_context(trainer.vllm_generation.using(served, num_generations, sampler))
            else:
                config.temperature = own_temperature * sampler.temperature
                if sampler.bias is not None:
                    sampled = trainer.accelerator.unwrap_model(trainer.model_wrapped, keep_torch_compile=False)
                    stack.enter_context(rows_drawn_by(sampled, [True], Sampler(bias=sampler.head_bias)))
            yield
    finally:
        if config is not None:
            config.temperature = own_temperature
        trainer.model_wrapped = policy


@contextlib.contextmanager
def without_lasting_changes(trainer: Any, model: nn.Module) -> Iterator[None]:
    """
    Context in which sampling keeps the mode and precision of the model, unwrapped.

    With continuous batching TRL (1.16) casts the model, and so what the optimizer updates, to half precision and does not restore it,
    and leaves it in training mode, in evaluation too. Way out: TRL restoring both.
    """
    if not trainer.use_transformers_continuous_batching:
        yield
        return
    modes = [(each, each.training) for each in (trainer.model, model)]
    # A cast makes new tensors, so that these stay; DeepSpeed's engines have cast theirs already
    weights = [(p, p.data) for p in model.parameters() if not hasattr(p, "ds_id")]
    buffers = [(module, dict(module._buffers)) for module in model.modules()]
    try:
        yield
    finally:
        for p, data in weights:
            p.data = data
        for module, kept in buffers:
            module._buffers.update(kept)
        for module, mode in modes:
            module.train(mode)


@contextlib.contextmanager
def without_kl(owner: Any) -> Iterator[None]:
    """
    Context in which a GRPO trainer's loss has no KL term, or a trainer is built from a configuration without a reference.

    TRL (1.16) loads the reference unless `args.beta` is 0 when a trainer is built, and reads `trainer.beta` in the loss. PPO has its
    KL penalty in the token rewards; a proposal's base can be the reference. Way out: an argument for the place of the penalty, and one
    for the model, as TRL's DPO trainer has.
    """
    beta, owner.beta = owner.beta, 0.0
    try:
        yield
    finally:
        owner.beta = beta


@contextlib.contextmanager
def scored_in_small_tiles(device: torch.device, tokens: int) -> Iterator[None]:
    """
    Context in which TRL's fused head, on a CPU, reads `tokens` with so much of the vocabulary at once that a tile stays in the cache.

    TRL (1.16) takes 32,768 tokens of the vocabulary on every device. Its passes over such tiles wait for memory and for fresh pages:
    with 2,000 tokens they take two to three times as long. Way out: an argument for the size, or smaller tiles without Triton.
    """
    before = trl_utils._CHUNKED_LOGPROB_CHUNK_SIZE
    if device.type == "cpu":
        trl_utils._CHUNKED_LOGPROB_CHUNK_SIZE = min(before, max(2048, 2**22 // max(tokens, 1)))
    try:
        yield
    finally:
        trl_utils._CHUNKED_LOGPROB_CHUNK_SIZE = before


def disable_dropout(model: nn.Module) -> None:
    """
    Disables all dropout of a model, in place, and the noise of routers. Its configuration, which is saved, stays as it is.

    TRL (1.16) does so for `nn.Dropout` alone. Some architectures hold a probability (OPT), or the jitter of a router's inputs (Mixtral),
    as an attribute of a layer. What a layer reads from the configuration in each pass (Falcon) stays: `check_noise` finds it.
    """
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            if ("drop" in name or "jitter" in name) and isinstance(value, float):
                setattr(module, name, 0.0)


def copy_unpatched(model: PreTrainedModel | str) -> PreTrainedModel | str:
    """
    A copy of a model with its class's own forward, without an earlier trainer's patch; a path or id is returned unchanged.

    `add_fused_lm_head` (TRL 1.16) and accelerate set `model.forward`, a closure over the forward of the model they patch: a copy with
    that attribute would silently run the original's weights. Way out: TRL patching classes.
    """
    if isinstance(model, str):
        return model
    with gathered(model):  # a parameter that ZeRO-3 has partitioned would be copied empty
        copied = copy.deepcopy(model)
    for module in copied.modules():
        if isinstance(module, PreTrainedModel):
            module.__dict__.pop("forward", None)
    return copied


@contextlib.contextmanager
def withheld_from_uploads(patterns: Sequence[str]) -> Iterator[None]:
    """
    Keeps files that match glob patterns, relative to the folder, out of the Trainer's uploads inside the context; `*` crosses folders.

    transformers (5.23) uploads `output_dir` and, with the `checkpoint` and `all_checkpoints` strategies, checkpoints,
    through `transformers.trainer.hf_api`. Way out: an `ignore_patterns` argument of `Trainer.push_to_hub`. If the name
    moves, this raises before anything is uploaded.
    """
    original = transformers_trainer.hf_api

    def withholding_api() -> Any:
        """A client of the Hub whose `upload_folder` leaves the patterns out."""
        api: Any = copy.copy(original())
        upload_folder = api.upload_folder

        def upload(*args: Any, ignore_patterns: list[str] | str | None = None, **kwargs: Any) -> Any:
            given = [ignore_patterns] if isinstance(ignore_patterns, str) else list(ignore_patterns or [])
            return upload_folder(*args, ignore_patterns=[*given, *patterns], **kwargs)

        api.upload_folder = upload
        return api

    transformers_trainer.hf_api = withholding_api
    try:
        yield
    finally:
        transformers_trainer.hf_api = original
