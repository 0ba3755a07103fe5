"""Resuming a run from a checkpoint: the state that TRL and transformers do not keep, and settings that must not change."""

import contextlib
import hashlib
import json
import re
import shutil
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate.logging import get_logger
from accelerate.utils import is_peft_model
from datasets import Dataset
from safetensors.torch import load_file, save_file
from torch.utils.data import Sampler
from transformers import TrainingArguments

from .._errors import changed_prompt
from .._trl import PREFIX_CHECKPOINT_DIR, TRAINER_STATE_NAME
from ..data._prompts import rendering
from ..models._adapters import AdapterView
from .records import EARLIER_NEGATIVES, NEGATIVES, set_negatives_aside
from .second_model import REFERENCE


logger = get_logger(__name__)

# Training state in a checkpoint. With a second model, which is never uploaded, it is of no use on the Hub and not uploaded either
RESUME_STATE = ("optimizer*", "scheduler*", "scaler*", "rng_state*", "global_step*")
# Of the fields of transformers' TrainingArguments, those that are compared. Another value would change the batches that are left,
_BATCHES = "per_device_train_batch_size gradient_accumulation_steps seed".split()
# or is ignored, wholly or in part, and gets a warning; `value_learning_rate` and `proposal_learning_rate` too
_REPORTED = """
    learning_rate proposal_learning_rate value_learning_rate lr_scheduler_type warmup_steps max_steps num_train_epochs
    max_grad_norm weight_decay optim optim_args lr_scheduler_kwargs adam_beta1 adam_beta2 adam_epsilon
""".split()
# All fields that TRL and this package add may change the batches or the objective, except these
_FREE = re.compile(
    "log_.*|vllm_(?!importance_sampling|structured).*|.*use_vllm|.*_vllm_.*|.*continuous_batching.*|use_transformers_paged|.*hub.*|save_.*|"
    "num_completions_to_print|num_generations_eval|share_prompts|generation_batch_size|model_init_kwargs|trust_remote_code|"
    "pad_to_multiple_of|cache_implementation|ds3_gather_for_generation"
)
# Not fields of a configuration; another value gets a warning. Rewards have names alone, which a moved folder changes
_REPORTED_OF_MODELS = {
    "model": "a new reference is loaded from a new `model`",
    "reward functions": "the run goes on with the rewards that are given here",
}
_CONSEQUENCES = _REPORTED_OF_MODELS | dict.fromkeys(
    ("lr_scheduler_type", "warmup_steps", "max_steps", "num_train_epochs"),
    "schedules, of `alpha` and `target_dist_beta` too, go on as if it had been so from the start, and may jump; set it to that "
    "for a run like one that was not interrupted",
)
_NEGATIVE_TERM = "negative_term"
_ADAPTERS = ("adapter", "second adapter", "third adapter")
# Fields of an adapter's configuration about its origin and initialisation, not about what it computes
_IGNORED_ADAPTER_FIELDS = """
    base_model_name_or_path revision inference_mode peft_version auto_mapping task_type init_lora_weights eva_config
    corda_config loftq_config lora_ga_config fan_in_fan_out megatron_config megatron_core runtime_config
    ensure_weight_tying
""".split()


class ResumedSampler(Sampler[int]):
    """TRL's `RepeatSampler`, in the order of the epoch whose number `epoch` gives. TRL's (1.16) draws each epoch's order from one generator: a resumed
    run would repeat the first."""

    def __init__(self, sampler: Any, epoch: Callable[[], int]):
        self._sampler, self._epoch = sampler, epoch

    def __iter__(self) -> Iterator[int]:
        """Indices of rows; before, the generator starts anew and draws the orders of the epochs that are over."""
        if self._sampler.shuffle:
            self._sampler.generator.manual_seed(self._sampler.seed)
            for _ in range(self._epoch()):
                torch.randperm(self._sampler.num_samples, generator=self._sampler.generator)
        return iter(self._sampler)

    def __len__(self) -> int:
        return len(self._sampler)


