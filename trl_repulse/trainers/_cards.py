"""Model cards: what is added to TRL's for the policy, and the warning that goes with a proposal."""

from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from huggingface_hub import ModelCard


if TYPE_CHECKING:
    from ..configs import RewardConfig


_VERSIONS = "### Framework versions\n\n"
_SHOWN = (
    "learning_rate",
    "value_learning_rate",
    "beta",
    "alpha",
    "alpha_normalization",
    "target_dist_beta",
    "potential",
    "proposal_loss",
    "proposal_learning_rate",
    "num_generations",
    "num_proposal_generations",
    "logprob_reduction",
    "baseline",
    "gae_lambda",
    "gamma",
    "value_clip",
    "whiten_advantages",
    "reward_transform",
    "reward_transform_alpha",
    "reward_transform_beta",
    "reward_transform_threshold",
    "seed",
)

_PROPOSAL_CARD = """\
---
library_name: transformers
tags:
- trl
- trl-repulse
- proposal
- not-for-deployment
---

# Proposal: draws another model's worst outputs

> [!CAUTION]
> **Do not deploy, serve or publish this model.** It was trained to seek out the outputs on which a reward model is
> lowest: whatever the reward model is there to prevent, this model produces on purpose. It is a by-product of training
> a policy with RePULSe and has uses only there: to go on training, and to estimate how rare the policy's bad outputs
> have become. `trl-repulse` never uploads it with the policy.

- Policy it was trained beside: `{policy}`
- Target: policy · potential, `potential={potential}`, `target_dist_beta={beta}` (negative: low rewards are sought)
- trl-repulse: {version}
"""


def amend_model_card(path: Path, args: "RewardConfig") -> None:
    """
    Adds this package's version and the run's hyper-parameters to a model card that TRL wrote.

    Args:
        path (`Path`):
            The card.
        args ([`RewardConfig`]):
            Configuration of the run; fields it lacks are left out.
    """
    card = ModelCard.load(path)
    settings = [(name, getattr(args, name)) for name in _SHOWN if getattr(args, name, None) is not None]
    table = "".join(f"| `{name}` | {value} |\n" for name, value in settings)
    added = (
        "### Hyper-parameters\n\n`beta` is the KL coefficient.\n\n| argument | value |\n|---|---|\n"
        f"{table}\n{_VERSIONS}- TRL-RePULSe: {version('trl-repulse')}\n"
    )
    card.text = card.text.replace(_VERSIONS, added, 1)
    card.save(path)


def write_proposal_card(directory: Path, policy: str, potential: str, beta: float) -> None:
    """
    Writes the card that warns of a proposal into its folder.

    Args:
        directory (`Path`):
            Folder of the proposal.
        policy (`str`):
            Name of the policy it was trained beside.
        potential (`str`):
            The run's `potential`.
        beta (`float`):
            The run's `target_dist_beta`.
    """
    text = _PROPOSAL_CARD.format(policy=policy, potential=potential, beta=beta, version=version("trl-repulse"))
    (directory / "README.md").write_text(text, encoding="utf-8")
