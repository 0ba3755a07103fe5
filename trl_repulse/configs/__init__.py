"""Configurations, one file a trainer."""

from .reinforce_config import ReinforceConfig
from .repulse_config import RePULSeConfig


__all__ = ["RePULSeConfig", "ReinforceConfig"]
