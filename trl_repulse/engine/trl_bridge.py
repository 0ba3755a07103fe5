"""Every dependence on private names of TRL and transformers.

Each entry has the version, the reason, and a way out. `PINNED` lists methods that the trainers override or call. A test compares their
signatures with the installed packages, and so do the trainers when they are built. PEFT's are in `models/_adapters.py`.
"""

import contextlib
import copy
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from importlib.metadata import version
from typing import Any

import torch
import transformers.trainer
import trl.trainer.utils as trl_utils
from torch import nn
from transformers import PreTrainedModel, Trainer
from transformers.trainer_utils import validate_quantization_for_training


# `trl.trainer.utils` is not part of TRL's public API. Measured with 1.15.0 and 1.16.0; `add_fused_lm_head` exists since 1.15, the
# others since 1.9 or earlier. They go when TRL exports them, or when a public equivalent appears.
try:
    from trl import GRPOTrainer
    from trl.models.utils import disable_gradient_checkpointing, unwrap_model_for_generation
    from trl.trainer.utils import (
        FusedCausalLMOutput,
        add_fused_lm_head,
        create_model_from_path,
        disable_dropout_in_model,
        get_config_model_id,
        is_async_callable,
        pad,
        print_prompt_completions_sample,
        split_tensor_dict,
        use_adapter,
    )
except ImportError as error:
    raise ImportError(
        f"TRL {version('trl')} has moved a function that trl-repulse builds on: {error}. Install a version that trl-repulse was tested "
        "with (1.15 or 1.16), or look for a newer trl-repulse.",
        name=error.name,
    ) from error

from ..generation.drawing import POLICY, Sampler, rows_drawn_by
from ..models._adapters import AdapterView, trainable_kept
from ..models._deepspeed import gathered


def check_scoring_on_cpu() -> None:
    """
    Raises `ValueError` if TRL's own scoring needs an accelerator, as that of 1.15, whose kernel is written in Triton. Way out: TRL 1.16 or
    newer as the oldest that is supported.
    """
    if getattr(trl_utils, "_ChunkedLogProbFunction", True) is None:
        raise ValueError(
            f"TRL {version('trl')} scores completions with a kernel that needs Triton and a GPU. Install TRL 1.16 to train with `alpha=0` "
            "here, or set `alpha` above 0."
        )


