"""RePULSe: REINFORCE on the policy's samples, and a negative term that pushes down samples which find its bad outputs.

Axis letters as in `engine/sampling.py`: U units of n policy samples and m proposal samples, T completion tokens.
"""

from typing import Any

import torch

from ..configs import RePULSeConfig
from ..math.losses import WeightedSamples, repulse_loss
from ..method.negative_term import COEFFICIENTS, NEGATIVE, OWN
from ._with_negative_term import WithNegativeTerm
from .reinforce_trainer import ReinforceTrainer


class RePULSeTrainer(WithNegativeTerm, ReinforceTrainer):
    """
    Trainer for RePULSe ([Reducing the Probability of Undesirable Outputs in Language Models Using Probabilistic
    Inference](https://huggingface.co/papers/2510.21184)).

    The policy takes REINFORCE steps on its own samples and lowers the log-probability of further samples that find its bad outputs,
    weighted by importance and by `alpha`. By default it draws these itself, at `proposal_temperature`, and what has a reward under
    `bad_reward_threshold` is pushed down (`proposal="hot_policy"`). With `proposal="policy"` its own samples serve, at no further cost.

    One training step, Algorithm 1 of the paper:

    1. draw N completions of each prompt from the policy, K more that find its bad outputs, and the rewards of both
       (`_generate_and_score_completions`, [`NegativeTerm.sample`]);
    2. score them under the policy (`_compute_loss`);
    3. weigh: advantages of the policy's samples (`_credit`), importance weights of those of step 1 ([`NegativeTerm.weigh`]);
    4. take a step of the policy on Eq. 4 ([`~trl_repulse.math.losses.repulse_loss`]);
    5. with a learned proposal, take a step of the proposal on its samples ([`LearnedProposal.learn`]).

    With `proposal="learned"`, the paper's method, a second language model, the *proposal*, learns to draw the policy's low-reward
    outputs: its target is σ ∝ policy · exp(`target_dist_beta`·reward), and it takes a step of contrastive twist learning at each
    step. The proposal is saved to `output_dir/proposal` with a card that warns of it, is part of each checkpoint, and is
    never uploaded with the policy; `push_proposal_to_hub` gives it a private repository of its own.

    Example:

    ```python
    >>> from trl_repulse import RePULSeConfig, RePULSeTrainer
    >>> from trl_repulse.embedded import load_prompts, policy_path, reward_model_path

    >>> args = RePULSeConfig("out", bad_reward_threshold=-5.0, max_completion_length=2, use_cpu=True, bf16=False)
    >>> trainer = RePULSeTrainer(policy_path(), reward_model_path(), args, train_dataset=load_prompts())
    >>> trainer.train()
    ```

    Args:
        model, reward_funcs, train_dataset, eval_dataset, processing_class, reward_processing_classes, callbacks,
        optimizers, quantization_config, peft_config:
            As for [`ReinforceTrainer`].
        args ([`RePULSeConfig`]):
            Configuration for this trainer. If `None`, a default configuration is used.
        proposal_model (`str` or [`~transformers.PreTrainedModel`], *optional*):
            Model the proposal starts from: a path, a model id, or a model. If `None`, a copy of the initial policy.
            Must have the policy's tokens, which are compared if a path has a tokenizer, and weights of its own. If `None` and
            the policy is an adapter, the proposal is a second one over the same base. If given, it has weights of its own and
            with a `peft_config` an adapter over them. The folder of an adapter over the policy's base joins it there.
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

    def _check_acting(self, args: RePULSeConfig, given: dict[str, Any]) -> None:
        """REINFORCE refuses tools whatever `alpha` is."""

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        # Step 1: draw
        batch = super()._generate_and_score_completions(inputs)
        return batch if self._negative is None else batch | self._negative.sample(inputs, batch)

    def _observe(self, rewards: torch.Tensor) -> None:
        if not self.args.draws_hot:  # the hot policy observes P(bad) from both kinds of samples, as it weighs them
            super()._observe(rewards)

    def _compute_loss(self, model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        negative = self._negative
        if negative is None:
            return super()._compute_loss(model, inputs)

        # Step 2: score, in one pass, the policy's samples and, where others were drawn, those that may have a weight
        asked = {"by_sampler": negative.by_sampler(inputs), "needed": negative.needed(inputs)}
        scores = self._score(model, inputs, negative.completions, **asked)
        log_p, log_p_negative = scores.log_p[0], scores.log_p[-1]
        old_log_p = inputs.get("old_log_p", log_p.detach())
        self._log_engine(inputs, OWN, old_log_p)

        # Step 3: weigh, unless that was done as the samples were drawn. Step 5 too: a proposal accumulates its gradient
        if "coefficients" not in inputs:
            inputs = inputs | self._credit(inputs, old_log_p)
        inputs = inputs | negative.learn(inputs | scores.by_sampler, old_log_p, log_p_negative.detach())

        # Step 4: the policy's loss
        advantages = inputs["coefficients"]
        if COEFFICIENTS[OWN] in inputs:
            advantages = advantages + inputs[COEFFICIENTS[OWN]]
        own = WeightedSamples(log_p, inputs[f"{OWN}_mask"], advantages, inputs.get("old_log_p"))
        others = None
        if COEFFICIENTS[NEGATIVE] in inputs:
            old_negative = None if self._on_policy else inputs.get("proposal_old_log_p")
            others = WeightedSamples(
                log_p_negative, inputs[f"{NEGATIVE}_mask"], inputs[COEFFICIENTS[NEGATIVE]], old_negative
            )
        clipping = self.epsilon_low, self.epsilon_high
        loss = repulse_loss(own, others, self.args.logprob_reduction, *clipping)
        return self._finish_policy_loss(loss, scores.entropy, scores.aux_loss, inputs)
