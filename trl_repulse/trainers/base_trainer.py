"""The trainer that all others build on: TRL's GRPO trainer with second models, exact sampling and scoring, pooled metrics and resume.

It holds the hooks of TRL that all trainers share. What a hook does is in `engine/`: drawing, scoring, logs, checkpoints, publishing.

Axis letters: P prompts, N completions of a prompt, B rows of a generation batch on one process, T completion tokens, F reward functions.
"""

import contextlib
import copy
import functools
import math
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict, Unpack

import torch
from accelerate.logging import get_logger
from accelerate.utils import DistributedType, is_peft_model
from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict
from transformers import BitsAndBytesConfig, PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback
from trl import GRPOTrainer

from .. import _trl
from ..configs import NegativeTermConfig
from ..configs._checks import check_uploads
from ..data._checks import (
    CheckedRows,
    by_name,
    check_adapters,
    check_arguments,
    check_best_metric,
    check_column_names,
    check_dataset_size,
    check_datasets,
    check_eval_batch,
    check_output_dir,
    check_prompt_lengths,
    check_reward_funcs,
    check_rewards,
    fitting_prompts,
)
from ..data._prompts import TEMPLATE_ERRORS, as_templates_read, render, warn_of_template
from ..data._texts import check_added_tokens, completion_texts, joins
from ..engine.logs import NEGATIVES, Logs, Moments, Pooled, Tables, Watch, drop_batch_means, mean, pool, pool_all
from ..engine.preparation import as_trained, check_loadable, check_templates, guard_model, set_learning_rate
from ..engine.records import (
    EARLIER_NEGATIVES,
    amend_model_card,
    make_proposal_repository,
    set_negatives_aside,
    upload_proposal,
    write_proposal_card,
)
from ..engine.resume import (
    ResumedSampler,
    begin_checkpoint,
    check_settings,
    find_checkpoint,
    load_position,
    naming_a_full_disk,
    save_position,
    warn_of_a_run,
    without_tied,
)
from ..engine.reward_functions import (
    RewardFunc,
    all_with_checks,
    check_separate_rewards,
    check_tokenizers,
    load_reward_models,
)
from ..engine.scoring import Scoring, prepare_scoring, sorted_by_prompt
from ..engine.second_model import (
    PROPOSAL_FOLDER,
    REFERENCE,
    VALUE_FOLDER,
    SecondAdapter,
    SecondModel,
    load_reference,
    prepare_second_models,
    save_reference,
)
from ..engine.serving import engine_of, serve_proposal, take_engine
from ..engine.trl_bridge import (
    disable_dropout,
    use_reference,
    withheld_from_uploads,
    without_kl,
    without_lasting_changes,
)
from ..engine.units import CompletionSet, Drawing, Shape, Units
from ..generation import _engine
from ..generation._probe import Guard
from ..generation.drawing import (
    Sampler,
    batches,
    casting_once,
    drawn_by_inversion,
    prompts_read_once,
    rows_drawn_by,
    without_generation_defaults,
)
from ..math.importance import sequence_log_prob
from ..math.objective import transform_rewards
from ..method.hot_policy import HotPolicy
from ..method.learned_proposal import LearnedProposal
from ..method.negative_term import NegativeTerm, Services
from ..method.proposal_model import build_proposal, plan_proposal
from ..models import _fsdp
from ..models._adapters import BaseView, adapters_kept, base_of, keep_4bit_trainable
from ..models._deepspeed import gathered_by_layer, share_process_group, zero_stage
from ..models._model_checks import check_causal, check_language_model, check_tokenizer, check_trained_tokens


if TYPE_CHECKING:
    from collections.abc import Callable

    from peft import PeftConfig, PeftModel


logger = get_logger(__name__)

Datasets: TypeAlias = (
    Dataset | IterableDataset | DatasetDict | IterableDatasetDict | dict[str, Dataset | IterableDataset] | None
)


class SecondModelArguments(TypedDict, total=False):
    """A trainer's arguments on second models, which TRL's trainers do not have. `_takes` of a class names those that it has."""

    proposal_model: "str | PreTrainedModel | None"
    proposal_peft_config: "PeftConfig | None"
    proposal_environment_factory: "Callable | dict[str, Callable] | None"
    value_model: "str | PreTrainedModel | None"
    value_peft_config: "PeftConfig | None"


