"""REINFORCE as the RePULSe paper runs it, on TRL's GRPO trainer.

Axis letters: P prompts, N completions per prompt, T completion tokens. U units of the buffer that TRL shuffles and splits into
micro-batches: a unit is a prompt with all its completions (n = N) where a micro-batch holds whole prompts, and a single completion
(n = 1) where it does not.
"""

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from ..configs import ReinforceConfig
from ..data._texts import completion_texts
from ..engine.logs import Moments, mean
from ..engine.records import REPULSE_PAPER
from ..engine.scoring import SetScores
from ..engine.units import EXTRA, OWN, Shape, Units, local_rows, to_prompts, to_units
from ..math.objective import WeightedSamples, compute_advantages, kl_token_rewards, prefix_values, repulse_loss
from ..math.ppo import generalized_advantages
from .base_trainer import BaseTrainer


class ReinforceTrainer(BaseTrainer):
    """
    Trainer for REINFORCE with the conventions of the RePULSe paper ([Reducing the Probability of Undesirable Outputs
    in Language Models Using Probabilistic Inference](https://huggingface.co/papers/2510.21184)).

    [`~trl.GRPOTrainer`] samples, and has the engine, the rewards and the logs; advantages and loss are REINFORCE's. From
    [`~trl.RLOOTrainer`] it differs in what the paper's runs differ in: the completion's mean (not summed) token log-probability, a choice
    of baseline, and reward transforms. The KL penalty (`beta`) enters the return as there. On-policy, the log-probabilities that carry the
    gradient also serve the KL penalty, so no second pass over the policy is made.

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
    _keeps_prompts_whole = True
    loss_is_scaled_for_ga = False  # the Trainer divides the loss by the number of accumulated micro-batches

    def _check_turns(self, args: Any, **given: Any) -> None:
        """Raises a `ValueError` if tools, a rollout function or environments are given."""
        name = next(filter(given.get, given), None)
        if name is not None:
            raise ValueError(
                f"`{name}` is not for `{type(self).__name__}`, whose completions are all the model's own; leave it out, or use "
                "`PPOTrainer`, or `RePULSeGRPOTrainer` with `alpha=0`."
            )

    # Step 1: draw

    def _generate(self, prompts: list):
        """As TRL's, with the whole text of each completion, which its reward is of."""
        prompt_ids, completion_ids, tool_mask, completions, *rest = super()._generate(prompts)
        if not isinstance(prompts[0], str):
            # Where the tokenizer says how, GRPO takes thinking and calls of tools out of a message; the reward is of all of it
            texts = self.processing_class.batch_decode(completion_ids, skip_special_tokens=True)
            completions = [[{"role": "assistant", "content": text}] for text in texts]
        return prompt_ids, completion_ids, tool_mask, completions, *rest

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """The policy's samples of a generation batch, as tensors that TRL shuffles and splits."""
        return self._draw_own(inputs, self.shape).to_batch()

    def _draw_own(self, rows: list[dict[str, Any]], shape: Shape) -> Units:
        """Units of the policy's samples, with what has to be scored before the policy changes."""
        units = self._drawing.draw_own(rows, shape)
        own, self._local_batch_rows = units.own, len(rows)
        if shape.training and self.args.prefix_reward_steps is not None:
            own.values = self._prefix_values(rows, units)
        if self.beta != 0.0:
            own.ref_log_p = self._reference_log_prob(units, own)
        scores = SetScores()
        if shape.training and not self._on_policy:
            own.log_p = self._scoring.score(self.model, units, shape, gradient=False).log_p[OWN]
        if self._advantages_can_wait(shape):
            return units
        if own.log_p is None and self.beta != 0.0:
            scores = self._scoring.score(self.model, units, shape, gradient=False)
        return self._credit(units, scores, shape)

    def _prefix_values(self, rows: list[dict[str, Any]], units: Units) -> torch.Tensor:
        """What rewards of prefixes predict of the whole rewards, at each token, `(U, n, T)`. A collective call."""
        own, steps, accelerator = units.own, self.args.prefix_reward_steps, self.accelerator
        prompts = [row["prompt"] for row in rows]
        prompt_ids = [ids[mask != 0].tolist() for ids, mask in zip(units.prompt_ids, units.prompt_mask, strict=True)]
        prompt_ids = [ids for ids in prompt_ids for _ in range(own.ids.size(1))]
        read = zip(own.ids.flatten(0, 1), own.read.flatten(0, 1), strict=True)
        # A truncated completion that is masked was rewarded as it is
        most = self.max_completion_length
        completion_ids = [ids[mask != 0].tolist() or ids[:most].tolist() for ids, mask in read]
        longest = torch.tensor([max(map(len, completion_ids))], device=own.ids.device)
        longest = accelerator.gather(longest).max().item()
        rewards = self._transform(accelerator.gather(own.rewards.flatten()))  # (B_all,)
        of_prefixes = [torch.zeros_like(rewards)]
        self._rewards_prefixes = True
        try:
            for length in range(steps, longest, steps):
                ids = [each[:length] for each in completion_ids]
                texts: list[Any] = completion_texts(self._tokenizer, prompts, prompt_ids, ids)
                if not isinstance(prompts[0], str):
                    texts = [[{"role": "assistant", "content": text}] for text in texts]
                weighted = self._weighted(self._calculate_rewards(rows, prompts, texts, ids))
                of_prefixes.append(self._transform(weighted))
        finally:
            self._rewards_prefixes = False
            self._pending_metrics.clear()
            self._pending_extra_logs.clear()
        values = prefix_values(rewards, torch.stack(of_prefixes, dim=1))[local_rows(accelerator, len(rows))]  # (B, S)
        values = values.repeat_interleave(steps, dim=1)
        return F.pad(values, (0, own.ids.size(-1) - values.size(1))).view_as(own.ids)  # a negative width cuts

    def _advantages_can_wait(self, shape: Shape) -> bool:
        """Whether advantages can wait for the log-probabilities of the pass that carries the gradient."""
        return not self.args.normalize_advantages and not shape.early

    # Step 3: weigh

    @property
    def transforms_rewards(self) -> bool:
        return bool(self.args.reward_clip_range) or super().transforms_rewards

    def _transform(self, rewards: torch.Tensor) -> torch.Tensor:
        """As [`BaseTrainer._transform`], of rewards limited to `reward_clip_range`."""
        limits = self.args.reward_clip_range
        return super()._transform(rewards.clamp(*limits) if limits else rewards)

    def _credit(self, units: Units, scores: SetScores, shape: Shape) -> Units:
        """Units with `advantages` and `returns`, from rewards and, with a KL penalty, log-probabilities under the policy that was sampled.
        Logs both. A collective call."""
        own, generations, accelerator = units.own, shape.generations, self.accelerator
        kl = self._kl(own, None if self.beta == 0.0 else scores.of(OWN, own))
        returns = self._transform(own.rewards) - self.beta * kl
        baseline = (self.args.baseline, self.args.baseline_constant)
        if generations == 1:  # only in evaluation: nothing to compare with, as in TRL
            advantages = torch.zeros_like(returns)
        elif self.args.normalize_advantages:  # over the generation batch, that of all processes
            of_all = accelerator.gather(returns.flatten()).view(-1, generations)  # (P, N)
            advantages = compute_advantages(of_all, *baseline, normalize=True)
            advantages = advantages.flatten()[local_rows(accelerator, returns.numel())].view_as(returns)
        else:
            advantages = compute_advantages(to_prompts(accelerator, returns, generations), *baseline)
            advantages = to_units(accelerator, advantages, returns)

        samples = (to_prompts(accelerator, x, generations) for x in (own.ids, own.mask, own.rewards))
        self._logs_of_run.distinct(*samples)
        self._log_returns(own.rewards, kl, own.mask.sum(), kl.nansum())
        assert units.rows is not None
        self._tables.record_advantages(units.rows, advantages, self._local_batch_rows)
        if own.values is not None:
            of_completions = advantages.unsqueeze(-1).expand_as(own.mask)
            advantages, without_lambda = self._token_advantages(units, scores, generations)
            squares = [(each.square() * own.mask).sum() for each in (without_lambda, of_completions)]
            self._logs_of_run.token_mean("prefix/noise", *squares)
        return replace(units, advantages=advantages, returns=returns)

    def _token_advantages(self, units: Units, scores: SetScores, generations: int) -> list[torch.Tensor]:
        """Generalized advantages of tokens, `(U, n, T)`, from the values of prefixes and, with a KL penalty, the mean of what the prompt's
        other completions have of it from there on; and those with a λ of 1. A collective call."""
        own = units.own
        values, rewards, left_out = own.values, self._transform(own.rewards), own.rewards.isnan().unsqueeze(-1)
        assert values is not None
        log_p = log_ref = torch.zeros_like(values)
        if self.beta != 0.0:
            assert own.ref_log_p is not None
            log_p, log_ref = scores.of(OWN, own), own.ref_log_p
            penalties = kl_token_rewards(log_p, log_ref, torch.zeros_like(rewards), self.beta, own.mask)
            later = penalties.flip(-1).cumsum(-1).flip(-1).masked_fill(left_out, torch.nan)
            of_prompts = to_prompts(self.accelerator, later, generations).transpose(1, 2)  # (P, T, N)
            known, scored = of_prompts.nan_to_num(0.0), ~of_prompts.isnan()
            count = (scored.sum(-1, keepdim=True) - scored.long()).clamp(min=1)  # of the others
            of_others = (known.sum(-1, keepdim=True) - known) / count
            values = values + to_units(self.accelerator, of_others.transpose(1, 2), rewards)
        token_rewards = kl_token_rewards(log_p, log_ref, rewards, self.beta, own.mask)
        steps, width = self.args.prefix_reward_steps, values.size(-1)
        lambdas = [self.args.gae_lambda if t % steps == 0 else 1.0 for t in range(1, width + 1)]
        of_rows = (token_rewards.view(-1, width), values.view(-1, width), own.mask.view(-1, width))
        both = (generalized_advantages(*of_rows, gae_lambda=each)[0] for each in (lambdas, 1.0))
        return [each.view_as(values).masked_fill(left_out, 0.0) for each in both]

    # Step 4: the policy's loss

    def _compute_loss(self, model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """REINFORCE's loss of a micro-batch, from one pass that carries the gradient."""
        units, shape = Units.of(inputs), self.shape
        scores = self._scoring.score(model, units, shape)
        self._compare_engine(units, scores)
        if units.advantages is None:
            units = self._credit(units, scores, shape)
        return self._finish(self._loss(units, scores), units, scores)

    def _compare_engine(self, units: Units, scores: SetScores) -> None:
        """Logs how far a vLLM engine's log-probabilities are from the model's, if an engine drew. A collective call."""
        if units.own.engine_log_p is not None:
            self._logs_of_run.compare_engine(units.own, scores.of(OWN, units.own))

    def _loss(self, units: Units, scores: SetScores) -> torch.Tensor:
        """[`~trl_repulse.math.objective.repulse_loss`] of the samples that have weights."""
        own, extra, advantages = units.own, units.extra, units.advantages
        assert advantages is not None
        if own.coefficients is not None:
            advantages = advantages + own.coefficients.view(advantages.shape[:2] + (1,) * (advantages.dim() - 2))
        samples = WeightedSamples(scores.log_p[OWN], own.mask, advantages, own.log_p)
        negative = None
        if extra is not None and extra.coefficients is not None:
            old_log_p = None if self._on_policy else extra.log_p
            negative = WeightedSamples(scores.log_p[EXTRA], extra.mask, extra.coefficients, old_log_p)
        return repulse_loss(samples, negative, self.args.logprob_reduction, self.epsilon_low, self.epsilon_high)

    def _finish(self, loss: torch.Tensor, units: Units, scores: SetScores) -> torch.Tensor:
        """The loss over the samples that count, with a router's loss; logs the entropy."""
        logs, mask = self._logs_of_run, units.own.mask
        loss = logs.mean_of_real(loss, mask.shape[:2].numel())
        assert scores.entropy is not None
        if self.aux_loss_enabled:
            assert scores.aux_loss is not None
            loss = loss + self.router_aux_loss_coef * scores.aux_loss
            moments = logs.gathered(Moments.alike(scores.aux_loss.item(), logs.loss_count))
            logs.record_moments({"aux_loss": mean}, moments)
        logs.token_mean("entropy", (scores.entropy * mask).sum(), mask.sum())
        return loss
