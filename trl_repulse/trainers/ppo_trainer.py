"""PPO on TRL's GRPO trainer: GRPO's sampling and clipped loss, advantages from a value model.

Axis letters: B rows of a generation batch or of a micro-batch, L prompt tokens, T completion tokens.
"""

import textwrap
from typing import Any

import torch
from accelerate.utils import is_peft_model, set_seed
from transformers import TrainerCallback

from .._trl import disable_gradient_checkpointing
from ..configs import PPOConfig
from ..engine.logs import Moments, mean, share_explained
from ..engine.preparation import VALUE_MODEL, as_trained
from ..engine.resume import RESUME_STATE
from ..engine.reward_functions import check_separate_rewards
from ..engine.scoring import Layout, prepare_scoring
from ..engine.second_model import VALUE_FOLDER, SecondModel, build_value_model, check_value_model, token_values
from ..engine.trl_bridge import without_kl
from ..math.objective import kl_token_rewards
from ..math.ppo import approximate_kl, generalized_advantages, value_loss, whiten
from ..models._adapters import adapter_config, base_of, keep_4bit_trainable
from ..models._deepspeed import zero_stage
from ..models._loading import check_same_tokens
from ..models._model_checks import check_separate
from ._grpo_loss import GRPOLossTrainer


class _HoldPolicy(TrainerCallback):
    """Drops the policy's gradient while the value model warms up: parameters without one are not touched at all."""

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if state.global_step < args.value_warmup_steps:
            kwargs["model"].zero_grad(set_to_none=True)


