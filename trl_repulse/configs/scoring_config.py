"""Options of all trainers for scoring completions."""

from dataclasses import dataclass, field
from typing import Literal

from ._fields import WholePrompts


@dataclass
class ScoringConfig(WholePrompts):
    r"""
    Options for scoring completions that all trainers share; not a configuration by itself.

    Parameters:
        share_prompts (`str` or `bool`, *optional*, defaults to `"auto"`):
            Whether completions of a prompt share rows in scoring and training, so that the prompt is read once.
            `"auto"`: if a check at set-up finds that the models support it, else with a warning not. `True`: an error
            if they do not. `False`: never. The number of completions in a row is chosen to make the pass cheapest.
        per_device_eval_batch_size (`int`, *optional*):
            Completions of one evaluation pass on each device. If `None`, 8, rounded up to whole prompts: a multiple of
            `num_generations_eval`, or of `num_generations`.
    """

    share_prompts: Literal["auto", True, False, "true", "false"] = field(
        default="auto",
        metadata={
            "help": "Whether completions of a prompt are scored in common rows, which read it once: `auto` where a check at "
            "set-up finds that the models can, `True` or an error, or `False`."
        },
    )
