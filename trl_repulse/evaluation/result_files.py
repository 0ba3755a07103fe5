"""Runs for a frontier, read from their result files; those that may not stand in one figure are refused."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import tails
from .comparison import is_number, load_runs
from .frontier import SHARES, Frontier, Run, axis_label, check_baseline, make_frontier
from .gcg.records import not_known, read_results
from .gcg.report import count_targets, success_below
from .records import COMPLETE, HEADER, SampleSet, first_difference, load_samples
from .report import check_same_settings


Source = str | Path | Sequence[str | Path]


def load_frontier(
    paths: dict[str, Sequence[Source]],
    x: str,
    y: str,
    threshold: float | None = None,
    level: float | None = None,
    confidence: float = 0.95,
    baseline: str | None = None,
    reference_point: tuple[float, float] | None = None,
) -> Frontier:
    """
    Reads result files of many runs, and places the methods.

    A run is a folder of held-out samples ([`~trl_repulse.evaluation.sampling.sample_completions`]), the `results.json` of a
    training script with exact evaluation, or another JSON file with `"settings"` (`"threshold"` and `"level"` among them where
    it has `"prob_bad"` or `"cvar"`) and the quantities by name. All runs are of one of these kinds. With results of attacks
    ([`~trl_repulse.evaluation.gcg.evaluator.evaluate_gcg`]) a run is a pair, of one of these and a `.jsonl` file;
    `"attack_success"` after the attack, any of a target's samples below the threshold, is then from the file.

    Args:
        paths (`dict[str, Sequence[str | Path | tuple[str | Path, str | Path]]]`):
            Method -> its runs, one a seed.
        x, y (`str`):
            Quantities, keys of [`QUANTITIES`].
        threshold (`float`, *optional*):
            η of `"prob_bad"`, and of attacks, in units of reward.
        level (`float`, *optional*):
            Level of `"cvar"`.
        confidence (`float`, *optional*, defaults to `0.95`):
            Nominal coverage of the intervals.
        baseline (`str`, *optional*):
            Method over which hypervolume gains are measured; the first one if not given.
        reference_point (`tuple[float, float]`, *optional*):
            x and y from which areas are measured, no better than any run; by default the worst run in either quantity.

    Returns:
        [`Frontier`]

    Raises:
        `ValueError`: If a run is not there, cannot be read or lacks a quantity, runs were made with different settings, one is named
            twice, or for what [`make_frontier`] refuses.
    """
    for name in (x, y):
        axis_label(name, threshold, level)  # refuses before anything is read
    check_baseline(baseline, paths)
    flat = [
        (method, [Path(path)] if isinstance(path := source, str | Path) else list(map(Path, source)))
        for method, each in paths.items()
        for source in each
    ]
    missing = next((path for _, run in flat for path in run if not path.exists()), None)
    if missing is not None:
        raise ValueError(f"There is no run `{missing}`; name a folder of samples, or a file of results.")
    places = [path.resolve() for _, run in flat for path in run]
    if len(set(places)) < len(places):
        twice = next(path for path in places if places.count(path) > 1)
        raise ValueError(f"`{twice}` is named twice; name each run once.")
    attacked = [[path for path in run if path.suffix == ".jsonl"] for _, run in flat]
    others = [[path for path in run if path.suffix != ".jsonl"] for _, run in flat]
    if any(len(run) != 1 for run in others) or {len(run) for run in attacked} not in (set(), {0}, {1}):
        raise ValueError(
            "A run is a folder of samples or a file of results; with attacks all are pairs, of one of these and a `.jsonl` file."
        )
    names, labels = (x, y), [method for method, _ in flat]
    if not any(attacked):
        values = _read([run[0] for run in others], names, threshold, level, labels)
    elif "attack_success" not in names:
        raise ValueError(
            "Results of attacks are given, and neither axis is `attack_success`; ask for it, or leave them out."
        )
    else:
        files = [run[0] for run in attacked]
        values = _read_attacked([run[0] for run in others], files, names, threshold, level, labels)
    runs = [Run(method, *found) for (method, _), found in zip(flat, values, strict=True)]
    return make_frontier(runs, x, y, threshold, level, confidence, baseline, reference_point)


def _read_attacked(
    paths: list[Path],
    attacks: list[Path],
    names: tuple[str, str],
    threshold: float | None,
    level: float | None,
    labels: list[str],
) -> list[tuple[float, float, int, int]]:
    """As `_read`, with attack success from files of attacks, whose samples are the targets."""
    if threshold is None:
        raise ValueError("The quantity 'attack_success' of attacks needs a `threshold`.")
    results = [read_results(path) for path in attacks]
    first = results[0][0]["identity"]
    for path, (header, _) in zip(attacks, results, strict=True):
        ignored = ("model", "config.seed", "config_hash", *not_known(header["identity"], first))
        name = first_difference(header["identity"], first, ignored)
        if name is not None:
            raise ValueError(f"`{path}` and `{attacks[0]}` differ in `{name}`; compare attacks of one kind.")
    for attack, (header, records) in zip(attacks, results, strict=True):
        missing = count_targets(header, records)["missing"]
        if missing:
            raise ValueError(f"`{attack}` lacks {missing} targets; call its evaluation again to complete it.")
    rates = [success_below(records, threshold) for _, records in results]
    (other,) = {name for name in names if name != "attack_success"} or {"attack_success"}
    found = _read(paths, (other, other), threshold, level, labels)
    for path, attack, (header, _) in zip(paths, attacks, results, strict=True):
        if path.is_dir():
            weights = json.loads((path / HEADER).read_text(encoding="utf-8"))["model"]["weights"]
            if weights != header["identity"]["model"]:
                raise ValueError(f"`{path}` and `{attack}` are of different models; pair those of one.")
    return [
        (
            *(rate.value if name == "attack_success" else value[0] for name in names),
            *(int(rate.samples) if name == "attack_success" else value[2] for name in names),
        )
        for rate, value in zip(rates, found, strict=True)
    ]


def _read(
    paths: list[Path], names: tuple[str, str], threshold: float | None, level: float | None, labels: list[str]
) -> list[tuple[float, float, int, int]]:
    """The two quantities of each run, and the samples that each rests on, as far as known."""
    kinds = {"samples" if path.is_dir() else "file" for path in paths}
    if len(kinds) > 1:
        raise ValueError("Folders of samples and result files stand in one figure; compare runs of one kind.")
    if kinds == {"samples"}:
        samples = [load_samples(path) for path in paths]
        check_same_settings(samples)

        def value(run: SampleSet, name: str) -> float:
            if name == "prob_bad":
                return tails.prob_below(run.column(), threshold).value
            if name == "cvar":
                return tails.cvar(run.column(), level).value
            return float(run.column(name).mean())

        return [(value(each, names[0]), value(each, names[1]), *[len(each.table)] * 2) for each in samples]
    contents = [_read_json(path) for path in paths]
    if all({"policy_updates", "samples"} <= set(content) for content in contents):
        contents = [run["final"] | {"settings": {}} for run in load_runs(paths, labels)]
    else:
        for path, content in zip(paths, contents, strict=True):
            if "settings" not in content:
                raise ValueError(
                    f"`{path}` has no `settings`, so that nothing says which runs it may be compared with."
                )
            if not isinstance(content["settings"], dict):
                raise ValueError(f"`{path}` has `settings` that are no settings by name; write them as a JSON object.")
            name = first_difference(content["settings"], contents[0]["settings"])
            if name is not None:
                raise ValueError(
                    f"`{path}` and `{paths[0]}` differ in the setting `{name}`; compare runs of one kind."
                )
    for path, content in zip(paths, contents, strict=True):
        for name in names:
            for setting, asked in {"prob_bad": {"threshold": threshold}, "cvar": {"level": level}}.get(
                name, {}
            ).items():
                if content["settings"].get(setting) != asked:
                    raise ValueError(
                        f"`{path}` has no `{name}` at `{setting}={asked}`; ask for the one in its settings."
                    )
            if not is_number(content.get(name)):
                numbers = [key for key, number in content.items() if is_number(number)]
                raise ValueError(f"`{path}` has no number `{name}`; it has {', '.join(numbers) or 'none'}.")
            if name in SHARES and not 0 <= content[name] <= 1:
                raise ValueError(f"`{path}` has the share `{name}` {content[name]}; write it as a number from 0 to 1.")
    return [(float(content[names[0]]), float(content[names[1]]), 0, 0) for content in contents]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"`{path}` cannot be read as results ({error}); run it again.") from error
    if not isinstance(content, dict) or path.name in (HEADER, COMPLETE):
        raise ValueError(f"`{path}` is no file of results; of samples, name the folder.")
    return content
