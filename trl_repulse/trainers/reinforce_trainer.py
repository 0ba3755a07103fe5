"""REINFORCE as the RePULSe paper runs it, on TRL's RLOO trainer.

Axis letters: P prompts, N completions per prompt, B = P·N rows of a generation batch, L prompt tokens, T completion
tokens. U units of the buffer that TRL shuffles and splits into micro-batches: a unit is a prompt with all its
completions (n = N) where a micro-batch holds whole prompts, and a single completion (n = 1) where it does not.
"""

import textwrap
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict
from transformers import BitsAndBytesConfig, PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback
from trl import RLOOTrainer

from .._checks import (
    check_adapters,
    check_arguments,
    check_datasets,
    check_eval_batch,
    check_reward_funcs,
    check_rows,
)
from .._model_checks import check_language_model
from ..configs import ReinforceConfig
from ..importance import sequence_log_prob
from ..losses import compute_advantages, policy_gradient_loss
from ._deepspeed import connect
from ._hooks import TrainerHooks, transform_rewards
from ._metrics import Moments, mean
from ._naming import check_loadable
from ._records import record_advantages, record_samples
from ._rewards import check_separate_rewards, load_reward_models
from ._scoring import Scores, tempered_log_probs, token_log_probs
from ._trl_bridge import (
    disable_gradient_checkpointing,
    get_config_model_id,
    pad,
    require_pinned,
    use_reference,
)


if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel

RewardFunc = str | PreTrainedModel | Callable[..., list[float | None]]


@dataclass
class Samples:
    """
    Completions drawn for the B local rows of a generation batch, with their rewards.

    Args:
        prompts (`list`): Prompts, text or messages, one a row.
        completions (`list`): Completions in the same form.
        prompt_ids, prompt_mask (`torch.Tensor` of shape `(B, L)`): Left-padded prompts.
        completion_ids, completion_mask (`torch.Tensor` of shape `(B, T)`): Right-padded completions.
        rewards (`torch.Tensor` of shape `(B,)`): Weighted rewards; NaN where no reward function gave one.
        rewards_per_func (`torch.Tensor` of shape `(B_all, F)`): The functions' rewards of all processes' rows.
        engine_log_p (`torch.Tensor` of shape `(B, T)`, *optional*): What a vLLM engine says of the tokens' log-probabilities
            (nats), to be compared and not to be used.
    """

    prompts: list
    completions: list
    prompt_ids: torch.Tensor
    prompt_mask: torch.Tensor
    completion_ids: torch.Tensor
    completion_mask: torch.Tensor
    rewards: torch.Tensor
    rewards_per_func: torch.Tensor
    engine_log_p: torch.Tensor | None = None


