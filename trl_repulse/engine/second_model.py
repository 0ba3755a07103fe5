"""Models beside the policy's: those that are trained with it, a proposal's adapter, the value model, and a reference that moves."""

import contextlib
import copy
import json
import math
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import DistributedType, is_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict, set_optimizer_state_dict
from transformers import (
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedModel,
    Trainer,
    get_scheduler,
)

from .._trl import create_model_from_path
from ..models import _fsdp
from ..models._adapters import (
    AdapterView,
    adapter_config,
    adapter_layers,
    base_of,
    bind_adapters_to_checkpoints,
    trainable_kept,
)
from ..models._deepspeed import (
    check_deepspeed,
    end_backward,
    gathered,
    gathered_by_layer,
    initialize,
    is_partitioned,
    whole_state_dict,
    zero_stage,
)
from ..models._model_checks import check_vocabulary_size, reads_ahead
from .logs import PROPOSAL_FOLDER, VALUE_FOLDER
from .scoring import Layout
from .trl_bridge import disable_dropout


if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel

    from .logs import Logs


logger = get_logger(__name__)


_NAMES = {PROPOSAL_FOLDER: "proposal", VALUE_FOLDER: "value model"}
REFERENCE = "reference.safetensors"  # file of a moving reference inside a checkpoint
POLICY_ADAPTER = "default"  # the trainer's own adapter has PEFT's name for the first one
_WEIGHTS = "adapter_model.safetensors"
_TENSORS = "optimizer.safetensors"
_STATE = "optimizer.json"


