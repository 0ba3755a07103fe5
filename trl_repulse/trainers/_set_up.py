"""What a trainer finds out about its models before it trains: how they can be sampled and scored, and noise in their passes."""

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import broadcast_object_list, is_peft_model
from torch import nn
from transformers import PretrainedConfig

from ..generation._padding import vocab_size
from ..generation._probe import Guard, describe, probe, probe_values, undisturbed
from ._deepspeed import gathered
from ._peft_bridge import AdapterView
from ._trl_bridge import disable_gradient_checkpointing


if TYPE_CHECKING:
    from .ppo_trainer import PPOTrainer
    from .reinforce_trainer import ReinforceTrainer

VALUE_MODEL = "value model"
_NOISE = ("drop", "jitter", "noise")  # what settings of random passes have in their names


def guard_model(trainer: "ReinforceTrainer | PPOTrainer", name: str, model: Any, quiet: bool) -> Guard:
    """
    Finds out, before a model is wrapped, how it can be sampled and scored. All processes must call it.

    The first process does, and the others take over what it found: with FSDP it may be the only one that has the weights.

    Args:
        trainer ([`ReinforceTrainer`] or [`PPOTrainer`]):
            Trainer that samples from the model or scores with it.
        name (`str`):
            What the model is to the trainer: `"policy"`, `"proposal"`, or [`VALUE_MODEL`], which is not sampled from.
        model ([`~transformers.PreTrainedModel`], `peft.PeftModel` or [`AdapterView`]):
            The model.
        quiet (`bool`):
            Whether dropout is meant to be off; two passes in training mode must then agree.

    Returns:
        [`~trl_repulse.generation._probe.Guard`]

    Raises:
        `ValueError`: If passes differ from each other, or the model cannot be sampled or scored.
    """
    found: list[Any] = [None]
    view = model.active() if isinstance(model, AdapterView) else contextlib.nullcontext()
    module = model.model if isinstance(model, AdapterView) else model
    with view, gathered(module):
        if trainer.accelerator.is_main_process:
            with disable_gradient_checkpointing(module, trainer.args.gradient_checkpointing_kwargs):
                try:
                    found[0] = _find_out(trainer, name, module, quiet)
                except ValueError as error:
                    found[0] = error
    broadcast_object_list(found)
    if isinstance(found[0], ValueError):
        raise found[0]
    return found[0]


def _find_out(trainer: "ReinforceTrainer | PPOTrainer", name: str, model: nn.Module, quiet: bool) -> Guard:
    if quiet:
        check_noise(model, name)
    if name == VALUE_MODEL:
        return probe_values(model)
    samples = not (trainer.use_vllm or trainer.use_transformers_continuous_batching)
    return probe(model, quiet, samples, trainer.generation_config if samples else None)


def check_noise(model: nn.Module, name: str) -> None:
    """
    Refuses a model whose passes in training mode differ from one another though its dropout is off.

    Args:
        model ([`~transformers.PreTrainedModel`] or `peft.PeftModel`):
            The model. Mode, random states and gradients are left as they are.
        name (`str`):
            What it is to the trainer, for the message.

    Raises:
        `ValueError`: If two passes differ; names the settings that make them so.
    """
    module = model
    if name == VALUE_MODEL:  # whose head is 0 at first
        module = (model.get_base_model() if is_peft_model(model) else model).base_model
    size, device = vocab_size(model), next(model.parameters()).device
    ids = (torch.arange(16, device=device) * max(1, size // 37) + size // 3).view(2, 8) % size

    def is_noisy() -> bool:
        passes = []
        for seed in (0, 1):
            torch.manual_seed(seed)
            passes.append(module(input_ids=ids, attention_mask=torch.ones_like(ids))[0])
        rounding = max(4 * torch.finfo(passes[0].dtype).eps, 1e-4)  # kernels that add in any order
        one, other = (x.float().nan_to_num().clamp(-1e4, 1e4) for x in passes)
        return bool((one - other).norm() > rounding * one.norm())

    with undisturbed(model, training=True):
        if not is_noisy():
            return
        fields = _noisy_fields(model, is_noisy)
    remedy = "train another model"
    if fields:
        listed = ", ".join(f"`{field}`" for field in fields)
        remedy = f"set {listed} to 0 in the model's configuration, e.g. with `model_init_kwargs`"
    raise ValueError(
        f"Two passes of the {name}, {describe(model)}, differ in training mode: it makes noise that `disable_dropout=True` "
        f"does not turn off, and log-probabilities would not be those of the samples; {remedy}."
    )


def _noisy_fields(model: nn.Module, is_noisy: Callable[[], bool]) -> list[str]:
    """The settings that make noise, each on its own."""
    settings = [
        (owner, field)
        for owner in {id(each): each for module in model.modules() for each in _configs(module)}.values()
        for field, value in vars(owner).items()
        if any(word in field for word in _NOISE) and isinstance(value, float) and value
    ]
    with contextlib.ExitStack() as stack:
        values = [stack.enter_context(_zeroed(*setting)) for setting in settings]
        found = []
        for (owner, field), value in zip(settings, values, strict=True):
            setattr(owner, field, value)
            if is_noisy():
                found.append(field)
            setattr(owner, field, 0.0)
        return [] if is_noisy() else list(dict.fromkeys(found))


def _configs(module: nn.Module) -> Iterator[PretrainedConfig]:
    config = vars(module).get("config")
    if isinstance(config, PretrainedConfig):
        yield config
        yield from (part for part in vars(config).values() if isinstance(part, PretrainedConfig))


@contextlib.contextmanager
def _zeroed(owner: Any, field: str) -> Iterator[float]:
    value = getattr(owner, field)
    setattr(owner, field, 0.0)
    try:
        yield value
    finally:
        setattr(owner, field, value)
