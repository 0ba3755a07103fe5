"""Every dependence on how TRL drives a vLLM engine, and vLLM a model's weights; its methods are pinned in `_trl.py`.

TRL (1.16) builds the engine of a trainer in `VLLMGeneration`, for one model, and calls it by `llm`. Each entry says what
it relies on, why, and what would let it go.
"""

import contextlib
import copy
import re
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from accelerate.utils import is_peft_model
from safetensors.torch import save_file
from transformers import AutoConfig

from .._trl import VLLMGeneration, is_vllm_available, vllm_generation
from .drawing import POLICY, Sampler


if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel

_Weights: TypeAlias = Iterator[tuple[str, torch.Tensor]]

# What vLLM (0.28 to 0.31) can be built for; an adapter of another rank takes the next one.
_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
# What vLLM says when an engine does not fit, in one case or another.
_TOO_LARGE = (
    *("available memory", "free memory", "enough memory", "out of memory", "memory utilization"),
    *("kv cache", "cache blocks"),
)
# Kinds of LoRA that vLLM has no words for: fields of `peft.LoraConfig`, where this version of PEFT has them
_NOT_SERVED = (
    *("use_dora", "modules_to_save", "layer_replication", "target_parameters", "trainable_token_indices"),
    *("alpha_pattern", "rank_pattern", "lora_bias", "alora_invocation_tokens", "use_qalora", "use_bdlora"),
    *("arrow_config", "monteclora_config", "kasa_config", "velora_config"),
)
# Fields with which an adapter cannot even be merged: a base layer that stands in several places, rows of an embedding
_NOT_MERGED = ("trainable_token_indices", "layer_replication")
# Input embeddings and output heads, as the models that vLLM serves adapters over have them
_VOCABULARY = (
    *("lm_head", "embed_out", "output", "model.embed_tokens", "model.decoder.embed_tokens", "transformer.wte"),
    *("transformer.word_embeddings", "transformer.embd", "gpt_neox.embed_in", "model.tok_embeddings"),
)


def check_vllm() -> None:
    """Raises `ImportError` if vLLM is missing, or of a version that TRL only warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        available = is_vllm_available()
    if not available:
        raise ImportError(
            "`use_vllm=True` needs vLLM, which is not installed; run `pip install 'trl-repulse[vllm]'`, or set `use_vllm=False`."
        )
    unsupported = [str(warning.message) for warning in caught if "supports vLLM versions" in str(warning.message)]
    if unsupported:
        raise ImportError(f"{unsupported[0]} Install one of these, or set `use_vllm=False`.")


def check_adapter(config: "PeftConfig") -> None:
    """Raises `ValueError`, naming the field, for adapters that can neither be pushed as they are nor merged."""
    obstacles = [name for name in _NOT_MERGED if getattr(config, name, None)]
    if config.is_prompt_learning:
        obstacles.append("peft_type")
    if obstacles:
        raise ValueError(
            f"vLLM cannot be given an adapter with `{obstacles[0]}={getattr(config, obstacles[0])!r}`, which cannot be merged either; "
            "train one without, or generate without vLLM (`use_vllm=False`, `TransformersGenerator`)."
        )


def is_pushable(config: "PeftConfig") -> bool:
    """Whether vLLM can take an adapter as it is: LoRA over linear layers, with one rank and one scale, and nothing else. Not over the head
    or the embedding, which vLLM refuses for most architectures. Others are merged in each push."""
    return (
        config.peft_type == "LORA"
        and config.bias == "none"
        and not any(getattr(config, name, None) for name in _NOT_SERVED)
        and config.init_lora_weights in (True, False, "gaussian", "orthogonal")  # the base is as it was saved
        and config.r <= _RANKS[-1]
        and not _names_vocabulary(config.target_modules)
    )


def _names_vocabulary(targets: "str | Collection[str] | None") -> bool:
    """Whether `target_modules`, a regular expression or ends of names, are met by a head or an embedding."""
    if isinstance(targets, str):
        return targets != "all-linear" and any(re.fullmatch(targets, place) for place in _VOCABULARY)
    ends = {place.rpartition(".")[2] for place in _VOCABULARY}
    return any(target.rpartition(".")[2] in ends for target in targets or ())


def goes_separately(model: "PeftModel", adapter: str) -> bool:
    """Whether vLLM can take a model's adapter as it is, over a base that it is given once."""
    base = model.get_base_model()
    vocabulary = [layer for layer in (base.get_input_embeddings(), base.get_output_embeddings()) if layer is not None]
    return (
        is_pushable(model.peft_config[adapter])
        and not any(adapter in name.split(".") for layer in vocabulary for name, _ in layer.named_parameters())
        # A base that is trained changes too
        and not any(
            p.requires_grad and model.prefix not in name and ".modules_to_save." not in name
            for name, p in model.named_parameters()
        )
    )