class SecondModel:
    """
    A model that is trained together with a TRL trainer's own: its engine, optimizer, schedule, clipping, saving and loading.

    The trainer calls [`prepare`] once training is set up, [`backward`] for each micro-batch inside [`gradient_sync`], and [`update`]
    for each update.

    Args:
        module ([`~transformers.PreTrainedModel`] or `peft.PeftModel`): Model to train. Moved to the accelerator's device.
        accelerator ([`~accelerate.Accelerator`]): The trainer's accelerator.
        learning_rate (`float`): Peak learning rate of this model's optimizer.

    Raises:
        `ValueError`: With a configuration of FSDP or DeepSpeed that cannot serve two models.
    """

    def __init__(self, module: Any, accelerator: Accelerator, learning_rate: float):
        _fsdp.check_fsdp(accelerator, module)
        check_deepspeed(accelerator)
        # Quantized models and models that ZeRO-3 has partitioned are placed when they are loaded; FSDP2 places parts
        if not (getattr(module, "is_quantized", False) or is_partitioned(module) or accelerator.is_fsdp2):
            module.to(accelerator.device)
        self.module = module
        self.engine: Any = module
        self.learning_rate = learning_rate
        self.optimizer: Any = None
        self.scheduler: Any = None
        self._accelerator = accelerator
        self._uses_deepspeed = zero_stage(accelerator) is not None
        self._uses_fsdp = accelerator.is_fsdp2
        self._scaler: torch.amp.GradScaler | None = None
        self._step_was_skipped = False
        self._max_grad_norm = 0.0

    def prepare(self, trainer: Trainer, num_training_steps: int) -> None:
        """Wraps the model as the trainer's is wrapped, with optimizer, schedule (over `num_training_steps` updates) and clipping by the
        trainer's arguments. A second call, as by a second `trainer.train()`, starts the schedule alone anew, and drops the gradient of an
        update that failed."""
        args: Any = trainer.args
        for p in self.module.parameters():
            p.grad = None
        if self.optimizer is None:
            self._build(trainer)
            self._max_grad_norm = args.max_grad_norm
            # DeepSpeed's engines scale themselves. Two optimizers must not share a scaler
            if self._accelerator.mixed_precision == "fp16" and not self._uses_deepspeed:
                handler = self._accelerator.scaler_handler
                kwargs = {} if handler is None else handler.to_kwargs()
                self._scaler = torch.amp.GradScaler(self._accelerator.device.type, **kwargs)
        self.scheduler = get_scheduler(
            args.lr_scheduler_type,
            optimizer=self.optimizer,
            num_warmup_steps=args.get_warmup_steps(num_training_steps),
            num_training_steps=num_training_steps,
            scheduler_specific_kwargs=args.lr_scheduler_kwargs,
        )

    def _build(self, trainer: Trainer) -> None:
        """Sets `optimizer`, and `engine`, the wrapped module that makes the passes. Called once, by the first [`prepare`]."""
        args: Any = trainer.args
        if args.activation_checkpointing:
            kwargs = dict(args.activation_checkpointing_kwargs or {})
            layers = {name: kwargs.pop(name) for name in ("every_n_layers", "offload") if name in kwargs}
            self.module.activation_checkpointing_enable(activation_checkpointing_kwargs=kwargs or None, **layers)
        optimizer = self._create_optimizer(trainer)
        if self._uses_deepspeed:
            self.engine, self.optimizer = initialize(self.module, optimizer, self._accelerator, args.max_grad_norm)
        elif self._uses_fsdp:
            self.engine, self.optimizer = _fsdp.prepare(self.module, optimizer, self._accelerator)
        else:
            self.engine, self.optimizer = self._accelerator.prepare_model(self.module), optimizer

    def _create_optimizer(self, trainer: Trainer) -> torch.optim.Optimizer:
        """An optimizer of the type that the policy has, at this model's learning rate."""
        optimizer_cls, kwargs = trainer.get_optimizer_cls_and_kwargs(trainer.args, self.module)
        decayed = set(trainer.get_decay_parameter_names(self.module))
        trained = [(name, p) for name, p in self.module.named_parameters() if p.requires_grad]
        groups = [
            {"params": [p for name, p in trained if name in decayed], "weight_decay": trainer.args.weight_decay},
            {"params": [p for name, p in trained if name not in decayed], "weight_decay": 0.0},
        ]
        return optimizer_cls(groups, **{**kwargs, "lr": self.learning_rate})

    @contextlib.contextmanager
    def gradient_sync(self, sync: bool) -> Iterator[None]:
        """Context for one micro-batch's forward and backward; gradients cross processes only if `sync`."""
        if self._uses_deepspeed:
            if self.optimizer is not None:
                self.engine.set_gradient_accumulation_boundary(sync)
            yield
            return
        with contextlib.nullcontext() if sync else self._accelerator.no_sync(self.engine):
            yield

    def backward(self, loss: torch.Tensor) -> None:
        """Accumulates the gradient of a micro-batch's loss, already divided by the number of micro-batches."""
        if self._uses_deepspeed:
            self.engine.backward(loss, scale_wrt_gas=False)
        else:
            (loss if self._scaler is None else self._scaler.scale(loss)).backward()

    def step(self) -> float:
        """Clips the accumulated gradient by norm, updates the parameters and clears the gradient. Returns the norm before clipping, not
        finite where `fp16=True` dropped a gradient that overflows, which it does independently of the trainer's own model."""
        if self._uses_deepspeed:
            self.engine.step()  # clips, updates and clears
            self.optimizer.step()  # does nothing, but schedulers want to have seen it
            self._step_was_skipped = self.optimizer.step_was_skipped
            norm = self.engine.get_global_grad_norm()
            return math.nan if norm is None else float(norm)  # fp16: the first step may overflow and be skipped
        if self._scaler is not None:
            self._scaler.unscale_(self.optimizer)
        parameters = [p for p in self.module.parameters() if p.requires_grad]
        norm = nn.utils.clip_grad_norm_(parameters, self._max_grad_norm if self._max_grad_norm > 0 else math.inf)
        if self._scaler is None:
            self.optimizer.step()
        else:
            scale = self._scaler.get_scale()
            self._scaler.step(self.optimizer)
            self._scaler.update()
            self._step_was_skipped = self._scaler.get_scale() < scale
        self.optimizer.zero_grad(set_to_none=True)
        return _fsdp.whole(norm).item()

    def update(self, logs: "Logs", folder: str, advance_schedule: bool = True) -> None:
        """Calls [`step`], with learning rate and gradient norm in the logs under the model's `folder`. Then advances the schedule, if
        `advance_schedule` and the step was not skipped."""
        logs.value(f"{folder}/learning_rate", self.optimizer.param_groups[0]["lr"])
        logs.value(f"{folder}/grad_norm", self.step())
        if advance_schedule and not self._step_was_skipped:
            self.scheduler.step()

    def save_pretrained(self, directory: str | Path, write: bool) -> None:
        """Writes the weights to a folder, for `from_pretrained`. All processes must call it; those with `write` write."""
        state_dict = None
        if self._uses_deepspeed:
            state_dict = whole_state_dict(self.module, self.engine, self._accelerator)
            write = write and state_dict is not None  # with ZeRO-3 the first process alone has them
        elif self._uses_fsdp and self.optimizer is not None:
            state_dict = self._accelerator.get_state_dict(self.engine)
        if write:
            self.module.save_pretrained(directory, state_dict=state_dict)

    def save_state(self, directory: str | Path, write: bool = True) -> None:
        """Writes optimizer and schedule to a folder, as safetensors and JSON; DeepSpeed a checkpoint of its own, each process its part. All
        processes must call it; those with `write` write."""
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        tensors: dict[str, torch.Tensor] = {}
        scalars, groups = {}, []
        if self._uses_deepspeed:
            self.engine.save_checkpoint(str(directory), exclude_frozen_parameters=is_peft_model(self.module))
        elif write or self._uses_fsdp:
            optimizer, is_fsdp = self.optimizer, self._uses_fsdp
            state = _fsdp.optimizer_state(self.module, optimizer) if is_fsdp else optimizer.state_dict()
            groups = state["param_groups"]
            for index, slots in state["state"].items():
                for name, value in _flat(slots):
                    if isinstance(value, torch.Tensor):
                        tensors[f"{index}.{name}"] = value.contiguous()
                    else:
                        scalars[f"{index}.{name}"] = value
        if not write:
            return
        contents = {
            "param_groups": groups,
            "scalars": scalars,
            "scheduler": self.scheduler.state_dict(),
            "scaler": None if self._scaler is None else self._scaler.state_dict(),
        }
        save_file(tensors, directory / _TENSORS)
        (directory / _STATE).write_text(json.dumps(contents), encoding="utf-8")

    def load_checkpoint(self, trainer: Trainer, directory: str | Path) -> None:
        """Restores what [`save_pretrained`] and [`save_state`] wrote to a folder; the trainer loads the weights."""
        if self._uses_fsdp:
            _fsdp.load_weights(self.module, directory)
        elif not self._uses_deepspeed:  # whose checkpoint has the weights as well
            trainer._load_from_checkpoint(str(directory), self.module)
        self.load_state(directory)

    def load_state(self, directory: str | Path) -> None:
        """Restores what [`save_state`] wrote to a folder, if anything: a checkpoint can be saved without optimizers."""
        directory = Path(directory)
        if not (directory / _STATE).exists():
            return
        contents = json.loads((directory / _STATE).read_text(encoding="utf-8"))
        if self._uses_deepspeed:
            self.engine.load_checkpoint(str(directory), load_module_strict=not is_peft_model(self.module))
        else:
            slots: dict[int | str, dict] = {}
            for key, value in (load_file(directory / _TENSORS) | contents["scalars"]).items():
                parameter, name = key.rsplit(".", 1)  # its name with FSDP, else its number
                *groups, name = name.split("/")
                slot = slots.setdefault(parameter if self._uses_fsdp else int(parameter), {})
                for group in groups:
                    slot = slot.setdefault(group, {})
                slot[name] = value
            state = {"state": slots, "param_groups": contents["param_groups"]}
            if self._uses_fsdp:  # the same in all processes
                options = StateDictOptions(full_state_dict=True)
                set_optimizer_state_dict(self.module, self.optimizer, state, options=options)
            else:
                self.optimizer.load_state_dict(state)
        self.scheduler.load_state_dict(contents["scheduler"])
        if self._scaler is not None and contents["scaler"]:
            self._scaler.load_state_dict(contents["scaler"])


