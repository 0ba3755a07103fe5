"""Checks of the configurations. All raise `ValueError` with the field and the remedy."""

import contextlib
import inspect
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from ..data._prompts import check_template_variables


# Generation arguments that cannot change the distribution completions are drawn from.
HARMLESS_GENERATION_KWARGS = {"use_cache", "cache_implementation", "cache_config", "prefill_chunk_size", "max_time"}
_OF_SECOND_MODEL = """
    proposal_updates_per_step proposal_update_order proposal_loss proposal_parameterization push_proposal_to_hub
    hub_proposal_model_id proposal_vllm_server_base_url proposal_vllm_group_port
""".split()
_TRUE = ("1", "on", "true", "yes")
# Trackers that can upload checkpoints or `output_dir` (transformers 5.23): environment variable, its default, values that turn it on
_CHECKPOINT_UPLOADS = (
    ("clearml", "CLEARML_LOG_MODEL", "true", _TRUE),
    ("comet_ml", "COMET_LOG_ASSETS", "false", _TRUE),
    ("dagshub", "HF_DAGSHUB_LOG_ARTIFACTS", "false", _TRUE),
    ("dagshub", "HF_MLFLOW_LOG_ARTIFACTS", "false", _TRUE),
    ("dvclive", "HF_DVCLIVE_LOG_MODEL", "false", ("all",)),
    ("mlflow", "HF_MLFLOW_LOG_ARTIFACTS", "false", _TRUE),
    ("wandb", "WANDB_LOG_MODEL", "false", ("checkpoint",)),
)


def require(args: Any, condition: bool, name: str, remedy: str) -> None:
    """Raises `ValueError` with the field, its value and the remedy unless the condition holds."""
    if not condition:
        raise ValueError(f"`{name}={getattr(args, name)!r}` {remedy}.")


def require_defaults(args: Any, remedy: str, *names: str) -> None:
    """Raises `ValueError` unless these fields have the defaults of this package's class, which `remedy` may show as `{!r}`."""
    ours: Any = next(cls for cls in type(args).__mro__ if cls.__module__.startswith("trl_repulse."))
    for name in names:
        if name in ours.__dataclass_fields__:  # a newer TRL may have dropped a field of its own
            default = ours.__dataclass_fields__[name].default
            require(args, getattr(args, name) == default, name, remedy.format(default))


def require_at_least(args: Any, least: int, *names: str) -> None:
    """Raises `ValueError` if one of these fields is set and less than that."""
    for name in names:
        value = getattr(args, name)
        require(args, value is None or value >= least, name, f"must be at least {least}")


def require_finite(args: Any, *names: str) -> None:
    """Raises `ValueError` if one of these fields is set and not finite."""
    for name in names:
        value = getattr(args, name)
        require(args, value is None or math.isfinite(value), name, "must be a finite number")


def parse_objects(args: Any, *names: str) -> None:
    """Replaces text in these fields by the JSON objects that it holds. Raises `ValueError` if it is not valid, or a field is no object."""
    for name in names:
        value = getattr(args, name)
        if isinstance(value, str):
            try:
                setattr(args, name, json.loads(value))
            except json.JSONDecodeError as error:
                remedy = f'is not valid JSON ({error}); write e.g. `{{"a_name": 300}}`'
                raise ValueError(f"`{name}={value!r}` {remedy}.") from error
        require(args, isinstance(getattr(args, name), dict | None), name, 'must be an object, e.g. {"a_name": 300}')


def check_choices(args: Any) -> None:
    """Raises `ValueError` for a value of one of this package's fields that its type, a `Literal`, does not list."""
    for cls in type(args).__mro__:
        if not cls.__module__.startswith("trl_repulse."):
            continue
        for name, hint in inspect.get_annotations(cls).items():
            kinds = [hint, *get_args(hint)]
            choices = [choice for kind in kinds if get_origin(kind) is Literal for choice in get_args(kind)]
            if choices and name != "share_prompts":  # which takes words of a command line too
                choices = [None] * (type(None) in kinds) + choices
                require(args, getattr(args, name) in choices, name, f"must be one of {', '.join(map(repr, choices))}")


