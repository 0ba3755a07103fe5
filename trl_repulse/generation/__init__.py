"""Sampling from several named models: text in, text out, with or without a trainer."""

from typing import TYPE_CHECKING

from .._lazy import lazy_names


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

__getattr__, __dir__ = lazy_names(__name__, _EXPORTS)
