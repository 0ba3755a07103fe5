"""What was measured of a model, on the model card in its folder: a section to read, and metrics for the Hub."""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from ..evaluation.records import write_atomically
from ..evaluation.tails import Estimate


_METADATA = re.compile(r"(\ufeff?\s*---[^\S\n]*\n)(.*?)(^---[^\S\n]*(?:\n|\Z))", re.DOTALL | re.MULTILINE)
_INDEX = re.compile(r"^model-index:.*\n(?:[ -].*\n|#.*\n(?=[ #-]))*", re.MULTILINE)
_NEW = """\
---
library_name: transformers
pipeline_tag: text-generation
tags:
- trl-repulse
---

# Model card of {name}
"""


def add_card(parser: Any) -> None:
    """Declares `--card`."""
    text = "folder of the model, on whose card (README.md) the report is written"
    parser.add_argument("--card", metavar="MODEL_DIR", type=Path, help=text)


def check_card(folder: Path | None, models: int = 1) -> None:
    """Raises a `ValueError` if the folder that `--card` names holds no model or a card that cannot be read, or the report has several models."""
    if folder is None:
        return
    if models > 1:
        raise ValueError("`--card` is for one model; leave it out for several.")
    if not any((folder / name).is_file() for name in ("config.json", "adapter_config.json")):
        raise ValueError(f"`--card {folder}` holds no model; name the folder of the model that was measured.")
    _read_card(folder)  # mistakes in it, before anything is drawn


def check_measured(
    folder: Path | str, weights: str, name: str, flag: str = "--card", measured: str = "was measured", **options: Any
) -> None:
    """
    Raises a `ValueError` if no precision of the model in the folder has the hash of the measured weights. Warns if that model
    cannot be loaded, with `options`. `name` is that of the measured model, for the message, in which `flag` names the folder.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from ..evaluation._generation import hash_model
    from ..models._loading import load_model

    try:
        model = load_model(AutoModelForCausalLM, str(folder), "model", dtype="auto", **options)
    except ValueError as error:  # such as a model with custom code, which was allowed when it was measured
        unchecked = "Whether its model is the one that was measured was not checked"
        logging.get_logger(__name__).warning(f"`{flag} {folder}`: {unchecked}. {error}")
        return
    for dtype in (None, torch.float32, torch.bfloat16, torch.float16):  # which `--dtype` may have chosen
        if hash_model(model, dtype) == weights:
            return
    raise ValueError(
        f"`{flag} {folder}` holds other weights than the model that {measured}, `{name}`; name the folder of that model, "
        "or measure this one."
    )


def write_on_card(
    folder: Path, heading: str, text: str, metrics: Mapping[str, Estimate], data: str, confidence: float
) -> None:
    """
    Writes a section (Markdown) on the model card in a folder, and its metrics into the card's `model-index`. Replaces an earlier
    section with the heading and its metrics; all but the `model-index` stays as it is, byte for byte. A model without a card gets one.
    `data` says what the model was measured on, and `confidence` is the nominal coverage of the intervals. Metrics that are not
    finite are left out.
    """
    newline, begin, front, end, body = _read_card(folder)
    numbers = []
    for name, estimate in metrics.items():
        value, *ends = (float(f"{number:.6g}") for number in (estimate.value, estimate.low, estimate.high))
        known = {side: end for side, end in zip(("low", "high"), ends, strict=True) if math.isfinite(end)}
        if math.isfinite(value):
            numbers.append({"type": name, "value": value, "name": name, "args": {"confidence": confidence} | known})
    if numbers:
        task, dataset = {"type": "text-generation"}, {"name": data, "type": heading}
        result = {"task": task, "dataset": dataset, "metrics": numbers}
        front = _with_result(front, folder.resolve().name, result)
    first, last = f"<!-- {heading} -->", f"<!-- end of {heading} -->"
    section = f"{first}\n### {heading}\n\n{text}\n\n{last}"
    before, found, rest = body.partition(first)
    if found and last in rest:
        body = before + section + rest.partition(last)[2]
    elif "\n### Framework versions" in body:  # of a card that TRL wrote
        body = body.replace("\n### Framework versions", f"\n{section}\n\n### Framework versions", 1)
    else:
        body += "\n" * (2 - body.endswith("\n")) + f"{section}\n"
    content = (begin + front + end + body).replace("\n", newline).encode()
    write_atomically(folder / "README.md", lambda partial: partial.write_bytes(content))


def _read_card(folder: Path) -> tuple[str, str, str, str, str]:
    """
    The card in a folder, or a new one: its line break, which is written as `\\n` in all that follows, the line before its metadata, the
    metadata (YAML), the line behind them, and the text.
    """
    path = folder / "README.md"
    try:
        text = path.read_bytes().decode() if path.is_file() else _NEW.format(name=folder.resolve().name)
        newline = "\r\n" if "\n" in text and text.count("\r\n") == text.count("\n") else "\n"
        text = text.replace(newline, "\n")
        parts = _METADATA.match(text)
        begin, front, end = parts.groups() if parts else ("---\n", "", "---\n")
        models = (yaml.safe_load(front) or {}).get("model-index", [])
    except UnicodeDecodeError as error:
        raise ValueError(f"`{path}` is not UTF-8 text ({error}); save it as UTF-8.") from error
    except yaml.YAMLError as error:
        raise ValueError(f"`{path}` has metadata that are not valid YAML: {' '.join(str(error).split())}.") from error
    if not isinstance(models, list) or not all(isinstance(each, dict) and "name" in each for each in models):
        raise ValueError(
            f"`{path}` has a `model-index` that is no list of models with a `name` and `results`; correct it, or remove it."
        )
    return newline, begin, front, end, text[parts.end() :] if parts else text


def _with_result(front: str, name: str, result: dict[str, Any]) -> str:
    """
    Metadata with a result in the `model-index` in place of earlier ones of its data set: of the model of that name, of the only model, or of
    a new one.
    """
    block = _INDEX.search(front)
    models = yaml.safe_load(block[0])["model-index"] if block else []
    model = next((each for each in models if each["name"] == name), models[0] if len(models) == 1 else None)
    if model is None:
        models.append(model := {"name": name})
    for each in models:
        known = each.get("results") or []
        each["results"] = [
            other for other in known if other.get("dataset", {}).get("type") != result["dataset"]["type"]
        ]
    model["results"].append(result)
    written = yaml.safe_dump({"model-index": models}, sort_keys=False, allow_unicode=True)
    return front[: block.start()] + written + front[block.end() :] if block else front + written