@contextlib.contextmanager
def own_precision(args: Any) -> Iterator[None]:
    """Context in which TRL fills in a configuration, so that only its `bf16` and `fp16` decide the precision: with both False,
    TrainingArguments (transformers 5.23) would take the launcher's without saying so. Warns if the launcher's is another."""
    from accelerate.logging import get_logger  # imports torch
    from accelerate.utils import patch_environment

    launched = os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    with patch_environment(ACCELERATE_MIXED_PRECISION="no"):
        yield
    if launched not in ("no", args.mixed_precision):
        get_logger(__name__).warning_once(
            f"`bf16={args.bf16}` and `fp16={args.fp16}` win over `mixed_precision: {launched}` of `accelerate launch`: the mixed "
            f"precision of this run is {args.mixed_precision!r}. Set `bf16` or `fp16` to choose another."
        )


def check_transform(args: Any) -> None:
    """Checks the fields of a reward transform."""
    numbers = ("reward_transform_alpha", "reward_transform_beta", "reward_transform_threshold")
    require_finite(args, *numbers)
    if args.reward_transform is None:
        require_defaults(args, "has no effect; set `reward_transform` to 'exponential' or 'indicator'", *numbers)
    require(args, args.reward_transform_alpha >= 0, "reward_transform_alpha", "must be at least 0")
    unused = f"has no effect with `reward_transform='{args.reward_transform}'`; leave it at {{}}"
    if args.reward_transform == "exponential":
        require_defaults(args, unused, "reward_transform_threshold")
        remedy = "must be below 0: the exponential transform takes the most from the lowest rewards"
        require(args, args.reward_transform_beta < 0, "reward_transform_beta", remedy)
    if args.reward_transform == "indicator":
        require_defaults(args, unused, "reward_transform_beta")
        remedy = "is needed by `reward_transform='indicator'`; set the reward under which a completion is penalised"
        require(args, args.reward_transform_threshold is not None, "reward_transform_threshold", remedy)


def check_compared(args: Any) -> None:
    """Refuses one completion a prompt, before TRL does with a message about GRPO."""
    remedy = "must be at least 2: advantages compare the policy's own completions of a prompt"
    require(args, args.num_generations is not None and args.num_generations >= 2, "num_generations", remedy)


def check_shared(args: Any) -> None:
    """Checks the fields that all trainers share, including TRL's, and the choices of all; makes text in `share_prompts` a bool."""
    check_choices(args)
    check_transform(args)
    require_finite(args, "bad_reward_threshold")
    if args.save_negatives:
        remedy = "is needed by `save_negatives=True`; set the reward under which a completion counts as bad"
        require(args, args.bad_reward_threshold is not None, "bad_reward_threshold", remedy)
    remedy = "must be a number of tokens, at least 1"
    require(args, (args.max_completion_length or 0) >= 1, "max_completion_length", remedy)
    if args.vllm_sleep_level is not None:
        remedy = "has no effect; set `use_vllm=True`, `vllm_mode='colocate'` and `vllm_enable_sleep_mode=True`"
        sleeps = args.use_vllm and args.vllm_mode == "colocate" and args.vllm_enable_sleep_mode
        require(args, sleeps, "vllm_sleep_level", remedy)
    if isinstance(args.share_prompts, str):  # of a command line
        args.share_prompts = {"true": True, "false": False}.get(args.share_prompts.lower(), args.share_prompts)
    fits = isinstance(args.share_prompts, bool) or args.share_prompts == "auto"
    require(args, fits, "share_prompts", "is not one of 'auto', True, False")
    check_template_variables(args.chat_template_kwargs)
    remedy = "must be at least 0: it is the KL coefficient. The paper's β is `target_dist_beta` of `RePULSeConfig`"
    require(args, 0 <= args.beta < math.inf, "beta", remedy)
    remedy = "must be a finite number of at least 0"
    require(args, args.learning_rate is None or 0 <= args.learning_rate < math.inf, "learning_rate", remedy)
    require(args, args.temperature > 0, "temperature", "must be above 0")
    require_at_least(args, 1, "num_iterations", "steps_per_generation", "num_generations_eval")
    require(args, args.epsilon > 0, "epsilon", "must be above 0: the ratio is clipped to 1 ± epsilon")
    remedy = "must be above 0, or left unset to use `epsilon`"
    require(args, args.epsilon_high is None or args.epsilon_high > 0, "epsilon_high", remedy)
    remedy = "must be finite numbers, one for each reward function"
    require(args, all(map(math.isfinite, args.reward_weights or [])), "reward_weights", remedy)
    if args.sync_ref_model:
        remedy = "must be from 0 to 1: the share of the policy in the reference"
        require(args, 0 <= args.ref_model_mixup_alpha <= 1, "ref_model_mixup_alpha", remedy)
        require(args, args.ref_model_sync_steps >= 1, "ref_model_sync_steps", "must be at least 1")
    for name in ("fp16_full_eval", "bf16_full_eval"):
        precision = name.removesuffix("_full_eval")
        remedy = f"would cast the policy permanently; leave it False (`{precision}=True` is for evaluation too)"
        require(args, not getattr(args, name), name, remedy)
    check_uploads(args)


