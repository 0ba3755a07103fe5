"""RePULSe on PPO: the value model's advantages, and a negative term beside PPO's clipped loss."""

from typing import Any

from ..configs import RePULSePPOConfig
from ..engine.records import REPULSE_PAPER
from ..method.environments import refuse_acting
from .ppo_trainer import PPOTrainer


class RePULSePPOTrainer(PPOTrainer):
    """
    Trainer for RePULSe ([Reducing the Probability of Undesirable Outputs in Language Models Using Probabilistic
    Inference](https://huggingface.co/papers/2510.21184)) with PPO in place of REINFORCE.

    The policy takes PPO's steps on its own samples, as in [`PPOTrainer`], and has the negative term of [`RePULSeGRPOTrainer`] beside
    PPO's loss. With `alpha=0` the updates are [`PPOTrainer`]'s.

    Value model and proposal are saved to `output_dir/value` and `output_dir/proposal`, are part of each checkpoint, and are not
    uploaded with the policy.

    Example:

    ```python
    >>> from trl_repulse import RePULSePPOConfig, RePULSePPOTrainer
    >>> from trl_repulse.embedded import load_prompts, policy_path, reward_model_path

    >>> args = RePULSePPOConfig("out", bad_reward_threshold=-5.0, max_completion_length=2, use_cpu=True, bf16=False)
    >>> trainer = RePULSePPOTrainer(policy_path(), reward_model_path(), args, train_dataset=load_prompts())
    >>> trainer.train()
    ```

    Args:
        model, reward_funcs, train_dataset, eval_dataset, processing_class, reward_processing_classes, callbacks,
        optimizers, quantization_config, peft_config, value_model, value_peft_config:
            As for [`PPOTrainer`].
        args ([`RePULSePPOConfig`]):
            Configuration for this trainer. If `None`, a default configuration is used.
        proposal_model, proposal_peft_config:
            As for [`RePULSeTrainer`], by name.

    Raises:
        `ValueError`: If tools, a `rollout_func` or an `environment_factory` is given where there is a negative term; else as
            [`PPOTrainer`] and [`RePULSeTrainer`].
    """

    _tag_names = ["trl", "trl-repulse", "repulse", "ppo"]
    _name = "RePULSe with PPO"
    _config_cls = RePULSePPOConfig
    _takes = (*PPOTrainer._takes, "proposal_model", "proposal_peft_config")
    _paper = REPULSE_PAPER

    def _check_turns(self, args: RePULSePPOConfig, **given: Any) -> None:
        refuse_acting(args, given)
