"""The proposal's own private repository on the Hub, if there is one."""

from importlib.metadata import version
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi

from ..configs._checks import check_uploads
from .second_model import PROPOSAL_FOLDER


class ProposalUploads:
    """Mixin before a trainer with a proposal: `push_proposal_to_hub` and `hub_proposal_model_id`."""

    def create_accelerator_and_postprocess(self) -> None:
        if self.args.has_proposal:
            check_uploads(self.args)  # the trackers are built next
        super().create_accelerator_and_postprocess()

    def train(self, *args: Any, **kwargs: Any):
        """As [`ReinforceTrainer.train`]; refuses trackers that would upload the proposal."""
        if self.args.has_proposal:
            check_uploads(self.args)
        return super().train(*args, **kwargs)

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """
        As [`~transformers.Trainer.init_hf_repo`]; with `push_proposal_to_hub=True` the proposal's repository is created too, always a
        private one.

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

        With `push_proposal_to_hub=True` the final proposal is then uploaded to the main branch of its own repository, and the call waits
        for it; checkpoints of it are not. `blocking`, `revision` and `private` concern the policy alone.

        Raises:
            `ValueError`: If the proposal's repository is not private, or a tracker would upload the proposal's completions.
        """
        if self.args.has_proposal:
            check_uploads(self.args, pushing=True)
        pushed = super().push_to_hub(commit_message, blocking, token, revision, private, **kwargs)
        if self._pushes_proposal():
            api = self._proposal_api(token)
            self._require_private(api)  # it may have been made public since training began
            api.upload_folder(
                repo_id=self.hub_proposal_model_id,
                folder_path=Path(self.args.output_dir) / PROPOSAL_FOLDER,
                commit_message=commit_message,
            )
        return pushed

    def _pushes_proposal(self) -> bool:
        return self.args.has_proposal and self.args.push_proposal_to_hub and self.is_world_process_zero()

    def _proposal_api(self, token: str | None) -> HfApi:
        token = self.args.hub_token if token is None else token
        return HfApi(token=token, library_name="trl-repulse", library_version=version("trl-repulse"))

    def _require_private(self, api: HfApi) -> None:
        if api.repo_info(self.hub_proposal_model_id).private is not True:
            raise ValueError(
                f"The repository {self.hub_proposal_model_id} is not private, and a proposal is not for the public: make "
                "it private, or choose another as `hub_proposal_model_id`. Nothing of the proposal was uploaded."
            )
