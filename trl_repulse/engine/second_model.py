"""A second model that is trained together with a TRL trainer's own."""

import contextlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import is_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel, Trainer, get_scheduler

from ..models import _fsdp
from ..models._deepspeed import check_deepspeed, initialize, is_partitioned, whole_state_dict, zero_stage


# Folders of second models inside `output_dir` and inside each checkpoint, and prefixes of their metrics
PROPOSAL_FOLDER = "proposal"
VALUE_FOLDER = "value"
_NAMES = {PROPOSAL_FOLDER: "proposal", VALUE_FOLDER: "value model"}
_TENSORS = "optimizer.safetensors"
_STATE = "optimizer.json"


class SecondModel:
    """
    A model that is trained together with a TRL trainer's own: its engine, optimizer, schedule, clipping, saving and loading.

    The trainer treats its policy as any TRL trainer does. It calls [`prepare`] once training is set up, [`backward`] for each
    micro-batch inside [`gradient_sync`], and [`step`] and [`step_schedule`] for each update.

    Args:
        module ([`~transformers.PreTrainedModel`] or `peft.PeftModel`):
            Model to train. Moved to the accelerator's device.
        accelerator ([`~accelerate.Accelerator`]):
            The trainer's accelerator.
        learning_rate (`float`):
            Peak learning rate of this model's optimizer.

    Raises:
        `ValueError`: With a configuration of FSDP or DeepSpeed that cannot serve two models.
    """

    def __init__(self, module: PreTrainedModel, accelerator: Accelerator, learning_rate: float):
        _fsdp.check_fsdp(accelerator, module)
        check_deepspeed(accelerator)
        # Quantized models and models that ZeRO-3 has partitioned are placed when they are loaded; FSDP2 places parts
        placed = getattr(module, "is_quantized", False) or is_partitioned(module) or accelerator.is_fsdp2
        if not placed:
            module.to(accelerator.device)
        self.module = module
        self.engine: Any = module
        self.learning_rate = learning_rate
        self.optimizer: Any = None
        self.scheduler: Any = None
        self._accelerator = accelerator
        self._deepspeed = zero_stage(accelerator) is not None
        self._fsdp = accelerator.is_fsdp2
        self._scaler: torch.amp.GradScaler | None = None
        self._step_was_skipped = False
        self._max_grad_norm = 0.0

    def prepare(self, trainer: Trainer, num_training_steps: int) -> None:
        """
        Wraps the model as the trainer's is wrapped. Builds optimizer, schedule (over `num_training_steps` updates) and clipping from the
        trainer's arguments.

        A second call, as by a second `trainer.train()`, keeps engine and optimizer and starts the schedule anew.
        """
        args = trainer.args
        if self.optimizer is None:
            self._build(trainer)
            self._max_grad_norm = args.max_grad_norm
            if self._accelerator.mixed_precision == "fp16" and not self._deepspeed:  # whose engines scale themselves
                # Two optimizers must not share a scaler
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
        """Makes engine and optimizer."""
        args = trainer.args
        if args.activation_checkpointing:
            kwargs = dict(args.activation_checkpointing_kwargs or {})
            layers = {name: kwargs.pop(name) for name in ("every_n_layers", "offload") if name in kwargs}
            self.module.activation_checkpointing_enable(activation_checkpointing_kwargs=kwargs or None, **layers)
        optimizer = self._create_optimizer(trainer)
        if self._deepspeed:
            self.engine, self.optimizer = initialize(self.module, optimizer, self._accelerator, args.max_grad_norm)
        elif self._fsdp:
            self.engine, self.optimizer = _fsdp.prepare(self.module, optimizer, self._accelerator)
        else:
            self.engine, self.optimizer = self._accelerator.prepare_model(self.module), optimizer

    def _create_optimizer(self, trainer: Trainer) -> torch.optim.Optimizer:
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
        if self._deepspeed:
            if self.optimizer is not None:
                self.engine.set_gradient_accumulation_boundary(sync)
            yield
            return
        with contextlib.nullcontext() if sync else self._accelerator.no_sync(self.engine):
            yield

    def backward(self, loss: torch.Tensor) -> None:
        """Accumulates the gradient of a micro-batch's loss, already divided by the number of micro-batches."""
        if self._deepspeed:
            self.engine.backward(loss, scale_wrt_gas=False)
        else:
            (loss if self._scaler is None else self._scaler.scale(loss)).backward()

    def step(self) -> float:
        """
        Clips the accumulated gradient by norm, updates the parameters and clears the gradient.

        With `fp16=True` a gradient that overflows is dropped, independently of the trainer's own model.

        Returns:
            `float`: The gradient's norm before clipping; not finite where it was dropped.
        """
        if self._deepspeed:
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

    def step_schedule(self) -> None:
        """Advances the learning rate schedule, unless the last step was skipped."""
        if not self._step_was_skipped:
            self.scheduler.step()

    def save_pretrained(self, directory: str | Path, write: bool) -> None:
        """Writes the weights to a folder, for `from_pretrained`. All processes must call it; those with `write` write."""
        state_dict = None
        if self._deepspeed:
            state_dict = whole_state_dict(self.module, self.engine, self._accelerator)
            write = write and state_dict is not None  # with ZeRO-3 the first process alone has them
        elif self._fsdp and self.optimizer is not None:
            state_dict = self._accelerator.get_state_dict(self.engine)
        if write:
            self.module.save_pretrained(directory, state_dict=state_dict)

    def save_state(self, directory: str | Path, write: bool = True) -> None:
        """
        Writes optimizer and schedule to a folder, as safetensors and JSON. All processes must call it; those with `write` write. DeepSpeed
        writes a checkpoint of its own, each process its part.
        """
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        tensors: dict[str, torch.Tensor] = {}
        scalars, groups = {}, []
        if self._deepspeed:
            self.engine.save_checkpoint(str(directory), exclude_frozen_parameters=is_peft_model(self.module))
        elif write or self._fsdp:
            state = _fsdp.optimizer_state(self.module, self.optimizer) if self._fsdp else self.optimizer.state_dict()
            groups = state["param_groups"]
            for index, slots in state["state"].items():
                for name, value in _flat(slots):
                    if isinstance(value, torch.Tensor):
                        tensors[f"{index}.{name}"] = value.contiguous()
                    else:
                        scalars[f"{index}.{name}"] = value
        if not write:
            return
        rest = {
            "param_groups": groups,
            "scalars": scalars,
            "scheduler": self.scheduler.state_dict(),
            "scaler": None if self._scaler is None else self._scaler.state_dict(),
        }
        save_file(tensors, directory / _TENSORS)
        (directory / _STATE).write_text(json.dumps(rest), encoding="utf-8")

    def load_checkpoint(self, trainer: Trainer, directory: str | Path) -> None:
        """
        Restores weights, optimizer and schedule from a folder that [`save_pretrained`] and [`save_state`] wrote; the trainer loads the
        weights.
        """
        if self._fsdp:
            _fsdp.load_weights(self.module, directory)
        elif not self._deepspeed:  # whose checkpoint has the weights as well
            trainer._load_from_checkpoint(str(directory), self.module)
        self.load_state(directory)

    def load_state(self, directory: str | Path) -> None:
        """Restores what [`save_state`] wrote to a folder, if anything: a checkpoint can be saved without optimizers."""
        directory = Path(directory)
        if not (directory / _STATE).exists():
            return
        rest = json.loads((directory / _STATE).read_text(encoding="utf-8"))
        if self._deepspeed:
            self.engine.load_checkpoint(str(directory), load_module_strict=not is_peft_model(self.module))
        else:
            slots: dict[int | str, dict] = {}
            for key, value in (load_file(directory / _TENSORS) | rest["scalars"]).items():
                parameter, name = key.rsplit(".", 1)  # its name with FSDP, else its number
                *groups, name = name.split("/")
                slot = slots.setdefault(parameter if self._fsdp else int(parameter), {})
                for group in groups:
                    slot = slot.setdefault(group, {})
                slot[name] = value
            state = {"state": slots, "param_groups": rest["param_groups"]}
            if self._fsdp:
                _fsdp.load_optimizer_state(self.module, self.optimizer, state)
            else:
                self.optimizer.load_state_dict(state)
        self.scheduler.load_state_dict(rest["scheduler"])
        if self._scaler is not None and rest["scaler"]:
            self._scaler.load_state_dict(rest["scaler"])


