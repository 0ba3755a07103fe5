"""
What `trl-repulse suggest` concludes from a model's samples: settings with a reason each, estimates, warnings.

Nothing here loads or draws anything. Each reason says whether it is a measurement of these samples, was measured elsewhere
(and where), or is a rule of thumb.

Legend: P prompts, N completions of a prompt.
"""

import math
import textwrap
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import yaml

from .._rules_of_thumb import LOW, bad_threshold_for, learning_rate_for, rounded
from ..evaluation.tails import prob_below


# What was measured in the three held-out worlds (docs/held_out.md): the spread of the initial policy's reward within a prompt,
# and the settings that belong to it
SPREAD, KL_COEFFICIENT, ALPHA = 1.5, 0.2, 1.0
TARGET_NATS = 35.0  # target_dist_beta times the range of the reward, as in the embedded world's settings
UPDATES = 800  # of the published setting 1; 640 in the held-out worlds
WARM_UP = 20  # updates, in the held-out worlds
HIGH = 0.98  # quantile


@dataclass(frozen=True)
class DrawnSamples:
    """
    Completions of the initial policy.

    Args:
        rewards (`numpy.ndarray` of shape `(P, N)`):
            Rewards, NaN where there is none.
        lengths (`numpy.ndarray` of shape `(P, N)`):
            Tokens.
        ended (`numpy.ndarray` of shape `(P, N)`):
            Whether a completion ended by itself.
        texts (`list[str]`):
            The P · N completions, prompt by prompt.
        seconds (`float`):
            Time to draw one.
    """

    rewards: np.ndarray
    lengths: np.ndarray
    ended: np.ndarray
    texts: list[str]
    seconds: float


@dataclass(frozen=True)
class Machine:
    """
    What training will need and have.

    Args:
        parameters, adapter (`int`):
            Parameters of the model, and of a LoRA adapter of rank 16 on all its linear layers.
        layers, width, inner, cache (`int`):
            The model's layers, hidden size, size of its MLP, and numbers that a layer keeps of a token for later ones.
        reward_bytes (`int`):
            Memory of the reward model; 0 if it is not in this process.
        number (`int`):
            Bytes of an activation: 2 in bf16, on an accelerator, else 4.
        memory (`float`, *optional*):
            Memory of the device in bytes, if it can be found out.
        device (`str`):
            Its type.
    """

    parameters: int
    adapter: int
    layers: int
    width: int
    inner: int
    cache: int
    reward_bytes: int
    number: int
    memory: float | None
    device: str


@dataclass(frozen=True)
class Measured:
    """
    All that was measured.

    Args:
        own ([`DrawnSamples`]):
            The policy's samples.
        empty_rewards (`numpy.ndarray`, *optional*):
            Rewards of empty completions; `None` where the reward failed.
        num_prompts (`int`):
            Prompts there are, of which samples may cover a part.
        prompt_tokens (`int`):
            Of the longest prompt that was sampled.
        reward_seconds, score_seconds (`float`):
            Time to reward a completion, and for a pass of the policy over it, without gradient.
        machine ([`Machine`]):
            The model and the device.
    """

    own: DrawnSamples
    empty_rewards: np.ndarray | None
    num_prompts: int
    prompt_tokens: int
    reward_seconds: float
    score_seconds: float
    machine: Machine