def check_repulse_config(args: Any, in_rows: bool = False) -> None:
    """Checks the fields of [`NegativeTermConfig`]; `in_rows` if completions are batched one by one."""
    require(args, 0 <= args.alpha < math.inf, "alpha", "must be at least 0 (0 leaves the negative term out)")
    _check_target(args)
    if args.alpha == 0:
        return  # alpha=0 alone turns the term off; fields of the proposal may stay in a configuration file
    for name in ("alpha", "target_dist_beta"):
        start, end = getattr(args, f"{name}_start"), getattr(args, name)
        if start is not None:
            remedy = f"must be finite, not 0 and of the sign of `{name}={end}`: a geometric schedule cannot cross 0"
            require(args, math.isfinite(start) and start * end > 0, f"{name}_start", remedy)
    if args.proposal != "hot_policy":
        remedy = "is the hot policy's; set `proposal='hot_policy'`, or leave it unset"
        require(args, args.proposal_temperature == 1.0, "proposal_temperature", remedy)
    _check_sampling(args)
    if args.negative_loss != "reinforce":
        require_defaults(args, "has no effect; set `negative_loss='reinforce'`", "negative_baseline")
    if in_rows:
        _check_rows(args)
    if args.draws_twice:
        remedy = "must be at least 2: weights are normalised over a prompt's proposal samples"
        require(args, (args.num_proposal_generations or 2) >= 2, "num_proposal_generations", remedy)
    if args.has_proposal:
        _check_proposal(args)
    else:
        _check_no_proposal(args)
    if args.draws_twice and not in_rows and args.per_device_train_batch_size % args.num_generations:
        remedy = (
            "needs each prompt's samples in one micro-batch; make `per_device_train_batch_size` a multiple of "
            f"`num_generations={args.num_generations}`"
        )
        same = args.num_proposal_generations in (None, args.num_generations)
        require(args, same, "num_proposal_generations", remedy)
        require_defaults(args, remedy, "proposal_updates_per_step", "proposal_update_order")
        require(args, args.proposal_loss != "dpg", "proposal_loss", remedy)


def _check_target(args: Any) -> None:
    """Checks the potential, and the fields that belong to it."""
    if args.potential == "tilted":
        remedy = (
            "must be below 0 for the tilted potential: the target policy · exp(β·reward) has to seek low rewards "
            "(TRL's `beta` is the KL coefficient)"
        )
        require(args, -math.inf < args.target_dist_beta < 0, "target_dist_beta", remedy)
    elif args.potential == "class":
        remedy = "must be above 0 for the class potential, which it multiplies; 1.0 seeks the class as it is"
        require(args, 0 < args.target_dist_beta < math.inf, "target_dist_beta", remedy)
    else:
        remedy = "is needed by `potential='indicator'`; set the reward under which a completion counts as bad"
        known = args.alpha == 0 or args.draws_hot or args.bad_reward_threshold is not None
        require(args, known, "bad_reward_threshold", remedy)
        require_defaults(args, "has no effect on the indicator potential; leave it unset", "target_dist_beta_start")
    if args.reward_cap is not None:
        require(args, math.isfinite(args.reward_cap), "reward_cap", "must be a finite number, or left unset")
        require(args, args.potential == "tilted", "reward_cap", "acts on the tilted potential only; leave it unset")


