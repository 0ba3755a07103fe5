"""What the configurations of all trainers say about scoring completions."""

from dataclasses import dataclass, field
from typing import Literal


@dataclass
class ScoringConfig:
    r"""
    Parameters of scoring that all trainers here share; not a configuration by itself.

    Parameters:
        share_prompts (`str` or `bool`, *optional*, defaults to `"auto"`):
            Whether completions of a prompt are scored and trained on in common rows, so that the prompt is read once:
            wherever a check at set-up finds that the models take such rows (`"auto"`, with a warning if they do not), in any
            case (`True`, an error if they do not), or not (`False`). As many of them share a row as makes the pass cheapest.
    """

    share_prompts: Literal["auto", True, False, "true", "false"] = field(
        default="auto",
        metadata={
            "help": "Whether completions of a prompt are scored in common rows, which read it once: `auto` where a check at "
            "set-up finds that the models can, `True` or an error, or `False`."
        },
    )
