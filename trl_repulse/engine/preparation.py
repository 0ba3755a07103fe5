"""What a trainer finds out about its models before it trains: whether they load, how they can be sampled and scored, and noise in passes."""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from accelerate.logging import get_logger
from accelerate.utils import broadcast_object_list, is_peft_model
from accelerate.utils.memory import should_reduce_batch_size
from datasets import Dataset, IterableDataset
from torch import nn
from transformers import AutoConfig, GenerationConfig, PretrainedConfig, PreTrainedModel

from .._rules_of_thumb import learning_rate_for
from .._trl import FusedCausalLMOutput, disable_gradient_checkpointing, pad
from ..data._checks import by_name, check_rows
from ..data._prompts import as_templates_read, conversations, one_of_each, render, rendering, warn_of_template
from ..generation._probe import (
    Guard,
    describe,
    probe,
    probe_values,
    reads_prompts_once,
    reads_rows_alike,
    shares_prompts,
)
from ..generation.drawing import padding_token, without_generation_defaults
from ..models._adapters import AdapterView, base_of, random_states_kept, takes, undisturbed
from ..models._deepspeed import gathered_by_layer, is_partitioned
from ..models._model_checks import vocab_size
from .scoring import MASKED, Layout, backbone_of, longest_row


logger = get_logger(__name__)


# Flags of the command line
_FLAGS = {"model": "model_name_or_path", "reward_funcs": "reward_model_path"}
_WEIGHTS = ("*.safetensors", "*.bin", "*.gguf")


def check_loadable(args: Any, peft_config: Any, **models: Any) -> None:
    """Refuses paths and ids whose configuration or weights cannot be found, also of the reference for a KL penalty, and a policy whose
    context has no room for completions. `models` are as they were passed, or lists of them, by the names of their arguments."""
    policy = models["model"]
    options = args.model_init_kwargs or {}
    loading = {"trust_remote_code": options.get("trust_remote_code", args.trust_remote_code)}
    for argument, given in models.items():
        for name in given if isinstance(given, list | tuple) else [given]:
            if isinstance(name, str):
                own: dict[str, Any] = {"revision": options.get("revision")} if name == policy else {}
                flag = f" (`--{_FLAGS[argument]}` on the command line)" if argument in _FLAGS else ""
                config = _check(name, f"`{argument}={name!r}`{flag}", **loading, **own)
                if argument != "model" or config is None or {"config", "max_position_embeddings"} & set(options):
                    continue
                # How long prompts are is known once there is a tokenizer. XLNet's context of no limit is -1
                context = getattr(config.get_text_config(), "max_position_embeddings", None) or -1
                if args.max_completion_length is not None and 0 < context <= args.max_completion_length:
                    raise ValueError(
                        f"`max_completion_length={args.max_completion_length}` leaves no room for a prompt in the model's context of "
                        f"{context} tokens; lower it."
                    )
    if not isinstance(policy, str) and args.beta != 0 and peft_config is None and not is_peft_model(policy):
        name = policy.config.name_or_path
        what = f"The reference model that `beta={args.beta:g}` needs, `{name}` by the policy's `name_or_path`,"
        _check(name, what, "save the policy and pass its path as `model`, or set `beta=0`", **loading)


def _check(
    name: str,
    what: str,
    remedy: str = "give the path of a saved model, or its id on the Hub (for a private or gated one, log in with `hf auth login`)",
    **options: Any,
) -> PretrainedConfig | None:
    """The configuration of a model by path or id, `None` for an adapter. Raises a `ValueError`, which calls the model `what`, if it or the
    weights of a folder cannot be found."""
    folder = Path(name)
    if (folder / "adapter_config.json").is_file():
        return None
    try:
        config = AutoConfig.from_pretrained(name, **options)
    except (OSError, ValueError) as error:
        raise ValueError(f"{what} cannot be loaded; {remedy}. ({' '.join(str(error).split())})") from error
    if folder.is_dir() and not any(path for pattern in _WEIGHTS for path in folder.glob(pattern)):
        raise ValueError(f"{what} cannot be loaded: the folder has no weights; {remedy}.")
    return config


