"""Every name of TRL and transformers that they do not promise to keep: all modules take such names from here.

`HOOKS` says what each must look like. It is compared with the installed packages when a trainer is built, and by tests. What trainers do
with the names is in `engine/trl_bridge.py`, what they rely on in vLLM in `generation/_engine.py`, and in PEFT in `models/_adapters.py`.
"""

import inspect
from importlib import import_module
from importlib.metadata import version
from typing import Any

from accelerate.logging import get_logger
from packaging.version import Version


logger = get_logger(__name__)

# Oldest and newest TRL that the tests were run with
TESTED = ("1.15", "1.16")
_ADVICE = f"Install a TRL that trl-repulse was tested with ({' to '.join(TESTED)}), or look for a newer trl-repulse."

# None of these modules is part of a public API. They go when TRL or transformers exports the names, or a public equivalent appears.
try:
    import transformers.trainer as transformers_trainer
    import trl.trainer.utils as trl_utils
    from transformers.integrations import TensorBoardCallback, TrackioCallback, get_available_reporting_integrations
    from transformers.masking_utils import create_masks_for_generate
    from transformers.modeling_outputs import MoeModelOutputWithPast
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES
    from transformers.trainer import TRAINER_STATE_NAME, TRAINING_ARGS_NAME
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, validate_quantization_for_training
    from trl.generation import vllm_generation
    from trl.generation.vllm_generation import VLLMGeneration
    from trl.import_utils import is_vllm_available
    from trl.models.utils import disable_gradient_checkpointing, unwrap_model_for_generation
    from trl.trainer.utils import (
        FusedCausalLMOutput,
        add_fused_lm_head,
        create_model_from_path,
        is_async_callable,
        pad,
        print_prompt_completions_sample,
        split_tensor_dict,
        use_adapter,
    )
except ImportError as error:
    raise ImportError(
        f"TRL {version('trl')} or transformers {version('transformers')} has moved a name that trl-repulse builds on: {error}. {_ADVICE}",
        name=error.name,
    ) from error

# Module and name -> the first parameters, or nothing. Way out for most of GRPO's: a public "sample and score" hook in TRL.
HOOKS = {
    # Called: draws completions, one a prompt. Overridden around `super()`: it logs means of lengths over batches, not samples.
    "trl:GRPOTrainer._generate": "self prompts",
    # Overridden around `super()`: samples from `self.model_wrapped`; more parameters, which differ between versions, follow.
    "trl:GRPOTrainer._generate_single_turn": "self prompt_ids",
    # Overridden to name prompts that do not fit the model's context before anything is generated.
    "trl:GRPOTrainer._tokenize_prompts": "self prompts",
    # Called, and overridden around `super()` to keep the gathered rewards: one column a reward function, NaN where one returned `None`.
    "trl:GRPOTrainer._calculate_rewards": "self inputs prompts completions completion_ids_list",
    # Overridden: returns the dict that TRL shuffles and splits into rows. On PPO and GRPO around `super()`: advantages, returns and values join it.
    "trl:GRPOTrainer._generate_and_score_completions": "self inputs",
    # Overridden around `super()`: micro-batches that are made anew, a new list in `_buffered_inputs`, are sorted by prompt.
    "trl:GRPOTrainer._prepare_inputs": "self generation_batch",
    # Overridden, as TRL's experimental trainers do. On PPO and GRPO around `super()`: takes advantages (B, T), as its source says.
    "trl:GRPOTrainer._compute_loss": "self model inputs",
    # Called, and overridden around `super()` to see the log-probabilities that the loss is made of.
    "trl:GRPOTrainer._get_per_token_logps_and_entropies": "self model input_ids attention_mask logits_to_keep batch_size",
    # Overridden around `super()`: the value model steps when the policy's gradient is complete.
    "trl:GRPOTrainer.training_step": "self model inputs num_items_in_batch",
    # Called with these arguments, by position or by name.
    "trl.trainer.utils:create_model_from_path": "model_id architecture",
    "trl.models.utils:disable_gradient_checkpointing": "model gradient_checkpointing_kwargs",
    "trl.trainer.utils:is_async_callable": "func",
    "trl.trainer.utils:pad": "tensors padding_value padding_side pad_to_multiple_of",
    "trl.trainer.utils:print_prompt_completions_sample": "prompts completions rewards advantages step num_samples extra",
    "trl.trainer.utils:split_tensor_dict": "tensor_dict num_chunks",
    "trl.models.utils:unwrap_model_for_generation": "model accelerator gather_deepspeed3_params generation_kwargs",
    "trl.trainer.utils:use_adapter": "model adapter_name",
    # Lowered on a CPU around scoring: the size of a tile.
    "trl.trainer.utils:_CHUNKED_LOGPROB_CHUNK_SIZE": "",
    # Called: what the Trainer refuses to train of its own model, for the second one. transformers has it since 5.0.
    "transformers.trainer_utils:validate_quantization_for_training": "model",
    # Patches the forward that every log-probability of either model comes from.
    "trl.trainer.utils:add_fused_lm_head": "model temperature cast_lm_head_to_fp32 outputs",
    # Built with names where that head does not fit a model: `log_probs`, `entropy` and `aux_loss` are read.
    "trl.trainer.utils:FusedCausalLMOutput": "loss log_probs entropy",
    # Overridden around `super()`: the second model is prepared, and loaded from a checkpoint or as the best, beside the first.
    "transformers:Trainer._load_best_model": "self",
    "transformers:Trainer._prepare_for_training": "self max_steps train_dataloader resume_from_checkpoint",
    # Called for the second model. Overridden around `super()`: it takes a second model's folder for one more adapter of the policy.
    "transformers:Trainer._load_from_checkpoint": "self resume_from_checkpoint model",
    # Overridden around `super()`: it takes tied weights, which are stored once, for missing ones.
    "transformers:Trainer._issue_warnings_after_load": "self load_result",
    # Overridden around `super()`: the second model is written before the checkpoint, in that folder, can be taken for complete.
    "transformers:Trainer._get_output_dir": "self trial",
    "transformers:Trainer._save_checkpoint": "self model trial",
    "transformers:Trainer.save_model": "self output_dir _internal_call",
    # Replaced on a base model with two adapters: whatever turns checkpointing on ends here.
    "transformers:PreTrainedModel._set_gradient_checkpointing": "self enable gradient_checkpointing_func every_n_layers",
    # Overridden around `super()`: where models under FSDP2 are told their precision, before the first is prepared.
    "transformers:Trainer.create_accelerator_and_postprocess": "self",
    # Overridden around `super()`: the loss becomes the mean over all processes.
    "transformers:Trainer.prediction_step": "self model inputs prediction_loss_only ignore_keys",
    # Overridden around `super()`: metrics are pooled over the batches of one evaluation; TRL takes the mean over batches.
    "transformers:Trainer.evaluation_loop": "self dataloader description prediction_loss_only ignore_keys metric_key_prefix",
    "trl:GRPOTrainer.log": "self logs start_time",
    # Overridden around `super()`: an epoch's order follows from the state. `shuffle`, `seed`, `generator`, `num_samples` of a sampler are read.
    "trl.trainer.utils:RepeatSampler": "data_source mini_repeat_count batch_size repeat_count shuffle seed",
    "trl:GRPOTrainer._get_train_sampler": "self dataset",
    # Replaced around uploads that leave files out. Way out: an `ignore_patterns` argument of `Trainer.push_to_hub`.
    "transformers.trainer:hf_api": "",
    # Overridden around `super()`: the proposal stays out of every upload; its own repository is made or refused as training is set up, and pushed.
    "transformers:Trainer._push_from_checkpoint": "self checkpoint_folder",
    "transformers:Trainer.init_hf_repo": "self token private",
    "transformers:Trainer.push_to_hub": "self commit_message blocking token revision private",
    # Overridden around `super()`: the card that was written is amended.
    "trl:GRPOTrainer.create_model_card": "self model_name dataset_name tags",
    # Called, and replaced in an engine that serves several models.
    "trl.generation.vllm_generation:VLLMGeneration": "model accelerator processing_class",
    "trl.generation.vllm_generation:VLLMGeneration.generate": "self prompts images num_generations profiler",
    "trl.generation.vllm_generation:VLLMGeneration.sync_weights": "self",
    "trl.generation.vllm_generation:VLLMGeneration._init_vllm": "self",
    "trl.generation.vllm_generation:VLLMGeneration._iter_named_params": "self",
    "trl.generation.vllm_generation:VLLMGeneration._iter_fsdp_params": "self",
    "trl.generation.vllm_generation:VLLMGeneration._fix_param_name_to_vllm": "self name",
}


