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
    """Declares `--card`."""
    parser.add_argument(
        "--card",
        metavar="MODEL_DIR",
        type=Path,
        help="folder of the model, on whose card (README.md) the report is written",
    )


def check_card(folder: Path | None, models: int = 1) -> None:
    """Raises a `ValueError` if the folder that `--card` names holds no model, or the report has several models."""
    if folder is None:
        return
    if models > 1:
        raise ValueError("`--card` is for one model; leave it out for several.")
    if not any((folder / name).is_file() for name in ("config.json", "adapter_config.json")):
        raise ValueError(f"`--card {folder}` holds no model; name the folder of the model that was measured.")


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
    section with the heading. A model without a card gets one. `data` says what the model was measured on, and `confidence` is the
    nominal coverage of the intervals. Metrics that are not finite are left out.
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
                    end: float(f"{bound:.6g}")
                    for end, bound in (("low", estimate.low), ("high", estimate.high))
                    if math.isfinite(bound)
                },
            },
        )
        for name, estimate in metrics.items()
        if math.isfinite(estimate.value)
    ]
    card.save(path)