_PROMPTS = 4  # P
_COMPLETIONS = 3  # n, at most; at least two share a row
_TOKENS = 8  # S, of a completion
_LONGEST = 512  # tokens of a prompt
_LONGEST_ON_CPU = 64  # the same if the model is still on the CPU and trains elsewhere


def first_batch(trainer: Any, policy: Any, use_cache: bool) -> tuple[torch.Tensor, ...] | None:
    """
    The first rows of a trainer's data set, once TRL has built it: left-padded prompts (P, L) and their mask, completions (P, n, S) that the
    policy draws and their mask, which is 0 after the end token; on the CPU. `use_cache` says whether `generate` may use a cache.

    Long prompts are cut at the front. Returns `None` if the data set is empty, prompts do not come from it (`environment_factory`,
    `rollout_func`), the model has no room for a few completions in a row, or `generate` fails.
    """
    if trainer.environment_factories is not None or trainer.rollout_func is not None:
        return None
    policy = getattr(policy, "_orig_mod", policy)  # compiled
    base, device = base_of(policy), next(policy.parameters()).device
    size, n = min(trainer.max_completion_length, _TOKENS), max(2, min(trainer.num_generations, _COMPLETIONS))
    limit = _LONGEST if device.type == trainer.accelerator.device.type else _LONGEST_ON_CPU
    longest = min(limit, longest_row(base.config.get_text_config()) - n * size)
    if longest < 1:
        return None
    with random_states_kept():  # rows may be made as they are read
        rows = list(itertools.islice(trainer.train_dataset, _PROMPTS))
    if not rows:
        return None
    check_rows(rows, trainer.train_dataset.features)
    tokenized = trainer._tokenize_prompts([row["prompt"] for row in rows])[0]
    ids = [torch.tensor(row[-int(longest) :], device=device) for row in tokenized]
    filler = padding_token(base, trainer._tokenizer, trainer.eos_token_ids)
    prompts, mask = pad(ids, filler, "left"), pad([torch.ones_like(row) for row in ids], 0, "left")
    settings = GenerationConfig(
        max_new_tokens=size,
        do_sample=True,
        temperature=trainer.temperature,
        num_return_sequences=n,
        pad_token_id=filler,
        use_cache=use_cache,
        disable_compile=True,
    )
    with undisturbed(policy, training=False), without_generation_defaults(policy) as config:
        config.eos_token_id = None  # processes that share weights draw as many tokens
        try:
            drawn = policy.generate(
                input_ids=prompts, attention_mask=mask, generation_config=settings, synced_gpus=False
            )
        except Exception as error:  # of a model that only an engine samples from
            if should_reduce_batch_size(error):
                raise
            return None
    completions = drawn[:, prompts.size(1) :].unflatten(0, (-1, n))
    ended = torch.isin(completions, torch.tensor(trainer.eos_token_ids, device=device)).long()
    return tuple(x.cpu() for x in (prompts, mask, completions, (ended.cumsum(dim=2) == ended).long()))


VALUE_MODEL = "value model"
_NOISE = ("drop", "jitter", "noise")  # what settings of random passes have in their names


def guard_model(trainer: Any, name: str, model: Any, quiet: bool) -> Guard:
    """
    Finds out, before a model is wrapped, how it can be sampled and scored. A collective call: only the main process makes passes, since
    with FSDP it may be the only one that has the weights; with ZeRO-3 all do, one whole layer at a time. Also sets `trainer._first_batch`.

    `name` is what the model is to the trainer: `"policy"`, `"proposal"`, or [`VALUE_MODEL`], which is not sampled from. If it is
    `quiet`, dropout is meant to be off, and two passes in training mode must agree.

    Raises:
        `ValueError`: If passes differ from each other, or the model cannot be sampled or scored.
    """
    guard: Any = None  # or an error
    view = model.active() if isinstance(model, AdapterView) else contextlib.nullcontext()
    module = model.model if isinstance(model, AdapterView) else model
    all_probe = is_partitioned(module)
    attention = base_of(module).config._attn_implementation
    with view, gathered_by_layer(module), as_trained(trainer, module):
        if all_probe or trainer.accelerator.is_main_process:
            with disable_gradient_checkpointing(module, trainer.args.gradient_checkpointing_kwargs):
                try:
                    guard = _probe_model(trainer, name, module, quiet, attention)
                    guard = replace(guard, fused_head=name == VALUE_MODEL or _head_fits(module, trainer.temperature))
                except ValueError as error:
                    guard = error
    of_main_process = [guard, trainer._first_batch]
    broadcast_object_list(of_main_process)
    guard, trainer._first_batch = of_main_process  # processes that read together read the same
    if isinstance(guard, ValueError):
        raise guard
    if not guard.fused_head:
        for scored in (module, trainer.ref_model) if name == "policy" else (module,):
            if scored is not None:
                scored = trainer.accelerator.unwrap_model(scored, keep_torch_compile=False)
                _use_own_head(base_of(scored), trainer.temperature)
    return guard


