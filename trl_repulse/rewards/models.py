"""Base of the rewards from local models: loading, chat template, batches, padding, device, and the check of results.

Axis letters: B texts of a batch, S tokens of the longest of them, K labels, V vocabulary.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, ClassVar

import jinja2
import torch
from accelerate.state import PartialState, is_initialized
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModel

from ..configs._checks import check_choices, require, require_at_least
from ..data._prompts import check_template_variables, rendering_hash, warn_of_template
from ..models._loading import load_model, load_tokenizer
from ..models._model_checks import check_reward_tokens
from ._texts import Messages, as_messages, in_parts, whole_text


Row = dict[str, list[int]]  # a tokenized text: model inputs by name


@dataclass(eq=False)
class ModelReward(ABC):
    """
    Base of the rewards from a model in the Hugging Face format; not for use by itself.

    The weights are loaded when the reward is built, and moved to the device on the first call. Raises `ValueError` if `batch_size` or
    `dtype` is invalid, or the checkpoint lacks weights; when called, if a reward is not finite.

    Args:
        model (`str`): Path or Hub id of the model and its tokenizer. For an adapter (PEFT) the base is loaded too.
        batch_size (`int`, *optional*, defaults to `16`): Texts of one forward pass. It affects speed and memory, never rewards.
        dtype (`str` or `torch.dtype`, *optional*, defaults to `"auto"`): Precision of the weights; `"auto"` keeps that of the checkpoint.
        device (`str` or `torch.device`, *optional*):
            Device of the model. Defaults to the trainer's; without a trainer to the accelerator, else the CPU.
        trust_remote_code (`bool`, *optional*, defaults to `False`): Whether to run Python code that comes with the model.
        revision (`str`, *optional*): Branch, tag or commit of a model on the Hub.
        name (`str`, *optional*): Name in the metrics, `rewards/NAME/mean`. Defaults to the last part of `model`.
    """

    model: str
    _: KW_ONLY
    batch_size: int = 16
    dtype: str | torch.dtype = "auto"
    device: str | torch.device | None = None
    trust_remote_code: bool = False
    revision: str | None = None
    name: str | None = None

    _auto_class: ClassVar[type] = AutoModel
    _padding_side: ClassVar[str] = "right"

    def __post_init__(self):
        self.model = str(self.model)
        self._rendering: dict[str, str] = {}  # what a chat template with a date writes
        check_choices(self)
        require_at_least(self, 1, "batch_size")
        kind = getattr(torch, self.dtype, None) if isinstance(self.dtype, str) else self.dtype
        known = self.dtype in ("auto", None) or isinstance(kind, torch.dtype)  # transformers has no clear message
        require(self, known, "dtype", "is none of torch's; give 'auto', or one such as 'bfloat16'")
        self._load()

    @property
    def __name__(self) -> str:
        return self.name or Path(self.model).name

    def _load(self) -> None:
        """Loads tokenizer and weights. Subclasses also prepare what scoring needs, and refuse a model that does not fit."""
        options = {"trust_remote_code": self.trust_remote_code, "revision": self.revision or "main"}
        self._tokenizer = load_tokenizer(self.model, "reward model", **options)
        options |= {"dtype": self.dtype} | self._adapter_options(options["revision"])
        self._module = load_model(self._auto_class, self.model, "reward model", **options)
        check_reward_tokens(self._module, self._tokenizer, f"`{self.model}`")
        self._module.eval()
        config = self._module.config.get_text_config()
        # Read once: classifiers set it in their configuration for each batch
        declared = (config.pad_token_id, self._tokenizer.pad_token_id)
        self._declared_pad_token_id = next((i for i in declared if i is not None and i >= 0), None)
        self._context = getattr(config, "max_position_embeddings", None)  # `None` without a limit
        for name, layer in self._module.named_modules():
            # RoBERTa and MPNet count positions from after the padding index
            if name.endswith("position_embeddings") and getattr(layer, "padding_idx", None) is not None:
                self._context = layer.num_embeddings - layer.padding_idx - 1

    def _adapter_options(self, revision: str) -> dict[str, Any]:
        """Further options of `load_model` for an adapter's base; none here."""
        return {}

    @torch.inference_mode()
    def __call__(
        self,
        prompts: list[str] | list[Messages],
        completions: list[str] | list[Messages],
        completion_ids: list[list[int]] | None = None,
        **kwargs: Any,
    ) -> list[float]:
        """Rewards of completions, as TRL calls a reward function. Raises `ValueError` if the model cannot read a text, or
        a reward is not finite."""
        self._module.to(self._resolve_device())
        pairs = list(zip(prompts, completions, strict=True))
        rows = [self._encode(prompt, completion) for prompt, completion in pairs]
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]["input_ids"]))  # sorted by length for less padding
        rewards = torch.full((len(rows),), torch.nan)
        for start in range(0, len(rows), self.batch_size):
            chosen = order[start : start + self.batch_size]
            rewards[chosen] = self._score([rows[i] for i in chosen]).float().cpu()
        for reward, pair in zip(rewards.tolist(), pairs, strict=True):
            if not math.isfinite(reward):
                raise ValueError(
                    f"{type(self).__name__} got {reward} from `{self.model}` for the text that begins "
                    f"{whole_text(*pair)[:60]!r}; check its weights, or try `dtype='float32'`."
                )
        return rewards.tolist()

    def _resolve_device(self) -> str | torch.device:
        if self.device is not None:
            return self.device
        if is_initialized():
            return PartialState().device
        return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"

    @abstractmethod
    def _encode(self, prompt: str | Messages, completion: str | Messages) -> Row:
        """Tokens of one text."""

    @abstractmethod
    def _score(self, rows: list[Row]) -> torch.Tensor:
        """Rewards of one batch, of shape (B,)."""

    def _pad(self, rows: list[Row]) -> dict[str, torch.Tensor]:
        """The model's inputs, each of shape (B, S), on its device."""
        padded = {}
        for key in rows[0]:
            value = self._pad_token_id(rows) if key == "input_ids" else 0
            tensors = [torch.tensor(row[key]) for row in rows]
            padded[key] = pad_sequence(tensors, batch_first=True, padding_value=value, padding_side=self._padding_side)
        return {key: ids.to(self._module.device) for key, ids in padded.items()}

    def _pad_token_id(self, rows: list[Row]) -> int:
        """The padding token of model or tokenizer, else a token that ends no row: classifiers read the last token that is not padding."""
        if self._declared_pad_token_id is not None:
            return self._declared_pad_token_id
        last = {row["input_ids"][-1] for row in rows}
        return next(i for i in range(len(last) + 1) if i not in last)


