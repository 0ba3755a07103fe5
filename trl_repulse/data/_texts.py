"""Text of completions as it reads after the prompt, and tokens that a tokenizer adds to plain prompts."""

from collections.abc import Sequence
from os.path import commonprefix
from typing import Any

from tokenizers.decoders import ByteLevel, Fuse
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.utils import logging


logger = logging.get_logger(__name__)


def joins(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether decoding in two parts gives the same text as decoding at once. True for byte-level decoders;
    SentencePiece drops the space at the start of a text, and others put spaces between tokens."""
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
    Texts of completions, without special tokens; `options` go to `batch_decode`.

    After a plain prompt, a completion is what the text of all tokens has beyond the prompt, so that both together read
    as the model wrote them. The answer to a conversation is decoded on its own, as in TRL. `prompt_ids` and
    `completion_ids` hold one row a completion; prompts are all plain text or all messages.
    """

    def decode(rows: Sequence[Sequence[int]]) -> list[str]:
        return tokenizer.batch_decode(list(map(list, rows)), skip_special_tokens=True, **options)

    if not len(prompts) or not isinstance(prompts[0], str):
        return decode(completion_ids)
    keys = list(map(tuple, prompt_ids))
    distinct = list(dict.fromkeys(keys))
    beginnings = dict(zip(distinct, decode(distinct), strict=True))
    cut = any(text.endswith("\ufffd") for text in beginnings.values())  # a prompt may end in the middle of a character
    if joins(tokenizer) and not cut:
        return decode(completion_ids)
    wholes = decode([[*key, *ids] for key, ids in zip(keys, completion_ids, strict=True)])
    # The whole text may begin with the prompt even if the prompt's tokens decode to something else (a space at its end)
    return [
        next(
            (whole.removeprefix(begin) for begin in (prompt, beginnings[key]) if whole.startswith(begin)),
            whole[len(commonprefix([whole, beginnings[key]])) :],
        )
        for prompt, key, whole in zip(prompts, keys, wholes, strict=True)
    ]


def check_added_tokens(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Any], prompt_ids: Sequence[Sequence[int]] | None = None
) -> None:
    """Raises `ValueError` if the tokenizer ends plain prompts with its end token. Warns once if it adds another token
    at the end, or repeats the first one. Without `prompt_ids`, only the first prompt is checked; messages are not,
    since their template writes all special tokens."""
    if not len(prompts) or not isinstance(prompts[0], str):
        return
    encoded = tokenizer(next(filter(None, prompts), ""), return_special_tokens_mask=True)
    ids, added = encoded["input_ids"], encoded["special_tokens_mask"]
    if all(added):
        return
    num_before, num_behind = added.index(0), added[::-1].index(0)
    end = ids[len(ids) - num_behind :]
    if tokenizer.eos_token_id in end:
        raise ValueError(
            f"The tokenizer ends plain prompts with its end token {tokenizer.eos_token!r}, behind which a model begins another text; load "
            f"the tokenizer, set its `add_bos_token = {num_before > 0}` and `add_eos_token = False`, and save or pass it."
        )
    if end:
        logger.warning_once(
            f"The tokenizer adds {tokenizer.decode(end)!r} to the end of plain prompts, and completions follow it. Take it out of the "
            "tokenizer's post-processor, unless the model was trained with it."
        )
    if num_before and any(row[num_before : 2 * num_before] == ids[:num_before] for row in prompt_ids or [ids]):
        token = tokenizer.decode(ids[:num_before])
        logger.warning_once(
            f"Prompts begin with {token!r} twice: it is in their text, as where a chat template wrote it, and the tokenizer adds it. Take it "
            "out of the text, or pass the messages themselves."
        )
