"""An attacked prompt as tokens: what comes before and after the suffix, the target, and the tokens a suffix may contain.

Axis letters: P tokens before the suffix, S of the suffix, A after it, T of the target; B suffixes, V vocabulary.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from transformers import PreTrainedTokenizerBase

from ...data._prompts import prompt_fault, rendering
from ...data._texts import check_added_tokens


Messages = list[dict[str, Any]]
_MARK = "\ue000"  # stands for the suffix in the chat template; from Unicode's private use area


@dataclass(frozen=True)
class AttackPrompt:
    """Text and tokens around a suffix. The model reads `before_ids + suffix + after_ids`."""

    tokenizer: PreTrainedTokenizerBase
    before_text: str
    after_text: str  # between the suffix and the answer
    before_ids: list[int]
    after_ids: list[int]
    target_ids: list[int]
    add_special_tokens: bool  # a chat template writes them itself
    suffix_ids: list[int]  # of the initial suffix, as in the prompt
    anchor: list[int]  # decoded with the suffix, since some tokenizers drop the space at the beginning of a text
    trims: tuple[bool, bool]  # whether the chat template drops white space at the suffix's beginning and end
    blanks: int  # white space that it drops at the end of the message if there is no suffix

    def encode(self, suffixes: list[str]) -> list[list[int]]:
        """Tokens of the whole prompt with each suffix, given as text; an empty one leaves the suffix out."""
        texts = []
        for suffix in suffixes:
            suffix = suffix.lstrip() if self.trims[0] else suffix
            suffix = suffix.rstrip() if self.trims[1] else suffix
            before = self.before_text if suffix else self.before_text[: len(self.before_text) - self.blanks]
            texts.append(before + suffix + self.after_text)
        return _encode(self.tokenizer, texts, self.add_special_tokens)

    def suffix_texts(self, rows: list[list[int]]) -> list[str]:
        """Text of suffixes given as tokens, as it stands in the prompt."""
        start, *wholes = _decode(self.tokenizer, [self.anchor, *([*self.anchor, *row] for row in rows)])
        alone = _decode(self.tokenizer, rows)
        return [b[len(start) :] if b.startswith(start) else a for a, b in zip(alone, wholes, strict=True)]

    def splice(self, suffix_ids: list[int]) -> list[int]:
        """Tokens of the prompt with a suffix given as tokens."""
        return [*self.before_ids, *suffix_ids, *self.after_ids]

    def survives(self, suffixes: torch.Tensor, scope: Literal["context", "suffix", "off"]) -> torch.Tensor:
        """Which suffixes (B, S) the tokenizer gives back, (B,): from the text of the whole prompt (`"context"`) or of the suffix
        alone (`"suffix"`), or all (`"off"`)."""
        rows = suffixes.tolist()
        if scope == "off" or not rows:
            return torch.ones(len(rows), dtype=torch.bool)
        if scope == "suffix":
            encoded = _encode(self.tokenizer, _decode(self.tokenizer, rows), False)
            return torch.tensor([a == b for a, b in zip(encoded, rows, strict=True)])
        encoded = self.encode(self.suffix_texts(rows))
        return torch.tensor([a == self.splice(b) for a, b in zip(encoded, rows, strict=True)])


def build_prompt(
    tokenizer: PreTrainedTokenizerBase,
    messages: str | Messages,
    target: str,
    prompt_format: Literal["chat", "raw"] = "chat",
    suffix_init: str = " x",
    chat_template_kwargs: dict[str, Any] | None = None,
) -> AttackPrompt:
    """
    Prepares a prompt for an attack: text, which becomes a message of the user, or a conversation. The suffix will follow the
    text of the last message. `prompt_format="raw"` uses the bare text instead of the chat template.

    Raises `ValueError` if the target is empty, the messages are invalid or given for the raw format, the tokenizer adds its end
    token to raw text, or the chat template is missing or does not write the message once.
    """
    is_raw = prompt_format == "raw"
    target_ids = _encode(tokenizer, [target], False)[0] if target.strip() else []
    if not target_ids:
        raise ValueError(f"The target {target!r} is empty; give the text that an answer is to begin with.")
    if is_raw:
        if not isinstance(messages, str):
            raise ValueError("`prompt_format='raw'` takes plain text; join the messages, or use 'chat'.")
        before, after, trims, blanks = messages, "", (False, False), 0
    else:
        before, after, trims, blanks = _render(tokenizer, messages, chat_template_kwargs or {})
    before_ids = _encode(tokenizer, [before], is_raw)[0]
    if is_raw:
        check_added_tokens(tokenizer, [before], [before_ids])
    after_ids, suffix_ids = _encode(tokenizer, [after, suffix_init], False)
    begun, whole = _encode(tokenizer, [before + suffix_init, before + suffix_init + after], is_raw)
    if before_ids + suffix_ids + after_ids != whole and begun[: len(before_ids)] == before_ids:
        # Tokenized separately, texts may get another space (SentencePiece): use the tokens of the whole prompt instead
        if whole[: len(begun)] == begun and len(begun) > len(before_ids):
            suffix_ids, after_ids = begun[len(before_ids) :], whole[len(begun) :]
    ids = before_ids, after_ids, target_ids
    anchor = before_ids[-1:] if before else []
    prompt = AttackPrompt(tokenizer, before, after, *ids, is_raw, suffix_ids, anchor, trims, blanks)
    for candidate in (prompt, replace(prompt, anchor=[])):
        if candidate.encode(candidate.suffix_texts([suffix_ids])) == [prompt.splice(suffix_ids)]:
            return candidate
    return prompt


def allowed_tokens(tokenizer: PreTrainedTokenizerBase, num_embeddings: int) -> torch.Tensor:
    """Mask (V,) of the tokens that a suffix may contain, for V rows of an embedding: printable ASCII, and not special. Raises `ValueError`
    without any."""
    allowed = torch.zeros(num_embeddings, dtype=torch.bool)
    known = min(len(tokenizer), num_embeddings)
    texts = _decode(tokenizer, [[i] for i in range(known)])
    allowed[:known] = torch.tensor([text.isascii() and text.isprintable() for text in texts])
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    allowed[[i for i in special | set(tokenizer.all_special_ids) if i < num_embeddings]] = False
    if not allowed.any():
        raise ValueError("The tokenizer has no token of printable ASCII for a suffix; attack with another method.")
    return allowed


def _render(
    tokenizer: PreTrainedTokenizerBase, messages: str | Messages, variables: dict[str, Any]
) -> tuple[str, str, tuple[bool, bool], int]:
    """Text before and after the suffix, and the fields `trims` and `blanks` of [`AttackPrompt`]. Raises as [`build_prompt`]."""
    if tokenizer.chat_template is None:
        raise ValueError("The tokenizer has no chat template; save one with it, or set `prompt_format='raw'`.")
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    if (fault := prompt_fault(messages)) is not None:
        raise ValueError(f"The conversation that is attacked {fault}.")
    if not isinstance(messages[-1].get("content"), str):
        raise ValueError("The last message of the conversation has no text for a suffix; give it a `content`.")
    mark = _MARK
    while any(mark in (message.get("content") or "") for message in messages):
        mark += _MARK
    content = messages[-1]["content"]

    def parts(begin: str, end: str) -> tuple[str, str]:
        """What the chat template writes before and after the suffix, if the content is begun and ended so."""
        filled = [*messages[:-1], messages[-1] | {"content": begin + mark + end}]
        options = {"tokenize": False, "add_generation_prompt": True} | variables
        with rendering(tokenizer, messages, "The conversation that is attacked"):
            pieces = str(tokenizer.apply_chat_template(filled, **options)).split(mark)
        if len(pieces) != 2:
            raise ValueError(
                f"The chat template writes the last message {len(pieces) - 1} times; an attack needs a template that writes it once."
            )
        return pieces[0], pieces[1]

    before, after = parts(content, "")
    # A blank that the template drops changes nothing
    start = not content.strip() and parts(f"{content} ", "")[0] == before
    end = parts(content, " ")[1] == after
    blanks = len(content) - len(content.rstrip()) if end and not start else 0
    return before, after, (start, end), blanks


def _decode(tokenizer: PreTrainedTokenizerBase, rows: list[list[int]]) -> list[str]:
    return tokenizer.batch_decode(rows, clean_up_tokenization_spaces=False)


def _encode(tokenizer: PreTrainedTokenizerBase, texts: list[str], special: bool) -> list[list[int]]:
    return tokenizer(texts, add_special_tokens=special)["input_ids"]