def _check_sampling(args: Any) -> None:
    """Refuses what would make samples, or their log-probabilities, other than those of the models: importance weights would be wrong."""
    exact: dict[str, tuple] = dict.fromkeys(("temperature", "top_p", "repetition_penalty"), (1.0,))
    exact |= {"top_k": (0, None), "min_p": (None, 0.0), "vllm_structured_outputs_regex": (None,)}
    for name, accepted in exact.items():
        remedy = f"would make the importance weights wrong: samples must follow the models; leave it at {accepted[0]}"
        require(args, getattr(args, name) in accepted, name, remedy)
    if isinstance(args.generation_kwargs, dict):
        ours = ", ".join(sorted(HARMLESS_GENERATION_KWARGS & set(args.generation_kwargs)))
        remedy = f"has settings of transformers' generation ({ours}), which vLLM does not take; leave them out"
        require(args, not (args.use_vllm and ours), "generation_kwargs", remedy)
        other = ", ".join(sorted(set(args.generation_kwargs) - HARMLESS_GENERATION_KWARGS))
        remedy = f"may change what is sampled ({other}), which would make the importance weights wrong; leave that out"
        require(args, not other, "generation_kwargs", remedy)
    remedy = "would make the log-probabilities behind the importance weights noisy; leave it True"
    require(args, args.disable_dropout, "disable_dropout", remedy)
    remedy = "adds noise to the policy's embeddings, and so to the log-probabilities behind the importance weights; leave it unset"
    require(args, not args.neftune_noise_alpha, "neftune_noise_alpha", remedy)
    remedy = "would count truncated completions as empty, with wrong importance weights; leave it False"
    require(args, not args.mask_truncated_completions, "mask_truncated_completions", remedy)


def _check_rows(args: Any) -> None:
    """Refuses what needs all samples of a prompt in one micro-batch: GRPO batches single completions."""
    drawn = args.num_proposal_generations or args.num_generations
    remedy = f"must be a multiple of `num_generations={args.num_generations}`: each completion gets as many proposal samples"
    require(args, drawn % args.num_generations == 0, "num_proposal_generations", remedy)
    remedy = "leaves a prompt one sample, and weights compare several; set at least 2, or, on PPO, `num_proposal_generations`"
    require(args, drawn >= 2, "num_generations", remedy)
    if args.proposal == "policy":
        remedy = "is too few for the policy as its own proposal, whose weights compare samples; set at least 2"
        require(args, args.num_generations >= 2, "num_generations", remedy)
    remedy = "is for `RePULSeTrainer` alone; leave it at {!r}"
    require_defaults(args, remedy, "negative_loss", "proposal_updates_per_step", "proposal_update_order")
    remedy = "is for `RePULSeTrainer` alone; choose 'ctl', 'ctl_no_second_term', 'sixo' or 'vargrad'"
    require(args, args.proposal_loss != "dpg", "proposal_loss", remedy)


def check_second_schedule(args: Any) -> None:
    """Refuses schedules that follow a metric, which two models cannot share."""
    remedy = "follows one metric, and would have to serve two models; choose a schedule of the number of updates"
    require(args, args.lr_scheduler_type not in ("reduce_lr_on_plateau", "greedy"), "lr_scheduler_type", remedy)


def _check_proposal(args: Any) -> None:
    """Checks the fields of a second model."""
    check_second_schedule(args)
    require(args, args.proposal_updates_per_step >= 1, "proposal_updates_per_step", "must be at least 1")
    if args.proposal_updates_per_step > 1:
        # Otherwise a step would use a gradient that is still being accumulated
        whole = args.steps_per_generation * args.num_iterations % args.gradient_accumulation_steps == 0
        remedy = (
            "needs batches of generations that begin with an update of the policy; make `steps_per_generation` a multiple "
            f"of `gradient_accumulation_steps={args.gradient_accumulation_steps}`"
        )
        require(args, whole, "proposal_updates_per_step", remedy)
    if args.proposal_learning_rate is not None:
        remedy = "must be a finite number of at least 0 (0 freezes the proposal)"
        require(args, 0 <= args.proposal_learning_rate < math.inf, "proposal_learning_rate", remedy)
    if args.proposal_parameterization == "prefix":
        remedy = "is defined for the CTL losses; set `proposal_loss='ctl'`"
        require(args, args.proposal_loss.startswith("ctl"), "proposal_parameterization", remedy)
    if args.proposal_vllm_server_base_url is not None:
        remedy = "is for `use_vllm=True` with `vllm_mode='server'`; set these or leave it out"
        require(args, args.use_vllm and args.vllm_mode == "server", "proposal_vllm_server_base_url", remedy)
        remedy = "is the policy's server; give the proposal one of its own, or leave it out to share the policy's"
        different = args.proposal_vllm_server_base_url != args.vllm_server_base_url
        require(args, different, "proposal_vllm_server_base_url", remedy)
        remedy = "must differ from `vllm_group_port`: each server has a port for weights"
        require(args, args.proposal_vllm_group_port != args.vllm_group_port, "proposal_vllm_group_port", remedy)


