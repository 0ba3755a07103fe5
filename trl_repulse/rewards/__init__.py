"""
Rewards from models, servers and files, and reward transforms.

Names are imported on first use, so that `trl_repulse.rewards.transforms` needs torch alone.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any


_EXPORTS = {
    "ChatReward": "classifiers",
    "GuardReward": "guard",
    "RemoteReward": "remote",
    "RewardServer": "server",
    "SequencePairReward": "classifiers",
    "ToxicityReward": "classifiers",
    "load_reward_function": "functions",
}

__all__ = sorted(_EXPORTS)

if TYPE_CHECKING:
    from .classifiers import ChatReward, SequencePairReward, ToxicityReward  # noqa: F401
    from .functions import load_reward_function  # noqa: F401
    from .guard import GuardReward  # noqa: F401
    from .remote import RemoteReward  # noqa: F401
    from .server import RewardServer  # noqa: F401


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_EXPORTS[name]}", __name__), name)


def __dir__() -> list[str]:
    return __all__
