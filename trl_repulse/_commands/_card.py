"""What was measured of a model, on the model card in its folder: a section to read, and metrics for the Hub."""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard

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
    """
    Declares `--card`.

    Args:
        parser:
            The sub-command's parser, or a group of its arguments.
    """
    parser.add_argument(
        "--card",
        metavar="MODEL_DIR",
        type=Path,
        help="folder of the model, on whose card (README.md) the report is written",
    )


def check_card(folder: Path | None, models: int = 1) -> None:
    """
    Refuses a folder without a model, and a report of several models.

    Args:
        folder (`Path`, *optional*):
            What `--card` names. `None` passes.
        models (`int`, *optional*, defaults to `1`):
            How many models the report is of.

    Raises:
        `ValueError`: If the folder holds no model, or there are several models.
    """
    if folder is None:
        return
    if models > 1:
        raise ValueError("`--card` is for one model; leave it out for several.")
    if not any((folder / name).is_file() for name in ("config.json", "adapter_config.json")):
        raise ValueError(f"`--card {folder}` holds no model; name the folder of the model that was measured.")


def check_measured(folder: Path, weights: str, name: str) -> None:
    """
    Refuses the card of another model than the one that was measured. Warns if the folder's model cannot be loaded.

    Args:
        folder (`Path`):
            What `--card` names.
        weights (`str`):
            Hash of the weights that were measured, as [`~trl_repulse.evaluation._generation.hash_model`] gives it.
        name (`str`):
            What the measured model was loaded by, for the message.

    Raises:
        `ValueError`: If the model in the folder has other weights, in every precision.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from .._loading import load_model
    from ..evaluation._generation import hash_model

    try:
        model = load_model(AutoModelForCausalLM, str(folder), "model", dtype="auto")
    except ValueError as error:  # for one, a model with code of its own, which was allowed when it was measured
        said = "Whether its model is the one that was measured was not checked"
        logging.get_logger(__name__).warning(f"`--card {folder}`: {said}. {error}")
        return
    for dtype in (None, torch.float32, torch.bfloat16, torch.float16):  # what `--dtype` may have said
        if hash_model(model, dtype) == weights:
            return
    raise ValueError(
        f"`--card {folder}` holds other weights than the model that was measured, `{name}`; name the folder of that model, "
        "or measure this one."
    )


def write_on_card(
    folder: Path, heading: str, text: str, metrics: Mapping[str, Estimate], data: str, confidence: float
) -> None:
    """
    Writes a section on a model card, in the place of an earlier one of the same heading, and its metrics into the card's
    `model-index`. A model without a card gets one.

    Args:
        folder (`Path`):
            Folder of the model.
        heading (`str`):
            Heading of the section.
        text (`str`):
            The section, Markdown.
        metrics (`Mapping[str, Estimate]`):
            Estimates by name; those that are not finite are left out.
        data (`str`):
            What the model was measured on.
        confidence (`float`):
            Nominal coverage of the intervals.
    """
    path = folder / "README.md"
    card = ModelCard.load(path) if path.is_file() else ModelCard(_NEW.format(name=folder.resolve().name))
    begin, end = f"<!-- {heading} -->", f"<!-- end of {heading} -->"
    section = f"{begin}\n### {heading}\n\n{text}\n\n{end}"
    if begin in card.text and end in card.text.partition(begin)[2]:
        card.text = re.sub(f"{re.escape(begin)}.*?{re.escape(end)}", lambda _: section, card.text, flags=re.DOTALL)
    elif "\n### Framework versions" in card.text:  # of a card that TRL wrote
        card.text = card.text.replace("\n### Framework versions", f"\n{section}\n\n### Framework versions", 1)
    else:
        card.text = f"{card.text.rstrip()}\n\n{section}\n"
    kept = [each for each in card.data.eval_results or [] if each.dataset_type != heading]
    card.data.model_name = card.data.model_name or folder.resolve().name
    card.data.eval_results = kept + [
        EvalResult(
            task_type="text-generation",
            dataset_type=heading,
            dataset_name=data,
            metric_type=name,
            metric_name=name,
            metric_value=float(f"{estimate.value:.6g}"),
            metric_args={
                "confidence": confidence,
                **{
                    end: float(f"{getattr(estimate, end):.6g}") for end in ("low", "high") if _is_finite(estimate, end)
                },
            },
        )
        for name, estimate in metrics.items()
        if _is_finite(estimate, "value")
    ]
    card.save(path)


def _is_finite(estimate: Estimate, name: str) -> bool:
    return math.isfinite(getattr(estimate, name))
