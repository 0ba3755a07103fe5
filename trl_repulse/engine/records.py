"""What a run publishes: model cards and the proposal's own repository on the Hub; and the negative data of earlier runs."""

import itertools
import json
import math
import re
import textwrap
from collections.abc import Sized
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

from accelerate.logging import get_logger
from accelerate.utils import is_peft_model
from huggingface_hub import EvalResult, HfApi, ModelCard

from .._numbers import with_unit
from ..configs import NegativeTermConfig
from .logs import NEGATIVES, PROPOSAL_FOLDER


logger = get_logger(__name__)


EARLIER_NEGATIVES = "negatives-*.jsonl"  # of earlier runs in the same folder


def set_negatives_aside(output_dir: str) -> None:
    """Renames negative data of an earlier run, with a warning; for the main process alone."""
    path = Path(output_dir) / NEGATIVES
    if not path.is_file() or not path.stat().st_size:
        return
    numbered = (path.with_stem(f"{path.stem}-{number}") for number in itertools.count(1))
    aside = next(candidate for candidate in numbered if not candidate.exists())
    path.rename(aside)
    logger.warning(
        "%s is of an earlier run and is now %s: this run writes its own. To resume the earlier run, first move it back.",
        *(path, aside),
    )


# Cited in the model cards of trainers with a negative term, and of its baseline
REPULSE_PAPER = {
    "title": "Reducing the Probability of Undesirable Outputs in Language Models Using Probabilistic Inference",
    "id": "2510.21184",
    # docstyle-ignore
    "citation": textwrap.dedent("""\
        @inproceedings{zhao2025reducing,
            title     = {{Reducing the Probability of Undesirable Outputs in Language Models Using Probabilistic Inference}},
            author    = {Stephen Zhao and Aidan Li and Rob Brekelmans and Roger Grosse},
            year      = 2025,
            eprint    = {arXiv:2510.21184},
            booktitle = {Advances in Neural Information Processing Systems 38: Annual Conference on Neural Information Processing Systems 2025, NeurIPS 2025},
        }"""),
}

_VERSIONS = "### Framework versions\n\n"
_NO_BASE = "[None](https://huggingface.co/None)"  # TRL's base model for a policy that started from a local folder
_QUESTION = re.compile(r'question = ".*"\n')  # TRL's example, for models that chat
_SHOWN = """
    learning_rate lr_scheduler_type per_device_train_batch_size gradient_accumulation_steps max_completion_length
    value_learning_rate beta bad_reward_threshold alpha alpha_normalization target_dist_beta potential target_class reward_cap proposal
    proposal_temperature proposal_loss proposal_learning_rate num_generations num_proposal_generations logprob_reduction baseline
    normalize_advantages gae_lambda gamma value_clip whiten_advantages reward_clip_range prefix_reward_steps
    reward_transform reward_transform_alpha reward_transform_beta reward_transform_threshold seed
""".split()
_OF_NEGATIVE_TERM = {field.name for field in fields(NegativeTermConfig)} - {"alpha", "bad_reward_threshold"}

_LIMITS = """\
The rewards alone said which outputs are bad: what they do not see was not made rarer. Bad outputs can be rarer and still occur,
above all on prompts unlike those of the training."""

_BY_PROPOSAL = """\
A second model, the proposal, sought the outputs of this one that its reward is lowest on, for this one to make them rarer. The proposal \
is not part of this repository.

"""

_PROPOSAL_CARD = """\
---
library_name: {library}
{base}tags:
- trl
- trl-repulse
- proposal
- not-for-deployment
- not-for-all-audiences
---

# Proposal: draws another model's worst outputs

> [!CAUTION]
> **Do not deploy, serve or publish this model.** It was trained to seek out the outputs on which a reward model is
> lowest: whatever the reward model is there to prevent, this model produces on purpose. It is a by-product of training
> a policy with RePULSe and has uses only there: to go on training, and to estimate how rare the policy's bad outputs
> have become. `trl-repulse` never uploads it with the policy; if this is a repository, keep it private.

{model}- Policy it was trained beside: `{policy}`
- Target: policy · potential, `potential={potential}`, {target}
- Limits: it knows bad outputs by the reward alone, finds some kinds of them, and may miss others. What it draws says nothing of how
  often the policy does, unless it is weighed by importance.
- trl-repulse: {version}
"""


