"""
An attacked prompt as tokens: what comes before the suffix, what comes after, the target, and what a suffix may hold.

Axis letters: P tokens before the suffix, S of the suffix, A after it, T of the target; B suffixes, V vocabulary.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers import PreTrainedTokenizerBase

from ..._prompts import prompt_fault, rendering
from ..._texts import check_added_tokens


Messages = list[dict[str, Any]]
# Stands where the suffix goes while the chat template is rendered; of Unicode's private use area
_MARK = "\ue000"


@dataclass(frozen=True)
class AttackPrompt:
    """
    Text and tokens around a suffix. The prompt that the model reads is `before_ids + suffix + after_ids`.

    Args:
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            The model's tokenizer.
        before_text, after_text (`str`):
            What comes before the suffix, and between it and the answer.
        before_ids, after_ids, target_ids (`list[int]`):
            Their tokens, and the target's.
        add_special_tokens (`bool`):
            Whether the tokenizer puts its own special tokens before the text; a chat template writes them itself.
        suffix_ids (`list[int]`):
            Tokens of the suffix that an attack begins with, as they are in the prompt.
        anchor (`list[int]`):
            Tokens before the suffix that are decoded with it, as some tokenizers drop the space that begins a text.
        trims (`tuple[bool, bool]`, *optional*):
            Whether the chat template drops white space at the beginning of the suffix, and at its end.
        blanks (`int`, *optional*):
            Characters of white space before the suffix that it drops where there is none.
    """

    tokenizer: PreTrainedTokenizerBase
    before_text: str
    after_text: str
    before_ids: list[int]
    after_ids: list[int]
    target_ids: list[int]
    add_special_tokens: bool
    suffix_ids: list[int]
    anchor: list[int]
    trims: tuple[bool, bool] = (False, False)
    blanks: int = 0

    def encode(self, suffixes: list[str]) -> list[list[int]]:
        """
        Tokens of the whole prompt as text.

        Args:
            suffixes (`list[str]`):
                Suffixes as text; an empty one gives the prompt without a suffix.

        Returns:
            `list[list[int]]`: the prompt's tokens, one list a suffix.
        """
        return _encode(self.tokenizer, list(map(self._text, suffixes)), self.add_special_tokens)

    def _text(self, suffix: str) -> str:
        start, end = self.trims
        suffix = suffix.lstrip() if start else suffix
        suffix = suffix.rstrip() if end else suffix
        before = self.before_text if suffix else self.before_text[: len(self.before_text) - self.blanks]
        return before + suffix + self.after_text

    def suffix_texts(self, rows: list[list[int]]) -> list[str]:
        """
        Text of suffixes, as it stands in the prompt.

        Args:
            rows (`list[list[int]]`):
                Tokens.

        Returns:
            `list[str]`: one text a row.
        """
        return _decode_behind(self.tokenizer, self.anchor, rows)

    def splice(self, suffix_ids: list[int]) -> list[int]:
        """
        Tokens of the prompt with a suffix given as tokens.

        Args:
            suffix_ids (`list[int]`):
                The suffix.

        Returns:
            `list[int]`: the prompt's tokens.
        """
        return [*self.before_ids, *suffix_ids, *self.after_ids]

    def survives(self, suffixes: torch.Tensor, scope: Literal["context", "suffix", "off"]) -> torch.Tensor:
        """
        Which suffixes are the tokens that the tokenizer makes of their text.

        Args:
            suffixes (`torch.Tensor` of shape `(B, S)`):
                Tokens.
            scope (`str`):
                `"context"` for the text of the whole prompt, `"suffix"` for the suffix alone, `"off"` for no check.

        Returns:
            `torch.Tensor` of shape `(B,)`: `True` where they are.
        """
        rows = suffixes.tolist()
        if scope == "off" or not rows:
            return torch.ones(len(rows), dtype=torch.bool)
        if scope == "suffix":
            found = _encode(self.tokenizer, decode(self.tokenizer, rows), False)
            return torch.tensor([a == b for a, b in zip(found, rows, strict=True)])
        found = self.encode(self.suffix_texts(rows))
        return torch.tensor([a == self.splice(b) for a, b in zip(found, rows, strict=True)])


def build_prompt(
    tokenizer: PreTrainedTokenizerBase,
    messages: str | Messages,
    target: str,
    prompt_format: Literal["chat", "raw"] = "chat",
    suffix_init: str = " x",
    chat_template_kwargs: dict[str, Any] | None = None,
) -> AttackPrompt:
    """
    Prepares a prompt for an attack: the suffix will follow the text of the last message.

    Args:
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            The model's tokenizer. Its chat template is read, never changed.
        messages (`str` or `list[dict]`):
            What is asked: text, which becomes a message of the user, or a conversation with text as content.
        target (`str`):
            Beginning of the answer to be provoked.
        prompt_format (`str`, *optional*, defaults to `"chat"`):
            `"chat"` for the chat template, `"raw"` for the bare text.
        suffix_init (`str`, *optional*, defaults to `" x"`):
            Suffix that an attack begins with.
        chat_template_kwargs (`dict`, *optional*):
            Further variables of the chat template.

    Returns:
        [`AttackPrompt`]

    Raises:
        `ValueError`: If the target is empty, the tokenizer ends raw text with its end token, there is no chat template, it refuses, drops or repeats the message, a message
            has no role or text, or messages are given for the raw format.
    """
    target_ids = _encode(tokenizer, [target], False)[0] if target.strip() else []
    if not target_ids:
        raise ValueError(f"The target {target!r} is empty; give the text that an answer is to begin with.")
    if prompt_format == "raw":
        if not isinstance(messages, str):
            raise ValueError("`prompt_format='raw'` takes plain text; join the messages, or use 'chat'.")
        before, after, trims, blanks = messages, "", (False, False), 0
    else:
        before, after, trims, blanks = _render(tokenizer, messages, chat_template_kwargs or {})
    special = prompt_format == "raw"
    before_ids = _encode(tokenizer, [before], special)[0]
    if special:
        check_added_tokens(tokenizer, [before], [before_ids])
    after_ids, suffix_ids = _encode(tokenizer, [after, suffix_init], False)
    begun, whole = _encode(tokenizer, [before + suffix_init, before + suffix_init + after], special)
    if before_ids + suffix_ids + after_ids != whole and begun[: len(before_ids)] == before_ids:
        # By themselves they have a space more, as with SentencePiece: as they are in the prompt, if it can be parted there
        if whole[: len(begun)] == begun and len(begun) > len(before_ids):
            suffix_ids, after_ids = begun[len(before_ids) :], whole[len(begun) :]
    anchors = [before_ids[-1:], []] if before else [[]]
    prompts = [
        AttackPrompt(
            tokenizer, before, after, before_ids, after_ids, target_ids, special, suffix_ids, anchor, trims, blanks
        )
        for anchor in anchors
    ]
    here = prompts[0].splice(suffix_ids)
    return next((each for each in prompts if each.encode(each.suffix_texts([suffix_ids])) == [here]), prompts[0])


def decode(tokenizer: PreTrainedTokenizerBase, rows: list[list[int]]) -> list[str]:
    """
    Text of tokens, special ones and white space as they are.

    Args:
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            The tokenizer.
        rows (`list[list[int]]`):
            Tokens.

    Returns:
        `list[str]`: one text a row.
    """
    return tokenizer.batch_decode(rows, clean_up_tokenization_spaces=False)


def allowed_tokens(
    tokenizer: PreTrainedTokenizerBase, num_embeddings: int, allow_non_ascii: bool, forbid_special: bool
) -> torch.Tensor:
    """
    Tokens that a suffix may be made of.

    Args:
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            The model's tokenizer.
        num_embeddings (`int`):
            Rows of the model's embedding, V. Those the tokenizer has no token for are never allowed.
        allow_non_ascii (`bool`):
            Whether tokens beyond printable ASCII are allowed.
        forbid_special (`bool`):
            Whether special tokens are not.

    Returns:
        `torch.Tensor` of shape `(V,)`: `True` where allowed.

    Raises:
        `ValueError`: If no token is left.
    """
    allowed = torch.zeros(num_embeddings, dtype=torch.bool)
    known = min(len(tokenizer), num_embeddings)
    texts = decode(tokenizer, [[i] for i in range(known)])
    allowed[:known] = torch.tensor([allow_non_ascii or (text.isascii() and text.isprintable()) for text in texts])
    if forbid_special:
        added = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        special = [i for i in added | set(tokenizer.all_special_ids) if i < num_embeddings]
        allowed[special] = False
    if not allowed.any():
        raise ValueError("The tokenizer has no token that a suffix may hold; set `allow_non_ascii=True`.")
    return allowed


def _render(
    tokenizer: PreTrainedTokenizerBase, messages: str | Messages, variables: dict[str, Any]
) -> tuple[str, str, tuple[bool, bool], int]:
    """The text before and after the place of the suffix, and what `AttackPrompt` says of white space."""
    if tokenizer.chat_template is None:
        raise ValueError("The tokenizer has no chat template; save one with it, or set `prompt_format='raw'`.")
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    fault = prompt_fault(messages)
    if fault is not None:
        raise ValueError(f"The conversation that is attacked {fault}.")
    if not isinstance(messages[-1].get("content"), str):
        raise ValueError(
            "The last message of the conversation has no text for a suffix to follow; give it a `content`."
        )
    mark = _MARK
    while any(mark in (message.get("content") or "") for message in messages):
        mark += _MARK
    content = messages[-1]["content"]

    def parts(begin: str, end: str) -> tuple[str, str]:
        filled = [*messages[:-1], messages[-1] | {"content": begin + mark + end}]
        options = {"tokenize": False, "add_generation_prompt": True} | variables
        with rendering(tokenizer, messages, "The conversation that is attacked"):
            found = tokenizer.apply_chat_template(filled, **options).split(mark)
        if len(found) != 2:
            raise ValueError(
                f"The chat template writes the last message {len(found) - 1} times; an attack needs a template that "
                "writes it once."
            )
        return found[0], found[1]

    before, after = parts(content, "")
    start = not content.strip() and parts(f"{content} ", "")[0] == before
    end = parts(content, " ")[1] == after
    blanks = len(content) - len(content.rstrip()) if end and not start else 0
    return before, after, (start, end), blanks


def _decode_behind(tokenizer: PreTrainedTokenizerBase, anchor: list[int], rows: list[list[int]]) -> list[str]:
    """Text of tokens that follow others."""
    begin, *behind = decode(tokenizer, [anchor, *([*anchor, *row] for row in rows)])
    alone = decode(tokenizer, rows)
    return [b[len(begin) :] if b.startswith(begin) else a for a, b in zip(alone, behind, strict=True)]


def _encode(tokenizer: PreTrainedTokenizerBase, texts: list[str], special: bool) -> list[list[int]]:
    return tokenizer(texts, add_special_tokens=special)["input_ids"]
