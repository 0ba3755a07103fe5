"""Configurations, one file a trainer."""

from .engine_config import EngineConfig
from .negative_term_config import NegativeTermConfig
from .ppo_config import PPOConfig
from .reinforce_config import ReinforceConfig
from .repulse_config import RePULSeConfig
from .repulse_grpo_config import RePULSeGRPOConfig
from .repulse_ppo_config import RePULSePPOConfig
from .reward_config import RewardConfig
from .scoring_config import ScoringConfig


__all__ = [
    "EngineConfig",
    "NegativeTermConfig",
    "PPOConfig",
    "RePULSeConfig",
    "RePULSeGRPOConfig",
    "RePULSePPOConfig",
    "ReinforceConfig",
    "RewardConfig",
    "ScoringConfig",
]
