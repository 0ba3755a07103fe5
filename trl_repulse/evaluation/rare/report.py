"""A report of rare events, as figures and as a table."""

from collections.abc import Sequence
from typing import Any

from ..._numbers import plain
from ..report import text_table
from .estimates import RareEstimate, cvar, prob_bad
from .forecast import NoSlopeError, TooFewScoresError, back_test, forecast_largest
from .mixture import MixtureSample


VERDICTS = {"reliable": "reliable", "bounds": "bounds only", "unreliable": "UNRELIABLE"}


def rare_event_report(
    sample: MixtureSample,
    thresholds: Sequence[float] = (),
    levels: Sequence[float] = (),
    forecast_sizes: Sequence[int] = (),
    confidence: float = 0.95,
) -> dict[str, Any]:
    """
    P(r < η) at each threshold and CVaR at each level, overall and prompt by prompt, and a forecast of the lowest reward.

    Args:
        sample ([`~trl_repulse.evaluation.rare.mixture.MixtureSample`]):
            Completions of policy and proposals.
        thresholds (`Sequence[float]`, *optional*):
            Rewards below which an output is bad.
        levels (`Sequence[float]`, *optional*):
            Levels of CVaR.
        forecast_sizes (`Sequence[int]`, *optional*):
            Numbers of completions for which the lowest reward is extrapolated, from the policy's own draws.
        confidence (`float`, *optional*, defaults to `0.95`):
            Nominal coverage of all intervals.

    Returns:
        `dict`: `counts`, `num_prompts`, `confidence`; `prob_bad` and `cvar`, lists with `threshold` or `level`, the fields of an
        estimate, `verdict`, `reliable`, `reasons`, `next_steps`, and `per_prompt`, the same for each prompt. With
        `forecast_sizes` also `forecast`, with `lowest`, `back_test`, `reliable` and `reasons`, or only `refused`, the reason.

    Raises:
        `ValueError`: If an argument is out of range.
    """
    report: dict[str, Any] = {"counts": list(sample.counts), "num_prompts": sample.num_prompts}
    report["confidence"] = confidence
    prompts = [sample.prompt(i) for i in range(sample.num_prompts)]
    for function, name, points in ((prob_bad, "threshold", thresholds), (cvar, "level", levels)):
        entries = report[function.__name__] = []
        for point in points:
            overall, *each = (_entry(function(part, point, confidence)) for part in (sample, *prompts))
            entries.append({name: point, **overall, "per_prompt": each})
    if forecast_sizes:
        report["forecast"] = _forecast(sample, forecast_sizes, confidence)
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
                    notes[-1] += f": between {plain(low)} and {plain(high)}, whatever the proposals miss"
                notes += [f"  why   {reason}" for reason in entry["reasons"]]
                notes += [f"  next  {step}" for step in entry["next_steps"]]
    lines = [*text_table(rows), *notes]
    if "refused" in report.get("forecast", {}):
        lines += ["", f"No forecast: {report['forecast']['refused']}"]
    elif "forecast" in report:
        test = report["forecast"]["back_test"]
        lines += ["", "Extrapolated, not measured: the lowest reward among so many completions of the policy"]
        lines += [
            f"{entry['size']:>15,}  {plain(entry['median'])} ({plain(entry['low'])} to {plain(entry['high'])})"
            for entry in report["forecast"]["lowest"]
        ]
        lines.append(
            f"Back-test, from a tenth of the completions to the others: {test['covered']:.0%} of intervals held."
        )
        lines += [f"UNRELIABLE: {reason}" for reason in report["forecast"]["reasons"]]
    return "\n".join(lines)


def _entry(estimate: RareEstimate) -> dict[str, Any]:
    names = ("value", "low", "high", "standard_error", "bounds", "verdict", "reliable")
    return {name: getattr(estimate, name) for name in names} | {
        "reasons": list(estimate.reasons),
        "next_steps": list(estimate.next_steps),
        "diagnostics": vars(estimate.diagnostics),
    }


def _forecast(sample: MixtureSample, sizes: Sequence[int], confidence: float) -> dict[str, Any]:
    """Lowest rewards among so many draws from the policy, over all prompts; scores are negated rewards."""
    scores = -sample.rewards[:, : sample.counts[0]].flatten()
    try:
        forecasts = forecast_largest(scores, sizes, confidence=confidence)
        test = back_test(scores, confidence=confidence)
    except (NoSlopeError, TooFewScoresError) as error:  # the estimates are still useful
        return {"refused": str(error)}
    lowest = [
        {"size": f.size, "median": -f.median, "low": -f.high, "high": -f.low, "extrapolation": f.extrapolation}
        for f in forecasts
    ]
    return {
        "lowest": lowest,
        "back_test": {"covered": test.covered, "blocks": len(test.observed)},
        "reliable": test.reliable,
        "reasons": list(test.reasons),
    }