def find_checkpoint(resume_from_checkpoint: str | Path | bool, output_dir: str) -> str:
    """The checkpoint to resume from: the one that is named or, with `True`, the last complete one in `output_dir`. Raises a `ValueError` if
    there is none, or it was not written to its end."""
    if not isinstance(resume_from_checkpoint, bool):
        if not Path(resume_from_checkpoint).is_dir():
            raise ValueError(
                f"There is no checkpoint `{resume_from_checkpoint}`; name the folder of one, or resume with "
                f"`resume_from_checkpoint=True` from the last in {output_dir}."
            )
        if any(Path(resume_from_checkpoint).glob(f"{PREFIX_CHECKPOINT_DIR}-*")):
            raise ValueError(f"`{resume_from_checkpoint}` is the folder of a run; name one of the checkpoints in it.")
        if (reason := why_incomplete(Path(resume_from_checkpoint))) is not None:
            raise ValueError(
                f"The checkpoint {resume_from_checkpoint} is not complete ({reason}): its writing was interrupted. Resume "
                "from an earlier one, or with `resume_from_checkpoint=True` from the last that is complete."
            )
        return str(resume_from_checkpoint)
    folders = [path for path in Path(output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*") if path.is_dir()]
    numbered = {int(number): path for path in folders if (number := path.name.split("-", 1)[1]).isdigit()}
    for _, checkpoint in sorted(numbered.items(), reverse=True):
        if (reason := why_incomplete(checkpoint)) is None:
            return str(checkpoint)
        logger.warning("%s is not complete (%s) and is passed over.", checkpoint, reason)
    raise ValueError(f"There is no complete checkpoint in {output_dir}; start without `resume_from_checkpoint`.")


def how_to_resume(output_dir: str) -> str:
    """How to resume a run that ended too early, in a sentence."""
    try:
        checkpoint = find_checkpoint(True, output_dir)
    except ValueError:
        return f"There is no complete checkpoint in {output_dir}: the run has to start anew."
    return f"`resume_from_checkpoint=True` (`--resume_from_checkpoint true`) goes on from {checkpoint}; the updates after it are lost."


def warn_of_a_run(output_dir: str) -> None:
    """Warns if a folder has a run or a model, which a new run overwrites."""
    folder = Path(output_dir)
    files = (TRAINER_STATE_NAME, "results.json", "config.json", "adapter_config.json", f"{PREFIX_CHECKPOINT_DIR}-*")
    if any(path for pattern in files for path in folder.glob(pattern)):
        logger.warning(
            "`output_dir=%r` holds a run or a model, and this run overwrites its files. To continue that run, stop and set "
            "`resume_from_checkpoint=True` (`--resume_from_checkpoint true`). To keep it, name another folder.",
            output_dir,
        )


@contextlib.contextmanager
def naming_a_full_disk(output_dir: str) -> Iterator[None]:
    """Context in which errors of a full disk, also those of torch and safetensors, say so and how to resume."""
    try:
        yield
    except Exception as error:
        words = ("No space left", "Disk quota exceeded", "unexpected pos", "file write failed")
        if not any(word in str(error) for word in words):
            raise
        raise OSError(
            f"The disk of `output_dir={output_dir!r}` is full, so that a file there was not written to its end. Free some space "
            f"first. {how_to_resume(output_dir)}"
        ) from error


def why_incomplete(checkpoint: Path) -> str | None:
    """Why a checkpoint is not complete, or `None`. The trainer's state is written last, except for the random states of other processes."""
    try:
        json.loads((checkpoint / TRAINER_STATE_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return f"{TRAINER_STATE_NAME} is missing or cut off"
    positions = sorted(checkpoint.glob("position-*.json"))
    if not positions:  # weights alone, or another trainer's
        return None
    processes = json.loads(positions[0].read_text(encoding="utf-8"))["num_processes"]
    names = ["rng_state.pth"] if processes == 1 else [f"rng_state_{rank}.pth" for rank in range(processes)]
    cut = [name for name in names if not zipfile.is_zipfile(checkpoint / name)]
    return f"{cut[0]} is missing or cut off" if cut else None


def without_tied(load_result: Any, *models: Any) -> Any:
    """Removes missing keys of tied weights from a load result, in place: a checkpoint stores them under their first name only."""
    every, once = ({name for x in models for name, _ in x.named_parameters(remove_duplicate=y)} for y in (False, True))
    load_result.missing_keys[:] = [name for name in load_result.missing_keys if name not in every - once]
    return load_result


def begin_checkpoint(trainer: Any, checkpoint: Path) -> None:
    """Removes an earlier run's training state from a checkpoint that is about to be overwritten, so that it counts as incomplete until it
    is written again. `save_only_model=True` would leave that state there. All processes must call it."""
    if trainer.args.should_save:
        (checkpoint / TRAINER_STATE_NAME).unlink(missing_ok=True)
        for pattern in (*RESUME_STATE, "position-*", REFERENCE):
            for path in (*checkpoint.glob(pattern), *checkpoint.glob(f"*/{pattern}")):  # policy and second models
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
    trainer.accelerator.wait_for_everyone()


def save_position(trainer: Any, checkpoint: Path) -> None:
    """Writes, to `position-RANK.json` and `.safetensors`, where this process is in its data, its buffered batches, the state of what
    adapts, and the settings that are compared when the run is resumed. All processes must call it."""
    checkpoint.mkdir(parents=True, exist_ok=True)
    rank = trainer.accelerator.process_index
    tensors: dict[str, torch.Tensor] = {}
    buffer: list[dict[str, Any]] | None = None
    generates_every = trainer.args.steps_per_generation * trainer.num_iterations
    if trainer._buffered_inputs is not None and trainer._step % generates_every:
        buffer = []
        for i, batch in enumerate(trainer._buffered_inputs):
            of_batch = {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}
            tensors |= {f"{i}.{name}": value.detach().cpu().clone() for name, value in of_batch.items()}
            buffer.append({name: value for name, value in batch.items() if name not in of_batch})
    negatives = Path(trainer.args.output_dir) / NEGATIVES
    negative = trainer._negative
    if negative is not None:
        tensors |= {f"{_NEGATIVE_TERM}.{name}": x.cpu() for name, x in negative.tensors().items()}
    position = {
        "num_processes": trainer.accelerator.num_processes,
        "step": trainer._step,
        "buffer": buffer,
        "negatives_bytes": negatives.stat().st_size if negatives.is_file() else 0,
        "negatives_begin": _first_row(negatives),
        _NEGATIVE_TERM: None if negative is None else negative.state(),
        "settings": _settings(trainer),
        "prompt": None if trainer._conversation is None else _rendered(trainer, trainer._conversation),
    }
    save_file(tensors, checkpoint / f"position-{rank}.safetensors")
    (checkpoint / f"position-{rank}.json").write_text(json.dumps(position, indent=2, default=str), encoding="utf-8")
    trainer.accelerator.wait_for_everyone()


def load_position(trainer: Any, checkpoint: Path) -> None:
    """Restores what [`save_position`] wrote, and cuts off later negative data. All processes must call it."""
    rank = trainer.accelerator.process_index
    if not any(checkpoint.glob("position-*.json")):
        logger.warning("%s does not say where in its data the run was; it goes on as TRL does.", checkpoint)
        return
    position = json.loads((checkpoint / f"position-{rank}.json").read_text(encoding="utf-8"))
    trainer._step = position["step"]
    trainer._conversation = (position["prompt"] or {}).get("messages")
    batches = [dict(batch) for batch in position["buffer"] or ()]
    tensors: dict[str, torch.Tensor] = {}
    for key, value in load_file(checkpoint / f"position-{rank}.safetensors").items():
        where, name = key.split(".", 1)
        if where == _NEGATIVE_TERM:
            tensors[name] = value
        elif batches:
            batches[int(where)][name] = value.to(trainer.accelerator.device)
    if position["buffer"] is not None:
        trainer._buffered_inputs = batches
    if trainer._negative is not None and position[_NEGATIVE_TERM] is not None:
        trainer._negative.load_state(position[_NEGATIVE_TERM], tensors)
    negatives = Path(trainer.args.output_dir) / NEGATIVES
    if trainer.accelerator.is_main_process:
        size, expected = negatives.stat().st_size if negatives.is_file() else 0, position["negatives_bytes"]
        if size and _first_row(negatives) != position["negatives_begin"]:
            set_negatives_aside(trainer.args.output_dir)  # of another run
            size = 0
        if size > expected:
            with negatives.open("r+b") as file:
                file.truncate(expected)
        elif size < expected and trainer.args.save_negatives:
            logger.warning(
                "%s has %d bytes, and had %d when %s was written: rows are missing, or it is of another run. %s may have them.",
                *(negatives, size, expected, checkpoint, EARLIER_NEGATIVES),
            )
    trainer.accelerator.wait_for_everyone()


def _first_row(path: Path) -> str:
    """A hash of the first row, by which negative data of two runs differ; empty without a row."""
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        row = file.readline()
    return hashlib.sha256(row).hexdigest() if row else ""


def _settings(trainer: Any) -> dict[str, Any]:
    """Settings that are compared when a run is resumed, as JSON returns them."""
    compared, shared = (*_BATCHES, *_REPORTED), TrainingArguments.__dataclass_fields__
    settings = {
        name: value
        for name, value in trainer.args.to_dict().items()
        if name in compared or not (name in shared or _FREE.fullmatch(name))
    }
    decides = settings.get("potential") == "indicator" or getattr(trainer.args, "draws_hot", False)
    if not decides:  # it only serves a metric
        settings.pop("bad_reward_threshold", None)
    if not trainer.args.sync_ref_model:
        settings = {name: value for name, value in settings.items() if not name.startswith("ref_model_")}
    second = list(trainer.second_models.values())
    settings["second model"] = " and ".join(type(model).__name__ for model in second) or None
    settings["model"] = trainer.model.config._name_or_path
    settings["reward functions"] = trainer.reward_func_names
    modules = [trainer.model, *(model.module for model in second)]
    settings |= dict.fromkeys(_ADAPTERS) | dict(zip(_ADAPTERS, map(_adapter_settings, modules), strict=False))
    settings["train_dataset"] = len(trainer.train_dataset) if isinstance(trainer.train_dataset, Dataset) else None
    return json.loads(json.dumps(settings, default=str))


def _rendered(trainer: Any, messages: list[dict[str, Any]]) -> dict[str, Any]:
    """A conversation, and its text in the policy's chat template."""
    variables = {"chat_template": trainer.chat_template, "tools": trainer.tools or None}
    variables |= trainer.chat_template_kwargs | {"tokenize": False, "add_generation_prompt": True}
    with rendering(trainer.processing_class, messages, "A prompt"):
        text = trainer.processing_class.apply_chat_template(messages, **variables)
    return {"messages": messages, "text": text}


def _adapter_settings(module: Any) -> dict[str, Any] | None:
    """Settings of a model's adapter, for JSON; `None` without one."""
    if isinstance(module, AdapterView):
        config = module.model.peft_config[module.name]
    elif module is not None and is_peft_model(module):
        config = module.peft_config[module.active_adapter]
    else:
        return None
    fields = {name: value for name, value in config.to_dict().items() if name not in _IGNORED_ADAPTER_FIELDS}
    return {name: sorted(value, key=str) if isinstance(value, set | list) else value for name, value in fields.items()}


def check_settings(trainer: Any, checkpoint: Path) -> None:
    """Compares settings with those of the run that wrote a checkpoint, before anything is loaded, and warns of changes. Raises a
    `ValueError` if the run cannot be resumed with them."""
    path = checkpoint / "position-0.json"
    if not path.is_file():
        return
    position = json.loads(path.read_text(encoding="utf-8"))
    new_run = "start a new run with `model` set to the checkpoint"
    if is_peft_model(trainer.model):  # of which the folder has the adapter alone
        new_run = "start a new run with `model=PeftModel.from_pretrained(base, checkpoint, is_trainable=True)`"
    if trainer.accelerator.num_processes != position["num_processes"]:
        raise ValueError(
            f"{checkpoint} is of a run with {position['num_processes']} processes, and this one has "
            f"{trainer.accelerator.num_processes}; launch as many, or {new_run}."
        )
    before, now = position["settings"], _settings(trainer)
    for name in _ADAPTERS:  # fields that differ, and that both versions of PEFT have
        if now[name] is not None and before.get(name) is not None:
            keys = sorted(key for key in now[name] if key in before[name] and now[name][key] != before[name][key])
            before[name], now[name] = ({key: settings[name][key] for key in keys} for settings in (before, now))
    if (recorded := position["prompt"]) is not None:
        text = _rendered(trainer, recorded["messages"])["text"]
        if text != recorded["text"]:
            raise ValueError(
                f"Prompts differ from those of the run that wrote {checkpoint}: {changed_prompt(text, recorded['text'])}, or "
                f"{new_run}."
            )
        if "strftime_now" in str(trainer.chat_template or trainer.processing_class.chat_template):
            before.pop("chat_template_kwargs", None)  # they make the same prompts
    changed = [name for name in now if name in before and now[name] != before[name]]
    if refused := [name for name in changed if name not in (*_REPORTED, *_REPORTED_OF_MODELS)]:
        name = refused[0]
        shown = f"`{name}={now[name]!r}`" if name in vars(trainer.args) else f"{name}: {now[name]!r}"
        raise ValueError(
            f"{shown} does not go on with the run that wrote {checkpoint}, where it is {before[name]!r}; set it to that, or {new_run}."
        )
    for name in changed:
        consequence = _CONSEQUENCES.get(name, "the optimizer goes on as it was")
        logger.warning("`%s` is %r here and %r in %s: %s.", *(name, now[name], before[name], checkpoint, consequence))
