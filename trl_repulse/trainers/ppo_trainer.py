"""PPO on TRL's GRPO trainer: GRPO's sampling and clipped loss, advantages from a value model.

Axis letters: B rows of a generation batch or of a micro-batch, L prompt tokens, T completion tokens.
"""

import functools
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import is_peft_model, set_seed
from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict
from transformers import BitsAndBytesConfig, PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback
from trl import GRPOTrainer

from .._checks import (
    check_adapters,
    check_arguments,
    check_datasets,
    check_eval_batch,
    check_reward_funcs,
    check_rows,
)
from .._model_checks import check_language_model, check_separate
from .._vocabulary import check_same_tokens
from ..configs import PPOConfig
from ..ppo import approximate_kl, generalized_advantages, value_loss, whiten
from ..returns import kl_token_rewards
from ._beside import VALUE_FOLDER
from ._deepspeed import connect, zero_stage
from ._hooks import TrainerHooks, transform_rewards
from ._layout import Layout
from ._metrics import Moments, Pooled, drop_batch_means, highest, lowest, mean, share_explained
from ._naming import check_loadable
from ._proposal import adapter_config
from ._records import append_negatives
from ._resume import RESUME_STATE
from ._rewards import RewardFunc, check_separate_rewards, load_reward_models
from ._scoring import Scores, prepare_scoring, token_log_probs
from ._set_up import VALUE_MODEL, as_trained
from ._trl_bridge import (
    disable_gradient_checkpointing,
    get_config_model_id,
    require_pinned,
    without_kl_in_loss,
)
from ._value import build_value_model, check_value_model, token_values
from .second_model import SecondModel


if TYPE_CHECKING:
    from collections.abc import Callable

    from peft import PeftConfig, PeftModel


# What GRPO logs of rewards, which says something of groups alone or is logged anew, and of the engine
_OF_BATCHES = ("frac_reward_zero_std", "reward", "sampling/")


class _HoldPolicy(TrainerCallback):
    """Drops the policy's gradient while the value model warms up: parameters without one are not touched at all."""

    def __init__(self, trainer: "PPOTrainer"):
        self._trainer = trainer

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if state.global_step < args.value_warmup_steps:
            self._trainer.model.zero_grad(set_to_none=True)


