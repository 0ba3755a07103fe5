"""Sampling from several named models: text in, text out, with or without a trainer."""

from importlib import import_module
from typing import TYPE_CHECKING, Any


_EXPORTS = {
    "Completion": "completions",
    "TransformersGenerator": "transformers_generator",
    "VLLMGenerator": "vllm_generator",
}

__all__ = ["Completion", "TransformersGenerator", "VLLMGenerator"]

if TYPE_CHECKING:
    from .completions import Completion
    from .transformers_generator import TransformersGenerator
    from .vllm_generator import VLLMGenerator


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_EXPORTS[name]}", __name__), name)
