"""Building the proposal, as a second model or as a second adapter over the policy's base."""

from typing import TYPE_CHECKING, Any

from accelerate.logging import get_logger
from accelerate.utils import is_peft_model
from transformers import PreTrainedModel

from .._trl import add_fused_lm_head, create_model_from_path, validate_quantization_for_training
from ..engine.preparation import as_trained
from ..engine.reward_functions import check_separate_rewards
from ..engine.scoring import prepare_scoring
from ..engine.second_model import POLICY_ADAPTER, SecondAdapter, SecondModel, add_adapter
from ..engine.trl_bridge import copy_unpatched, disable_dropout
from ..models._adapters import adapter_config, base_of, keep_4bit_trainable
from ..models._deepspeed import gathered_by_layer, zero_stage
from ..models._loading import check_same_tokens
from ..models._model_checks import check_causal, check_language_model, check_separate, check_vocabulary_size


if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel


logger = get_logger(__name__)


def policy_adapter(model: Any, peft_config: "PeftConfig | None") -> Any:
    """Configuration of the policy's adapter, which it has or is given; `None` without."""
    is_adapter = not isinstance(model, str) and is_peft_model(model)
    return model.peft_config.get(POLICY_ADAPTER) if is_adapter else peft_config


def shares_base(
    model: "str | PreTrainedModel | PeftModel",
    args: Any,
    peft_config: "PeftConfig | None",
    proposal_peft_config: "PeftConfig | None",
) -> bool:
    """Whether policy and proposal, as passed, can be two adapters over one base; warns with the reason if adapters cannot."""
    policy_config = policy_adapter(model, peft_config)
    if policy_config is None:
        return False
    own_config: Any = policy_config if proposal_peft_config is None else proposal_peft_config
    obstacle = _change_of_base(policy_config) or _change_of_base(own_config)
    if args.fsdp:
        obstacle = "FSDP flattens all weights"
    elif own_config.peft_type != policy_config.peft_type:
        obstacle = f"one is {policy_config.peft_type.value} and the other {own_config.peft_type.value}"
    if obstacle is not None:
        logger.warning(
            "Policy and proposal cannot be adapters over one base because %s; each gets its own copy of it.", obstacle
        )
    return obstacle is None


def _change_of_base(config: Any) -> str | None:
    """Why a model with such an adapter is not its base model when the adapter is off; `None` if it is."""
    if config.is_prompt_learning or config.is_adaption_prompt:
        return f"{config.peft_type.value} has no layers to switch"
    if getattr(config, "bias", "none") != "none":
        return f"biases of the base are trained (`bias={config.bias!r}`)"
    if getattr(config, "init_lora_weights", True) not in (True, False, "gaussian", "orthogonal"):
        return f"the base is changed to begin with (`init_lora_weights={config.init_lora_weights!r}`)"
    if getattr(config, "layer_replication", None):
        return "layers are replicated (`layer_replication`)"
    return None


def plan_proposal(
    args: Any, model: Any, reward_funcs: Any, peft_config: Any, given: Any, own_config: Any
) -> "tuple[bool, str | PreTrainedModel | None, list[PeftConfig | None]]":
    """
    Plans the proposal before TRL wraps or patches the policy. `given` and `own_config` are a trainer's `proposal_model` and
    `proposal_peft_config`, the others its arguments of these names.

    Returns:
        `tuple`: Whether the base of the proposal's adapter, which is the initial policy, is the reference too; the model that the proposal
        starts from, `None` if there is no proposal or it is a second adapter over the policy's base; and all adapters that are sampled from.

    Raises:
        `ValueError`: If a proposal or its adapter is passed and has no use, if it is the policy itself, shares weights with it or is no
            language model, or if the policy's adapter has another name than PEFT's `default`.
    """
    if not getattr(args, "has_proposal", False):
        for name, value in {"proposal_peft_config": own_config, "proposal_model": given}.items():
            if value is not None:
                raise ValueError(
                    f"`{name}` is given, but the configuration builds no proposal; set `proposal='learned'`, or leave it out."
                )
        return False, None, [peft_config]
    if not isinstance(model, str) and is_peft_model(model) and POLICY_ADAPTER not in model.peft_config:
        raise ValueError(
            f"The policy's adapter is named {', '.join(map(repr, model.peft_config))}; load it under PEFT's name, 'default'."
        )
    proposal = given
    if given is not None:
        _check_given(given, model, peft_config, own_config)
    elif not shares_base(model, args, peft_config, own_config):
        proposal = copy_unpatched(model)
    is_whole = own_config is None and peft_config is None
    check_separate_rewards(reward_funcs, proposal, "`proposal_model`", trained=is_whole)
    of_policy = policy_adapter(model, peft_config)
    adapters = [peft_config, own_config, adapter_config(proposal)]
    if proposal is None and own_config is None:
        adapters.append(of_policy)  # once more, of a proposal over its base
    whole = given is None and of_policy is None and adapter_config(model) is None
    reference_stays = args.beta != 0.0 and not args.sync_ref_model and not args.fsdp
    lends_base = whole and reference_stays and own_config is not None and _change_of_base(own_config) is None
    return lends_base, proposal, adapters


