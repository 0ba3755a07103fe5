"""RePULSe for TRL: find a language model's rarest, worst outputs with a learned proposal, and make them rarer."""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any


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


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "configs" if name.endswith("Config") else "trainers"
    return getattr(import_module(f".{module}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