def _check_no_proposal(args: Any) -> None:
    """Refuses fields of a second model where none is built, and checks those of the hot policy."""
    remedy = f"is for `proposal='learned'`, and `{args.proposal!r}` builds no second model; leave it at {{!r}}"
    require_defaults(args, remedy, *_OF_SECOND_MODEL)
    if args.proposal == "policy":
        remedy = "asks for samples beside the policy's own; set another `proposal`, or leave it unset"
        require(args, args.num_proposal_generations is None, "num_proposal_generations", remedy)
        return
    if args.proposal_temperature is not None:
        remedy = "must be above 1: hot samples find what the policy hardly ever draws at temperature 1"
        require(args, 1 < args.proposal_temperature < math.inf, "proposal_temperature", remedy)
        fits = not args.use_vllm or args.proposal_temperature <= 2.0
        remedy = "is above what vLLM draws at: it takes temperatures up to 2; lower it, or set `use_vllm=False`"
        require(args, fits, "proposal_temperature", remedy)
    require_defaults(args, "does not go with `proposal='hot_policy'`; leave it at {!r}", "negative_loss")


def check_uploads(args: Any, pushing: bool = False) -> None:
    """
    Refuses to upload a learned proposal, except to a private repository of its own, and bad completions that a run keeps.

    Called when the configuration is made and again before training, since fields and environment may change. `pushing`
    says that the policy is being pushed, which is possible without `push_to_hub=True`. Raises `ValueError`.
    """
    learned = getattr(args, "has_proposal", False)
    logs_worst = getattr(args, "draws_twice", False) and args.log_completions
    if not (learned or logs_worst or args.save_negatives):
        return
    what = "whole checkpoints, the proposal in them" if learned else "`output_dir`, with its bad completions"
    if learned and args.push_proposal_to_hub:
        remedy = "pushes the proposal whenever the policy is; set `push_to_hub=True`"
        require(args, args.push_to_hub, "push_proposal_to_hub", remedy)
        policy = args.hub_model_id or Path(args.output_dir).absolute().name
        remedy = "is the policy's repository; name another, or leave it unset"
        require(args, args.hub_proposal_model_id != policy, "hub_proposal_model_id", remedy)
    elif learned:
        require_defaults(args, "has no effect; set `push_proposal_to_hub=True`", "hub_proposal_model_id")
    report_to = [args.report_to] if isinstance(args.report_to, str) else list(args.report_to or [])  # set by hand
    if "all" in report_to:
        from .._trl import get_available_reporting_integrations  # slow import

        report_to = get_available_reporting_integrations()
    for tracker, variable, default, uploading in _CHECKPOINT_UPLOADS:
        value = os.environ.get(variable, default)
        if tracker in report_to and value.lower() in uploading and (learned or tracker in ("comet_ml", "dagshub")):
            raise ValueError(
                f"`report_to={args.report_to}` with {variable}={value} in the environment uploads {what}; set {variable}=false."
            )
    if "flyte" in report_to and learned:
        raise ValueError(f"`report_to='flyte'` uploads {what}; report elsewhere.")
    pushing |= args.push_to_hub
    published = pushing and not args.hub_private_repo and args.trackio_static_space_id is not False
    if "trackio" in report_to and logs_worst and published and args.trackio_space_id is None:
        raise ValueError(
            "`report_to='trackio'` copies what it logged to a public Space when the policy is pushed, with "
            "`log_completions=True` those of the proposal or the hot policy too; set `trackio_static_space_id=False`, or "
            "`hub_private_repo=True`."
        )
    if logs_worst and args.log_completions_hub_repo is not None:
        remedy = "gets the completions of the proposal or the hot policy too; set `hub_private_repo=True`, or leave it unset"
        require(args, args.hub_private_repo, "log_completions_hub_repo", remedy)
