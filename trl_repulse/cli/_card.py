"""What was measured of a model, on the model card in its folder: a section to read, and metrics for the Hub."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCard

from ..evaluation.records import write_atomically
from ..evaluation.tails import Estimate


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
    """Raises a `ValueError` if no precision of the model in the folder has the hash `weights` (of `hash_model`). Warns if that
    model cannot be loaded, with `options`. `name` is that of the measured model, for the message, in which `flag` names the folder."""
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
    """Writes a section (Markdown) on the model card in a folder, and its metrics into the card's `model-index`. Replaces an earlier section
    with the heading and its metrics. A model without a card gets one. `data` says what the model was measured on, and `confidence` is the
    nominal coverage of the intervals. Metrics and ends of intervals that are not finite are left out. Raises as [`_read_card`]."""
    card = _read_card(folder)
    results = [result for result in card.data.eval_results or [] if result.dataset_type != heading]
    for name, estimate in metrics.items():
        value, *ends = (float(f"{number:.6g}") for number in (estimate.value, estimate.low, estimate.high))
        finite_ends = {side: end for side, end in zip(("low", "high"), ends, strict=True) if math.isfinite(end)}
        if math.isfinite(value):
            more = {"metric_name": name, "metric_args": {"confidence": confidence} | finite_ends}
            results.append(EvalResult("text-generation", heading, data, name, value, **more))
    if results:
        card.data.eval_results = results
        card.data.model_name = card.data.model_name or folder.resolve().name
    first, last = f"<!-- {heading} -->", f"<!-- end of {heading} -->"
    section = f"{first}\n### {heading}\n\n{text}\n\n{last}"
    before, opening, behind = card.text.partition(first)
    if opening and last in behind:
        card.text = before + section + behind.partition(last)[2]
    elif "\n### Framework versions" in card.text:  # of a card that TRL wrote
        card.text = card.text.replace("\n### Framework versions", f"\n{section}\n\n### Framework versions", 1)
    else:
        card.text += f"\n{section}\n"
    write_atomically(folder / "README.md", card.save)


def _read_card(folder: Path) -> ModelCard:
    """The card in a folder, or a new one. Raises a `ValueError` if it cannot be read."""
    path = folder / "README.md"
    if not path.is_file():
        return ModelCard(_NEW.format(name=folder.resolve().name))
    try:
        return ModelCard.load(path)
    except (ValueError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"`{path}` cannot be read as a model card ({reason}); correct it, or remove it.") from error
