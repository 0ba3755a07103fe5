"""Trainers: TRL's, with a second model beside the policy where the method has one."""

from .ppo_trainer import PPOTrainer
from .reinforce_trainer import ReinforceTrainer
from .repulse_grpo_trainer import RePULSeGRPOTrainer
from .repulse_ppo_trainer import RePULSePPOTrainer
from .repulse_trainer import RePULSeTrainer


__all__ = ["PPOTrainer", "RePULSeGRPOTrainer", "RePULSePPOTrainer", "RePULSeTrainer", "ReinforceTrainer"]
