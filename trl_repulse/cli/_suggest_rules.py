"""
Settings for RePULSe from measurements of the initial policy, each with its reason, and the texts that show them.

Each reason says whether it is a measurement of these samples, was measured elsewhere (and where), or is a rule of thumb.

Legend: P prompts, N completions of a prompt.
"""

import math
import sys
import textwrap
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import yaml

from .._numbers import is_bad
from .._rules_of_thumb import LOW, bad_threshold_for, learning_rate_for, rounded
from ..evaluation.tails import prob_below


LEAST = 50  # samples
# What was measured in the three held-out worlds (docs/held_out.md): the spread of the initial policy's reward within a prompt,
# and the settings that belong to it
SPREAD, KL_COEFFICIENT, ALPHA = 1.5, 0.2, 1.0
TARGET_NATS = 35.0  # target_dist_beta times the range of the reward, as in the embedded world's settings
UPDATES = 800  # of the published setting 1; 640 in the held-out worlds
WARM_UP, FEW = 20, 160  # updates, in the held-out worlds: of the warm-up, and the fewest
HIGH = 0.98  # quantile
CUT = 0.05  # share of samples that may be cut at the length that they were drawn with
# Most rewards of prefixes of a completion, λ, and the share of the mean square of advantages under which they are worth it
PREFIXES, LAMBDA, WORTH = 20, 0.9, 0.8
MOST = 1.0  # gain and its standard error, of extra samples that gain nothing
FEWEST = 5  # prompts of an update
CLEARLY = 1.2  # how many times faster the other precision must be
SAMPLING, EVALUATION = 0.1, 0.25  # shares of `--minutes`: of what suggests, on top, and of what evaluates
ADAPTER = {"use_peft": True, "lora_r": 16, "lora_alpha": 32, "lora_target_modules": ["all-linear"]}