def check_tied(model: "PeftModel", adapter: str) -> None:
    """Raises `ValueError` for an adapter, to be merged, that sets a tied head and embedding apart, whose weights vLLM has but once."""
    base = model.get_base_model()
    layers = [base.get_input_embeddings(), base.get_output_embeddings()]
    if None in layers:
        return
    shared = [getattr(layer, "original_module", getattr(layer, "base_layer", layer)).weight for layer in layers]
    copies = [getattr(layer, "modules_to_save", {}) for layer in layers]
    own = [modules[adapter].weight if adapter in modules else p for modules, p in zip(copies, shared, strict=True)]
    names = [name for layer in layers for name, _ in layer.named_parameters()]
    merged = any(model.prefix in name and adapter in name.split(".") for name in names)
    if shared[0] is shared[1] and (merged or own[0] is not own[1]):
        raise ValueError(
            f"Adapter {adapter!r} changes the head or the embedding, which have the same weights in this model (`tie_word_embeddings`) and "
            "in vLLM; leave them out of `target_modules` and `modules_to_save`, or generate without vLLM."
        )


@contextlib.contextmanager
def engine_options(dtype: str, adapters: Sequence["PeftConfig"] = (), prefix: str = "vllm_") -> Iterator[None]:
    """
    Lets the engine that TRL builds inside the context serve our models; says what to do if it does not fit.

    TRL passes no precision, so that vLLM would halve a float32 model's, and makes no room for adapters. Where vLLM
    cannot serve adapters of the model's architecture, or is too old to take weights below them, no room is made, and
    they are merged. Way out: further arguments of `VLLMGeneration` for `vllm.LLM`.

    `dtype` is the precision in which the models run elsewhere (`"float32"`), `prefix` what the caller's arguments have before TRL's names
    for them. Raises `ValueError` if an adapter can neither be pushed nor merged, `RuntimeError` if the engine does not fit into memory.
    """
    for config in adapters:
        check_adapter(config)
    pushed = [config for config in adapters if is_pushable(config)]
    original = vllm_generation.LLM

    def build(model: str, **options: Any) -> Any:
        """`vllm.LLM` in our precision and, where vLLM serves adapters over the model, with room for those that are pushed."""
        options["dtype"] = dtype
        if pushed and serves_adapters(model, options.get("trust_remote_code", False)):
            room = next(size for size in _RANKS if size >= max(config.r for config in pushed))
            options |= {"enable_lora": True, "max_lora_rank": room}
            options |= {"max_loras": len(pushed), "max_cpu_loras": len(pushed)}
        return original(model=model, **options)

    vllm_generation.LLM = build
    try:
        yield
    except (RuntimeError, ValueError) as error:  # as torch.OutOfMemoryError is
        if not any(word in str(error).lower() for word in _TOO_LARGE):
            raise
        raise RuntimeError(
            f"The vLLM engine does not fit into memory: {str(error).rstrip('.')}. Lower `{prefix}gpu_memory_utilization` "
            f"if training needs the memory, raise it if the cache is too small, or lower `{prefix}max_model_length`."
        ) from error
    finally:
        vllm_generation.LLM = original


