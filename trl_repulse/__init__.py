"""RePULSe for TRL: find a language model's rarest, worst outputs, and make them rarer still."""

from importlib.metadata import version
from typing import TYPE_CHECKING

from ._lazy import lazy_names


__version__ = version("trl-repulse")

__all__ = [
    "PPOConfig",
    "PPOTrainer",
    "RePULSeConfig",
    "RePULSeGRPOConfig",
    "RePULSeGRPOTrainer",
    "RePULSePPOConfig",
    "RePULSePPOTrainer",
    "RePULSeTrainer",
    "ReinforceConfig",
    "ReinforceTrainer",
    "__version__",
]

if TYPE_CHECKING:
    from .configs import PPOConfig, ReinforceConfig, RePULSeConfig, RePULSeGRPOConfig, RePULSePPOConfig
    from .trainers import PPOTrainer, ReinforceTrainer, RePULSeGRPOTrainer, RePULSePPOTrainer, RePULSeTrainer


__getattr__, __dir__ = lazy_names(
    __name__, {name: "configs" if name.endswith("Config") else "trainers" for name in __all__}
)