def _flat(slots: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """An optimizer's state of one parameter, flat: nested names (bitsandbytes) are joined by a slash."""
    for name, value in slots.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}/")
        elif prefix and isinstance(value, torch.Tensor):
            yield prefix + name, value.clone()  # tables that parameters share are written for each
        else:
            yield prefix + name, value


class SecondModels:
    """Mixin before a TRL trainer that prepares, updates, saves and loads second models with the policy."""

    _second_models: dict[str, SecondModel] = {}  # by folder; a trainer sets its own

    def _update_second(self, folder: str, advance_schedule: bool = True) -> None:
        """Updates a second model with the gradient it has, and logs learning rate and norm."""
        model, metrics = self._second_models[folder], self._metrics["train"]
        metrics[f"{folder}/learning_rate"].append(model.optimizer.param_groups[0]["lr"])
        metrics[f"{folder}/grad_norm"].append(model.step())
        if advance_schedule:
            model.step_schedule()

    def _prepare_for_training(self, max_steps, train_dataloader, resume_from_checkpoint):
        prepared = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        for folder, model in self._second_models.items():
            model.prepare(self, max_steps)
            if resume_from_checkpoint is not None:
                path = Path(resume_from_checkpoint) / folder
                if not path.is_dir():
                    raise ValueError(
                        f"The checkpoint {resume_from_checkpoint} holds no {_NAMES[folder]}; resume from one that "
                        f"`{type(self).__name__}` wrote, or start a new run with that checkpoint's policy as `model`."
                    )
                model.load_checkpoint(self, path)
        return prepared

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        for folder, model in self._second_models.items():
            path = Path(output_dir or self.args.output_dir) / folder
            model.save_pretrained(path, self.args.should_save)
            if self.args.should_save:
                self.processing_class.save_pretrained(path)
                self._describe_second(path)
        super().save_model(output_dir, _internal_call)

    def _describe_second(self, path: Path) -> None:
        """Writes more files to the folder of a second model that was saved."""

    def _save_second_models(self, checkpoint: Path) -> None:
        """Writes what training needs to go on, without the weights, which `save_model` writes."""
        for folder, model in self._second_models.items():
            model.save_state(checkpoint / folder, self.args.should_save)

    def _load_best_model(self) -> None:
        super()._load_best_model()
        for folder, model in self._second_models.items():
            model.load_checkpoint(self, Path(self.state.best_model_checkpoint) / folder)
