"""One vLLM engine that samples from several named models, always with the weights they have now."""

import contextlib
import copy
import itertools
import shutil
import tempfile
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from accelerate import Accelerator
from accelerate.utils import is_peft_model
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .._trl import VLLMGeneration
from ..data._prompts import check_conversations
from ..models._adapters import random_states_kept
from . import _engine
from .completions import Completion, check_one_family, group_completions, tokenize
from .drawing import POLICY, Sampler, end_tokens


if TYPE_CHECKING:
    from peft import PeftModel


@dataclass
class _Served:
    """A model, the engine that samples from it, the adapter of a PEFT model, and whether that is pushed as it is."""

    model: "PreTrainedModel | PeftModel"
    engine: VLLMGeneration
    adapter: str | None
    separate: bool
    version: int = 0
    pushed: tuple[int, Any] | None = None  # version and request of the adapter that was pushed last
    metadata: list | None = None  # what a server is told of its tensors


@dataclass
class _Ahead:
    """What was drawn from a model beside another, for the call that will ask for it."""

    wanted: tuple[str, int, Sampler]  # name, version, sampler
    prompts: list[list[int]]
    result: tuple


class VLLMGenerator:
    """
    Samples from several models of one architecture with one vLLM engine in this process, or with vLLM servers.

    The engine holds one model's weights at a time. Before it samples, the weights of the model in question are pushed
    if, and only if, it holds another's or they were declared changed ([`changed`]). LoRA adapters are pushed as
    adapters over a base that stays where it is; other adapters are merged into the weights that are pushed.

    It stands on TRL's own [`~trl.generation.VLLMGeneration`] and takes its place in a TRL trainer.

    Args:
        models (`dict[str, PreTrainedModel]`):
            Models by name, unwrapped, PEFT models too. The first is sampled from unless [`using`] says otherwise; its
            `name_or_path` must be loadable, for vLLM builds its engine from there.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]): Tokenizer of all models.
        accelerator ([`~accelerate.Accelerator`], *optional*): A trainer's accelerator. If `None`, a new one.
        engine ([`~trl.generation.VLLMGeneration`], *optional*): A trainer's engine. If `None`, one is built.
        sleep_level (`int`, *optional*):
            With `enable_sleep_mode=True`, what the engine does between samplings: keep its weights in main memory (1) or
            drop them (2). If `None`, 1 where adapters are pushed, whose base need not be pushed again then, else 2.
        **options:
            Arguments of [`~trl.generation.VLLMGeneration`] for an engine that is built: `max_model_length`,
            `max_completion_length`, `gpu_memory_utilization`, `tensor_parallel_size`, ...

    Attributes:
        pushes (`Counter[str]`): How often each model's weights went to the engine; a base that adapters share counts as `"base"`.
        log_probs (`list[list[float]]`): The engine's own log-probabilities of the latest completions' tokens, in nats.

    Raises:
        `ImportError`: If vLLM is missing or of a version that TRL does not support.
        `ValueError`: As in [`add`].
        `RuntimeError`: If an engine that is built does not fit into memory.
    """

    def __init__(
        self,
        models: "dict[str, PreTrainedModel | PeftModel]",
        tokenizer: PreTrainedTokenizerBase,
        accelerator: Accelerator | None = None,
        engine: VLLMGeneration | None = None,
        sleep_level: Literal[1, 2] | None = None,
        **options: Any,
    ):
        _check_loaded(models)
        check_one_family(models)
        if engine is None:
            _engine.check_vllm()
            engine = _build_engine(models, tokenizer, accelerator or Accelerator(), options)
        self.tokenizer, self._engine = tokenizer, engine
        self.pushes: Counter[str] = Counter()
        self.log_probs: list[list[float]] = []
        self._lora = engine.mode == "colocate" and _engine.takes_adapters(engine)
        if engine.mode == "colocate":
            engine.llm = _engine.EngineView(engine.llm, sleep_level or (1 if self._lora else 2))
        # vLLM itself knows only the end tokens that were saved with the model it is built from
        first, given = next(iter(models.values())), dict(engine.generation_kwargs or {})
        size = first.config.get_text_config().vocab_size
        ends = [end for end in end_tokens(first, tokenizer) if 0 <= end < size and not given.get("ignore_eos")]
        engine.generation_kwargs = {"stop_token_ids": ends, **given}
        if engine.logprobs is None:
            engine.logprobs = 0  # those of the sampled tokens, to compare a trainer's with
        self._served: dict[str, _Served] = {}
        self._resident: dict[int, Any] = {}  # by engine, what it holds
        self._requests = itertools.count(1)
        self._current = next(iter(models))
        self._num_generations: int | None = None
        self._sampler = POLICY
        self._other: tuple[str, Sampler, int, int] | None = None  # name, sampler, rows of both for each prompt
        self._ahead: _Ahead | None = None
        self._folder = Path(tempfile.mkdtemp(prefix="trl-repulse-adapters-"))
        weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        for name, model in models.items():
            self.add(name, model)

    def add(self, name: str, model: "PreTrainedModel | PeftModel", adapter: str | None = None, **server: Any) -> None:
        """
        Adds a model.

        Args:
            name (`str`): Its name.
            model ([`~transformers.PreTrainedModel`] or `peft.PeftModel`): The model, unwrapped.
            adapter (`str`, *optional*): Which adapter of a PEFT model it is, if not the one that is active now.
            **server: In server mode, `server_base_url` and `group_port` of a server of its own.

        Raises:
            `ValueError`: If the name is taken, the model differs from the others in architecture or vocabulary, or has an
                adapter that can neither be pushed nor merged, or that transformers loaded.
        """
        if name in self._served:
            raise ValueError(f"There is a model {name!r} already; give the new one another name.")
        _check_loaded({name: model})
        check_one_family({**{key: served.model for key, served in self._served.items()}, name: model})
        adapter = adapter or model.active_adapter if is_peft_model(model) else None
        if adapter is not None:
            _engine.check_adapter(model.peft_config[adapter])
        separate = adapter is not None and self._lora and _engine.goes_separately(model, adapter)
        if adapter is not None and not separate:
            _engine.check_tied(model, adapter)
        engine = self._engine
        if server:
            engine = copy.copy(engine)
            vars(engine).update(server, model=model, _weight_metadata=None)
            engine._init_vllm()  # connects
        self._served[name] = _Served(model, engine, adapter, separate)

    def changed(self, *names: str) -> None:
        """Declares that the weights of the named models, or of all, have changed since they were sampled from."""
        for name in names or self._served:
            self._served[name].version += 1

    @contextlib.contextmanager
    def using(self, name: str, num_generations: int | None = None, sampler: Sampler = POLICY) -> Iterator[None]:
        """
        Context in which [`generate`] samples from another model, or by another sampler.

        Args:
            name (`str`): Name of the model.
            num_generations (`int`, *optional*):
                Completions a prompt, where [`generate`] is told another number by a trainer that does not know better.
            sampler ([`Sampler`], *optional*): What draws from the model's logits. In server mode it may have a temperature alone.
        """
        before = self._current, self._num_generations, self._sampler
        self._current, self._num_generations, self._sampler = name, num_generations, sampler
        try:
            yield
        finally:
            self._current, self._num_generations, self._sampler = before

    @contextlib.contextmanager
    def together(self, name: str, rows: tuple[int, int] = (1, 1), sampler: Sampler = POLICY) -> Iterator[None]:
        """
        Context in which [`generate`] draws for a second model too, in the same call of the engine, if one can serve both.

        One can where both are adapters over one base that are pushed as adapters, or where the second is the first, drawn by another
        sampler. What is drawn for the second is kept for the next [`generate`] that asks for it with the same prompts; it is dropped if the
        model's weights are declared changed before. Elsewhere the context does nothing.

        Args:
            name (`str`): Name of the second model.
            rows (`tuple[int, int]`, *optional*, defaults to `(1, 1)`):
                Neighbouring rows of a prompt that are drawn for the first model, and for the second.
            sampler ([`Sampler`], *optional*): What draws from the second model's logits.
        """
        self._ahead, self._other = None, (name, sampler, *rows)
        try:
            yield
        finally:
            self._other = None

    @property
    def version(self) -> int:
        """How many times the weights of the model that is sampled from have been declared changed."""
        return self._served[self._current].version

    def sync_weights(self) -> None:
        """Pushes the weights of the model that is sampled from, unless the engine holds them as they are."""
        served = self._served[self._current]
        engine, model = served.engine, served.model
        if engine.mode == "colocate":
            _engine.wake_weights(engine)
        wanted = ("base", id(model.get_base_model())) if served.separate else (self._current, served.version)
        if self._resident.get(id(engine)) != wanted:
            self._resident[id(engine)] = None  # if the push fails half-way, the engine holds nothing of use
            engine._weight_metadata = served.metadata  # TRL keeps the first model's
            _engine.push_weights(engine, model, None if served.separate else served.adapter)
            served.metadata = engine._weight_metadata
            self._resident[id(engine)] = wanted
            self.pushes[wanted[0]] += 1
        engine.model = model
        if engine.mode == "colocate":
            engine.llm.rows = [(self._adapter_request(self._current), self._sampler)]

    def generate(
        self, prompts: list[list[int]], images: list | None = None, num_generations: int = 1, profiler: Any = None
    ) -> tuple:
        """
        Samples one completion for each row, as [`~trl.generation.VLLMGeneration`]'s method of that name, with the
        current weights of the model in question. All processes must call it.

        Args:
            prompts (`list[list[int]]`): Token ids, one list a row; a prompt's rows follow one another.
            images (`list`), profiler (*optional*): As there.
            num_generations (`int`, *optional*, defaults to `1`): Rows a prompt.

        Returns:
            `tuple`: Prompt ids, completion ids, and the engine's log-probabilities with their token ids.
        """
        ahead, wanted = self._ahead, (self._current, self.version, self._sampler)
        if ahead is not None and (ahead.wanted, ahead.prompts, images) == (wanted, prompts, None):
            result, self._ahead = ahead.result, None
        else:
            self.sync_weights()
            beside = None if images else self._rows_of_the_other(prompts)
            engine = self._served[self._current].engine
            own = engine.temperature
            if engine.mode != "colocate":
                engine.temperature = own * self._sampler.temperature
            try:
                # In the turns after the first each row has a history of its own, and TRL says so
                generations = 1 if num_generations == 1 else self._num_generations or num_generations
                result = engine.generate(prompts + (beside or []), images, generations, profiler)
            finally:
                engine.temperature = own
            if engine.mode == "colocate" and engine.enable_sleep_mode and engine.llm.sleep_level == 2:
                self._resident[id(engine)] = None
            if beside is not None:
                name, sampler = self._other[:2]  # of this call alone
                kept = tuple(part and part[len(prompts) :] for part in result)
                result = tuple(part and part[: len(prompts)] for part in result)
                self._other = None
                self._ahead = _Ahead((name, self._served[name].version, sampler), beside, kept)
        self.log_probs = _of_the_drawn(*result[1:4])
        return result

    def _rows_of_the_other(self, prompts: list[list[int]]) -> list[list[int]] | None:
        """The prompts of the second model of [`together`], m for every n of this call; also tells the engine whose each row is. `None` if
        there is no second model, or the engine cannot draw for both in one call."""
        if self._other is None:
            return None
        name, sampler, n, m = self._other
        served, other = self._served[self._current], self._served[name]
        one_base = served.separate and other.separate and served.model.get_base_model() is other.model.get_base_model()
        if served.engine is not other.engine or served.engine.mode != "colocate":
            return None
        if self._sampler is not POLICY or not (one_base or served is other):
            return None
        beside = [ids for ids in prompts[::n] for _ in range(m)]
        engine_view = served.engine.llm
        engine_view.rows = engine_view.rows * len(prompts) + [(self._adapter_request(name), sampler)] * len(beside)
        return beside

    def complete(
        self, prompts: Sequence[str | list[dict[str, str]]], model: str, num_completions: int = 1
    ) -> list[list[Completion]]:
        """
        Draws completions as [`TransformersGenerator.complete`] does, with the current weights. All processes must call it.

        Raises:
            `KeyError`: If there is no such model.
            `ValueError`: If a prompt and the longest completion do not fit into an engine in this process.
        """
        check_conversations(prompts, "`prompts`")
        rows = [ids for ids in tokenize(self.tokenizer, prompts) for _ in range(num_completions)]
        engine = self._served[model].engine
        if engine.mode == "colocate":
            longest, length = max(map(len, rows), default=0), engine.generation_kwargs.get("max_tokens")
            length, size = length or engine.max_completion_length, _engine.context_length(engine)
            if longest + length > size:  # it would be cut short without a word
                raise ValueError(
                    f"A prompt of {longest} tokens and `max_completion_length={length}` do not fit into the engine's "
                    f"`max_model_length={size}`; raise that, or lower `max_completion_length`."
                )
        with self.using(model):
            drawn = self.generate(rows, num_generations=num_completions)[1]
            return group_completions(self.tokenizer, prompts, rows, drawn, model, self.version)

    def _adapter_request(self, name: str) -> Any:
        """vLLM's request for the adapter as it is now, `None` if it is merged. Each version has an id of its own, so that nothing cached
        serves it. All processes must call it."""
        served = self._served[name]
        if not served.separate:
            return None
        from vllm.lora.request import LoRARequest

        if served.pushed is None or served.pushed[0] != served.version:
            before, number = served.pushed, next(self._requests)
            folder = self._folder / str(number)
            _engine.write_adapter(served.engine, served.model, served.adapter, folder)
            served.pushed = (served.version, LoRARequest(f"{name}-{served.version}", number, str(folder)))
            self.pushes[name] += 1
            if before is not None:
                shutil.rmtree(before[1].lora_path, ignore_errors=True)
        return served.pushed[1]

    def __getattr__(self, name: str) -> Any:
        if name == "_engine":  # not set yet, as in a copy that is being made
            raise AttributeError(name)
        return getattr(self._engine, name)


