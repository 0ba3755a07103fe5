"""`trl-repulse merge`: an adapter and its base model, as one model with full weights."""

import argparse
import shutil
import sys
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard


DTYPES = ("auto", "float32", "float16", "bfloat16")
_CARD = "README.md"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments."""
    parser.add_argument("adapter", metavar="ADAPTER_DIR", type=Path, help="folder of a saved adapter")
    parser.add_argument("output", metavar="OUTPUT_DIR", type=Path, help="folder to write to; new or empty")
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="precision of the weights (that of the base)")
    parser.add_argument(
        "--base_model", metavar="MODEL", help="path or Hub id of the base (the one the adapter was trained over)"
    )
    parser.add_argument("--trust_remote_code", action="store_true", help="run Python code that comes with the base")
    parser.add_argument(
        "--allow_proposal",
        action="store_true",
        help="merge the adapter of a proposal, a model that seeks the worst outputs; never deploy the result",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Merges and returns 0, or 1 with a message if that cannot be done; then nothing is written."""
    try:
        merge(args.adapter, args.output, args.dtype, args.base_model, args.allow_proposal, args.trust_remote_code)
    except (ValueError, OSError, RuntimeError, ImportError) as error:
        print(f"trl-repulse merge: {error}", file=sys.stderr)
        return 1
    print(f"Merged {args.adapter} into {args.output}.")
    return 0


def merge(
    adapter: Path,
    output: Path,
    dtype: str = "auto",
    base_model: str | None = None,
    allow_proposal: bool = False,
    trust_remote_code: bool = False,
) -> None:
    """
    Merges a saved adapter of a language model into its base and saves model and tokenizer.

    Args:
        adapter (`Path`):
            Folder of the adapter.
        output (`Path`):
            Folder to write to; new or empty.
        dtype (`str`, *optional*, defaults to `"auto"`):
            Precision of the weights, `"auto"` for that of the base.
        base_model (`str`, *optional*):
            Path or id of the base, if not the one that the adapter names.
        allow_proposal (`bool`, *optional*, defaults to `False`):
            Whether to merge a proposal's adapter, with the card that warns of it.
        trust_remote_code (`bool`, *optional*, defaults to `False`):
            Whether to run Python code that comes with the base.

    Raises:
        `ValueError`: If there is no adapter, it is a proposal's or cannot be merged, or the output is in the way.
        `OSError`: If the base or its tokenizer cannot be loaded.
        `RuntimeError`: If the adapter's weights do not fit the base.
    """
    config = _check(adapter, output, allow_proposal)

    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    base_model = base_model or config.base_model_name_or_path
    if not base_model:
        raise ValueError(f"{adapter} does not say over which model it was trained; pass `--base_model`.")
    loading: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    base = AutoModelForCausalLM.from_pretrained(base_model, dtype=dtype, **loading)
    model = PeftModel.from_pretrained(base, adapter).merge_and_unload(safe_merge=True)
    has_tokenizer = (adapter / "tokenizer_config.json").is_file()
    tokenizer = AutoTokenizer.from_pretrained(adapter if has_tokenizer else base_model, **loading)
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)
    if is_proposal(adapter):
        shutil.copy(adapter / _CARD, output / _CARD)


def _check(adapter: Path, output: Path, allow_proposal: bool) -> Any:
    """The adapter's configuration, if all that can be known before anything is loaded allows to merge it."""
    if not (adapter / "adapter_config.json").is_file():
        if (adapter / "config.json").is_file():
            raise ValueError(f"{adapter} holds a model with full weights; there is nothing to merge.")
        raise ValueError(f"{adapter} holds no adapter: it has no `adapter_config.json`.")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(f"{output} is in the way; name a folder that is new or empty.")
    if is_proposal(adapter) and not allow_proposal:
        raise ValueError(
            f"{adapter} is the adapter of a proposal, which was trained to seek out the worst outputs. To merge it all "
            "the same, for use in training and evaluation alone, pass `--allow_proposal`."
        )
    try:
        from peft import PeftConfig
    except ImportError as error:
        raise ImportError('`merge` needs peft: pip install "trl-repulse[peft]".') from error

    config = PeftConfig.from_pretrained(adapter)
    if config.task_type not in ("CAUSAL_LM", None):
        raise ValueError(f"{adapter} is an adapter of another kind of model (`task_type={config.task_type}`).")
    if config.is_prompt_learning or config.is_adaption_prompt:
        raise ValueError(f"A {config.peft_type.value} adapter has no weights that could be merged into the base.")
    return config


def is_proposal(folder: Path) -> bool:
    """
    Whether a folder holds a proposal, by the tags of its card.

    Args:
        folder (`Path`):
            Folder of a model or an adapter.

    Returns:
        `bool`: `False` without a card.
    """
    if not (folder / _CARD).is_file():
        return False
    tags = ModelCard.load(folder / _CARD, ignore_metadata_errors=True).data.tags or []
    return {"proposal", "not-for-deployment"} <= set(tags)