@dataclass
class Suggestion:
    """Settings by name with the reason of each; notes by what they are about; and what to look at before training."""

    values: dict[str, Any] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    def set(self, name: str, value: Any, reason: str) -> None:
        """Adds a setting."""
        self.values[name], self.reasons[name] = value, reason

    def to_text(self) -> str:
        """A line for each setting, note and warning."""
        width = max(map(len, self.reasons))
        lines = [f"{name:<{width}}  {_plain(self.values[name]):<10}  {self.reasons[name]}" for name in self.reasons]
        return "\n".join([*lines, "", *self._remarks()])

    def to_yaml(self, head: str, more: dict[str, Any]) -> str:
        """The file of a training command: `more` settings without a reason first, then each with its reason above it."""
        lines = [f"# {line}" for line in head.splitlines()] + [""]
        lines += [yaml.safe_dump({name: value}, allow_unicode=True).rstrip() for name, value in more.items()]
        for name, value in self.values.items():
            lines += ["", *_comment(self.reasons[name]), yaml.safe_dump({name: value}).rstrip()]
        for remark in self._remarks():
            lines += ["", *_comment(remark)]
        return "\n".join(lines) + "\n"

    def _remarks(self) -> list[str]:
        notes = [f"{name}: {text}" for name, text in self.notes.items()]
        return [*notes, *(f"WARNING: {text}" for text in self.warnings)]


