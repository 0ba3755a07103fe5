"""Defaults that depend on the run: the learning rate for a model's size, the reward below which an output is bad."""

import math

import numpy as np

from ._numbers import is_bad


# Parameters of a model, and its learning rate: in held-out worlds, and in the published settings 1 and 2
RATES = ((2.4e5, 6e-4), (1.35e8, 3e-5), (1.24e9, 3e-7))
ADAPTER_RATE = 5.0  # times that of all weights; chosen in held-out worlds (docs/held_out.md)
LOW = 0.02  # quantile of the rewards of the first samples, below which an output is bad
_NEAR = 0.005, 0.1  # a gap above this share of the samples takes precedence


def rounded(value: float, digits: int = 1) -> float:
    """Rounds to that many significant digits."""
    return float(f"{value:.{digits}g}")


def learning_rate_for(parameters: int, adapter: bool) -> float:
    """The learning rate of a model with that many parameters (an adapter's base included): [`RATES`], interpolated in logarithms."""
    sizes, rates = np.log([size for size, _ in RATES]), np.log([rate for _, rate in RATES])
    full = rounded(float(np.exp(np.interp(math.log(parameters), sizes, rates))))
    return rounded(ADAPTER_RATE * full, 2) if adapter else full


def bad_threshold_for(rewards: np.ndarray) -> float:
    """The reward below which an output is bad, from rewards of shape (n,), finite and not all equal. It is about the 2 % quantile, or the
    middle of a gap that separates the lowest 0.5 to 10 % of the samples. It is rounded to a tenth of the power of ten of the standard
    deviation, or less if that changed the share of bad samples by more than half. If no reward is below it, only the lowest is bad."""
    low = _gap(rewards)
    low = float(np.quantile(rewards, LOW)) if low is None else low
    share = is_bad(rewards, low).mean()
    if share == 0:
        ordered = np.unique(rewards)
        threshold = rounded(float(ordered[:2].mean()), 6)
        return threshold if ordered[0] < threshold <= ordered[1] else float(ordered[1])
    digits = 1 - math.floor(math.log10(rewards.std()))
    # One extreme reward makes the deviation large, and all others nearly equal
    while abs(is_bad(rewards, threshold := round(low, digits) + 0.0).mean() - share) > share / 2:  # + 0.0: no -0.0
        digits += 1
    return threshold


def _gap(rewards: np.ndarray) -> float | None:
    """The middle of the widest gap below which lie 0.5 to 10 % of the rewards (n,) ([`_NEAR`]), and at least 3; `None` if they are too few,
    or if an interquartile range of either side is as wide."""
    ordered = np.sort(rewards)
    first, last = max(3, math.ceil(_NEAR[0] * rewards.size)), math.floor(_NEAR[1] * rewards.size)
    gaps = np.diff(ordered[first - 1 : last + 1])  # below the first of them are `first` samples
    if not gaps.size:
        return None
    below = first + int(gaps.argmax())
    peaks = [np.subtract(*np.quantile(part, (0.75, 0.25))) for part in (ordered[:below], ordered[below:])]
    return float(ordered[below - 1 : below + 1].mean()) if gaps.max() > max(peaks) else None
