"""TRL's GRPO trainer with what all trainers here share, and what those share that keep its loss: PPO and RePULSe on GRPO.

Axis letters: B rows of a generation batch or of a micro-batch, L prompt tokens, T completion tokens.
"""

from typing import TYPE_CHECKING, Any

import torch
from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict
from transformers import BitsAndBytesConfig, PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback
from trl import GRPOTrainer

from ..data._checks import (
    by_name,
    check_adapters,
    check_arguments,
    check_best_metric,
    check_column_names,
    check_datasets,
    check_eval_batch,
    check_output_dir,
    check_reward_funcs,
    check_rows,
)
from ..engine.base_trainer import BaseTrainer
from ..engine.metrics import drop_batch_means, highest, lowest, mean
from ..engine.preparation import check_loadable
from ..engine.records import append_negatives
from ..engine.scoring import (
    RewardFunc,
    Scores,
    all_with_checks,
    check_separate_rewards,
    check_tokenizers,
    load_reward_models,
    token_log_probs,
)
from ..engine.trl_bridge import require_pinned
from ..generation import _engine
from ..models._deepspeed import connect
from ..models._layout import Layout
from ..models._model_checks import check_language_model


if TYPE_CHECKING:
    from collections.abc import Callable

    from peft import PeftConfig, PeftModel

Datasets = Dataset | IterableDataset | DatasetDict | IterableDatasetDict | dict[str, Dataset | IterableDataset] | None
# Losses that are sums over a batch's tokens; the others are means over its completions
_OVER_TOKENS = ("dapo", "cispo", "vespo", "bnpo")