def suggest_settings(
    measured: Measured,
    *,
    max_completion_length: int,
    max_steps: int = UPDATES,
    use_peft: bool = False,
    bad_reward_threshold: float | None = None,
) -> Suggestion:
    """
    Settings for `trl-repulse repulse`, from samples of the initial policy.

    Args:
        measured ([`Measured`]):
            The samples.
        max_completion_length (`int`):
            Tokens that a completion could have.
        max_steps (`int`, *optional*, defaults to `800`):
            Updates of the run.
        use_peft (`bool`, *optional*, defaults to `False`):
            Whether an adapter is trained, not all weights.
        bad_reward_threshold (`float`, *optional*):
            The user's own.

    Returns:
        [`Suggestion`]

    Raises:
        `ValueError`: If all samples have the same reward, or fewer than two have any.
    """
    found, own = Suggestion(), measured.own
    rewards = own.rewards[np.isfinite(own.rewards)]
    if rewards.size < 2 or rewards.min() == rewards.max():
        what = f"the reward {rewards[0]:g}" if rewards.size else "no reward"
        raise ValueError(
            f"All {own.rewards.size} samples have {what}, so that there is nothing to learn; check the reward function, or "
            "give other prompts."
        )
    threshold = _threshold(found, own.rewards.size, rewards, bad_reward_threshold)
    _reward_warnings(found, measured, rewards, threshold)
    share = float((rewards < threshold).mean())
    found.set(
        "proposal",
        "hot_policy",
        "The default: there is no second model. Extra samples are drawn from the policy as it is, at a higher temperature, or with the "
        "logits of tokens raised that lower the reward, whichever finds bad outputs most often as training goes on.",
    )
    _length(found, own, max_completion_length)
    prompts = _counts(found, measured, share)
    _weights(found, own.rewards, rewards, threshold)
    _learning_rate(found, measured.machine.parameters, use_peft)
    _batch(found, measured, prompts, use_peft)
    reason = "Rule of thumb: as many updates as the published setting 1; the held-out worlds had 160 and 640."
    found.set("max_steps", max_steps, reason if max_steps == UPDATES else "The value is yours.")
    reason = "Rule of thumb: as in the held-out worlds, and no more than an eighth of the updates."
    found.set("warmup_steps", min(WARM_UP, max_steps // 8), reason)
    found.notes["other methods"] = (
        "`repulse-ppo` takes this file too. `repulse-grpo` takes it with `--scale_rewards none`. By default it divides rewards by their "
        "standard deviation within a prompt, and `alpha` and `beta`, which are in units of the reward, would no longer fit."
    )
    found.notes["time"] = _hours(measured, prompts * found.values["num_generations"], max_steps, share)
    return found


def _reward_warnings(found: Suggestion, measured: Measured, rewards: np.ndarray, threshold: float) -> None:
    own, (low, middle) = measured.own, np.quantile(rewards, (LOW, 0.5))
    missing = own.rewards.size - rewards.size
    if missing:
        found.warnings.append(
            f"{missing} of {own.rewards.size} samples have no reward. Training leaves such samples out; check that this is meant."
        )
    within = _spread_within(own.rewards)
    if within is not None and within**2 < 0.01 * rewards.var():
        found.warnings.append(
            "The reward hardly differs between completions of one prompt, and training compares those alone: there is little to "
            "learn from it."
        )
    floor = float((rewards == rewards.min()).mean())
    quarter = float(np.quantile(rewards, 0.25))
    if floor >= 0.05:
        found.warnings.append(
            f"{floor:.0%} of the samples share the lowest reward ({rewards.min():g}): the reward has no low tail, and what is worse "
            "than bad cannot be told from what is bad."
        )
    elif middle - low < 2 * (middle - quarter):  # 3.0 times for a normal distribution, 1.9 for an even one
        found.warnings.append(
            f"The reward has no low tail: the worst 2 % of the samples ({low:.3g}) are hardly farther from the median ({middle:.3g}) "
            f"than the worst quarter ({quarter:.3g}). RePULSe is made for outputs that are rare and much worse."
        )
    groups = {"An empty completion": measured.empty_rewards}
    cut = own.rewards[~own.ended]
    if 10 <= cut.size < own.rewards.size:
        groups["A completion that was cut"] = cut
    for name, values in groups.items():
        if values is None:
            found.warnings.append(
                "The reward function fails on an empty completion, which a policy may draw at any time."
            )
            continue
        values = values[np.isfinite(values)]
        if not values.size:
            continue
        value = float(np.median(values))
        rank = float((rewards < value).mean() + (rewards == value).mean() / 2)
        if value < threshold:
            found.warnings.append(
                f"{name} gets {value:.3g} and counts as bad: the negative term will find such completions, and be "
                "spent on them. If they are not what you call bad, give them an ordinary reward."
            )
        elif rank <= 0.05:
            found.warnings.append(
                f"{name} gets {value:.3g}, among the lowest rewards there are, though it does not count as bad: training will avoid such "
                "completions. Check that this is meant."
            )
        if rank >= 0.95:
            found.warnings.append(
                f"{name} gets {value:.3g}, among the highest rewards there are: training will make such completions common. Give "
                "them a low reward."
            )


def _threshold(found: Suggestion, drawn: int, rewards: np.ndarray, given: float | None) -> float:
    threshold = bad_threshold_for(rewards) if given is None else given
    below = prob_below(rewards[None], threshold)
    advice = "Rule of thumb: about the 2 % quantile, or a gap near it. Read the lowest samples, and move it to what you call bad."
    found.set(
        "bad_reward_threshold",
        threshold,
        f"Measured: {below.samples:.0f} of {drawn} samples lie under it ({below.value:.1%}; 95 % interval {below.low:.1%} to "
        f"{below.high:.1%}). {advice if given is None else 'The value is yours.'}",
    )
    if below.value > 0.1:
        found.warnings.append(
            f"{below.value:.0%} of the samples are bad. REINFORCE learns from outputs that common; RePULSe is for the rare ones "
            "that it leaves. Train with `--alpha 0` first, or lower the threshold."
        )
    return threshold


def _length(found: Suggestion, own: DrawnSamples, limit: int) -> None:
    cut = 1 - float(own.ended.mean())
    if cut > 0.05:
        reason = f"Measured: {cut:.0%} of the samples were cut at this length, which they were drawn with."
        found.set("max_completion_length", limit, reason)
        found.warnings.append(
            f"{cut:.0%} of the samples did not end within {limit} tokens, so that their rewards are of text that breaks off. Run this "
            "again with a larger `--max_completion_length`, or ask for shorter answers in the prompts."
        )
        return
    high = float(np.quantile(own.lengths[own.ended], HIGH))
    reason = f"Measured: 98 % of the samples that ended have at most {high:.0f} tokens. Rule of thumb: a tenth more, in eights."
    found.set("max_completion_length", min(limit, 8 * math.ceil(1.1 * high / 8)), reason)


def _counts(found: Suggestion, measured: Measured, share: float) -> int:
    """Sets N, and returns the prompts of an update."""
    completions = 5 if measured.num_prompts >= 10 else math.ceil(50 / measured.num_prompts)
    reason = "As in the held-out worlds and the published setting 1. As many extra samples come on top."
    if completions != 5:
        reason = f"Rule of thumb: about 50 completions in an update, of your {measured.num_prompts} prompts. As many extra samples come on top."
    found.set("num_generations", completions, reason)
    each = 2 * completions * share  # bad samples of a prompt, if extra samples find no more than the policy
    prompts = next((count for count in (10, 20, 30, 40) if count * each >= 10), 50)
    prompts = min(prompts, measured.num_prompts)
    found.set(
        "train_batch_size",
        prompts * completions,
        f"Completions of an update: {completions} of each of {prompts} prompts. At first about {prompts * each:.0f} samples of an update "
        "or more will be bad. Rule of thumb: 10, with 10 prompts (held-out worlds) to 50 (published setting 1).",
    )
    return prompts


def _weights(found: Suggestion, drawn: np.ndarray, rewards: np.ndarray, threshold: float) -> None:
    within = _spread_within(drawn)
    spread = within or float(rewards.std())
    bad, high = rewards[rewards < threshold], np.quantile(rewards, HIGH)
    low = np.median(bad) if bad.size else rewards.min()
    if low == high:
        high = rewards.max()
    found.set(
        "beta",
        rounded(KL_COEFFICIENT * spread / SPREAD),
        f"KL penalty. Measured: the reward's standard deviation {'within a prompt' if within else 'over all samples'} is {spread:.3g}. "
        f"Rule of thumb: {KL_COEFFICIENT / SPREAD:.2f} of it, as in the held-out worlds ({KL_COEFFICIENT:g} at {SPREAD:g}). Twice as much "
        "stays nearer to the initial policy.",
    )
    found.set(
        "alpha",
        rounded(ALPHA * spread / SPREAD),
        f"Weight of the negative term. Rule of thumb: {ALPHA / SPREAD:.1f} of that standard deviation, as in the held-out worlds "
        f"({ALPHA:g} at {SPREAD:g}). With Adam a reward in other units makes the same updates, if `beta` and `alpha` are in these units.",
    )
    found.notes["learned proposal"] = (
        f"with `proposal: learned` set `target_dist_beta: {-rounded(TARGET_NATS / (high - low), 2):g}`. Rule of thumb: "
        f"{TARGET_NATS:g} nats from a bad output to a good one ({low:.3g} to {high:.3g}: the median of the bad samples and the 98 % quantile, "
        f"measured), as in the embedded world. The target then prefers bad outputs down to a probability of about e^-{TARGET_NATS:g}."
    )


def _learning_rate(found: Suggestion, parameters: int, use_peft: bool) -> None:
    full, adapter = (learning_rate_for(parameters, each) for each in (False, True))
    found.set(
        "learning_rate",
        adapter if use_peft else full,
        f"Rule of thumb for {_count(parameters)} parameters: {full:g} for all weights, {adapter:g} for an adapter. It interpolates 6e-4 "
        "at 0.24M (held-out worlds), 3e-5 at 135M and 3e-7 at 1.24B (published). Five times as much for an adapter "
        "was chosen in held-out worlds. Try a third and three times as much, and keep what has the highest reward - beta * KL.",
    )


def _batch(found: Suggestion, measured: Measured, prompts: int, use_peft: bool) -> None:
    """Sets the micro-batch, and estimates memory."""
    machine, n, have = measured.machine, found.values["num_generations"], measured.machine.memory
    fixed = _fixed_memory(machine, use_peft)
    tokens = measured.prompt_tokens + found.values["max_completion_length"]
    # An own and an extra completion: inputs of all layers, which checkpointing keeps, and one layer whole. The factors of the latter
    # are those at which the formula without checkpointing gives what was measured on an H100 (benchmarks/notes/shared_prompts.md)
    a_row = 2 * tokens * machine.number * ((machine.layers + 20) * machine.width + 8 * machine.inner)
    cache = 2 * prompts * n * tokens * machine.layers * machine.cache * machine.number
    sizes = [n * k for k in range(prompts, 0, -1) if prompts % k == 0]
    size = next((size for size in sizes if have is None or sum(fixed.values()) + size * a_row <= 0.8 * have), n)
    need = sum(fixed.values()) + max(size * a_row, cache)
    passes = prompts * n // size
    reason = f"Whole prompts, in {passes} passes to an update." if passes > 1 else "An update in one pass."
    fits = have is not None and need <= have
    reason += " By the estimate of memory below." if fits else ""
    found.set("per_device_train_batch_size", size, reason)
    parts = ", ".join(f"{name} {_gib(value)}" for name, value in fixed.items() if value)
    found.notes["memory"] = (
        f"{_gib(need)}: {parts}, and the larger of {_gib(size * a_row)} (activations of a pass) and {_gib(cache)} (keys and values "
        "while sampling). Weights are counted, with TRL's defaults: float32, Adam, gradient checkpointing. Activations may be off by a "
        f"factor of 2, and a reward that is a function or a server is not counted.{'' if have is None else f' This device has {_gib(have)}.'}"
    )
    if have is not None and need > have:
        remedy = (
            "a smaller model, or ZeRO-3 on several devices" if use_peft else "`--use_peft`, or ZeRO on several devices"
        )
        found.warnings.append(
            f"Training needs about {_gib(need)} of memory, and this device has {_gib(have)}. Try {remedy}."
        )


def _fixed_memory(machine: Machine, use_peft: bool) -> dict[str, float]:
    trained = machine.adapter if use_peft else machine.parameters
    return {
        "weights": 4 * machine.parameters + (4 * trained if use_peft else 0),
        "copies in bf16": 2 * machine.parameters if machine.number == 2 else 0,
        "gradients": 4 * trained,
        "Adam": 8 * trained,
        "reference": 0 if use_peft else 4 * machine.parameters,
        "reward model": machine.reward_bytes,
    }


def _hours(measured: Measured, completions: int, updates: int, bad: float) -> str:
    own = measured.own.seconds
    drawing = 2 * completions * (own + measured.reward_seconds)
    # Forward, recomputed forward, and a backward pass of two for own samples and bad extra ones; the reference's for the own
    passes = 4 * (1 + bad) + 1
    training = completions * measured.score_seconds * passes
    return (
        f"{_time(updates * (drawing + training))} for {updates} updates on this device ({measured.machine.device}). Measured: {own:.2g} s to "
        f"draw a completion and {measured.reward_seconds:.2g} s to reward it, hence {_time(drawing)} for the "
        f"{2 * completions} of an update. Rule of thumb: {_time(training)} of training, {passes:.1f} forward passes ({measured.score_seconds:.2g} s, "
        "measured) for each own completion with its extra one, which is read if it is bad. Larger batches than those of these samples take less time."
    )


def _spread_within(rewards: np.ndarray) -> float | None:
    """Standard deviation within a prompt, or `None` if no prompt has two samples."""
    counts = np.isfinite(rewards).sum(axis=1)
    several = rewards[counts > 1]
    if not len(several):
        return None
    return float(np.sqrt(np.nanvar(several, axis=1, ddof=1).mean()))


def _comment(text: str) -> list[str]:
    return textwrap.wrap(text, 117, initial_indent="# ", subsequent_indent="# ")


def _plain(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _count(number: float) -> str:
    return next(
        (f"{number / size:.3g}{unit}" for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")) if number >= size),
        f"{number:g}",
    )


def _gib(value: float) -> str:
    return f"{value / 2**30:.2g} GiB" if value >= 2**30 / 10 else f"{value / 2**20:.2g} MiB"


def _time(seconds: float) -> str:
    return next(
        (f"{seconds / size:.2g} {unit}" for size, unit in ((3600, "hours"), (60, "minutes")) if seconds >= size),
        f"{seconds:.2g} seconds",
    )
