"""What a trainer finds out about its models before it trains: how they can be sampled and scored, and noise in their passes."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import MethodType
from typing import Any

import torch
from accelerate.logging import get_logger
from accelerate.utils import broadcast_object_list, is_peft_model
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from .._rules_of_thumb import learning_rate_for
from ..generation._probe import (
    Guard,
    describe,
    probe,
    probe_values,
    reads_prompts_once,
    reads_rows_alike,
    shares_prompts,
)
from ..models._adapters import AdapterView, base_of, takes, undisturbed
from ..models._deepspeed import gathered_by_layer, is_partitioned
from ..models._layout import MASKED, Layout, longest_row
from ..models._model_checks import vocab_size
from .probe_batch import first_batch
from .scoring import backbone_of
from .trl_bridge import FusedCausalLMOutput, disable_gradient_checkpointing


logger = get_logger(__name__)

VALUE_MODEL = "value model"
_NOISE = ("drop", "jitter", "noise")  # what settings of random passes have in their names


def guard_model(trainer: Any, name: str, model: Any, quiet: bool) -> Guard:
    """
    Finds out, before a model is wrapped, how it can be sampled and scored. All processes must call it.

    The first process does, and the others take over what it found: with FSDP it may be the only one that has the weights. With
    ZeRO-3 all make the same passes, in which one layer at a time is whole.

    `name` is what the model is to the trainer: `"policy"`, `"proposal"`, or [`VALUE_MODEL`], which is not sampled from. If it is
    `quiet`, dropout is meant to be off, and two passes in training mode must agree.

    Raises:
        `ValueError`: If passes differ from each other, or the model cannot be sampled or scored.
    """
    found: list[Any] = [None, True, None]
    view = model.active() if isinstance(model, AdapterView) else contextlib.nullcontext()
    module = model.model if isinstance(model, AdapterView) else model
    everyone = is_partitioned(module)
    attention = base_of(module).config._attn_implementation
    with view, gathered_by_layer(module), as_trained(trainer, module):
        if everyone or trainer.accelerator.is_main_process:
            with disable_gradient_checkpointing(module, trainer.args.gradient_checkpointing_kwargs):
                try:
                    found[0] = _find_out(trainer, name, module, quiet, attention)
                    found[1] = name == VALUE_MODEL or _head_fits(module, trainer.temperature)
                except ValueError as error:
                    found[0] = error
    found[2] = trainer._first_batch
    broadcast_object_list(found)
    trainer._first_batch = found[2]  # processes that read together read the same
    if isinstance(found[0], ValueError):
        raise found[0]
    if not found[1]:
        for scored in (module, trainer.ref_model) if name == "policy" else (module,):
            if scored is not None:
                scored = trainer.accelerator.unwrap_model(scored, keep_torch_compile=False)
                _use_own_head(base_of(scored), trainer.temperature)
    return replace(found[0], fused_head=found[1])


def set_learning_rate(trainer: Any, policy: nn.Module) -> None:
    """
    Sets a learning rate that was left unset to that of the rule of thumb for the policy's size, or of the optimizer that was given.

    Where a configuration keeps TRL's default, which is for large models, it warns if the rule gives ten times as much or more.

    Raises:
        `ValueError`: If DeepSpeed's configuration, which is read before the model, has an optimizer or a schedule.
    """
    args = trainer.args
    if args.learning_rate is None and trainer.optimizer is not None:
        args.learning_rate = trainer.optimizer.param_groups[0]["lr"]
        return
    plugin = trainer.accelerator.state.deepspeed_plugin
    if (
        args.learning_rate is None
        and plugin is not None
        and {"optimizer", "scheduler"} & plugin.deepspeed_config.keys()
    ):
        raise ValueError(
            "`learning_rate` is not set, and DeepSpeed's configuration has an `optimizer` or a `scheduler`, which take it before the model "
            "is there; set it, or leave these sections out."
        )
    parameters = sum(map(_count, policy.parameters()))
    wanted = learning_rate_for(max(parameters, 1), is_peft_model(policy))
    if args.learning_rate is None:
        args.learning_rate = wanted
        logger.warning(
            f"`learning_rate` is not set. It is now {wanted:g}, by a rule of thumb for {parameters:,} parameters"
            f"{', trained by an adapter' if is_peft_model(policy) else ''}."
        )
    elif args.learning_rate == type(args).learning_rate and wanted >= 10 * args.learning_rate:
        logger.warning_once(
            f"`learning_rate` is {args.learning_rate:g}, TRL's default, at which a model of {parameters:,} parameters hardly changes; "
            f"set it, e.g. to {wanted:g} (a rule of thumb; `trl-repulse suggest` has values for the other settings too)."
        )


def _count(parameter: nn.Parameter) -> int:
    """Numbers of a parameter, those of other processes included; bitsandbytes packs two or more of 4 bits into one."""
    count = getattr(parameter, "ds_numel", parameter.numel())
    return 2 * parameter.element_size() * count if type(parameter).__name__ == "Params4bit" else count


@contextlib.contextmanager
def as_trained(trainer: Any, model: nn.Module) -> Iterator[None]:
    """
    Context for passes before a model is wrapped: in the precision of training, by attention that there is on its device.

    With FSDP and DeepSpeed models are on the CPU until training begins, and FlashAttention has no kernel there; nor has it
    one for float32, which weights are in that run under autocast.
    """
    base = base_of(model)
    chosen = base.config._attn_implementation
    elsewhere = next(base.parameters()).device.type != trainer.accelerator.device.type
    if elsewhere and chosen not in ("eager", "sdpa"):
        base.set_attn_implementation("eager")
    try:
        with trainer.accelerator.autocast():
            yield
    finally:
        if base.config._attn_implementation != chosen:
            base.set_attn_implementation(chosen)


def _find_out(trainer: Any, name: str, model: nn.Module, quiet: bool, attention: str) -> Guard:
    if quiet:
        check_noise(model, name)
    wanted = trainer.args.share_prompts
    if name == VALUE_MODEL:
        guard, repeats = probe_values(model), True  # it is not sampled from
    else:
        samples = not (trainer.use_vllm or trainer.use_transformers_continuous_batching)
        guard = probe(model, quiet, samples, trainer.generation_config if samples else None)
        repeats = samples and wanted is not False and guard.use_cache and not guard.sample_by_length
        if repeats:
            repeats = reads_prompts_once(model, quiet, trainer.generation_config)
    why = None if wanted is False else _why_not_shared(trainer, name, model, quiet, guard, attention)
    if why is not None:
        said = f"{describe(model)}, the {name}, cannot read a prompt once for all its completions: {why}"
        if wanted is True:
            raise ValueError(
                f"{said}; set `share_prompts=False`, or load it with `attn_implementation='sdpa'` if it has that."
            )
        logger.warning_once(
            f"{said}. It reads the prompt with each of them, which takes longer; `share_prompts=False` does so without a warning."
        )
    if wanted is False or why is not None:
        return replace(guard, share_prompts=False, repeat_cache=repeats)
    config = base_of(model).config.get_text_config()
    return replace(guard, repeat_cache=repeats, longest_row=longest_row(config))


def _why_not_shared(
    trainer: Any, name: str, model: nn.Module, quiet: bool, guard: Guard, attention: str
) -> str | None:
    """What keeps completions from sharing rows, `None` if nothing does; `attention` is the implementation in training."""
    base = base_of(model)

    def read(ids: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        if name == VALUE_MODEL:
            return base.base_model(input_ids=ids).last_hidden_state.float()
        return model(input_ids=ids, use_cache=False).logits.float().log_softmax(dim=-1)

    def read_rows(prompts: torch.Tensor, mask: torch.Tensor, *completions: torch.Tensor) -> torch.Tensor:
        layout = Layout(prompts.size(1), completions[0].size(2), completions[0].size(1))
        kept: list[torch.Tensor] = []
        handle = backbone_of(base).register_forward_hook(lambda _, args, output: kept.append(output.last_hidden_state))
        try:
            logits = model(
                input_ids=layout.rows(prompts, completions[0]),
                attention_mask=layout.rows(mask, completions[1]),
                layout=layout,
            ).logits
        finally:
            handle.remove()
        found = kept[0].float() if name == VALUE_MODEL else logits.float().log_softmax(dim=-1)
        return found[:, -layout.width - 1 : -1]

    if guard.score_by_length:
        return "it reads the padding before a prompt"
    if not takes(base, "position_ids"):
        return "it takes no positions"
    if attention not in MASKED:
        return f"its attention ({attention}) takes no masks of pairs of tokens"
    training = quiet or name == VALUE_MODEL
    if not shares_prompts(model, training, read, read_rows):
        return "completions in one row are not read as each would be by itself"
    if name == "policy":
        trainer._first_batch = first_batch(trainer, model, guard.use_cache)
    if trainer._first_batch is not None:
        prompts, mask, *completions = trainer._first_batch
        room = longest_row(base.config.get_text_config()) - completions[0][0].numel()
        batch = [x[:, -int(min(room, x.size(1))) :] for x in (prompts, mask)] + completions
        if room >= 1 and not reads_rows_alike(model, training, read_rows, batch):
            return "completions of the data set's first prompts in one row are not read as in rows of their own"
    return None


@torch.no_grad()
def _head_fits(model: nn.Module, temperature: float) -> bool:
    """Whether TRL's fused head gives the log-probabilities of the model's own logits; warns where it does not."""
    ids = _tokens(model)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}
    with undisturbed(model, training=False):
        own = model(**inputs).logits
        expected = (own[:, :-1].float() / temperature).log_softmax(dim=-1).gather(-1, ids[:, 1:, None])[:, :, 0]
        try:
            found = model(**inputs, labels=ids, fused_lm_head=True).log_probs
            gap = (found - expected).square().mean().sqrt()
            if bool(gap <= max(16 * torch.finfo(own.dtype).eps, 1e-5)) or bool(expected.isnan().any()):
                return True
        except (AttributeError, KeyError, RuntimeError, TypeError, ValueError):  # no head where TRL looks for it
            pass
    logger.warning_once(
        f"TRL's fused head does not give the log-probabilities of {describe(model)}: they are taken from its logits, which "
        "takes more memory."
    )
    return False


def _use_own_head(model: PreTrainedModel, temperature: float) -> None:
    """
    Scores with a model's own logits where TRL's fused head is asked for.

    TRL (1.16) computes logits from the last hidden states and knows some of what a model may do to them; a cap under another
    name (RecurrentGemma), or a head of several layers, it does not. Way out: TRL using the model's own logits there.
    """
    fused, own = model.forward, type(model).forward

    @functools.wraps(own)
    def forward(self, *args: Any, fused_lm_head: bool = False, labels: torch.Tensor | None = None, **kwargs: Any):
        if not fused_lm_head:
            return fused(*args, **kwargs) if labels is None else fused(*args, labels=labels, **kwargs)
        outputs = own(self, *args, **kwargs | {"use_cache": False})
        labels = labels[:, 1:]
        log_p = (outputs.logits[:, -labels.size(1) - 1 : -1].float() / temperature).log_softmax(dim=-1)
        chosen = log_p.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        entropy = -(log_p.exp() * log_p.clamp(min=torch.finfo(log_p.dtype).min)).sum(dim=-1)
        return FusedCausalLMOutput(
            log_probs=chosen.masked_fill(labels == -100, 0.0),
            entropy=entropy.masked_fill(labels == -100, 0.0),
            aux_loss=getattr(outputs, "aux_loss", None),
        )

    model.forward = MethodType(forward, model)


def _tokens(model: nn.Module) -> torch.Tensor:
    """A few rows of tokens, neither the first nor the last of the vocabulary, which are often no words."""
    size, device = vocab_size(model), next(model.parameters()).device
    return (torch.arange(16, device=device) * max(1, size // 37) + size // 3).view(2, 8) % size


def check_noise(model: nn.Module, name: str) -> None:
    """
    Refuses a model whose passes in training mode differ from one another though its dropout is off. `name` is what the message calls
    it. Mode, random states and gradients are left as they are.

    Raises:
        `ValueError`: If two passes differ; names the settings that make them so.
    """
    module = model
    if name == VALUE_MODEL:  # whose head is 0 at first
        module = base_of(model).base_model
    ids = _tokens(model)

    def is_noisy() -> bool:
        passes = []
        for _ in range(2):  # not seeded, which would seed accelerators too, where a model may not be yet
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
    configs = [vars(module).get("config") for module in model.modules()]
    configs = [config for config in configs if isinstance(config, PretrainedConfig)]
    configs += [part for config in configs for part in vars(config).values() if isinstance(part, PretrainedConfig)]
    settings = [
        (owner, field, value)
        for owner in {id(config): config for config in configs}.values()
        for field, value in vars(owner).items()
        if any(word in field for word in _NOISE) and isinstance(value, float) and value
    ]
    found = []
    try:
        for owner, field, _ in settings:
            setattr(owner, field, 0.0)
        for owner, field, value in settings:
            setattr(owner, field, value)
            if is_noisy():
                found.append(field)
            setattr(owner, field, 0.0)
        return [] if is_noisy() else list(dict.fromkeys(found))
    finally:
        for owner, field, value in settings:
            setattr(owner, field, value)