def set_learning_rate(trainer: Any, policy: nn.Module) -> None:
    """
    Sets a learning rate that is unset: to that of a given optimizer, or by the rule of thumb for the policy's size. Warns about TRL's
    default if the rule gives at least ten times as much.

    Raises:
        `ValueError`: If DeepSpeed's configuration, which is read before the model, has an optimizer or a schedule.
    """
    args = trainer.args
    if args.learning_rate is None and trainer.optimizer is not None:
        args.learning_rate = trainer.optimizer.param_groups[0]["lr"]
        return
    plugin = trainer.accelerator.state.deepspeed_plugin
    read_before = plugin is not None and {"optimizer", "scheduler"} & plugin.deepspeed_config.keys()
    if args.learning_rate is None and read_before:
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
    """Number of elements of a parameter, including those on other processes. bitsandbytes packs two or more of 4 bits into one."""
    count = getattr(parameter, "ds_numel", parameter.numel())
    return 2 * parameter.element_size() * count if type(parameter).__name__ == "Params4bit" else count


@contextlib.contextmanager
def as_trained(trainer: Any, model: nn.Module) -> Iterator[None]:
    """Context for passes before a model is wrapped: in the precision of training, and with an attention that its device supports. With FSDP
    and DeepSpeed the model is on the CPU until training begins, where FlashAttention has no kernel."""
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


def _probe_model(trainer: Any, name: str, model: nn.Module, quiet: bool, attention: str) -> Guard:
    """Finds out how a model can be sampled and scored, and whether completions can share rows; arguments as for [`guard_model`]."""
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
    return replace(guard, repeat_cache=repeats, longest_row=longest_row(base_of(model).config.get_text_config()))


