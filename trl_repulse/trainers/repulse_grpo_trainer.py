"""RePULSe on TRL's GRPO: any of its advantages and losses, and a negative term beside them."""

import contextlib
from typing import Any

from ..configs import RePULSeGRPOConfig
from ..engine.records import REPULSE_PAPER
from ..engine.resume import RESUME_STATE
from ..method.environments import ProposalWorld, check_acting
from ..models._deepspeed import zero_stage
from ._grpo_loss import GRPOLossTrainer


class RePULSeGRPOTrainer(GRPOLossTrainer):
    """
    Trainer for RePULSe ([Reducing the Probability of Undesirable Outputs in Language Models Using Probabilistic
    Inference](https://huggingface.co/papers/2510.21184)) with GRPO in place of REINFORCE.

    The policy takes [`~trl.GRPOTrainer`]'s steps on its own samples, with any `loss_type` and advantages. It also lowers the
    log-probability of samples that find its bad outputs, weighted by importance and by `alpha`. As in [`RePULSeTrainer`] these come from
    the policy with other logits, from a proposal that learns, or from the policy's own samples. The negative term is added to GRPO's
    loss. It is the mean over samples of a coefficient times the completion's mean log-probability (`logprob_reduction`). Where a
    generation batch serves several updates, it is clipped as in [`RePULSeTrainer`].

    With `alpha=0` the updates are [`~trl.GRPOTrainer`]'s with the same settings, bit for bit: sampling and scoring are TRL's own.
    `disable_dropout` is `True` by default here.

    Example:

    ```python
    >>> from trl_repulse import RePULSeGRPOConfig, RePULSeGRPOTrainer
    >>> from trl_repulse.embedded import load_prompts, policy_path, reward_model_path

    >>> args = RePULSeGRPOConfig("out", bad_reward_threshold=-5.0, max_completion_length=2, use_cpu=True, bf16=False)
    >>> trainer = RePULSeGRPOTrainer(policy_path(), reward_model_path(), args, train_dataset=load_prompts())
    >>> trainer.train()
    ```

    Of a completion in which tools or an environment wrote, only the tokens that the model wrote count: in log-probabilities, weights,
    losses and the KL penalty.

    Args:
        model, reward_funcs, train_dataset, eval_dataset, processing_class, reward_processing_classes, callbacks,
        optimizers, quantization_config, peft_config, tools, rollout_func, environment_factory:
            As for [`~trl.GRPOTrainer`]. Datasets need a `"prompt"` column, plain or conversational text. Where completions are drawn
            for the negative term, tools and environments need `proposal_tools=True`, and a `rollout_func` is refused.
        args ([`RePULSeGRPOConfig`]):
            Configuration for this trainer. If `None`, a default configuration is used.
        proposal_model, proposal_peft_config:
            As for [`RePULSeTrainer`], by name.
        proposal_environment_factory (`Callable` or `dict[str, Callable]`, *optional*):
            By name. Makes the environments that the proposal, or the hot policy, acts in, where there is an `environment_factory`. They
            must answer as the policy's do, with the same probabilities: a sandbox or, if nothing that is done there matters, the same
            factory.

    Raises:
        `ValueError`: If what is drawn for the negative term would act with tools or in environments without `proposal_tools=True`
            and a `proposal_environment_factory`, or be drawn by a `rollout_func`; else as [`RePULSeTrainer`].
    """

    _tag_names = ["trl", "trl-repulse", "repulse", "grpo"]
    _name = "RePULSe with GRPO"
    _paper = REPULSE_PAPER
    _config_cls = RePULSeGRPOConfig
    _takes = ("proposal_model", "proposal_peft_config", "proposal_environment_factory")
    _withheld = (*GRPOLossTrainer._withheld, *RESUME_STATE)
    _proposal_world: ProposalWorld | None = None

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        if self.tools and not self.use_vllm and self.accelerator.num_processes > 1:
            if zero_stage(self.accelerator) == 3 or self.is_fsdp_enabled:
                raise ValueError(
                    "With tools or environments, processes generate different numbers of turns, and with ZeRO-3 or FSDP they would "
                    "wait for each other. Set `use_vllm=True`, or launch with DDP or ZeRO-2."
                )
        if self.tools and self.args.draws_twice:
            self._proposal_world = ProposalWorld(self, self._second.get("proposal_environment_factory"))

    def _check_turns(self, args: RePULSeGRPOConfig, **given: Any) -> None:
        check_acting(args, given, self._second.get("proposal_environment_factory"))

    def _acting(self, rows: list[dict[str, Any]]) -> contextlib.AbstractContextManager[list[dict[str, Any]]]:
        return super()._acting(rows) if self._proposal_world is None else self._proposal_world.acting(rows)

    @property
    def _leaves_passes_to_trl(self) -> bool:
        return self.args.alpha == 0
