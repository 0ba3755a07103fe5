"""What ends an attack."""

import torch


class GCGError(RuntimeError):
    """An attack that cannot go on: no candidate survives the round trip, or a loss is not finite."""


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
