"""Whether two models mean the same by a token, as their log-probabilities of one completion suppose."""

from collections.abc import Sequence

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ._loading import load_tokenizer
from .generation._padding import vocab_size


def check_reference(
    name: str | None,
    reference: PreTrainedModel,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt_ids: Sequence[Sequence[int]],
    trust_remote_code: bool = False,
) -> None:
    """
    Refuses a reference of another vocabulary, which would give log-probabilities of other texts.

    Added tokens, such as those of a chat template, may have other names than in the reference: fine-tuning takes what a base
    model keeps in reserve. Of all others, no token of the prompts may differ, and no more than half of the vocabulary.

    Args:
        name (`str`, *optional*):
            Where the reference was loaded from; its tokenizer, if there is one, is compared.
        reference, model ([`~transformers.PreTrainedModel`]):
            The models.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            The model's.
        prompt_ids (`Sequence[Sequence[int]]`):
            Tokens of the prompts.
        trust_remote_code (`bool`, *optional*, defaults to `False`):
            Whether the reference's tokenizer may run code of its own.

    Raises:
        `ValueError`: If the reference has fewer tokens than the model, or others.
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
    """
    Refuses a second model that has more or fewer tokens than the policy.

    Args:
        model, policy ([`~transformers.PreTrainedModel`] or `peft.PeftModel`):
            The models.
        label (`str`):
            What the message calls the second one.

    Raises:
        `ValueError`: If the sizes of their vocabularies differ.
    """
    size, own = vocab_size(model), vocab_size(policy)
    if size != own:
        raise ValueError(
            f"{label} has a vocabulary of {size} tokens and the policy one of {own}, but both read the same completions; pass a "
            "model of the policy's family."
        )


def check_same_tokens(
    name: str, label: str, tokenizer: PreTrainedTokenizerBase, trust_remote_code: bool = False
) -> None:
    """
    Refuses a model to be used with another's tokenizer if it was saved with one that means something else by the same tokens.

    Added tokens may have other names, as in [`check_reference`]. Where no tokenizer was saved there is nothing to compare.

    Args:
        name (`str`):
            Path or Hub id of the model.
        label (`str`):
            What the message calls it.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            The tokenizer it is to be used with.
        trust_remote_code (`bool`, *optional*, defaults to `False`):
            Whether the model's own tokenizer may run code that comes with it.

    Raises:
        `ValueError`: If a token differs.
    """
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
    """What a tokenizer, and that of a saved model, have for the same number; how many numbers both have. None are added tokens'."""
    try:
        other = load_tokenizer(name, "model", trust_remote_code=trust_remote_code)
    except ValueError:
        return {}, 0  # a folder of weights alone, as of an adapter
    added = {i for each in (tokenizer, other) for i in each.get_added_vocab().values()}
    ours, theirs = ({i: token for token, i in each.get_vocab().items()} for each in (tokenizer, other))
    shared = (ours.keys() & theirs.keys()) - added
    return {i: (ours[i], theirs[i]) for i in shared if ours[i] != theirs[i]}, len(shared)