def serves_adapters(model: str, trust_remote_code: bool = False) -> bool:
    """Whether vLLM serves adapters over a model, and takes new weights for the layers below them (0.28 and later)."""
    from vllm import ModelRegistry
    from vllm.lora.layers import BaseLayerWithLoRA
    from vllm.model_executor.models.interfaces import supports_lora

    architectures = AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code).architectures or []
    known = [ModelRegistry.models[name] for name in architectures if name in ModelRegistry.models]
    return hasattr(BaseLayerWithLoRA, "load_weights") and any(supports_lora(entry.load_model_cls()) for entry in known)


def takes_adapters(engine: VLLMGeneration) -> bool:
    """Whether an engine in this process was built with room for adapters."""
    return engine.llm.llm_engine.vllm_config.lora_config is not None


def context_length(engine: VLLMGeneration) -> int:
    """How many tokens of prompt and completion an engine in this process takes."""
    return engine.llm.llm_engine.vllm_config.model_config.max_model_len


def sampler_params(params: Any, sampler: Sampler) -> Any:
    """Parameters with which vLLM draws by a sampler; `params` for the model as it is. The bias becomes
    `logit_bias`, which vLLM adds before it divides by the temperature; 0 takes no room."""
    if sampler is POLICY:
        return params
    params = copy.copy(params)
    params.temperature = params.temperature * sampler.temperature
    if sampler.bias is not None:
        bias = sampler.bias * params.temperature
        params.logit_bias = {token: bias[token].item() for token in bias.nonzero().flatten().tolist()}
    return params


