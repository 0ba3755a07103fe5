"""`trl-repulse merge`: an adapter and its base model, as one model with full weights."""

import argparse
import shutil
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard


DTYPES = ("auto", "float32", "float16", "bfloat16")
_CARD = "README.md"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments."""
    parser.add_argument("adapter", metavar="ADAPTER_DIR", type=Path, help="folder of a saved adapter")
    parser.add_argument("output", metavar="OUTPUT_DIR", help="folder to write to; new or empty")
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
    """Merges and returns 0. Nothing is written if that fails."""
    merge(args.adapter, Path(args.output), args.dtype, args.base_model, args.allow_proposal, args.trust_remote_code)
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
    Merges a saved adapter of a language model into its base, and saves model and tokenizer in a folder that is new or empty. If
    head and embedding share weights and the adapter changes one of them, they are separated. The saved model is loaded again,
    and deleted with a `ValueError` unless its logits are those of the adapter.
    """
    _check(adapter, output, allow_proposal)

    import torch
    from transformers import AutoModelForCausalLM

    from ..models._loading import load_adapter, load_model, load_tokenizer

    loading: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    try:
        adapted = load_adapter(AutoModelForCausalLM, str(adapter), base_model, dtype=dtype, **loading)
    except ValueError as error:
        raise ValueError(f"`{adapter}` cannot be merged: {error}") from error
    rows = adapted.get_input_embeddings().weight.shape[0]
    ids = torch.linspace(0, rows - 1, min(rows, 16)).long().view(1, -1)
    expected = _logits(adapted, ids)
    _untie(adapted)
    model = adapted.merge_and_unload(safe_merge=True)
    has_tokenizer = (adapter / "tokenizer_config.json").is_file()
    tokenizer = load_tokenizer(str(adapter if has_tokenizer else base_model or adapter), "adapter", **loading)
    existed = output.exists()
    try:
        model.save_pretrained(output)
        tokenizer.save_pretrained(output)
        _write_card(adapter, output)
        del adapted, model  # there need not be room for two
        saved = load_model(AutoModelForCausalLM, str(output), "merged model", dtype="auto", **loading)
        _check_logits(_logits(saved, ids), expected, 0.01 if saved.dtype == torch.float32 else 0.25, adapter)
    except BaseException:
        for path in output.iterdir() if output.is_dir() else ():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        if output.is_dir() and not existed:
            output.rmdir()
        raise


def _write_card(adapter: Path, output: Path) -> None:
    """Copies the model card of an adapter and makes it one of a full model; that of a proposal names no base. A card that PEFT alone wrote
    is not copied."""
    if "trl" not in _tags(adapter):
        return
    card = ModelCard.load(adapter / _CARD, ignore_metadata_errors=True)
    card.data.library_name, card.data.model_name = "transformers", output.resolve().name
    card.text = card.text.replace(
        f"# Model Card for {adapter.resolve().name}", f"# Model Card for {output.resolve().name}", 1
    )
    card.data.tags = [tag for tag in card.data.tags if tag != "lora" and not tag.startswith("base_model:adapter:")]
    if is_proposal(adapter):
        card.data.base_model = None
    card.save(output / _CARD)


def _untie(adapted: Any) -> None:
    """Gives the head its own weights if it shares those of the embedding and the adapter changes one of the two."""
    base = adapted.get_base_model()
    layers = [base.get_input_embeddings(), base.get_output_embeddings()]
    if None in layers:
        return
    embedding, head = (getattr(layer, "base_layer", layer) for layer in layers)
    changed = any(adapted.prefix in name for layer in layers for name, _ in layer.named_parameters())
    # PEFT itself separates copies of whole layers (`modules_to_save`)
    if changed and getattr(head, "weight", None) is embedding.weight:
        head.weight = type(head.weight)(head.weight.detach().clone(), requires_grad=False)
        base.config.tie_word_embeddings = base.config.get_text_config().tie_word_embeddings = False


def _logits(model: Any, ids: Any) -> Any:
    import torch

    with torch.no_grad():
        return model.eval()(input_ids=ids.to(model.device)).logits.float().cpu()


def _check_logits(found: Any, expected: Any, tolerance: float, adapter: Path) -> None:
    """Refuses logits that differ by more than a share of their spread: merged weights are rounded, in half precision to some hundredths of
    it. Adding a constant to all changes no probability."""
    found, expected = (logits - logits.mean(dim=-1, keepdim=True) for logits in (found, expected))
    distance = ((found - expected).square().mean() / expected.square().mean().clamp(min=1e-12)).sqrt().item()
    if not distance <= tolerance:
        raise ValueError(
            f"{adapter} cannot be merged: the merged model gives other logits (off by {distance:.2g} of their spread); evaluate the "
            "adapter as it is, or merge with `--dtype float32`."
        )


def _check(adapter: Path, output: Path, allow_proposal: bool) -> None:
    """Refuses what can be refused before a model is loaded."""
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


def is_proposal(folder: Path) -> bool:
    """Whether a folder's model or adapter is a proposal, by the tags of its card; `False` without a card."""
    return {"proposal", "not-for-deployment"} <= set(_tags(folder))


def _tags(folder: Path) -> list[str]:
    """Tags of a model's card, if it has one."""
    if not (folder / _CARD).is_file():
        return []
    return ModelCard.load(folder / _CARD, ignore_metadata_errors=True).data.tags or []
