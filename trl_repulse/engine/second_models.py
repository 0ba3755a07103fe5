"""What is alike of all models that train beside a policy, each in a folder of its own beside the policy's files."""

from pathlib import Path

from .second_model import SecondModel


# Folders inside `output_dir` and inside each checkpoint, and prefixes of metrics.
PROPOSAL_FOLDER = "proposal"
VALUE_FOLDER = "value"
_NAMES = {PROPOSAL_FOLDER: "proposal", VALUE_FOLDER: "value model"}


class SecondModels:
    """
    Mixin before a TRL trainer: second models are prepared, updated, saved and loaded with the policy.
    """

    _second_models: dict[str, SecondModel] = {}  # by folder; a trainer sets its own

    def _update_second(self, folder: str, advance_schedule: bool = True) -> None:
        """Updates a second model with the gradient it has, and logs learning rate and norm."""
        model, metrics = self._second_models[folder], self._metrics["train"]
        metrics[f"{folder}/learning_rate"].append(model.optimizer.param_groups[0]["lr"])
        metrics[f"{folder}/grad_norm"].append(model.step())
        if advance_schedule:
            model.step_schedule()

    def _prepare_for_training(self, max_steps, train_dataloader, resume_from_checkpoint):
        prepared = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        for folder, model in self._second_models.items():
            model.prepare(self, max_steps)
            if resume_from_checkpoint is not None:
                path = Path(resume_from_checkpoint) / folder
                if not path.is_dir():
                    raise ValueError(
                        f"The checkpoint {resume_from_checkpoint} holds no {_NAMES[folder]}; resume from one that "
                        f"`{type(self).__name__}` wrote, or start a new run with that checkpoint's policy as `model`."
                    )
                model.load_checkpoint(self, path)
        return prepared

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        for folder, model in self._second_models.items():
            path = Path(output_dir or self.args.output_dir) / folder
            model.save_pretrained(path, self.args.should_save)
            if self.args.should_save:
                self.processing_class.save_pretrained(path)
                self._describe_second(path)
        super().save_model(output_dir, _internal_call)

    def _describe_second(self, path: Path) -> None:
        """Writes what else belongs into the folder of a second model that was saved."""

    def _save_second_models(self, checkpoint: Path) -> None:
        """Writes what goes on training second models, beside the weights that `save_model` writes."""
        for folder, model in self._second_models.items():
            model.save_state(checkpoint / folder, self.args.should_save)

    def _load_best_model(self) -> None:
        super()._load_best_model()
        for folder, model in self._second_models.items():
            model.load_checkpoint(self, Path(self.state.best_model_checkpoint) / folder)