def amend_model_card(trainer: Any) -> None:
    """Adds the run's data, settings and measurements to the model card that TRL wrote, and PEFT to an adapter's metadata."""
    args, path = trainer.args, Path(trainer.args.output_dir) / "README.md"
    card = ModelCard.load(path)
    card.data.pipeline_tag = "text-generation"
    if is_peft_model(trainer.model):
        card.data.library_name = "peft"
    card.data.model_name = card.data.model_name or path.parent.name  # results need one
    dataset = card.data.datasets or "prompts"
    measured = {name: value for name, value in (trainer.measured or {}).items() if value is not None}
    intervals = {name: {side: measured.get(f"{name}_{side}") for side in ("low", "high")} for name in measured}
    intervals = {name: bounds for name, bounds in intervals.items() if None not in bounds.values()}
    bounds = {f"{name}_{side}" for name in intervals for side in ("low", "high")}
    card.data.eval_results = [
        EvalResult(
            task_type="text-generation",
            dataset_type=dataset,
            dataset_name=dataset,
            metric_type=name,
            metric_name=with_unit(name),
            metric_value=float(value),  # a number of NumPy would be written as an object
            metric_args={"confidence": 0.95} | intervals[name] if name in intervals else None,
        )
        for name, value in measured.items()
        if math.isfinite(value) and name not in bounds
    ] or None
    added = _BY_PROPOSAL if getattr(args, "has_proposal", False) else ""
    if trainer.tail_report is not None:
        added += f"### Measured\n\n{trainer.tail_report}\n\n"
    added += f"### Model\n\n{_of_model(trainer.model.config._name_or_path, path.parent)}\n"
    added += f"### Data\n\n- Rewards: {', '.join(f'`{name}`' for name in trainer.reward_func_names)}\n"
    if isinstance(trainer.train_dataset, Sized):
        source = "" if dataset == "prompts" else f" of `{dataset}`"
        added += f"- Rows of prompts: {len(trainer.train_dataset)}{source}\n"
    added += f"- Updates: {trainer.state.global_step}\n\n"
    added += "### Hyper-parameters\n\n`beta` is the KL coefficient.\n\n| argument | value |\n|---|---|\n"
    settings = {name: getattr(args, name) for name in _SHOWN if _has_effect(args, name)}
    settings["mixed_precision"] = trainer.accelerator.mixed_precision
    if trainer.bad_reward_threshold is not None:
        settings["bad_reward_threshold"] = trainer.bad_reward_threshold
    added += "".join(f"| `{name}` | {getattr(value, 'value', value)} |\n" for name, value in settings.items())
    added += f"\n### Limits\n\n{_LIMITS}\n\n{_VERSIONS}- TRL-RePULSe: {version('trl-repulse')}\n"
    card.text = card.text.replace(_VERSIONS, added, 1).replace(_NO_BASE, "a local model", 1)
    card.text = card.text.replace('model="None"', f'model="{path.parent.name}"', 1)
    if trainer.processing_class.chat_template is None:
        card.text = _QUESTION.sub('prompt = "The weather is"\n', card.text, 1)
        card.text = card.text.replace('generator([{"role": "user", "content": question}],', "generator(prompt,", 1)
    card.save(path)


def _of_model(base: str, folder: Path) -> str:
    """Lines on a model in a folder: its base, and type and rank of its adapter."""
    name = Path(base).name if Path(base).is_dir() else base
    lines, adapter = f"- Base model: `{name or 'not named'}`\n", folder / "adapter_config.json"
    if adapter.is_file():
        config = json.loads(adapter.read_text(encoding="utf-8"))
        rank = f", rank {config['r']}" if config.get("r") is not None else ""
        lines += f"- Adapter: {config['peft_type']}{rank}\n"
    return lines


def _has_effect(args: Any, name: str) -> bool:
    """Whether a setting is set and has an effect."""
    if getattr(args, name, None) is None:
        return False
    if name.startswith("reward_transform_") and args.reward_transform is None:
        return False
    if getattr(args, "alpha", 0) == 0:
        return name != "alpha" and name not in _OF_NEGATIVE_TERM
    return {
        "target_dist_beta": args.potential != "indicator",
        "target_class": args.potential == "class",
        "proposal_temperature": args.draws_hot,
        "proposal_loss": args.has_proposal,
        "proposal_learning_rate": args.has_proposal,
        "num_proposal_generations": args.draws_twice,
    }.get(name, True)


def write_proposal_card(directory: Path, policy: str, started_from: str, args: Any) -> None:
    """Writes a proposal's card, with a warning, into its folder. `policy` names its policy, and `started_from` its base model."""
    name, meaning = {
        "tilted": ("target_dist_beta", "negative: low rewards are sought"),
        "indicator": ("bad_reward_threshold", "rewards under it are sought"),
        "class": ("target_class", "that class is sought"),
    }[args.potential]
    text = _PROPOSAL_CARD.format(
        library="peft" if (directory / "adapter_config.json").is_file() else "transformers",
        model=_of_model(started_from, directory),
        base=f"base_model: {started_from}\n" if started_from and not Path(started_from).is_dir() else "",
        policy=policy,
        potential=args.potential,
        target=f"`{name}={getattr(args, name)}` ({meaning})",
        version=version("trl-repulse"),
    )
    (directory / "README.md").write_text(text, encoding="utf-8")


def make_proposal_repository(args: Any, policy: str, token: str | None) -> str:
    """
    Makes the private repository of a proposal on the Hub and returns its id; `policy` is the policy's.

    Raises:
        `ValueError`: If it is the policy's repository, or exists and is not private.
    """
    api = _proposal_api(args, token)
    name = args.hub_proposal_model_id or f"{policy}-proposal"
    repository = api.create_repo(name, private=True, exist_ok=True).repo_id
    if repository.lower() == policy.lower():
        raise ValueError(
            f"`hub_proposal_model_id={name!r}` is the policy's repository; name another, or leave it unset."
        )
    _require_private(api, repository)
    return repository


def upload_proposal(args: Any, repository: str, token: str | None, commit_message: str | None) -> None:
    """Uploads the saved proposal to its repository, which may have been made public since training began: then a `ValueError`."""
    api = _proposal_api(args, token)
    _require_private(api, repository)
    folder = Path(args.output_dir) / PROPOSAL_FOLDER
    api.upload_folder(repo_id=repository, folder_path=folder, commit_message=commit_message)


def _proposal_api(args: Any, token: str | None) -> HfApi:
    token = args.hub_token if token is None else token
    return HfApi(token=token, library_name="trl-repulse", library_version=version("trl-repulse"))


def _require_private(api: HfApi, repository: str) -> None:
    if api.repo_info(repository).private is not True:
        raise ValueError(
            f"The repository {repository} is not private, and a proposal is not for the public: make "
            "it private, or choose another as `hub_proposal_model_id`. Nothing of the proposal was uploaded."
        )