def say(text: str) -> None:
    """Says on stderr, where no report goes, what `suggest` is doing."""
    print(f"suggest: {text} ...", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Measured:
    """What samples of the initial policy show."""

    rewards: np.ndarray  # (P, N), NaN where there is none
    lengths: np.ndarray  # (P, N), in tokens
    ended: np.ndarray  # (P, N), whether it ended by itself
    texts: list[str]  # P · N, prompt by prompt
    empty_rewards: np.ndarray | None  # of empty completions; `None` where the reward failed
    num_prompts: int  # of which samples may cover a part
    parameters: int
    seconds: float  # to draw, reward and score a completion, as `evaluate` does
    # Of extra samples over as many of the policy's own, if enough bad ones were found to tell, and its standard error
    gain: tuple[float, float] | None = None
    # Tokens a step of prefixes that are rewarded, and the share of the mean square of advantages that their values leave
    prefixes: tuple[int, float] | None = None


@dataclass(frozen=True)
class Updates:
    """What updates of training took on this device."""

    prompts: int  # in an update
    seconds: dict[str, float]  # of an update, by precision
    device: str
    memory: float | None = None  # most bytes that the device held, if it says


@dataclass
class Suggestion:
    """Settings by name with the reason of each; notes by what they are about; and what to look at before training."""

    values: dict[str, Any] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    def set(self, name: str, value: Any, reason: str) -> None:
        self.values[name], self.reasons[name] = value, reason

    def to_text(self) -> str:
        """A line for each setting, note and warning."""
        shown = {name: f"{value:g}" if isinstance(value, float) else str(value) for name, value in self.values.items()}
        width = max(map(len, self.reasons))
        lines = [f"{name:<{width}}  {shown[name]:<10}  {why}" for name, why in self.reasons.items()]
        return "\n".join([*lines, "", *self._remarks()])

    def to_yaml(self, head: str, more: dict[str, Any]) -> str:
        """The file of a training command: `head` and each reason become comments, and `more` settings, without a reason, come first."""
        lines = [f"# {line}".rstrip() for line in head.splitlines()] + [""]
        lines += [yaml.safe_dump({name: value}, allow_unicode=True).rstrip() for name, value in more.items()]
        for name, value in self.values.items():
            lines += ["", *_comment(self.reasons[name]), yaml.safe_dump({name: value}).rstrip()]
        return "\n".join([*lines, *(line for remark in self._remarks() for line in ("", *_comment(remark))), ""])

    def _remarks(self) -> list[str]:
        notes = [f"{name}: {text}" for name, text in self.notes.items()]
        return [*notes, *(f"WARNING: {text}" for text in self.warnings)]


def sample_report(measured: Measured) -> str:
    """The samples in a few numbers, and those with the lowest rewards."""
    values, lengths = measured.rewards.ravel(), measured.lengths
    rewards = values[np.isfinite(values)]
    quantiles = ", ".join(f"{np.quantile(rewards, q):.3g} ({q:.0%})" for q in (0.02, 0.25, 0.5, 0.75, 0.98))
    lines = [
        f"{values.size} samples of {len(lengths)} prompts: reward {rewards.mean():.3g} on average, {rewards.min():.3g} to "
        f"{rewards.max():.3g}, quantiles {quantiles}; {lengths.mean():.0f} tokens on average.",
        "",
    ]
    lines += [f"lowest: {values[i]:.3g}  {measured.texts[i].strip()[:160]!r}" for i in np.argsort(values)[:5]]
    return "\n".join([*lines, ""])


def suggest_settings(
    measured: Measured,
    *,
    max_completion_length: int,
    use_peft: bool = False,
    bad_reward_threshold: float | None = None,
) -> Suggestion:
    """Settings for `trl-repulse repulse`, from samples of the initial policy, which had at most `max_completion_length` tokens.
    Raises a `ValueError` if all samples have the same reward, or fewer than two have any."""
    found, rewards = Suggestion(), measured.rewards[np.isfinite(measured.rewards)]
    if rewards.size < 2 or rewards.min() == rewards.max():
        what = f"the reward {rewards[0]:g}" if rewards.size else "no reward"
        raise ValueError(
            f"All {measured.rewards.size} samples have {what}, so that there is nothing to learn; check the reward function."
        )
    threshold = _threshold(found, measured.rewards.size, rewards, bad_reward_threshold)
    _reward_warnings(found, measured, rewards, threshold)
    found.set(
        "proposal",
        "hot_policy",
        "The default: there is no second model. Extra samples are drawn from the policy as it is, at a higher temperature, or with the "
        "logits of tokens raised that lower the reward, whichever finds bad outputs most often as training goes on.",
    )
    _length(found, measured, max_completion_length)
    _counts(found, measured, share=float(is_bad(rewards, threshold).mean()))
    _weights(found, measured.rewards, rewards, threshold)
    _learning_rate(found, measured.parameters, use_peft)
    if measured.prefixes is not None and measured.prefixes[1] < WORTH:
        steps, noise = measured.prefixes
        found.notes["rewards of prefixes"] = (
            f"add `prefix_reward_steps: {steps}` and `gae_lambda: {LAMBDA}` for `reinforce` or `repulse`, if up to {PREFIXES - 1} more calls "
            f"of the reward a completion are cheap. Measured: advantages keep {noise:.2g} of their mean square, since the rewards of the first "
            f"{steps}, {2 * steps}, ... tokens tell much. A chat model then had a higher reward - beta * KL nearer to the initial policy, "
            "and in a long run more bad outputs: lower `beta` too, by a third."
        )
    found.notes["other methods"] = (
        "`repulse-ppo` takes this file too. `repulse-grpo` takes it with `--scale_rewards none`. By default it divides rewards by their "
        "standard deviation within a prompt, and `alpha` and `beta`, which are in units of the reward, would no longer fit."
    )
    if measured.gain is not None and sum(measured.gain) <= MOST:
        found.warnings.append(
            f"Use REINFORCE (`trl-repulse reinforce` takes this file too): extra samples gain nothing here. Measured: one is worth about "
            f"{measured.gain[0]:.2g} of the policy's own in an estimate of P(bad), and costs as much."
        )
    return found


def _reward_warnings(found: Suggestion, measured: Measured, rewards: np.ndarray, threshold: float) -> None:
    """Adds to `found.warnings` what in finite `rewards` (n,), bad under `threshold`, RePULSe learns little from or is hardly meant."""
    warn, size = found.warnings.append, measured.rewards.size
    if missing := size - rewards.size:
        warn(f"{missing} of {size} samples have no reward, and training leaves such out; check that this is meant.")
    within = _spread_within(measured.rewards)
    if within is not None and within**2 < 0.01 * rewards.var():
        warn("The reward hardly differs between completions of one prompt, which are all that training compares.")
    low, quarter, middle = np.quantile(rewards, (LOW, 0.25, 0.5))
    share_of_lowest = float((rewards == rewards.min()).mean())
    if share_of_lowest >= 0.05:
        warn(
            f"{share_of_lowest:.0%} of the samples share the lowest reward ({rewards.min():g}): the reward has no low tail, and what is worse "
            "than bad cannot be told from what is bad."
        )
    elif middle - low < 2 * (middle - quarter):  # 3.0 times for a normal distribution, 1.9 for an even one
        warn(
            f"The reward has no low tail: the worst 2 % of the samples ({low:.3g}) are hardly farther from the median ({middle:.3g}) "
            f"than the worst quarter ({quarter:.3g}). RePULSe is made for outputs that are rare and much worse."
        )
    if measured.empty_rewards is None:
        warn("The reward function fails on an empty completion, which a policy may draw at any time.")
    groups = {"An empty completion": measured.empty_rewards}
    cut = measured.rewards[~measured.ended]
    if 10 <= cut.size < size:
        groups["A completion that was cut"] = cut
    for name, values in groups.items():
        if values is None or not np.isfinite(values).any():
            continue
        value = float(np.nanmedian(values))
        rank = float((rewards < value).mean() + (rewards == value).mean() / 2)
        if is_bad(value, threshold):
            effect = "and counts as bad: the negative term will be spent on such completions"
        elif rank <= 0.05:
            effect = "among the lowest rewards there are: training will avoid such completions"
        elif rank >= 0.95:
            effect = "among the highest rewards there are: training will make such completions common"
        else:
            continue
        warn(f"{name} gets {value:.3g}, {effect}. Give it an ordinary reward, unless you mean that.")


def _threshold(found: Suggestion, drawn: int, rewards: np.ndarray, given: float | None) -> float:
    """Sets and returns `bad_reward_threshold`, `given` or from finite `rewards` (n,) of `drawn` samples. Warns if over a tenth is bad."""
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


def _length(found: Suggestion, measured: Measured, limit: int) -> None:
    """Sets `max_completion_length` (tokens): to `limit`, with a warning, if more than [`CUT`] of the samples were cut there; else a tenth
    above the [`HIGH`] quantile of those that ended, rounded up to a multiple of 8."""
    cut = 1 - float(measured.ended.mean())
    if cut > CUT:
        reason = f"Measured: {cut:.0%} of the samples were cut at this length, which they were drawn with."
        found.set("max_completion_length", limit, reason)
        found.warnings.append(
            f"{cut:.0%} of the samples did not end within {limit} tokens, so that their rewards are of text that breaks off. Run this "
            "again with a larger `--max_completion_length`, or ask for shorter answers in the prompts."
        )
        return
    high = float(np.quantile(measured.lengths[measured.ended], HIGH))
    reason = f"Measured: {100 * HIGH:g} % of the samples that ended have at most {high:.0f} tokens. Rule of thumb: a tenth more, in eights."
    found.set("max_completion_length", min(limit, 8 * math.ceil(1.1 * high / 8)), reason)


def _counts(found: Suggestion, measured: Measured, share: float) -> None:
    """Sets `num_generations` and `train_batch_size`, for about 10 bad samples in an update if `share` of the policy's samples are bad."""
    completions = 5 if measured.num_prompts >= 10 else math.ceil(50 / measured.num_prompts)
    reason = "As in the held-out worlds and the published setting 1. As many extra samples come on top."
    if completions != 5:
        reason = f"Rule of thumb: about 50 completions in an update, of your {measured.num_prompts} prompts. As many extra samples come on top."
    found.set("num_generations", completions, reason)
    bad_per_prompt = 2 * completions * share  # bad samples of a prompt, if extra samples find no more than the policy
    prompts = next((count for count in (10, 20, 30, 40) if count * bad_per_prompt >= 10), 50)
    prompts = min(prompts, measured.num_prompts)
    found.set(
        "train_batch_size",
        prompts * completions,
        f"Completions of an update: {completions} of each of {prompts} prompts. At first about {prompts * bad_per_prompt:.0f} samples of "
        "an update or more will be bad. Rule of thumb: 10, with 10 prompts (held-out worlds) to 50 (published setting 1).",
    )


def _weights(found: Suggestion, drawn: np.ndarray, rewards: np.ndarray, threshold: float) -> None:
    """Sets `beta` and `alpha` in proportion to the standard deviation of rewards within a prompt; notes `target_dist_beta`. `drawn` (P, N)
    has NaN where there is no reward; `rewards` (n,) are the finite ones."""
    within = _spread_within(drawn)
    spread = within or float(rewards.std())
    bad, high = rewards[is_bad(rewards, threshold)], np.quantile(rewards, HIGH)
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
    """Sets the learning rate by the number of parameters."""
    size, unit = next(each for each in ((1e9, "B"), (1e6, "M"), (1e3, "k"), (1, "")) if parameters >= each[0])
    full, adapter = (learning_rate_for(parameters, is_adapter) for is_adapter in (False, True))
    found.set(
        "learning_rate",
        adapter if use_peft else full,
        f"Rule of thumb for {parameters / size:.3g}{unit} parameters: {full:g} for all weights, {adapter:g} for an adapter. It "
        "interpolates 6e-4 at 0.24M (held-out worlds), 3e-5 at 135M and 3e-7 at 1.24B (published). Five times as much for an adapter "
        "was chosen in held-out worlds. Try a third and three times as much, and keep what has the highest reward - beta * KL.",
    )


def planned_update(found: Suggestion, updates: Updates, minutes: float | None) -> tuple[str, float, int]:
    """The precision, the seconds per prompt, and the prompts of an update: the most of a few sizes for which [`FEW`] updates fit into
    `minutes`, or the fewest."""
    usual = "float32" if updates.device == "cpu" else "bfloat16"  # unless the other is [`CLEARLY`] faster
    fastest = min(updates.seconds, key=updates.seconds.get)
    precision = fastest if updates.seconds[usual] > CLEARLY * updates.seconds[fastest] else usual
    a_prompt = updates.seconds[precision] / updates.prompts
    most = found.values["train_batch_size"] // found.values["num_generations"]
    sizes = [most, *(size for size in (40, 30, 20, 10, FEWEST) if size < most)]
    training = math.inf if minutes is None else 60 * minutes * (1 - EVALUATION)
    return precision, a_prompt, next((size for size in sizes if FEW * size * a_prompt <= training), sizes[-1])


def plan(
    found: Suggestion, measured: Measured, updates: Updates, max_steps: int | None = None, minutes: float | None = None
) -> None:
    """Sets precision, batch and number of updates from what updates took, so that training and an evaluation fit into `minutes`. Raises a
    `ValueError` if no update fits."""
    n, (precision, a_prompt, prompts) = found.values["num_generations"], planned_update(found, updates, minutes)
    seconds, fits = prompts * a_prompt, None
    if minutes is not None:
        fits = min(int(60 * minutes * (1 - EVALUATION) / seconds), UPDATES)
        if not fits:
            raise ValueError(
                f"An update of {prompts * n} completions takes {duration(seconds)}, too long for `--minutes {minutes:g}`; give "
                f"{math.ceil(10 * seconds / 60 / (1 - EVALUATION))} or more."
            )
        if prompts * n < found.values["train_batch_size"]:
            reason = f"Completions of an update: {n} of each of {prompts} prompts, so that {FEW} updates fit, as in the shortest runs of the "
            found.set("train_batch_size", prompts * n, f"{reason}held-out worlds, or as many as can.")
    rates = " and ".join(f"{value:.2g} s in {name}" for name, value in updates.seconds.items())
    reason = f"Measured: an update of {updates.prompts * n} completions and as many extra ones took {rates}."
    found.set("bf16", precision == "bfloat16", reason)
    size = largest_divisor(prompts, updates.prompts) * n
    memory = "" if updates.memory is None else f", in {updates.memory / 2**30:.2g} GiB of memory"
    passes = f" in {prompts * n // size} passes" if size < prompts * n else ""
    reason = f"Measured: {updates.prompts * n} completions of a pass fit on this device ({updates.device}){memory}. An update{passes} is the same."
    found.set("per_device_train_batch_size", size, reason)
    steps = fits or max_steps or UPDATES
    reason = "Rule of thumb: as many updates as the published setting 1; the held-out worlds had 160 and 640."
    reason = "The value is yours." if max_steps else f"As many as fit into {minutes:g} minutes." if fits else reason
    found.set("max_steps", steps, reason)
    reason = "Rule of thumb: as in the held-out worlds, and no more than an eighth of the updates."
    found.set("warmup_steps", min(WARM_UP, steps // 8), reason)
    found.notes["time"] = f"about {duration(steps * seconds)} for {steps} updates of {duration(seconds)}, as measured."
    if minutes is not None:
        _evaluation(found, measured, max(1, int(60 * minutes * EVALUATION / 2 / measured.seconds)), steps)


def _evaluation(found: Suggestion, measured: Measured, count: int, steps: int) -> None:
    """Notes what evaluation fits, of at most `count` completions of the policy before and after training, and what it can show."""
    rewards = measured.rewards[np.isfinite(measured.rewards)]
    p = float(is_bad(rewards, found.values["bad_reward_threshold"]).mean())
    num_samples = math.ceil(count / measured.num_prompts)
    prompts = count // num_samples
    count = prompts * num_samples
    found.notes["evaluation"] = (
        f"{count:,} completions before training and {count:,} after it: `trl-repulse evaluate`, with this file as `--config`, another "
        f"folder and `--model out` after training, {prompts} prompts and `--num_samples {num_samples}`; then `trl-repulse compare`."
    )
    # A difference of 2.8 standard errors is seen four times of five
    q = p * np.linspace(0, 1, 200, endpoint=False)
    seen = q[p - q > 2.8 * np.sqrt((p - p**2 + q - q**2) / count)]
    shown = f"that P(bad) falls from {p:.2g} to {seen.max():.2g} or less" if seen.size else "no fall of P(bad)"
    few = f" Rule of thumb: P(bad) has hardly moved by update {steps}; {FEW} are few." if steps < FEW else ""
    found.notes["what this can show"] = (
        f"{shown}, and that the reward changes by {2.8 * rewards.std() * math.sqrt(2 / count):.2g} or more (four times of five).{few}"
    )


def _spread_within(rewards: np.ndarray) -> float | None:
    """Standard deviation within a prompt of rewards (P, N), NaN where there is none; `None` if no prompt has two."""
    with_several = rewards[np.isfinite(rewards).sum(axis=1) > 1]
    return float(np.sqrt(np.nanvar(with_several, axis=1, ddof=1).mean())) if len(with_several) else None


def _comment(text: str) -> list[str]:
    return textwrap.wrap(text, 117, initial_indent="# ", subsequent_indent="# ")


def largest_divisor(number: int, most: float) -> int:
    """The largest divisor of `number` that is at most `most`, or 1."""
    return max((each for each in range(1, number + 1) if number % each == 0 and each <= most), default=1)


def duration(seconds: float) -> str:
    """Seconds in the unit that fits, with its name: 2.5 minutes."""
    size, unit = next((each for each in ((3600, "hours"), (60, "minutes")) if seconds >= each[0]), (1, "seconds"))
    return f"{seconds / size:.2g} {unit}"
