"""Completions as text, as they read behind their prompts, and what a tokenizer adds to plain prompts."""

from collections.abc import Sequence
from os.path import commonprefix
from typing import Any

from tokenizers.decoders import ByteLevel, Fuse
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.utils import logging


logger = logging.get_logger(__name__)


def joins(tokenizer: PreTrainedTokenizerBase) -> bool:
    """
    Whether the text of tokens is that of the first ones followed by that of the others, wherever whole characters are parted.

    Args:
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            The tokenizer.

    Returns:
        `bool`: `True` for decoders known to do so, those of byte-level tokenizers above all. Those of SentencePiece drop the space
        that begins a text, and others put one between tokens.
    """
    if not isinstance(tokenizer, PreTrainedTokenizerFast) or tokenizer.clean_up_tokenization_spaces:
        return False
    return isinstance(tokenizer.backend_tokenizer.decoder, ByteLevel | Fuse)


def completion_texts(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Any],
    prompt_ids: Sequence[Sequence[int]],
    completion_ids: Sequence[Sequence[int]],
    **options: Any,
) -> list[str]:
    """
    Texts of completions, without special tokens.

    After a plain prompt it is what the text of all tokens has beyond the prompt, so that prompt and completion together read as the
    model wrote them. The answer to a conversation is decoded by itself, as in TRL: a message begins with it.

    Args:
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            The model's tokenizer.
        prompts (`Sequence`):
            The prompt of each completion, all of them plain text or all messages.
        prompt_ids, completion_ids (`Sequence[Sequence[int]]`):
            Tokens of each prompt and of each completion.
        **options:
            Further arguments of `batch_decode`.

    Returns:
        `list[str]`: one text a completion.
    """

    def decode(rows: Sequence[Sequence[int]]) -> list[str]:
        return tokenizer.batch_decode(list(map(list, rows)), skip_special_tokens=True, **options)

    if not len(prompts) or not isinstance(prompts[0], str):
        return decode(completion_ids)
    keys = list(map(tuple, prompt_ids))
    distinct = list(dict.fromkeys(keys))
    beginnings = dict(zip(distinct, decode(distinct), strict=True))
    cut = any(text.endswith("\ufffd") for text in beginnings.values())  # in the middle of a character
    if joins(tokenizer) and not cut:
        return decode(completion_ids)
    wholes = decode([[*key, *ids] for key, ids in zip(keys, completion_ids, strict=True)])
    # A prompt that is not decoded as it was written may still be how the whole begins, as with a space at its end
    return [
        next(
            (whole.removeprefix(begin) for begin in (prompt, beginnings[key]) if whole.startswith(begin)),
            whole[len(commonprefix([whole, beginnings[key]])) :],
        )
        for prompt, key, whole in zip(prompts, keys, wholes, strict=True)
    ]


def completion_tokens(tokenizer: PreTrainedTokenizerBase, prompt: Any, text: str) -> list[int]:
    """
    Tokens of a completion's text, as they follow a prompt: the inverse of [`completion_texts`], as far as there is one.

    Args:
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            The model's tokenizer.
        prompt (`str` or `list[dict]`):
            The prompt.
        text (`str`):
            The completion.

    Returns:
        `list[int]`: its tokens.
    """

    def encode(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    if isinstance(prompt, str) and not joins(tokenizer):
        # By itself a text has a space more with SentencePiece; the last token of the prompt may be one with the first of the text
        for before in (prompt, "\n"):
            begin, whole = encode(before), encode(before + text)
            if whole[: len(begin)] == begin:
                return whole[len(begin) :]
    return encode(text)


def check_added_tokens(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Any], prompt_ids: Sequence[Sequence[int]] | None = None
) -> None:
    """
    Refuses a tokenizer that ends plain prompts with its end token; warns once of another at their end, or of twice the same at their
    beginning.

    Args:
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            The model's tokenizer.
        prompts (`Sequence`):
            Prompts; of messages nothing is checked, since their template writes all special tokens.
        prompt_ids (`Sequence[Sequence[int]]`, *optional*):
            Their tokens. If `None`, those of the first prompt alone are looked at.

    Raises:
        `ValueError`: If prompts end with the end token because the tokenizer adds it.
    """
    if not len(prompts) or not isinstance(prompts[0], str):
        return
    first = tokenizer(next(filter(None, prompts), ""), return_special_tokens_mask=True)
    ids, added = first["input_ids"], first["special_tokens_mask"]
    if all(added):
        return
    before, behind = added.index(0), added[::-1].index(0)
    end = ids[len(ids) - behind :]
    if tokenizer.eos_token_id in end:
        raise ValueError(
            f"The tokenizer ends plain prompts with its end token {tokenizer.eos_token!r}, behind which a model begins another text; load "
            f"the tokenizer, set its `add_bos_token = {before > 0}` and `add_eos_token = False`, and save or pass it."
        )
    if end:
        logger.warning_once(
            f"The tokenizer adds {tokenizer.decode(end)!r} to the end of plain prompts, and completions follow it. Take it out of the "
            "tokenizer's post-processor, unless the model was trained with it."
        )
    if before and any(row[before : 2 * before] == ids[:before] for row in prompt_ids or [ids]):
        token = tokenizer.decode(ids[:before])
        logger.warning_once(
            f"Prompts begin with {token!r} twice: it is in their text, as where a chat template wrote it, and the tokenizer adds it. Take it "
            "out of the text, or pass the messages themselves."
        )
