"""Rewards from models, servers and files, and reward transforms.

Names are imported on first use, so that `trl_repulse.math.objective` needs torch alone.
"""

from typing import TYPE_CHECKING

from .._lazy import lazy_names


_EXPORTS = {
    **dict.fromkeys(("ChatReward", "SequencePairReward", "ToxicityReward"), "classifiers"),
    "GuardReward": "guard",
    "RemoteReward": "remote",
    "RewardServer": "server",
    "load_reward_function": "functions",
}

__all__ = sorted(_EXPORTS)

if TYPE_CHECKING:
    from .classifiers import ChatReward, SequencePairReward, ToxicityReward  # noqa: F401
    from .functions import load_reward_function  # noqa: F401
    from .guard import GuardReward  # noqa: F401
    from .remote import RemoteReward  # noqa: F401
    from .server import RewardServer  # noqa: F401

__getattr__, __dir__ = lazy_names(__name__, _EXPORTS)