def _check_given(given: Any, model: Any, peft_config: Any, own_config: Any) -> None:
    """Raises a `ValueError` for a `proposal_model`, `given`, that is the policy, shares weights with it, or is no language model."""
    if given is model and not isinstance(model, str):
        raise ValueError("`proposal_model` is the policy itself; pass a copy of it, or leave it out to have one made.")
    check_language_model(given, "`proposal_model`")
    if not isinstance(given, str) and not isinstance(model, str):
        own_weights = is_peft_model(given) or (own_config or peft_config) is None
        check_separate(
            *(given, "`proposal_model`", model, "`model`"),
            trained=(own_weights, peft_config is None),
            remedy="pass `copy.deepcopy` of it, made before either has an adapter, or leave it out to have a proposal made.",
        )


def build_proposal(
    model: Any,
    trainer: Any,
    peft_config: "PeftConfig | None" = None,
    proposal_peft_config: "PeftConfig | None" = None,
    quantization_config: Any = None,
) -> SecondModel:
    """
    Makes the second model of a trainer, after its policy, from the model that [`plan_proposal`] gave.

    A path or id is loaded with the trainer's `model_init_kwargs`. An adapter over the policy's base is added to the policy's model. The
    policy's `peft_config` is used if there is no `proposal_peft_config`.

    Raises:
        `ValueError`: If its tokens are not the policy's, or it is not causal or cannot be trained.
    """
    args = trainer.args
    if isinstance(model, str) and model != trainer.model.config._name_or_path:
        check_same_tokens(model, "`proposal_model`", trainer._tokenizer, args.trust_remote_code)
    learning_rate = args.learning_rate if args.proposal_learning_rate is None else args.proposal_learning_rate
    saved, own = adapter_config(model), policy_adapter(trainer.model, None)
    # A saved adapter over the policy's base can share that base
    joins = saved is not None and own is not None and saved.base_model_name_or_path == own.base_model_name_or_path
    if (model is None or joins) and (saved is None or shares_base(trainer.model, args, None, saved)):
        adapter = add_adapter(trainer.model, SecondAdapter.name, saved or proposal_peft_config)
        if saved is not None:
            adapter.load(model)
        return SecondAdapter(adapter, trainer.accelerator, learning_rate)
    config = None if saved is not None else proposal_peft_config or peft_config
    proposal = SecondModel(_ready(model, trainer, config, quantization_config), trainer.accelerator, learning_rate)
    with gathered_by_layer(proposal.module), as_trained(trainer, proposal.module):
        check_causal(proposal.module, "`proposal_model`")
    return proposal


def _ready(
    model: Any, trainer: Any, peft_config: "PeftConfig | None", quantization_config: Any
) -> "PreTrainedModel | PeftModel":
    """Loads (from a path or id) and prepares a model as TRL does the policy, so that TRL's hooks can sample from it and score with it.
    Raises a `ValueError` if its vocabulary has another size than the policy's, or there is nothing to train."""
    args = trainer.args
    if isinstance(model, str):
        init_kwargs = {"trust_remote_code": args.trust_remote_code, **(args.model_init_kwargs or {})}
        if quantization_config is not None:
            init_kwargs["quantization_config"] = quantization_config
        if args.distributed_state.distributed_type in ("MULTI_GPU", "DEEPSPEED"):
            init_kwargs["device_map"] = None
        if model != getattr(trainer.model.config, "_name_or_path", None):
            init_kwargs.pop("revision", None)  # the policy's
        saved: Any = adapter_config(model)
        if saved is None:
            model = create_model_from_path(model, **init_kwargs)
        else:
            from peft import PeftModel

            base = create_model_from_path(saved.base_model_name_or_path, **init_kwargs)
            model = PeftModel.from_pretrained(base, model, is_trainable=True)
    check_vocabulary_size(model, "`proposal_model`", trainer.model)
    model.config.get_text_config().pad_token_id = trainer._tokenizer.pad_token_id
    model.generation_config.pad_token_id = trainer._tokenizer.pad_token_id
    if peft_config is not None and not is_peft_model(model):
        from peft import get_peft_model

        # As TRL does: ZeRO-3 gathers in one dtype
        casts = zero_stage(trainer.accelerator) != 3 or getattr(model, "is_quantized", False)
        model = get_peft_model(model, peft_config, autocast_adapter_dtype=casts)
    try:
        validate_quantization_for_training(model)
    except ValueError as error:
        remedy = "Pass `proposal_peft_config`, or load it in full."
        raise ValueError(f"`proposal_model` cannot be trained: {error} {remedy}") from error
    if is_peft_model(model) and args.activation_checkpointing:
        model.enable_input_require_grads()
    disable_dropout(model)
    base = base_of(model)
    add_fused_lm_head(base, temperature=1.0)
    prepare_scoring(base)
    keep_4bit_trainable(model, "`proposal_model`")
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError("`proposal_model` has nothing to train; load its adapter with `is_trainable=True`.")
    return model.train()  # activation checkpointing works in training mode alone
