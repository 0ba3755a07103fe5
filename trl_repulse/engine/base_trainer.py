"""What our trainers share, whatever their loss is."""

import contextlib
import copy
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.logging import get_logger
from accelerate.utils import DistributedType, is_peft_model, set_seed
from datasets import Dataset, IterableDataset
from transformers import AutoConfig, PreTrainedModel, TrainerCallback
from transformers.trainer import TRAINING_ARGS_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..data._checks import by_name, check_dataset_size, check_prompt_lengths
from ..data._prompts import (
    TEMPLATE_ERRORS,
    as_templates_read,
    conversations,
    one_of_each,
    render,
    rendering,
    warn_of_template,
)
from ..data._texts import check_added_tokens
from ..generation._batches import batches, without_generation_defaults
from ..generation._cache import prompts_read_once
from ..generation._samplers import Sampler, drawn_by_inversion, rows_drawn_by
from ..models import _fsdp
from ..models._adapters import adapters_kept, base_of, keep_gradients
from ..models._deepspeed import gathered_by_layer
from ..models._model_checks import check_causal, check_tokenizer, check_trained_tokens
from ..rewards.transforms import transform_rewards
from .metrics import PooledMetrics, highest, mean
from .preparation import as_trained, guard_model, set_learning_rate
from .records import EARLIER_NEGATIVES, NEGATIVES, amend_model_card, set_negatives_aside
from .resume import (
    ResumedSampler,
    begin_checkpoint,
    check_settings,
    find_checkpoint,
    load_position,
    naming_a_full_disk,
    save_position,
    warn_of_a_run,
)
from .scoring import RowLayouts, prepare_scoring
from .second_model import PROPOSAL_FOLDER, REFERENCE, VALUE_FOLDER, SecondModels, load_reference, save_reference
from .trl_bridge import disable_dropout, get_config_model_id, withheld_from_uploads, without_lasting_changes


if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel

    from ..generation import VLLMGenerator

logger = get_logger(__name__)


class _WeightsChanged(TrainerCallback):
    """Tells the vLLM engine when the policy's weights have changed; a second model's trainer tells of that one's."""

    def __init__(self, generator: "VLLMGenerator"):
        self._generator = generator

    def on_train_begin(self, args, state, control, **kwargs):
        self._generator.changed()  # a checkpoint may have been loaded

    def on_optimizer_step(self, args, state, control, **kwargs):
        self._generator.changed("policy")


