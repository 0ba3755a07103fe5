"""Values for what a user has not set: learning rate for a model's size, reward under which an output is bad."""

import math

import numpy as np


# Parameters of a model, and the learning rate it was trained with: held-out worlds, published settings 1 and 2
RATES = ((2.4e5, 6e-4), (1.35e8, 3e-5), (1.24e9, 3e-7))
ADAPTER_RATE = 5.0  # times that of all weights; chosen in held-out worlds (docs/held_out.md)
LOW = 0.02  # the quantile of the first samples' rewards under which an output is bad
_NEAR = 0.005, 0.1  # shares of the samples under a gap that is taken in its place


def rounded(value: float, digits: int = 1) -> float:
    """To so many digits that count."""
    return float(f"{value:.{digits}g}")


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
    full = rounded(float(np.exp(np.interp(math.log(parameters), sizes, rates))))
    return rounded(ADAPTER_RATE * full, 2) if adapter else full


def bad_threshold_for(rewards: np.ndarray) -> float:
    """
    Reward under which an output is bad: about the 2 % quantile, rounded to a tenth of the standard deviation's power of ten, or to more
    digits where that would change the share of bad ones by more than half. Where a gap divides the rewards into two peaks, the lower one of
    0.5 to 10 % of the samples, it is in the middle of the gap. If no reward is under it, as may be with few distinct ones, only the
    lowest is bad, however many samples have it.

    Args:
        rewards (`numpy.ndarray` of shape `(n,)`):
            Finite rewards of samples, at least two of them different.

    Returns:
        `float`
    """
    low = _gap(rewards)
    low = float(np.quantile(rewards, LOW)) if low is None else low
    share = (rewards < low).mean()
    if share == 0:
        ordered = np.unique(rewards)
        threshold = rounded(float(ordered[:2].mean()), 6)
        return threshold if ordered[0] < threshold <= ordered[1] else float(ordered[1])
    digits = 1 - math.floor(math.log10(rewards.std()))
    # One extreme reward makes the deviation large, and all others nearly equal
    while abs((rewards < (threshold := round(low, digits) + 0.0)).mean() - share) > share / 2:
        digits += 1
    return threshold


def _gap(rewards: np.ndarray) -> float | None:
    """The middle of the widest gap near the quantile, if it is wider than the middle half of the rewards on either side."""
    ordered = np.sort(rewards)
    first, last = max(3, math.ceil(_NEAR[0] * rewards.size)), math.floor(_NEAR[1] * rewards.size)
    gaps = np.diff(ordered[first - 1 : last + 1])  # under the first there are `first` samples
    if not gaps.size:
        return None
    below = first + int(gaps.argmax())
    peaks = [np.subtract(*np.quantile(part, (0.75, 0.25))) for part in (ordered[:below], ordered[below:])]
    return float(ordered[below - 1 : below + 1].mean()) if gaps.max() > max(peaks) else None
