"""
Prompts and other tables that users write, and what is refused of them.

Names are imported on first use, so that checks of configurations need no `datasets`.
"""

from typing import TYPE_CHECKING, Any


__all__ = ["drop_long_prompts", "load_prompts"]

if TYPE_CHECKING:
    from .loading import drop_long_prompts, load_prompts


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import loading

    return getattr(loading, name)


def __dir__() -> list[str]:
    return sorted(__all__)
