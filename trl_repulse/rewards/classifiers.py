"""Rewards from sequence classifiers of question and answer, of a conversation, or of a whole text.

Axis letters: B texts of a batch, S tokens of the longest of them, K labels.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from transformers import AutoModelForSequenceClassification

from ..configs._checks import require_at_least
from ..models._loading import count_labels
from ._texts import Messages, conversation_text, last_question, whole_text
from .models import ConversationReward, ModelReward, Row


@dataclass(eq=False, kw_only=True)
class ClassifierReward(ModelReward):
    """
    Base of the rewards that are a label's logit, from a sequence-classification model; not for use by itself. Raises `ValueError` if the
    model lacks the label, or has several and none is chosen.

    Args:
        label (`int` or `str`, *optional*): Number or name of the label whose logit is the reward. Not needed for a model with one label.
        kwargs: As for [`~trl_repulse.rewards.models.ModelReward`].
    """

    label: int | str | None = None

    _auto_class: ClassVar[type] = AutoModelForSequenceClassification

    def _load(self) -> None:
        """Finds the label's index. Raises a `ValueError` that lists the labels if there is none such."""
        super()._load()
        config = self._module.config
        names = [config.id2label[i] for i in range(config.num_labels)]
        label = 0 if self.label is None and len(names) == 1 else self.label
        if isinstance(label, str) and label in names:
            label = names.index(label)
        if not (isinstance(label, int) and 0 <= label < len(names)):
            raise ValueError(
                f"`{self.model}` has {len(names)} labels and `label={self.label!r}` is none of them; choose a number "
                f"below {len(names)} or one of {', '.join(map(repr, names[:8]))}."
            )
        self._label_index = label

    def _adapter_options(self, revision: str) -> dict[str, Any]:
        # The configuration of a language model has two labels, whatever the adapter was trained with
        labels = count_labels(self.model, revision)
        return {} if labels is None else {"num_labels": labels}

    def _score(self, rows: list[Row]) -> torch.Tensor:
        self._module.config.get_text_config().pad_token_id = self._pad_token_id(rows)
        return self._read(self._module(**self._pad(rows)).logits.float())

    def _read(self, logits: torch.Tensor) -> torch.Tensor:
        """Rewards of shape (B,) from logits of shape (B, K)."""
        return logits[:, self._label_index]

    def _tokenize(self, *texts: str, **options: Any) -> Row:
        """Tokens of a text or a pair. An empty text becomes the end token; a BOS token that is there twice is kept once."""
        row = dict(self._tokenizer(*texts, **options))
        bos = self._tokenizer.bos_token_id
        if bos is not None and row["input_ids"][:2] == [bos, bos]:
            row = {key: values[1:] for key, values in row.items()}
        if not getattr(self._module.config, "type_vocab_size", 0):
            row.pop("token_type_ids", None)  # GPT-2 would add the embedding of the token 0 everywhere
        if not row["input_ids"]:
            end = self._tokenizer.eos_token_id
            if end is None:
                raise ValueError(f"`{self.model}` has no token for an empty text; set the tokenizer's `eos_token`.")
            row = {"input_ids": [end], "attention_mask": [1]} | {key: [0] for key in row if key == "token_type_ids"}
        return row

    def _truncate(self, max_length: int | None) -> dict[str, Any]:
        """Tokenizer arguments that cut a text to `max_length`, or to the limit of tokenizer and model."""
        limits = [max_length] if max_length is not None else [self._tokenizer.model_max_length, self._context]
        stated = [limit for limit in limits if limit is not None and limit < 10**9]
        return {"truncation": True, "max_length": min(stated)} if stated else {}


@dataclass(eq=False, kw_only=True)
class SequencePairReward(ClassifierReward):
    """
    Reward of a classifier that reads question and answer as a pair of sequences, like DeBERTa reward models.

    The answer is the completion. A plain prompt is the question. Raises `ValueError` as [`ClassifierReward`]; when called, if a
    conversation has no user's message.

    Args:
        max_length (`int`, *optional*):
            Most tokens of question and answer; the longer of the two is cut first. Defaults to the limit of tokenizer or model.
        question (`str`, *optional*, defaults to `"last"`):
            Question of a conversation: the user's last message (`"last"`) or all messages, one a line, without roles (`"conversation"`).
        kwargs: As for [`ClassifierReward`].
    """

    max_length: int | None = None
    question: Literal["last", "conversation"] = "last"

    def __post_init__(self):
        require_at_least(self, 1, "max_length")
        super().__post_init__()

    def _encode(self, prompt: str | Messages, completion: str | Messages) -> Row:
        question = last_question(prompt) if self.question == "last" else conversation_text(prompt)
        return self._tokenize(question, conversation_text(completion), **self._truncate(self.max_length))


@dataclass(eq=False, kw_only=True)
class ChatReward(ConversationReward, ClassifierReward):
    """Reward of a classifier that reads a conversation in its own chat template, like Skywork's reward models. Plain prompts and
    completions become a user's and an assistant's message. If both template and tokenizer add a BOS token, one is kept. Arguments and
    errors are those of [`ClassifierReward`] and [`~trl_repulse.rewards.models.ConversationReward`]."""

    def _encode(self, prompt: str | Messages, completion: str | Messages) -> Row:
        row = self._tokenize(self._render(prompt, completion))
        self._check_context(len(row["input_ids"]), prompt, completion)
        return row


@dataclass(eq=False, kw_only=True)
class ToxicityReward(ClassifierReward):
    """
    Reward of a classifier that reads a whole text, such as a toxicity classifier.

    The text is prompt and completion; messages are joined by line breaks, without roles. Raises `ValueError` as [`ClassifierReward`], or if
    a model with one label is asked for log-odds.

    Args:
        output (`str`, *optional*, defaults to `"logit"`):
            `"logit"`: the label's logit, for models with one label or independent labels. `"log_odds"`: log P(label) −
            log P(any other), in nats, for labels whose probabilities sum to 1. `potential="class"` can use both.
        negate (`bool`, *optional*, defaults to `False`):
            Whether to change the sign, for a label such as "toxic": rewards must be high for good texts.
        include_prompt (`bool`, *optional*, defaults to `True`): Whether the text begins with the prompt.
        max_length (`int`, *optional*): Most tokens of a text; most tokenizers cut its end. Defaults to the limit of tokenizer or model.
        kwargs: As for [`ClassifierReward`].
    """

    output: Literal["logit", "log_odds"] = "logit"
    negate: bool = False
    include_prompt: bool = True
    max_length: int | None = None

    def __post_init__(self):
        require_at_least(self, 1, "max_length")
        super().__post_init__()

    def _load(self) -> None:
        super()._load()
        if self.output == "log_odds" and self._module.config.num_labels == 1:
            raise ValueError(f"`{self.model}` has one label, whose logit is its log-odds; use `output='logit'`.")

    def _encode(self, prompt: str | Messages, completion: str | Messages) -> Row:
        text = whole_text(prompt, completion) if self.include_prompt else conversation_text(completion)
        return self._tokenize(text, **self._truncate(self.max_length))

    def _read(self, logits: torch.Tensor) -> torch.Tensor:
        reward = super()._read(logits)
        if self.output == "log_odds":
            others = [i for i in range(logits.shape[1]) if i != self._label_index]
            reward = reward - logits[:, others].logsumexp(dim=1)
        return -reward if self.negate else reward
