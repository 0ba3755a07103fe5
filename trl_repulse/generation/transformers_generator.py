"""Sampling from several named models with transformers."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from ..data._checks import check_prompt_lengths
from ..data._prompts import check_conversations
from ..models._adapters import in_mode
from ..models._model_checks import check_causal
from ._probe import Guard, probe_shared
from .completions import Completion, group_completions, tokenize
from .drawing import (
    batches,
    drawn_by_inversion,
    end_tokens,
    padding_token,
    prompts_read_once,
    until_end,
    without_generation_defaults,
)


def draw(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt_ids: Sequence[list[int]],
    guard: Guard,
    batch_size: int,
    on_drawn: Callable[[int], object] = lambda count: None,
    **settings: Any,
) -> list[list[int]]:
    """A completion of each prompt, up to its end token, from all tokens at temperature 1 unless `settings` of
    [`~transformers.GenerationConfig`] say otherwise. `on_drawn` gets the number of completions of each batch. Neighbours with the same
    prompt have it read once, where `guard` allows it."""
    settings = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0} | settings
    settings = {"eos_token_id": end_tokens(model, tokenizer) or None} | settings
    settings |= {} if guard.use_cache else {"use_cache": False}
    end = settings["eos_token_id"]
    end = [] if end is None else [end] if isinstance(end, int) else end
    config = GenerationConfig(**{"pad_token_id": padding_token(model, tokenizer, end)} | settings)
    pad, device = config.pad_token_id or 0, next(model.parameters()).device
    rows: list[list[int]] = [[] for _ in prompt_ids]
    once = prompts_read_once(model) if guard.repeat_cache else contextlib.nullcontext()
    with in_mode(model, training=False), without_generation_defaults(model), drawn_by_inversion(model), once:
        for chosen in batches(prompt_ids, batch_size, guard.sample_by_length):
            width = max(len(prompt_ids[i]) for i in chosen)
            padding = [width - len(prompt_ids[i]) for i in chosen]
            ids = [[pad] * k + prompt_ids[i] for k, i in zip(padding, chosen, strict=True)]
            output = model.generate(
                input_ids=torch.tensor(ids, device=device),
                attention_mask=torch.tensor([[0] * k + [1] * (width - k) for k in padding], device=device),
                generation_config=config,
            )
            for place, row in zip(chosen, output[:, width:].tolist(), strict=True):
                rows[place] = until_end(row, end)
            on_drawn(len(chosen))
    return rows


class TransformersGenerator:
    """
    Draws completions from several models, one at a time, with transformers' `generate`.

    Samples follow the models exactly (temperature 1, whole vocabulary) unless `generation_kwargs` say otherwise. Settings that a model was
    saved with (`top_p`, `suppress_tokens`, ...) are ignored, except for its end tokens, which end a completion like the tokenizer's.

    Example:

    ```python
    >>> from transformers import AutoModelForCausalLM, AutoTokenizer
    >>> from trl_repulse.embedded import policy_path
    >>> from trl_repulse.generation import TransformersGenerator

    >>> tokenizer = AutoTokenizer.from_pretrained(policy_path())
    >>> models = {"policy": AutoModelForCausalLM.from_pretrained(policy_path())}
    >>> generator = TransformersGenerator(models, tokenizer, max_completion_length=2)
    >>> [[completion]] = generator.complete(["the weather is"], model="policy")
    ```

    Args:
        models (`dict[str, PreTrainedModel]`): Models by name, with or without PEFT. They keep device and precision.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]): Tokenizer of all models.
        max_completion_length (`int`, *optional*, defaults to `256`): Most tokens of a completion.
        batch_size (`int`, *optional*, defaults to `64`): Completions drawn at the same time.
        **generation_kwargs: Further arguments of [`~transformers.GenerationConfig`].

    Raises:
        `ValueError`: If a model is not causal.
    """

    def __init__(
        self,
        models: dict[str, PreTrainedModel],
        tokenizer: PreTrainedTokenizerBase,
        max_completion_length: int = 256,
        batch_size: int = 64,
        **generation_kwargs: Any,
    ):
        for name, lm in models.items():
            check_causal(lm, f"The model {name!r}")
        self.models, self.tokenizer, self.batch_size = models, tokenizer, batch_size
        self._settings = {"max_new_tokens": max_completion_length} | generation_kwargs
        self._guards: dict[str, Guard] = {}

    def complete(
        self, prompts: Sequence[str | list[dict[str, str]]], model: str, num_completions: int = 1
    ) -> list[list[Completion]]:
        """
        Draws completions.

        Args:
            prompts (`Sequence`): Plain text, or conversations as lists of messages.
            model (`str`): Name of the model to draw from.
            num_completions (`int`, *optional*, defaults to `1`): Completions a prompt.

        Returns:
            `list[list[Completion]]`: `num_completions` for each prompt. `version` is 0, since there is no copy of the
                weights.

        Raises:
            `KeyError`: If there is no such model.
        """
        lm = self.models[model]
        check_conversations(prompts, "`prompts`")
        prompt_ids = tokenize(self.tokenizer, prompts)
        check_prompt_lengths(prompt_ids, list(prompts), lm.config, self._settings["max_new_tokens"] or 0)
        rows = [ids for ids in prompt_ids for _ in range(num_completions)]
        if model not in self._guards:
            self._guards[model] = probe_shared(lm, generation_config=GenerationConfig(**self._settings))
        drawn = draw(lm, self.tokenizer, rows, self._guards[model], self.batch_size, **self._settings)
        return group_completions(self.tokenizer, prompts, rows, drawn, model, version=0)