def _why_not_shared(
    trainer: Any, name: str, model: nn.Module, quiet: bool, guard: Guard, attention: str
) -> str | None:
    """What keeps completions from sharing rows, `None` if nothing does; `attention` is the implementation in training. Sets
    `trainer._first_batch` if the model is the policy."""
    base = base_of(model)

    def read(ids: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Log-probabilities (or a value model's hidden states) of texts (B, L), (B, L, V or d); there is no mask."""
        if name == VALUE_MODEL:
            return base.base_model(input_ids=ids).last_hidden_state.float()
        return model(input_ids=ids, use_cache=False).logits.float().log_softmax(dim=-1)

    def read_rows(prompts: torch.Tensor, mask: torch.Tensor, *completions: torch.Tensor) -> torch.Tensor:
        """As [`~trl_repulse.generation._probe.shares_prompts`] needs it: log-probabilities (P·n, S, V) of completions (P, n, S) after
        prompts (P, L), or a value model's hidden states (P·n, S, d)."""
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
        predictions = kept[0].float() if name == VALUE_MODEL else logits.float().log_softmax(dim=-1)
        return predictions[:, -layout.width - 1 : -1]

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


def _head_fits(model: nn.Module, temperature: float) -> bool:
    """Whether TRL's fused head gives the log-probabilities of the model's own logits; warns where it does not."""
    ids = _tokens(model)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}
    with undisturbed(model, training=False):
        own = model(**inputs).logits
        expected = (own[:, :-1].float() / temperature).log_softmax(dim=-1).gather(-1, ids[:, 1:, None])[:, :, 0]
        try:
            fused = model(**inputs, labels=ids, fused_lm_head=True).log_probs
            gap = (fused - expected).square().mean().sqrt()
            # Rounding passes; NaN is reported elsewhere
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
    """Scores with a model's own logits where TRL's fused head is asked for: TRL (1.16) knows some of what a model may do to logits, but no
    cap under another name (RecurrentGemma) and no head of several layers. Way out: TRL using the model's own logits there."""
    fused, own = model.forward, type(model).forward

    @functools.wraps(own)
    def forward(self, *args: Any, fused_lm_head: bool = False, labels: torch.Tensor | None = None, **kwargs: Any):
        """As TRL's fused forward, by the model's own head: logits are whole in memory."""
        if not fused_lm_head:
            return fused(*args, **kwargs) if labels is None else fused(*args, labels=labels, **kwargs)
        assert labels is not None
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


def _tokens(model: Any) -> torch.Tensor:
    """Different token ids (2, 8) to check a model with; of 25 tokens or more, not the first and last ones, which are often no words."""
    size, device = vocab_size(model), next(model.parameters()).device
    return (torch.arange(16, device=device) * max(1, size // 37) + size // 3).view(2, 8) % size


def check_noise(model: nn.Module, name: str) -> None:
    """Raises a `ValueError` if a model's passes in training mode differ although its dropout is off. The message calls the model `name`,
    and names the settings of its configuration that can make noise."""
    module = base_of(model).base_model if name == VALUE_MODEL else model  # a value model's head is 0 at first
    ids = _tokens(model)
    with undisturbed(model, training=True):
        # Not seeded, which would seed accelerators too, where a model may not be yet
        passes = [module(input_ids=ids, attention_mask=torch.ones_like(ids))[0] for _ in range(2)]
    rounding = max(4 * torch.finfo(passes[0].dtype).eps, 1e-4)  # kernels that add in any order
    first_pass, second_pass = (x.float().nan_to_num().clamp(-1e4, 1e4) for x in passes)
    if bool((first_pass - second_pass).norm() <= rounding * first_pass.norm()):
        return
    config = base_of(model).config
    parts = [config, *(part for part in vars(config).values() if isinstance(part, PretrainedConfig))]
    fields = [field for part in parts for field, value in vars(part).items() if isinstance(value, float) and value]
    listed = ", ".join(f"`{field}`" for field in fields if any(word in field for word in _NOISE))
    remedy = f"set {listed} to 0 in the model's configuration, e.g. with `model_init_kwargs`"
    raise ValueError(
        f"Two passes of the {name}, {describe(model)}, differ in training mode: it makes noise that `disable_dropout=True` "
        f"does not turn off, and log-probabilities would not be those of the samples; {remedy if listed else 'train another model'}."
    )


def check_templates(
    trainer: Any,
    tokenize: Callable[[list[Any]], Any],
    train_dataset: Dataset | IterableDataset | None,
    eval_dataset: Dataset | IterableDataset | dict[str, Any] | None,
) -> None:
    """Refuses conversations that the chat template of the policy, or of a reward model, is missing for or refuses; `tokenize` is TRL's."""
    rewards = zip(trainer.reward_func_names, trainer.reward_funcs, trainer.reward_processing_classes, strict=True)
    readers = [(name, tokenizer) for name, reward, tokenizer in rewards if isinstance(reward, nn.Module)]
    for name, dataset in by_name(train_dataset, eval_dataset).items():
        for number, prompt in one_of_each(conversations(dataset)):
            where = f"Row {number} of `{name}`"
            with rendering(trainer.processing_class, prompt, where):
                tokenize(as_templates_read([prompt]))
            answered = [*prompt, {"role": "assistant", "content": "An answer."}]
            for reward, tokenizer in readers:
                of_reward = f"{where}, as the reward model '{reward}' reads it,"
                render(tokenizer, answered, of_reward, trainer.chat_template_kwargs, add_generation_prompt=False)
                warn_of_template(tokenizer, prompt, trainer.chat_template_kwargs)
