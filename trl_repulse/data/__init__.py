"""Prompts and other tables that users write, and what is refused of them.

Names are imported on first use, so that checks of configurations need no `datasets`.
"""

from typing import TYPE_CHECKING

from .._lazy import lazy_names


__all__ = ["drop_long_prompts", "load_prompts"]

if TYPE_CHECKING:
    from .loading import drop_long_prompts, load_prompts

__getattr__, __dir__ = lazy_names(__name__, dict.fromkeys(__all__, "loading"))
