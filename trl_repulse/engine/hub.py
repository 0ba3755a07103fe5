"""The proposal's repository on the Hub: a private one of its own, and only if it is asked for."""

from importlib.metadata import version
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi

from ..configs._checks import check_uploads
from .second_models import PROPOSAL_FOLDER


class ProposalUploads:
    """Mixin before a trainer with a proposal: `push_proposal_to_hub` and `hub_proposal_model_id`."""

    def create_accelerator_and_postprocess(self) -> None:
        self._check_uploads()  # the trackers are built next
        super().create_accelerator_and_postprocess()

    def train(self, *args: Any, **kwargs: Any):
        """As [`ReinforceTrainer.train`]; refuses trackers that would upload the proposal."""
        self._check_uploads()
        return super().train(*args, **kwargs)

    def _check_uploads(self) -> None:
        if self.args.has_proposal:
            check_uploads(self.args)

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """
        Creates the policy's repository and, with `push_proposal_to_hub=True`, the proposal's, always a private one.

        Args:
            token, private:
                As for [`~transformers.Trainer.init_hf_repo`]; `private` is about the policy's repository alone.

        Raises:
            `ValueError`: If the proposal's repository is the policy's, or exists and is not private.
        """
        super().init_hf_repo(token, private)
        if not self._pushes_proposal():
            return
        api = self._proposal_api(token)
        name = self.args.hub_proposal_model_id or f"{self.hub_model_id}-proposal"
        self.hub_proposal_model_id = api.create_repo(name, private=True, exist_ok=True).repo_id
        if self.hub_proposal_model_id.lower() == self.hub_model_id.lower():
            raise ValueError(
                f"`hub_proposal_model_id={name!r}` is the policy's repository; name another, or leave it unset."
            )
        self._require_private(api)

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """
        Uploads the policy as [`~transformers.Trainer.push_to_hub`] does, without the proposal and the negative data.

        With `push_proposal_to_hub=True` the final proposal then goes to its own repository, on the main branch, once
        that has been seen to be private; the call waits for it. Checkpoints never take it along.

        Args:
            commit_message, blocking, token, revision, private, kwargs:
                As for [`~transformers.Trainer.push_to_hub`]; `blocking`, `revision` and `private` are about the policy.

        Raises:
            `ValueError`: If the proposal's repository is not private, or a tracker would take the proposal's completions
                along.
        """
        if self.args.has_proposal:
            check_uploads(self.args, pushing=True)
        pushed = super().push_to_hub(commit_message, blocking, token, revision, private, **kwargs)
        if self._pushes_proposal():
            api = self._proposal_api(token)
            self._require_private(api)  # it may have been opened since training began
            api.upload_folder(
                repo_id=self.hub_proposal_model_id,
                folder_path=Path(self.args.output_dir) / PROPOSAL_FOLDER,
                commit_message=commit_message,
            )
        return pushed

    def _pushes_proposal(self) -> bool:
        return self.args.has_proposal and self.args.push_proposal_to_hub and self.is_world_process_zero()

    def _proposal_api(self, token: str | None) -> HfApi:
        return HfApi(
            token=self.args.hub_token if token is None else token,
            library_name="trl-repulse",
            library_version=version("trl-repulse"),
        )

    def _require_private(self, api: HfApi) -> None:
        if api.repo_info(self.hub_proposal_model_id).private is not True:
            raise ValueError(
                f"The repository {self.hub_proposal_model_id} is not private, and a proposal is not for the public: make "
                "it private, or choose another as `hub_proposal_model_id`. Nothing of the proposal was uploaded."
            )
