"""What a configuration with a proposal may not send away."""

import os
from pathlib import Path
from typing import Any


_TRUE = ("1", "on", "true", "yes")
# Trackers that upload whole checkpoints, or all of `output_dir`, where the environment tells them to (transformers
# 5.23): the variable, its default, and the values that make them do so.
_CHECKPOINT_UPLOADS = (
    ("clearml", "CLEARML_LOG_MODEL", "true", _TRUE),
    ("comet_ml", "COMET_LOG_ASSETS", "false", _TRUE),
    ("dagshub", "HF_DAGSHUB_LOG_ARTIFACTS", "false", _TRUE),
    ("dagshub", "HF_MLFLOW_LOG_ARTIFACTS", "false", _TRUE),
    ("dvclive", "HF_DVCLIVE_LOG_MODEL", "false", ("all",)),
    ("mlflow", "HF_MLFLOW_LOG_ARTIFACTS", "false", _TRUE),
    ("wandb", "WANDB_LOG_MODEL", "false", ("checkpoint",)),
)


def check_uploads(args: Any, pushing: bool = False) -> None:
    """
    Refuses uploads of the proposal, or of what it wrote, other than to a private repository of its own.

    A configuration is looked at when it is made; its trainer looks again, since fields and environment may have changed.

    Args:
        args ([`NegativeTermConfig`]):
            Configuration of a run with a proposal.
        pushing (`bool`, *optional*, defaults to `False`):
            Whether the policy is being pushed, which is possible without `push_to_hub=True`.

    Raises:
        `ValueError`: If the fields about the proposal's repository contradict one another, or a tracker would take the
            proposal or its completions along.
    """
    if args.push_proposal_to_hub:
        if not args.push_to_hub:
            raise ValueError(
                "`push_proposal_to_hub=True` pushes the proposal whenever the policy is; set `push_to_hub=True`."
            )
        if args.hub_proposal_model_id == (args.hub_model_id or Path(args.output_dir).absolute().name):
            raise ValueError(
                f"`hub_proposal_model_id={args.hub_proposal_model_id!r}` is the policy's repository; name another, or "
                "leave it unset."
            )
    elif args.hub_proposal_model_id is not None:
        raise ValueError(
            f"`hub_proposal_model_id={args.hub_proposal_model_id!r}` has no effect; set `push_proposal_to_hub=True`."
        )
    report_to = [args.report_to] if isinstance(args.report_to, str) else list(args.report_to or [])  # once set by hand
    if "all" in report_to:
        from transformers.integrations import get_available_reporting_integrations  # imports seconds' worth of models

        report_to = get_available_reporting_integrations()
    for tracker, variable, default, uploading in _CHECKPOINT_UPLOADS:
        value = os.environ.get(variable, default)
        if tracker in report_to and value.lower() in uploading:
            raise ValueError(
                f"`report_to={args.report_to}` with {variable}={value} in the environment uploads whole checkpoints, "
                f"the proposal in them; set {variable}=false."
            )
    if "flyte" in report_to:
        raise ValueError("`report_to='flyte'` uploads whole checkpoints, the proposal in them; report elsewhere.")
    pushing |= args.push_to_hub
    published = pushing and not args.hub_private_repo and args.trackio_static_space_id is not False
    if "trackio" in report_to and args.log_completions and published and args.trackio_space_id is None:
        raise ValueError(
            "`report_to='trackio'` copies what it logged to a public Space when the policy is pushed, with "
            "`log_completions=True` the proposal's completions too; set `trackio_static_space_id=False`, or "
            "`hub_private_repo=True`."
        )
