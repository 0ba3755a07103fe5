"""RePULSe: REINFORCE on the policy's samples, and a learned proposal whose samples are pushed down.

Axis letters as in `reinforce_trainer.py`: U units of n policy samples and m proposal samples, T completion tokens,
V vocabulary.
"""

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict
from transformers import BitsAndBytesConfig, PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback

from .._checks import check_arguments
from ..configs import RePULSeConfig
from ..importance import log_importance_weights, normalize_weights
from ..losses import negative_coefficients, negative_reinforce_coefficients
from ..rewards.transforms import (
    class_log_potential,
    geometric_schedule,
    indicator_log_potential,
    tilted_log_potential,
)
from ._cards import write_proposal_card
from ._collapse import CollapseWatch
from ._hot_policy import HotPolicy
from ._hub import ProposalUploads
from ._peft_bridge import BaseView
from ._proposal import (
    PROPOSAL_FOLDER,
    UpdateProposalAfterPolicy,
    adapter_config,
    build_proposal,
    contrast,
    drawn_together,
    lends_reference,
    proposal_loss,
    serve_proposal,
    starting_point,
)
from ._records import log_importance, new_logs, record_samples, show_completions
from ._resume import RESUME_STATE
from ._rewards import check_separate_rewards
from ._trl_bridge import no_reference_built, sampling_from, split_tensor_dict
from .reinforce_trainer import ReinforceTrainer, RewardFunc
from .second_adapter import SecondAdapter
from .second_model import SecondModel


if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel

# What a proposal update needs of a batch of its samples; everything else follows from the models.
_DRAWN = (
    "prompt_ids",
    "prompt_mask",
    "proposal_completion_ids",
    "proposal_completion_mask",
    "proposal_rewards",
    "proposal_old_log_q",
)