def _flat(slots: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields an optimizer's state of one parameter with flat names: nested names (bitsandbytes) are joined by a slash."""
    for name, value in slots.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}/")
        elif prefix and isinstance(value, torch.Tensor):
            yield prefix + name, value.clone()  # tables that parameters share are written for each
        else:
            yield prefix + name, value


def prepare_second_models(trainer: Any, num_training_steps: int, checkpoint: Path | None) -> None:
    """
    Wraps a trainer's second models for training, and restores them from a checkpoint.

    Raises:
        `ValueError`: If the checkpoint lacks one of them.
    """
    for folder, model in trainer.second_models.items():
        model.prepare(trainer, num_training_steps)
        if checkpoint is not None:
            path = checkpoint / folder
            if not path.is_dir():
                raise ValueError(
                    f"The checkpoint {checkpoint} holds no {_NAMES[folder]}; resume from one that "
                    f"`{type(trainer).__name__}` wrote, or start a new run with that checkpoint's policy as `model`."
                )
            model.load_checkpoint(trainer, path)


class Adapter(AdapterView):
    """One adapter of a PEFT model, as a model: passes run with this adapter, and parameters, saving and loading are of its weights alone.
    Everything else is the PEFT model's. `weights` are its parameters by their names in `model`."""

    def __init__(self, model: "PeftModel", name: str, weights: dict[str, nn.Parameter]):
        super().__init__(model, adapter_layers(model), name)
        self._weights = weights

    def named_parameters(self, *, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters of this adapter, by their names in the PEFT model. None of them is tied to another."""
        yield from self._weights.items()

    def parameters(self) -> Iterator[nn.Parameter]:
        yield from self._weights.values()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """This adapter's weights, by their names in the PEFT model."""
        return {name: p.detach() for name, p in self.named_parameters()}

    def requires_grad_(self, requires_grad: bool = True) -> "Adapter":
        """Freezes or unfreezes this adapter, whichever is active."""
        for p in self.parameters():
            p.requires_grad_(requires_grad)
        return self

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Context in which this adapter is not trainable."""
        with trainable_kept(self.model):
            self.requires_grad_(False)
            yield

    def save_pretrained(self, save_directory: str | Path) -> None:
        """Writes this adapter alone to a folder, as an ordinary PEFT adapter."""
        from peft import get_peft_model_state_dict

        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        weights = get_peft_model_state_dict(self.model, adapter_name=self.name)
        save_file({k: v.contiguous() for k, v in weights.items()}, folder / _WEIGHTS, metadata={"format": "pt"})
        config = copy.copy(self.model.peft_config[self.name])
        config.inference_mode = True
        config.save_pretrained(folder)

    def load(self, directory: str | Path) -> None:
        """Reads weights that [`save_pretrained`] wrote. Raises a `ValueError` if there is no adapter, or one of other layers."""
        from peft import set_peft_model_state_dict

        path = Path(directory) / _WEIGHTS
        if not path.is_file():
            raise ValueError(
                f"{directory} holds no adapter (`{_WEIGHTS}`), but the proposal is an adapter over the policy's base; "
                "was it trained with full weights?"
            )
        result: Any = set_peft_model_state_dict(self.model, load_file(path), adapter_name=self.name)
        missing = sorted(set(result.missing_keys) & set(self._weights))
        if missing or result.unexpected_keys:
            raise ValueError(
                f"The adapter in {directory} is not of the proposal's layers (first of them: "
                f"{[*missing, *result.unexpected_keys][0]}); train with the configuration it was made with."
            )


def add_adapter(model: "PeftModel", name: str, config: "PeftConfig | None" = None) -> Adapter:
    """
    Adds a frozen adapter, of a configuration of its own or as a copy of the policy's, to a model; what was trainable stays so.
    `model.save_pretrained` leaves it out from now on, unless `selected_adapters` names it.

    Raises:
        `ValueError`: If the model has an adapter of that name.
    """
    if name in model.peft_config:
        raise ValueError(
            f"The policy already has an adapter named {name!r}, the proposal's name; rename or delete it."
        )
    policy_config = model.peft_config[POLICY_ADAPTER]
    own = copy.deepcopy(policy_config if config is None else config)
    own.inference_mode = False
    own.base_model_name_or_path = policy_config.base_model_name_or_path
    before = {id(p) for p in model.parameters()}
    with trainable_kept(model):
        model.add_adapter(name, own)
    weights = {key: p for key, p in model.named_parameters() if id(p) not in before}
    # The precision that TRL gives the policy's, which depends on quantization and on ZeRO-3; it leaves DoRA's magnitudes alone
    matrices = {key: p for key, p in model.named_parameters() if "lora_magnitude_vector" not in key.split(".")}
    dtype = next(p.dtype for key, p in matrices.items() if POLICY_ADAPTER in key.split("."))
    for key, p in weights.items():
        if config is None:
            policy_key = ".".join(POLICY_ADAPTER if part == name else part for part in key.split("."))
            p.data = model.get_parameter(policy_key).data.clone()
        elif key in matrices:
            p.data = p.data.to(dtype)
    disable_dropout(model)  # the new adapter's; TRL has done so with all others
    model.save_pretrained = MethodType(_save_the_others, model)  # type: ignore[method-assign]
    bind_adapters_to_checkpoints(base_of(model))
    return Adapter(model, name, weights).requires_grad_(False)


def _save_the_others(model, save_directory, safe_serialization=True, selected_adapters=None, **kwargs) -> None:
    """`PeftModel.save_pretrained` of every adapter but the proposal's."""
    if selected_adapters is None:
        selected_adapters = [name for name in model.peft_config if name != SecondAdapter.name]
    type(model).save_pretrained(model, save_directory, safe_serialization, selected_adapters, **kwargs)


class SecondAdapter(SecondModel):
    """
    A [`SecondModel`] that is an adapter over the same frozen base as the trainer's own, as [`add_adapter`] makes it.

    Its passes run on the bare model with its adapter active, never through the trainer's engine: no data-parallel wrapper waits for
    gradients of an unused adapter. Gradients are averaged over processes once, in [`step`]. DeepSpeed casts the adapter to its training
    precision, and ZeRO-3 partitions it: the optimizer then works, in each process, on a whole copy in float32, which is also what is saved.

    Raises:
        `ValueError`: With FSDP, which flattens all of a model's weights, or a configuration of DeepSpeed that cannot serve two models.
    """

    name = "proposal"  # of the adapter

    def __init__(self, module: Adapter, accelerator: Accelerator, learning_rate: float):
        super().__init__(module, accelerator, learning_rate)
        self._uses_deepspeed = False  # the adapter has no engine
        self._policy_engine: nn.Module | None = None  # DeepSpeed's
        self._masters: list[torch.Tensor] | None = None

    def prepare(self, trainer: Trainer, num_training_steps: int) -> None:
        """As [`SecondModel.prepare`]. Unfreezes the adapter, which is frozen while the trainer prepares its own model."""
        self.module.requires_grad_(True)
        super().prepare(trainer, num_training_steps)

    def _build(self, trainer: Trainer) -> None:
        """As [`SecondModel._build`], but there is no engine; with DeepSpeed the optimizer gets copies in float32 in each step."""
        if zero_stage(self._accelerator) is not None:
            self._policy_engine = trainer.model_wrapped
            with gathered(self.module):
                self._masters = [p.detach().float().clone() for p in self.module.parameters()]
        self.optimizer = self._create_optimizer(trainer)

    @contextlib.contextmanager
    def gradient_sync(self, sync: bool) -> Iterator[None]:
        """Unfreezes the adapter, which PEFT (0.21) freezes as a callback switches adapters; gradients cross processes in [`step`]."""
        if self.optimizer is not None:
            self.module.requires_grad_(True)
        yield

    def backward(self, loss: torch.Tensor) -> None:
        """As [`SecondModel.backward`]; then lets the policy's engine, if it is DeepSpeed's, release layers that it has gathered."""
        super().backward(loss)
        if self._policy_engine is not None:
            end_backward(self._policy_engine)

    @contextlib.contextmanager
    def _masters_in_place(self, changed: bool = False) -> Iterator[None]:
        """Context in which, with DeepSpeed, the parameters are their float32 copies. With `changed=True`, these are copied back."""
        if self._masters is None:
            yield
            return
        parameters = list(self.module.parameters())
        before = [p.data for p in parameters]
        for p, master in zip(parameters, self._masters, strict=True):
            p.data = master
        try:
            yield
        finally:
            for p, data in zip(parameters, before, strict=True):
                p.data = data
        if changed:
            with gathered(self.module, write=True), torch.no_grad():
                for p, master in zip(parameters, self._masters, strict=True):
                    p.copy_(master)

    def save_pretrained(self, directory: str | Path, write: bool) -> None:
        """As [`SecondModel.save_pretrained`]; each process has the whole adapter."""
        if write:
            with self._masters_in_place():
                self.module.save_pretrained(directory)

    def load_checkpoint(self, trainer: Trainer, directory: str | Path) -> None:
        with self._masters_in_place(changed=True):
            self.module.load(directory)
            self.load_state(directory)  # an optimizer's state takes the precision of the parameters it finds

    def step(self) -> float:
        """As [`SecondModel.step`], of the gradient averaged over processes; raises a `ValueError` if nothing has one."""
        if all(p.grad is None for p in self.module.parameters()):
            raise ValueError(
                f"The adapter {self.name!r} has no gradient: it was frozen or inactive in its own passes; switch adapters "
                "between updates alone, as in `on_step_end`."
            )
        with self._masters_in_place(changed=True):
            for p in self.module.parameters():
                if p.grad is not None:
                    p.grad = p.grad.to(p.dtype)
            if self._accelerator.num_processes > 1:
                self._average_gradients()
            return super().step()

    def _average_gradients(self) -> None:
        """Averages gradients over processes, which must all call it, in one call for each dtype; 0 counts for a parameter without one."""
        groups = defaultdict(list)
        for p in self.module.parameters():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            groups[p.grad.dtype].append(p.grad)
        for grads in groups.values():
            flat = self._accelerator.reduce(torch.cat([grad.flatten() for grad in grads]), reduction="mean")
            for grad, mean in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
                grad.copy_(mean.view_as(grad))


def save_reference(trainer: Any, checkpoint: Path) -> None:
    """Writes the parameters of a reference that moves (`sync_ref_model=True`): TRL (1.16) loads a resumed run's as it began. All processes
    must call it. With FSDP's first version, whose parameters are flat, nothing is written."""
    if not trainer.args.sync_ref_model or _is_flat(trainer):
        return
    module = trainer.accelerator.unwrap_model(trainer.ref_model, keep_torch_compile=False)
    weights: dict[str, torch.Tensor] = {}
    with gathered(module):
        for name, p in module.named_parameters():  # those that TRL moves; tied ones once
            value = _fsdp.whole(p.detach())
            if trainer.args.should_save:
                weights[name] = value.cpu().contiguous().clone()
    if trainer.args.should_save:
        checkpoint.mkdir(parents=True, exist_ok=True)
        save_file(weights, checkpoint / REFERENCE)


def load_reference(trainer: Any, checkpoint: Path) -> None:
    """Loads the reference that [`save_reference`] wrote, in all processes. Raises a `ValueError` if the checkpoint holds no reference, or
    that of another model."""
    if not trainer.args.sync_ref_model:
        return
    path = checkpoint / REFERENCE
    if not path.is_file() and not any(checkpoint.glob("position-*.json")):  # of weights alone
        logger.warning("%s holds no reference; `sync_ref_model=True` begins with that of `model`.", checkpoint)
        return
    if not path.is_file() or _is_flat(trainer):
        raise ValueError(
            f"{checkpoint} holds no reference that `sync_ref_model=True` could go on from (written by an earlier version, or "
            "with FSDP's first version); resume from another, or start a new run from its models."
        )
    weights: dict[str, Any] = load_file(path)
    module = trainer.accelerator.unwrap_model(trainer.ref_model, keep_torch_compile=False)
    names = {name for name, _ in module.named_parameters()}
    if names != set(weights):
        raise ValueError(
            f"{path} does not fit the reference that `model` makes: only one of them has `{min(names ^ set(weights))}`. Set `model` to the "
            "one that the run began with."
        )
    if trainer.accelerator.is_fsdp2:
        set_model_state_dict(module, weights, options=StateDictOptions(full_state_dict=True, strict=False))
        return
    with gathered(module, write=True), torch.no_grad():
        for name, p in module.named_parameters():
            p.copy_(weights[name])


def _is_flat(trainer: Any) -> bool:
    """Whether the run uses FSDP's first version, whose parameters are flat."""
    accelerator = trainer.accelerator
    return accelerator.distributed_type == DistributedType.FSDP and not accelerator.is_fsdp2


def build_value_model(
    model: str | PreTrainedModel, init_kwargs: dict[str, Any], peft_config: Any = None
) -> PreTrainedModel:
    """
    Makes a token classifier with one label, whose logit at a token is the value after that token.

    Args:
        model (`str` or [`~transformers.PreTrainedModel`]):
            What it starts from. A causal language model gives its transformer, without an adapter, under a new head that is 0 at first; a
            sequence classifier with one label (a reward model) transformer and head: the first values are its rewards of the
            unfinished texts. A token classifier with one label is taken as it is, of the others weights are copied. The folder of an
            adapter that a value model had goes on, over the base that it names.
        init_kwargs (`dict`): Arguments of `from_pretrained` for a path or id.
        peft_config (`peft.PeftConfig`, *optional*): If given, an adapter and the head are trained. A saved adapter keeps its own.

    Raises:
        `ValueError`: If the architecture has no token classifier, a classifier has several labels or a head of several
            layers, the model is quantized and no adapter is asked for, or a saved adapter is not a value model's.
    """
    value: Any
    if not isinstance(model, str):
        base = base_of(model)
        if type(base).__name__.endswith("ForTokenClassification"):
            value = model
        elif is_peft_model(model) or getattr(base, "is_quantized", False):
            value = _load_token_classifier(base.config.name_or_path, init_kwargs)
        else:
            value = _copied(base)
    elif (saved := adapter_config(model)) is not None:
        from peft import PeftModel

        if saved.task_type != "TOKEN_CLS":
            raise ValueError(
                f"`value_model={model!r}` is the folder of an adapter that gives no values; pass that of a value model, or a "
                "whole model."
            )
        base = _load_token_classifier(saved.base_model_name_or_path, init_kwargs)
        value, peft_config = PeftModel.from_pretrained(base, model, is_trainable=True), None
    else:
        value = _load_token_classifier(model, init_kwargs)
    if value.config.num_labels != 1:
        raise ValueError(
            f"`value_model` has {value.config.num_labels} labels, but a value is one number; pass a model with one label."
        )
    if peft_config is None and not is_peft_model(value) and getattr(value, "is_quantized", False):
        raise ValueError(
            "`value_model` is quantized and cannot be trained whole; pass `value_peft_config`, or load it in full."
        )
    if peft_config is not None:
        from peft import get_peft_model

        peft_config = copy.deepcopy(peft_config)
        peft_config.task_type = "TOKEN_CLS"  # the head is new: it has to be trained and saved with the adapter
        value = get_peft_model(value, peft_config)
    value.config.get_text_config().use_cache = False
    disable_dropout(value)
    return value.train()  # activation checkpointing works in training mode alone


def _load_token_classifier(path: Any, init_kwargs: dict[str, Any]) -> PreTrainedModel:
    """A token classifier from a path or id of a token classifier, a sequence classifier or a causal language model."""
    if (quantization_config := init_kwargs.get("quantization_config")) is not None:  # a new head must not be quantized
        quantization_config = copy.deepcopy(quantization_config)
        skipped = quantization_config.llm_int8_skip_modules or []
        quantization_config.llm_int8_skip_modules = [*skipped, "score", "classifier"]
        init_kwargs = init_kwargs | {"quantization_config": quantization_config}
    config = AutoConfig.from_pretrained(
        path, trust_remote_code=init_kwargs.get("trust_remote_code", False), revision=init_kwargs.get("revision")
    )
    architecture = (config.architectures or [""])[0]
    if architecture.endswith("ForSequenceClassification"):
        sequence_classifier: Any = AutoModelForSequenceClassification
        return _copied(create_model_from_path(path, sequence_classifier, **init_kwargs))
    token_classifier: Any = AutoModelForTokenClassification
    if architecture.endswith("ForTokenClassification"):
        return create_model_from_path(path, token_classifier, **init_kwargs)
    _require_token_classifier(config)
    value = create_model_from_path(path, token_classifier, num_labels=1, **init_kwargs)
    with gathered(_head(value), write=True):
        _set_head(value, None)
    return value


def _copied(source: PreTrainedModel) -> PreTrainedModel:
    """A token classifier with the weights of a causal language model or a sequence classifier."""
    is_classifier = type(source).__name__.endswith("ForSequenceClassification")
    config = copy.deepcopy(source.config)
    if not is_classifier:
        config.num_labels = 1
    _require_token_classifier(config)
    value = AutoModelForTokenClassification.from_config(config, dtype=source.dtype)
    with gathered(source), gathered(value, write=True):
        missing = value.base_model.load_state_dict(source.base_model.state_dict(), strict=False).missing_keys
        assert not missing, missing  # one class, one configuration; a pooler may be left over
        if config.num_labels == 1:
            _set_head(value, _head(source) if is_classifier else None)
    return value


def _require_token_classifier(config: Any) -> None:
    if type(config) not in MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING:
        raise ValueError(
            f"transformers has no token classifier for `{config.model_type}`, which the value model would be; pass "
            "`value_model` of another architecture with the policy's tokenizer."
        )


def _head(model: PreTrainedModel) -> nn.Linear:
    """The linear head of a classifier. Raises a `ValueError` if there is not exactly one."""
    heads = [child for child in model.children() if isinstance(child, nn.Linear)]
    if len(heads) != 1:
        raise ValueError(
            f"The head of `{type(model).__name__}`, which `value_model` is, is not one linear layer; pass a causal language "
            "model or a reward model with a linear head."
        )
    return heads[0]


def _set_head(value: PreTrainedModel, source: nn.Linear | None) -> None:
    """Copies a head to a value model's, or sets that to 0 if `source` is `None`."""
    head = _head(value)
    with torch.no_grad():
        nn.init.zeros_(head.weight)
        if head.bias is not None:
            nn.init.zeros_(head.bias)
        if source is not None:
            head.weight.copy_(source.weight)
            if head.bias is not None and source.bias is not None:
                head.bias.copy_(source.bias)


def check_value_model(value: PreTrainedModel, policy: PreTrainedModel) -> None:
    """Refuses a value model that cannot read the policy's tokens, or that reads tokens still to come."""
    check_vocabulary_size(value, "`value_model`", policy)
    backbone = base_of(value).base_model
    with gathered_by_layer(backbone):
        ahead = value.config.is_encoder_decoder or reads_ahead(backbone)
    if ahead:
        raise ValueError(
            "`value_model` reads tokens to the right (it is an encoder), so its values would know what is still to be "
            "sampled; pass a causal model."
        )


def token_values(
    model: torch.nn.Module,
    accelerator: Accelerator,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    layout: Layout,
) -> torch.Tensor:
    """V(s_t), the value before each token of the completions of rows, of shape `(R·k, T)` and in float32; gradient flows to the model. Args
    as for [`~trl_repulse.engine.scoring.token_log_probs`]."""
    with accelerator.autocast():
        logits = model(input_ids=input_ids, attention_mask=attention_mask, layout=layout).logits  # (R·k, T + 1, 1)
    return logits[:, -layout.width - 1 : -1, 0].float()
