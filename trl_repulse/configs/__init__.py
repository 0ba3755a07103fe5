"""Configurations of the trainers."""

from .ppo_config import PPOConfig
from .reinforce_config import ReinforceConfig
from .repulse_config import NegativeTermConfig, RePULSeConfig, RePULSeGRPOConfig, RePULSePPOConfig
from .shared_config import SharedConfig


__all__ = [
    "NegativeTermConfig",
    "PPOConfig",
    "RePULSeConfig",
    "RePULSeGRPOConfig",
    "RePULSePPOConfig",
    "ReinforceConfig",
    "SharedConfig",
]
