"""What the configurations of all trainers say about scoring completions."""

from dataclasses import dataclass, field
from typing import Literal

from ._fields import WholePrompts


@dataclass
class ScoringConfig(WholePrompts):
    r"""
    Parameters of scoring that all trainers here share; not a configuration by itself.

    Parameters:
        share_prompts (`str` or `bool`, *optional*, defaults to `"auto"`):
            Whether completions of a prompt are scored and trained on in common rows, so that the prompt is read once:
            wherever a check at set-up finds that the models take such rows (`"auto"`, with a warning if they do not), in any
            case (`True`, an error if they do not), or not (`False`). As many of them share a row as makes the pass cheapest.
        per_device_eval_batch_size (`int`, *optional*):
            Completions of one pass of evaluation on each device. If `None`, 8, rounded up to whole prompts: a multiple of
            `num_generations_eval`, or of `num_generations`.
    """

    share_prompts: Literal["auto", True, False, "true", "false"] = field(
        default="auto",
        metadata={
            "help": "Whether completions of a prompt are scored in common rows, which read it once: `auto` where a check at "
            "set-up finds that the models can, `True` or an error, or `False`."
        },
    )