class RePULSeTrainer(ProposalUploads, ReinforceTrainer):
    """
    Trainer for RePULSe ([Reducing the Probability of Undesirable Outputs in Language Models Using Probabilistic
    Inference](https://huggingface.co/papers/2510.21184)).

    Beside the policy, a second language model, the *proposal*, learns to draw the policy's low-reward outputs: its
    target is σ ∝ policy · exp(`target_dist_beta`·reward). At each step both models are sampled; the policy takes a
    REINFORCE step on its own samples and lowers the log-probability of the proposal's, weighted by importance and by
    `alpha`; the proposal takes a step of contrastive twist learning.

    The proposal is saved to `output_dir/proposal` with a card that warns of it, is part of each checkpoint, and is
    never uploaded with the policy; `push_proposal_to_hub` gives it a private repository of its own.

    With `use_policy_as_proposal=True` there is none: the policy's own samples take its place, or, with
    `proposal_temperature` above 1, samples that the policy draws at that temperature.

    Example:

    ```python
    >>> from trl_repulse import RePULSeConfig, RePULSeTrainer
    >>> from trl_repulse.embedded import load_prompts, policy_path, reward_model_path

    >>> args = RePULSeConfig(output_dir="out", max_completion_length=2, use_cpu=True, bf16=False)
    >>> trainer = RePULSeTrainer(
    ...     model=policy_path(),
    ...     reward_funcs=reward_model_path(),
    ...     args=args,
    ...     train_dataset=load_prompts(),
    ... )
    >>> trainer.train()
    ```

    Args:
        model, reward_funcs, train_dataset, eval_dataset, processing_class, reward_processing_classes, callbacks,
        optimizers, quantization_config, peft_config:
            As for [`ReinforceTrainer`].
        args ([`RePULSeConfig`], *optional*):
            Configuration for this trainer. If `None`, a default configuration is used.
        proposal_model (`str` or [`~transformers.PreTrainedModel`], *optional*):
            Model the proposal starts from: a path, a model id, or a model. If `None`, a copy of the initial policy.
            Must have the policy's tokens, which are compared if a path has a tokenizer, and weights of its own. If `None` and the policy is an adapter, the proposal is a second one
            over the same base; if given, it has weights of its own and with a `peft_config` an adapter over them. The
            folder of an adapter over the policy's base joins it there.
        proposal_peft_config (`peft.PeftConfig`, *optional*):
            Configuration of the proposal's adapter, where it is not the policy's. Without `peft_config`, the policy
            is trained whole and the proposal is an adapter over its initial weights.

    Raises:
        `ValueError`: If the proposal is the policy itself, shares weights with it that are trained, has other tokens or is no
            causal language model; if a `proposal_model` or a
            `proposal_peft_config` is given where the configuration builds none; if the policy's adapter is not named
            `default`; else as [`ReinforceTrainer`].
    """

    _tag_names = ["trl", "trl-repulse", "repulse"]
    _name = "RePULSe"
    _config_cls = RePULSeConfig
    _withheld = (*ReinforceTrainer._withheld, *RESUME_STATE)

    def __init__(
        self,
        model: "str | PreTrainedModel | PeftModel",
        reward_funcs: RewardFunc | list[RewardFunc],
        args: RePULSeConfig | None = None,
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
        proposal_model: str | PreTrainedModel | None = None,
        proposal_peft_config: "PeftConfig | None" = None,
    ):
        check_arguments(self._config_cls, args, model=model, proposal_model=proposal_model)
        self._second_models = {"proposal_model": proposal_model}
        lends_base = proposal_model is None and lends_reference(model, args, peft_config, proposal_peft_config)
        proposal_model = starting_point(proposal_model, model, args, peft_config, proposal_peft_config)
        trained = proposal_peft_config is None and peft_config is None
        check_separate_rewards(reward_funcs, proposal_model, "`proposal_model`", trained)
        self._proposal_adapters = [proposal_peft_config, adapter_config(proposal_model)]
        with no_reference_built(args) if lends_base else contextlib.nullcontext():
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

        self.proposal: SecondModel | None = None
        self._hot = HotPolicy(self) if self.args.draws_hot else None
        self._proposal_logs = new_logs(self.args.generation_batch_size)
        if not self.args.has_proposal:
            return
        self.proposal = build_proposal(proposal_model, self, peft_config, proposal_peft_config, quantization_config)
        self._guard_model("proposal", self.proposal.module)
        if lends_base:
            self.beta, self.ref_model = args.beta, BaseView(self.proposal.module)
        if self.use_vllm:
            serve_proposal(self)
        self._pending: list[dict[str, torch.Tensor]] = []
        self._watch = CollapseWatch(self)
        if self.args.proposal_update_order == "after":
            self.add_callback(UpdateProposalAfterPolicy(self))

    # Sampling

    def _adapter_configs(self, peft_config):
        return [peft_config, *self._proposal_adapters]

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        with drawn_together(self):
            batch = super()._generate_and_score_completions(inputs)
        if not self.args.draws_twice:
            return batch
        mode = "train" if self.model.training else "eval"
        if mode == "train":
            for _ in range(self.args.proposal_updates_per_step - 1):
                chunks = split_tensor_dict(self._draw_proposals(inputs, batch), self.args.steps_per_generation)
                self.update_proposal(chunks, advance_schedule=False)
        batch |= self._draw_proposals(inputs, batch)
        off_policy = mode == "train" and not self._on_policy
        if off_policy or not self._whole(mode):
            names = ("proposal_completion",) if "old_log_p" in batch else ("proposal_completion", "completion")
            log_p, own_log_p, *_ = self._score(self.model, batch, names, gradient=False)
            own_log_p = batch.get("old_log_p", own_log_p)
            batch["proposal_old_log_p"] = log_p  # (U, m, T)
            if self._hot is not None:
                return batch | self._hot.weigh(batch, own_log_p, log_p)
            log_q = self._score(self.proposal.module, batch, ("proposal_completion",), gradient=False)[0]
            batch["proposal_old_log_q"] = log_q  # (U, m, T)
            batch |= self._weigh(batch | {"old_log_p": own_log_p}, log_p, log_q)
            if not self._whole(mode):
                batch |= contrast(self, batch, log_p, log_q, log_q)
        return batch

    def _draw_proposals(self, inputs: list[dict[str, Any]], batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Proposal samples for the prompts of a generation batch, in the units of its policy samples."""
        mode = "train" if self.model.training else "eval"
        m = self._num_proposals(mode) if self._whole(mode) else 1
        rows = inputs
        if m > 1 and m != self._num_generations(mode):
            rows = [row for row in inputs[:: self._num_generations(mode)] for _ in range(m)]
        engine, temperature = (self.proposal.engine, 1.0) if self._hot is None else (None, self._hot.temperature)
        with sampling_from(self, engine, PROPOSAL_FOLDER, self._num_proposals(mode), temperature):
            samples = self._draw(rows)
        record_samples(self, samples, self._proposal_logs, "proposal")
        width = samples.completion_ids.size(1)  # T
        drawn = {
            "prompt_ids": batch["prompt_ids"],
            "prompt_mask": batch["prompt_mask"],
            "proposal_completion_ids": samples.completion_ids.view(-1, m, width),  # (U, m, T)
            "proposal_completion_mask": samples.completion_mask.view(-1, m, width),  # (U, m, T)
            "proposal_rewards": samples.rewards.view(-1, m),  # (U, m)
        }
        if samples.engine_log_p is not None:
            drawn["proposal_completion_engine_log_p"] = samples.engine_log_p.view(-1, m, width)  # (U, m, T)
        if self._hot is not None:
            drawn |= self._hot.score(batch | drawn)
        if self.args.negative_loss == "reinforce" and self.beta != 0.0:
            drawn["proposal_ref_log_prob"] = self._reference_log_prob(drawn, "proposal_completion")
        return drawn

    def _whole(self, mode: str) -> bool:
        """Whether a unit holds all samples of its prompt."""
        return self._unit_size(mode) == self._num_generations(mode)

    def _num_proposals(self, mode: str) -> int:
        configured = self.args.num_proposal_generations
        return configured if mode == "train" and configured is not None else self._num_generations(mode)

    # Credit

    def _scheduled(self, name: str) -> float:
        """`alpha` or `target_dist_beta` at this update."""
        start, end = getattr(self.args, f"{name}_start"), getattr(self.args, name)
        if start is None:
            return end
        last = max(self.state.max_steps - 1, 1)
        return geometric_schedule(start, end, min(self.state.global_step / last, 1.0))

    def _log_potential(self, rewards: torch.Tensor, beta: float | None = None) -> torch.Tensor:
        """log φ of each sample, nats; the raw reward decides, never the transformed one."""
        args = self.args
        beta = self._scheduled("target_dist_beta") if beta is None else beta
        if args.potential == "indicator":
            return indicator_log_potential(rewards, args.bad_reward_threshold)
        if args.potential == "class":
            return class_log_potential(rewards, beta, args.target_class)
        return tilted_log_potential(rewards, beta, args.reward_cap)

    def _credit(self, batch: dict[str, torch.Tensor], log_p: torch.Tensor | None) -> dict[str, torch.Tensor]:
        credit = super()._credit(batch, log_p)
        if self.args.use_policy_as_proposal and self.args.alpha > 0 and self._hot is None:
            mode = "train" if self.model.training else "eval"
            rewards, size = batch["rewards"], self._num_generations(mode)
            log_w = self._to_prompts(self._log_potential(rewards, self.args.reweighting_beta), size)  # (P, N)
            scored = ~log_w.isnan()
            log_w = torch.where(scored, log_w, -torch.inf)
            log_importance(self, "negative", log_w, scored)
            returns = self._to_prompts(credit["returns"], size)
            negative = self._negative_coefficients(log_w, returns, returns)
            credit["coefficients"] = credit["coefficients"] + self._to_units(negative, rewards)
        return credit

    def _negative_coefficients(
        self, log_w: torch.Tensor, returns_negative: torch.Tensor | None, returns: torch.Tensor | None
    ) -> torch.Tensor:
        """
        What the log-probabilities of weighted samples are multiplied with in the policy loss.

        Args:
            log_w (`torch.Tensor` of shape `(P, N)`):
                Log-weights, −inf for samples without a reward.
            returns_negative, returns (`torch.Tensor` of shape `(P, N)`, *optional*):
                Returns of these samples and of the policy's, which `negative_loss="reinforce"` needs.

        Returns:
            `torch.Tensor` of shape `(P, N)`.
        """
        args, alpha = self.args, self._scheduled("alpha")
        if args.uniform_weights:
            log_w = torch.where(log_w == -torch.inf, log_w, torch.zeros_like(log_w))
        normalized_w = normalize_weights(log_w)
        if args.negative_loss == "push_down":
            return negative_coefficients(normalized_w, alpha, args.alpha_normalization)
        baseline = args.negative_baseline if log_w.size(1) > 1 else "none"  # one sample: only in evaluation
        return negative_reinforce_coefficients(
            normalized_w, returns_negative, alpha, baseline, returns, args.alpha_normalization
        )

    def _weigh(
        self, batch: dict[str, torch.Tensor], log_p: torch.Tensor, log_q: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """
        Importance weights of the proposal samples, and what the policy makes of them.

        Args:
            batch (`dict[str, torch.Tensor]`):
                Units of proposal samples with their rewards.
            log_p, log_q (`torch.Tensor` of shape `(U, m, T)`):
                Log-probabilities (nats) under the sampling-time models, detached.

        Returns:
            `dict[str, torch.Tensor]`: `proposal_w`, the weights under the proposal's target, and
            `negative_coefficients` of the policy loss, each of shape `(U, m)`.
        """
        mode = "train" if self.model.training else "eval"
        rewards, size = batch["proposal_rewards"], self._num_proposals(mode)
        samples = [self._to_prompts(x, size) for x in (log_p, log_q, batch["proposal_completion_mask"])]

        def log_weights(beta: float | None) -> torch.Tensor:
            log_potential = self._to_prompts(self._log_potential(rewards, beta), size)
            return log_importance_weights(samples[0], samples[1], log_potential, samples[2])  # (P, N)

        log_w = log_weights(None)
        log_importance(self, PROPOSAL_FOLDER, log_w, self._to_prompts(~rewards.isnan(), size))
        weights = {"proposal_w": self._to_units(normalize_weights(log_w), rewards)}
        if "rewards" in batch:  # the policy's samples are at hand: this is the draw that serves its loss
            self._watch.look(batch, log_w, samples[0], samples[2])
            negative_log_w = log_w if self.args.reweighting_beta is None else log_weights(self.args.reweighting_beta)
            returns = [None, None]
            if self.args.negative_loss == "reinforce":
                kl = self._kl(batch, log_p, "proposal_")
                returns_negative = self._transform(rewards) - self.beta * kl
                returns = [
                    self._to_prompts(returns_negative, size),
                    self._to_prompts(batch["returns"], self._num_generations(mode)),
                ]
            negative = self._negative_coefficients(negative_log_w, *returns)
            weights["negative_coefficients"] = self._to_units(negative, rewards)
        return weights

    # Losses

    def _compute_loss(self, model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        if not self.args.draws_twice:
            return super()._compute_loss(model, inputs)
        if self._hot is not None:
            return self._hot.loss(model, inputs)
        learn = self.model.training and self.args.proposal_update_order == "before"
        name = "proposal_completion"

        # Score: one policy pass over both models' samples, one proposal pass over its own
        log_p, log_p_negative, entropy, aux_loss = self._score(model, inputs, ("completion", name))
        old_log_p = inputs.get("old_log_p", log_p.detach())
        sampled_log_p = inputs.get("proposal_old_log_p", log_p_negative.detach())
        with self.proposal.gradient_sync(not learn or self.accelerator.sync_gradients):
            # Without gradient the bare model serves; wrappers are for passes that carry one
            proposal = self.proposal.engine if learn else self.proposal.module
            log_q_now = self._score(proposal, inputs, (name,), gradient=learn)[0]
            sampled_log_q = inputs.get("proposal_old_log_q", log_q_now.detach())
            self._log_engine(inputs, "completion", old_log_p)
            self._log_engine(inputs, name, sampled_log_q, f"{PROPOSAL_FOLDER}/")

            # Weigh, unless that was done when the samples were drawn
            if "coefficients" not in inputs:
                inputs = inputs | self._credit(inputs, old_log_p)
            if "negative_coefficients" not in inputs:
                weighed = self._weigh(inputs | {"old_log_p": old_log_p}, sampled_log_p, sampled_log_q)
                inputs = inputs | weighed

            # Proposal loss
            if learn:
                if "proposal_coefficients" not in inputs:
                    inputs = inputs | contrast(self, inputs, sampled_log_p, sampled_log_q, log_q_now.detach())
                self._learn(inputs, log_q_now, sampled_log_p, self.current_gradient_accumulation_steps)
        if self.model.training and not learn:
            self._pending.append({key: inputs[key] for key in _DRAWN if key in inputs})

        # Policy loss
        loss = self._policy_loss(log_p, inputs["completion_mask"], inputs["coefficients"], inputs.get("old_log_p"))
        loss = loss + self._policy_loss(
            log_p_negative,
            inputs[f"{name}_mask"],
            inputs["negative_coefficients"],
            None if self._on_policy else inputs.get("proposal_old_log_p"),
        )
        return self._finish_policy_loss(loss, entropy, aux_loss, inputs)

    # Proposal updates

    def _learn(
        self, batch: dict[str, torch.Tensor], log_q_now: torch.Tensor, log_p: torch.Tensor, micro_batches: int
    ) -> None:
        """Accumulates the gradient of one of `micro_batches` micro-batches of proposal samples."""
        loss = proposal_loss(self, batch, log_q_now, log_p)
        self.proposal.backward(loss / micro_batches)
        self._log_mean(f"{PROPOSAL_FOLDER}/loss", loss.view(1))

    def update_proposal(self, chunks: list[dict[str, torch.Tensor]], advance_schedule: bool = True) -> None:
        """
        One proposal update on samples already drawn, against the policy as it is now.

        Args:
            chunks (`list[dict[str, torch.Tensor]]`):
                Micro-batches of proposal samples, each of whole prompts.
            advance_schedule (`bool`, *optional*, defaults to `True`):
                Whether the proposal's learning rate moves on, as it does once for each update of the policy.
        """
        name = "proposal_completion"
        for i, chunk in enumerate(chunks):
            with self.proposal.gradient_sync(i == len(chunks) - 1):
                log_p = self._score(self.model, chunk, (name,), gradient=False)[0]
                log_q_now = self._score(self.proposal.engine, chunk, (name,))[0]
                log_q = chunk.get("proposal_old_log_q", log_q_now.detach())
                batch = chunk | self._weigh(chunk, log_p, log_q)
                batch |= contrast(self, batch, log_p, log_q, log_q_now.detach())
                self._learn(batch, log_q_now, log_p, len(chunks))
        self._step_proposal(advance_schedule)

    def take_pending(self) -> list[dict[str, torch.Tensor]]:
        """Micro-batches of the policy's update that the proposal has still to learn from; forgets them."""
        pending, self._pending = self._pending, []
        return pending

    def _step_proposal(self, advance_schedule: bool = True) -> None:
        metrics = self._metrics["train"]
        metrics[f"{PROPOSAL_FOLDER}/learning_rate"].append(self.proposal.optimizer.param_groups[0]["lr"])
        metrics[f"{PROPOSAL_FOLDER}/grad_norm"].append(self.proposal.step())
        if self.use_vllm:
            self.vllm_generation.changed(PROPOSAL_FOLDER)
        if advance_schedule:
            self.proposal.step_schedule()

    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = super().training_step(model, inputs, num_items_in_batch)
        if (
            self.proposal is not None
            and self.args.proposal_update_order == "before"
            and self.accelerator.sync_gradients
        ):
            self._step_proposal()
        return loss

    # Logging

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        super().log(logs, start_time)
        if self.args.draws_twice:
            show_completions(self, self._proposal_logs, "proposal_completions")

    # Saving, loading, pushing

    def _prepare_for_training(self, max_steps, train_dataloader, resume_from_checkpoint):
        if isinstance(self.proposal, SecondAdapter):  # the policy's optimizer and engine do without it
            self.proposal.module.requires_grad_(False)
        prepared = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        if self.proposal is not None:
            self.proposal.prepare(self, max_steps)
            if resume_from_checkpoint is not None:
                folder = Path(resume_from_checkpoint) / PROPOSAL_FOLDER
                if not folder.is_dir():
                    raise ValueError(
                        f"The checkpoint {resume_from_checkpoint} holds no proposal; resume from one that "
                        "`RePULSeTrainer` wrote, or start a new run with that checkpoint's policy as `model`."
                    )
                self.proposal.load_checkpoint(self, folder)
        return prepared

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if self.proposal is not None:
            folder = Path(output_dir or self.args.output_dir) / PROPOSAL_FOLDER
            self.proposal.save_pretrained(folder, self.args.should_save)
            if self.args.should_save:
                self.processing_class.save_pretrained(folder)
                name = self.args.hub_model_id or Path(self.args.output_dir).name
                write_proposal_card(folder, name, self.args.potential, self.args.target_dist_beta)
        super().save_model(output_dir, _internal_call)

    def _save_second_model(self, checkpoint: Path) -> None:
        if self.proposal is not None:
            self.proposal.save_state(checkpoint / PROPOSAL_FOLDER, self.args.should_save)

    def _save_checkpoint(self, model, trial):
        # DeepSpeed's files of the policy, which an upload of checkpoints takes along, leave out frozen adapters
        with self.proposal.module.frozen() if isinstance(self.proposal, SecondAdapter) else contextlib.nullcontext():
            super()._save_checkpoint(model, trial)

    def _load_best_model(self):
        super()._load_best_model()
        if self.proposal is not None:
            self.proposal.load_checkpoint(self, Path(self.state.best_model_checkpoint) / PROPOSAL_FOLDER)