class BaseTrainer(GRPOTrainer):
    """
    TRL's GRPO trainer with what all trainers here share, whatever their loss is.

    Args:
        model, reward_funcs, args, train_dataset, eval_dataset, processing_class, reward_processing_classes, callbacks,
        optimizers, quantization_config, peft_config, tools, rollout_func, environment_factory:
            As for [`~trl.GRPOTrainer`].
        second (`SecondModelArguments`):
            By name: a proposal, a value model, and what belongs to them.
    """

    # TRL's
    args: Any
    model: Any
    state: Any
    train_dataset: Any
    ref_model: Any
    processing_class: Any
    data_collator: Any
    vllm_generation: Any
    num_generations: Any
    num_generations_eval: Any
    max_completion_length: Any
    chat_template_kwargs: Any
    hub_model_id: Any
    loss_is_scaled_for_ga: Any
    _config_cls: Any
    _metrics: Any
    # Markdown that the model card shows under "Measured"; set by evaluation callbacks
    tail_report: str | None = None
    # Numbers by name, for the card's metadata (`model-index`); set by evaluation callbacks
    measured: dict[str, float | None] | None = None
    # Metrics of GRPO that are not of this algorithm, or are logged anew: the prefixes of their names
    _dropped: tuple[str, ...] = ("reward", "sampling/")
    # Glob patterns, relative to an uploaded folder, of what no upload to the Hub takes along. The Trainer's arguments,
    # which it pickles, have `hub_token` in them (transformers 5.23); GRPO's `log_completions` writes `completions` (TRL 1.16).
    # Second models are withheld whoever uploads: an earlier run of another trainer may have left one in the folder
    _withheld: tuple[str, ...] = tuple(
        prefix + name
        for name in (
            *(NEGATIVES, EARLIER_NEGATIVES, _trl.TRAINING_ARGS_NAME, "position-*", REFERENCE, "completions/*"),
            *(f"{PROPOSAL_FOLDER}/*", f"{VALUE_FOLDER}/*"),
        )
        for prefix in ("", "*/")
    )
    _takes: tuple[str, ...] = ()  # of `SecondModelArguments`
    proposal: SecondModel | None = None
    _negative: NegativeTerm | None = None
    # What steps are made of
    _logs_of_run: Logs
    _tables: Tables
    _drawing: Drawing
    _scoring: Scoring
    _conversation: list[dict[str, Any]] | None = None  # the latest prompt as the chat template got it
    _fitting_prompts: tuple[float, float] = (0, 0)  # as `data._checks.fitting_prompts` gives, once a batch was checked
    _has_begun = False  # whether the negative data in the folder are this run's
    _first_batch: tuple[torch.Tensor, ...] | None = None  # what models are checked on at set-up, drawn by the policy

    def __init__(
        self,
        model: "str | PreTrainedModel | PeftModel",
        reward_funcs: RewardFunc | list[RewardFunc] | None = None,
        args: Any = None,
        train_dataset: Dataset | IterableDataset | None = None,
        eval_dataset: Datasets = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        reward_processing_classes: PreTrainedTokenizerBase | list[PreTrainedTokenizerBase] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, torch.optim.lr_scheduler.LambdaLR | None] = (None, None),
        quantization_config: BitsAndBytesConfig | None = None,
        peft_config: "PeftConfig | None" = None,
        tools: "list[Callable] | None" = None,
        rollout_func: "Callable | None" = None,
        environment_factory: "Callable | dict[str, Callable] | None" = None,
        **second: Unpack[SecondModelArguments],
    ):
        if unknown := sorted(second.keys() - set(self._takes)):
            raise TypeError(f"{type(self).__name__} takes no argument `{unknown[0]}`.")
        self._second = second
        self.second_models: dict[str, SecondModel] = {}  # by folder
        models = {name: second.get(name) for name in ("proposal_model", "value_model")}
        check_arguments(self._config_cls, args, model=model, **models)
        args = self._configuration(model, args)
        args.check()
        _trl.require_hooks()
        self._check_turns(args, tools=tools, rollout_func=rollout_func, environment_factory=environment_factory)
        share_process_group(args)
        check_output_dir(args)
        if args.use_vllm:
            _engine.check_vllm()
        if eval_dataset is not None:
            check_eval_batch(args)
            check_best_metric(args, eval_dataset)
        if environment_factory is None:  # an environment may bring prompts and rewards
            check_reward_funcs(reward_funcs)
            check_datasets(train_dataset, eval_dataset, args.generation_batch_size // args.num_generations)
        for name, dataset in by_name(train_dataset, eval_dataset).items():
            check_column_names(getattr(dataset, "column_names", None) or (), f"`{name}`")
        lends_base, proposal, adapters = plan_proposal(
            args, model, reward_funcs, peft_config, second.get("proposal_model"), second.get("proposal_peft_config")
        )
        check_adapters(model, *adapters, second.get("value_peft_config"), beta=args.beta)
        check_loadable(args, peft_config, model=model, reward_funcs=reward_funcs, **models)
        check_language_model(model, "`model`", (args.model_init_kwargs or {}).get("revision"))
        check_separate_rewards(reward_funcs, model, "`model`", trained=peft_config is None)
        if reward_funcs is not None:
            reward_funcs, reward_processing_classes = load_reward_models(reward_funcs, reward_processing_classes, args)
        self._build_first(model, reward_funcs, args, quantization_config, peft_config)
        no_reference = without_kl(args) if lends_base else contextlib.nullcontext()
        with no_reference, engine_of(args, model, adapters):
            super().__init__(
                model,
                reward_funcs,
                args,
                train_dataset,
                eval_dataset,
                processing_class,
                reward_processing_classes,
                callbacks,
                optimizers,
                quantization_config,
                peft_config,
                tools,
                rollout_func,
                environment_factory,
            )
        # Which TRL has loaded where none was passed
        check_tokenizers(self.reward_funcs, self.reward_processing_classes)
        self._check_policy(adapters)
        if args.use_vllm:
            take_engine(self)
        if environment_factory is None and rollout_func is None:  # which may make prompts otherwise
            check_templates(self, super()._tokenize_prompts, train_dataset, eval_dataset)
        self.reward_funcs = all_with_checks(self.reward_funcs, self.reward_func_names)
        if environment_factory is None:  # streams, and data sets that change their rows, are checked as they yield
            self.data_collator = CheckedRows(self.train_dataset.features)
        self._build_services()
        self._prepare_scoring()
        self._add_value_model()
        if self.has_proposal:
            self._add_proposal(proposal, lends_base, peft_config, quantization_config)
        self._negative = self.build_negative_term()

    # Set-up

    @classmethod
    def _configuration(cls, model: Any, args: Any) -> Any:
        """A trainer's configuration, a copy if its learning rate is still to be set; if none is given, with an `output_dir` for its model."""
        if args is not None:
            return copy.copy(args) if args.learning_rate is None else args
        name = model if isinstance(model, str) else model.config.name_or_path
        return cls._config_cls(f"{Path(name).name}-{cls._name}")

    def _check_turns(self, args: Any, **given: Any) -> None:
        """Hook that refuses arguments, by name, which put more than the model's own tokens into completions; here all are taken."""

    def _build_first(
        self, model: Any, reward_funcs: Any, args: Any, quantization_config: Any, peft_config: Any
    ) -> None:
        """Hook that builds what must be built before TRL wraps or patches the policy."""

    @property
    def has_proposal(self) -> bool:
        """Whether a second model learns to draw bad outputs."""
        return isinstance(self.args, NegativeTermConfig) and self.args.has_proposal

    def _build_services(self) -> None:
        """Makes what steps are made of, once TRL has built the trainer: logs, drawing, scoring."""
        self._logs_of_run = Logs(self.accelerator, self._metrics, self.model)
        self._watch = Watch(self.args, self.callback_handler)
        self._tables = Tables(
            self._logs_of_run,
            self.args,
            self._logs,
            self.reward_func_names,
            self._pending_extra_logs,
            self._transform,
            self.transforms_rewards,
            lambda: self.state.global_step,
        )
        self._drawing = Drawing(self, self._logs_of_run, self._tables)
        self._scoring = Scoring(
            self.accelerator,
            self.args,
            self._tokenizer.pad_token_id,
            self.model.config.get_text_config().hidden_size,
            self.aux_loss_enabled,
            self.is_fsdp_enabled or zero_stage(self.accelerator) == 3,
        )

    @property
    def _guard(self) -> Guard:
        """What keeps sampling and scoring right for all models."""
        return vars(self).get("_scoring", Scoring).guard  # the default until `_scoring` is made

    @_guard.setter
    def _guard(self, guard: Guard) -> None:
        self._scoring.guard = guard

    def _check_policy(self, adapters: list["PeftConfig | None"]) -> None:
        """Refuses, once TRL has built it, a policy that cannot be sampled and scored, with its tokenizer and adapters."""
        policy = self.accelerator.unwrap_model(self.model)
        own = policy.peft_config.values() if is_peft_model(policy) else ()
        check_tokenizer(self._tokenizer, policy.config)
        check_trained_tokens([*own, *adapters], policy.config)
        keep_4bit_trainable(policy, "`model`")
        with gathered_by_layer(policy), as_trained(self, policy):
            check_causal(policy, "`model`")
        set_learning_rate(self, policy)

    def _prepare_scoring(self) -> None:
        """Readies policy and reference, once TRL has built them, for scores at the positions of generation."""
        if self._leaves_passes_to_trl:
            _trl.check_scoring_on_cpu()
            self._guard = Guard(share_prompts=False, repeat_cache=False)
            return
        for scored in (self.model, self.ref_model):
            if scored is not None:
                if self.args.disable_dropout:
                    disable_dropout(scored)
                base = base_of(self.accelerator.unwrap_model(scored, keep_torch_compile=False))
                prepare_scoring(base, self.args.cast_lm_head_to_fp32)
        self._guard_model("policy", self.model, self.args.disable_dropout)  # the reference is of its architecture

    def _guard_model(self, name: str, model: Any, quiet: bool = True) -> None:
        """Finds out how a model can be sampled and scored; refuses one that makes noise where it should be `quiet`."""
        self._guard = self._guard | guard_model(self, name, model, quiet)
        if not self._guard.use_cache:
            self.generation_config.use_cache = False

    def _add_value_model(self) -> None:
        """Hook that adds a value model, where a trainer has one."""

    def _add_proposal(self, model: Any, lends_base: bool, peft_config: Any, quantization_config: Any) -> None:
        """Adds the proposal; its base is the reference if `lends_base`."""
        own_config = self._second.get("proposal_peft_config")
        self.proposal = build_proposal(model, self, peft_config, own_config, quantization_config)
        self.second_models[PROPOSAL_FOLDER] = self.proposal
        self._guard_model("proposal", self.proposal.module)
        if lends_base:
            self.beta, self.ref_model = self.args.beta, BaseView(self.proposal.module)
        if self.use_vllm:
            serve_proposal(self, self.proposal)

    def build_negative_term(self) -> NegativeTerm | None:
        """The negative term by `args.proposal`, or `None` if `alpha` is 0. Override it to bring a way of finding bad outputs of your own."""
        if not isinstance(self.args, NegativeTermConfig) or self.args.alpha == 0:
            return None
        if self.args.draws_hot:
            return HotPolicy(self.services)
        if self.proposal is not None:
            return LearnedProposal(self.services, self.proposal, self.add_callback)
        return NegativeTerm(self.services)

    @property
    def services(self) -> Services:
        """What a negative term is given."""
        return Services(
            self.args,
            self.accelerator,
            lambda: self.model,
            self._drawing,
            self._scoring,
            self._logs_of_run,
            self.vllm_generation if self.use_vllm else None,
            self.beta,
            lambda: self.state,
            lambda: self.current_gradient_accumulation_steps,
            self._reference_log_prob,
            self._returns,
        )

    # What the policy maximizes

    @property
    def bad_reward_threshold(self) -> float | None:
        """Reward under which a completion counts as bad, measured by the hot policy if it is not set; `None` until it is known."""
        return self.args.bad_reward_threshold if self._negative is None else self._negative.bad_reward_threshold

    @property
    def transforms_rewards(self) -> bool:
        """Whether the policy maximizes something else than the reward."""
        return self.args.reward_transform is not None

    def _transform(self, rewards: torch.Tensor) -> torch.Tensor:
        """r': what the policy maximizes instead of the reward r; r itself without a transform."""
        return transform_rewards(self.args, rewards)

    def _kl(self, samples: CompletionSet, log_p: torch.Tensor | None) -> torch.Tensor:
        """Σ_t (log p − log p_0) of each completion, `(U, n)`, nats; zeros without a KL penalty."""
        if self.beta == 0.0:
            return torch.zeros_like(samples.rewards)
        assert log_p is not None and samples.ref_log_p is not None
        return sequence_log_prob(log_p, samples.mask) - sequence_log_prob(samples.ref_log_p, samples.mask)

    def _returns(self, samples: CompletionSet, log_p: torch.Tensor | None) -> torch.Tensor:
        """What the policy maximizes: transformed reward less the KL penalty, of each completion, `(U, n)`."""
        return self._transform(samples.rewards) - self.beta * self._kl(samples, log_p)

    def _log_returns(self, rewards: torch.Tensor, kl: torch.Tensor, tokens: torch.Tensor, total: torch.Tensor) -> None:
        """Logs the return, with and without transform, from rewards and KL terms (nats) of samples, and the KL a token from its `total` and
        the number of `tokens`."""
        logs = self._logs_of_run
        if self.beta != 0.0:
            logs.token_mean("kl", total, tokens)
        logs.mean("return", rewards - self.beta * kl)
        if self.transforms_rewards:
            transformed = self._transform(rewards)
            logs.mean("reward_transformed", transformed)
            logs.mean("return_transformed", transformed - self.beta * kl)

    # How batches are cut

    @property
    def _on_policy(self) -> bool:
        """Whether every update is made with generations of the current policy: no ratio, no second pass."""
        return self.args.gradient_accumulation_steps % (self.args.steps_per_generation * self.num_iterations) == 0

    @property
    def shape(self) -> Shape:
        """How batches are cut now, in training or evaluation."""
        args, training = self.args, self.model.training
        generations = self.num_generations if training else self.num_generations_eval
        extra = getattr(args, "num_proposal_generations", None) if training else None
        micro_batch = args.per_device_train_batch_size if training else args.per_device_eval_batch_size
        whole = self._keeps_prompts_whole and micro_batch % generations == 0
        early = not whole or (training and not self._on_policy)
        unit = generations if whole else 1
        return Shape(training, generations, extra or generations, unit, whole, early, micro_batch)

    _keeps_prompts_whole = False  # whether micro-batches are cut between prompts, where their size allows it

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        """As TRL's; the rows of each update are sorted by prompt, or those of each micro-batch where that is what a loss is made of."""
        before, args = self._buffered_inputs, self.args
        inputs = super()._prepare_inputs(generation_batch)
        if self._buffered_inputs is before or not self._guard.share_prompts or self.shape.whole:
            return inputs
        # Of these losses, each micro-batch has a mean or a quantile of its own
        alone = args.loss_type == "bnpo" or args.top_entropy_quantile < 1
        alone = alone or self._entropy_bonus_enabled or self.aux_loss_enabled
        size = 1 if alone else math.gcd(args.steps_per_generation, args.gradient_accumulation_steps)
        groups = [self._buffered_inputs[i : i + size] for i in range(0, args.steps_per_generation, size)]
        self._buffered_inputs = [batch for group in groups for batch in sorted_by_prompt(group)]
        return self._buffered_inputs[self._step % args.steps_per_generation]

    def _reference_log_prob(self, units: Units, samples: CompletionSet) -> torch.Tensor:
        """Log-probabilities of tokens under the reference model, `(U, n, T)`, nats."""
        units = Units(units.prompt_ids, units.prompt_mask, samples)
        if self.ref_model is not None:
            return self._scoring.score(self.ref_model, units, self.shape, gradient=False).log_p["own"]
        with use_reference(self.accelerator.unwrap_model(self.model)):  # an adapter, or beside a frozen copy of itself
            return self._scoring.score(self.model, units, self.shape, gradient=False).log_p["own"]

    # Hooks of TRL: sampling and rewards

    def _acting(self, rows: list[dict[str, Any]]) -> contextlib.AbstractContextManager[list[dict[str, Any]]]:
        """Context in which extra samples are drawn with tools and environments of their own; it gives their rows."""
        return contextlib.nullcontext(rows)

    def _has_ended(self, completion: list[int]) -> bool:
        """Whether a completion, of at least one token, ends with an end token or, as TRL counts, with padding."""
        return completion[-1] in (*self.eos_token_ids, self._tokenizer.pad_token_id)

    @property
    def _leaves_passes_to_trl(self) -> bool:
        """Whether sampling and scoring are TRL's own."""
        return False

    def _generate_single_turn(self, prompt_ids: list[list[int]], *args: Any, **kwargs: Any):
        """As TRL's, with extra samples in the same call where [`Drawing.together`] asks for them."""
        if self._leaves_passes_to_trl:
            return super()._generate_single_turn(prompt_ids, *args, **kwargs)

        def generate(prompts: list[list[int]], drawn_by: tuple[list[bool], Sampler] | None = None) -> Any:
            return self._generate_rows(prompts, drawn_by, *args, **kwargs)

        joint = self._drawing.joint
        return generate(prompt_ids) if joint is None else joint.draw(prompt_ids, generate)

    def _generate_rows(
        self, prompt_ids: list[list[int]], drawn_by: tuple[list[bool], Sampler] | None, *args: Any, **kwargs: Any
    ):
        """What TRL generates for rows; `drawn_by` says which of them another sampler draws, and which sampler."""
        sampled = self.model_wrapped
        if sampled is not self.model or hasattr(sampled, "_orig_mod"):  # accelerate takes 2 ms to find nothing
            sampled = self.accelerator.unwrap_model(sampled, keep_torch_compile=False)
        once: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        together = self._scoring.passes_together
        if self._guard.repeat_cache:
            once = prompts_read_once(sampled, self._holds_everywhere if together else bool)
        mixed = contextlib.nullcontext() if drawn_by is None else rows_drawn_by(sampled, *drawn_by)
        precision = contextlib.ExitStack()
        # Under one autocast for all tokens weights are cast once; accelerate's, around each pass, casts them for each token
        if not self.use_vllm:
            precision.enter_context(self.accelerator.autocast())
            precision.enter_context(casting_once(sampled))
        defaults = without_generation_defaults(sampled)
        with precision, defaults, without_lasting_changes(self, sampled), drawn_by_inversion(sampled), mixed, once:
            if not self._guard.sample_by_length:
                return super()._generate_single_turn(prompt_ids, *args, **kwargs)
            groups = batches(prompt_ids, len(prompt_ids), equal=True)
            if len(groups) > 1 and together:
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

    def _holds_everywhere(self, condition: bool) -> bool:
        """Whether something holds in all processes. A collective call."""
        held = torch.tensor(float(condition), device=self.accelerator.device)
        return self.accelerator.reduce(held, "sum").item() == self.accelerator.num_processes

    def _tokenize_prompts(self, prompts: list):
        """As TRL's. Raises a `ValueError` that names the row if the template refuses it, or no completion fits behind it."""
        are_texts = isinstance(prompts[0], str)
        try:
            tokenized = super()._tokenize_prompts(prompts if are_texts else as_templates_read(prompts))
        except TEMPLATE_ERRORS:
            for number, prompt in enumerate(prompts, 1):
                if not isinstance(prompt, str):
                    render(self.processing_class, prompt, f"Row {number} of a batch", self.chat_template_kwargs)
            raise
        if not are_texts:
            self._conversation = prompts[0]
        lengths, room, vocabulary = [len(ids) for ids in tokenized[0]], *self._fitting_prompts
        if not 0 < min(lengths) <= max(lengths) <= room or max(map(max, tokenized[0])) >= vocabulary:  # at first
            self._check_prompts(prompts, tokenized[0])
            self._fitting_prompts = fitting_prompts(self.model.config, self.max_completion_length, self._engine_length)
        for fields in tokenized[1:]:  # GPT-2 adds embeddings of token types, which scoring does not pass
            if isinstance(fields, dict):
                fields.pop("token_type_ids", None)
        return tokenized

    def _check_prompts(self, prompts: list, prompt_ids: list[list[int]]) -> None:
        """Refuses prompts that the model cannot read with room for a completion, and warns of how they are written."""
        warn_of_template(self.processing_class, prompts[0], self.chat_template_kwargs)
        check_prompt_lengths(prompt_ids, prompts, self.model.config, self.max_completion_length, self._engine_length)
        check_added_tokens(self._tokenizer, prompts, prompt_ids)

    @property
    def _engine_length(self) -> int | None:
        """Most tokens of a prompt and its completion on a vLLM engine of this process."""
        return self.args.vllm_max_model_length if self.use_vllm and self.vllm_mode == "colocate" else None

    @functools.cached_property
    def _joins(self) -> bool:
        """Whether a completion's text is what the text of all tokens has beyond the prompt."""
        return joins(self._tokenizer)

    def _generate(self, prompts: list):
        """As TRL's, with metrics of samples that are no padding, and texts that fit behind their prompts. A collective call."""
        logs = self._logs_of_run
        with logs.weighing(logs.real_rows(len(prompts))) as metrics:
            generated = super()._generate(prompts)
            drop_batch_means(metrics, "completions/")
            if "tools/failure_frequency" in metrics:  # of calls
                calls = metrics["tools/call_frequency"][-1] * len(prompts) * self.accelerator.num_processes
                failed = metrics["tools/failure_frequency"].pop()
                metrics["tools/failure_frequency"].append(Pooled(mean, Moments.alike(failed, calls)))
        # TRL (1.16) decodes completions by themselves, which is the same for some tokenizers
        if isinstance(prompts[0], str) and not (self._joins and all(not x.endswith("\ufffd") for x in prompts)):
            texts = completion_texts(self._tokenizer, prompts, *generated[:2])
            generated = (*generated[:3], texts, *generated[4:])
        completions, written = generated[1:3]
        device = self.accelerator.device
        truncated = torch.tensor([not self._has_ended(ids) for ids in completions], device=device)
        # Of tokens, or of marks: 1 where the model wrote, not a tool
        lengths = [len(ids) for ids in completions] if written is None else [sum(marks) for marks in written]
        logs.lengths(torch.tensor(lengths, dtype=torch.float32, device=device), truncated)
        return generated

    _rewards_prefixes = False  # while prefixes of completions are rewarded, of which nothing is logged

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        """Rewards `(B_all, F)` of all processes, NaN in rows that only fill the last batch."""
        rewards_per_func = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        are_models = [isinstance(function, torch.nn.Module) for function in self.reward_funcs]
        if not bool(rewards_per_func.isfinite().all()):
            check_rewards(rewards_per_func, self.reward_func_names, are_models)
        # Like a sample without a reward, a padding row takes part in nothing
        logs = self._logs_of_run
        rewards_per_func[logs.real_rows(len(prompts)) :] = torch.nan
        if not all(are_models) and not self._rewards_prefixes:  # functions can log
            logs.record_pending(self._pending_metrics, logs.are_real(len(prompts)).sum().item())
        return rewards_per_func

    def _weigh_rewards(self, rewards_per_func: torch.Tensor) -> torch.Tensor:
        """Weighted rewards of all processes, `(B_all,)`, from the functions' `(B_all, F)`, which are logged: NaN where no function gave
        one, which is not a reward of 0."""
        rewards = self._weighted(rewards_per_func)
        self._logs_of_run.rewards(self.reward_func_names, rewards_per_func, rewards, lambda: self.bad_reward_threshold)
        return rewards

    def _weighted(self, rewards_per_func: torch.Tensor) -> torch.Tensor:
        """Weighted rewards `(B_all,)` from the functions' `(B_all, F)`."""
        rewards = (rewards_per_func * self.reward_weights.to(rewards_per_func.device)).nansum(dim=1)
        return rewards.masked_fill(rewards_per_func.isnan().all(dim=1), torch.nan)

    # Hooks of TRL: steps, evaluation, logs

    def training_step(self, model, inputs, num_items_in_batch=None):
        """As the Trainer's; second models take their step with the last micro-batch of an update. A collective call."""
        loss = super().training_step(model, inputs, num_items_in_batch)
        if self.accelerator.sync_gradients:
            if VALUE_FOLDER in self.second_models:
                self.second_models[VALUE_FOLDER].update(self._logs_of_run, VALUE_FOLDER)
            if self._negative is not None:
                self._negative.end_of_update()
        self._logs_of_run.flush()
        return loss

    def evaluation_loop(
        self, dataloader, description, prediction_loss_only=None, ignore_keys=None, metric_key_prefix="eval"
    ):
        """As the Trainer's, with the mean loss and metrics over all rows that are no padding, under names with the prefix."""
        if self.use_vllm and not self.is_in_train:
            self.vllm_generation.changed()  # models may have been loaded, or changed by hand
        check_eval_batch(self.args)
        if not self.is_in_train:
            self._watch.trackers.reopen(self.state, self.model)
        metrics = self._metrics["eval"]
        metrics.clear()  # of an evaluation that failed
        self._logs_of_run.drop()
        with self._logs_of_run.counting(dataloader, self.num_generations_eval) as evaluation:
            output: Any = super().evaluation_loop(
                dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
            )
        if evaluation.losses:  # transformers (5.23) counts prompts in the last batch, though its rows are completions
            output.metrics[f"{metric_key_prefix}_loss"] = pool(evaluation.losses)
        # Here, since TRL's `log` (1.16) begins the names of all evaluation sets with `eval_`
        pool_all(metrics)
        for name, values in metrics.items():
            known = [value for value in values if not math.isnan(value)]
            output.metrics[f"{metric_key_prefix}_{name}"] = sum(known) / len(known) if known else None
        metrics.clear()
        return output

    def get_test_dataloader(self, test_dataset):
        """As the Trainer's; of a stream as TRL's of an evaluation, which gives a prompt once for each completion."""
        if not isinstance(test_dataset, IterableDataset):
            return super().get_test_dataloader(test_dataset)
        vars(self).pop("_eval_dataloaders", None)  # kept with persistent workers, and of another data set
        return self.get_eval_dataloader(test_dataset)

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        """As TRL's, with a loss and metrics of the rows of the batch that are no padding. A collective call."""
        self._logs_of_run.begin_batch(len(inputs))
        loss, *rest = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        self._logs_of_run.flush()
        return self._logs_of_run.end_batch(loss), *rest

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As TRL's, of pooled metrics; then shows tables of completions, and looks for symptoms of failure."""
        pool_all(self._metrics["train" if self.model.training else "eval"])
        super().log(logs, start_time)
        if self.accelerator.is_main_process and self.args.log_completions:
            self._tables.show(self._watch.trackers)
        if self.model.training:
            self._watch.look(self.state)

    # Several processes

    def create_accelerator_and_postprocess(self) -> None:
        """As the Trainer's. Refuses fp16 that would have no effect, and continuous batching with FSDP."""
        super().create_accelerator_and_postprocess()
        engine_scales = self.accelerator.distributed_type in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)
        if self.accelerator.mixed_precision == "fp16" and not self.accelerator.native_amp and not engine_scales:
            raise ValueError(
                f"`fp16=True` is not supported by Accelerate on {self.accelerator.device.type!r}, where it would train in float32. Set "
                "`fp16=False`, and `bf16=True` for half precision."
            )
        if self.args.use_transformers_continuous_batching and self.is_fsdp_enabled:
            raise ValueError(
                "`use_transformers_continuous_batching=True` casts the model's shards where it samples, and processes sample in "
                "steps of their own: it does not go with FSDP. Leave it False, or set `use_vllm=True`."
            )
        _fsdp.keep_precision(self.accelerator)

    # Checkpoints

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any):
        """As [`~transformers.Trainer.train`]; a checkpoint that was not written to its end is refused or, with `True`, passed over. A
        folder that holds another run gets a warning, and its negative data are set aside. Refuses a policy without anything to train, and a
        stream of fewer prompts than a batch takes, and trackers that would upload bad outputs. At the end `trainer_state.json` is written,
        whatever `save_strategy` is."""
        check_uploads(self.args)
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
            own = Path(output_dir).resolve()
            if not resume_from_checkpoint or Path(resume_from_checkpoint).resolve().parent != own:
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

    def _prepare_for_training(self, max_steps, train_dataloader, resume_from_checkpoint):
        """As the Trainer's, also for second models; then restores the rest of a checkpoint. All processes must call it."""
        self._logs_of_run.drop()  # of a run that failed
        self._step, self._buffered_inputs = 0, None  # or batches would begin in the middle of an update
        if self._negative is not None:
            self._negative.drop()
        if isinstance(self.proposal, SecondAdapter):  # the policy's optimizer and engine do without it
            self.proposal.module.requires_grad_(False)
        _fsdp.start_scaler(self.accelerator)
        prepared = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        checkpoint = None if resume_from_checkpoint is None else Path(resume_from_checkpoint)
        prepare_second_models(self, max_steps, checkpoint)
        if checkpoint is not None:
            load_position(self, checkpoint)
            load_reference(self, checkpoint)
            self._has_begun = True
        return prepared

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        with adapters_kept(self.model if model is None else model):  # a second model's is not the policy's
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        # The result of loading any of them, which all pass here
        models = self.model, *(second.module for second in self.second_models.values())
        super()._issue_warnings_after_load(without_tied(load_result, *models))

    def _save_checkpoint(self, model, trial):
        """As the Trainer's, with second models, a moving reference, and the place in the data. All processes must call it."""
        # Before what transformers writes: its state comes last, and says that the checkpoint is complete
        checkpoint = Path(self._get_output_dir(trial)) / f"{_trl.PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        # DeepSpeed's files of the policy, which an upload of checkpoints takes along, leave out frozen adapters
        with self.proposal.module.frozen() if isinstance(self.proposal, SecondAdapter) else contextlib.nullcontext():
            begin_checkpoint(self, checkpoint)
            if not self.args.save_only_model:
                for folder, second in self.second_models.items():  # `save_model` writes the weights
                    second.save_state(checkpoint / folder, self.args.should_save)
                save_reference(self, checkpoint)
                save_position(self, checkpoint)
            super()._save_checkpoint(model, trial)

    def _get_train_sampler(self, dataset: Any = None):
        return ResumedSampler(super()._get_train_sampler(dataset), lambda: int(self.state.epoch or 0))

    def _load_best_model(self) -> None:
        """As the Trainer's, and the second models of that checkpoint, so that all belong together."""
        with adapters_kept(self.model):
            super()._load_best_model()
            for folder, second in self.second_models.items():
                second.load_checkpoint(self, Path(self.state.best_model_checkpoint) / folder)
        if self.use_vllm:
            self.vllm_generation.changed()

    # Publishing

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As the Trainer's, with second models in folders of their own. All processes must call it."""
        for folder, second in self.second_models.items():
            path = Path(output_dir or self.args.output_dir) / folder
            second.save_pretrained(path, self.args.should_save)
            if self.args.should_save:
                self.processing_class.save_pretrained(path)
                if folder == PROPOSAL_FOLDER:
                    name = self.args.hub_model_id or Path(self.args.output_dir).name
                    write_proposal_card(path, name, second.module.config._name_or_path, self.args)
        super().save_model(output_dir, _internal_call)
        # An upload has written the card. PEFT writes one of an adapter, with the local path of its base
        own = Path(self.args.output_dir).resolve()
        if not _internal_call and not self.args.push_to_hub and Path(output_dir or own).resolve() == own:
            self.create_model_card(own.name)

    def create_model_card(self, model_name=None, dataset_name=None, tags=None):  # type: ignore[override]
        super().create_model_card(model_name, dataset_name, tags)
        if self.is_world_process_zero():
            amend_model_card(self)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        with withheld_from_uploads(self._withheld):
            super()._push_from_checkpoint(checkpoint_folder)

    def _pushes_proposal(self) -> bool:
        return self.has_proposal and self.args.push_proposal_to_hub and self.is_world_process_zero()

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """As [`~transformers.Trainer.init_hf_repo`]; with `push_proposal_to_hub=True` also makes the proposal's repository. Raises a
        `ValueError` if that is the policy's, or exists and is not private."""
        super().init_hf_repo(token, private)
        if self._pushes_proposal():
            self.hub_proposal_model_id = make_proposal_repository(self.args, self.hub_model_id, token)

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """
        Uploads the policy as [`~transformers.Trainer.push_to_hub`] does, without second models and negative data.

        With `push_proposal_to_hub=True` the final proposal is then uploaded to the main branch of its own repository, and the call waits
        for it. `blocking`, `revision` and `private` concern the policy alone.

        Raises:
            `ValueError`: If the proposal's repository is not private, or a tracker would upload the proposal's completions.
        """
        check_uploads(self.args, pushing=True)
        with withheld_from_uploads(self._withheld):
            pushed = super().push_to_hub(commit_message, blocking, token, revision, private, **kwargs)
        if self._pushes_proposal():
            upload_proposal(self.args, self.hub_proposal_model_id, token, commit_message)
        return pushed