class BaseTrainer(RowLayouts, SecondModels, PooledMetrics):
    """Mixin before [`~trl.GRPOTrainer`]: true positions and distributions, logging, the model card, uploads."""

    # TRL's, which the mixins of this folder read
    args: Any
    model: Any
    accelerator: Any
    # Markdown that the model card shows under "Measured"; for whoever measures the policy to set
    tail_report: str | None = None
    # Numbers by name, for the card's metadata (`model-index`); for whoever measures the policy to set
    measured: dict[str, float | None] | None = None
    # Glob patterns, relative to an uploaded folder, of what no upload to the Hub takes along. The Trainer's arguments,
    # which it pickles, have `hub_token` in them (transformers 5.23); GRPO's `log_completions` writes `completions` (TRL 1.16).
    # Second models are withheld whoever uploads: an earlier run of another trainer may have left one in the folder
    _withheld: tuple[str, ...] = tuple(
        prefix + name
        for name in (
            *(NEGATIVES, EARLIER_NEGATIVES, TRAINING_ARGS_NAME, "position-*", REFERENCE, "completions/*"),
            *(f"{PROPOSAL_FOLDER}/*", f"{VALUE_FOLDER}/*"),
        )
        for prefix in ("", "*/")
    )
    _constraint: Any = None  # on the rate of bad outputs, where a trainer takes one
    _conversation: list[dict[str, Any]] | None = None  # a prompt as the chat template got it last
    _has_begun = False  # whether the negative data in the folder are this run's
    _first_batch: tuple[torch.Tensor, ...] | None = None  # what models are checked on at set-up, drawn by the policy
    # Beside the policy's: models as they were passed, by the names of their arguments, and adapters to be sampled from
    _passed: dict[str, Any] = {}
    _more_adapters: "list[PeftConfig | None]" = []

    @classmethod
    def _configuration(cls, model: Any, args: Any) -> Any:
        """A trainer's configuration, a copy if its learning rate is still to be set; if none is given, with an `output_dir` for its model."""
        if args is not None:
            if args.learning_rate is None and not hasattr(args, "_of_trainer"):  # which is then that of one model
                args = copy.copy(args)
                args._of_trainer = True
            return args
        name = model if isinstance(model, str) else get_config_model_id(model.config)
        return cls._config_cls(f"{Path(name).name}-{cls._name}")

    def _check_policy(self, adapters: list["PeftConfig | None"]) -> None:
        """Refuses, once TRL has built it, a policy that cannot be sampled and scored, with its tokenizer and adapters."""
        policy = self.accelerator.unwrap_model(self.model)
        own = policy.peft_config.values() if is_peft_model(policy) else ()
        check_tokenizer(self._tokenizer, policy.config)
        check_trained_tokens([*own, *adapters], policy.config)
        keep_gradients(policy, "`model`")
        with gathered_by_layer(policy), as_trained(self, policy):
            check_causal(policy, "`model`")
        set_learning_rate(self, policy)

    def _prepare_scoring(self) -> None:
        """Readies policy and reference, once TRL has built them, for scores at the positions of generation."""
        for scored in (self.model, self.ref_model):
            if scored is not None:
                if self.args.disable_dropout:
                    disable_dropout(scored)
                base = base_of(self.accelerator.unwrap_model(scored, keep_torch_compile=False))
                prepare_scoring(base, self.args.cast_lm_head_to_fp32)
        self._guard_model("policy", self.model, self.args.disable_dropout)  # the reference is of its architecture

    def _guard_model(self, name: str, model: Any, quiet: bool = True) -> None:
        """Finds out how a model can be sampled and scored; refuses one that makes noise where it should be `quiet`."""
        self._guard |= guard_model(self, name, model, quiet)
        if not self._guard.use_cache:
            self.generation_config.use_cache = False

    def _check_templates(
        self,
        train_dataset: Dataset | IterableDataset | None,
        eval_dataset: Dataset | IterableDataset | dict[str, Any] | None,
    ) -> None:
        """Refuses conversations that the chat template of the policy, or of a reward model, is missing for or refuses."""
        rewards = zip(self.reward_func_names, self.reward_funcs, self.reward_processing_classes, strict=True)
        readers = [(name, tokenizer) for name, reward, tokenizer in rewards if isinstance(reward, torch.nn.Module)]
        for name, dataset in by_name(train_dataset, eval_dataset).items():
            for number, prompt in one_of_each(conversations(dataset)):
                where = f"Row {number} of `{name}`"
                with rendering(self.processing_class, prompt, where):
                    super()._tokenize_prompts(as_templates_read([prompt]))
                answered = [*prompt, {"role": "assistant", "content": "An answer."}]
                for reward, tokenizer in readers:
                    of_reward = f"{where}, as the reward model '{reward}' reads it,"
                    render(tokenizer, answered, of_reward, self.chat_template_kwargs, add_generation_prompt=False)
                    warn_of_template(tokenizer, prompt, self.chat_template_kwargs)

    @property
    def bad_reward_threshold(self) -> float | None:
        """Reward under which a completion counts as bad; `None` if it is not known."""
        return self.args.bad_reward_threshold

    @property
    def transforms_rewards(self) -> bool:
        """Whether the policy maximises something else than the reward."""
        return self.args.reward_transform is not None

    def _transform(self, rewards: torch.Tensor) -> torch.Tensor:
        """r': what the policy maximises instead of the reward r; r itself without a transform."""
        return transform_rewards(self.args, rewards)

    def _log_returns(self, rewards: torch.Tensor, kl: torch.Tensor, tokens: torch.Tensor, total: torch.Tensor) -> None:
        """Logs returns, with and without transform, of samples with these rewards and KL terms (nats), and KL a token, by its `total`."""
        if self.beta != 0.0:
            self._log_token_mean("kl", total, tokens)
        self._log_mean("return", rewards - self.beta * kl)
        if self.transforms_rewards:
            transformed = self._transform(rewards)
            self._log_mean("reward_transformed", transformed)
            self._log_mean("return_transformed", transformed - self.beta * kl)

    # Several processes

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        engine_scales = self.accelerator.distributed_type in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)
        if self.accelerator.mixed_precision == "fp16" and not self.accelerator.native_amp and not engine_scales:
            raise ValueError(
                f"`fp16=True` asks for what Accelerate does not do on {self.accelerator.device.type!r}: it would train in "
                "float32. Set `fp16=False`, and `bf16=True` for half precision."
            )
        if self.args.use_transformers_continuous_batching and self.is_fsdp_enabled:
            raise ValueError(
                "`use_transformers_continuous_batching=True` casts the model's shards where it samples, and processes sample in "
                "steps of their own: it does not go with FSDP. Leave it False, or set `use_vllm=True`."
            )
        _fsdp.keep_precision(self.accelerator)

    # Checkpoints

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any):
        """
        As [`~transformers.Trainer.train`]; a checkpoint that was not written to its end is refused or, with `True`, passed over. A folder
        that holds another run gets a warning, and its negative data are set aside. Refuses a policy without anything to train, and a stream
        of fewer prompts than a batch takes. At the end `trainer_state.json` is written, whatever `save_strategy` is.
        """
        if not any(p.requires_grad for p in self.model.parameters()):
            raise ValueError(
                "The policy has nothing to train: all its weights are frozen; load its adapter with `is_trainable=True`, or "
                "pass a `peft_config`."
            )
        output_dir = self.args.output_dir
        if resume_from_checkpoint:
            asked, resume_from_checkpoint = resume_from_checkpoint, find_checkpoint(resume_from_checkpoint, output_dir)
            if asked is True:
                logger.warning("Training goes on from %s.", resume_from_checkpoint)
            check_settings(self, Path(resume_from_checkpoint))  # before weights are loaded, which may fail otherwise
            if self.args.dataloader_persistent_workers and self.args.dataloader_num_workers:
                logger.warning(
                    "`dataloader_persistent_workers=True`: torch seeds such workers once a run, so that the resumed run will "
                    "draw other completions than one that was not interrupted. Set it to False for the same ones."
                )
        if not self._has_begun and self.accelerator.is_main_process:
            if (
                not resume_from_checkpoint
                or Path(resume_from_checkpoint).resolve().parent != Path(output_dir).resolve()
            ):
                warn_of_a_run(output_dir)
            if not resume_from_checkpoint and self.args.save_negatives:
                set_negatives_aside(output_dir)
        self._has_begun |= not resume_from_checkpoint
        with naming_a_full_disk(output_dir):
            result = super().train(resume_from_checkpoint, *args, **kwargs)
            self.save_state()  # which `trl-repulse diagnose` reads
        stopped = self.state.global_step == self._initial_global_step < self.state.max_steps
        if stopped and isinstance(self.train_dataset, IterableDataset):  # whose rows are known only now
            wanted = self.args.generation_batch_size // self.num_generations
            check_dataset_size(sum(1 for _ in islice(self.train_dataset, wanted)), wanted)
        return result

    def _get_train_sampler(self, dataset: Any = None):
        return ResumedSampler(super()._get_train_sampler(dataset), lambda: int(self.state.epoch or 0))

    def _prepare_for_training(self, max_steps, train_dataloader, resume_from_checkpoint):
        _fsdp.start_scaler(self.accelerator)
        prepared = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        if resume_from_checkpoint is not None:
            load_position(self, Path(resume_from_checkpoint))
            load_reference(self, Path(resume_from_checkpoint))
            self._has_begun = True
        return prepared

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        with adapters_kept(self.model if model is None else model):  # a second model's is not the policy's
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        models = self.model, *(second.module for second in self._second_models.values())
        every, once = (
            {name for x in models for name, _ in x.named_parameters(remove_duplicate=y)} for y in (False, True)
        )
        tied = every - once  # which a checkpoint has by their first name alone
        load_result.missing_keys[:] = [name for name in load_result.missing_keys if name not in tied]
        super()._issue_warnings_after_load(load_result)

    def _save_checkpoint(self, model, trial):
        # Before what transformers writes: its state comes last, and says that the checkpoint is complete
        checkpoint = Path(self._get_output_dir(trial)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        begin_checkpoint(self, checkpoint)
        if not self.args.save_only_model:
            self._save_second_models(checkpoint)
            save_reference(self, checkpoint)
            save_position(self, checkpoint)
        super()._save_checkpoint(model, trial)

    # Sampling with vLLM

    @contextlib.contextmanager
    def _engine_fits(
        self,
        args: Any,
        model: "str | PreTrainedModel | PeftModel",
        adapters: list["PeftConfig | None"],
    ) -> Iterator[None]:
        """Context in which TRL builds models and engine: the engine has their precision and room for adapters."""
        if not args.use_vllm:
            yield
            return
        from ..generation._engine import engine_options

        if args.bf16 or args.fp16:  # what autocast runs them in
            dtype = "bfloat16" if args.bf16 else "float16"
        elif isinstance(model, str):
            options = dict(args.model_init_kwargs or {})
            dtype = str(options.get("dtype") or options.get("torch_dtype") or "float32")
            if dtype == "auto":
                loading = {"trust_remote_code": args.trust_remote_code, **options}
                loading = {name: loading.get(name) for name in ("revision", "trust_remote_code")}
                dtype = str(AutoConfig.from_pretrained(model, **loading).dtype or "float32")
        else:
            dtype = str(model.dtype)
        if not isinstance(model, str) and is_peft_model(model):
            adapters = [*adapters, *model.peft_config.values()]
        with engine_options(dtype.removeprefix("torch."), [config for config in adapters if config is not None]):
            yield

    def _take_engine(self) -> None:
        """Lets the engine that TRL has built push weights when they changed, and serve more than one model."""
        if not self.use_vllm:
            return
        from ..generation import VLLMGenerator

        if self.vllm_mode == "colocate":
            # The engine has set torch's seed, from which it samples, to the number of its group whatever `seed` is
            group = self.accelerator.process_index // self.vllm_tensor_parallel_size
            set_seed(self.args.seed + group)
        models = {"policy": self.accelerator.unwrap_model(self.model)}
        self.vllm_generation = VLLMGenerator(
            models, self._tokenizer, engine=self.vllm_generation, sleep_level=self.args.vllm_sleep_level
        )
        self.add_callback(_WeightsChanged(self.vllm_generation))

    def _load_best_model(self) -> None:
        with adapters_kept(self.model):
            super()._load_best_model()
        if self.use_vllm:
            self.vllm_generation.changed()

    def evaluation_loop(self, *args: Any, **kwargs: Any):
        if self.use_vllm and not self.is_in_train:
            self.vllm_generation.changed()  # models may have been loaded, or changed by hand
        return super().evaluation_loop(*args, **kwargs)

    def _log_engine(self, batch: dict[str, torch.Tensor], name: str, log_p: torch.Tensor, prefix: str = "") -> None:
        """Logs how far the engine's log-probabilities are from `log_p` (U, n, T), the sampling-time model's; warns."""
        if f"{name}_engine_log_p" not in batch:
            return
        gap = (batch[f"{name}_engine_log_p"] - log_p).abs()
        self._log_gap(gap[batch[f"{name}_mask"] == 1], prefix)

    def _log_gap(self, gap: torch.Tensor, prefix: str = "") -> None:
        """Logs distances from the engine, one for each of this process's tokens and NaN where it gave none; warns."""
        name, moments = f"{prefix}sampling/sampling_logp_difference", self._gathered_moments(gap)
        self._record({f"{name}/mean": mean, f"{name}/max": highest}, moments)
        if moments.mean > self.args.vllm_logp_difference_threshold:
            logger.warning_once(
                "vLLM's log-probabilities of the samples are %.3f nats a token from the trainer's "
                "(`vllm_logp_difference_threshold=%g`): the engine samples from another distribution than the model's, and "
                "importance weights are off. Give both the same precision (`bf16`, the model's `dtype`).",
                moments.mean,
                self.args.vllm_logp_difference_threshold,
            )

    def _tokenize_prompts(self, prompts: list):
        try:
            tokenized = super()._tokenize_prompts(as_templates_read(prompts))
        except TEMPLATE_ERRORS:
            for number, prompt in enumerate(prompts, 1):
                if not isinstance(prompt, str):
                    render(self.processing_class, prompt, f"Row {number} of a batch", self.chat_template_kwargs)
            raise
        warn_of_template(self.processing_class, prompts[0], self.chat_template_kwargs)
        if not isinstance(prompts[0], str):
            self._conversation = prompts[0]
        limit = self.args.vllm_max_model_length if self.use_vllm and self.vllm_mode == "colocate" else None
        check_prompt_lengths(tokenized[0], prompts, self.model.config, self.max_completion_length, limit)
        check_added_tokens(self._tokenizer, prompts, tokenized[0])
        for fields in tokenized[1:]:  # GPT-2 adds embeddings of token types, which scoring does not pass
            if isinstance(fields, dict):
                fields.pop("token_type_ids", None)
        return tokenized

    def _holds_everywhere(self, condition: bool) -> bool:
        """Whether something holds in all processes. A collective call."""
        held = torch.tensor(float(condition), device=self.accelerator.device)
        return self.accelerator.reduce(held, "sum").item() == self.accelerator.num_processes

    def _generate_single_turn(
        self,
        prompt_ids: list[list[int]],
        *args: Any,
        drawn_by: tuple[list[bool], Sampler] | None = None,
        **kwargs: Any,
    ):
        """As TRL's; `drawn_by` says which rows another sampler draws, and which sampler."""
        sampled = self.model_wrapped
        if sampled is not self.model or hasattr(sampled, "_orig_mod"):  # accelerate takes 2 ms to find nothing
            sampled = self.accelerator.unwrap_model(sampled, keep_torch_compile=False)
        once = contextlib.nullcontext()
        if self._guard.repeat_cache:
            once = prompts_read_once(sampled, self._holds_everywhere if self._passes_together else bool)
        each = contextlib.nullcontext() if drawn_by is None else rows_drawn_by(sampled, *drawn_by)
        # Under one autocast for all tokens weights are cast once; accelerate's, around each pass, cast them for each token
        precision = contextlib.nullcontext() if self.use_vllm else self.accelerator.autocast()
        defaults = without_generation_defaults(sampled)
        with defaults, without_lasting_changes(self, sampled), precision, drawn_by_inversion(sampled), each, once:
            if not self._guard.sample_by_length:
                return super()._generate_single_turn(prompt_ids, *args, **kwargs)
            groups = batches(prompt_ids, len(prompt_ids), equal=True)
            if len(groups) > 1 and self._passes_together:
                raise ValueError(
                    "Prompts of different lengths are sampled one length at a time, since the model generates wrongly behind "
                    "padding, and processes that share its weights cannot do so each on its own; use prompts of one length, or "
                    "launch without ZeRO-3 and FSDP."
                )
            multiple, self.pad_to_multiple_of = self.pad_to_multiple_of, None
            try:
                parts = [
                    super(BaseTrainer, self)._generate_single_turn([prompt_ids[i] for i in group], *args, **kwargs)
                    for group in groups
                ]
            finally:
                self.pad_to_multiple_of = multiple
        # Log-probabilities, which come beside the rows, are `None` without vLLM (TRL 1.16)
        drawn = [row for part, _ in parts for row in part]
        return [row for _, row in sorted(zip((i for group in groups for i in group), drawn, strict=True))], None

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        super().save_model(output_dir, _internal_call)
        # An upload has written the card. PEFT writes one of an adapter, with the local path of its base
        own = Path(self.args.output_dir).resolve()
        if not _internal_call and not self.args.push_to_hub and Path(output_dir or own).resolve() == own:
            self.create_model_card(own.name)

    def create_model_card(self, model_name=None, dataset_name=None, tags=None):
        super().create_model_card(model_name, dataset_name, tags)
        if self.is_world_process_zero():
            amend_model_card(self)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        with withheld_from_uploads(self._withheld):
            super()._push_from_checkpoint(checkpoint_folder)

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
        """Uploads the policy as [`~transformers.Trainer.push_to_hub`] does; a second model and negative data stay."""
        with withheld_from_uploads(self._withheld):
            return super().push_to_hub(*args, **kwargs)