class EngineView:
    """The `vllm.LLM` of a [`~trl.generation.VLLMGeneration`], with adapters, samplers and a sleep level that TRL
    has no words for. Sleep level 1 keeps the weights in main memory, 2 drops them. Way out: a `lora_request` and
    sampling parameters for each row, and a sleep level, in `VLLMGeneration`."""

    def __init__(self, llm: Any, sleep_level: int):
        self.llm, self.sleep_level = llm, sleep_level
        # Of each row of a process's prompts, or of all: the request for its adapter, and its sampler
        self.rows: list[tuple[Any, Sampler]] = [(None, POLICY)]

    def generate(self, prompts: list[Any], sampling_params: Any, **kwargs: Any) -> Any:
        """Samples each row with its adapter, if any, and by its sampler."""
        options = {sampler: sampler_params(sampling_params, sampler) for _, sampler in self.rows}
        if len(self.rows) == 1:
            request, sampler = self.rows[0]
            return self.llm.generate(prompts, sampling_params=options[sampler], lora_request=request, **kwargs)
        rows = self.rows * (len(prompts) // len(self.rows))  # processes that share an engine have as many each
        params = [options[sampler] for _, sampler in rows]
        requests = [request for request, _ in rows]
        return self.llm.generate(prompts, sampling_params=params, lora_request=requests, **kwargs)

    def sleep(self, level: int) -> None:
        """Sleeps at our level, whatever TRL asks for."""
        self.llm.sleep(level=self.sleep_level)

    def __getattr__(self, name: str) -> Any:
        if name == "llm":  # not set yet, as in a copy that is being made
            raise AttributeError(name)
        return getattr(self.llm, name)


def wake_weights(engine: VLLMGeneration) -> None:
    """Brings the weights of a sleeping engine back to the device; at sleep level 2 they hold nothing until the next push."""
    if engine.enable_sleep_mode and engine._llm_weights_sleeping:
        vllm_generation.empty_cache()
        engine.llm.wake_up(tags=["weights"])
        engine._llm_weights_sleeping = False


def push_weights(engine: VLLMGeneration, model: Any, adapter: str | None = None) -> None:
    """
    Copies a model's weights to the (woken) engine and forgets cached prefixes. Of a PEFT model, `adapter` is merged
    into them; if `None`, the base is pushed. All processes must call it.

    In the same process weights go through vLLM's `reload_weights`: it lets each layer bring them into its own layout
    anew, which TRL's `load_weights` of single tensors skips (vLLM's CPU layers then have no place for them), and knows
    the names of layers with adapters. Way out: TRL using it.
    """
    engine.model = model
    with _plain_weights(engine, model, adapter) as weights:
        if engine.mode == "server":
            engine._iter_named_params = weights
            try:
                engine.sync_weights()
            finally:
                del engine._iter_named_params
            return
        runner = engine.llm.llm_engine.model_executor.driver_worker.model_runner
        # vLLM holds on to some of the tensors until it returns: what is merged must stay so
        runner.reload_weights(weights_iterator=weights())
    if runner.model_config.hf_text_config.tie_word_embeddings:
        _process_tied_head(runner.get_model())
    engine.llm.reset_prefix_cache()


def _process_tied_head(model: torch.nn.Module) -> None:
    """Lets an LM head that has the embedding's weights see the new ones. vLLM (0.30) leaves a layer that is given no weights of its own as
    it was; on CPU, that is a packed copy of the old ones. Way out: `reload_weights` knowing tied layers."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)


@contextlib.contextmanager
def _plain_weights(engine: VLLMGeneration, model: Any, adapter: str | None) -> Iterator[Callable[[], _Weights]]:
    """Context in which a function lists weights by the names vLLM expects; an adapter is merged throughout, whatever fails. In place of
    TRL's `_iter_named_params` for PEFT models, which takes adapters apart as soon as it has been read to its end, never if it is not, and
    knows no other name than "default". Way out: a context and an adapter's name there."""
    if not is_peft_model(model):
        yield engine._iter_named_params
    elif adapter is None:
        yield lambda: _peft_params(engine, model, None)
    else:
        # Shards cannot be merged
        with engine._dist.gather_params(list(model.parameters())):
            try:
                model.merge_adapter([adapter])
                yield lambda: _peft_params(engine, model, adapter)
            finally:
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", "Already unmerged")  # layers that this adapter leaves alone
                    model.unmerge_adapter()


def _peft_params(engine: VLLMGeneration, model: "PeftModel", adapter: str | None) -> _Weights:
    """Parameters of the base, by the names vLLM expects, with an adapter's own copies of whole modules in their places."""
    if engine._dist.is_fsdp:  # of one adapter, with TRL's name for it
        yield from engine._iter_fsdp_params(model)
        return
    for name, p in model.named_parameters():
        if model.prefix in name:
            continue
        layer, _, inner = name.partition(".modules_to_save.")
        if inner:
            owner, _, name = inner.partition(".")
            if owner != adapter:
                continue
            name = f"{layer}.{name}"
        layer, _, inner = name.partition(".original_module.")
        if inner:
            if adapter in model.get_submodule(layer).modules_to_save:
                continue
            name = f"{layer}.{inner}"
        name = engine._fix_param_name_to_vllm(name.removeprefix("base_model.model.").replace(".base_layer", ""))
        # What is merged is gathered already
        with engine._dist.gather_params([p]) if adapter is None else contextlib.nullcontext():
            yield name, p.data


def write_adapter(engine: VLLMGeneration, model: "PeftModel", adapter: str, folder: Path) -> None:
    """Writes an adapter to a new folder for vLLM. All processes must call it, each with a folder of its own."""
    from peft import get_peft_model_state_dict

    own = {name: p for name, p in model.named_parameters() if adapter in name.split(".")}
    with engine._dist.gather_params(list(own.values())):
        # Shards that are kept on the CPU are gathered on the device
        whole = {
            name: p.to(engine.accelerator.device).full_tensor() if hasattr(p, "full_tensor") else p
            for name, p in own.items()
        }
        # Of the embeddings it would ask the Hub, each time, whether their size is that of the base
        weights = get_peft_model_state_dict(model, state_dict=whole, adapter_name=adapter, save_embedding_layers=False)
        weights = {  # wrappers for activation checkpointing stand in names
            name.replace("_checkpoint_wrapped_module.", ""): value.detach().cpu().contiguous()
            for name, value in weights.items()
        }
    folder.mkdir(parents=True)
    save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    model.peft_config[adapter].save_pretrained(str(folder))
