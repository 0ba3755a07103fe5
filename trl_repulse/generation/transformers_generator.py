"""Sampling from several named models with transformers."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from ..models._causal import check_causal
from ._defaults import end_tokens, until_end, without_generation_defaults
from ._padding import batches
from ._probe import Guard, probe
from .completions import Completion, group_completions, tokenize


class TransformersGenerator:
    """
    Draws completions from several models, one at a time, with transformers' `generate`.

    Samples follow the models exactly (temperature 1, whole vocabulary) unless `generation_kwargs` say otherwise.
    Settings that a model was saved with (`top_p`, `suppress_tokens`, ...) are ignored, except for its end tokens,
    which end a completion like the tokenizer's.

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
        self.models = models
        self.tokenizer = tokenizer
        self.batch_size = batch_size
        pad_token_id = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        settings = {
            "max_new_tokens": max_completion_length,
            "do_sample": True,
            "temperature": 1.0,
            "top_k": 0,
            "top_p": 1.0,
            "pad_token_id": pad_token_id,
        }
        self._settings = settings | generation_kwargs
        self._guards: dict[str, Guard] = {}

    @torch.no_grad()
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
        rows = [ids for ids in tokenize(self.tokenizer, prompts) for _ in range(num_completions)]
        guard = self._guard(model)
        drawn: list[list[int]] = [[] for _ in rows]
        training = lm.training
        lm.eval()
        try:
            with without_generation_defaults(lm):
                for chosen in batches(rows, self.batch_size, guard.sample_by_length):
                    for place, ids in zip(chosen, self._generate(lm, [rows[i] for i in chosen], guard), strict=True):
                        drawn[place] = ids
        finally:
            lm.train(training)
        return group_completions(self.tokenizer, prompts, rows, drawn, model, version=0)

    def _guard(self, model: str) -> Guard:
        """How to sample from a model, checked before its first completions."""
        if model not in self._guards:
            self._guards[model] = probe(self.models[model], generation_config=GenerationConfig(**self._settings))
        return self._guards[model]

    def _generate(self, lm: PreTrainedModel, rows: list[list[int]], guard: Guard) -> list[list[int]]:
        """Completions of a left-padded batch, up to their end tokens."""
        ends = {"eos_token_id": end_tokens(lm, self.tokenizer) or None}
        config = GenerationConfig(**ends | self._settings | ({} if guard.use_cache else {"use_cache": False}))
        ends = config.eos_token_id
        ends = [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
        width = max(map(len, rows))
        padding = [width - len(row) for row in rows]
        pad = 0 if config.pad_token_id is None else config.pad_token_id
        ids = torch.tensor([[pad] * k + row for k, row in zip(padding, rows, strict=True)], device=lm.device)
        mask = torch.tensor([[0] * k + [1] * (width - k) for k in padding], device=lm.device)
        drawn = lm.generate(input_ids=ids, attention_mask=mask, generation_config=config)[:, width:].tolist()
        return [until_end(row, ends) for row in drawn]
