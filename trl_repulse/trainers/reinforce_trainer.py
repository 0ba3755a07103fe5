"""REINFORCE as the RePULSe paper runs it, on TRL's GRPO trainer.

Axis letters: P prompts, N completions per prompt, B = P·N rows of a generation batch, L prompt tokens, T completion
tokens. U units of the buffer that TRL shuffles and splits into micro-batches: a unit is a prompt with all its
completions (n = N) where a micro-batch holds whole prompts, and a single completion (n = 1) where it does not.
"""

import functools
from typing import Any

import torch

from .._numbers import is_bad
from ..configs import ReinforceConfig
from ..engine.metrics import Moments, mean
from ..engine.records import REPULSE_PAPER, record_advantages, record_samples
from ..engine.sampling import UnitSampling
from ..math.importance import sequence_log_prob
from ..math.returns import compute_advantages, cvar_rewards, cvar_schedule
from ..method.constraint import Constraint
from ._grpo_base import GRPOBase


class ReinforceTrainer(UnitSampling, GRPOBase):
    """
    Trainer for REINFORCE with the conventions of the RePULSe paper ([Reducing the Probability of Undesirable Outputs
    in Language Models Using Probabilistic Inference](https://huggingface.co/papers/2510.21184)).

    [`~trl.GRPOTrainer`] samples, and has the engine, the rewards and the logs; advantages and loss are REINFORCE's. From
    [`~trl.RLOOTrainer`] it differs in what the paper's runs differ in: the completion's mean (not summed) token
    log-probability, a choice of baseline, and reward transforms. The KL penalty (`beta`) enters the return as there.
    On-policy, the log-probabilities that carry the gradient also serve the KL penalty, so no second pass over the policy is
    made.

    Example:

    ```python
    >>> from trl_repulse import ReinforceConfig, ReinforceTrainer
    >>> from trl_repulse.embedded import load_prompts, policy_path, reward_model_path

    >>> args = ReinforceConfig("out", max_completion_length=2, use_cpu=True, bf16=False)
    >>> trainer = ReinforceTrainer(policy_path(), reward_model_path(), args, train_dataset=load_prompts())
    >>> trainer.train()
    ```

    Args:
        model, reward_funcs, train_dataset, eval_dataset, processing_class, reward_processing_classes, callbacks,
        optimizers, quantization_config, peft_config:
            As for [`~trl.GRPOTrainer`], without tools. Datasets need a `"prompt"` column, plain or conversational text.
        args ([`ReinforceConfig`], *optional*):
            Configuration for this trainer. If `None`, a default configuration is used.

    Raises:
        `ValueError`: If `args` is another trainer's or there is no reward; if a data set is empty, lacks the `"prompt"`
            column or has images; if a prompt is neither text nor messages, or the chat template is missing for messages or
            refuses them; if the policy is no causal language model, its tokenizer has no end token, or a reward model is no
            classifier of one label or shares weights that are trained; if `tools`, a `rollout_func` or an `environment_factory` is
            given; while training, if the policy has nothing to train, a prompt does not fit the model's context, or a reward
            function returns what is neither a finite number nor `None`.
        `RuntimeError`: If the installed TRL or transformers lacks methods that this trainer builds on.
    """

    _tag_names = ["trl", "trl-repulse", "reinforce"]
    _name = "REINFORCE"
    _paper = REPULSE_PAPER
    _config_cls = ReinforceConfig
    loss_is_scaled_for_ga = False  # the Trainer divides the loss by the number of accumulated micro-batches

    def _check_turns(self, **given: Any) -> None:
        name = next(filter(given.get, given), None)
        if name is not None:
            raise ValueError(
                f"`{name}` is not for `{type(self).__name__}`, whose completions are all the model's own; leave it out, or use "
                "`PPOTrainer`, or `RePULSeGRPOTrainer` with `alpha=0`."
            )

    # Sampling

    def _generate(self, prompts: list):
        prompt_ids, completion_ids, tool_mask, completions, *rest = super()._generate(prompts)
        if not isinstance(prompts[0], str):
            # Where the tokenizer says how, GRPO takes thinking and calls of tools out of a message; the reward is of all of it
            texts = self.processing_class.batch_decode(completion_ids, skip_special_tokens=True)
            completions = [[{"role": "assistant", "content": text}] for text in texts]
        return prompt_ids, completion_ids, tool_mask, completions, *rest

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        mode = "train" if self.model.training else "eval"
        samples = self._draw(inputs)
        self._local_batch_rows = len(inputs)
        record_samples(self, samples, self._logs, "policy")
        n = self._unit_size(mode)
        batch = {
            "prompt_ids": samples.prompt_ids[::n],  # (U, L)
            "prompt_mask": samples.prompt_mask[::n],  # (U, L)
            **samples.in_units(n),  # (U, n, T), rewards (U, n)
            "rows": torch.arange(len(inputs), device=self.accelerator.device).view(-1, n),  # (U, n)
        }
        if self.beta != 0.0:
            batch["ref_log_prob"] = self._reference_log_prob(batch)  # (U, n)
        if mode == "train" and not self._on_policy:
            batch["old_log_p"] = self._score(self.model, batch, gradient=False).log_p[0]  # (U, n, T)
        if not self._credit_in_loss(mode):
            log_p = batch.get("old_log_p")
            if log_p is None and self.beta != 0.0:
                log_p = self._score(self.model, batch, gradient=False).log_p[0]
            batch |= self._credit(batch, log_p)
        return batch

    def _credit_in_loss(self, mode: str) -> bool:
        """Whether advantages can wait for the log-probabilities of the pass that carries the gradient."""
        of_batch = self.args.normalize_advantages or (
            self.args.cvar_level is not None and self.args.cvar_over == "batch"
        )
        return not of_batch and not self._weighs_early(mode)

    # Credit

    @functools.cached_property
    def _constraint(self) -> Constraint | None:
        if self.args.max_bad_probability is None:
            return None
        return Constraint(self, 1.0 if self.args.charges_bad else self.args.alpha)

    @property
    def transforms_rewards(self) -> bool:
        return bool(self.args.reward_clip_range) or self.args.charges_bad or super().transforms_rewards

    def _transform(self, rewards: torch.Tensor) -> torch.Tensor:
        limits = self.args.reward_clip_range
        transformed = super()._transform(rewards.clamp(*limits) if limits else rewards)
        if self.args.charges_bad:
            bad = is_bad(rewards, self.args.bad_reward_threshold)
            transformed = torch.where(bad, transformed - self._constraint.multiplier, transformed)
        return transformed

    def _observe(self, rewards: torch.Tensor) -> None:
        """Lets the constraint, if there is one, know of the policy's samples."""
        if self._constraint is not None:
            bad = is_bad(rewards, self.args.bad_reward_threshold).float()
            self._constraint.observe(bad.masked_fill(rewards.isnan(), torch.nan), resolution=1.0)

    def _kl(self, batch: dict[str, torch.Tensor], log_p: torch.Tensor | None, name: str = "") -> torch.Tensor:
        """Σ_t (log p − log p_0) of each completion, shape (U, n), nats; zeros where no KL penalty is asked for."""
        if self.beta == 0.0:
            return torch.zeros_like(batch[f"{name}rewards"])
        return sequence_log_prob(log_p, batch[f"{name}completion_mask"]) - batch[f"{name}ref_log_prob"]

    def _returns(self, batch: dict[str, torch.Tensor], log_p: torch.Tensor | None, name: str = "") -> torch.Tensor:
        """What the policy maximises: transformed reward without the KL penalty, of each completion, shape (U, n)."""
        return self._transform(batch[f"{name}rewards"]) - self.beta * self._kl(batch, log_p, name)

    def _tail(self, rewards: torch.Tensor, generations: int) -> torch.Tensor:
        """Rewards whose mean is that of the worst among them, of each completion, shape (U, n); logs it."""
        args, state, mode = self.args, self.state, "train" if self.model.training else "eval"
        level = args.cvar_level  # in evaluation always the same
        if mode == "train":
            progress = min(state.global_step / max(state.max_steps - 1, 1), 1.0)
            level = cvar_schedule(args.cvar_level, args.cvar_schedule_ratio, progress)
        if args.cvar_over == "batch":  # the generation batch, that of all processes
            everyone = self.accelerator.gather(rewards.flatten()).view(1, -1)
            tail = cvar_rewards(everyone, level).flatten()[self._local_rows(rewards.numel())].view_as(rewards)
            generations = everyone.numel()
        else:
            tail = self._to_units(cvar_rewards(self._to_prompts(rewards, generations), level), rewards)
        # A share of less than one sample has no mean, as in an evaluation with one completion a prompt
        if level * generations >= 1:
            self._log_mean("reward_cvar", tail)
        self._metrics[mode]["cvar_level"].append(level)
        return tail

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
        self._observe(batch["rewards"])
        rewards = self._transform(batch["rewards"])
        returns = aims = rewards - self.beta * kl
        if self.args.cvar_level is not None:
            aims = self._tail(rewards, generations) - self.beta * kl
        baseline = (self.args.baseline, self.args.baseline_constant)
        if generations == 1:  # only in evaluation: nothing to compare with, as in TRL
            advantages = torch.zeros_like(returns)
        elif self.args.normalize_advantages:  # over the generation batch, that of all processes
            everyone = self.accelerator.gather(aims.flatten()).view(-1, generations)  # (P, N)
            advantages = compute_advantages(everyone, *baseline, normalize=True)
            advantages = advantages.flatten()[self._local_rows(returns.numel())].view_as(returns)
        else:
            advantages = compute_advantages(self._to_prompts(aims, generations), *baseline)
            advantages = self._to_units(advantages, returns)

        names = ("completion_ids", "completion_mask", "rewards")
        self._log_distinct(*(self._to_prompts(batch[name], generations) for name in names))
        self._log_returns(batch["rewards"], kl, batch["completion_mask"].sum(), kl.nansum())
        record_advantages(self, batch["rows"], advantages, self._local_batch_rows)
        return {"coefficients": advantages, "returns": returns}

    # Loss

    def _compute_loss(self, model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        (log_p,), entropy, aux_loss, _ = self._score(model, inputs)
        self._log_engine(inputs, "completion", inputs.get("old_log_p", log_p.detach()))
        if "coefficients" not in inputs:
            inputs = inputs | self._credit(inputs, inputs.get("old_log_p", log_p.detach()))
        loss = self._policy_loss(log_p, inputs["completion_mask"], inputs["coefficients"], inputs.get("old_log_p"))
        return self._finish_policy_loss(loss, entropy, aux_loss, inputs)

    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = super().training_step(model, inputs, num_items_in_batch)
        if self._constraint is not None and self.accelerator.sync_gradients:
            self._constraint.update()
        return loss

    def _finish_policy_loss(self, loss, entropy, aux_loss, inputs) -> torch.Tensor:
        loss = self._mean_of_real(loss, inputs["completion_mask"].shape[:2].numel())
        if self.aux_loss_enabled:
            loss = loss + self.router_aux_loss_coef * aux_loss
            self._record({"aux_loss": mean}, self._gathered(Moments.alike(aux_loss.item(), self._loss_count)))
        mask = inputs["completion_mask"]
        self._log_token_mean("entropy", (entropy * mask).sum(), mask.sum())
        return loss
