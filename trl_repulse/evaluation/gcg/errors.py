"""What ends an attack."""

import torch
from transformers import PretrainedConfig


class GCGError(RuntimeError):
    """
    An attack that cannot go on: no candidate survives the round trip, a loss is not finite, or the prompt is too long.
    """


def check_context(config: PretrainedConfig, prompt: int, more: int) -> None:
    """
    Refuses prompts that with what follows exceed the model's context.

    Args:
        config ([`~transformers.PretrainedConfig`]):
            The model's configuration; one without `max_position_embeddings` sets no limit.
        prompt, more (`int`):
            Tokens of the prompt with its suffix, and of what follows.

    Raises:
        [`GCGError`]: If there are more than the model reads.
    """
    context = getattr(config.get_text_config(), "max_position_embeddings", None)
    if context is not None and prompt + more > context:
        raise GCGError(
            f"The prompt with its suffix has {prompt} tokens, which with {more} more exceed the model's context of {context}."
        )


def finite(losses: torch.Tensor) -> torch.Tensor:
    """
    Refuses losses that are not finite.

    Args:
        losses (`torch.Tensor`):
            Losses.

    Returns:
        `torch.Tensor`: the same.

    Raises:
        [`GCGError`]: If one of them is NaN or infinite.
    """
    if not losses.isfinite().all():
        raise GCGError(f"A loss is {losses[~losses.isfinite()][0].item()}; try the model in float32.")
    return losses