class PPOTrainer(GRPOLossTrainer):
    """
    Trainer for PPO ([Proximal Policy Optimization Algorithms](https://huggingface.co/papers/1707.06347)).

    TRL's [`~trl.GRPOTrainer`] samples, scores and clips; the advantages come from a value model instead of from the other
    completions of a prompt. The KL penalty is part of the token rewards, the reward is given at the last token, and
    generalized advantage estimation spreads both over the tokens. One completion a prompt is enough.

    The value model has an optimizer of its own. It is saved to `output_dir/value`, is part of each checkpoint, and is not
    uploaded with the policy.

    Example:

    ```python
    >>> from trl_repulse import PPOConfig, PPOTrainer
    >>> from trl_repulse.embedded import load_prompts, policy_path, reward_model_path

    >>> args = PPOConfig("out", max_completion_length=2, num_generations=2, use_cpu=True, bf16=False)
    >>> trainer = PPOTrainer(policy_path(), reward_model_path(), args, train_dataset=load_prompts())
    >>> trainer.train()
    ```

    Args:
        model, reward_funcs, train_dataset, eval_dataset, processing_class, reward_processing_classes, callbacks,
        optimizers, quantization_config, peft_config, tools, rollout_func, environment_factory:
            As for [`~trl.GRPOTrainer`]. Datasets need a `"prompt"` column, plain or conversational text.
        args ([`PPOConfig`], *optional*):
            Configuration for this trainer. If `None`, a default configuration is used.
        value_model (`str` or [`~transformers.PreTrainedModel`], *optional*):
            What the value model starts from: a path, a model id, or a model. A causal language model gives its
            transformer under a new head; a sequence classifier with one label, that is a reward model, gives its head
            too; a token classifier with one label is trained as it is, and so is the adapter in the `value` folder of an
            earlier run, over its base. Must be causal and read the policy's tokens. If `None`, the initial policy.
        value_peft_config (`peft.PeftConfig`, *optional*):
            If given, an adapter and the head of the value model are trained; else, also with a `peft_config`, all of it.

    Raises:
        `ValueError`: If a data set is empty, lacks the `"prompt"` column or has images; if a prompt is neither text nor messages, or
            the chat template is missing for messages or refuses them; if the policy is no causal language model; if the value
            model has other tokens, shares weights with the policy that are trained, has several labels, or reads to the right;
            with FSDP's first version, or `value_warmup_steps` with DeepSpeed; while training, if a prompt does not fit the model's
            context or a reward is infinite.
    """

    _tag_names = ["trl", "trl-repulse", "ppo"]
    _name = "PPO"
    _paper = {
        "title": "Proximal Policy Optimization Algorithms",
        "id": "1707.06347",
        # docstyle-ignore
        "citation": textwrap.dedent("""\
            @misc{schulman2017proximal,
                title         = {{Proximal Policy Optimization Algorithms}},
                author        = {John Schulman and Filip Wolski and Prafulla Dhariwal and Alec Radford and Oleg Klimov},
                year          = 2017,
                eprint        = {arXiv:1707.06347},
            }"""),
    }
    _config_cls = PPOConfig
    _takes: tuple[str, ...] = ("value_model", "value_peft_config")
    _withheld = (*GRPOLossTrainer._withheld, *RESUME_STATE)
    _dropped = (*GRPOLossTrainer._dropped, "frac_reward_zero_std")  # of groups

    def _add_value_model(self) -> None:
        """Checks the value model that was built before the trainer, and makes it a second model with an optimizer of its own. Raises a
        `ValueError` if it has other tokens than the policy or cannot be trained with these settings."""
        args, value, value_model = self.args, self._initial_value, self._second.get("value_model")
        prepare_scoring(base_of(value))
        with as_trained(self, value):
            check_value_model(value, self.model)
        self._guard_model(VALUE_MODEL, value)
        if isinstance(value_model, str) and value_model != self.model.config._name_or_path:
            check_same_tokens(value_model, "`value_model`", self._tokenizer, args.trust_remote_code)
        if is_peft_model(value) and args.activation_checkpointing:
            value.enable_input_require_grads()
        learning_rate = args.learning_rate if args.value_learning_rate is None else args.value_learning_rate
        self.value = SecondModel(value, self.accelerator, learning_rate)
        self.second_models[VALUE_FOLDER] = self.value
        if args.value_warmup_steps > 0:  # during which only the value model is updated
            if zero_stage(self.accelerator) is not None:
                raise ValueError(
                    "`value_warmup_steps` does not work with DeepSpeed, which updates the policy as soon as its gradient "
                    "is complete; set it to 0 or use plain data parallelism (`distributed_type: MULTI_GPU`)."
                )
            self.add_callback(_HoldPolicy())

    def _build_first(self, model, reward_funcs, args, quantization_config, peft_config):
        """Builds the value model before TRL loads the policy. Raises a `ValueError` if it shares weights with another model."""
        second: Any = self._second
        value_model, proposal_model = second.get("value_model"), second.get("proposal_model")
        value_peft_config = second.get("value_peft_config")
        init_kwargs = {"trust_remote_code": args.trust_remote_code, **(args.model_init_kwargs or {})}
        init_kwargs["device_map"] = None
        if value_model is not None and value_model != model:
            init_kwargs.pop("revision", None)  # the policy's
        value_is_adapter = value_peft_config is not None or adapter_config(value_model) is not None
        if value_is_adapter and quantization_config is not None:
            init_kwargs["quantization_config"] = quantization_config
        set_seed(args.seed)  # a new adapter is drawn from it, as TRL draws the policy's
        value = build_value_model(model if value_model is None else value_model, init_kwargs, value_peft_config)
        keep_4bit_trainable(value, "`value_model`")
        check_separate_rewards(reward_funcs, value, "`value_model`", trained=True)  # it may be a copy of one
        if not isinstance(model, str) and value_model is not None:
            remedy = "pass `copy.deepcopy` of it, or leave it out to have one made."
            check_separate(value, "`value_model`", model, "`model`", (True, peft_config is None), remedy)
        if value_model is not None and proposal_model is not None and not isinstance(proposal_model, str):
            remedy = "pass `copy.deepcopy` of one of them."
            check_separate(value, "`value_model`", proposal_model, "`proposal_model`", (True, True), remedy)
        self._initial_value = value

    # Sampling and credit

    def _credit(self, batch: dict[str, torch.Tensor | Any]) -> dict[str, torch.Tensor]:
        """
        What the losses need of a generation batch that TRL sampled and scored, from its `rewards` (B,), NaN where there is none.

        Returns:
            `dict[str, torch.Tensor]`: `advantages`, `returns`, `old_values` and `credit_mask` (1 at the tokens that take
            part), each of shape `(B, T)`, and `num_items_in_batch`, the number of those tokens in all processes; with a KL
            penalty also `sampling_log_p` `(B, T)`, the log-probabilities (nats) that it was made of.
        """
        rewards, counted = batch["rewards"], batch["completion_mask"] * batch.get("tool_mask", 1)  # (B,) and (B, T)
        mask = counted * ~rewards.isnan().unsqueeze(1)
        # Values and log-probabilities under the models at sampling time, (B, T) each
        scored, size = _joined(batch), self.shape.micro_batch
        module, kwargs = self.value.module, self.args.gradient_checkpointing_kwargs
        with torch.no_grad(), disable_gradient_checkpointing(module, kwargs):
            values = self._values(module, *scored, size)
        log_p: Any = torch.zeros_like(mask, dtype=torch.float32)
        log_ref = log_p
        if self.beta != 0.0:
            log_p, log_ref = batch.get("old_per_token_logps"), batch["ref_per_token_logps"]
        if log_p is None:
            with torch.no_grad(), disable_gradient_checkpointing(self.model, kwargs):
                log_p = self._get_per_token_logps_and_entropies(self.model, *scored, batch_size=size)[0]

        # Token rewards: the KL penalty at each token, the reward at the last
        rows = (log_p, log_ref, self._transform(rewards), mask)
        of_policy, of_reference, transformed, counts = (x.unsqueeze(1) for x in rows)
        token_rewards = kl_token_rewards(of_policy, of_reference, transformed, self.beta, counts).squeeze(1)  # (B, T)
        advantages, returns = generalized_advantages(
            token_rewards, values, mask, self.args.gamma, self.args.gae_lambda
        )
        kl = (log_p - log_ref).masked_fill(counted == 0, 0.0)
        self._log_returns(rewards, kl.sum(dim=1), counted.sum(), kl.sum())
        self._log_values(values, returns, mask)
        if self.args.whiten_advantages:
            advantages = whiten(advantages, mask, self.accelerator.reduce)
        means = advantages.sum(dim=1) / mask.sum(dim=1).clamp(min=1)  # in the place of GRPO's, which are of groups
        self._tables.record_advantages(torch.arange(len(mask), device=mask.device), means, len(mask))
        return {
            "advantages": advantages,
            "returns": returns,
            "old_values": values,
            "credit_mask": mask,
            "num_items_in_batch": self.accelerator.reduce(mask.sum()),
            **({} if self.beta == 0.0 else {"sampling_log_p": log_p}),
        }

    def _values(
        self, model: torch.nn.Module, ids: torch.Tensor, mask: torch.Tensor, width: int, size: int | None = None
    ) -> torch.Tensor:
        """V(s_t), (B, T), under the value model, wrapped or not, in chunks as for micro-batches of `size` if it is given."""

        def values(ids: torch.Tensor, mask: torch.Tensor, layout: Layout) -> tuple[torch.Tensor]:
            return (token_values(model, self.accelerator, ids, mask, layout),)

        return self._scoring.in_rows(values, ids, mask, width, size)[0]

    # Losses

    def _own_loss(self, model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """PPO's loss of the policy; before it, the value model's backward pass. A collective call."""
        # Tokens of an average micro-batch: sums over it add up to a token mean, however a batch is split
        denominator = inputs["num_items_in_batch"].clamp(min=1) / self.accelerator.num_processes
        if self.model.training:
            denominator = denominator / self.args.steps_per_generation

        self._learn_values(inputs, denominator)  # its activations are gone before the policy's come
        with without_kl(self):
            loss = super()._own_loss(model, inputs)

        log_p = self._scored_log_p
        old_log_p = inputs.get("old_per_token_logps", log_p)
        kl = approximate_kl(log_p, old_log_p, inputs["credit_mask"], denominator)
        self._log_share("approx_kl", kl, inputs)
        return loss

    def _learn_values(self, inputs: dict[str, torch.Tensor], denominator: torch.Tensor) -> None:
        """Value loss of a micro-batch, divided by `denominator`; in training, its gradient is accumulated. A collective call."""
        learn = self.model.training
        with self.value.gradient_sync(not learn or self.accelerator.sync_gradients):
            engine = self.value.engine if learn else self.value.module
            values = self._values(engine, *_joined(inputs))
            before, targets, mask = inputs["old_values"], inputs["returns"], inputs["credit_mask"]
            loss, clipped = value_loss(values, before, targets, mask, self.args.value_clip, denominator)
            if learn:
                self.value.backward(loss / self.current_gradient_accumulation_steps)
        self._log_share(f"{VALUE_FOLDER}/loss", loss, inputs)
        self._log_share(f"{VALUE_FOLDER}/clip_fraction", clipped, inputs)

    # Logging

    def _log_values(self, values: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor) -> None:
        """Logs the mean value, and the share of the variance of returns that values explain, over tokens (B, T) of mask 1."""
        logs = self._logs_of_run
        of_tokens = (x[mask != 0] for x in (returns, returns - values))
        logs.record_later({f"{VALUE_FOLDER}/explained_variance": share_explained}, *of_tokens)
        logs.mean(f"{VALUE_FOLDER}/mean", values[mask != 0])

    def _log_share(self, name: str, share: torch.Tensor, inputs: dict[str, torch.Tensor]) -> None:
        """Logs a mean over tokens from this micro-batch's share of it, a sum over the average number of tokens. A collective call."""
        average = self.accelerator.gather(share.detach().view(1)).mean().item()
        self._logs_of_run.record_moments({name: mean}, Moments.alike(average, inputs["num_items_in_batch"].item()))


def _joined(batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Tokens and mask of prompts and completions, (B, L + T), and T."""
    input_ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    attention_mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    return input_ids, attention_mask, batch["completion_ids"].size(1)
