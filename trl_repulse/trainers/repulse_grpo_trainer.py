"""RePULSe on TRL's GRPO: any of its advantages and losses, and a negative term beside them."""

from typing import Any

from ..configs import RePULSeGRPOConfig
from ..generation._probe import Guard
from ._grpo import GRPOBase
from ._rows import RowsWithNegativeTerm


class RePULSeGRPOTrainer(RowsWithNegativeTerm, GRPOBase):
    """
    Trainer for GRPO with a negative term: RePULSe ([Reducing the Probability of Undesirable Outputs in Language Models Using
    Probabilistic Inference](https://huggingface.co/papers/2510.21184)) in the place of REINFORCE.

    The policy takes [`~trl.GRPOTrainer`]'s steps on its own samples, with any `loss_type` and advantages, and lowers the
    log-probability of samples that find its bad outputs, weighted by importance and by `alpha`: as in [`RePULSeTrainer`] those of the policy
    drawn hotter, of a proposal that learns, or its own. The negative term is added to GRPO's loss: a mean over samples of coefficient times the completion's mean (`logprob_reduction`)
    log-probability. Where a generation batch serves several updates, it is clipped as in [`RePULSeTrainer`].

    With `alpha=0` the updates are [`~trl.GRPOTrainer`]'s to the last bit: nothing of this package has part in sampling and scoring.

    Example:

    ```python
    >>> from trl_repulse import RePULSeGRPOConfig, RePULSeGRPOTrainer
    >>> from trl_repulse.embedded import load_prompts, policy_path, reward_model_path

    >>> args = RePULSeGRPOConfig(
    ...     output_dir="out",
    ...     bad_reward_threshold=-5.0,
    ...     max_completion_length=2,
    ...     use_cpu=True,
    ...     bf16=False,
    ... )
    >>> trainer = RePULSeGRPOTrainer(
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
            As for [`~trl.GRPOTrainer`]. Datasets need a `"prompt"` column, plain or conversational text.
        args ([`RePULSeGRPOConfig`]):
            Configuration for this trainer. By default it needs a `bad_reward_threshold`.
        proposal_model, proposal_peft_config:
            As for [`RePULSeTrainer`], by name.

    Raises:
        `ValueError`: If tools, a `rollout_func` or an `environment_factory` is given where there is a negative term; else as
            [`RePULSeTrainer`].
    """

    _tag_names = ["trl", "trl-repulse", "repulse", "grpo"]
    _name = "RePULSe with GRPO"
    _config_cls = RePULSeGRPOConfig

    def _prepare_scoring(self) -> None:
        if self.args.alpha > 0:
            super()._prepare_scoring()
        else:
            self._guard = Guard(share_prompts=False, repeat_cache=False)

    def _get_per_token_logps_and_entropies(self, *args: Any, **options: Any):
        if self.args.alpha > 0:
            return super()._get_per_token_logps_and_entropies(*args, **options)
        return super(GRPOBase, self)._get_per_token_logps_and_entropies(*args, **options)
