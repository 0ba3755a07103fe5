"""What gives a trainer of units a negative term, and the proposal that it may need."""

import contextlib
import inspect
from pathlib import Path
from typing import Any

import torch

from ..configs import NegativeTermConfig
from ..data._checks import check_arguments
from ..engine.records import REPULSE_PAPER, ProposalUploads, show_completions, write_proposal_card
from ..engine.resume import RESUME_STATE
from ..engine.sampling import UnitSampling
from ..engine.scoring import check_separate_rewards
from ..engine.second_model import PROPOSAL_FOLDER, SecondAdapter, SecondModel
from ..engine.trl_bridge import without_kl
from ..method.environments import refuse_acting
from ..method.hot_policy import HotPolicy
from ..method.learned_proposal import LearnedProposal
from ..method.negative_term import NegativeTerm
from ..method.proposal_model import build_proposal, lends_reference, policy_adapter, serve_proposal, starting_point
from ..models._adapters import BaseView, adapter_config
from ._grpo_base import GRPOBase


class WithNegativeTerm(ProposalUploads):
    """
    Mixin before a trainer of units ([`UnitSampling`]): it has a negative term (`_negative`) unless `alpha` is 0.

    Args:
        model, reward_funcs, args, rest, options:
            The trainer's arguments; `args` has the fields of [`~trl_repulse.configs.NegativeTermConfig`].
        proposal_model, proposal_peft_config:
            As for [`RePULSeTrainer`].
    """

    _paper = REPULSE_PAPER
    _withheld = (*UnitSampling._withheld, *RESUME_STATE)

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: Any = None,
        *rest: Any,
        proposal_model: Any = None,
        proposal_peft_config: Any = None,
        **options: Any,
    ):
        check_arguments(self._config_cls, args, model=model, proposal_model=proposal_model)
        args = self._configuration(model, args)
        given = self._by_name(model, reward_funcs, args, *rest, **options)
        peft_config, quantization_config = given.get("peft_config"), given.get("quantization_config")
        self._check_acting(args, given)
        self._passed = {"proposal_model": proposal_model}
        lends_base = proposal_model is None and lends_reference(model, args, peft_config, proposal_peft_config)
        proposal_model = starting_point(proposal_model, model, args, peft_config, proposal_peft_config)
        trained = proposal_peft_config is None and peft_config is None
        check_separate_rewards(reward_funcs, proposal_model, "`proposal_model`", trained)
        self._more_adapters = [proposal_peft_config, adapter_config(proposal_model)]
        if proposal_model is None and proposal_peft_config is None and args.has_proposal:
            self._more_adapters.append(policy_adapter(model, peft_config))  # once more, of a proposal over its base
        with without_kl(args) if lends_base else contextlib.nullcontext():
            super().__init__(model, reward_funcs, args, *rest, **options)

        self.proposal: SecondModel | None = None
        if self.args.has_proposal:
            self.proposal = build_proposal(
                proposal_model, self, peft_config, proposal_peft_config, quantization_config
            )
            self._second_models = {**self._second_models, PROPOSAL_FOLDER: self.proposal}
            self._guard_model("proposal", self.proposal.module)
            if lends_base:
                self.beta, self.ref_model = args.beta, BaseView(self.proposal.module)
            if self.use_vllm:
                serve_proposal(self, self.proposal)
        self._negative = self.build_negative_term()

    def build_negative_term(self) -> NegativeTerm | None:
        """The negative term by `args.proposal`, or `None` if `alpha` is 0. Override it to bring a way of finding bad outputs of your own."""
        if self.args.draws_hot:
            return HotPolicy(self)
        if self.args.has_proposal:
            return LearnedProposal(self, self.proposal)
        return NegativeTerm(self) if self.args.alpha > 0 else None

    @staticmethod
    def _by_name(*args: Any, **options: Any) -> dict[str, Any]:
        """A constructor's arguments by the names that the base writes out, those of parts between them left out."""
        signature = inspect.signature(GRPOBase.__init__)
        named = {name: value for name, value in options.items() if name in signature.parameters}
        return signature.bind_partial(None, *args, **named).arguments

    def _check_acting(self, args: NegativeTermConfig, given: dict[str, Any]) -> None:
        """Refuses tools and environments, before anything is loaded."""
        refuse_acting(args, given)

    @property
    def bad_reward_threshold(self) -> float | None:
        """Reward under which a completion counts as bad, measured by the hot policy if it is not set; `None` until it is known."""
        measured = self._negative.measured if isinstance(self._negative, HotPolicy) else None
        return self.args.bad_reward_threshold if measured is None else measured.value

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        with contextlib.nullcontext() if self._negative is None else self._negative.drawing():
            return super()._generate_and_score_completions(inputs)

    def update_proposal(self, chunks: list[dict[str, torch.Tensor]], advance_schedule: bool = True) -> None:
        """
        One proposal update on samples already drawn, against the policy as it is now.

        Args:
            chunks (`list[dict[str, torch.Tensor]]`):
                Micro-batches of proposal samples, each of whole prompts.
            advance_schedule (`bool`, *optional*, defaults to `True`):
                Whether the proposal's learning rate moves on, as it does once for each update of the policy.
        """
        if self.proposal is None:
            raise ValueError("There is no proposal to update: `alpha` is 0, or `proposal` is not 'learned'.")
        self._negative.update(chunks, advance_schedule)

    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = super().training_step(model, inputs, num_items_in_batch)
        if self._negative is not None:
            self._negative.end_of_micro_batch()
        return loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        super().log(logs, start_time)
        if self._negative is not None:
            show_completions(self, self._negative.logs, "proposal_completions")

    # Saving and loading

    def _prepare_for_training(self, max_steps, train_dataloader, resume_from_checkpoint):
        if isinstance(self.proposal, SecondAdapter):  # the policy's optimizer and engine do without it
            self.proposal.module.requires_grad_(False)
        return super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)

    def _describe_second(self, path: Path) -> None:
        if path.name == PROPOSAL_FOLDER:
            name = self.args.hub_model_id or Path(self.args.output_dir).name
            write_proposal_card(path, name, self.proposal.module.config._name_or_path, self.args)

    def _save_checkpoint(self, model, trial):
        # DeepSpeed's files of the policy, which an upload of checkpoints takes along, leave out frozen adapters
        is_adapter = isinstance(self.proposal, SecondAdapter)
        with self.proposal.module.frozen() if is_adapter else contextlib.nullcontext():
            super()._save_checkpoint(model, trial)
