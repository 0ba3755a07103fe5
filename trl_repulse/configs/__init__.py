"""Configurations, one file a trainer."""

from .engine_config import EngineConfig
from .ppo_config import PPOConfig
from .reinforce_config import ReinforceConfig
from .repulse_config import RePULSeConfig
from .reward_config import RewardConfig
from .scoring_config import ScoringConfig


__all__ = ["EngineConfig", "PPOConfig", "RePULSeConfig", "ReinforceConfig", "RewardConfig", "ScoringConfig"]