# Method -> parameters we rely on, in order. Way out for most of GRPO's: a public "sample and score" hook in TRL.
PINNED: dict[Any, tuple[str, ...]] = {
    # Called: draws completions for a list of prompts, one each. Overridden around `super()`: the lengths it logs are
    # means over batches. Way out: logs that weigh batches by their samples.
    GRPOTrainer._generate: ("self", "prompts"),
    # Overridden around `super()`: samples from `self.model_wrapped`; more parameters, which differ between versions, follow.
    GRPOTrainer._generate_single_turn: ("self", "prompt_ids"),
    # Overridden to name prompts that do not fit the model's context before anything is generated.
    GRPOTrainer._tokenize_prompts: ("self", "prompts"),
    # Called, and overridden around `super()`: gathered rewards, one column a reward function, NaN where a function returned
    # `None`. They are kept, since GRPO's batch holds only group advantages.
    GRPOTrainer._calculate_rewards: ("self", "inputs", "prompts", "completions", "completion_ids_list"),
    # Overridden: returns the dict that TRL shuffles and splits along the first dimension. On PPO and GRPO around `super()`:
    # advantages of tokens, returns and values join it.
    GRPOTrainer._generate_and_score_completions: ("self", "inputs"),
    # Overridden around `super()`: micro-batches that are made anew, a new list in `_buffered_inputs`, are sorted by prompt.
    GRPOTrainer._prepare_inputs: ("self", "generation_batch"),
    # Overridden, as TRL's own experimental trainers do. On PPO and GRPO around `super()`: takes advantages of shape (B, T), as
    # its source says of subclasses.
    GRPOTrainer._compute_loss: ("self", "model", "inputs"),
    # Called, and overridden around `super()` to see the log-probabilities that the loss is made of.
    GRPOTrainer._get_per_token_logps_and_entropies: (
        *("self", "model", "input_ids", "attention_mask", "logits_to_keep", "batch_size"),
    ),
    # Overridden around `super()`: the value model steps when the policy's gradient is complete.
    GRPOTrainer.training_step: ("self", "model", "inputs", "num_items_in_batch"),
    # Called with these arguments, by position or by name.
    create_model_from_path: ("model_id", "architecture"),
    disable_dropout_in_model: ("model",),
    disable_gradient_checkpointing: ("model", "gradient_checkpointing_kwargs"),
    get_config_model_id: ("config",),
    is_async_callable: ("func",),
    pad: ("tensors", "padding_value", "padding_side", "pad_to_multiple_of"),
    print_prompt_completions_sample: (
        *("prompts", "completions", "rewards", "advantages", "step", "num_samples", "extra"),
    ),
    split_tensor_dict: ("tensor_dict", "num_chunks"),
    unwrap_model_for_generation: ("model", "accelerator", "gather_deepspeed3_params", "generation_kwargs"),
    use_adapter: ("model", "adapter_name"),
    # Called: what the Trainer refuses to train of its own model, for the second one. transformers has it since 5.0.
    validate_quantization_for_training: ("model",),
    # Patches the forward that every log-probability of either model comes from.
    add_fused_lm_head: ("model", "temperature", "cast_lm_head_to_fp32", "outputs"),
    # Built with names where that head does not fit a model: `log_probs`, `entropy` and `aux_loss` are read.
    FusedCausalLMOutput: ("loss", "log_probs", "entropy"),
    # Overridden around `super()`: the second model is prepared, and loaded from a checkpoint, beside the first.
    Trainer._prepare_for_training: ("self", "max_steps", "train_dataloader", "resume_from_checkpoint"),
    # Called with the second model and its folder: loads sharded weights and adapters alike. Overridden around
    # `super()`: it takes a second model's folder for one more adapter of the policy.
    Trainer._load_from_checkpoint: ("self", "resume_from_checkpoint", "model"),
    # Overridden around `super()`: it takes tied weights, which are stored once, for missing ones.
    Trainer._issue_warnings_after_load: ("self", "load_result"),
    # Overridden around `super()`: the second model is written before the checkpoint can be taken for complete.
    Trainer._save_checkpoint: ("self", "model", "trial"),
    Trainer.save_model: ("self", "output_dir", "_internal_call"),
    # Replaced on a base model with two adapters: whatever turns checkpointing on ends here.
    PreTrainedModel._set_gradient_checkpointing: ("self", "enable", "gradient_checkpointing_func", "every_n_layers"),
    # Overridden around `super()`: where models under FSDP2 are told their precision, before the first is prepared.
    Trainer.create_accelerator_and_postprocess: ("self",),
    # Overridden around `super()`: the loss becomes the mean over all processes.
    Trainer.prediction_step: ("self", "model", "inputs", "prediction_loss_only", "ignore_keys"),
    # Overridden around `super()`: metrics are pooled over the batches of one evaluation.
    Trainer.evaluation_loop: (
        *("self", "dataloader", "description", "prediction_loss_only", "ignore_keys", "metric_key_prefix"),
    ),
    # Overridden around `super()`: TRL takes the mean over batches of the values it finds.
    GRPOTrainer.log: ("self", "logs", "start_time"),
    # Overridden around `super()`: the second model goes where the policy goes.
    Trainer._load_best_model: ("self",),
    # Overridden around `super()`: the order of an epoch follows from the trainer's state.
    GRPOTrainer._get_train_sampler: ("self", "dataset"),
    # Overridden around `super()` to keep the proposal out of every upload.
    Trainer._push_from_checkpoint: ("self", "checkpoint_folder"),
    # Overridden around `super()`, called as training is set up: the proposal's repository is made or refused.
    Trainer.init_hf_repo: ("self", "token", "private"),
    # Overridden around `super()`, called by `save_model` too: the proposal goes to its own repository.
    Trainer.push_to_hub: ("self", "commit_message", "blocking", "token", "revision", "private"),
    # Overridden around `super()`: the card that was written is amended.
    GRPOTrainer.create_model_card: ("self", "model_name", "dataset_name", "tags"),
}


def pinned_changes() -> list[str]:
    """Entries of [`PINNED`] that the installed packages no longer have, one line each with package, version and name."""
    changes = []
    for method, expected in PINNED.items():
        package, name = method.__module__.partition(".")[0], method.__qualname__
        found: Any = import_module(method.__module__)
        for part in name.split("."):
            found = getattr(found, part, None)
        actual = None if found is None else tuple(inspect.signature(found).parameters)
        if actual is None:
            changes.append(f"{package} {version(package)}: {name}({', '.join(expected)}) is gone")
        elif actual[: len(expected)] != expected:
            change = f"{name} takes ({', '.join(actual)}) and no longer ({', '.join(expected)}, ...)"
            changes.append(f"{package} {version(package)}: {change}")
    return changes