@dataclass(eq=False, kw_only=True)
class ConversationReward(ModelReward):
    """
    Base of the rewards that read a conversation in the chat template of their tokenizer, with content in parts if the
    template reads no other; not for use by itself.

    Args:
        chat_template_kwargs (`dict`, *optional*):
            Further variables of the template, such as a guideline, or `add_generation_prompt=True` if the template
            would otherwise end before the model's turn.
        drop_system (`bool`, *optional*, defaults to `False`): Whether to leave out system messages, which some templates refuse.
        kwargs: As for [`ModelReward`].

    Raises:
        `ValueError`: If there is no template, or it fails on or drops the assistant's message in both forms; when
            called, if it refuses a conversation, or one is longer than the model's context.
    """

    chat_template_kwargs: dict[str, Any] | None = None
    drop_system: bool = False

    _PROBES: ClassVar[tuple[str, str]] = ("Is this the question?", "This is the answer.")

    def _load(self) -> None:
        super()._load()
        variables = self.chat_template_kwargs
        arguments = ("chat_template", "add_generation_prompt", "continue_final_message")
        check_template_variables(variables, ("tools", *arguments))
        if self._tokenizer.chat_template is None:
            raise ValueError(
                f"The tokenizer of `{self.model}` has no chat template; save one with it, or use a reward that reads plain text."
            )
        failures = []
        for self._parts in (False, True):  # content as text, then as a list of parts; the form that works stays
            try:
                text = self._render(*self._PROBES)
            except ValueError as error:
                failures.append(error)
                continue
            if self._PROBES[1] in text:
                others = {name: value for name, value in (variables or {}).items() if name not in arguments}
                warn_of_template(self._tokenizer, self._messages(*self._PROBES), others)
                self._rendering = rendering_hash(text)
                return
        if failures:
            raise failures[0]
        raise ValueError(
            f"The chat template of `{self.model}` leaves out what the assistant said; save one for judging answers."
        )

    def _messages(self, prompt: str | Messages, completion: str | Messages) -> Messages:
        """The whole conversation as the template is to get it: without system messages, or with content in parts, if so set."""
        messages = as_messages(prompt, completion)
        if self.drop_system:
            messages = [message for message in messages if message["role"] != "system"]
        return [in_parts(message) for message in messages] if self._parts else messages

    def _render(self, prompt: str | Messages, completion: str | Messages) -> str:
        """The conversation as text. Raises `ValueError` if the template refuses it."""
        messages = self._messages(prompt, completion)
        try:
            return self._tokenizer.apply_chat_template(messages, tokenize=False, **(self.chat_template_kwargs or {}))
        except (jinja2.TemplateError, TypeError) as error:
            raise ValueError(
                f"The chat template of `{self.model}` refuses the roles {[message['role'] for message in messages]} of the conversation "
                f"that begins {whole_text(prompt, completion)[:60]!r} ({error}); if it is for a system message, use `drop_system=True`."
            ) from error

    def _check_context(self, length: int, prompt: str | Messages, completion: str | Messages) -> None:
        """Refuses a conversation that exceeds the model's context: cut, it would lose the end, where rewards are read."""
        if self._context is not None and length > self._context:
            raise ValueError(
                f"{type(self).__name__} got a conversation of {length} tokens, more than the context of `{self.model}` ({self._context}); "
                f"shorten the prompt, or lower `max_completion_length`. It begins {whole_text(prompt, completion)[:60]!r}."
            )
