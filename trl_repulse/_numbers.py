"""Rewards compared with a threshold, and numbers as reports print them."""

import re
from ctypes import c_float
from typing import Any


# Metric of training or mean of a column of samples -> its unit
_UNITS = dict.fromkeys(("kl", "mean kl", "mean entropy", "mean log_prob"), "nats per completion")
_UNITS |= {"entropy": "nats per token", "mean length": "tokens"}
# Metric -> how it is printed
_WORDS = {
    "reward": "reward {}",
    "bad_fraction": "bad {} %",
    "kl": "KL {} nats/completion",
    "entropy": "entropy {} nats/token",
    "completions/mean_length": "length {} tokens",
    "proposal/reward": "proposal reward {}",
    "proposal/bad_fraction": "proposal bad {} %",
    "proposal/ess": "ESS {} samples",
    "negative/ess": "ESS {} samples",
    "value/explained_variance": "explained variance {}",
    "step_time": "{} s/update",
}


def is_bad(rewards: Any, threshold: float) -> Any:
    """Whether rewards (an array or a number) are under a threshold; false for NaN. All code that counts bad outputs calls this, or
    [`~trl_repulse.math.objective.is_below`] for tensors. Both compare in float32, in which trainers keep rewards: a reward of 0.7 is not
    under 0.7, however it was stored."""
    rewards = c_float(rewards).value if isinstance(rewards, float | int) else rewards.astype("float32")
    return rewards < c_float(threshold).value


def plain(value: float, digits: int = 4) -> str:
    """A number with that many significant digits, or with all digits before the point: 0.00012, 12,346, 1.2e-5."""
    rounded = float(f"{value:.{digits}g}")
    if 10**digits <= abs(rounded) < 1e15:
        return f"{value:,.0f}"
    return re.sub(r"e([+-])0", r"e\1", f"{rounded:.{digits}g}")


def percent(share: float, digits: int = 3) -> str:
    """A share from -1 to 1 in percent, without the percent sign; <0.001 if it is tiny."""
    value = 100 * share
    if 0 < abs(value) < 0.001:
        return "<0.001" if value > 0 else ">-0.001"
    return f"{value:.{digits}g}"


def kl_per_completion(logs: dict[str, Any], prefix: str = "") -> float | None:
    """KL to the reference in nats per completion, the unit of all reports, from the logged `kl` in nats per token."""
    kl, length = logs.get(f"{prefix}kl"), logs.get(f"{prefix}completions/mean_length")
    return None if kl is None or length is None else kl * length


def with_unit(name: str) -> str:
    """A metric's name, with its unit if it needs one."""
    unit = _UNITS.get(name.removeprefix("eval_"))
    return f"{name}, {unit}" if unit else name


def format_logs(logs: dict[str, Any], update: int, updates: int) -> str:
    """The main metrics of a log of training or of an evaluation, in a line. Empty if it has no reward, as the last log."""
    prefixes = [name.removesuffix("reward") for name in logs if re.fullmatch(r"(eval_(.+_)?)?reward", name)]
    if not prefixes:
        return ""
    prefix = min(prefixes, key=len)  # a function may log a metric that ends in `_reward`
    values = {name: logs.get(prefix + name) for name in _WORDS} | {"kl": kl_per_completion(logs, prefix)}
    parts = [
        _WORDS[name].format(percent(value) if name.endswith("bad_fraction") else plain(value, 3))
        for name, value in values.items()
        if value is not None
    ]
    evaluated = prefix.removeprefix("eval_").removesuffix("_")
    where = f"evaluation{f' of {evaluated}' * bool(evaluated)} at " if prefix else ""
    return " | ".join([f"{where}update {update}/{updates}", *parts])