def hook_changes() -> list[str]:
    """Entries of [`HOOKS`] that the installed packages no longer have, one line each with package, version and name."""
    changes = []
    for hook, parameters in HOOKS.items():
        module, _, name = hook.partition(":")
        package, expected = module.partition(".")[0], parameters.split()
        installed: Any = import_module(module)
        for part in name.split("."):
            installed = getattr(installed, part, None)
        if installed is None:
            changes.append(f"{package} {version(package)}: {name}({', '.join(expected)}) is gone")
        elif expected and (actual := list(inspect.signature(installed).parameters))[: len(expected)] != expected:
            change = f"{name} takes ({', '.join(actual)}) and no longer ({', '.join(expected)}, ...)"
            changes.append(f"{package} {version(package)}: {change}")
    return changes


def require_hooks() -> None:
    """Raises a `RuntimeError` with a TRL or transformers in which anything of [`HOOKS`] has moved. Warns once, on the main process, of a
    TRL newer than those tested. Accelerate's state must be initialized, as by a configuration."""
    if changes := hook_changes():
        raise RuntimeError(
            f"Methods that trl-repulse builds on have changed: {'; '.join(changes)}. {_ADVICE} Look for patches of TRL and transformers."
        )
    installed = version("trl")
    if Version(installed).release[:2] > Version(TESTED[1]).release:
        logger.warning_once(
            f"TRL {installed} is newer than {TESTED[1]}, the newest that trl-repulse was tested with. All methods that it builds on are "
            f"there, but they may do something else: compare a short run with TRL {TESTED[1]}, or install that."
        )


def require_known_options(options: dict[str, Any]) -> None:
    """Raises a `RuntimeError` if TRL asks for log-probabilities with an option that only a newer TRL, or images, would set."""
    known = {"batch_size", "compute_entropy", "compute_aux_loss"}
    if unknown := sorted(name for name, value in options.items() if value is not None and name not in known):
        raise RuntimeError(
            f"TRL {version('trl')} asks for log-probabilities with {', '.join(unknown)}, which trl-repulse does not know. {_ADVICE}"
        )


def check_scoring_on_cpu() -> None:
    """Raises `ValueError` if TRL's own scoring needs an accelerator, as that of 1.15, whose kernel is written in Triton. Way out: TRL 1.16
    or newer as the oldest that is supported."""
    if getattr(trl_utils, "_ChunkedLogProbFunction", True) is None:
        raise ValueError(
            f"TRL {version('trl')} scores completions with a kernel that needs Triton and a GPU. Install TRL 1.16 to train with `alpha=0` "
            "here, or set `alpha` above 0."
        )
