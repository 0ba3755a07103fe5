"""RePULSe: REINFORCE on the policy's samples, and a negative term that pushes down samples which find its bad outputs."""

from typing import Any

import torch

from ..configs import RePULSeConfig
from ..engine.resume import RESUME_STATE
from ..engine.scoring import SetScores
from ..engine.units import Shape, Units
from ..method.negative_term import NegativeTerm
from .reinforce_trainer import ReinforceTrainer


class RePULSeTrainer(ReinforceTrainer):
    """
    Trainer for RePULSe ([Reducing the Probability of Undesirable Outputs in Language Models Using Probabilistic
    Inference](https://huggingface.co/papers/2510.21184)).

    The policy takes REINFORCE steps on its own samples and lowers the log-probability of further samples that find its bad outputs,
    weighted by importance and by `alpha`. By default it draws these itself, with other logits, and what has a reward under
    `bad_reward_threshold` is pushed down (`proposal="hot_policy"`). With `proposal="policy"` its own samples serve, at no further cost.

    One training step, Algorithm 1 of the paper:

    1. draw N completions of each prompt from the policy, K more that find its bad outputs, and the rewards of both
       (`_generate_and_score_completions`, [`NegativeTerm.draw`]);
    2. score them under the policy (`_compute_loss`) and what drew them ([`NegativeTerm.score`]);
    3. weigh: advantages of the policy's samples (`_credit`), importance weights of those of step 1 ([`NegativeTerm.weigh`]);
    4. take the policy's gradient of Eq. 4, for the Trainer's step ([`~trl_repulse.math.objective.repulse_loss`]);
    5. with a learned proposal, take its gradient on its samples ([`NegativeTerm.learn`]), for its own step at the end of the update
       ([`NegativeTerm.end_of_update`]).

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
            causal language model; if a `proposal_model` or a `proposal_peft_config` is given where the configuration builds none; if the
            policy's adapter is not named `default`; else as [`ReinforceTrainer`].
    """

    _tag_names = ["trl", "trl-repulse", "repulse"]
    _name = "RePULSe"
    _config_cls = RePULSeConfig
    _takes = ("proposal_model", "proposal_peft_config")
    _withheld = (*ReinforceTrainer._withheld, *RESUME_STATE)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        if self._negative is None:
            return super()._generate_and_score_completions(inputs)
        # Step 1: draw
        shape, source = self.shape, self._negative.source(self.shape)
        with self._drawing.together(shape, source):
            units = self._draw_own(inputs, shape)
        return self._negative.draw(inputs, units, shape, source).to_batch()

    def _compute_loss(self, model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        if (negative := self._negative) is None:
            return super()._compute_loss(model, inputs)
        units, shape = Units.of(inputs), self.shape
        scores = self._scoring.score(model, units, shape, negative.wanted(units))  # Step 2: score
        scores = negative.score(units, scores, shape)
        units = self._weigh(negative, units, scores, shape)  # Step 3: weigh
        loss = self._loss(units, scores)  # Step 4: the policy's loss
        negative.learn(units, scores, shape)  # Step 5: a proposal learns
        return self._finish(loss, units, scores)

    def _weigh(self, negative: NegativeTerm, units: Units, scores: SetScores, shape: Shape) -> Units:
        """Adds advantages and weights to units, unless these were computed as the samples were drawn. A collective call."""
        self._compare_engine(units, scores)
        if units.advantages is None:
            units = self._credit(units, scores, shape)
        if not negative.is_weighed(units):
            weights = negative.weigh(units, scores, shape)
            negative.observe(units, scores, weights, shape)
            units = weights.added_to(units)
        return units