class ReinforceTrainer(TrainerHooks, RLOOTrainer):
    """
    Trainer for REINFORCE with the conventions of the RePULSe paper ([Reducing the Probability of Undesirable Outputs
    in Language Models Using Probabilistic Inference](https://huggingface.co/papers/2510.21184)).

    It differs from [`~trl.RLOOTrainer`] in what the paper's runs differ in: the completion's mean (not summed) token
    log-probability, a choice of baseline, and reward transforms. The KL penalty (`beta`) enters the return as in
    [`~trl.RLOOTrainer`]. On-policy, the log-probabilities that carry the gradient also serve the KL penalty, so no
    second pass over the policy is made.

    Example:

    ```python
    >>> from datasets import Dataset
    >>> from trl_repulse import ReinforceConfig, ReinforceTrainer
    >>> from trl_repulse.embedded import load_prompts, policy_path, reward_model_path

    >>> trainer = ReinforceTrainer(
    ...     model=policy_path(),
    ...     reward_funcs=reward_model_path(),
    ...     args=ReinforceConfig(output_dir="out", max_completion_length=2, use_cpu=True, bf16=False),
    ...     train_dataset=load_prompts(),
    ... )
    >>> trainer.train()
    ```

    Args:
        model, reward_funcs, train_dataset, eval_dataset, processing_class, reward_processing_classes, callbacks,
        optimizers, quantization_config, peft_config:
            As for [`~trl.RLOOTrainer`]. Datasets need a `"prompt"` column, plain or conversational text.
        args ([`ReinforceConfig`], *optional*):
            Configuration for this trainer. If `None`, a default configuration is used.

    Raises:
        `ValueError`: If `args` is another trainer's or there is no reward; if a data set is empty, lacks the `"prompt"`
            column or has images; if a prompt is neither text nor messages, or the chat template is missing for messages or
            refuses them; if the policy is no causal language model, its tokenizer has no end token, or a reward model is no
            classifier of one label or shares weights that are trained; while training, if the policy has nothing to train, a
            prompt does not fit the model's
            context, or a reward function returns what is neither a finite number nor `None`.
        `RuntimeError`: If the installed TRL or transformers lacks methods that this trainer builds on.
    """

    _tag_names = ["trl", "trl-repulse", "reinforce"]
    _name = "REINFORCE"
    _paper = {
        "title": "Reducing the Probability of Undesirable Outputs in Language Models Using Probabilistic Inference",
        "id": "2510.21184",
        # docstyle-ignore
        "citation": textwrap.dedent("""\
            @inproceedings{zhao2025reducing,
                title     = {{Reducing the Probability of Undesirable Outputs in Language Models Using Probabilistic Inference}},
                author    = {Stephen Zhao and Aidan Li and Rob Brekelmans and Roger Grosse},
                year      = 2025,
                eprint    = {arXiv:2510.21184},
                booktitle = {Advances in Neural Information Processing Systems 38: Annual Conference on Neural Information Processing Systems 2025, NeurIPS 2025},
            }"""),
    }
    _config_cls = ReinforceConfig
    _second_models: dict[str, Any] = {}  # as they were passed, by the names of their arguments

    def __init__(
        self,
        model: "str | PreTrainedModel | PeftModel",
        reward_funcs: RewardFunc | list[RewardFunc],
        args: ReinforceConfig | None = None,
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
    ):
        require_pinned()
        check_arguments(self._config_cls, args, model=model)
        check_reward_funcs(reward_funcs)
        if args is None:
            model_name = model if isinstance(model, str) else get_config_model_id(model.config)
            args = self._config_cls(f"{Path(model_name).name}-{self._name}")
        connect(args)
        check_datasets(train_dataset, eval_dataset, args.generation_batch_size // args.num_generations)
        if eval_dataset is not None:
            check_eval_batch(args)
        check_adapters(model, *self._adapter_configs(peft_config))
        check_loadable(args, peft_config, model=model, reward_funcs=reward_funcs, **self._second_models)
        check_language_model(model, "`model`", (args.model_init_kwargs or {}).get("revision"))
        check_separate_rewards(reward_funcs, model, "`model`", trained=peft_config is None)
        reward_funcs, reward_processing_classes = load_reward_models(reward_funcs, reward_processing_classes, args)

        with self._engine_fits(args, model, self._adapter_configs(peft_config)):
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
            )

        self._check_policy(self._adapter_configs(peft_config))
        self._take_engine()
        self._check_templates(train_dataset, eval_dataset)
        self._check_reward_functions()
        # Every update is made with the generations of the current policy: no ratio, no second pass.
        generate_every = args.steps_per_generation * args.num_iterations
        self._on_policy = args.gradient_accumulation_steps % generate_every == 0
        self._prepare_scoring()

    def _adapter_configs(self, peft_config: "PeftConfig | None") -> list["PeftConfig | None"]:
        """Configurations of all adapters that will be sampled from."""
        return [peft_config]

    # Sampling

    def _draw(self, inputs: list[dict[str, Any]]) -> Samples:
        """Draws one completion a row, scores it, and logs rewards."""
        mode = "train" if self.model.training else "eval"
        device = self.accelerator.device
        check_rows(inputs)
        prompts = [row["prompt"] for row in inputs]
        prompt_ids, completion_ids, completions = self._generate(prompts)
        rewards_per_func = self._calculate_rewards(inputs, prompts, completions, completion_ids)
        rewards = self._weigh_rewards(rewards_per_func)

        def padded(rows: list[list[int]], side: str) -> tuple[torch.Tensor, torch.Tensor]:
            values = (self._tokenizer.pad_token_id, 0)
            ids = pad([torch.tensor(row, dtype=torch.long) for row in rows], values[0], side, self.pad_to_multiple_of)
            position = torch.arange(ids.size(1)) if side == "right" else torch.arange(ids.size(1) - 1, -1, -1)
            mask = (position < torch.tensor([len(row) for row in rows]).unsqueeze(1)).long()
            both = [ids.to(device), mask.to(device)]
            if side == "right" and self._unit_size(mode) == 1:  # tokens of one prompt meet over processes
                both = [
                    self.accelerator.pad_across_processes(x, dim=1, pad_index=value)
                    for x, value in zip(both, values, strict=True)
                ]
            return both[0], both[1]

        samples = Samples(
            prompts,
            completions,
            *padded(prompt_ids, "left"),
            *padded(completion_ids, "right"),
            rewards[self._local_rows(len(inputs))],
            rewards_per_func,
        )
        if self.use_vllm:
            samples.engine_log_p = self._engine_log_probs(samples.completion_mask)
            self._metrics[mode]["sampling/weights_version"].append(self.vllm_generation.version)
        if self.mask_truncated_completions:
            ends = [*self.eos_token_ids, self._tokenizer.pad_token_id]
            complete = torch.tensor([row[-1] in ends for row in completion_ids], device=device)
            samples.completion_mask = samples.completion_mask * complete.unsqueeze(1)
        samples.completion_mask = samples.completion_mask * self._are_real(len(inputs)).unsqueeze(1)
        return samples

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        mode = "train" if self.model.training else "eval"
        samples = self._draw(inputs)
        self._local_batch_rows = len(inputs)
        record_samples(self, samples, self._logs, "policy")
        n = self._unit_size(mode)
        batch = {
            "prompt_ids": samples.prompt_ids[::n],  # (U, L)
            "prompt_mask": samples.prompt_mask[::n],  # (U, L)
            "completion_ids": samples.completion_ids.view(-1, n, samples.completion_ids.size(1)),  # (U, n, T)
            "completion_mask": samples.completion_mask.view(-1, n, samples.completion_ids.size(1)),  # (U, n, T)
            "rewards": samples.rewards.view(-1, n),  # (U, n)
            "rows": torch.arange(len(inputs), device=self.accelerator.device).view(-1, n),  # (U, n)
        }
        if samples.engine_log_p is not None:
            batch["completion_engine_log_p"] = samples.engine_log_p.view(
                -1, n, samples.completion_ids.size(1)
            )  # (U, n, T)
        if self.beta != 0.0:
            batch["ref_log_prob"] = self._reference_log_prob(batch)  # (U, n)
        if mode == "train" and not self._on_policy:
            batch["old_log_p"] = self._score(self.model, batch, gradient=False)[0]  # (U, n, T)
        if not self._credit_in_loss(mode):
            log_p = batch.get("old_log_p")
            if log_p is None and self.beta != 0.0:
                log_p = self._score(self.model, batch, gradient=False)[0]
            batch |= self._credit(batch, log_p)
        return batch

    def _num_generations(self, mode: str) -> int:
        return self.num_generations if mode == "train" else self.num_generations_eval

    def _unit_size(self, mode: str) -> int:
        """n: all N completions of a prompt where each micro-batch of each process holds whole prompts, else 1."""
        n = self._num_generations(mode)
        return n if self._micro_batch_size(mode) % n == 0 else 1

    def _micro_batch_size(self, mode: str) -> int:
        return self.args.per_device_train_batch_size if mode == "train" else self.args.per_device_eval_batch_size

    def _credit_in_loss(self, mode: str) -> bool:
        """Whether advantages can wait for the log-probabilities of the pass that carries the gradient."""
        whole = self._unit_size(mode) == self._num_generations(mode)
        return whole and not self.normalize_advantages and (mode == "eval" or self._on_policy)

    def _local_rows(self, rows: int) -> slice:
        return slice(self.accelerator.process_index * rows, (self.accelerator.process_index + 1) * rows)

    def _to_prompts(self, units: torch.Tensor, generations: int) -> torch.Tensor:
        """(U, n, ...) of this process to (P, N, ...), over all processes where prompts are cut into units of one."""
        if units.size(1) == generations:
            return units
        rows = self.accelerator.gather(units.flatten(0, 1))
        return rows.view(-1, generations, *rows.shape[1:])

    def _to_units(self, prompts: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """The inverse of [`_to_prompts`]: (P, N, ...) to this process's (U, n, ...), (U, n) being the shape of `like`."""
        if prompts.size(1) == like.size(1):
            return prompts
        local = prompts.flatten(0, 1)[self._local_rows(like.numel())]
        return local.view(*like.shape, *prompts.shape[2:])

    # Scoring

    def _score(
        self,
        model: torch.nn.Module,
        batch: dict[str, torch.Tensor],
        names: tuple[str, ...] = ("completion",),
        gradient: bool = True,
        temperature: float | None = None,
    ) -> tuple[list[torch.Tensor] | torch.Tensor, ...]:
        """
        Per-token log-probabilities of sets of completions to the same prompts, in one forward pass.

        Args:
            model (`torch.nn.Module`):
                Model to score with.
            batch (`dict[str, torch.Tensor]`):
                `prompt_ids` and `prompt_mask` of shape `(U, L)`; for each name, `{name}_ids` and `{name}_mask` of
                shape `(U, n, T)`, where n and T may differ from name to name.
            names (`tuple[str, ...]`):
                Sets of completions to score.
            gradient (`bool`):
                Whether the pass carries gradient. Without, rows are scored in chunks of the micro-batch's size or, where they share
                prompts, of whole units.
            temperature (`float`, *optional*):
                Another temperature than that of training, for a pass without gradient.

        Returns:
            A `(U, n, T)` tensor of log-probabilities (nats) for each name, then the entropies (nats) of the first
            name's tokens, which a pass with gradient through the policy gives, and the auxiliary loss of a
            mixture-of-experts model; each `None` otherwise.
        """
        width = max(batch[f"{name}_ids"].size(2) for name in names)  # T

        def joined(kind: str, value: int) -> torch.Tensor:
            parts = [batch[f"{name}_{kind}"] for name in names]
            return torch.cat([F.pad(part, (0, width - part.size(2)), value=value) for part in parts], dim=1)

        ids, mask = joined("ids", self._tokenizer.pad_token_id), joined("mask", 0)  # (U, Σn, T)
        n, mode = ids.size(1), "train" if self.model.training else "eval"
        layout = self._layout(batch["prompt_ids"].size(1), width, n)
        rows = layout.rows(batch["prompt_ids"], ids), layout.rows(batch["prompt_mask"], mask)  # (R, S) each

        def log_probs(ids: torch.Tensor, mask: torch.Tensor) -> Scores:
            cut = replace(layout, prompt=ids.size(1) - layout.count * width)
            if temperature is not None:
                return tempered_log_probs(model, self.accelerator, ids, mask, cut, temperature)
            return token_log_probs(model, self.accelerator, ids, mask, cut, gradient and self.aux_loss_enabled)

        if gradient:
            log_p, entropy, aux_loss = self._by_length(log_probs, *rows)
        else:
            size = self._micro_batch_size(mode)
            if self._guard.share_prompts:  # whole units, so that all processes make as many passes
                size = max(1, size // n) * (n // layout.count)
            with torch.no_grad(), disable_gradient_checkpointing(model, self.args.gradient_checkpointing_kwargs):
                chunks = [
                    self._by_length(log_probs, *chunk)[0] for chunk in zip(*(x.split(size) for x in rows), strict=True)
                ]
            log_p, entropy, aux_loss = torch.cat(chunks), None, None
        sizes = [batch[f"{name}_ids"].size(1) for name in names]
        scores = [
            part[..., : batch[f"{name}_ids"].size(2)]
            for part, name in zip(log_p.view(-1, n, width).split(sizes, dim=1), names, strict=True)
        ]
        if entropy is not None:
            entropy = entropy.view(-1, n, width)[:, : sizes[0], : scores[0].size(2)]
        return *scores, entropy, aux_loss

    def _reference_log_prob(self, batch: dict[str, torch.Tensor], name: str = "completion") -> torch.Tensor:
        """Log-probability of each completion under the reference model, shape (U, n), nats."""
        if self.ref_model is not None:
            log_ref = self._score(self.ref_model, batch, (name,), gradient=False)[0]
        else:  # an adapter over the reference, or beside a frozen copy of itself
            model = self.accelerator.unwrap_model(self.model)
            with use_reference(model):
                log_ref = self._score(self.model, batch, (name,), gradient=False)[0]
        return sequence_log_prob(log_ref, batch[f"{name}_mask"])

    # Credit

    @property
    def transforms_rewards(self) -> bool:
        """Whether the policy maximises something else than the reward: a clipped or transformed one."""
        return bool(self.reward_clip_range) or self.args.reward_transform is not None

    def _transform(self, rewards: torch.Tensor) -> torch.Tensor:
        """r': what the policy maximises instead of the reward r; r itself without clipping or a transform."""
        if self.reward_clip_range:
            rewards = rewards.clamp(*self.reward_clip_range)
        return transform_rewards(self.args, rewards)

    def _kl(self, batch: dict[str, torch.Tensor], log_p: torch.Tensor | None, name: str = "") -> torch.Tensor:
        """Σ_t (log p − log p_0) of each completion, shape (U, n), nats; zeros where no KL penalty is asked for."""
        if self.beta == 0.0:
            return torch.zeros_like(batch[f"{name}rewards"])
        return sequence_log_prob(log_p, batch[f"{name}completion_mask"]) - batch[f"{name}ref_log_prob"]

    def _credit(self, batch: dict[str, torch.Tensor], log_p: torch.Tensor | None) -> dict[str, torch.Tensor]:
        """
        What each policy sample's log-probability is multiplied with in the loss.

        Args:
            batch (`dict[str, torch.Tensor]`):
                Units of policy samples with their rewards.
            log_p (`torch.Tensor` of shape `(U, n, T)`, *optional*):
                Log-probabilities under the sampling-time policy, detached; needed with a KL penalty.

        Returns:
            `dict[str, torch.Tensor]`: `coefficients` and `returns`, each of shape `(U, n)`.
        """
        mode = "train" if self.model.training else "eval"
        generations = self._num_generations(mode)
        kl = self._kl(batch, log_p)
        returns = self._transform(batch["rewards"]) - self.beta * kl
        baseline = (self.args.baseline, self.args.baseline_constant)
        if generations == 1:  # only in evaluation: nothing to compare with, as in TRL
            advantages = torch.zeros_like(returns)
        elif self.normalize_advantages:  # over the generation batch, that of all processes
            everyone = self.accelerator.gather(returns.flatten()).view(-1, generations)  # (P, N)
            advantages = compute_advantages(everyone, *baseline, normalize=True)
            advantages = advantages.flatten()[self._local_rows(returns.numel())].view_as(returns)
        else:
            advantages = compute_advantages(self._to_prompts(returns, generations), *baseline)
            advantages = self._to_units(advantages, returns)

        if self.beta != 0.0:
            self._log_token_mean("kl", kl.nansum(), batch["completion_mask"].sum())
        self._log_mean("return", batch["rewards"] - self.beta * kl)
        if self.transforms_rewards:
            self._log_mean("reward_transformed", self._transform(batch["rewards"]))
            self._log_mean("return_transformed", returns)
        record_advantages(self, batch["rows"], advantages)
        return {"coefficients": advantages, "returns": returns}

    # Loss

    def _compute_loss(self, model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        log_p, entropy, aux_loss = self._score(model, inputs)
        self._log_engine(inputs, "completion", inputs.get("old_log_p", log_p.detach()))
        if "coefficients" not in inputs:
            inputs = inputs | self._credit(inputs, inputs.get("old_log_p", log_p.detach()))
        loss = self._policy_loss(log_p, inputs["completion_mask"], inputs["coefficients"], inputs.get("old_log_p"))
        return self._finish_policy_loss(loss, entropy, aux_loss, inputs)

    def _policy_loss(self, log_p, mask, coefficients, old_log_p) -> torch.Tensor:
        return policy_gradient_loss(
            log_p,
            mask,
            coefficients,
            reduction=self.args.logprob_reduction,
            old_log_p=old_log_p,
            epsilon_low=self.epsilon_low,
            epsilon_high=self.epsilon_high,
        )

    def _finish_policy_loss(self, loss, entropy, aux_loss, inputs) -> torch.Tensor:
        rows = inputs["completion_mask"].shape[:2].numel()
        self._loss_count = self._real_rows(rows)
        if not self.model.training and self._loss_count:  # rows that fill up a batch add 0, and do not count
            loss = loss * (rows * self.accelerator.num_processes / self._loss_count)
        if self.aux_loss_enabled:
            loss = loss + self.router_aux_loss_coef * aux_loss
            self._record({"aux_loss": mean}, self._gathered(Moments.alike(aux_loss.item(), self._loss_count)))
        mask = inputs["completion_mask"]
        self._log_token_mean("entropy", (entropy * mask).sum(), mask.sum())
        return loss
