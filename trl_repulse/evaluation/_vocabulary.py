"""Whether two models mean the same by a token, as their log-probabilities of one completion suppose."""

from collections.abc import Sequence

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..generation._padding import vocab_size
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
    try:
        other = None if name is None else load_tokenizer(name, "reference", trust_remote_code=trust_remote_code)
    except ValueError:
        other = None  # a folder of weights alone, as of an adapter
    if other is None:
        return
    added = {i for each in (tokenizer, other) for i in each.get_added_vocab().values()}
    ours, theirs = ({i: token for token, i in each.get_vocab().items()} for each in (tokenizer, other))
    shared = (ours.keys() & theirs.keys()) - added
    differ = {i for i in shared if ours[i] != theirs[i]}
    met = sorted(differ & {i for ids in prompt_ids for i in ids})
    if met or 2 * len(differ) > len(shared):
        token = (met or sorted(differ))[0]
        raise ValueError(
            f"The reference `{label}` has another vocabulary than the model, with {theirs[token]!r} for its token {token}, "
            f"{ours[token]!r}; give a reference with the model's tokenizer."
        )