def require_pinned() -> None:
    """Raises a `RuntimeError` with a TRL or transformers in which anything of [`PINNED`] has moved."""
    changes = pinned_changes()
    if changes:
        raise RuntimeError(
            f"Methods that trl-repulse builds on have changed: {'; '.join(changes)}. Install a TRL that trl-repulse was tested with (1.15 "
            "or 1.16), or look for a newer trl-repulse; look for patches of TRL and transformers."
        )


def unwrapped_for_generation(trainer: Any) -> Any:
    """A context with a trainer's policy, whole and ready for `generate`. TRL 1.15 takes no `gradient_checkpointing_kwargs`."""
    args = trainer.args
    options = {"gather_deepspeed3_params": args.ds3_gather_for_generation}
    if "gradient_checkpointing_kwargs" in inspect.signature(unwrap_model_for_generation).parameters:
        options["gradient_checkpointing_kwargs"] = args.gradient_checkpointing_kwargs
    return unwrap_model_for_generation(trainer.model_wrapped, trainer.accelerator, **options)


@contextlib.contextmanager
def use_reference(model: Any) -> Iterator[None]:
    """
    Makes a PEFT model, unwrapped, the reference: TRL's frozen adapter `ref` if there is one, else the base model.

    TRL (1.16) adds `ref` to a PEFT model passed as it is. Way out: a method of TRL's trainer that scores with the
    reference.
    """
    with trainable_kept(model), use_adapter(model, adapter_name="ref" if "ref" in model.peft_config else None):
        yield


@contextlib.contextmanager
def logged_apart(
    tables: dict[str, dict[str, list[Any]]], mode: str, joined: Callable[[str, Any], tuple[str, Any]]
) -> Iterator[dict[str, list[Any]]]:
    """
    Context in which TRL logs to a new table, which it gives. Afterwards `joined` gives the name and value with which each entry is added
    to the others; the running total of tokens, which is no mean, is kept as it is.
    """
    metrics = tables[mode]
    inner: dict[str, list[Any]] = defaultdict(list)
    tables[mode] = inner
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
    trainer: Any, engine: Any, name: str, num_generations: int, sampler: Sampler = POLICY
) -> Iterator[None]:
    """
    Lets TRL's generation and reward hooks work on another model, with its `name` before their metrics: `"proposal/..."`.

    TRL (1.16) generates from `trainer.model_wrapped`, at the temperature of `trainer.generation_config`, and logs to
    `trainer._metrics[mode]`. All are replaced inside the context. An adapter of the trainer's own model is activated instead, and a
    vLLM engine gets name and sampler. Way out: arguments `model` and `logits_processor` on TRL's generation hook.

    Args:
        trainer ([`~trl.GRPOTrainer`]):
            Trainer whose hooks are called inside the context.
        engine (`torch.nn.Module` or [`AdapterView`], *optional*):
            Model to sample from, wrapped as it was prepared. If `None`, the policy.
        num_generations (`int`):
            Completions of a prompt.
        sampler ([`Sampler`], *optional*):
            Sampler of the model's logits.
    """
    mode = "train" if trainer.model.training else "eval"
    policy = trainer.model_wrapped
    config = None if trainer.use_vllm else trainer.generation_config
    own_temperature: Any = None if config is None else config.temperature
    is_adapter = isinstance(engine, AdapterView)
    if engine is not None and not is_adapter:
        trainer.model_wrapped = engine
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(logged_apart(trainer._metrics, mode, lambda key, value: (f"{name}/{key}", value)))
            if is_adapter:
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

    `disable_dropout_in_model` (TRL 1.16) sets that of `nn.Dropout` modules to 0. Some architectures hold a probability (OPT), or the
    jitter of a router's inputs (Mixtral), as an attribute of a layer instead. What a layer reads from the configuration in each pass
    (Falcon) stays: `check_noise` finds it.
    """
    disable_dropout_in_model(model)
    for module in model.modules():
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
    original = transformers.trainer.hf_api

    def withholding_api() -> Any:
        api: Any = copy.copy(original())
        upload_folder = api.upload_folder

        def upload(*args: Any, ignore_patterns: list[str] | str | None = None, **kwargs: Any) -> Any:
            given = [ignore_patterns] if isinstance(ignore_patterns, str) else list(ignore_patterns or [])
            return upload_folder(*args, ignore_patterns=[*given, *patterns], **kwargs)

        api.upload_folder = upload
        return api

    transformers.trainer.hf_api = withholding_api
    try:
        yield
    finally:
        transformers.trainer.hf_api = original
