"""Trainers: TRL's, with a proposal beside the policy."""

from .reinforce_trainer import ReinforceTrainer
from .repulse_trainer import RePULSeTrainer


__all__ = ["RePULSeTrainer", "ReinforceTrainer"]
