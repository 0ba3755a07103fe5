"""A few prompts of a run's data set with completions that the policy draws, before it is wrapped."""

import contextlib
import itertools
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from accelerate.utils.memory import should_reduce_batch_size
from torch import nn
from transformers import GenerationConfig

from ..data._checks import check_rows
from ..generation._batches import padding_token, without_generation_defaults
from ..models._adapters import base_of, undisturbed
from ..models._layout import longest_row
from .trl_bridge import pad


_PROMPTS = 4  # P
_COMPLETIONS = 3  # n
_TOKENS = 8  # S, of a completion
_LONGEST = 512  # tokens of a prompt
_ELSEWHERE = 64  # the same where the model is still on the CPU and trains elsewhere


def first_batch(trainer: Any, policy: nn.Module, use_cache: bool) -> tuple[torch.Tensor, ...] | None:
    """
    The first rows of a trainer's data set as a batch, of a size that is quickly read.

    Args:
        trainer ([`~trl.GRPOTrainer`]):
            The trainer, once TRL has built it. Long prompts are cut to their last 512 tokens, 64 where the policy is still on
            the CPU and trains elsewhere, or to what leaves room for their completions in a row.
        policy ([`~transformers.PreTrainedModel`] or `peft.PeftModel`):
            Draws the completions. Mode, random states and gradients are left as they are.
        use_cache (`bool`):
            Whether it draws with a cache.

    Returns:
        `tuple[torch.Tensor, ...]`: prompts (P, L) behind padding and their mask, completions (P, n, S) and their mask, which is 0
        behind an end token, on CPU; `None` where no row of a few completions is short enough for the model, where prompts do not
        come from the data set (`environment_factory`, `rollout_func`), which may be empty, or where `generate` fails.
    """
    if trainer.environment_factories is not None or trainer.rollout_func is not None:
        return None
    policy = getattr(policy, "_orig_mod", policy)  # compiled
    base, device = base_of(policy), next(policy.parameters()).device
    size, n = min(trainer.max_completion_length, _TOKENS), max(2, min(trainer.num_generations, _COMPLETIONS))
    limit = _LONGEST if device.type == trainer.accelerator.device.type else _ELSEWHERE
    longest = min(limit, longest_row(base.config.get_text_config()) - n * size)
    if longest < 1:
        return None
    with _random_states_kept():  # rows may be made as they are read
        rows = list(itertools.islice(trainer.train_dataset, _PROMPTS))
    if not rows:
        return None
    check_rows(rows, trainer.train_dataset.features)
    tokenized = trainer._tokenize_prompts([row["prompt"] for row in rows])[0]
    ids = [torch.tensor(row[-int(longest) :], device=device) for row in tokenized]
    filler = padding_token(base, trainer._tokenizer, trainer.eos_token_ids)
    prompts, mask = pad(ids, filler, "left"), pad([torch.ones_like(row) for row in ids], 0, "left")
    settings = GenerationConfig(
        max_new_tokens=size,
        do_sample=True,
        temperature=trainer.temperature,
        num_return_sequences=n,
        pad_token_id=filler,
        use_cache=use_cache,
        disable_compile=True,
    )
    with undisturbed(policy, training=False), without_generation_defaults(policy) as config:
        config.eos_token_id = None  # processes that share weights draw as many tokens
        try:
            drawn = policy.generate(
                input_ids=prompts, attention_mask=mask, generation_config=settings, synced_gpus=False
            )
        except Exception as error:  # of a model that only an engine samples from
            if should_reduce_batch_size(error):
                raise
            return None
    completions = drawn[:, prompts.size(1) :].unflatten(0, (-1, n))
    ended = torch.isin(completions, torch.tensor(trainer.eos_token_ids, device=device)).long()
    return tuple(x.cpu() for x in (prompts, mask, completions, (ended.cumsum(dim=2) == ended).long()))


@contextlib.contextmanager
def _random_states_kept() -> Iterator[None]:
    """Context after which the random states on the CPU are what they were."""
    states = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
