"""Checks that two models share a vocabulary, so that their log-probabilities of a completion can be compared."""

from collections.abc import Sequence

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ._loading import load_tokenizer


def check_reference(
    name: str | None,
    reference: PreTrainedModel,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt_ids: Sequence[Sequence[int]],
    trust_remote_code: bool = False,
) -> None:
    """
    Raises `ValueError` if the reference has a smaller or another vocabulary than the model.

    Added tokens may have other names, since fine-tuning uses reserved ones. Of all others, no token of the prompts may
    differ, and at most half of the vocabulary. `name` is where the reference was loaded from, with its tokenizer if
    any.
    """
    own, others = vocab_size(model), vocab_size(reference)
    label = name or reference.config._name_or_path
    if others < own:
        raise ValueError(
            f"The reference `{label}` has a vocabulary of {others} tokens and the model one of {own}; resize the "
            "reference's embeddings to it with `resize_token_embeddings`, or give another reference."
        )
    differ, shared = {}, 0
    if name is not None:
        differ, shared = _differences(name, tokenizer, trust_remote_code)
    met = sorted(differ.keys() & {i for ids in prompt_ids for i in ids})
    if met or 2 * len(differ) > shared:
        token = (met or sorted(differ))[0]
        raise ValueError(
            f"The reference `{label}` has another vocabulary than the model, with {differ[token][1]!r} for its token {token}, "
            f"{differ[token][0]!r}; give a reference with the model's tokenizer."
        )


def check_vocabulary_size(model: PreTrainedModel, label: str, policy: PreTrainedModel) -> None:
    """Raises `ValueError` if the sizes of the vocabularies of a second model and the policy differ."""
    size, own = vocab_size(model), vocab_size(policy)
    if size != own:
        raise ValueError(
            f"{label} has a vocabulary of {size} tokens and the policy one of {own}, but both read the same completions; pass a "
            "model of the policy's family."
        )


def check_same_tokens(
    name: str, label: str, tokenizer: PreTrainedTokenizerBase, trust_remote_code: bool = False
) -> None:
    """Raises `ValueError` if the model at path or Hub id `name` was saved with a tokenizer that gives another meaning
    to a token. Names of added tokens may differ; a model without a tokenizer passes."""
    differ, _ = _differences(name, tokenizer, trust_remote_code)
    if differ:
        token = min(differ)
        raise ValueError(
            f"{label} has a tokenizer of its own, with {differ[token][1]!r} for the policy's token {token}, "
            f"{differ[token][0]!r}; pass a model with the policy's tokenizer."
        )


def _differences(
    name: str, tokenizer: PreTrainedTokenizerBase, trust_remote_code: bool
) -> tuple[dict[int, tuple[str, str]], int]:
    """Tokens (ours, theirs) by id where the tokenizer and that of a saved model differ, and the number of ids in both;
    added tokens are left out."""
    try:
        other = load_tokenizer(name, "model", trust_remote_code=trust_remote_code)
    except ValueError:
        return {}, 0  # weights without a tokenizer, such as an adapter
    added = {i for each in (tokenizer, other) for i in each.get_added_vocab().values()}
    ours, theirs = ({i: token for token, i in each.get_vocab().items()} for each in (tokenizer, other))
    shared = (ours.keys() & theirs.keys()) - added
    return {i: (ours[i], theirs[i]) for i in shared if ours[i] != theirs[i]}, len(shared)


def vocab_size(model: PreTrainedModel) -> int:
    """Number of tokens in the model's vocabulary."""
    return int(model.config.get_text_config().vocab_size)