class GRPOBase(BaseTrainer, GRPOTrainer):
    """
    What is not of an algorithm: checks of all arguments, rewards, tables, what is logged, true positions.

    Args:
        model, reward_funcs, args, train_dataset, eval_dataset, processing_class, reward_processing_classes, callbacks,
        optimizers, quantization_config, peft_config, tools, rollout_func, environment_factory:
            As for [`~trl.GRPOTrainer`].
    """

    # What GRPO logs that is not of this algorithm, or is logged anew: the beginnings of names
    _dropped: tuple[str, ...] = ("reward", "sampling/")

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
    ):
        require_pinned()
        check_arguments(self._config_cls, args, model=model, **self._passed)
        self._check_turns(tools=tools, rollout_func=rollout_func, environment_factory=environment_factory)
        args = self._configuration(model, args)
        connect(args)
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
        adapters = [peft_config, *self._more_adapters]
        check_adapters(model, *adapters)
        check_loadable(args, peft_config, model=model, reward_funcs=reward_funcs, **self._passed)
        check_language_model(model, "`model`", (args.model_init_kwargs or {}).get("revision"))
        check_separate_rewards(reward_funcs, model, "`model`", trained=peft_config is None)
        if reward_funcs is not None:
            reward_funcs, reward_processing_classes = load_reward_models(reward_funcs, reward_processing_classes, args)
        self._build_first(model, reward_funcs, args, quantization_config, peft_config)
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
        # Which TRL has loaded where none was passed
        check_tokenizers(self.reward_funcs, self.reward_processing_classes)
        self._check_policy(adapters)
        self._take_engine()
        if environment_factory is None and rollout_func is None:  # which may make prompts otherwise
            self._check_templates(train_dataset, eval_dataset)
        self.reward_funcs = all_with_checks(self.reward_funcs, self.reward_func_names)
        self._prepare_scoring()

    def _check_turns(self, **given: Any) -> None:
        """Refuses what makes completions of more than the model's own tokens, by name, where a trainer does not take it."""

    def _build_first(
        self, model: Any, reward_funcs: Any, args: Any, quantization_config: Any, peft_config: Any
    ) -> None:
        """Builds what must be built before TRL wraps or patches the policy."""

    # Sampling

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, torch.Tensor | Any]:
        if self.environment_factories is None:
            check_rows(inputs, self.train_dataset.features)
        with self._weighing(self._real_rows(len(inputs))) as metrics:
            batch = super()._generate_and_score_completions(inputs)
            drop_batch_means(metrics, *self._dropped)
        batch["completion_mask"] = batch["completion_mask"] * self._are_real(len(inputs)).unsqueeze(1)
        if not self.model.training:
            counted = batch["completion_mask"] * batch.get("tool_mask", 1)
            batch["num_items_in_batch"] = self.accelerator.gather(counted.sum()).sum()
        self._trim_logs(len(inputs) * self.accelerator.num_processes - self._real_rows(len(inputs)))
        self._log_sampling(batch)
        rewards = self._weigh_rewards(self._rewards_per_func)
        if self.args.save_negatives and self.model.training:
            append_negatives(self, "policy", self._logs["prompt"], self._logs["completion"], rewards)
        generations = self.num_generations if self.model.training else self.num_generations_eval
        ids, mask = (
            self.accelerator.gather(self.accelerator.pad_across_processes(batch[name], dim=1)).unflatten(
                0, (-1, generations)
            )
            for name in ("completion_ids", "completion_mask")
        )
        self._log_distinct(ids, mask, rewards.view(-1, generations))
        first = self.accelerator.process_index * len(inputs)
        return batch | {"rewards": rewards[first : first + len(inputs)]}  # (B,)

    # Loss

    def _compute_loss(self, model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        counted = self.accelerator.reduce((inputs["completion_mask"] * inputs.get("tool_mask", 1)).sum(), "sum").item()
        rows = len(inputs["completion_mask"])
        of_samples = ("vespo/", "clip_ratio/") if self.importance_sampling_level == "sequence" else ("vespo/",)
        with self._weighing(counted, rows * self.accelerator.num_processes, of_samples):
            loss = super()._compute_loss(model, inputs)
        if self.args.loss_type in _OVER_TOKENS:
            self._loss_count = inputs["num_items_in_batch"].item()
            return loss
        return self._mean_of_real(loss, rows)

    def _get_per_token_logps_and_entropies(self, model, input_ids, attention_mask, logits_to_keep, **options: Any):
        aux_loss = options.get("compute_aux_loss", False)  # of the other options, those of images do not come

        def log_probs(ids: torch.Tensor, mask: torch.Tensor, layout: Layout) -> Scores:
            return token_log_probs(model, self.accelerator, ids, mask, layout, aux_loss)

        rows = (input_ids, attention_mask, logits_to_keep)
        log_p, entropy, router_loss, _ = self._in_rows(log_probs, *rows, options.get("batch_size"))
        self._scored_log_p = log_p.detach()
        return log_p, entropy if options.get("compute_entropy") else None, router_loss if aux_loss else None

    # Logging

    def _log_sampling(self, batch: dict[str, torch.Tensor]) -> None:
        """Logs what GRPO says of vLLM's log-probabilities and of its corrections of them."""
        if "importance_sampling_ratio" not in batch:
            return
        mask = (batch["completion_mask"] * batch.get("tool_mask", 1)).bool()
        self._log_gap((batch["old_per_token_logps"] - batch["sampling_per_token_logps"]).abs()[mask])
        self._log_engine_ratio(batch["importance_sampling_ratio"], mask)

    def _log_engine_ratio(self, ratio: torch.Tensor, mask: torch.Tensor, prefix: str = "") -> None:
        """Logs corrections of the engine's log-probabilities: of tokens (B, T), or of whole completions (B, 1)."""
        counted = mask if ratio.shape == mask.shape else self._are_real(len(mask)).unsqueeze(1)
        names = {"min": lowest, "mean": mean, "max": highest}
        names = {f"{prefix}sampling/importance_sampling_ratio/{name}": statistic for name, statistic in names.items()}
        self._record(names, self._gathered_moments(ratio[counted]))

    def _trim_logs(self, rows: int) -> None:
        """Takes the last rows, which only fill up a batch, out of the completions table."""
        names = ("prompt", "completion", "advantages")
        columns = [self._logs[name] for name in names]
        for column in (*columns, *self._logs["rewards"].values(), *self._logs["extra"].values()):
            for _ in range(min(rows, len(column))):
                column.pop()