def _check_loaded(models: "dict[str, PreTrainedModel | PeftModel]") -> None:
    """Refuses adapters that transformers itself has put into a model: their layers have names that vLLM does not know."""
    for name, model in models.items():
        if getattr(model, "_hf_peft_config_loaded", False) and not is_peft_model(model):
            raise ValueError(
                f"Model {name!r} has an adapter that transformers loaded, which vLLM cannot be given; load it with "
                "`peft.AutoPeftModelForCausalLM`, or merge it with PEFT's `merge_and_unload`."
            )


def _of_the_drawn(
    completions: list[list[int]], log_probs: list[list[list[float]]] | None, token_ids: list[list[list[int]]] | None
) -> list[list[float]]:
    """Log-probabilities (nats) of the tokens of each completion. Of each token the engine gives a list, with other likely ones beside it,
    and their `token_ids`; without these the first is taken. Empty if it gives none."""
    if not log_probs:
        return []
    if not token_ids:
        return [[values[0] for values in row] for row in log_probs]
    return [
        [values[ids.index(token)] for token, values, ids in zip(*row, strict=True)]
        for row in zip(completions, log_probs, token_ids, strict=True)
    ]


def _build_engine(
    models: "dict[str, PreTrainedModel | PeftModel]",
    tokenizer: PreTrainedTokenizerBase,
    accelerator: Accelerator,
    options: dict[str, Any],
) -> VLLMGeneration:
    """TRL's vLLM engine of the first model, with random states as they were but for each engine's own seed."""
    adapters = [config for model in models.values() if is_peft_model(model) for config in model.peft_config.values()]
    first = next(iter(models.values()))
    # vLLM seeds all generators with the number of the engine's group; the caller's seed is what it is to draw by
    seed, dtype = torch.initial_seed(), str(first.dtype).removeprefix("torch.")
    with random_states_kept(), _engine.engine_options(dtype, adapters, prefix=""):
        engine = VLLMGeneration(first, accelerator, tokenizer, **options)
    torch.manual_seed((seed + accelerator.process_index // engine.tensor_parallel_size) % 2**63)
    return engine
