"""A learning rate for a model's size: a rule of thumb."""

import math

import numpy as np


# Parameters of a model, and the learning rate it was trained with: held-out worlds, published settings 1 and 2
RATES = ((2.4e5, 6e-4), (1.35e8, 3e-5), (1.24e9, 3e-7))
ADAPTER_RATE = 10.0  # times that of all weights; was not measured


def learning_rate_for(parameters: int, adapter: bool) -> float:
    """
    Learning rate that the rule of thumb gives a model: [`RATES`], interpolated in logarithms, to one digit.

    Args:
        parameters (`int`):
            Parameters of the model, an adapter's base included.
        adapter (`bool`):
            Whether an adapter is trained in place of all weights.

    Returns:
        `float`
    """
    sizes, rates = np.log([size for size, _ in RATES]), np.log([rate for _, rate in RATES])
    full = float(f"{np.exp(np.interp(math.log(parameters), sizes, rates)):.1g}")
    return float(f"{ADAPTER_RATE * full:.1g}") if adapter else full
