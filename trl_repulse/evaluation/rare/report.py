"""Reports of rare events: figures, a table, and what a training run ends with."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from datasets import Dataset
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..._numbers import plain
from ..report import text_table
from .components import Component
from .estimates import RareEstimate, cvar, prob_bad
from .mixture import MixtureSample
from .sampling import draw, find_temperature


VERDICTS = {"reliable": "reliable", "bounds": "bounds only", "unreliable": "UNRELIABLE"}


def rare_event_report(
    sample: MixtureSample, thresholds: Sequence[float] = (), levels: Sequence[float] = (), confidence: float = 0.95
) -> dict[str, Any]:
    """
    P(r < η) at each threshold η, in units of reward, and CVaR at each level, in (0, 1), overall and prompt by prompt. Raises as [`prob_bad`]
    and [`cvar`].

    Returns:
        `dict`: `counts`, `num_prompts`, `confidence`; `prob_bad` and `cvar`, lists with `threshold` or `level`, `value`, `low`, `high`,
        `standard_error`, `bounds`, `verdict`, `reliable`, `reasons`, `next_steps`, `diagnostics`, and `per_prompt`, the same for each prompt.
    """
    prompts = [sample.prompt(i) for i in range(sample.num_prompts)]
    report: dict[str, Any] = {"counts": list(sample.counts), "num_prompts": len(prompts), "confidence": confidence}
    for function, name, points in ((prob_bad, "threshold", thresholds), (cvar, "level", levels)):
        entries = report[function.__name__] = []
        for point in points:
            overall, *each = (_entry(function(part, point, confidence)) for part in (sample, *prompts))
            entries.append({name: point, **overall, "per_prompt": each})
    return report


def format_report(report: dict[str, Any]) -> str:
    """The report of [`rare_event_report`] as text: overall estimates, and why those that are not reliable are not."""
    interval = f"{100 * report['confidence']:g}% interval"
    rows = [("", "estimate", interval, "ESS", "largest share", "unseen", "efficiency", "verdict")]
    notes: list[str] = []
    for key, label in (("prob_bad", "P(r < {threshold:g})"), ("cvar", "CVaR at {level:g}")):
        for entry in report[key]:
            name, diagnostics = label.format(**entry), entry["diagnostics"]
            rows.append(
                (
                    name,
                    plain(entry["value"]),
                    f"{plain(entry['low'])} to {plain(entry['high'])}",
                    f"{diagnostics['ess']:.0f} of {diagnostics['tail_samples']}",
                    f"{diagnostics['max_weight_share']:.1%}",
                    f"up to {diagnostics['unseen_share']:.0%}",
                    plain(diagnostics["efficiency"], 2),
                    VERDICTS[entry["verdict"]],
                )
            )
            if not entry["reliable"]:
                notes += ["", name]
                if entry["verdict"] == "bounds":
                    low, high = entry["bounds"]
                    notes[-1] += f": between {plain(low)} and {plain(high)}, whatever the other components miss"
                notes += [f"  why   {reason}" for reason in entry["reasons"]]
                notes += [f"  next  {step}" for step in entry["next_steps"]]
    return "\n".join([*_drawn(report), *text_table(rows), *notes])


def _drawn(report: dict[str, Any]) -> list[str]:
    """What the components drew; those that drew little are counted together."""
    if len(report.get("components", ())) < 2:
        return []
    total, drawn = sum(report["counts"]), zip(report["components"], report["counts"], strict=True)
    shown = [(name, count) for name, count in drawn if count >= 0.02 * total]
    shown.append(("others", total - sum(count for _, count in shown)))
    return ["Completions of each prompt", *(f"{count:>9,}  {name}" for name, count in shown if count), ""]


def _entry(estimate: RareEstimate) -> dict[str, Any]:
    """An estimate as [`rare_event_report`] has it."""
    names = ("value", "low", "high", "standard_error", "bounds", "verdict", "reliable")
    return {name: getattr(estimate, name) for name in names} | {
        "reasons": list(estimate.reasons),
        "next_steps": list(estimate.next_steps),
        "diagnostics": vars(estimate.diagnostics),
    }


DIVERGENCE = 2.0  # nats per completion between the policy and its hot copy


def estimate_prob_bad(
    policy: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Dataset,
    reward: Callable[..., Any] | nn.Module,
    threshold: float,
    max_completion_length: int,
    num_samples: int,
    **kwargs: Any,
) -> RareEstimate:
    """
    P(reward < threshold) of a policy, from its own samples and as many of a hot copy, weighted against their mixture.

    The hot copy is the policy at the temperature that takes it 2 nats per completion from itself, so that
    probabilities far below one in the number of samples can be estimated. What both hardly ever draw is not seen;
    `rare-events` says how much that may be. `num_samples` are completions of each prompt from the policy, and from the
    hot copy; the other arguments are those of [`~trl_repulse.evaluation.rare.sampling.draw`]. All processes must call it.
    """
    shared = {name: kwargs[name] for name in ("chat_template_kwargs", "batch_size", "seed") if name in kwargs}
    hot = find_temperature(policy, tokenizer, prompts["prompt"][:], max_completion_length, DIVERGENCE, **shared)
    components = [Component(policy), Component(policy, temperature=hot)]
    sample = draw(components, tokenizer, prompts, reward, [num_samples] * 2, max_completion_length, **kwargs).sample
    return prob_bad(sample, threshold)


def format_unseen(columns: Mapping[str, Mapping[str, float]], notes: Sequence[str] = ()) -> str:
    """A table of policies, side by side. `columns` has, by name, what is known of a policy:
    `eval_p_bad` with the ends of its interval, `eval_p_bad_low` and `eval_p_bad_high`; `eval_reward`; the KL in nats per completion
    as `kl`; and the completions drawn in training as `samples`. `notes` are lines below the table."""
    values = list(columns.values())
    ends = ([_share(each[f"eval_p_bad_{side}"]) for side in ("low", "high")] for each in values)
    rows = [
        ("", *columns),
        ("reward", *(f"{each['eval_reward']:.2f}" if "eval_reward" in each else "–" for each in values)),
        ("P(bad)", *(_share(each["eval_p_bad"]) for each in values)),
        ("  95% interval", *map(" to ".join, ends)),
        ("KL to the initial policy, nats", *(f"{each['kl']:.2f}" if "kl" in each else "–" for each in values)),
        ("completions drawn in training", *(f"{each['samples']:,}" for each in values)),
    ]
    return "\n".join([*text_table(rows), *notes])


def _share(probability: float) -> str:
    """A probability with two digits, as 1.2e-5."""
    return re.sub("e([+-])0", r"e\1", f"{probability:.1e}") if probability else "0"
