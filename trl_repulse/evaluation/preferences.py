"""Preference data in TRL's formats, from completions with rewards."""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._numbers import is_bad
from ..data._prompts import messages_fault, prompt_fault
from ..data._tables import read_json_lines
from .records import load_samples, write_atomically


@dataclass(frozen=True)
class RewardedCompletion:
    """A completion, text or messages as its prompt is, with its reward."""

    prompt: Any
    completion: Any
    reward: float


def read_rewarded(path: str | Path) -> list[RewardedCompletion]:
    """
    Reads completions and their rewards, in the order of the rows; those without a reward are left out.

    `path` is a folder of samples that `trl-repulse evaluate` wrote, or JSON lines with `"prompt"`, `"completion"` and
    `"reward"`, such as a `negatives.jsonl` (`save_negatives`). Raises `ValueError` if there is none, samples are
    incomplete, or a row lacks one of the three or mixes text and messages.
    """
    path = Path(path).expanduser()
    if path.is_dir():
        table = load_samples(path).table
        rows = enumerate(table.select(["prompt", "completion", "reward"]).to_pylist(), 1)
    elif path.is_file():
        rows = read_json_lines(path)
    else:
        raise ValueError(f"There is no file or folder `{path}`; name a `negatives.jsonl` or a folder of samples.")
    return [each for number, row in rows if (each := _rewarded(row, f"Row {number} of `{path}`")) is not None]


def _rewarded(row: Any, where: str) -> RewardedCompletion | None:
    """A row as a completion, or `None` if it has no reward. Raises `ValueError` about `where` if a field is missing or unusable."""
    if not isinstance(row, dict) or not {"prompt", "completion", "reward"} <= set(row):
        raise ValueError(f"{where} lacks `prompt`, `completion` or `reward`; each row needs all three.")
    if (fault := prompt_fault(row["prompt"])) is not None:
        raise ValueError(f"{where} {fault}.")
    if type(row["completion"]) is not type(row["prompt"]) or messages_fault(row["completion"]) is not None:
        raise ValueError(f"{where} must have a `completion` of the kind of its `prompt`: text, or messages.")
    if (reward := row["reward"]) is None:
        return None
    if isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
        raise ValueError(f"{where} has the reward {reward!r:.60}, which is no finite number; correct it.")
    return RewardedCompletion(row["prompt"], row["completion"], float(reward))


def preference_rows(
    completions: Iterable[RewardedCompletion], threshold: float, margin: float = 0.0, max_bad: int | None = None
) -> list[dict[str, Any]]:
    """
    Pairs of a good and a bad completion of the same prompt, in TRL's preference format: `prompt`, `chosen`,
    `rejected`, the difference of their rewards as `margin`, and both rewards.

    Each bad completion, the worst first, is paired with the next good one, the best first. The good ones are repeated if they are fewer.
    Duplicates count once. Raises `ValueError` if an argument is out of range, text and messages are mixed, or no prompt has a good and a
    bad completion.

    Args:
        completions (`Iterable[RewardedCompletion]`): Completions of any prompts, in any order.
        threshold (`float`): Reward below which a completion is bad.
        margin (`float`, *optional*, defaults to `0.0`):
            How far above the threshold, in units of reward, a completion is good. In between it is neither.
        max_bad (`int`, *optional*): Most bad completions of a prompt, the worst ones. If `None`, all.
    """
    rows = [
        {
            "prompt": worse.prompt,
            "chosen": good[i % len(good)].completion,
            "rejected": worse.completion,
            "margin": good[i % len(good)].reward - worse.reward,
            "chosen_reward": good[i % len(good)].reward,
            "rejected_reward": worse.reward,
        }
        for good, bad in _sides(completions, threshold, margin, max_bad)
        for i, worse in enumerate(bad)
        if good
    ]
    if not rows:
        raise ValueError(
            f"No prompt has both a completion with a reward under {threshold} and one of at least {threshold + margin}; add samples of "
            "the prompts that the bad completions are of (their prompts must be the same text or messages), or move the threshold."
        )
    return rows


def unpaired_rows(
    completions: Iterable[RewardedCompletion], threshold: float, margin: float = 0.0, max_bad: int | None = None
) -> list[dict[str, Any]]:
    """Good and bad completions in TRL's unpaired format: `prompt`, `completion`, `label` (`True` of a good one) and `reward`. The arguments
    are those of [`preference_rows`]; raises `ValueError` as it does, or if all completions are good or all are bad."""
    rows = [
        {"prompt": each.prompt, "completion": each.completion, "label": label, "reward": each.reward}
        for good, bad in _sides(completions, threshold, margin, max_bad)
        for label, side in ((True, good), (False, bad))
        for each in side
    ]
    if len({row["label"] for row in rows}) < 2:
        raise ValueError(
            f"The completions are all good or all bad: some with a reward under {threshold} and some of at least "
            f"{threshold + margin} are needed; add samples or negative data, or move the threshold."
        )
    return rows


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Writes rows to a file as JSON lines, atomically."""
    text = "".join(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows)
    write_atomically(path, lambda partial: partial.write_text(text, encoding="utf-8"))


def _sides(
    completions: Iterable[RewardedCompletion], threshold: float, margin: float, max_bad: int | None
) -> list[tuple[list[RewardedCompletion], list[RewardedCompletion]]]:
    """For each prompt its good completions, the best first, and its bad ones, the worst first. Arguments as in [`preference_rows`]."""
    if not margin >= 0:
        raise ValueError(f"`margin` is {margin}; it must be at least 0, in units of reward.")
    if max_bad is not None and max_bad < 1:
        raise ValueError(f"`max_bad` is {max_bad}; it must be at least 1, or be left out.")
    prompts: dict[str, dict[str, RewardedCompletion]] = {}
    for each in completions:
        prompts.setdefault(_key(each.prompt), {}).setdefault(_key(each.completion), each)
    if len({type(each.prompt) for group in prompts.values() for each in group.values()}) > 1:
        raise ValueError("Some prompts are text and some messages; use sources of one kind.")
    sides = []
    for group in prompts.values():
        ranked = sorted(group.values(), key=lambda each: each.reward)
        bad = [each for each in ranked if is_bad(each.reward, threshold)]
        good = [each for each in reversed(ranked) if not is_bad(each.reward, threshold + margin)]
        sides.append((good, bad[:max_bad]))
    return sides


def _key(value: Any) -> str:
    return json.dumps(value, sort_keys=True)