class PPOTrainer(TrainerHooks, GRPOTrainer):
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

    >>> args = PPOConfig(output_dir="out", max_completion_length=2, num_generations=2, use_cpu=True, bf16=False)
    >>> trainer = PPOTrainer(
    ...     model=policy_path(),
    ...     reward_funcs=reward_model_path(),
    ...     args=args,
    ...     train_dataset=load_prompts(),
    ... )
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
    _withheld = (*TrainerHooks._withheld, *RESUME_STATE)

    def __init__(
        self,
        model: "str | PreTrainedModel | PeftModel",
        reward_funcs: RewardFunc | list[RewardFunc] | None = None,
        args: PPOConfig | None = None,
        train_dataset: Dataset | IterableDataset | None = None,
        eval_dataset: Dataset
        | IterableDataset
        | DatasetDict
        | IterableDatasetDict
        | dict[str, Dataset | IterableDataset]
        | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        reward_processing_classes: PreTrainedTokenizerBase | list[PreTrainedTokenizerBase] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, torch.optim.lr_scheduler.LambdaLR | None] = (None, None),
        quantization_config: BitsAndBytesConfig | None = None,
        peft_config: "PeftConfig | None" = None,
        tools: "list[Callable] | None" = None,
        rollout_func: "Callable | None" = None,
        environment_factory: "Callable | dict[str, Callable] | None" = None,
        value_model: str | PreTrainedModel | None = None,
        value_peft_config: "PeftConfig | None" = None,
    ):
        require_pinned()
        check_arguments(self._config_cls, args, model=model, value_model=value_model)
        if args is None:
            model_name = model if isinstance(model, str) else get_config_model_id(model.config)
            args = self._config_cls(f"{Path(model_name).name}-{self._name}")
        connect(args)
        if eval_dataset is not None:
            check_eval_batch(args)
        if environment_factory is None:  # an environment may bring prompts and rewards
            check_reward_funcs(reward_funcs)
            check_datasets(train_dataset, eval_dataset, args.generation_batch_size // args.num_generations)
        adapters = [peft_config, *self._more_adapters]
        check_adapters(model, *adapters)
        passed = {"reward_funcs": reward_funcs, "value_model": value_model, **self._passed}
        check_loadable(args, peft_config, model=model, **passed)
        check_language_model(model, "`model`", (args.model_init_kwargs or {}).get("revision"))
        check_separate_rewards(reward_funcs, model, "`model`", trained=peft_config is None)
        if reward_funcs is not None:
            reward_funcs, reward_processing_classes = load_reward_models(reward_funcs, reward_processing_classes, args)
        init_kwargs = {"trust_remote_code": args.trust_remote_code, **(args.model_init_kwargs or {})}
        init_kwargs["device_map"] = None
        if value_model is not None and value_model != model:
            init_kwargs.pop("revision", None)  # the policy's
        value_is_adapter = value_peft_config is not None or adapter_config(value_model) is not None
        if value_is_adapter and quantization_config is not None:
            init_kwargs["quantization_config"] = quantization_config
        # Before TRL wraps or patches the policy; a new adapter is drawn from the seed, as TRL draws the policy's
        set_seed(args.seed)
        value = build_value_model(model if value_model is None else value_model, init_kwargs, value_peft_config)
        check_separate_rewards(reward_funcs, value, "`value_model`", trained=True)  # it may be a copy of one
        if not isinstance(model, str) and value_model is not None:
            remedy = "pass `copy.deepcopy` of it, or leave it out to have one made."
            check_separate(value, "`value_model`", model, "`model`", (True, peft_config is None), remedy)
        with self._engine_fits(args, model, adapters):
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
        self._check_policy(adapters)
        self._take_engine()
        if environment_factory is None and rollout_func is None:  # which may make prompts otherwise
            self._check_templates(train_dataset, eval_dataset)
        self._check_reward_functions()
        self._prepare_scoring()
        prepare_scoring(value.get_base_model() if is_peft_model(value) else value)
        self._guard_model(VALUE_MODEL, value)
        with as_trained(self, value):
            check_value_model(value, self.model)
        if isinstance(value_model, str) and value_model != model:
            check_same_tokens(value_model, "`value_model`", self._tokenizer, args.trust_remote_code)
        if value_is_adapter and self.args.activation_checkpointing:
            value.enable_input_require_grads()
        learning_rate = self.args.value_learning_rate
        self.value = SecondModel(
            value, self.accelerator, self.args.learning_rate if learning_rate is None else learning_rate
        )
        self._beside = {VALUE_FOLDER: self.value}
        if self.args.value_warmup_steps > 0:
            if zero_stage(self.accelerator) is not None:
                raise ValueError(
                    "`value_warmup_steps` does not work with DeepSpeed, which updates the policy as soon as its gradient "
                    "is complete; set it to 0 or use plain data parallelism (`distributed_type: MULTI_GPU`)."
                )
            self.add_callback(_HoldPolicy(self))
        self._sum_over_processes = functools.partial(self.accelerator.reduce, reduction="sum")

    # Sampling and credit

    def _written(self, generated):
        tool_mask = generated[2]
        return super()._written(generated) if tool_mask is None else [sum(mask) for mask in tool_mask]

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        rewards_per_func = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        self._rewards_per_func = rewards_per_func  # (B_all, F)
        return rewards_per_func

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, torch.Tensor | Any]:
        mode = "train" if self.model.training else "eval"
        if self.environment_factories is None:
            check_rows(inputs)
        with self._weighing(self._real_rows(len(inputs))) as metrics:
            batch = super()._generate_and_score_completions(inputs)
            drop_batch_means(metrics, *_OF_BATCHES)
        batch["completion_mask"] = batch["completion_mask"] * self._are_real(len(inputs)).unsqueeze(1)
        self._trim_logs(len(inputs) * self.accelerator.num_processes - self._real_rows(len(inputs)))
        self._log_sampling(batch)
        rewards = self._weigh_rewards(self._rewards_per_func)
        if self.args.save_negatives and mode == "train" and self.accelerator.is_main_process:
            transformed = None
            if self.args.reward_transform is not None:
                transformed = transform_rewards(self.args, rewards).tolist()
            prompts, completions = (list(self._logs[name]) for name in ("prompt", "completion"))
            append_negatives(self, "policy", prompts, completions, rewards.tolist(), transformed)
        first = self.accelerator.process_index * len(inputs)
        batch["rewards"] = rewards[first : first + len(inputs)]  # (B,)
        return batch | self._credit(batch, batch["rewards"])

    def _credit(self, batch: dict[str, torch.Tensor], rewards: torch.Tensor) -> dict[str, torch.Tensor]:
        """
        What the losses need of a generation batch beside its tokens.

        Args:
            batch (`dict[str, torch.Tensor]`):
                What TRL sampled and scored.
            rewards (`torch.Tensor` of shape `(B,)`):
                Rewards of this process's completions, NaN where there is none.

        Returns:
            `dict[str, torch.Tensor]`: `advantages`, `returns`, `old_values` and `credit_mask` (1 at the tokens that take
            part), each of shape `(B, T)`, and `num_items_in_batch`, the number of those tokens in all processes.
        """
        counted = batch["completion_mask"] * batch.get("tool_mask", 1)  # (B, T)
        mask = counted * ~rewards.isnan().unsqueeze(1)
        log_p = log_ref = torch.zeros_like(mask, dtype=torch.float32)
        if self.beta != 0.0:
            log_ref = batch["ref_per_token_logps"]
            log_p = batch.get("old_per_token_logps")
            if log_p is None:
                log_p = self._sampling_log_probs(batch)

        # Token rewards: the KL penalty at each token, the reward at the last
        rows = [x.unsqueeze(1) for x in (log_p, log_ref, transform_rewards(self.args, rewards))]
        token_rewards = kl_token_rewards(*rows, self.beta, mask.unsqueeze(1)).squeeze(1)  # (B, T)
        values = self._sampling_values(batch)
        advantages, returns = generalized_advantages(
            token_rewards, values, mask, self.args.gamma, self.args.gae_lambda
        )
        self._log_credit(rewards, (log_p - log_ref).masked_fill(counted == 0, 0.0), counted)
        self._log_values(values, returns, mask)
        if self.args.whiten_advantages:
            advantages = whiten(advantages, mask, self._sum_over_processes)
        self._show_advantages(advantages, mask)
        return {
            "advantages": advantages,
            "returns": returns,
            "old_values": values,
            "credit_mask": mask,
            "num_items_in_batch": self._sum_over_processes(mask.sum()),
        }

    def _sampling_log_probs(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Log-probabilities (B, T) under the policy that sampled, nats; needed for the KL penalty alone."""
        input_ids, attention_mask, width = _joined(batch)
        with torch.no_grad(), disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs):
            return self._get_per_token_logps_and_entropies(
                self.model, input_ids, attention_mask, width, batch_size=self._micro_batch_size()
            )[0]

    def _sampling_values(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """V(s_t) under the value model that is at hand at sampling time, shape (B, T), in chunks, without gradient."""
        input_ids, attention_mask, width = _joined(batch)
        module, size = self.value.module, self._micro_batch_size()
        rows = zip(input_ids.split(size), attention_mask.split(size), strict=True)
        with torch.no_grad(), disable_gradient_checkpointing(module, self.args.gradient_checkpointing_kwargs):
            return torch.cat([self._values(module, *chunk, width) for chunk in rows])

    def _values(self, model: torch.nn.Module, ids: torch.Tensor, mask: torch.Tensor, width: int) -> torch.Tensor:
        """V(s_t), (B, T), under the value model, wrapped or not."""

        def values(ids: torch.Tensor, mask: torch.Tensor, layout: Layout) -> tuple[torch.Tensor]:
            return (token_values(model, self.accelerator, ids, mask, layout),)

        return self._in_rows(values, ids, mask, width)[0]

    # Losses

    def _compute_loss(self, model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        # Tokens of an average micro-batch: sums over it add up to a token mean, however a batch is split
        denominator = inputs["num_items_in_batch"].clamp(min=1) / self.accelerator.num_processes
        if self.model.training:
            denominator = denominator / self.args.steps_per_generation

        self._learn_values(inputs, denominator)  # its activations are gone before the policy's come
        counted = (inputs["completion_mask"] * inputs.get("tool_mask", 1)).sum()
        with without_kl_in_loss(self), self._weighing(self._sum_over_processes(counted).item()):
            loss = super()._compute_loss(model, inputs)

        self._loss_count = inputs["num_items_in_batch"].item()
        if self.args.loss_type != "dapo":  # a mean over samples
            rows = len(inputs["completion_mask"])
            self._loss_count = self._real_rows(rows)
            if not self.model.training and self._loss_count:  # rows that fill up a batch add 0, and do not count
                loss = loss * (rows * self.accelerator.num_processes / self._loss_count)

        log_p = self._scored_log_p
        old_log_p = inputs.get("old_per_token_logps", log_p)
        kl = approximate_kl(log_p, old_log_p, inputs["credit_mask"], denominator)
        self._log_share("approx_kl", kl, inputs)
        return loss

    def _get_per_token_logps_and_entropies(self, model, input_ids, attention_mask, logits_to_keep, **options: Any):
        aux_loss = options.get("compute_aux_loss", False)  # of the other options, those of images do not come

        def log_probs(ids: torch.Tensor, mask: torch.Tensor, layout: Layout) -> Scores:
            return token_log_probs(model, self.accelerator, ids, mask, layout, aux_loss)

        size = options.get("batch_size") or len(input_ids)
        chunks = zip(input_ids.split(size), attention_mask.split(size), strict=True)
        parts = [self._in_rows(log_probs, *chunk, logits_to_keep) for chunk in chunks]
        log_p, entropies, aux_losses = zip(*parts, strict=True)
        self._scored_log_p = torch.cat(log_p).detach()
        entropy = torch.cat(entropies) if options.get("compute_entropy") else None
        return torch.cat(log_p), entropy, torch.stack(aux_losses).mean() if aux_loss else None

    def _learn_values(self, inputs: dict[str, torch.Tensor], denominator: torch.Tensor) -> None:
        """Value loss of a micro-batch; in training, its gradient is accumulated."""
        learn = self.model.training
        input_ids, attention_mask, width = _joined(inputs)
        with self.value.gradient_sync(not learn or self.accelerator.sync_gradients):
            engine = self.value.engine if learn else self.value.module
            values = self._values(engine, input_ids, attention_mask, width)
            loss, clipped = value_loss(
                values,
                inputs["old_values"],
                inputs["returns"],
                inputs["credit_mask"],
                self.args.value_clip,
                denominator,
            )
            if learn:
                self.value.backward(loss / self.current_gradient_accumulation_steps)
        self._log_share(f"{VALUE_FOLDER}/loss", loss, inputs)
        self._log_share(f"{VALUE_FOLDER}/clip_fraction", clipped, inputs)

    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = super().training_step(model, inputs, num_items_in_batch)
        if self.accelerator.sync_gradients:
            self._update_second(VALUE_FOLDER)
        return loss

    # Logging

    def _log_credit(self, rewards: torch.Tensor, log_ratio: torch.Tensor, mask: torch.Tensor) -> None:
        """Logs KL and returns from the log-ratios (B, T) to the reference, 0 where masked."""
        penalty = self.beta * log_ratio.sum(dim=1)
        if self.beta != 0.0:
            self._log_token_mean("kl", log_ratio.sum(), mask.sum())
        self._log_mean("return", rewards - penalty)
        if self.args.reward_transform is not None:
            transformed = transform_rewards(self.args, rewards)
            self._log_mean("reward_transformed", transformed)
            self._log_mean("return_transformed", transformed - penalty)

    def _log_values(self, values: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor) -> None:
        targets, errors = (self._everyones(x[mask != 0]) for x in (returns, returns - values))
        explained = Pooled(share_explained, targets, errors)
        self._metrics["train" if self.model.training else "eval"][f"{VALUE_FOLDER}/explained_variance"].append(
            explained
        )
        self._record({f"{VALUE_FOLDER}/mean": mean}, self._everyones(values[mask != 0]))

    def _log_share(self, name: str, share: torch.Tensor, inputs: dict[str, torch.Tensor]) -> None:
        """Logs a mean over tokens from this micro-batch's share of it, a sum over the average number of tokens."""
        average = self.accelerator.gather(share.detach().view(1)).mean().item()
        self._record({name: mean}, Moments.alike(average, inputs["num_items_in_batch"].item()))

    def _log_sampling(self, batch: dict[str, torch.Tensor]) -> None:
        """Logs what GRPO says of vLLM's log-probabilities and of its corrections of them."""
        if "importance_sampling_ratio" not in batch:
            return
        mask = (batch["completion_mask"] * batch.get("tool_mask", 1)).bool()
        self._log_gap((batch["old_per_token_logps"] - batch["sampling_per_token_logps"]).abs()[mask])
        ratio = batch["importance_sampling_ratio"]  # (B, T), or (B, 1) of whole completions
        counted = mask if ratio.shape == mask.shape else self._are_real(len(mask)).unsqueeze(1)
        names = {"min": lowest, "mean": mean, "max": highest}
        names = {f"sampling/importance_sampling_ratio/{name}": statistic for name, statistic in names.items()}
        self._record(names, self._everyones(ratio[counted]))

    def _trim_logs(self, rows: int) -> None:
        """Takes the last rows, which only fill up a batch, out of the completions table."""
        names = ("prompt", "completion", "advantages")
        columns = [self._logs[name] for name in names]
        for column in (*columns, *self._logs["rewards"].values(), *self._logs["extra"].values()):
            for _ in range(min(rows, len(column))):
                column.pop()

    def _show_advantages(self, advantages: torch.Tensor, mask: torch.Tensor) -> None:
        """Replaces the group advantages that GRPO put into the completions table by the means over tokens."""
        if not self.log_completions:
            return
        means = self.accelerator.gather(advantages.sum(dim=1) / mask.sum(dim=1).clamp(min=1)).tolist()
        means = means[: self._real_rows(len(mask))]
        column = self._logs["advantages"]
        shown = min(len(means), len(column))
        for i in range(1, shown + 1):
            column[-i] = means[-i]


def _joined(batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Tokens and mask of prompts and completions, (B, L + T), and T."""
    input_ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    attention_mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    return input_ids, attention_mask, batch["completion_ids"].size(1)
